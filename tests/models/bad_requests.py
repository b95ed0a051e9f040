"""Requests through the loop, bad ones among them, each held to what it gets alone.

    python -m tests.models.bad_requests [--count 2000]

serves so many on a captured Llama; `test_bad_requests.py` fewer. Good ones ask for all that there
is to ask for, some have too little time, some go on from texts of others. Token 77 has an embedding
of NaN, slot 2 an adapter that is not finite; what else may be wrong with a request is in BAD.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import random
import re
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch

from fngraph.models import (
    Event,
    Policy,
    Settings,
    State,
    Tally,
    bare_steps,
    cancel,
    llama,
    lora,
    make_steps,
    serve,
    start,
    stream,
    submit,
)
from tests.models.conftest import wide_params

CONFIG = llama.Config(
    vocab_size=256, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, dim=24, mlp_dim=32,
    max_len=40,
)  # fmt: skip
POLICY = Policy(48, 12, 6, block_size=8, query_lens=(1, 3), ngram=1, reserve=0)
BLOCKS, SLOTS, NAN_TOKEN, NAN_SLOT = 20, 3, 77, 2
BARRED = Settings(logit_bias=tuple((token, -math.inf) for token in range(60, 64)))


def even(new: tuple[int, ...]) -> range:
    """A grammar."""
    return range(0, 256, 2)


def turns(new: tuple[int, ...]) -> np.ndarray:
    """One that goes by what was said."""
    return np.arange(256) % 3 != sum(new) % 3


def two_at_most(new: tuple[int, ...]) -> list[int] | None:
    """One that allows nothing in the end."""
    return [] if len(new) == 2 else None


def sixties(new: tuple[int, ...]) -> range:
    """What BARRED bars."""
    return range(60, 64)


def breaks(new: tuple[int, ...]) -> list[int]:
    """One that cannot be asked twice."""
    return {0: [7, 8, 9]}[len(new)]


def decode(tokens: Any) -> str:
    """Letters."""
    return "".join(chr(ord("a") + token % 26) for token in tokens)


# what -> what is asked, and the reason that is given; those of AT_ONCE at submit
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a token below": ({"prompt": [3, -1]}, r"prompt\[1\]=-1 is no token"),
    "a token between": ({"prompt": [3, 1.9]}, r"prompt\[1\]=1\.9 is a float"),
    "no prompt": ({"prompt": []}, "needs a prompt token"),
    "part of a token": ({"max_new": 2.5}, r"max_new=2\.5 is a float"),
    "too long": ({"max_new": 99}, "a request may have 6"),
    "a token beyond": ({"prompt": [5, 256]}, r"prompt\[1\]=256, but .* below 256"),
    "one far beyond": ({"prompt": [2**31 - 1, 5]}, r"prompt\[0\]=2147483647"),
    "no slot": ({"adapter": SLOTS}, "adapter=3, but these steps have 3 slots"),
    "a position beyond": ({"prompt": [4] * 33, "max_new": 9}, "beyond the model's 40 positions"),
    "an adapter of NaN": ({"adapter": NAN_SLOT}, "no token is the likeliest"),
    "a token of NaN": ({"prompt": [9, NAN_TOKEN, 9]}, "no token is the likeliest"),
    "a grammar of nothing": ({"grammar": two_at_most, "max_new": 3}, "allows no token after 2 new"),
    "a grammar that fails": ({"grammar": breaks, "max_new": 3}, "its grammar raised KeyError: 1"),
    "logprobs": ({"logprobs": 99}, "logprobs=99, beyond 20"),
    "all tokens barred": ({"settings": BARRED, "grammar": sixties}, "no token is the likeliest"),
}
AT_ONCE = list(BAD)[:5]
AFTER = {"a grammar of nothing": 2, "a grammar that fails": 1}
"""New tokens up to which a request is like any other, and may end by its stops."""
GRAMMARS = (None, None, None, None, even, turns)
STOPS: tuple[tuple[Any, ...], ...] = ((), (), (), ("e", "ab"), ("q", (4, 5)), (7, 11, 13, "zz"))
CHANGES = (
    {}, {}, {}, {"repetition_penalty": 1.4}, {"frequency_penalty": 0.8, "presence_penalty": -0.3},
    {"logit_bias": ((5, 4.0), (9, -math.inf))},
)  # fmt: skip


class Asked(NamedTuple):
    """A request, and what is bad about it; None: nothing."""

    prompt: tuple[Any, ...]
    max_new: Any
    adapter: int
    settings: Settings
    bad: str | None
    stop: tuple[Any, ...] = ()
    min_tokens: int = 0
    grammar: Any = None
    logprobs: int | None = None
    n: int = 1
    priority: int = 0
    steps: float = math.inf  # that it has time for

    def submit(self, state: State, now: float = 0.0) -> State:
        """The state with it."""
        own = self._asdict()
        del own["bad"], own["steps"], own["prompt"], own["max_new"]
        return submit(
            state,
            POLICY,
            self.prompt,
            self.max_new,
            decode=decode,
            deadline=now + self.steps,
            **own,
        )

    def each(self) -> list[Asked]:
        """Its texts as requests of their own."""
        settings = self.settings
        return [
            self._replace(n=1, settings=settings._replace(seed=(settings.seed or 0) + i))
            for i in range(self.n)
        ]


@functools.cache
def model() -> tuple[llama.Params, Any]:
    """Weights and slots: two adapters that are good, and one that is not finite in one number."""
    params = wide_params(CONFIG)
    params = dataclasses.replace(params, embed=params.embed.clone())
    params.embed[NAN_TOKEN] = torch.nan
    slots, generator = lora.slots(params, count=SLOTS, rank=2), torch.Generator().manual_seed(5)
    for pair in (pair for own in slots for pair in own.values()):
        for x in (pair.a, pair.b):
            x.normal_(0, 0.3, generator=generator)
    slots[0]["attn.wo"].b[NAN_SLOT, 1, 7] = torch.inf
    return params, slots


def draw(count: int, kinds: int, seed: int = 0) -> list[Asked]:
    """So many requests, the good ones of so many kinds; a fifth is bad."""
    rng = random.Random(seed)
    heads = [tuple(rng.choices(range(1, 60), k=n)) for n in (0, 0, 8, 17)]
    good = []
    for i in range(kinds):
        changes: Any = rng.choice(CHANGES)
        max_new = rng.randint(3, 12)
        one = Asked(
            rng.choice(heads) + tuple(rng.choices(range(1, 60), k=rng.randint(1, 6))),
            max_new, rng.choice([-1, -1, 0, 1]),
            Settings(0.8, top_p=0.9, seed=i, **changes) if rng.random() < 0.4
            else Settings(**changes),
            None, rng.choice(STOPS), rng.choice([0, 0, 2]), rng.choice(GRAMMARS),
            rng.choice([None, None, 0, 3]), rng.choice([1, 1, 1, 2, 3]),
        )  # fmt: skip
        good.append(one)
        again = (*one.prompt, *alone(one.each()[0])[0], 7)  # a second turn
        if i % 3 == 0 and len(again) < 30:
            good.append(one._replace(prompt=again, max_new=5, stop=()))
    asked, bads = [], itertools.cycle(rng.sample(list(BAD), len(BAD)))
    for _ in range(count):
        one = rng.choice(good)
        steps = rng.randint(1, 14) if rng.random() < 0.15 else math.inf
        one = one._replace(priority=rng.choice([0, 0, 0, 1, -1]), steps=steps)
        if rng.random() < 0.2:
            bad = next(bads)
            wrong = {n: tuple(x) if isinstance(x, list) else x for n, x in BAD[bad][0].items()}
            one = one._replace(**wrong, bad=bad)
        asked.append(one)
    return asked


def alone(one: Asked) -> Got:
    """What a request gets by itself, by bare `forward`, with all the time that there is."""
    return _alone(one._replace(priority=0, steps=math.inf, bad=None))


@functools.cache
def _alone(one: Asked) -> Got:
    params, slots = model()
    steps = bare_steps(llama.forward, params, POLICY, "sampling", "logits", adapters=slots)
    cache = llama.init_cache(CONFIG, 6, block_size=POLICY.block_size)
    return got(list(stream(serve(steps, cache, one.submit(start(6, POLICY)), POLICY))))


class Got(NamedTuple):
    """All that a request got."""

    tokens: tuple[int, ...]
    text: str
    end: str | None
    logprobs: tuple[Any, ...]


def got(events: list[Event]) -> Got:
    """Of its events, of which the last alone may have an end."""
    assert not any(event.end for event in events[:-1])
    return Got(
        tuple(token for event in events for token in event.tokens),
        "".join(event.text for event in events),
        events[-1].end if events else None,
        tuple(one for event in events for one in event.logprobs),
    )


class Inbox:
    """Bursts of requests; what is refused is kept with its reason; a cancel now and then."""

    def __init__(self, asked: list[Asked]) -> None:
        self.left, self.rng = list(reversed(asked)), random.Random(1)
        self.step = 0.0
        self.ids: dict[int, Asked] = {}
        self.refused: list[tuple[Asked, str]] = []
        self.cancelled: set[int] = set()

    def clock(self) -> float:
        """Steps so far."""
        return self.step

    def __call__(self, state: State) -> State:
        self.step += 1
        while self.left and (len(state.waiting) < 9 or not state.live):
            one = self.left.pop()
            try:
                after = one.submit(state, self.step)
            except (TypeError, ValueError) as error:
                self.refused.append((one, str(error)))
                continue
            self.ids |= dict(zip(range(state.submitted, after.submitted), one.each()))
            state = after
        if self.rng.random() < 0.1 and self.ids:
            id = self.rng.choice(list(self.ids)[-30:])
            after = cancel(state, id)
            self.cancelled |= {id} if after is not state else set()
            state = after
        return state


def hold(count: int, kinds: int, modes: str = "FULL_AND_PIECEWISE") -> Counter[str]:
    """Serve them, and assert all that is promised; how many ended how.

    Raises:
        AssertionError: a text that is another one than alone, a reason that is not the one, a
            request that is lost or ends twice, blocks that are held in the end.
    """
    params, slots = model()
    cache = llama.init_cache(CONFIG, BLOCKS, block_size=POLICY.block_size)
    steps = make_steps(
        llama.forward, params, cache, POLICY, "sampling", "logits", modes=modes, adapters=slots,
        sizes=(12, 48), recorder="tape", progress=False,
    )  # fmt: skip
    asked, tally = draw(count, kinds), Tally()
    inbox, events, thrown = Inbox(asked), [], 0
    running: set[int] = set()
    for served in tally.watch(
        serve(steps, cache, start(BLOCKS, POLICY), POLICY, inbox, inbox.clock)
    ):
        events += served.events
        thrown += len(running & {job.id for job in served.state.waiting})
        running = {job.id for job in served.state.running}
    assert not inbox.left and len(set(served.state.pool.free.tolist())) == BLOCKS
    assert not served.state.pool.holders
    refused = {id(one) for one, _ in inbox.refused}
    assert len(inbox.ids) == sum(one.n for one in asked if id(one) not in refused)
    for one, reason in inbox.refused:
        assert one.bad in AT_ONCE and re.search(BAD[one.bad][1], reason), (one, reason)
    by_id: dict[int, list[Event]] = {number: [] for number in inbox.ids}
    for event in events:
        by_id[event.id].append(event)
    counts = Counter(refused=len(inbox.refused), thrown=thrown, reused=tally.total("reused"))
    for number, one in inbox.ids.items():
        here, want = got(by_id[number]), alone(one)
        assert len(here.logprobs) == (0 if one.logprobs is None else len(here.tokens)), one
        if number in inbox.cancelled or here.end == "time":
            assert here.end is None or one.steps < math.inf
            assert here.tokens == want.tokens[: len(here.tokens)], (number, one, here, want)
            assert (want.text if here.tokens == want.tokens else decode(here.tokens)).startswith(
                here.text
            )
            counts["cancelled" if here.end is None else "time"] += 1
            continue
        assert here[:3] == want[:3], (number, one, here, want)
        for mine, theirs in zip(here.logprobs, want.logprobs, strict=True):
            assert abs(mine.logprob - theirs.logprob) < 1e-3 and len(mine.top) == one.logprobs
        if one.bad is None or (here.end == "stop" and len(here.tokens) <= AFTER.get(one.bad, 0)):
            counts[here.end] += 1
        else:
            assert one.bad not in AT_ONCE
            assert here.end.startswith("failed: ") and re.search(BAD[one.bad][1], here.end), (
                one,
                here,
            )
            counts["bad"] += 1
    return counts


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.bad_requests")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--kinds", type=int, default=150)
    flags = parser.parse_args(argv)
    torch.set_num_threads(1)
    with torch.no_grad():
        print(dict(hold(flags.count, flags.kinds)))


if __name__ == "__main__":
    main()
