"""Where a layer of the one launch spends its time, by clocks within the kernel.

    python -m tests.one_launch_clocks --models 1B 8B --tokens 1 2 --json clocks.json     # a GPU

The kernel's source is read, and after each line of a layer that waits, and where its comments begin
another part, one thread of a program writes the clock. So the kernel that is timed is slower by
some hundredths than the one that runs, which has no such lines. Of each part: its mean over
programs and layers, and that of the program that took longest, in us. Parts of attention are of
those programs that attend.
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

from fngraph.one_launch import kept_by
from fngraph.ops.megakernel import _loaded, image

PARTS = (  # what a layer does, and the line with which it begins, or behind which it does
    ("input of q, k, v: waits", "    // q, k, v\n"),
    ("q, k, v", "    take_normed(before, y.norm, same);\n"),
    ("attention", "    // attention\n"),
    ("outputs: waits", "    // its product\n"),
    ("its product", "    take<HEADS * HEAD>(merged, m.input[warp], step);\n"),
    ("sum: waits", "    // gate and up\n"),
    ("gate and up", "    take_normed(mid, y.mlp_norm, same);\n"),
    ("gate: waits", "    // down\n"),
    ("down", "    take<MLP>(gate, m.input[warp], step);\n"),
)
ATTENDS = (  # what a program that attends does, and the line ahead of which it ends
    ("attention: q, k, v", "    if (split() == 0 && slot() >= 0 && thread < HALF) {\n"),
    ("attention: keys", "    wait_but<0>();\n"),
    ("attention: warps' sums", "    if (!alone) merge(outs, logs, merged);\n"),
    ("attention: merges", "  }\n\n  // This split's share"),
)
END = "    before = end;\n"
MARKS = len(PARTS) + len(ATTENDS) + 2  # the end of a layer too, in ticks and in ns
BEGINS = [name for name, _ in PARTS].index("attention")
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
  if (threadIdx.x == 0) \\
  ((volatile u64*)CLOCKS)[((&y - m.layers) * PROGRAMS + blockIdx.x) * MARKS + k] = time
"""


def with_clocks(folder: Path, clocks: Tensor) -> Path:
    """The kernel's source in a folder, with marks that are written to `clocks`, (layers, programs,
    MARKS) int64: of the parts, of the end, of attention, and the time in ns."""
    for file in image.SOURCE.parent.glob("*.cu*"):
        shutil.copy(file, folder)
    source, ends = folder / image.SOURCE.name, len(PARTS)
    for k, (_, line) in enumerate(PARTS):
        _mark(source, line, f"    MARK({k}, ticks());\n", ahead=line.lstrip().startswith("//"))
    last = f"    MARK({ends}, ticks());\n    MARK({MARKS - 1}, ns());\n"
    _mark(source, END, last, ahead=False)
    for k, (_, line) in enumerate(ATTENDS, ends + 1):
        _mark(folder / "attention.cuh", line, f"    MARK({k}, ticks());\n", ahead=True)
    defined = f"#define CLOCKS {clocks.data_ptr()}ull\n#define MARKS {MARKS}\n{HEAD}"
    _mark(folder / "attention.cuh", '#include "products.cuh"\n', defined, ahead=False)
    return source


def _mark(file: Path, line: str, mark: str, ahead: bool) -> None:
    """`mark` ahead of the one `line`, or behind it."""
    text = file.read_text()
    assert text.count(line) == 1, f"{file.name} has no such line, or several: {line}"
    file.write_text(text.replace(line, mark + line if ahead else line + mark))


def parts_of(clocks: Tensor) -> dict[str, tuple[float, float]]:
    """Of each part, and of a layer: us of the mean program, and of the one that took longest."""
    ticks, ns = clocks[..., : len(PARTS) + 1], clocks[..., -1]
    taken, whole = ticks.diff(dim=-1), ticks[..., 0].diff(dim=0)
    us = (ns[-1] - ns[0]) / (ticks[-1, :, -1] - ticks[0, :, -1]) / 1e3  # of a program's tick
    found = {name: taken[..., k] * us for k, (name, _) in enumerate(PARTS)}
    found["a layer"] = whole * us
    attends = clocks[0, :, -2] > 0
    own = torch.cat([ticks[..., BEGINS, None], clocks[..., len(PARTS) + 1 : -1]], -1)[:, attends]
    for k, (name, _) in enumerate(ATTENDS):
        found[name] = own.diff(dim=-1)[..., k] * us[attends]
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
    for kept in (kept_by, _loaded):
        kept.cache_clear()  # the address of the clocks is in the source
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
    os.environ["FNGRAPH_CACHE"] = "off"  # likewise
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
