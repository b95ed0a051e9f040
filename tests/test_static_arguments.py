"""Arguments that are no data, which are part of the function; and several that are one batch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import toys
from refusing import TREE, exact, refused, w44, x43

import fngraph as fg


def kinds(w: Any, x: Any, train: bool = False, mode: str = "relu", eps: Any = 0.5) -> Any:
    """Takes a flag, a name and a number."""
    y = getattr(torch, mode)(x @ w) + (eps if eps is not None else 7)
    return y * 2 if train else y


STATIC: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "defaults": ((), {}), "a flag": ((True,), {}), "a flag by name": ({}, {"train": True}),
    "text": ((False, "sigmoid"), {}), "text by name": ((), {"mode": "tanh"}),
    "None": ((), {"eps": None}), "a tensor": ((), {"eps": torch.tensor(3.0)}),
}  # fmt: skip


def test_what_is_no_data_is_part_of_the_function():
    """Each value has a program of its own, and comes back to it."""
    fast = fg.graphify(kinds, stage="x", max_keys=16)
    for _ in range(2):
        for args, kwargs in STATIC.values():
            want = kinds(w44, x43, *args, **kwargs)
            assert torch.equal(fast(w44, x43, *args, **kwargs), want)
    assert len(fast.steps) == 6  # two of them are the same
    with refused(*TREE, ["eps is a float", "functools.partial"]):  # it may be another at each call
        fast(w44, x43, eps=0.25)
    bound = functools.partial(kinds, train=True, eps=0.25)
    assert torch.equal(exact(bound, w44, x43), bound(w44, x43))
    fast = fg.graphify(bound, stage="x")
    assert torch.equal(fast(w44, x43, train=False), bound(w44, x43, train=False))
    assert torch.equal(fast(w44, x43), bound(w44, x43))


def test_what_is_no_data_ahead_of_calls():
    fast = fg.graphify(kinds, stage="x")
    for more in ((), (True, "tanh")):
        step = fast.bind(w44, *more).capture(batch=x43, progress=False)
        assert torch.equal(step(x43), kinds(w44, x43, *more))
        compiled = fast.trace(w44, *more, batch=x43).split().lower().compile()
        assert torch.equal(compiled.capture(w44, *more)(x43), kinds(w44, x43, *more))
    with refused(*TREE, ["train is False", "traced as True"]):
        compiled.capture(w44)
    assert fg.check(kinds, w44, x43, stage="x", rehearse=True)


def test_what_is_no_data_beside_a_batch_with_a_spec():
    def scaled(p: Any, s: Any, b: Any, by: Any = 3, back: bool = True) -> Any:
        y, s = toys.tally(p, s, b)
        return (-y if back else y) * by, s

    fast = fg.graphify(scaled, donate="s", stage="b", limits=toys.LIMITS, sizes=toys.SIZES)
    params, state = toys.tally_params(), toys.tally_state()
    for batch in (toys.batch(2), toys.batch(3, 1)):
        for more in ({}, {"back": False}):
            bare = functools.partial(scaled, **more)
            want, after = toys.bare(bare, params, state, batch)
            toys.assert_trees(fast(params, state, batch, **more), (want, after), **toys.CLOSE)
    assert len(fast.steps) == 2


def forward_of_two(x: Any, w: Any, s: Any, t: Any) -> Any:
    return x @ w * t["a"], s + x.sum()


def test_several_staged_arguments_are_one_batch(recorder_name, device):
    options = {"stage": ("x", "t"), "donate": "s", "recorder": recorder_name}
    fast = fg.graphify(forward_of_two, **options)
    w, s, state = w44.to(device), torch.zeros(1, device=device), torch.zeros(1)
    for n in (3, 2, 3):
        x, t = torch.rand(n, 4), {"a": torch.rand(1)}
        want, state = forward_of_two(x, w44, state, t)
        y, back = fast(x.to(device), w, s, t={"a": t["a"].to(device)})
        torch.testing.assert_close(y.cpu(), want)
        assert back is s
        torch.testing.assert_close(s.cpu(), state)
    assert len(fast.steps) == 2
    step = fast.bind(w).capture(s, batch=(x.to(device), t), progress=False)
    for args, kwargs in (((x, s, t), {}), ((), {"t": t, "s": s, "x": x})):
        want, state = forward_of_two(x, w44, state, t)
        torch.testing.assert_close(step(*args, **kwargs)[0].cpu(), want)
    for bad, path in ((x.double(), "x"), (x[:1], "x")):
        with refused(*TREE, [f"{path}: "]):
            step(bad, s, t)
    with refused(*TREE, ["t['a']: missing"]):
        step(x, s, {"b": t["a"]})
    with refused(*TREE, ["expected the arguments 'x', 's', 't'"]):
        step(x, s, t, t)
    assert fg.check(forward_of_two, x, w44, torch.zeros(1), t, stage=("x", "t"), donate="s")


def test_what_is_staged_beside_a_batch_with_a_spec_is_a_field_of_it():
    fast = fg.graphify(lambda p, s, b, t: toys.tally(p, s, b), donate="s", stage=("b", "t"))
    with refused(*TREE, ["b is a Batch", "Make t a field of it"]):
        fast(toys.tally_params(), toys.tally_state(), toys.batch(2), torch.ones(1))
