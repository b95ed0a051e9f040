"""What a function closes over, found by running it; and the function of that too.

A gradient is taken of arguments. So where one goes through a loop, what its functions close over
becomes an argument: they are run once to see which tensors from outside they use, and from then on
with others in the place of those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fngraph.core.where import user_line
from fngraph.errors import TransformError
from fngraph.fx.nodes import flat
from fngraph.torch_facts.names import (
    DisableTorchFunction,
    count_function_modes,
    current_level,
    function_modes,
    level_of,
    unwrapped,
)

Flat = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class _Seen(TorchFunctionMode):
    """Notes tensors that were there before.

    Args:
        known: what they are under all transforms, by id.
        given: what the function was given, which is not noted.
    """

    def __init__(self, known: set[int], given: Sequence[torch.Tensor], level: int) -> None:
        super().__init__()
        self.known, self.level = known, level
        self.given = {id(x) for x in given}
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.look((*flat(args), *flat(kwargs)))
        return func(*args, **kwargs)

    def look(self, values: Sequence[Any]) -> None:
        """Note those of them that are from outside.

        Raises:
            TransformError: one that a transform within the function has wrapped: it is to be
                differentiated there, and could not be given as an argument.
        """
        for x in values:
            if not isinstance(x, torch.Tensor) or id(x) in self.given or id(x) in self.found:
                continue
            now = _swapped(x)
            with DisableTorchFunction():
                base, level = unwrapped(now), level_of(now)
            if id(base) not in self.known:
                continue
            if level > self.level:
                raise TransformError(
                    f"{user_line()}: a function of a loop takes a gradient of a tensor that it "
                    "closes over, and another is taken of the loop. Pass that tensor in: as a "
                    "part of the carry, or of xs"
                )
            self.found[id(x)] = x, now


class _Swapped(TorchFunctionMode):
    """Gives functions other tensors in the place of some."""

    def __init__(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.old = old  # which keeps their ids
        self.new = {id(x): y for x, y in zip(old, new)}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*self.swap(args), **self.swap(kwargs or {}))

    def swap(self, x: Any) -> Any:
        """The same, with the others in it."""
        if isinstance(x, torch.Tensor):
            return self.new.get(id(x), x)
        if isinstance(x, dict):
            return {name: self.swap(value) for name, value in x.items()}
        if type(x) in (list, tuple):
            return type(x)(map(self.swap, x))
        return x


def here(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that a function hands to a loop, as those that stand for them now."""
    found = list(values)
    for mode in reversed(function_modes()) if count_function_modes() else ():
        if isinstance(mode, _Seen):
            mode.look(found)
        elif isinstance(mode, _Swapped):
            found = mode.swap(found)
    return found


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """What stands for a tensor now."""
    for mode in reversed(function_modes()) if count_function_modes() else ():
        if isinstance(mode, _Swapped):
            x = mode.swap(x)
    return x


def closed_over(
    fn: Flat, given: Sequence[torch.Tensor], known: set[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors from outside that `fn` uses or returns, in order, and what stands for each now.

    Args:
        given: what it is called with.
        known: what was there before, under all transforms, by id.
    """
    with _Seen(known, given, current_level() or 0) as seen:
        seen.look(list(fn(given)))
    return list(seen.found.values())


def with_others(fn: Flat, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> Flat:
    """`fn`, with `new` in the place of what it closes over."""

    def run(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with _Swapped(old, new) as swapped:
            return swapped.swap(list(fn(given)))  # type: ignore[no-any-return]

    return run
