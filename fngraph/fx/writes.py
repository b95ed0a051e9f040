"""Errors about single ops: writes into what was not given to keep, waits, what no graph holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fngraph.errors import HostSyncError, MutationError, OperatorError
from fngraph.fx.api import rebound
from fngraph.fx.leaves import Leaf, Role, storage_key
from fngraph.fx.schemas import written

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
        fix = "Write into a copy, x.clone()"
        if leaf.role is Role.HELD:
            donate = _with(leaf, owners)
            fix += f", or donate the argument: fg.graphify(..., donate={donate})"
        yield MutationError(
            f"{line}: forward writes into {leaf.path} ({func}), which is {leaf.role.value}, not "
            f"donated. {fix}"
        )


def _with(leaf: Leaf, owners: Mapping[int, Leaf]) -> str:
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
    fix = _FIXES.get(call, "Keep the choice on the device: torch.where(condition, a, b)")
    return HostSyncError(
        f"{line}: forward needs a tensor's value on the host ({func}, from .item(), int(), "
        f"if tensor, ...); a graph would freeze it. {fix}"
    )


def unsupported(line: str, func: Any, why: str) -> OperatorError:
    """The error about an op that a graph cannot hold."""
    return OperatorError(
        f"{line}: forward calls {func}, {why}, so that a graph cannot hold it. Call it outside of "
        "forward, or write it with ops on plain (strided) tensors"
    )
