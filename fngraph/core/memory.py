"""What keys cost in device memory, as a value that prints: estimated, measured, last used.

A key costs its share of the pool, where its intermediates live (the pool is shared, and as large
as its largest key needs), and its graphs' own memory, which comes back when the key is released.
Pool memory comes back only when the pool has no graph left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fngraph.core.modes import Mode
from fngraph.core.spec import BatchDescriptor
from fngraph.core.text import html, table

GRAPH_BYTES = 208 << 10
"""What a graph takes beside its nodes. Source: an H200 with torch 2.11 and CUDA 13.0, where
867 graphs of six nodes, of a 16-layer Llama, took 200 MB more than 51 of the same kernels."""

NODE_BYTES = 3 << 10
"""What a node takes. Source: there too, the first 61 FULL graphs of `python -m benchmarks capture`,
of 1760 nodes each, took 298 MB."""

ALIGN = 512
"""Every tensor takes a multiple of this. Source: torch's CUDA caching allocator."""


class Bytes(NamedTuple):
    """Memory of one key.

    Attributes:
        pool: bytes of its intermediates; measured: by how much the pool grew for it.
        graph: bytes of its graphs. CUDA takes memory in chunks of MBs, so that of measured keys
            one may show a chunk and the next ones nothing; their sum is right. It does not tell
            processes apart: what is far beyond the estimate is taken for another's.
    """

    pool: int
    graph: int


class KeyMemory(NamedTuple):
    """One line of the table.

    Attributes:
        measured: None while it is not captured.
        last_used: the step's call that used it last, from 1, those without graphs counted too; 0:
            none has; None: it is not captured.
    """

    mode: Mode
    key: BatchDescriptor
    estimated: Bytes
    measured: Bytes | None = None
    last_used: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Memory of the keys of a step, in capture order.

    Attributes:
        pool: bytes that the pool has grown to; it keeps them when a key is released.
        budget: what pool and graphs may take together; None: anything.
    """

    rows: Sequence[KeyMemory]
    pool: int = 0
    budget: int | None = None

    @property
    def total(self) -> int:
        """Measured bytes: the pool, and the graphs of what is captured."""
        return self.pool + sum(row.measured.graph for row in self.rows if row.measured)

    @property
    def estimated(self) -> int:
        """Bytes with every key captured: the largest key's intermediates, and all graphs."""
        largest = max((row.estimated.pool for row in self.rows), default=0)
        return largest + sum(row.estimated.graph for row in self.rows)

    def _repr_html_(self) -> str:
        return html(self.as_text())

    def as_text(self) -> str:
        """One line a key, in MB, then the totals."""
        cells = [
            (r.mode, r.key, _mb(r.estimated.pool), _mb(r.estimated.graph),
             *(("", "") if r.measured is None else map(_mb, r.measured)),
             "" if r.last_used is None else r.last_used or "never")
            for r in self.rows
        ]  # fmt: skip
        header = ("mode", "key", "est. pool MB", "est. graph MB", "pool MB", "graph MB",
                  "last used, step")  # fmt: skip
        return f"{table(header, cells)}\n\n{self!r}"

    def __repr__(self) -> str:
        captured = sum(row.measured is not None for row in self.rows)
        budget = "" if self.budget is None else f", budget {_mb(self.budget)} MB"
        return (
            f"MemoryTable({captured} of {len(self.rows)} keys: {_mb(self.total)} MB, of which the "
            f"pool {_mb(self.pool)} MB; all keys, estimated: {_mb(self.estimated)} MB{budget})"
        )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f}"
