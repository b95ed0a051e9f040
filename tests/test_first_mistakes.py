"""The first mistakes of a first hour: what eager would name is named the same way, and what
is new to him says what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from refusing import TREE, attend, exact, refused, w44, x43

import fngraph as fg
from fngraph import errors

HERE = "test_first_mistakes.py:"
MISTAKES: dict[str, Callable[[Any, Any], Any]] = {
    "an attribute": lambda w, x: (x @ w).reshpe(-1),
    "an attribute of a view": lambda w, x: w.t().bogus,
    "an operand": lambda w, x: x + [1, 2],  # noqa: RUF005
    "an operand on the left": lambda w, x: [1, 2] + x,  # noqa: RUF005
    "a comparison": lambda w, x: x < "a",
    "a call": lambda w, x: x(3),
    "an argument": lambda w, x: torch.cat(x, w),
    "a size": lambda w, x: torch.zeros(x),
    "bytes": lambda w, x: memoryview(x),
    "a function of torch": lambda w, x: torch.softmx(x @ w),
    "a key": lambda w, x: {"w": w}["W"],
    "a keyword": lambda w, x: torch.relu(x, bad=3),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_that_eager_would_name_is_named_the_same_way(what: str):
    """A typo is an AttributeError, not a rule of ours; fakes are not spoken of."""
    forward = MISTAKES[what]
    with pytest.raises((AttributeError, TypeError, LookupError)) as eager:
        forward(w44, x43)
    with pytest.raises(type(eager.value)) as caught:
        exact(forward, w44, x43)
    assert type(caught.value) is type(eager.value) and str(caught.value) == str(eager.value)
    assert HERE in caught.value.__notes__[0]
    report = fg.check(forward, w44, x43, stage="x")
    assert str(eager.value).split("\n")[0] in report.as_text() and HERE in report.as_text()


@pytest.mark.parametrize("given", ["cache", "params"])
def test_a_batch_in_the_place_of_another_argument(given: str):
    fast, params, cache = attend()
    batch = toys.batch(2)
    args = (params, batch, cache) if given == "cache" else (batch, cache, params)
    for call in (lambda: fast(*args), lambda: fast.trace(*args[:2])):
        words = [f"{given} is", "Batch", "The batch is 'batch'", "(params, cache, batch)"]
        with refused(*TREE, words):
            call()
    fast(params, cache, batch)
    with refused(*TREE, [f"{given} is", "The batch is 'batch'"]):
        fast(*args)


@pytest.mark.parametrize(
    ("forward", "new", "donate"),
    [(lambda w, t, x: x @ w * t, torch.ones(1), False),
     (lambda w, t, x: x @ w * t["a"], {"a": torch.ones(4)}, False),
     (lambda w, t, x: (x @ w * t).float(), torch.ones(3, 4).double(), False),
     (lambda w, t, x: (x @ w, t + 1), torch.ones(2), True),
     (lambda w, t, x: (x @ w, {"n": t["n"] + 1}), {"n": torch.ones(2)}, True),
     (lambda w, t, x: (x @ w, {"n": t["n"] + 1.5}), {"n": torch.ones(2).long()}, False),
     (lambda w, t, x: t + 1, torch.ones(2), True)],
    ids=["a number", "a dict", "a dtype", "state", "a dict of state", "another dtype", "all"],
)  # fmt: skip
def test_an_argument_that_is_new_at_each_call(forward: Any, new: Any, donate: bool):
    """To stage it is what is said; to donate it where forward returns one like it."""
    fast = fg.graphify(forward, stage="x")
    fast(w44, new, x43)
    with pytest.raises(errors.AddressError, match=r'stage=\("x", "t"\)') as caught:
        fast(w44, toys.clone(new), x43)
    assert ("donate='t'" in str(caught.value)) is donate


def test_state_is_to_be_donated_beside_what_is():
    fast = fg.graphify(lambda s, t, x: (s + 1, t + 1), donate="s", stage="x")
    state = torch.ones(2)
    fast(state, torch.ones(3), x43)
    with pytest.raises(errors.AddressError, match=r"donate=\('s', 't'\)\), and it is updated"):
        fast(state, torch.ones(3), x43)


def test_a_new_argument_beside_a_batch_with_a_spec():
    fast = fg.graphify(lambda p, t, s, b: toys.tally(p, s, b), donate="s", stage="b")
    params, state = toys.tally_params(), toys.tally_state()
    fast(params, torch.ones(1), state, toys.batch(2))
    with pytest.raises(errors.AddressError, match=r"'t' is new.*field of Batch, fg\.buffer"):
        fast(params, torch.ones(1), state, toys.batch(2))


def test_state_that_comes_back_as_it_was():
    with refused(errors.OutputError, RuntimeError, ["s['n']", 'donate="s"', "x.clone()"]):
        exact(lambda w, s, x: (x @ w, s), w44, {"n": torch.zeros(2)}, x43)
    with refused(errors.OutputError, RuntimeError, ["returns x itself", "x.clone()"]):
        exact(lambda w, x: x, w44, x43)


def test_modules_are_pointed_to_from_module():
    net = torch.nn.Linear(4, 4)
    for call in (
        lambda: fg.graphify(net, stage="x"), lambda: exact(lambda m, x: m(x), net, x43),
        lambda: exact(lambda m, x: m["net"](x), {"net": net}, x43),
    ):  # fmt: skip
        with refused(*TREE, ["module", "Linear", "fg.from_module("]):
            call()


@fg.struct
class Model:
    """A tree with a method."""

    w: torch.Tensor

    @fg.graphify(stage="x")
    def apply(self, x: Any) -> Any:
        return x @ self.w


def test_a_graphified_method():
    """`self` is the first argument, a tree; of another class it is said how to make it one."""
    model, other = Model(w44), type("Other", (), {"apply": Model.apply})()
    assert torch.equal(model.apply(x43), x43 @ w44)
    assert Model.apply.trace(model, batch=x43).signature.names == ("self", "x")
    with refused(*TREE, ["self is of class Other", "@fg.struct"]):
        other.apply(x43)


def helper(x: Any) -> Any:
    raise ValueError("mine")


def fails(w: Any, x: Any) -> Any:
    """Fails in a function that it calls."""
    return helper(x @ w)


FIRST_CALLS: dict[str, Callable[[Any], Any]] = {
    "a call": lambda fast: fast(w44, x43),
    "a trace": lambda fast: fast.trace(w44, batch=x43),
    "a capture": lambda fast: fast.bind(w44).capture(batch=x43, progress=False),
}


@pytest.mark.parametrize("how", FIRST_CALLS)
def test_a_mistake_comes_with_the_callers_own_frames(how: str, monkeypatch: pytest.MonkeyPatch):
    """Its traceback has forward's frames, after the call that led to it; all of them on request."""
    fast = fg.graphify(fails, stage="x")

    def names() -> tuple[list[str], Any]:
        with pytest.raises(ValueError, match="mine") as caught:
            FIRST_CALLS[how](fast)
        return [entry.name for entry in caught.traceback], caught.value.__notes__

    found, notes = names()
    assert found[-2:] == ["fails", "helper"] and len(found) <= 6, found
    assert notes[-1].endswith("FNGRAPH_TRACEBACK=all shows them") and len(set(notes)) == len(notes)
    monkeypatch.setenv("FNGRAPH_TRACEBACK", "all")
    found, notes = names()
    assert found[-2:] == ["fails", "helper"] and len(found) > 15 and len(notes) == 1
