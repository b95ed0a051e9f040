"""Qwen3-Next as pure functions: gated delta rule in most layers, gated attention in the others.

Layers of attention page their cache as Llama does; the others keep a state a request. A layer
around a gated delta rule (GDN) is its projections, a convolution, the rule and a gated norm.

Shape letters as in `fngraph.models.families.llama`; in GDN G key and H value heads, M = H/G value
heads a key head, D key and U value columns, C = 2*G*D + H*U channels of its convolution, W taps.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

import fngraph as fg
from fngraph.models.families import experts, layers, llama, qwen3, qwen3_moe
from fngraph.models.families.decoder import Params as Params, decode, layer_of, params_of
from fngraph.models.families.experts import expert_splits, experts_of, mix, route
from fngraph.models.families.layers import (
    Mlp,
    Room,
    centred_norm,
    heads,
    join,
    mlp,
    mlp_names,
    mlp_of,
    mlp_splits,
    rms_norm,
)
from fngraph.models.families.rope import Turn, rotate
from fngraph.models.weights import loading, naming
from fngraph.models.weights.naming import shape
from fngraph.models.weights.splits import Each, Size, Specs, Split, rows, summed

States = tuple[Tensor, Tensor]  # last inputs (slots, C, W - 1), state (slots, H, D, U) float32
Kept = tuple[Tensor, Tensor]  # of attention (k, v), else States


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen3_moe.Config):
    """Sizes of a model. Hashable, and part of the structure of its `Params`."""

    rope_dim: int  # columns of a head that are rotated
    shared_dim: int  # F of the expert that every token has
    attention_layers: tuple[int, ...]  # the others have the delta rule
    key_heads: int  # G
    value_heads: int  # H
    key_dim: int  # D
    value_dim: int  # U
    taps: int  # W

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@fg.struct
class Attention(qwen3.Attention):
    """Weights of one attention; wq is (H*2*D, E): of each head the query, then the gate."""


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


@fg.struct
class Mixture(experts.Mixture):
    """Weights of the experts and their router, and of the expert that every token has."""

    shared: Mlp
    shared_gate: Tensor  # (1, E)


@fg.struct
class Slots:
    """Where each request's states are."""

    state_slots: Tensor = fg.buffer("R", "int64", pad=-1)  # -1: keep nothing


@fg.struct
class Batch(llama.Batch, Slots):
    """Llama's, with states."""


def forward(
    params: Params, cache: tuple[Kept, ...], batch: Batch
) -> tuple[Tensor, tuple[Kept, ...]]:
    """The logits of each request's rows `logits_indices`, (R, V), and the updated cache."""
    rope_dim = params.config.rope_dim
    return decode(params, cache, batch, mixer, mixture, rope_dim=rope_dim, norm=centred_norm)


def mixer(
    config: Config, weights: Attention | Delta, x_TE: Tensor, rope: Turn, kept: Kept, batch: Batch
) -> tuple[Tensor, Kept]:
    """Attention or delta, as the layer has it."""
    if isinstance(weights, Delta):
        return delta(config, weights, x_TE, kept, batch)
    return attention(config, weights, x_TE, rope, kept, batch)


def attention(
    config: Config, weights: Attention, x_TE: Tensor, rope: Turn, kv: Kept, batch: Batch
) -> tuple[Tensor, Kept]:
    """Attention with a gate on what comes out."""
    D = config.head_dim
    q_THD, gate_THD = heads(x_TE, weights.wq, 2 * D, weights.bq).chunk(2, dim=-1)
    k_TKD, v_TKD = heads(x_TE, weights.wk, D, weights.bk), heads(x_TE, weights.wv, D, weights.bv)
    q_THD = rotate(centred_norm(q_THD, weights.q_norm, config.norm_eps), rope)
    k_TKD = rotate(centred_norm(k_TKD, weights.k_norm, config.norm_eps), rope)
    out_THD, kv = fg.ops.attention(q_THD, k_TKD, v_TKD, kv, batch)
    return join(out_THD * gate_THD.sigmoid(), weights.wo, weights.bo), kv


def delta(
    config: Config, weights: Delta, x_TE: Tensor, states: States, batch: Batch
) -> tuple[Tensor, States]:
    """Convolution, gated delta rule, gated norm; and the layer's last inputs and state."""
    G, H, D, U = config.key_heads, config.value_heads, config.key_dim, config.value_dim
    last, state = states
    *qkv, gate_TGU = heads(x_TE, weights.w_qkvz, 2 * (D + H // G * U)).split(
        [D, D, H // G * U, H // G * U], dim=-1
    )
    b_TH, a_TH = (x.flatten(1) for x in heads(x_TE, weights.w_ba, 2 * H // G).chunk(2, dim=-1))
    mixed_TC = torch.cat([x.flatten(1) for x in qkv], dim=-1)
    mixed_TC, last = fg.ops.causal_conv(mixed_TC, weights.conv[:, 0], last, batch)
    q_TC, k_TC, v_TC = silu(mixed_TC).split([G * D, G * D, H * U], dim=-1)
    q_TGD, k_TGD = (unit(rearrange(x, "t (g d) -> t g d", g=G)) for x in (q_TC, k_TC))
    v_THU = rearrange(v_TC, "t (h u) -> t h u", h=H)
    g_TH = -weights.a_log.float().exp() * softplus(a_TH.float() + weights.dt_bias.float())
    out_THU, state = fg.ops.gated_delta(q_TGD, k_TGD, v_THU, g_TH, b_TH.sigmoid(), state, batch)
    gate_THU = rearrange(gate_TGU, "t g (m u) -> t (g m) u", u=U)
    out_THU = rms_norm(out_THU, weights.gate_norm, config.norm_eps) * silu(gate_THU.float())
    return join(out_THU.to(x_TE.dtype), weights.w_out), (last, state)


def unit(x_TGD: Tensor) -> Tensor:
    """Each row with length 1."""
    wide = x_TGD.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x_TGD.dtype)


def mixture(config: Config, weights: Mixture, x_TE: Tensor, real_T: Tensor) -> Tensor:
    """(T, E): the experts that the router chooses, and the shared one."""
    chosen = route(x_TE, weights.router, config.num_chosen, normalized=config.normalized)
    shared_TE = linear(x_TE, weights.shared_gate).sigmoid() * mlp(weights.shared, x_TE)
    return mix(weights.experts, x_TE, *chosen, real_T, shared_TE)


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, X = config.dim, config.num_experts
    attn, q = Attention(**vars(qwen3.attention_of(config))), config.num_heads * config.head_dim
    attn = dataclasses.replace(
        attn, wq=shape(2 * q, E), bq=shape(2 * q) if config.qkv_bias else None
    )
    gated = delta_of(config)
    shared = mlp_of(E, config.shared_dim)
    sparse = Mixture(shape(X, E), experts_of(X, E, config.expert_dim), shared, shape(1, E))
    dense = mlp_of(E, config.mlp_dim)
    numbers = range(config.num_layers)
    mixers = [attn if i in config.attention_layers else gated for i in numbers]
    mlps = [dense if i in config.dense_layers else sparse for i in numbers]
    return params_of(config, [layer_of(config, *parts) for parts in zip(mixers, mlps)])


def delta_of(config: Config) -> Delta:
    """Shapes of one such layer."""
    E, H, U = config.dim, config.value_heads, config.value_dim
    return Delta(
        w_qkvz=shape(config.channels + H * U, E), w_ba=shape(2 * H, E),
        conv=shape(config.channels, 1, config.taps), dt_bias=shape(H), a_log=shape(H),
        gate_norm=shape(U), w_out=shape(E, H * U),
    )  # fmt: skip


def specs(config: Config) -> Specs:
    """How a model of this config is split: as Qwen3-MoE, and the delta rule by its heads."""
    attn = llama.attention_splits(config, wq=2)
    experts = expert_splits(config.num_experts, config.expert_dim)
    shared = mlp_splits("mlp.shared", config.shared_dim, whole_sum=False)
    parts = {**attn, **delta_splits(config), **experts, **shared}
    return Specs({**llama.specs(config).weights, **parts}, SIZES)


SIZES = {**qwen3_moe.SIZES, "shared_dim": Size(), "key_heads": Size(repeated=True),
         "value_heads": Size()}  # fmt: skip


def delta_splits(config: Config) -> dict[str, Split]:
    """How the weights of such a layer are split: by value heads, of each key head its own."""
    G, H, D, U = config.key_heads, config.value_heads, config.key_dim, config.value_dim
    own, key, value = Each(H // G, U), Each(G, D, repeated=True), Each(H, U)
    qkvz, ba = (D, D, own, own), (Each(H // G), Each(H // G))
    parts = {
        "w_qkvz": rows(Each(G, qkvz, repeated=True)), "w_ba": rows(Each(G, ba, repeated=True)),
        "conv": rows((key, key, value)), "dt_bias": rows(Each(H)), "a_log": rows(Each(H)),
        "w_out": summed(value),
    }  # fmt: skip
    return {f"layers.*.attn.{name}": part for name, part in parts.items()}


def empty(config: Config, room: Room) -> tuple[Kept, ...]:
    """A cache without tokens: pages for a layer of attention, else a slot for each request."""
    return tuple(
        llama.pair(config, room) if i in config.attention_layers else new_states(config, room)
        for i in range(config.num_layers)
    )


def new_states(config: Config, room: Room) -> States:
    """A slot for each request, of one layer."""
    H, D, U = config.value_heads, config.key_dim, config.value_dim
    last = room.slots(config.channels, config.taps - 1)
    return last, room.slots(H, D, U, dtype=torch.float32)


CENTRED = dict.fromkeys(("attn_norm", "mlp_norm", "norm", "q_norm", "k_norm"), 0.0)
init_params = functools.partial(
    naming.init_params, blank, vectors=CENTRED | llama.UNBIASED
)  # config, *, seed, device, dtype
init_cache = functools.partial(layers.init_cache, empty)  # config, num_blocks, *, block_size, ...


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json."""
    fields = llama.read_fields(raw, head_dim=256, num_kv_heads=2, share=0.25)
    fields |= qwen3_moe.read_experts(raw)
    every = raw.get("full_attention_interval", 4)
    numbers = range(1, 1 + fields["num_layers"])
    kinds = raw.get("layer_types") or ["" if i % every else "full_attention" for i in numbers]
    key_heads, value_heads = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ValueError(
            f"linear_num_value_heads is {value_heads}, no multiple of linear_num_key_heads, "
            f"{key_heads}"
        )
    return Config(
        **fields, shared_dim=raw["shared_expert_intermediate_size"],
        attention_layers=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"),
        key_heads=key_heads, value_heads=value_heads,
        key_dim=raw["linear_key_head_dim"], value_dim=raw["linear_value_head_dim"],
        taps=raw["linear_conv_kernel_dim"],
    )  # fmt: skip


DELTA_NAMES = {
    "layers.*.attn.w_qkvz": "model.layers.*.linear_attn.in_proj_qkvz.weight",
    "layers.*.attn.w_ba": "model.layers.*.linear_attn.in_proj_ba.weight",
    "layers.*.attn.conv": "model.layers.*.linear_attn.conv1d.weight",
    "layers.*.attn.dt_bias": "model.layers.*.linear_attn.dt_bias",
    "layers.*.attn.a_log": "model.layers.*.linear_attn.A_log",
    "layers.*.attn.gate_norm": "model.layers.*.linear_attn.norm.weight",
    "layers.*.attn.w_out": "model.layers.*.linear_attn.out_proj.weight",
}
FORMAT = qwen3_moe.FORMAT._replace(
    read=read_config,
    blank=blank,
    names={
        **qwen3_moe.FORMAT.names,
        **DELTA_NAMES,
        **mlp_names("mlp.shared", "mlp.shared_expert"),
        "layers.*.mlp.shared_gate": "model.layers.*.mlp.shared_expert_gate.weight",
    },
    only={"hidden_act": "silu", "use_sliding_window": False},
    skipped=("mtp.*",),
    layers=("full_attention", "linear_attention"),
    wide=("dt_bias", "a_log", "gate_norm", *CENTRED),
    specs=specs,
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype, mesh -> config, params
