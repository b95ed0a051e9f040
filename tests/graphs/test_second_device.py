"""`cuda:1` while `cuda:0` is the current device: nothing may go by the current one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph.errors import CaptureError
from fngraph.graphs.recorders import make_recorder

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two_gpus")
ONE = torch.device("cuda", 1)


class On:
    """A recorder in name, of one device."""

    name = "cuda"
    turn = loans = None
    lazy_kernels = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self) -> None: ...

    record = unowned = recording = usage = synchronize = renew = warm_up


def test_a_recorder_of_another_index_is_refused():
    assert make_recorder(On(ONE), ONE).device == ONE  # type: ignore[arg-type]
    assert make_recorder(On(ONE), torch.device("cuda")).device == ONE  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"cuda:1.*cuda:0"):
        make_recorder(On(ONE), torch.device("cuda", 0))  # type: ignore[arg-type]


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("source", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("lazy", [False, True])
def test_every_mode_runs_on_the_second_device(source: str, lazy: bool):
    torch.cuda.set_device(0)
    params, cache = toys.attention_params(device=ONE), toys.attention_cache(device=ONE)
    want_cache = toys.clone(cache)
    fast = fg.graphify(
        toys.attend, donate="cache", stage="batch", limits=toys.LIMITS, sizes=(1, 2, 4, 8)
    )
    compiled = fast.trace(params, cache).split().lower().compile()
    used = torch.cuda.memory_allocated(0)
    step = compiled.capture(params, cache, lazy=lazy)
    assert step.recorder.device == ONE
    again = [toys.batch(3, 2)] * 3  # from the third on attention's launches alone are made
    for batch in (*again, toys.decode(3), toys.decode(2), toys.batch(6, 6)):
        want, want_cache = toys.bare(toys.attend, params, want_cache, toys.on(batch, ONE))
        got, cache = step(cache, toys.on(batch, source))
        assert got.device == ONE
        toys.assert_trees((got, cache), (want, want_cache), atol=1e-5, rtol=1e-5)
    assert torch.cuda.current_device() == 0
    if source != "cuda:0":
        assert torch.cuda.memory_allocated(0) == used


@pytest.mark.gpu
@two_gpus
def test_host_batches_and_generators_of_the_second_device():
    torch.cuda.set_device(0)
    g, h = (torch.Generator(ONE).manual_seed(2) for _ in "gh")

    def forward(p: Any, s: Any, b: toys.Batch) -> Any:
        x = p["w"][b.token_ids]
        return x + torch.rand(toys.E, generator=g, device=x.device), s

    params, state = toys.tally_params(ONE), toys.tally_state(ONE)
    fast = fg.graphify(
        forward, donate="s", stage="b", limits=toys.LIMITS, sizes=(2, 4), generators=(g,)
    )
    step = fast.bind(params).capture(state, progress=False)
    for rows in (2, 1, 2):
        batch = toys.decode(rows, seed=rows)
        got, state = step(state, toys.fill(step.host_batch(batch.spec), batch))
        want = params["w"][batch.token_ids.to(ONE)] + torch.rand(toys.E, generator=h, device=ONE)
        assert torch.equal(got, want)


@pytest.mark.gpu
@two_gpus
def test_an_op_on_the_wrong_device_s_stream_is_named():
    torch.cuda.set_device(0)
    recorder = make_recorder(None, ONE)
    x, side = torch.ones(3, device=ONE), torch.cuda.Stream(ONE)

    def strays() -> Any:
        with torch.cuda.stream(side):
            return x * 2

    with pytest.raises(CaptureError, match=r"test_second_device.py:\d+: aten.mul.*not part"):
        recorder.record(strays)
    recording, out = recorder.record(lambda: x * 3)
    recording.replay()
    assert out.tolist() == [3, 3, 3] and torch.cuda.current_device() == 0
