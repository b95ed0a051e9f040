"""One stream of requests under seven schedules, tokens drawn: each request writes the same text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.traffic import Arrival, Lengths, Profile, stream
from fngraph.models import (
    Policy,
    Settings,
    State,
    Tally,
    gather,
    generate,
    llama,
    make_steps,
    serve,
    start,
    submit,
)
from fngraph.models.serving.loop import Served
from fngraph.models.serving.sampling import sample, stack
from tests.models.conftest import wide_params

PROFILE = Profile(10, Lengths(8, 0.6, 20), Lengths(14, 0.4, 24), systems=(9, 4), sampled=0.8)
ARRIVALS = stream(PROFILE, 14, vocab_size=256, seed=3)
ROOMY = Policy(24, 8, 14, block_size=4)
SIZES = (1, 2, 4, 8, 16, 24)
FEW = dataclasses.replace(ROOMY, share=False, decode_many=9)
SCHEDULES = {  # name -> policy, blocks, steps between arrivals, modes
    "roomy": (ROOMY, 120, 0, "FULL_AND_PIECEWISE"),
    "few blocks": (dataclasses.replace(ROOMY, share=False), 18, 0, "FULL"),
    "drafts": (dataclasses.replace(ROOMY, query_lens=(1, 3), ngram=1), 120, 3, "FULL_DECODE_ONLY"),
    "one by one": (dataclasses.replace(ROOMY, max_reqs=1), 60, 0, "NONE"),
    "many": (dataclasses.replace(ROOMY, decode_many=6), 120, 3, "FULL_AND_PIECEWISE"),
    "many, few blocks": (FEW, 18, 0, "FULL_DECODE_ONLY"),
    "small budget": (dataclasses.replace(ROOMY, max_tokens=7), 120, 2, "PIECEWISE"),
}


def settings_of(one: Arrival) -> Settings:
    """Some greedy, the others with filters that differ."""
    if one.seed is None:
        return Settings()
    top_k, top_p, min_p = [(0, 1.0, 0.0), (40, 0.9, 0.0), (0, 0.95, 0.02)][one.seed % 3]
    return Settings(0.9, top_k, top_p, min_p, one.seed)


@torch.no_grad()
def alone(params: llama.Params, one: Arrival) -> tuple[int, ...]:
    """Bare `forward` and draws, one request at a time."""
    device = params.embed.device
    settings = stack([settings_of(one)])
    settings = type(settings)(**{n: x.to(device) for n, x in vars(settings).items()})
    tokens, computed = list(one.prompt), 0
    cache = llama.init_cache(params.config, 8, block_size=16, device=device)
    for _ in range(one.max_new):
        batch = generate.alone(tokens, computed, 8, device)
        logits_RV, cache = llama.forward(params, cache, batch)
        computed = len(tokens)
        place = torch.tensor([computed], device=device)
        tokens.append(int(sample(logits_RV, settings, place)))
    return tuple(tokens[len(one.prompt) :])


@pytest.fixture(scope="module")
def wanted(config):
    """Texts by device."""
    kept: dict[str, list[tuple[int, ...]]] = {}

    def on(device: Any) -> list[tuple[int, ...]]:
        if str(device) not in kept:
            params = wide_params(config, device=str(device))
            kept[str(device)] = [alone(params, one) for one in ARRIVALS]
        return kept[str(device)]

    return on


def served(params: Any, recorder: str, schedule: str) -> tuple[dict, Tally, Sequence[Served]]:
    """The texts, what ran, and the steps."""
    policy, num_blocks, apart, modes = SCHEDULES[schedule]
    device = params.embed.device
    cache = llama.init_cache(params.config, num_blocks, block_size=4, device=device)
    steps = make_steps(
        llama.forward, params, cache, policy, "sampling", modes=modes, recorder=recorder,
        sizes=[size for size in SIZES if size <= policy.max_tokens],
    )  # fmt: skip
    coming, since, tally, ran, events = list(ARRIVALS), apart, Tally(), [], []

    def inbox(state: State) -> State:
        nonlocal since
        since += 1
        while coming and (since > apart or not state.live):
            one = coming.pop(0)
            state = submit(state, policy, one.prompt, one.max_new, settings=settings_of(one))
            since = 0 if apart else since
        return state

    for one in tally.watch(serve(steps, cache, start(num_blocks, policy), policy, inbox)):
        events += one.events
        ran.append(one)
    return gather(events), tally, ran


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_request_writes_the_same_text(schedule, recorder_name, device, config, wanted):
    params = wide_params(config, device=str(device))
    texts, tally, steps = served(params, recorder_name, schedule)
    states = [one.state for one in steps]
    assert [texts[i] for i in range(len(ARRIVALS))] == wanted(device)
    thrown = any(len(j.tokens) > len(j.request.prompt) for s in states for j in s.waiting)
    assert thrown == ("few blocks" in schedule)
    assert (max(one.turns for one in steps) > 1) == ("many" in schedule)
    assert ("verify" in tally.kinds) == (schedule == "drafts")
    assert (max(len(s.running) for s in states) == 1) == (schedule == "one by one")


def test_the_stream_says_something(wanted):
    """Sampled requests leave the greedy path, and seeds matter."""
    texts = wanted("cpu")
    sampled = [i for i, one in enumerate(ARRIVALS) if one.seed is not None]
    assert 5 <= len(sampled) < len(ARRIVALS)
    params = wide_params(llama.Config(256, 2, 6, 2, 12, 32, 48))
    for i in sampled[:3]:
        assert alone(params, ARRIVALS[i]._replace(seed=None)) != texts[i]
        other = ARRIVALS[i]._replace(seed=ARRIVALS[i].seed + 3)
        assert alone(params, other) != texts[i]
