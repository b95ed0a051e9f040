"""Mixture of experts: a router, and the mlps that it chooses, grouped by expert.

No size depends on what is routed where, and nothing waits. Padding is routed nowhere, so groups
are of true rows alone.

Shape letters as in `fngraph.models.families.llama`; X experts, C chosen ones of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, silu

import fngraph as fg
from fngraph.models.families.layers import mlp_names
from fngraph.models.weights.naming import shape
from fngraph.models.weights.sharded import SplitStack
from fngraph.models.weights.splits import Each, Split


@fg.struct
class Experts:
    """Weights of all experts of a layer, matrices as (expert, out, in)."""

    w_gate: Tensor  # (X, F, E)
    w_up: Tensor  # (X, F, E)
    w_down: Tensor  # (X, E, F)


@fg.struct
class Mixture:
    """Weights of the experts and of what chooses among them."""

    router: Tensor  # (X, E)
    experts: Experts


def experts_of(count: int, dim: int, hidden: int) -> Experts:
    """Shapes of a layer's experts."""
    up = shape(count, hidden, dim)
    return Experts(up, up, shape(count, dim, hidden))


def chosen_of(raw: Mapping[str, Any], count: int) -> int:
    """How many of so many experts a token has, from a config.json.

    Raises:
        ValueError: none, or more than there are.
    """
    chosen: int = raw["num_experts_per_tok"]
    if not 1 <= chosen <= count:
        raise ValueError(f"num_experts_per_tok is {chosen}, but there are {count} experts")
    return chosen


def route(
    x_TE: Tensor, router_XE: Tensor, chosen: int, *, normalized: bool
) -> tuple[Tensor, Tensor]:
    """The experts of each token, (T, C) int64, and their shares, (T, C) float32.

    Args:
        normalized: whether the shares of a token's experts add up to 1.
    """
    share_TX = linear(x_TE, router_XE).softmax(-1, dtype=torch.float32)
    share_TC, expert_TC = share_TX.topk(chosen, dim=-1)
    if normalized:
        share_TC = share_TC / share_TC.sum(-1, keepdim=True)
    return expert_TC, share_TC


def mix(
    experts: Experts, x_TE: Tensor, expert_TC: Tensor, share_TC: Tensor, real_T: Tensor,
    beside_TE: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(T, E): the sum of each token's experts, by their shares; zero in rows that are not real.

    Where experts are split over processes, which all have the same tokens, each runs its own ones,
    or its own columns of each, and what they give is summed over all.

    Args:
        real_T: (T,) bool, whether a row is a token and not padding.
        beside_TE: what is added to it, split as the columns of an expert are.
    """
    run = _grouped if x_TE.dtype == torch.bfloat16 else _dense
    down, is_own = experts.w_down, real_T[:, None]
    if isinstance(down, SplitStack):
        experts = dataclasses.replace(experts, w_down=down.weight)
        if down.experts.size > 1:
            count = len(down.weight)
            expert_TC = expert_TC - down.experts.rank * count
            is_own = is_own & (expert_TC >= 0) & (expert_TC < count)
    out_TE = run(experts, x_TE, expert_TC, share_TC.to(x_TE.dtype), is_own)
    out_TE = torch.where(real_T[:, None], out_TE, 0)
    if isinstance(down, SplitStack):
        out_TE = fg.all_reduce(out_TE, down.experts)
    out_TE = out_TE if beside_TE is None else out_TE + beside_TE
    return fg.all_reduce(out_TE, down.columns) if isinstance(down, SplitStack) else out_TE


def _grouped(
    experts: Experts, x_TE: Tensor, expert_TC: Tensor, share_TC: Tensor, is_own: Tensor
) -> Tensor:
    """Rows sorted by expert, a product for each group; what is not `is_own`, (T, 1) or (T, C),
    padding or another process's, comes last, in none."""
    X, C = experts.w_gate.shape[0], expert_TC.shape[1]
    expert_N = rearrange(torch.where(is_own, expert_TC, X), "t c -> (t c)")
    sorted_N, order_N = expert_N.sort(stable=True)
    every_X = torch.arange(X, device=x_TE.device)
    end_X = torch.searchsorted(sorted_N, every_X, right=True).to(torch.int32)
    x_NE = x_TE[order_N // C]
    hidden_NF = silu(_by_group(x_NE, experts.w_gate, end_X)) * _by_group(x_NE, experts.w_up, end_X)
    out_NE = _by_group(hidden_NF, experts.w_down, end_X)
    back_TC = rearrange(order_N.argsort(), "(t c) -> t c", c=C)
    out_TCE = out_NE[back_TC]  # of those in no group, whatever was there
    if is_own.shape[1] == C:  # each choice by itself, not a row as a whole
        out_TCE = torch.where(is_own[..., None], out_TCE, 0)
    return fg.trust_rows((out_TCE * share_TC[..., None]).sum(1))


def _by_group(x_NI: Tensor, weight_XOI: Tensor, end_X: Tensor) -> Tensor:
    return grouped_mm(x_NI, weight_XOI.mT, offs=end_X)


def _dense(
    experts: Experts, x_TE: Tensor, expert_TC: Tensor, share_TC: Tensor, is_own: Tensor
) -> Tensor:
    """Every expert of every token, for dtypes that torch has no grouped product of.

    What a token did not choose is left out, not multiplied by 0: it may be beyond the dtype.
    """
    X = experts.w_gate.shape[0]
    gate_TXF = einsum(x_TE, experts.w_gate, "t e, x f e -> t x f")
    up_TXF = einsum(x_TE, experts.w_up, "t e, x f e -> t x f")
    out_TXE = einsum(silu(gate_TXF) * up_TXF, experts.w_down, "t x f, x e f -> t x e")
    is_TCX = expert_TC[..., None] == torch.arange(X, device=x_TE.device)
    share_TX = torch.where(is_TCX, share_TC[..., None], 0).sum(1)
    out_TXE = torch.where(is_TCX.any(1)[..., None], out_TXE, 0)
    return einsum(out_TXE, share_TX, "t x e, t x -> t e")


def expert_splits(count: int, hidden: int) -> dict[str, Split]:
    """How the weights of experts are split, for `splits.Specs`: whole ones over "ep", the columns
    of each over "tp"."""
    spread, each = ("ep", Each(count)), ("tp", Each(hidden))
    up = Split({0: spread, 1: each})
    parts = {"w_gate": up, "w_up": up, "w_down": Split({0: spread, 2: each}, "experts")}
    return {f"layers.*.mlp.experts.{name}": part for name, part in parts.items()}


EXPERT_NAMES = {
    "layers.*.mlp.router": "model.layers.*.mlp.gate.weight",
    **mlp_names("mlp.experts", "mlp.experts.*"),
}
"""What Hugging Face calls these weights, for `loading.Format.names`."""
