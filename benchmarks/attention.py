"""Attention backends against torch's, device time in one run: python -m benchmarks attention

Decode of a Llama-8B head shape (32 query heads, 8 kv heads of 128, bf16, blocks of 16). Ours read
a paged cache whose blocks lie in random order, theirs a contiguous one of the same contents, and
gathering it is not charged. `step` is ours with the write of the new k and v, which theirs do not
make; ratios are without. Then prefill against torch's FlashAttention 2. Every result is compared
with sdpa's in the same run. Times are of replayed graphs, medians. --sweep tries other tiles.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_cases import D, H, backend, decoders, flash, paged, prefilling
from benchmarks.attention_sweep import invariant_cost, sweep
from benchmarks.device import copy_bandwidth, device_us, show, worst

POINTS = [*itertools.product((1, 8, 32, 128), (512, 4096, 32768)), (32, 8192)]
PREFILLS = ((4096,), (1024,) * 4, (3072, 700, 300, 24))


def decode(n: int, context: int, flex: bool, peak: float) -> dict[str, Any]:
    """One point: us of each, the ratio, the share of the copy bandwidth, the largest error."""
    p = paged(n, context)
    row: dict[str, Any] = {"batch": n, "context": context}
    starts = p.meta.query_start_loc
    want = flash(p.q, p.keys.flatten(0, 1), p.values.flatten(0, 1), (starts, starts * context),
                 (1, context), False)  # fmt: skip
    errors = {}
    for name, fn in decoders(p, flex):
        try:
            errors[name] = worst(fn(), want)
            row[name] = device_us(fn)
        except Exception as error:
            if name in ("step", "triton_decode", "triton"):
                raise
            row[name], row[f"{name} failed"] = None, f"{type(error).__name__}: {error}"[:200]
    theirs = {name: row[name] for name in ("sdpa", "varlen", "flex") if row.get(name)}
    row["best of theirs"] = min(theirs, key=theirs.__getitem__)
    row["ratio"] = min(theirs.values()) / row["triton_decode"]
    row["ratio, write charged"] = min(theirs.values()) / row["step"]
    row["share of copy"] = 2 * p.keys.nbytes / row["triton_decode"] / 1e6 / peak
    row["error"] = max(errors[name] for name in ("step", "triton_decode", "triton"))
    if not row["error"] < 1e-2:
        raise SystemExit(f"wrong at batch {n}, context {context}: {errors}")
    return row


def prefill(lens: tuple[int, ...]) -> dict[str, Any]:
    """Causal self-attention of whole prompts: us, TFLOP/s of each, and the ratio."""
    call, theirs, want = prefilling(lens)
    error = worst(call(), want)
    if not error < 1e-2:
        raise SystemExit(f"wrong in prefill of {lens}: {error}")
    ours_us, theirs_us = device_us(call), device_us(theirs)
    flops = sum(2 * n * n * H * D for n in lens)  # half of the square, two products
    return {
        "prompts": lens, "triton": ours_us, "FlashAttention 2": theirs_us,
        "ratio": theirs_us / ours_us, "TFLOP/s": flops / ours_us / 1e6, "error": error,
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """Prints the tables; 1 where a ratio or share is below what is asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks attention", description=__doc__)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--no-flex", action="store_true", help="leave out flex, which compiles")
    parser.add_argument("--sweep", action="store_true", help="other tiles and splits, alone")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks attention needs a CUDA device")
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    backend("triton_decode")
    peak = copy_bandwidth()
    print(f"copy: {peak:.2f} TB/s")
    importing = paged(1, 512)  # loads the kernels' modules
    for _, fn in list(decoders(importing, False)):
        fn()
    if args.sweep:
        sweep(peak)
        return 0
    rows = []
    for n, context in POINTS:
        rows.append(decode(n, context, not args.no_flex, peak))
        torch.cuda.empty_cache()
    show("decode, us a call", rows)
    prompts = [prefill(lens) for lens in PREFILLS]
    show("prefill, us a call", prompts)
    cost = invariant_cost()
    show("fixed splits, batch-invariant, against the best for the batch", cost)
    if args.json:
        from benchmarks.record import write

        write(args.json, {"copy TB/s": peak, "decode": rows, "prefill": prompts, "invariant": cost})
    share = next(r["share of copy"] for r in rows if (r["batch"], r["context"]) == (32, 8192))
    good = share >= 0.8 and prompts[0]["ratio"] >= 0.7
    return int(not good or any(r["ratio"] < 1.0 for r in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
