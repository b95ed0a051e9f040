"""What the loop is passed by mistake: it says so where it is passed, and no failure is silent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fngraph as fg
from fngraph.models import (
    Event,
    Policy,
    Settings,
    State,
    Steps,
    Tally,
    advance,
    bare_steps,
    cancel,
    forget,
    gather,
    llama,
    lora,
    make_steps,
    mamba2,
    schedule,
    serve,
    start,
    start_over,
    stream,
    submit,
)
from fngraph.models.serving.scheduling import plan

POLICY = Policy(16, 3, 6, 8)


@pytest.fixture(scope="module")
def params() -> llama.Params:
    config = llama.Config(
        vocab_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, dim=24, mlp_dim=32
    )
    return llama.init_params(config)


@pytest.fixture(scope="module")
def steps(params) -> Steps:
    return bare_steps(llama.forward, params, POLICY)


def cache_of(params: llama.Params) -> Any:
    return llama.init_cache(params.config, 12, block_size=8)


def waiting(*prompts: Any, **asked: Any) -> State:
    state = start(12, POLICY)
    for prompt in prompts:
        state = submit(state, POLICY, prompt, 3, **asked)
    return state


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"settings": Settings(0.8)}, r'make_steps\(..., "sampling"\)'),
        ({"logprobs": 5}, r'make_steps\(..., "logits"\)'),
        ({"grammar": lambda new: None}, r'make_steps\(..., "logits"\)'),
        ({"adapter": 3}, "adapter=3, but these steps have none"),
        ({"prompt": [300]}, r"prompt\[0\]=300"),
    ],
)
def test_gather_says_who_failed_and_why(asked: Any, reason: str, params, steps):
    """It had given {1: ()} and no word."""
    state = submit(waiting([1, 2]), POLICY, **{"prompt": [4], "max_new": 3, **asked})
    state = submit(state, POLICY, [1, 2], 3)
    with pytest.warns(UserWarning, match=rf"1 of 3 failed:\nrequest 1 failed: .*{reason}") as told:
        texts = gather(stream(serve(steps, cache_of(params), state, POLICY)))
    assert len(told) == 1 and told[0].filename == __file__
    assert texts[1] == () and len(texts[0]) == 3 and texts[2] == texts[0]


def test_gather_names_eight_and_nobody_where_none_failed():
    failed = [Event(i, (), "failed: so") for i in range(11)]
    with pytest.warns(UserWarning, match="11 of 11 failed") as told:
        gather(failed)
    assert str(told[0].message).splitlines()[8:] == ["request 7 failed: so", "and 3 more"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gather([Event(0, (1,), "time"), Event(1, (2,), "stop")]) == {0: (1,), 1: (2,)}


@pytest.mark.parametrize(
    ("drawn", "error", "says"),
    [
        ([[1.5]], TypeError, r"drawn\[0\]\[0\]=1.5 is a float: pass a whole number"),
        ([[True]], TypeError, r"drawn\[0\]\[0\]=True is a bool"),
        ([["a"]], TypeError, r"drawn\[0\]\[0\]='a' is a str"),
        ([[-5]], ValueError, r"drawn\[0\] has -5, which is no token: .* below 256"),
        ([[256]], ValueError, r"drawn\[0\] has 256, which is no token: .* below 256"),
        (None, TypeError, r"drawn=None is a NoneType: pass a list of tokens for each row"),
        ([5], TypeError, r"drawn\[0\]=5: pass a list of tokens for each row"),
        ([[]], TypeError, r"drawn\[0\]=\[\]: pass a list of tokens"),
        ([None], TypeError, r"drawn\[0\]=None: pass a list of tokens"),
    ],
)
def test_what_are_no_tokens(drawn: Any, error: Any, says: str, steps):
    state, _ = schedule(waiting([1, 2]), POLICY, steps)
    with pytest.raises(error, match=says):
        advance(state, drawn)
    _, (event,) = advance(state, np.array([[255]]))
    assert event.tokens == (255,) and type(event.tokens[0]) is int


def test_tokens_of_a_vocabulary_that_is_not_known():
    state = plan(waiting([1, 2]), POLICY)
    assert advance(state, [[9999]])[1][0].tokens == (9999,)
    with pytest.raises(ValueError, match=f"below {2**31}"):
        advance(state, [[2**31]])


def test_states_and_numbers_of_another_kind(steps):
    state = waiting([1, 2])
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: advance(None, [[1]]), "state=None is a NoneType"),
        (lambda: cancel(None, 0), "state=None is a NoneType"),
        (lambda: forget(POLICY), "state is a Policy"),
        (lambda: start_over(None, 4, POLICY), "state=None is a NoneType"),
        (lambda: cancel(state, "0"), "id='0' is a str"),
        (lambda: cancel(state, 1), r"no request has that number, of 1 submitted"),
        (lambda: cancel(state, -1), r"no request has that number, of 1 submitted"),
        (lambda: forget(state, "0"), "adapter='0' is a str"),
        (lambda: Policy(True, 3, 6), "max_tokens=True is a bool"),
        (lambda: Policy(16, 3, 6, query_lens=(1, True)), "query_lens=True is a bool"),
        (lambda: Policy(16, 3, 6, query_lens=1), r"query_lens=1: pass a tuple of them, \(1,\)"),
        (lambda: Policy(16, 3, 6, query_lens=3), r"query_lens=3: pass a tuple of them, \(1, 3\)"),
        (lambda: Policy(16, 3, 6, share="no"), "share='no' is a str. Pass True or False"),
        (lambda: start(True, POLICY), "num_blocks=True is a bool"),
        (lambda: submit(state, POLICY, [1], True), "max_new=True is a bool"),
        (lambda: submit(state, POLICY, [1], 3, stop=[True]), "stop=True is a bool"),
        (lambda: schedule(POLICY, state, steps), "state is a Policy"),
    ]  # fmt: skip
    for call, says in calls:
        with pytest.raises((TypeError, ValueError), match=says):
            call()


def test_parts_of_the_loop_in_each_others_places(params, steps):
    state, cache = waiting([1, 2]), cache_of(params)

    def served(*args: Any, **named: Any) -> Any:
        return serve(*(args or (steps, cache, state, POLICY)), **named)

    events = [Event(0, (1,), None)]
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: gather(served()), r"gather got a Served: pass gather\(stream\(serve"),
        (lambda: gather(state), "gather got a State: pass"),
        (lambda: list(stream(events)), r"stream got an Event: pass stream\(serve"),
        (lambda: list(stream(state)), "stream got a State: pass"),
        (lambda: Tally(events), r"Tally.watch got an Event: pass tally.watch\(serve"),
        (lambda: served(cache, steps, state, POLICY), r"steps is a tuple. Pass what make_steps"),
        (lambda: served(llama.forward, cache, state, POLICY), "steps=.* is a function. Pass what"),
        (lambda: served(steps, cache, POLICY, state), "state is a Policy. Pass one of start"),
        (lambda: served(inbox=3), "inbox=3 is an int. Pass a function"),
        (lambda: served(clock=3), "clock=3 is an int. Pass a function"),
        (lambda: next(served(inbox=lambda state: None)), "inbox gave a NoneType: return its state"),
    ]  # fmt: skip
    for call, says in calls:
        with pytest.raises(TypeError, match=says):
            call()


def test_what_steps_cannot_be_made_of(params):
    cache = cache_of(params)

    def make(*args: Any, **named: Any) -> Any:
        given = dict(enumerate((llama.forward, params, cache, POLICY))) | dict(enumerate(args))
        options = {"modes": "FULL", "sizes": (4,), "recorder": "tape", "progress": False}
        return make_steps(*given.values(), **{**options, **named})

    adapters = lora.slots(params, count=2, rank=2)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: make(limits=fg.Limits(8, 2)), r"limits= is not for make_steps. Pass Policy"),
        (lambda: make(query_lens=(1, 3)), r"query_lens= is not for .*Policy\(query_lens"),
        (lambda: make(donate="cache"), "donate= is not for make_steps"),
        (lambda: make(cost=lambda key: None), r"cost\(.*\) gives None. Return a number"),
        (lambda: make(llama), "forward is a module. Pass llama.forward"),
        (lambda: bare_steps(llama, params, POLICY), "forward is a module. Pass llama.forward"),
        (lambda: make(llama.forward, cache, params), "cache is a Params, .* pass params, then"),
        (lambda: make(llama.forward, params, cache, 4), r"policy=4 is an int. Pass Policy\("),
        (lambda: make(stage="batch"), r"stage='batch' is a str. Pass stage_of"),
        (lambda: make(progress="no"), "progress='no' is a str. Pass True or False"),
        (lambda: make(vocab_size="4"), "vocab_size='4' is a str"),
        (lambda: make(max_len=-4), "max_len=-4: pass what the model has"),
        (lambda: make(adapters=4), r"adapters=4 is an int. Pass lora.slots\("),
        (lambda: make(adapters=()), r"adapters=\(\) has no slots. Pass lora.slots\("),
        (lambda: make(adapters=adapters[:1]), "adapters has 1 part, and the model 2 layers"),
        (lambda: make(llama.forward, params, cache[:1]), "cache has 1 part, and the model 2 lay"),
        (lambda: make(llama.forward, params, None), r"cache=None is a NoneType. Pass init_cache"),
        (lambda: llama.init_cache(params, 4), r"config is a Params. Pass init_cache\(params.conf"),
        (lambda: llama.init_cache(4, 4), "config=4 is an int. Pass a family's Config"),
        (lambda: llama.init_cache(params.config, "4"), "num_blocks='4' is a str"),
        (lambda: llama.init_cache(params.config, 4, block_size=-1), "block_size=-1: pass 0 or"),
        (lambda: llama.init_params(params), r"config is a Params. Pass init_params\(params.conf"),
        (lambda: mamba2.init_params(3), "config=3 is an int"),
    ]  # fmt: skip
    for call, says in calls:
        with pytest.raises((TypeError, ValueError), match=says):
            call()


def test_a_mode_by_its_value_is_the_mode_of_that_name(params):
    policy = Policy(16, 3, 6, 8, query_lens=(1, 3))
    options: Any = {"sizes": (6,), "recorder": "tape", "progress": False}
    made = [
        make_steps(llama.forward, params, cache_of(params), policy, modes=modes, **options)
        for modes in ("FULL", "full", fg.Mode.FULL)
    ]
    keys = [[list(step.table) for step in steps.captured] for steps in made]
    assert keys[0] == keys[1] == keys[2] and len(made[0].captured) == 2
