"""Values that mix rows over T or R: true rows of them depend on padding, or on how much there is.

Each takes `(x, p, b)`: (T, E) rows, the weights and the batch of the toys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from rows_given import T_of, heads, masked, owner

Outputs = dict[str, Any]

MIXED: Outputs = {
    "sum(0)": lambda x, p, b: x.sum(0),
    "sum()": lambda x, p, b: x.sum(),
    "torch.sum(dim=0, keepdim)": lambda x, p, b: torch.sum(x, dim=0, keepdim=True) + x,
    "sum(-2)": lambda x, p, b: x.sum(-2),
    "sum((0, 1))": lambda x, p, b: x.sum((0, 1)),
    "mean(0)": lambda x, p, b: x.mean(0),
    "mean()": lambda x, p, b: x.mean(),
    "x - x.mean()": lambda x, p, b: x - x.mean(),
    "x - x.mean(0)": lambda x, p, b: x - x.mean(0),
    "x.t().sum(1)": lambda x, p, b: x.t().sum(1),
    "flatten().sum()": lambda x, p, b: x.flatten().sum(),
    "max()": lambda x, p, b: (-x).max(),
    "amax(0)": lambda x, p, b: (-x).amax(0),
    "amin(0)": lambda x, p, b: x.amin(0),
    "max(0)": lambda x, p, b: torch.max(-x, 0).values,
    "max(0).indices": lambda x, p, b: torch.max(-x, 0).indices,
    "aminmax": lambda x, p, b: torch.aminmax(x, dim=0).min,
    "prod(0)": lambda x, p, b: (x + 3).prod(0),
    "std(0)": lambda x, p, b: (x + x[:1]).std(0, correction=0),
    "var_mean(0)": lambda x, p, b: torch.var_mean(x, 0, correction=0)[0],
    "norm()": lambda x, p, b: x.norm(),
    "linalg.vector_norm(dim=0)": lambda x, p, b: torch.linalg.vector_norm(x, dim=0),
    "logsumexp(0)": lambda x, p, b: x.logsumexp(0),
    "any(0)": lambda x, p, b: (x < -0.9).any(0),
    "all()": lambda x, p, b: (x > -0.9).all(),
    "count_nonzero(0)": lambda x, p, b: x.count_nonzero(0),
    "median(0)": lambda x, p, b: x.median(0).values,
    "kthvalue(1, 0)": lambda x, p, b: x.kthvalue(1, 0).values,
    "nanmean": lambda x, p, b: x.nanmean(0),
    "einsum te->e": lambda x, p, b: torch.einsum("te->e", x),
    "a per-tensor amax scale": lambda x, p, b: (x / x.abs().amax()).round(),
    "F.cross_entropy mean": lambda x, p, b: F.cross_entropy(x @ p["w"].t(), b.token_ids),
    "F.mse_loss": lambda x, p, b: F.mse_loss(x, x * 2),
    "a loop of adds over a reduced view": lambda x, p, b: sum(x.mean(0)[i] for i in range(3)),
    "softmax(0)": lambda x, p, b: x.softmax(0),
    "log_softmax(0)": lambda x, p, b: F.log_softmax(x, 0),
    "F.normalize(dim=0)": lambda x, p, b: F.normalize(x, dim=0),
    "layer norm over all": lambda x, p, b: (x - x.mean()) / x.var(correction=0).add(1e-5).sqrt(),
    "batch norm in training": lambda x, p, b: F.batch_norm(
        x + torch.arange(T_of(b))[:, None], None, None, training=True
    ),
    "flip(0)": lambda x, p, b: x.flip(0),
    "torch.flipud": lambda x, p, b: torch.flipud(x),
    "roll(1, 0)": lambda x, p, b: x.roll(1, 0),
    "roll(-1, 0)": lambda x, p, b: x.roll(-1, 0),
    "sort(0)": lambda x, p, b: x.sort(0).values,
    "sort(0, descending)": lambda x, p, b: (-x).sort(0, descending=True).values,
    "argsort(0)": lambda x, p, b: x.argsort(dim=0, stable=True),
    "argsort of what counts up to T, the other way": lambda x, p, b: torch.arange(
        x.shape[0]
    ).argsort(descending=True, stable=True),
    "topk(1, 0)": lambda x, p, b: (-x).topk(1, 0).values,
    "argmax(0)": lambda x, p, b: (-x).argmax(0),
    "argmin(0), gathered": lambda x, p, b: x.gather(0, x.argmin(0, keepdim=True)),
    "fft over T": lambda x, p, b: torch.fft.fft(x, dim=0).real,
    "reverse cumsum": lambda x, p, b: x.flip(0).cumsum(0).flip(0),
    "sum - cumsum": lambda x, p, b: x.sum(0) - x.cumsum(0),
    "shift left, cat": lambda x, p, b: torch.cat([x[1:], x[:1]]),
    "shift left, zeros": lambda x, p, b: torch.cat([x[1:], x.new_zeros(1, x.shape[1])]),
    "shift left, pad": lambda x, p, b: F.pad(x[1:], (0, 0, 0, 1)),
    "shift left, in place": lambda x, p, b: x.clone().index_copy_(
        0, torch.arange(T_of(b) - 1), x[1:]
    ),
    "centered conv1d": lambda x, p, b: F.conv1d(x.t()[None], x.new_ones(1, 8, 3), padding=1)[0].t(),
    "centered average pool": lambda x, p, b: F.avg_pool1d(
        x.t()[None], 3, 1, 1, count_include_pad=False
    )[0].t(),
    "pictures, rows of which are tokens": lambda x, p, b: F.interpolate(
        x[None, None], scale_factor=(1.0, 2.0), mode="nearest"
    ),
    "pooled over pictures that are not in front": lambda x, p, b: F.max_pool2d(
        x[:, :4].t().unflatten(0, (2, 2)), (2, 1)
    ),
    "cut out of what has tokens for rows": lambda x, p, b: F.unfold(x[None, None], 3, padding=1),
    "adaptive pool": lambda x, p, b: F.adaptive_avg_pool1d(x.t()[None], 1)[0],
    "x[-1]": lambda x, p, b: x[-1] * 1,
    "x[-1:]": lambda x, p, b: x[-1:] * 1,
    "x.select(0, -1)": lambda x, p, b: x.select(0, -1) * 1,
    "narrow": lambda x, p, b: x.narrow(0, T_of(b) - 1, 1) * 1,
    "x + x[-1]": lambda x, p, b: x + x[-1],
    "x[tensor(-1)]": lambda x, p, b: x[torch.tensor([-1])] * 1,
    "x[arange(T).flip]": lambda x, p, b: x[torch.arange(T_of(b)).flip(0)],
    "x[arange(T-1, -1, -1)]": lambda x, p, b: x[torch.arange(T_of(b) - 1, -1, -1)],
    "x[T - 1 - arange]": lambda x, p, b: x[T_of(b) - 1 - torch.arange(T_of(b))],
    "index_select with flip": lambda x, p, b: x.index_select(0, torch.arange(T_of(b)).flip(0)),
    "negative arange": lambda x, p, b: x[-1 - torch.arange(T_of(b))],
    "x.T @ x": lambda x, p, b: x.t() @ x,
    "einsum te,tf->ef": lambda x, p, b: torch.einsum("te,tf->ef", x, x),
    "ones @ x": lambda x, p, b: x.new_ones(1, T_of(b)) @ x,
    "(x @ x.T) @ x": lambda x, p, b: (x @ x.t()) @ x,
    "(x @ x.T).sum(1)": lambda x, p, b: (x @ x.t()).sum(1),
    "einsum ti,si->t": lambda x, p, b: torch.einsum("ti,si->t", x, x),
    "cdist, then min": lambda x, p, b: torch.cdist(x + torch.arange(T_of(b))[:, None], -x).amin(1),
    "attention without a mask": lambda x, p, b: F.scaled_dot_product_attention(*[heads(x)] * 3)[
        0
    ].sum(0),
    "attention by hand": lambda x, p, b: (x @ x.t()).softmax(-1) @ x,
    "addmm with x.T": lambda x, p, b: torch.addmm(x.new_zeros(8, 8), x.t(), x),
    "tensordot over T": lambda x, p, b: torch.tensordot(x, x, dims=([0], [0])),
    "pinv": lambda x, p, b: torch.linalg.pinv(x + torch.eye(8)[:1]).sum(1),
    "x * T": lambda x, p, b: x * T_of(b),
    "x / len": lambda x, p, b: x / x.shape[0],
    "x * R": lambda x, p, b: x * b.seq_lens.shape[0],
    "x * x.numel()": lambda x, p, b: x * x.numel(),
    "full(T)": lambda x, p, b: torch.full((T_of(b),), 1.0) * T_of(b),
    "arange(T) / T": lambda x, p, b: torch.arange(T_of(b)) / T_of(b),
    "linspace over T": lambda x, p, b: torch.arange(T_of(b)).float() / (T_of(b) + 1),
    "arange(T) == T - 1": lambda x, p, b: torch.arange(T_of(b)) == T_of(b) - 1,
    "scalar_tensor(T)": lambda x, p, b: torch.scalar_tensor(T_of(b)) * 1.0,
    "ones(T).sum()": lambda x, p, b: torch.ones(T_of(b)).sum(),
    "ones_like(ids).sum()": lambda x, p, b: torch.ones_like(b.token_ids).sum(),
    "masked sum / T": lambda x, p, b: masked(p, b).sum(0) / T_of(b),
    "masked mean(0)": lambda x, p, b: masked(p, b).mean(0),
    "seq_lens.min()": lambda x, p, b: b.seq_lens.min(),
    "seq_lens mean": lambda x, p, b: b.seq_lens.float().mean(),
    "seq_lens.flip": lambda x, p, b: b.seq_lens.flip(0),
    "seq_lens.sort": lambda x, p, b: b.seq_lens.sort().values,
    "seq_lens[-1]": lambda x, p, b: b.seq_lens[-1] * 1,
    "softmax over R": lambda x, p, b: b.seq_lens.float().softmax(0),
    "query_start_loc[-1] is T, but in a uniform key": lambda x, p, b: b.query_start_loc[-1] * 1,
    "expert load, one hot": lambda x, p, b: F.one_hot(x.argmax(-1), 8).sum(0),
    "bincount of ids": lambda x, p, b: torch.zeros(11).index_add(
        0, b.token_ids, torch.ones(T_of(b))
    ),
    "scatter_add of ids": lambda x, p, b: torch.zeros(11).scatter_add(
        0, b.token_ids, torch.ones(T_of(b))
    ),
    "rank within an expert, from behind": lambda x, p, b: (
        F.one_hot(b.token_ids, 11).flip(0).cumsum(0).flip(0)
    ),
    "histc": lambda x, p, b: torch.histc(b.token_ids.float(), 4, 0, 11),
    "sums of requests, clamped owner": lambda x, p, b: x.new_zeros(
        b.seq_lens.shape[0], 8
    ).index_add(0, owner(b).clamp(max=b.seq_lens.shape[0] - 1), x),
    "chunk(2)": lambda x, p, b: x.chunk(2)[0] * 1,
    "F.interpolate": lambda x, p, b: F.interpolate(x.t()[None], size=7, mode="linear")[0],
    "T % 2 as a number": lambda x, p, b: x * (T_of(b) % 2),
    "T * 1.0": lambda x, p, b: x + T_of(b) * 1.0,
    "T ** 0.5": lambda x, p, b: x / T_of(b) ** 0.5,
    "1 << T": lambda x, p, b: x * (1 << T_of(b)),
    "sum of the shape": lambda x, p, b: x * sum(x.shape),
    "x * (T > 3)": lambda x, p, b: x * (T_of(b) > 3),
    "sym_not": lambda x, p, b: x * torch.sym_not(T_of(b) > 3),
    "sym_max": lambda x, p, b: x * torch.sym_max(T_of(b), 3),
    "scatter_reduce amax": lambda x, p, b: torch.zeros(11, 8).scatter_reduce(
        0, b.token_ids[:, None].expand(-1, 8), x, "amax"
    ),
    "x[T - R:]": lambda x, p, b: x[T_of(b) - b.seq_lens.shape[0] :] * 1,
    "padded to 16": lambda x, p, b: F.pad(x, (0, 0, 0, 16 - T_of(b))),
    "reversed": lambda x, p, b: x.__reversed__(),
    "the last row before lengths, which do not rise": lambda x, p, b: x[b.seq_lens[1:] - 1],
    "elements that are among the rows": lambda x, p, b: torch.isin(p["w"][:2, :2], x),
}

SIZED: Outputs = {
    "x[T - 1]": lambda x, p, b: x[T_of(b) - 1] * 1,
    "tensor_split(2)": lambda x, p, b: x.tensor_split(2)[0] * 1,
    "squeeze()": lambda x, p, b: x.sum(1, keepdim=True).squeeze() * 1,
    "squeeze(0)": lambda x, p, b: x.squeeze(0) * 1,
    "squeeze of two dims": lambda x, p, b: x[:, :1].squeeze((0, 1)) * 1,
    "x[3]": lambda x, p, b: x[3] * 1,
    "x.select(0, 1)": lambda x, p, b: x.select(0, 1) * 1,
    "x[:4]": lambda x, p, b: x[:4] * 1,
    "x[-4:]": lambda x, p, b: x[-4:] * 1,
    "x[2:]": lambda x, p, b: x[2:] * 1,
}
