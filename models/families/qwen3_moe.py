"""Qwen3-MoE as pure functions: Qwen3 whose mlps are experts, but for some layers.

Shape letters as in `fngraph.models.families.llama`; X experts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import Tensor

from fngraph.models.families import llama, qwen3
from fngraph.models.families.decoder import Params as Params, decode, layer_of, params_of
from fngraph.models.families.experts import (
    EXPERT_NAMES,
    Mixture,
    chosen_of,
    expert_splits,
    experts_of,
    mix,
    route,
)
from fngraph.models.families.layers import mlp_of
from fngraph.models.families.llama import (
    KV,
    UNBIASED,
    Batch as Batch,
    init_cache as init_cache,
    window_of,
)
from fngraph.models.families.qwen3 import attention, attention_of
from fngraph.models.weights import loading, naming
from fngraph.models.weights.naming import shape
from fngraph.models.weights.splits import Size, Specs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    """Sizes of a model. Hashable, and part of the structure of its `Params`."""

    num_experts: int  # X
    num_chosen: int  # experts of a token
    expert_dim: int  # F of an expert
    normalized: bool  # the shares of a token's experts add up to 1
    dense_layers: tuple[int, ...] = ()  # with an mlp of mlp_dim in place of experts


def forward(params: Params, cache: tuple[KV, ...], batch: Batch) -> tuple[Tensor, tuple[KV, ...]]:
    """The logits of each request's rows `logits_indices`, (R, V), and the updated cache."""
    return decode(params, cache, batch, attention, mixture, rope_dim=params.config.head_dim)


def mixture(config: Config, weights: Mixture, x_TE: Tensor, real_T: Tensor) -> Tensor:
    """(T, E): the experts that the router chooses."""
    expert_TC, share_TC = route(
        x_TE, weights.router, config.num_chosen, normalized=config.normalized
    )
    return mix(weights.experts, x_TE, expert_TC, share_TC, real_T)


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, X = config.dim, config.num_experts
    dense = mlp_of(E, config.mlp_dim)
    sparse = Mixture(shape(X, E), experts_of(X, E, config.expert_dim))
    kinds = [dense if i in config.dense_layers else sparse for i in range(config.num_layers)]
    attns = (attention_of(config, window_of(config, i)) for i in range(config.num_layers))
    return params_of(config, [layer_of(config, *parts) for parts in zip(attns, kinds)])


init_params = functools.partial(
    naming.init_params, blank, vectors=UNBIASED
)  # config, *, seed, device, dtype


def specs(config: Config) -> Specs:
    """How a model of this config is split: over "tp" as Llama, and in each expert; over "ep" whole
    experts are spread."""
    experts = expert_splits(config.num_experts, config.expert_dim)
    return Specs({**llama.specs(config).weights, **experts}, SIZES)


SIZES = {**llama.SIZES, "num_experts": Size("ep", whole=True), "expert_dim": Size()}


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json, whose windows are in all layers or in none.

    Raises:
        ValueError: numbers that cannot be.
    """
    fields = llama.read_fields(raw, num_kv_heads=4)
    used = raw.get("use_sliding_window", False) and raw.get("sliding_window", 4096) is not None
    if used and raw.get("layer_types"):
        raise ValueError("layer_types beside use_sliding_window, which goes for all layers here")
    kinds = ["sliding_attention"] * fields["num_layers"] if used else []
    windows = llama.read_windows(kinds, raw.get("sliding_window", 4096))
    return Config(**fields, **windows, **read_experts(raw))


def read_experts(raw: loading.Raw) -> dict[str, Any]:
    """What Qwen's relatives say of experts.

    Raises:
        ValueError: numbers that cannot be.
    """
    step, plain = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    if step < 1:
        raise ValueError(f"decoder_sparse_step is {step}; 1: every layer has experts")
    layers = range(raw["num_hidden_layers"])
    counts = [raw[key] for key in ("num_local_experts", "num_experts") if key in raw]
    if len(set(counts)) > 1:
        raise ValueError(f"num_local_experts is {counts[0]}, but num_experts {counts[1]}")
    count = counts[0] if counts else raw["num_experts"]
    return {
        "num_experts": count,
        "num_chosen": chosen_of(raw, count),
        "expert_dim": raw["moe_intermediate_size"],
        "normalized": raw["norm_topk_prob"],
        "dense_layers": tuple(i for i in layers if i in plain or (i + 1) % step),
    }


FORMAT = qwen3.FORMAT._replace(
    read=read_config,
    blank=blank,
    names={**qwen3.FORMAT.names, **EXPERT_NAMES},
    only={"hidden_act": "silu"},
    layers=("full_attention",),
    specs=specs,
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype, mesh -> config, params
