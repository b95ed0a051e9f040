"""Requests through the loop, bad ones among them, each held to what it gets alone.

    python -m tests.models.bad_requests [--count 2000]

serves so many on a captured Llama; `test_bad_requests.py` fewer. Token 77 has an embedding of NaN,
slot 2 an adapter that is not finite, and whatever else may be wrong with a request is in BAD.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import re
from collections import Counter
from typing import Any, NamedTuple

import torch

from fngraph.models import (
    Event,
    Policy,
    Settings,
    State,
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
}
AT_ONCE = list(BAD)[:5]


class Asked(NamedTuple):
    """A request, and what is bad about it; None: nothing."""

    prompt: tuple[Any, ...]
    max_new: Any
    adapter: int
    settings: Settings
    bad: str | None

    def submit(self, state: State) -> State:
        """The state with it."""
        return submit(
            state, POLICY, self.prompt, self.max_new, adapter=self.adapter, settings=self.settings
        )


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
    good = [
        Asked(
            rng.choice(heads) + tuple(rng.choices(range(1, 60), k=rng.randint(1, 6))),
            rng.randint(3, 12), rng.choice([-1, -1, 0, 1]),
            Settings(0.8, top_p=0.9, seed=i) if rng.random() < 0.4 else Settings(), None,
        )
        for i in range(kinds)
    ]  # fmt: skip
    asked = []
    for _ in range(count):
        one = rng.choice(good)
        if rng.random() < 0.2:
            bad = rng.choice(list(BAD))
            one = one._replace(**BAD[bad][0], bad=bad)
        asked.append(one)
    return asked


@functools.cache
def alone(one: Asked) -> tuple[tuple[int, ...], str | None]:
    """The text of a request by itself, by bare `forward`, and why it ended."""
    params, slots = model()
    steps = bare_steps(llama.forward, params, POLICY, "sampling", adapters=slots)
    cache = llama.init_cache(CONFIG, 6, block_size=POLICY.block_size)
    events = list(stream(serve(steps, cache, one.submit(start(6, POLICY)), POLICY)))
    return tuple(token for event in events for token in event.tokens), events[-1].end


class Inbox:
    """Bursts of requests; what is refused is kept with its reason; a cancel now and then."""

    def __init__(self, asked: list[Asked]) -> None:
        self.left, self.rng = list(reversed(asked)), random.Random(1)
        self.ids: dict[int, Asked] = {}
        self.refused: list[tuple[Asked, str]] = []
        self.cancelled: set[int] = set()

    def __call__(self, state: State) -> State:
        while self.left and (len(state.waiting) < 9 or not state.live):
            one = self.left.pop()
            try:
                after = one.submit(state)
            except (TypeError, ValueError) as error:
                self.refused.append((one, str(error)))
                continue
            self.ids[state.submitted], state = one, after
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
            request that is lost or ends twice, blocks that are kept.
    """
    params, slots = model()
    cache = llama.init_cache(CONFIG, BLOCKS, block_size=POLICY.block_size)
    steps = make_steps(
        llama.forward, params, cache, POLICY, "sampling", modes=modes, adapters=slots,
        sizes=(12, 48), recorder="tape", progress=False,
    )  # fmt: skip
    inbox, events, thrown = Inbox(draw(count, kinds)), [], 0
    running: set[int] = set()
    for served in serve(steps, cache, start(BLOCKS, POLICY), POLICY, inbox):
        events += served.events
        thrown += len(running & {job.id for job in served.state.waiting})
        running = {job.id for job in served.state.running}
    assert not inbox.left and len(served.state.pool.free) == BLOCKS
    assert not served.state.pool.holders
    assert len(inbox.ids) + len(inbox.refused) == count
    for one, reason in inbox.refused:
        assert one.bad in AT_ONCE and re.search(BAD[one.bad][1], reason), (one, reason)
    by_id: dict[int, list[Event]] = {id: [] for id in inbox.ids}
    for event in events:
        by_id[event.id].append(event)
    counts = Counter(refused=len(inbox.refused), thrown=thrown)
    for id, one in inbox.ids.items():
        ends = [event.end for event in by_id[id] if event.end]
        text = tuple(token for event in by_id[id] for token in event.tokens)
        if id in inbox.cancelled:
            assert not ends
            if one.bad is None:
                assert text == alone(one)[0][: len(text)]
            counts["cancelled"] += 1
            continue
        assert len(ends) == 1 and by_id[id][-1].end, (one, by_id[id])
        if one.bad is None:
            assert (text, ends[0]) == alone(one), (id, one, text, ends, alone(one))
            counts[ends[0][:6]] += 1
        else:
            assert one.bad not in AT_ONCE and not text, (one, text)
            assert ends[0].startswith("failed: ") and re.search(BAD[one.bad][1], ends[0]), ends
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
