"""Everything at once: 64 requests in every mode get what bare `forward` gives each of them alone.

They come in waves, share prefixes, use adapters or none, draw greedily or by key, stop by token or
by length, and are thrown out where blocks run out; drafts are verified, and steps in which all
share a prefix cascade. The judges share nothing with the loop: tokens come from one request at a
time, and the mode of each step from the table in `fngraph.models.demo`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import fngraph as fg
from fngraph.models import (
    Policy,
    Served,
    Settings,
    State,
    Steps,
    Tally,
    demo,
    gather,
    generate,
    llama,
    lora,
    make_steps,
    serve,
    start,
    submit,
)
from fngraph.models.serving.sampling import sample, stack
from tests.models.conftest import DEVICES, wide_params
from tests.traced_once import Kept, traced_once

SIZES = (4, 12, 48)
POLICY = Policy(
    56, 12, 8, generate.BLOCK_SIZE, query_lens=(1, 2, 4), ngram=1, cascade=32, cascade_reqs=3,
    reserve=0,
)  # fmt: skip
NUM_BLOCKS = 32  # 12 requests would like some 50
WAVES = {0: 16, 25: 12, 60: 12, 90: 12}  # step -> requests that come; 12 more once all is done
KINDS = {
    "prefill", "prefill lora", "mixed", "mixed lora", "decode", "decode lora", "verify",
    "verify lora", "cascade decode", "cascade verify",
}  # fmt: skip


class Asked(NamedTuple):
    """One request."""

    prompt: tuple[int, ...]
    max_new: int
    stop: tuple[tuple[int, ...], ...]
    adapter: int
    settings: Settings


def requests() -> list[Asked]:
    """64 of them: those of a wave are alike in what they share and in the adapters they use."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    tokens = lambda n: tuple(torch.randint(256, (n,), generator=generator).tolist())  # noqa: E731
    heads = [tokens(37), tokens(50)]
    asked = []
    for i in range(64):
        wave = next(w for w, end in enumerate((16, 28, 40, 52, 64)) if i < end)
        head = heads[wave == 2] if wave in (1, 2) or i % 3 == 0 else ()
        adapter = -1 if wave in (1, 4) or i % 2 else i % 3
        hot = wave in (0, 3) and i % 4 == 1
        settings = Settings(0.8, 20, 0.95, 0.01, seed=i) if hot else Settings()
        body = tokens(draw(2, 8)) * draw(1, 5)  # with repeats, so that drafts are found
        stop = ((draw(0, 256),), (draw(0, 256),)) if i % 5 == 2 else ()
        asked.append(Asked(head + body, draw(12, 40), stop, adapter, settings))
    return asked


def adapters_for(params: llama.Params) -> Any:
    """Three adapters that change the text."""
    generator = torch.Generator().manual_seed(8)
    held = lora.slots(params, count=3, rank=4)
    for layer in held:
        for pair in layer.values():
            for x in (pair.a, pair.b):
                x.copy_(torch.randn(x.shape, generator=generator) * 0.5)
    return held


@pytest.fixture(scope="module")
def wanted(config):
    """(params, adapters, tokens of each request from bare `forward`) on a device, once."""
    kept: dict[str, tuple] = {}

    def on(device: str) -> tuple:
        if device not in kept:
            params = wide_params(config, device=device)
            adapters = adapters_for(params)
            kept[device] = params, adapters, [alone(params, adapters, one) for one in requests()]
        return kept[device]

    return on


@torch.no_grad()
def alone(params: llama.Params, adapters: Any, asked: Asked) -> tuple[int, ...]:
    """What bare `forward` writes for one request, in a cache of its own."""
    device = params.embed.device
    cache = llama.init_cache(
        params.config, POLICY.max_blocks, block_size=generate.BLOCK_SIZE, device=device
    )
    sampling = stack([asked.settings])
    sampling = type(sampling)(**{name: x.to(device) for name, x in vars(sampling).items()})
    text, computed = list(asked.prompt), 0
    while len(text) < len(asked.prompt) + asked.max_new:
        batch = generate.alone(text, computed, POLICY.max_blocks, device)
        if asked.adapter < 0:
            logits_RV, cache = llama.forward(params, cache, batch)
        else:
            object.__setattr__(
                batch, "adapter_ids", torch.full_like(batch.token_ids, asked.adapter)
            )
            logits_RV, cache = lora.adapted(llama.forward)(params, adapters, cache, batch)
        computed = len(text)
        text.append(int(sample(logits_RV, sampling, torch.tensor([computed], device=device))))
        new = tuple(text[len(asked.prompt) :])
        if any(new[-len(run) :] == run for run in asked.stop):
            break
    return tuple(text[len(asked.prompt) :])


@pytest.fixture(scope="module")
def traces() -> Kept:
    """Of the functions that serve, for all modes."""
    return {}


def drive(steps: Steps, cache: Any) -> Iterator[Served]:
    """Serve all requests, which come in waves."""
    coming, number = requests(), -1

    def inbox(state: State) -> State:
        nonlocal number
        number += 1
        count = WAVES.get(number, 0 if state.live else 12)
        for one in coming[:count]:
            state = submit(
                state, POLICY, one.prompt, one.max_new,
                stop=one.stop, adapter=one.adapter, settings=one.settings,
            )  # fmt: skip
        del coming[:count]
        return state

    yield from serve(steps, cache, start(NUM_BLOCKS, POLICY), POLICY, inbox)


def expected(modes: str, spec: fg.BatchSpec) -> str:
    """The mode that a step must run as."""
    decode, mixed = demo.MEANING[modes]
    if spec.num_tokens > SIZES[-1]:
        return "NONE"
    if spec.cascade:
        return "PIECEWISE" if mixed == "PIECEWISE" else "NONE"
    return mixed if spec.query_len is None else decode


@pytest.mark.sampled("FULL_AND_PIECEWISE")
@pytest.mark.parametrize("device, recorder", DEVICES)
@pytest.mark.parametrize("modes", demo.MEANING)
def test_everything_at_once(modes, device, recorder, wanted, traces):
    params, adapters, tokens = wanted(device)
    cache = llama.init_cache(
        params.config, NUM_BLOCKS, block_size=generate.BLOCK_SIZE, device=device
    )
    for kv in cache:
        for x_NSKD in kv:  # reading what was never written shows
            x_NSKD.fill_(torch.nan)
    with traced_once(traces, device):
        steps = make_steps(
            llama.forward, params, cache, POLICY, "sampling", modes=modes, adapters=adapters,
            sizes=SIZES, recorder=recorder,
        )  # fmt: skip
    tally, should, query_lens = Tally(), Counter(), set()
    thrown, events, running = 0, [], set()
    for one in tally.watch(drive(steps, cache)):
        should[expected(modes, one.spec)] += 1
        events += one.events
        query_lens.add(one.spec.query_len)
        thrown += len(running & {job.id for job in one.state.waiting})
        running = {job.id for job in one.state.running}
        state = one.state
    got = gather(events)
    assert [got[i] for i in range(64)] == tokens
    assert len(set().union(*tokens)) >= 50
    assert len(set(state.pool.free.tolist())) == NUM_BLOCKS and not state.pool.holders

    print(tally.as_text())
    assert tally.kinds >= KINDS
    assert query_lens == {None, 1, 2, 4}
    assert thrown >= 3

    ran = sum((step.stats for step in steps.captured), fg.core.Stats())
    share = {name: round(ran.share(name) * ran.steps) for name in ("FULL", "PIECEWISE", "NONE")}
    assert share == {name: should[name] for name in share}
    assert share == {name: tally.total("steps", name) for name in share}
    assert ran.tokens == tally.total("tokens") and ran.padding == tally.total("padding")
    assert ran.steps == tally.total("steps")
