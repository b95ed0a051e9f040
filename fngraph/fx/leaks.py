"""Tensors that outlive the call of `forward` that made them, other than as its result.

A graph makes them once: whoever keeps one holds memory of the last capture, or a trace's fake.
Everything made is weakly referred to; what is alive after the trace, somebody keeps.
"""

from __future__ import annotations

import collections
import gc
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fngraph.errors import LeakError
from fngraph.fx.leaves import Leaf
from fngraph.fx.refusals import Refusals

_DEPTH = 4  # containers between a tensor and the name under which it is kept

_CONTAINERS = (dict, list, set, tuple, collections.deque, types.CellType)


class Made:
    """What one trace has given to `forward` and seen it make."""

    def __init__(self, fakes: Sequence[torch.Tensor], leaves: Sequence[Leaf]) -> None:
        pairs = zip(fakes, leaves)
        self._leaves = {id(fake) for fake in fakes}
        self._seen = {id(fake): (weakref.ref(fake), leaf.path) for fake, leaf in pairs}

    def note(self, result: Any, what: str) -> None:
        """Remember the tensors of `result`, made at the line `what`."""
        for x in [result] if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(x, torch.Tensor | torch.SymInt):
                self._seen.pop(id(x), None)  # of one that is gone: keep the order of making
                self._seen[id(x)] = weakref.ref(x), what  # type: ignore[arg-type]

    def check(self, refuse: Refusals) -> None:
        """Refuse each that is alive, once the trace has let go of all of them."""
        if self._alive():
            gc.collect()  # cycles; without any, counting references has been enough
        alive = self._alive()
        alive.sort(key=lambda pair: id(pair[0]) in self._leaves)  # what ops have made first
        while alive:
            x, what = alive.pop(0)
            kind = "number of tokens or requests" if isinstance(x, torch.SymInt) else "tensor"
            name = _keeper(x, {id(alive)})
            if name is None and gc.get_freeze_count():
                name = "what may be hidden by gc.freeze(): call gc.unfreeze() to see its name"
            refuse(
                LeakError(
                    f"{what}: forward keeps the {kind} from here after it has returned"
                    f"{f', in {name}' if name else ''}; a graph makes it once, so it would be "
                    "stale. Return it: return logits, kept, cache"
                )
            )

    def _alive(self) -> list[tuple[Any, str]]:
        alive = ((ref(), what) for ref, what in self._seen.values())
        return [(x, what) for x, what in alive if x is not None]


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
