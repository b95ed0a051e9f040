"""Qwen3-Next as pure functions: gated delta rule in most layers, gated attention in the others.

Layers of attention page their cache as Llama does; the others keep a state a request. Shape letters
as in `models.llama`, and in `models.gated_delta` for its layers.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from models import experts, llama, loading, naming, qwen3, qwen3_moe
from models.decoder import Params as Params, decode, layer_of, params_of
from models.experts import experts_of, mix, route
from models.gated_delta import DELTA_NAMES, Delta, delta, delta_of, new_states
from models.layers import Mlp, centred_norm, heads, join, mlp, mlp_names, mlp_of
from models.naming import shape
from models.rope import Turn, rotate

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
class Mixture(experts.Mixture):
    """The same, and the expert that every token has, with its gate."""

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
    q_THD, gate_THD = heads(x_TE, weights.wq, 2 * D).chunk(2, dim=-1)
    k_TKD, v_TKD = heads(x_TE, weights.wk, D), heads(x_TE, weights.wv, D)
    q_THD = rotate(centred_norm(q_THD, weights.q_norm, config.norm_eps), rope)
    k_TKD = rotate(centred_norm(k_TKD, weights.k_norm, config.norm_eps), rope)
    out_THD, kv = fg.ops.attention(q_THD, k_TKD, v_TKD, kv, batch)
    return join(out_THD * gate_THD.sigmoid(), weights.wo), kv


def mixture(config: Config, weights: Mixture, x_TE: Tensor, real_T: Tensor) -> Tensor:
    """(T, E): the experts that the router chooses, and the shared one."""
    chosen = route(x_TE, weights.router, config.num_chosen, normalized=config.normalized)
    shared_TE = linear(x_TE, weights.shared_gate).sigmoid() * mlp(weights.shared, x_TE)
    return mix(weights.experts, x_TE, *chosen, real_T) + shared_TE


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, X = config.dim, config.num_experts
    attn = Attention(**vars(qwen3.attention_of(config)))
    attn = dataclasses.replace(attn, wq=shape(2 * config.num_heads * config.head_dim, E))
    gated = delta_of(config)
    shared = mlp_of(E, config.shared_dim)
    sparse = Mixture(shape(X, E), experts_of(X, E, config.expert_dim), shared, shape(1, E))
    dense = mlp_of(E, config.mlp_dim)
    numbers = range(config.num_layers)
    mixers = [attn if i in config.attention_layers else gated for i in numbers]
    mlps = [dense if i in config.dense_layers else sparse for i in numbers]
    return params_of(config, [layer_of(config, *parts) for parts in zip(mixers, mlps)])


CENTRED = dict.fromkeys(("attn_norm", "mlp_norm", "norm", "q_norm", "k_norm"), 0.0)
init_params = functools.partial(
    naming.init_params, blank, vectors=CENTRED
)  # config, *, seed, device, dtype


def init_cache(
    config: Config,
    num_blocks: int,
    *,
    num_slots: int,
    block_size: int = 16,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Kept, ...]:
    """Of a layer of attention a pair of (num_blocks, block_size, K, D), of any other its states."""
    paged = num_blocks, block_size, config.num_kv_heads, config.head_dim
    zeros = lambda: torch.zeros(paged, device=device, dtype=dtype)  # noqa: E731
    return tuple(
        (zeros(), zeros())
        if i in config.attention_layers
        else new_states(config, num_slots, device, dtype)
        for i in range(config.num_layers)
    )


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json."""
    fields = llama.read_fields(raw) | qwen3_moe.read_experts(raw)
    every = raw.get("full_attention_interval", 4)
    numbers = range(1, 1 + fields["num_layers"])
    kinds = raw.get("layer_types") or ["" if i % every else "full_attention" for i in numbers]
    rope = raw.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25))
    return Config(
        **fields, rope_dim=int(fields["head_dim"] * part),
        shared_dim=raw["shared_expert_intermediate_size"],
        attention_layers=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"),
        key_heads=raw["linear_num_key_heads"], value_heads=raw["linear_num_value_heads"],
        key_dim=raw["linear_key_head_dim"], value_dim=raw["linear_value_head_dim"],
        taps=raw["linear_conv_kernel_dim"],
    )  # fmt: skip


FORMAT = qwen3_moe.FORMAT._replace(
    read=read_config,
    blank=blank,
    names={
        **qwen3_moe.FORMAT.names,
        **DELTA_NAMES,
        **mlp_names("mlp.shared", "mlp.shared_expert"),
        "layers.*.mlp.shared_gate": "model.layers.*.mlp.shared_expert_gate.weight",
    },
    skipped=("lm_head.weight", "mtp.*"),
    layers=("full_attention", "linear_attention"),
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype -> config, params
