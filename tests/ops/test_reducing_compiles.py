"""The kernel that sums over processes compiles for an H100, without one: words lie side by side,
its signals are release and acquire over the system, hardly a register is spilled."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_triton_compiles import SHARED, compiled_for_h100, needs_triton, run_alone, spilled

from fngraph.ops.symmetric import MOST_PROGRAMS, ONE_SHOT, TWO_SHOT, SymmetricMemory
from fngraph.ops.triton import launching

KINDS = {
    r"st\.release": "s", r"ld\.acquire": "l", r"bar\.sync": "b",
    r"ld\.global\.b32": "R", r"st\.global\.b32": "W",
}  # fmt: skip


def compiled(dtype: torch.dtype, size: int, way: str, width: int, folder: Path) -> None:
    """Compile it as a launch would, and look at what was made."""
    from fngraph.ops.triton import reducing

    def launch(kernel: Any, grid: Any, *given: Any, **options: Any) -> None:
        made = compiled_for_h100(kernel, *given, EARLY=options.pop("early"), **options)
        assert made.metadata.shared <= SHARED
        assert spilled(made, folder) <= (32 if width * dtype.itemsize <= 16384 else 200)
        (by_words if way == ONE_SHOT else by_signals)(made.asm["ptx"], dtype, width)

    def words_of(dtype: torch.dtype, width: int) -> int:
        """Of a row, those of a thread."""
        words = width * dtype.itemsize // 4
        return words // (32 * reducing.warps_of(words))

    def by_words(ptx: str, dtype: torch.dtype, width: int) -> None:
        """Each word goes once to each peer, behind what waits for the kernel ahead; all are sent
        before any is waited for, each of its own place, until all have the number or time is over;
        and all threads have read before the next turn."""
        words = max(1, words_of(dtype, width))
        sent, asked = (
            list(re.finditer(rf"{kind}\.relaxed\.sys\.global\.b64 [^;]*\[(%rd\d+)\]", ptx))
            for kind in ("st", "ld")
        )
        assert len(sent) == len(asked) == words * (size - 1)
        assert len({one[1] for one in asked}) == len(asked)
        assert sent[-1].start() < asked[0].start()
        assert ptx.count("@there st.relaxed") == len(sent)
        together = min(words, 4)
        polls = words // together * (size - 1)
        assert ptx.count("trap;") == ptx.count("setp.lt.u64 is, now") == polls
        assert ptx.count("setp.eq.u32 is, turn0, 0;") == polls
        assert len(re.findall(r"xor\.b32 turn\d", ptx)) == len(asked)
        assert len(re.findall(r"or\.b32 turn0, turn0, turn[1-3];", ptx)) == polls * (together - 1)
        turn = ptx.index("ld.global.b64", ptx.index("griddepcontrol.wait"))  # the first behind it
        assert ptx[:turn].count("ld.global.b64") == size  # peers' addresses alone
        assert "bar.sync" in ptx[asked[-1].end() :]
        if width % 64 == 0:
            assert "st.shared" not in ptx[: asked[-1].start()]

    def by_signals(ptx: str, dtype: torch.dtype, width: int) -> None:
        assert ptx.count("st.release.sys.global.b64") == 3 * (size - 1)
        assert ptx.count("ld.acquire.sys.global.b64") == 3 * (size - 1)
        assert ptx.count("trap;") == 3 * (size - 1)
        found = re.findall("|".join(f"({kind})" for kind in KINDS), ptx)
        names = "".join(k for one in found for k, text in zip(KINDS.values(), one) if text)
        # rows are written, all threads have done so; peers hear of it, and this one of theirs; all
        # threads know, and rows are read; and, behind all, all processes' programs have read
        told, heard = "s" * (size - 1), "l" * (size - 1)
        assert names.count(f"b{told}{heard}b") == 3, names
        whole = "R" * size * words_of(dtype, width)
        assert re.search(rf"W+b+{told}{heard}b+{whole}", names), names

    reducing.launch = launch  # type: ignore[attr-defined]
    x = torch.zeros(16, width, dtype=dtype)
    own = torch.zeros(16, dtype=torch.uint8)
    number = torch.zeros(MOST_PROGRAMS, dtype=torch.int64)
    shared = SymmetricMemory(own, number, number, size - 1, size, 300)
    reducing.all_reduce_rms_norm(x, x, x[0], 1e-5, False, shared, way)
    print(way, size, str(dtype).removeprefix("torch."), width)


CASES = [
    (dtype, size, way, width)
    for dtype in (torch.bfloat16, torch.float32)
    for size, way in ((2, ONE_SHOT), (4, ONE_SHOT), (2, TWO_SHOT), (8, TWO_SHOT))
    for width in (4096, 8192)
]
CASES += [  # a thread has two words, one, or one that others have as well
    (dtype, size, ONE_SHOT, width)
    for dtype, size, width in (
        (torch.bfloat16, 2, 512), (torch.float16, 2, 4096), (torch.float16, 3, 33),
        (torch.float32, 2, 4),
    )
]  # fmt: skip


@pytest.mark.sampled(0)
@needs_triton
def test_every_kernel_compiles_and_fits(tmp_path: Path) -> None:
    told = run_alone(__file__, tmp_path / "cache", str(tmp_path))
    assert len(told.splitlines()) == len(CASES)


if __name__ == "__main__":
    assert not launching.interpreted()
    for one in CASES:
        compiled(*one, Path(sys.argv[1]))
