"""What a process does up to its first step that a second process need not: collections that find
nothing, modules that nobody asks, workers that have nothing to compile.

`python -m benchmarks startup` says how long it takes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch._inductor import async_compile

import fngraph as fg
from fngraph.step import capture
from fngraph.torch_facts import portable

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def in_new_process(told: str, *args: str, **env: str) -> Any:
    """What a script has printed last, as JSON."""
    ran = subprocess.run(
        [sys.executable, "-c", told, *args], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **env},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


# --- the collector --------------------------------------------------------------------------------


@pytest.mark.sampled(0)
def test_nothing_is_collected_while_fngraph_is_imported():
    told = """
import gc, json, sys
import fngraph
seen = {}

class Watch:
    def find_spec(self, name, path=None, target=None):
        seen[name] = gc.isenabled()

sys.meta_path.insert(0, Watch())
fngraph.graphify
print(json.dumps([seen["fngraph.graphified"], seen["fngraph.stages"], gc.isenabled()]))
"""
    assert in_new_process(told) == [False, False, True]


def test_nothing_is_collected_while_a_function_is_traced_or_captured(monkeypatch):
    seen: list[bool] = []
    warm = capture._warm_ahead

    def watched(*args: Any) -> None:
        seen.append(gc.isenabled())
        warm(*args)

    def forward(w: torch.Tensor, batch: toys.Batch) -> torch.Tensor:
        seen.append(gc.isenabled())
        return w[batch.token_ids]

    monkeypatch.setattr(capture, "_warm_ahead", watched)
    fast = fg.graphify(forward, modes="FULL", stage="batch", sizes=(2,))
    fast.bind(torch.ones(toys.V)).capture(toys.LIMITS, recorder="tape")
    assert seen == [False, False] and gc.isenabled()


# --- modules --------------------------------------------------------------------------------------

START = """
import json, sys
import torch
before = set(sys.modules)
sys.path[:0] = ["tests"]
import fngraph as fg
from fngraph.models.families import llama

fg.graphify
config = llama.Config(
    vocab_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4, dim=16, mlp_dim=24
)
import_done = set(sys.modules)
import toys  # of the tests: what it brings is not counted
before |= set(sys.modules) - import_done
params = llama.init_params(config)
cache = llama.init_cache(config, 4 * toys.B, block_size=toys.S)
fast = fg.graphify(
    llama.forward, modes="FULL_AND_PIECEWISE", donate="cache", stage="batch", sizes=(1, 2, 4)
)
lowered = fast.trace(params, cache, limits=toys.LIMITS).split().lower()
if "heavy" in sys.argv:
    import torch.onnx.ops, matplotlib
lowered.compile().capture(params, cache, recorder="tape")
print(json.dumps(sorted(set(sys.modules) - before)))
"""

ALLOWED = {
    "fngraph": 289,
    "torch._dynamo": 120,  # `make_fx` runs through its switches, and asks it where sizes are from
    "torch.distributed": 150,  # Dynamo's
    "torch._inductor": 35,  # Dynamo's: its settings, and an op that it tests with
    "torch._numpy": 20,  # Dynamo's
    "torch.onnx": 40,  # Dynamo's
    "torch._export": 20, "torch._functorch": 30, "torch.utils": 30, "torch.nn": 15,  # Dynamo's
    "torch.fx": 25,
    "sympy": 500, "mpmath": 60,  # sizes that are symbols
    "triton": 100,  # Dynamo asks whether it is there; on CUDA it compiles and launches kernels
    "numpy": 25, "optree": 20, "einops": 12, "safetensors": 5,
}  # fmt: skip
"""How many modules a process may load of what, besides those of `import torch`, to trace and
capture a model. What is not named may be `FEW`, and must be torch's or the standard library's."""
FEW = 7
UNCOUNTED = {"colorama", "cython_runtime", "typing_extensions"}  # of torch's own, where installed


def group(module: str) -> str:
    """`sympy`, `torch.fx`."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "torch" else 1])


def too_many(modules: list[str]) -> dict[str, int]:
    """Groups of modules that a start has no budget for, and how many there are."""
    counts = Counter(map(group, modules))
    known = {*sys.stdlib_module_names, *UNCOUNTED}
    own = {name for name in counts if name.startswith(("torch.", "_")) or name in known}
    most = {name: FEW if name in own else 0 for name in counts} | ALLOWED
    return {name: n for name, n in counts.items() if n > most[name]}


def test_a_start_loads_no_more_than_it_needs():
    """A new module in the way of a first step is found here whatever it is: give it a budget above
    with the reason, or import it where it is used."""
    loaded = in_new_process(START)
    assert {"sympy", "fngraph", "torch.fx"} <= set(map(group, loaded))
    assert not too_many(loaded)


@pytest.mark.sampled(0)
def test_the_test_above_would_notice():
    found = too_many(in_new_process(START, "heavy"))
    assert found["matplotlib"] > 20 and {"PIL", "matplotlib"} <= set(found)


# --- workers --------------------------------------------------------------------------------------


@pytest.fixture
def pools(monkeypatch) -> list[str]:
    """Pools of processes that torch has started to compile Triton's kernels in: none is."""
    started: list[str] = []
    kind: Any = async_compile.AsyncCompile

    def process_pool() -> Any:
        started.append(threading.current_thread().name)
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 4)
    monkeypatch.setattr(kind, "process_pool", staticmethod(process_pool))
    monkeypatch.setattr(kind, "_ready_future", None)
    return started


def test_no_worker_is_started_for_code_that_is_kept(pools, monkeypatch):
    """Torch looks for a pool before it looks for the kernel; other threads have theirs."""
    found: list[bool] = []

    class Kept:
        @staticmethod
        def deserialize(data: bytes) -> Any:
            found.append(bool(async_compile.AsyncCompile.use_process_pool()))
            other = threading.Thread(
                target=lambda: async_compile.AsyncCompile.use_process_pool(), name="other"
            )
            other.start()
            other.join()
            return data

    module = importlib.import_module("torch._inductor.standalone_compile")  # a function's name too
    monkeypatch.setattr(module, "AOTCompiledArtifact", Kept)
    assert portable.loaded(b"code") == b"code"
    assert found == [False] and pools == ["other"]
    async_compile.AsyncCompile._ready_future = None
    async_compile.AsyncCompile.use_process_pool()
    assert pools == ["other", threading.current_thread().name]
