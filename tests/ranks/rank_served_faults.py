"""A stream that several processes serve, of which one is killed or stalls in the middle of it; and
the processes that are left, which serve the rest."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_faults import behind_agreement, within_collective
from starting import die, freeze

import fngraph as fg
from fngraph.models import (
    Policy,
    Settings,
    State,
    Steps,
    llama,
    make_ranks,
    make_steps,
    over_ranks,
    serve,
    shard,
    stage_of,
    stages_of,
    start,
    start_over,
    submit,
)
from fngraph.ranks.faults import ROLL_CALL_S
from fngraph.ranks.mesh import agreeing
from fngraph.torch_facts.names import resolve_group
from tests.models.conftest import wide_params
from tests.ranks.meeting import meeting

TIMEOUT_S, LONG_S = 2.5, 50.0
CONFIG = llama.Config(
    vocab_size=96, num_layers=2, num_heads=6, num_kv_heads=6, head_dim=8, dim=24, mlp_dim=36
)
POLICY = Policy(16, 4, 4, 16, reserve=0)
NUM_BLOCKS = 16
FAILS_AT = 6  # this step of the stream
MODES = "FULL"


def requests() -> State:
    """Greedy and drawn."""
    g, state = torch.Generator().manual_seed(3), start(NUM_BLOCKS, POLICY)
    for i in range(6):
        prompt = torch.randint(96, (3 + i,), generator=g).tolist() * 2
        settings = Settings(0.8, 20, 0.95) if i % 2 else Settings()
        state = submit(state, POLICY, prompt, 12 + i, settings=settings)
    return state


class Made(NamedTuple):
    """Steps of a process by itself, the same over its team, and their cache."""

    own: Steps
    steps: Steps
    cache: Any


def made(mesh: fg.Mesh, modes: str = MODES, meet: bool = False) -> Made:
    """Of a mesh with "dp", "pp" and "tp". Until all have them, they wait long for each other."""
    whole = wide_params(CONFIG, device=mesh.device)
    ranks = make_ranks(mesh, meet=meet, timeout=TIMEOUT_S)
    stage = stage_of(ranks)
    params = shard(whole, llama.specs(CONFIG), mesh) if mesh["tp"].size > 1 else whole
    params = meeting(params, whole, mesh["dp"]) if meet else params
    params = stages_of(params, stage.total)[stage.number]
    cache = llama.init_cache(
        params.config, NUM_BLOCKS, block_size=POLICY.block_size, device=mesh.device
    )
    own = make_steps(
        llama.forward, params, cache, POLICY, "sampling", modes=modes, sizes=(4, 16),
        recorder="tape" if mesh.device == "cpu" else "cuda", progress=False, stage=stage,
    )  # fmt: skip
    make_impatient(mesh)
    return Made(own, over_ranks(own, ranks), cache)


def make_impatient(mesh: fg.Mesh) -> None:
    """From now on they wait for `TIMEOUT_S`, as by make_mesh(timeout=)."""
    if mesh.size == 1:
        return
    dist.barrier()
    for group in (resolve_group(axis.group) for axis in mesh.axes if axis.group):
        by = agreeing(group)
        for one in (group, by.group):
            one.set_timeout(timedelta(seconds=TIMEOUT_S))
        if by.board is not None:
            by.board.timeout_s = TIMEOUT_S


def mesh_of(device: str = "cpu", **sizes: int) -> fg.Mesh:
    """A mesh of all axes."""
    return fg.make_mesh(device, timeout=LONG_S, **{"dp": 1, "pp": 1, "tp": 1, **sizes})


class Stream:
    """What a leader has had of a stream, also where it breaks off.

    Attributes:
        texts: by request.
        state: after the last whole step.
        steps: that are done.
    """

    def __init__(self, state: State) -> None:
        self.state, self.steps = state, 0
        self.texts: dict[int, tuple[int, ...]] = {}

    def run(self, steps: Steps, cache: Any, before: Callable[[int], None] = lambda n: None) -> None:
        """Serve until all are done.

        Args:
            before: called before each step, with its number.
        """

        def inbox(state: State) -> State:
            before(self.steps)
            return state

        for one in serve(steps, cache, self.state, POLICY, inbox):
            self.state, self.steps = one.state, self.steps + 1
            for event in one.events:
                self.texts[event.id] = self.texts.get(event.id, ()) + event.tokens


def alone() -> dict[int, tuple[int, ...]]:
    """What one process writes."""
    stream = Stream(requests())
    with torch.no_grad():
        one = made(mesh_of(), "NONE")
        stream.run(one.steps, one.cache)
    return stream.texts


def _freeze() -> None:
    freeze(TIMEOUT_S + ROLL_CALL_S + 1)


def _raise() -> None:
    raise ValueError("no such luck")


HOW: dict[str, Callable[[], None]] = {"is killed": die, "stalls": _freeze, "raises": _raise}
WITHIN = {"collective": within_collective, "launch": behind_agreement}


def failing(steps: Steps, act: Callable[[], None], where: str) -> Steps:
    """Steps of a follower, of which one goes wrong: before it, or within it."""
    run, number = steps.run, -1

    def fails(cache: Any, batch: Any, allowed: Any = None) -> Any:
        nonlocal number
        number += 1
        if number == FAILS_AT and where in WITHIN:
            WITHIN[where](act)
        elif number == FAILS_AT:
            act()
        return run(cache, batch, allowed=allowed)

    return steps._replace(run=fails)


def lost(
    rank: int, sizes: dict[str, int], who: int, how: str, where: str = "before",
    device: str = "cpu",
) -> Any:  # fmt: skip
    """What a process raises, and how long after the failing one was to fail."""
    warnings.simplefilter("ignore")
    if device == "cuda":  # a device that waits for who is gone keeps its process
        threading.Timer(60, os._exit, (0,)).start()
    if "pp" in sizes:  # what goes from stage to stage has the timeout that a group was made with
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    mesh = mesh_of(device, **sizes)
    modes = "FULL" if where != "before" else "NONE"
    one, act = made(mesh, modes, meet="dp" in sizes), HOW[how]
    leads = one.steps.ranks.leads
    steps = failing(one.steps, act, where) if rank == who and not leads else one.steps
    last = time.monotonic()

    def before(number: int) -> None:
        nonlocal last
        last = time.monotonic()
        if number == FAILS_AT and rank == who:
            act()

    error = ""
    try:
        if leads:
            Stream(requests()).run(steps, one.cache, before)
        else:
            for _ in serve(_timed(steps, before), one.cache, requests(), POLICY):
                raise AssertionError("a follower has no events")
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, time.monotonic() - last


def _timed(steps: Steps, before: Callable[[int], None]) -> Steps:
    """Steps that say when each begins."""
    run = steps.run

    def timed(cache: Any, batch: Any, allowed: Any = None) -> Any:
        before(-1)
        return run(cache, batch, allowed=allowed)

    return steps._replace(run=timed)


def again(rank: int, size: int, name: str) -> None:
    """A new world of those that are left, in the same processes."""
    dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = str(size)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)


def _until_lost(one: Made, who: int, rank: int, how: str, where: str) -> tuple[str, Stream]:
    """The stream, until it breaks off."""
    steps = failing(one.steps, HOW[how], where) if rank == who else one.steps
    stream = Stream(requests())
    try:
        stream.run(steps, one.cache)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}", stream
    return "", stream


def served_by_the_others(rank: int) -> Any:
    """Three processes, of which one is killed in a collective; the other two make steps anew, over
    a cache of their own, and serve the rest of all requests."""
    warnings.simplefilter("ignore")
    one = made(mesh_of(tp=3))
    error, stream = _until_lost(one, 2, rank, "is killed", "collective")
    for step in one.own.captured:
        step.sleep(cache=True)
    del one
    begun = sum(map(len, stream.texts.values()))
    again(rank, 2, "second")
    two = made(mesh_of(tp=2))
    stream.state = start_over(stream.state, NUM_BLOCKS, POLICY)
    stream.run(two.steps, two.cache)
    return error, begun, stream.texts


def served_again(rank: int) -> Any:
    """Two processes, of which one raises in a collective; they sleep, meet anew, wake, and serve
    the rest by the same steps and the same cache."""
    warnings.simplefilter("ignore")
    one = made(mesh_of(tp=2))
    error, stream = _until_lost(one, 1, rank, "raises", "collective")
    begun = sum(map(len, stream.texts.values()))
    sleeping = one.own.captured
    sleeping[0].sleep()
    own, cache = one.own, one.cache
    del one
    again(rank, 2, "second")
    mesh = mesh_of(tp=2)
    sleeping[0].wake()
    stream.run(over_ranks(own, make_ranks(mesh)), cache)
    return error, begun, stream.texts
