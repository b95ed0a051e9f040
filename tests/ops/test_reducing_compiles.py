"""The kernel that sums over processes compiles for an H100, without one: its signals are release
and acquire over the system, rows go in words of 16 bytes, hardly a register is spilled."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_triton_compiles import SHARED, compiled_for_h100, needs_triton, run_alone, spilled

from fngraph.ops import peers
from fngraph.ops.triton import launching

KINDS = {
    r"st\.release": "s", r"ld\.acquire": "l", r"bar\.sync": "b",
    r"ld\.global\.(?:v4\.b32|v2\.b64)": "R", r"st\.global\.(?:v4\.b32|v2\.b64)": "W",
}  # fmt: skip


def compiled(dtype: torch.dtype, size: int, way: str, width: int, folder: Path) -> None:
    """Compile it as a launch would, and look at what was made."""
    from fngraph.ops.triton import reducing

    def launch(kernel: Any, grid: Any, *given: Any, **options: Any) -> None:
        made = compiled_for_h100(kernel, *given, EARLY=options.pop("early"), **options)
        assert made.metadata.shared <= SHARED and spilled(made, folder) <= 32
        ptx = made.asm["ptx"]
        meetings = 1 if way == peers.ONE_SHOT else 2
        assert ptx.count("st.release.sys.global.b64") == meetings * (size - 1)
        assert ptx.count("ld.acquire.sys.global.b64") == meetings * (size - 1)
        assert ptx.count("trap;") == meetings * (size - 1)
        found = re.findall("|".join(f"({kind})" for kind in KINDS), ptx)
        names = "".join(k for one in found for k, text in zip(KINDS.values(), one) if text)
        # rows are written, all threads have done so; peers hear of it, and this one of theirs; all
        # threads know, and rows are read
        told, heard = "s" * (size - 1), "l" * (size - 1)
        assert names.count(f"b{told}{heard}b") == meetings, names
        assert re.search(rf"W+b+{told}{heard}b+R{{{size}}}", names), names

    reducing.launch = launch  # type: ignore[attr-defined]
    x = torch.zeros(16, width, dtype=dtype)
    own = torch.zeros(16, dtype=torch.uint8)
    number = torch.zeros(peers.PROGRAMS, dtype=torch.int64)
    shared = peers.Shared(own, number, number, size - 1, size, 300)
    reducing.all_reduce_rms_norm(x, x, x[0], 1e-5, False, shared, way)
    print(way, size, str(dtype).removeprefix("torch."), width)


CASES = [
    (dtype, size, way, width)
    for dtype in (torch.bfloat16, torch.float32)
    for size, way in ((2, peers.ONE_SHOT), (4, peers.ONE_SHOT), (8, peers.TWO_SHOT))
    for width in (4096, 8192)
]


@pytest.mark.sampled(0)
@needs_triton
def test_every_kernel_compiles_and_fits(tmp_path: Path) -> None:
    told = run_alone(__file__, tmp_path / "cache", str(tmp_path))
    assert len(told.splitlines()) == len(CASES)


if __name__ == "__main__":
    assert not launching.interpreted()
    for one in CASES:
        compiled(*one, Path(sys.argv[1]))
