"""What steps were not made for is refused, not left out."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.models import (
    Policy,
    Settings,
    bare_steps,
    cancel,
    forget,
    gather,
    llama,
    lora,
    make_steps,
    serve,
    start,
    stream,
    submit,
)
from fngraph.models.families.rope import Dynamic
from tests.models.conftest import gathered, wide_params

POLICY = Policy(max_tokens=32, max_reqs=2, max_blocks=4)


@pytest.fixture(scope="module")
def params(config: llama.Config) -> llama.Params:
    """Of one layer: what is refused does not depend on the others."""
    return wide_params(dataclasses.replace(config, num_layers=1))


@pytest.fixture(scope="module")
def made(params):
    """Steps and their cache; those that are alike are made once."""
    return functools.cache(functools.partial(make, params))


def make(
    params: llama.Params, *more: str, block_size: int = 16, num_blocks: int = 16, slots: int = 0,
    modes: str = "NONE", policy: Policy = POLICY, progress: bool = False, max_len: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Steps and their cache."""
    cache = llama.init_cache(params.config, num_blocks, block_size=block_size)
    adapters = lora.slots(params, count=slots, rank=2) if slots else None
    options = {} if modes == "NONE" else {"sizes": (2, 8)}
    steps = make_steps(
        llama.forward, params, cache, policy, *more, modes=modes, adapters=adapters,
        progress=progress, max_len=max_len, **options,
    )  # fmt: skip
    return steps, cache


def events(steps: Any, cache: Any, *requests: dict[str, Any], policy: Policy = POLICY) -> Any:
    """What happens to the requests; the first asks for nothing special."""
    state = start(16, policy)
    for request in ({}, *requests):
        state = submit(state, policy, **{"prompt": [1, 2, 3], "max_new": 4, **request})
    return list(stream(serve(steps, cache, state, policy)))


def run(steps: Any, cache: Any, *requests: dict[str, Any], policy: Policy = POLICY) -> Any:
    """What they get."""
    return gather(events(steps, cache, *requests, policy=policy))


def fails(says: str, steps: Any, cache: Any, bad: dict[str, Any], policy: Policy = POLICY) -> None:
    """The bad one does, alone and at once, for that reason; those beside it get what they get."""
    good = run(steps, cache, {"prompt": [4] * 17}, policy=policy)
    ends = events(steps, cache, {"prompt": [4] * 17}, bad, {"prompt": [4] * 17}, policy=policy)
    texts = gathered(ends)
    assert (texts[0], texts[1], texts[3]) == (good[0], good[1], good[1]) and texts[2] == ()
    (failed,) = [event for event in ends if event.failed]
    assert failed.id == 2 and re.search(says, failed.end), failed
    assert sorted(event.id for event in ends if event.end) == [0, 1, 2, 3]


def test_settings_are_not_dropped(made, params):
    drawing = {"settings": Settings(5.0, seed=3)}
    fails(
        r"^failed: these steps are greedy.*temperature=5\.0.*\.\.\., \"sampling\"", *made(), drawing
    )
    assert run(*made(), {"settings": Settings(0.0, top_k=3)}).keys() == {0, 1}
    texts = run(*made("sampling"), drawing)
    assert texts[0] != texts[1]
    bare = bare_steps(llama.forward, params, POLICY)
    fails("these steps are greedy", bare, llama.init_cache(params.config, 16), drawing)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("slots, has, count", [(0, "none", 8), (2, "2 slots", 8)])
@pytest.mark.parametrize("cascade", [0, 16])
def test_an_adapter_without_a_slot(slots, has, count, cascade, made):
    policy = dataclasses.replace(POLICY, cascade=cascade)
    steps, cache = made(slots=slots, modes="FULL", policy=policy)
    fails(rf"adapter=7.*{has}.*count={count}", steps, cache, {"adapter": 7}, policy)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a token beyond": ({"prompt": [3, 256, 4]}, r"prompt\[1\]=256, but .* tokens are below 256"),
    "one far beyond": ({"prompt": [2**31 - 1]}, r"prompt\[0\]=2147483647, but"),
    "in a later chunk": ({"prompt": [*[1] * 40, 999]}, r"prompt\[40\]=999"),
    "a position beyond": ({"prompt": [1] * 46, "max_new": 6}, "46 .* 6 new ones .* 50 positions"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("modes", ["bare", "FULL"])
def test_what_the_model_does_not_have(what: str, modes: str, made, params):
    bad, says = BAD[what]
    held = dataclasses.replace(params, config=dataclasses.replace(params.config, max_len=50))
    steps, cache = made(modes="FULL", max_len=50)
    if modes == "bare":
        steps = bare_steps(llama.forward, held, POLICY)
    fails(says, steps, cache, bad)
    last = {"prompt": [1] * 46, "max_new": 5}  # its last token has no position
    assert not any(event.failed for event in events(steps, cache, last))


def test_a_prompt_for_which_transformers_would_rescale_all_of_the_rope(params):
    """It may grow past that length, token by token."""
    rope = Dynamic(4.0, 20)
    config = dataclasses.replace(params.config, rope_scaling=rope, max_len=80)
    steps, cache = make(dataclasses.replace(params, config=config))
    fails("prompt of 21 tokens, .* of more than 20: shorten", steps, cache, {"prompt": [1] * 21})
    assert not any(one.failed for one in events(steps, cache, {"prompt": [1] * 20, "max_new": 9}))


def test_a_shared_prefix_of_a_bad_request_is_not_read(made):
    """Its blocks hold nothing of its text, and nobody else has a text like it."""
    bad = {"prompt": [*[7] * 16, *[999] * 17]}
    fails("999", *made(modes="FULL"), bad)
    ends = events(*made(modes="FULL"), bad, bad, {"prompt": [*[7] * 16, 3]})
    alone = run(*made(modes="FULL"), {"prompt": [*[7] * 16, 3]})
    assert [event.id for event in ends if event.failed] == [1, 2] and gathered(ends)[3] == alone[1]


def test_logits_that_are_no_numbers_fail_their_request_alone(made, params):
    """Of a token whose embedding is NaN, greedy or not."""
    broken = dataclasses.replace(params, embed=params.embed.clone())
    broken.embed[77] = torch.nan
    for more in ((), ("sampling",)):
        steps, cache = make(broken, *more, modes="FULL")
        fails("no token is the likeliest", steps, cache, {"prompt": [1, 77, 2]})


def test_an_adapter_below_none():
    with pytest.raises(ValueError, match="adapter=-2"):
        submit(start(16, POLICY), POLICY, [1], 1, adapter=-2)


@pytest.mark.parametrize("block_size", [8, 32])
def test_a_cache_of_another_block_size(block_size, made):
    with pytest.raises(ValueError, match=rf"cache leaf 0\.0 is \[16, {block_size}, 2, 12\].*=16"):
        made(block_size=block_size)


def test_a_cache_with_fewer_blocks_than_the_pool(made):
    with pytest.raises(ValueError, match=r"start\(16, policy\).*Pass start\(1, policy\)"):
        run(*made(num_blocks=1))


def test_a_policy_that_the_steps_were_not_made_for(made):
    steps, cache = made()
    lower = dataclasses.replace(POLICY, max_tokens=2, max_reqs=1, share=False)
    assert run(steps, cache, policy=lower)
    for other in (
        dataclasses.replace(POLICY, max_tokens=64),
        dataclasses.replace(POLICY, max_blocks=5),
        dataclasses.replace(POLICY, query_lens=(1, 3)),
        dataclasses.replace(POLICY, cascade=16),
    ):
        with pytest.raises(ValueError, match=r"make_steps had Policy\(max_tokens=32"):
            run(steps, cache, policy=other)


@pytest.mark.parametrize("name", ["samplign", "adapters", "cascade"])
def test_a_name_that_steps_cannot_have(name, made):
    with pytest.raises(ValueError, match=rf"'{name}' is no name .*\"logits\" or \"states\""):
        made(name)


def test_states_go_with_slots(made):
    with pytest.raises(ValueError, match=r'make_steps\(\.\.\., "states"\)'):
        made("states")
    with pytest.raises(ValueError, match="num_slots=2"):
        made(policy=dataclasses.replace(POLICY, num_slots=2, share=False))


@pytest.mark.parametrize("cascade", [0, 16])
def test_an_adapter_is_loaded_between_steps(cascade, made, params):
    policy = dataclasses.replace(POLICY, cascade=cascade)
    steps, cache = made(slots=2, modes="FULL", policy=policy)
    keys = [set(step.replays) for step in steps.captured]
    before = run(steps, cache, {"adapter": 1}, policy=policy)
    assert before[0] == before[1]  # an empty slot
    draw = torch.Generator().manual_seed(3)
    pairs = {
        (i, name): (
            torch.randn(2, pair.a.shape[2], generator=draw),
            torch.randn(2, pair.b.shape[2], generator=draw),
        )
        for i, own in enumerate(lora.slots(params, count=2, rank=2))
        for name, pair in own.items()
    }
    slots = lora.slots(params, count=2, rank=2)
    idle = start(16, policy)
    steps.load_slot(1, lora.one_slot(slots, pairs), idle)
    after = run(steps, cache, {"adapter": 1}, {"adapter": 0}, policy=policy)
    assert after[0] == after[2] == before[0] != after[1]
    assert [set(step.replays) for step in steps.captured] == keys
    with pytest.raises(fg.errors.TreeError, match="slot=2"):
        steps.load_slot(2, lora.one_slot(slots, pairs), idle)
    with pytest.raises(ValueError, match=r"make_steps\(\.\.\., adapters=lora\.slots"):
        made()[0].load_slot(0, lora.one_slot(slots, pairs), idle)


def test_a_slot_in_use_is_not_loaded(made, params):
    """Its blocks, which texts that begin alike may share, are of the adapter that it had."""
    steps, cache = made(slots=2, modes="FULL")
    empty = lora.one_slot(lora.slots(params, count=2, rank=2), {})
    state = submit(start(16, POLICY), POLICY, range(17), 3, adapter=1)
    refused = pytest.raises(ValueError, match=r"slot 1: request 0 has .* cancel\(state, 0\)")
    with refused:  # it waits
        steps.load_slot(1, empty, state)
    for step in serve(steps, cache, state, POLICY):
        steps.load_slot(0, empty, step.state)
        if step.state.live:
            assert step.state.pool.named
            with refused:
                steps.load_slot(1, empty, step.state)
            with pytest.raises(ValueError, match=r"request 0 has adapter=1 .* cancel\(state, 0\)"):
                forget(step.state, 1)
            cancelled = cancel(step.state, 0)
            with pytest.raises(ValueError, match=r"1 blocks are kept .* forget\(state, 1\)"):
                steps.load_slot(1, empty, cancelled)
            steps.load_slot(1, empty, forget(cancelled, 1))
    state = forget(step.state, 0)
    assert state.pool.named and not forget(state, 1).pool.named
    steps.load_slot(1, empty, forget(state, 1))


def test_captures_are_labelled_and_steps_read_in_a_line(made, capsys):
    steps, _ = made(slots=2, modes="FULL", progress=True)
    labels = [line.partition(" \u2501")[0] for line in capsys.readouterr().out.splitlines()]
    assert labels == ["capturing plain", "capturing adapters"]
    keys = sum(len(step) for step in steps.captured)
    assert repr(steps) == (
        f"Steps({keys} keys of 2 functions; greedy, 2 adapters, max_tokens=32, max_reqs=2)"
    )
