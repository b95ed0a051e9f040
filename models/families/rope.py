"""Rotary embedding: angles by position, and the ways of stretching them to long contexts.

Two of these, `Dynamic` and `LongRope`, go by how long a text is. Here a token goes by the text up
to itself, which is its position, so that its key in the cache stays right whatever comes after it,
in whatever chunks it came. transformers goes by the longest text of a call, for all of its tokens.
The two are equal up to `unscaled(scaling)` tokens, and from there on where a prompt has no more
than that and what follows comes token by token over a cache; a longer prompt is refused by the loop
of `fngraph.models.serving`.

Shape letters: T tokens, H heads, D rotated columns of a head, a pair of which turns together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor


class Turn(NamedTuple):
    """By what pairs (i, i + D/2) turn.

    Attributes:
        cos: (T, 1, D), each cosine for both of a pair.
        sin: (T, 1, D), each sine negated for the first of a pair, and as it is for the second.
    """

    cos: Tensor
    sin: Tensor


class Llama3(NamedTuple):
    """Pairs that turn seldom over the trained context turn `factor` times slower.

    Attributes:
        low: up to so many turns a pair is slowed down in full; from
        high: turns on not at all; in between, in proportion.
        trained: tokens of the context that the model was trained on at first.

    Source: Llama 3.1's `rope_type: llama3`.
    """

    factor: float
    low: float
    high: float
    trained: int


class Yarn(NamedTuple):
    """YaRN: as `Llama3`, in proportion to a pair's number; attention gets sharper too.

    Attributes:
        fast, slow: turns over the trained context, above and below which the proportion ends.
        trained: tokens of the context that the model was trained on at first.
        amplitude: of cosines and sines.
        sharper: of the scores, where a model asks for it (DeepSeek-V2).
        whole: whether the ends are rounded to whole pairs.

    Source: Peng et al., "YaRN", 2023, section 3; the mscales are DeepSeek-V2's.
    """

    factor: float
    fast: float
    slow: float
    trained: int
    amplitude: float = 1.0
    sharper: float = 1.0
    whole: bool = True


class Linear(NamedTuple):
    """Every pair turns `factor` times slower.

    Source: Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation", 2023.
    """

    factor: float


class Dynamic(NamedTuple):
    """Theta grows with the text, from `trained` tokens on, so that slow pairs turn slower still.

    Source: transformers' `rope_type: dynamic`, NTK-aware scaling.
    """

    factor: float
    trained: int


class LongRope(NamedTuple):
    """Each pair turns slower by a factor of its own: `short` up to `trained` tokens, then `long`.

    Attributes:
        short, long: of each of D/2 pairs.
        amplitude: of cosines and sines.

    Source: Ding et al., "LongRoPE", 2024, as transformers has it.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained: int
    amplitude: float


Scaling = Llama3 | Yarn | Linear | Dynamic | LongRope
Sections = tuple[int, int, int]  # pairs that turn by time, row and column


def frequencies(
    D: int, theta: float, scaling: Scaling | None, device: torch.device | None = None
) -> Tensor:
    """(D/2,) float32, radians a token; of one that goes by the text, up to `unscaled` tokens."""
    pair = torch.arange(0, D, 2, device=device, dtype=torch.float32)
    frequency = 1 / theta ** (pair / D)
    if scaling is None or isinstance(scaling, Dynamic):
        return frequency
    if isinstance(scaling, Linear):
        return frequency / scaling.factor
    if isinstance(scaling, LongRope):
        return frequency / torch.tensor(scaling.short, device=device)
    if isinstance(scaling, Llama3):
        turns = scaling.trained / (2 * math.pi / frequency)
        kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    else:
        first, last = _ends(D, theta, scaling)
        kept = 1 - ((pair / 2 - first) / (last - first)).clamp(0, 1)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def _ends(D: int, theta: float, yarn: Yarn) -> tuple[float, float]:
    """The pairs that turn `fast` and `slow` times over the trained context."""
    first, last = (
        D * math.log(yarn.trained / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (yarn.fast, yarn.slow)
    )
    if yarn.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, D - 1)
    return first, last + 0.001 if first == last else last


def unscaled(scaling: Scaling | None) -> int | None:
    """Tokens up to which a text turns as a short one; None: its length changes nothing."""
    return scaling.trained if isinstance(scaling, Dynamic | LongRope) else None


def frequencies_at(positions: Tensor, D: int, theta: float, scaling: Dynamic | LongRope) -> Tensor:
    """(T, 1, D/2) float32: of each token, by the text up to it.

    Args:
        positions: (T,).
    """
    pair = torch.arange(0, D, 2, device=positions.device, dtype=torch.float32)
    at_T11 = rearrange(positions, "t -> t 1 1")
    if isinstance(scaling, Dynamic):
        share_T11 = (at_T11 + 1).clamp(min=scaling.trained).float() / scaling.trained
        wider_T11 = scaling.factor * share_T11 - (scaling.factor - 1)
        return 1 / (theta * wider_T11 ** (D / (D - 2))) ** (pair / D)
    short, long = (torch.tensor(x, device=pair.device) for x in (scaling.short, scaling.long))
    return 1 / (torch.where(at_T11 >= scaling.trained, long, short) * theta ** (pair / D))


def rotation(
    positions: Tensor, D: int, theta: float, dtype: torch.dtype, scaling: Scaling | None = None,
    sections: Sections | None = None,
) -> Turn:  # fmt: skip
    """The turn of all layers; its angles are in float32, as positions run to thousands.

    Args:
        positions: (T,), or with sections (T, 3): of time, row and column.
    """
    if isinstance(scaling, Dynamic | LongRope) and sections is None:
        frequency = frequencies_at(positions, D, theta, scaling)
    else:
        frequency = frequencies(D, theta, scaling, positions.device)
    if sections is not None:
        positions = positions[:, _axes(D, sections, positions.device)]  # (T, D/2)
        angle = rearrange(positions.float() * frequency, "t d -> t 1 d")
    else:
        angle = rearrange(positions.float(), "t -> t 1 1") * frequency
    cos, sin = angle.cos(), angle.sin()
    if isinstance(scaling, Yarn | LongRope) and scaling.amplitude != 1:
        cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
    return turn_by(cos.to(dtype), sin.to(dtype))


def turn_by(cos: Tensor, sin: Tensor) -> Turn:
    """The turn by cosines and sines of each pair, (T, 1, D/2)."""
    return Turn(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))


def _axes(D: int, sections: Sections, device: torch.device) -> Tensor:
    """(D/2,): which of three positions turns each pair: 0 1 2 0 1 2 ... as long as there are any.

    Source: Qwen3-VL's interleaved mRoPE. Rows and columns have what `sections` says, time the rest.
    """
    pair = torch.arange(D // 2, device=device)
    axis = pair % 3
    return axis * ((axis == 1) & (pair < 3 * sections[1]) | (axis == 2) & (pair < 3 * sections[2]))


def rotate(x_THD: Tensor, rope: Turn) -> Tensor:
    """Rotary embedding; a pair is (i, i + D/2), as in the Hugging Face checkpoints.

    Columns past the D that `rope` has angles for stay as they are.
    """
    D = rope.cos.shape[-1]
    if (beyond := x_THD.shape[-1] - D) > 0:
        x_THD, rest = torch.split_with_sizes(x_THD, [D, beyond], dim=-1)
        return torch.cat([rotate(x_THD, rope), rest], dim=-1)
    a, b = torch.split_with_sizes(x_THD, [D // 2, D // 2], dim=-1)  # x.split is Python around it
    return x_THD * rope.cos + torch.cat([b, a], dim=-1) * rope.sin


def rotate_neighbours(x_THD: Tensor, rope: Turn) -> Tensor:
    """Rotary embedding of pairs (2i, 2i + 1), which come out as (i, i + D/2).

    Scores see no order of columns, as long as queries and keys agree.
    """
    return rotate(rearrange(x_THD, "t h (i two) -> t h (two i)", two=2), rope)


KINDS: dict[str, tuple[str, ...]] = {  # rope_type -> what else it may say
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "beta_fast", "beta_slow", "original_max_position_embeddings",
        "attention_factor", "mscale", "mscale_all_dim", "truncate",
    ),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": (
        "factor", "short_factor", "long_factor", "attention_factor",
        "original_max_position_embeddings",
    ),
}  # fmt: skip


Rope = tuple[float, Scaling | None, float]  # theta, scaling, share of a head's columns that turn


def read_rope(raw: Mapping[str, Any], share: float = 1.0) -> Rope:
    """Theta, scaling and the share of a head's columns that turn, from a config.json.

    Of transformers 4 (`rope_scaling`) or 5 (`rope_parameters`). Where both are there, the first
    stands in place of all of the second, theta too, and an `original_max_position_embeddings`
    outside of them is before the one inside: that is transformers' order.

    Args:
        share: of columns, where the config does not say.

    Raises:
        ValueError: a kind of scaling that is not here, a key that its kind does not have, or
            numbers that cannot be.
    """
    scaling, parameters = raw.get("rope_scaling"), raw.get("rope_parameters")
    rope = {
        "rope_theta": raw.get("rope_theta", 10_000.0),
        "partial_rotary_factor": raw.get("partial_rotary_factor", share),
        **(scaling or parameters or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"rope of type {kind!r}; there are {', '.join(KINDS)}")
    asked = {key for key, value in rope.items() if value is not None}
    known = {"rope_theta", "partial_rotary_factor", "rope_type", "type", *KINDS[kind]}
    if kind == "default":  # left over from a scaling that was taken out: it says nothing here
        known |= {"original_max_position_embeddings"}
    if unknown := asked - known:
        raise ValueError(f"rope of type {kind!r} has no {', '.join(sorted(unknown))}")
    theta, share = rope["rope_theta"], rope["partial_rotary_factor"]
    outside = raw.get("original_max_position_embeddings")
    if kind == "default":
        return theta, None, share
    if kind == "linear":
        return theta, Linear(rope["factor"]), share
    if kind == "dynamic":
        return theta, Dynamic(rope["factor"], raw["max_position_embeddings"]), share
    trained = outside or rope.get("original_max_position_embeddings")
    trained = trained or raw["max_position_embeddings"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if not low < high:
            raise ValueError(f"low_freq_factor is {low}, not below high_freq_factor, {high}")
        return theta, Llama3(rope["factor"], low, high, trained), share
    factor = rope.get("factor") if kind == "longrope" else rope["factor"]
    if factor is None:
        factor = raw["max_position_embeddings"] / trained
    if kind == "longrope":
        return theta, _longrope(rope, factor, trained), share
    mscale, every = rope.get("mscale"), rope.get("mscale_all_dim")
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        amplitude = _mscale(factor, 1)
        if mscale and every:
            amplitude = _mscale(factor, mscale) / _mscale(factor, every)
    return theta, Yarn(
        factor, rope.get("beta_fast") or 32, rope.get("beta_slow") or 1, trained, amplitude,
        _mscale(factor, every) ** 2 if every else 1.0, rope.get("truncate", True),
    ), share  # fmt: skip


def _longrope(rope: Mapping[str, Any], factor: float, trained: int) -> LongRope:
    both = []
    for key in ("short_factor", "long_factor"):
        if not all(isinstance(x, int | float) for x in rope[key]):
            raise ValueError(f"{key} is {rope[key]!r}, not a list of numbers")
        both.append(tuple(float(x) for x in rope[key]))
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return LongRope(both[0], both[1], trained, amplitude)


def longest(raw: Mapping[str, Any], scaling: Scaling | None) -> int:
    """Positions that a model was made for, from a config.json; 0: not known.

    Of `Dynamic`, `factor` times those that it was trained on, after which it is named.
    """
    if isinstance(scaling, Dynamic):
        return int(scaling.factor * scaling.trained)
    most: int = raw.get("max_position_embeddings", 0)
    return most


def check_pairs(scaling: Scaling | None, D: int) -> None:
    """Refuse a scaling that does not fit so many columns.

    Raises:
        ValueError: it has factors for more or fewer pairs, or no exponent.
    """
    if isinstance(scaling, LongRope):
        counts = len(scaling.short), len(scaling.long)
        if set(counts) != {D // 2}:
            raise ValueError(
                f"short_factor and long_factor have {counts[0]} and {counts[1]} numbers, not one "
                f"for each of {D // 2} pairs of columns that turn"
            )
    if isinstance(scaling, Dynamic) and D == 2:
        raise ValueError("rope of type 'dynamic' with one pair of columns has no exponent")


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1
