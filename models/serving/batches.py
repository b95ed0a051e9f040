"""The serving batch: which fields a step is told, as data, and how rows are laid out in them.

Shape letters: T tokens of the step, R requests of the step, B blocks per request, Q tokens that a
request draws at most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import fngraph as fg
from fngraph.models.serving.grammars import words_for
from fngraph.models.serving.logits import LOGITS, fill
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.ranks.joining import pad_leaves
from fngraph.models.serving.requests import Request, Row, left_of
from fngraph.models.serving.sampling import Settings

HARMLESS = Request(-1, (0,), 1)  # asks for nothing, as a row does whose request will fail
DIRECT = set(Settings._fields) - {"seed", "logit_bias"}  # settings that are leaves as they are
Fields = dict[str, "partial[Any]"]  # by name, what declares it

COUNTS = slice(-1)  # of a spec, all but its host bounds
SHAPED = (("logits", True),)  # of a batch in which a request wants more than a draw
MANY = (("many", True),)  # of one whose requests draw several tokens, one after the other
STOPS = 8  # of a request while it does so: tokens that stop it, and FAILED in one place at least

PAGED: Fields = {
    "token_ids": partial(fg.buffer, "T", "int64", pad=0),
    "positions": partial(fg.buffer, "T", "int64", pad=0),
    "slot_mapping": partial(fg.buffer, "T", "int64", pad=-1),  # -1: write nowhere
    "seq_lens": partial(fg.buffer, "R", "int32", pad=0),  # this step's tokens included
    "query_start_loc": partial(fg.buffer, "R + 1", "int32", pad="stride"),
    "block_tables": partial(fg.buffer, "R B", "int32", pad=0),
    "logits_indices": partial(fg.buffer, "R Q", "int64", pad=0, min=0),  # of the T rows, the head's
}
MORE: dict[str, Fields] = {  # by what a step may need beside these
    "states": {"state_slots": partial(fg.buffer, "R", "int64", pad=-1)},
    "cascade": {"prefix_len": partial(fg.buffer, "1", "int32", pad=0)},
    "adapters": {"adapter_ids": partial(fg.buffer, "T", "int64", pad=-1)},
    "sampling": {
        "keys": partial(fg.buffer, "R", "int64", pad=0),
        "temperature": partial(fg.buffer, "R", "float32", pad=0),
        "top_k": partial(fg.buffer, "R", "int32", pad=0),
        "top_p": partial(fg.buffer, "R", "float32", pad=1),
        "min_p": partial(fg.buffer, "R", "float32", pad=0),
    },
    "logits": LOGITS,
    "many": {
        "left": partial(fg.buffer, "R", "int32", pad=0),  # tokens that it may draw
        "stop_ids": partial(fg.buffer, "R S", "int64", pad=-1),
    },
    "lookup": {"text": LOGITS["text"]},
    **{  # what an earlier stage has made of the tokens
        f"hidden {dtype}": {"hidden": partial(fg.buffer, "T E", dtype, pad=0)}
        for dtype in ("float32", "bfloat16", "float16")
    },
}


@functools.cache
def batch_type(*more: str) -> type:
    """The struct of a batch with the fields of PAGED, of MORE by these names, and a spec.

    Of "many" each request has one token, so that what others have for each token has R, not T; or,
    with "lookup", Q of them.
    """
    fields = dict(PAGED)
    for name in more:
        fields |= MORE[name]
    if "many" in more:
        alike = {"T": "R Q"} if "lookup" in more else {"T": "R", "R Q": "R"}
        fields = {
            name: partial(fg.buffer, alike.get(dims := x.args[0], dims), *x.args[1:], **x.keywords)
            for name, x in fields.items()
        }
    members: dict[str, Any] = {name: declare() for name, declare in fields.items()}
    hints = dict.fromkeys(fields, torch.Tensor) | {"spec": fg.BatchSpec}
    members |= {
        "spec": fg.host(),
        "__annotations__": hints,
        "__doc__": "One step's rows, end to end.",
    }
    return fg.struct(type("Batch", (), members))


def limits_of(policy: Policy, vocab_size: int | None, width: int | None = None) -> fg.Limits:
    """The limits of steps, with the sizes of what `logits` stages where the vocabulary is known,
    and of hidden states where they come from an earlier stage."""
    limits, sizes = policy.limits, {"S": STOPS} if policy.decode_many > 1 else {}
    if vocab_size is not None:
        sizes |= {"K": policy.max_bias, "W": words_for(vocab_size)}
    if vocab_size is not None or (policy.decode_many > 1 and max(policy.query_lens) > 1):
        sizes["L"] = policy.max_blocks * policy.block_size
    if width is not None:
        sizes["E"] = width
    if not sizes:
        return limits
    return fg.Limits(limits.max_tokens, limits.max_reqs, **limits.dims, **sizes)


def empty_batch(
    kind: type, policy: Policy, spec: fg.BatchSpec, vocab_size: int | None = None
) -> Any:
    """A batch of zeros, as `step.host_batch` hands one out, for a bare `forward`."""
    sizes = {**limits_of(policy, vocab_size).dims, "T": spec.num_tokens, "R": spec.num_reqs}
    leaves = {
        name: torch.zeros(buffer.shape(sizes), dtype=getattr(torch, buffer.dtype))
        for name, buffer in fg.core.buffers_of(kind).items()
    }
    return kind(**leaves, spec=spec)


def lay_out(
    rows: Sequence[Row], policy: Policy, host_batch: Callable[[fg.BatchSpec], Any],
    faults: Collection[int] = (), allowed: Mapping[int, np.ndarray] | None = None,
    joint: fg.BatchSpec | None = None, turns: int = 1,
) -> Any:  # fmt: skip
    """The batch in which each job computes its next `new` tokens, and its drafts.

    Args:
        host_batch: hands out the batch of a spec; each of its leaves is filled, in place.
        faults: numbers of requests that are not to be run: their rows have token 0 throughout, no
            adapter, and are greedy.
        allowed: masks of those that have a grammar, see `grammars.ask`.
        joint: the counts of the batch, filled up with padding; None: just those of its rows. See
            `fngraph.models.serving.ranks.joining`.
        turns: tokens that each row may draw, one after the other; of more than one it says so.
    """
    jobs = [row.job for row in rows]
    asked = [HARMLESS if faults and job.id in faults else job.request for job in jobs]
    computed = np.array([job.computed for job in jobs])
    counts = np.array([row.new + len(row.drafts) for row in rows])
    alone = joint is not None and not joint.cascade
    shared = 0 if alone else prefix_blocks(rows, policy) * policy.block_size
    left = [min(turns, left_of(job)) for job in jobs]
    spec = spec_of(rows, asked, counts, computed + counts, shared > 0, left if turns > 1 else ())
    if joint is None or joint[COUNTS] == spec[COUNTS]:
        batch = host_batch(spec)
        into = {name: x.numpy() for name, x in vars(batch).items() if name != "spec"}
    else:
        batch = host_batch(joint._replace(host=widened(spec.host, joint)))
        into = pad_leaves(batch, spec.num_tokens, len(rows))

    ends = counts.cumsum()
    first = ends - counts
    row_T = np.repeat(np.arange(len(rows)), counts)
    ids_T, position_T, slot_T = (  # (R, Q) where drafts are looked up
        into[name].reshape(-1) for name in ("token_ids", "positions", "slot_mapping")
    )
    np.add(np.arange(ends[-1]), (computed - first)[row_T], out=position_T)
    at = 0
    for job, new, drafts in rows:
        stop = at + new
        refused = faults and job.id in faults
        ids_T[at:stop] = 0 if refused else job.tokens.view(job.computed, job.computed + new)
        at = stop + len(drafts)
        if drafts:
            ids_T[stop:at] = drafts
    tables = into["block_tables"]
    tables.fill(0)
    for table, job in zip(tables, jobs):
        table[: len(job.blocks)] = job.blocks.view()
    block_T, offset_T = np.divmod(position_T, policy.block_size)
    slot_T[:] = tables[row_T, block_T].astype(np.int64) * policy.block_size + offset_T
    into["seq_lens"][:] = computed + counts
    into["query_start_loc"][0], into["query_start_loc"][1:] = 0, ends
    drawn = 1 + len(rows[0].drafts)  # of each row; places beyond them repeat the last
    places_RQ = into["logits_indices"].reshape(len(rows), -1)  # (R,) where Q is 1 for good
    wide = places_RQ.shape[1]
    places_RQ[:] = (ends - drawn)[:, None] + np.arange(wide).clip(max=drawn - 1)
    fill_more(jobs, asked, counts, shared, into)
    if "allowed" in into:
        fill(rows, asked, allowed or {}, into)
    elif "text" in into:
        for own, job, request in zip(into["text"], jobs, asked):
            own.fill(0)
            if request is not HARMLESS:
                own[: len(job.tokens)] = job.tokens.view()
    if "left" in into:
        into["left"][:] = left
        into["stop_ids"].fill(-1)
        for own, request in zip(into["stop_ids"], asked):
            tokens = [run[0] for run in request.stop if len(run) == 1][: STOPS - 1]
            own[: len(tokens)] = tokens
    return batch


def fill_more(
    jobs: Sequence[Any], asked: Sequence[Request], counts: np.ndarray, shared: int,
    into: dict[str, Any],
) -> None:  # fmt: skip
    """The fields of MORE, of those that the batch has."""
    if "state_slots" in into:
        into["state_slots"][:] = [job.slot for job in jobs]
    if "prefix_len" in into:
        into["prefix_len"][:] = shared
    if "adapter_ids" in into:
        adapters = np.repeat([request.adapter for request in asked], counts)
        into["adapter_ids"].reshape(-1)[:] = adapters
    if "keys" in into:
        into["keys"][:] = [request.key for request in asked]
    for name in DIRECT & into.keys():
        into[name][:] = [getattr(request.settings, name) for request in asked]


def widened(host: fg.HostBounds, joint: fg.BatchSpec) -> fg.HostBounds:
    """Bounds under which the requests of a batch may bring the joint one's tokens too."""
    least = -(-joint.num_tokens // joint.num_reqs)
    return fg.HostBounds(*(None if most is None else max(most, least) for most in host))


def padding(joint: fg.BatchSpec, host_batch: Callable[[fg.BatchSpec], Any]) -> Any:
    """A batch of nothing but padding."""
    batch = host_batch(joint._replace(host=widened(fg.HostBounds(0, 0), joint)))
    pad_leaves(batch, 0, 0)  # offsets begin with 0
    return batch


def own_spec(rows: Sequence[Row], policy: Policy, faults: Collection[int] = ()) -> fg.BatchSpec:
    """What `lay_out` would say of these rows by themselves."""
    asked = [HARMLESS if row.job.id in faults else row.job.request for row in rows]
    counts = np.array([row.new + len(row.drafts) for row in rows])
    ends = counts + np.array([row.job.computed for row in rows])
    return spec_of(rows, asked, counts, ends, prefix_blocks(rows, policy) > 0)


def spec_of(
    rows: Sequence[Row], asked: Sequence[Request], counts: np.ndarray, ends: np.ndarray,
    cascade: bool, left: Sequence[int] = (),
) -> fg.BatchSpec:  # fmt: skip
    """What dispatch looks at.

    Args:
        left: tokens that each row may draw, one after the other; (): one.
    """
    last = ends + np.array(left) - 1 if left else ends
    more = SHAPED if any([request.shaped for request in asked]) else ()
    uniform = all(row.job.decoding for row in rows)
    return fg.BatchSpec(
        int(counts.sum()),
        len(rows),
        query_len=int(counts[0]) if uniform else None,
        adapters=len({request.adapter for request in asked} - {-1}),
        cascade=cascade,
        extra=more + MANY * bool(left),
        host=fg.HostBounds(int(counts.max()), int(last.max())),
    )


def prefix_blocks(rows: Sequence[Row], policy: Policy) -> int:
    """Leading blocks that all rows share, where they make a cascade batch; else 0.

    A block that two requests share has the same blocks before it in both.
    """
    least = -(-policy.cascade // policy.block_size)
    if not least or len(rows) < max(2, policy.cascade_reqs):
        return 0
    shortest = min(len(row.job.blocks) for row in rows)
    if shortest < least:
        return 0
    tables = np.stack([row.job.blocks.view(least - 1, shortest) for row in rows])
    same = int((tables == tables[0]).all(0).cumprod().sum())
    return least - 1 + same if same else 0
