"""Agreement of ranks that must run alike, as a pure function of what each of them proposes.

Data-parallel ranks meet in collectives and so must pad alike; pipeline ranks see one batch but
may differ in what they captured. Each rank sends its `Proposal` (five small values), computes
`agree` on all of them, and takes its own `Decision`; nobody decides for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fngraph.core.dispatching import Allowed, dispatch
from fngraph.core.lookup import Dispatch
from fngraph.core.modes import RUNTIME_MODES, Mode
from fngraph.core.spec import NO_BOUNDS, BatchSpec
from fngraph.core.table import DispatchTable
from fngraph.core.text import expect
from fngraph.errors import ModesError


class Proposal(NamedTuple):
    """What one rank would do by itself.

    Attributes:
        mode: the runtime mode it would run.
        num_tokens, num_reqs, query_len: its batch.
        plan_hash: its dispatch table, by `plan_hash`; empty: not compared.
    """

    mode: Mode
    num_tokens: int
    num_reqs: int = 1
    query_len: int | None = None
    plan_hash: str = ""


class Decision(NamedTuple):
    """What one rank does.

    Attributes:
        mode: the strongest runtime mode that it may run; NONE: its own batch, unpadded.
        num_tokens, num_reqs, query_len: the batch that it dispatches on.
    """

    mode: Mode
    num_tokens: int
    num_reqs: int = 1
    query_len: int | None = None


def propose(table: DispatchTable, spec: BatchSpec, allowed: Allowed = None) -> Proposal:
    """What this rank would run for `spec`. Raises as `dispatch`."""
    mode = dispatch(table, spec, allowed).mode
    return Proposal(mode, spec.num_tokens, spec.num_reqs, spec.query_len, table.plan_hash)


def agree(proposals: Sequence[Proposal]) -> tuple[Decision, ...]:
    """One decision a rank, in the order of `proposals`.

    The weakest mode proposed holds for all. Where it is NONE, every rank runs its own batch;
    else all dispatch on the largest counts, and on the query length that they share, if any.

    Raises:
        ModesError: nobody proposes, or ranks planned different tables.
        SpecError: what is no proposal, or has counts that are no batch's.

    Source: the second of vLLM 0.33's two ways to agree over data-parallel ranks. Its first pads
    every rank to the largest padded batch: the same, with padded counts proposed.
    """
    expect(Sequence, "one Proposal a rank", proposals=proposals)
    for i, one in enumerate(proposals):
        expect(Proposal, "what fg.core.propose gives", **{f"proposals[{i}]": one})
        expect(Mode, "a Mode: fg.Mode.FULL", **{f"proposals[{i}].mode": one.mode})
        BatchSpec(one.num_tokens, one.num_reqs, one.query_len)  # or the rule that they break
    if not proposals:
        raise ModesError("No rank proposes anything. Pass one Proposal a rank.")
    plans = [proposal.plan_hash for proposal in proposals]
    if len(set(plans)) > 1:
        ranks = "; ".join(
            f"{plan or 'no hash'} on {[rank for rank, other in enumerate(plans) if other == plan]}"
            for plan in dict.fromkeys(plans)
        )
        raise ModesError(
            f"Ranks planned different dispatch tables: {ranks}. Build every rank's table from the "
            "same modes, sizes and limits."
        )
    mode = min((proposal.mode for proposal in proposals), key=lambda mode: mode.strength)
    if mode is Mode.NONE:
        return tuple(Decision(mode, p.num_tokens, p.num_reqs, p.query_len) for p in proposals)
    num_tokens = max(proposal.num_tokens for proposal in proposals)
    num_reqs = max(proposal.num_reqs for proposal in proposals)
    lengths = {proposal.query_len for proposal in proposals}
    query_len = lengths.pop() if len(lengths) == 1 else None
    return (Decision(mode, num_tokens, num_reqs, query_len),) * len(proposals)


def settle(table: DispatchTable, spec: BatchSpec, decision: Decision) -> Dispatch:
    """What this rank runs for `spec` under `decision`; the same key on every rank.

    Ranks differ in nothing but adapters then; a table without a `cost` pads those alike. Where
    the agreed batch has no key, every rank finds that out by itself and runs unpadded.
    """
    expect(DispatchTable, "step.table", table=table)
    expect(BatchSpec, "fg.BatchSpec(num_tokens=..., num_reqs=...), or batch.spec", spec=spec)
    expect(Decision, "what fg.core.agree gives", decision=decision)
    mode, num_tokens, num_reqs, query_len = decision
    if mode is Mode.NONE:
        return Dispatch(Mode.NONE, spec.descriptor(), "a rank runs NONE")
    joint = spec._replace(
        num_tokens=num_tokens, num_reqs=num_reqs, query_len=query_len, host=NO_BOUNDS
    )
    ran = dispatch(table, joint, RUNTIME_MODES[: mode.strength + 1])
    if ran.mode is Mode.NONE:
        return Dispatch(Mode.NONE, spec.descriptor(), f"over all ranks: {ran.reason}")
    return ran
