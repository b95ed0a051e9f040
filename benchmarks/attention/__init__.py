"""Attention backends against torch's, device time in one run: python -m benchmarks attention

Decode of a Llama-8B head shape (32 query heads, 8 kv heads of 128, bf16, blocks of 16). Ours read
a paged cache whose blocks lie in random order, theirs a contiguous one of the same contents, and
gathering it is not charged. `step` is ours with the write of the new k and v, which theirs do not
make; ratios are without. Then prefill against torch's FlashAttention 2, which ours are held to in
the same run. Times are of replayed graphs, medians. --sweep tries other tiles.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.attention.cases import D, H, backend, decoders, flash, paged, prefilling
from benchmarks.attention.tiles import invariant_cost, sweep
from benchmarks.device import PREFILLS, copy_bandwidth, device_us, error_of
from benchmarks.harness import SWEEP, Benchmark, Flags, kept, show

OURS = ("step", "triton_decode", "triton")
POINTS = [*itertools.product((1, 8, 32, 128), (512, 4096, 32768)), (32, 8192)]


def decode(n: int, context: int, flex: bool, peak: float) -> dict[str, Any]:
    """One point: us of each, the ratio, the share of the copy bandwidth, the largest error."""
    p = paged(n, context)
    row: dict[str, Any] = {"batch": n, "context": context}
    starts = p.meta.query_start_loc
    want = flash(p.q, p.keys.flatten(0, 1), p.values.flatten(0, 1), (starts, starts * context),
                 (1, context), False)  # fmt: skip
    errors = []
    for name, fn in decoders(p, flex):
        try:
            if name in OURS:
                errors.append(error_of(fn(), want, f"{name}, batch {n}, context {context}"))
            row[name] = device_us(fn)
        except Exception as error:
            if name in OURS:
                raise
            row[name], row[f"{name} failed"] = None, f"{type(error).__name__}: {error}"[:200]
    theirs = {name: row[name] for name in ("sdpa", "varlen", "flex") if row.get(name)}
    row["best of theirs"] = min(theirs, key=theirs.__getitem__)
    row["ratio"] = min(theirs.values()) / row["triton_decode"]
    row["ratio, write charged"] = min(theirs.values()) / row["step"]
    row["share of copy"] = 2 * p.keys.nbytes / row["triton_decode"] / 1e6 / peak
    row["error"] = max(errors)
    return row


def prefill(lens: tuple[int, ...]) -> dict[str, Any]:
    """Causal self-attention of whole prompts: us, TFLOP/s of each, and the ratio."""
    call, theirs, want = prefilling(lens)
    error = error_of(call(), want, f"prefill of {lens}")
    ours_us, theirs_us = device_us(call), device_us(theirs)
    flops = sum(2 * n * n * H * D for n in lens)  # half of the square, two products
    return {
        "prompts": lens, "triton": ours_us, "FlashAttention 2": theirs_us,
        "ratio": theirs_us / ours_us, "TFLOP/s": flops / ours_us / 1e6, "error": error,
    }  # fmt: skip


def missed(figures: dict[str, Any], flags: argparse.Namespace) -> list[str]:
    """Ours are as fast as the best of theirs, in prefill 0.7 of it, and read at 0.8 of a copy."""
    lines = []
    for row in figures["decode"]:
        where = f"batch {row['batch']}, context {row['context']}"
        if row["ratio"] < 1.0:
            lines.append(f"{where}: {row['ratio']:.2f} of the best of theirs, and 1 is asked")
        if (row["batch"], row["context"]) == (32, 8192) and row["share of copy"] < 0.8:
            lines.append(f"{where}: {row['share of copy']:.2f} of the copy, and 0.8 is asked")
    first = figures["prefill"][0]
    if first["ratio"] < 0.7:
        lines.append(f"prefill of {first['prompts']}: {first['ratio']:.2f}, and 0.7 is asked")
    return lines


FLEX: Flags = {"--no-flex": {"action": "store_true", "help": "leave out flex, which compiles"}}


@Benchmark(FLEX | SWEEP, missed=missed, needs_cuda=True)
def measure(flags: argparse.Namespace) -> dict[str, Any] | None:
    """Decode, prefill, and what batch invariance costs; or other tiles."""
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    backend("triton_decode")
    peak = copy_bandwidth()
    importing = paged(1, 512)  # loads the kernels' modules
    for _, fn in list(decoders(importing, False)):
        fn()
    if flags.sweep:
        sweep(peak)
        return None
    figures: dict[str, Any] = {"copy TB/s": peak}
    show(kept(flags, decodes(flags, peak), figures, "decode"), "decode, us a call")
    prompts = map(prefill, PREFILLS[: 1 if flags.quick else None])
    show(kept(flags, prompts, figures, "prefill"), "prefill, us a call")
    cost = kept(flags, invariant_cost(1 if flags.quick else None), figures, "invariant")
    show(cost, "fixed splits, batch-invariant, against the best for the batch")
    return figures


def decodes(flags: argparse.Namespace, peak: float) -> Iterator[dict[str, Any]]:
    """A row a batch and context."""
    for n, context in POINTS[: 2 if flags.quick else None]:
        yield decode(n, context, not flags.no_flex, peak)
        torch.cuda.empty_cache()
