"""Attention over a paged KV cache, for any mix of prefill and decode.

Shape letters: T query tokens, R requests, H query heads, K kv heads, D head dim, B blocks per
request. The cache of one layer is a pair of (num_blocks, block_size, K, D) tensors; token number i
of a request lives in block `block_tables[r, i // block_size]` at row `i % block_size`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops.backend import Backend
from fngraph.ops.check_shapes import PAGED, QKV, Shapes
from fngraph.ops.fp8 import quantize_fp8
from fngraph.ops.paged import reference
from fngraph.ops.paged.config import AttentionArgs, AttentionConfig, Turn, meta_of, turned
from fngraph.ops.paged.inlined import inline
from fngraph.ops.primitives import Pages, define
from fngraph.ops.transforms import inlined, is_transformed


def _configure(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any
) -> AttentionConfig:
    *_, scale, window, softcap, causal, sinks, k_scale, v_scale, cos = rest[:-6]
    return AttentionConfig(
        num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[2],
        block_size=k_cache.shape[1], dtype=q.dtype, cache_dtype=k_cache.dtype,
        device=q.device.type, scale=scale, window=window, softcap=softcap, causal=causal,
        sinks=sinks is not None, scaled=k_scale is not None or v_scale is not None,
        turned=cos is not None, rounded=rest[-1] is not None,
    )  # fmt: skip


def _around(backend: Backend, args: AttentionArgs, host: HostBounds | None) -> Any:
    """Run a backend; what it cannot do of what goes before and behind, ops do."""
    if "rope" not in backend.options:
        args = turned(args)
    if args.out_scale is None or "fp8 output" in backend.options:
        return backend.run(args, host=host)  # type: ignore[misc]
    made = args.q.new_empty(args.q.shape)
    returned = backend.run(args._replace(out=made, out_scale=None), host=host)  # type: ignore[misc]
    args.out.copy_(quantize_fp8(made, args.out_scale))
    return returned


ATTENTION = define(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor seq_lens, Tensor query_start_loc, Tensor block_tables, Tensor(c!) out, float scale, "
    "int? window, float? softcap, bool causal, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, float eps, bool centred, "
    "Tensor? out_scale)",
    configure=_configure,
    args=AttentionArgs,
    default=reference.BACKEND,
    null_slots="slot_mapping",
    offsets="query_start_loc",
    pages=Pages(("k_cache", "v_cache"), ("block_tables",), ("slot_mapping",)),
    around=_around,
)


SHAPES = Shapes("attention", {**QKV, **PAGED}, shared=("H", "K"))


@ATTENTION.function
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
    causal: bool = True,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Write this step's k and v to the cache, then attend over each request's tokens.

    Query heads share kv heads in order: head h reads kv head `h // (H // K)`.

    Where a gradient or a `torch.func` transform goes through it, it runs in torch ops in place of
    the primitive: a new `kv` comes back, through which gradients flow from one step to the next.
    The cache that was passed gets the values alone; and none under `vmap`, if samples share it.

    Args:
        q_THD: (T, H, D) queries.
        k_TKD: (T, K, D) new keys.
        v_TKD: (T, K, D) new values.
        kv: the layer's cache, a pair (k, v) of (num_blocks, block_size, K, D); written in place,
            so it must be donated. An element that is out of range in fp8 is its largest number.
        batch: anything with the fields of `AttentionMeta`.
        scale: of the scores; 1 / sqrt(D) if None.
        window: a token sees this many tokens at most, itself and those just before it; None: all
            before it. What fell out of the window stays in the cache.
        softcap: scores s, scaled, become softcap * tanh(s / softcap); None: they stay.
        causal: False: a token sees all of its request, and with a window also as far behind it.
            For encoders and pooling: a request comes whole, in one step.
        sinks: (H,) a logit a head, to which attention may go without anything coming back.
        k_scale: () or (K,) float32: the cache holds k / k_scale, as an fp8 cache needs; and
        v_scale: likewise of v. None: 1.

    Returns:
        (T, H, D) in q's dtype, zero in rows that belong to no request; and `kv` itself.

    Raises:
        TransformError: `vmap` over another dim of the cache than its first, or an fp8 cache.
        TreeError: an argument whose shape or dtype does not fit the others.
        ValueError: a window or softcap that is not above zero.
    """
    tensors = (q_THD, k_TKD, v_TKD, *SHAPES.pair("kv", kv), *meta_of(batch))
    sizes = SHAPES.check(*tensors)
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    _check_options(sizes, scale, window, softcap, sinks, k_scale, v_scale)
    options = scale, window, softcap, causal, sinks, k_scale, v_scale, *Turn(), None
    optional = sinks, k_scale, v_scale
    if is_transformed(*tensors, *optional):
        with inlined("attention"):
            return inline(tensors, kv, _configure(*tensors, None, *options), optional)
    out_THD = q_THD.new_empty(q_THD.shape)
    ATTENTION.apply(*tensors, out_THD, *options)
    return out_THD, kv


def _check_options(
    sizes: dict[str, int],
    scale: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Raise where one is of another type or shape."""
    SHAPES.number("scale", scale, float)
    for name, value, kind in (("window", window, int), ("softcap", softcap, float)):
        if value is not None:
            SHAPES.number(name, value, kind)
            if not value > 0:
                raise ValueError(
                    f"fg.ops.attention({name}={value}): pass a number above 0, or None"
                )
    if sinks is not None:
        SHAPES.also("sinks", "H", sinks, sizes)
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if x is not None and not (isinstance(x, Tensor) and x.dim() == 0):
            SHAPES.also(name, "K", x, sizes)
