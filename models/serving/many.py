"""Several tokens a request from one launch: when the loop asks for them, and what is taken ahead.

With `Policy(decode_many=8)` a step whose rows are all past their prompts may draw up to 8 tokens
for each, one after the other, without the host (`fngraph.models.serving.turns`). Nothing else
changes: blocks are taken for as many tokens as may come, what is drawn is cut to what single steps
would have given, and who was cancelled or has come meanwhile is looked at after the launch.

Such a launch is one that nobody waits for, and in which nobody needs the host between two tokens;
`why_single` says what is in the way. Where the step that was planned has drafts, so has each turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fngraph.models.serving import blocks
from fngraph.models.serving.batches import prefix_blocks
from fngraph.models.serving.blocks import blocks_for
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.requests import Job, Row, State, left_of


def take_ahead(state: State, policy: Policy, drafts: int | None = None) -> State:
    """The state whose step draws as many tokens a row as it may, with blocks for them; or one, and
    why.

    Args:
        state: as `plan` gives it.
        drafts: that each turn of such steps has where there are any; None: the policy's.
    """
    if policy.decode_many == 1:
        return state
    if reason := why_single(state, policy):
        return dataclasses.replace(state, single=reason)
    jobs = [row.job for row in state.rows]
    turns = most = min(policy.decode_many, max(map(left_of, jobs)))
    size, free, more, lacks = policy.block_size, len(state.pool.free), 0, [0]
    if state.rows[0].drafts:
        more = max(policy.query_lens) - 1 if drafts is None else drafts
        if (1 + more) * len(jobs) > policy.max_tokens:
            why = f"{len(jobs)} rows with {more} drafts each are more tokens than a step has"
            return dataclasses.replace(state, single=why)
    while turns > 1 and (
        sum(lacks := lacking(jobs, turns, size, more)) > free
        or max(len(job.blocks) + n for job, n in zip(jobs, lacks)) > policy.max_blocks
    ):
        turns -= 1
    if turns == 1:
        full = "no block is free for more" if sum(lacks) > free else "a table has no place for more"
        why = full if most > 1 else "each request lacks one token"
        return dataclasses.replace(state, single=why)
    pool, new = blocks.take(state.pool, sum(lacks)) if any(lacks) else (state.pool, [])
    grown: dict[int, Job] = {}
    for job, count in zip(jobs, lacks):
        grown[job.id] = job._replace(blocks=job.blocks.append(new[:count])) if count else job
        new = new[count:]
    rows = tuple(
        Row(grown[job.id], new, (*guess, *[job.tokens.last] * more)[:more])
        for job, new, guess in state.rows
    )
    running = tuple(grown.get(job.id, job) for job in state.running)
    return dataclasses.replace(state, rows=rows, running=running, pool=pool, turns=turns)


def why_single(state: State, policy: Policy) -> str:
    """Why the step that was planned may draw only one token a request; "": it may draw more."""
    rows = state.rows
    if state.waiting:
        return f"{len(state.waiting)} wait"
    if not all(row.job.decoding for row in rows):
        return "a prompt is being computed"
    if len(rows) < len(state.running):
        return "more requests run than a step has tokens"
    if any(row.job.request.shaped for row in rows):
        return "a request changes its logits, or has them reported"
    if prefix_blocks(rows, policy):
        return "all share a beginning, which cascade attention reads once"
    return ""


def lacking(jobs: Sequence[Job], turns: int, size: int, drafts: int = 0) -> list[int]:
    """Blocks that each needs beyond its own, to write what so many turns compute, drafts too."""
    ends = (len(job.tokens) + min(turns, left_of(job)) - 1 + drafts for job in jobs)
    return [max(0, blocks_for(end, size) - len(job.blocks)) for end, job in zip(ends, jobs)]
