"""What each process of test_family_streams.py runs: one stream of requests by a model of each
family, over each mesh that it can be spread over, in every mode."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from serving_run import Ran, observed

import fngraph as fg
from fngraph.models import Policy, Settings, cancel, loading, lora, make_steps, naming, serve, start
from fngraph.models.families.decoder import stages_of
from fngraph.models.serving.ranks.circles import make_ranks
from fngraph.models.serving.ranks.following import over_ranks
from fngraph.models.serving.ranks.stages import stage_of
from fngraph.models.serving.requests import State
from fngraph.models.serving.submitting import submit
from fngraph.models.weights import sharding
from fngraph.models.weights.adapters import shard_adapters
from tests.models import tiny
from tests.traced_once import traced_once

MODES = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE")
STATES = ("mamba2", "qwen3_next")  # whose requests bring one token each, as states cannot go back
EXPERTS = ("qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3")
ADAPTED = ("wq", "wv", "wo", "w_q_up", "w_in", "w_out", "w_qkvz")
NUM_BLOCKS, SIZES = 7, (4, 16)  # four requests would like some 10 blocks
CANCELLED, AT = 2, 5  # this request, before the step of this number


class Over(NamedTuple):
    """A mesh, and how processes serve over it.

    Attributes:
        sizes: along each axis.
        apart: along these they have requests of their own, and take each step together.
        own_tokens: layers of experts gather the tokens of all of these.
    """

    sizes: dict[str, int]
    apart: tuple[str, ...] = ()
    own_tokens: bool = False


MESHES: dict[int, dict[str, Over]] = {
    2: {
        "tp": Over({"tp": 2}),
        "pp": Over({"pp": 2}),
        "dp": Over({"dp": 2}, ("dp",)),
        "ep": Over({"ep": 2}),
        "dp ep": Over({"ep": 2}, ("ep",), own_tokens=True),
    },
    4: {
        "dp tp": Over({"dp": 2, "tp": 2}, ("dp",)),
        "pp tp": Over({"pp": 2, "tp": 2}),
        "ep tp": Over({"ep": 2, "tp": 2}),
        "dp ep tp": Over({"ep": 2, "tp": 2}, ("ep",), own_tokens=True),
    },
}
ALONE = Over({"tp": 1})


def names(world: int, kind: str) -> tuple[str, ...]:
    """The families that can be spread so."""
    return EXPERTS if "ep" in MESHES[world][kind].sizes else tuple(tiny.GENERATIVE)


def policy_of(name: str) -> Policy:
    """How a family is served."""
    states = name in STATES
    return Policy(
        16, 4, 4, 16, query_lens=(1,) if states else (1, 3), ngram=1, share=not states,
        num_slots=4 if states else 0, reserve=0,
    )  # fmt: skip


def submitted(policy: Policy, own: Any) -> State:
    """All requests; those that are not `own` are counted alone."""
    g = torch.Generator().manual_seed(2)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=g))  # noqa: E731
    state = start(NUM_BLOCKS, policy)
    for i in range(8):
        few = torch.randint(1, 1000, (draw(3, 7),), generator=g).tolist()
        prompt, max_new = few * draw(2, 4), draw(8, 24)
        if own(i):
            more = {"settings": Settings(0.8, 20, 0.95)} if i % 4 == 1 else {}
            state = submit(state, policy, prompt, max_new, adapter=0 if i % 3 == 0 else -1, **more)
        else:
            state = dataclasses.replace(state, submitted=state.submitted + 1)
    return state


def adapter_of(slots: Any) -> Any:
    """What goes into a slot."""
    g = torch.Generator().manual_seed(8)
    draw = lambda x: torch.randn(x.shape[1:], generator=g) * 0.3  # noqa: E731
    return tuple(
        {name: lora.LowRank(draw(pair.a), draw(pair.b)) for name, pair in own.items()}
        for own in slots
    )


class Made(NamedTuple):
    """Steps of this process, their cache, and which requests it has."""

    steps: Any
    cache: Any
    policy: Policy
    own: Any


def made(folder: Path, name: str, over: Over, mesh: fg.Mesh, modes: str) -> Made:
    """A family's steps; padding, and pages that were never written, hold NaN."""
    family, policy = loading.family(folder / name), policy_of(name)
    config, whole = family.load(folder / name, device=mesh.device)
    specs, slots = family.specs(config), lora.slots(whole, count=1, rank=2, names=ADAPTED)
    ranks = make_ranks(mesh, apart=over.apart, meet=bool(over.apart))
    own = sharding.shard(whole, specs, mesh) if mesh.size > 1 else whole
    own = sharding.with_own_tokens(own) if over.own_tokens else own
    stage = stage_of(ranks)
    count = len(own.layers)
    ends = [count * i // stage.total for i in range(stage.total + 1)]
    own = stages_of(own, stage.total)[stage.number]
    layers = slice(*ends[stage.number : stage.number + 2])
    cache = family.init_cache(
        own.config, NUM_BLOCKS, block_size=policy.block_size, device=mesh.device,
        **({"num_slots": policy.num_slots} if policy.num_slots else {}),
    )  # fmt: skip
    if not policy.num_slots:
        for x in naming.named(cache).values():
            x.fill_(torch.nan)
    part = lambda adapters: shard_adapters(adapters, config, specs, mesh)[layers]  # noqa: E731
    steps = make_steps(
        family.forward, own, cache, policy, "sampling", *("states",) * bool(policy.num_slots),
        modes=modes, adapters=part(slots), sizes=SIZES, progress=False, stage=stage, guards=True,
        recorder="tape" if mesh.device == "cpu" else "cuda",
    )  # fmt: skip
    steps = over_ranks(steps, ranks, part)
    if ranks.leads:
        steps.load_slot(0, adapter_of(slots), start(NUM_BLOCKS, policy))
    leaders = ranks.leaders
    return Made(steps, cache, policy, lambda i: not over.apart or i % leaders.size == leaders.rank)


def streamed(one: Made) -> Ran:
    """The stream; one request is cancelled on the way."""
    number = -1

    def inbox(state: State) -> State:
        nonlocal number
        number += 1
        return cancel(state, CANCELLED) if number == AT else state

    state = submitted(one.policy, one.own)
    return observed(serve(one.steps, one.cache, state, one.policy, inbox))


@torch.no_grad()
def alone(folder: Path, name: str) -> Ran:
    """What one process writes."""
    return streamed(made(folder, name, ALONE, fg.make_mesh("cpu", tp=1), "NONE"))


Job = tuple[str, str, str]  # kind of mesh, family, modes


def streams(rank: int, world: int, folder: Path, device: str) -> Any:
    """What does a job."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(minutes=2))
    sizes = {
        kind: {**over.sizes, "tp": over.sizes.get("tp", 1)} for kind, over in MESHES[world].items()
    }
    meshes = {kind: fg.make_mesh(device, **one) for kind, one in sizes.items()}
    kept: dict[Any, Any] = {}

    @torch.no_grad()
    def do(job: Job) -> dict[Job, Ran]:
        kind, name, modes = job
        with traced_once(kept, (kind, name)):
            one = made(folder, name, MESHES[world][kind], meshes[kind], modes)
        return {job: streamed(one)._replace(events=())}

    return do
