"""Latent attention against the device's copy: python -m benchmarks latent

DeepSeek-V2's shapes (rank 512, rotated part 64, bf16, blocks of 64 in random order): 16 heads as
in the Lite model, 128 as in the large one. GB/s are of the compressed cache, read once. `step` is
`triton_decode` with the write of the new rows. Every result is compared with the reference's in
the same run. Times are of replayed graphs, medians. --sweep tries other tiles and splits.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg
from benchmarks.device import copy_bandwidth, device_us, draw, show, worst

L, D, BLOCK = 512, 64, 64
C = L + D
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SCALE = (128 + D) ** -0.5  # of the heads before absorption
POINTS = [
    *((16, 1, n, context) for n, context in itertools.product((1, 8, 32), (512, 4096, 32768))),
    *((16, query_len, 32, 8192) for query_len in (1, 2, 4)),
    (16, 1, 128, 4096),
    *((128, 1, n, 8192) for n in (1, 32)),
]  # (heads, query length, batch, context)
PREFILLS = ((4096,), (1024,) * 4, (3072, 700, 300, 24))
TIMED = 1 << 19  # tokens and keys of a batch, multiplied: the reference is timed up to here
ops: Any = fg.ops


class Compressed(NamedTuple):
    """A batch whose last tokens are new, over a cache that holds them already."""

    q: Tensor  # (T, H, C)
    new: Tensor  # (T, C)
    cache: Tensor  # (blocks, BLOCK, C)
    meta: Any

    @property
    def config(self) -> Any:
        """What our backends are chosen by."""
        return ops.MLAConfig(self.q.shape[1], L, D, BLOCK, BF16, self.cache.dtype, "cuda", SCALE)

    def args(self, out: Tensor) -> Any:
        """What a backend is given."""
        return ops.MLAArgs(self.q, self.new, self.cache, self.meta, out, self.config)


def compressed(heads: int, new: list[int], lens: list[int], dtype: torch.dtype) -> Compressed:
    """Requests of `lens` tokens, of which `new` are new."""
    columns = -(-max(lens) // BLOCK)
    table = torch.randperm(len(lens) * columns, device="cuda").view(len(lens), columns)
    cache = draw(table.numel(), BLOCK, C).to(dtype)
    slots = []
    for row, n, length in zip(table, new, lens):
        i = torch.arange(length - n, length, device="cuda")
        slots.append(row[i // BLOCK] * BLOCK + i % BLOCK)
    starts = torch.tensor([0, *itertools.accumulate(new)], device="cuda", dtype=torch.int32)
    seq_lens = torch.tensor(lens, device="cuda", dtype=torch.int32)
    meta = ops.AttentionMeta(torch.cat(slots), seq_lens, starts, table.int())
    rows = cache.view(-1, C)[meta.slot_mapping] if dtype is BF16 else draw(sum(new), C)
    return Compressed(draw(sum(new), heads, C), rows, cache, meta)


def runner(name: str, c: Compressed, query_len: int | None) -> Callable[[], Tensor]:
    """A backend's whole call: the write, then attention."""
    backend = ops.primitive("mla").backend(name)
    out, host = c.q.new_empty(*c.q.shape[:2], L), fg.HostBounds(max_query_len=query_len)

    def step() -> Tensor:
        backend.run(c.args(out), host)
        return out

    return step


def decode(heads: int, query_len: int, n: int, context: int, peak: float,
           dtype: torch.dtype = BF16) -> dict[str, Any]:  # fmt: skip
    """One point: us of each, what is read a second, its share of the copy, the largest error."""
    c = compressed(heads, [query_len] * n, [context] * n, dtype)
    row: dict[str, Any] = {
        "heads": heads, "query len": query_len, "batch": n, "context": context,
        "cache": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    plain = runner("reference", c, None)
    want = plain().clone()
    row["reference"] = device_us(plain) if c.q.shape[0] * context <= TIMED else None
    out = torch.empty_like(want)

    def split() -> Tensor:
        ops.triton.latent.attend_decode(c.args(out), query_len)
        return out

    def unified() -> Tensor:
        ops.triton.latent.attend_unified(c.args(out))
        return out

    calls = {"step": runner("triton_decode", c, query_len), "triton_decode": split}
    errors = {}
    for name, fn in (calls | {"triton": unified}).items():
        errors[name] = worst(fn(), want)
        row[name] = device_us(fn)
    row["GB/s"] = c.cache.nbytes / row["triton_decode"] / 1e3
    row["share of copy"] = row["GB/s"] / 1e3 / peak
    row["error"] = max(errors.values())
    if not row["error"] < 1e-2:
        raise SystemExit(f"wrong at {row}: {errors}")
    return row


def prefill(lens: tuple[int, ...]) -> dict[str, Any]:
    """Whole prompts by the absorbed formula: us and TFLOP/s."""
    c = compressed(16, [*lens], [*lens], BF16)
    want = runner("reference", c, None)().clone()
    call = runner("triton", c, None)
    error = worst(call(), want)
    if not error < 1e-2:
        raise SystemExit(f"wrong in prefill of {lens}: {error}")
    us = device_us(call)
    flops = sum(n * n * 16 * (C + L) for n in lens)  # half of the square, two products
    return {"prompts": lens, "triton": us, "TFLOP/s": flops / us / 1e6, "error": error}


# --- other tiles and splits -----------------------------------------------------------------------

TILES = (  # (rows, keys, warps, stages), programs a multiprocessor
    ((16, 32, 4, 5), 2), ((16, 32, 4, 3), 2), ((16, 32, 4, 7), 1), ((16, 64, 8, 5), 1),
    ((16, 64, 8, 4), 2), ((16, 16, 4, 6), 3), ((64, 32, 8, 3), 1), ((64, 32, 8, 5), 1),
    ((64, 64, 8, 3), 1),
)  # fmt: skip
PREFILL_TILES = ((64, 32, 8, 3), (64, 32, 8, 5), (64, 64, 8, 3), (32, 32, 8, 5))


def sweep(peak: float) -> None:
    """Decode with other tiles and splits, the best six; prefill with other tiles."""
    Tile = ops.triton.keys.Tile
    for heads, n, context in ((16, 1, 8192), (16, 32, 512), (16, 32, 8192), (128, 32, 8192)):
        c = compressed(heads, [1] * n, [context] * n, BF16)
        usual = ops.triton.latent.how_to(c.config, 1, context)
        ways = [usual._replace(split=split) for split in (128, 256, 512, 1024, 2048)]
        ways += [usual._replace(tile=Tile(*shape), programs=k) for shape, k in TILES]
        times = {how: _tried(ops.triton.latent.attend_decode, c, 1, how) for how in (usual, *ways)}
        best = sorted(times, key=times.__getitem__)[:6]
        for how in (usual, *best):
            share = c.cache.nbytes / times[how] / 1e6 / peak
            as_it_is = ", as it is" * (how == usual)
            print(f"{heads} heads, batch {n}, context {context}{as_it_is}: "
                  f"{times[how]:.1f} us, {share:.0%}, {how}")  # fmt: skip
    c = compressed(16, [4096], [4096], BF16)
    for tile in itertools.starmap(Tile, PREFILL_TILES):
        us = _tried(ops.triton.latent.attend_unified, c, tile)
        print(f"prefill of 4096: {us:.1f} us, {tile}")


def _tried(attend: Callable[..., None], c: Compressed, *how: Any) -> float:
    """us, or infinity where it does not fit the device."""
    out = c.q.new_empty(*c.q.shape[:2], L)
    try:
        return device_us(lambda: attend(c.args(out), *how), 1.5)
    except Exception as error:
        print(f"  {how}: {type(error).__name__}: {str(error)[:100]}")
        return float("inf")


def main(argv: list[str]) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks latent", description=__doc__)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--sweep", action="store_true", help="other tiles and splits, alone")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks latent needs a CUDA device")
    torch.manual_seed(0)
    peak = copy_bandwidth()
    print(f"copy: {peak:.2f} TB/s")
    small = compressed(16, [1], [64], BF16)
    runner("triton_decode", small, 1)()  # loads the kernels' modules
    if args.sweep:
        sweep(peak)
        return 0
    rows = [decode(*point, peak) for point in POINTS]
    rows.append(decode(16, 1, 32, 8192, peak, FP8))
    show("decode, us a call", rows)
    prompts = [prefill(lens) for lens in PREFILLS]
    show("prefill, us a call", prompts)
    if args.json:
        from benchmarks.record import write

        write(args.json, {"copy TB/s": peak, "decode": rows, "prefill": prompts})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
