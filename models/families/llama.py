"""Llama 3 as pure functions: forward(params, cache, batch) -> (logits, cache).

Shape letters: T query tokens, R requests, H query heads, K kv heads, D head dim, E model dim,
F mlp hidden, V vocab, B blocks per request; N blocks in the cache, S tokens in a block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.families.decoder import DECODER_NAMES, Params as Params, logits, params_of
from fngraph.models.families.layers import attend, heads, join, rms_norm, swiglu
from fngraph.models.families.rope import Scaling, Turn, read_rope, rotate, rotation
from fngraph.models.weights import loading, naming
from fngraph.models.weights.naming import shape

KV = tuple[Tensor, Tensor]  # one layer's (k, v), each (N, S, K, D)
Attend = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]  # q, k, v, kv -> out_THD, kv


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a model. Hashable, and part of the structure of its `Params`."""

    vocab_size: int  # V
    num_layers: int
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    dim: int  # E
    mlp_dim: int  # F
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False  # the head is the embedding
    rope_scaling: Scaling | None = None


@fg.struct
class Layer:
    """Weights of one layer, matrices as (out, in)."""

    attn_norm: Tensor  # (E,)
    wq: Tensor  # (H*D, E)
    wk: Tensor  # (K*D, E)
    wv: Tensor  # (K*D, E)
    wo: Tensor  # (E, H*D)
    mlp_norm: Tensor  # (E,)
    w_gate: Tensor  # (F, E)
    w_up: Tensor  # (F, E)
    w_down: Tensor  # (E, F)


@fg.struct
class Batch:
    """One step's tokens, R requests of one or more tokens each, laid end to end."""

    token_ids: Tensor = fg.buffer("T", "int64")
    positions: Tensor = fg.buffer("T", "int64")
    slot_mapping: Tensor = fg.buffer("T", "int64", pad=-1)  # -1: write nowhere
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)  # this step's tokens included
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: Tensor = fg.buffer("R B", "int32", pad=0)
    logits_indices: Tensor = fg.buffer("R", "int64", pad=0)  # the head runs on R rows, not on T
    spec: fg.BatchSpec = fg.host()


def forward(params: Params, cache: tuple[KV, ...], batch: Batch) -> tuple[Tensor, tuple[KV, ...]]:
    """The logits of each request's rows `logits_indices`, (R, V), and the updated cache."""

    def paged(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, kv: KV) -> tuple[Tensor, KV]:
        return attend(q_THD, k_TKD, v_TKD, kv, batch)

    x_TE, cache = transformer(params, batch.token_ids, batch.positions, cache, paged)
    return logits(params, x_TE[batch.logits_indices]), cache


def transformer(
    params: Params, token_ids_T: Tensor, positions_T: Tensor, cache: tuple[Any, ...], attend: Attend
) -> tuple[Tensor, tuple[Any, ...]]:
    """Hidden states (T, E) before the last norm. `attend` says which tokens see which.

    Serving attends over a paged cache, training over the other tokens of its T: the layers are
    the same, and `cache` holds whatever one layer's `attend` keeps (None where it keeps nothing).
    """
    x_TE = params.embed[token_ids_T]
    config, kept = params.config, []
    rope = rotation(
        positions_T, config.head_dim, config.rope_theta, x_TE.dtype, config.rope_scaling
    )
    for layer, kv in zip(params.layers, cache, strict=True):
        x_TE, kv = decoder_layer(config, layer, x_TE, rope, kv, attend)
        kept.append(kv)
    return x_TE, tuple(kept)


def decoder_layer(
    config: Config, layer: Layer, x_TE: Tensor, rope: Turn, kv: Any, attend: Attend
) -> tuple[Tensor, Any]:
    """x + attention(norm(x)), plus the mlp of its norm; and what the layer keeps."""
    normed_TE = rms_norm(x_TE, layer.attn_norm, config.norm_eps)
    q_THD, k_TKD, v_TKD = (
        heads(normed_TE, weight, config.head_dim) for weight in (layer.wq, layer.wk, layer.wv)
    )
    out_THD, kv = attend(rotate(q_THD, rope), rotate(k_TKD, rope), v_TKD, kv)
    x_TE = x_TE + join(out_THD, layer.wo)
    normed_TE = rms_norm(x_TE, layer.mlp_norm, config.norm_eps)
    return x_TE + swiglu(normed_TE, layer.w_gate, layer.w_up, layer.w_down), kv


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, F, D = config.dim, config.mlp_dim, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D
    layer = Layer(
        attn_norm=shape(E), wq=shape(q, E), wk=shape(kv, E), wv=shape(kv, E), wo=shape(E, q),
        mlp_norm=shape(E), w_gate=shape(F, E), w_up=shape(F, E), w_down=shape(E, F),
    )  # fmt: skip
    return params_of(config, [layer] * config.num_layers)


init_params = functools.partial(naming.init_params, blank)  # config, *, seed, device, dtype


def init_cache(
    config: Config,
    num_blocks: int,
    *,
    block_size: int = 16,
    num_slots: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[KV, ...]:
    """An empty paged cache: for each layer a pair of (num_blocks, block_size, K, D) tensors.

    There are no states, so `num_slots` is not used.
    """
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    zeros = lambda: torch.zeros(shape, device=device, dtype=dtype)  # noqa: E731
    return tuple((zeros(), zeros()) for _ in range(config.num_layers))


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json."""
    return Config(**read_fields(raw))


def read_fields(raw: loading.Raw) -> dict[str, Any]:
    """What Llama's relatives say in the same words."""
    theta, scaling = read_rope(raw)
    num_heads = raw["num_attention_heads"]
    return {
        "vocab_size": raw["vocab_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // num_heads,
        "dim": raw["hidden_size"],
        "mlp_dim": raw["intermediate_size"],
        "rope_theta": theta,
        "norm_eps": raw["rms_norm_eps"],
        "tied": raw.get("tie_word_embeddings", False),
        "rope_scaling": scaling,
    }


FORMAT = loading.Format(
    read_config,
    blank,
    names={
        **DECODER_NAMES,
        "layers.*.wq": "model.layers.*.self_attn.q_proj.weight",
        "layers.*.wk": "model.layers.*.self_attn.k_proj.weight",
        "layers.*.wv": "model.layers.*.self_attn.v_proj.weight",
        "layers.*.wo": "model.layers.*.self_attn.o_proj.weight",
        "layers.*.w_gate": "model.layers.*.mlp.gate_proj.weight",
        "layers.*.w_up": "model.layers.*.mlp.up_proj.weight",
        "layers.*.w_down": "model.layers.*.mlp.down_proj.weight",
    },
    only={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    skipped=("lm_head.weight", "model.layers.*.self_attn.rotary_emb.inv_freq"),
)

load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype -> config, params
