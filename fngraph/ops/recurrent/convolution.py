"""Causal depthwise convolution over each request's tokens, with the last inputs as its state.

Shape letters: T tokens, R requests, C channels, W taps. The state holds the W - 1 inputs before the
step's first, oldest first. Mamba-2 and GDN convolve so before their recurrence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend
from fngraph.ops.check_shapes import STATES, Shapes
from fngraph.ops.paged.config import owners
from fngraph.ops.primitives import Pages, define
from fngraph.ops.recurrent.requests import StateMeta, is_empty, load, meta_of, store


class CausalConvConfig(NamedTuple):
    """What a backend may be chosen by."""

    channels: int
    taps: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    device: str


class CausalConvArgs(NamedTuple):
    """What a backend of `causal_conv` gets, `run(args, host)`.

    Attributes:
        x: (T, C) inputs.
        weight: (C, W), the tap of the token itself last.
        state: (num_slots, C, W - 1).
        meta: where the tokens and the states belong.
        out: (T, C) to be written in full, zero in rows that belong to no request.
        config: what is the same for every batch.
        plan: the buffers that the backend's `Plan` has filled, if it has one.
    """

    x: Tensor
    weight: Tensor
    state: Tensor
    meta: StateMeta
    out: Tensor
    config: CausalConvConfig
    plan: Any = None


def run(args: CausalConvArgs, host: HostBounds | None) -> None:
    """The `reference` backend: every tap is gathered, from this step's tokens or from the state."""
    if is_empty(args.meta, args.out):
        args.out.zero_()
        return
    dtype = torch.promote_types(args.x.dtype, torch.float32)
    T, W, meta, starts = args.x.shape[0], args.config.taps, args.meta, args.meta.starts
    R = starts.shape[0] - 1
    x, old_RCW = args.x.to(dtype), load(args.state, meta, dtype)
    token_T = torch.arange(T, device=x.device)
    owner_T, owned_T = owners(token_T, starts)
    owned_T = owned_T & meta.live_R[owner_T]
    back_W = torch.arange(1 - W, 1, device=x.device)
    tap_TCW = _inputs(x, old_RCW, owner_T, (token_T - starts[owner_T])[:, None] + back_W, starts)
    out = einsum(tap_TCW, args.weight.to(dtype), "t c w, c w -> t c")
    owner_R = torch.arange(R, device=x.device)
    last_RW = (starts[1:] - starts[:-1])[:, None] + back_W[:-1]
    store(args.state, _inputs(x, old_RCW, owner_R, last_RW, starts), meta)
    args.out.copy_(torch.where(owned_T[:, None], out, 0.0))


def _inputs(x: Tensor, old_RCW: Tensor, owner_N: Tensor, at_NW: Tensor, starts: Tensor) -> Tensor:
    """(N, C, W): inputs at places of requests' steps; those before the step are in the state."""
    new_NWC = x[(starts[owner_N][:, None] + at_NW).clamp(0, x.shape[0] - 1)]
    if old_RCW.shape[2] == 0:
        return rearrange(new_NWC, "n w c -> n c w")
    behind_NW = (at_NW + old_RCW.shape[2]).clamp(0, old_RCW.shape[2] - 1)
    old_NWC = rearrange(old_RCW, "r c w -> r w c")[owner_N[:, None], behind_NW]
    return rearrange(torch.where((at_NW >= 0)[..., None], new_NWC, old_NWC), "n w c -> n c w")


def _configure(x: Tensor, weight: Tensor, state: Tensor, *rest: Any) -> CausalConvConfig:
    C, W = weight.shape
    return CausalConvConfig(C, W, x.dtype, state.dtype, x.device.type)


CAUSAL_CONV = define(
    "causal_conv",
    "(Tensor x, Tensor weight, Tensor(a!) state, Tensor state_slots, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor(b!) out)",
    configure=_configure,
    args=CausalConvArgs,
    default=Backend("reference", run, support=lambda config: Support.ALWAYS),
    null_slots="state_slots",
    offsets="query_start_loc",
    pages=Pages(("state",), ("state_slots",)),
)


SHAPES = Shapes(
    "causal_conv", {"x_TC": "T C", "weight_CW": "C W", "state": "num_slots C W-1", **STATES}
)


@CAUSAL_CONV.function
def causal_conv(
    x_TC: Tensor, weight_CW: Tensor, state: Tensor, batch: Any
) -> tuple[Tensor, Tensor]:
    """Convolve each request's tokens with what came before them. Bias and silu are the model's.

    Args:
        x_TC: (T, C) inputs.
        weight_CW: (C, W), the tap of the token itself last.
        state: (num_slots, C, W - 1); written in place, so it must be donated.
        batch: anything with the fields of `fg.ops.StateMeta`; pad `state_slots` with -1.

    Returns:
        (T, C) in x's dtype, zero in rows that belong to no request; and `state` itself.

    Raises:
        TreeError: an argument whose shape or dtype does not fit the others.
        TransformError: a gradient or a `torch.func` transform goes through it.
    """
    tensors = (x_TC, weight_CW, state, *meta_of(batch))
    SHAPES.check(*tensors)
    out_TC = x_TC.new_empty(x_TC.shape)
    CAUSAL_CONV.op(*tensors, out_TC)
    return out_TC, state
