"""What `forward` was not given: real tensors and arrays that its code can reach, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fngraph.core.where import is_user
from fngraph.errors import ClosureError, MutationError, OperatorError, PurityError
from fngraph.fx.leaves import Leaf

MAKERS = ("tensor", "as_tensor", "asarray", "new_tensor")  # check their own arguments


def foreign(line: str, x: Any, owners: Mapping[int, Leaf]) -> PurityError:
    """The error about a tensor or storage that no op of this trace has made."""
    if isinstance(x, torch.UntypedStorage):
        leaf = owners.get(x._cdata)
        fake = x.device.type == "meta"
        return memory(line, "set_", leaf) if fake else _closed(line, "memory")
    if isinstance(x, FakeTensor):
        return PurityError(
            f"{line}: forward uses a tensor that no op of this trace has made: another thread "
            "has, or another trace. Compute it in forward, on its own thread"
        )
    name = _name_of(lambda v: v is x) or "a tensor"
    return _closed(line, f"{name}, {tuple(x.shape)} {x.dtype},")


def literal_from_outside(line: str, x: Any, maker: str) -> PurityError | None:
    """The error about an array that `torch.from_numpy` takes for a literal."""
    if maker in MAKERS or not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
        return None
    address = x.data_ptr()
    name = _name_of(lambda v: address != 0 and _address(v) == address)
    return None if name is None else _closed(line, f"the array: {name},")


def array_from_outside(line: str, value: Any) -> PurityError | None:
    """The error about an array that a user's frame finds in its globals or its closure."""
    if _address(value) is None:
        return None
    name = _name_of(lambda v: v is value)
    return None if name is None else _closed(line, f"the array: {name},")


def memory(line: str, how: str, leaf: Leaf | None) -> PurityError:
    """The error about looking behind a tensor."""
    if leaf is None:
        return OperatorError(
            f"{line}: forward looks at the memory behind a tensor ({how}), which a graph lays out "
            "anew. Stay with tensors: x.view(dtype), x.copy_(y), x.shape"
        )
    return MutationError(
        f"{line}: forward reaches into the memory of {leaf.path} ({how}), past what a graph can "
        "see. Read and write it as a tensor: x.view(dtype), x.copy_(y), x.shape"
    )


def _closed(line: str, what: str) -> ClosureError:
    return ClosureError(
        f"{line}: forward reads {what} which was not passed to it; a graph would go on reading "
        "that memory after you replace it. Make it an argument: forward(params, cache, batch) "
        "with the tensor in params"
    )


def _address(value: Any) -> int | None:
    """Where a numpy array is; None for anything else."""
    if type(value).__module__ != "numpy":
        return None
    interface = getattr(value, "__array_interface__", None)
    return interface["data"][0] if interface else None


def _name_of(fits: Callable[[Any], bool]) -> str | None:
    """What the users' frames call a value, from the innermost outwards: `the global 'W'`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user(frame):
            for name, value in _reachable(frame):
                if fits(value):
                    return name
        frame = frame.f_back
    return None


def _reachable(frame: FrameType) -> Iterator[tuple[str, Any]]:
    code = frame.f_code
    kinds = (
        ("the global {!r}", code.co_names, frame.f_globals),
        ("{!r} from its closure", code.co_freevars, frame.f_locals),
    )
    for text, names, scope in kinds:
        for name in names:
            value = scope.get(name)
            yield text.format(name), value
            if isinstance(value, dict | list | tuple):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((text.format(f"{name}[{key!r}]"), item) for key, item in items)
            else:
                parts = [] if isinstance(value, torch.Tensor) else _attributes(value)
                yield from ((text.format(f"{name}.{key}"), item) for key, item in parts)
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        yield f"the argument {name!r}", frame.f_locals.get(name)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    try:
        return list(vars(value).items())
    except TypeError:  # it has none
        return []
