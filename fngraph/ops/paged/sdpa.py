"""The `sdpa` backend of attention: torch's scaled_dot_product_attention over gathered keys.

It copies what it attends over first: right for any batch, and as fast as the copy for decode. It
is captured for uniform batches, whose requests are its rows; a mixed batch that is not made of
requests of about one length goes token by token, which is no work for a graph of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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

    def attend(q_NKQD: Tensor, k_NKSD: Tensor, v_NKSD: Tensor, seen_NQS: Tensor) -> Tensor:
        mask = seen_NQS[:, None]
        return scaled_dot_product_attention(
            q_NKQD, k_NKSD, v_NKSD, attn_mask=mask, scale=config.scale
        )

    new, scales = (k_TKD, v_TKD), (k_scale, v_scale)
    dense.run(attend, q_THD, new, kv, meta, out_THD, config, host, scales)


def supports(config: Any) -> str | None:
    """Everything but a soft cap."""
    return None if config.softcap is None else "scaled_dot_product_attention has no softcap"


BACKEND = Backend(
    "sdpa",
    run,
    support=lambda config: Support.UNIFORM_BATCH,
    supports=supports,
    options=("bidirectional", "cache scales", "fp8 cache"),
)
