"""The `flashinfer` backend of attention, where flashinfer-python is installed.

FlashInfer schedules a batch on the host, `wrapper.plan(...)`, and its kernels read the result from
buffers that a wrapper owns. So each key that is captured in one graph has a wrapper of its own over
fixed buffers, and eager calls share another one. Captured: decode of one token a request, the level
that vLLM 0.33 gives it without trtllm-gen.

Source: flashinfer's BatchDecodeWithPagedKVCacheWrapper and BatchPrefillWithPagedKVCacheWrapper.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fngraph.core import BatchDescriptor, HostBounds, Support
from fngraph.ops.backend import Backend, Plan, not_installed
from fngraph.ops.paged.config import AttentionArgs, present
from fngraph.ops.paged.reference import write_new

WORKSPACE = 128 << 20  # bytes; what flashinfer's own examples use


class Wrapped(NamedTuple):
    """A wrapper of flashinfer's, for decode over fixed buffers or for any batch."""

    wrapper: Any
    decodes: bool


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """Scratch memory of all wrappers of a device, which run one after another."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def buffers(config: Any, sizes: Mapping[str, int], key: BatchDescriptor | None) -> Wrapped:
    """Fixed buffers for a key that is captured; for eager calls, buffers that come and go."""
    import flashinfer

    scratch = _workspace(torch.empty(0, device=config.device).device)
    if key is None:
        return Wrapped(flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD"), False)
    fixed = functools.partial(torch.zeros, dtype=torch.int32, device=scratch.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        scratch, "NHD", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=fixed(sizes["R"] + 1),
        paged_kv_indices_buffer=fixed(sizes["R"] * sizes["B"]),
        paged_kv_last_page_len_buffer=fixed(sizes["R"]),
    )  # fmt: skip
    return Wrapped(wrapper, True)


def pages(
    seq_lens: Tensor, block_tables: Tensor, block_size: int, R: int
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's page table, on the host: (R + 1,) offsets, the pages, rows in each last page.

    Requests beyond the batch's own, up to R, have no page.
    """
    num_pages = (seq_lens.long() + block_size - 1) // block_size
    used = torch.arange(block_tables.shape[1])[None] < num_pages[:, None]
    num_pages = torch.nn.functional.pad(num_pages, (0, R - len(seq_lens)))
    offsets = torch.nn.functional.pad(num_pages.cumsum(0), (1, 0)).int()
    last = torch.nn.functional.pad((seq_lens.long() - 1) % block_size + 1, (0, R - len(seq_lens)))
    return offsets, block_tables[used].int(), last.int()


def fill(planned: Wrapped, config: Any, sizes: Mapping[str, int], leaves: Sequence[Tensor]) -> None:
    """`wrapper.plan` for a step."""
    seq_lens, query_start_loc, block_tables = leaves
    table = pages(seq_lens, block_tables, config.block_size, sizes["R"])
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    options = {
        "sm_scale": config.scale, "logits_soft_cap": config.softcap,
        "window_left": -1 if config.window is None else config.window - 1,
        "q_data_type": config.dtype, "kv_data_type": config.cache_dtype,
    }  # fmt: skip
    if planned.decodes:
        planned.wrapper.plan(*table, *heads, config.block_size, **options)
    else:
        starts = query_start_loc.int()
        planned.wrapper.plan(starts, *table, *heads, config.block_size, causal=True, **options)


def run(args: AttentionArgs, host: HostBounds | None) -> None:
    """See `fngraph.ops.attention`."""
    write_new(args)
    out = args.plan.wrapper.run(args.q, args.kv)
    args.out.copy_(torch.where(present(args.meta, len(out))[:, None, None], out, 0.0))


def missing() -> str | None:
    """The package `flashinfer-python` and a GPU."""
    absent = not_installed("flashinfer", "flashinfer-python")
    return absent or (None if torch.cuda.is_available() else "no CUDA device")


def supports(config: Any) -> str | None:
    """What its kernels are made for."""
    if absent := missing():
        return absent
    if config.device != "cuda":
        return f"FlashInfer runs on CUDA, not on {config.device}"
    if config.dtype not in (torch.float16, torch.bfloat16) or config.cache_dtype != config.dtype:
        return f"q in {config.dtype} over a cache in {config.cache_dtype}; float16 or bfloat16 both"
    if config.head_dim not in (64, 128, 256):
        return f"head_dim {config.head_dim} is none of 64, 128, 256"
    return None


BACKEND = Backend(
    "flashinfer",
    run,
    support=lambda config: Support.UNIFORM_SINGLE_TOKEN_DECODE,
    supports=supports,
    needs="CUDA, flashinfer-python; seq_lens, query_start_loc, block_tables on the host",
    missing=missing,
    plan=Plan(("seq_lens", "query_start_loc", "block_tables"), buffers, fill),
)
