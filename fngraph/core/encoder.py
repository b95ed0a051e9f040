"""Encoder graphs: token budgets, the one that fits, and the plan of what to capture."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fngraph.core import text
from fngraph.errors import SizesError

Budgets = tuple[int, ...]

DEFAULT_PATH = "default"


class Path(NamedTuple):
    """One tower of an encoder, with budgets of its own.

    Attributes:
        min_budget: its smallest budget, in output tokens.
        allow_zero: items may bring it no tokens at all (an image without local crops).
    """

    min_budget: int
    allow_zero: bool = False


class EncoderPlan(NamedTuple):
    """What is captured for an encoder.

    Attributes:
        budgets: the plan's token budgets, ascending.
        path_budgets: the budgets of each path; 0 stands for "nothing to run", without a graph.
        max_items: items (images, videos) a graph holds.
        max_frames: frames a graph holds, over its items; 0: no video.
    """

    budgets: Budgets
    path_budgets: Mapping[str, Budgets]
    max_items: int
    max_frames: int

    @property
    def num_graphs(self) -> int:
        """Graphs to capture."""
        return sum(budget > 0 for budgets in self.path_budgets.values() for budget in budgets)

    def as_text(self) -> str:
        """The budgets of each path as a text table."""
        rows = [
            (path, sum(budget > 0 for budget in budgets), ", ".join(map(str, budgets)))
            for path, budgets in self.path_budgets.items()
        ]
        head = f"at most {text.count(self.max_items, 'item')}, {self.max_frames} frames a graph"
        return f"{head}\n\n{text.table(('path', 'graphs', 'token budgets'), rows)}"


def token_budgets(low: int, high: int) -> Budgets:
    """`low` doubled as long as it stays within `high`, and `high` itself.

    Source: vLLM 0.33, encoder CUDA graphs.

    >>> token_budgets(64, 800)
    (64, 128, 256, 512, 800)
    """
    if low < 1 or high < 1:
        raise SizesError(f"token_budgets({low}, {high}): budgets are positive. Pass 1 or more.")
    doubled = (low << i for i in range((high // low).bit_length()))
    return tuple(sorted({*doubled, high}))


def fit(tokens: int, budgets: Budgets) -> int | None:
    """The smallest of the ascending `budgets` that holds `tokens`; None where none does."""
    at = bisect_left(budgets, tokens)
    return budgets[at] if at < len(budgets) else None


def plan_encoder(
    low: int,
    high: int,
    *,
    budgets: Iterable[int] | None = None,
    max_items: int | None = None,
    paths: Mapping[str, Path] | None = None,
    max_frames: int | None = None,
    frames_per_item: int = 1,
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
        paths: several towers; each has budgets from its own minimum to the plan's largest.
        max_frames: video frames a graph; None: `frames_per_item` for each item.
        frames_per_item: the most frames of one item; 0 where there is no video.

    Raises:
        SizesError: the range is empty and something must be derived from it; budgets that are
            not ascending; more items than the smallest budget has tokens; negative frames.

    Source: vLLM 0.33, `EncoderCudaGraphManager`.
    """
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
    chosen = token_budgets(max(low, max_items or 1), high) if given is None else given
    items = min(high // low, chosen[0]) if max_items is None else max_items
    if items > chosen[0]:
        raise SizesError(
            f"max_items={items} is more than the smallest budget, {chosen[0]} tokens, and an item "
            f"brings at least one. Pass max_items={chosen[0]}, or drop that budget."
        )
    if paths is None:
        path_budgets = {DEFAULT_PATH: chosen}
    else:
        path_budgets = {
            name: ((0,) if path.allow_zero else ()) + token_budgets(path.min_budget, chosen[-1])
            for name, path in paths.items()
        }
    frames = items * frames_per_item if max_frames is None else max_frames
    if frames < 0:
        raise SizesError(f"{frames} frames a graph. Pass max_frames=0 where there is no video.")
    return EncoderPlan(chosen, path_budgets, items, frames)


def _check_budgets(budgets: Budgets) -> None:
    if not budgets or list(budgets) != sorted(set(budgets)) or budgets[0] < 1:
        good = tuple(sorted({budget for budget in budgets if budget > 0})) or (64,)
        raise SizesError(f"budgets={budgets} must ascend from 1 or more. Pass budgets={good}.")
