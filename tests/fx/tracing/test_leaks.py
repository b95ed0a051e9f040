"""Tensors that outlive the call that made them: refused wherever they are kept; what is not kept
is not refused."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import queue
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph.errors import LeakError
from fngraph.fx.tracing import outside
from fngraph.fx.tracing.outside import Made
from fngraph.fx.tracing.refusals import Refusals

GLOBAL: Any = None
TABLE: dict[str, Any] = {}
VARIABLE: Any = contextvars.ContextVar("variable", default=None)
LOCAL = threading.local()


class Model:
    last: Any = None


MODULE, SEEN, QUEUE, MODEL = torch.nn.Module(), [], queue.Queue(), Model()  # type: ignore[var-annotated]
MODULE.register_buffer("last", None)


@pytest.fixture(autouse=True, scope="module")
def thawed(frozen: None) -> None:
    """Who keeps a tensor is found by what the collector sees."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _empty():
    global GLOBAL
    yield
    GLOBAL = None
    MODULE.last = Model.last = MODEL.last = LOCAL.x = None
    VARIABLE.set(None)
    for kept in (TABLE, SEEN, QUEUE.queue):
        kept.clear()


def rows(p: Any, b: Any) -> torch.Tensor:
    return p["w"][b.token_ids] * 2  # made here


def made(forward: Callable[[Any, Any, Any], Any]) -> None:
    fast = fg.graphify(forward, donate="s", stage="b", limits=toys.LIMITS)
    fast.trace(toys.tally_params(), toys.tally_state(), batch=toys.batch(2))


def set_global(x: Any) -> None:
    global GLOBAL
    GLOBAL = x


def raise_and_keep(x: Any) -> None:
    try:
        raise ValueError(x)
    except ValueError as error:
        SEEN.append(error)


def suspend(x: Any) -> None:
    def parts() -> Any:
        y = x
        yield y
        yield y

    running = parts()
    next(running)
    SEEN.append(running)


KEPT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (SEEN.append, ""),
    "dict": (lambda x: TABLE.update(x=x), "the global 'TABLE'"),
    "nested": (lambda x: SEEN.append((1, {"a": [x]})), ""),
    "deque": (lambda x: SEEN.append(deque([x])), ""),
    "view": (lambda x: SEEN.append(x[:, :1].t()), ""),
    "detached": (lambda x: SEEN.append(x.detach()), ""),
    "global": (set_global, "the global 'GLOBAL'"),
    "attribute": (lambda x: setattr(MODEL, "last", x), "Model.last"),
    "class attribute": (lambda x: setattr(Model, "last", x), "Model.last"),
    "module buffer": (lambda x: setattr(MODULE, "last", x), "Module._buffers"),
    "closure": (lambda x: SEEN.append(lambda: x), "closure"),
    "partial": (lambda x: SEEN.append(functools.partial(torch.add, x)), "partial"),
    "thread local": (lambda x: setattr(LOCAL, "x", x), ""),
    "queue": (QUEUE.put, "Queue.queue"),
    "context variable": (VARIABLE.set, ""),
    "generator": (suspend, "generator"),
    "exception": (raise_and_keep, "ValueError"),
}


@pytest.mark.sampled("[list]", "[queue]")
@pytest.mark.parametrize("how", KEPT)
def test_a_tensor_that_is_kept(how: str):
    keep, where = KEPT[how]

    def forward(p: Any, s: Any, b: Any) -> Any:
        x = rows(p, b)
        keep(x)
        return x + 1, s

    with pytest.raises(LeakError) as caught:
        made(forward)
    text = str(caught.value)
    assert f"{Path(__file__).name}:" in text and where in text and "Return it" in text, text


def test_they_are_told_in_the_order_of_making_though_an_id_comes_again():
    made, refuse = Made([], []), Refusals(go_on=True)
    gone, second = torch.zeros(1), torch.zeros(1)
    made.note(gone, "first")
    made.note(second, "second")
    number = id(gone)
    del gone
    more = [torch.zeros(1) for _ in range(1000)]  # kept, so that each has an id of its own
    made.note(next(x for x in more if id(x) == number), "third")
    made.check(refuse)
    assert [str(error).split(":")[0] for error in refuse.errors] == ["second", "third"]


def test_a_keeper_that_the_collector_does_not_see():
    def forward(p: Any, s: Any, b: Any) -> Any:
        SEEN.append(rows(p, b))
        return SEEN[-1] + 1, s

    gc.freeze()
    try:
        with pytest.raises(LeakError, match=r"hidden by gc.freeze\(\)"):
            made(forward)
    finally:
        gc.unfreeze()


def test_the_line_is_where_it_was_made():
    with pytest.raises(LeakError) as caught:
        made(lambda p, s, b: (SEEN.append(rows(p, b)), (p["w"] * 1, s))[1])
    (number,) = {n for *_, n in rows.__code__.co_lines() if n and n > rows.__code__.co_firstlineno}
    assert f"{Path(__file__).name}:{number}:" in str(caught.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("keep", "path"),
    [
        (lambda p, s, b: b.token_ids, "b.token_ids"),
        (lambda p, s, b: b, "b.token_ids"),
        (lambda p, s, b: s, "s['seen']"),
        (lambda p, s, b: b.token_ids.shape[0], "number of tokens"),
        (lambda p, s, b: torch.tensor([1.0, 2.0]), "tensor"),
    ],
)
def test_an_argument_a_size_or_a_literal_that_is_kept(keep: Any, path: str):
    with pytest.raises(LeakError, match=path.replace("[", r"\[")):
        made(lambda p, s, b: (SEEN.append(keep(p, s, b)), (rows(p, b), s))[1])


def test_an_output_that_is_kept_as_well():
    def forward(p: Any, s: Any, b: Any) -> Any:
        MODEL.last = rows(p, b)
        return MODEL.last, s

    with pytest.raises(LeakError, match=r"Model\.last"):
        made(forward)


@contextlib.contextmanager
def holding(x: Any) -> Any:
    TABLE["x"] = x
    try:
        yield
    finally:
        del TABLE["x"]


def cycle(p: Any, b: Any) -> Any:
    box = types.SimpleNamespace(x=rows(p, b))
    box.me = box
    return box.x + 1


def popped(p: Any, b: Any) -> Any:
    SEEN.append(rows(p, b))
    return SEEN.pop() + 1


def scoped(p: Any, b: Any) -> Any:
    with holding(rows(p, b)):
        return TABLE["x"] + 1


def weak(p: Any, b: Any) -> Any:
    x = rows(p, b)
    SEEN.append(weakref.ref(x))
    return x + 1


def numbers(p: Any, b: Any) -> Any:
    x = rows(p, b)
    SEEN.append((x.dtype, x.dim(), x.shape[1]))
    return x + 1


def gradient(p: Any, b: Any) -> Any:
    return torch.func.grad(lambda x: (x**2).sum())(rows(p, b))


@pytest.mark.parametrize("value", [cycle, popped, scoped, weak, numbers, gradient])
def test_what_is_let_go_of_is_fine(value: Any):
    made(lambda p, s, b: (value(p, b), s))


def held_by_a_thread(x: Any, go: threading.Event) -> threading.Thread:
    """As autograd's thread for a GPU holds the last of its tensors: where nobody sees them."""
    box, taken = [x], threading.Event()

    def hold() -> None:
        x = box.pop()  # noqa: F841
        taken.set()
        go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    return thread


def in_a_cycle_while_another_thread_collects(x: Any, go: threading.Event) -> threading.Thread:
    """Then `gc.collect()` returns at once, and has done nothing."""
    begun = threading.Event()

    class Slow:
        def __del__(self) -> None:
            begun.set()
            go.wait(60)

    def collect() -> None:
        one: Any = Slow()
        one.itself = one
        del one
        gc.collect()

    box = types.SimpleNamespace(x=x)
    box.itself = box
    thread = threading.Thread(target=collect)
    thread.start()
    assert begun.wait(60)
    return thread


@pytest.mark.parametrize("held", [held_by_a_thread, in_a_cycle_while_another_thread_collects])
def test_what_is_let_go_of_a_little_later_is_fine(held: Any, monkeypatch: pytest.MonkeyPatch):
    """At the first look it is alive."""
    go, threads, looks = threading.Event(), [], []

    def forward(p: Any, s: Any, b: Any) -> Any:
        threads.append(held(rows(p, b), go))
        return p["w"] * 1, s

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            go.set()
            threads[0].join(60)

    monkeypatch.setattr(outside, "time", types.SimpleNamespace(sleep=sleep))
    try:
        made(forward)
    finally:
        go.set()
        threads[0].join(60)
    assert len(looks) == 2


@pytest.mark.sampled(0)
def test_the_look_has_an_end():
    """What a thread goes on to hold is kept."""
    go, threads = threading.Event(), []

    def forward(p: Any, s: Any, b: Any) -> Any:
        threads.append(held_by_a_thread(rows(p, b), go))
        return p["w"] * 1, s

    began = time.monotonic()
    try:
        with pytest.raises(LeakError, match="keeps the tensor from here"):
            made(forward)
    finally:
        go.set()
        threads[0].join(60)
    assert time.monotonic() - began > sum(outside._PATIENCE)
