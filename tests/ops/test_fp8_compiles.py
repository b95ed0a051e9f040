"""The kernels of fp8 compile for an H100, without one, at models' sizes, and keep all they have in
registers: the interpreter checks no types."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from test_triton_compiles import SHARED, compiled_for_h100, needs_triton, run_alone, spilled

from fngraph.ops.triton import launching

EIGHT = torch.float8_e4m3fn


def kernels(dtype: torch.dtype, folder: Path) -> list[str]:
    """What models' shapes launch, compiled; their names."""
    from fngraph.ops.triton import rounding
    from fngraph.ops.triton.products import fp8, skinny_fp8

    names = []

    def launch(kernel: Any, grid: Any, reads: Any, writes: Any, numbers: Any, **options: Any):
        early = options.pop("early")
        given = (reads, writes, numbers)
        options |= {"HELD": True} if "HELD" in options else {}
        made = compiled_for_h100(kernel, *given, EARLY=early, **options)
        assert made.metadata.shared <= SHARED
        assert not spilled(made, folder), (kernel.fn.__name__, options)
        names.append(kernel.fn.__name__)

    for module in (rounding, skinny_fp8, fp8):
        module.launch = launch  # type: ignore[attr-defined]
    fp8.processors = lambda device: 132  # type: ignore[attr-defined]
    x, one = torch.zeros(16, 14336, dtype=dtype), torch.ones(())
    values, scales = rounding.quantize_rows(x)
    rounding.quantize(x, one)
    for N, K in ((28672, 4096), (4096, 14336), (80, 528)):
        weight, by = torch.zeros(N, K, dtype=EIGHT), torch.ones(N, 1)
        for rows in (1, 16):
            few = values[:rows, :K].contiguous()
            fp8.linear(few, scales[:rows], weight, by, dtype)
            fp8.linear(few, one, weight, one, dtype, more=x[:rows, :1].expand(rows, N))
    for K, known in ((4096, one), (4096, None), (2048, one)):  # an 8B's and a 1B's layers
        row, norm = x[:1, :K], x[0, :K]
        q, kv, wide = (torch.zeros(n, K, dtype=EIGHT) for n in (K, 1024, 14336))
        given: dict[str, Any] = {"norm": norm, "x_scale": known, "eps": 1e-5, "held": True}
        by = [torch.ones(n, 1) for n in (K, 1024, 1024)]
        skinny_fp8.run(row, [q, kv, kv], by, x[:1], dtype, **given)
        given |= {"gated": True, "out_scale": known}
        skinny_fp8.run(row, [wide, wide], [one, one], values if known is one else x, dtype, **given)
        skinny_fp8.run(row, [q], [one], x[:1], dtype, x_scale=known, more=row, held=True)
    wide = [torch.zeros(256, 2048, dtype=EIGHT)] * 2  # all that there is
    more = {"more": x[:1, :256], "gated": True, "out_scale": one}
    skinny_fp8.run(values[:1, :2048], wide, [one, one], values[:1], dtype, x_scale=one, **more)
    for K in (5120, 6144, 11008):  # of which a program has a whole part to spare
        three, by = [torch.zeros(160, K, dtype=EIGHT)] * 3, [torch.ones(160, 1)] * 3
        skinny_fp8.run(values[:1, :K].contiguous(), three, by, x[:1], dtype, x_scale=scales[:1])
    return names


@pytest.mark.sampled(0)
@needs_triton
def test_every_kernel_compiles_and_fits(tmp_path):
    one, few, split = ["one_kernel"] * 2, ["few_kernel"] * 2, ["few_kernel", "add_kernel"] * 2
    want = ["quantize_rows_kernel", "quantize_kernel", *one, *few, *one, *split, *one, *few]
    want += ["one_kernel"] * 13
    assert run_alone(__file__, tmp_path).splitlines() == [" ".join(want)] * 3


if __name__ == "__main__":
    assert not launching.interpreted()
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            print(*kernels(dtype, Path(folder)))
