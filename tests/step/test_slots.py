"""Adapters are slots of stacked held leaves: loading one captures nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fngraph as fg
from fngraph.errors import AddressError, TreeError

SLOTS, E = 4, 3
PADDED = fg.Limits(max_tokens=8, max_reqs=8)


@fg.struct
class Batch:
    """T tokens, each with the adapter that it uses."""

    x: Tensor = fg.buffer("T 3", "float32")
    slots: Tensor = fg.buffer("T", "int64", pad=0)
    spec: fg.BatchSpec = fg.host()


def forward(adapters: Any, scale: Any, batch: Batch) -> Tensor:
    """x times the low-rank product of each token's own adapter."""
    a_TE, b_TE = adapters["a"][batch.slots], adapters["b"][0][batch.slots]
    return batch.x + scale * a_TE * b_TE


def stacked(device: Any) -> dict[str, Any]:
    """Adapters of zeros."""
    zeros = torch.zeros(SLOTS, E, device=device)
    return {"a": zeros, "b": [zeros.clone()]}


def adapter(value: float) -> dict[str, Any]:
    """One adapter."""
    return {"a": torch.full((E,), value), "b": [torch.full((E,), value + 1)]}


def make(device: Any, recorder: str, modes: str = "FULL") -> tuple[Any, Any]:
    """A captured step, and its adapters."""
    adapters, scale = stacked(device), torch.ones((), device=device)
    fast = fg.graphify(forward, stage="batch", modes=modes, sizes=(1, 4, 8), recorder=recorder)
    return fast.bind(adapters, scale).capture(PADDED, progress=False), adapters


def run(step: Any, *slots: int) -> list[float]:
    """The first element of each row of a step over rows of zeros that use `slots`."""
    batch = Batch(torch.zeros(len(slots), E), torch.tensor(slots), fg.BatchSpec(len(slots), 1))
    return step(batch)[:, 0].tolist()


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE", "NONE"])
def test_only_rows_that_use_the_slot_change(recorder_name, device, modes: str):
    step, _ = make(device, recorder_name, modes)
    before = dict(step.replays)
    assert run(step, 0, 1, 2, 3, 1) == [0] * 5
    step.load_slot(1, adapters=adapter(2.0))
    assert run(step, 0, 1, 2, 3, 1) == [0, 6, 0, 0, 6]
    step.load_slot(3, adapters=adapter(4.0))
    step.load_slot(1, adapters={"adapters['a']": torch.full((E,), 10.0)})
    assert run(step, 3, 1, 2) == [20, 30, 0]
    assert all(step.replays[key] is replay for key, replay in before.items())
    assert len(step.replays) == len(before)


def test_a_slot_may_be_loaded_from_another_one(device, recorder_name):
    step, adapters = make(device, recorder_name)
    step.load_slot(0, adapters=adapter(2.0))
    step.load_slot(2, adapters={"a": adapters["a"][0], "b": [adapters["b"][0][0]]})
    assert run(step, 0, 1, 2) == [6, 0, 6]


BAD: dict[str, tuple[Any, Any, list[str]]] = {
    "beyond": (SLOTS, adapter(1.0), ["adapters['a']", "4 slots", "slot=4"]),
    "negative": (-1, adapter(1.0), ["4 slots", "slot=-1"]),
    "no int": (1.0, adapter(1.0), ["slot=1.0"]),
    "all slots": (0, stacked("cpu"), ["adapters['a']", "float32[3]", "float32[4, 3]"]),
    "one other shape": (0, {**adapter(1.0), "b": [torch.ones(E + 1)]},
                        ["adapters['b'][0]", "float32[3]", "float32[4]"]),
    "one other dtype": (0, {**adapter(1.0), "b": [torch.ones(E, dtype=torch.bfloat16)]},
                        ["adapters['b'][0]", "float32[3]", "bfloat16[3]"]),
    "another structure": (0, {"a": torch.ones(E)}, ["adapters['b'][0]"]),
    "an unknown path": (0, {"adapters['c']": torch.ones(E)}, ["adapters['c']"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_named_and_nothing_is_written(what: str):
    slot, tree, words = BAD[what]
    step, adapters = make(torch.device("cpu"), "tape")
    with pytest.raises(TreeError) as error:
        step.load_slot(slot, adapters=tree)
    assert [word for word in words if word not in str(error.value)] == []
    assert not adapters["a"].any() and not adapters["b"][0].any()


def test_a_leaf_without_slots_is_refused():
    step, _ = make(torch.device("cpu"), "tape")
    with pytest.raises(TreeError, match="scale has 0 slots"):
        step.load_slot(0, scale=torch.ones(()))


def test_a_leaf_that_moved_is_not_written():
    step, adapters = make(torch.device("cpu"), "tape")
    adapters["a"].data = adapters["a"].clone()
    with pytest.raises(AddressError, match="adapters"):
        step.load_slot(0, adapters=adapter(1.0))
