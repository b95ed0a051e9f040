"""Ops written down instead of run: what the tape does while it records.

Nothing is executed but views: results get their shapes from torch's rules and their memory,
poisoned, from the arena.
"""

from __future__ import annotations

import contextlib
from types import CodeType
from typing import Any

import torch

from fngraph.errors import CaptureError
from fngraph.graphs.tape.arena import Arena
from fngraph.graphs.tape.ops import TapeOp
from fngraph.graphs.witness import check_no_read, op_at
from fngraph.torch_facts.names import TorchDispatchMode, tree_leaves, tree_map
from fngraph.torch_facts.schemas import as_computed
from fngraph.torch_facts.tracing import FakeTensorMode

aten = torch.ops.aten
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
          "aten::new_empty_strided"}  # fmt: skip


class TapeMode(TorchDispatchMode):
    """Writes each op down instead of running it."""

    def __init__(self, arena: Arena, within: CodeType) -> None:
        super().__init__()
        self.arena, self.within = arena, within
        self.ops: list[TapeOp] = []
        self.fakes = FakeTensorMode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if func._can_decompose():  # inference tensors bring composite ops in one part
            with self:
                return func.decompose(*args, **kwargs)
        check_no_read(func, args, kwargs, self.within)
        self._check_devices(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:  # squeeze_ and such: metadata only
            return func(*args, **kwargs)
        if schema.is_mutable:
            return self._mutating(func, args, kwargs)
        if schema.name == "aten::_unsafe_view":
            return aten.view.default(*args)
        if any(r.alias_info is not None for r in schema.returns):
            return func(*args, **kwargs)  # a view: nothing happens on the device
        results = self._allocate(func, self._expect(func, args, kwargs))
        if schema.name not in _EMPTY:
            self._note(func, args, kwargs, results)
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
            expected = self._expect(func, args, kwargs)
            each = expected if len(returns) > 1 else (expected,)
            found = [
                self._allocate(func, x)
                if r.alias_info is None
                else by_alias[next(iter(r.alias_info.before_set))]
                for r, x in zip(returns, each)
            ]
            self._note(func, args, kwargs, found)
        return found[0] if len(found) == 1 else tuple(found) or None

    def _expect(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What `func` would return, without memory.

        The shape of one result is the same anywhere, and a meta tensor says it in half the time. Of
        several some are the device's own affair (what a norm saves for its backward, a workspace),
        which a fake tensor of the CPU knows.
        """
        several = len(func._schema.returns) > 1
        device = torch.device("cpu" if several else "meta")

        def without_memory(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
            return None if isinstance(x, torch.Generator) else x  # there are none of "meta"

        with self.fakes if several else contextlib.nullcontext():
            args, kwargs = tree_map(without_memory, (args, kwargs))
            if "device" in {a.name for a in func._schema.arguments}:
                kwargs = {**kwargs, "device": device}
            kwargs.pop("pin_memory", None)
            return as_computed(func, args, func(*args, **kwargs))

    def _allocate(self, func: Any, expected: Any) -> Any:
        def allocate(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if x.layout is not torch.strided or x.is_quantized:
                where = op_at(func, self.within)
                raise CaptureError(
                    f"{where} makes a tensor that is not dense, which the tape cannot hold. Keep "
                    "to dense ones, or make it before the step and pass it"
                )
            return self.arena.empty(x.shape, x.stride(), x.dtype)

        return tree_map(allocate, expected)

    def before_compiled_code(self) -> None:
        """Refuse it: see `fngraph.torch_facts.compiled`."""
        raise CaptureError(
            f"{op_at('a compiled function', self.within)} writes memory by kernels that the tape "
            "does not see, so a replay would leave them out. Call the function that it was made "
            "from; or make the call one op, @torch.library.custom_op with register_fake. A CUDA "
            "graph holds it as it is"
        )

    def _check_devices(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                where = op_at(func, self.within)
                raise CaptureError(f"{where} on {tensor.device}; the tape records CPU")

    def _note(self, fn: Any, args: Any, kwargs: dict[str, Any], into: Any = ()) -> None:
        # unowned, or the tape would keep every intermediate alive; it is a snapshot as well, so
        # that an in-place view op later on does not change what was recorded
        args, kwargs, into = tree_map(
            lambda x: self.arena.unowned(x) if isinstance(x, torch.Tensor) else x,
            (tuple(args), kwargs, tuple(tree_leaves(into))),
        )
        if kwargs.get("device") is not None:  # whatever forward made it on, its memory is here
            kwargs = kwargs | {"device": torch.device("cpu")}
        self.ops.append(TapeOp(fn, args, kwargs, into))
