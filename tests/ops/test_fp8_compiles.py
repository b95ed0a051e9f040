"""The kernels of fp8 compile for an H100, without one, at models' sizes: the interpreter checks no
types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_triton_compiles import SHARED, compile_for_h100, needs_triton, run_alone

from fngraph.ops.triton import launching


def kernels(dtype: torch.dtype) -> list[str]:
    """What models' shapes launch, compiled; their names."""
    from fngraph.ops.triton import fp8

    names = []

    def launch(kernel: Any, grid: Any, reads: Any, writes: Any, numbers: Any, **options: Any):
        early = options.pop("early")
        given = (reads, writes, numbers)
        assert compile_for_h100(kernel, *given, EARLY=early, **options) <= SHARED
        names.append(kernel.fn.__name__)

    fp8.launch, fp8.processors = launch, lambda device: 132  # type: ignore[attr-defined]
    x, one = torch.zeros(16, 14336, dtype=dtype), torch.ones(())
    values, scales = fp8.quantize_rows(x)
    fp8.quantize(x, one)
    for N, K in ((28672, 4096), (4096, 14336), (80, 528)):
        weight, by = torch.zeros(N, K, dtype=torch.float8_e4m3fn), torch.ones(N, 1)
        for rows in (1, 16):
            few = values[:rows, :K].contiguous()
            fp8.linear(few, scales[:rows], weight, by, dtype)
            fp8.linear(few, one, weight, one, dtype)
    return names


@pytest.mark.sampled(0)
@needs_triton
def test_every_kernel_compiles_and_fits(tmp_path):
    one, few, split = ["one_kernel"] * 2, ["few_kernel"] * 2, ["few_kernel", "add_kernel"] * 2
    want = ["quantize_rows_kernel", "quantize_kernel", *one, *few, *one, *split, *one, *few]
    assert run_alone(__file__, tmp_path).splitlines() == [" ".join(want)] * 3


if __name__ == "__main__":
    assert not launching.interpreted()
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        print(*kernels(dtype))
