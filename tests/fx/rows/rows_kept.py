"""Values that keep rows: apart, in front of padding, or behind a mask or a staged index.

Each takes `(x, p, b)`: (T, E) rows, the weights and the batch of the toys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from rows_given import INF, NAN, T_of, heads, masked, owner, real

import fngraph as fg

Outputs = dict[str, Any]


def picture(x: Any) -> Any:
    """(T, 2, 2, 2): each row as a picture of two channels."""
    return x.unflatten(1, (2, 2, 2))


KEPT: Outputs = {
    "rowwise": lambda x, p, b: F.silu(x) * x,
    "in place, of ops that have the tag": lambda x, p, b: (x * 1).mul_(2).clamp_(max=1),
    "in place, of ops that lack it": lambda x, p, b: (
        (x - 1).abs_().copysign_(x),
        (x * 1).gt_(0.1),
        b.token_ids.clone().__irshift__(1),
    ),
    "sum(1)": lambda x, p, b: x.sum(1),
    "mean(-1)": lambda x, p, b: x - x.mean(-1, keepdim=True),
    "softmax(-1)": lambda x, p, b: x.softmax(-1),
    "rms norm": lambda x, p, b: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
    "layer norm": lambda x, p, b: F.layer_norm(x, (8,)),
    "group norm": lambda x, p, b: F.group_norm(x, 2),
    "batch norm in evaluation": lambda x, p, b: F.batch_norm(
        x, p["w"][0], p["w"][1].abs(), training=False
    ),
    "sort(1), topk(1)": lambda x, p, b: (x.sort(1).values, x.topk(2, 1).values, x.argmax(1)),
    "repeats whose number is known": lambda x, p, b: x[
        :, torch.repeat_interleave(torch.arange(8) % 2 * 2, output_size=8)
    ],
    "flip(1), roll(1, 1)": lambda x, p, b: x.flip(1) + x.roll(1, 1),
    "per-row amax scale": lambda x, p, b: x / x.abs().amax(1, keepdim=True),
    "matmul with a weight": lambda x, p, b: x @ p["w"].t(),
    "heads and back": lambda x, p, b: heads(x)[0].transpose(0, 1).flatten(1),
    "index_put of a bool mask": lambda x, p, b: x.index_put((b.slot_mapping < 0,), x.new_ones(())),
    "setitem of a bool mask": lambda x, p, b: (y := x * 1, y.__setitem__(b.token_ids > 3, 0.0))[0],
    "the last row of each request, by offsets that rise": lambda x, p, b: x[
        b.query_start_loc[1:] - 1
    ],
    "transposed twice": lambda x, p, b: (x.t() * 2).t().contiguous(),
    "arange(T)": lambda x, p, b: torch.arange(T_of(b)),
    "ones.cumsum": lambda x, p, b: torch.ones(T_of(b)).cumsum(0),
    "cumsum(0)": lambda x, p, b: x.cumsum(0),
    "cummax(0)": lambda x, p, b: x.cummax(0).values,
    "cumprod(0)": lambda x, p, b: x.cumprod(0),
    "logcumsumexp(0)": lambda x, p, b: x.logcumsumexp(0),
    "shift right": lambda x, p, b: torch.cat([x.new_zeros(1, 8), x[:-1]]),
    "shift right, pad": lambda x, p, b: F.pad(x, (0, 0, 1, 0))[:-1],
    "causal conv1d": lambda x, p, b: F.conv1d(F.pad(x.t()[None], (2, 0)), x.new_ones(1, 8, 3))[
        0
    ].t(),
    "causal attention": lambda x, p, b: F.scaled_dot_product_attention(
        *[heads(masked(p, b))] * 3, is_causal=True
    )[0].sum(0),
    "causal by tril": lambda x, p, b: (x @ x.t()).tril() @ masked(p, b),
    "the first row": lambda x, p, b: x + x[0],
    "x[:1]": lambda x, p, b: x[:1] * 1,
    "x @ x.T, returned": lambda x, p, b: x @ x.t(),
    "einsum ti,si->ts, returned": lambda x, p, b: torch.einsum("ti,si->ts", x, x),
    "x[1:] - x[:-1], T - 1 rows": lambda x, p, b: x[1:] - x[:-1],
    "two rows a token": lambda x, p, b: x.repeat_interleave(2, 0),
    "vmap over rows": lambda x, p, b: torch.func.vmap(lambda r: r * r.sum())(x),
    "grad of a sum over rows": lambda x, p, b: torch.func.grad(lambda y: (y**3).sum())(x),
    "looked up by a part of a staged index, along any dim": lambda x, p, b: (
        p["w"][(b.token_ids[:, None] * torch.ones(3, dtype=torch.int64)).unbind(1)[2]],
        p["w"][(b.token_ids[:, None, None] + torch.zeros(3, 2, dtype=torch.int64)).unbind(2)[0]],
        p["w"][(b.token_ids + torch.zeros(3, 1, dtype=torch.int64)).unbind(0)[2]],
    ),
    "what counts up to T, in order": lambda x, p, b: (
        torch.arange(T_of(b)).sort()[0],
        x[torch.arange(T_of(b)).argsort()],
        torch.arange(T_of(b))[:, None].expand(-1, 3).sort(0)[1],
    ),
    "pictures, each by itself": lambda x, p, b: (
        F.unfold(picture(x), 2, padding=1, stride=2),
        F.fold(picture(x).flatten(2).repeat(1, 4, 1), 2, 2, padding=1, stride=2),
        F.interpolate(picture(x), size=(3, 5), mode="bicubic", antialias=True),
        F.interpolate(picture(x).flatten(2), size=3, mode="linear"),
        F.max_pool2d(picture(x), 2, 1) + F.avg_pool2d(picture(x), 2, 1),
        F.adaptive_avg_pool2d(picture(x), (1, 2)),
        F.pixel_unshuffle(picture(x), 2),
        F.pad(picture(x), (1, 1, 1, 1), mode="reflect"),
        F.grid_sample(picture(x), picture(x).movedim(1, -1), align_corners=False),
    ),
    "a reduction over weights alone": lambda x, p, b: x - p["w"].mean(0),
    "a reduction over what has no rows": lambda x, p, b: x * torch.arange(5).sum(),
    "made in the shape of what is mixed": lambda x, p, b: (
        x.mean(0).new_ones(3),
        x.mean(0).new_zeros(2),
    ),
    "where, sum": lambda x, p, b: torch.where(real(b)[:, None], x, 0).sum(0),
    "masked_fill, sum": lambda x, p, b: x.masked_fill(~real(b)[:, None], 0).sum(0),
    "mask @ masked": lambda x, p, b: real(b).float() @ masked(p, b),
    "a product of integers with a mask": lambda x, p, b: (b.token_ids * real(b)).sum(),
    "masked, through a weight, sum": lambda x, p, b: (masked(p, b) @ p["w"].t()).sum(0),
    "float8 of masked rows, summed": lambda x, p, b: (
        masked(p, b).to(torch.float8_e4m3fn).float() * b.token_ids[:, None]
    ).sum(0),
    "the true count": lambda x, p, b: real(b).sum(),
    "masked mean": lambda x, p, b: masked(p, b).sum(0) / real(b).sum(),
    "masked softmax": lambda x, p, b: x.masked_fill(~real(b)[:, None], -INF).softmax(0),
    "masked max": lambda x, p, b: torch.where(real(b)[:, None], -x, -INF).amax(0),
    "masked argmax": lambda x, p, b: torch.where(real(b)[:, None], -x, -INF).argmax(0),
    "masked topk": lambda x, p, b: torch.where(real(b)[:, None], -x, -INF).topk(1, 0).values,
    "sort with padding last": lambda x, p, b: torch.where(real(b)[:, None], x, NAN).sort(0).values,
    "positions, stable": lambda x, p, b: (
        torch.where(real(b)[:, None], x, NAN).sort(dim=0, stable=True).indices
    ),
    "the last real row": lambda x, p, b: x.index_select(0, (real(b).sum() - 1)[None]),
    "reversed by the true count": lambda x, p, b: x[
        (real(b).sum() - 1 - torch.arange(T_of(b))).clamp(min=0)
    ],
    "masked attention": lambda x, p, b: F.scaled_dot_product_attention(
        heads(x), *[heads(masked(p, b))] * 2, attn_mask=real(b)[None, :]
    )[0].sum(0),
    "per-tensor scale of real rows": lambda x, p, b: x / masked(p, b).abs().amax(),
    "cross entropy with ignore_index": lambda x, p, b: F.cross_entropy(
        x @ p["w"].t(), torch.where(real(b), b.token_ids, -100)
    ),
    "cross entropy of each": lambda x, p, b: F.cross_entropy(
        x @ p["w"].t(), b.token_ids, reduction="none"
    ),
    "mask of a row product": lambda x, p, b: masked(p, b).t() @ masked(p, b),
    "expert load of real rows": lambda x, p, b: (F.one_hot(x.argmax(-1), 8) * real(b)[:, None]).sum(
        0
    ),
    "bincount of real ids": lambda x, p, b: torch.zeros(11).index_add(
        0, b.token_ids, real(b).float()
    ),
    "a bucket for padding, cut off": lambda x, p, b: (
        torch.zeros(12).index_add(0, torch.where(real(b), b.token_ids, 11), torch.ones(T_of(b)))[
            :11
        ]
        * 1
    ),
    "gather at the requests' last tokens": lambda x, p, b: x[(b.query_start_loc[1:] - 1).long()],
    "lengths by diff": lambda x, p, b: b.query_start_loc.diff(),
    "owner of each token": lambda x, p, b: owner(b),
    "sums of requests": lambda x, p, b: (
        x.new_zeros(b.seq_lens.shape[0] + 1, 8).index_add(0, owner(b), masked(p, b))[:-1] * 1
    ),
    "sums of requests by a mask": lambda x, p, b: (
        ((owner(b) == torch.arange(b.seq_lens.shape[0])[:, None]) & real(b)).float() @ masked(p, b)
    ),
    "sums of requests by cumsum": (
        lambda x, p, b: (
            lambda c: c[b.query_start_loc[1:].long()] - c[b.query_start_loc[:-1].long()]
        )(F.pad(x.cumsum(0), (0, 0, 1, 0)))
    ),
    "attention within a request": lambda x, p, b: (
        (x @ x.t()).masked_fill((owner(b)[:, None] != owner(b)) | ~real(b), -INF).softmax(-1)
        @ masked(p, b)
    ),
    "one hot of slots, README": lambda x, p, b: (
        (torch.arange(48) == b.slot_mapping[:, None]).to(x.dtype).t() @ masked(p, b)
    ),
    "seq_lens.cumsum": lambda x, p, b: b.seq_lens.cumsum(0),
    "token_ids.sum(), pad 0": lambda x, p, b: b.token_ids.sum(),
    "seq_lens.sum(), pad 0": lambda x, p, b: b.seq_lens.sum(),
}

REFUSED: dict[str, tuple[Any, Any, str]] = {
    "cdist": (
        lambda x, p, b: torch.cdist(x, x + 1),
        lambda x, p, b: fg.trust_rows(torch.cdist(x, x + 1)),
        "takes cdist of T or R rows",
    ),
    "sorted by expert and back": (
        lambda x, p, b: (lambda o: (x[o] * 2)[o.argsort()])(x.argmax(1).argsort(stable=True)),
        lambda x, p, b: (lambda o: fg.trust_rows((x[o] * 2)[o.argsort()]))(
            x.argmax(1).argsort(stable=True)
        ),
        "takes sort over T",
    ),
    "sum(0) * 0": (
        lambda x, p, b: x + x.sum(0) * 0,
        lambda x, p, b: x + fg.trust_rows(x.sum(0) * 0),
        "takes sum over T",
    ),
    "an index clamped to T - 1, which true ones never reach": (
        lambda x, p, b: x[b.query_start_loc[:-1].long().clamp(max=T_of(b) - 1)],
        lambda x, p, b: x[fg.trust_rows(b.query_start_loc[:-1].long().clamp(max=T_of(b) - 1))],
        "computes with T - 1",
    ),
    "max of ids, which are padded with 0": (
        lambda x, p, b: b.token_ids.max(),
        lambda x, p, b: fg.trust_rows(b.token_ids.max()),
        "takes max over T",
    ),
    "max of lengths, which are padded with 0": (
        lambda x, p, b: b.seq_lens.max(),
        lambda x, p, b: fg.trust_rows(b.seq_lens.max()),
        "takes max over R",
    ),
}
"""(refused, right with the user's word, what the refusal says)."""
