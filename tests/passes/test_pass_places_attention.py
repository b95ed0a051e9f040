"""Where what turns q and k goes into attention's call, and where attention rounds what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from places import BF16, EPS, F32, D, H, by_row, in_float32, known, params, turn
from test_graphify import Model, steps
from torch import Tensor

import fngraph as fg
from fngraph.models.families.layers import rms_norm
from fngraph.models.families.rope import rotate

# --- what turns q and k, in attention's call ------------------------------------------------------


def in_call(
    *, of: Callable[[Any, Tensor], Tensor] = lambda p, y: y, eps: float | None = None,
    angle: Callable[[Tensor], Tensor] = lambda x: x, then: Callable[..., Any] = lambda *x: None,
    turns: tuple[bool, bool] = (True, True), one: bool = False, wide: bool = False,
    width: int = D // 2,
) -> Any:  # fmt: skip
    """Attention over q and k that are turned, by default as one expects; and what else is read.

    Args:
        of: the norm of q, and of k where `eps` is not given: that of k's norm.
        angle: what k's angles are made of.
        width: pairs that turn.
        then: is called with p and the values before attention is; what it returns is returned.
    """

    def forward(p: Any, state: Any, batch: toys.Batch) -> Any:
        x = p["w"][batch.token_ids]
        y, own = x.sin(), x.cos()
        by = turn(x, width)
        q, k, v = (z.unflatten(1, (H, D)) for z in (y, own, x))
        q = of(p, q)
        k = of(p, k) if eps is None else rms_norm(k, p["h"], eps)
        k_by = by if angle(x) is x else turn(angle(x))
        if wide:
            by = turn(x.float())
            q, k = in_float32(q, by), in_float32(k, by)
        else:
            q = rotate(q, by) if turns[0] else q
            k = rotate(k, k_by) if turns[1] else k
        k = q if one else k
        kept = then(p, y, q, k)
        out, kv = fg.ops.attention(q, k, v, state, batch)
        return (out, kept), kv

    return forward


def normed(p: Any, y: Tensor) -> Tensor:
    return rms_norm(y, p["h"], EPS)


IN_CALL = {
    "both turned": (in_call(), 1),
    "some of their columns turned": (in_call(width=1), 1),
    "both normed and turned": (in_call(of=normed), 1),
    "normed by another epsilon": (in_call(of=normed, eps=0.1), 0),
    "one of a norm": (in_call(eps=EPS), 0),
    "turned by other angles": (in_call(angle=Tensor.exp), 0),
    "q alone turned": (in_call(turns=(True, False)), 0),
    "neither turned": (in_call(turns=(False, False)), 0),
    "one value for both": (in_call(one=True), 0),
    "turned in float32": (in_call(wide=True), 0),
    "k read elsewhere": (in_call(then=lambda p, y, q, k: k.sin()), 0),
    "q read elsewhere": (in_call(then=lambda p, y, q, k: q.sum(-1)), 0),
    "q asked for its size": (in_call(then=lambda p, y, q, k: q.new_zeros(q.shape[0], 3)), 1),
    "what is turned is written before": (in_call(then=lambda p, y, q, k: y.add_(1).sin()), 0),
    "something else is written before": (
        in_call(then=lambda p, y, q, k: q.new_zeros(q.shape[0], 3).add_(1)), 1,
    ),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", IN_CALL)
def test_what_turns_q_and_k_goes_into_the_call(name: str):
    forward, matches = IN_CALL[name]
    dtype = BF16 if "float32" in name else F32
    cache = tuple(torch.zeros(4 * toys.B, toys.S, H, D, dtype=dtype) for _ in range(2))
    toy = Model(forward, {key: x.to(dtype) for key, x in params().items()}, cache)
    for modes in ("FULL", "PIECEWISE"):
        fast = toy.graphify(
            passes=("norm_rope", "rope", "rope_in_attention"), modes=modes, sizes=(16,),
            recorder="tape",
        )  # fmt: skip
        one = fast.trace(toy.params, toy.state).passes[-1]
        assert one.matches == matches and len(one.notes) == 1 - matches
        for batch in steps()[:3]:
            toy.check(fast, batch, atol=0, rtol=0)


# --- attention, rounded to fp8 --------------------------------------------------------------------


def rounding(
    read: Callable[[Any, Tensor], Any], *, view: Callable[[Tensor], Tensor] = lambda x: x.flatten(1)
) -> Any:
    """Attention, and what reads its output."""

    def forward(p: Any, state: Any, batch: toys.Batch) -> Any:
        x = p["w"][batch.token_ids]
        q, k, v = (z.unflatten(1, (H, D)) for z in (x, x.sin(), x.cos()))
        made = p["one"] * 2
        out, kv = fg.ops.attention(q, k, v, state, batch)
        return read({**p, "made": made}, view(out)), kv

    return forward


ROUNDED = {
    "by a known scale": (rounding(lambda p, y: known(p, y, "one")), 1),
    "by rows": (rounding(lambda p, y: by_row(p, y)), 0),
    "by two scales": (rounding(lambda p, y: known(p, y, "one", "other scale")), 0),
    "and read elsewhere": (rounding(lambda p, y: (known(p, y, "one"), y.sin())), 0),
    "and returned": (rounding(lambda p, y: (known(p, y, "one"), y)), 0),
    "by a scale that is made before it": (rounding(lambda p, y: known(p, y, "made")), 1),
    "by a scale that is written behind it": (
        rounding(lambda p, y: known({**p, "view": p["made"].view(1).add_(1)}, y, "made")), 0,
    ),
    "by a scale that is made behind it": (
        rounding(lambda p, y: known(p, y, own=p["one"] * 2)), 0,
    ),
    "written before": (rounding(lambda p, y: known(p, y.add_(1), "one")), 0),
    "of more than heads": (
        rounding(lambda p, y: known(p, y, "one"), view=lambda x: x.flatten(1).sin()), 0,
    ),
    "of another dtype": (
        rounding(lambda p, y: known(p, y, "one"), view=lambda x: x.flatten(1).bfloat16()), 0,
    ),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ROUNDED)
def test_attention_rounds_what_is_read_rounded_alone(name: str):
    forward, matches = ROUNDED[name]
    cache = tuple(torch.zeros(4 * toys.B, toys.S, H, D) for _ in range(2))
    toy = Model(forward, params(), cache)
    for modes in ("FULL", "PIECEWISE"):
        fast = toy.graphify(passes=("attention_fp8",), modes=modes, sizes=(16,), recorder="tape")
        (one,) = fast.trace(toy.params, toy.state).passes
        assert one.matches == matches
        for batch in steps()[:3]:
            toy.check(fast, batch, atol=0, rtol=0)
