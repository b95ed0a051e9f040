"""Messages met in the first hour of a port: what, where, and the fix as code.

A GRU whose state has a row for each request, and a function of tensors without a batch: what people
leave out, mix up or pass by mistake, each with all that the message has to say of it.
"""

from __future__ import annotations

import functools
import logging
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fngraph as fg
from fngraph.errors import (
    AddressError,
    DonationError,
    FieldError,
    FnGraphError,
    HostSyncError,
    TreeError,
)


@fg.struct
class Words:
    x: Tensor = fg.buffer("R", "int64")
    row: Tensor = fg.buffer("R", "int64", pad=0)
    spec: fg.BatchSpec = fg.host()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(9, 4), nn.GRUCell(4, 4), nn.Linear(4, 9)

    def forward(self, state: Tensor, batch: Any) -> Any:
        h = self.cell(self.embed(batch.x), state[batch.row])
        return self.head(h), state.index_copy(0, batch.row, h)


APPLY, PARAMS, BUFFERS = fg.from_module(Net().eval())
SPEC = fg.BatchSpec(3, 3, query_len=1)
BATCH = Words(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]), SPEC)


def state() -> Tensor:
    return torch.zeros(5, 4)


def fast(fn: Any = APPLY, **options: Any) -> Any:
    given = {"donate": "state", "stage": "batch", "sizes": (1, 4)} | options
    return fg.graphify(fn, **given)


@functools.cache
def bound() -> Any:
    """A step, and the state that it was captured with."""
    kept = state()
    limits = fg.Limits(max_tokens=4, max_reqs=4)
    captured = fast().bind(PARAMS, BUFFERS).capture(kept, limits, batch=BATCH, progress=False)
    return captured, kept


def stepped(batch: Any, *more: Any) -> Any:
    step, kept = bound()
    return step(kept, batch, *more)


def forgets(params: Any, buffers: Any, state: Any, batch: Any) -> Any:
    return APPLY(params, buffers, state, batch)[0]


def halves(params: Any, buffers: Any, state: Any, batch: Any) -> Any:
    logits, state = APPLY(params, buffers, state, batch)
    return logits, state.half()


def forgets_a_dict(params: Any, state: Any, x: Any) -> Any:
    return {"a": x + params["w"]}, x.sum()


def scaled(params: Any, x: Any, t: Any) -> Any:
    return x * params["w"] * t


def logged(params: Any, x: Any, t: Any) -> Any:
    loss = (x * params["w"] * t).sum()
    return loss.item()


WEIGHTS = {"w": torch.ones(3)}
X, T = torch.ones(2, 3), torch.tensor(2.0)


def called(fn: Any, *args: Any, **options: Any) -> Any:
    return fg.graphify(fn, **({"stage": ("x", "t")} | options))(*args)


@fg.struct
class Encoded:
    memory: Tensor = fg.buffer("R S 4", "float32")
    spec: fg.BatchSpec = fg.host()


MISTAKES: dict[str, tuple[Any, type[FnGraphError], list[str]]] = {
    "a new state that is not returned": (
        lambda: fast(forgets)(PARAMS, BUFFERS, state(), BATCH), DonationError,
        ["'state' does not come back", "output: float32[R, 9]", "float32[5, 4]",
         "return ..., state"]),
    "a new state of another dtype": (
        lambda: fast(halves)(PARAMS, BUFFERS, state(), BATCH), DonationError,
        ["state", "float32[5, 4]", "float16[5, 4]", "output[0]: float32[R, 9]"]),
    "a dict that is not returned": (
        lambda: called(forgets_a_dict, WEIGHTS, {"m": X, "v": X + 1}, X, donate="state",
                       stage="x"), DonationError,
        ["'state' does not come back", "state['m']: missing", "return ..., state"]),
    "a state of another shape": (
        lambda: bound()[0](torch.zeros(7, 4), BATCH), AddressError,
        ["state is float32[7, 4]", "was float32[5, 4] when", "passed first"]),
    "a state of another dtype": (
        lambda: bound()[0](state().half(), BATCH), AddressError,
        ["state is float16[5, 4]", "was float32[5, 4] when"]),
    "another state": (
        lambda: bound()[0](state(), BATCH), AddressError, ["state moved since the graphs"]),
    "a dict for a batch": (
        lambda: stepped({"x": BATCH.x, "row": BATCH.row}), TreeError,
        ["batch is a dict", "not a Words", "Words(..., spec="]),
    "a list": (
        lambda: stepped(Words([1, 2, 3], BATCH.row, SPEC)), TreeError,
        ["batch.x", "int64[R]", "got list", "torch.tensor(x)"]),
    "an array": (
        lambda: stepped(Words(BATCH.x.numpy(), BATCH.row, SPEC)), TreeError,
        ["batch.x", "int64[R]", "got ndarray", "torch.from_numpy(x)"]),
    "too few arguments": (
        lambda: fast()(PARAMS, BUFFERS, BATCH), TreeError, ["'batch' is missing"]),
    "weights that are bound": (
        lambda: bound()[0](PARAMS, BUFFERS, bound()[1], BATCH), TreeError,
        ["'state', 'batch'", "4 were passed", "bound"]),
    "an argument by another name": (
        lambda: fast()(PARAMS, BUFFERS, state(), inputs=BATCH), TreeError,
        ["'inputs' is none of them", "'batch' is missing"]),
    "a bound function that is called": (
        lambda: fast().bind(PARAMS, BUFFERS)(state(), BATCH), TreeError,
        [".capture(", "state, fg.Limits(max_tokens=..., max_reqs=...)"]),
    "an int that changes": (
        lambda: called(scaled, WEIGHTS, X, 3), TreeError,
        ["t is an int", "torch.tensor(3)", "functools.partial(forward, t=3)"]),
    "a part that is new at each call": (
        lambda: (f := fg.graphify(scaled, stage="x"), f(WEIGHTS, X, T), f(WEIGHTS, X, T + 1)),
        AddressError, ['stage=("x", "t")']),
    "two staged, and a third that is new": (
        lambda: (f := fg.graphify(lambda w, x, t: x * t * w, stage=("x", "t")), f(T, X, T),
                 f(T + 1, X, T)), AddressError, ['stage=("x", "t", "w")']),
    "exact shapes, captured by their tensors": (
        lambda: fg.graphify(scaled, stage=("x", "t")).bind(WEIGHTS).capture(X, T), TreeError,
        ["capture takes batch=(x, t)", "got Tensor, Tensor"]),
    "exact shapes, captured without an example": (
        lambda: fg.graphify(scaled, stage=("x", "t")).bind(WEIGHTS).capture(), TreeError,
        ["'x', 't' have no annotation", "capture(..., batch=(x, t))"]),
    "a letter without a size": (
        lambda: fg.graphify(lambda w, batch: batch.memory * w, stage="batch").trace(
            T, batch=Encoded(torch.ones(2, 6, 4), SPEC)), FieldError,
        ["batch.memory", "'S'", "fg.Limits(..., S=64)"]),
    "a loss that is read": (
        lambda: called(logged, WEIGHTS, X, T), HostSyncError,
        ["tests/test_ports.py:", "Return the tensor itself", "after the call"]),
    "a donated name that is none": (
        lambda: fast(donate="states"), TreeError,
        ["donate='states'", "'state'", 'Did you mean donate="state"?']),
    "a key that is missing": (
        lambda: (f := fg.graphify(scaled, stage=("x", "t")), f(WEIGHTS | {"b": X}, X, T),
                 f(WEIGHTS, X, T)), TreeError, ["params['b']: missing"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_fix(name: str) -> None:
    mistaken, kind, words = MISTAKES[name]
    with pytest.raises(kind) as caught:
        mistaken()
    text = str(caught.value)
    assert not [word for word in words if word not in text], text


def test_the_traceback_of_a_refusal_has_no_walk_through_fngraph() -> None:
    with pytest.raises(DonationError) as caught:
        fast(forgets)(PARAMS, BUFFERS, state(), BATCH)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files[0] == __file__
    assert len([file for file in files if "/fngraph/" in file]) <= 2, files


def test_a_mistake_of_shapes_is_raised_once_and_logged_by_nobody(caplog, capfd) -> None:
    def joined(params: Any, x: Any, t: Any) -> Any:
        return torch.cat([x, torch.ones(5, 4)])

    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError, match="must match"):
        called(joined, WEIGHTS, X, T)
    assert "failed while attempting" not in caplog.text + capfd.readouterr().err
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    assert not logger.filters and not logger.disabled  # torch's own is as it was
