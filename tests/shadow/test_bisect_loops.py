"""`fg.bisect` of steps with loops: the loop is named as it was called, with its line, and the op in
its functions at which turns differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg

pytestmark = pytest.mark.usefixtures("one_thread")
SCALE = {"by": 2.0}


def scanned(p: Any, x: Tensor) -> Any:
    h = x * 2

    def body(c: Tensor, w: Tensor) -> Any:
        c = torch.tanh(c @ w)  # ws
        c = c * p["s"]  # s
        return c + SCALE["by"], c.sum()  # SCALE

    c, ys = fg.scan(body, h, p["ws"])  # loop
    return c + 1, ys


def repeated(p: Any, x: Tensor) -> Any:
    def body(carry: Any) -> Any:
        i, c = carry
        return i + 1, torch.sin(c @ p["w"])  # w

    start = torch.zeros((), dtype=torch.int64, device=x.device), x
    _, c = fg.while_loop(lambda carry: carry[0] < 3, body, start)  # loop
    return c * 1


def counted(p: Any, x: Tensor) -> Any:
    def body(i: Tensor, c: Tensor) -> Tensor:
        return c @ p["w"]  # w

    return fg.fori_loop(0, 3, body, x) * 1  # loop


def chosen(p: Any, x: Tensor) -> Any:
    def yes() -> Tensor:
        return x @ p["w"]  # w

    return fg.cond(x.sum() > 0, yes, lambda: x - 1) * 2  # loop


def nested(p: Any, x: Tensor) -> Any:
    def inner(c: Tensor, w: Tensor) -> Any:
        return torch.tanh(c @ w) * p["s"], None  # s

    def outer(i: Tensor, c: Tensor) -> Tensor:
        return fg.scan(inner, c, p["ws"])[0]

    return fg.fori_loop(0, 2, outer, x) * 1  # loop


def params(device: Any) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=made).to(device)  # noqa: E731
    return {"ws": draw(3, 4, 4), "s": draw(4), "w": draw(4, 4)}


def line(forward: Callable[..., Any], mark: str) -> str:
    """The line with a comment."""
    lines, first = inspect.getsourcelines(forward)
    (at,) = [i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {mark}")]
    return f"tests/shadow/test_bisect_loops.py:{first + at}"


CASES = [
    (scanned, "s", "fg.scan", "in its body, turn 0: first aten.mul.Tensor"),
    (scanned, "ws", "fg.scan", "in its body, turn 0: first aten.mm.default"),
    (repeated, "w", "fg.while_loop", "in its body, turn 0: first aten.mm.default"),
    (counted, "w", "fg.fori_loop", "in its body, turn 0: first aten.mm.default"),
    (chosen, "w", "fg.cond", "in its branch 'if true': first aten.mm.default"),
    (nested, "s", "fg.fori_loop", "in its body, turn 0: first aten.mul.out"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("modes", ["FULL", "NONE"])
@pytest.mark.parametrize(("forward", "key", "loop", "inside"), CASES)
def test_a_stale_weight_in_a_loop_is_named_with_loop_op_and_lines(
    forward: Any, key: str, loop: str, inside: str, modes: str, recorder_name: str, device: Any
):
    p, x = params(device), torch.rand(2, 4, device=device) + 0.1
    step = fg.graphify(forward, stage="x", modes=modes).bind(p).capture(
        batch=x, progress=False, recorder=recorder_name
    )  # fmt: skip
    assert not fg.bisect(step, x).kind
    p[key] = p[key] + 1
    found = fg.bisect(step, x)
    assert (found.kind, found.op, found.line) == ("program", loop, line(forward, "loop"))
    if forward is nested:
        assert "first fg.scan, from" in found.what
    assert f"{inside}, from {line(forward, key)}" in found.what and f"p['{key}']" in found.what
    assert "getitem" not in str(found)


def test_one_of_an_ops_several_results_is_named_by_the_op():
    def forward(p: Any, x: Tensor) -> Any:
        values, order = p["w"].sort(0)
        return values * 2 + x.sum(), order

    p, x = params("cpu"), torch.ones(4)
    step = fg.graphify(forward, stage="x").bind(p).capture(batch=x, progress=False)
    p["w"] = p["w"] + 1
    assert fg.bisect(step, x).op == "aten.sort.default"


def test_what_forward_reads_anew_within_a_loop_is_named_there(monkeypatch: pytest.MonkeyPatch):
    p, x = params("cpu"), torch.rand(2, 4)
    step = fg.graphify(scanned, stage="x").bind(p).capture(batch=x, progress=False)
    monkeypatch.setitem(SCALE, "by", 3.0)
    found = fg.bisect(step, x)
    assert (found.kind, found.op) == ("trace", "aten.add.Tensor")
    assert found.line == line(scanned, "SCALE")


def trusting(p: Any, s: Any, b: toys.Batch) -> Any:
    """A false word in a body."""

    def body(i: Tensor, c: Tensor) -> Tensor:
        return c + fg.trust_rows(c.sum(0)) * 0.1  # word

    return fg.fori_loop(0, 2, body, p["w"][b.token_ids] + 1), s


def test_a_false_word_within_a_loop_is_named_there():
    p, s, batch = toys.tally_params(), toys.tally_state(), toys.batch(3)
    options = {"donate": "s", "stage": "b", "limits": toys.LIMITS}
    step = fg.graphify(trusting, sizes=(8,), **options).bind(p).capture(s, progress=False)
    found = fg.bisect(step, batch)
    assert (found.kind, found.op) == ("padding", "fg.trust_rows")
    assert found.line == line(trusting, "word")
    (error,) = fg.check(trusting, p, s, batch, rehearse=True, **options).errors
    assert line(trusting, "word") in str(error) and "getitem" not in str(error)


def flagged(p: Any, x: Tensor) -> Any:
    return fg.cond(p["yes"], lambda: x + 1, lambda: x - 1) * 2  # loop


def test_a_choice_that_goes_another_way_is_told():
    p, x = {"yes": torch.tensor(True)}, torch.rand(2, 4)
    step = fg.graphify(flagged, stage="x").bind(p).capture(batch=x, progress=False)
    p["yes"] = torch.tensor(False)
    found = fg.bisect(step, x)
    assert (found.op, found.line) == ("fg.cond", line(flagged, "loop"))
    assert ", and it takes other turns" in found.what and "p['yes']" in found.what
