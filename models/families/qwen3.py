"""Qwen3, dense, as pure functions: Llama with a norm on each head's queries and keys.

Shape letters as in `fngraph.models.families.llama`.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

import fngraph as fg
from fngraph.models.families import llama, qwen2
from fngraph.models.families.decoder import (
    WITHOUT_HEAD,
    Params as Params,
    decode,
    layer_of,
    params_of,
)
from fngraph.models.families.layers import attend, join, mlp_of, rms_norm
from fngraph.models.families.llama import (
    KV,
    UNBIASED,
    Batch as Batch,
    Config as Config,
    init_cache as init_cache,
    project,
    specs as specs,
    window_of,
)
from fngraph.models.families.rope import Turn, rotate
from fngraph.models.weights import loading, naming
from fngraph.models.weights.naming import shape


@fg.struct
class Attention(llama.Attention):
    """Llama's, and the norms."""

    q_norm: Tensor  # (D,)
    k_norm: Tensor  # (D,)


def forward(params: Params, cache: tuple[KV, ...], batch: Batch) -> tuple[Tensor, tuple[KV, ...]]:
    """The logits of each request's rows `logits_indices`, (R, V), and the updated cache."""
    return decode(params, cache, batch, attention, rope_dim=params.config.head_dim)


def attention(
    config: Any, weights: Attention, x_TE: Tensor, rope: Turn, kv: KV, batch: Any
) -> tuple[Tensor, KV]:
    """Attention with normalized queries and keys."""
    q_THD, k_TKD, v_TKD = project(config, weights, x_TE)
    q_THD = rotate(rms_norm(q_THD, weights.q_norm, config.norm_eps), rope)
    k_TKD = rotate(rms_norm(k_TKD, weights.k_norm, config.norm_eps), rope)
    out_THD, kv = attend(q_THD, k_TKD, v_TKD, kv, batch, window=weights.window)
    return join(out_THD, weights.wo, weights.bo), kv


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    attns = (attention_of(config, window_of(config, i)) for i in range(config.num_layers))
    mlp = mlp_of(config.dim, config.mlp_dim)
    return params_of(config, [layer_of(config, attn, mlp) for attn in attns])


def attention_of(config: Any, window: int | None = None) -> Attention:
    """Shapes of one attention."""
    norm = shape(config.head_dim)
    return Attention(**vars(llama.attention_of(config, window)), q_norm=norm, k_norm=norm)


init_params = functools.partial(
    naming.init_params, blank, vectors=UNBIASED
)  # config, *, seed, device, dtype


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json."""
    return Config(**llama.read_fields(raw, head_dim=128, num_kv_heads=32), **qwen2.windows_of(raw))


FORMAT = loading.Format(
    read_config,
    blank,
    names={
        **llama.FORMAT.names,
        "layers.*.attn.q_norm": "model.layers.*.self_attn.q_norm.weight",
        "layers.*.attn.k_norm": "model.layers.*.self_attn.k_norm.weight",
    },
    only={"hidden_act": "silu"},
    renamed=WITHOUT_HEAD,
    specs=specs,
    layers=("full_attention", "sliding_attention"),
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype, mesh -> config, params
