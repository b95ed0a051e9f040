"""A mixed stream of requests over processes that have each a whole model (`benchmarks ranks`)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from benchmarks.ranks.sharing import Task
from benchmarks.serve.streams import served
from benchmarks.traffic import PROFILES, Lengths, Profile, stream
from benchmarks.workload import BF16, BLOCK_SIZE
from fngraph.models import Policy, make_steps
from fngraph.models.families import llama

Row = dict[str, Any]
SMALL = Profile(50, Lengths(12, 0.6, 40), Lengths(8, 0.5, 16), systems=(16,))
LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def stream_row(task: Task, requests: int, rank: int, size: int, small: bool) -> Row:
    """This process's share of the stream, every `size`-th request: all of it is there from the
    first step on. `texts`: by the number of the request."""
    profile = SMALL if small else PROFILES["chat"]
    arrivals = stream(profile, requests, vocab_size=task.config.vocab_size)
    mine = [one._replace(at=0.0) for one in arrivals[rank::size]]
    most, tokens = (4, 32) if small else (64, 512)
    per = -(-profile.longest // BLOCK_SIZE)
    policy, num_blocks = Policy(tokens, most, per, BLOCK_SIZE), most * per
    cache = llama.init_cache(
        task.config, num_blocks, block_size=BLOCK_SIZE, device=task.mesh.device, dtype=BF16
    )
    sizes = tuple(n for n in LADDER if n <= tokens)
    steps = make_steps(
        llama.forward, task.params, cache, policy, modes="FULL_AND_PIECEWISE", sizes=sizes,
        outputs="borrow", progress=False,
    )  # fmt: skip
    served(steps, cache, policy, num_blocks, mine[:2])  # warm
    if size > 1:
        dist.barrier()
    row, _, texts = served(steps, cache, policy, num_blocks, mine)
    return {
        "requests": requests, "new tokens": row["new tokens"],
        "s": row["new tokens"] / row["tokens/s"],
        "texts": {rank + size * number: text for number, text in texts.items()},
    }  # fmt: skip


def as_one(by_rank: list[Row], alone: Row | None) -> Row:
    """The shares of all processes as one row.

    Args:
        alone: the one process's, as this gives it; None: this is it.
    """
    texts = {number: text for row in by_rank for number, text in row["texts"].items()}
    new, seconds = sum(row["new tokens"] for row in by_rank), max(row["s"] for row in by_rank)
    row = by_rank[0] | {"new tokens": new, "s": seconds, "tokens/s": new / seconds, "texts": texts}
    if alone is None:
        return row
    equal = sum(texts[number] == text for number, text in alone["texts"].items())
    return row | {
        "of one": row["tokens/s"] / alone["tokens/s"],
        "texts as of one": equal / len(alone["texts"]),
    }
