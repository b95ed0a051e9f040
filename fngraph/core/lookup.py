"""The table arranged for the hot path: one dict lookup, one list index, one comparison a step.

A batch's *class* is all of its fields but the two counts. For every class and every token count
the lookup holds the keys that can still win, least first, as ready-made answers; all that is left
for a step is to compare the number of requests (and user-defined fields, where a table has any).

`arrange`: from keys to a `Lookup`. Everything that `dispatch` need not do at each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

from fngraph.core.fields import Field, RoundedTo, user_defined
from fngraph.core.modes import Mode
from fngraph.core.spec import BatchDescriptor, BatchSpec, Extra

Key = tuple[Mode, BatchDescriptor]
"""What is captured, and what a step replays: a descriptor in one runtime mode."""


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

    @property
    def key(self) -> Key:
        """Mode and descriptor."""
        return self.mode, self.descriptor


Class = tuple[int | None, int | None, bool, bool, Extra]
"""A batch's fields after its two counts."""

Entry = tuple[tuple[int, Dispatch], ...]
"""(most requests, answer) pairs that can serve a class at one rung: least first, FULL first."""

ANY = sys.maxsize
"""The bound of an answer that holds as many requests as its tokens can bring."""

CROWDED = "no key of its kind and size holds so many requests"


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
    query_lens: frozenset[int | None]
    adapters: RoundedTo
    extra: tuple[Field, ...]

    def classify(self, spec: BatchSpec) -> Class:
        """The class that answers for `spec`: values that no key tells apart fall together."""
        _, _, query_len, count, cascade, encoder_outputs, _, _ = spec
        known = query_len if query_len in self.query_lens else None
        return (known, self.adapters.round(count), cascade, encoder_outputs, ())


Order = Callable[[BatchDescriptor], tuple]
Kind = tuple[Mode, int | None, int, bool | None, bool | None]  # a key's class, and its mode
Kinds = dict[Kind, list[BatchDescriptor]]

ENUMERATED_ADAPTERS = 64
"""Adapter counts up to here are classes of their own; larger ones are rounded first (1 us more)."""


def arrange(
    full: Iterable[BatchDescriptor],
    piecewise: Iterable[BatchDescriptor],
    fields: Sequence[Field],
    order: Order,
) -> Lookup:
    """For every class and rung, the keys that can win, least first by `order`.

    Args:
        full, piecewise: the keys of each mode.
        fields: the built-in fields, then user-defined ones.
    """
    kinds: Kinds = {}
    for mode, keys in ((Mode.FULL, full), (Mode.PIECEWISE, piecewise)):
        for key in keys:
            _, _, query_len, adapters, cascade, encoder, _ = key
            kinds.setdefault((mode, query_len, adapters, cascade, encoder), []).append(key)
    rungs = sorted({key.num_tokens for keys in kinds.values() for key in keys})
    rung: list[int] = []
    for i in range(len(rungs)):
        rung += [i] * (rungs[i] + 1 - len(rung))

    @cache  # these three: many classes are served by the same keys
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
    def entries(batch: Class) -> tuple[list[Entry], str]:
        strong, full_gap = _fitting(Mode.FULL, kinds, fields, batch)
        weak, piecewise_gap = _fitting(Mode.PIECEWISE, kinds, fields, batch)
        rows = zip(
            answers(Mode.FULL, strong, "least FULL key"),
            answers(Mode.PIECEWISE, weak, full_gap or "least PIECEWISE key"),
            answers(Mode.PIECEWISE, weak, CROWDED),
        )
        found = [one + (crowded if one else other) for one, other, crowded in rows]
        return found, "; ".join(filter(None, (full_gap, piecewise_gap))) or "no key exists"

    query_lens = {kind[1] for kind in kinds}
    rounding = fields[3].rule
    assert isinstance(rounding, RoundedTo)
    counted = range(min(rounding.captured[-1], ENUMERATED_ADAPTERS) + 1)
    classes: dict[Class, list[Entry]] = {}
    reasons: dict[Class, str] = {}
    for query_len, count, cascade, encoder in product(
        {None, *query_lens}, {None, *counted, *rounding.captured}, (False, True), (False, True)
    ):
        rounded = None if count is None else rounding.round(count)
        batch = (query_len, count, cascade, encoder, ())
        classes[batch], reasons[batch] = entries((query_len, rounded, cascade, encoder, ()))
    extra = user_defined(fields)
    top = rungs[-1] if rungs else 0
    quick = {} if extra else classes
    return Lookup(top, rung, classes, quick, reasons, frozenset(query_lens), rounding, extra)


def _winners(
    keys: list[BatchDescriptor], rungs: list[int], order: Order
) -> list[list[tuple[int, BatchDescriptor]]]:
    """For each rung, the (most requests, key) pairs that can serve so many tokens, least first.

    A key is left out where another one of as many tokens or more, and as many requests or more,
    comes before it. What remains is one key a rung, or two where `max_reqs` bounds the first.
    """
    ranked: list[tuple[tuple, int, BatchDescriptor]] = []
    of_size: dict[int, list[BatchDescriptor]] = {}
    for key in keys:
        of_size.setdefault(key.num_tokens, []).append(key)
    at: list[list[tuple[int, BatchDescriptor]]] = []
    for size in reversed(rungs):
        for key in of_size.get(size, ()):
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
    query_len, adapters, cascade, encoder, _ = batch
    fits = [kind for kind in mine if kind[2] == adapters]
    if not fits:
        return (), f"no {mode} key is for that many adapters"
    for at, wanted in ((3, cascade), (4, encoder)):
        field = fields[at + 1]
        fits = [kind for kind in fits if field.rule.covers(kind[at], wanted)]
        if not fits:
            return (), f"{mode} keys take no {field.name} batches"
    fits = [kind for kind in fits if fields[2].rule.covers(kind[1], query_len)]
    if not fits:
        lens = sorted({kind[1] for kind in mine if kind[1] is not None})
        return (), f"{mode} keys are for uniform batches of query_len {' or '.join(map(str, lens))}"
    top = max(key.num_tokens for kind in fits for key in kinds[kind])
    return tuple(fits), f"{mode} keys for such batches end at {top} tokens"
