"""What Triton's attention kernels share: a tile's scores and weights, and how a row's sums end.

`attend_keys` is how the unified kernel goes over keys; split-KV decode sums them split by split, in
`decode`. A row is one query head of one token; rows that share a kv head share a tile, which
reads it once. Key tiles begin at multiples of KEYS whatever the batch, and each row's softmax goes
over them in order, so its bits depend on its own request alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.errors import BackendError
from fngraph.ops.triton.launching import power_of_two
from fngraph.ops.triton.strides import step_of

LOG2E = 1.4426950408889634
WIDEST = 2**31 - 1  # of what kernels count in 32 bits


@triton.jit
def attend_keys(
    acc, top, total, q, position, begin, end, first, last, table, k_cache, v_cache,
    k_block, k_slot, v_block, v_slot, scale, softcap, window,
    ALIKE: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Go on from (acc, top, total): weighted values, largest score, sum of weights of each row.

    Keys begin <= n < end, a multiple of KEYS to the next; none outside of first <= n < last is
    looked at. Scores are in powers of two. Without MASKED every row sees every key.
    """
    d = tl.arange(0, WIDTH)
    for start in tl.range(begin, end, KEYS):
        n = start + tl.arange(0, KEYS)
        live = (n >= first) & (n < last)
        if MASKED:
            block = tl.load(table + n // SIZE, mask=live, other=0).to(tl.int64)
        else:
            block = tl.load(table + n // SIZE).to(tl.int64)
        row = n % SIZE
        k_at = (block * k_block + row * k_slot)[:, None] + d[None, :]
        v_at = k_at if ALIKE else (block * v_block + row * v_slot)[:, None] + d[None, :]
        if MASKED or WIDTH != D:
            there = (live | (not MASKED))[:, None] & (d < D)[None, :]
            k = tl.load(k_cache + k_at, mask=there, other=0.0)
            v = tl.load(v_cache + v_at, mask=there, other=0.0)
        else:
            k = tl.load(k_cache + k_at)
            v = tl.load(v_cache + v_at)
        scores = score(
            q, k, n, live, position, scale, softcap, window, CAUSAL, WINDOW, SOFTCAP, MASKED
        )
        weights, fade, top, total = weigh(scores, top, total)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return acc, top, total


@triton.jit
def score(
    q, k, n, live, position, scale, softcap, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile's scores, in powers of two; with MASKED those that a row does not see are -inf."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    if SOFTCAP:
        scores = tanh(scores) * softcap
    if MASKED:
        seen = live[None, :]
        if CAUSAL:
            seen = seen & (n[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (n[None, :] > position[:, None] - window)
            if not CAUSAL:
                seen = seen & (n[None, :] < position[:, None] + window)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def tanh(x):
    """By exponentials where these do not cancel, else x + x^3 p(x^2); right to some last places.

    Source: Cephes, tanhf.
    """
    fade = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - fade) / (1.0 + fade)
    z = x * x
    p = (-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2
    p = (p * z + 1.33314422036e-1) * z - 3.33332819422e-1
    return tl.where(z < 0.390625, x + x * z * p, tl.where(x < 0, -far, far))


@triton.jit
def weigh(scores, top, total):
    """A further tile's weights, what earlier sums are multiplied with, the new top and total."""
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    return weights, fade, higher, total * fade + tl.sum(weights, 1)


@triton.jit
def finish(top, total, sinks, query_head, mask, v_scale, SINKS: tl.constexpr):
    """What a row's sum of values is multiplied with in the end; a sink is one more score."""
    if SINKS:
        sink = tl.load(sinks + query_head, mask=mask, other=0.0).to(tl.float32) * 1.4426950408889634
        total += tl.exp2(sink - tl.where(top == float("-inf"), 0.0, top))
    return v_scale / tl.where(total > 0, total, 1.0)


class Tile(NamedTuple):
    """Rows and keys of a tile, and how it is compiled. Bits depend on keys and dtype alone."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def compute_dtype(config: Any) -> torch.dtype:
    """What tiles are multiplied in; sums are float32 always. The interpreter's dot has no bf16."""
    exact = torch.float32 in (config.dtype, config.cache_dtype) or config.device == "cpu"
    return torch.float32 if exact else config.dtype


def check_near(name: str, cache: Tensor, block_size: int) -> None:
    """Whether kernels reach all slots of a block, (num_blocks, block_size, ...), in 32 bits.

    Raises:
        BackendError: they lie too far apart.
    """
    step = cache.stride(1)
    if (block_size - 1) * step > WIDEST:
        raise BackendError(
            f"{name}: slots of a block lie {step} elements apart, so that its {block_size} span "
            f"over {WIDEST}, as far as Triton's attention counts. Pass a cache whose blocks lie "
            'together, or backend="reference"'
        )


def options(
    config: Any, kv: tuple[Tensor, Tensor]
) -> tuple[tuple[float, float, int], dict[str, Any]]:
    """(scale, softcap, window) as the split kernel and the unified one take them; their constants.

    Raises:
        BackendError: see `check_near`.
    """
    for name, x in zip(("k_cache", "v_cache"), kv):
        check_near(name, x, config.block_size)
    softcap = config.softcap or 0.0
    numbers = (
        config.scale / softcap if softcap else config.scale * LOG2E,
        softcap * LOG2E,
        min(config.window or 0, WIDEST // 2),  # positions are added to it
    )
    constants = {
        "ALIKE": kv[0].stride() == kv[1].stride(),
        "STEP": step_of(*kv[0].stride()[:3], *kv[1].stride()[:3]),
        "GROUP": config.num_heads // config.num_kv_heads,
        "SIZE": config.block_size,
        "D": config.head_dim,
        "WIDTH": power_of_two(config.head_dim, at_least=16),
        "CAUSAL": getattr(config, "causal", True),
        "WINDOW": config.window is not None,
        "SOFTCAP": config.softcap is not None,
        "FLOAT32": compute_dtype(config) == torch.float32,
    }
    return numbers, constants
