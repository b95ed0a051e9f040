"""The kernels of the fused ops compile for an H100, without one, in every dtype and at models'
sizes: the interpreter checks no types."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from fused_cases import CASES, FP8_CASES
from test_triton_compiles import SHARED, compile_for_h100, needs_triton, run_alone

from fngraph.ops import fused_linear
from fngraph.ops.triton import launching


def kernels(dtype: torch.dtype) -> list[str]:
    """What each case launches, compiled; their names."""
    from fngraph.ops.triton import fused, highest, own_rows
    from fngraph.ops.triton.products import skinny, wide

    names = []

    def launch(kernel: Any, grid: Any, *given: Any, **options: Any) -> None:
        given = (*given, ()) if len(given) == 2 else given
        early = options.pop("early")
        options |= {"HELD": True} if "HELD" in options else {}
        assert compile_for_h100(kernel, *given, EARLY=early, **options) <= SHARED
        names.append(kernel.fn.__name__)

    fused.launch = launch  # type: ignore[attr-defined]
    for name, make in (CASES | FP8_CASES).values():
        getattr(fused, name)(*make(16, dtype))
    x = torch.zeros(16, 8192, dtype=dtype)
    fused.add_rms_norm(x, x, x[0], 1e-5, False)
    fused.add_rms_norm_fp8_rows(x, x, x[0], 1e-5, False)
    fused.silu_mul_fp8_rows(*torch.zeros(2, 16, 28672, dtype=dtype))  # as in a 70B
    own_rows.launch = launch  # type: ignore[attr-defined]
    for parts in (1, 8):
        own_rows.own_rows_rms_norm(x[None].expand(parts, -1, -1), x, x[0], 1e-5, parts > 1, 0)
    many = torch.zeros(4096, 3, 16, 72, dtype=dtype).unbind(1)[0]
    for kind, width in ((dtype, 36), (torch.float32, 72)):
        fused.rope(many, *torch.zeros(2, 4096, 1, width, dtype=kind))
    highest.launch = launch  # type: ignore[attr-defined]
    highest.row_max(torch.zeros(3, 128256, dtype=dtype), False)
    skinny.launch = launch  # type: ignore[attr-defined]
    w = torch.zeros(256, 2048, dtype=dtype)
    for rows, norm, gated, more in product((1, 16), (w[0], None), (False, True), (None, w)):
        tile = fused_linear.tile_of(rows, 2048, gated, norm is not None, dtype.itemsize)
        more = None if more is None else more[:rows, : 256 if gated else 512]
        given = (w[:rows], [w, w], norm, more, w[:rows, :512], 1e-5)
        if tile is not None:
            skinny.run(*given, tile, centred=False, gated=gated, held=True)
    wide.launch = launch  # type: ignore[attr-defined]
    for rows, K in product((3, 64), (2048, 3000)):
        x, w, cpu = torch.zeros(rows, K, dtype=dtype), torch.zeros(256, K, dtype=dtype), x.device
        if (tile := fused_linear.wide_of(rows, K, 256, True, cpu, dtype.itemsize)) is not None:
            wide.product(x, [w, w], tile)
        if (tile := fused_linear.wide_of(rows, K, 256, False, cpu, dtype.itemsize)) is not None:
            wide.summed(x, w, x[:, :256], x[0, :256], 1e-5, False, tile)
            wide.product(x, [w], tile._replace(split=1))
    return names


@pytest.mark.sampled(0)
@needs_triton
def test_every_kernel_compiles_and_fits(tmp_path):
    norms, gates, ropes = ["norm_kernel"] * 5, ["silu_mul_kernel"] * 3, ["rope_kernel"] * 6
    rounded = [*norms * 2, *gates * 2, *norms[:2], *gates[:2]]
    wide = [*norms[:2], "silu_mul_kernel", *["own_rows_kernel"] * 2, *["rope_pairs_kernel"] * 2]
    want = [*norms, *gates, *ropes, *rounded, *wide, "part_kernel", "best_kernel"]
    lines = run_alone(__file__, tmp_path).splitlines()
    assert len(lines) == 3
    for line in lines:
        names = line.split()
        assert names[: len(want)] == want
        few, many = {"vector_kernel", "rows_kernel"}, {"wide_kernel", "sum_kernel"}
        assert few | many >= set(names[len(want) :]) >= {"vector_kernel"}
        assert names.count("wide_kernel") == 3 * names.count("sum_kernel") in (0, 12)
    assert {"sum_kernel"} <= set(lines[0].split())  # in bfloat16


if __name__ == "__main__":
    assert not launching.interpreted()
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        print(*kernels(dtype))
