"""On a GPU: real kernels in real graphs, found again by another process. What holds on both
recorders is in `tests/test_compiled.py`, which runs there as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import toys
from test_compiled import captured, check, tiny_llama
from test_graphify import llama_batch, steps

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("recorder_name", ["cuda"], indirect=True)]
ROOT = Path(__file__).parents[2]

FRESH = """
import sys
sys.path[:0] = ["tests"]
import torch
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from test_compiled import captured, check, tiny_llama
from test_graphify import llama_batch, steps

device = torch.device("cuda", 0)
toy = tiny_llama(device)
step = captured(toy, "cuda", modes="FULL_AND_PIECEWISE", donate="cache")
for batch in steps(device):
    check(toy, step, llama_batch(batch))
print(step.stats.compiled, sum(took.times for took in step.stats.compiles.values()))
print(counters["aot_autograd"]["autograd_cache_miss"])
print(AsyncCompile.process_pool.cache_info().currsize)
"""


def test_a_second_process_compiles_nothing(recorder_name: str, tmp_path: Path):
    """Though Inductor's and Triton's own folders are empty: kernels are in the artefacts. Nor has
    it started workers."""
    said = []
    for run in ("first", "second"):
        env = {**os.environ, "FNGRAPH_CACHE": str(tmp_path / "kept"),
               "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / run)}  # fmt: skip
        ran = subprocess.run(
            [sys.executable, "-c", FRESH], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        said.append([int(word) for word in ran.stdout.split()])
    (compiled, made, *_), second = said
    assert compiled == made > 0
    assert second == [0, made, 0, 0]


def test_a_full_key_has_fewer_nodes(recorder_name: str, device):
    nodes = {}
    for level in ("none", "pieces"):
        toy = tiny_llama(device)
        step = captured(toy, recorder_name, modes="FULL", donate="cache", compile=level)
        for batch in steps(device):
            check(toy, step, llama_batch(batch))
        key = step.dispatch(toys.decode(4).spec).descriptor
        nodes[level] = step[key].counts.nodes
    assert nodes["pieces"] < 0.7 * nodes["none"]


def test_the_estimate_is_no_less_than_what_a_pool_takes(recorder_name: str, device):
    """Compiled code keeps its intermediates below those of the piece as it was traced, but for the
    blocks of 2 MB in which torch's allocator takes memory."""
    toy = tiny_llama(device)
    step = captured(toy, recorder_name, modes="FULL", donate="cache")
    for row in step.memory.rows:
        assert row.measured is not None
        assert row.measured.pool <= row.estimated.pool + (4 << 20)
