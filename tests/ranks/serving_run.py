"""What each process of the serving tests runs: streams of requests in every mode, over the mesh
that it is told. What requests got goes into files, by rank.

    python -m torch.distributed.run --nproc-per-node 2 serving_run.py FOLDER tp=2 dp=1
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fngraph as fg
from fngraph.models import (
    Event,
    Policy,
    Settings,
    State,
    cancel,
    gather,
    llama,
    make_steps,
    serve,
    start,
    submit,
)
from fngraph.models.families.decoder import stages_of
from fngraph.models.serving.following import over_ranks
from fngraph.models.serving.ranks import make_ranks
from fngraph.models.serving.stages import stage_of
from tests.models.conftest import wide_params
from tests.ranks.splitting import drawn_adapters, slots_for, split, split_adapters

MODES = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE")
CONFIG = llama.Config(
    vocab_size=256, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=12, dim=32, mlp_dim=48
)
POLICY = Policy(24, 6, 6, 16, query_lens=(1, 3), ngram=1, reserve=0)
NUM_BLOCKS = 14  # six requests would like some 24
SIZES = (3, 6, 12, 18, 24)
CANCELLED = 5  # this request, before the step of this number
AT = 8


class Asked(NamedTuple):
    """One request."""

    prompt: tuple[int, ...]
    max_new: int
    adapter: int = -1
    settings: Settings = Settings()
    n: int = 1


def requests(shaped: bool) -> list[Asked]:
    """Greedy and drawn, with repeats so that drafts are found, with adapters and without."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    tokens = lambda n: tuple(torch.randint(256, (n,), generator=generator).tolist())  # noqa: E731
    head = tokens(33)
    asked = []
    for i in range(14):
        prompt = (head if i % 3 == 0 else ()) + tokens(draw(2, 6)) * draw(1, 4)
        settings = Settings(0.8, 20, 0.95) if i % 4 == 1 else Settings()
        if shaped and i % 2:
            settings = settings._replace(repetition_penalty=1.3, logit_bias={7: 2.0})
        adapter = i % 2 if 6 <= i < 11 else -1
        asked.append(Asked(prompt, draw(12, 36), adapter, settings, 1 + (i == 4)))
    return asked


def only_even(new: tuple[int, ...]) -> list[int]:
    """A grammar."""
    return list(range(len(new) % 2, 256, 2))


def submitted(state: State, shaped: bool, own: Any = lambda number: True) -> State:
    """All requests; those that are not `own` are counted alone."""
    for i, one in enumerate(requests(shaped)):
        if not own(i):
            state = dataclasses.replace(state, submitted=state.submitted + one.n)
            continue
        more = {"grammar": only_even, "logprobs": 2} if shaped and i % 5 == 2 else {}
        state = submit(
            state, POLICY, one.prompt, one.max_new, adapter=one.adapter, settings=one.settings,
            n=one.n, **more,
        )  # fmt: skip
    return state


def drive(steps: Any, cache: Any, state: State) -> Iterator[Any]:
    """Serve them; one is cancelled on the way."""
    number = -1

    def inbox(state: State) -> State:
        nonlocal number
        number += 1
        return cancel(state, CANCELLED) if number == AT else state

    yield from serve(steps, cache, state, POLICY, inbox)


class Ran(NamedTuple):
    """What one process saw of a stream."""

    texts: dict[int, tuple[int, ...]]
    kinds: Counter[str]
    modes: Counter[str]
    thrown: int
    events: tuple[Event, ...]


def observed(served: Iterator[Any]) -> Ran:
    """Run a stream."""
    events: list[Event] = []
    kinds, modes, thrown, running = Counter(), Counter(), 0, set()
    for one in served:
        events += one.events
        kinds[one.kind + " lora" * (one.spec.adapters > 0)] += 1
        modes[one.ran.mode.name] += 1
        thrown += len(running & {job.id for job in one.state.waiting})
        running = {job.id for job in one.state.running}
    return Ran(gather(events), kinds, modes, thrown, tuple(events))


def served(
    params: Any, mesh: fg.Mesh, modes: str, *, shaped: bool = False, meet: bool = False
) -> Ran:
    """One stream over a mesh, or of one process; adapters are loaded while it is live."""
    ranks = make_ranks(mesh, meet=meet)
    tp, stage = mesh["tp"], stage_of(ranks)
    own = split(params, tp, mesh["dp"] if meet else None) if mesh.size > 1 else params
    own = stages_of(own, stage.total)[stage.number]
    cache = llama.init_cache(own.config, NUM_BLOCKS, block_size=POLICY.block_size)
    for kv in cache:
        for x_NSKD in kv:  # reading what was never written shows
            x_NSKD.fill_(torch.nan)
    layers = mesh["pp"].part(len(params.layers)) if stage.total > 1 else range(len(params.layers))
    part = lambda adapter: split_adapters([adapter[i] for i in layers], tp)  # noqa: E731
    slots = part(slots_for(params))
    more = ("sampling", *("logits",) * shaped)
    steps = make_steps(
        llama.forward, own, cache, POLICY, *more, modes=modes, adapters=slots, sizes=SIZES,
        recorder="tape", progress=False, stage=stage,
    )  # fmt: skip
    steps = over_ranks(steps, ranks, part)
    state = start(NUM_BLOCKS, POLICY)
    if ranks.leads:
        for slot, adapter in enumerate(drawn_adapters(params)):
            steps.load_slot(slot, adapter, state)
    dp = mesh["dp"]
    mine = lambda number: number % dp.size == dp.rank  # noqa: E731
    return observed(drive(steps, cache, submitted(state, shaped, mine)))


@torch.no_grad()
def main(folder: Path, sizes: dict[str, int]) -> None:
    """All streams of one mesh."""
    torch.set_num_threads(1)
    mesh = fg.make_mesh("cpu", **{"dp": 1, "pp": 1, "tp": 1, **sizes})
    params = wide_params(CONFIG)
    try:
        for modes in MODES:
            for meet in (False, True) if mesh["dp"].size > 1 else (False,):
                began = time.perf_counter()
                ran = served(params, mesh, modes, meet=meet)
                name = f"{modes}{'-meet' * meet}-{dist.get_rank()}.pt"
                torch.save(ran, folder / name)
                if dist.get_rank() == 0:
                    print(name, f"{time.perf_counter() - began:.1f} s", dict(ran.kinds))
        if mesh["dp"].size == 1:
            ran = served(params, mesh, "FULL_AND_PIECEWISE", shaped=True)
            torch.save(ran, folder / f"shaped-{dist.get_rank()}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    given = dict(word.split("=") for word in sys.argv[2:])
    main(Path(sys.argv[1]), {name: int(size) for name, size in given.items()})
