"""Attention over a paged KV cache, for any mix of prefill and decode.

Shape letters: T query tokens, R requests, H query heads, K kv heads, D head dim, B blocks per
request. The cache of one layer is a pair of (num_blocks, block_size, K, D) tensors; token number i
of a request lives in block `block_tables[r, i // block_size]` at row `i % block_size`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fngraph.core import HostBounds, trees
from fngraph.core.where import user_line
from fngraph.errors import TransformError
from fngraph.ops import reference, triton_backends
from fngraph.ops.primitive import Backend, define
from fngraph.ops.transforms import enter, inlined, is_transformed, leave


class AttentionMeta(NamedTuple):
    """Where the tokens of a batch belong.

    Attributes:
        slot_mapping: (T,) int64, block * block_size + row for each token's k and v; -1 writes none.
        seq_lens: (R,) int32, tokens of each request, this step's included; 0 is a padding request.
        query_start_loc: (R + 1,) int32, offset of each request's first token among the T.
        block_tables: (R, B) int32, the blocks of each request, in order.
    """

    slot_mapping: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    block_tables: Tensor


class AttentionConfig(NamedTuple):
    """What a backend may be chosen by: everything that is the same for every batch.

    Attributes:
        window: tokens that a token sees at most, itself included; None: all before it.
        softcap: scores s become softcap * tanh(s / softcap); None: they stay.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: str
    scale: float
    window: int | None = None
    softcap: float | None = None


def attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv: Any,
    batch: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Any]:
    """Write this step's k and v to the cache, then attend causally over each request's tokens.

    Query heads share kv heads in order: head h reads kv head `h // (H // K)`.

    Where a gradient or a `torch.func` transform goes through it, it runs in torch ops in place of
    the primitive: a new `kv` comes back, through which gradients flow from one step to the next.
    The cache that was passed gets the values alone; and none under `vmap`, if samples share it.

    Args:
        q_THD: (T, H, D) queries.
        k_TKD: (T, K, D) new keys.
        v_TKD: (T, K, D) new values.
        kv: the layer's cache, a pair (k, v) of (num_blocks, block_size, K, D); written in place,
            so it must be donated.
        batch: anything with the fields of `AttentionMeta`.
        scale: of the scores; 1 / sqrt(D) if None.
        window: a token sees this many tokens at most, itself and those just before it; None: all
            before it. What fell out of the window stays in the cache.
        softcap: scores s, scaled, become softcap * tanh(s / softcap); None: they stay.

    Returns:
        (T, H, D) in q's dtype, zero in rows that belong to no request; and `kv` itself.

    Raises:
        TransformError: `vmap` over another dim of the cache than its first.
        ValueError: a window or softcap that is not above zero.
    """
    for name, value in (("window", window), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise ValueError(f"fg.ops.attention({name}={value}): pass a number above 0, or None")
    tensors = (q_THD, k_TKD, v_TKD, *kv, *_meta(batch))
    options = q_THD.shape[-1] ** -0.5 if scale is None else scale, window, softcap
    if is_transformed(*tensors):
        with inlined("attention"):
            return _inline(tensors, kv, _configure(*tensors, *options))
    out_THD = q_THD.new_zeros(q_THD.shape)
    ATTENTION.op(*tensors, out_THD, *options)
    return out_THD, kv


def _inline(tensors: tuple[Tensor, ...], kv: Any, config: AttentionConfig) -> tuple[Tensor, Any]:
    """The same in torch ops. The cache gets the values, and what comes back the gradients too."""
    meta = AttentionMeta(*tensors[5:])
    for cache, new_TKD in zip(tensors[3:5], tensors[1:3]):
        _Write.apply(cache, new_TKD, meta.slot_mapping)
    q_THD, k_TKD, v_TKD, k_cache, v_cache = enter("attention", *tensors[:5])
    new = []
    for cache, new_TKD in ((k_cache, k_TKD), (v_cache, v_TKD)):
        new.append(reference.put(cache, new_TKD, meta.slot_mapping))
    out_THD = leave("attention", reference.attend(q_THD, (new[0], new[1]), meta, config))
    return out_THD, trees.unflatten(trees.flatten(kv)[1], new)


class _Write(torch.autograd.Function):
    """`reference.write` below all transforms, which refuse to write what was not passed through.

    Under `vmap`, samples that share a cache leave it alone: each has one of its own coming back.
    """

    @staticmethod
    def forward(cache: Tensor, new_TKD: Tensor, slot_mapping: Tensor) -> Tensor:
        reference.write(cache, new_TKD, slot_mapping)
        return cache.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Any, cache: Tensor, *batch: Tensor) -> Any:
        """All samples in one write: the blocks of one sample's cache follow those of another's."""
        into, *of = in_dims
        shared = cache.new_empty(0), None
        if into is None:
            return shared
        if into != 0:
            raise TransformError(
                f"{user_line()}: vmap goes over dim {into} of the cache, which attention writes in "
                "place. Keep the samples in its first dim: vmap(..., in_dims=0)"
            )
        N = info.batch_size
        new_NTKD, slots_NT = (
            x.unsqueeze(0).expand(N, *x.shape) if d is None else x.movedim(d, 0)
            for x, d in zip(batch, of)
        )
        first_N1 = torch.arange(N, device=cache.device)[:, None] * cache[0, ..., 0, 0].numel()
        slots_NT = torch.where(slots_NT < 0, -1, slots_NT + first_N1)
        _Write.apply(cache.view(-1, *cache.shape[2:]), new_NTKD.flatten(0, 1), slots_NT.flatten())
        return shared


def _meta(batch: Any) -> AttentionMeta:
    return AttentionMeta(
        batch.slot_mapping, batch.seq_lens, batch.query_start_loc, batch.block_tables
    )


def _configure(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, *rest: Any) -> AttentionConfig:
    scale, window, softcap = rest[-3:]
    return AttentionConfig(
        num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[2],
        block_size=k_cache.shape[1], dtype=q.dtype, cache_dtype=k_cache.dtype,
        device=q.device.type, scale=scale, window=window, softcap=softcap,
    )  # fmt: skip


def _call(
    backend: Backend, args: tuple[Any, ...], config: AttentionConfig, host: HostBounds | None
) -> None:
    q, k, v, k_cache, v_cache, slots, lens, starts, tables, out, *_ = args
    meta = AttentionMeta(slots, lens, starts, tables)
    backend.run(q, k, v, (k_cache, v_cache), meta, out, config=config, host=host)


ATTENTION = define(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor seq_lens, Tensor query_start_loc, Tensor block_tables, Tensor(c!) out, float scale, "
    "int? window, float? softcap)",
    configure=_configure,
    call=_call,
    default=reference.BACKEND,
    null_slots="slot_mapping",
)
ATTENTION.backends.update({b.name: b for b in triton_backends.BACKENDS})
