"""Items over ranks: each rank runs its share, and every rank gets the rows of all items.

Every rank is passed the same items and measures all of them, so that who runs what, and how long
each rank's rows are, is known everywhere without a message. The one message is an `all_gather` a
path and leaf, of rows padded to those of the rank that has the most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fngraph.core import EncoderPlan, Item, trees
from fngraph.encoder.run import Steps, share_of
from fngraph.step.step import Step

Rows = Mapping[int, Mapping[str, Any]]


def shares_of(counts: Sequence[Item], ranks: int) -> list[tuple[int, ...]]:
    """Which items each rank runs, ascending: about as many tokens on each."""
    totals = [sum(count.tokens) for count in counts]
    return [share_of(totals, rank, ranks) for rank in range(ranks)]


def gather(
    rows: Rows,
    counts: Sequence[Item],
    shares: Sequence[Sequence[int]],
    plan: EncoderPlan,
    steps: Steps,
    group: dist.ProcessGroup,
) -> dict[int, dict[str, Any]]:
    """The rows of all items, by item and path, of which this rank has its share's.

    Every rank must call it with the same items.
    """
    gathered: dict[int, dict[str, Any]] = {at: {} for at in range(len(counts))}
    own = shares[dist.get_rank(group)]
    for place, path in enumerate(plan.path_budgets):
        brought = [[at for at in share if counts[at].tokens[place]] for share in shares]
        totals = [sum(counts[at].tokens[place] for at in share) for share in brought]
        if not any(totals):
            continue
        leaves, treedef = no_rows(steps[path])
        mine = [rows[at][path] for at in own if path in rows[at]]
        flat = [trees.flatten(tree)[0] for tree in mine]
        parts = [
            _all_gather(torch.cat([leaf, *(found[i] for found in flat)]), max(totals), group)
            for i, leaf in enumerate(leaves)
        ]
        for rank, share in enumerate(brought):
            begin = 0
            for at in share:
                end = begin + counts[at].tokens[place]
                found = [part[rank][begin:end].clone() for part in parts]
                gathered[at][path] = trees.unflatten(treedef, found)
                begin = end
    return gathered


def no_rows(step: Step[Any]) -> tuple[list[torch.Tensor], Any]:
    """The leaves of a step's result for no token at all, which a rank without items has, and their
    tree."""
    executable = step.main.executable
    sizes = {**executable.limits.dims, "T": 0, "R": 0}
    leaves = [
        torch.empty([0, *(d(**sizes) for d in dims[1:])], dtype=dtype, device=step.recorder.device)
        for dims, dtype in zip(executable.output_dims, executable.output_dtypes)
    ]
    return leaves, executable.out_tree


def _all_gather(rows: torch.Tensor, most: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Each rank's rows, padded to `most`."""
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows
    made = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(made, padded, group=group)
    return made
