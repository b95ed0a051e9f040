"""The table arranged for the hot path: one dict lookup, one list index, one comparison a step.

A batch's *class* is all of its fields but the two counts. For every class and every token count
the lookup holds the keys that can still win, least first, as ready-made answers; all that is left
for a step is to compare the number of requests (and user-defined fields, where a table has any).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
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


Class = tuple[int | None, int | None, bool, bool, Extra]  # a spec's fields after the two counts
Kind = tuple[Mode, int | None, int, bool | None, bool | None]  # the same of a key, and its mode
Kinds = dict[Kind, list[BatchDescriptor]]  # largest first
Entry = tuple[
    tuple[int, Dispatch], ...
]  # (most requests, answer); least first, FULL before PIECEWISE
Order = Callable[[BatchDescriptor], tuple]

ANY = sys.maxsize
"""The bound of an answer that holds as many requests as its tokens can bring."""

CROWDED = "no key of its kind and size holds so many requests"

ENUMERATED_ADAPTERS = 64
"""Adapter counts up to here are classes of their own; larger ones are rounded first (1 us more)."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answers by class and token count.

    Attributes:
        top: the largest token count of any key.
        rung: token count -> index into a class's entries, for 0..top.
        classes: class, user-defined fields left out -> its entries, a rung each.
        quick: the same where the table has no user-defined fields; else empty, since an answer
            of `classes` must then be compared with the batch.
        reasons: class -> why a batch of it runs eagerly.
        query_lens: query lengths with keys of their own.
        adapters: the rounding of adapter counts.
        extra: user-defined fields.
    """

    top: int
    rung: list[int]
    classes: dict[Class, list[Entry]]
    quick: dict[Class, list[Entry]]
    reasons: dict[Class, str]
    query_lens: frozenset[int]
    adapters: RoundedTo
    extra: tuple[Field, ...]

    def classify(self, spec: BatchSpec) -> Class:
        """The class that answers for `spec`: values that no key tells apart fall together."""
        query_len = spec.query_len if spec.query_len in self.query_lens else None
        adapters = self.adapters.round(spec.adapters)
        return (query_len, adapters, bool(spec.cascade), bool(spec.encoder_outputs), ())


def build_lookup(
    full: Iterable[BatchDescriptor],
    piecewise: Iterable[BatchDescriptor],
    fields: Sequence[Field],
    order: Order,
) -> Lookup:
    """Arranges keys, given largest first, for `dispatch`."""
    kinds: Kinds = {}
    for mode, keys in ((Mode.FULL, full), (Mode.PIECEWISE, piecewise)):
        for key in keys:
            kinds.setdefault((mode, *key[2:6]), []).append(key)
    rungs = sorted({key.num_tokens for keys in kinds.values() for key in keys})
    rung: list[int] = []
    for i in range(len(rungs)):
        rung += [i] * (rungs[i] + 1 - len(rung))

    @cache  # many classes are served by the same keys
    def winners(fits: tuple[Kind, ...]) -> list[list[tuple[int, BatchDescriptor]]]:
        return _winners([key for kind in fits for key in kinds[kind]], rungs, order)

    @cache
    def answers(mode: Mode, fits: tuple[Kind, ...], reason: str) -> list[Entry]:
        new, of = tuple.__new__, Dispatch  # three times as fast as calling it; there are hundreds
        return [
            tuple([(most, new(of, (mode, key, reason))) for most, key in at])
            for at in winners(fits)
        ]

    @cache
    def entries(full: tuple[Kind, ...], piecewise: tuple[Kind, ...], why: str) -> list[Entry]:
        strong = answers(Mode.FULL, full, "least FULL key")
        weak = answers(Mode.PIECEWISE, piecewise, why)
        crowded = answers(Mode.PIECEWISE, piecewise, CROWDED)
        return [one + (two if one else three) for one, two, three in zip(strong, crowded, weak)]

    query_lens = sorted({kind[1] for kind in kinds if kind[1] is not None})
    rounding = fields[3].rule
    assert isinstance(rounding, RoundedTo)
    counts = range(min(rounding.captured[-1], ENUMERATED_ADAPTERS) + 1)
    same = {count: rounding.round(count) for count in (*counts, *rounding.captured)}
    classes: dict[Class, list[Entry]] = {}
    reasons: dict[Class, str] = {}
    for query_len, rounded, *flags in product(
        (None, *query_lens), {None, *same.values()}, (False, True), (False, True)
    ):
        batch = (query_len, rounded, *flags, ())
        full, full_gap = _fitting(Mode.FULL, kinds, fields, batch)
        piecewise, piecewise_gap = _fitting(Mode.PIECEWISE, kinds, fields, batch)
        classes[batch] = entries(full, piecewise, full_gap or "least PIECEWISE key")
        reasons[batch] = "; ".join(filter(None, (full_gap, piecewise_gap))) or "no key exists"
        for count in same:
            if same[count] == rounded:
                alias = (query_len, count, *flags, ())
                classes[alias], reasons[alias] = classes[batch], reasons[batch]
    quick = {} if len(fields) > 6 else classes
    top = rungs[-1] if rungs else 0
    lens = frozenset(query_lens)
    return Lookup(top, rung, classes, quick, reasons, lens, rounding, tuple(fields[6:]))


def _winners(
    keys: list[BatchDescriptor], rungs: list[int], order: Order
) -> list[list[tuple[int, BatchDescriptor]]]:
    """For each rung, the (most requests, key) pairs that can serve so many tokens, least first.

    A key is left out where another one of as many tokens or more, and as many requests or more,
    comes before it. What remains is one key a rung, or two where `max_reqs` bounds the first.
    """
    ranked: list[tuple[tuple, int, BatchDescriptor]] = []
    waiting = sorted(keys, key=lambda key: key.num_tokens)
    at: list[list[tuple[int, BatchDescriptor]]] = []
    for size in reversed(rungs):
        while waiting and waiting[-1].num_tokens == size:
            key = waiting.pop()
            new = (order(key), _most_reqs(key), key)
            if not any(_beats(old, new) for old in ranked):
                ranked = [old for old in ranked if not _beats(new, old)]
                ranked.append(new)
                ranked.sort(key=lambda item: item[0])
        at.append([(most, key) for _, most, key in ranked])
    at.reverse()
    return at


def _most_reqs(key: BatchDescriptor) -> int:
    """The most requests that `key` holds; ANY where its token count bounds them already."""
    if key.num_reqs is None or key.num_reqs * (key.query_len or 1) >= key.num_tokens:
        return ANY
    return key.num_reqs


def _beats(one: tuple, other: tuple) -> bool:
    """Whether `one` wins wherever `other` would."""
    return one[0] <= other[0] and one[1] >= other[1] and one[2].extra == other[2].extra


def _fitting(
    mode: Mode, kinds: Kinds, fields: Sequence[Field], batch: Class
) -> tuple[tuple[Kind, ...], str]:
    """The kinds of keys whose fields cover a class, and what limits them, in words.

    The words are empty where `mode` has no keys at all.
    """
    mine = [kind for kind in kinds if kind[0] is mode]
    if not mine:
        return (), ""
    _, _, query_len, _, cascade, encoder_outputs, *_ = fields
    _, adapters, *flags, _ = batch
    fits = [kind for kind in mine if kind[2] == adapters]
    if not fits:
        return (), f"no {mode} key is for so many adapters"
    for at, item, wanted in ((3, cascade, flags[0]), (4, encoder_outputs, flags[1])):
        fits = [kind for kind in fits if item.rule.covers(kind[at], wanted)]
        if not fits:
            return (), f"{mode} keys take no {item.name} batches"
    fits = [kind for kind in fits if query_len.rule.covers(kind[1], batch[0])]
    if not fits:
        lens = sorted({kind[1] for kind in mine if kind[1] is not None})
        return (), f"{mode} keys are for uniform batches of query_len {' or '.join(map(str, lens))}"
    top = max(kinds[kind][0].num_tokens for kind in fits)
    return tuple(fits), f"{mode} keys for such batches end at {top} tokens"
