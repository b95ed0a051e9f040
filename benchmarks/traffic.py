"""Request streams as values: stream(PROFILES["chat"], 200, vocab_size=..., seed=0).

The same arguments give the same requests on any machine. Lengths are log-normal, gaps between
arrivals exponential, and of system prompts and adapters the first ones are the most popular; the
figures of the profiles are round ones of our own, not measured on anybody's users.

    python -m benchmarks traffic --profile chat     prints a stream's figures
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import fngraph as fg
from benchmarks.harness import Benchmark, Flags, count


class Lengths(NamedTuple):
    """Log-normal whole numbers: half of them below `median`, none above `most`.

    Attributes:
        spread: standard deviation of the logarithm; 0: all are `median`.
    """

    median: int
    spread: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """One of them, at least 1."""
        drawn = self.median * math.exp(self.spread * rng.gauss(0, 1))
        return min(self.most, max(1, round(drawn)))


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """What a stream looks like.

    Attributes:
        rate: requests a second, on average.
        prompt: tokens, without the system prompt.
        output: tokens.
        burst: requests that come at once, on average.
        systems: tokens of each system prompt, one of which each request begins with.
        adapters: how many there are.
        adapted: the share of requests that use one.
        sampled: the share of requests that are drawn at temperature 0.8, top_p 0.95.
    """

    rate: float
    prompt: Lengths
    output: Lengths
    burst: int = 1
    systems: tuple[int, ...] = ()
    adapters: int = 0
    adapted: float = 0.0
    sampled: float = 0.0

    @property
    def longest(self) -> int:
        """Tokens of the longest request that there can be."""
        return max(self.systems, default=0) + self.prompt.most + self.output.most


PROFILES = {
    "chat": Profile(50, Lengths(96, 1.0, 1024), Lengths(128, 0.7, 384), systems=(256, 64, 512)),
    "long": Profile(4, Lengths(3000, 0.6, 8192), Lengths(64, 0.5, 160)),
    "burst": Profile(50, Lengths(64, 0.8, 512), Lengths(64, 0.7, 192), burst=24),
}


class Arrival(NamedTuple):
    """A request of a stream.

    Attributes:
        at: seconds since the stream began.
        system: number of its system prompt; -1: none.
        adapter: its number; -1: none.
        seed: of its draws; None: greedy.
    """

    at: float
    prompt: tuple[int, ...]
    max_new: int
    system: int = -1
    adapter: int = -1
    seed: int | None = None


def stream(profile: Profile, count: int, *, vocab_size: int, seed: int = 0) -> tuple[Arrival, ...]:
    """So many requests, in the order in which they come."""
    rng = random.Random(seed)
    tokens = lambda n: tuple(rng.randrange(vocab_size) for _ in range(n))  # noqa: E731
    systems = [tokens(n) for n in profile.systems]
    arrivals: list[Arrival] = []
    at = 0.0
    while len(arrivals) < count:
        together = rng.randint(1, 2 * profile.burst - 1)
        at += rng.expovariate(profile.rate / profile.burst)
        for _ in range(min(together, count - len(arrivals))):
            system = popular(len(systems), rng)
            head = systems[system] if systems else ()
            prompt = head + tokens(profile.prompt.draw(rng))
            max_new = profile.output.draw(rng)
            chances, own = (rng.random(), rng.random()), rng.randrange(2**32)
            adapter = popular(profile.adapters, rng) if chances[0] < profile.adapted else -1
            drawn = own if chances[1] < profile.sampled else None
            arrivals.append(Arrival(at, prompt, max_new, system, adapter, drawn))
    return tuple(arrivals)


def popular(count: int, rng: random.Random) -> int:
    """A number below `count`, number i 1 / (i + 1) times as often as the first; -1 of none."""
    if not count:
        return -1
    return rng.choices(range(count), [1 / (i + 1) for i in range(count)])[0]


def as_text(arrivals: Sequence[Arrival]) -> str:
    """A Markdown table of what is in a stream."""
    rows: list[tuple[str, object]] = [
        ("requests", len(arrivals)),
        ("seconds", f"{arrivals[-1].at:.2f}"),
        ("bursts", len({a.at for a in arrivals})),
        ("prompt tokens, p50 / p99 / most", _quantiles([len(a.prompt) for a in arrivals])),
        ("output tokens, p50 / p99 / most", _quantiles([a.max_new for a in arrivals])),
        ("tokens in all, prompt + output",
         f"{sum(len(a.prompt) for a in arrivals)} + {sum(a.max_new for a in arrivals)}"),
        ("system prompts", len({a.system for a in arrivals} - {-1})),
        ("with an adapter", sum(a.adapter >= 0 for a in arrivals)),
        ("sampled", sum(a.seed is not None for a in arrivals)),
    ]  # fmt: skip
    return fg.core.text.table(("stream", ""), rows)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least the share `q` of them does not exceed."""
    at_least = math.ceil(round(q * len(values), 9))  # 0.07 * 100 is a little more than 7
    return sorted(values)[max(0, at_least - 1)]


def _quantiles(values: Sequence[int]) -> str:
    return " / ".join(str(x) for x in (quantile(values, 0.5), quantile(values, 0.99), max(values)))


STREAM: Flags = {
    "--profile": {"choices": list(PROFILES), "default": "chat"},
    "--seed": count(0, least=0),
}


@Benchmark(STREAM | {"--requests": count(200)}, quick={"requests": 20})
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """A stream's figures are shown, its requests kept."""
    profile = PROFILES[flags.profile]
    arrivals = stream(profile, flags.requests, vocab_size=1000, seed=flags.seed)
    print(profile, as_text(arrivals), sep="\n\n")
    return [one._asdict() for one in arrivals]
