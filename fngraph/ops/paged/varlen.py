"""The `varlen` backend of attention: torch's own FlashAttention 2, `torch.nn.attention.varlen`.

The keys are gathered first, one request behind the other: torch reads pages through `block_table=`
(2.12 and newer) with FlashAttention 3 or 4 alone. Where one of them is active,
`torch.nn.attention.activate_flash_attention_impl("FA3")`, the cache is read in place. What lies
before the window must be finite: FlashAttention masks it by a product with zero.

UNIFORM_BATCH: a graph bakes in the key's longest query, from which FlashAttention chooses its grid.
The longest key is the block table's whole row.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend
from fngraph.ops.paged.config import present
from fngraph.ops.paged.reference import write


def run(
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
    for cache, x_TKD in zip(kv, (k_TKD, v_TKD)):
        write(cache, x_TKD, meta.slot_mapping)
    T, S = q_THD.shape[0], meta.block_tables.shape[1] * config.block_size
    max_q = min(T, (host and host.max_query_len) or T)
    options = _options(config)
    if paged():
        keys = kv
        options |= {"block_table": meta.block_tables.int(), "seqused_k": meta.seq_lens.int()}
        starts_k = None
    else:
        starts_k, where_N = compact(meta, config.block_size)
        keys = tuple(cache.view(-1, *cache.shape[2:])[where_N] for cache in kv)  # type: ignore[assignment]
    starts_q = meta.query_start_loc.int()
    out = _varlen()(q_THD, *keys, starts_q, starts_k, max_q, S, **options)
    out_THD.copy_(torch.where(present(meta, T)[:, None, None], out, 0.0))


def compact(meta: Any, block_size: int) -> tuple[Tensor, Tensor]:
    """Where requests begin once their keys follow one another, and the slot of each key.

    Returns:
        (R + 1,) int32 offsets, and (R * S,) slots; those past the last offset are any.
    """
    R, B = meta.block_tables.shape
    ends_R = meta.seq_lens.long().cumsum(0)
    key_N = torch.arange(R * B * block_size, device=ends_R.device)
    owner_N = torch.searchsorted(ends_R, key_N, right=True).clamp(max=R - 1)
    at_N = key_N - (ends_R - meta.seq_lens)[owner_N]
    at_N = at_N.clamp(min=0, max=B * block_size - 1)
    block_N = meta.block_tables.long()[owner_N, at_N // block_size]
    starts = torch.nn.functional.pad(ends_R, (1, 0)).int()
    return starts, block_N * block_size + at_N % block_size


def paged() -> bool:
    """Whether torch can read the cache in place."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", lambda: None)()
    return current in ("FA3", "FA4") and "block_table" in _parameters()


def _options(config: Any) -> dict[str, Any]:
    """Keyword arguments, as far as this torch has them; see `supports`."""
    behind = 0 if config.causal else -1 if config.window is None else config.window - 1
    before = -1 if config.window is None else config.window - 1
    options = {"scale": config.scale, "window_size": (before, behind)}
    if config.num_heads != config.num_kv_heads and "enable_gqa" in _parameters():
        options["enable_gqa"] = True
    return options


@functools.cache
def _varlen() -> Any:
    from torch.nn.attention.varlen import varlen_attn  # not in every build of torch

    return varlen_attn


@functools.cache
def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(_varlen()).parameters)


def missing() -> str | None:
    """FlashAttention 2 needs a GPU of compute capability 8.0 or newer."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than Ampere (sm_80)"
    absent = {"scale", "window_size"} - _parameters()
    return f"torch {torch.__version__}'s varlen_attn takes no {sorted(absent)}" if absent else None


def supports(config: Any) -> str | None:
    """What FlashAttention 2 computes."""
    if config.device != "cuda":
        return f"FlashAttention runs on CUDA, not on {config.device}"
    if config.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention computes in float16 and bfloat16, not in {config.dtype}"
    if config.cache_dtype is not config.dtype:
        return f"the cache is {config.cache_dtype}, and has to be {config.dtype} as q is"
    if config.head_dim > 256 or config.head_dim % 8:
        return f"head_dim {config.head_dim} is not a multiple of 8 up to 256"
    return None if config.softcap is None else "varlen_attn has no softcap"


BACKEND = Backend(
    "varlen",
    run,
    support=lambda config: Support.UNIFORM_BATCH,
    supports=supports,
    options=("bidirectional",),
    needs="CUDA, sm_80 or newer",
    missing=missing,
)
