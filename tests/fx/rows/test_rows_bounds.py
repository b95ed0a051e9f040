"""What `bounds.py` says that integers lie between: torch's own do, op by op."""

from __future__ import annotations

import functools
import itertools
import operator
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fngraph.fx.nodes import is_op, is_tensor
from fngraph.fx.rows import bounds
from fngraph.fx.rows.state import Kept, OpCall
from fngraph.fx.schemas import plain_name
from fngraph.torch_facts.tracing import FloorDiv

aten = torch.ops.aten
N = 300  # rows of three numbers; the first half are true ones
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "add, scaled": lambda a, b: torch.add(a, b, alpha=-2),
    "sub": lambda a, b: a - b, "sub, scaled": lambda a, b: torch.sub(a, b, alpha=3),
    "rsub": lambda a, b: 2 - a, "rsub, scaled": lambda a, b: torch.rsub(a, b, alpha=2),
    "mul": lambda a, b: a * b, "by a number": lambda a, b: a * -3, "neg": lambda a, b: -a,
    "floor_divide": lambda a, b: a // b, "div": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div, cut": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "by 2": lambda a, b: a // 2,
    "remainder": lambda a, b: a % b, "by 4": lambda a, b: a % 4, "by -4": lambda a, b: a % -4,
    "of a number": lambda a, b: 5 % b, "fmod": torch.fmod, "fmod by 4": lambda a, b: a.fmod(4),
    ">>": lambda a, b: a >> b, ">>=": lambda a, b: a.__irshift__(1), "<<": lambda a, b: a << b,
    "bitwise_right_shift": lambda a, b: torch.bitwise_right_shift(a, b),
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": lambda a, b: ~a, "and 6": lambda a, b: a & 6, "or 6": lambda a, b: a | 6,
    "abs": lambda a, b: a.abs(), "sign": lambda a, b: a.sign(), "square": lambda a, b: a.square(),
    "relu": lambda a, b: a.relu(), "gcd": torch.gcd, "pow": lambda a, b: a**2,
    "sum": lambda a, b: a.sum(1), "sum of bytes": lambda a, b: a.sum(1, dtype=torch.uint8),
    "cumsum": lambda a, b: a.cumsum(1), "prod": lambda a, b: a.prod(1),
    "cumprod": lambda a, b: a.cumprod(1), "diff": lambda a, b: a.diff(dim=1),
    "count_nonzero": lambda a, b: a.count_nonzero(1),
    "clamp": lambda a, b: a.clamp(-1, 3), "clamp_min": lambda a, b: a.clamp(min=1),
    "clamp_max": lambda a, b: a.clamp(max=1), "clamp, crossed": lambda a, b: a.clamp(3, -1),
    "clamp by tensors": lambda a, b: a.clamp(b, b + 1), "clamp_min, clamp_max": lambda a, b: (
        a.clamp_min(b).clamp_max(b + 1)),
    "minimum": torch.minimum, "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b), "cat": lambda a, b: torch.cat([a, b], 1),
    "where, a number": lambda a, b: torch.where(a > b, a, 9), "copy": lambda a, b: a.copy_(b),
    "masked_fill": lambda a, b: a.masked_fill(a > b, 4), "fill": lambda a, b: (a * 1).fill_(9),
    "pad": lambda a, b: torch.constant_pad_nd(a, [1, 0], 7),
    "stack": lambda a, b: torch.stack([a, b.clone()], 1),
    "fill, a tensor": lambda a, b: (a * 1).fill_(b[0, 0].fill_(6)),
    "sort": lambda a, b: a.sort(1), "topk": lambda a, b: a.topk(2, 1),
    "max": lambda a, b: (*a.max(1), a.amax(1), a.argmax(1), *a.cummax(1)),
    "min": lambda a, b: (*a.min(1), a.amin(1), a.argmin(1), *a.cummin(1)),
    "argsort": lambda a, b: (a.argsort(1), a.argsort()),
    "gather": lambda a, b: a.gather(1, b.remainder(3).long()), "flip": lambda a, b: a.flip(1),
    "roll": lambda a, b: a.roll(1, 1), "expand": lambda a, b: a[:, None].expand(-1, 2, -1),
    "alias, expand": lambda a, b: aten.alias(a)[:, None].expand(-1, 2, -1),
    "views": lambda a, b: aten._reshape_alias(a.contiguous().detach(), [3, N], [1, 3]).t(),
    "reshape": lambda a, b: a.reshape(N, 1, 3).squeeze(1).unsqueeze(1).permute(1, 0, 2)[0],
    "more views": lambda a, b: aten._unsafe_view(a.view(-1), [N, 3]).unfold(1, 2, 1).mT,
    "transpose": lambda a, b: a[:, None].transpose(1, 2), "diagonal": lambda a, b: (
        a[:, None].diagonal(0, 1, 2)),
    "parts": lambda a, b: (*a.split(2, 1), *a.split([1, 2], 1), *a.unbind(1), a.repeat(1, 2)),
    "copied parts": lambda a, b: (
        *torch.unsafe_split(a, 2, 1), *torch.unsafe_split_with_sizes(a, [1, 2], 1),
        *torch.split_copy(b, 2, 1), *torch.split_with_sizes_copy(b, [1, 2], 1),
        *torch.unbind_copy(a, 1),
    ),
    "cut": lambda a, b: (a.narrow(1, 1, 2), a.select(1, 2), a[:, 1:]),
    "looked up": lambda a, b: (a[:, torch.tensor([2, 0])], a.index_select(1, torch.tensor([1, 1])),
        aten._unsafe_index(a, [None, torch.tensor([0, 2])])),
    "embedding": lambda a, b: torch.embedding(a, b[:, 0].long() % (N // 2)),
    "copies": lambda a, b: aten.lift_fresh_copy(a.t().contiguous().t()),
    "repeat_interleave": lambda a, b: a.repeat_interleave(2, 1),
    "narrower": lambda a, b: a.to(torch.int8), "wider": lambda a, b: a.to(torch.int32),
    "as bits": lambda a, b: a.view(torch.uint8), "unsigned": lambda a, b: a.to(torch.uint8),
    "bool": lambda a, b: a.bool(), "by floats": lambda a, b: (a / 2).long(),
    "searchsorted": lambda a, b: torch.searchsorted(b.sort(1).values, a),
    "bucketize": lambda a, b: torch.bucketize(a, torch.tensor([1, 2, 6])),
    "ones": lambda a, b: torch.ones_like(a) + torch.zeros_like(b), "eye": lambda a, b: (
        torch.eye(3, dtype=torch.int64)[:1] + a), "full": lambda a, b: a + torch.full((3,), -4),
    "arange": lambda a, b: a + torch.arange(-2, 7, 3), "falling": lambda a, b: (
        a + torch.arange(2, -1, -1)),
}  # fmt: skip
DIVIDE = {name for name in OPS if re.match("floor|div|rem|of a|fmod$", name)}  # not by 0
SPANS = [(-7, 7), (-5, -2), (0, 0), (0, 5), (1, 4)]
CASES = [(torch.int64, a, b) for a, b in itertools.product(SPANS, SPANS)]
CASES += [(d, a, b) for d, whole in ((torch.int8, (-128, 127)), (torch.uint8, (0, 255)))
          for a, b in itertools.product([whole, (0, 5), (120, 127)], [whole, (1, 4)])]  # fmt: skip


def rows(dtype: torch.dtype, true: tuple[int, int], seed: int) -> Tensor:
    """Of which padding may be one less, and one more."""
    least, most = (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    wide = max(true[0] - 1, least), min(true[1] + 1, most)
    draw = torch.Generator().manual_seed(seed)
    halves = [
        torch.randint(low, high + 1, (N // 2, 3), generator=draw) for low, high in (true, wide)
    ]
    return torch.cat(halves).to(dtype)


def traced(name: str, dtype: torch.dtype) -> fx.Graph:
    """The graph of an op on two tensors of rows."""
    given = [torch.ones(N, 3, dtype=dtype) for _ in range(2)]
    return make_fx(OPS[name], tracing_mode="fake", pre_dispatch=True)(*given).graph


def told(graph: fx.Graph, *given: Tensor) -> list[Kept]:
    """What is said of each result."""
    states: dict[Any, Any] = {}
    placed = iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            x = next(placed)
            span = bounds.Span(int(x.min()), int(x.max()))
            states[node] = Kept(low=int(x[: N // 2].min()), span=span)
        elif node.op == "get_attr":
            states[node] = bounds.of_constant(Kept(value=getattr(graph.owning_module, node.target)))
        elif is_tensor(node):
            call = OpCall.of(node, states, str) if is_op(node) else OpCall(node, {}, states, str)
            states[node] = bounds.bounded(call, Kept())
    results = graph.output_node().args[0]
    return [states[x] for x in (results if isinstance(results, list | tuple) else [results])]


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", OPS)
def test_every_number_lies_where_it_is_said_to(name: str) -> None:
    graph_of = functools.cache(functools.partial(traced, name))
    for i, (dtype, *spans) in enumerate(CASES):
        a, b = (rows(dtype, span, 2 * i + j) for j, span in enumerate(spans))
        if name in DIVIDE:
            b = torch.where(b == 0, b[b != 0][0], b)
        results = OPS[name](a.clone(), b.clone())
        results = results if isinstance(results, tuple) else (results,)
        for state, got in zip(told(graph_of(dtype), a, b), results, strict=True):
            low, high = state.span.at({})
            case = f"{dtype}, {spans}: {state.span}, true ones from {state.low}"
            assert low <= int(got.min()) and int(got.max()) <= high, case
            assert state.low <= int(got[: N // 2].min()), case


def test_every_rule_is_tried() -> None:
    ops = {n for name in OPS for n in traced(name, torch.int64).nodes if is_op(n)}
    ruled = {*bounds._RULES, *bounds._ARGS, *bounds._SECOND, *bounds._CHOICES, *bounds._ALONG}
    ruled -= {"lift_fresh"}  # which make_fx leaves out
    ruled -= {"all_gather", "all_to_all"}  # which need processes: tests/ranks/rank_rows.py
    assert ruled - {plain_name(node.target) for node in ops} == set()


def test_bounds_of_sizes_with_quotients_hold_at_all_sizes():
    """Whatever is said to be at most another thing is, for all T and R from 1 on."""
    T, R = sympy.symbols("T R", integer=True, positive=True)
    draw, said = random.Random(4), 0
    for _ in range(400):
        whole = draw.choice([T, T + R, 2 * T + 1, T - 3, T * R])
        quotient = FloorDiv(whole, sympy.Integer(draw.choice([2, 3, 4])))
        a = draw.randint(-2, 4) + draw.choice([0, R, quotient])
        b = draw.randint(-2, 2) * quotient + draw.choice([T, R, T + R, 2 * T]) + draw.randint(-2, 2)
        if bounds.at_most(a, b):
            said += 1
            held = sympy.lambdify((T, R), sympy.sympify(b) - a, [{"FloorDiv": operator.floordiv}])
            assert all(held(t, r) >= 0 for t in range(1, 25) for r in range(1, 9)), (a, b)
    assert said > 40
    assert bounds.at_most(0, R + FloorDiv(T, sympy.Integer(3)) - 1)
    assert bounds.at_most(FloorDiv(T + R, sympy.Integer(2)), T + R)
    assert not bounds.at_most(0, FloorDiv(T, sympy.Integer(3)) - 1)
    assert not bounds.at_most(0, FloorDiv(T, R) + R - 2)
