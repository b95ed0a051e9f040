"""Which function serves a batch: what only some batches need is not paid for by the others.

Adapters cost two products a projection. A verify batch draws at each place of a draft, the others
once a request. Cascade attention is never part of a graph, so that its batches run PIECEWISE where
there is that.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import fngraph as fg
from models.ability import check_names
from models.policy import Policy


class Case(NamedTuple):
    """Which function serves a batch."""

    cascade: bool = False
    adapted: bool = False
    verify: bool = False

    @property
    def text(self) -> str:
        """In words."""
        named = zip(("cascade", "adapters", "verify"), self)
        return " ".join(name for name, has in named if has) or "plain"

    def modes(self, asked: str) -> str:
        """Of its function; verify batches are uniform, so mixed ones need no keys of theirs."""
        if self.cascade:
            return "PIECEWISE" if asked in ("PIECEWISE", "FULL_AND_PIECEWISE") else "NONE"
        mixed = asked in ("FULL", "FULL_AND_PIECEWISE")
        return "FULL_DECODE_ONLY" if self.verify and mixed else asked

    def policy(self, whole: Policy) -> Policy:
        """Of its batches: only those with drafts draw more than one token a request."""
        return whole if self.verify else dataclasses.replace(whole, query_lens=(1,))


PLAIN, ADAPTED = Case(), Case(adapted=True)


def case_of(spec: fg.BatchSpec) -> Case:
    """The case of a batch."""
    return Case(spec.cascade, spec.adapters > 0, (spec.query_len or 1) > 1)


def cases(policy: Policy, adapters: Any, more: tuple[str, ...]) -> dict[Case, tuple[str, ...]]:
    """Every case that can come, with the names of what its batches have beside the paged fields."""
    check_names(more, policy)
    either = (False, True)
    return {
        Case(cascade, adapted, verify): ("cascade",) * cascade + ("adapters",) * adapted + more
        for cascade in either[: 1 + bool(policy.cascade)]
        for adapted in either[: 1 + (adapters is not None)]
        for verify in either[: 1 + (max(policy.query_lens) > 1)]
    }
