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
from models.policy import Policy
from models.requests import State, cancel, start, submit
from models.schedule import advance, plan
from models.serve import gather, serve
from models.steps import make_steps
from models.tally import Tally

COUNT, VOCAB, SIZE = 10_000, 11, 8
POLICY = Policy(192, 64, 6, SIZE, query_lens=(1, 3), ngram=1, cascade=SIZE, reserve=0)
DEVICES = [
    pytest.param("cpu", "tape", id="tape"),
    pytest.param("cuda", "cuda", id="cuda", marks=pytest.mark.gpu),
]


DRAW = random.Random(3)
NUMBERS = [[DRAW.randrange(16) for _ in range(48)] for _ in range(VOCAB)]  # by token and place


def forward(params: torch.Tensor, cache: Any, batch: Any) -> Any:
    """Logits that are highest at the sum of all numbers so far, modulo VOCAB."""
    value_T = params[batch.token_ids, batch.positions]
    value_T11, zero_T11 = value_T[:, None, None], torch.zeros_like(value_T)[:, None, None]
    mean_T11, cache = fg.ops.attention(zero_T11, zero_T11, value_T11, cache, batch)
    total_T = (mean_T11[:, 0, 0] * (batch.positions + 1)).round().long()
    ids_V = torch.arange(VOCAB, device=total_T.device)
    return -(ids_V - (total_T % VOCAB)[batch.logits_indices][..., None]).abs().float(), cache


def text_of(prompt: tuple[int, ...], max_new: int) -> tuple[int, ...]:
    """What a request must get."""
    number, text = NUMBERS, list(prompt)
    total = sum(number[token][place] for place, token in enumerate(text))
    for place in range(len(prompt), len(prompt) + max_new):
        text.append(total % VOCAB)
        total += number[text[-1]][place]
    return tuple(text[len(prompt) :])


def asked(draw: random.Random) -> list[tuple[tuple[int, ...], int]]:
    """All requests; many prompts begin alike."""
    tokens = lambda n: tuple(draw.choices(range(VOCAB), k=n))  # noqa: E731
    heads = [(), (), *(tokens(n) for n in (8, 16, 19))]
    return [
        (draw.choice(heads) + tokens(draw.randint(1, 8)), draw.randint(6, 20)) for _ in range(COUNT)
    ]


class Inbox:
    """Bursts of requests, and a cancel now and then, at times of one that has ended."""

    def __init__(self, requests: list[tuple[tuple[int, ...], int]]) -> None:
        self.requests, self.draw, self.cancelled = requests, random.Random(7), set()

    def __call__(self, state: State) -> State:
        first, draw = state.submitted, self.draw
        if len(state.running) < 8 and not state.waiting:
            for request in self.requests[first : first + 125]:
                state = submit(state, POLICY, *request)
        if draw.random() < 0.3:
            id = draw.randrange(state.submitted - 125, state.submitted)
            after = cancel(state, id)
            self.cancelled |= {id} if after is not state else set()
            state = after
        return state


def most_held(requests: list[tuple[tuple[int, ...], int]], texts: list[tuple[int, ...]]) -> int:
    """Blocks that are in use at once where there are enough."""
    state, inbox, most = start(1000, POLICY), Inbox(requests), 0
    while (state := inbox(state)).live:
        state = plan(state, POLICY)
        most = max(most, 1000 - len(state.pool.free))
        drawn = []
        for job, _, drafts in state.rows:
            at = len(job.tokens) - len(job.request.prompt)
            drawn.append([*texts[job.id][at : at + 1 + len(drafts)], *[0] * len(drafts)])
        state, _ = advance(state, drawn)
    return most


@pytest.mark.parametrize("device, recorder", DEVICES)
def test_ten_thousand_requests(device, recorder):
    requests = asked(random.Random(7))
    texts = [text_of(*request) for request in requests]
    num_blocks = most_held(requests[:1000], texts) * 8 // 10
    params = torch.tensor(NUMBERS, dtype=torch.float32, device=device)
    cache = tuple(torch.zeros(num_blocks, SIZE, 1, 1, device=device) for _ in range(2))
    steps = make_steps(
        forward, params, cache, POLICY, modes="FULL_AND_PIECEWISE", recorder=recorder,
        sizes=(8, 32, 64, 128, 192),
    )  # fmt: skip
    tally, inbox = Tally(), Inbox(requests)
    thrown, events, running = 0, [], set()
    for one in tally.watch(serve(steps, cache, start(num_blocks, POLICY), POLICY, inbox)):
        state = one.state
        events += one.events
        thrown += len(running & {job.id for job in state.waiting})
        running = {job.id for job in state.running}

    print(tally.as_text(), thrown, len(inbox.cancelled), num_blocks)
    got, ended = gather(events), [event.id for event in events if event.end]
    assert len(ended) == len(set(ended)) and not set(ended) & inbox.cancelled
    assert set(ended) | inbox.cancelled == set(range(COUNT))
    for id, text in enumerate(texts):
        new = got.get(id, ())
        assert new == (text[: len(new)] if id in inbox.cancelled else text)
    assert sorted(state.pool.free.tolist()) == list(range(num_blocks))
    assert not state.pool.named and not state.pool.names and not state.pool.holders
    assert thrown > 100 and len(inbox.cancelled) > 300
    assert tally.kinds >= {"prefill", "mixed", "verify"}
