"""What indices and sizes are bound by.

x[i] with i = -1 is the last row: of a key, padding. So an index into T or R rows must not be
negative. Staged integers are taken not to be, in true rows. And a size must not shrink as T and R
grow, or a key's tensor would be shorter than its batch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from fngraph.fx.rows.state import RISING, Mixed, is_tensor
from fngraph.torch_facts.names import OpOverload

_KEPT = set(
    """alias clone contiguous detach expand index index_select gather permute transpose t slice
    select narrow squeeze unsqueeze view _unsafe_view reshape _reshape_alias repeat flip sort amax
    amin max min _to_copy relu split split_with_sizes unbind topk embedding""".split()
)  # the elements of their first argument
_NATURAL = set(
    """argmax argmin argsort searchsorted bucketize zeros ones zeros_like ones_like new_zeros
    new_ones eye count_nonzero""".split()
)
_INDICES = {"sort", "topk", "max", "min", "cummax", "cummin"}  # as their second result


def lowest(node: fx.Node, states: Mapping[fx.Node, Any]) -> float:
    """A number that no true element of an integer tensor is below; -inf if none is known."""
    dtype = node.meta["val"].dtype
    value = states[node].value
    if dtype.is_floating_point or dtype.is_complex:
        return -math.inf
    if value is not None:
        return value.min().item() if value.numel() else 0
    if dtype is torch.bool or node.op == "placeholder":
        return 0

    def of(x: Any) -> float:
        if is_tensor(x):
            return -math.inf if isinstance(states[x], Mixed) else states[x].low
        return x if isinstance(x, int) else 0 if isinstance(x, fx.Node) else -math.inf

    source, second = node, 0
    if not isinstance(node.target, OpOverload):  # one of several results
        source, second = node.args  # type: ignore[assignment]
    name = source.target._schema.name.partition("::")[2].removesuffix("_")  # type: ignore[union-attr]
    if name in _NATURAL or (second and name in _INDICES):
        return 0
    return _bound(name, source, of)


def _bound(name: str, node: fx.Node, of: Callable[[Any], float]) -> float:
    args = [*node.args, None, None]
    a, b = of(args[0]), of(args[1])
    if name in _KEPT:
        return a
    if name == "arange":
        down = len(node.args) > 2 and not of(node.args[2]) > 0
        return -math.inf if down else 0 if len(node.args) == 1 else a
    if name == "add" and not node.kwargs:
        return a + b
    if name == "sub" and isinstance(args[1], int):
        return a - args[1]
    if name in ("mul", "bitwise_and", "floor_divide", "div", "bitwise_right_shift", "bitwise_or"):
        return 0 if min(a, b) >= 0 else -math.inf
    if name in ("sum", "cumsum"):
        return 0 if a >= 0 else -math.inf
    if name == "remainder":  # the divisor's sign
        return 0 if b > 0 else -math.inf
    if name in ("clamp", "clamp_min", "maximum"):
        return max(a, of(node.kwargs.get("min", args[1])))
    if name in ("minimum", "where", "masked_fill", "cat", "stack"):
        picked = args[0] if name in ("cat", "stack") else [x for x in node.args if not _is_mask(x)]
        return min(map(of, picked))  # type: ignore[arg-type]
    return -math.inf


def _is_mask(x: Any) -> bool:
    return is_tensor(x) and x.meta["val"].dtype is torch.bool


def after_first(node: fx.Node, fills: Any) -> float:
    """Of offsets without their leading 0: each request has brought a token, so 1."""
    name = str(getattr(node.target, "_opname", ""))
    start = node.args[2] if len(node.args) > 2 else 0
    later = name == "slice" and isinstance(start, int) and start > 0
    return 1 if later and any(isinstance(f, str) and f == RISING for f in fills) else -math.inf


def grows(size: Any) -> bool:
    """Whether a size is at least as large for more tokens or requests."""
    if isinstance(size, torch.SymInt):
        size = size.node.expr
    if not isinstance(size, sympy.Expr) or size.is_number or size.is_Symbol:
        return True
    if isinstance(size, sympy.Mul):
        return all(grows(a) and not (a.is_number and a < 0) for a in size.args)
    if type(size).__name__ in ("FloorDiv", "CleanDiv"):
        return grows(size.args[0]) and bool(size.args[1].is_number and size.args[1] > 0)
    sums = isinstance(size, sympy.Add) or type(size).__name__ in ("Max", "Min")
    return sums and all(map(grows, size.args))
