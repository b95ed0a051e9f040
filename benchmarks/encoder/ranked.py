"""Requests of squares over ranks, a process each (`benchmarks encoder --ranks 2`).

Both ways share a request's images as `balance` does and gather all rows on every rank: by graphs,
and by bare `forward`. Times are those of rank 0, from one barrier to the last row. Planned budgets
hold a rank's share in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fngraph as fg
from benchmarks.device import wait
from benchmarks.encoder.requests import Request, squares
from benchmarks.encoder.ways import Tower, as_asked, as_seen, make_tower, named, way_of
from benchmarks.harness import Mistake


def in_ranks(flags: argparse.Namespace) -> tuple[Mapping[str, list[float]], list[Request]]:
    """Seconds of each request by each way, and the requests that count.

    Raises:
        Mistake: fewer GPUs than ranks.
    """
    if flags.device.startswith("cuda") and torch.cuda.device_count() < flags.ranks:
        raise Mistake(f"--ranks {flags.ranks}: there are {torch.cuda.device_count()} GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "seconds.json"
        mp.spawn(_rank, (flags, port, str(into)), nprocs=flags.ranks)
        seconds = json.loads(into.read_text())
    tower = make_tower(flags)
    return seconds, squares(tower, len(seconds["bare"]), flags.seed)


def _rank(rank: int, flags: argparse.Namespace, port: int, into: str) -> None:
    is_cuda = flags.device.startswith("cuda")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    flags.device = f"cuda:{rank}" if is_cuda else flags.device
    if is_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if is_cuda else "gloo", rank=rank, world_size=flags.ranks)
    try:
        with torch.no_grad():
            seconds = _measured(flags, dist.group.WORLD)
        if rank == 0:
            Path(into).write_text(json.dumps(seconds))
    finally:
        dist.destroy_process_group()


def _measured(flags: argparse.Namespace, group: Any) -> dict[str, list[float]]:
    tower = make_tower(flags)
    many = max(3, flags.requests // 10)
    warmup = min(flags.warmup, many // 4)
    requests = squares(tower, many, flags.seed)
    share = requests[0].items()[: -(-len(requests[0].grids) // flags.ranks)]  # a rank's, all alike

    def bare(items: Sequence[Any]) -> list[Any]:
        return shared(tower, items, group)

    ways: dict[str, Any] = {"bare": bare}
    asked = {"asked": as_asked(tower), "planned": as_seen(tower, [share], most=len(share))}
    for budgets in flags.budgets:
        way = named(flags.levels[-1], budgets)
        ways[way] = way_of(tower, flags.levels[-1], flags, ranks=group, **asked[budgets])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for at, request in enumerate(requests):
        items = request.items()
        for name, way in ways.items():
            dist.barrier(group)
            began = time.perf_counter()
            way(items)
            wait(flags.device)
            if at >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def shared(tower: Tower, items: Sequence[Any], group: Any) -> list[Any]:
    """Leaves of all items' rows, on every rank, of which each has run its part by bare `forward`;
    in the order of the ranks."""
    tokens = [tower.model.measure(item).tokens["default"] for item in items]
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    spread = fg.core.balance(tokens, ranks)
    begin = sum(spread.counts[:me])
    mine = [items[i] for i in spread.order[begin : begin + spread.counts[me]]]
    parts = [fg.core.trees.flatten(rows)[0] for rows in tower.bare(mine)]
    made = []
    for leaves in zip(*parts):
        own = torch.cat(leaves)
        padded = own.new_zeros((max(spread.loads), *own.shape[1:]))
        padded[: len(own)] = own
        every = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(every, padded, group=group)
        made.append(torch.cat([x[:n] for x, n in zip(every, spread.loads)]))
    return made
