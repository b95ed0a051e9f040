"""Processes of a test: forked from one that has torch loaded, which takes them some ms to start.

They meet in a store that this process keeps, as torchrun's does, so that it outlives each of them.
What runs is a function of a module, of its rank and what else it is given; what it returns comes
back, or what it raised, or the signal that ended it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fngraph.torch_facts.symmetric import ON_ONE_DEVICE

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "torch.distributed.device_mesh",
        "fngraph.graphified",
        "fngraph.models.demo",
        "fngraph.models.train",
    ]
)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        value: what its function returned.
        error: what it raised, as text; "" if nothing.
        code: its exit code; -9: killed.
        s: seconds until it told this, from when all were started.
    """

    value: Any = None
    error: str = ""
    code: int | None = 0
    s: float = 0.0


def run(
    fn: Callable[..., Any], ranks: int, *args: Any, within: float = 60, env: Any = None
) -> list[Ended]:
    """`fn(rank, *args)` in as many processes, with torchrun's environment; how each has ended.

    Args:
        within: seconds, after which those that still run are killed, and the test fails.
    """
    told, codes = _world(fn, ranks, args, None, within, env)
    ended = [
        dataclasses.replace(one[0] if one else Ended(), code=code)
        for one, code in zip(told, codes, strict=True)
    ]
    late = [rank for rank, code in enumerate(codes) if code is None]
    assert not late, f"ranks {late} still ran after {within} s: {ended}"
    return ended


def over_gpus(ranks: int) -> dict[str, str]:
    """The environment of as many processes over this host's GPUs, one each. Where GPUs are fewer,
    processes share them, local ranks beginning again at 0 once each GPU has one: NCCL lets them
    from 2.30 on, and else the test is skipped."""
    gpus = torch.cuda.device_count()
    if gpus >= ranks:
        return {}
    if not gpus or ranks % gpus:
        pytest.skip(f"{ranks} processes do not share {gpus} GPUs evenly")
    if (there := _nccl_version()) < (2, 30):
        pytest.skip(f"{ranks} processes share {gpus} GPUs by NCCL 2.30 and later, not by {there}")
    shared = ("NCCL_MULTI_RANK_GPU_ENABLE", ON_ONE_DEVICE)
    return {"LOCAL_WORLD_SIZE": str(gpus), **dict.fromkeys(shared, "1")}


def _nccl_version() -> tuple[int, ...]:
    """Of the library that is loaded; torch itself tells with which it was built."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:  # it is a part of torch
        return torch.cuda.nccl.version()  # type: ignore[no-any-return]
    found = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(found))
    return found.value // 10000, found.value // 100 % 100, found.value % 100


def in_turn(
    fn: Callable[..., Any], ranks: int, jobs: Sequence[Any], *args: Any, within: float = 60,
    env: Any = None,
) -> list[Found]:  # fmt: skip
    """What each of so many processes has found, job by job. Where one is lost (a process raises, is
    killed, or is not done within its time), it is lost alone: others go on in a new world.

    Args:
        fn: `fn(rank, *args)` gives what does a job, and returns a dict of what it has found.
        within: seconds for each world.
    """
    found, lost = [Found() for _ in range(ranks)], dict[Any, str]()
    left = list(jobs)
    while left:
        told, codes = _world(fn, ranks, args, left, within, env)
        done = min(sum(not one.error for one in by_rank) for by_rank in told)
        for own, by_rank in zip(found, told, strict=True):
            for one in by_rank[:done]:
                own.update(one.value)
        if done < len(left):
            lost[left[done]] = "; ".join(
                f"rank {rank}: {by_rank[done].error or 'done'}" if len(by_rank) > done
                else f"rank {rank}: {'not done in time' if code is None else f'exit code {code}'}"
                for rank, (by_rank, code) in enumerate(zip(told, codes, strict=True))
            )  # fmt: skip
        left = left[done + 1 :]
    for own in found:
        own.lost = lost
    return found


class Found(dict[Any, Any]):
    """What a process has found, by name; who asks for what was lost is told why it was.

    Attributes:
        lost: by job.
    """

    lost: dict[Any, str]

    def __missing__(self, name: Any) -> Any:
        some = {name: self.lost[name]} if name in self.lost else self.lost
        raise AssertionError("\n".join(f"{job} was lost: {why}" for job, why in some.items()))


def _world(
    fn: Callable[..., Any], ranks: int, args: Sequence[Any], jobs: Sequence[Any] | None,
    within: float, env: Any,
) -> tuple[list[list[Ended]], list[int | None]]:  # fmt: skip
    """What each process has told, and its exit code; None: it was killed, being late."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          timeout=datetime.timedelta(seconds=within))  # fmt: skip
    told = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1", **(env or {}),
    }  # fmt: skip
    until = time.monotonic() + within
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(ranks)]
    started = [
        PROCESSES.Process(target=_main, args=(fn, rank, told, ours, args, jobs), daemon=True)
        for rank, (_, ours) in enumerate(pipes)
    ]
    for one in started:
        one.start()
    for _, ours in pipes:
        ours.close()  # so that the end of a process is the end of its pipe
    ended: list[list[Ended]] = [[] for _ in range(ranks)]
    codes: list[int | None] = [None] * ranks
    try:
        open_ones = {theirs: rank for rank, (theirs, _) in enumerate(pipes)}
        while open_ones and (ready := wait([*open_ones], max(until - time.monotonic(), 0.01))):
            for theirs in ready:
                try:
                    ended[open_ones[theirs]].append(pickle.loads(theirs.recv_bytes()))
                except EOFError:
                    del open_ones[theirs]
        for rank, one in enumerate(started):
            one.join(max(until - time.monotonic(), 0.01))
            codes[rank] = one.exitcode
    finally:
        for one in started:
            if one.is_alive():
                one.kill()
                one.join()
    return ended, codes


def run_asked(
    request: Any, runs: Mapping[str, tuple[int, Any, tuple[Any, ...]]], cases: Iterable[str],
    at_once: int,
) -> dict[str, list[Ended]]:  # fmt: skip
    """How processes of some runs ended, those that a module's tests ask for. They wait most of the
    time, so several run at once.

    Args:
        request: of a fixture of the module.
        runs: by name, how many processes, the function and its arguments.
        cases: those of them that a test has as its `name`, which may be left out.
    """
    own = [item for item in request.session.items if item.path == request.path]
    asked = [getattr(item, "callspec", None) for item in own]
    left_out = set(cases) - {one.params.get("name") for one in asked if one is not None}
    with ThreadPoolExecutor(at_once) as pool:
        running = {
            name: pool.submit(run, fn, ranks, *args)
            for name, (ranks, fn, args) in runs.items()
            if name not in left_out
        }
        return {name: one.result() for name, one in running.items()}


def values(ended: Sequence[Ended]) -> list[Any]:
    """What each returned; fails if one did not."""
    wrong = {rank: one for rank, one in enumerate(ended) if one.error or one.code}
    assert not wrong, "\n".join(f"rank {rank}: {one.error or one}" for rank, one in wrong.items())
    return [one.value for one in ended]


def _main(
    fn: Callable[..., Any], rank: int, env: Any, pipe: Any, args: Sequence[Any],
    jobs: Sequence[Any] | None,
) -> None:  # fmt: skip
    local = rank % int(env["LOCAL_WORLD_SIZE"])
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(local))
    torch.set_num_threads(1)
    gc.freeze()  # what is loaded is no garbage; looking at it takes half a second each time
    began, failed = time.monotonic(), False

    def tell(value: Any, error: str = "") -> None:
        ended = Ended(value, error, s=time.monotonic() - began)
        pipe.send_bytes(pickle.dumps(ended))  # tensors too, by their numbers: nothing is shared

    try:
        made = fn(rank, *args)
        if jobs is None:
            tell(made)
        for job in jobs or ():
            tell(made(job))
    except BaseException:
        failed = True
        tell(None, traceback.format_exc())
    pipe.close()
    if failed:  # threads of a broken group wait for nobody
        os._exit(0)
    if dist.is_initialized():
        dist.destroy_process_group()


def die() -> None:
    """End this process as the kernel ends one that has no memory left."""
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(seconds: float) -> None:
    """Stop this process, all of its threads, and let it go on after so long."""
    own = os.getpid()
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {own}"]):
        os.kill(own, signal.SIGSTOP)
