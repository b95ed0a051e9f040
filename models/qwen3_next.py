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
from models import llama, loading, naming, qwen3, qwen3_moe
from models.experts import Experts, experts_of, mix, route
from models.gated_delta import DELTA_NAMES, Delta, delta, delta_of, new_states
from models.layers import Mlp, centred_norm, heads, join, mlp, mlp_names, mlp_of
from models.naming import shape
from models.rope import Turn, rotate, rotation

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
class Mixture:
    """Weights of the experts and of what chooses among them; the shared one has a gate."""

    router: Tensor  # (X, E)
    experts: Experts
    shared: Mlp
    shared_gate: Tensor  # (1, E)


@fg.struct
class Layer:
    """Weights of one layer; its norms are centred on 0."""

    attn_norm: Tensor  # (E,)
    attn: Attention | Delta
    mlp_norm: Tensor  # (E,)
    mlp: Mlp | Mixture


@fg.struct
class Params:
    """Weights of a model."""

    embed: Tensor  # (V, E)
    layers: tuple[Layer, ...]
    norm: Tensor  # (E,)
    head: Tensor | None  # (V, E); None where it is tied to embed
    config: Config = fg.static()


@fg.struct
class Batch:
    """One step's tokens, R requests of one or more tokens each, laid end to end."""

    token_ids: Tensor = fg.buffer("T", "int64")
    positions: Tensor = fg.buffer("T", "int64")
    slot_mapping: Tensor = fg.buffer("T", "int64", pad=-1)  # -1: write nowhere
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)  # this step's tokens included
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: Tensor = fg.buffer("R B", "int32", pad=0)
    state_slots: Tensor = fg.buffer("R", "int64", pad=-1)  # -1: keep nothing
    logits_indices: Tensor = fg.buffer("R", "int64", pad=0)  # the head runs on R rows, not on T
    spec: fg.BatchSpec = fg.host()


def forward(
    params: Params, cache: tuple[Kept, ...], batch: Batch
) -> tuple[Tensor, tuple[Kept, ...]]:
    """The logits of each request's rows `logits_indices`, (R, V), and the updated cache."""
    config, all_kept = params.config, []
    x_TE = params.embed[batch.token_ids]
    rope = rotation(
        batch.positions, config.rope_dim, config.rope_theta, x_TE.dtype, config.rope_scaling
    )
    for layer, kept in zip(params.layers, cache, strict=True):
        x_TE, kept = decoder_layer(config, layer, x_TE, rope, kept, batch)
        all_kept.append(kept)
    x_RE = centred_norm(x_TE[batch.logits_indices], params.norm, config.norm_eps)
    head_VE = params.embed if params.head is None else params.head
    return linear(x_RE, head_VE), tuple(all_kept)


@fg.block
def decoder_layer(
    config: Config, layer: Layer, x_TE: Tensor, rope: Turn, kept: Kept, batch: Batch
) -> tuple[Tensor, Kept]:
    """x + attention or delta(norm(x)), plus the mlp or the experts of its norm; what is kept."""
    normed_TE = centred_norm(x_TE, layer.attn_norm, config.norm_eps)
    if isinstance(layer.attn, Delta):
        out_TE, kept = delta(config, layer.attn, normed_TE, kept, batch)
    else:
        out_TE, kept = attention(config, layer.attn, normed_TE, rope, kept, batch)
    x_TE = x_TE + out_TE
    normed_TE = centred_norm(x_TE, layer.mlp_norm, config.norm_eps)
    if isinstance(layer.mlp, Mlp):
        return x_TE + mlp(layer.mlp, normed_TE), kept
    return x_TE + mixture(config, layer.mlp, normed_TE, batch.slot_mapping >= 0), kept


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
    E, V, X = config.dim, config.vocab_size, config.num_experts
    attn = Attention(**vars(qwen3.attention_of(config)))
    attn = dataclasses.replace(attn, wq=shape(2 * config.num_heads * config.head_dim, E))
    gated = delta_of(config)
    shared = mlp_of(E, config.shared_dim)
    sparse = Mixture(shape(X, E), experts_of(X, E, config.expert_dim), shared, shape(1, E))
    dense = mlp_of(E, config.mlp_dim)
    layers = tuple(
        Layer(
            shape(E), attn if i in config.attention_layers else gated,
            shape(E), dense if i in config.dense_layers else sparse,
        )
        for i in range(config.num_layers)
    )  # fmt: skip
    return Params(shape(V, E), layers, shape(E), None if config.tied else shape(V, E), config)


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
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype -> config, params
