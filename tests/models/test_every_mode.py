"""Every mode writes what bare `forward` writes, and runs its steps as it promises.

28 requests of different lengths on at most 16 rows: they join and leave, long prompts come in
chunks, and some steps are larger than the ladder. The judges share nothing with what is judged:
tokens come from `generate.reference` (one request at a time, no scheduler), logits from one pass
over each finished text, and the mode of each step from the table in `fngraph.models.demo`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fngraph as fg
from fngraph.models import Policy, Steps, demo, gather, generate, llama, schedule, start, submit
from fngraph.models.serving.batches import batch_type
from fngraph.models.serving.loop import advance
from fngraph.models.serving.requests import Row
from tests.models.conftest import DEVICES, wide_params
from tests.traced_once import Kept, traced_once

SIZES = (1, 2, 4, 8, 16, 32)
POLICY = Policy(40, 16, 6, share=False)
BUDGETS = (18, 25, 16, 32, 21, 40, 29)  # steps of 33 to 40 tokens find no graph in any mode
NUM_BLOCKS = 80
WAVES = {0: 16, 33: 8, 68: 4}  # step -> requests that come
RUNTIME_MODES = ("FULL", "PIECEWISE", "NONE")
STEPS = {  # of this traffic that run as FULL, PIECEWISE, NONE; 5 of them are beyond the ladder
    "NONE": (0, 0, 117),
    "PIECEWISE": (0, 112, 5),
    "FULL_DECODE_ONLY": (75, 0, 42),
    "FULL": (112, 0, 5),
    "FULL_AND_PIECEWISE": (75, 37, 5),
}


def prompts() -> list[tuple[list[int], int]]:
    """28 prompts of 1 to 47 tokens, with the 16 to 48 new ones that each is to get."""
    generator = torch.Generator().manual_seed(11)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    lengths = [1 if i in (3, 9) else draw(2, 48) for i in range(28)]
    return [(torch.randint(256, (n,), generator=generator).tolist(), draw(16, 49)) for n in lengths]


def logits_forward(params: Any, cache: Any, batch: batch_type()) -> Any:
    """`llama.forward` over the serving batch, for those who look at logits."""
    return llama.forward(params, cache, batch)


def drive(
    step: Any, cache: Any, look: Callable[[tuple[Row, ...], Any, Tensor], None]
) -> dict[int, tuple[int, ...]]:
    """Serve all prompts, in three waves; `look` at each step. Returns what each request got."""
    state, coming, number, events = start(NUM_BLOCKS, POLICY), prompts(), 0, []
    while coming or state.live:
        for _ in range(WAVES.get(number, 0)):
            state = submit(state, POLICY, *coming.pop(0))
        budget = dataclasses.replace(POLICY, max_tokens=BUDGETS[number % len(BUDGETS)])
        state, batch = schedule(state, budget, Steps(step.host_batch, step, step.dispatch))
        spec, rows = batch.spec, state.rows
        logits_R1V, back = step(cache, batch)
        assert back is cache
        look(rows, spec, logits_R1V[:, 0])
        state, new = advance(state, logits_R1V.argmax(-1).tolist())
        events += new
        number += 1
    assert len(state.pool.free) == NUM_BLOCKS
    return gather(events)


class Wanted(NamedTuple):
    """What bare `forward` says: by request, its new tokens and the logits after each token."""

    params: llama.Params
    tokens: dict[int, tuple[int, ...]]
    logits_SV: dict[int, Tensor]


@pytest.fixture(scope="module")
def wanted(config):
    """`Wanted` on a device, computed once."""
    kept: dict[str, Wanted] = {}

    def on(device: str) -> Wanted:
        if device not in kept:
            kept[device] = want(wide_params(config, device=device))
        return kept[device]

    return on


@torch.no_grad()
def want(params: llama.Params) -> Wanted:
    """Bare `forward`, one request at a time."""
    tokens, logits = {}, {}
    for i, (prompt, max_new) in enumerate(prompts()):
        tokens[i] = generate.reference(params, prompt, max_new)
        text = [*prompt, *tokens[i]]
        batch = generate.alone(text, 0, POLICY.max_blocks, params.embed.device)
        everywhere = torch.arange(len(text), device=params.embed.device)
        batch = llama.Batch(**{**vars(batch), "logits_indices": everywhere})
        logits[i], _ = llama.forward(params, new_cache(params, POLICY.max_blocks), batch)
    return Wanted(params, tokens, logits)


@pytest.fixture(scope="module")
def traces() -> Kept:
    """Of `logits_forward`, for all modes."""
    return {}


def new_cache(params: llama.Params, num_blocks: int) -> Any:
    """A cache in which reading what was never written shows."""
    cache = llama.init_cache(
        params.config, num_blocks, block_size=generate.BLOCK_SIZE, device=params.embed.device
    )
    for kv in cache:
        for x_NSKD in kv:
            x_NSKD.fill_(torch.nan)
    return cache


def capture(
    params: llama.Params, modes: str, recorder: str, traces: Kept, outputs: str = "own"
) -> Any:
    """The step, and the cache that it is bound to."""
    cache = new_cache(params, NUM_BLOCKS)
    fast = fg.graphify(
        logits_forward, modes=modes, donate="cache", stage="batch", sizes=SIZES, recorder=recorder
    )
    with traced_once(traces, params.embed.device):
        step = fast.bind(params).capture(cache, POLICY.limits, outputs=outputs, progress=False)
    return step, cache


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device, recorder", DEVICES)
@pytest.mark.parametrize("modes", demo.MEANING)
def test_tokens_logits_and_shares(modes, device, recorder, wanted, traces):
    params, tokens, logits_SV = wanted(device)
    step, cache = capture(params, modes, recorder, traces)
    should, specs = Counter(), []

    def look(rows: tuple[Row, ...], spec: fg.BatchSpec, got_RV: Tensor) -> None:
        ends = [(job.id, job.computed + new) for job, new, _ in rows]
        want_RV = torch.stack([logits_SV[id][end - 1] for id, end in ends])
        torch.testing.assert_close(got_RV, want_RV, atol=1e-5, rtol=0)
        should[demo.expected_mode(modes, spec)] += 1
        specs.append(spec)

    assert drive(step, cache, look) == tokens
    assert len(set().union(*tokens.values())) >= 50

    assert len(specs) >= 64 and {spec.num_reqs for spec in specs} >= {1, 3, 5, 12, 15, 16}

    ran = {name: round(step.stats.share(name) * len(specs)) for name in RUNTIME_MODES}
    assert step.stats.steps == len(specs)
    assert ran == {name: should[name] for name in RUNTIME_MODES}
    assert ran == dict(zip(RUNTIME_MODES, STEPS[modes]))


@pytest.mark.parametrize("device, recorder", DEVICES)
def test_replayed_logits_come_from_fixed_addresses(device, recorder, wanted, traces):
    """What `stats` calls a replay is one: the borrowed outputs of a key never move."""
    params, tokens, _ = wanted(device)
    step, cache = capture(params, "FULL_AND_PIECEWISE", recorder, traces, outputs="borrow")
    addresses: dict[Any, set[int]] = {}
    held = []  # so that an eager step's output cannot be given the same memory again

    def look(rows: tuple[Row, ...], spec: fg.BatchSpec, got_RV: Tensor) -> None:
        mode, key, _ = step.dispatch(spec)
        if mode is not fg.Mode.NONE:
            addresses.setdefault((mode, key), set()).add(got_RV.data_ptr())
            held.append(got_RV)

    got = drive(step, cache, look)
    assert {mode for mode, _ in addresses} == {fg.Mode.FULL, fg.Mode.PIECEWISE}
    assert len(addresses) >= 7
    assert all(len(seen) == 1 for seen in addresses.values())
    assert got == tokens


@pytest.mark.parametrize("device, recorder", DEVICES)
def test_a_drop_in_for_forward(device, recorder, wanted):
    """`fast(params, cache, batch)`, nothing captured ahead; batches on the device and the host."""
    params, tokens, _ = wanted(device)
    cache = new_cache(params, POLICY.max_blocks)
    fast = fg.graphify(llama.forward, donate="cache", stage="batch", recorder=recorder)
    prompt, max_new = prompts()[0]
    text, computed = list(prompt), 0
    for i in range(max_new):
        where = params.embed.device if i % 2 else torch.device("cpu")
        batch = generate.alone(text, computed, POLICY.max_blocks, where)
        got_RV, back = fast(params, cache, batch)
        assert back is cache
        computed = len(text)
        text.append(int(got_RV.argmax()))
    assert tuple(text[len(prompt) :]) == tokens[0]
    assert fast.stats.steps == max_new and fast.stats.share("NONE") < 1
