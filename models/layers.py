"""The parts that decoders share. Shape letters as in `models.llama`."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import linear, silu


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm, computed in float32."""
    wide_TE = x_TE.float()
    scale_T1 = torch.rsqrt(wide_TE.square().mean(-1, keepdim=True) + eps)
    return (wide_TE * scale_T1).to(x_TE.dtype) * weight_E


def swiglu(x_TE: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """The gated mlp; matrices as (out, in)."""
    return linear(silu(linear(x_TE, w_gate)) * linear(x_TE, w_up), w_down)


def rotation(
    positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, 1, D/2) for all layers; in float32, as positions run to thousands."""
    pair = torch.arange(0, head_dim, 2, device=positions_T.device, dtype=torch.float32)
    frequency = theta ** (-pair / head_dim)
    angle = rearrange(positions_T.float(), "t -> t 1 1") * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_THD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding; a pair is (i, i + D/2), as in the Hugging Face checkpoints."""
    cos, sin = rope
    a, b = x_THD.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
