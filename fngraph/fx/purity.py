"""Purity: each op is looked at while the user's frame is live, so that an error names the line.

A graph freezes what Python saw once. So `forward` may not read tensors that it was not given, wait
for values on the host, draw from an unregistered generator, or write what it was not given to keep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, has_proxy_slot
from torch.fx.traceback import annotate
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from fngraph.core.where import user_line
from fngraph.errors import HostSyncError, OperatorError, RandomError
from fngraph.fx import standins
from fngraph.fx.api import CallsMode
from fngraph.fx.generators import DRAWN, Generators, device_of, is_on, source, without
from fngraph.fx.guards import by_transform
from fngraph.fx.leaks import Made
from fngraph.fx.leaves import Leaf
from fngraph.fx.outside import foreign, literal_from_outside
from fngraph.fx.refusals import Refusals
from fngraph.fx.rows.check import REFUSED
from fngraph.fx.schemas import draws, is_plain, leaves_device, waits_for_shape
from fngraph.fx.sizes import Sizes
from fngraph.fx.streams import Streams
from fngraph.fx.writes import sync_error, unsupported, write_errors

aten = torch.ops.aten
_LITERALS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}  # torch.tensor([1., 2.])
_SYNCS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}


class PurityMode(TorchDispatchMode):
    """Refuses impure ops inside a trace and stamps each node with the user's line.

    Args:
        owners: storage key to the leaf that was passed in with that storage.
        sizes: is asked, after each op, whether it has fixed a size.
        calls: the mode that sees what the user's code calls, for which ops run.
        made: is told of each result.
        streams: is told of each op's line.
        generators: those that may be drawn from.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        owners: Mapping[int, Leaf],
        sizes: Sizes,
        refuse: Refusals,
        calls: CallsMode,
        made: Made,
        streams: Streams,
        generators: Generators = (),
    ) -> None:
        super().__init__()
        self.owners, self.sizes, self.refuse = owners, sizes, refuse
        self.calls, self.made, self.generators = calls, made, generators
        self.streams = streams
        self.blocks: dict[Any, Any] = {}  # key of a call to what it left; see `fngraph.fx.block`
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
        if not isinstance(func, torch._ops.OpOverload):
            self.refuse(
                OperatorError(
                    f"{line}: forward calls the higher-order operator {func}, whose functions a "
                    "graph cannot call. To choose, compute both and pick: "
                    "torch.where(condition, a, b); to loop, write the loop in Python"
                )
            )
            return func(*args, **kwargs)
        tangent = func is aten.size.default and not isinstance(args[0], FakeTensor)
        if tangent and (rule := by_transform(line)) is not None:  # asked in C++
            self.refuse(rule)
        if func in _LITERALS:
            array = literal_from_outside(line, args[0], self.calls.name)
            if array is not None:
                self.refuse(array)
        else:
            args, kwargs = self._given(line, args, kwargs)
        if func is aten.record_stream.default:  # a graph's memory is its own
            return None
        if func in _SYNCS and not all(_literal(x) for x in args):
            self.refuse(sync_error(line, func, self.calls.name))
            return standins.scalar(args[0]) if func is aten._local_scalar_dense.default else True
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
        self.sizes.check_fixed(line)
        result = self._check_result(line, func, args, result)
        self.made.note(result, line)
        return result

    def _check_result(self, line: str, func: Any, args: Any, result: Any) -> Any:
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
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
            return standins.fixed(result)
        return result

    def _given(self, line: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, refused where they are not of this trace, with stand-ins for those."""
        strangers = [x for x in tree_leaves((args, kwargs)) if self._is_foreign(x)]
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


def is_tracing() -> bool:
    """Whether a function is being traced right now."""
    return bool(torch._C._len_torch_dispatch_stack()) and any(
        isinstance(mode, PurityMode) for mode in _get_current_dispatch_mode_stack()
    )


def _unregistered(line: str, func: Any) -> RandomError:
    return RandomError(
        f"{line}: forward draws from a random number generator that is not registered ({func}), "
        "which a graph would not repeat as eager does. Draw with generator=g, and say so: "
        "graphify(..., generators=(g,)); or pass the numbers in as an argument. Dropout in a "
        "module is switched off with module.eval()"
    )


def _literal(x: Any) -> bool:
    return getattr(x, "constant", None) is not None
