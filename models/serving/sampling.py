"""Tokens from logits, inside the graph: greedy, temperature, top-k, top-p, min-p.

The token drawn depends on its row of logits, the request's settings and key, and the place of the
token in its text; not on the other rows, padding, the mode, or how often the step is repeated.
Two things make that exact. Random numbers are a function of (key, place), and probabilities are
added up as integers, which no order of adding changes.

Where no token is the likeliest, since logits are NaN, infinite, or -inf for all tokens, there is
none to draw: FAILED is, greedy or not.

Shape letters: R requests, Q tokens drawn for each, V vocab.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import fngraph as fg

HOT = 1e38  # the highest temperature: from 3.5e38 on it is inf in float32, and -inf over it NaN
COLD = 1e-5  # a temperature below it is greedy: logits over it would leave float32
FAILED = -1  # in place of a token
UNDRAWN = -2  # the same, behind the last one that was drawn
WEIGHT_BITS = 34  # of the likeliest token: sums over 2**18 tokens are exact in a float64 too


@fg.core.text.with_suggestions
class Settings(NamedTuple):
    """How one request wants its tokens drawn.

    Attributes:
        temperature: logits are divided by it; below 1e-5: greedy, whatever else is said.
        top_k: only the k likeliest tokens; 0: all.
        top_p: of these, the fewest likeliest that have at least this share of their probability.
        min_p: only tokens at least this often as likely as the likeliest.
        seed: any int; equal seeds give equal numbers. None: the request's own, its number.
        repetition_penalty: logits of tokens of the prompt and the text so far are divided by it
            where they are above 0, else multiplied; 1: none.
        presence_penalty: taken from the logits of tokens of the text so far.
        frequency_penalty: the same, as often as they are there.
        logit_bias: token -> what is added to its logit, -inf: it is never drawn; or pairs.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()

    @property
    def changes_logits(self) -> bool:
        """Whether it asks for more than a draw."""
        return self[5:8] != (1.0, 0.0, 0.0) or self.logit_bias is None or len(self.logit_bias) > 0

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` as a dict."""
        return dict(self.logit_bias)


@fg.struct
class Sampling:
    """The settings of a step's requests; rows of padding are greedy."""

    keys: Tensor = fg.buffer("R", "int64", pad=0)  # `key_of` the seed
    temperature: Tensor = fg.buffer("R", "float32", pad=0)
    top_k: Tensor = fg.buffer("R", "int32", pad=0)
    top_p: Tensor = fg.buffer("R", "float32", pad=1)
    min_p: Tensor = fg.buffer("R", "float32", pad=0)


def check_settings(settings: Settings, subject: str = "") -> None:
    """Raise `ValueError` for a setting out of its range, `TypeError` for one that is no number."""
    temperature, top_k, top_p, min_p, seed = settings[:5]
    for name, number in zip(Settings._fields, settings[:8]):
        if not isinstance(number, numbers.Real) and not (name == "seed" and number is None):
            raise TypeError(f"{subject}{name}={number!r} is a {type(number).__name__}, no number")
    ranges = 0 <= temperature <= HOT and 0 <= top_k < 2**31 and 0 < top_p <= 1 and 0 <= min_p <= 1
    if not (
        ranges and isinstance(top_k, numbers.Integral) and isinstance(seed, numbers.Integral | None)
    ):
        raise ValueError(
            f"{subject}{settings} needs 0 <= temperature <= 1e38, top_k >= 0, 0 < top_p <= 1 and "
            "0 <= min_p <= 1, top_k and seed whole numbers; Settings() is greedy, Settings(1.0) "
            "draws from all tokens"
        )
    if settings.changes_logits:
        _check_changes(settings, subject)


def _check_changes(settings: Settings, subject: str) -> None:
    repeated, *taken = settings[5:8]
    if not 1e-6 <= repeated <= 1e6:
        raise ValueError(
            f"{subject}repetition_penalty={repeated!r} is not between 1e-6 and 1e6; 1.0 is none"
        )
    for name, penalty in zip(Settings._fields[6:], taken):
        if not abs(penalty) <= 1e6:
            raise ValueError(f"{subject}{name}={penalty!r} is not within 1e6 of 0; 0.0 is none")
    try:
        biases = settings.biases
    except (TypeError, ValueError):
        raise ValueError(
            f"{subject}logit_bias={settings.logit_bias!r}: pass a dict, {{token: 2.0}}"
        ) from None
    for token, value in biases.items():
        number = isinstance(token, numbers.Integral) and isinstance(value, numbers.Real)
        if not (
            number and 0 <= token < 2**31 and (abs(value) <= HOT or value == -math.inf)
        ):  # nor NaN
            raise ValueError(
                f"{subject}logit_bias has {token!r}: {value!r}. Pass tokens, counted from 0, and "
                "what is added to their logits, up to 1e38 or -inf"
            )


def stack(settings: Sequence[Settings]) -> Sampling:
    """The leaves of so many requests, in host memory; one without a seed has its place in the list.

    Raises:
        ValueError: a setting out of its range, with the request's number.
    """
    for i, one in enumerate(settings):
        check_settings(one, f"request {i}: ")
    temperature, top_k, top_p, min_p, seeds = zip(*(one[:5] for one in settings))
    return Sampling(
        keys=torch.tensor([key_of(i if seed is None else seed) for i, seed in enumerate(seeds)]),
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p, dtype=torch.float32),
        min_p=torch.tensor(min_p, dtype=torch.float32),
    )


def sample(logits: Tensor, sampling: Sampling, places: Tensor, *, greedy: bool = False) -> Tensor:
    """The next token of each row; of equal logits, the lowest id counts as the likeliest.

    All three filters keep the first so many of the tokens by falling probability, so one sort
    serves them, and the token is found on the running sum by bisection.

    Args:
        logits: (R, V) or (R, Q, V); -inf: never drawn.
        sampling: leaves (R,).
        places: (R,) or (R, Q) int64, the place in its text of the token that is drawn.
        greedy: no request of any batch draws: argmax, and `sampling` is not read.

    Returns:
        ids, int64, of the shape of `places`; FAILED where no logit is the highest of numbers.
    """
    if greedy:
        return likeliest(logits)
    vocab, ones = logits.shape[-1], (1,) * (logits.dim() - 1)
    keys, heat, top_k, top_p, min_p = (
        x.view(-1, *ones)
        for x in (sampling.keys, sampling.temperature, sampling.top_k, sampling.top_p,
                  sampling.min_p)
    )  # fmt: skip
    cold = heat < COLD
    ranked, ids = torch.sort(logits, dim=-1, descending=True, stable=True)  # NaN comes first
    bad = no_number(ranked[..., 0])
    ranked = ranked.to(torch.promote_types(logits.dtype, torch.float32))
    gains = (ranked - ranked[..., :1]) / heat.masked_fill(cold, 1)  # log of how often of the first
    weights = (gains.exp() * 2.0**WEIGHT_BITS).long()
    sums = weights.cumsum(-1)

    # each index is one that there is, of rows without numbers too
    last = top_k.long().clamp(max=vocab).sub(1).remainder(vocab)
    last = last.expand(ids[..., :1].shape)  # the rank of the last token that is kept
    share = sums.gather(-1, last).double() * top_p
    last = torch.minimum(last, torch.searchsorted(sums, share.long()))
    often_enough = (gains[..., 1:] >= min_p.log()).sum(-1, keepdim=True)  # beside the first
    last = torch.minimum(last, often_enough).masked_fill(cold, 0)

    share = uniform(keys, places.unsqueeze(-1)) * sums.gather(-1, last)
    rank = torch.searchsorted(sums, share.long(), right=True)
    drawn = ids.gather(-1, torch.minimum(rank, last)).squeeze(-1)
    return drawn.masked_fill(bad, FAILED)


def likeliest(logits: Tensor) -> Tensor:
    """The greedy token of each row, the first of equal ones; FAILED where there is none."""
    top, best = logits.max(-1)  # NaN where there is one
    return best.masked_fill(no_number(top), FAILED)


def no_number(x: Tensor) -> Tensor:
    """Where it is NaN or infinite: there it is not 0 away from itself."""
    return (x - x).ne(0)


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Numbers in [0, 1), float64 of 32 random bits, by key and counter (int64, broadcast).

    Source: Widynski, Squares: A Fast Counter-Based RNG, 2020 (arXiv:2004.06278), four rounds.
    Products wrap at 64 bits; signs do not matter to the bits.
    """
    y = counters * keys
    z = y + keys
    x = y
    for add in (y, z, y):
        x = torch.addcmul(add, x, x)
        # its halves swapped; as int32 and flipped it is one kernel, which Inductor of 2.11 refuses
        x = torch.add((x >> 32) & 0xFFFFFFFF, x, alpha=1 << 32)
    high = (torch.addcmul(z, x, x) >> 32) & 0xFFFFFFFF  # a shift that leaves the sign behind
    return high.double() * 2.0**-32


def key_of(seed: int) -> int:
    """An odd key of irregular bits, as Squares needs, from any int; as a signed 64-bit int.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    word = (int(seed) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64  # 0 would stay 0
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    word = (word ^ word >> 31) | 1
    return word - 2**64 if word >= 2**63 else word
