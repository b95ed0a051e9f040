"""Decode and prefill with other tiles, splits and programs, and what batch invariance costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

import fngraph as fg
from benchmarks.attention_cases import H, K, Paged, config, paged, prefilling
from benchmarks.device import device_us

ops: Any = fg.ops
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
    prompt = (4096,)
    call = prefilling(prompt)[0]
    usual = ops.triton_unified.tile_of(config())
    for shape in PREFILL_TILES:
        tile = type(usual)(*shape)
        us_of = device_us(lambda tile=tile: call(tile))  # type: ignore[misc]
        print(f"prefill of {prompt}: {us_of:.1f} us, {tile}{' as it is' * (tile == usual)}")


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
