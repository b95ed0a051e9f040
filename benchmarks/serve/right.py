"""Whether a way draws what bare `forward` draws (`benchmarks serve`).

In bf16 rounding decides between tokens that are nearly as likely, and a draw among many hits
another one. So a token is right where its logit is close to that of the token that bare `forward`
draws, both by bare `forward`'s logits; texts are judged where they part.

Shape letters: N tokens drawn, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from benchmarks.traffic import Arrival

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # of the best logit's way above the mean
RIGHT = 0.9  # the share of a way's tokens, or of its texts, that have to be
Texts = Mapping[int, Sequence[int]]
LogitsAfter = Callable[[Arrival, Sequence[int]], Tensor]  # a request, its text so far -> (V,)


def refill(cache: Any) -> None:
    """Random numbers, the same each time: zeros would hide what attention reads."""
    for leaf in fg.core.trees.flatten(cache)[0]:
        leaf.normal_(generator=torch.Generator(leaf.device).manual_seed(0))


def share_right(logits_NV: Tensor, drawn_N: Tensor, wanted_N: Tensor) -> float:
    """The share of the tokens drawn that are as good as those of bare `forward`, 0 to 1."""
    tolerance, logits_NV = TOLERANCE[logits_NV.dtype], logits_NV.float()
    valid_N = (drawn_N >= 0) & (drawn_N < logits_NV.shape[1])
    both_N2 = torch.stack([drawn_N * valid_N, wanted_N], 1)
    gap_N = logits_NV.gather(1, both_N2).diff(dim=1)[:, 0].abs()
    most_N = tolerance * (logits_NV.amax(1) - logits_NV.mean(1))
    return (valid_N & (gap_N <= most_N)).float().mean().item()


def share_of_texts(
    texts: Texts, wanted: Texts, arrivals: Sequence[Arrival], logits_after: LogitsAfter
) -> float:
    """The share of requests whose text is bare `forward`'s, or parts from it at a token as good."""
    right = 0.0
    for i, one in enumerate(arrivals):
        mine, other = tuple(texts.get(i, ())), tuple(wanted[i])
        if len(mine) != len(other):
            continue
        at = next((n for n, (a, b) in enumerate(zip(mine, other)) if a != b), None)
        if at is None:
            right += 1
        else:
            logits_V = logits_after(one, other[:at])
            drawn, best = (torch.tensor([x[at]], device=logits_V.device) for x in (mine, other))
            right += share_right(logits_V[None], drawn, best)
    return right / len(arrivals)


def wrong(found: Mapping[str, Any]) -> list[str]:
    """What was measured and draws something else than bare `forward`, a line each."""
    rows = [(f"batch {row['batch']}: {row['way']}", "tokens", row) for row in found["decode"]]
    rows += [(f"traffic: {row['modes']}", "texts", row) for row in found["traffic"]]
    return [
        f"{what} draws other {of} than bare forward: {row['right']:.2f} of them are right, and "
        f"{RIGHT} have to be"
        for what, of, row in rows
        if not row["right"] >= RIGHT
    ]
