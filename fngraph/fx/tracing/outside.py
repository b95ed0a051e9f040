"""What goes past arguments and results: what `forward` reads unasked, and what it keeps.

It reads real tensors and arrays that its code can reach, and is told their names. It keeps tensors
that outlive the call, which a graph makes once: whoever keeps one holds memory of the last capture,
or a trace's fake. All that is made is weakly referred to; what is alive after the trace, somebody
keeps.
"""

from __future__ import annotations

import collections
import gc
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from fngraph.core.where import is_user
from fngraph.errors import ClosureError, LeakError, MutationError, OperatorError, PurityError
from fngraph.fx.advice import ARGUMENT
from fngraph.fx.leaves import Leaf
from fngraph.fx.tracing.refusals import Refusals
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import tree_leaves
from fngraph.torch_facts.tracing import FakeTensor

MAKERS = ("tensor", "as_tensor", "asarray", "new_tensor")  # check their own arguments


def is_literal(x: Any) -> bool:
    """Whether a tensor is made of numbers that stand in `forward`, so that its values are known."""
    return getattr(x, "constant", None) is not None


def foreign(line: str, x: Any, owners: Mapping[int, Leaf]) -> PurityError:
    """The error about a tensor or storage that no op of this trace has made."""
    if isinstance(x, torch.UntypedStorage):
        leaf = owners.get(x._cdata)
        fake = x.device.type == "meta"
        return memory(line, "set_", leaf) if fake else _closed(line, "memory")
    if isinstance(x, FakeTensor):
        return PurityError(
            f"{line}: forward uses a tensor that no op of this trace has made: another thread "
            "has, or another trace, or a function of a loop has made it, and its turn is over. "
            "Compute it in forward, on its own thread; return from a loop what is to last"
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
        f"that memory after you replace it. {ARGUMENT}"
    )


def is_array(value: Any) -> bool:
    """Whether a value is one of numpy's, with memory of its own."""
    return _address(value) is not None


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


_DEPTH = 4  # containers between a tensor and the name under which it is kept

_PATIENCE = (0.0, 0.01, 0.1, 1.0)
"""Seconds before each look at what is alive."""
_CONTAINERS = (dict, list, set, tuple, collections.deque, types.CellType)


class Made:
    """What one trace has given to `forward` and seen it make."""

    def __init__(self, fakes: Sequence[torch.Tensor], leaves: Sequence[Leaf]) -> None:
        pairs = zip(fakes, leaves)
        self._leaves = {id(fake): leaf for fake, leaf in pairs}
        self._seen = {
            key: (weakref.ref(x), self._leaves[key].path) for x in fakes if (key := id(x))
        }
        self._undo: list[Callable[[], object]] = []

    def at_end(self, undo: Callable[[], object]) -> None:
        """Have `undo` called once the trace is over, whatever came of it; the last one first."""
        self._undo.append(undo)

    def close(self) -> None:
        """The trace is over."""
        while self._undo:
            self._undo.pop()()

    def note(self, result: Any, what: str) -> None:
        """Remember the tensors of `result`, made at the line `what`."""
        for x in [result] if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(x, torch.Tensor | torch.SymInt):
                self._seen.pop(id(x), None)  # of one that is gone: keep the order of making
                self._seen[id(x)] = weakref.ref(x), what  # type: ignore[arg-type]

    def origin(self, x: torch.Tensor) -> tuple[torch.Tensor, str, Leaf | None] | None:
        """The first tensor in the memory of `x`, the line that made it, and which leaf it is."""
        at = _lies_at(x)
        for first, what in self._alive() if at is not None else ():
            if isinstance(first, FakeTensor) and _lies_at(first) == at:
                return first, what, self._leaves.get(id(first))
        return None

    def check(self, refuse: Refusals) -> None:
        """Refuse each that is alive, once the trace has let go of all of them.

        What nobody is seen to hold is looked at again for a while: a thread of torch's may not yet
        have let go. Autograd's for a GPU still has the last of its tensors when its caller goes on.
        """
        kept: list[tuple[str, str, str | None]] = []
        for seconds in _PATIENCE:
            if not self._alive():  # without cycles, counting references has been enough
                return
            time.sleep(seconds)
            collected = _collect()
            kept = self._kept()
            if collected and any(name is not None for _, _, name in kept):
                break
        for kind, line, name in kept:
            if name is None and gc.get_freeze_count():
                name = "what may be hidden by gc.freeze(): call gc.unfreeze() to see its name"
            refuse(
                LeakError(
                    f"{line}: forward keeps the {kind} from here after it has returned"
                    f"{f', in {name}' if name else ''}; a graph makes it once, so it would be "
                    "stale. Return it with the results"
                )
            )

    def _kept(self) -> list[tuple[str, str, str | None]]:
        """Of each that is alive: what it is, its line, and who holds it, if he can be seen."""
        alive, kept = self._alive(), []
        alive.sort(key=lambda pair: id(pair[0]) in self._leaves)  # what ops have made first
        while alive:
            x, line = alive.pop(0)
            kind = "number of tokens or requests" if isinstance(x, torch.SymInt) else "tensor"
            kept.append((kind, line, _keeper(x, {id(alive)})))
        return kept

    def _alive(self) -> list[tuple[Any, str]]:
        alive = ((ref(), what) for ref, what in self._seen.values())
        return [(x, what) for x, what in alive if x is not None]


def _lies_at(x: torch.Tensor) -> int | None:
    """Which storage a tensor lives in, if it has one."""
    return storage_key(x) if x.layout is torch.strided else None


class _Cycle:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def _collect() -> bool:
    """Have cycles collected; False if the collector would not: it runs already, on another thread
    or further out on this one."""
    seen = weakref.ref(_Cycle())
    gc.collect()
    return seen() is None


def _keeper(x: Any, skip: set[int], depth: int = _DEPTH) -> str | None:
    """Under which name something is kept: `the global 'TABLE'`, `Model.last`, `a list`.

    None if the keeper is hidden from the collector by `gc.freeze()`.
    """
    found = None
    holders = gc.get_referrers(x)
    skip = skip | {id(holders), id(sys._getframe())}
    for holder in holders:
        if id(holder) in skip or isinstance(holder, types.FrameType):
            continue
        named = _named(holder, x)
        if named is not None:
            return named
        if isinstance(holder, _CONTAINERS) and depth:
            found = _keeper(holder, skip, depth - 1) or found or f"a {type(holder).__name__}"
    return found


def _named(holder: Any, x: Any) -> str | None:
    """`holder` as a namespace, with the name of `x` in it."""
    if isinstance(holder, dict):
        name = next((k for k, v in holder.items() if v is x), None)
        module = sys.modules.get(str(holder.get("__name__")))
        if module is not None and vars(module) is holder:
            return f"the global {name!r}"
        return next(_owners(holder, name), None)
    if isinstance(holder, types.FunctionType):
        return f"the closure or a default of {holder.__qualname__}"
    for name, value in getattr(holder, "__dict__", {}).items():
        if value is x:
            return f"{type(holder).__name__}.{name}"
    return None if isinstance(holder, _CONTAINERS) else f"a {type(holder).__name__}"


def _owners(namespace: dict[Any, Any], name: Any) -> Iterator[str]:
    for owner in gc.get_referrers(namespace):
        if isinstance(owner, type) and vars(owner).get(name) is namespace[name]:
            yield f"{owner.__name__}.{name}"
        elif getattr(owner, "__dict__", None) is namespace:
            yield f"{type(owner).__name__}.{name}"
