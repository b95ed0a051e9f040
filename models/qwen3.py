"""Qwen3, dense, as pure functions: Llama with a norm on each head's queries and keys.

Shape letters as in `models.llama`.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from models import llama, loading, naming
from models.layers import DECODER_NAMES, Mlp, attend, heads, join, mlp, mlp_names, mlp_of, rms_norm
from models.llama import KV, Batch as Batch, Config as Config, init_cache as init_cache
from models.naming import shape
from models.rope import Turn, rotate, rotation


@fg.struct
class Attention:
    """Weights of one attention, matrices as (out, in)."""

    wq: Tensor  # (H*D, E)
    wk: Tensor  # (K*D, E)
    wv: Tensor  # (K*D, E)
    wo: Tensor  # (E, H*D)
    q_norm: Tensor  # (D,)
    k_norm: Tensor  # (D,)


@fg.struct
class Layer:
    """Weights of one layer."""

    attn_norm: Tensor  # (E,)
    attn: Attention
    mlp_norm: Tensor  # (E,)
    mlp: Mlp


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
    """x + attention(norm(x)), plus the mlp of its norm; and the layer's cache."""
    normed_TE = rms_norm(x_TE, layer.attn_norm, config.norm_eps)
    out_TE, kv = attention(config, layer.attn, normed_TE, rope, kv, batch)
    x_TE = x_TE + out_TE
    return x_TE + mlp(layer.mlp, rms_norm(x_TE, layer.mlp_norm, config.norm_eps)), kv


def attention(
    config: Any, weights: Attention, x_TE: Tensor, rope: Turn, kv: KV, batch: Any
) -> tuple[Tensor, KV]:
    """Attention with normalized queries and keys."""
    q_THD, k_TKD, v_TKD = (
        heads(x_TE, weight, config.head_dim) for weight in (weights.wq, weights.wk, weights.wv)
    )
    q_THD = rotate(rms_norm(q_THD, weights.q_norm, config.norm_eps), rope)
    k_TKD = rotate(rms_norm(k_TKD, weights.k_norm, config.norm_eps), rope)
    out_THD, kv = attend(q_THD, k_TKD, v_TKD, kv, batch)
    return join(out_THD, weights.wo), kv


def logits(params: Any, x_RE: Tensor) -> Tensor:
    """The last norm and the head, (R, V)."""
    head_VE = params.embed if params.head is None else params.head
    return linear(rms_norm(x_RE, params.norm, params.config.norm_eps), head_VE)


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, V = config.dim, config.vocab_size
    layer = Layer(shape(E), attention_of(config), shape(E), mlp_of(E, config.mlp_dim))
    head = None if config.tied else shape(V, E)
    return Params(shape(V, E), (layer,) * config.num_layers, shape(E), head, config)


def attention_of(config: Any) -> Attention:
    """Shapes of one attention."""
    E, D = config.dim, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D
    return Attention(shape(q, E), shape(kv, E), shape(kv, E), shape(E, q), shape(D), shape(D))


init_params = functools.partial(naming.init_params, blank)  # config, *, seed, device, dtype


ATTENTION_NAMES = {
    "layers.*.attn.wq": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attn.wk": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attn.wv": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attn.wo": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.attn.q_norm": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attn.k_norm": "model.layers.*.self_attn.k_norm.weight",
}
FORMAT = loading.Format(
    llama.read_config,
    blank,
    names={**DECODER_NAMES, **ATTENTION_NAMES, **mlp_names("mlp", "mlp")},
    only={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    skipped=("lm_head.weight",),
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype -> config, params
