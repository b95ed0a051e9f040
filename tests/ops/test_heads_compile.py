"""Attention of heads of any width asks for its keys ahead, and keeps its sums in registers.

Seen in what the kernels compile to for an H100, without one. Of strides that are no multiples of 16
Triton knows nothing: heads of 72 numbers were read two bytes at a time, each tile waited for, and
sums kept in memory.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from test_triton_compiles import SHARED, compiled_for_h100, needs_triton, run_alone, spilled

import fngraph as fg
from fngraph.ops.varlen import VarlenArgs, VarlenConfig

BF16 = torch.bfloat16
ASYNC = r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x10,"
WIDE = r"ld\.global\.v4\.b32"  # where no loop does it, in front of what lets the next kernel begin
HEADS = (64, 72, 80, 96, 104, 120, 128)
LARGEST = 256  # bytes that a thread may keep in memory; it was a thousand


def watch(folder: Path, *modules: Any) -> list[str]:
    """What becomes a line a launch: the kernel's name, loads of 16 bytes that run ahead, and bytes
    that are spilled."""
    told: list[str] = []

    def launch(
        kernel: Any, grid: Any, *given: Any, early: bool | None = None, kept: Any = None,
        programs: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        options |= {} if early is None else {"EARLY": early}
        found = compiled_for_h100(kernel, *given, **options)
        assert found.metadata.shared <= SHARED
        ptx = found.asm["ptx"]
        ahead = len(re.findall(ASYNC, ptx))
        if not ahead:
            before, lets, _ = ptx.partition("griddepcontrol.launch_dependents")
            assert lets, kernel.fn.__name__
            ahead = len(re.findall(WIDE, before))
        told.append(f"{kernel.fn.__name__} {ahead} {spilled(found, folder)}")

    for module in modules:
        module.launch = launch
        module.processors = lambda device: 132
    return told


def made(D: int, folder: Path) -> list[str]:
    """Of attention over a cache and without one, heads of D."""
    from fngraph.ops.triton.attention import decode, unified, varlen

    told = watch(folder, decode, unified, varlen)
    x = torch.zeros(64, 16, D, dtype=BF16)
    starts = torch.tensor([0, 32, 64], dtype=torch.int32)
    seen = VarlenConfig(16, 16, D, BF16, "cuda", 0.1)
    varlen.run(VarlenArgs(x, x, x, starts, torch.empty_like(x), seen), None)
    lens = torch.full((2,), 32, dtype=torch.int32)
    table = torch.zeros(2, 64, dtype=torch.int32)
    meta = fg.ops.AttentionMeta(torch.zeros(64, dtype=torch.int64), lens, starts, table)
    config = fg.ops.AttentionConfig(16, 4, D, 16, BF16, BF16, "cuda", 0.1)
    cache = [torch.zeros(8, 16, 4, D, dtype=BF16) for _ in range(2)]
    args = fg.ops.AttentionArgs(x, x[:, :4], x[:, :4], *cache, meta, torch.empty_like(x), config)
    unified.attend(args)
    few = args._replace(q=x[:2], k=x[:2, :4], v=x[:2, :4], out=torch.empty_like(x[:2]))
    decode.attend(few, 1)  # two tiles a split
    long = meta._replace(block_tables=torch.zeros(2, 512, dtype=torch.int32))
    decode.attend(few._replace(meta=long), 1)  # eight
    eight, starts = torch.full((8,), 32, dtype=torch.int32), torch.arange(9, dtype=torch.int32)
    table = torch.zeros(8, 256, dtype=torch.int32)
    meta = fg.ops.AttentionMeta(torch.zeros(8, dtype=torch.int64), eight, starts, table)
    some = args._replace(q=x[:8], k=x[:8, :4], v=x[:8, :4], out=torch.empty_like(x[:8]), meta=meta)
    decode.attend(some, 1)  # programs take splits of two tiles in turn
    return told


def latent(folder: Path) -> list[str]:
    """Of latent attention: a table for one span of splits, and for several."""
    from fngraph.ops.triton.attention import latent, merging

    told = watch(folder, latent, merging)
    config = fg.ops.MLAConfig(16, 512, 64, 16, BF16, BF16, "cuda", 0.1)
    q, out = torch.zeros(2, 16, 576, dtype=BF16), torch.zeros(2, 16, 512, dtype=BF16)
    cache = torch.zeros(8, 16, 576, dtype=BF16)
    starts = torch.arange(3, dtype=torch.int32)
    for columns in (32, 512):
        table = torch.zeros(2, columns, dtype=torch.int32)
        meta = fg.ops.AttentionMeta(torch.zeros(2, dtype=torch.int64), starts[1:], starts, table)
        args = fg.ops.MLAArgs(q, q[:, 0], cache, meta, out, config)
        latent.attend_decode(args, 1)
    latent.attend_unified(args)
    return told


@pytest.mark.sampled(0)
@needs_triton
def test_latent_attention_does_so_too(tmp_path):
    told = [line.split() for line in run_alone(__file__, tmp_path, "latent").splitlines()]
    decode = ["latent_split_kernel", "merge_kernel"]
    assert [name for name, _, _ in told] == [*decode, *decode, "latent_unified_kernel"]
    for name, ahead, bytes_spilled in told:
        assert int(ahead) >= 8 or name == "merge_kernel", (name, ahead)
        assert int(bytes_spilled) <= LARGEST, (name, bytes_spilled)


@pytest.mark.sampled(0)
@needs_triton
@pytest.mark.parametrize("D", HEADS)
def test_keys_are_asked_for_ahead_and_sums_stay_in_registers(D, tmp_path):
    told = [line.split() for line in run_alone(__file__, tmp_path, str(D)).splitlines()]
    decode = ["split_kernel"] * 3
    assert [name for name, _, _ in told] == ["varlen_kernel", "unified_kernel", *decode]
    for name, ahead, bytes_spilled in told:
        assert int(ahead) >= 8, (name, ahead)
        assert int(bytes_spilled) <= LARGEST, (name, bytes_spilled)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        named = sys.argv[1]
        print(
            "\n".join(latent(Path(folder)) if named == "latent" else made(int(named), Path(folder)))
        )
