"""What is easily overlooked, for random programs: other weights, marks that end, constant masks, a
head's width, rows kept for padding that are read, state that is written through views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rows_chains import Stage, chain, changed, counted, literal, same
from rows_idioms import LAST, like, zeroed
from rows_inner import INNER_CHAINS
from rows_numbers import NUMBERS
from rows_pairs import PAIRS
from rows_programs import INF

aten = torch.ops.aten

# --- values that keep rows, of which something is known -----------------------------------------

MARKED: Stage = (
    lambda _, g: torch.softmax(torch.where(g.real[:, None], g.x, -INF), 0),
    lambda _, g: zeroed(g.x, g.real),
    lambda _, g: torch.ones_like(g.x),
    lambda _, g: torch.zeros_like(g.x),
    lambda _, g: torch.where(g.real[:, None], g.x, -INF),
    lambda _, g: g.w[g.ids],
    lambda _, g: g.x * like(g.real, g.x),
    lambda _, g: counted(g)[:, None].expand(-1, 8) * 1.0,
)
OVERWRITTEN: Stage = (
    same,
    changed(lambda v, g: v.copy_(g.x + 1)),
    changed(lambda v, g: v[:, :4].copy_(g.x[:, 4:])),
    changed(lambda v, g: v.t().copy_(g.x.t())),
    changed(lambda v, g: v.view(-1).copy_(g.x.flatten())),
    changed(lambda v, g: v[1:].copy_(g.x[1:])),
    changed(lambda v, g: v.fill_(2)),
    changed(lambda v, g: v.view(-1, 4).mul_(2)),
    lambda v, g: v.bool().float(),
    lambda v, g: v[1:],
    lambda v, g: v.half().float(),
    lambda v, g: v.flatten(),
)
SUMMED: Stage = (
    lambda v, g: v.sum(0),
    lambda v, g: v.amax(0),
    lambda v, g: v.prod(0),
    lambda v, g: v.reciprocal().amin(0),
    lambda v, g: v.t() @ v,
    lambda v, g: (v == 0).any(0),
    lambda v, g: v.logsumexp(0),
    same,
)
LOOKED_UP: Stage = (
    lambda _, g: g.w[g.ids],
    lambda _, g: g.w16[g.ids],
    lambda _, g: g.w16[g.ids],
    lambda _, g: g.zero[g.ids],
    lambda _, g: g.neg[g.ids],
    lambda _, g: g.odds[g.ids],
    lambda _, g: (g.w16 * 100)[g.ids],
    lambda _, g: g.w16.square()[g.ids],
    lambda _, g: F.layer_norm(g.zero, (8,), eps=0.0)[g.ids],
    lambda _, g: F.rms_norm(g.zero, (8,), eps=0.0)[g.ids],
    lambda _, g: F.layer_norm(g.w[g.ids], (8,), weight=1 / torch.zeros(8, device=g.x.device)),
    lambda _, g: F.layer_norm(g.zero[g.ids], (8,), eps=0.0),
    lambda _, g: torch.empty_like(g.w)[g.ids],
    lambda _, g: changed(lambda v, g: v[1:].copy_(g.w[1:]))(torch.empty_like(g.w), g)[g.ids],
    lambda _, g: g.w.new_empty(12, 8)[g.ids] * 0,
    lambda _, g: (g.w @ g.w.t() @ g.w)[g.ids],
    lambda _, g: F.embedding(g.ids, g.odds),
    lambda _, g: (g.w / g.zero.sum(1, keepdim=True))[g.ids],
    lambda _, g: torch.eye(12, 8, device=g.x.device)[g.ids],
    lambda _, g: g.x16,
)
MADE_OF_IT: Stage = (
    same,
    same,
    lambda v, g: v.sum(1, keepdim=True),
    lambda v, g: v.sum(1),
    lambda v, g: v * 100,
    lambda v, g: v.exp(),
    lambda v, g: v.log(),
    lambda v, g: v.softmax(-1),
    lambda v, g: v.logit(),
    lambda v, g: v.square(),
    lambda v, g: v @ v.new_ones(8, 2),
    lambda v, g: F.layer_norm(v, (8,), eps=0.0),
    lambda v, g: v.cumsum(1),
    lambda v, g: v.prod(1, keepdim=True),
    lambda v, g: v.norm(dim=1, keepdim=True),
)
LEFT_OUT: Stage = (
    lambda v, g: (v * like(g.real, v)).sum(0),
    lambda v, g: (v * like(g.real, v)).sum(),
    lambda v, g: g.real.to(v.dtype) @ v,
    lambda v, g: torch.where(g.real[:, None], 1.0, 0.0).to(v.dtype).t() @ v,
    lambda v, g: torch.reciprocal(v * like(g.real, v)).amin(0),
    lambda v, g: torch.copysign(torch.ones_like(v), v * like(g.real, v)).sum(0),
    lambda v, g: torch.atan2(v * like(g.real, v), v.new_full((), -1.0)).sum(0),
    lambda v, g: zeroed(v, g.real).sum(0),
    lambda v, g: zeroed(v, g.real).t() @ v,
    lambda v, g: (zeroed(v, g.real) * v).sum(0),
)


def of_zeros(gradient: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The backward of an op, where what comes back to padding is 0."""
    return lambda v, g: gradient(zeroed(g.x, g.real).to(v.dtype), v)


GRADIENTS: Stage = tuple(map(of_zeros, (
    aten.logit_backward, aten.sigmoid_backward, aten.tanh_backward, aten.gelu_backward,
    aten.silu_backward, aten.hardswish_backward, aten.mish_backward, aten.hardsigmoid_backward,
    lambda d, v: aten.softplus_backward(d, v, 1, 20),
    lambda d, v: aten.softshrink_backward(d, v, 0.5),
    lambda d, v: aten.threshold_backward(d, v, 0),
    lambda d, v: aten.hardtanh_backward(d, v, -1, 1),
    lambda d, v: aten.leaky_relu_backward(d, v, 0.1, False),
    lambda d, v: aten.elu_backward(d, 1, 1, 1, False, v),
    lambda d, v: aten._softmax_backward_data(d, v, -1, v.dtype),
    lambda d, v: aten._log_softmax_backward_data(d, v, -1, v.dtype),
    lambda d, v: aten.glu_backward(d[:, :4], v, -1),
)))  # fmt: skip
FLOATS: Stage = (*LOOKED_UP[:6], lambda _, g: g.x, lambda _, g: 1 / g.x, lambda _, g: g.x16)

# --- masks, matrices and the width of a head ------------------------------------------------------

BASES: Stage = (
    lambda _, g: g.y.expand(2, 3, -1).clone(),
    lambda _, g: g.x.t()[:6].reshape(2, 3, -1),
    lambda _, g: torch.zeros(g.x.shape[0], device=g.x.device).expand(2, 3, -1).clone(),
    lambda _, g: g.w[:6].view(2, 3, 8) * 1,
)


def masked_by(*indices: Any) -> Callable[[Any, Any], Any]:
    return lambda v, g: v.index_put(tuple(literal(g, i) for i in indices), literal(g, 1.0))


TWO_DIMS = [[True, False, False], [False, False, False]]
MASKS: Stage = (
    masked_by(TWO_DIMS, [-1]),
    masked_by(TWO_DIMS, [0]),
    masked_by([[True, False, True], [False, False, False]]),
    masked_by([True, False], [-1]),
    masked_by([True, False], [0]),
    masked_by([True, False], [1], [-1]),
    masked_by([False, True]),
    masked_by([1, 0], [1], [-1]),
)
BYTES: Stage = (
    lambda _, g: g.x.index_put((g.real.to(torch.uint8),), zeroed(g.x, g.real), accumulate=True),
    lambda _, g: g.x.index_put((g.real.to(torch.uint8),), g.w[1]),
    lambda _, g: g.x.index_put((g.small,), g.w[1]),
    lambda _, g: g.x[g.real.to(torch.uint8)],
    lambda _, g: g.x * g.real.to(torch.uint8)[:, None],
    lambda _, g: torch.where(g.small.bool()[:, None], g.x, 0).sum(0),
    lambda _, g: torch.where(g.on[:, None], g.x, 0).sum(0),
    lambda _, g: g.x.masked_fill(g.on[:, None], 0.0),
    lambda _, g: g.x.index_put((g.on,), literal(g, 0.0)),
    lambda _, g: g.x.index_put((g.on & g.real,), literal(g, 0.0)).sum(0),
    lambda _, g: (g.on & g.real).to(torch.uint8).sum(0),
    lambda _, g: g.w.index_put((literal(g, [True, False] * 6), g.ids[:6] % 8), literal(g, 1.0)),
    lambda _, g: (~g.on).any(0),
)
SQUARES: Stage = (
    lambda _, g: torch.eye(g.x.shape[0], 3, device=g.x.device),
    lambda _, g: torch.eye(g.starts.shape[0] - 1, g.x.shape[0], device=g.x.device),
    lambda _, g: torch.eye(g.x.shape[0], device=g.x.device),
    lambda _, g: torch.eye(3, g.x.shape[0], device=g.x.device).t(),
    lambda _, g: torch.ones(g.x.shape[0], g.x.shape[0], device=g.x.device).tril(),
    lambda _, g: torch.eye(g.x.shape[0], device=g.x.device).tril() * 2,
)
WIDTHS: Stage = (
    lambda _, g: g.x.t().contiguous()[None, None],
    lambda _, g: zeroed(g.x, g.real).t().contiguous()[None, None],
    lambda _, g: g.x.t()[None, None],
    lambda _, g: zeroed(g.x, g.real)[None, None],
    lambda _, g: zeroed(g.x, g.real).t().unflatten(0, (2, 4))[None],
)
ATTENDED: Stage = (
    lambda q, g: F.scaled_dot_product_attention(q, q, q).sum(-2),
    lambda q, g: F.scaled_dot_product_attention(q, q, q)[0, 0],
    lambda q, g: F.scaled_dot_product_attention(q, q, q, is_causal=True)[0, 0],
    lambda q, g: F.scaled_dot_product_attention(q, q, q, scale=0.5)[0, 0],
    lambda q, g: q @ q.mT,
    lambda q, g: (q @ q.mT).softmax(-1) @ q,
    lambda q, g: q.mT @ q,
)

# --- rows kept for padding, and state that is written through views -------------------------------

WRITTEN: Stage = (
    lambda _, g: g.total.index_put((g.place,), g.x),
    lambda _, g: g.total.index_put((torch.where(g.real, g.slot, LAST),), g.x),
    lambda _, g: g.total.index_copy(0, torch.where(g.real, g.slot, LAST), g.x + 1),
    lambda _, g: g.total.index_add(0, torch.where(g.real, g.slot, 0), g.x + 1),
    lambda _, g: g.total.index_fill(0, g.place, 3.0),
    lambda _, g: g.total.index_put_((g.place,), g.x),
    lambda _, g: g.total.index_put_((torch.where(g.real, g.slot, LAST),), g.x + 1),
    lambda _, g: g.total.view(-1, 4).index_put((g.place,), g.x[:, :4] + 1).view(-1, 8),
    lambda _, g: g.total.scatter(0, g.place[:, None].expand(-1, 8), g.x),
)
KEPT_READ: Stage = (
    lambda c, g: c.sum(0),
    lambda c, g: c[-1],
    lambda c, g: c.roll(1, 0),
    lambda c, g: g.x @ c.sum(0),
    lambda c, g: F.linear(g.x, c),
    lambda c, g: c.argmax(0),
    lambda c, g: c[g.ids % (LAST + 1)],
    lambda c, g: c[g.ids % 5],
    lambda c, g: c[1:LAST],
    lambda c, g: c[1:LAST].sum(0),
    lambda c, g: c + c[LAST],
    lambda c, g: c.cumsum(0),
    lambda c, g: c.flip(0),
    lambda c, g: c.softmax(0),
    lambda c, g: c.t() @ c,
    lambda c, g: c.amax(1),
    lambda c, g: c[g.place],
    lambda c, g: c[g.slot.clamp(min=0)],
    lambda c, g: c.view(-1, 4)[g.place],
    lambda c, g: c.t()[:, :3],
    lambda c, g: torch.cat([c[LAST:], c[1:]]),
    lambda c, g: c[g.wild % (LAST + 1)],
    same,
)
READ_FIRST: Stage = (
    lambda _, g: g.total.view(-1, 4)[g.place],
    lambda _, g: g.total[g.place],
    lambda _, g: g.total.t()[:, g.place].t(),
    lambda _, g: g.total.view(-1)[g.place][:, None],
    lambda _, g: g.total.view(13, 2, 8)[g.place, 0],
    lambda _, g: g.total.sum(0),
    lambda _, g: g.total[-1] * 1,
    lambda _, g: g.total[1:LAST].sum(0),
    lambda _, g: g.x @ g.total.sum(0),
    lambda _, g: g.total.amax(0),
    lambda _, g: g.total[g.ids % 5],
)


def _then(write: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def run(v: Any, g: Any) -> Any:
        write(g)
        return v

    return run


WRITTEN_THEN: Stage = tuple(map(_then, (
    lambda g: g.total.view(-1, 4).index_put_((g.place,), 1 / g.x[:, :4]),
    lambda g: g.total.view(13, 2, 8).index_put_((g.place,), 1 / g.x[:, None]),
    lambda g: g.total.index_put_((g.place,), 1 / g.x),
    lambda g: g.total.view(-1).index_put_((g.place,), 1 / g.x[:, 0]),
    lambda g: g.total.t().index_copy_(1, g.place, 1 / g.x.t()),
    lambda g: g.total[:20].index_put_((g.place,), g.x + 1),
    lambda g: g.total.index_copy_(0, torch.where(g.real, g.slot, LAST), g.x + 1),
    lambda g: g.total.copy_(g.other),
    lambda g: g.total.mul_(0.5),
)))  # fmt: skip
USED: Stage = (
    same,
    lambda v, g: zeroed(g.x, g.real).t() @ v,
    lambda v, g: (v * like(g.real, v)).sum(0),
    lambda v, g: g.real.float() @ v,
    lambda v, g: zeroed(v, g.real).sum(0),
)

_OF_WEIGHTS = "w w16 zero neg odds ids real x x16"
ODD = [
    *NUMBERS,
    *INNER_CHAINS,
    *PAIRS * 2,
    chain("x w ids real", MARKED, OVERWRITTEN, SUMMED),
    *[chain(_OF_WEIGHTS, LOOKED_UP, MADE_OF_IT, LEFT_OUT)] * 2,
    chain(_OF_WEIGHTS, LOOKED_UP, LEFT_OUT),
    chain(_OF_WEIGHTS, FLOATS, GRADIENTS, SUMMED),
    chain("x y w", BASES, MASKS),
    chain("x w ids real small on", BYTES),
    chain("x starts", SQUARES, (*SUMMED[:2], same)),
    chain("x real", WIDTHS, ATTENDED),
    *[chain("total place slot ids wild real x", WRITTEN, KEPT_READ)] * 2,
    *[chain("total other place slot ids real x", READ_FIRST, WRITTEN_THEN, USED)] * 2,
]
