"""What each process of test_serving.py runs: one stream of requests over each mesh, in every mode;
what went wrong on purpose, and how long it took the others."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fngraph as fg
from fngraph.models import (
    Event,
    Policy,
    Settings,
    State,
    Steps,
    cancel,
    gather,
    llama,
    lora,
    make_steps,
    serve,
    start,
    submit,
)
from fngraph.models.families.decoder import stages_of
from fngraph.models.serving import loop
from fngraph.models.serving.ranks.circles import make_ranks
from fngraph.models.serving.ranks.following import agree, over_ranks
from fngraph.models.serving.ranks.spreading import spread
from fngraph.models.serving.ranks.stages import stage_of
from fngraph.models.weights.adapters import shard_adapters
from fngraph.models.weights.sharding import shard
from tests.models.conftest import wide_params
from tests.ranks.meeting import meeting
from tests.traced_once import traced_once

MODES = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE")
CONFIG = llama.Config(
    vocab_size=256, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=12, dim=32, mlp_dim=48
)
POLICY = Policy(24, 6, 6, 16, query_lens=(1, 3), ngram=1, reserve=0)
NUM_BLOCKS = 14  # six requests would like some 24
SIZES = (6, 24)
CANCELLED = 5  # this request, before the step of this number
AT = 8
LATE = range(20, 50, 2)  # of these steps one team gets a request more


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


def submitted(
    state: State, own: Callable[[int], bool] = lambda number: True, *, shaped: bool = False,
    adapted: bool = True,
) -> State:  # fmt: skip
    """All requests; those that are not `own` are counted alone."""
    for i, asked in enumerate(requests(shaped)):
        one = asked._asdict() | ({} if adapted else {"adapter": -1})
        if shaped and i % 5 == 2:
            one |= {"grammar": only_even, "logprobs": 2}
        if own(i):
            state = submit(state, POLICY, **one)
        else:
            state = dataclasses.replace(state, submitted=state.submitted + asked.n)
    return state


def drive(steps: Steps, cache: Any, state: State, cancelled: int = CANCELLED) -> Iterator[Any]:
    """Serve; one request is cancelled on the way."""
    number = -1

    def inbox(state: State) -> State:
        nonlocal number
        number += 1
        return cancel(state, cancelled) if number == AT else state

    yield from serve(steps, cache, state, POLICY, inbox)


class Ran(NamedTuple):
    """What one process saw of a stream."""

    texts: dict[int, tuple[int, ...]]
    events: tuple[Event, ...]
    kinds: Counter[str]
    modes: Counter[str]
    thrown: int


def observed(served: Iterator[Any]) -> Ran:
    """Run a stream."""
    events: list[Event] = []
    kinds, modes = Counter[str](), Counter[str]()
    thrown, running = 0, set[int]()
    for one in served:
        events += one.events
        kinds[one.kind + " lora" * (one.spec.adapters > 0)] += 1
        modes[one.ran.mode.name] += 1
        thrown += len(running & {job.id for job in one.state.waiting})
        running = {job.id for job in one.state.running}
    return Ran(gather(events), tuple(events), kinds, modes, thrown)


def slots_of(params: llama.Params) -> Any:
    """Two empty slots; queries, values and what is summed behind them."""
    return lora.slots(params, count=2, rank=4, names=("wq", "wv", "wo"))


def adapters_of(params: llama.Params) -> list[Any]:
    """What goes into the slots."""
    generator = torch.Generator().manual_seed(8)
    draw = lambda x: torch.randn(x.shape[1:], generator=generator) * 0.5  # noqa: E731
    return [
        tuple(
            {name: lora.LowRank(draw(pair.a), draw(pair.b)) for name, pair in own.items()}
            for own in slots_of(params)
        )
        for _ in range(2)
    ]


def made(
    mesh: fg.Mesh, modes: str, *, shaped: bool = False, meet: bool = False, adapted: bool = True
) -> tuple[Steps, Any]:
    """Steps of this process and their cache; adapters are loaded where it leads."""
    whole, ranks = wide_params(CONFIG, device=mesh.device), make_ranks(mesh, meet=meet)
    tp, stage, specs = mesh["tp"], stage_of(ranks), llama.specs(CONFIG)
    own = whole if tp.size == 1 else shard(whole, specs, mesh)
    own = meeting(own, whole, mesh["dp"]) if meet else own
    own = stages_of(own, stage.total)[stage.number]
    cache = llama.init_cache(
        own.config, NUM_BLOCKS, block_size=POLICY.block_size, device=mesh.device
    )
    for kv in cache:
        for x_NSKD in kv:  # reading what was never written shows
            x_NSKD.fill_(torch.nan)
    each = CONFIG.num_layers // stage.total
    layers = slice(stage.number * each, (stage.number + 1) * each)
    part = lambda adapters: shard_adapters(adapters, CONFIG, specs, mesh)[layers]  # noqa: E731
    steps = make_steps(
        llama.forward, own, cache, POLICY, "sampling", *("logits",) * shaped, modes=modes,
        adapters=part(slots_of(whole)) if adapted else None, sizes=SIZES,
        recorder="tape" if mesh.device == "cpu" else "cuda",
        progress=False, stage=stage,
    )  # fmt: skip
    steps = over_ranks(steps, ranks, part)
    if ranks.leads and adapted:
        for slot, adapter in enumerate(adapters_of(whole)):
            steps.load_slot(slot, adapter, start(NUM_BLOCKS, POLICY))
    return steps, cache


def mine(mesh: fg.Mesh) -> Callable[[int], bool]:
    """Which requests a process has."""
    dp = mesh["dp"]
    return lambda number: number % dp.size == dp.rank


def stream(
    mesh: fg.Mesh, modes: str, *, shaped: bool = False, meet: bool = False, adapted: bool = True
) -> Ran:
    """The stream over a mesh, or of one process."""
    steps, cache = made(mesh, modes, shaped=shaped, meet=meet, adapted=adapted)
    return streamed(mesh, steps, cache, shaped=shaped, adapted=adapted)


def streamed(mesh: fg.Mesh, steps: Steps, cache: Any, **how: bool) -> Ran:
    """The same, by steps that are there."""
    return observed(drive(steps, cache, submitted(start(NUM_BLOCKS, POLICY), mine(mesh), **how)))


class Unknown:
    """A grammar that pickle takes and does not give back: as of a module that others lack."""

    def __call__(self, new: tuple[int, ...]) -> list[int]:
        return only_even(new)

    def __reduce__(self) -> Any:
        return int, ("no number",)


def spread_out(steps: Steps, cache: Any) -> Ran:
    """The same stream, which one process takes and all share, some requests at a time."""
    coming = [one._asdict() for one in requests(False)]
    coming += [{**coming[0], "grammar": Unknown()}] * 2 + [coming[0]]

    def take(state: State) -> list[dict[str, Any]]:
        taken = coming[:4]
        del coming[:4]
        return taken

    inbox = spread(steps.ranks, POLICY, take)
    return observed(serve(steps, cache, start(NUM_BLOCKS, POLICY), POLICY, inbox))


class Ended(NamedTuple):
    """How a process came out of what was to go wrong."""

    error: str
    seconds: float


def ended(act: Callable[[], Any]) -> Ended:
    """What it raised, and when."""
    began = time.perf_counter()
    try:
        act()
        error = ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Ended(error, time.perf_counter() - began)


def failing(at: int) -> Callable[[State], State]:
    """An inbox that raises before a step."""
    left = at

    def inbox(state: State) -> State:
        nonlocal left
        left -= 1
        if left < 0:
            raise ZeroDivisionError("on purpose")
        return state

    return inbox


def ahead(mesh: fg.Mesh, steps: Steps, cache: Any) -> tuple[Ran, int, int]:
    """The stream without drafts, whose steps are agreed on ahead, and to which one team gets more
    requests meanwhile; how many of all steps were not."""
    asked: list[int] = []

    def counting(ranks: Any, spec: Any) -> Any:
        asked.append(1)
        return agree(ranks, spec)

    steps = steps._replace(ranks=dataclasses.replace(steps.ranks, ahead=True))
    policy = dataclasses.replace(POLICY, query_lens=(1,))
    state, number = submitted(start(NUM_BLOCKS, POLICY), mine(mesh)), -1

    def inbox(state: State) -> State:
        nonlocal number
        number += 1
        if number in LATE and mesh["dp"].rank == 0:
            return submit(state, policy, (number, 7, 9), 4)
        return cancel(state, CANCELLED) if number == AT else state

    loop.agree = counting  # type: ignore[attr-defined]
    try:
        ran = observed(serve(steps, cache, state, policy, inbox))
    finally:
        loop.agree = agree  # type: ignore[attr-defined]
    return ran, len(asked), number


def led(steps: Steps, cache: Any) -> dict[str, Any]:
    """A leader that raises, one that closes its loop early, and the same steps after that."""
    state = submitted(start(NUM_BLOCKS, POLICY))
    found: dict[str, Any] = {}
    found["raises"] = ended(lambda: list(serve(steps, cache, state, POLICY, failing(4))))

    def closed() -> None:
        served = serve(steps, cache, state, POLICY)
        for _ in range(3):
            next(served, None)
        served.close()

    found["closes"] = ended(closed)
    found["after"] = observed(drive(steps, cache, state))
    return found


def met(mesh: fg.Mesh, steps: Steps, cache: Any) -> dict[str, Any]:
    """A rank whose loop fails while the other one's goes on."""
    state = submitted(start(NUM_BLOCKS, POLICY), mine(mesh))
    inbox = failing(4 if mesh["dp"].rank == 1 else 10**6)
    return {"left": ended(lambda: list(serve(steps, cache, state, POLICY, inbox)))}


def taking_fails(mesh: fg.Mesh, steps: Steps, cache: Any) -> dict[str, Any]:
    """Of a stream that is spread, the process that takes the requests fails between two steps."""
    ranks, left = make_ranks(mesh, meet=True), 3

    def take(state: State) -> list[dict[str, Any]]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ZeroDivisionError("on purpose")
        return [{"prompt": [5, 6, 7], "max_new": 20}] * 2

    steps, state = steps._replace(ranks=ranks), start(NUM_BLOCKS, POLICY)
    inbox = spread(ranks, POLICY, take)
    return {"taking": ended(lambda: list(serve(steps, cache, state, POLICY, inbox)))}


def follower_fails(steps: Steps, cache: Any) -> dict[str, Any]:
    """One that follows raises in its fifth step, and leaves."""
    run, left = steps.run, 4

    def fails(cache: Any, batch: Any, allowed: Any = None) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ZeroDivisionError("on purpose")
        return run(cache, batch, allowed=allowed)

    own = steps if steps.ranks.leads else steps._replace(run=fails)
    state = submitted(start(NUM_BLOCKS, POLICY))
    try:
        return {"follower": ended(lambda: list(serve(own, cache, state, POLICY)))}
    finally:
        if not steps.ranks.leads:
            dist.destroy_process_group()


STREAMS: dict[int, dict[str, dict[str, int]]] = {
    2: {"tp": {"tp": 2}, "pp": {"pp": 2}, "dp": {"dp": 2}},
    4: {"dp tp": {"dp": 2, "tp": 2}, "pp tp": {"pp": 2, "tp": 2}},
}


APART = ("dp apart", "tp shaped", "dp spread", "dp ahead", "led", "met", "taking", "follower")
"""What two processes do besides, in the last mode; after the last of them they are no world."""


def jobs(world: int, modes: tuple[str, ...]) -> list[Any]:
    """All streams of so many processes, in these modes; and all that goes wrong in two."""
    found: list[Any] = [(name, mode) for name in STREAMS[world] for mode in modes]
    return [*found, *APART] if world == 2 and MODES[-1] in modes else found


def streams(rank: int, world: int, modes: tuple[str, ...], device: str) -> Any:
    """What does a job, by steps that are kept for those that come after it."""
    kind = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(kind, timeout=timedelta(minutes=2))
    meshes = {
        name: fg.make_mesh(device, **{"dp": 1, "pp": 1, "tp": 1, **sizes})
        for name, sizes in STREAMS[world].items()
    }
    kept: dict[Any, Any] = {}
    last: dict[str, tuple[str, Any]] = {}

    def steps_of(name: str, mode: str = modes[-1]) -> Any:
        if name not in last or last[name][0] != mode:
            with traced_once(kept, name):
                adapted = name != "pp tp"
                last[name] = mode, made(meshes[name], mode, meet="dp" in name, adapted=adapted)
        return last[name][1]

    @torch.no_grad()
    def do(job: Any) -> dict[Any, Any]:
        if not isinstance(job, str):
            name, mode = job
            return {job: streamed(meshes[name], *steps_of(name, mode), adapted=name != "pp tp")}
        if job == "dp apart":
            return {job: stream(meshes["dp"], modes[-1], adapted=False)}
        if job == "tp shaped":
            return {job: stream(meshes["tp"], modes[-1], shaped=True, adapted=False)}
        if job == "dp spread":
            return {job: spread_out(*steps_of("dp"))}
        if job == "dp ahead":
            return {job: ahead(meshes["dp"], *steps_of("dp"))}
        if job == "led":
            return led(*steps_of("tp"))
        if job == "met":
            return met(meshes["dp"], *steps_of("dp"))
        if job == "taking":
            return taking_fails(meshes["dp"], *steps_of("dp"))
        return follower_fails(*steps_of("tp"))

    return do
