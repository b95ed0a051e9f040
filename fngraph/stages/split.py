"""`Split`: the pieces between primitives."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fngraph.core import Limits
from fngraph.core.program import Program
from fngraph.core.text import count
from fngraph.fx.pieces.cuts import Cut, Piece, Pieces
from fngraph.stages.lowered import Lowered, lower

if TYPE_CHECKING:
    from fngraph.stages.traced import Traced


@dataclasses.dataclass(frozen=True)
class Split:
    """Pieces of traced ops, with a primitive between one and the next."""

    traced: Traced
    pieces: Pieces

    @property
    def program(self) -> Program:
        """The steps as data."""
        return self.pieces.program

    @property
    def distinct(self) -> list[Piece]:
        """Each distinct piece once; it is compiled once."""
        return list(dict.fromkeys(p for p in self.pieces.parts if isinstance(p, Piece)))

    @property
    def cuts(self) -> list[Cut]:
        """Calls of primitives, in order."""
        return [p for p in self.pieces.parts if isinstance(p, Cut)]

    def lower(self, limits: Limits | None = None) -> Lowered:
        """Choose backends, resolve modes, lay out the dispatch table and the static buffers.

        Raises:
            BackendError: a backend that is unknown or does not support the configuration.
            ModesError: modes that the backends cannot serve.
            SizesError: capture sizes beyond the limits.
        """
        return lower(self, limits or self.traced.limits)

    def as_text(self) -> str:
        """One line a step, with the leaves that it reads by name; equal kinds are one piece."""
        leaves = [leaf.path for leaf in self.traced.args.leaves] + list(self.traced.constants)
        return self.program.as_text(dict(enumerate(leaves)))

    def __repr__(self) -> str:
        return (
            f"Split({count(len(self.program.instructions), 'step')}: {count(len(self.cuts), 'cut')}, "
            f"{count(len(self.distinct), 'distinct piece')})"
        )
