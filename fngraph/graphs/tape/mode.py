"""Ops written down instead of run: what the tape does while it records.

Nothing is executed but views: results get their shapes from the meta device and their memory,
poisoned, from the arena.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch

from fngraph.errors import CaptureError
from fngraph.graphs.tape.arena import Arena
from fngraph.graphs.tape.ops import TapeOp
from fngraph.graphs.witness import check_no_read, op_at
from fngraph.torch_facts.names import TorchDispatchMode, tree_leaves, tree_map
from fngraph.torch_facts.schemas import out_twins

aten = torch.ops.aten
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
          "aten::new_empty_strided"}  # fmt: skip


class TapeMode(TorchDispatchMode):
    """Writes each op down instead of running it."""

    def __init__(self, arena: Arena, within: CodeType) -> None:
        super().__init__()
        self.arena, self.within = arena, within
        self.ops: list[TapeOp] = []

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
        if not (twins := out_twins(func)):
            self._note(func, args, kwargs, results)
            return results
        twin, names = twins[0]
        outs = dict(zip(names, (results,) if len(names) == 1 else results))
        known = {a.name for a in twin._schema.arguments}
        self._note(twin, args, {k: v for k, v in kwargs.items() if k in known} | outs)
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
            self._note(func, args, kwargs, found)
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

    def _note(self, fn: Any, args: Any, kwargs: dict[str, Any], into: Any = ()) -> None:
        # unowned, or the tape would keep every intermediate alive; it is a snapshot as well, so
        # that an in-place view op later on does not change what was recorded
        args, kwargs, into = tree_map(
            lambda x: self.arena.unowned(x) if isinstance(x, torch.Tensor) else x,
            (tuple(args), kwargs, tuple(tree_leaves(into))),
        )
        self.ops.append(TapeOp(fn, args, kwargs, into))


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
