"""Llama once more, apart from `fngraph.models`: dense, one text, float64, head by head."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fngraph.models import llama, naming


def dense_logits(params: llama.Params, tokens: Sequence[int]) -> Tensor:
    """Logits (S, V) after each token of one text."""
    c = params.config
    w = {name: tensor.double() for name, tensor in naming.named(params).items()}
    x = torch.stack([w["embed"][token] for token in tokens])
    for i in range(c.num_layers):
        layer = {n.rsplit(".", 1)[-1]: t for n, t in w.items() if n.startswith(f"layers.{i}.")}
        y = normed(x, layer["attn_norm"], c.norm_eps)
        heads = []
        for head in range(c.num_heads):
            shared = head // (c.num_heads // c.num_kv_heads)
            q = turned(y @ part(layer["wq"], head, c.head_dim).T, c.rope_theta)
            k = turned(y @ part(layer["wk"], shared, c.head_dim).T, c.rope_theta)
            v = y @ part(layer["wv"], shared, c.head_dim).T
            scores = q @ k.T / math.sqrt(c.head_dim)
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ layer["wo"].T
        y = normed(x, layer["mlp_norm"], c.norm_eps)
        gate = y @ layer["w_gate"].T
        x = x + (gate / (1 + torch.exp(-gate)) * (y @ layer["w_up"].T)) @ layer["w_down"].T
    return normed(x, w["norm"], c.norm_eps) @ w.get("head", w["embed"]).T


def part(weight: Tensor, head: int, head_dim: int) -> Tensor:
    """The rows of one head."""
    return weight[head * head_dim : (head + 1) * head_dim]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """Rope as a product of complex numbers, the row's number being its position."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(x), dtype=torch.float64)[:, None] * frequency
    spun = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([spun.real, spun.imag], -1)
