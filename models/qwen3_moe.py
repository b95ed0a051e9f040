"""Qwen3-MoE as pure functions: Qwen3 whose mlps are experts, but for some layers.

Shape letters as in `models.llama`; X experts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import Tensor

import fngraph as fg
from models import llama, loading, naming, qwen3
from models.experts import Experts, experts_of, mix, route
from models.layers import Mlp, mlp, mlp_names, mlp_of, rms_norm
from models.llama import KV, Batch as Batch, init_cache as init_cache
from models.naming import shape
from models.qwen3 import Attention, attention, attention_of, logits
from models.rope import Turn, rotation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    """Sizes of a model. Hashable, and part of the structure of its `Params`."""

    num_experts: int  # X
    num_chosen: int  # experts of a token
    expert_dim: int  # F of an expert
    normalized: bool  # the shares of a token's experts add up to 1
    dense_layers: tuple[int, ...] = ()  # with an mlp of mlp_dim in place of experts


@fg.struct
class Mixture:
    """Weights of the experts and of what chooses among them."""

    router: Tensor  # (X, E)
    experts: Experts


@fg.struct
class Layer:
    """Weights of one layer."""

    attn_norm: Tensor  # (E,)
    attn: Attention
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


def forward(params: Params, cache: tuple[KV, ...], batch: Batch) -> tuple[Tensor, tuple[KV, ...]]:
    """The logits of each request's rows `logits_indices`, (R, V), and the updated cache."""
    config, kept = params.config, []
    x_TE = params.embed[batch.token_ids]
    rope = rotation(
        batch.positions, config.head_dim, config.rope_theta, x_TE.dtype, config.rope_scaling
    )
    for layer, kv in zip(params.layers, cache, strict=True):
        x_TE, kv = decoder_layer(config, layer, x_TE, rope, kv, batch)
        kept.append(kv)
    return logits(params, x_TE[batch.logits_indices]), tuple(kept)


@fg.block
def decoder_layer(
    config: Config, layer: Layer, x_TE: Tensor, rope: Turn, kv: KV, batch: Batch
) -> tuple[Tensor, KV]:
    """x + attention(norm(x)), plus the mlp or the experts of its norm; and the layer's cache."""
    normed_TE = rms_norm(x_TE, layer.attn_norm, config.norm_eps)
    out_TE, kv = attention(config, layer.attn, normed_TE, rope, kv, batch)
    x_TE = x_TE + out_TE
    normed_TE = rms_norm(x_TE, layer.mlp_norm, config.norm_eps)
    if isinstance(layer.mlp, Mlp):
        return x_TE + mlp(layer.mlp, normed_TE), kv
    return x_TE + mixture(config, layer.mlp, normed_TE, batch.slot_mapping >= 0), kv


def mixture(config: Config, weights: Mixture, x_TE: Tensor, real_T: Tensor) -> Tensor:
    """(T, E): the experts that the router chooses."""
    expert_TC, share_TC = route(
        x_TE, weights.router, config.num_chosen, normalized=config.normalized
    )
    return mix(weights.experts, x_TE, expert_TC, share_TC, real_T)


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, V = config.dim, config.vocab_size
    dense = mlp_of(E, config.mlp_dim)
    X = config.num_experts
    sparse = Mixture(shape(X, E), experts_of(X, E, config.expert_dim))
    layers = tuple(
        Layer(
            shape(E), attention_of(config), shape(E), dense if i in config.dense_layers else sparse
        )
        for i in range(config.num_layers)
    )
    return Params(shape(V, E), layers, shape(E), None if config.tied else shape(V, E), config)


init_params = functools.partial(naming.init_params, blank)  # config, *, seed, device, dtype


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json."""
    return Config(**llama.read_fields(raw), **read_experts(raw))


def read_experts(raw: loading.Raw) -> dict[str, Any]:
    """What Qwen's relatives say of experts."""
    step, plain = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    layers = range(raw["num_hidden_layers"])
    return {
        "num_experts": raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"],
        "num_chosen": raw["num_experts_per_tok"],
        "expert_dim": raw["moe_intermediate_size"],
        "normalized": raw["norm_topk_prob"],
        "dense_layers": tuple(i for i in layers if i in plain or (i + 1) % step),
    }


EXPERT_NAMES = {
    "layers.*.mlp.router": "model.layers.*.mlp.gate.weight",
    **mlp_names("mlp.experts", "mlp.experts.*"),
}
FORMAT = qwen3.FORMAT._replace(
    read=read_config, blank=blank, names={**qwen3.FORMAT.names, **EXPERT_NAMES}
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype -> config, params
