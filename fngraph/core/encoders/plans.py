"""Which token budgets an encoder's graphs are captured for, and how much a graph holds.

An item (an image, a video) brings output tokens, to each path (tower) of the encoder its own. A
graph holds so many tokens, sequences, items and frames; `plan_encoder` says which graphs there are.
How items are packed into them is in `items.py`.
"""

from __future__ import annotations

import dataclasses
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from operator import ge
from types import MappingProxyType
from typing import NamedTuple

from fngraph.core import text
from fngraph.core.kinds import checked
from fngraph.core.text import with_suggestions
from fngraph.errors import SizesError, SpecError

Budgets = tuple[int, ...]

DEFAULT_PATH = "default"
ANY = sys.maxsize  # of sequences: as many as there are tokens


@checked
@with_suggestions
@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """One tower of an encoder, with budgets of its own.

    Attributes:
        min_budget: its smallest budget, in output tokens.
        allow_zero: items may bring it no tokens at all (an image without local crops).
        unit: tokens of each sequence where all are alike; budgets are then whole sequences. None:
            sequences of any length.
        budgets: its own, ascending; None: `min_budget` doubled up to the plan's largest.

    Raises:
        SizesError: counts below 1, or budgets that do not ascend.
    """

    min_budget: int
    allow_zero: bool = False
    unit: int | None = None
    budgets: Budgets | None = None

    def __post_init__(self) -> None:
        for name, count in (("min_budget", self.min_budget), ("unit", self.unit)):
            if count is not None and count < 1:
                raise SizesError(f"Path({name}={count}) holds no token. Pass 1 or more.")
        if self.budgets is not None:
            _check_budgets(self.budgets)

    def ladder(self, largest: int) -> Budgets:
        """Its budgets, where the plan's largest is this.

        Raises:
            SizesError: none that holds a whole sequence, or none at all up to that.
        """
        if self.budgets is None and self.min_budget > largest:
            raise SizesError(
                f"min_budget={self.min_budget} is beyond the largest budget, {largest} tokens. "
                f"Pass min_budget={largest} or less, or a range that reaches it."
            )
        found = self.budgets or token_budgets(self.min_budget, largest)
        if self.unit is not None:
            found = tuple(sorted({n - n % self.unit for n in found} - {0}))
        if not found:
            raise SizesError(
                f"No budget up to {largest} holds a sequence of unit={self.unit} tokens. Pass a "
                f"range or budgets that reach {self.unit}."
            )
        return ((0,) if self.allow_zero else ()) + found


class EncoderPlan(NamedTuple):
    """What is captured for an encoder.

    Attributes:
        budgets: the plan's token budgets, ascending.
        path_budgets: the budgets of each path; 0 stands for "nothing to run", without a graph.
        max_items: items (images, videos) a graph holds.
        max_frames: frames a graph holds, over its items; 0: no video.
        max_sequences: sequences of attention that a graph of a path holds; a path left out: as many
            as its tokens make.
        defer: whether `pack` keeps an item for a later batch where that is cheaper.
        sequences: numbers of sequences that a path has graphs for at each budget, ascending, the
            last of them its `max_sequences`; a path left out: that one alone.
    """

    budgets: Budgets
    path_budgets: Mapping[str, Budgets]
    max_items: int
    max_frames: int
    max_sequences: Mapping[str, int] = MappingProxyType({})
    defer: bool = True
    sequences: Mapping[str, Budgets] = MappingProxyType({})

    @property
    def num_graphs(self) -> int:
        """Graphs to capture."""
        return sum(self._graphs(path) for path in self.path_budgets)

    def _graphs(self, path: str) -> int:
        """Of one path: where several numbers of sequences are beyond a budget, one of them."""
        numbers = self.sequences.get(path, (ANY,))
        budgets = self.path_budgets[path]
        return sum(len({min(budget, n) for n in numbers}) for budget in budgets if budget)

    def _repr_html_(self) -> str:
        return text.html(self.as_text())

    def __repr__(self) -> str:
        return text.named(self)

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self) -> str:
        """The budgets of each path as a text table."""
        rows = [
            (path, self._graphs(path), ", ".join(map(str, budgets)))
            for path, budgets in self.path_budgets.items()
        ]
        head = f"at most {text.count(self.max_items, 'item')}, {self.max_frames} frames a graph"
        for path, most in self.max_sequences.items():
            fewer = "".join(f"{n} or " for n in self.sequences.get(path, ())[:-1])
            head += f", {fewer}{text.count(most, 'sequence')} of {path}"
        return f"{head}\n\n{text.table(('path', 'graphs', 'token budgets'), rows)}"


@checked
def token_budgets(low: int, high: int) -> Budgets:
    """`low` doubled as long as it stays within `high`, and `high` itself.

    Source: vLLM 0.33, encoder CUDA graphs.

    >>> token_budgets(64, 800)
    (64, 128, 256, 512, 800)

    Raises:
        SizesError: `low` beyond `high`, or below 1.
    """
    if low < 1 or high < 1:
        raise SizesError(f"token_budgets({low}, {high}): budgets are positive. Pass 1 or more.")
    if low > high:
        raise SizesError(f"token_budgets({low}, {high}): none is within. Pass low <= high.")
    doubled = (low << i for i in range((high // low).bit_length()))
    return tuple(sorted({*doubled, high}))


@checked
def fit(tokens: int, budgets: Budgets) -> int | None:
    """The smallest of the ascending `budgets` that holds `tokens`; None where none does.

    Raises:
        SizesError: budgets that do not ascend. SpecError: negative tokens.
    """
    if any(map(ge, budgets, budgets[1:])):
        good = tuple(sorted(set(budgets)))
        raise SizesError(f"budgets={budgets} must ascend. Pass budgets={good}.")
    if tokens < 0:
        raise SpecError(f"fit({tokens}, ...): tokens are not negative. Pass 0 or more.")
    at = bisect_left(budgets, tokens)
    return budgets[at] if at < len(budgets) else None


@checked
@with_suggestions
def plan_encoder(
    low: int,
    high: int,
    *,
    budgets: Iterable[int] | None = None,
    max_items: int | None = None,
    paths: Mapping[str, Path] | None = None,
    max_frames: int | None = None,
    frames_per_item: int = 1,
    max_sequences: Mapping[str, int] | None = None,
) -> EncoderPlan:
    """What to capture for an encoder whose items bring `low` to `high` output tokens.

    | budgets | max_items | budgets become                    | max_items becomes          |
    |---------|-----------|-----------------------------------|----------------------------|
    | given   | given     | as given                          | as given                   |
    | given   |           | as given                          | high // low, one a budget  |
    |         | given     | from max(low, max_items) to high  | as given                   |
    |         |           | from low to high                  | high // low, one a budget  |

    "One a budget": at most the smallest budget, since an item brings at least one token.

    Args:
        low: tokens of the smallest item. high: the most that a step brings.
        paths: several towers; each has budgets from its own minimum to the plan's largest, or
            its own.
        max_frames: video frames a graph; None: `frames_per_item` for each item.
        frames_per_item: the most frames of one item; 0 where there is no video.
        max_sequences: sequences that a graph of a path holds; a path left out: any number.

    Raises:
        SizesError: no path; the range is empty and something must be derived from it; budgets that
            are not ascending, or a path's that begin beyond them; more items than the smallest
            budget has tokens; negative frames; no sequence.

    Source: vLLM 0.33, `EncoderCudaGraphManager`.
    """
    if paths is not None and not paths:
        raise SizesError("paths={} has nothing to run. Pass paths={name: Path(min_budget)}.")
    given = None if budgets is None else tuple(budgets)
    if given is not None:
        _check_budgets(given)
    if max_items is not None and max_items < 1:
        raise SizesError(f"max_items={max_items} holds no item. Pass max_items=1 or more.")
    if (given is None or max_items is None) and not 0 < low <= high:
        raise SizesError(
            f"Items of {low} to {high} tokens leave no budget. Pass low <= high, both positive, "
            "or both budgets= and max_items=."
        )
    chosen = token_budgets(min(max(low, max_items or 1), high), high) if given is None else given
    items = min(high // low, chosen[0]) if max_items is None else max_items
    if items > chosen[0]:
        raise SizesError(
            f"max_items={items} is more than the smallest budget, {chosen[0]} tokens, and an item "
            f"brings at least one. Pass max_items={chosen[0]}, or drop that budget."
        )
    if paths is None:
        path_budgets = {DEFAULT_PATH: chosen}
    else:
        path_budgets = {name: path.ladder(chosen[-1]) for name, path in paths.items()}
    frames = items * frames_per_item if max_frames is None else max_frames
    if frames < 0:
        raise SizesError(f"{frames} frames a graph. Pass max_frames=0 where there is no video.")
    most = dict(max_sequences or {})
    for name, count in most.items():
        if name not in path_budgets or count < 1:
            raise SizesError(
                f"max_sequences={{{name!r}: {count}}}: pass 1 or more, of a path that there is: "
                f"{sorted(path_budgets)}."
            )
    return EncoderPlan(chosen, path_budgets, items, frames, MappingProxyType(most))


def _check_budgets(budgets: Budgets) -> None:
    if not budgets or list(budgets) != sorted(set(budgets)) or budgets[0] < 1:
        good = tuple(sorted({budget for budget in budgets if budget > 0})) or (64,)
        raise SizesError(f"budgets={budgets} must ascend from 1 or more. Pass budgets={good}.")
