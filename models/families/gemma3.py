"""Gemma 3's language model as pure functions: Qwen3 with windows in most layers.

Layers with a window turn by a theta of their own. Each part of a layer has a norm before it and one
behind, the mlp has GELU, embeddings are scaled.

Shape letters as in `fngraph.models.families.llama`.

Source: "Gemma 3 Technical Report", 2025, as transformers has it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

import fngraph as fg
from fngraph.models.families import llama, qwen3
from fngraph.models.families.decoder import (
    WITHOUT_HEAD,
    Params as Params,
    all_layers,
    entered,
    layer_of,
    left,
    params_of,
)
from fngraph.models.families.layers import (
    Mlp,
    attend,
    centred_norm,
    join,
    mlp_names,
    mlp_of,
    mlp_splits,
)
from fngraph.models.families.llama import (
    KV,
    Batch as Batch,
    init_cache as init_cache,
    project,
    window_of,
)
from fngraph.models.families.rope import (
    Rope,
    Scaling,
    Turn,
    check_pairs,
    read_rope,
    rotate,
    rotation,
    unscaled,
)
from fngraph.models.weights import loading, naming
from fngraph.models.weights.naming import shape
from fngraph.models.weights.splits import Specs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    """Sizes of a model. Hashable, and part of the structure of its `Params`."""

    scale: float  # of the scores
    window_theta: float  # of layers with a window; `rope_theta` is that of the others
    window_scaling: Scaling | None = None
    softcap: float = 0.0  # of the logits; 0: none


@fg.struct
class Attention(qwen3.Attention):
    """Qwen3's, and the norm behind it."""

    out_norm: Tensor  # (E,)


@fg.struct
class Gated:
    """Weights of the mlp, and the norm behind it."""

    mlp: Mlp
    out_norm: Tensor  # (E,)


def forward(params: Params, cache: tuple[KV, ...], batch: Batch) -> tuple[Tensor, tuple[KV, ...]]:
    """The logits of each request's rows `logits_indices`, (R, V), and the updated cache."""
    c = params.config
    x_TE = entered(params, batch)
    if params.embed is not None:
        x_TE = x_TE * torch.full((), c.dim**0.5, dtype=x_TE.dtype, device=x_TE.device)
    ropes = tuple(
        rotation(batch.positions, c.head_dim, theta, x_TE.dtype, scaling)
        for theta, scaling in (
            (c.rope_theta, c.rope_scaling), (c.window_theta, c.window_scaling)
        )
    )  # fmt: skip
    x_TE, cache = all_layers(params, x_TE, ropes, cache, batch, attention, gated, norm=centred_norm)
    out_RV = left(params, x_TE, batch, centred_norm)
    if c.softcap and params.norm is not None:
        out_RV = (out_RV / c.softcap).tanh() * c.softcap
    return out_RV, cache


def attention(
    config: Config, weights: Attention, x_TE: Tensor, ropes: tuple[Turn, Turn], kv: KV, batch: Any
) -> tuple[Tensor, KV]:
    """Attention with normalized queries, keys and results, turned as its kind of layer is."""
    rope = ropes[weights.window is not None]
    q_THD, k_TKD, v_TKD = project(config, weights, x_TE)
    q_THD = rotate(centred_norm(q_THD, weights.q_norm, config.norm_eps), rope)
    k_TKD = rotate(centred_norm(k_TKD, weights.k_norm, config.norm_eps), rope)
    out_THD, kv = attend(q_THD, k_TKD, v_TKD, kv, batch, scale=config.scale, window=weights.window)
    out_TE = join(out_THD, weights.wo, weights.bo)
    return centred_norm(out_TE, weights.out_norm, config.norm_eps), kv


def gated(config: Config, weights: Gated, x_TE: Tensor, real_T: Tensor) -> Tensor:
    """(T, E): the mlp with GELU, and the norm behind it."""
    up_TF = linear(x_TE, weights.mlp.w_up)
    hidden_TF = gelu(linear(x_TE, weights.mlp.w_gate), approximate="tanh") * up_TF
    out_TE = linear(hidden_TF, weights.mlp.w_down)
    return centred_norm(out_TE, weights.out_norm, config.norm_eps)


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    norm, mlp = shape(config.dim), Gated(mlp_of(config.dim, config.mlp_dim), shape(config.dim))
    windows = (window_of(config, i) for i in range(config.num_layers))
    attns = (Attention(**vars(qwen3.attention_of(config, w)), out_norm=norm) for w in windows)
    return params_of(config, [layer_of(config, attn, mlp) for attn in attns])


def specs(config: Config) -> Specs:
    """How a model of this config is split over an axis "tp", as Llama is."""
    mlp = mlp_splits("mlp.mlp", config.mlp_dim)
    return llama.specs(config)._replace(weights={**llama.specs(config).weights, **mlp})


CENTRED = dict.fromkeys(("attn_norm", "mlp_norm", "norm", "q_norm", "k_norm", "out_norm"), 0.0)
init_params = functools.partial(
    naming.init_params, blank, vectors=CENTRED | llama.UNBIASED
)  # config, *, seed, device, dtype


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json.

    Raises:
        ValueError: numbers that cannot be.
    """
    rope, (window_theta, window_scaling, share) = read_ropes(raw)
    fields = llama.read_fields(raw, head_dim=256, num_kv_heads=4, tied=True, rope=rope)
    if share != 1 or unscaled(window_scaling):
        raise ValueError(
            "rope_parameters of sliding_attention turn part of a head, or go by the length of the "
            "text; only all columns, by default, linear, llama3 or yarn, can be run"
        )
    check_pairs(window_scaling, fields["head_dim"])
    every = raw.get("sliding_window_pattern", 6)
    numbers = range(1, 1 + fields["num_layers"])
    kinds = ["sliding_attention" if i % every else "full_attention" for i in numbers]
    windows = llama.read_windows(raw.get("layer_types") or kinds, raw.get("sliding_window", 4096))
    return Config(
        **fields, **windows, scale=raw.get("query_pre_attn_scalar", 256) ** -0.5,
        window_theta=window_theta, window_scaling=window_scaling,
        softcap=raw.get("final_logit_softcapping") or 0.0,
    )  # fmt: skip


def read_ropes(raw: loading.Raw) -> tuple[Rope, Rope]:
    """Theta, scaling and share of layers without a window, and of those with one.

    Of transformers 5, a rope for each kind of layer, or 4, where `rope_scaling` is of the first;
    it is laid over theirs where both are there, as transformers has it.

    Raises:
        ValueError: ropes of other kinds of layers, or what `read_rope` says.
    """
    said = raw.get("rope_parameters") or {}
    if strange := said.keys() - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"rope_parameters has {', '.join(sorted(strange))}; it has a rope for full_attention "
            "and one for sliding_attention"
        )
    plain: dict[str, Any] = {"rope_type": "default"}
    full = {**(said.get("full_attention") or plain), **(raw.get("rope_scaling") or {})}
    local = dict(said.get("sliding_attention") or plain)
    full.setdefault("rope_theta", raw.get("rope_theta", 1_000_000.0))
    local.setdefault("rope_theta", raw.get("rope_local_base_freq", 10_000.0))
    if not all(rope.get("truncate", True) for rope in (full, local)):  # which it does not look at
        raise ValueError("rope_parameters has truncate=False, which transformers leaves out here")
    most = raw.get("max_position_embeddings")
    beside = {} if most is None else {"max_position_embeddings": most}
    both = [read_rope({"rope_parameters": rope, **beside}) for rope in (full, local)]
    return both[0], both[1]


FORMAT = loading.Format(
    read_config,
    blank,
    names={
        **qwen3.FORMAT.names,
        **mlp_names("mlp.mlp", "mlp"),
        "layers.*.attn.out_norm": "model.layers.*.post_attention_layernorm.weight",
        "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm.weight",
        "layers.*.mlp.out_norm": "model.layers.*.post_feedforward_layernorm.weight",
    },
    only={
        "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    skipped=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    renamed=WITHOUT_HEAD,
    layers=("full_attention", "sliding_attention"),
    wide=tuple(CENTRED),
    specs=specs,
    harmless=("cache_implementation", "_sliding_window_pattern", "sliding_window_pattern"),
)  # fmt: skip
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype, mesh -> config, params
