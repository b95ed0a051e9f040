"""Purity: each op is looked at while the user's frame is live, so that an error names the line.

A graph freezes what Python saw once. So `forward` may not read tensors that it was not given, wait
for values on the host, draw from an unregistered generator, or write what it was not given to keep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import annotate

from fngraph.core.where import user_line
from fngraph.errors import HostSyncError, MutationError, OperatorError, RandomError, RankError
from fngraph.fx.generators import DRAWN, Generators, device_of, is_on, source, without
from fngraph.fx.leaves import Leaf, Role
from fngraph.fx.nodes import REFUSED, flat
from fngraph.fx.schemas import draws, is_plain, leaves_device, waits_for_shape
from fngraph.fx.tracing.ambient import Switches
from fngraph.fx.tracing.api import CallsMode, rebound
from fngraph.fx.tracing.arrays import Arrays
from fngraph.fx.tracing.assumptions import by_transform
from fngraph.fx.tracing.operands import mixed, operands_of
from fngraph.fx.tracing.outside import Made, foreign, is_literal, literal_from_outside
from fngraph.fx.tracing.refusals import Refusals, any_scalar, any_shape
from fngraph.fx.tracing.streams import Streams
from fngraph.fx.tracing.symbols import Symbols
from fngraph.fx.tracing.tried import Dtypes
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import (
    OpOverload,
    TorchDispatchMode,
    count_dispatch_modes,
    dispatch_modes,
    tree_map,
    tree_map_only,
)
from fngraph.torch_facts.schemas import SYNCS, gives_nothing, out_names, written
from fngraph.torch_facts.tracing import (
    DataDependentOutputException,
    FakeTensor,
    UnsupportedOperatorException,
    get_proxy_mode,
    has_proxy_slot,
)

aten = torch.ops.aten
_LITERALS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}  # torch.tensor([1., 2.])


_CHECKED_IN_VAIN = {"one_hot"}
"""What asserts by itself what a graph need not know: a number that is no class is a row of zeros
there. From torch 2.13 on."""


_TRANSPORTS = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd",
               "symm_mem", "_dtensor")  # fmt: skip
"""Namespaces of torch's whose ops speak to other processes."""


class PurityMode(TorchDispatchMode):
    """Refuses impure ops inside a trace and stamps each node with the user's line.

    Args:
        owners: storage key to the leaf that was passed in with that storage.
        symbols: is asked, after each op, whether it has fixed a size.
        calls: the mode that sees what the user's code calls, for which ops run.
        made: is told of each result.
        streams: is told of each op's line.
        generators: those that may be drawn from.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        owners: Mapping[int, Leaf],
        symbols: Symbols,
        refuse: Refusals,
        calls: CallsMode,
        made: Made,
        streams: Streams,
        generators: Generators = (),
    ) -> None:
        super().__init__()
        self.owners, self.symbols, self.refuse = owners, symbols, refuse
        self.calls, self.made, self.generators = calls, made, generators
        self.streams, self.dtypes = streams, Dtypes()
        self.switches, self.arrays = Switches(), Arrays()
        self.blocks: dict[Any, Any] = {}  # key of a call to what it left: see fx/blocks/stamps.py
        self._standins: dict[int, tuple[Any, Any]] = {}

    def __enter__(self) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        self.tracer: Any = mode.tracer
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = len(self.refuse.errors)
        line = user_line()
        fx.traceback.set_stack_trace([line])
        self.streams.look(line)
        if (switched := self.switches.changed(line)) is not None:
            self.refuse(switched)
        if not isinstance(func, OpOverload):
            self.refuse(
                OperatorError(
                    f"{line}: forward calls the higher-order operator {func}, whose functions a "
                    "graph cannot call. To choose, compute both and pick: "
                    "torch.where(condition, a, b); to loop, write the loop in Python"
                )
            )
            return func(*args, **kwargs)
        if func.namespace in _TRANSPORTS:
            refused = transport_error(line, func)
            self.refuse(refused)
            raise refused  # what groups of processes do with fakes is their own
        tangent = func is aten.size.default and not isinstance(args[0], FakeTensor)
        if tangent and (rule := by_transform(line)) is not None:  # asked in C++
            self.refuse(rule)
        if func in _LITERALS:
            array = literal_from_outside(line, args[0], self.calls.name)
            if array is not None:
                self.refuse(array)
            args = (self.arrays.take(line, self.calls, args[0]), *args[1:])
        else:
            args, kwargs = self._given(line, args, kwargs)
        if func is aten.record_stream.default:  # a graph's memory is its own
            return None
        if func in SYNCS and not all(is_literal(x) for x in args):
            self.refuse(sync_error(line, func, self.calls.name))
            return any_scalar(args[0]) if func is aten._local_scalar_dense.default else True
        if gives_nothing(func) or kwargs.get("check_errors"):
            if self.calls.name in _CHECKED_IN_VAIN:
                return None
            self.refuse(nothing_error(line, func, args))
            return func(*args, **kwargs)
        marks: dict[str, Any] = {}
        if draws(func, args, kwargs):
            index = source(func, args, kwargs, self.generators)
            if index is None:
                self.refuse(_unregistered(line, func))
            elif not is_on(self.generators[index], on := device_of(args, kwargs)):
                self.refuse(
                    RandomError(
                        f"{line}: forward draws on {on} with a generator of "
                        f"{self.generators[index].device} ({func}). Make one there: "
                        f'torch.Generator("{on}")'
                    )
                )
            func, args, kwargs = without(func, args, kwargs)
            marks = {DRAWN: index}
        for error in write_errors(line, func, args, kwargs, self.owners):
            self.refuse(error)
        for x in written(func, args, kwargs):
            if storage_key(x) in self.arrays.shared:
                self.refuse(self.arrays.written(line, func))
        if (said := self.dtypes.refused(func, args, kwargs)) is not None:
            name = self.calls.name or func._schema.name.partition("::")[2]
            self.refuse.told(mixed(line, name, operands_of((args, kwargs), self.made), said))
            # a stand-in
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.float, (args, kwargs))
        outs = [(kwargs[n], _shape(kwargs[n])) for n in out_names(func) if n in kwargs]
        if len(self.refuse.errors) > known:  # of its rows nothing more is asked
            marks[REFUSED] = True
        try:
            with annotate(marks) if marks else contextlib.nullcontext():
                result = func(*args, **kwargs)
        except UnsupportedOperatorException:
            self.refuse(unsupported(line, func, "which no trace can see into"))
            raise
        except DataDependentOutputException:
            self.refuse(sync_error(line, func, self.calls.name))
            return True
        self.symbols.check_fixed(line)
        for given, shape in outs:
            if _shape(given) != shape:
                self.refuse(_resized(line, func, shape, _shape(given)))
        result = self._check_result(line, func, args, result)
        if func in _LITERALS:
            self.arrays.note(self.calls, result)
        self.made.note(result, line)
        return result

    def _check_result(self, line: str, func: Any, args: Any, result: Any) -> Any:
        tensors = [x for x in flat(result) if isinstance(x, torch.Tensor)]
        quantized = func._schema.name.startswith("aten::quantize")  # which fakes do not show
        if quantized or not all(is_plain(x) for x in tensors):
            self.refuse(unsupported(line, func, "whose result has no plain memory"))
        if leaves_device(func, args, result):
            self.refuse(
                HostSyncError(
                    f"{line}: forward moves a tensor to the host (.cpu(), .to('cpu')), and a graph "
                    "would freeze what it finds there. Return the tensor, and move it outside"
                )
            )
        if waits_for_shape(func, tensors):
            self.refuse(
                HostSyncError(
                    f"{line}: the shape of {func}'s result depends on values, so the host would "
                    "have to wait for them. Use a mask of fixed shape: torch.where(mask, x, 0)"
                )
            )
            return any_shape(result)
        return result

    def _given(self, line: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, refused where they are not of this trace, with stand-ins for those."""
        strangers = [x for x in (*flat(args), *flat(kwargs)) if self._is_foreign(x)]
        for x in strangers:
            self.refuse(foreign(line, x, self.owners))
            if id(x) not in self._standins and isinstance(x, torch.Tensor):
                made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
                self._standins[id(x)] = x, made
        if not strangers:
            return args, kwargs
        swap = lambda x: self._standins.get(id(x), (x, x))[1]  # noqa: E731
        return tree_map(swap, (args, kwargs))  # type: ignore[no-any-return]

    def _is_foreign(self, x: Any) -> bool:
        if isinstance(x, FakeTensor):
            return not has_proxy_slot(x, self.tracer)
        return isinstance(x, torch.Tensor | torch.UntypedStorage)


def _shape(x: Any) -> list[str]:
    """Sizes as text: to compare T with a number is to ask for it."""
    return [str([str(n) for n in t.shape]).replace("'", "") for t in flat(x)]


def _resized(line: str, func: Any, old: list[str], new: list[str]) -> OperatorError:
    return OperatorError(
        f"{line}: forward gives {func} an out= of shape {', '.join(old)} for a result of "
        f"{', '.join(new)}, and torch resizes it, which a graph does not. Leave out= away, and "
        "take the result: y = torch.add(x, 1)"
    )


def is_tracing() -> bool:
    """Whether a function is being traced right now."""
    return tracing_mode() is not None


def tracing_mode() -> PurityMode | None:
    """The mode of the trace that is going on, if one is."""
    if not count_dispatch_modes():
        return None
    return next((mode for mode in dispatch_modes() if isinstance(mode, PurityMode)), None)


def _unregistered(line: str, func: Any) -> RandomError:
    return RandomError(
        f"{line}: forward draws from a random number generator that is not registered ({func}), "
        "which a graph would not repeat as eager does. Draw with generator=g, and say so: "
        "graphify(..., generators=(g,)); or pass the numbers in as an argument. Dropout in a "
        "module is switched off with module.eval()"
    )


_REBINDS = ("set_", "resize_", "resize_as_")


def write_errors(
    line: str, func: Any, args: Any, kwargs: Mapping[str, Any], owners: Mapping[int, Leaf]
) -> Iterator[MutationError]:
    """For each argument that an op writes and may not.

    Args:
        owners: storage key to the leaf that was passed in with that storage.
    """
    for tensor in written(func, args, kwargs):
        leaf = owners.get(storage_key(tensor))
        if leaf is None:
            continue
        if leaf.role is Role.DONATED:
            if func._schema.name.partition("::")[2] in _REBINDS:
                yield rebound(line, func, leaf.path)
            continue
        yield unwritable(line, func, leaf, owners)


def unwritable(line: str, func: Any, leaf: Leaf, owners: Mapping[int, Leaf]) -> MutationError:
    """The error about writing a leaf that is not donated."""
    fix = "Write into a copy, x.clone()"
    if leaf.role is Role.HELD:
        donate = donated_with(leaf, owners)
        fix += f", or donate the argument: fg.graphify(..., donate={donate})"
    return MutationError(
        f"{line}: forward writes into {leaf.path} ({func}), which is {leaf.role.value}, not "
        f"donated. {fix}"
    )


def donated_with(leaf: Leaf, owners: Mapping[int, Leaf]) -> str:
    """What `donate=` would be with the argument of `leaf` in it too."""
    donated = [x for x in owners.values() if x.role is Role.DONATED]
    roots = dict.fromkeys(x.path.partition(".")[0].partition("[")[0] for x in (*donated, leaf))
    quoted = [f'"{root}"' for root in roots]
    return quoted[0] if len(quoted) == 1 else f"({', '.join(quoted)})"


_FIXES = {
    "__getitem__": "An element: x.index_select(0, i[None]); a part: torch.where(mask, x, 0)",
    "__setitem__": "Write with a tensor of one dim: x.index_put((i[None],), value)",
    "full": "Fill on the device: value.expand(3)",
    "allclose": "Compare on the device: torch.isclose(a, b)",
}


def sync_error(line: str, func: Any, call: str) -> HostSyncError:
    """The error about an op that waits for a value, with the fix for the call that it is from."""
    fix = _FIXES.get(call, "Keep the choice on the device: torch.where(condition, a, b); for if "
                           "and while fg.cond and fg.while_loop. Return the tensor itself to read "
                           "it after the call")  # fmt: skip
    return HostSyncError(
        f"{line}: forward needs a tensor's value on the host ({func}, from .item(), int(), "
        f"if tensor, ...); a graph would freeze it. {fix}"
    )


def nothing_error(line: str, func: Any, args: Any) -> OperatorError:
    """The error about what is called to raise an error, or to print."""
    info = "return its info, which is 0 where it could, and look at that after the call"
    if func is aten._linalg_check_errors.default:
        name = "torch.linalg." + args[1].rpartition(".")[2]
        called, fix = f"{name}, which raises where it cannot", f"Call {name}_ex, {info}"
    elif func._schema.returns:
        called, fix = f"{func} with check_errors=True", f"Without it, {info}"
    elif func.__name__.startswith("_assert"):
        called, fix = str(func), "Return the condition, and look at it after the call"
    else:
        called = f"{func}, which has no result"
        fix = "Call it outside of forward, or let it give a tensor that forward returns"
    return OperatorError(
        f"{line}: forward calls {called}. A graph raises no error and prints nothing: it would "
        f"leave that out. {fix}"
    )


def transport_error(line: str, func: Any) -> RankError:
    """The error about an op of torch's own that speaks to other processes."""
    name = func.__name__.partition(".")[0].replace("_", "")
    ours = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all",
            "reducescatter": "reduce_scatter"}  # fmt: skip
    fits = [own for theirs, own in ours.items() if theirs in name]
    fix = " or ".join(f'fg.{own}(x, mesh["tp"])' for own in fits or ours.values())
    return RankError(
        f"{line}: forward calls {func}, which speaks to other processes by torch.distributed. A "
        "graph would leave it out, or run it where the others do not. Those that are traced, "
        f"compared before a step, and captured take an axis of a mesh: {fix}"
    )


def unsupported(line: str, func: Any, why: str) -> OperatorError:
    """The error about an op that a graph cannot hold."""
    return OperatorError(
        f"{line}: forward calls {func}, {why}, so that a graph cannot hold it. Call it outside of "
        "forward, or write it with ops on plain (strided) tensors"
    )
