"""Ops that compute over some dims, for random programs: T among those dims, before and behind; and
rows that are folded behind others, changed, and unfolded one way or another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rows_chains import Stage, chain, same
from rows_idioms import like, zeroed

aten = torch.ops.aten

# --- four dims, of which T is one or two ----------------------------------------------------------

SHAPED: Stage = (
    lambda _, g: g.x.view(-1, 2, 2, 2),
    lambda _, g: g.x.view(-1, 2, 2, 2),
    lambda _, g: zeroed(g.x, g.real).view(-1, 2, 2, 2),
    lambda _, g: g.x.nan_to_num(0, 9, -9).view(-1, 2, 2, 2),
    lambda _, g: g.x.view(-1, 1, 2, 4).expand(-1, 2, -1, -1),
    lambda _, g: g.x.t().reshape(2, 2, 2, -1),
    lambda _, g: g.x.view(-1, 2, 4).permute(1, 0, 2)[None].expand(2, -1, -1, -1),
    lambda _, g: g.x.view(-1, 2, 4).permute(1, 2, 0)[:, None].expand(-1, 2, -1, -1),
    lambda _, g: (g.x @ g.x.t())[:, None, None].expand(-1, 2, 2, -1),
    lambda _, g: (g.x @ g.x.t())[:, :, None, None].expand(-1, -1, 2, 2),
    lambda _, g: g.w[g.ids].view(-1, 2, 2, 2),
)


def square(v: Any) -> Any:
    """Matrices, as many rows as columns where they are."""
    return v if v.shape[-1] == v.shape[-2] else v @ v.mT


def finite(fn: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda v, g: fn(square(v).nan_to_num(0, 3, -3))


INNER: Stage = (
    lambda v, g: F.max_pool2d(v, 2),
    lambda v, g: F.max_pool2d(v, 2, return_indices=True)[1],
    lambda v, g: F.max_pool2d(v, 2, 1, 1),
    lambda v, g: F.avg_pool2d(v, 2),
    lambda v, g: F.avg_pool2d(v, 2, 1, 1),
    lambda v, g: F.max_unpool2d(*F.max_pool2d(v, 2, return_indices=True), 2),
    lambda v, g: F.max_unpool2d(v, (v > 1).long() * 3, 2, 1, output_size=v.shape[-2:]),
    lambda v, g: F.adaptive_avg_pool2d(v, 2),
    lambda v, g: F.adaptive_avg_pool2d(v, 3),
    lambda v, g: F.adaptive_max_pool2d(v, 1),
    lambda v, g: F.pad(v, (1, 1, 1, 1), mode="reflect"),
    lambda v, g: F.pad(v, (1, 1, 1, 1), mode="replicate"),
    lambda v, g: F.pad(v, (1, 1, 0, 1), mode="circular"),
    lambda v, g: F.pixel_shuffle(v.repeat(1, 2, 1, 1), 2),
    lambda v, g: F.pixel_unshuffle(v, 2),
    lambda v, g: F.channel_shuffle(v, 2),
    lambda v, g: F.unfold(v, 2),
    lambda v, g: F.fold(F.unfold(v, 2), v.shape[-2:], 2),
    lambda v, g: F.interpolate(v, 3, mode="bilinear", antialias=True),
    lambda v, g: F.grid_sample(v, v[..., :2], align_corners=False),
    lambda v, g: F.grid_sample(v, v[:, 0, :, :2, None].expand(-1, -1, -1, 2), "nearest", "border"),
    lambda v, g: F.glu(v, 1),
    lambda v, g: F.glu(v),
    lambda v, g: torch.fft.rfft(v).real,
    lambda v, g: torch.fft.irfft2(v).sin(),
    lambda v, g: torch.fft.fft(v, dim=0).imag,
    lambda v, g: torch.fft.fftn(v, dim=(1, 2)).abs(),
    lambda v, g: torch.diag_embed(v),
    lambda v, g: torch.diag_embed(v, dim1=0, dim2=2),
    lambda v, g: v.rot90(1, (2, 3)),
    lambda v, g: v.rot90(1, (0, 1)),
    lambda v, g: v.renorm(2, 0, 1.0),
    lambda v, g: v.renorm(2, 1, 1.0),
    lambda v, g: v.aminmax(dim=1)[0],
    lambda v, g: v.aminmax(dim=-1, keepdim=True)[1],
    lambda v, g: torch.aminmax(v)[0],
    lambda v, g: torch.cdist(v, v.flip(1)),
    lambda v, g: torch.cdist(v, v, 1.0),
    lambda v, g: torch.cdist(v, v, compute_mode="donot_use_mm_for_euclid_dist"),
    lambda v, g: torch.cdist(g.x, g.w, float("inf")),
    lambda v, g: v.masked_scatter(v > 0, v + 1),
    lambda v, g: v.masked_scatter(v > 0, g.w),
    lambda v, g: v.masked_scatter(like(g.real, v) & (v > 0), g.w.repeat(20, 1)),
    lambda v, g: v.masked_scatter(v > 0, g.x.t()),
    lambda v, g: g.w.masked_scatter(g.w > 0, v),
    lambda v, g: torch.isin(v, g.w),
    lambda v, g: torch.isin(g.ids, g.ids.new_tensor([1, 5])),
    lambda v, g: torch.isin(3, g.ids),
    lambda v, g: F.mse_loss(v, v.flip(1), reduction="none"),
    lambda v, g: F.huber_loss(v, v + 1),
    lambda v, g: F.binary_cross_entropy(v.sigmoid(), (v > 0).float(), reduction="none"),
    lambda v, g: F.logsigmoid(v),
    lambda v, g: F.hardswish(v),
    lambda v, g: F.prelu(v, g.w[0, :1]),
    lambda v, g: F.prelu(v, g.w[0, : v.shape[1]]),
    lambda v, g: F.rrelu(v),
    lambda v, g: F.bilinear(v, v, g.w[None, : v.shape[-1], : v.shape[-1]]),
    lambda v, g: F.batch_norm(v, g.w[0, :2], g.w[1, :2].abs()),
    lambda v, g: F.embedding_bag(g.ids[:, None].expand(-1, 3), g.w, mode="sum"),
    lambda v, g: F.embedding_bag(g.ids, g.w, torch.arange(0, len(g.w), 4), mode="max"),
    lambda v, g: F.embedding_bag(g.slot[:, None].expand(-1, 2), g.w.repeat(2, 1), mode="max"),
    lambda v, g: torch.unsafe_split(v, 2, 1)[0],
    lambda v, g: torch.unsafe_split(v, 2)[0],
    lambda v, g: torch.unsafe_split(v, [1, 1], 2)[1],
    lambda v, g: torch.split_copy(v, 1, -1)[1],
    lambda v, g: torch.unbind_copy(v, 1)[1],
    lambda v, g: torch.linalg.cross(v.repeat(1, 1, 1, 3)[..., :3], g.w[None, None, :1, :3]),
)  # fmt: skip
MATRICES: Stage = (
    finite(torch.linalg.det),
    finite(lambda m: torch.linalg.slogdet(m)[0]),
    finite(lambda m: torch.linalg.inv_ex(m)[1]),
    finite(lambda m: torch.linalg.inv_ex(m + 9 * torch.eye(2))[0]),
    finite(lambda m: torch.linalg.inv_ex(m)[0]),
    finite(lambda m: torch.linalg.solve_ex(m + 9 * torch.eye(2), m)[0]),
    finite(lambda m: torch.linalg.cholesky_ex(m @ m.mT + 3 * torch.eye(2))[0]),
    finite(torch.linalg.svdvals),
    finite(lambda m: torch.linalg.svd(m)[0]),
    finite(lambda m: torch.linalg.eigvalsh(m + m.mT)),
    finite(lambda m: torch.linalg.matrix_exp(m / 4)),
    finite(lambda m: torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(m)[:2], m).isnan()),
    finite(lambda m: torch.linalg.solve_triangular(m + 9 * torch.eye(2), m, upper=True)),
    lambda v, g: torch.linalg.svdvals(v),
    lambda v, g: torch.linalg.det(square(v)),
    lambda v, g: torch.linalg.pinv(v.nan_to_num(0, 1, -1)).abs() > 1e9,
)  # fmt: skip

# --- folded behind others -------------------------------------------------------------------------

FOLDED: Stage = (
    lambda _, g: torch.stack([g.x, g.x + 1]).reshape(-1, 8),
    lambda _, g: torch.stack([g.x, g.x + 1]).view(-1, 4),
    lambda _, g: g.x.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4),
    lambda _, g: zeroed(g.x, g.real).view(-1, 2, 4).transpose(0, 1).reshape(-1, 4),
    lambda _, g: g.x.view(-1, 2, 4).transpose(0, 1).reshape(-1),
    lambda _, g: g.x.view(-1, 2, 2, 2).permute(1, 2, 0, 3).reshape(-1, 2),
    lambda _, g: g.x.view(-1, 2, 2, 2).permute(1, 0, 2, 3).reshape(1, -1, 4),
    lambda _, g: torch.cat([g.x, g.x], 1).t().reshape(-1),
)
CHANGED: Stage = (
    same,
    lambda v, g: v.relu() * 2,
    lambda v, g: v + v.sin(),
    lambda v, g: v @ g.w[: v.shape[-1], :4],
    lambda v, g: F.linear(v, g.w[:4, : v.shape[-1]], g.w[0, :4]),
    lambda v, g: torch.addmm(g.w[0, :4], v, g.w[: v.shape[-1], :4]),
    lambda v, g: v + g.w[0, 0],
    lambda v, g: v * g.w[0, : v.shape[-1]],
    lambda v, g: v.sum(-1, keepdim=True),
    lambda v, g: v + g.x.repeat(2, 1)[:, : v.shape[-1]],
    lambda v, g: v + g.x.reshape(-1, v.shape[-1]),
    lambda v, g: v.cumsum(0),
    lambda v, g: v.view(-1).view(v.shape) + 1,
    lambda v, g: v.view(-1, 2).exp().view(v.shape),
    lambda v, g: v.clone().mul_(2),
    lambda v, g: v.half().float(),
)
UNFOLDED: Stage = (
    same,
    lambda v, g: v.reshape(2, -1),
    lambda v, g: v.reshape(2, -1, v.shape[-1]),
    lambda v, g: v.reshape(2, -1, 2),
    lambda v, g: v.reshape(4, -1, 2),
    lambda v, g: v.reshape(1, 2, -1, 2),
    lambda v, g: v.reshape(2, 2, -1),
    lambda v, g: v.reshape(2, g.x.shape[0], -1),
    lambda v, g: v.reshape(16, -1),
    lambda v, g: v.reshape(-1, 2, 4),
    lambda v, g: v.reshape(-1),
    lambda v, g: v[: g.x.shape[0]],
)
THEN: Stage = (
    same,
    same,
    lambda v, g: v.transpose(0, 1) * 1,
    lambda v, g: v.sum(0),
    lambda v, g: v.float().sum(1),
    lambda v, g: v[0] * 1,
    lambda v, g: v.reshape(-1, 2) + 0,
)

_NAMES = "x w ids slot real"
INNER_CHAINS = [
    *[chain(_NAMES, SHAPED, INNER, THEN)] * 3,
    chain(_NAMES, SHAPED, MATRICES, THEN),
    *[chain(_NAMES, FOLDED, CHANGED, UNFOLDED, THEN)] * 2,
]
