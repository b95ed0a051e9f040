"""The Triton kernel that turns a step's queries and keys and writes keys and values to the cache.

A program takes a head of a token, or up to four that have no norm: queries are turned into memory
of their own, keys into the cache, where attention reads them, and values go there as they are. Of a
token whose slot is -1 nothing is written but its queries, which no request reads.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.paged.config import AttentionArgs, Turn, dense, turned as turned_by_ops
from fngraph.ops.triton.attention.writing import check_dense, forget, scale_of, store, write
from fngraph.ops.triton.fused import turned
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.overlapping import overlap
from fngraph.ops.triton.repeating import Launches


@triton.jit(do_not_specialize=COUNTS)
def turn_kernel(
    slots, q, k, v, q_norm, k_norm, cos, sin, k_scale, v_scale, turned_q, k_cache, v_cache, done,
    q_row, q_head, k_row, k_head, v_row, v_head, cos_row, sin_row,
    k_block, k_slot, k_at, v_block, v_slot, v_at, k_step, v_step, eps, count,
    H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    OTHER: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr,
    CENTRED: tl.constexpr, EXACT: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Token t's query heads, then its heads of keys, then of values, HEADS at a time."""
    overlap(EARLY)
    row = tl.program_id(0).to(tl.int64)
    programs: tl.constexpr = (H + 2 * K) // HEADS
    t, first = row // programs, row % programs * HEADS
    i = tl.arange(0, HEADS * BLOCK)
    h, d = first + i // BLOCK, i % BLOCK
    real = d < D
    if first == 0:
        forget(done, t, count, K)
    kind = q.dtype.element_ty
    c, s = cos + t * cos_row, sin + t * sin_row
    if first < H:
        made = turned(
            q + t * q_row + h * q_head, d, q_norm, c, s, eps, kind, D, HALF, OTHER, NORMS, CENTRED
        )
        tl.store(turned_q + (t * H + h) * D + d, made, mask=real)
    else:
        slot = tl.load(slots + t)
        if slot >= 0:
            block, place = slot // SIZE, slot % SIZE
            if first < H + K:
                g = h - H
                made = turned(
                    k + t * k_row + g * k_head, d, k_norm, c, s, eps, kind,
                    D, HALF, OTHER, NORMS, CENTRED,
                )  # fmt: skip
                by = tl.load(k_scale + g * k_step) if K_SCALED else 1.0
                at = block * k_block + place * k_slot + g * k_at + d
                store(k_cache, made, by, at, real, EXACT, K_SCALED)
            else:
                g = h - H - K
                x = tl.load(v + t * v_row + g * v_head + d, mask=real)
                by = tl.load(v_scale + g * v_step) if V_SCALED else 1.0
                at = block * v_block + place * v_slot + g * v_at + d
                store(v_cache, x, by, at, real, EXACT, V_SCALED)


def turn_and_write(
    args: AttentionArgs, done: Tensor | None = None, kept: Launches | None = None
) -> AttentionArgs:
    """Write k and v, k turned, as `write` does; the same arguments with q turned, too.

    Args:
        done: at most (T, K) int32, which becomes zeros.
    """
    cos, sin, q_norm, k_norm, eps, centred = args.turn
    exact = args.k_cache.dtype == args.k.dtype
    if cos is None or sin is None or not (exact or args.k_cache.is_cuda):
        args = turned_by_ops(args)  # the interpreter rounds wrongly, which `write` knows of
        write(args, done, kept)
        return args
    k_cache, v_cache = args.kv
    check_dense(k_cache)
    check_dense(v_cache)
    q_THD, k_TKD, v_TKD = (dense(x) for x in (args.q, args.k, args.v))
    (T, H, D), K = q_THD.shape, k_TKD.shape[1]
    cos, sin = (dense(x) for x in (cos, sin))
    by_k, k_step = scale_of(args.k_scale, q_THD)
    by_v, v_step = scale_of(args.v_scale, q_THD)
    half = min(cos.shape[-1], D // 2)
    out_THD = q_THD.new_empty(q_THD.shape)
    each = math.gcd(H, K, 4 if q_norm is None and k_norm is None and D <= 128 else 1)
    launch(
        turn_kernel,
        (T * (H + 2 * K) // each,),
        (args.meta.slot_mapping, q_THD, k_TKD, v_TKD, _weight(q_norm, q_THD),
         _weight(k_norm, q_THD), cos, sin, by_k, by_v),
        (out_THD, k_cache, v_cache, args.meta.slot_mapping if done is None else done),
        (*q_THD.stride()[:2], *k_TKD.stride()[:2], *v_TKD.stride()[:2], cos.stride(0),
         sin.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3], k_step, v_step, eps,
         0 if done is None else done.numel()),
        early=True,
        kept=kept,
        num_warps=each if D <= 128 else 4,
        H=H,
        K=K,
        HEADS=each,
        D=D,
        HALF=half,
        OTHER=cos.shape[-1] - half,
        SIZE=k_cache.shape[1],
        BLOCK=power_of_two(D),
        NORMS=q_norm is not None,
        CENTRED=centred,
        EXACT=exact,
        K_SCALED=args.k_scale is not None,
        V_SCALED=args.v_scale is not None,
    )  # fmt: skip
    return args._replace(q=out_THD, turn=Turn())


def _weight(norm: Tensor | None, other: Tensor) -> Tensor:
    return other if norm is None else norm.contiguous()
