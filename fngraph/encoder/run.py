"""Encoders: items (images, videos) packed into the token budgets that graphs were captured for.

    items --balance--> this rank's --pack--> runs --collate--> batches --step--> rows by item

Each path of a plan (most encoders have one) is an ordinary captured step whose capture sizes are
the path's budgets and whose tokens are output tokens; an item is one request of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fngraph.core import EncoderPlan, Item, Limits, Packed, balance, pack
from fngraph.core.encoder_items import DEFAULT_PATH
from fngraph.errors import SpecError

Step = Callable[[Any], torch.Tensor]  # batch -> (tokens, ...) rows of its items, end to end


class Encoded(NamedTuple):
    """What one rank made of its items.

    Attributes:
        indices: which of the items are this rank's, in the order in which they were given.
        outputs: for each of them, path to the item's own rows; a path without tokens is absent.
        packed: how they ran; `hits` and `misses` say how many by graph.
    """

    indices: tuple[int, ...]
    outputs: tuple[dict[str, torch.Tensor], ...]
    packed: Packed


def encoder_limits(plan: EncoderPlan, path: str = DEFAULT_PATH, **dims: int) -> Limits:
    """The `fg.Limits` of a path's step: what no graph holds runs eagerly, so far as it fits here.

    Args:
        dims: bounds of further letters; `max_tokens` and `max_reqs` may be widened too.
    """
    largest = plan.path_budgets[path][-1]
    return Limits(**{"max_tokens": largest, "max_reqs": min(plan.max_items, largest), **dims})


def encode(
    steps: Step | Mapping[str, Step],
    plan: EncoderPlan,
    items: Sequence[Any],
    tokens: Sequence[int | Mapping[str, int] | Item],
    collate: Callable[[str, Sequence[Any]], Any],
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Encoded:
    """Run this rank's share of `items` in as few graph replays as the plan's budgets allow.

    Args:
        steps: batch to rows, by path; one callable where the plan has one path. It must own its
            outputs, since runs follow one another.
        tokens: output tokens of each item: a number, numbers by path, or `Item`s with frames.
        collate: path and some items to the batch of their run; its spec counts output tokens.
        rank, ranks: of how many ranks that share the items this one is which.

    Raises:
        SpecError: counts that do not belong to the plan, or to the items.
    """
    if len(tokens) != len(items):
        raise SpecError(f"{len(items)} items, but token counts of {len(tokens)}. Pass one each.")
    by_path = dict(steps) if isinstance(steps, Mapping) else {DEFAULT_PATH: steps}
    if by_path.keys() != plan.path_budgets.keys():
        raise SpecError(
            f"steps for the paths {sorted(by_path)}, a plan with {sorted(plan.path_budgets)}. "
            "Pass one step a path."
        )
    mine = _share([_total(count) for count in tokens], rank, ranks)
    packed = pack([tokens[i] for i in mine], plan)
    outputs: list[dict[str, torch.Tensor]] = [{} for _ in mine]
    for run in packed.runs:
        counts = [_of_path(tokens[mine[j]], run.path, plan) for j in run.items]
        present = [j for j, count in zip(run.items, counts) if count]
        rows = by_path[run.path](collate(run.path, [items[mine[j]] for j in present]))
        for j, part in zip(present, rows.split([count for count in counts if count])):
            outputs[j][run.path] = part
    return Encoded(mine, tuple(outputs), packed)


def _share(totals: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    spread = balance(totals, ranks)
    start = sum(spread.counts[:rank])
    return tuple(sorted(spread.order[start : start + spread.counts[rank]]))


def _total(count: int | Mapping[str, int] | Item) -> int:
    if isinstance(count, int):
        return count
    return sum(count.values() if isinstance(count, Mapping) else count.tokens)


def _of_path(count: int | Mapping[str, int] | Item, path: str, plan: EncoderPlan) -> int:
    if isinstance(count, Mapping):
        return count[path]
    return count if isinstance(count, int) else count.tokens[list(plan.path_budgets).index(path)]
