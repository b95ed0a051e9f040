"""Where a pass must match, and, beside it, where what looks alike is another thing: memory that is
written in between, values that others read, other dtypes, roundings, shapes and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from places import (
    BF16,
    EPS,
    F32,
    Body,
    D,
    H,
    angles,
    by_row,
    changed,
    in_float32,
    known,
    model_of,
    params,
    turn,
)
from test_graphify import steps
from torch import Tensor
from torch.nn.functional import silu

import fngraph as fg
from fngraph.models.families.layers import centred_norm, rms_norm
from fngraph.models.families.rope import Turn, rotate, turn_by

# --- the norm -------------------------------------------------------------------------------------


def spelled(
    x: Tensor, weight: Tensor, eps: Any = EPS, *, dim: Any = -1, inside: bool = True,
    narrow: bool = True, wide: bool = True, between: Callable[[Tensor], Any] = lambda x: None,
) -> Tensor:  # fmt: skip
    """A norm step by step, each of which may be another's."""
    y = x.float() if wide else x
    mean = y.square().mean(dim, keepdim=True)
    scale = torch.rsqrt(mean + eps) if inside else torch.rsqrt(mean) + eps
    between(x)
    between(weight)
    scaled = y * scale
    return (scaled.to(x.dtype) if narrow else scaled) * weight


def kept(p: Any, x: Tensor) -> Any:
    """The scale is read by somebody else."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return (x * scale) * p["g"], scale * 2


def sum_in_the_middle(p: Any, x: Tensor) -> Any:
    total = x + x.sin()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
    total.add_(1)
    return (total * scale) * p["g"]


NORM = ("add_rms_norm", "rms_norm")
Case = tuple[Any, tuple[str, ...], tuple[int, ...], torch.dtype]
CASES: dict[str, Case] = {
    "a norm": (lambda p, x: rms_norm(x, p["g"], EPS), NORM, (0, 1), torch.float32),
    "a norm in bfloat16": (lambda p, x: rms_norm(x, p["g"], EPS), NORM, (0, 1), BF16),
    "a centred norm": (lambda p, x: centred_norm(x, p["g"], EPS), NORM, (0, 1), BF16),
    "any epsilon": (lambda p, x: rms_norm(x, p["g"], 0.5), NORM, (0, 1), BF16),
    "an epsilon that is a tensor": (
        lambda p, x: spelled(x, p["g"], p["eps"]), NORM, (0, 0), torch.float32,
    ),
    "an epsilon beside the root": (
        lambda p, x: spelled(x, p["g"], inside=False), NORM, (0, 0), torch.float32,
    ),
    "computed in half precision": (
        lambda p, x: spelled(x, p["g"], wide=False), NORM, (0, 0), BF16,
    ),
    "not rounded before the weight": (
        lambda p, x: spelled(x, p["g"], narrow=False).to(x.dtype), NORM, (0, 0), BF16,
    ),
    "a weight of another dtype": (
        lambda p, x: rms_norm(x, p["g"].float(), EPS).to(x.dtype), NORM, (0, 0), BF16,
    ),
    "over heads and columns": (
        lambda p, x: spelled(x.unflatten(1, (H, D)), p["h"], dim=(-2, -1)), NORM, (0, 0),
        torch.float32,
    ),
    "a weight for each row": (
        lambda p, x: spelled(x, x.cos()), NORM, (0, 0), torch.float32,
    ),
    "its scale read elsewhere": (kept, NORM, (0, 0), torch.float32),
    "a norm of a sum": (
        lambda p, x: rms_norm(x + x.sin(), p["g"], EPS), NORM, (1, 0), BF16,
    ),
    "a sum that is read elsewhere too": (
        lambda p, x: (lambda y: (rms_norm(y, p["g"], EPS), y))(x + x.sin()), NORM, (1, 0), BF16,
    ),
    "two norms of one sum": (
        lambda p, x: (lambda y: rms_norm(y, p["g"], EPS) + rms_norm(y, p["b"], EPS))(x + x.sin()),
        NORM, (1, 1), BF16,
    ),
    "a sum of another shape": (
        lambda p, x: rms_norm(x + p["b"], p["g"], EPS), NORM, (0, 1), BF16,
    ),
    "a sum and a number": (lambda p, x: rms_norm(x + 1, p["g"], EPS), NORM, (0, 1), BF16),
    "a sum with a weight made behind it": (
        lambda p, x: rms_norm(x + x.sin(), p["g"] * 2, EPS), NORM, (0, 1), BF16,
    ),
    "a multiple of a sum": (
        lambda p, x: rms_norm(torch.add(x, x.sin(), alpha=2), p["g"], EPS), NORM, (0, 1), BF16,
    ),
    "a sum that is written in between": (sum_in_the_middle, NORM, (0, 0), torch.float32),
    "a norm of what is written in between": (
        lambda p, x: spelled(x.sin(), p["g"], between=lambda y: y.add_(1) if y.dim() == 2 else 0),
        NORM, (0, 0), torch.float32,
    ),
    "a norm of what a view of it writes": (
        lambda p, x: spelled(x.sin(), p["g"], between=lambda y: y.view(-1)[:8].add_(1)
                             if y.dim() == 2 else 0),
        NORM, (0, 0), torch.float32,
    ),
    "a norm of what a primitive writes in between": (
        lambda p, x: spelled(x.sin(), p["g"], between=lambda y: toys.double(x, y)
                             if y.dim() == 2 else 0),
        NORM, (0, 0), torch.float32,
    ),
    "something else written in between": (
        lambda p, x: (lambda z: (spelled(x.sin(), p["g"], between=lambda y: z.add_(1)), z))(x * 2),
        NORM, (0, 1), torch.float32,
    ),
}  # fmt: skip


# --- gates, ropes, copies -------------------------------------------------------------------------


def pair_by_pair(p: Any, x: Tensor) -> Tensor:
    q, (cos, sin) = x.unflatten(1, (H, D)), angles(x)
    a, b, rest = q.split([2, 2, 0], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def turned(p: Any, x: Tensor, normed: bool = False, **more: Any) -> Tensor:
    q = x.unflatten(1, (H, D))
    return rotate(rms_norm(q, p["h"], EPS) if normed else q, turn(x, **more))


def with_copy(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.clone()


def neighbours(p: Any, x: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1), which come out where they were: not this rope."""
    q, (cos, sin) = x.unflatten(1, (H, D)), angles(x)
    a, b = q[..., 0::2], q[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def backwards(p: Any, x: Tensor) -> Tensor:
    q, (cos, sin) = x.unflatten(1, (H, D)), angles(x)
    a, b, rest = q.split([2, 2, 0], dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin, rest], dim=-1)


def by_halves(q: Tensor, cos: Any, sin: Any) -> Tensor:
    """As transformers turns heads."""
    a, b = q[..., : D // 2], q[..., D // 2 :]
    return q * cos + torch.cat((-b, a), dim=-1) * sin


def of_towers(p: Any, x: Tensor) -> Tensor:
    """As transformers' towers turn them."""
    angle = x[:, :D] * 2
    cos, sin = (y.unsqueeze(-2).float() for y in (angle.cos(), angle.sin()))
    return by_halves(x.unflatten(1, (H, D)).float(), cos, sin).to(x.dtype)


ROPE = ("norm_rope", "rope")
GATE = ("silu_mul",)
NOTHING = ("no_ops",)
CASES |= {
    "a rope": (turned, ROPE, (0, 1), BF16),
    "a rope, pair by pair": (pair_by_pair, ROPE, (0, 1), BF16),
    "a rope of a share": (lambda p, x: turned(p, x, width=1), ROPE, (0, 1), F32),
    "a rope of a norm": (lambda p, x: turned(p, x, normed=True), ROPE, (1, 0), BF16),
    "a norm that others read before its rope": (
        lambda p, x: (lambda n: (rotate(n, turn(x)), n.sin()))(
            rms_norm(x.unflatten(1, (H, D)), p["h"], EPS)
        ),
        ROPE, (0, 1), BF16,
    ),
    "angles of another dtype": (
        lambda p, x: rotate(x.unflatten(1, (H, D)), turn(x.float())), ROPE, (0, 0), BF16,
    ),
    "a rope in float32": (
        lambda p, x: in_float32(x.unflatten(1, (H, D)), turn(x.float())), ROPE, (0, 1), BF16,
    ),
    "a rope in float32 that others read before it is rounded": (
        lambda p, x: (lambda y: (y.to(BF16), y.sin()))(
            rotate(x.unflatten(1, (H, D)).float(), turn(x.float()))
        ),
        ROPE, (0, 1), BF16,
    ),
    "a rope in float32, rounded to another dtype": (
        lambda p, x: rotate(x.unflatten(1, (H, D)).float(), turn(x.float())).half(),
        ROPE, (0, 1), BF16,
    ),
    "a rope in float32 by angles that are not": (
        lambda p, x: rotate(x.unflatten(1, (H, D)).float(), turn(x)).to(BF16), ROPE, (0, 0), BF16,
    ),
    "a rope of a tower": (of_towers, ROPE, (0, 1), BF16),
    "a rope of a tower in float32": (of_towers, ROPE, (0, 1), F32),
    "halves by numbers": (
        lambda p, x: by_halves(x.unflatten(1, (H, D)), 2.0, 3.0), ROPE, (0, 0), F32,
    ),
    "pairs by numbers": (
        lambda p, x: (lambda a, b, rest: torch.cat([a * 2 - b * 3, b * 2 + a * 3, rest], -1))(
            *x.unflatten(1, (H, D)).split_with_sizes([D // 2, D // 2, 0], -1)
        ),
        ROPE, (0, 0), F32,
    ),
    "halves by angles for each head": (
        lambda p, x: (lambda q: by_halves(q, q.cos(), q.sin()))(x.unflatten(1, (H, D))),
        ROPE, (0, 0), F32,
    ),
    "thirds": (
        lambda p, x: (lambda q: q * q[:, :1] + torch.cat((-q[..., 1:], q[..., :1]), -1) * q[:, :1])(
            x.unflatten(1, (H, D))
        ),
        ROPE, (0, 0), F32,
    ),
    "angles for each head": (
        lambda p, x: rotate(x.unflatten(1, (H, D)), turn_by(x.unflatten(1, (H, D))[..., :2].cos(),
                                                            x.unflatten(1, (H, D))[..., :2].sin())),
        ROPE, (0, 0), F32,
    ),
    "a rope of some columns": (
        lambda p, x: rotate(x.unflatten(1, (H, D)), turn(x, width=1)), ROPE, (0, 1), BF16,
    ),
    "a rope of some columns, and one column lost": (
        lambda p, x: (lambda a, b, c: torch.cat([rotate(a, turn(x, width=1)), b], -1))(
            *torch.split_with_sizes(x.unflatten(1, (H, D)), [2, 1, 1], -1)), ROPE, (0, 1), BF16,
    ),
    "sines of another sign": (
        lambda p, x: (lambda q, by: q * by.cos - torch.cat(q.split([2, 2], -1)[::-1], -1) * by.sin)(
            x.unflatten(1, (H, D)), turn(x)), ROPE, (0, 0), F32,
    ),
    "sines without a sign": (
        lambda p, x: (lambda q, cos, sin: rotate(q, Turn(
            torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))))(
                x.unflatten(1, (H, D)), *angles(x)), ROPE, (0, 0), F32,
    ),
    "other sines in the second half": (
        lambda p, x: (lambda q, cos, sin: rotate(q, Turn(
            torch.cat([cos, cos], -1), torch.cat([-sin, cos], -1))))(
                x.unflatten(1, (H, D)), *angles(x)), ROPE, (0, 0), F32,
    ),
    "sines that are written in between": (
        lambda p, x: (lambda q, cos, sin: (lambda by: rotate(
            changed(q.sin(), lambda _: sin.add_(1)), by))(turn_by(cos, sin)))(
                x.unflatten(1, (H, D)), *angles(x)), ROPE, (0, 0), F32,
    ),
    "pairs of neighbours": (neighbours, ROPE, (0, 0), F32),
    "turned backwards": (backwards, ROPE, (0, 0), F32),
    "a gate": (lambda p, x: silu(x) * x.sin(), GATE, (1,), BF16),
    "a gate the other way around": (lambda p, x: x.sin() * silu(x), GATE, (1,), BF16),
    "a gate of itself": (lambda p, x: silu(x) * x, GATE, (1,), BF16),
    "a gate that is read elsewhere": (
        lambda p, x: (lambda g: (g * x.sin(), g))(silu(x)), GATE, (0,), F32,
    ),
    "a gate of one row": (lambda p, x: silu(x) * p["g"], GATE, (0,), F32),
    "a gate of another dtype": (lambda p, x: silu(x) * x.float(), GATE, (0,), BF16),
    "a gate times a number": (lambda p, x: silu(x) * 2.0, GATE, (0,), F32),
    "a gate of what is written in between": (
        lambda p, x: (lambda y: (lambda g: changed(y, Tensor.exp_) * g)(silu(y)))(x.sin()),
        GATE, (0,), F32,
    ),
    "views of views, and the same again": (
        lambda p, x: x.view(-1, 2, 4).view(-1, 4, 2).sin() + x.view(-1, 4, 2), NOTHING, (2,), F32,
    ),
    "a slice over all, two transposes, the same shape": (
        lambda p, x: x.narrow(1, 0, toys.E).t().t().expand(-1, toys.E).sin(), NOTHING, (3,), F32,
    ),
    "a copy that nobody can tell": (lambda p, x: x.clone().sin(), NOTHING, (1,), F32),
    "a copy that is written": (
        lambda p, x: changed(x.clone(), Tensor.sin_) + x, NOTHING, (0,), F32,
    ),
    "a copy of what is written": (
        lambda p, x: (lambda y, z: changed(y, Tensor.exp_) + z)(*with_copy(x.sin())),
        NOTHING, (0,), F32,
    ),
    "a copy of what a view of it writes": (
        lambda p, x: (lambda y, z: changed(y.narrow(1, 0, 2), Tensor.exp_) + z.narrow(1, 0, 2))(
            *with_copy(x.sin())
        ),
        NOTHING, (0,), F32,
    ),
    "a copy that a primitive writes": (
        lambda p, x: (lambda y: toys.double(x, y) + x)(x.clone()), NOTHING, (0,), F32,
    ),
    "a copy that is returned": (lambda p, x: (x.clone(), x.sin()), NOTHING, (0,), F32),
    "a copy that lies otherwise": (
        lambda p, x: x.t().clone(memory_format=torch.contiguous_format).sin().t(), NOTHING, (0,),
        F32,
    ),
    "a copy of a part, read by its places in memory": (
        lambda p, x: (p["w"] + 1)[4:].clone().as_strided((toys.E,), (1,), 0) + x, NOTHING, (0,),
        F32,
    ),
    "a copy of a leaf": (lambda p, x: x * p["g"].clone(), NOTHING, (0,), F32),
    "a conjugate, of the same memory": (
        lambda p, x: (torch.complex(x, x.sin()).conj() * 1j).real + x, NOTHING, (0,), F32,
    ),
    "0 more, and 1 times": (lambda p, x: (x + 0) * 1, NOTHING, (0,), F32),
}  # fmt: skip


# --- rounding to fp8 ------------------------------------------------------------------------------


def norm(p: Any, x: Tensor, total: bool = False) -> Tensor:
    return rms_norm(x + x.sin() if total else x, p["g"], EPS)


def gate(p: Any, x: Tensor) -> Tensor:
    return silu(x) * x.sin()


def seen(write: Callable[[Tensor], Any]) -> Body:
    """Two roundings of one value, of whose results one is used otherwise too."""

    def body(p: Any, x: Tensor) -> Any:
        y = x.sin()
        a, b = fg.ops.quantize_fp8_rows(y), fg.ops.quantize_fp8_rows(y)
        kept = write(a[0].view(torch.uint8))
        return kept, *[v.float() * s for v, s in (a, b)]

    return body


def rounded_late(p: Any, x: Tensor) -> Any:
    """What the norm has read is written before it is rounded."""
    y = x.sin()
    made = norm(p, y)
    y.add_(1)
    return *by_row(p, made), y


EIGHT = ("add_rms_norm_fp8", "rms_norm_fp8", "silu_mul_fp8", "quantize_once")
CASES |= {
    "a norm, rounded": (lambda p, x: by_row(p, norm(p, x)), EIGHT, (0, 1, 0, 0), BF16),
    "a norm, rounded by a known scale": (
        lambda p, x: known(p, norm(p, x), "one"), EIGHT, (0, 1, 0, 0), BF16,
    ),
    "a centred norm, rounded": (
        lambda p, x: by_row(p, centred_norm(x, p["g"], EPS)), EIGHT, (0, 1, 0, 0), BF16,
    ),
    "a norm, rounded three times": (
        lambda p, x: by_row(p, norm(p, x), 3), EIGHT, (0, 1, 0, 0), F32,
    ),
    "a norm of a sum, rounded three times": (
        lambda p, x: by_row(p, norm(p, x, total=True), 3), EIGHT, (1, 0, 0, 0), BF16,
    ),
    "a norm of a sum, rounded by one scale in two leaves": (
        lambda p, x: known(p, norm(p, x, total=True), "one", "same", "one"), EIGHT,
        (1, 0, 0, 0), BF16,
    ),
    "a sum that is read elsewhere too, rounded": (
        lambda p, x: (lambda y: (by_row(p, rms_norm(y, p["g"], EPS), 2), y))(x + x.sin()), EIGHT,
        (1, 0, 0, 0), BF16,
    ),
    "a norm, rounded by equal scales": (
        lambda p, x: known(p, norm(p, x), "one", "other scale"), EIGHT, (0, 0, 0, 0), BF16,
    ),
    "a norm, rounded in two ways": (
        lambda p, x: known(p, norm(p, x), "one") + by_row(p, norm(p, x)), EIGHT,
        (0, 2, 0, 0), BF16,
    ),
    "one norm, rounded in two ways": (
        lambda p, x: (lambda y: known(p, y, "one") + by_row(p, y))(norm(p, x)), EIGHT,
        (0, 0, 0, 0), BF16,
    ),
    "a norm, rounded and read elsewhere": (
        lambda p, x: (lambda y: (by_row(p, y, 2), y.sin()))(norm(p, x)), EIGHT, (0, 0, 0, 1),
        BF16,
    ),
    "a norm by an epsilon that is a tensor, rounded": (
        lambda p, x: by_row(p, spelled(x, p["g"], p["eps"])), EIGHT, (0, 0, 0, 0), F32,
    ),
    "a norm in half precision, rounded": (
        lambda p, x: by_row(p, spelled(x, p["g"], wide=False)), EIGHT, (0, 0, 0, 0), BF16,
    ),
    "a norm, as another dtype and rounded": (
        lambda p, x: by_row(p, norm(p, x).float()), EIGHT, (0, 0, 0, 0), BF16,
    ),
    "a norm of what is written before it is rounded": (rounded_late, EIGHT, (0, 0, 0, 0), F32),
    "a norm, rounded by a scale of its own": (
        lambda p, x: known(p, norm(p, x), mine=p["one"] * 2), EIGHT, (0, 1, 0, 0), F32,
    ),
    "a norm of a sum, rounded by a scale made behind the sum": (
        lambda p, x: (lambda y: known(p, rms_norm(y, p["g"], EPS), mine=p["one"] * 2))(x + x.sin()),
        EIGHT, (0, 1, 0, 0), F32,
    ),
    "a gate, rounded": (lambda p, x: by_row(p, gate(p, x)), EIGHT, (0, 0, 1, 0), BF16),
    "a gate, rounded by a known scale": (
        lambda p, x: known(p, gate(p, x), "one"), EIGHT, (0, 0, 1, 0), BF16,
    ),
    "a gate, rounded and read elsewhere": (
        lambda p, x: (lambda y: (by_row(p, y), y.sin()))(gate(p, x)), EIGHT, (0, 0, 0, 0), BF16,
    ),
    "anything, rounded three times": (
        lambda p, x: by_row(p, x.sin(), 3) + known(p, x.cos(), "one", "one"), EIGHT, (0, 0, 0, 2),
        BF16,
    ),
    "rounded by two scales": (
        lambda p, x: known(p, x.sin(), "one", "same"), EIGHT, (0, 0, 0, 0), BF16,
    ),
    "rounded before and after it is written": (
        lambda p, x: (lambda y: by_row(p, y) + by_row(p, changed(y, lambda z: z[:, :4].exp_())))(
            x.sin()
        ),
        EIGHT, (0, 0, 0, 0), F32,
    ),
    "rounded twice, and one is returned": (seen(lambda x: x), EIGHT, (0, 0, 0, 0), F32),
    "rounded twice, and one is written": (
        seen(lambda x: changed(x, Tensor.zero_).sum(-1, dtype=torch.int32)), EIGHT, (0, 0, 0, 0),
        F32,
    ),
    "rounded twice, and one is read": (
        seen(lambda x: x.sum(-1, dtype=torch.int32)), EIGHT, (0, 0, 0, 1), F32,
    ),
}  # fmt: skip


# --- constants ------------------------------------------------------------------------------------


def frequencies(theta: float = 100.0) -> Tensor:
    return 1 / theta ** (torch.arange(0, 8) / 8)


FOLD = ("fold_constants",)
CASES |= {
    "made of numbers": (lambda p, x: x * frequencies(), FOLD, (1,), F32),
    "in bfloat16": (lambda p, x: x * frequencies().bfloat16(), FOLD, (1,), BF16),
    "made of literals": (
        lambda p, x: x * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]).exp().sin(), FOLD, (1,), F32,
    ),
    "literals themselves": (
        lambda p, x: x * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]), FOLD, (0,), F32,
    ),
    "two that are made alike": (
        lambda p, x: x * frequencies() + x.sin() * frequencies(), FOLD, (1,), F32,
    ),
    "two that are not": (
        lambda p, x: x * frequencies() + x.sin() * frequencies(99.0), FOLD, (2,), F32,
    ),
    "one that another is made of": (
        lambda p, x: (lambda c: x * c + x.sin() * (c + 1))(frequencies()), FOLD, (2,), F32,
    ),
    "views of one": (
        lambda p, x: (lambda c: x[:, :4] * c[:4] + x[:, 4:] * c[None, 4:].expand(1, 4))(
            frequencies()
        ),
        FOLD, (1,), F32,
    ),
    "of a number of columns": (lambda p, x: x * torch.arange(x.shape[1]).sin(), FOLD, (1,), F32),
    "of a number of rows": (
        lambda p, x: x * torch.arange(x.shape[0])[:, None].sin(), FOLD, (0,), F32,
    ),
    "of a weight": (lambda p, x: x * p["g"].sin(), FOLD, (0,), F32),
    "with -0.0": (lambda p, x: x * (frequencies() * -0.0) + 1 / (frequencies() * -0.0), FOLD,
                  (2,), F32),
    "written later": (
        lambda p, x: (lambda c: x * changed(c, lambda y: y.add_(x[0].sum() * 0)))(frequencies()),
        FOLD, (1,), F32,  # what it is made of, by the one op before
    ),
    "literals that are written": (
        lambda p, x: (lambda c: (c + 1, x * changed(c, Tensor.exp_), c.sin()))(torch.ones(8)),
        FOLD, (0,), F32,
    ),
    "numbers in a list that are written": (
        lambda p, x: (lambda c: (c + 1, x * changed(c, Tensor.exp_), c.sin()))(
            torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
        ),
        FOLD, (0,), F32,
    ),
    "written through a view": (
        lambda p, x: (lambda c: x * (changed(c[2:], Tensor.exp_).sum() + c.sin()))(torch.ones(8)),
        FOLD, (0,), F32,
    ),
    "written by a primitive": (
        lambda p, x: x + toys.double(torch.ones(8), torch.zeros(8)), FOLD, (1,), F32,
    ),
    "returned": (lambda p, x: (x.sin(), torch.ones(3)), FOLD, (0,), F32),
    "memory that nobody has filled": (
        lambda p, x: x + torch.zeros_like(torch.empty(8)), FOLD, (0,), F32,
    ),
    "of other strides than traced": (  # by torch 2.13
        lambda p, x: x.unflatten(1, (4, 2)) * torch.isin(
            torch.arange(8.0).view(2, 4).t(), torch.tensor([2.0, 7.0])
        ),
        FOLD, (0,), F32,
    ),
    "too large": (lambda p, x: x * torch.arange(20_000).sum(), FOLD, (0,), F32),
}  # fmt: skip


def test_what_is_too_large_for_a_constant_is_said():
    toy = model_of(CASES["too large"][0], params())
    (one,) = toy.graphify(passes=FOLD).trace(toy.params, toy.state).passes
    (note,) = one.notes
    assert "test_pass_places.py" in note and "160000 bytes" in note and "at most 65536" in note


def test_draws_are_no_constants():
    generator = torch.Generator()
    toy = model_of(lambda p, x: x + torch.rand(8, generator=generator).sin(), params())
    (one,) = toy.graphify(passes=FOLD, generators=(generator,)).trace(toy.params, toy.state).passes
    assert one.matches == 0


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_a_pass_matches_where_it_should_and_results_are_the_same_bits(name: str):
    body, passes, matches, dtype = CASES[name]
    toy = model_of(body, params(dtype))
    fast = toy.graphify(passes=passes, modes="FULL", sizes=(16,), recorder="tape")
    seen = fast.trace(toy.params, toy.state)
    assert tuple(one.matches for one in seen.passes) == matches, seen.as_text()
    for batch in steps()[:2]:
        toy.check(fast, batch, atol=0, rtol=0)
