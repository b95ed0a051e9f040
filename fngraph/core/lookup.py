"""The table arranged for the hot path: one dict lookup, one list index, one comparison a step.

A batch's *class* is all of its fields but the two counts. For every class and every token count
the lookup holds the keys that can still win, least first, as ready-made answers; all that is left
for a step is to compare the number of requests (and user-defined fields, where a table has any).
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fngraph.core.fields import Field, RoundedTo
from fngraph.core.modes import Mode
from fngraph.core.spec import BatchDescriptor, BatchSpec, Extra


class Dispatch(NamedTuple):
    """What one batch runs as.

    Attributes:
        mode: NONE, PIECEWISE or FULL.
        descriptor: the key; for NONE the batch's own counts, unpadded.
        reason: why this mode, or why nothing stronger. It depends on the kind of batch, not on
            its counts, so that reasons can be counted.
    """

    mode: Mode
    descriptor: BatchDescriptor
    reason: str


Answer = tuple[int, Dispatch]  # (most requests, what to run)
Entry = tuple[Answer, ...]  # least first, FULL before PIECEWISE
Class = tuple[int | None, int | None, bool, bool, Extra]

ANY = sys.maxsize
"""The bound of an answer that holds as many requests as its tokens can bring."""

ENUMERATED_ADAPTERS = 64
"""Adapter counts up to here have a class of their own; larger ones are rounded first (0.4 us)."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answers by class and token count.

    Attributes:
        top: the largest token count of any key.
        rung: token count -> index into a class's entries, for 0..top.
        rows: class -> its entries; empty where the table has user-defined fields, whose batches
            go through `scan` instead.
        scan: class without user-defined fields -> its entries.
        reasons: the same class -> why a batch of it runs eagerly.
        query_lens: query lengths with keys of their own.
        adapters: the rounding of adapter counts.
        extra: user-defined fields.
    """

    top: int
    rung: list[int]
    rows: dict[Class, list[Entry]]
    scan: dict[Class, list[Entry]]
    reasons: dict[Class, str]
    query_lens: frozenset[int | None]
    adapters: RoundedTo
    extra: tuple[Field, ...]

    def classify(self, spec: BatchSpec) -> Class:
        """The class that answers for `spec`: counts that no key tells apart fall together."""
        query_len = spec.query_len if spec.query_len in self.query_lens else None
        adapters = self.adapters.round(spec.adapters)
        return (query_len, adapters, bool(spec.cascade), bool(spec.encoder_outputs), ())


def build_lookup(
    full: Iterable[BatchDescriptor],
    piecewise: Iterable[BatchDescriptor],
    fields: tuple[Field, ...],
    order: Callable[[BatchDescriptor], tuple],
) -> Lookup:
    """Arranges keys, given largest first, for `dispatch`."""
    kinds: dict[tuple, list[BatchDescriptor]] = {}
    for mode, keys in ((Mode.FULL, full), (Mode.PIECEWISE, piecewise)):
        for key in keys:
            kinds.setdefault((mode, *key[2:6]), []).append(key)
    rungs = sorted({key.num_tokens for keys in kinds.values() for key in keys})
    rung: list[int] = []
    for i in range(len(rungs)):
        rung += [i] * (rungs[i] + 1 - len(rung))

    _, _, query, adapters, cascade, encoder, *extra = fields
    rounding = adapters.rule
    assert isinstance(rounding, RoundedTo)
    query_lens = sorted({kind[1] for kind in kinds if kind[1] is not None})
    counts = range(min(rounding.captured[-1], ENUMERATED_ADAPTERS) + 1)
    most = {*counts, *rounding.captured, None}
    scan: dict[Class, list[Entry]] = {}
    reasons: dict[Class, str] = {}
    made: dict[tuple, tuple[list[Entry], str]] = {}
    for count in most:
        rounded = None if count is None else rounding.round(count)
        for query_len in (None, *query_lens):
            for flags in _FLAGS:
                barred = flags != (False, False)
                which = (query_len, rounded, barred)
                if which not in made:
                    fits = [
                        kind
                        for kind in kinds
                        if kind[2] == rounded
                        and query.rule.covers(kind[1], query_len)
                        and cascade.rule.covers(kind[3], barred)
                        and encoder.rule.covers(kind[4], barred)
                    ]
                    made[which] = _row(kinds, fits, rungs, order, which)
                key = (query_len, count, *flags, ())
                scan[key], reasons[key] = made[which]
    return Lookup(
        rungs[-1] if rungs else 0,
        rung or [0],
        {} if extra else scan,
        scan,
        reasons,
        frozenset(query_lens),
        rounding,
        tuple(extra),
    )


_FLAGS = ((False, False), (False, True), (True, False), (True, True))


def _row(
    kinds: dict[tuple, list[BatchDescriptor]],
    fits: list[tuple],
    rungs: list[int],
    order: Callable[[BatchDescriptor], tuple],
    which: tuple[int | None, int | None, bool],
) -> tuple[list[Entry], str]:
    """One class's entries, a rung each, and why it runs eagerly where they are empty."""
    why = {mode: _gap(mode, kinds, fits, which) for mode in (Mode.FULL, Mode.PIECEWISE)}
    answers = {mode: _least(mode, kinds, fits, order, why) for mode in why}
    entries: list[Entry] = []
    full: Entry = ()
    piecewise: Entry = ()
    crowded: Entry = ()
    for size in reversed(rungs):
        full = answers[Mode.FULL].get(size, full)
        if size in answers[Mode.PIECEWISE]:
            piecewise = answers[Mode.PIECEWISE][size]
            crowded = tuple((most, hit._replace(reason=CROWDED)) for most, hit in piecewise)
        entries.append(full + (crowded if full else piecewise))
    entries.reverse()
    gaps = [gap for gap in why.values() if gap]
    return entries, "; ".join(gaps) or "the table has no keys"


CROWDED = "no key of its kind and size holds so many requests"


def _least(
    mode: Mode,
    kinds: dict[tuple, list[BatchDescriptor]],
    fits: list[tuple],
    order: Callable[[BatchDescriptor], tuple],
    why: dict[Mode, str],
) -> dict[int, Entry]:
    """Rung -> the keys of that many tokens or more that can still win, least first."""
    keys = [key for kind in fits if kind[0] is mode for key in kinds[kind]]
    if len(fits) > 1:
        keys.sort(key=lambda key: -key.num_tokens)
    reason = why[Mode.FULL] if mode is Mode.PIECEWISE and why[Mode.FULL] else f"least {mode} key"
    ranked: list[tuple] = []
    at: dict[int, Entry] = {}
    for key in keys:
        most = _most_reqs(key)
        rank = (order(key), most, key.extra, (most, Dispatch(mode, key, reason)))
        if not any(_beats(other, rank) for other in ranked):
            ranked = [other for other in ranked if not _beats(rank, other)]
            insort(ranked, rank, key=lambda item: item[0])
        at[key.num_tokens] = tuple(item[3] for item in ranked)
    return at


def _most_reqs(key: BatchDescriptor) -> int:
    """The most requests that `key` holds; ANY where its token count bounds them already."""
    if key.num_reqs is None or key.num_reqs * (key.query_len or 1) >= key.num_tokens:
        return ANY
    return key.num_reqs


def _beats(one: tuple, other: tuple) -> bool:
    """Whether `one` wins wherever `other` would."""
    return one[0] <= other[0] and one[1] >= other[1] and one[2] == other[2]


def _gap(
    mode: Mode,
    kinds: dict[tuple, list[BatchDescriptor]],
    fits: list[tuple],
    which: tuple[int | None, int | None, bool],
) -> str:
    """Why `mode` may not serve a class, in words; empty where `mode` has no keys at all."""
    _, adapters, barred = which
    mine = [kind for kind in kinds if kind[0] is mode]
    if not mine:
        return ""
    if top := max((kinds[kind][0].num_tokens for kind in fits if kind[0] is mode), default=0):
        return f"{mode} keys for such batches end at {top} tokens"
    if all(kind[2] != adapters for kind in mine):
        return f"no {mode} key is for so many adapters"
    if barred and all(kind[3] is not None for kind in mine):
        return f"{mode} keys take no cascade attention and no encoder outputs"
    lengths = sorted({kind[1] for kind in mine if kind[1] is not None})
    return f"{mode} keys are for uniform batches of query_len {' or '.join(map(str, lengths))}"
