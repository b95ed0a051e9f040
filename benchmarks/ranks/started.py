"""Processes of this machine that run one function, as torchrun would start them
(`benchmarks ranks`)."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def in_processes(fn: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """What `fn(*args)` returns in each of so many processes, in the order of their ranks.

    Args:
        fn: of a module's top level; it makes its mesh itself.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_main, (fn, count, port, folder, args), nprocs=count)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(count)]


def _main(rank: int, fn: Callable[..., Any], count: int, port: int, into: str, args: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // count)))
    try:
        (Path(into) / str(rank)).write_bytes(pickle.dumps(fn(*args)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
