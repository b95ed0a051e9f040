"""Memory that an axis's processes read of each other: made once a group, by all of them at once.

Whether it can be is decided by all alike: each says what it has, and if one lacks something none
has it, with the reason. It is kept by the name of the group, as torch keeps the group itself, as
long as that is there: graphs have its addresses in them. So it is made by the first call that runs,
which is the warm-up of the first key, and never within a capture.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fngraph.errors import RankError
from fngraph.ops.symmetric import LARGEST, MOST_PROGRAMS, SymmetricMemory, block_bytes
from fngraph.ranks.faults import failing_as, group_of
from fngraph.torch_facts.names import gather_objects, is_capturing, timeout_s
from fngraph.torch_facts.symmetric import ON_ONE_DEVICE, forget_workspace, share

LOG = logging.getLogger("fngraph")


class Has(NamedTuple):
    """What a process has, for memory that others read.

    Attributes:
        host: its name.
        device: of its GPU, the number on the host.
        lacks: what it lacks; "": nothing.
        reaches: devices of its host that can be read from its own.
    """

    host: str
    device: int
    lacks: str
    reaches: tuple[int, ...]


class _Made(NamedTuple):
    of: Any  # the group: another one may have its name later
    shared: SymmetricMemory | None


_MADE: dict[str, _Made] = {}


def shared_of(axis: str, group: str) -> SymmetricMemory | None:
    """The blocks of an axis's processes; None where there can be none, which is logged once.

    All of them come to the first call at once.

    Raises:
        RankError: the axis has no processes; it would be made while a graph is captured.
    """
    found = group_of(group, axis)
    made = _MADE.get(group)
    if made is None or made.of is not found:
        if made is not None:
            forget_workspace(group)
        made = _MADE[group] = _Made(found, _make(axis, group))
    return made.shared


def why_none(all_have: Sequence[Has], on_one: bool) -> str:
    """Why these processes cannot read each other's memory; "": they can.

    Args:
        on_one: whether several of them may share a device.
    """
    if len(all_have) not in LARGEST:
        return f"it is for {min(LARGEST)} to {max(LARGEST)} processes"
    for rank, one in enumerate(all_have):
        if one.lacks:
            return f"process {rank} lacks {one.lacks}"
    hosts = {one.host for one in all_have}
    if len(hosts) > 1:
        return f"they are on several hosts: {', '.join(sorted(hosts))}"
    devices = [one.device for one in all_have]
    if len(set(devices)) < len(devices) and not on_one:
        return "several of them are on one GPU"
    for rank, one in enumerate(all_have):
        far = sorted(set(devices) - {one.device, *one.reaches})
        if far:
            return f"cuda:{one.device} of process {rank} cannot read cuda:{far[0]}"
    return ""


def _make(axis: str, group: str) -> SymmetricMemory | None:
    at = torch.cuda.current_device()
    if is_capturing():
        raise RankError(
            f"axis {axis!r} has no memory that its processes share, and none can be made while a "
            "graph is captured. Run the step once before, by capture() or capture_all()"
        )
    with failing_as("making shared memory", axis, group) as found:
        size, rank = dist.get_world_size(found), dist.get_rank(found)
        why = why_none(gather_objects(_has(at), found), os.environ.get(ON_ONE_DEVICE) == "1")
        if why:
            _warn(axis, why)
            return None
        failed, block = "", None
        try:
            block = share(group, block_bytes(size), torch.device("cuda", at))
        except RuntimeError as error:
            failed = str(error).partition("\n")[0]
        whys = [one for one in gather_objects(failed, found) if one]
        if whys or block is None:
            _warn(axis, whys[0] if whys else failed)
            return None
        own, addresses, kept = block
        return SymmetricMemory(
            own,
            torch.tensor(addresses, dtype=torch.int64, device=own.device),
            torch.zeros(MOST_PROGRAMS, dtype=torch.int64, device=own.device),
            rank,
            size,
            int(timeout_s(found)) + 1,
            [kept],
        )


def _has(device: int) -> Has:
    lacks = ""
    if importlib.util.find_spec("triton") is None:
        lacks = "Triton: pip install triton"
    elif torch.cuda.get_device_capability(device) < (7, 0):
        lacks = "a GPU whose loads and stores are ordered over the system (Volta, or later)"
    others = (i for i in range(torch.cuda.device_count()) if i != device)
    reaches = tuple(i for i in others if torch.cuda.can_device_access_peer(device, i))
    return Has(socket.gethostname(), device, lacks, reaches)


def _warn(axis: str, why: str) -> None:
    LOG.warning(
        "the processes of axis %r cannot read each other's memory: %s. So what passes make of sums "
        "over them are collectives of torch.distributed's, and norms launches of their own; leave "
        "all_reduce_rms_norm out of passes= to have norms compiled with what is around them",
        axis,
        why,
    )
