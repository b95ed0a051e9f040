"""FlashAttention, wherever it is: `varlen` of torch's own, `flash_attn` (2) and `flash_attn_3`.

`varlen`, torch's FlashAttention 2, gathers the keys first, one request behind the other: torch
reads pages through `block_table=` (2.12 and newer) with FlashAttention 3 or 4 alone. Where one of
them is active, `torch.nn.attention.activate_flash_attention_impl("FA3")`, the cache is read in
place. What lies before the window must be finite: FlashAttention masks it by a product with zero.

The other two are there where their packages are, and read the pages in place.

FlashAttention 2 chooses its grid from the longest query, which a graph bakes in: UNIFORM_BATCH. 3
schedules on the device: ALWAYS, as in vLLM 0.33. The longest key is the block table's whole row.

Source: `flash_attn_varlen_func` of flash-attn 2.5 to 2.8, and `flash_attn_with_kvcache` of its
hopper/flash_attn_interface.py.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend, not_installed
from fngraph.ops.paged.config import AttentionArgs, AttentionConfig, AttentionMeta, present
from fngraph.ops.paged.reference import write_new


def run_varlen(args: AttentionArgs, host: HostBounds | None) -> None:
    """See `fngraph.ops.attention`."""
    write_new(args)
    attend, config = varlen_attn(), args.config
    options = varlen_options(config, _window(config))
    keys: tuple[Tensor, ...] = args.kv
    if _reads_pages(attend):
        options |= {
            "block_table": args.meta.block_tables.int(),
            "seqused_k": args.meta.seq_lens.int(),
        }
        starts_k = None
    else:
        starts_k, where_N = _compact(args.meta, config.block_size)
        keys = tuple(cache.view(-1, *cache.shape[2:])[where_N] for cache in args.kv)
    starts_q = args.meta.query_start_loc.int()
    lengths = _longest_query(args, host), _longest_key(args)
    _deliver(attend(args.q, *keys, starts_q, starts_k, *lengths, **options), args)


def run_2(args: AttentionArgs, host: HostBounds | None) -> None:
    """See `fngraph.ops.attention`."""
    from flash_attn import flash_attn_varlen_func

    write_new(args)
    meta, config = args.meta, args.config
    out = flash_attn_varlen_func(
        args.q, *args.kv, meta.query_start_loc.int(), pad(meta.seq_lens.cumsum(0), (1, 0)).int(),
        _longest_query(args, host), _longest_key(args), softmax_scale=config.scale,
        causal=config.causal, window_size=_window(config), softcap=config.softcap or 0.0,
        block_table=meta.block_tables.int(),
    )  # fmt: skip
    _deliver(out, args)


def run_3(args: AttentionArgs, host: HostBounds | None) -> None:
    """See `fngraph.ops.attention`."""
    from flash_attn_interface import flash_attn_with_kvcache

    write_new(args)
    meta, config = args.meta, args.config
    out = flash_attn_with_kvcache(
        args.q, *args.kv, cache_seqlens=meta.seq_lens.int(), page_table=meta.block_tables.int(),
        cu_seqlens_q=meta.query_start_loc.int(), max_seqlen_q=_longest_query(args, host),
        softmax_scale=config.scale, causal=config.causal, window_size=_window(config),
        softcap=config.softcap or 0.0,
    )  # fmt: skip
    _deliver(out, args)


# --- what they are called with --------------------------------------------------------------------


def _longest_query(args: AttentionArgs, host: HostBounds | None) -> int:
    return min(args.q.shape[0], (host and host.max_query_len) or args.q.shape[0])


def _longest_key(args: AttentionArgs) -> int:
    return args.meta.block_tables.shape[1] * args.config.block_size


def _window(config: AttentionConfig) -> tuple[int, int]:
    """Tokens that one sees before and behind itself; -1: all."""
    before = -1 if config.window is None else config.window - 1
    return before, 0 if config.causal else before


def _deliver(out: Tensor, args: AttentionArgs) -> None:
    """What comes back, but for rows that belong to no request, into the output."""
    args.out.copy_(torch.where(present(args.meta, len(out))[:, None, None], out, 0.0))


def _compact(meta: AttentionMeta, block_size: int) -> tuple[Tensor, Tensor]:
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
    return pad(ends_R, (1, 0)).int(), block_N * block_size + at_N % block_size


def varlen_attn() -> Any:
    """torch's own function."""
    from torch.nn.attention.varlen import varlen_attn  # not in every build of torch

    return varlen_attn


def varlen_options(config: Any, window: tuple[int, int]) -> dict[str, Any]:
    """What it is told of a configuration with `scale`, `num_heads` and `num_kv_heads`."""
    options: dict[str, Any] = {"scale": config.scale, "window_size": window}
    if config.num_heads != config.num_kv_heads and "enable_gqa" in _parameters(varlen_attn()):
        options["enable_gqa"] = True
    return options


@functools.cache
def _parameters(fn: Any) -> frozenset[str]:
    return frozenset(inspect.signature(fn).parameters)


def _reads_pages(varlen_attn: Any) -> bool:
    """Whether torch can read the cache in place."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", lambda: None)()
    return current in ("FA3", "FA4") and "block_table" in _parameters(varlen_attn)


# --- what they need -------------------------------------------------------------------------------


def missing_varlen() -> str | None:
    """torch's FlashAttention 2."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than Ampere (sm_80)"
    absent = {"scale", "window_size"} - _parameters(varlen_attn())
    return f"torch {torch.__version__}'s varlen_attn takes no {sorted(absent)}" if absent else None


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


def refusal(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention cannot run these, or None."""
    if device != "cuda":
        return f"FlashAttention runs on CUDA, not on {device}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention computes in float16 and bfloat16, not in {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"head_dim {head_dim} is not a multiple of 8 up to 256"
    return None


def _supports(config: AttentionConfig) -> str | None:
    reason = refusal(config.device, config.dtype, config.head_dim)
    if reason is None and config.cache_dtype is not config.dtype:
        return f"the cache is {config.cache_dtype}, and has to be {config.dtype} as q is"
    return reason


def _supports_varlen(config: AttentionConfig) -> str | None:
    reason = _supports(config)
    return reason or (None if config.softcap is None else "varlen_attn has no softcap")


def _supports_2(config: AttentionConfig) -> str | None:
    """Its pages are multiples of 256 rows."""
    if config.block_size % 256:
        return missing_2() or f"block_size {config.block_size} is not a multiple of 256"
    return missing_2() or _supports(config)


def _supports_3(config: AttentionConfig) -> str | None:
    return missing_3() or _supports(config)


VARLEN = Backend(
    "varlen", run_varlen, lambda config: Support.UNIFORM_BATCH, _supports_varlen,
    options=("bidirectional",), needs="CUDA, sm_80 or newer", missing=missing_varlen,
)  # fmt: skip
FLASH_ATTN = Backend(
    "flash_attn", run_2, lambda config: Support.UNIFORM_BATCH, _supports_2,
    options=("bidirectional",), needs="CUDA, sm_80 or newer, flash-attn", missing=missing_2,
)  # fmt: skip
FLASH_ATTN_3 = Backend(
    "flash_attn_3", run_3, lambda config: Support.ALWAYS, _supports_3,
    options=("bidirectional",), needs="CUDA, sm_90, flash_attn_interface", missing=missing_3,
)  # fmt: skip
