"""Integers that are easily overlooked: offsets seen otherwise, counts, wraps; what they index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rows_chains import Stage, chain, changed, counted, literal, same
from rows_idioms import zeroed

import fngraph as fg

OFFSETS: Stage = (
    lambda _, g: g.starts,
    lambda _, g: g.starts[1:],
    lambda _, g: g.starts[:, None].expand(-1, 2)[:, 1:].reshape(-1),
    lambda _, g: g.starts[:, None].expand(-1, 2)[:, 1:].squeeze(1),
    lambda _, g: g.starts[None].expand(2, -1)[1:].flatten(),
    lambda _, g: g.starts[None][:, 1:][0],
    lambda _, g: g.starts[:, None].expand(-1, 3)[1:, :1].squeeze(1),
    lambda _, g: g.starts[::2],
    lambda _, g: g.starts.int(),
    lambda _, g: g.starts.clone(),
    lambda _, g: torch.stack([g.starts, g.starts], 1)[:, 1],
    lambda _, g: g.starts.view(1, -1).t()[:, 0],
)
COUNTED: Stage = (
    lambda _, g: counted(g),
    lambda _, g: counted(g)[:, None].expand(-1, 2).reshape(-1),
    lambda _, g: counted(g).view(-1, 1).squeeze(1),
    lambda _, g: counted(g)[1:],
    lambda _, g: counted(g, 0, 2 * g.x.shape[0], 2),
    lambda _, g: counted(g, 2 * g.x.shape[0])[::2],
    lambda _, g: counted(g, 1, g.x.shape[0] + 1),
    lambda _, g: counted(g) + 1,
    lambda _, g: counted(g).int(),
    lambda _, g: counted(g).to(torch.int8),
    lambda _, g: counted(g).flip(0),
    lambda _, g: changed(lambda v, g: v.copy_(g.ids + 100))(counted(g), g),
    lambda _, g: changed(lambda v, g: v[1:].copy_(g.ids[1:]))(counted(g), g),
    lambda _, g: counted(g, 2 * g.x.shape[0]).view(-1, 2)[:, 0],
    lambda _, g: counted(g)[None].expand(2, -1)[1],
)
WRAPPED: Stage = (
    lambda _, g: (counted(g) * 2**62) // 2**62,
    lambda _, g: counted(g) * 2**61,
    lambda _, g: counted(g).int() * 2**30,
    lambda _, g: counted(g).to(torch.int8) + 120,
    lambda _, g: g.small + 250,
    lambda _, g: g.small * 2,
    lambda _, g: -g.small,
    lambda _, g: g.small - 1,
    lambda _, g: g.narrow.abs(),
    lambda _, g: g.narrow.square(),
    lambda _, g: g.narrow * g.narrow,
    lambda _, g: g.narrow + (2**31 - 1),
    lambda _, g: -g.narrow,
    lambda _, g: torch.where(g.real, g.narrow, 0).abs(),
    lambda _, g: torch.where(g.real, g.narrow, 0).square(),
    lambda _, g: torch.where(g.real, g.small, 0) - 1,
    lambda _, g: g.small.sum(0, dtype=torch.uint8) + g.small,
    lambda _, g: torch.where(g.real, g.wild, 0).abs(),
    lambda _, g: g.wild * 2,
)


def with_literal(fn: Callable[[Any, Any], Any], values: Any, dtype: Any) -> Callable[..., Any]:
    return lambda _, g: fn(g, literal(g, values, dtype))


PROMOTED: Stage = tuple(
    with_literal(fn, values, dtype)
    for fn in (lambda g, c: g.far + c, lambda g, c: g.slot * c, lambda g, c: g.small + c,
               lambda g, c: g.x16[:, 0] * c, lambda g, c: g.y + c,
               lambda g, c: torch.maximum(g.far, c))
    for values, dtype in ((250, torch.uint8), ([250], torch.uint8), ([100], torch.int8),
                          ([1000], torch.int32), (2.5, torch.float64), ([1e5], torch.float32))
)  # fmt: skip
TRUSTED: Stage = (
    lambda _, g: fg.trust_rows(g.ids),
    lambda _, g: fg.trust_rows(g.place) - 1,
    lambda _, g: fg.trust_rows(g.ids - 1) + 1,
    lambda _, g: torch.where(g.ids > 2, fg.trust_rows(g.ids), 5) - 5,
    lambda _, g: torch.where(g.real, fg.trust_rows(g.place), 0),
    lambda _, g: torch.minimum(fg.trust_rows(g.ids), literal(g, 5)) - 5,
    lambda _, g: fg.trust_rows(g.slot).clamp(0, 5),
    lambda _, g: fg.trust_rows(g.ids) * 2 - fg.trust_rows(g.ids),
    lambda _, g: fg.trust_rows(g.ids).clamp(max=g.y[:1].long()),
)
"""Row 0, which padding names, is there."""
FAR: Stage = (
    lambda _, g: fg.trust_rows(g.far),
    lambda _, g: fg.trust_rows(g.far - 1) + 2,
    lambda _, g: fg.trust_rows(g.far) + 5,
    lambda _, g: fg.trust_rows(g.far) - 1,
    lambda _, g: torch.where(g.real, fg.trust_rows(g.far), 0),
    lambda _, g: torch.stack([fg.trust_rows(g.far), g.far])[0],
    lambda _, g: torch.minimum(fg.trust_rows(g.far), g.slot + 9),
)
"""Row 10, which padding names, is there in weights alone."""
OF_WEIGHTS: Stage = (
    lambda i, g: g.w[i],
    lambda i, g: g.w[i + 5],
    lambda i, g: g.w[i - 6],
    lambda i, g: F.embedding(i, g.w),
    lambda i, g: F.embedding(i + 1, g.w),
    lambda i, g: g.w.index_fill(0, i, 1.0),
    lambda i, g: torch.zeros(12, device=g.x.device).index_add(0, i, g.real.float()),
)
REPEATED: Stage = (
    lambda _, g: torch.repeat_interleave(literal(g, [2, 1]), output_size=3),
    lambda _, g: torch.repeat_interleave(literal(g, [1, 0, 1]), output_size=2),
    lambda _, g: torch.repeat_interleave(g.real.long(), output_size=g.x.shape[0]),
    lambda _, g: torch.repeat_interleave(g.starts.diff(), output_size=g.x.shape[0]),
    lambda _, g: torch.repeat_interleave(literal(g, [3]), output_size=3),
    lambda _, g: g.ids[:2].repeat_interleave(literal(g, [1, 2]), output_size=3),
)
INDEXED: Stage = (
    lambda i, g: g.x[i],
    lambda i, g: g.x[i - 1],
    lambda i, g: g.x[i.clamp(max=0)],
    lambda i, g: g.y[i.clamp(min=1) - 1],
    lambda i, g: g.x.index_select(0, i - 1),
    lambda i, g: g.w[i.long()],
    lambda i, g: g.w[i + 5],
    lambda i, g: g.w[i - 6],
    lambda i, g: g.w[i % 12],
    lambda i, g: F.embedding(i, g.w),
    lambda i, g: g.x.index_fill(0, i, 1.0),
    lambda i, g: torch.zeros_like(g.y).index_fill(0, i, 1.0),
    lambda i, g: torch.zeros_like(g.y).index_put((i,), g.y),
    lambda i, g: torch.searchsorted(g.starts, i, right=True),
    lambda i, g: torch.searchsorted(i, counted(g), right=True),
    lambda i, g: torch.zeros_like(g.x[:, :2]).flatten().index_fill(0, i, 1.0),
    lambda i, g: torch.zeros(12, device=g.x.device).index_add(0, i, g.real.float()),
)
MEASURED: Stage = (
    same,
    lambda i, g: i.amax(0),
    lambda i, g: i.sum(0),
    lambda i, g: torch.where(g.real, i, 0).amax(0),
    lambda i, g: torch.where(g.real, i, 0).abs().amax(0),
    lambda i, g: torch.where(g.real, i, 0).square().amax(0),
    lambda i, g: i.logsumexp(0),
    lambda i, g: torch.where(i[:, None] == 4, 0.0, zeroed(g.x, g.real) + 1).sum(0),
    lambda i, g: torch.where(i[:, None] > 0, zeroed(g.x, g.real), 1.0).sum(0),
    lambda i, g: i.sort(descending=True)[0],
    lambda i, g: (g.x * (i != 0)[:, None]).sum(0),
    lambda i, g: i.clamp(min=0).prod(0),
)
CLASSES: Stage = (
    lambda _, g: g.slot,
    lambda _, g: g.far,
    lambda _, g: g.slot % 8,
    lambda _, g: g.place % 8,
    lambda _, g: torch.where(g.real, g.far, -100),
    lambda _, g: torch.where(g.real, g.ids % 8, 9),
    lambda _, g: fg.trust_rows(g.place % 8),
)
LOSSES: Stage = (
    lambda c, g: F.nll_loss(g.x, c, reduction="none"),
    lambda c, g: F.cross_entropy(g.x, c, reduction="none"),
    lambda c, g: F.nll_loss(g.x, c, ignore_index=9, reduction="sum"),
    lambda c, g: F.cross_entropy(zeroed(g.x, g.real), c),
    lambda c, g: F.nll_loss(g.x, c, weight=g.x.new_ones(8), reduction="none"),
    lambda c, g: g.x.gather(1, c[:, None]),
    lambda c, g: F.one_hot(c, 12).sum(0),
)

_NAMES = "x y w ids starts real slot far small narrow wild"
NUMBERS = [
    chain(_NAMES, OFFSETS, INDEXED),
    chain(_NAMES, COUNTED, INDEXED),
    chain(_NAMES, WRAPPED, INDEXED),
    chain(_NAMES, WRAPPED, MEASURED),
    chain(f"{_NAMES} x16", PROMOTED, MEASURED),
    chain(f"{_NAMES} place", TRUSTED, INDEXED),
    chain(_NAMES, FAR, OF_WEIGHTS),
    chain(_NAMES, REPEATED, INDEXED),
    chain("x slot far place ids real", CLASSES, LOSSES),
]
