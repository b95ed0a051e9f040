"""The layer around a gated delta rule (GDN), in Qwen3-Next: projections, convolution, gated norm.

Shape letters: T query tokens, E model dim, G key and H value heads, M = H/G value heads a key head,
D key and U value columns, C = 2*G*D + H*U channels of the convolution, W its taps.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import silu, softplus

import fngraph as fg
from models.layers import heads, join, rms_norm
from models.naming import shape

States = tuple[Tensor, Tensor]  # last inputs (slots, C, W - 1), state (slots, H, D, U) float32


@fg.struct
class Delta:
    """Weights of one gated delta rule, matrices as (out, in)."""

    w_qkvz: Tensor  # (G*(2*D + 2*M*U), E): of each key head q, k, its value heads, their gates
    w_ba: Tensor  # (G*2*M, E): of each key head its value heads' corrections, then decays
    conv: Tensor  # (C, 1, W)
    dt_bias: Tensor  # (H,)
    a_log: Tensor  # (H,)
    gate_norm: Tensor  # (U,)
    w_out: Tensor  # (E, H*U)


def delta(
    config: Any, weights: Delta, x_TE: Tensor, states: States, batch: Any
) -> tuple[Tensor, States]:
    """Convolution, gated delta rule, gated norm; and the layer's last inputs and state."""
    G, H, D, U = config.key_heads, config.value_heads, config.key_dim, config.value_dim
    last, state = states
    parts = heads(x_TE, weights.w_qkvz, 2 * (D + H // G * U)).split(
        [D, D, H // G * U, H // G * U], dim=-1
    )
    b_TH, a_TH = (x.flatten(1) for x in heads(x_TE, weights.w_ba, 2 * H // G).chunk(2, dim=-1))
    mixed_TC = torch.cat([x.flatten(1) for x in parts[:3]], dim=-1)
    mixed_TC, last = fg.ops.causal_conv(mixed_TC, weights.conv[:, 0], last, batch)
    q_TC, k_TC, v_TC = silu(mixed_TC).split([G * D, G * D, H * U], dim=-1)
    q_TGD, k_TGD = (unit(rearrange(x, "t (g d) -> t g d", g=G)) for x in (q_TC, k_TC))
    v_THU = rearrange(v_TC, "t (h u) -> t h u", h=H)
    g_TH = -weights.a_log.float().exp() * softplus(a_TH.float() + weights.dt_bias.float())
    out_THU, state = fg.ops.gated_delta(q_TGD, k_TGD, v_THU, g_TH, b_TH.sigmoid(), state, batch)
    gate_THU = rearrange(parts[3], "t g (m u) -> t (g m) u", u=U)
    out_THU = rms_norm(out_THU, weights.gate_norm, config.norm_eps) * silu(gate_THU.float())
    return join(out_THU.to(x_TE.dtype), weights.w_out), (last, state)


def unit(x_TGD: Tensor) -> Tensor:
    """Each row with length 1."""
    wide = x_TGD.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x_TGD.dtype)


def delta_of(config: Any) -> Delta:
    """Shapes of one such layer."""
    E, H, U = config.dim, config.value_heads, config.value_dim
    return Delta(
        w_qkvz=shape(config.channels + H * U, E), w_ba=shape(2 * H, E),
        conv=shape(config.channels, 1, config.taps), dt_bias=shape(H), a_log=shape(H),
        gate_norm=shape(U), w_out=shape(E, H * U),
    )  # fmt: skip


def new_states(
    config: Any, num_slots: int, device: torch.device | str, dtype: torch.dtype
) -> States:
    """A slot for each of `num_slots` requests."""
    last = num_slots, config.channels, config.taps - 1
    state = num_slots, config.value_heads, config.key_dim, config.value_dim
    return torch.zeros(last, device=device, dtype=dtype), torch.zeros(state, device=device)


DELTA_NAMES = {
    "layers.*.attn.w_qkvz": "model.layers.*.linear_attn.in_proj_qkvz.weight",
    "layers.*.attn.w_ba": "model.layers.*.linear_attn.in_proj_ba.weight",
    "layers.*.attn.conv": "model.layers.*.linear_attn.conv1d.weight",
    "layers.*.attn.dt_bias": "model.layers.*.linear_attn.dt_bias",
    "layers.*.attn.a_log": "model.layers.*.linear_attn.A_log",
    "layers.*.attn.gate_norm": "model.layers.*.linear_attn.norm.weight",
    "layers.*.attn.w_out": "model.layers.*.linear_attn.out_proj.weight",
}
