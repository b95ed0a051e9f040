"""Reading results back on a side stream while the next step runs: docs/serving.md, delayed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

import fngraph as fg

CYCLES = 40_000_000  # some 20 ms of an H200
STEPS = 6
SERVING = Path(__file__).parents[2] / "docs" / "serving.md"


def tokens(p: Any, s: Any, b: toys.Batch) -> Any:
    """(T,) a number that tells each step's tokens apart."""
    return b.token_ids * 7 + s["calls"].add_(1)[0], s


def read_back(before: bool, after: bool, delay_copy: bool, delay_step: bool) -> tuple[Any, Any]:
    """What the host got of each step, and what it should have.

    Args:
        before: the step waits for the last copy.
        after: the copy waits for the step.
    """
    state = {"calls": torch.zeros(1, dtype=torch.int64, device="cuda")}
    params = {"w": torch.zeros(1, device="cuda")}
    fast = fg.graphify(
        tokens,
        modes="FULL",
        donate="s",
        stage="b",
        limits=toys.LIMITS,
        sizes=(4,),
        outputs="borrow",
    )
    step = fast.bind(params).capture(state, progress=False)
    batches = [toys.on(toys.batch(4, seed=i), "cuda") for i in range(STEPS)]
    hosts = [torch.full((4,), -1).pin_memory() for _ in range(STEPS)]
    copies, copied = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    for batch, host in zip(batches, hosts):
        current = torch.cuda.current_stream()
        if before:
            current.wait_event(copied)
        if delay_step:
            torch.cuda._sleep(CYCLES)
        out, state = step(state, batch)
        if after:
            copies.wait_stream(current)
        with torch.cuda.stream(copies):
            if delay_copy:
                torch.cuda._sleep(CYCLES)
            host.copy_(out, non_blocking=True)
            copied.record()
    torch.cuda.synchronize()
    want = [(b.token_ids * 7 + i).cpu() for i, b in enumerate(batches, 1)]
    return torch.stack(hosts), torch.stack(want)


@pytest.mark.gpu
@pytest.mark.parametrize("delay_copy", [False, True])
@pytest.mark.parametrize("delay_step", [False, True])
def test_in_the_right_order_every_step_is_read(delay_copy: bool, delay_step: bool):
    got, want = read_back(True, True, delay_copy, delay_step)
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_a_step_that_does_not_wait_overwrites_what_is_being_copied():
    got, want = read_back(False, True, delay_copy=True, delay_step=False)
    assert not torch.equal(got[:-1], want[:-1]) and torch.equal(got[-1], want[-1])


@pytest.mark.gpu
def test_a_copy_that_does_not_wait_takes_the_step_before():
    got, want = read_back(True, False, delay_copy=False, delay_step=True)
    assert not torch.equal(got[0], want[0])


def recipe() -> str:
    """The docs' block that reads back."""
    blocks = re.findall(r"```python\n(.*?)```", SERVING.read_text(), flags=re.S)
    (code,) = (block for block in blocks if "wait_event" in block)
    return code


@pytest.mark.gpu
def test_the_recipe_in_the_docs_runs():
    code = recipe()
    state = {"calls": torch.zeros(1, dtype=torch.int64, device="cuda")}
    params = {"w": torch.zeros(1, device="cuda")}
    fast = fg.graphify(tokens, donate="s", stage="b", limits=toys.LIMITS, sizes=(4,))
    batches = [toys.on(toys.batch(n, seed=n), "cuda") for n in (4, 2, 3, 1)]
    seen: list[Any] = []
    scope: dict[str, Any] = {}
    exec(compile(code, str(SERVING), "exec"), scope)
    step = fast.bind(params).capture(state, progress=False, outputs="borrow")
    got = scope["read_back"](step, state, batches, lambda host: seen.append(host.clone()), 4)
    assert got is state
    assert [x.tolist() for x in seen] == [
        (b.token_ids * 7 + i).tolist() for i, b in enumerate(batches, 1)
    ]


def test_the_recipe_has_each_order():
    code = recipe()
    for words in ("wait_event", "wait_stream", "non_blocking=True", "pin_memory"):
        assert words in code
