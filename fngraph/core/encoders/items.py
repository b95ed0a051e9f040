"""How a step's items are packed into the graphs of an encoder's plan (`plans.py`).

An item brings output tokens to each path of the encoder, in one sequence of attention or several.
`pack` runs items in as few graphs as it can, and `balance` spreads items over ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from operator import add, le
from typing import NamedTuple

from fngraph.core import text
from fngraph.core.encoders.plans import ANY, DEFAULT_PATH, Budgets, EncoderPlan, fit
from fngraph.core.kinds import checked
from fngraph.errors import SpecError

_fit = inspect.unwrap(fit)  # which is asked for each item, of what is known to be of its kind


class Item(NamedTuple):
    """One image or video.

    Attributes:
        tokens: output tokens of each path, in the plan's order of paths.
        frames: frames of a video; 0 for an image, which no frame limit counts.
        sequences: sequences of attention of each path; (): one where there are tokens.
    """

    tokens: tuple[int, ...]
    frames: int = 0
    sequences: tuple[int, ...] = ()


class Run(NamedTuple):
    """One path's run over some items.

    Attributes:
        path: the path.
        items: indices into what was packed: the batch's, whether they bring the path tokens or not.
        budget: the graph's token budget; None: no budget holds them, so they run eagerly.
    """

    path: str
    items: tuple[int, ...]
    budget: int | None


class Packed(NamedTuple):
    """How the items run, in order, and how many of them by graph.

    Attributes:
        runs: each batch's runs, a path each; a path without tokens does not run.
        hits: items replayed, counted once for each path that they bring tokens.
        misses: items of batches that no graph served.
    """

    runs: tuple[Run, ...]
    hits: int
    misses: int


@checked
def pack(items: Iterable[int | Mapping[str, int] | Item], plan: EncoderPlan) -> Packed:
    """Packs items, fewest tokens first, into batches that one graph a path serves.

    A batch is closed before an item that would make it too large (items, frames, or tokens or
    sequences of any path), and before one that is better deferred: where together they need a
    larger graph than the two budgets in sum, and the item alone needs at least the batch's; unless
    the plan says defer=False.

    Args:
        items: output tokens; or tokens by path; or `Item`s.

    Raises:
        SpecError: negative tokens, or paths other than the plan's.

    Source: vLLM 0.33, `EncoderCudaGraphManager`, which limits neither frames nor sequences while
    packing, and takes an item without tokens of a path for one of its hits.
    """
    ladder = tuple(plan.path_budgets.values())
    most = tuple(plan.max_sequences.get(path, ANY) for path in plan.path_budgets)
    known = [_counts_of(item, plan) for item in items]
    batches: list[list[int]] = []
    sums: list[Item] = []  # of each batch
    for at in sorted(range(len(known)), key=lambda at: sum(known[at].tokens)):
        item = known[at]
        both = _together(sums[-1], item) if sums else item
        if (
            batches
            and len(batches[-1]) < plan.max_items
            and both.frames <= plan.max_frames
            and all(total <= budgets[-1] for total, budgets in zip(both.tokens, ladder))
            and all(map(le, both.sequences, most))
            and not (plan.defer and any(map(_defer, sums[-1].tokens, item.tokens, ladder)))
        ):
            batches[-1].append(at)
            sums[-1] = both
        else:
            batches.append([at])
            sums.append(item)
    runs: list[Run] = []
    misses = 0
    for batch, total in zip(batches, sums):
        mine = list(_runs(batch, total, plan))
        runs += mine
        misses += len(batch) if mine and all(run.budget is None for run in mine) else 0
    place = {path: i for i, path in enumerate(plan.path_budgets)}
    served = [(run, place[run.path]) for run in runs if run.budget is not None]
    hits = sum(known[at].tokens[i] > 0 for run, i in served for at in run.items)
    return Packed(tuple(runs), hits, misses)


@checked
def item_of(item: int | Mapping[str, int] | Item, plan: EncoderPlan) -> Item:
    """An item with a count of tokens and sequences for each path of `plan`, in its order.

    Raises:
        SpecError: negative counts, more sequences than tokens, or paths other than the plan's.
    """
    return _counts_of(item, plan)


def _counts_of(item: int | Mapping[str, int] | Item, plan: EncoderPlan) -> Item:
    """`item_of`, of one of many whose kinds are looked at together."""
    paths = tuple(plan.path_budgets)
    if isinstance(item, int) and not isinstance(item, bool):
        item = {DEFAULT_PATH: item}
    if isinstance(item, Mapping):
        if item.keys() != set(paths):
            raise SpecError(
                f"An item with tokens for {sorted(item)} does not suit a plan with the paths "
                f"{sorted(paths)}. Pass {{{', '.join(f'{path!r}: tokens' for path in paths)}}}."
            )
        item = Item(tuple(item[path] for path in paths))
    if not isinstance(item, Item):
        raise SpecError(
            f"{text.what_is('an item', item)}. Pass its tokens, a dict of them by path, or "
            "Item(tokens, frames, sequences)."
        )
    if not isinstance(item.tokens, Sequence) or not isinstance(item.sequences, Sequence):
        raise SpecError(f"{item}: tokens and sequences are a tuple each. Pass Item((64,)).")
    for n in (*item.tokens, item.frames, *item.sequences):
        if type(n) is not int and (isinstance(n, bool) or not isinstance(n, Integral)):
            raise SpecError(f"{item} counts {n!r}: pass whole numbers, Item((64,)).")
    if len(item.tokens) != len(paths) or min(item.tokens) < 0 or item.frames < 0:
        raise SpecError(f"{item} needs {len(paths)} token counts, none negative.")
    sequences = item.sequences or tuple(min(n, 1) for n in item.tokens)
    if len(sequences) != len(paths) or any(
        not min(n, 1) <= count <= n for n, count in zip(item.tokens, sequences)
    ):
        raise SpecError(
            f"{item} needs {len(paths)} counts of sequences, each with a token at least, or none. "
            "Pass sequences=() where an item is one sequence."
        )
    return item._replace(sequences=sequences)


def _defer(total: int, tokens: int, budgets: Budgets) -> bool:
    """Whether one path had rather run an item apart from the batch so far; all of it fits."""
    now, alone, both = (_fit(count, budgets) or 0 for count in (total, tokens, total + tokens))
    return now + alone < both and alone >= now


def _together(one: Item, other: Item) -> Item:
    """What two items bring in sum."""
    tokens = tuple(map(add, one.tokens, other.tokens))
    sequences = tuple(map(add, one.sequences, other.sequences))
    return Item(tokens, one.frames + other.frames, sequences)


def _runs(batch: Sequence[int], total: Item, plan: EncoderPlan) -> Iterable[Run]:
    """A batch's runs, of items that bring `total`."""
    for i, (path, budgets) in enumerate(plan.path_budgets.items()):
        if total.tokens[i]:
            fits = total.frames <= plan.max_frames
            fits &= total.sequences[i] <= plan.max_sequences.get(path, ANY)
            yield Run(path, tuple(batch), _fit(total.tokens[i], budgets) if fits else None)


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


@checked
def balance(sizes: Sequence[int], ranks: int) -> Balance:
    """Each item, largest first, goes to the least loaded rank; among equals to the first.

    Source: vLLM 0.33, `get_load_balance_assignment`.

    >>> balance([1000, 100, 200, 50], 2)
    Balance(order=(0, 2, 1, 3), counts=(1, 3), loads=(1000, 350))
    """
    if ranks < 1:
        raise SpecError(f"ranks={ranks}: at least one rank works. Pass ranks=1 or more.")
    if negative := [i for i, size in enumerate(sizes) if size < 0]:
        at = negative[0]
        raise SpecError(f"sizes[{at}]={sizes[at]}: tokens are not negative. Pass 0 or more.")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        rank = loads.index(min(loads))
        shares[rank].append(item)
        loads[rank] += sizes[item]
    order = tuple(item for share in shares for item in share)
    return Balance(order, tuple(map(len, shares)), tuple(loads))
