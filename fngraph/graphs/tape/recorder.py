"""The `tape` recorder: a CUDA graph's behavior, without a GPU.

It records the ATen calls of one run (`TapeMode`) and replays them into the same memory. So what a
graph would get wrong (a stale input, a frozen branch, an output overwritten, memory reused) shows
here too. docs/recorders.md lists what it cannot show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fngraph.core.memory import GRAPH_BYTES, NODE_BYTES
from fngraph.errors import CaptureError, FnGraphError
from fngraph.graphs.inside import Node
from fngraph.graphs.loans import Loans
from fngraph.graphs.recorder import Usage, describe
from fngraph.graphs.tape.arena import POISON, Arena, subtract
from fngraph.graphs.tape.mode import TapeMode
from fngraph.graphs.tape.ops import TapeOp, count_of, edges_of, lines_of, nodes_of, perform
from fngraph.graphs.turn import PoolTurn
from fngraph.torch_facts.compiled import tell_of_compiled_code
from fngraph.torch_facts.names import DisableTorchFunction, dispatch_modes


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TapeRecording:
    """Ops in order, and the memory that is dead once they have run.

    Attributes:
        dead: byte windows of the pool that hold nothing between replays.
        keeps: see `Recorder.record`.
    """

    graph: tuple[TapeOp, ...]
    dead: tuple[torch.Tensor, ...]
    keeps: tuple[Any, ...] = ()

    @torch.inference_mode()  # which may write both inference tensors and normal ones
    def replay(self) -> None:
        """Do it all again, then poison what a CUDA graph would leave as garbage.

        Whatever the caller's autocast is: what it has to say is in the recording.
        """
        cast = torch.is_autocast_enabled("cpu")
        off = torch.autocast("cpu", enabled=False) if cast else contextlib.nullcontext()
        with off, DisableTorchFunction():  # a default device would decide where zeros are made
            perform(self.graph)
            for window in self.dead:
                window.fill_(POISON)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """See `Recording.nodes`."""
        return nodes_of(self.graph)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """See `Recording.edges`."""
        return edges_of(self.graph)

    def as_text(self) -> str:
        """One line an op, in the order of replay; those of a loop stand further in."""
        return "\n".join(lines_of(self.graph))

    def __repr__(self) -> str:
        return f"TapeRecording({len(self.graph)} ops)"


class TapeRecorder:
    """Records CPU work into one arena."""

    name = "tape"
    lazy_kernels = False

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise CaptureError(f'recorder "tape" records on the CPU, not on {device}')
        self.device = device
        self.arena = Arena()
        self.loans = Loans()
        self.turn = PoolTurn(device)
        self._graph_bytes = 0

    def __repr__(self) -> str:
        return f"TapeRecorder({self.device})"

    def warm_up(self, fn: Callable[[], Any]) -> None:
        """Nothing on the CPU is set up lazily in a way that a recording would miss."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Nothing is needed."""
        yield

    def usage(self) -> Usage:
        """The arena; and what CUDA would take for graphs of as many nodes as there are ops."""
        return Usage(self.arena.nbytes, self._graph_bytes)

    def synchronize(self) -> None:
        """The CPU is done when a call returns."""

    def renew(self) -> None:
        """See `Recorder.renew`."""
        self.arena = Arena()

    def _forget(self, nbytes: int) -> None:
        self._graph_bytes -= nbytes

    def record(
        self,
        fn: Callable[[], Any],
        generators: Sequence[torch.Generator] = (),
        watched: bool = True,
        keeps: tuple[Any, ...] = (),
    ) -> tuple[TapeRecording, Any]:
        """See `Recorder.record`. Ops keep the generators that they were given."""
        if any(isinstance(m, TapeMode) for m in dispatch_modes()):
            raise CaptureError("record() inside a recording; graphs do not nest")
        tell_of_compiled_code()
        self.arena.handed_out = []
        mode = TapeMode(self.arena, sys._getframe().f_code)
        try:
            with torch.no_grad(), mode:
                result = fn()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # or it keeps the pool's memory alive
            if isinstance(error, FnGraphError) or not isinstance(error, Exception):
                raise
            raise CaptureError(f"the recording failed: {describe(error)}") from error
        fresh = self.arena.handed_out
        dead = subtract(fresh, list(self.arena.live.items()))
        for window in self.arena.windows(fresh):
            window.fill_(POISON)
        recording = TapeRecording(tuple(mode.ops), tuple(self.arena.windows(dead)), keeps)
        nbytes = GRAPH_BYTES + NODE_BYTES * count_of(recording.graph)
        self._graph_bytes += nbytes
        weakref.finalize(recording, self._forget, nbytes).atexit = False
        return recording, result

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Recorder.unowned`."""
        return self.arena.unowned(tensor)
