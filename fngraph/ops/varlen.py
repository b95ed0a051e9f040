"""Attention without a cache: over sequences that lie end to end, as encoders have them.

Shape letters: T tokens, S sequences, H query heads, K kv heads, D head dim. Sequence s has the
tokens cu_seqlens[s] to cu_seqlens[s + 1]; those past the last offset are in no sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend
from fngraph.ops.check_shapes import Shapes
from fngraph.ops.paged import flash
from fngraph.ops.paged.config import owners
from fngraph.ops.primitives import define
from fngraph.ops.slots import parts_of
from fngraph.ops.transforms import asks, enter, inlined, is_transformed, leave


class VarlenConfig(NamedTuple):
    """What a backend may be chosen by.

    Attributes:
        num_heads: of queries; each num_heads / num_kv_heads in a row share a kv head.
        num_kv_heads: of keys and values.
        head_dim: numbers of a head, of queries, keys and values alike.
        dtype: of all of them, and of the output.
        device: type of the device, "cpu" or "cuda".
        scale: of scores, before the softmax.
        causal: whether a token sees none behind it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str
    scale: float
    causal: bool = False


class VarlenArgs(NamedTuple):
    """What a backend of `varlen_attention` gets, `run(args, host)`.

    Attributes:
        q: (T, H, D) queries.
        k: (T, K, D) keys.
        v: (T, K, D) values.
        cu_seqlens: (S + 1,) int32 or int64, where sequences begin; it never falls, and sequences
            may be empty.
        out: (T, H, D) to be written in full, zero in rows of no sequence.
        config: what is the same for every batch.
        plan: the buffers that the backend's `Plan` has filled, if it has one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    out: Tensor
    config: VarlenConfig
    plan: Any = None


# --- the definition -------------------------------------------------------------------------------


def plain(
    q_NHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts: Tensor, scale: float, causal: bool,
    first: int = 0,
) -> Tensor:  # fmt: skip
    """In torch ops and float32 at least; N tokens from number `first` on.

    A value that is no finite number makes NaN of what sees it, and of nothing else: a product with
    a weight of 0 would carry it into every sequence.
    """
    dtype = torch.promote_types(q_NHD.dtype, torch.float32)
    token_N = torch.arange(first, first + q_NHD.shape[0], device=q_NHD.device)
    owner_N, owned_N = owners(token_N, starts)
    key_T = torch.arange(k_TKD.shape[0], device=q_NHD.device)
    begin_N1, end_N1 = (starts[owner_N + i][:, None] for i in range(2))
    seen_NT = (key_T >= begin_N1) & (key_T < end_N1) & owned_N[:, None]
    if causal:
        seen_NT = seen_NT & (key_T <= token_N[:, None])
    q_NKGD = rearrange(q_NHD.to(dtype), "n (k g) d -> n k g d", k=k_TKD.shape[1])
    hidden_N11T = ~seen_NT[:, None, None]
    scores = einsum(q_NKGD, k_TKD.to(dtype), "n k g d, t k d -> n k g t") * scale
    weights = scores.masked_fill(hidden_N11T, torch.finfo(dtype).min).softmax(-1)
    weights = weights.masked_fill(hidden_N11T, 0.0)  # of a row that sees nothing
    finite = v_TKD.isfinite()
    v_TKD = torch.where(finite, v_TKD, 0.0).to(dtype)
    mixed = einsum(weights, v_TKD, "n k g t, t k d -> n k g d")
    spoilt = einsum(seen_NT.to(dtype), (~finite).to(dtype), "n t, t k d -> n k d") > 0
    mixed = torch.where(spoilt[:, :, None], float("nan"), mixed)
    return rearrange(mixed, "n k g d -> n (k g) d").to(q_NHD.dtype)


def run(args: VarlenArgs, host: HostBounds | None) -> None:
    """The `reference` backend, some tokens at a time."""
    config, out = args.config, args.out
    if 0 in args.q.shape or args.cu_seqlens.shape[0] < 2:
        out.zero_()
        return
    T = args.q.shape[0]
    for part in parts_of(T, config.num_heads * T):  # scores of one row
        made = plain(
            args.q[part], args.k, args.v, args.cu_seqlens, config.scale, config.causal, part.start
        )
        out[part].copy_(made)


# --- FlashAttention -------------------------------------------------------------------------------


def run_varlen(args: VarlenArgs, host: HostBounds | None) -> None:
    """torch's own FlashAttention 2, whose grid is as large as if one sequence had all tokens."""
    T, starts, config = args.q.shape[0], args.cu_seqlens.int(), args.config
    options = flash.varlen_options(config, (-1, 0 if config.causal else -1))
    made = flash.varlen_attn()(args.q, args.k, args.v, starts, starts, T, T, **options)
    owned_T = torch.arange(T, device=made.device) < starts[-1]
    args.out.copy_(torch.where(owned_T[:, None, None], made, 0.0))


def _suits_flash(config: VarlenConfig) -> str | None:
    return flash.refusal(config.device, config.dtype, config.head_dim)


# --- the primitive --------------------------------------------------------------------------------


def _configure(q: Tensor, k: Tensor, *rest: Any) -> VarlenConfig:
    *_, scale, causal = rest
    H, D = q.shape[1:]
    return VarlenConfig(H, k.shape[1], D, q.dtype, q.device.type, scale, causal)


VARLEN = define(
    "varlen_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor(a!) out, float scale, bool causal)",
    configure=_configure,
    args=VarlenArgs,
    default=Backend("reference", run, support=lambda config: Support.ALWAYS),
    offsets="cu_seqlens",
)
FLASH = Backend(
    "varlen", run_varlen, lambda config: Support.ALWAYS, _suits_flash,
    needs="CUDA, sm_80 or newer", missing=flash.missing_varlen,
)  # fmt: skip


SHAPES = Shapes(
    "varlen_attention",
    {"q_THD": "T H D", "k_TKD": "T K D", "v_TKD": "T K D", "cu_seqlens": "S+1"},
    shared=("H", "K"), whole=("cu_seqlens",),
)  # fmt: skip


@VARLEN.function
def varlen_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Each token attends over its own sequence: no cache, and nothing of its neighbours.

    Query heads share kv heads in order: head h reads kv head `h // (H // K)`. Where a gradient or a
    `torch.func` transform goes through it, it runs in torch ops in place of the primitive.

    Args:
        q_THD: (T, H, D) queries.
        k_TKD: (T, K, D) keys.
        v_TKD: (T, K, D) values.
        cu_seqlens: (S + 1,) int32 or int64, where sequences begin, and the end of the last. It
            begins with 0 and never falls; staged with pad="last" (or "stride").
        scale: of the scores; 1 / sqrt(D) if None.
        causal: whether a token sees none behind it.

    Returns:
        (T, H, D) in q's dtype, zero in rows of no sequence.

    Raises:
        TreeError: an argument whose shape or dtype does not fit the others.
    """
    tensors = (q_THD, k_TKD, v_TKD, cu_seqlens)
    SHAPES.check(*tensors)
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    SHAPES.number("scale", scale, float)
    if is_transformed(*tensors):
        with inlined("varlen_attention"):
            starts = asks("varlen_attention", "cu_seqlens", cu_seqlens)
            q, k, v = enter("varlen_attention", q_THD, k_TKD, v_TKD)
            return leave("varlen_attention", plain(q, k, v, starts, scale, causal))
    out_THD = q_THD.new_empty(q_THD.shape)
    VARLEN.apply(*tensors, out_THD, scale, causal)
    return out_THD
