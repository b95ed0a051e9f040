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
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fngraph as fg

H, K, D, BLOCK = 32, 8, 128, 16
DTYPE = torch.bfloat16
POINTS = [*itertools.product((1, 8, 32, 128), (512, 4096, 32768)), (32, 8192)]
PREFILLS = ((4096,), (1024,) * 4, (3072, 700, 300, 24))
Fn = Callable[[], Any]
ops: Any = fg.ops


class Paged(NamedTuple):
    """A decode batch twice: paged for us, contiguous for torch."""

    q: Tensor  # (N, H, D)
    k: Tensor  # (N, K, D), the new token's, which the cache holds already
    v: Tensor
    cache: tuple[Tensor, Tensor]  # (blocks, BLOCK, K, D)
    meta: Any
    keys: Tensor  # (N, context, K, D)
    values: Tensor


def draw(*shape: int) -> Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def paged(n: int, context: int) -> Paged:
    """n requests of one length, their last token new."""
    blocks = context // BLOCK
    place = torch.randperm(n * blocks, device="cuda")
    keys, values, cache = draw(n, context, K, D), draw(n, context, K, D), []
    for x in (keys, values):
        pages = torch.empty_like(x).view(n * blocks, BLOCK, K, D)
        pages[place] = x.view(n * blocks, BLOCK, K, D)
        cache.append(pages)
    table = place.view(n, blocks).int()
    meta = fg.ops.AttentionMeta(
        slot_mapping=table[:, -1].long() * BLOCK + BLOCK - 1,
        seq_lens=torch.full((n,), context, device="cuda", dtype=torch.int32),
        query_start_loc=torch.arange(n + 1, device="cuda", dtype=torch.int32),
        block_tables=table,
    )
    new = keys[:, -1].clone(), values[:, -1].clone()
    return Paged(draw(n, H, D), *new, (cache[0], cache[1]), meta, keys, values)


def device_us(fn: Fn, target_ms: float = 4.0) -> float:
    """Median device time of one call, in us, over replays of a graph of as many as take so long."""
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        fn()
    end.record()
    torch.cuda.synchronize()
    calls = max(2, min(50, int(target_ms * 3 / begin.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    graph.replay()
    times = []
    for _ in range(7):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return median(times)


def copy_bandwidth() -> float:
    """TB/s of a device copy, bytes read and written: the driver's, or a kernel's if faster."""
    x = torch.ones(1 << 28, device="cuda")
    y = torch.empty_like(x)
    us = min(device_us(lambda: y.copy_(x)), device_us(lambda: torch.neg(x, out=y)))
    return 2 * x.nbytes / us / 1e6


def config() -> Any:
    """What our backends are chosen by."""
    return fg.ops.AttentionConfig(H, K, D, BLOCK, DTYPE, DTYPE, "cuda", D**-0.5)


def backend(name: str) -> Any:
    """One of ours, able to run here."""
    found = fg.ops.primitive("attention").backend(name)
    reason = ops.triton_launch.missing("cuda") or found.supports(config())
    if reason is not None:
        raise SystemExit(f"{name}: {reason}")
    return found


def flash(q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor], most: tuple[int, int],
          causal: bool) -> Tensor:  # fmt: skip
    """torch's FlashAttention 2 over requests end to end, the op below `varlen_attn`."""
    return torch.ops.aten._flash_attention_forward(
        q, k, v, *starts, *most, 0.0, causal, False, scale=D**-0.5
    )[0]


def decoders(p: Paged, flex: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Name and call of each; a result is (N, H, D)."""
    context = p.keys.shape[1]
    out, host = torch.empty_like(p.q), fg.HostBounds(max_query_len=1)
    q_NH1D = p.q[:, :, None]
    k_NKSD, v_NKSD = (x.transpose(1, 2) for x in (p.keys, p.values))
    starts = p.meta.query_start_loc
    flat = p.keys.flatten(0, 1), p.values.flatten(0, 1)

    def ours(name: str) -> Callable[[], Tensor]:
        run = backend(name).run

        def step() -> Tensor:
            run(p.q, p.k, p.v, p.cache, p.meta, out, config=config(), host=host)
            return out

        return step

    def split() -> Tensor:
        ops.triton_decode.attend(p.q, p.cache, p.meta, out, config(), 1)
        return out

    def unified() -> Tensor:
        ops.triton_unified.attend(p.q, p.cache, p.meta, out, config())
        return out

    yield "sdpa", lambda: sdpa(q_NH1D, k_NKSD, v_NKSD, enable_gqa=True)[:, :, 0]
    yield "varlen", lambda: flash(p.q, *flat, (starts, starts * context), (1, context), False)
    if flex:
        from torch.nn.attention.flex_attention import flex_attention  # brings dynamo in

        attend = torch.compile(flex_attention, dynamic=False)
        yield "flex", lambda: attend(q_NH1D, k_NKSD, v_NKSD, enable_gqa=True)[:, :, 0]
    yield "step", ours("triton_decode")
    yield "triton_decode", split
    yield "triton", unified


def worst(got: Tensor, want: Tensor) -> float:
    """The largest error of a (token, head) row, by the row's norm."""
    got, want = got.double(), want.double()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


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


def prefilling(lens: tuple[int, ...]) -> tuple[Callable[..., Tensor], Fn, Tensor]:
    """Our call, by a tile if one is given; theirs; and what both should come to."""
    T, most = sum(lens), max(lens)
    q, k, v = draw(T, H, D), draw(T, K, D), draw(T, K, D)
    columns = -(-most // BLOCK)
    pages = torch.randperm(len(lens) * columns, device="cuda").view(len(lens), columns)
    cache = draw(pages.numel(), BLOCK, K, D), draw(pages.numel(), BLOCK, K, D)
    slots = []
    for row, n in zip(pages, lens):
        i = torch.arange(n, device="cuda")
        slots.append(row[i // BLOCK] * BLOCK + i % BLOCK)
    for pool, x in zip(cache, (k, v)):
        pool.view(-1, K, D)[torch.cat(slots)] = x
    starts = torch.tensor([0, *itertools.accumulate(lens)], device="cuda", dtype=torch.int32)
    seq_lens = torch.tensor(lens, device="cuda", dtype=torch.int32)
    meta = fg.ops.AttentionMeta(torch.cat(slots), seq_lens, starts, pages.int())
    out = torch.empty_like(q)

    def ours(tile: Any = None) -> Tensor:
        ops.triton_unified.attend(q, cache, meta, out, config(), tile=tile)
        return out

    def theirs() -> Tensor:
        return flash(q, k, v, (starts, starts), (most, most), True)

    return ours, theirs, theirs()


# --- other tiles and splits -----------------------------------------------------------------------

TILES = ((32, 4, 5), (32, 2, 5), (32, 1, 7), (64, 4, 3), (64, 2, 5), (64, 8, 5), (128, 4, 3))
PREFILL_TILES = (
    (128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 8, 3),
    (64, 128, 4, 2), (128, 64, 8, 5),
)  # fmt: skip


def splitting(p: Paged) -> tuple[Any, Callable[[Any], float]]:
    """How a decode batch is split, and the us of doing it another way."""
    out = torch.empty_like(p.q)

    def us(how: Any) -> float:
        call = lambda: ops.triton_decode.attend(p.q, p.cache, p.meta, out, config(), 1, how=how)  # noqa: E731
        return device_us(call, 1.5)

    pairs, places = len(p.q) * K, ops.triton_launch.processors(p.q.device)
    return ops.triton_decode.how_to(config(), H // K, p.keys.shape[1], pairs, places), us


def sweep(peak: float) -> None:
    """Decode with other tiles, splits and numbers of programs; prefill with other tiles."""
    for n, context in ((1, 512), (1, 4096), (1, 32768), (32, 8192), (128, 512), (128, 4096)):
        p = paged(n, context)
        usual, us = splitting(p)
        times = {how: us(how) for how in (usual, usual._replace(early=False))}
        for (keys, warps, stages), split in itertools.product(TILES, (128, 256, 512)):
            tile = usual.tile._replace(keys=keys, num_warps=warps, num_stages=stages)
            for programs, spans in itertools.product((2, 4), (False, True)):
                how = usual._replace(tile=tile, split=split, programs=programs, spans=spans)
                times[how] = us(how)
        for name, how in [
            ("as it is", usual),
            *((" ", h) for h in sorted(times, key=times.__getitem__)[:6]),
        ]:
            share = 2 * p.keys.nbytes / times[how] / 1e6 / peak
            print(f"batch {n}, context {context}, {name}: {times[how]:.1f} us, {share:.0%}, {how}")
    call = prefilling(PREFILLS[0])[0]
    usual = ops.triton_unified.tile_of(config())
    for shape in PREFILL_TILES:
        tile = type(usual)(*shape)
        us_of = device_us(lambda tile=tile: call(tile))  # type: ignore[misc]
        print(f"prefill of {PREFILLS[0]}: {us_of:.1f} us, {tile}{' as it is' * (tile == usual)}")


def invariant_cost() -> list[dict[str, Any]]:
    """Splits of a fixed length, which make rows batch-invariant, against the best for the batch."""
    found = []
    for n, context in ((1, 4096), (1, 32768), (8, 4096), (32, 8192), (128, 4096)):
        usual, us = splitting(paged(n, context))
        lengths = (128, 256, 512, 1024, 2048)
        times = {split: us(usual._replace(split=split)) for split in lengths}
        if usual.spans:  # also a request's keys in one piece, up to what the table holds
            times[-(-context // 8)] = us(usual._replace(split=-(-context // 8)))
        best = min(times, key=times.__getitem__)
        fixed = times[usual.split]
        found.append({
            "batch": n, "context": context, "fixed": fixed, "split": usual.split,
            "spans": usual.spans, "free": times[best], "best split": best,
            "cost": fixed / times[best] - 1,
        })  # fmt: skip
    return found


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table; numbers short."""
    names = [name for name in rows[0] if not name.endswith("failed")]

    def cell(x: Any) -> str:
        if isinstance(x, float):
            return f"{x:.3f}" if x < 10 else f"{x:.1f}"
        return "-" if x is None else str(x)

    print(
        f"\n{title}\n{fg.core.text.table(names, [[cell(r.get(n)) for n in names] for r in rows])}"
    )
    for row in rows:
        for name in row:
            if name.endswith("failed"):
                print(f"  batch {row['batch']}, context {row['context']}: {name}: {row[name]}")


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
    show("fixed splits, batch-invariant, against the best for the batch, us", cost)
    if args.json:
        from benchmarks.record import write

        write(args.json, {"copy TB/s": peak, "decode": rows, "prefill": prompts, "invariant": cost})
    share = next(r["share of copy"] for r in rows if (r["batch"], r["context"]) == (32, 8192))
    good = share >= 0.8 and prompts[0]["ratio"] >= 0.7
    return int(not good or any(r["ratio"] < 1.0 for r in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
