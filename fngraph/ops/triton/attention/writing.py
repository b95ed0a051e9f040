"""The Triton kernels that write a step's k and v, or its rows, to the cache: a program a token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fngraph.errors import BackendError
from fngraph.ops.paged.config import AttentionArgs, dense
from fngraph.ops.slots import rounded
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.overlapping import overlap
from fngraph.ops.triton.repeating import Launches


@triton.jit
def store(into, x, scale, at, mask, EXACT: tl.constexpr, SCALED: tl.constexpr):
    """A cache in the model's own dtype takes the bits; in another, x / scale, rounded once.

    CUDA's conversion to fp8 stops at its largest number.
    """
    if SCALED:
        x = tl.div_rn(x.to(tl.float32), scale)
    elif not EXACT:
        x = x.to(tl.float32)
    tl.store(into + at, x.to(into.dtype.element_ty), mask=mask)


@triton.jit
def forget(done, t, count, EACH: tl.constexpr):
    """EACH zeros into `done` at row t, of `count` in all."""
    i = t * EACH + tl.arange(0, triton.next_power_of_2(EACH))
    tl.store(done + i, 0, mask=(i < (t + 1) * EACH) & (i < count))


@triton.jit(do_not_specialize=COUNTS)
def write_kernel(
    slots, k, v, k_scale, v_scale, k_cache, v_cache, done,
    k_row, k_head, v_row, v_head, k_block, k_slot, k_at, v_block, v_slot, v_at, k_step, v_step,
    count, HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Token t to its slot, all heads; nothing where the slot is -1."""
    overlap(EARLY)
    t = tl.program_id(0).to(tl.int64)
    forget(done, t, count, HEADS)
    slot = tl.load(slots + t)
    if slot >= 0:
        block, row = slot // SIZE, slot % SIZE
        i = tl.arange(0, BLOCK)
        head, d, real = i // D, i % D, i < HEADS * D
        x = tl.load(k + t * k_row + head * k_head + d, mask=real)
        y = tl.load(v + t * v_row + head * v_head + d, mask=real)
        by_k = tl.load(k_scale + head * k_step, mask=real, other=1) if K_SCALED else 1.0
        by_v = tl.load(v_scale + head * v_step, mask=real, other=1) if V_SCALED else 1.0
        at = block * k_block + row * k_slot + head * k_at + d
        store(k_cache, x, by_k, at, real, EXACT, K_SCALED)
        at = block * v_block + row * v_slot + head * v_at + d
        store(v_cache, y, by_v, at, real, EXACT, V_SCALED)


def write(args: AttentionArgs, done: Tensor | None = None, kept: Launches | None = None) -> None:
    """cache[slot] = new / scale for each token whose slot is not -1; nothing else changes.

    Args:
        done: at most (T, K) int32, which becomes zeros.
    """
    k_TKD, v_TKD, k_cache, v_cache = args.k, args.v, args.k_cache, args.v_cache
    k_scale, v_scale = args.k_scale, args.v_scale
    check_dense(k_cache)
    check_dense(v_cache)
    if not k_cache.is_cuda and k_cache.dtype != k_TKD.dtype:  # the interpreter rounds it wrongly
        k_TKD = rounded(k_TKD, k_cache.dtype, k_scale)
        v_TKD = rounded(v_TKD, v_cache.dtype, v_scale)
        k_scale = v_scale = None
    k_TKD, v_TKD = dense(k_TKD), dense(v_TKD)
    T, K, D = k_TKD.shape
    by_k, k_step = scale_of(k_scale, k_TKD)
    by_v, v_step = scale_of(v_scale, v_TKD)
    launch(
        write_kernel,
        (T,),
        (args.meta.slot_mapping, k_TKD, v_TKD, by_k, by_v),
        (*args.kv, args.meta.slot_mapping if done is None else done),
        (*k_TKD.stride()[:2], *v_TKD.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
         k_step, v_step, 0 if done is None else done.numel()),
        early=True,
        kept=kept,
        HEADS=K,
        D=D,
        SIZE=k_cache.shape[1],
        BLOCK=power_of_two(K * D),
        EXACT=k_cache.dtype == k_TKD.dtype,
        K_SCALED=k_scale is not None,
        V_SCALED=v_scale is not None,
    )  # fmt: skip


@triton.jit
def row_kernel(
    slots, new, cache, by_token, by_block, by_slot,
    C: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Row t to its slot; nothing where the slot is -1."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)
    if slot >= 0:
        c = tl.arange(0, BLOCK)
        x = tl.load(new + t * by_token + c, mask=c < C)
        at = slot // SIZE * by_block + slot % SIZE * by_slot + c
        store(cache, x, 1.0, at, c < C, EXACT, False)


def write_rows(
    new_TC: Tensor, cache: Tensor, slot_mapping: Tensor, kept: Launches | None = None
) -> None:
    """As `write`, for a cache of one row a token, (num_blocks, block_size, C)."""
    check_dense(cache)
    if not cache.is_cuda:  # the interpreter rounds wrongly
        new_TC = rounded(new_TC, cache.dtype)
    new_TC = dense(new_TC)
    T, C = new_TC.shape
    launch(
        row_kernel,
        (T,),
        (slot_mapping, new_TC),
        (cache,),
        (new_TC.stride(0), *cache.stride()[:2]),
        kept=kept,
        C=C,
        SIZE=cache.shape[1],
        BLOCK=power_of_two(C),
        EXACT=cache.dtype == new_TC.dtype,
    )


def scale_of(scale: Tensor | None, other: Tensor) -> tuple[Tensor, int]:
    """A scale of shape () or (K,) with the step from head to head; if None, `other`, not read."""
    if scale is None:
        return other, 0
    return scale, scale.stride(0) if scale.dim() else 0


def check_dense(cache: Tensor) -> None:
    """Raise where the last dim of what is written has gaps, which the kernels would write into.

    Raises:
        BackendError: it has.
    """
    if cache.stride(-1) != 1:
        raise BackendError(
            f"a cache of shape {tuple(cache.shape)} and strides {cache.stride()} has gaps in its "
            "last dim, which Triton's kernels do not step over: make it whole with .contiguous(), "
            'or pass backends={"attention": "reference"}'
        )
