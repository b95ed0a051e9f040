"""The table arranged for the hot path: one dict lookup, one list index, one comparison a step.

A batch's *class* is all of its fields but the two counts. For every class and every token count
the lookup holds the keys that can still win, least first, as ready-made answers; all that is left
for a step is to compare the number of requests (and user-defined fields, where a table has any).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

from fngraph.core.descriptor import BatchDescriptor, Extra
from fngraph.core.fields import Field, RoundedTo
from fngraph.core.modes import Mode
from fngraph.core.spec import BatchSpec


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
