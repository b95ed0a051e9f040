"""A decode step as one writes it by hand: torch's own ops over a static contiguous cache.

What others are built on in `compile`, `decode`, `host` and `prefill`: eager, captured by hand,
under `torch.compile`, as a module. Llama, Qwen3 and Qwen3-MoE, by the weights that are there.
Weights are read where the families have them; projections of one input are one product.

Shape letters: R requests, T tokens of each in this step, S tokens that the cache has room for,
H query heads, K kv heads, G = H / K, D head dim, E model dim, F mlp hidden, V vocab; X experts,
C chosen ones of a token, N = R * C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fngraph as fg
from fngraph.models.families.experts import Mixture
from fngraph.models.families.rope import frequencies

KV = tuple[Tensor, Tensor]  # one layer's k and v, each (R, K, S, D)
Attend = Callable[..., Tensor]  # q_RHTD, k_RKSD, v_RKSD, seen_RTS -> (R, H, T, D)
Mix = Callable[["Experts", Tensor, int, bool], Tensor]


class Experts(NamedTuple):
    """A router and its experts."""

    router: Tensor  # (X, E)
    w_gate: Tensor  # (X, F, E)
    w_up: Tensor  # (X, F, E)
    w_down: Tensor  # (X, E, F)


class Gated(NamedTuple):
    """A gated mlp, gate and up as one matrix."""

    w_in: Tensor  # (2 * F, E)
    w_out: Tensor  # (E, F)


class Layer(NamedTuple):
    """Weights of one layer, q, k and v as one matrix."""

    attn_norm: Tensor  # (E,)
    wqkv: Tensor  # ((H + 2 * K) * D, E)
    wo: Tensor  # (E, H * D)
    q_norm: Tensor | None  # (D,)
    k_norm: Tensor | None  # (D,)
    mlp_norm: Tensor  # (E,)
    mlp: Gated | Experts


class Weights(NamedTuple):
    """All of a model's."""

    embed: Tensor  # (V, E)
    layers: tuple[Layer, ...]
    norm: Tensor  # (E,)
    head: Tensor  # (V, E)


def weights_of(params: Any) -> Weights:
    """A family's `Params`, read where they lie; what `fg.ops.lay_side_by_side` has laid.

    Raises:
        ValueError: projections of one input are apart.
    """
    layers = []
    for layer in params.layers:
        attn, mlp = layer.attn, layer.mlp
        whole: Gated | Experts
        if isinstance(mlp, Mixture):
            of = mlp.experts
            whole = Experts(mlp.router, of.w_gate, of.w_up, of.w_down)
        else:
            whole = Gated(as_one(mlp.w_gate, mlp.w_up), mlp.w_down)
        q_norm, k_norm = (getattr(attn, name, None) for name in ("q_norm", "k_norm"))
        qkv = as_one(attn.wq, attn.wk, attn.wv)
        layers.append(Layer(layer.attn_norm, qkv, attn.wo, q_norm, k_norm, layer.mlp_norm, whole))
    head = params.embed if params.head is None else params.head
    return Weights(params.embed, tuple(layers), params.norm, head)


def as_one(*parts: Tensor) -> Tensor:
    """The matrix whose rows these are, one after the other in memory."""
    ends = [x.data_ptr() + x.nbytes for x in parts]
    if [x.data_ptr() for x in parts[1:]] != ends[:-1]:
        raise ValueError("weights of one input are apart: pass fg.ops.lay_side_by_side(params)")
    first = parts[0]
    return first.as_strided((sum(len(x) for x in parts), first.shape[1]), first.stride())


def static_cache(config: Any, num_reqs: int, room: int, device: Any, dtype: Any) -> tuple[KV, ...]:
    """Zeros for `step`."""
    shape = (num_reqs, config.num_kv_heads, room, config.head_dim)
    zeros = lambda: torch.zeros(shape, device=device, dtype=dtype)  # noqa: E731
    return tuple((zeros(), zeros()) for _ in range(config.num_layers))


# --- attention ------------------------------------------------------------------------------------


def grouped_heads(q_RHTD: Tensor, k_RKSD: Tensor, v_RKSD: Tensor, seen_RTS: Tensor) -> Tensor:
    """SDPA told that several query heads share one of k and v: (R, H, T, D)."""
    mask = seen_RTS[:, None]
    return F.scaled_dot_product_attention(q_RHTD, k_RKSD, v_RKSD, mask, enable_gqa=True)


def folded_heads(q_RHTD: Tensor, k_RKSD: Tensor, v_RKSD: Tensor, seen_RTS: Tensor) -> Tensor:
    """SDPA with the query heads of one kv head as rows of one: (R, H, T, D)."""
    R, H, T, D = q_RHTD.shape
    K, S = k_RKSD.shape[1:3]
    q_RKGD = q_RHTD.reshape(R, K, H // K * T, D)
    mask = seen_RTS[:, None, None].expand(R, 1, H // K, T, S).reshape(R, 1, H // K * T, S)
    return F.scaled_dot_product_attention(q_RKGD, k_RKSD, v_RKSD, mask).view(R, H, T, D)


def causal_heads(q_RHTD: Tensor, k_RKSD: Tensor, v_RKSD: Tensor, _: None) -> Tensor:
    """SDPA of tokens from the first on, which are all that the cache has room for: S is T."""
    return F.scaled_dot_product_attention(q_RHTD, k_RKSD, v_RKSD, is_causal=True, enable_gqa=True)


FORMS: dict[str, Attend] = {"enable_gqa": grouped_heads, "folded heads": folded_heads}


# --- experts --------------------------------------------------------------------------------------


def route(router_XE: Tensor, x_TE: Tensor, chosen: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token, (T, C), and their shares, likewise."""
    share_TX = F.linear(x_TE, router_XE).softmax(-1, dtype=torch.float32)
    share_TC, expert_TC = share_TX.topk(chosen, dim=-1)
    if normalized:
        share_TC = share_TC / share_TC.sum(-1, keepdim=True)
    return expert_TC, share_TC.to(x_TE.dtype)


def by_group(weights: Experts, x_TE: Tensor, chosen: int, normalized: bool) -> Tensor:
    """Rows sorted by expert, one grouped product each for gate, up and down."""
    expert_TC, share_TC = route(weights.router, x_TE, chosen, normalized)
    sorted_N, order_N = expert_TC.flatten().sort(stable=True)
    every_X = torch.arange(len(weights.router), device=x_TE.device)
    ends_X = torch.searchsorted(sorted_N, every_X, right=True).to(torch.int32)
    x_NE = x_TE[order_N // chosen]
    made = [F.grouped_mm(x_NE, w.mT, offs=ends_X) for w in (weights.w_gate, weights.w_up)]
    out_NE = F.grouped_mm(F.silu(made[0]) * made[1], weights.w_down.mT, offs=ends_X)
    out_TCE = out_NE[order_N.argsort()].view(*expert_TC.shape, -1)
    return (out_TCE * share_TC[..., None]).sum(1)


def gathered(weights: Experts, x_TE: Tensor, chosen: int, normalized: bool) -> Tensor:
    """The weights of each token's experts, looked up: what gpt-fast does for one token."""
    expert_TC, share_TC = route(weights.router, x_TE, chosen, normalized)
    gate_TCF = torch.einsum("te,tcfe->tcf", x_TE, weights.w_gate[expert_TC])
    up_TCF = torch.einsum("te,tcfe->tcf", x_TE, weights.w_up[expert_TC])
    out_TCE = torch.einsum("tcf,tcef->tce", F.silu(gate_TCF) * up_TCF, weights.w_down[expert_TC])
    return (out_TCE * share_TC[..., None]).sum(1)


# --- the step -------------------------------------------------------------------------------------


def turn_of(config: Any, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (R, T), for heads: (R, 1, T, D / 2)."""
    wide = torch.promote_types(dtype, torch.float32)
    frequency = frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling, positions.device
    )
    angle = positions[:, None, :, None].to(wide) * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def turned(x_RHTD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of pairs (i, i + D / 2)."""
    cos, sin = turn
    a, b = x_RHTD.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def layer_step(
    config: Any, layer: Layer, x_RTE: Tensor, turn: tuple[Tensor, Tensor], kv: KV,
    positions_RT: Tensor, seen_RTS: Tensor | None, attend: Attend, mix: Mix,
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:  # fmt: skip
    """(R, T, E): one layer, which writes its k and v at the positions before it reads them.

    Args:
        total: of what comes out of attention and of a gated mlp: the sum over those that share it.
    """
    R, T, E = x_RTE.shape
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    y = F.rms_norm(x_RTE, (E,), layer.attn_norm, config.norm_eps)
    heads = F.linear(y, layer.wqkv).view(R, T, H + 2 * K, D).transpose(1, 2)
    q, k, v = heads.split((H, K, K), 1)
    if layer.q_norm is not None:
        q = F.rms_norm(q, (D,), layer.q_norm, config.norm_eps)
        k = F.rms_norm(k, (D,), layer.k_norm, config.norm_eps)
    at_R = torch.arange(R, device=x_RTE.device)[:, None]
    for kept_RKSD, new_RKTD in zip(kv, (turned(k, turn), v)):
        kept_RKSD[at_R, :, positions_RT] = new_RKTD.transpose(1, 2)
    out = attend(turned(q, turn), *kv, seen_RTS).transpose(1, 2).reshape(R, T, H * D)
    x_RTE = x_RTE + total(F.linear(out, layer.wo))
    y = F.rms_norm(x_RTE, (E,), layer.mlp_norm, config.norm_eps)
    if isinstance(layer.mlp, Gated):
        gate, up = F.linear(y, layer.mlp.w_in).chunk(2, -1)
        return x_RTE + total(F.linear(F.silu(gate) * up, layer.mlp.w_out))
    mixed = mix(layer.mlp, y.view(R * T, E), config.num_chosen, config.normalized)
    return x_RTE + mixed.view(R, T, E)


def chunk_step(
    config: Any, weights: Weights, cache: Sequence[KV], ids_RT: Tensor, positions_RT: Tensor,
    attend: Attend = folded_heads, mix: Mix = by_group,
) -> Tensor:  # fmt: skip
    """(R, V): logits of each request's last token, after T tokens of each."""
    x_RTE = F.embedding(ids_RT, weights.embed)
    turn = turn_of(config, positions_RT, x_RTE.dtype)
    seen_RTS = None  # tokens from the first on need no mask
    if attend is not causal_heads:
        room = torch.arange(cache[0][0].shape[2], device=ids_RT.device)
        seen_RTS = room <= positions_RT[..., None]
    for layer, kv in zip(weights.layers, cache):
        x_RTE = layer_step(
            config, layer, x_RTE, turn, kv, positions_RT, seen_RTS, attend, mix
        )  # fmt: skip
    return F.linear(last_norm(config, weights, x_RTE[:, -1]), weights.head)


def last_norm(config: Any, weights: Weights, x_RE: Tensor) -> Tensor:
    """(R, E): what the head reads."""
    return F.rms_norm(x_RE, x_RE.shape[-1:], weights.norm, config.norm_eps)


def step(
    config: Any, weights: Weights, cache: Sequence[KV], ids_R: Tensor, positions_R: Tensor,
    attend: Attend = folded_heads, mix: Mix = by_group,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token of each request: the likeliest next ones, (R,) int64, and logits, (R, V)."""
    logits_RV = chunk_step(
        config, weights, cache, ids_R[:, None], positions_R[:, None], attend, mix
    )
    return logits_RV.argmax(-1), logits_RV


class Module(nn.Module):
    """`step` with weights and cache as buffers of its own, as gpt-fast's model has them."""

    def __init__(
        self, config: Any, weights: Weights, cache: Sequence[KV], attend: Attend = folded_heads,
        mix: Mix = gathered,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.attend, self.mix = config, attend, mix
        leaves, treedef = fg.core.trees.flatten((weights, tuple(cache)))
        names = [f"_{i}" for i in range(len(leaves))]
        for name, leaf in zip(names, leaves):
            self.register_buffer(name, leaf)
        self.tree = fg.core.trees.unflatten(treedef, names)

    def _filled(self, tree: Any) -> Any:
        """The tree with buffers in place of their names, in Python: Dynamo goes through it."""
        if tree is None or isinstance(tree, str):
            return None if tree is None else getattr(self, tree)
        parts = [self._filled(x) for x in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)

    def forward(self, ids_R: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """As `step`."""
        weights, cache = self._filled(self.tree)
        return step(self.config, weights, cache, ids_R, positions_R, self.attend, self.mix)
