"""Gated delta rule (GDN, as in Qwen3-Next): linear attention with a decaying, correcting state.

Shape letters: T tokens, R requests, H value heads, G key heads, D key dim, V value dim. Per head
and token, with S of (D, V): S <- exp(g) S; S <- S + beta k (v - k S); o = scale q S.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, equation 10.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import einsum
from torch import Tensor

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend
from fngraph.ops.check_shapes import STATES, Shapes
from fngraph.ops.primitives import Pages, define
from fngraph.ops.recurrent.requests import StateMeta, meta_of, scan


class GatedDeltaConfig(NamedTuple):
    """What a backend may be chosen by."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    device: str
    scale: float


class GatedDeltaArgs(NamedTuple):
    """What a backend of `gated_delta` gets, `run(args, host)`.

    Attributes:
        q: (T, G, D) queries.
        k: (T, G, D) keys.
        v: (T, H, V) values.
        g: (T, H) logarithm of the decay.
        beta: (T, H) how much of the error is corrected.
        state: (num_slots, H, D, V).
        meta: where the tokens and the states belong.
        out: (T, H, V) to be written in full, zero in rows that belong to no request.
        config: what is the same for every batch.
        plan: the buffers that the backend's `Plan` has filled, if it has one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    meta: StateMeta
    out: Tensor
    config: GatedDeltaConfig
    plan: Any = None


def run(args: GatedDeltaArgs, host: HostBounds | None) -> None:
    """The `reference` backend: the recurrence, one token of every request at a time."""
    dtype = torch.promote_types(args.q.dtype, torch.float32)
    each = args.config.num_heads // args.config.num_key_heads
    q_THD, k_THD = (x.to(dtype).repeat_interleave(each, 1) for x in (args.q, args.k))
    v, decay_TH, beta = args.v.to(dtype), args.g.to(dtype).exp(), args.beta.to(dtype)

    def advance(state_RHDV: Tensor, at_R: Tensor) -> tuple[Tensor, Tensor]:
        q_RHD, k_RHD = q_THD[at_R], k_THD[at_R]
        state_RHDV = state_RHDV * decay_TH[at_R][..., None, None]
        error_RHV = v[at_R] - einsum(k_RHD, state_RHDV, "r h d, r h d v -> r h v")
        state_RHDV = state_RHDV + einsum(
            k_RHD, beta[at_R][..., None] * error_RHV, "r h d, r h v -> r h d v"
        )
        out_RHV = einsum(q_RHD, state_RHDV, "r h d, r h d v -> r h v")
        return state_RHDV, out_RHV * args.config.scale

    scan(advance, args.state, args.meta, args.out, host, dtype)


def _configure(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *rest: Any
) -> GatedDeltaConfig:
    *_, scale = rest
    return GatedDeltaConfig(
        v.shape[1], k.shape[1], k.shape[2], v.shape[2], q.dtype, state.dtype, q.device.type, scale
    )


GATED_DELTA = define(
    "gated_delta",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor state_slots, "
    "Tensor seq_lens, Tensor query_start_loc, Tensor(b!) out, float scale)",
    configure=_configure,
    args=GatedDeltaArgs,
    default=Backend("reference", run, support=lambda config: Support.ALWAYS),
    null_slots="state_slots",
    offsets="query_start_loc",
    pages=Pages(("state",), ("state_slots",)),
)


SHAPES = Shapes(
    "gated_delta",
    {
        "q_TGD": "T G D", "k_TGD": "T G D", "v_THV": "T H V", "g_TH": "T H", "beta_TH": "T H",
        "state": "num_slots H D V", **STATES,
    },
    shared=("H", "G"),
)  # fmt: skip


@GATED_DELTA.function
def gated_delta(
    q_TGD: Tensor,
    k_TGD: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state: Tensor,
    batch: Any,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over each request's tokens, from its state and into it.

    Args:
        q_TGD: (T, G, D) queries; value head h reads key head `h // (H // G)`. Normalize q and k
            before, if the model does.
        k_TGD: (T, G, D) keys.
        v_THV: (T, H, V) values.
        g_TH: (T, H) logarithm of the decay, at most 0.
        beta_TH: (T, H) how much of the error is corrected, 0 to 1.
        state: (num_slots, H, D, V), best float32; written in place, so it must be donated.
        batch: anything with the fields of `fg.ops.StateMeta`; pad `state_slots` with -1.
        scale: of q; 1 / sqrt(D) if None.

    Returns:
        (T, H, V) in v's dtype, zero in rows that belong to no request; and `state` itself.

    Raises:
        TreeError: an argument whose shape or dtype does not fit the others.
        TransformError: a gradient or a `torch.func` transform goes through it.
    """
    tensors = (q_TGD, k_TGD, v_THV, g_TH, beta_TH, state, *meta_of(batch))
    SHAPES.check(*tensors)
    scale = q_TGD.shape[-1] ** -0.5 if scale is None else scale
    SHAPES.number("scale", scale, float)
    out_THV = v_THV.new_empty(v_THV.shape)
    GATED_DELTA.op(*tensors, out_THV, scale)
    return out_THV, state
