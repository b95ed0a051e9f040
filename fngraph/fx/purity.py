"""Purity: each op is looked at while the user's frame is live, so that an error names the line.

A graph freezes what Python saw once. So `forward` may not read tensors that it was not given, wait
for values on the host, draw from a global generator, or write what it was not given to keep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from fngraph.core.where import user_line
from fngraph.errors import ClosureError, HostSyncError, MutationError, OperatorError, RandomError
from fngraph.fx.leaves import Leaf, Role, storage_key
from fngraph.fx.sizes import refuse_transform

aten = torch.ops.aten
_LITERALS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}  # torch.tensor([1., 2.])
_SYNCS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}


class PurityMode(TorchDispatchMode):
    """Refuses impure ops inside a trace and stamps each node with the user's line.

    Args:
        owners: storage key to the leaf that was passed in with that storage.
        names: `id(tensor)` to the name under which `forward` can see a real tensor.
        check_sizes: called with the line after each op, to see whether it has fixed a size.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        owners: Mapping[int, Leaf],
        names: Mapping[int, str],
        check_sizes: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.owners, self.names, self.check_sizes = owners, names, check_sizes
        self.blocks: dict[Any, Any] = {}  # key of a call to what it left; see `fngraph.fx.block`

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        line = user_line()
        fx.traceback.set_stack_trace([line])
        if not isinstance(func, torch._ops.OpOverload):
            raise OperatorError(
                f"{line}: forward calls the higher-order operator {func}, whose branches a graph "
                "cannot choose between. Compute both and pick: torch.where(condition, a, b)"
            )
        if func in _SYNCS:
            raise HostSyncError(
                f"{line}: forward needs a tensor's value on the host ({func}, from .item(), "
                "int(), if tensor, ...); a graph would freeze it. Keep the choice on the device: "
                "torch.where(condition, a, b)"
            )
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(
            func, args, kwargs
        ):
            raise RandomError(
                f"{line}: forward draws from a global random number generator ({func}), which a "
                "graph would not repeat as eager does. Pass the numbers in as an argument, "
                "or derive them from a key: hash the positions with integer arithmetic. Dropout in "
                "a module is switched off with module.eval()"
            )
        if func is aten.size.default and not isinstance(args[0], FakeTensor):
            refuse_transform(line)  # asked of a tensor with a tangent, in C++
        if func not in _LITERALS:
            self._check_closures(line, args, kwargs)
        self._check_writes(line, func, args, kwargs)
        result = func(*args, **kwargs)
        self.check_sizes(line)
        if _leaves_device(func, args, result):
            raise HostSyncError(
                f"{line}: forward moves a tensor to the host (.cpu(), .to('cpu')), and a graph "
                "would freeze what it finds there. Return the tensor, and move it outside"
            )
        if torch.Tag.dynamic_output_shape in func.tags and _has_unbacked(result):
            raise HostSyncError(
                f"{line}: the shape of {func}'s result depends on values, so the host would have "
                "to wait for them. Use a mask of fixed shape: torch.where(mask, x, 0)"
            )
        return result

    def _check_closures(self, line: str, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                name = self.names.get(id(leaf), "a tensor")
                raise ClosureError(
                    f"{line}: forward reads {name}, {tuple(leaf.shape)} {leaf.dtype}, which was "
                    "not passed to it; a graph would go on reading that memory after you "
                    "replace it. Make it an argument: forward(params, cache, batch) with the "
                    "tensor in params"
                )

    def _check_writes(self, line: str, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in written(func, args, kwargs):
            leaf = self.owners.get(storage_key(tensor))
            if leaf is not None and leaf.role is not Role.DONATED:
                fix = "Write into a copy, x.clone()"
                if leaf.role is Role.HELD:
                    fix += f", or donate the argument: fg.graphify(..., donate={self._with(leaf)})"
                raise MutationError(
                    f"{line}: forward writes into {leaf.path} ({func}), which is "
                    f"{leaf.role.value}, not donated. {fix}"
                )

    def _with(self, leaf: Leaf) -> str:
        """What `donate=` would be with the argument of `leaf` in it too."""
        donated = [x for x in self.owners.values() if x.role is Role.DONATED]
        roots = dict.fromkeys(x.path.partition(".")[0].partition("[")[0] for x in (*donated, leaf))
        quoted = [f'"{root}"' for root in roots]
        return quoted[0] if len(quoted) == 1 else f"({', '.join(quoted)})"


def is_tracing() -> bool:
    """Whether a function is being traced right now."""
    return bool(torch._C._len_torch_dispatch_stack()) and any(
        isinstance(mode, PurityMode) for mode in _get_current_dispatch_mode_stack()
    )


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors (or graph nodes, when given nodes) that an op writes, by its schema."""
    if not func._schema.is_mutable:
        return []
    found: list[Any] = []
    for i, spec in enumerate(func._schema.arguments):
        if spec.alias_info is not None and spec.alias_info.is_write:
            value = kwargs.get(spec.name) if i >= len(args) else args[i]
            found += value if isinstance(value, list | tuple) else [value]
    return [value for value in found if value is not None]


def _draws_nothing(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Dropout ops that are switched off (p = 0, or not training) carry the tag all the same."""
    given = dict(zip((a.name for a in func._schema.arguments), args)) | dict(kwargs)
    off = [given.get(k, d) == d for k, d in (("dropout_p", 0.0), ("p", 0.0), ("train", False))]
    known = [k in {a.name for a in func._schema.arguments} for k in ("dropout_p", "p", "train")]
    return any(k and o for k, o in zip(known, off))


def _leaves_device(func: Any, args: Any, result: Any) -> bool:
    if func is not aten._to_copy.default:
        return False
    return args[0].device.type != "cpu" and result.device.type == "cpu"


def _has_unbacked(result: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    return any(free_unbacked_symbols(t) for t in tensors)


def visible_tensors(fn: Any) -> dict[int, str]:
    """Names of the real tensors that `fn` can reach: closure, globals and defaults."""
    fn = getattr(fn, "__wrapped__", fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return {}
    found = {}
    for name in code.co_names:
        found[id(fn.__globals__.get(name))] = f"the global {name!r}"
    for name, cell in zip(code.co_freevars, fn.__closure__ or ()):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            found[id(cell.cell_contents)] = f"{name!r} from its closure"
    for value in fn.__defaults__ or ():
        found[id(value)] = "a default argument"
    return found
