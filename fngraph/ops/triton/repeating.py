"""Launches that are made again: what a backend does with tensors alike, without its Python.

What a backend launches follows from what its tensors are: shapes, strides, dtypes, alignment; and
from how many tokens a request brings at most. So the second of some calls that are alike keeps its
launches, and those that follow make them and do nothing else.

In PIECEWISE a step runs its attention again and again over tensors that stay where they are:
`Repeated`. In bare `forward` and in NONE they are elsewhere each time: `Recalled`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.torch_facts.names import TorchDispatchMode, count_dispatch_modes, current_device

aten = torch.ops.aten
ROOM = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default}
ROOM_STEP = 512  # bytes: torch's own memory begins at multiples of as many
MOST_KEYS = 1024  # kinds of calls that a backend keeps; a program that brings more begins again


class Place(NamedTuple):
    """An argument in memory that is another each time, and which part of it.

    Attributes:
        source: of the tensors that the call is given; the one behind them is its room.
        offset: bytes from where that begins.
    """

    argument: int
    source: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, source: Tensor) -> Tensor:
        """The argument as a tensor."""
        storage = source.untyped_storage()
        offset = source.data_ptr() - storage.data_ptr() + self.offset
        empty = torch.empty(0, dtype=self.dtype, device=source.device)
        return empty.set_(storage, offset // self.dtype.itemsize, self.shape, self.stride)


class Launch(NamedTuple):
    """A launch, `run(*arguments)`, those of `places` filled in beforehand."""

    run: Callable[..., Any]
    arguments: list[Any]
    places: tuple[Place, ...]


class Launches(TorchDispatchMode):
    """The launches that are made while it is entered.

    Attributes:
        kept: them, in order.
        room: bytes and device of all memory that was asked for meanwhile; None: there was none.
        whole: whether that is all that happened: no op was called but those that give memory, views
            of it, and the launches; and whether it is known where all of their tensors will be.
    """

    def __init__(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Keep launches.

        Args:
            tensors: what the call is given, at addresses of their own, and elsewhere the next time;
                what is launched over is these or parts of one of them. None: all stay.
        """
        super().__init__()
        self.kept: list[Launch] = []
        self.room: tuple[int, torch.device] | None = None
        self.whole = True
        self._stay = tensors is None
        self._tensors = list(tensors or ())  # held until `close`
        self._given: dict[int, tuple[int, Tensor]] = {}  # by address; held, or it is given twice
        self._holds: list[Tensor] = []
        self._device: int | None = None  # of what is launched on a GPU
        # the last call's addresses, and its launches with these filled in
        self._last: tuple[list[int] | None, list[tuple[Callable[..., Any], list[Any]]]] = None, []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        if op in ROOM:
            storage = made.untyped_storage()
            begin, device = self.room or (0, made.device)
            self._given[storage.data_ptr()] = begin, made
            self.room = begin + -(-storage.nbytes() // ROOM_STEP) * ROOM_STEP, device
            self.whole &= made.device == device
        elif not op.is_view and op is not torch.ops.fngraph.interpret.default:
            self.whole = False
        return made

    def add(self, run: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Keep a launch that has just been made of these arguments."""
        places, kept = [], list(arguments)
        for i, x in enumerate(arguments):
            if not isinstance(x, Tensor):
                continue
            if x.is_cuda:
                self._device = x.device.index
            found = self._find(x)
            if found is not None:
                places.append(Place(i, *found, x.dtype, tuple(x.shape), x.stride()))
                kept[i] = None  # or its memory would be held
            elif not self._stay:
                self.whole = False
            elif x.is_cuda:
                self._holds.append(x)
                kept[i] = x.data_ptr()
        self.kept.append(Launch(run, kept, tuple(places)))

    def _find(self, x: Tensor) -> tuple[int, int] | None:
        """Number of the source of a tensor, and bytes from where that begins."""
        if not x.numel():
            return None
        begin = x.untyped_storage().data_ptr()
        if begin in self._given:
            return len(self._tensors), self._given[begin][0] + x.data_ptr() - begin
        near = [(i, x.data_ptr() - y.data_ptr()) for i, y in enumerate(self._tensors)
                if y.untyped_storage().data_ptr() == begin]  # fmt: skip
        same = [one for one in near if one[1] == 0]
        return same[0] if same else near[0] if len(near) == 1 else None

    def close(self) -> None:
        """Let go of the memory that was asked for."""
        self._given.clear()
        self._tensors.clear()

    def again(self, tensors: Sequence[Tensor] = ()) -> None:
        """Make them once more, whatever the current device is, over tensors like those that were
        given at first, as many and in their order."""
        if self._device is not None and self._device != current_device():
            with torch.cuda.device(self._device):
                return self.again(tensors)
        sources = [*tensors]
        if self.room is not None:
            size, device = self.room
            sources.append(torch.empty(size, dtype=torch.uint8, device=device))
        if self._device is None:
            for run, arguments, places in self.kept:
                run(*_filled(arguments, places, [p.of(sources[p.source]) for p in places]))
            return
        addresses = [x.data_ptr() for x in sources]
        before, launches = self._last
        if addresses != before:  # memory that was free a step ago mostly is again
            launches = [
                (run, _filled(arguments, places, [addresses[p.source] + p.offset for p in places]))
                for run, arguments, places in self.kept
            ]
            self._last = addresses, launches  # at once: another thread may be here too
        for run, given in launches:
            run(*given)


def _filled(arguments: list[Any], places: tuple[Place, ...], values: list[Any]) -> list[Any]:
    """Arguments of a launch with these values in their places."""
    given = arguments.copy()
    for place, value in zip(places, values):
        given[place.argument] = value
    return given


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


_NEW = object()  # in place of what has not been called so far


class Recalled:
    """`run(args, host)` of a backend over tensors that are elsewhere each time.

    What its launches are may follow from the tensors' shapes, strides, dtypes, device, and what 16
    leaves of their addresses, from the other arguments, and from how many tokens a request brings
    at most; from nothing that is in the tensors. Calls in which all of that is the same launch the
    same. Where a dispatch mode looks on, two tensors begin in one place, or not all are on one
    device, it is run.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run
        self._launches: dict[Any, Launches | None] = {}  # None: it has been called once

    def __call__(self, args: Any, host: HostBounds | None) -> None:
        """The first time run it, the second keep its launches, from then on make those."""
        if count_dispatch_modes():
            self._run(args, host)
            return
        tensors: list[Tensor] = []
        rest: list[Any] = [None if host is None else host.max_query_len]
        _sort(args, args.config, tensors, rest)
        addresses = [x.data_ptr() for x in tensors]
        devices = {x.get_device() for x in tensors}
        if len(set(addresses)) != len(tensors) or len(devices) != 1:
            self._run(args, host)
            return
        key = (
            tuple([(x.shape, x.stride(), x.dtype) for x in tensors]),
            tuple([x & 15 for x in addresses]),  # a part of a tensor may be aligned where it is not
            tuple(rest),
            devices.pop(),
        )
        launches: Any = self._launches.get(key, _NEW)
        if launches is _NEW:
            if len(self._launches) >= MOST_KEYS:
                self._launches.clear()
            self._launches[key] = None
            self._run(args, host)
        elif launches is None:
            with Launches(tensors) as made:
                self._run(args, host, made)
            made.close()
            self._launches[key] = made
        elif launches.whole:
            launches.again(tensors)
        else:
            self._run(args, host)


def _sort(args: tuple[Any, ...], config: Any, tensors: list[Tensor], rest: list[Any]) -> None:
    """Tensors of nested tuples, and what else is in them with the tensors' places.

    Args:
        config: has no tensors, and is not looked into.
    """
    for x in args:
        if x is None or x is config:
            rest.append(x)
        elif isinstance(x, Tensor):
            tensors.append(x)
            rest.append(Tensor)
        elif isinstance(x, tuple):
            rest.append(len(x))
            _sort(x, config, tensors, rest)
        else:
            rest.append(x)
