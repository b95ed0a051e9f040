"""Passes and compiled pieces: fused ops inside of Inductor's code, and what code is kept by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from test_graphify import Model, steps
from torch.nn.functional import linear, silu

import fngraph as fg
from fngraph.models.families.layers import rms_norm

pytestmark = pytest.mark.usefixtures("one_thread")


def mlp(params: Any, state: Any, batch: toys.Batch) -> Any:
    x_TE = rms_norm(params["w"][batch.token_ids], params["g"], 1e-5)
    gate_TE = silu(linear(x_TE, params["w_gate"])) * linear(x_TE, params["w_up"])
    return rms_norm(x_TE + gate_TE, params["g"], 1e-5), state


def toy_on(device: Any = "cpu") -> Model:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
    params = {"w": draw(toys.V, toys.E), "g": draw(toys.E)}
    params |= {name: draw(toys.E, toys.E) for name in ("w_gate", "w_up")}
    return Model(mlp, fg.ops.lay_side_by_side(params), {"calls": torch.zeros(1, device=device)})


def compiled(toy: Model, passes: Any) -> Any:
    fast = toy.graphify(compile="pieces", modes="FULL", sizes=(16,), passes=passes)
    return fast.trace(toy.params, toy.state).split().lower().compile()


def test_compiled_pieces_call_fused_ops_and_equal_forward(recorder_name, device):
    toy = toy_on(device)
    made = compiled(toy, [one.name for one in fg.passes.PASSES if "linears" not in one.name])
    (piece,) = made.executable.compiled
    traced = made.executable.maker.traced
    matches = {one.one.name: one.matches for one in traced.passes if one.matches}
    assert matches == {"side_by_side": 1, "add_rms_norm": 1, "rms_norm": 1, "silu_mul": 1}
    assert "fngraph.silu_mul" in Path(piece.artefacts[0].made.path).read_text()
    step = made.capture(toy.params, toy.state, recorder=recorder_name)
    for batch in steps(device)[:3]:
        toy.check(lambda params, state, batch: step(state, batch), batch)


def row(params: Any, state: Any, batch: toys.Batch) -> Any:
    return torch.tanh(params["w"][batch.token_ids]), state


def test_the_passes_are_part_of_what_code_is_kept_by(tmp_path, monkeypatch):
    """None of these has changed the graph of a function without anything to fuse."""
    monkeypatch.setenv("FNGRAPH_CACHE", str(tmp_path))
    plain = Model(row, {"w": torch.ones(toys.V, toys.E)}, {"calls": torch.zeros(1)})
    again = fg.passes.Pass("rope", fg.passes.PASSES[0].fn, "another")
    seen = []
    for passes in (("rope", "no_ops"), ("rope", "no_ops"), ("no_ops", "rope"), (again, "no_ops")):
        (piece,) = compiled(plain, passes).executable.compiled
        seen.append({one.loaded for one in piece.made})
    assert seen == [{False}, {True}, {False}, {False}]


def turned(theta: float) -> Any:
    def forward(params: Any, state: Any, batch: toys.Batch) -> Any:
        frequencies = 1 / theta ** (torch.arange(0, toys.E, device=batch.token_ids.device) / toys.E)
        return torch.sin(params["w"][batch.token_ids] * frequencies), state

    return forward


def test_a_constant_is_an_argument_of_the_code_that_reads_it(
    tmp_path, monkeypatch, recorder_name, device
):
    """So code is found again where another number was written, and gives what that makes."""
    monkeypatch.setenv("FNGRAPH_CACHE", str(tmp_path))
    state = {"calls": torch.zeros(1, device=device)}
    for theta, loaded in ((10.0, False), (99.0, True)):
        toy = Model(turned(theta), {"w": torch.ones(toys.V, toys.E, device=device)}, state)
        made = compiled(toy, ("fold_constants",))
        assert {one.loaded for piece in made.executable.compiled for one in piece.made} == {loaded}
        step = made.capture(toy.params, toy.state, recorder=recorder_name)
        for batch in steps(device)[:2]:
            toy.check(lambda params, state, batch: step(state, batch), batch)  # noqa: B023
