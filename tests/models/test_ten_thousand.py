"""10,000 requests, random cancels, a fifth of the blocks missing: nothing lost, nothing kept.

The model is small enough for that: the next token is the sum of a number for each token and place,
read out of the paged cache by attention with equal weights. So a token that is lost, doubled, in
another's block or at another place changes the text, and pure Python knows the text.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.models import (
    Policy,
    State,
    Tally,
    advance,
    cancel,
    gather,
    make_steps,
    serve,
    start,
    submit,
)
from fngraph.models.serving.scheduling import plan
from tests.models.conftest import DEVICES

VOCAB, SIZE = 11, 8


DRAW = random.Random(3)
NUMBERS = [[DRAW.randrange(16) for _ in range(48)] for _ in range(VOCAB)]  # by token and place


def forward(params: torch.Tensor, cache: Any, batch: Any) -> Any:
    """Logits that are highest at the sum of all numbers so far, modulo VOCAB."""
    value_T11 = params[batch.token_ids, batch.positions][:, None, None]
    none_T11 = torch.zeros_like(value_T11)
    mean_T11, cache = fg.ops.attention(none_T11, none_T11, value_T11, cache, batch)
    return logits(mean_T11[:, 0, 0] * (batch.positions + 1), batch), cache


def recurrent(params: torch.Tensor, cache: Any, batch: Any) -> Any:
    """The same with a state that never decays."""
    value_T = params[batch.token_ids, batch.positions]
    one_T1, zero_1 = torch.ones_like(value_T)[:, None], value_T.new_zeros(1)
    sum_T11, state = fg.ops.ssd(
        value_T[:, None, None], one_T1, zero_1, one_T1[..., None], one_T1[..., None],
        cache[0], batch,
    )  # fmt: skip
    return logits(sum_T11[:, 0, 0], batch), (state,)


def logits(sum_T: torch.Tensor, batch: Any) -> torch.Tensor:
    """(R, Q, VOCAB), highest at each sum."""
    token_T = sum_T.round().long() % VOCAB
    ids_V = torch.arange(VOCAB, device=sum_T.device)
    return -(ids_V - token_T[batch.logits_indices][..., None]).abs().float()


def text_of(prompt: tuple[int, ...], max_new: int) -> tuple[int, ...]:
    """What a request must get."""
    number, text = NUMBERS, list(prompt)
    total = sum(number[token][place] for place, token in enumerate(text))
    for place in range(len(prompt), len(prompt) + max_new):
        text.append(total % VOCAB)
        total += number[text[-1]][place]
    return tuple(text[len(prompt) :])


def asked(draw: random.Random, count: int) -> list[tuple[tuple[int, ...], int]]:
    """All requests; many prompts begin alike."""
    tokens = lambda n: tuple(draw.choices(range(VOCAB), k=n))  # noqa: E731
    heads = [(), (), *(tokens(n) for n in (8, 16, 19))]
    return [
        (draw.choice(heads) + tokens(draw.randint(1, 8)), draw.randint(6, 20)) for _ in range(count)
    ]


class Inbox:
    """Bursts of requests, and a cancel now and then, at times of one that has ended."""

    def __init__(self, requests: list[tuple[tuple[int, ...], int]], policy: Policy) -> None:
        self.requests, self.policy = requests, policy
        self.draw, self.cancelled = random.Random(7), set()

    def __call__(self, state: State) -> State:
        first, draw = state.submitted, self.draw
        if len(state.running) < 8 and not state.waiting:
            for request in self.requests[first : first + 125]:
                state = submit(state, self.policy, *request)
        if draw.random() < 0.3:
            id = draw.randrange(state.submitted - 125, state.submitted)
            after = cancel(state, id)
            self.cancelled |= {id} if after is not state else set()
            state = after
        return state


def most_held(
    requests: list[tuple[tuple[int, ...], int]], texts: list[tuple[int, ...]], policy: Policy
) -> int:
    """Blocks that are in use at once where there are enough."""
    state, inbox, most = start(1000, policy), Inbox(requests, policy), 0
    while (state := inbox(state)).live:
        state = plan(state, policy)
        most = max(most, 1000 - len(state.pool.free))
        drawn = []
        for job, _, drafts in state.rows:
            at = len(job.tokens) - len(job.request.prompt)
            drawn.append([*texts[job.id][at : at + 1 + len(drafts)], *[0] * len(drafts)])
        state, _ = advance(state, drawn)
    return most


def run(count: int, policy: Policy, forward: Any, cache: Any, *more: str, **options: Any) -> Tally:
    """Serve so many requests; all that was promised of it is asserted.

    Args:
        cache: number of blocks -> an empty cache.
    """
    requests = asked(random.Random(7), count)
    texts = [text_of(*request) for request in requests]
    num_blocks = most_held(requests[:1000], texts, policy) * 8 // 10
    cache = cache(num_blocks)
    device = cache[0].device
    params = torch.tensor(NUMBERS, dtype=torch.float32, device=device)
    steps = make_steps(forward, params, cache, policy, *more, **options)
    tally, inbox = Tally(), Inbox(requests, policy)
    thrown, events, running = 0, [], set()
    for one in tally.watch(serve(steps, cache, start(num_blocks, policy), policy, inbox)):
        state = one.state
        events += one.events
        thrown += len(running & {job.id for job in state.waiting})
        running = {job.id for job in state.running}

    print(tally.as_text(), thrown, len(inbox.cancelled), num_blocks)
    got, ended = gather(events), [event.id for event in events if event.end]
    assert len(ended) == len(set(ended)) and not set(ended) & inbox.cancelled
    assert set(ended) | inbox.cancelled == set(range(count))
    for id, text in enumerate(texts):
        new = got.get(id, ())
        assert new == (text[: len(new)] if id in inbox.cancelled else text)
    assert sorted(state.pool.free.tolist()) == list(range(num_blocks))
    assert bool(state.pool.named) == policy.share and not state.pool.holders
    assert sorted(state.slots) == list(range(policy.num_slots))
    assert thrown > count // 100 and len(inbox.cancelled) > count // 33
    return tally


@pytest.mark.sampled(0)
@pytest.mark.parametrize("device, recorder", DEVICES)
def test_ten_thousand_requests(device, recorder):
    policy = Policy(192, 64, 6, SIZE, query_lens=(1, 3), ngram=1, reserve=0)
    cache = lambda n: tuple(torch.zeros(n, SIZE, 1, 1, device=device) for _ in range(2))  # noqa: E731
    tally = run(
        10_000, policy, forward, cache, modes="FULL_AND_PIECEWISE", recorder=recorder,
        sizes=(8, 32, 64, 128, 192),
    )  # fmt: skip
    assert tally.kinds == {"prefill", "mixed", "verify", "decode"}
    assert tally.share("FULL") + tally.share("PIECEWISE") == 1


@pytest.mark.sampled(0)
@pytest.mark.parametrize("device, recorder", DEVICES)
def test_recurrent_states_start_over(device, recorder):
    """The sum is a state in a slot here; a request that was thrown out starts from nothing."""
    policy = Policy(96, 16, 6, SIZE, share=False, num_slots=16, reserve=0)
    cache = lambda n: (torch.full((16, 1, 1, 1), torch.nan, device=device),)  # noqa: E731
    tally = run(
        600, policy, recurrent, cache, "states", modes="FULL_AND_PIECEWISE", recorder=recorder,
        sizes=(8, 16, 64, 96),
    )  # fmt: skip
    assert tally.kinds == {"prefill", "mixed", "decode"}
