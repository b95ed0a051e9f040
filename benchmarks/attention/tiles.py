"""Decode and prefill with other tiles, splits and programs, and what batch invariance costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.attention.cases import H, K, Paged, config, kernels, paged, prefilling
from benchmarks.device import device_us

TILES = ((32, 4, 3), (32, 2, 3), (32, 2, 4), (32, 1, 4), (64, 4, 3), (64, 2, 3))
SPLITS = (128, 256, 512, 1024, 2048)
PREFILL_TILES = (
    (128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 8, 3),
    (64, 128, 4, 2), (128, 64, 8, 5),
)  # fmt: skip


def splitting(p: Paged) -> tuple[Any, Callable[[Any], float]]:
    """How a decode batch is split, and the us of doing it another way."""
    out = torch.empty_like(p.q)

    def us(how: Any) -> float:
        call = lambda: kernels.attention.decode.attend(p.args(out), 1, how=how)  # noqa: E731
        return device_us(call, 1.5)

    pairs, places = len(p.q) * K, kernels.launching.processors(p.q.device)
    return kernels.attention.decode.how_to(config(), H // K, p.keys.shape[1], pairs, places), us


def ways(usual: Any) -> list[Any]:
    """Other tiles by split, with spans or not, and by programs; and kernels launched one by one.

    And units shared by more or fewer programs.
    """
    found = [usual, usual._replace(early=False)]
    found += [usual._replace(each=each) for each in (None, 1, 2, 4, 8, 16, 32)]
    for keys, warps, stages in TILES:
        how = usual._replace(
            tile=usual.tile._replace(keys=keys, num_warps=warps, num_stages=stages)
        )
        for split, many in itertools.product(SPLITS[:3], (None, 0)):
            found.append(how._replace(split=split, many=many, each=None))
        found += [how._replace(programs=programs) for programs in (2, 8)]
    return list(dict.fromkeys(found))


def divisions(usual: Any, context: int) -> list[Any]:
    """Splits of every length, alone and in spans, and a whole request in one program."""
    whole = usual._replace(split=context // kernels.attention.merging.SPLITS, many=0, each=None)
    shared = itertools.product(SPLITS, (None, 0))
    found = [usual._replace(split=split, many=many, each=None) for split, many in shared]
    return list(dict.fromkeys([usual, *found, whole]))


def sweep(peak: float) -> None:
    """Decode in other `ways`, the six fastest of each batch; prefill with other tiles."""
    for n, context in ((1, 512), (1, 4096), (1, 32768), (32, 8192), (128, 512), (128, 4096)):
        p = paged(n, context)
        usual, us = splitting(p)
        times = {how: us(how) for how in ways(usual)}
        for name, how in [
            ("as it is", usual),
            *((" ", h) for h in sorted(times, key=times.__getitem__)[:6]),
        ]:
            share = 2 * p.keys.nbytes / times[how] / 1e6 / peak
            print(f"batch {n}, context {context}, {name}: {times[how]:.1f} us, {share:.0%}, {how}")
    prompt = (4096,)
    call = prefilling(prompt)[0]
    usual = kernels.attention.unified.tile_of(config())
    for shape in PREFILL_TILES:
        tile = type(usual)(*shape)
        us_of = device_us(lambda tile=tile: call(tile))  # type: ignore[misc]
        print(f"prefill of {prompt}: {us_of:.1f} us, {tile}{' as it is' * (tile == usual)}")


def invariant_cost(most: int | None = None) -> Iterator[dict[str, Any]]:
    """Splits by the table's width, which make rows batch-invariant, against the batch's best.

    The best is of all `divisions`, by the batch's own tile and programs, of `most` batches.
    """
    for n, context in ((1, 4096), (1, 32768), (8, 4096), (32, 8192), (128, 4096))[:most]:
        usual, us = splitting(paged(n, context))
        times = {how: us(how) for how in divisions(usual, context)}
        best = min(times, key=times.__getitem__)
        yield {
            "batch": n, "context": context, "fixed us": times[usual], "split": usual.split,
            "spans past": usual.many, "best us": times[best], "best split": best.split,
            "best spans past": best.many, "cost": times[usual] / times[best] - 1,
        }  # fmt: skip
