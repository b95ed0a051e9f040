"""Ops written down instead of run: what the tape does while it records.

Nothing is executed but views: results get their shapes from torch's rules and their memory,
poisoned, from the arena.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from fngraph.errors import CaptureError
from fngraph.graphs.tape.arena import Arena
from fngraph.graphs.tape.ops import Nested, TapeOp
from fngraph.graphs.tape.shapes import Like, expected, mapped
from fngraph.graphs.witness import check_no_read, op_at
from fngraph.torch_facts.names import TorchDispatchMode, tree_leaves
from fngraph.torch_facts.schemas import is_composite

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
        if is_composite(func):  # inference tensors bring composite ops in one part
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
        found = [self._allocate(func, x) for x in expected(func, args, kwargs)]
        if schema.name not in _EMPTY:
            self._note(func, args, kwargs, found)
        return found[0] if len(found) == 1 else tuple(found)

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
            found = [
                self._allocate(func, x)
                if r.alias_info is None
                else by_alias[next(iter(r.alias_info.before_set))]
                for r, x in zip(returns, expected(func, args, kwargs))
            ]
            self._note(func, args, kwargs, found)
        return found[0] if len(found) == 1 else tuple(found) or None

    def _allocate(self, func: Any, expected: Any) -> Any:
        if isinstance(expected, list):
            return [self._allocate(func, x) for x in expected]
        if not isinstance(expected, Like):
            return expected
        if not expected.dense:
            where = op_at(func, self.within)
            raise CaptureError(
                f"{where} makes a tensor that is not dense, which the tape cannot hold. Keep "
                "to dense ones, or make it before the step and pass it"
            )
        return self.arena.empty(*expected[:3])

    def while_node(self, pred: torch.Tensor, run_body: Callable[[], None]) -> None:
        """See `fngraph.graphs.control`: the body's ops are a tape of their own, within this one."""
        self._nested("while", pred, run_body)

    def if_node(self, pred: torch.Tensor, run_body: Callable[[], None]) -> None:
        """Likewise."""
        self._nested("if", pred, run_body)

    def _nested(self, kind: str, pred: torch.Tensor, run_body: Callable[[], None]) -> None:
        outer, self.ops = self.ops, []
        try:
            run_body()
        finally:
            outer, self.ops = self.ops, outer
        self.ops.append(TapeOp(Nested(kind, tuple(outer)), (self.arena.unowned(pred),), {}))

    def before_compiled_code(self) -> None:
        """Refuse it: see `fngraph.torch_facts.compiled`."""
        raise CaptureError(
            f"{op_at('a compiled function', self.within)} writes memory by kernels that the tape "
            "does not see, so a replay would leave them out. Call the function that it was made "
            "from; or make the call one op, @torch.library.custom_op with register_fake. A CUDA "
            "graph holds it as it is"
        )

    def _check_devices(self, func: Any, args: Any, kwargs: Any) -> None:
        def check(x: Any) -> None:
            if isinstance(x, torch.Tensor) and x.device.type != "cpu":
                raise CaptureError(
                    f"{op_at(func, self.within)} on {x.device}; the tape records CPU"
                )

        mapped(check, (args, kwargs))

    def _note(self, fn: Any, args: Any, kwargs: dict[str, Any], into: Any = ()) -> None:
        # unowned, or the tape would keep every intermediate alive; it is a snapshot as well, so
        # that an in-place view op later on does not change what was recorded
        args, kwargs, into = mapped(
            lambda x: self.arena.unowned(x) if isinstance(x, torch.Tensor) else x,
            (tuple(args), kwargs, tuple(tree_leaves(into))),
        )
        if kwargs.get("device") is not None:  # whatever forward made it on, its memory is here
            kwargs = kwargs | {"device": torch.device("cpu")}
        self.ops.append(TapeOp(fn, args, kwargs, into))
