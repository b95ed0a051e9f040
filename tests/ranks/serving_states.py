"""What each process of test_serving_states.py runs: streams over two processes of models with
recurrent states, and of requests that share a prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fngraph as fg
from fngraph.models import Policy, gather, generate, loading, make_steps, serve, start, submit
from fngraph.models.serving.ranks.circles import make_ranks
from fngraph.models.serving.ranks.following import over_ranks

STATES = ("mamba2", "qwen3_next")
NUM_BLOCKS = 24


def asked(shares: bool) -> list[tuple[tuple[int, ...], int]]:
    """Prompts, and how many tokens each is to have."""
    g = torch.Generator().manual_seed(3)
    draw = lambda n: tuple(torch.randint(1, 90, (n,), generator=g).tolist())  # noqa: E731
    head = draw(2 * generate.BLOCK_SIZE) if shares else ()
    return [((*head, *draw(3 + i)), 6 + i % 3) for i in range(5)]


@torch.no_grad()
def written(
    folder: Path, name: str, mesh: fg.Mesh, modes: str, shares: bool = False
) -> tuple[dict[int, tuple[int, ...]], set[bool]]:
    """The texts, where this process leads; and whether steps had cascades."""
    family = loading.family(folder)
    config, params = family.load(folder, mesh=mesh) if mesh.size > 1 else family.load(folder)
    states = name in STATES
    policy = Policy(
        24, 3, 6, generate.BLOCK_SIZE, share=not states, num_slots=3 if states else 0,
        cascade=generate.BLOCK_SIZE if shares else 0, reserve=0,
    )  # fmt: skip
    cache = family.init_cache(
        config, NUM_BLOCKS, block_size=generate.BLOCK_SIZE, num_slots=3, dtype=torch.float32
    )
    more = ("states",) if states else ()
    steps = make_steps(
        family.forward, params, cache, policy, *more, modes=modes, sizes=(4, 24), progress=False,
        recorder="tape",
    )  # fmt: skip
    steps = over_ranks(steps, make_ranks(mesh))
    state = start(NUM_BLOCKS, policy)
    for prompt, count in asked(shares):
        state = submit(state, policy, prompt, count)
    events: list[Any] = []
    cascades = set()
    for one in serve(steps, cache, state, policy):
        events += one.events
        cascades.add(one.spec.cascade)
    return gather(events), cascades


def stream(rank: int, folder: Path, name: str, modes: str, shares: bool) -> Any:
    """The same over two processes."""
    return written(folder, name, fg.make_mesh("cpu", timeout=60, tp=2), modes, shares)
