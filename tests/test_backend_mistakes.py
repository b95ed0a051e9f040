"""Mistakes of who writes an attention backend: each is refused by its name, with the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph.errors import BackendError
from fngraph.ops import ATTENTION, Backend, Plan

always = lambda config: fg.Support.ALWAYS  # noqa: E731
unplanned = (lambda config, sizes, key: None, lambda buffers, config, sizes, leaves: None)
right: Any = ATTENTION.backend("reference").run


@pytest.fixture(autouse=True)
def _restored():
    sdpa = ATTENTION.backend("sdpa")
    yield
    ATTENTION.register(sdpa)
    if "mine" in ATTENTION.backends:
        ATTENTION.unregister("mine")


def by_position(
    q: Any, k: Any, v: Any, kv: Any, meta: Any, out: Any, *, config: Any, host: Any
) -> None: ...


def no_host(args: Any) -> None: ...


def bounds(args: Any, bounds: Any) -> None: ...


def returned(args: Any, host: Any) -> Any:
    mine = torch.empty_like(args.out)
    right(args._replace(out=mine), host)
    return mine


MADE = {
    "support gives a str": lambda: Backend("mine", right, lambda config: "ALWAYS"),
    "support gives None": lambda: Backend("mine", right, lambda config: None),
    "run takes them by position": lambda: Backend("mine", by_position, always),
    "run takes no host": lambda: Backend("mine", no_host, always),
    "run calls its bounds otherwise": lambda: Backend("mine", bounds, always),
    "run is no function": lambda: Backend("mine", 3, always),
    "bind is no function": lambda: Backend("mine", right, always, bind=3),
    "run returns": lambda: Backend("mine", returned, always),
    "options of no such name": lambda: Backend("mine", right, always, options=("sink",)),
    "options a str": lambda: Backend("mine", right, always, options="sinks"),
    "plan a function": lambda: Backend("mine", right, always, plan=lambda config: 1),
    "plan of no such leaf": lambda: Backend(
        "mine", right, always, plan=Plan(("seqlens",), *unplanned)
    ),
}


FIXES = {
    "support gives a str": "returned 'ALWAYS'; return a level",
    "support gives None": "returned None; return a level",
    "run takes them by position": r"run\(q, k, .*, host\) cannot be called as run\(args, .*args.q",
    "run takes no host": r"argument 'host'\. Write def run\(args, host\): .*fg.ops.AttentionArgs",
    "run calls its bounds otherwise": r"run\(args, bounds\) .*'bounds'\. Write def run\(args, h",
    "run is no function": "run=3 is no function",
    "bind is no function": "bind=3 is no function",
    "run returns": r"run returned a Tensor.*out.copy_\(...\), and return nothing",
    "options of no such name": "options names 'sink'.* Did you mean 'sinks'",
    "options a str": r"options=\('sinks',\)",
    "plan a function": "is no fg.ops.Plan; pass plan=",
    "plan of no such leaf": "plan names 'seqlens'.* Did you mean 'seq_lens'",
}


@pytest.mark.parametrize("how", MADE)
def test_a_mistake_is_refused_by_the_backends_name(how):
    with pytest.raises(BackendError, match=f"'mine': .*{FIXES[how]}"):
        ATTENTION.register(MADE[how]())
        fg.testing.check_backend("mine", query_len=1)


def test_the_definition_is_not_replaced_silently():
    with pytest.raises(BackendError, match="reference"):
        ATTENTION.register(Backend("reference", returned, always))
    ATTENTION.register(ATTENTION.backend("reference"), Backend("sdpa", returned, always))
    assert ATTENTION.backend("sdpa").run is returned


# --- what a `run` returns ------------------------------------------------------------------------


def graphified(run: Any, modes: str) -> Any:
    ATTENTION.register(Backend("mine", run, always))
    return fg.graphify(
        toys.attend, modes=modes, donate="cache", stage="batch", sizes=toys.SIZES,
        backends={"attention": "mine"}, recorder="tape", limits=toys.LIMITS,
    )  # fmt: skip


@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL"])
def test_a_step_refuses_a_run_that_returns(modes):
    fast = graphified(returned, modes)
    with pytest.raises(fg.errors.FnGraphError, match="'mine': run returned a Tensor"):
        fast(toys.attention_params(), toys.attention_cache(), toys.batch(3, 2))


def test_a_call_between_graphs_is_refused_that_returns_for_some_batches_alone():
    wrong = []

    def run(args: Any, host: Any) -> Any:
        return (returned if wrong else right)(args, host)

    fast, cache = graphified(run, "PIECEWISE"), toys.attention_cache()
    step = fast.bind(toys.attention_params()).capture(cache, progress=False)
    step(cache, toys.batch(3, 2))
    wrong.append(True)
    with pytest.raises(BackendError, match="'mine': run returned a Tensor"):
        step(cache, toys.batch(3, 2))
    wrong.clear()
    step(cache, toys.batch(3, 2))


def test_bare_forward_refuses_a_run_that_returns():
    ATTENTION.register(Backend("mine", returned, always, preferred=lambda config: True))
    with pytest.raises(BackendError, match="'mine': run returned a Tensor"):
        toys.attend(toys.attention_params(), toys.attention_cache(), toys.batch(3, 2))


def test_a_level_that_is_none_is_refused_when_lowered():
    ATTENTION.register(Backend("mine", right, lambda config: 3))
    fast = fg.graphify(toys.attend, donate="cache", stage="batch", backends={"attention": "mine"})
    split = fast.trace(toys.attention_params(), toys.attention_cache(), limits=toys.LIMITS).split()
    with pytest.raises(BackendError, match=r"'mine': support\(config\) returned 3; return a level"):
        split.lower()


@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE"])
def test_what_raises_half_way_leaves_what_ran_before_it_and_the_next_step_is_right(modes):
    """As docs/serving.md says; no copy of the state is kept for it."""
    fails, layers = [], []

    def run(args: Any, host: Any) -> None:
        layers.append(args.out.shape)
        if fails and len(layers) % 2 == 0:
            raise ValueError("boom")
        right(args, host)

    fast, params, cache = graphified(run, modes), toys.attention_params(), toys.attention_cache()
    batch = toys.batch(3, 2)
    fast(params, cache, toys.batch(4, 1))
    before, want = toys.clone(cache), toys.bare(toys.attend, params, cache, batch)
    fails.append(True)
    layers.clear()
    with pytest.raises(ValueError, match="boom"):
        fast(params, cache, batch)
    toys.assert_trees(cache[0], want[1][0], atol=1e-5, rtol=1e-5)  # the first layer has run
    toys.assert_trees(cache[1], before[1])
    fails.clear()
    got = fast(params, cache, batch)
    toys.assert_trees(got, want, atol=1e-5, rtol=1e-5)
