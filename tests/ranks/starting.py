"""Processes of a test: forked from one that has torch loaded, which takes them some ms to start.

They meet in a store that this process keeps, as torchrun's does, so that it outlives each of them.
What runs is a function of a module, of its rank and what else it is given; what it returns comes
back, or what it raised, or the signal that ended it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

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
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          timeout=datetime.timedelta(seconds=within))  # fmt: skip
    told = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1", **(env or {}),
    }  # fmt: skip
    began = time.monotonic()
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(ranks)]
    started = [
        PROCESSES.Process(target=_main, args=(fn, rank, told, ours, args), daemon=True)
        for rank, (_, ours) in enumerate(pipes)
    ]
    for one in started:
        one.start()
    for _, ours in pipes:
        ours.close()  # so that the end of a process is the end of its pipe
    ended: list[Ended] = [Ended(code=None)] * ranks
    try:
        for rank, (theirs, _) in enumerate(pipes):
            if theirs.poll(max(began + within - time.monotonic(), 0.01)):
                with contextlib.suppress(EOFError):
                    ended[rank] = pickle.loads(theirs.recv_bytes())
        for rank, one in enumerate(started):
            one.join(max(began + within - time.monotonic(), 0.01))
            ended[rank] = dataclasses.replace(ended[rank], code=one.exitcode)
    finally:
        for one in started:
            if one.is_alive():
                one.kill()
                one.join()
    late = [rank for rank, one in enumerate(ended) if one.code is None]
    assert not late, f"ranks {late} still ran after {within} s: {ended}"
    return ended


def values(ended: Sequence[Ended]) -> list[Any]:
    """What each returned; fails if one did not."""
    wrong = {rank: one for rank, one in enumerate(ended) if one.error or one.code}
    assert not wrong, "\n".join(f"rank {rank}: {one.error or one}" for rank, one in wrong.items())
    return [one.value for one in ended]


def _main(fn: Callable[..., Any], rank: int, env: Any, pipe: Any, args: Sequence[Any]) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    gc.freeze()  # what is loaded is no garbage; looking at it takes half a second each time
    began = time.monotonic()
    try:
        ended = Ended(fn(rank, *args))
    except BaseException:
        ended = Ended(error=traceback.format_exc())
    ended = dataclasses.replace(ended, s=time.monotonic() - began)
    pipe.send_bytes(pickle.dumps(ended))  # tensors too, by their numbers: nothing is shared
    pipe.close()
    if dist.is_initialized() and not ended.error:
        dist.destroy_process_group()
    if ended.error:  # threads of a broken group wait for nobody
        os._exit(0)


def die() -> None:
    """End this process as the kernel ends one that has no memory left."""
    os.kill(os.getpid(), signal.SIGKILL)
