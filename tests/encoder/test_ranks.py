"""Items over ranks: two processes, as torchrun starts them, give what one gives, in the same order,
and share the work. As a script this file is what each of them runs.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pictures as toy
import pytest
import torch
import torch.distributed as dist
import toys

ROOT = Path(__file__).parents[2]
RANKS = 2


def calls(kind: str) -> list[list[Any]]:
    """Items of some calls: many, one, which leaves a rank without any, and none."""
    draw = random.Random(kind)
    one = [toy.page(2)] if kind == "pages" else [toy.picture(3, 4)]
    crop = [toy.page(0), toy.page(0, 1), toy.page(1)] if kind == "pages" else []
    return [*(toy.random_items(kind, draw) for _ in range(4)), one, crop, []]


def main(folder: Path, recorder: str) -> None:
    """What each process runs: every call's outputs, and what was its own, into a file."""
    torch.set_num_threads(1)
    device = "cpu"
    if recorder == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    backend = "nccl" if recorder == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=2))
    try:
        rank = dist.get_rank()
        for kind in toy.KINDS:
            encoder = toy.make(kind, device, recorder, ranks=dist.group.WORLD)
            outputs = toys.moved([encoder(items) for items in calls(kind)], "cpu")
            ran = {path: step.stats.tokens for path, step in encoder.steps.items()}
            torch.save((outputs, encoder.stats.items, ran), folder / f"{kind}{rank}.pt")
    finally:
        dist.destroy_process_group()


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="takes two CUDA devices")


@pytest.fixture(
    scope="module",
    params=["tape", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])],
)
def recorder(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(recorder: str, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """What the processes have left."""
    made = tmp_path_factory.mktemp("ranks")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={RANKS}", __file__, str(made), recorder,
    ]  # fmt: skip
    given = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", given)))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", toy.KINDS)
def test_two_processes_equal_one(folder: Path, recorder: str, kind: str):
    """On the CPU through gloo; `-m gpu`: on two GPUs, through NCCL."""
    encoder = toy.make(kind, "cpu" if recorder == "tape" else "cuda", recorder)
    given = calls(kind)
    want = toys.moved([encoder(items) for items in given], "cpu")
    found = [torch.load(folder / f"{kind}{rank}.pt", weights_only=False) for rank in range(RANKS)]
    for outputs, *_ in found:
        toys.assert_trees(outputs, want, **toys.CLOSE)
    items = [own for _, own, _ in found]
    assert sum(items) == encoder.stats.items and min(items) > 0.25 * sum(items)
    tokens = {path: [ran[path] for *_, ran in found] for path in encoder.steps}
    assert {path: sum(n) for path, n in tokens.items()} == {
        path: step.stats.tokens for path, step in encoder.steps.items()
    }
    both = [sum(ran.values()) for *_, ran in found]
    assert max(both) < 0.75 * sum(both), "the work is shared"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
