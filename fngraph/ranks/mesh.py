"""Processes in a grid with named axes, as values: a mesh is passed, and never ambient.

    mesh = fg.make_mesh(dp=2, tp=4)      # under torchrun, 8 processes
    fg.all_reduce(x, mesh["tp"])         # the sum over the 4 processes of this one's row

An axis of one process needs no process group, and its collectives return what they are given, so
that one function serves one process and many.
"""

from __future__ import annotations

import dataclasses
import keyword
import math
import os
import weakref
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fngraph.core import text
from fngraph.core.kinds import checked
from fngraph.errors import RankError
from fngraph.ranks.board import Board, is_seconds, make_board
from fngraph.ranks.faults import first_words
from fngraph.torch_facts.names import gather_objects


@checked
@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh, as a process sees it. Hashable: it may be a static field of params.

    Attributes:
        name: "tp".
        size: processes along it.
        rank: which of them this one is, from 0.
        group: what torch calls their process group; "" where there is none, being alone.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: str = ""

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, rank {self.rank} of {self.size})"

    @checked
    def part(self, total: int, what: str = "rows") -> range:
        """Which of so many, split evenly and in order, are this process's.

        Raises:
            RankError: they cannot be split evenly.
        """
        if total % self.size:
            raise RankError(
                f"{total} {what} cannot be split evenly over axis {self.name!r} of {self.size} "
                f"processes. Make the axis one of {text.ranges(divisors(total))}, or pad what is "
                "split"
            )
        each = total // self.size
        return range(self.rank * each, (self.rank + 1) * each)


@checked
@dataclasses.dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes of a grid of processes; `mesh["tp"]` is one of them.

    Attributes:
        axes: outermost first: neighbours along the last are neighbours in rank.
        device: where a process computes, "cpu" or "cuda:1".
    """

    axes: tuple[Axis, ...]
    device: str = "cpu"

    @classmethod
    @checked
    def over(cls, mesh: DeviceMesh) -> Mesh:
        """Of torch's, whose dims have names.

        Raises:
            RankError: dims without names.
        """
        names = mesh.mesh_dim_names
        if names is None:
            raise RankError(
                "this DeviceMesh has no names for its dims. Make it with mesh_dim_names=('tp',)"
            )
        axes = tuple(
            Axis(name, mesh.size(i), mesh.get_local_rank(name), mesh.get_group(name).group_name)
            if mesh.size(i) > 1
            else Axis(name)
            for i, name in enumerate(names)
        )
        own = mesh.device_type
        return cls(axes, f"cuda:{torch.cuda.current_device()}" if own == "cuda" else own)

    @property
    def size(self) -> int:
        """Processes in all."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes."""
        return tuple(axis.name for axis in self.axes)

    def __getitem__(self, name: str) -> Axis:
        """An axis.

        Raises:
            RankError: no axis has this name.
        """
        for axis in self.axes:
            if axis.name == name:
                return axis
        word = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
        by_name = f"An axis goes by its name: mesh[{next(iter(self.names), 'tp')!r}]"
        sizes = "".join(f"{axis.name}={axis.size}, " for axis in self.axes)
        made = f"Make it: make_mesh({sizes}{name}=2)" if word else by_name
        near = text.did_you_mean(name, self.names)
        raise RankError(f"there is no axis {name!r} in {self!r}.{near} {made}")

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis.name}={axis.size}" for axis in self.axes)
        ranks = ", ".join(f"{axis.name} {axis.rank}" for axis in self.axes)
        return f"Mesh({sizes}; this process is {ranks or 'alone'}, on {self.device})"


TIMEOUT_S = 300.0
"""How long a process waits for another one: longer than a model loads or compiles."""


def make_mesh(device: str | None = None, *, timeout: float | None = None, **sizes: int) -> Mesh:
    """A mesh of the processes that torchrun has started, each of which calls this.

    Where no process group is there yet, it is made: NCCL's for "cuda" beside gloo's, by which steps
    agree, and gloo's for "cpu". On CUDA a process takes the device of its number on its host.

    Args:
        device: "cpu" or "cuda"; None: CUDA where there is a device for each process of a host.
        timeout: seconds that a process waits for another one in a collective before that is a
            `RankError`; what one of them does alone, as loading and compiling, is waited for as
            well. None: 300.
        sizes: processes along each axis, outermost first; their product is all there are.

    Raises:
        RankError: another number of processes than were started, a size below 1, or a device or a
            timeout that is none; processes that do not meet, or make another mesh each.
    """
    waits = TIMEOUT_S if timeout is None else timeout
    if not is_seconds(waits) or waits == math.inf:
        raise RankError(f"make_mesh(timeout={timeout!r}): a number of seconds above 0")
    device = _device() if device is None else device
    if device not in ("cpu", "cuda"):
        raise RankError(f'make_mesh({device!r}): pass "cpu" or "cuda", or leave it out')
    wrong = [f"{name}={size!r}" for name, size in sizes.items() if not _is_count(size)]
    if wrong:
        raise RankError(f"make_mesh({', '.join(wrong)}): a size is a whole number from 1")
    wanted = math.prod(sizes.values())
    there = dist.get_world_size() if dist.is_initialized() else _started()
    if wanted != there:
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise RankError(
            f"make_mesh({given}) wants {wanted} processes, and {there} "
            f"{'is' if there == 1 else 'are'} here. Start it with: torchrun --nproc-per-node "
            f"{wanted} ..., or give sizes whose product is {there}"
        )
    devices = torch.cuda.device_count()
    if device == "cuda" and _local_rank() >= devices:
        raise RankError(
            f'make_mesh("cuda"): torch finds {devices} CUDA devices here, and process '
            f'{_local_rank()} of this host has none. Start no more than that, or pass "cpu"'
        )
    if wanted == 1 and not dist.is_initialized():
        return Mesh(tuple(Axis(name) for name in sizes), "cuda:0" if device == "cuda" else device)
    if device == "cuda":
        torch.cuda.set_device(_local_rank())
    names = tuple(name for name, size in sizes.items() if size > 1)
    if not names:
        return Mesh(tuple(Axis(name) for name in sizes), device)
    if not dist.is_initialized():
        _meet("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", waits)
    _check_alike({"device": device, "timeout": waits, **sizes})
    shape = tuple(sizes[name] for name in names)
    made = init_device_mesh(device, shape, mesh_dim_names=names)
    for group in made.get_all_groups():  # which torch gives its own default
        group.set_timeout(timedelta(seconds=waits))
    for name in names:
        _make_agreeing(made, name, float(waits))
    found = Mesh.over(made)
    axes = tuple(found[name] if name in names else Axis(name) for name in sizes)
    return dataclasses.replace(found, axes=axes)


def _meet(backend: str, waits: float) -> None:
    """Make the process group.

    Raises:
        RankError: what torchrun says is not there, or wrong; or not all have come.
    """
    told = {name: os.environ.get(name, "") for name in _TOLD}
    if missing := [name for name, value in told.items() if not value]:
        raise RankError(
            f"make_mesh: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set in "
            f"the environment. Start all processes with: torchrun --nproc-per-node {_started()} ..."
        )
    rank, total = told["RANK"], _started()
    if not rank.isdigit() or int(rank) >= total:
        raise RankError(f"make_mesh: RANK={rank!r}, and WORLD_SIZE={total} has 0 to {total - 1}")
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=waits))
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"make_mesh: {total} processes have not met at {told['MASTER_ADDR']}:"
            f"{told['MASTER_PORT']} in {waits:g} s, of which this is rank {rank}. There all must "
            f"call make_mesh. ({first_words(error)})"
        ) from error


_TOLD = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""What torchrun says by variables."""


def _check_alike(own: dict[str, Any]) -> None:
    """Raise unless all processes make the same mesh.

    Raises:
        RankError: they do not, or not all make one.
    """
    ranks = range(dist.get_world_size())
    try:
        told = gather_objects(own, dist.group.WORLD)
    except RuntimeError as error:
        raise RankError(
            f"make_mesh: not all of ranks {list(ranks)} have called it in time, or one is gone. "
            f"({first_words(error)})"
        ) from error
    spelled = [", ".join(f"{name}={value!r}" for name, value in one.items()) for one in told]
    if len(set(spelled)) > 1:
        each = "; ".join(f"make_mesh({one}) on rank {rank}" for rank, one in zip(ranks, spelled))
        raise RankError(f"all processes make one mesh, with axes in one order: {each}")


class Agreeing(NamedTuple):
    """By what the processes of an axis agree.

    Attributes:
        group: of gloo where `make_mesh` has made it, and of the same processes.
        board: for some numbers at a time; None: they are on several hosts.
    """

    group: Any
    board: Board | None = None


_AGREEING: weakref.WeakKeyDictionary[Any, Agreeing] = weakref.WeakKeyDictionary()
"""By an axis's group: as torch keeps its groups."""


def agreeing(group: Any) -> Agreeing:
    """By what the processes of an axis agree; of a mesh that `make_mesh` has not made, their own
    group."""
    return _AGREEING.get(group) or Agreeing(group)


def _make_agreeing(mesh: DeviceMesh, name: str, waits: float) -> None:
    """Such groups of an axis, of all its rows: torch wants all processes at each. A group that is
    all of them is every mesh's of one axis, and has one."""
    own = mesh.get_group(name)
    if own in _AGREEING:
        return
    ranks = mesh.mesh.movedim(mesh.mesh_dim_names.index(name), -1)  # type: ignore[union-attr]
    for row in ranks.reshape(-1, ranks.shape[-1]).tolist():
        made = dist.new_group(row, timedelta(seconds=waits), "gloo", group_desc="agreement")
        if dist.get_rank() in row:
            _AGREEING[own] = Agreeing(made)
    group = _AGREEING[own].group
    _AGREEING[own] = Agreeing(group, make_board(group, waits))


def divisors(total: int) -> list[int]:
    """The numbers of processes among which so many can be split evenly."""
    return [n for n in range(1, min(total, 64) + 1) if total % n == 0]


def _is_count(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def _started() -> int:
    """How many processes torchrun says that there are."""
    return _number("WORLD_SIZE", 1)


def _local_rank() -> int:
    return _number("LOCAL_RANK", 0)


def _number(name: str, default: int) -> int:
    told = os.environ.get(name, str(default))
    if not told.isdigit():
        raise RankError(f"make_mesh: {name}={told!r} in the environment is no number")
    return int(told)


def _device() -> str:
    on_host = _number("LOCAL_WORLD_SIZE", 1)
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= on_host else "cpu"
