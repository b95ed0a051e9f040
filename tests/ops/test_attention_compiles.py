"""Triton's decode kernels compile for an H100, without one, in every way that shapes choose."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_triton_compiles import SHARED, compile_for_h100

import fngraph as fg
from fngraph.ops.triton import launching as triton_launch

HERE = Path(__file__)
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
CASES: list[tuple[dict[str, Any], int, int]] = [  # config, requests, blocks of 16 in the table
    ({}, 8, 64), ({}, 64, 64), ({}, 8, 512), ({"head_dim": 256, "causal": False}, 1, 512),
    ({"head_dim": 80, "window": 100, "softcap": 30.0, "cache_dtype": FP8}, 64, 512),
    ({"dtype": F32, "cache_dtype": F32}, 64, 512),
]  # fmt: skip


def compiled(change: dict[str, Any], R: int, columns: int, Q: int) -> list[str]:
    """Kernels launched for R requests of Q tokens each, compiled; their names and constants."""
    from fngraph.ops.triton import decode as triton_decode, merging as triton_merge

    names = []

    def launch(
        kernel: Any, grid: Any, *given: Any,
        early: bool | None = None, programs: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        options["EARLY"] = early
        assert compile_for_h100(kernel, *given, **options) <= SHARED
        modes = "-final" if options.get("FINAL") else ""
        modes += "-spans" if "FINAL" in options and options["SPAN"] > options["SPLIT"] else ""
        names.append(kernel.fn.__name__.removesuffix("_kernel") + modes)

    for module in (triton_decode, triton_merge):
        module.launch = launch  # type: ignore[attr-defined]
    triton_decode.processors = lambda device: 132
    c = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16} | {
        "dtype": BF16, "cache_dtype": BF16, "device": "cuda", "scale": 0.1, **change,
    }  # fmt: skip
    config = fg.ops.AttentionConfig(**c)
    zeros = lambda *shape, dtype=torch.int32: torch.zeros(shape, dtype=dtype)  # noqa: E731
    meta = fg.ops.AttentionMeta(
        zeros(R * Q, dtype=torch.int64), zeros(R), zeros(R + 1), zeros(R, columns)
    )
    cache = [zeros(4, 16, 8, config.head_dim, dtype=config.cache_dtype) for _ in range(2)]
    q = zeros(R * Q, 32, config.head_dim, dtype=config.dtype)
    args = fg.ops.AttentionArgs(q, q, q, *cache, meta, torch.empty_like(q), config)
    triton_decode.attend(args, Q)
    return names


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_way_of_splitting_compiles_and_fits(tmp_path):
    """In a Python of its own, with nothing compiled beforehand."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[2]), env.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(HERE)], capture_output=True, text=True, env=env, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    splits, spans = "split merge", "split-spans merge"
    ways = [splits, "split-final-spans", spans, splits, spans, spans]
    assert ran.stdout.split() == " ".join([*ways, spans]).split()


if __name__ == "__main__":
    assert not triton_launch.interpreted()
    for case in CASES:
        print(*compiled(*case, 1))
    print(*compiled({}, 64, 512, 5))
