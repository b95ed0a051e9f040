"""The `tape` recorder: a CUDA graph's behavior, without a GPU.

It records the ATen calls of one run and replays them into the same memory. Recording executes
nothing but views: results get their shapes from the meta device and their memory, poisoned, from
the arena. So what a graph would get wrong (a stale input, a frozen branch, an output overwritten,
memory reused) shows here too. docs/recorders.md lists what it cannot show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fngraph.core.memory import GRAPH_BYTES, NODE_BYTES
from fngraph.errors import CaptureError, FnGraphError
from fngraph.graphs import tape_nodes
from fngraph.graphs.arena import POISON, Arena, subtract
from fngraph.graphs.inside import Node
from fngraph.graphs.loans import Loans
from fngraph.graphs.recorder import Usage, describe
from fngraph.graphs.tape_nodes import Call
from fngraph.graphs.turn import Turn
from fngraph.graphs.witness import check_no_read, op_at

aten = torch.ops.aten
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
          "aten::new_empty_strided"}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TapeRecording:
    """Calls in order, and the memory that is dead once they have run.

    Attributes:
        graph: (function, args, kwargs) over tensors at fixed addresses.
        dead: byte windows of the pool that hold nothing between replays.
    """

    graph: tuple[Call, ...]
    dead: tuple[torch.Tensor, ...]

    @torch.inference_mode()  # which may write both inference tensors and normal ones
    def replay(self) -> None:
        """Do it all again, then poison what a CUDA graph would leave as garbage."""
        for call, args, kwargs in self.graph:
            call(*args, **kwargs)
        for window in self.dead:
            window.fill_(POISON)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """See `Recording.nodes`."""
        return tape_nodes.nodes(self.graph)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """See `Recording.edges`."""
        return tape_nodes.edges(self.graph)

    def as_text(self) -> str:
        """One line a call, in the order of replay."""
        return "\n".join(
            f"{i:4} {getattr(call, '_name', call)}({', '.join(map(_brief, args))})"
            for i, (call, args, _) in enumerate(self.graph)
        )

    def __repr__(self) -> str:
        return f"TapeRecording({len(self.graph)} calls)"


def _brief(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"
    if isinstance(arg, list | tuple):
        return f"[{', '.join(map(_brief, arg))}]"
    return str(arg)


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
        self.turn = Turn(device)
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
        """The arena; and what CUDA would take for graphs of as many nodes as there are calls."""
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
    ) -> tuple[TapeRecording, Any]:
        """See `Recorder.record`. Ops keep the generators that they were given."""
        if any(isinstance(m, _TapeMode) for m in _modes()):
            raise CaptureError("record() inside a recording; graphs do not nest")
        self.arena.handed_out = []
        mode = _TapeMode(self.arena, sys._getframe().f_code)
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
        recording = TapeRecording(tuple(mode.calls), tuple(self.arena.windows(dead)))
        nbytes = GRAPH_BYTES + NODE_BYTES * len(recording.graph)
        self._graph_bytes += nbytes
        weakref.finalize(recording, self._forget, nbytes).atexit = False
        return recording, result

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Recorder.unowned`."""
        return self.arena.unowned(tensor)


def _modes() -> list[Any]:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()


class _TapeMode(TorchDispatchMode):
    """Writes each op down instead of running it."""

    def __init__(self, arena: Arena, within: CodeType) -> None:
        super().__init__()
        self.arena, self.within = arena, within
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if func._can_decompose():  # inference tensors bring composite ops in one part
            with self:
                return func.decompose(*args, **kwargs)
        check_no_read(func, args, self.within)
        self._check_devices(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:  # squeeze_ and such: metadata only
            return func(*args, **kwargs)
        if schema.is_mutable:
            return self._mutating(func, args, kwargs)
        if schema.name == "aten::_unsafe_view":
            return aten.view.default(*args)
        if any(r.alias_info is not None for r in schema.returns):
            return func(*args, **kwargs)  # a view: nothing happens on the device
        results = self._allocate(_meta_run(func, args, kwargs))
        if schema.name in _EMPTY:
            return results
        out_variant = out_overload(func)
        if out_variant is None:
            self._note(_call_and_copy, (func, args, kwargs, results), {})
        else:
            op, names = out_variant
            outs = dict(zip(names, (results,) if len(names) == 1 else results))
            kept = {k: v for k, v in kwargs.items() if k in {a.name for a in op._schema.arguments}}
            self._note(op, args, {**kept, **outs})
        return results

    def _mutating(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """In-place and out= ops: their written arguments are results; others are new tensors."""
        given = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
        by_alias = {
            next(iter(a.alias_info.before_set)): given.get(a.name)
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.alias_info.before_set
        }
        returns = func._schema.returns
        if all(r.alias_info is not None for r in returns):
            self._note(func, args, kwargs)
            found = [by_alias[next(iter(r.alias_info.before_set))] for r in returns]
        else:
            meta = _meta_run(func, args, kwargs)
            metas = meta if isinstance(meta, tuple | list) else (meta,)
            found = [
                self._allocate(m)
                if r.alias_info is None
                else by_alias[next(iter(r.alias_info.before_set))]
                for r, m in zip(returns, metas)
            ]
            self._note(_call_and_copy, (func, args, kwargs, tuple(found)), {})
        return found[0] if len(found) == 1 else tuple(found) or None

    def _allocate(self, metas: Any) -> Any:
        def allocate(meta: Any) -> Any:
            if not isinstance(meta, torch.Tensor):
                return meta
            return self.arena.empty(meta.shape, meta.stride(), meta.dtype)

        return tree_map(allocate, metas)

    def _check_devices(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                where = op_at(func, self.within)
                raise CaptureError(f"{where} on {tensor.device}; the tape records CPU")

    def _note(self, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        # unowned, or the tape would keep every intermediate alive; it is a snapshot as well, so
        # that an in-place view op later on does not change what was recorded
        self.calls.append(
            tree_map(
                lambda x: self.arena.unowned(x) if isinstance(x, torch.Tensor) else x,
                (call, tuple(args), dict(kwargs)),
            )
        )


def _meta_run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `func` would return, as meta tensors."""

    def to_meta(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return None if isinstance(x, torch.Generator) else x  # meta kernels take none

    args, kwargs = tree_map(to_meta, (args, kwargs))
    if "device" in {a.name for a in func._schema.arguments}:
        kwargs = {**kwargs, "device": torch.device("meta")}
    kwargs.pop("pin_memory", None)
    return func(*args, **kwargs)


def _call_and_copy(func: Any, args: Any, kwargs: Any, results: Any) -> None:
    for into, value in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs))):
        if into.data_ptr() != value.data_ptr() or into.shape != value.shape:
            into.copy_(value)


@functools.cache
def out_overload(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The out= twin of a functional overload and the names of its out arguments, or None."""
    want = [(a.name, str(a.type)) for a in func._schema.arguments]
    tensor_options = {"dtype", "layout", "device", "pin_memory"}
    for name in func.overloadpacket.overloads():
        twin = getattr(func.overloadpacket, name)
        arguments = twin._schema.arguments
        outs = tuple(a.name for a in arguments if a.is_out)
        have = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if not outs or len(outs) != len(func._schema.returns):
            continue
        if have == want or have == [(n, t) for n, t in want if n not in tensor_options]:
            return twin, outs
    return None
