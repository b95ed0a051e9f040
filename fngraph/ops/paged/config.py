"""What attention is told of a batch, what its backends are chosen by, and what they get."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


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
        num_heads: of queries; each num_heads / num_kv_heads in a row share a kv head.
        num_kv_heads: of the cache.
        head_dim: numbers of a head, of queries, keys and values alike.
        block_size: tokens of a block of the cache.
        dtype: of queries, new keys and values, and the output.
        cache_dtype: of the cache.
        device: type of the device, "cpu" or "cuda".
        scale: of scores, before the softmax.
        window: tokens that a token sees at most, itself included; None: all before it.
        softcap: scores s become softcap * tanh(s / softcap); None: they stay.
        causal: whether a token sees none behind it.
        sinks: whether each head has a sink.
        scaled: whether the cache holds k / k_scale and v / v_scale.
        turned: whether q and k come before their rotary embedding.
        rounded: whether the output is rounded to fp8.
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
    causal: bool = True
    sinks: bool = False
    scaled: bool = False
    turned: bool = False
    rounded: bool = False

    @property
    def asks(self) -> tuple[str, ...]:
        """What only a backend that lists it in its `options` is asked to do."""
        asked = {
            "bidirectional": not self.causal,
            "sinks": self.sinks,
            "cache scales": self.scaled,
            "fp8 cache": self.cache_dtype.itemsize == 1,
        }
        return tuple(name for name, yes in asked.items() if yes)


class Turn(NamedTuple):
    """How q and k are turned before k is written, as the op `fngraph::rope` of them, or with norms
    of each head `fngraph::norm_rope`; the pass `rope_in_attention` puts it there.

    Attributes:
        cos: (T, 1, C) of pairs (i, i + C), or (T, 1, D); None: q and k come as they are.
        sin: likewise.
        q_norm, k_norm: (D,) weights of norms; None: none.
        eps: of the norms.
        centred: whether 1 is added to their weights.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    centred: bool = False


class AttentionArgs(NamedTuple):
    """What a backend of attention gets, `run(args, host)`; the letters are `fg.ops.attention`'s.

    Attributes:
        q: (T, H, D) queries.
        k: (T, K, D) new keys, to be written at `meta.slot_mapping`.
        v: (T, K, D) new values, likewise.
        k_cache: (num_blocks, block_size, K, D) keys.
        v_cache: (num_blocks, block_size, K, D) values.
        meta: where the tokens belong.
        out: (T, H, D) to be written in full, zero in rows that belong to no request; in q's dtype,
            or float8_e4m3fn if there is an `out_scale`.
        config: what is the same for every batch, the options included.
        sinks: (H,) logits, if `config.sinks`.
        k_scale: () or (K,) float32, the cache holds k / k_scale; None: 1.
        v_scale: likewise of v.
        turn: how q and k are to be turned first. A backend that has no "rope" among its `options`
            gets them turned, and nothing here.
        out_scale: () float32, by which the output is rounded to fp8 when it has been rounded to q's
            dtype, as the op `fngraph::quantize_fp8` does; the pass `attention_fp8` puts it there. A
            backend that has no "fp8 output" among its `options` gets None, and an `out` in q's
            dtype.
        plan: the buffers that the backend's `Plan` has filled, if it has one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: AttentionMeta
    out: Tensor
    config: AttentionConfig
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    turn: Turn = Turn()
    out_scale: Tensor | None = None
    plan: Any = None

    @property
    def kv(self) -> tuple[Tensor, Tensor]:
        """The layer's cache, as it was passed to `fg.ops.attention`."""
        return self.k_cache, self.v_cache


def turned(args: AttentionArgs) -> AttentionArgs:
    """The same with q and k turned, an op each."""
    cos, sin, q_norm, k_norm, *how = args.turn
    if cos is None:
        return args
    ops = torch.ops.fngraph
    if q_norm is None:
        q, k = (ops.rope(x, cos, sin) for x in (args.q, args.k))
    else:
        pairs = (args.q, q_norm), (args.k, k_norm)
        q, k = (ops.norm_rope(x, norm, cos, sin, *how) for x, norm in pairs)
    return args._replace(q=q, k=k, turn=Turn())


def meta_of(batch: Any) -> AttentionMeta:
    """The fields of a batch that attention reads, without gaps."""
    fields = (getattr(batch, name) for name in AttentionMeta._fields)
    return AttentionMeta(*map(dense, fields))


def dense(x: Tensor) -> Tensor:
    """`x`, its last dim without gaps, as kernels take it; what is no such tensor as it is."""
    gaps = isinstance(x, Tensor) and x.dim() > 0 and x.stride(-1) != 1
    return x.contiguous() if gaps else x


def sees_nothing(meta: AttentionMeta) -> bool:
    """Whether no token can see a key: there are no requests, or tables of no blocks."""
    return 0 in meta.block_tables.shape


def present(meta: AttentionMeta, num_tokens: int) -> Tensor:
    """(T,) bool: whether a token belongs to a request that is not empty."""
    token_T = torch.arange(num_tokens, device=meta.seq_lens.device)
    owner_T, owned_T = owners(token_T, meta.query_start_loc)
    return owned_T & (meta.seq_lens[owner_T] > 0)


def owners(token_T: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The request of each token, and whether it has one: past the last offset it is padding."""
    R = starts.shape[0] - 1
    owner_T = (token_T[:, None] >= starts[1:]).sum(1)
    return owner_T.clamp(max=R - 1), owner_T < R
