"""Attention in plain torch ops, for gradients and `torch.func` transforms that go through it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fngraph.core import trees
from fngraph.core.where import user_line
from fngraph.errors import TransformError
from fngraph.ops.paged import reference
from fngraph.ops.paged.config import AttentionConfig, AttentionMeta
from fngraph.ops.slots import rounded, write_cache
from fngraph.ops.transforms import asks, enter, leave


def inline(
    tensors: tuple[Tensor, ...],
    kv: Any,
    config: AttentionConfig,
    optional: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> tuple[Tensor, Any]:
    """Attention in torch ops. The cache gets the values, and what comes back the gradients too.

    Args:
        tensors: q, k, v, k_cache, v_cache and the fields of `AttentionMeta`.
        optional: sinks, k_scale and v_scale, or None for what there is not.

    Raises:
        TransformError: a cache of one byte an element, whose rounding has no gradient; or `vmap`
            over another dim of the cache than its first.
    """
    if config.cache_dtype.itemsize == 1:
        raise TransformError(
            f"{user_line()}: a gradient or a torch.func transform goes through attention over a "
            f"cache in {config.cache_dtype}, whose rounding has no gradient. Use a wider one there"
        )
    *given, slot_mapping, seq_lens, query_start_loc, block_tables = tensors
    slot_mapping = asks("attention", "slot_mapping", slot_mapping)
    query_start_loc = asks("attention", "query_start_loc", query_start_loc)
    meta = AttentionMeta(slot_mapping, seq_lens, query_start_loc, block_tables)
    _, k_TKD, v_TKD, k_cache, v_cache = given
    for cache, new_TKD, scale in ((k_cache, k_TKD, optional[1]), (v_cache, v_TKD, optional[2])):
        _Write.apply(cache, rounded(new_TKD, cache.dtype, scale), slot_mapping)
    there = [x for x in optional if x is not None]
    q_THD, k_TKD, v_TKD, k_cache, v_cache, *entered = enter("attention", *given, *there)
    sinks, k_scale, v_scale = (None if x is None else entered.pop(0) for x in optional)
    k_new = _written(k_cache, k_TKD, slot_mapping, k_scale)
    v_new = _written(v_cache, v_TKD, slot_mapping, v_scale)
    out_THD = reference.attend(q_THD, (k_new, v_new), meta, config, sinks, k_scale, v_scale)
    out_THD = leave("attention", out_THD)
    return out_THD, trees.unflatten(trees.flatten(kv)[1], [k_new, v_new])


def _written(cache: Tensor, new_TKD: Tensor, slot_mapping: Tensor, scale: Tensor | None) -> Tensor:
    """What `write_cache` makes of the cache, as a new tensor that any transform can go through.

    It gathers, since scattering the first real row more than once would count its gradient so.
    """
    num_blocks, block_size, *_ = cache.shape
    N = num_blocks * block_size
    slot_T = torch.where(slot_mapping < 0, N, slot_mapping)
    token_T = torch.arange(slot_T.shape[0], device=cache.device)
    nobody = torch.full((N + 1,), -1, device=cache.device)
    writer_NS = nobody.index_put((slot_T,), token_T)[:N].view(num_blocks, block_size)
    new_NSKD = rounded(new_TKD, cache.dtype, scale)[writer_NS.clamp(min=0)]
    return torch.where(writer_NS[:, :, None, None] >= 0, new_NSKD, cache)


class _Write(torch.autograd.Function):
    """`write_cache` below all transforms, which refuse to write what was not passed through.

    Under `vmap`, samples that share a cache leave it alone: each has one of its own coming back.
    """

    @staticmethod
    def forward(cache: Tensor, new_TKD: Tensor, slot_mapping: Tensor) -> Tensor:
        write_cache(cache, new_TKD, slot_mapping)
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
