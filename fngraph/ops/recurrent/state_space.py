"""Mamba-2's state space (SSD): a recurrence with a scalar decay a head.

Shape letters: T tokens, R requests, H heads, P head dim, G groups, N state dim. Per head and token,
with S of (P, N): S <- exp(dt a) S + dt x b; y = S c.

Source: Dao and Gu, "Transformers are SSMs", 2024, section 3; `D x` and the gate are the model's.
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


class SSDConfig(NamedTuple):
    """What a backend may be chosen by."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    device: str


class SSDArgs(NamedTuple):
    """What a backend of `ssd` gets, `run(args, host)`.

    Attributes:
        x: (T, H, P) inputs.
        dt: (T, H) time steps.
        a: (H,) decay rates.
        b: (T, G, N) what goes in.
        c: (T, G, N) what comes out.
        state: (num_slots, H, P, N).
        meta: where the tokens and the states belong.
        out: (T, H, P) to be written in full, zero in rows that belong to no request.
        config: what is the same for every batch.
        plan: the buffers that the backend's `Plan` has filled, if it has one.
    """

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    state: Tensor
    meta: StateMeta
    out: Tensor
    config: SSDConfig
    plan: Any = None


def run(args: SSDArgs, host: HostBounds | None) -> None:
    """The `reference` backend: the recurrence, one token of every request at a time."""
    dtype = torch.promote_types(args.x.dtype, torch.float32)
    each = args.config.num_heads // args.config.num_groups
    b_THN, c_THN = (x.to(dtype).repeat_interleave(each, 1) for x in (args.b, args.c))
    dt = args.dt.to(dtype)
    decay_TH, x = (dt * args.a.to(dtype)).exp(), args.x.to(dtype) * dt[..., None]

    def advance(state_RHPN: Tensor, at_R: Tensor) -> tuple[Tensor, Tensor]:
        state_RHPN = state_RHPN * decay_TH[at_R][..., None, None]
        state_RHPN = state_RHPN + einsum(x[at_R], b_THN[at_R], "r h p, r h n -> r h p n")
        return state_RHPN, einsum(state_RHPN, c_THN[at_R], "r h p n, r h n -> r h p")

    scan(advance, args.state, args.meta, args.out, host, dtype)


def _configure(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, *rest: Any
) -> SSDConfig:
    (_, H, P), (_, G, N) = x.shape, b.shape
    return SSDConfig(H, P, G, N, x.dtype, state.dtype, x.device.type)


SSD = define(
    "ssd",
    "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor(a!) state, Tensor state_slots, "
    "Tensor seq_lens, Tensor query_start_loc, Tensor(b!) out)",
    configure=_configure,
    args=SSDArgs,
    default=Backend("reference", run, support=lambda config: Support.ALWAYS),
    null_slots="state_slots",
    offsets="query_start_loc",
    pages=Pages(("state",), ("state_slots",)),
)


SHAPES = Shapes(
    "ssd",
    {
        "x_THP": "T H P", "dt_TH": "T H", "a_H": "H", "b_TGN": "T G N", "c_TGN": "T G N",
        "state": "num_slots H P N", **STATES,
    },
    shared=("H", "G"),
)  # fmt: skip


@SSD.function
def ssd(
    x_THP: Tensor,
    dt_TH: Tensor,
    a_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    state: Tensor,
    batch: Any,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's recurrence over each request's tokens, from its state and into it.

    Args:
        x_THP: (T, H, P) inputs, after the convolution.
        dt_TH: (T, H) time steps, after bias and softplus.
        a_H: (H,) decay rates, below 0.
        b_TGN: (T, G, N) what goes in; head h reads group `h // (H // G)`.
        c_TGN: (T, G, N) what comes out.
        state: (num_slots, H, P, N), best float32; written in place, so it must be donated.
        batch: anything with the fields of `fg.ops.StateMeta`; pad `state_slots` with -1.

    Returns:
        (T, H, P) in x's dtype, zero in rows that belong to no request; and `state` itself.

    Raises:
        TreeError: an argument whose shape or dtype does not fit the others.
        TransformError: a gradient or a `torch.func` transform goes through it.
    """
    tensors = (x_THP, dt_TH, a_H, b_TGN, c_TGN, state, *meta_of(batch))
    SHAPES.check(*tensors)
    out_THP = x_THP.new_empty(x_THP.shape)
    SSD.op(*tensors, out_THP)
    return out_THP, state
