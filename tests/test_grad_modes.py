"""no_grad, inference_mode, gradients on, parameters that require them: one step, in any order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import toys

import fngraph as fg

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
ORDERS = list(itertools.permutations(MODES))


def forward(p: Any, s: Any, b: toys.Batch, g: torch.Generator) -> Any:
    x, s = toys.tally(p, s, b)
    return x + torch.rand(toys.E, generator=g, device=x.device), s


def setup(device: Any, requires_grad: bool) -> tuple[Any, Any, Any, Any]:
    """A function that draws, params, state, and the generator."""
    g = torch.Generator(device).manual_seed(3)

    def fn(p: Any, s: Any, b: toys.Batch) -> Any:
        return forward(p, s, b, g)

    params = {"w": toys.tally_params(device)["w"].requires_grad_(requires_grad)}
    state = toys.tally_state(device)
    fast = fg.graphify(fn, donate="s", stage="b", limits=toys.LIMITS, sizes=(2, 4), generators=(g,))
    return fast, params, state, g


def memory(step: Any) -> dict[str, Any]:
    """What graphs read and write that is the step's own."""
    keys = step.main
    ring = keys.ring
    pinned = [x for buffers in ring.buffers for x in buffers]
    return {
        "static": list(keys.static.tensors),
        "outputs": list(keys.outputs),
        "constants": list(keys.constants),
        "ring": [ring.words, ring.state, ring.told, *pinned],
    }


@pytest.mark.parametrize("ahead", [True, False], ids=["captured ahead", "captured in a step"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("captured_under", MODES)
def test_modes_of_capture_and_call_in_any_order(
    device, captured_under: str, requires_grad: bool, ahead: bool
):
    fast, params, state, g = setup(device, requires_grad)
    before = torch.Generator(device).manual_seed(3)
    want_state = toys.clone(state)
    batches = [toys.on(toys.batch(2), device), toys.on(toys.decode(2), device),
               toys.on(toys.batch(3, 3), device)]  # fmt: skip
    with MODES[captured_under]():
        compiled = fast.trace(params, state).split().lower().compile()
        step = compiled.capture(params, state, lazy=not ahead)
    assert not [k for k, xs in memory(step).items() if any(x.is_inference() for x in xs)]
    for order, batch in itertools.product(ORDERS[:: 1 if ahead else 2], batches):
        for mode in order:
            with torch.no_grad():
                want, want_state = forward(params, want_state, batch, before)
            with MODES[mode]():
                got, state = step(state, batch)
            toys.assert_trees((got, state), (want, want_state))
            assert not got.requires_grad
    assert torch.equal(g.get_state(), before.get_state())
    assert len({id(keys) for keys in step.by_ambient.values()}) <= 1  # nothing was traced again


@pytest.mark.parametrize("modes", ["NONE", "FULL", "PIECEWISE"])
@pytest.mark.parametrize("mode", MODES)
def test_state_that_was_made_in_inference_mode_is_written_in_any(device, mode: str, modes: str):
    """Torch writes an inference tensor in inference mode alone."""
    params = {"w": toys.tally_params()["w"].to(device)}
    with torch.inference_mode():
        state = toys.trees.map_leaves(lambda x: x.to(device).clone(), toys.tally_state())
    fast = fg.graphify(
        toys.tally, donate="state", stage="batch", limits=toys.LIMITS, sizes=(2, 4), modes=modes
    )
    step = fast.bind(params).capture(state, progress=False)
    for seed in range(3):
        batch = toys.on(toys.batch(2, 1, seed=seed), device)
        with torch.inference_mode():
            want, after = toys.tally(params, toys.clone(state), batch)
        with MODES[mode]():
            got, state = step(state, batch)
        toys.assert_trees((got, state), (want, after))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outputs", ["own", "borrow"])
def test_results_are_ordinary_tensors_in_whatever_mode_the_call_is(device, outputs: str, mode: str):
    """FULL, PIECEWISE and NONE alike."""
    fast, params, state, _ = setup(device, requires_grad=True)
    with torch.inference_mode():
        step = fast.bind(params).capture(state, progress=False, outputs=outputs)
        step(state, toys.on(toys.decode(2), device))
    for batch in (toys.decode(2), toys.batch(2), toys.batch(3, 3)):
        with MODES[mode]():
            got, _ = step(state, toys.on(batch, device))
        assert not got.is_inference() and not got.requires_grad
        weight = torch.ones_like(got, requires_grad=True)
        (got * weight).sum().backward()  # which an inference tensor would not allow
        assert torch.equal(weight.grad, got)
    assert {key[-1] for key in step.stats.counts} == {fg.Mode.FULL, fg.Mode.PIECEWISE, fg.Mode.NONE}
