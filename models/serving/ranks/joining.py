"""Batches that meet others in collectives: what size all of them have, as a pure function of what
each brings.

Teams that meet must run alike: as many tokens, in NONE too, and a function with the same
collectives. So each lays its rows out in a batch of the same counts, filled up with padding, and
dispatch, which looks at nothing else, gives every team the same key.

| of any team's batch        | the others'                                                  |
|----------------------------|--------------------------------------------------------------|
| mixed                      | mixed                                                        |
| another `query_len`        | none verifies: drafts are left out                           |
| adapters, logits           | the function with them, for rows that want neither           |
| no shared prefix           | no cascade                                                   |
| nothing to do              | padding alone, as long as another one has something to do    |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import fngraph as fg


class Wish(NamedTuple):
    """What a team would run by itself, in whole numbers.

    Attributes:
        num_tokens, num_reqs: of its batch; 0: it has nothing to do.
        query_len: 0: mixed.
        adapters: at work.
        cascade, shaped: whether its rows share a prefix; whether logits are changed.
        bound: it will bring no more than this, whatever comes until then; see `promise`.
        gone: it is no longer there, and takes part in nothing more.
    """

    num_tokens: int = 0
    num_reqs: int = 0
    query_len: int = 0
    adapters: int = 0
    cascade: int = 0
    shaped: int = 0
    bound: int = 0
    gone: int = 0


NOTHING = Wish()


def wish_of(spec: fg.BatchSpec) -> Wish:
    """What is said of a batch."""
    return Wish(
        spec.num_tokens, spec.num_reqs, spec.query_len or 0, spec.adapters, int(spec.cascade),
        int(bool(spec.extra)),
    )  # fmt: skip


def promise(spec: fg.BatchSpec | None, going_on: bool) -> Wish:
    """What a team says of the next step while one runs: bound, where it will be no more than that.

    Args:
        spec: of the step that runs; None: this team has nothing to do in it.
        going_on: whether all its rows are next to draw one token each, nothing waits, and there are
            no drafts. Rows that end meanwhile, and what comes, change nothing.
    """
    if spec is None:
        return NOTHING._replace(bound=int(going_on))
    one = wish_of(spec)._replace(num_tokens=spec.num_reqs, query_len=1, cascade=0)
    return one._replace(bound=int(going_on))


def join(wishes: Sequence[Wish], extra: tuple[tuple[str, Any], ...]) -> fg.BatchSpec | None:
    """The counts of every team's batch; None where no team has anything to do.

    Args:
        extra: of a batch that is `shaped`.

    >>> join([Wish(2, 2, 1), Wish(), Wish(8, 2, 4)], ())
    BatchSpec(num_tokens=2, num_reqs=2, query_len=1)
    """
    live = [wish for wish in wishes if wish.num_tokens]
    if not live:
        return None
    lengths = {wish.query_len for wish in live}
    if len(lengths) > 1:  # without its drafts, a verify batch is a decode batch
        live = [w._replace(num_tokens=w.num_reqs, query_len=1) if w.query_len else w for w in live]
        lengths = {wish.query_len for wish in live}
    return fg.BatchSpec(
        max(wish.num_tokens for wish in live),
        max(wish.num_reqs for wish in live),
        query_len=lengths.pop() or None if len(lengths) == 1 else None,
        adapters=max(wish.adapters for wish in live),
        cascade=all(wish.cascade for wish in wishes),
        extra=extra if any(wish.shaped for wish in live) else (),
    )


def pad_leaves(batch: Any, num_tokens: int, num_reqs: int) -> dict[str, np.ndarray]:
    """What smaller counts have of a batch's leaves, by name, to be filled in place; the rest of
    them is filled with padding, as their fields say it.

    Args:
        batch: on the host; its own counts are larger.
        num_tokens, num_reqs: 0 where all of it is padding.
    """
    sizes, into = {"T": num_tokens, "R": num_reqs}, {}
    for name, buffer in fg.core.buffers_of(type(batch)).items():
        x = getattr(batch, name).numpy()
        x.fill(0 if buffer.pad == "stride" else buffer.pad)
        ends = [dim(**sizes) if dim.letters & sizes.keys() else None for dim in buffer.dims]
        own = into[name] = x[tuple(map(slice, ends))]
        if buffer.pad == "stride":  # query_start_loc
            more = np.arange(1, len(x) - len(own) + 1) * (batch.spec.query_len or 0)
            x[len(own) :] = num_tokens + more
    return into
