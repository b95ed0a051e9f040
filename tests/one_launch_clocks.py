"""Where a layer of the one launch spends its time, by clocks within the kernel.

    python -m tests.one_launch_clocks --models 1B 8B --tokens 1 2 --json clocks.json     # a GPU

The kernel's source is read, and after each line of a layer that waits, and where its comments begin
another part, one thread of a program writes the clock. So the kernel that is timed is slower by
some hundredths than the one that runs, which has no such lines. Of each part: its mean over
programs and layers, and that of the program that took longest, in us.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fngraph.ops.megakernel import image

PARTS = (  # what a layer does, and the line with which it begins, or behind which it does
    ("input of q, k, v: waits", "    // q, k, v\n"),
    ("q, k, v", "    take_normed(before, y.norm, same);\n"),
    ("attention", "    // attention\n"),
    ("outputs, merged: waits", "    // its product, of merged splits\n"),
    ("its product", "    attention.take_merged(outs, logs, merged);\n"),
    ("sum: waits", "    // gate and up\n"),
    ("gate and up", "    take_normed(mid, y.mlp_norm, same);\n"),
    ("gate: waits", "    // down\n"),
    ("down", "    take<MLP>(gate, m.input[warp], step);\n"),
)
END = "    before = end;\n"
MARKS = len(PARTS) + 2  # the end of a layer too, in ticks and in ns
HEAD = """
#ifdef __CUDACC__
__device__ __forceinline__ u64 ticks() {
  u64 t;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(t));
  return t;
}
__device__ __forceinline__ u64 ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
#else
static u64 ticked;
inline u64 ticks() { return ++ticked; }
inline u64 ns() { return 1000 + ticked; }
#endif
#define MARK(k, time) \\
  if (thread == 0) ((volatile u64*)CLOCKS)[(l * PROGRAMS + program) * MARKS + k] = time
"""


def with_clocks(folder: Path, clocks: Tensor) -> Path:
    """The kernel's source in a folder, with marks that are written to `clocks`, (layers, programs,
    MARKS) int64."""
    for file in image.SOURCE.parent.glob("*.cu*"):
        shutil.copy(file, folder)
    source = folder / image.SOURCE.name
    text = source.read_text()
    for k, (_, line) in enumerate(PARTS):
        assert text.count(line) == 1, f"decoder.cu has no such line, or several: {line}"
        mark = f"    MARK({k}, ticks());\n"
        begins = line.lstrip().startswith("//")
        text = text.replace(line, mark + line if begins else line + mark)
    assert text.count(END) == 1
    ends = f"    MARK({len(PARTS)}, ticks());\n    MARK({len(PARTS) + 1}, ns());\n"
    text = text.replace(END, END + ends)
    include = '#include "attention.cuh"\n'
    clocked = f"#define CLOCKS {clocks.data_ptr()}ull\n#define MARKS {MARKS}\n{HEAD}"
    assert text.count(include) == 1
    source.write_text(text.replace(include, include + clocked))
    return source


def parts_of(clocks: Tensor) -> dict[str, tuple[float, float]]:
    """Of each part, and of a layer: us of the mean program, and of the one that took longest."""
    ticks, ns = clocks[..., :-1], clocks[..., -1]
    taken, whole = ticks.diff(dim=-1), ticks[..., 0].diff(dim=0)
    us = (ns[-1] - ns[0]) / (ticks[-1, :, -1] - ticks[0, :, -1]) / 1e3  # of a program's tick
    found = {name: taken[..., k] * us for k, (name, _) in enumerate(PARTS)}
    found["a layer"] = whole * us
    return {name: (float(x.mean()), float(x.mean(0).max())) for name, x in found.items()}


def clocked(name: str, tokens: int, context: int) -> dict[str, Any]:
    """`parts_of` a step of a model with random weights, of so many requests."""
    import fngraph as fg
    from benchmarks.decode.models import MODELS
    from benchmarks.decode.ours import greedy
    from benchmarks.workload import BF16, BLOCK_SIZE, batch_of, random_params, to_device
    from fngraph.ops.triton.launching import processors

    family, config = MODELS[name].family, MODELS[name].config
    programs = processors(torch.device("cuda"))
    clocks = torch.zeros(config.num_layers, programs, MARKS, dtype=torch.int64, device="cuda")
    params = fg.ops.lay_side_by_side(random_params(config, "cuda", BF16, family))
    blocks = context // BLOCK_SIZE
    cache = family.init_cache(
        config, tokens * blocks, block_size=BLOCK_SIZE, device="cuda", dtype=BF16
    )
    fast = fg.graphify(
        greedy(family.forward), modes="FULL", passes="all", sizes=(tokens,), donate="cache",
        stage="batch",
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp())
    before, image.SOURCE = image.SOURCE, with_clocks(folder, clocks)
    try:
        limits = fg.Limits(tokens, tokens, B=blocks)
        step = fast.bind(params).capture(cache, limits, progress=False)
    finally:
        image.SOURCE = before
        shutil.rmtree(folder)
    batch = batch_of(tokens, 1, context)
    spec = batch.spec._replace(host=fg.HostBounds(1, context))
    batch = to_device(dataclasses.replace(batch, spec=spec), "cuda")
    steps = []
    for _ in range(25):
        step(cache, batch)
        torch.cuda.synchronize()
        steps.append(parts_of(clocks))
    return {part: tuple(map(median, zip(*[one[part] for one in steps]))) for part in steps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["1B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1], help="one of each request")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    os.environ["FNGRAPH_CACHE"] = "off"  # addresses are in the source
    found = {}
    for name in flags.models:
        for tokens in flags.tokens:
            parts = found[f"{name}, {tokens}"] = clocked(name, tokens, flags.context)
            print(f"{name}, requests: {tokens}, tokens of each: {flags.context}")
            for part, (mean, most) in parts.items():
                print(f"  {part:26} {mean:7.2f}  {most:7.2f}", flush=True)
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
