"""Latent attention against the device's copy: python -m benchmarks latent

DeepSeek-V2's shapes (rank 512, rotated part 64, bf16, blocks of 64 in random order): 16 heads as
in the Lite model, 128 as in the large one. GB/s are of the compressed cache, read once. `step` is
`triton_decode` with the write of the new rows. Every result is compared with the reference's in
the same run. Times are of replayed graphs, medians. --sweep tries other tiles and splits.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg
from benchmarks.device import DTYPE, PREFILLS, copy_bandwidth, device_us, draw, error_of, scattered
from benchmarks.harness import SWEEP, Benchmark, kept, show

L, D, BLOCK = 512, 64, 64
C = L + D
FP8 = torch.float8_e4m3fn
SCALE = (128 + D) ** -0.5  # of the heads before absorption
POINTS = [
    *((16, 1, n, context) for n, context in itertools.product((1, 8, 32), (512, 4096, 32768))),
    *((16, query_len, 32, 8192) for query_len in (1, 2, 4)),
    (16, 1, 128, 4096),
    *((128, 1, n, 8192) for n in (1, 32)),
]  # (heads, query length, batch, context)
TIMED = 1 << 19  # tokens and keys of a batch, multiplied: the reference is timed up to here
ops: Any = fg.ops
kernels: Any = fg.ops.triton  # not public: what lies below a backend's call


class Compressed(NamedTuple):
    """A batch whose last tokens are new, over a cache that holds them already."""

    q: Tensor  # (T, H, C)
    new: Tensor  # (T, C)
    cache: Tensor  # (blocks, BLOCK, C)
    meta: Any

    @property
    def config(self) -> Any:
        """What our backends are chosen by."""
        return ops.MLAConfig(self.q.shape[1], L, D, BLOCK, DTYPE, self.cache.dtype, "cuda", SCALE)

    def args(self, out: Tensor) -> Any:
        """What a backend is given."""
        return ops.MLAArgs(self.q, self.new, self.cache, self.meta, out, self.config)


def compressed(heads: int, new: list[int], lens: list[int], dtype: torch.dtype) -> Compressed:
    """Requests of `lens` tokens, of which `new` are new."""
    meta = scattered(new, lens, BLOCK)
    cache = draw(meta.block_tables.numel(), BLOCK, C).to(dtype)
    rows = cache.view(-1, C)[meta.slot_mapping] if dtype is DTYPE else draw(sum(new), C)
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
           dtype: torch.dtype = DTYPE) -> dict[str, Any]:  # fmt: skip
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
        kernels.attention.latent.attend_decode(c.args(out), query_len)
        return out

    def unified() -> Tensor:
        kernels.attention.latent.attend_unified(c.args(out))
        return out

    calls = {"step": runner("triton_decode", c, query_len), "triton_decode": split}
    errors = []
    for name, fn in (calls | {"triton": unified}).items():
        errors.append(error_of(fn(), want, f"{name}, {row}"))
        row[name] = device_us(fn)
    row["GB/s"] = c.cache.nbytes / row["triton_decode"] / 1e3
    row["share of copy"] = row["GB/s"] / 1e3 / peak
    row["error"] = max(errors)
    return row


def prefill(lens: tuple[int, ...]) -> dict[str, Any]:
    """Whole prompts by the absorbed formula: us and TFLOP/s."""
    c = compressed(16, [*lens], [*lens], DTYPE)
    want = runner("reference", c, None)().clone()
    call = runner("triton", c, None)
    error = error_of(call(), want, f"prefill of {lens}")
    us = device_us(call)
    flops = sum(n * n * 16 * (C + L) for n in lens)  # half of the square, two products
    return {"prompts": lens, "triton": us, "TFLOP/s": flops / us / 1e6, "error": error}


@Benchmark(SWEEP, needs_cuda=True)
def measure(flags: argparse.Namespace) -> dict[str, Any] | None:
    """Decode and prefill; or other tiles."""
    torch.manual_seed(0)
    peak = copy_bandwidth()
    small = compressed(16, [1], [64], DTYPE)
    runner("triton_decode", small, 1)()  # loads the kernels' modules
    if flags.sweep:
        sweep(peak)
        return None
    figures: dict[str, Any] = {"copy TB/s": peak}
    points: list[Any] = [(*point, peak) for point in POINTS[: 2 if flags.quick else None]]
    points.append((16, 1, 32, 8192, peak, FP8))
    show(kept(flags, itertools.starmap(decode, points), figures, "decode"), "decode, us a call")
    prompts = map(prefill, PREFILLS[: 1 if flags.quick else None])
    show(kept(flags, prompts, figures, "prefill"), "prefill, us a call")
    return figures


# --- other tiles and splits -----------------------------------------------------------------------

TILES = (  # (rows, keys, warps, stages), programs a multiprocessor
    ((16, 32, 4, 5), 2), ((16, 32, 4, 3), 2), ((16, 32, 4, 7), 1), ((16, 64, 8, 5), 1),
    ((16, 64, 8, 4), 2), ((16, 16, 4, 6), 3), ((64, 32, 8, 3), 1), ((64, 32, 8, 5), 1),
    ((64, 64, 8, 3), 1),
)  # fmt: skip
PREFILL_TILES = ((64, 32, 8, 3), (64, 32, 8, 5), (64, 64, 8, 3), (32, 32, 8, 5))


def sweep(peak: float) -> None:
    """Decode with other tiles and splits, the best six; prefill with other tiles."""
    Tile = kernels.attention.keys.Tile
    for heads, n, context in ((16, 1, 8192), (16, 32, 512), (16, 32, 8192), (128, 32, 8192)):
        c = compressed(heads, [1] * n, [context] * n, DTYPE)
        usual = kernels.attention.latent.how_to(c.config, 1, context)
        ways = [usual._replace(split=split) for split in (128, 256, 512, 1024, 2048)]
        ways += [usual._replace(tile=Tile(*shape), programs=k) for shape, k in TILES]
        times = {
            how: _tried(kernels.attention.latent.attend_decode, c, 1, how) for how in (usual, *ways)
        }
        best = sorted(times, key=times.__getitem__)[:6]
        for how in (usual, *best):
            share = c.cache.nbytes / times[how] / 1e6 / peak
            as_it_is = ", as it is" * (how == usual)
            print(f"{heads} heads, batch {n}, context {context}{as_it_is}: "
                  f"{times[how]:.1f} us, {share:.0%}, {how}")  # fmt: skip
    c = compressed(16, [4096], [4096], DTYPE)
    for tile in itertools.starmap(Tile, PREFILL_TILES):
        us = _tried(kernels.attention.latent.attend_unified, c, tile)
        print(f"prefill of 4096: {us:.1f} us, {tile}")


def _tried(attend: Callable[..., None], c: Compressed, *how: Any) -> float:
    """us, or infinity where it does not fit the device."""
    out = c.q.new_empty(*c.q.shape[:2], L)
    try:
        return device_us(lambda: attend(c.args(out), *how), 1.5)
    except Exception as error:
        print(f"  {how}: {type(error).__name__}: {str(error)[:100]}")
        return float("inf")
