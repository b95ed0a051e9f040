"""Launches that are made again: what a backend does between two graphs, without its Python.

In PIECEWISE a step runs its attention again and again over tensors that stay where they are. All
that changes is what is in them. So the second call for a batch's counts keeps its launches, and
those that follow make them and do nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.torch_facts.names import TorchDispatchMode

aten = torch.ops.aten
ROOM = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default}


class Place(NamedTuple):
    """An argument in memory that is given anew each time, and which part of it."""

    argument: int
    room: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, rooms: Sequence[Tensor]) -> Any:
        """The argument: an address on a GPU, where a kernel takes that, else a tensor."""
        room = rooms[self.room]
        if room.is_cuda:
            return room.data_ptr() + self.offset * self.dtype.itemsize
        storage = room.untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=room.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


class Launch(NamedTuple):
    """A launch, `run(*arguments)`, those of `places` filled in beforehand."""

    run: Callable[..., Any]
    arguments: list[Any]
    places: tuple[Place, ...]


class Launches(TorchDispatchMode):
    """The launches that are made while it is entered.

    Attributes:
        kept: them, in order.
        rooms: bytes and device of memory that was asked for meanwhile.
        whole: whether that is all that happened: no op was called but those that give memory, views
            of it, and the launches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Launch] = []
        self.rooms: list[tuple[int, torch.device]] = []
        self.whole = True
        self._given: dict[int, tuple[int, Tensor]] = {}  # by address; held, or it is given twice
        self._holds: list[Tensor] = []
        self._device: int | None = None  # of what is launched on a GPU

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        if op in ROOM:
            storage = made.untyped_storage()
            self._given[storage.data_ptr()] = len(self.rooms), made
            self.rooms.append((storage.nbytes(), made.device))
        elif not op.is_view and op is not torch.ops.fngraph.interpret.default:
            self.whole = False
        return made

    def add(self, run: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Keep a launch that has just been made of these arguments."""
        places, kept = [], list(arguments)
        for i, x in enumerate(arguments):
            if not isinstance(x, Tensor):
                continue
            room, _ = self._given.get(x.untyped_storage().data_ptr(), (None, x))
            if room is not None and x.numel():
                shape = tuple(x.shape), x.stride()
                places.append(Place(i, room, x.dtype, int(x.storage_offset()), *shape))
                kept[i] = None  # or its memory would be held
            elif x.is_cuda:
                self._holds.append(x)
                self._device = x.device.index
                kept[i] = x.data_ptr()
        self.kept.append(Launch(run, kept, tuple(places)))

    def close(self) -> None:
        """Let go of the memory that was asked for."""
        self._given.clear()

    def again(self) -> None:
        """Make them once more, whatever the current device is."""
        if self._device is not None and self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self.again()
        rooms = [torch.empty(n, dtype=torch.uint8, device=device) for n, device in self.rooms]
        for run, arguments, places in self.kept:
            for place in places:
                arguments[place.argument] = place.of(rooms)
            run(*arguments)


class Repeated:
    """`run(host=bounds)` of a backend over tensors that stay where they are.

    What its launches are may follow from the tensors' addresses, shapes and strides, and from how
    many tokens a request brings at most; from nothing that is in them.
    """

    def __init__(self, run: Callable[..., None], args: Any) -> None:
        self._run, self._args = run, args
        self._bound: Any = ()  # of the launches, or of the one call so far
        self._launches: Launches | None = None

    def __call__(self, *, host: HostBounds | None) -> None:
        """The first time run it, the second keep its launches, from then on make those."""
        bound = None if host is None else host.max_query_len
        if bound != self._bound:
            self._bound, self._launches = bound, None
            self._run(self._args, host)
        elif self._launches is None:
            with Launches() as made:
                self._run(self._args, host, made)
            made.close()
            self._launches = made
        elif self._launches.whole:
            self._launches.again()
        else:
            self._run(self._args, host)
