"""Encoder packing: items into as few graph runs as their budgets allow, and items over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fngraph.core.encoder import DEFAULT_PATH, Budgets, EncoderPlan, fit
from fngraph.errors import SpecError


class Item(NamedTuple):
    """One image or video.

    Attributes:
        tokens: output tokens of each path, in the plan's order of paths.
        frames: frames of a video; 0 for an image, which no frame limit counts.
    """

    tokens: tuple[int, ...]
    frames: int = 0


class Run(NamedTuple):
    """One path's run over some items.

    Attributes:
        path: the path.
        items: indices into what was packed.
        budget: the graph's token budget; None: no budget holds them, so they run eagerly.
    """

    path: str
    items: tuple[int, ...]
    budget: int | None


class Packed(NamedTuple):
    """How the items run, in order, and how many of them by graph.

    Attributes:
        runs: each batch's runs, a path each; a path without tokens does not run.
        hits: items replayed, counted once for each path.
        misses: items of batches that no graph served.
    """

    runs: tuple[Run, ...]
    hits: int
    misses: int


def pack(items: Iterable[int | Mapping[str, int] | Item], plan: EncoderPlan) -> Packed:
    """Packs items, fewest tokens first, into batches that one graph a path serves.

    A batch is closed before an item that would make it too large (items, frames, or tokens of any
    path), and before one that is better deferred: where together they need a larger graph than
    the two budgets in sum, and the item alone needs at least the batch's.

    Args:
        items: output tokens; or tokens by path; or `Item`s.

    Raises:
        SpecError: negative tokens, or paths other than the plan's.

    Source: vLLM 0.33, `EncoderCudaGraphManager`, which does not limit frames while packing.
    """
    ladder = tuple(plan.path_budgets.values())
    known = [_item(item, plan) for item in items]
    batches: list[list[int]] = []
    sums, frames = (0,) * len(ladder), 0
    for at in sorted(range(len(known)), key=lambda at: sum(known[at].tokens)):
        item = known[at]
        joined, shown = tuple(map(sum, zip(sums, item.tokens))), frames + item.frames
        if (
            batches
            and len(batches[-1]) < plan.max_items
            and shown <= plan.max_frames
            and all(total <= budgets[-1] for total, budgets in zip(joined, ladder))
            and not any(map(_defer, sums, item.tokens, ladder))
        ):
            batches[-1].append(at)
            sums, frames = joined, shown
        else:
            batches.append([at])
            sums, frames = item.tokens, item.frames
    runs: list[Run] = []
    misses = 0
    for batch in batches:
        mine = list(_runs(batch, known, plan))
        runs += mine
        misses += len(batch) if mine and all(run.budget is None for run in mine) else 0
    hits = sum(len(run.items) for run in runs if run.budget is not None)
    return Packed(tuple(runs), hits, misses)


def _item(item: int | Mapping[str, int] | Item, plan: EncoderPlan) -> Item:
    paths = tuple(plan.path_budgets)
    if isinstance(item, int):
        item = {DEFAULT_PATH: item}
    if isinstance(item, Mapping):
        if item.keys() != set(paths):
            raise SpecError(
                f"An item with tokens for {sorted(item)} does not suit a plan with the paths "
                f"{sorted(paths)}. Pass {{{', '.join(f'{path!r}: tokens' for path in paths)}}}."
            )
        item = Item(tuple(item[path] for path in paths))
    if len(item.tokens) != len(paths) or min(item.tokens) < 0 or item.frames < 0:
        raise SpecError(f"{item} needs {len(paths)} token counts, none negative.")
    return item


def _defer(total: int, tokens: int, budgets: Budgets) -> bool:
    """Whether one path had rather run an item apart from the batch so far; all of it fits."""
    now, alone, both = (fit(count, budgets) or 0 for count in (total, tokens, total + tokens))
    return now + alone < both and alone >= now


def _runs(batch: Sequence[int], items: Sequence[Item], plan: EncoderPlan) -> Iterable[Run]:
    held = sum(items[at].frames for at in batch) <= plan.max_frames
    for i, (path, budgets) in enumerate(plan.path_budgets.items()):
        total = sum(items[at].tokens[i] for at in batch)
        if total:
            yield Run(path, tuple(batch), fit(total, budgets) if held else None)


class Balance(NamedTuple):
    """Items spread over ranks.

    Attributes:
        order: item indices, those of rank 0 first.
        counts: items of each rank.
        loads: tokens of each rank.
    """

    order: tuple[int, ...]
    counts: tuple[int, ...]
    loads: tuple[int, ...]


def balance(sizes: Sequence[int], ranks: int) -> Balance:
    """Each item, largest first, goes to the least loaded rank; among equals to the first.

    Source: vLLM 0.33, `get_load_balance_assignment`.

    >>> balance([1000, 100, 200, 50], 2)
    Balance(order=(0, 2, 1, 3), counts=(1, 3), loads=(1000, 350))
    """
    if ranks < 1:
        raise SpecError(f"ranks={ranks}: at least one rank works. Pass ranks=1 or more.")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        rank = loads.index(min(loads))
        shares[rank].append(item)
        loads[rank] += sizes[item]
    order = tuple(item for share in shares for item in share)
    return Balance(order, tuple(map(len, shares)), tuple(loads))
