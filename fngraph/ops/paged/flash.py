"""Backends `flash_attn` (FlashAttention 2) and `flash_attn_3`, where their packages are installed.

Source: `flash_attn_varlen_func` of flash-attn 2.5 to 2.8, and `flash_attn_with_kvcache` of its
hopper/flash_attn_interface.py. Both read the pages in place. Levels are those of vLLM 0.33: FA2
chooses its grid from the longest query, which a graph bakes in; FA3 schedules on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend
from fngraph.ops.paged.config import present
from fngraph.ops.paged.reference import write
from fngraph.ops.primitives import not_installed


def run_2(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv: tuple[Tensor, Tensor],
    meta: Any,
    out_THD: Tensor,
    *,
    config: Any,
    host: HostBounds | None,
) -> None:
    """See `fngraph.ops.attention`."""
    from flash_attn import flash_attn_varlen_func

    _write(kv, (k_TKD, v_TKD), meta)
    out = flash_attn_varlen_func(
        q_THD, *kv, meta.query_start_loc.int(), pad(meta.seq_lens.cumsum(0), (1, 0)).int(),
        _longest(q_THD, host), meta.block_tables.shape[1] * config.block_size,
        softmax_scale=config.scale, causal=config.causal, window_size=_window(config),
        softcap=config.softcap or 0.0, block_table=meta.block_tables.int(),
    )  # fmt: skip
    _deliver(out, meta, out_THD)


def run_3(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv: tuple[Tensor, Tensor],
    meta: Any,
    out_THD: Tensor,
    *,
    config: Any,
    host: HostBounds | None,
) -> None:
    """See `fngraph.ops.attention`."""
    from flash_attn_interface import flash_attn_with_kvcache

    _write(kv, (k_TKD, v_TKD), meta)
    out = flash_attn_with_kvcache(
        q_THD, *kv, cache_seqlens=meta.seq_lens.int(), page_table=meta.block_tables.int(),
        cu_seqlens_q=meta.query_start_loc.int(), max_seqlen_q=_longest(q_THD, host),
        softmax_scale=config.scale, causal=config.causal, window_size=_window(config),
        softcap=config.softcap or 0.0,
    )  # fmt: skip
    _deliver(out, meta, out_THD)


def _write(kv: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], meta: Any) -> None:
    for cache, x_TKD in zip(kv, new):
        write(cache, x_TKD, meta.slot_mapping)


def _longest(q_THD: Tensor, host: HostBounds | None) -> int:
    return min(q_THD.shape[0], (host and host.max_query_len) or q_THD.shape[0])


def _window(config: Any) -> tuple[int, int]:
    if config.window is None:
        return -1, 0 if config.causal else -1
    return config.window - 1, 0 if config.causal else config.window - 1


def _deliver(out: Tensor, meta: Any, out_THD: Tensor) -> None:
    out_THD.copy_(torch.where(present(meta, len(out))[:, None, None], out, 0.0))


def _supports(config: Any) -> str | None:
    if config.device != "cuda":
        return f"FlashAttention runs on CUDA, not on {config.device}"
    if config.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention computes in float16 and bfloat16, not in {config.dtype}"
    if config.cache_dtype is not config.dtype:
        return f"the cache is {config.cache_dtype}, and has to be {config.dtype} as q is"
    if config.head_dim > 256 or config.head_dim % 8:
        return f"head_dim {config.head_dim} is not a multiple of 8 up to 256"
    return None


def missing_2() -> str | None:
    """The package `flash-attn`."""
    return not_installed("flash_attn", "flash-attn --no-build-isolation")


def missing_3() -> str | None:
    """The interface that flash-attention's folder hopper/ installs, on a Hopper GPU."""
    absent = not_installed("flash_attn_interface", "ninja packaging; in flash-attention/hopper: "
                           "python setup.py install")  # fmt: skip
    if absent or not torch.cuda.is_available():
        return absent or "no CUDA device"
    sm = torch.cuda.get_device_capability()
    return None if sm[0] == 9 else f"FlashAttention 3 is for sm_90; this GPU is sm_{sm[0]}{sm[1]}"


def supports_2(config: Any) -> str | None:
    """What FlashAttention 2 computes; its pages are multiples of 256 rows."""
    if config.block_size % 256:
        return missing_2() or f"block_size {config.block_size} is not a multiple of 256"
    return missing_2() or _supports(config)


def supports_3(config: Any) -> str | None:
    """What FlashAttention 3 computes."""
    return missing_3() or _supports(config)


FLASH_ATTN = Backend(
    "flash_attn", run_2, lambda config: Support.UNIFORM_BATCH, supports_2,
    options=("bidirectional",), needs="CUDA, sm_80 or newer, flash-attn", missing=missing_2,
)  # fmt: skip
FLASH_ATTN_3 = Backend(
    "flash_attn_3", run_3, lambda config: Support.ALWAYS, supports_3,
    options=("bidirectional",), needs="CUDA, sm_90, flash_attn_interface", missing=missing_3,
)  # fmt: skip
