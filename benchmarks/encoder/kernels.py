"""The tower's attention alone, by each backend and order of images (`--parts attention`).

It takes most of a large request's time, bare as in graphs, so that what graphs save of the rest
shows only as far as a backend is fast. `TFLOP/s` counts true products alone: neither the padding of
heads to a tile's width nor that of the last tile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import fngraph as fg
from benchmarks.device import device_us
from benchmarks.encoder.ways import MOST_ITEMS, Tower
from fngraph.models.vision.qwen3_vl import MERGE

varlen: Any = fg.ops.varlen  # kernels are not public: what lies below a call of the primitive
MOST_SCORES = 1 << 28  # of a head; `reference` works them all out, a sequence's own or not


def attention_alone(tower: Tower, device: str) -> list[dict[str, Any]]:
    """A row for each pack of images and backend that can run it: us of one layer, TFLOP/s."""
    config, top = tower.config, tower.budgets[-1] * MERGE**2
    uneven = [max(1, top * 2 * i // (MOST_ITEMS * (MOST_ITEMS + 1))) for i in range(1, 9)]
    packs = {
        "one image, an eighth": [top // 8], "one image": [top],
        "eight, shortest first": uneven, "eight, longest first": uneven[::-1],
    }  # fmt: skip
    dtype = tower.params.positions.dtype
    H, D = config.num_heads, config.dim // config.num_heads
    about = varlen.VarlenConfig(H, H, D, dtype, torch.device(device).type, D**-0.5)
    rows = []
    for name, lengths in packs.items():
        P = sum(lengths)
        q, k, v = torch.randn(3, P, H, D, device=device, dtype=dtype)
        ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        for backend in varlen.VARLEN.backends.values():
            scores = P * P if backend.name == "reference" else 0
            if backend.run is None or backend.refusal(about) or scores > MOST_SCORES:
                continue
            args = (q, k, v, ends, torch.empty_like(q), about.scale, about.causal)
            call = varlen.VARLEN.bind(backend, args, about)
            us = _us(lambda: call(host=None), device)  # noqa: B023
            flops = sum(4 * n * n * D * H for n in lengths)
            rows.append({
                "images": name, "patches": P, "backend": backend.name, "us": us,
                "TFLOP/s": flops / us / 1e6, "taken": backend is varlen.VARLEN.suited(about),
            })  # fmt: skip
    return rows


def _us(call: Callable[[], Any], device: str) -> float:
    """Of one call: the device's time, or the CPU's."""
    if device.startswith("cuda"):
        return device_us(call)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1e6)
    return median(took)
