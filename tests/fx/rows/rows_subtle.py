"""More values that mix rows, through arguments and shapes that are easily overlooked."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from rows_given import INF, T_of, heads, masked, real


def not_a_number(x: Any, b: Any) -> Any:
    """Padding is NaN, of the sign that the device makes."""
    return torch.where(real(b)[:, None], x, 0.0) / real(b)[:, None].float()


SUBTLE: dict[str, Any] = {
    "sum over the T that R rows are expanded to": lambda x, p, b: (
        b.seq_lens[None, :].expand(T_of(b), b.seq_lens.shape[0]).sum(0)
    ),
    "roll of all elements": lambda x, p, b: x.roll(1),
    "weights rolled by T": lambda x, p, b: p["w"].roll(T_of(b), 0) * 1,
    "every Tth weight": lambda x, p, b: p["w"][:: T_of(b)] * 1,
    "norms of columns": lambda x, p, b: x.renorm(2, 1, 1.0),
    "sum of masked rows but the last": lambda x, p, b: masked(p, b)[:-1].sum(0),
    "sum of the first R masked rows": lambda x, p, b: masked(p, b)[: b.seq_lens.shape[0]].sum(0),
    "argmax into all, T inside": lambda x, p, b: torch.where(real(b), x.t(), -INF).argmax(),
    "the least norm": lambda x, p, b: torch.linalg.vector_norm(masked(p, b), -INF, 0),
    "a negative norm": lambda x, p, b: masked(p, b).norm(p=-1, dim=0),
    "isin ids": lambda x, p, b: torch.isin(torch.arange(11), b.token_ids),
    "T rows in front": lambda x, p, b: F.pad(p["w"], (0, 0, T_of(b), 0)) * 1,
    "what lies behind T": lambda x, p, b: torch.zeros(32, 8).split([T_of(b), 32 - T_of(b)])[1] * 1,
    "fewer rows for more tokens": lambda x, p, b: p["w"][: 11 - T_of(b) // 2] * 1,
    "all added to row 0": lambda x, p, b: x.new_zeros(2, 8).index_add(
        0, torch.zeros_like(b.token_ids), x
    ),
    "take": lambda x, p, b: x.t().take(b.token_ids) * 1,
    "logsumexp of a mask": lambda x, p, b: real(b).logsumexp(0),
    "0 / 0 in padding": lambda x, p, b: (masked(p, b) / x.norm(dim=-1, keepdim=True)).sum(0),
    "bits of ones": lambda x, p, b: torch.where(real(b)[:, None], x, 1.0).view(torch.int32).prod(0),
    "triu times rows": lambda x, p, b: (x @ x.t()).triu() @ x,
    "tril(1) times rows": lambda x, p, b: (x @ x.t()).tril(1) @ x,
    "einsum with dots": lambda x, p, b: torch.einsum("t...,t...->...", x, x),
    "bmm, then sum": lambda x, p, b: torch.bmm(x[:, None], x[:, :, None]).sum(0),
    "grouped attention without a mask": lambda x, p, b: F.scaled_dot_product_attention(
        heads(x), heads(x)[:, :1], heads(x)[:, :1], enable_gqa=True
    )[0].sum(0),
    "one query, all keys": lambda x, p, b: F.scaled_dot_product_attention(
        heads(x)[:, :, :1], heads(x), heads(x)
    )[0].sum(0),
    "causal, but the keys of another length": lambda x, p, b: F.scaled_dot_product_attention(
        heads(x)[:, :, 1:], heads(x), heads(x), is_causal=True
    )[0].sum(0),
    "offsets searched for lengths": lambda x, p, b: torch.searchsorted(
        b.query_start_loc, b.seq_lens
    ),
    "offsets searched for T": lambda x, p, b: torch.searchsorted(
        b.query_start_loc, torch.arange(T_of(b)) + 1, right=True
    ),
    "offsets as buckets": lambda x, p, b: torch.bucketize(
        torch.tensor([3, 100]), b.query_start_loc
    ),
    "the mask swapped": lambda x, p, b: torch.where(~real(b)[:, None], x, 0).sum(0),
    "-1 as uint8": lambda x, p, b: b.slot_mapping.to(torch.uint8).sum(),
    **{  # a CPU has one, CUDA the other
        f"the sign of padding's NaN is not {-by}": lambda x, p, b, by=by: (
            torch.copysign(torch.ones_like(x), not_a_number(x, b)).add(by).sum(0)
        )
        for by in (1, -1)
    },
    "NaN as an integer": lambda x, p, b: (
        not_a_number(x, b).long().clamp(max=-(1 << 62)) + (1 << 62)
    ).sum(0),
    "more than 32 bits": lambda x, p, b: (
        torch.where(real(b)[:, None], x, -1e30).int().clamp(max=-(1 << 31)) + (1 << 31)
    ).sum(0),
    "-1.0 as uint8": lambda x, p, b: (
        torch.where(real(b)[:, None], x, -1.0).to(torch.uint8) + 1
    ).sum(0),
    "-1 // 2": lambda x, p, b: (b.slot_mapping // 2).sum(),
    "scattered into all but the last": lambda x, p, b: x.slice_scatter(x[:-1] * 2, 0, 0, -1),
    "scattered into the last": lambda x, p, b: x.select_scatter(p["w"][0], 0, -1),
    "unfold": lambda x, p, b: x.unfold(0, 1, 1).sum(0),
    "matrix norm": lambda x, p, b: torch.linalg.matrix_norm(x),
    "instance norm": lambda x, p, b: F.instance_norm(x.t()[None])[0],
    "a batch mean": lambda x, p, b: F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
    "lengths repeated": lambda x, p, b: (
        b.seq_lens.repeat_interleave(b.seq_lens, output_size=T_of(b)) * 1
    ),
    "argsort of a mask, ties in any order": lambda x, p, b: torch.where(
        real(b), b.token_ids > 3, True
    ).argsort(),
    "vmap over columns": lambda x, p, b: torch.func.vmap(lambda c: c.sum(), in_dims=1)(x),
    "jvp of a mean": lambda x, p, b: torch.func.jvp(lambda y: y.mean(0), (x,), (x,))[1],
}
