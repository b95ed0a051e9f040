"""Several graphified functions over one donated cache and one pool, called in turn."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.errors import CaptureError, StaleError
from fngraph.graphs.loans import Borrowed

BOTH = "FULL_AND_PIECEWISE"
MODES = [("NONE", "FULL"), ("PIECEWISE", "FULL"), ("FULL", "PIECEWISE"), (BOTH, BOTH)]


def prefill(params: Any, cache: Any, batch: toys.Batch) -> tuple[Any, Tensor]:
    """The cache first, and the sum of each token's logits."""
    logits_TV, cache = toys.attend(params, cache, batch)
    return cache, logits_TV.sum(-1)


def two(device: Any, recorder: str, modes: tuple[str, str], **options: Any) -> Any:
    """Steps of `prefill` and of `attend` over one cache and one pool; weights and cache."""
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    steps: list[Any] = []
    for fn, mode, top in zip((prefill, toys.attend), modes, (16, 4)):
        sizes = [size for size in toys.SIZES if size <= top]
        fast = fg.graphify(fn, modes=mode, donate="cache", stage="batch", sizes=sizes)
        limits = fg.Limits(max_tokens=top, max_reqs=4, B=toys.B)
        shared = steps[0].recorder if steps else recorder
        bound = fast.bind(params)
        steps.append(bound.capture(cache, limits, progress=False, recorder=shared, **options))
    return *steps, params, cache


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("outputs", "guards"), [("own", False), ("borrow", False), ("borrow", True)]
)
@pytest.mark.parametrize("modes", MODES, ids="-".join)
def test_two_functions_over_one_cache_interleave(
    recorder_name, device, modes: tuple[str, str], outputs: str, guards: bool
):
    slow, fast, params, cache = two(device, recorder_name, modes, outputs=outputs, guards=guards)
    assert slow.recorder is fast.recorder
    draw = random.Random(str(modes))
    for turn in range(8):
        if turn == 0 or draw.random() < 0.4:
            rows = [(draw.randint(1, 4), draw.randint(0, 4)) for _ in range(draw.randint(1, 4))]
            batch = toys.on(toys.batch(*rows, seed=turn), device)
            after, want = toys.bare(prefill, params, cache, batch)
            back, got = slow(cache, batch)
        else:
            batch = toys.on(toys.decode(draw.randint(1, 4), past=4 + turn % 4, seed=turn), device)
            want, after = toys.bare(toys.attend, params, cache, batch)
            got, back = fast(cache, batch)
        assert back is cache
        toys.assert_trees((got, cache), (want, after), **toys.CLOSE)


def test_one_is_told_when_the_others_call_expired_its_result(recorder_name, device):
    slow, fast, _, cache = two(
        device, recorder_name, ("FULL", "FULL"), outputs="borrow", guards=True
    )
    batch, decode = toys.on(toys.batch(3, 2), device), toys.on(toys.decode(2), device)
    _, sums = slow(cache, batch)
    plain = sums.as_subclass(Tensor)
    logits, _ = fast(cache, decode)
    with pytest.raises(StaleError, match=r"prefill \(call 1 .*attend \(call 2 "):
        sums.sum()
    assert plain.isnan().all() and logits.isfinite().all() and type(logits) is Borrowed
    slow(cache, batch)
    with pytest.raises(StaleError, match=r"attend \(call 2 .*prefill \(call 3 "):
        logits.sum()
    loans = slow.recorder.loans
    assert loans.generation == 3 and len(loans.running) == 1  # the others are let go


def test_another_pool_expires_nothing(recorder_name, device):
    slow, _, _, cache = two(device, recorder_name, ("FULL", "FULL"), outputs="borrow", guards=True)
    _, other, _, elsewhere = two(
        device, recorder_name, ("FULL", "FULL"), outputs="borrow", guards=True
    )
    _, sums = slow(cache, toys.on(toys.batch(3, 2), device))
    other(elsewhere, toys.on(toys.decode(2), device))
    assert sums.isfinite().all()


def wide(x: Tensor) -> Tensor:
    """Needs 8 MB in between."""
    return (x.expand(1 << 20, 2) * x).sum(0)


def test_a_second_function_takes_what_the_first_left_free(kit):
    x = torch.tensor([1.0, 2.0], device=kit.device)
    used: list[int] = []
    steps: list[Any] = []
    for _ in range(3):
        bound = fg.graphify(wide, stage="x", modes="FULL").bind()
        steps.append(bound.capture(batch=x, progress=False, recorder=kit.recorder))
        used.append(pool_bytes(kit))
    for step in (*steps, *steps):
        assert step(x).tolist() == [1 << 20, 4 << 20]
    assert used[0] >= 8 << 20 and used[2] - used[0] < 4 << 20


def pool_bytes(kit: Any) -> int:
    """Bytes that a recorder's pool holds, used or free; of the whole device on CUDA."""
    if kit.recorder.name == "tape":
        return kit.recorder.arena.nbytes
    return torch.cuda.memory_reserved(kit.device)


def test_a_shared_recorder_must_be_one_of_the_device():
    step, *_ = two(torch.device("cpu"), "tape", ("FULL", "FULL"))
    with pytest.raises(CaptureError, match="cuda"):
        fg.graphs.recorders.make_recorder(step.recorder, torch.device("cuda", 0))
