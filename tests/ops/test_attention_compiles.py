"""Triton's decode kernels compile for an H100, without one, in every way that shapes choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_triton_compiles import SHARED, compile_for_h100, needs_triton, run_alone

import fngraph as fg
from fngraph.ops.paged.config import Turn
from fngraph.ops.triton import launching as triton_launch

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
CASES: list[tuple[dict[str, Any], int, int]] = [  # config, requests, blocks of 16 in the table
    ({}, 8, 64), ({}, 64, 32), ({}, 8, 512), ({"head_dim": 256, "causal": False}, 1, 512),
    ({"head_dim": 80, "window": 100, "softcap": 30.0, "cache_dtype": FP8}, 64, 512),
    ({"dtype": F32, "cache_dtype": F32}, 64, 512), ({}, 4, 256), ({}, 16, 256), ({}, 12, 256),
    ({"head_dim": 64}, 4, 256), ({"head_dim": 64}, 64, 256), ({"head_dim": 64}, 24, 256),
]  # fmt: skip


def compiled(change: dict[str, Any], R: int, columns: int, Q: int) -> list[str]:
    """Kernels launched for R requests of Q tokens each, compiled; their names and constants."""
    from fngraph.ops.triton.attention import decode as triton_decode, turning as triton_turning

    names: list[str] = []

    def launch(
        kernel: Any, grid: Any, *given: Any,
        early: bool | None = None, programs: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        options |= {} if early is None else {"EARLY": early}
        needed = compile_for_h100(kernel, *given, **options)
        assert needed * (programs or 1) <= SHARED, (kernel.fn.__name__, programs)
        modes = "-final" if options.get("FINAL") else ""
        modes += "-spans" if "FINAL" in options and options["SPAN"] > options["SPLIT"] else ""
        modes += "-shared" if options.get("SHARED") else ""
        names.append(kernel.fn.__name__.removesuffix("_kernel") + modes)

    for module in (triton_decode, triton_turning):
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
    if config.dtype == config.cache_dtype:  # the CPU turns for another cache by ops
        angle = zeros(R * Q, 1, config.head_dim // 2, dtype=config.dtype)
        norm = q[0, 0] if Q == 1 else None
        turn = Turn(angle, angle, norm, norm)
        given = args._replace(turn=turn, k=q[:, :8], v=q[:, 8:16])
        triton_turning.turn_and_write(given, zeros(R, 8))
    turns = list(names)
    for rounded in {"out_scale": zeros(dtype=F32), "out": torch.empty_like(q, dtype=FP8)}, {}:
        names.clear()
        triton_decode.attend(args._replace(**rounded), Q)
    return [*turns, *names]


@pytest.mark.sampled(0)
@needs_triton
def test_every_way_of_splitting_compiles_and_fits(tmp_path):
    told = run_alone(__file__, tmp_path).splitlines()
    ways = ["-shared", "-final-spans", "-spans-shared", "", "-spans", "-spans"]
    ways += ["-shared", "-spans-shared", "-spans-shared", "-shared", "-spans", "-spans", "-spans"]
    turns = ["turn " if "float8" not in str(c) else "" for c, _, _ in [*CASES, ({}, 64, 5)]]
    assert told == [f"{turn}split{way}" for turn, way in zip(turns, ways, strict=True)]


if __name__ == "__main__":
    assert not triton_launch.interpreted()
    for case in CASES:
        print(*compiled(*case, 1))
    print(*compiled({}, 64, 512, 5))
