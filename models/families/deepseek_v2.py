"""DeepSeek-V2 and V2-Lite as pure functions: latent attention (MLA), and experts with shared ones
beside.

The cache holds a latent and a rotated key for each token, shared by all heads. Queries are
multiplied into latent space and results out of it, so that keys and values are never made
("absorbed"), in prefill as well.

Shape letters as in `fngraph.models.families.llama`; L latent, P rotated and N other columns of a
query, U columns of a value, C = L + P; Q latent of queries; X experts, in G groups.

Source: DeepSeek-V2, 2024, sections 2.1 and 2.2; V2-Lite's queries are not compressed. The choice
that is corrected by a bias is DeepSeek-V3's, 2024, section 2.1.2.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from fngraph.models.families import experts, layers
from fngraph.models.families.decoder import (
    DECODER_NAMES,
    WITHOUT_HEAD,
    Params as Params,
    decode,
    layer_of,
    params_of,
    vocabulary_splits,
)
from fngraph.models.families.experts import (
    EXPERT_NAMES,
    chosen_of,
    expert_splits,
    experts_of,
    mix,
)
from fngraph.models.families.layers import (
    Mlp,
    Room,
    heads,
    join,
    mlp,
    mlp_names,
    mlp_of,
    mlp_splits,
    rms_norm,
)
from fngraph.models.families.llama import Batch as Batch
from fngraph.models.families.rope import (
    Scaling,
    Turn,
    Yarn,
    check_pairs,
    longest,
    read_rope,
    rotate_neighbours,
)
from fngraph.models.weights import loading, naming
from fngraph.models.weights.naming import shape
from fngraph.models.weights.splits import Each, Size, Specs, rows, summed

LATENT_EPS = 1e-6  # of the latent's norm; no config says it


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a model. Hashable, and part of the structure of its `Params`."""

    vocab_size: int  # V
    num_layers: int
    num_heads: int  # H
    dim: int  # E
    mlp_dim: int  # F of the dense layers
    rank: int  # L
    rope_dim: int  # P
    plain_dim: int  # N
    value_dim: int  # U
    num_experts: int  # X
    num_chosen: int  # experts of a token
    expert_dim: int  # F of an expert
    num_shared: int  # experts that every token has, as one mlp
    num_dense: int = 0  # layers with an mlp, before those with experts
    share_scale: float = 1.0  # of the experts' shares
    rope_theta: float = 10_000.0
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-6
    tied: bool = False  # the head is the embedding
    max_len: int = 0  # positions that it was made for; 0: not known
    query_rank: int = 0  # Q; 0: queries are not compressed
    biased: bool = False  # latents, and what comes out of attention
    num_groups: int = 1  # G
    num_chosen_groups: int = 1  # of a token, out of which its experts are
    corrected: bool = False  # experts are chosen by a sigmoid and a bias, as in DeepSeek-V3
    normalized: bool = False  # and the shares of a token's experts add up to 1

    @property
    def scale(self) -> float:
        """What the scores are multiplied by."""
        sharper = self.rope_scaling.sharper if isinstance(self.rope_scaling, Yarn) else 1.0
        return float((self.plain_dim + self.rope_dim) ** -0.5 * sharper)


@fg.struct
class Attention:
    """Weights of one attention, matrices as (out, in)."""

    wq: Tensor | None  # (H*(N+P), E), of queries that are not compressed
    w_q_latent: Tensor | None  # (Q, E)
    b_q_latent: Tensor | None  # (Q,)
    q_latent_norm: Tensor | None  # (Q,)
    w_q_up: Tensor | None  # (H*(N+P), Q)
    w_latent: Tensor  # (L+P, E)
    b_latent: Tensor | None  # (L+P,)
    latent_norm: Tensor  # (L,)
    w_kv: Tensor  # (H*(N+U), L)
    wo: Tensor  # (E, H*U)
    bo: Tensor | None  # (E,)


@fg.struct
class Mixture(experts.Mixture):
    """Weights of the experts and their router, and of the experts that every token has."""

    shared: Mlp
    choice_bias: Tensor | None  # (X,) float32


def forward(
    params: Params, cache: tuple[Tensor, ...], batch: Batch
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The logits of each request's rows `logits_indices`, (R, V), and the updated cache."""
    return decode(params, cache, batch, attention, mixture, rope_dim=params.config.rope_dim)


def attention(
    config: Config, weights: Attention, x_TE: Tensor, rope: Turn, cache: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Attention in latent space."""
    N, P, L = config.plain_dim, config.rope_dim, config.rank
    w_kv = rearrange(weights.w_kv, "(h n) l -> h n l", h=config.num_heads)
    q_THN, q_THP = queries(config, weights, x_TE).split([N, P], dim=-1)
    latent_TL, k_TP = linear(x_TE, weights.w_latent, weights.b_latent).split([L, P], dim=-1)
    latent_TL = rms_norm(latent_TL, weights.latent_norm, LATENT_EPS)
    k_TP = rotate_neighbours(k_TP[:, None], rope)[:, 0]
    q_THL = einsum(q_THN, w_kv[:, :N], "t h n, h n l -> t h l")
    q_THC = torch.cat([q_THL, rotate_neighbours(q_THP, rope)], dim=-1)
    new_TC = torch.cat([latent_TL, k_TP], dim=-1)
    out_THL, cache = fg.ops.mla(q_THC, new_TC, cache, batch, rank=L, scale=config.scale)
    out_THU = einsum(out_THL, w_kv[:, N:], "t h l, h u l -> t h u")
    return join(out_THU, weights.wo, weights.bo), cache


def queries(config: Config, weights: Attention, x_TE: Tensor) -> Tensor:
    """(T, H, N+P): from x, or from a latent of it."""
    D, norm = config.plain_dim + config.rope_dim, weights.q_latent_norm
    if weights.wq is not None:
        return heads(x_TE, weights.wq, D)
    assert norm is not None and weights.w_q_latent is not None and weights.w_q_up is not None
    q_TQ = rms_norm(linear(x_TE, weights.w_q_latent, weights.b_q_latent), norm, LATENT_EPS)
    return heads(q_TQ, weights.w_q_up, D)


def mixture(config: Config, weights: Mixture, x_TE: Tensor, real_T: Tensor) -> Tensor:
    """(T, E): the experts that the router, in float32, chooses; and the shared ones."""
    expert_TC, share_TC = choose(config, weights, x_TE)
    shared_TE, share_TC = mlp(weights.shared, x_TE), share_TC * config.share_scale
    return mix(weights.experts, x_TE, expert_TC, share_TC, real_T, shared_TE)


def choose(config: Config, weights: Mixture, x_TE: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each token, (T, C) int64, and their shares, (T, C) float32.

    They are out of the best groups alone: by the best expert of each, or, where a bias corrects the
    choice, by its best two.
    """
    score_TX = linear(x_TE.float(), weights.router.float())
    score_TX = score_TX.softmax(-1) if weights.choice_bias is None else score_TX.sigmoid()
    order_TX = score_TX if weights.choice_bias is None else score_TX + weights.choice_bias
    if config.num_groups > 1:
        order_TGX = order_TX.unflatten(-1, (config.num_groups, -1))
        best = order_TGX.topk(1 if weights.choice_bias is None else 2, dim=-1).values.sum(-1)
        group_TC = best.topk(config.num_chosen_groups, dim=-1).indices
        every_G = torch.arange(config.num_groups, device=x_TE.device)
        among_TG = (group_TC[..., None] == every_G).any(1)
        outside = 0.0 if weights.choice_bias is None else -torch.inf
        order_TX = torch.where(among_TG[..., None], order_TGX, outside).flatten(1)
    top_TC, expert_TC = order_TX.topk(config.num_chosen, dim=-1)
    share_TC = top_TC if weights.choice_bias is None else score_TX.gather(1, expert_TC)
    if config.normalized:
        share_TC = share_TC / (share_TC.sum(-1, keepdim=True) + 1e-20)
    return expert_TC, share_TC


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, H, L = config.dim, config.num_heads, config.rank
    N, P, U, X = config.plain_dim, config.rope_dim, config.value_dim, config.num_experts
    Q = config.query_rank
    biased = lambda size: shape(size) if size and config.biased else None  # noqa: E731
    attn = Attention(
        wq=None if Q else shape(H * (N + P), E), w_q_latent=shape(Q, E) if Q else None,
        b_q_latent=biased(Q), q_latent_norm=shape(Q) if Q else None,
        w_q_up=shape(H * (N + P), Q) if Q else None,
        w_latent=shape(L + P, E), b_latent=biased(L + P), latent_norm=shape(L),
        w_kv=shape(H * (N + U), L), wo=shape(E, H * U), bo=biased(E),
    )  # fmt: skip
    dense = mlp_of(E, config.mlp_dim)
    shared = mlp_of(E, config.expert_dim * config.num_shared)
    bias = shape(X) if config.corrected else None
    sparse = Mixture(shape(X, E), experts_of(X, E, config.expert_dim), shared, bias)
    kinds = [dense if i < config.num_dense else sparse for i in range(config.num_layers)]
    return params_of(config, [layer_of(config, attn, kind) for kind in kinds])


def specs(config: Config) -> Specs:
    """How a model of this config is split: over "tp" heads, mlps, in each expert, and vocabulary;
    over "ep" whole experts are spread. What makes latents is whole."""
    H, N, U = config.num_heads, config.plain_dim, config.value_dim
    q = rows(Each(H, N + config.rope_dim))
    parts = {"wq": q, "w_q_up": q, "w_kv": rows(Each(H, N + U)), "wo": summed(Each(H, U))}
    shared = config.expert_dim * config.num_shared
    weights = {
        **vocabulary_splits(config),
        **{f"layers.*.attn.{name}": part for name, part in parts.items()},
        **mlp_splits("mlp", config.mlp_dim),
        **mlp_splits("mlp.shared", shared, whole_sum=False),
        **expert_splits(config.num_experts, config.expert_dim),
    }
    split = {"num_heads": Size(), "mlp_dim": Size(), "expert_dim": Size()}
    return Specs(weights, {**split, "num_experts": Size("ep", whole=True)})


def empty(config: Config, room: Room) -> tuple[Tensor, ...]:
    """A cache without tokens: pages of (C,) for each layer."""
    return tuple(room.pages(config.rank + config.rope_dim) for _ in range(config.num_layers))


ZEROS = dict.fromkeys(("b_q_latent", "b_latent", "bo", "choice_bias"), 0.0)
init_params = functools.partial(
    naming.init_params, blank, vectors=ZEROS
)  # config, *, seed, device, dtype
init_cache = functools.partial(layers.init_cache, empty)  # config, num_blocks, *, block_size, ...


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json.

    Raises:
        ValueError: numbers that cannot be.
    """
    method = raw.get("topk_method", "greedy")
    groups = (1, 1)
    if method == "group_limited_greedy":
        groups = read_groups(raw, raw["n_group"], raw["topk_group"])
    elif method != "greedy":
        raise ValueError(f"topk_method is {method!r}, not greedy or group_limited_greedy")
    return Config(
        **read_fields(raw, num_dense=0), num_groups=groups[0], num_chosen_groups=groups[1]
    )


def read_groups(raw: loading.Raw, count: int, chosen: int, least: int = 1) -> tuple[int, int]:
    """How many groups experts are in, and how many of them a token has.

    Args:
        least: experts that a group has.

    Raises:
        ValueError: groups that experts cannot be shared out to, or too few experts in those chosen.
    """
    total = raw["n_routed_experts"]
    if count < 1 or total % count or total // count < least or not 1 <= chosen <= count:
        raise ValueError(
            f"n_group is {count} and topk_group {chosen}; {total} experts go into groups of one "
            f"size, {least} at least, of which a token has some"
        )
    if chosen * (total // count) < raw["num_experts_per_tok"]:
        raise ValueError(
            f"num_experts_per_tok is {raw['num_experts_per_tok']}, but {chosen} groups have "
            f"{chosen * (total // count)} experts"
        )
    return count, chosen


def read_fields(raw: loading.Raw, *, num_dense: int) -> dict[str, Any]:
    """What V2 and V3 say in the same words.

    Args:
        num_dense: layers without experts, of a config that does not say.

    Raises:
        ValueError: numbers that cannot be.
    """
    theta, scaling, share = read_rope(raw)
    num_heads, rope_dim = raw["num_attention_heads"], raw["qk_rope_head_dim"]
    if raw.get("num_key_value_heads") not in (None, num_heads):
        raise ValueError(
            f"num_key_value_heads is {raw['num_key_value_heads']}, but there are {num_heads} heads"
        )
    if share != 1 or rope_dim % 2:
        raise ValueError(
            f"qk_rope_head_dim is {rope_dim} and partial_rotary_factor {share}; only all of these "
            "columns, in pairs, can turn"
        )
    check_pairs(scaling, rope_dim)
    return {
        "vocab_size": raw["vocab_size"], "num_layers": raw["num_hidden_layers"],
        "num_heads": num_heads, "dim": raw["hidden_size"],
        "mlp_dim": raw["intermediate_size"], "rank": raw["kv_lora_rank"],
        "rope_dim": rope_dim, "plain_dim": raw["qk_nope_head_dim"],
        "value_dim": raw["v_head_dim"], "num_experts": raw["n_routed_experts"],
        "num_chosen": chosen_of(raw, raw["n_routed_experts"]),
        "expert_dim": raw["moe_intermediate_size"], "num_shared": raw["n_shared_experts"],
        "num_dense": raw.get("first_k_dense_replace", num_dense),
        "share_scale": raw["routed_scaling_factor"], "rope_theta": theta,
        "rope_scaling": scaling, "norm_eps": raw["rms_norm_eps"],
        "tied": raw.get("tie_word_embeddings", False), "max_len": longest(raw, scaling),
        "query_rank": raw.get("q_lora_rank", 1536) or 0,
        "biased": raw.get("attention_bias", False),
    }  # fmt: skip


FORMAT = loading.Format(
    read_config,
    blank,
    names={
        **DECODER_NAMES,
        "layers.*.attn.wq": "model.layers.*.self_attn.q_proj.weight",
        "layers.*.attn.w_q_up": "model.layers.*.self_attn.q_b_proj.weight",
        "layers.*.attn.w_latent": "model.layers.*.self_attn.kv_a_proj_with_mqa.weight",
        "layers.*.attn.latent_norm": "model.layers.*.self_attn.kv_a_layernorm.weight",
        "layers.*.attn.w_kv": "model.layers.*.self_attn.kv_b_proj.weight",
        "layers.*.attn.wo": "model.layers.*.self_attn.o_proj.weight",
        "layers.*.attn.w_q_latent": "model.layers.*.self_attn.q_a_proj.weight",
        "layers.*.attn.b_q_latent": "model.layers.*.self_attn.q_a_proj.bias",
        "layers.*.attn.q_latent_norm": "model.layers.*.self_attn.q_a_layernorm.weight",
        "layers.*.attn.b_latent": "model.layers.*.self_attn.kv_a_proj_with_mqa.bias",
        "layers.*.attn.bo": "model.layers.*.self_attn.o_proj.bias",
        "layers.*.mlp.choice_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
        **mlp_names("mlp", "mlp"),
        **mlp_names("mlp.shared", "mlp.shared_experts"),
        **EXPERT_NAMES,
    },
    only={
        "hidden_act": "silu", "mlp_bias": False, "norm_topk_prob": False,
        "scoring_func": "softmax", "moe_layer_freq": 1,
    },
    skipped=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    renamed=WITHOUT_HEAD,
    harmless=("head_dim", "qk_head_dim", "n_group", "topk_group", "ep_size"),
    wide=("router",),
    kept=("choice_bias",),
    specs=specs,
)  # fmt: skip
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype, mesh -> config, params
