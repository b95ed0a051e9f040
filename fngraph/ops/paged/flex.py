"""The `flex` backend of attention: torch's flex_attention over gathered keys.

It is called without `torch.compile`, which would compile once a shape, and so once a key: so it is
not fused, and holds all scores in memory. It is here to compare with, and for score rules that
nothing else has. It is never captured: unfused, torch copies a number to the device on the way,
which no graph can hold, and the tape sees ATen ops, which this is none of.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend
from fngraph.ops.paged import dense


def run(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv: tuple[Tensor, Tensor],
    meta: Any,
    out_THD: Tensor,
    *,
    config: Any,
    host: HostBounds | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `fngraph.ops.attention`."""
    from torch.nn.attention.flex_attention import flex_attention  # brings dynamo in

    def attend(q_NKQD: Tensor, k_NKSD: Tensor, v_NKSD: Tensor, seen_NQS: Tensor) -> Tensor:
        def score_mod(score: Any, n: Any, head: Any, q: Any, k: Any) -> Any:
            if config.softcap is not None:
                score = torch.tanh(score / config.softcap) * config.softcap
            return torch.where(seen_NQS[n, q, k], score, -float("inf"))

        with warnings.catch_warnings():  # of being unfused, which is said above
            warnings.simplefilter("ignore")
            out = flex_attention(q_NKQD, k_NKSD, v_NKSD, score_mod=score_mod, scale=config.scale)
        return out  # type: ignore[return-value]

    new, scales = (k_TKD, v_TKD), (k_scale, v_scale)
    dense.run(attend, q_THD, new, kv, meta, out_THD, config, host, scales)


BACKEND = Backend(
    "flex",
    run,
    support=lambda config: Support.NEVER,
    options=("bidirectional", "cache scales", "fp8 cache"),
)
