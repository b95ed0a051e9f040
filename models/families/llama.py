"""Llama 3 as pure functions: forward(params, cache, batch) -> (logits, cache).

Shape letters: T query tokens, R requests, H query heads, K kv heads, D head dim, E model dim,
F mlp hidden, V vocab, B blocks per request; N blocks in the cache, S tokens in a block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

import fngraph as fg
from fngraph.models.families import layers
from fngraph.models.families.decoder import (
    DECODER_NAMES,
    WITHOUT_HEAD,
    AttendFn,
    Params as Params,
    decode,
    layer_of,
    params_of,
    vocabulary_splits,
)
from fngraph.models.families.layers import (
    Room,
    attend,
    heads,
    join,
    mlp_names,
    mlp_of,
    mlp_splits,
)
from fngraph.models.families.rope import (
    Rope,
    Scaling,
    Turn,
    check_pairs,
    longest,
    read_rope,
    rotate,
)
from fngraph.models.weights import loading, naming
from fngraph.models.weights.naming import shape
from fngraph.models.weights.splits import Each, Size, Specs, Split, rows, summed

KV = tuple[Tensor, Tensor]  # one layer's (k, v), each (N, S, K, D)


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
    max_len: int = 0  # positions that it was made for; 0: not known
    qkv_bias: bool = False  # queries, keys and values have one
    out_bias: bool = False  # and what comes out of attention
    window: int = 0  # tokens that one sees in `window_layers`, itself included
    window_layers: tuple[int, ...] = ()  # in the others it sees all before it


@fg.struct
class Attention:
    """Weights of one attention, matrices as (out, in)."""

    wq: Tensor  # (H*D, E)
    wk: Tensor  # (K*D, E)
    wv: Tensor  # (K*D, E)
    wo: Tensor  # (E, H*D)
    bq: Tensor | None  # (H*D,)
    bk: Tensor | None  # (K*D,)
    bv: Tensor | None  # (K*D,)
    bo: Tensor | None  # (E,)
    window: int | None = fg.static()  # tokens that one sees, itself included; None: all before it


@fg.struct
class Batch:
    """One step's tokens, R requests of one or more tokens each, laid end to end."""

    token_ids: Tensor = fg.buffer("T", "int64")
    positions: Tensor = fg.buffer("T", "int64")
    slot_mapping: Tensor = fg.buffer("T", "int64", pad=-1)  # -1: write nowhere
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)  # this step's tokens included
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: Tensor = fg.buffer("R B", "int32", pad=0)
    logits_indices: Tensor = fg.buffer(
        "R", "int64", pad=0, min=0
    )  # the head runs on R rows, not on T
    spec: fg.BatchSpec = fg.host()


def forward(params: Params, cache: tuple[KV, ...], batch: Batch) -> tuple[Tensor, tuple[KV, ...]]:
    """The logits of each request's rows `logits_indices`, (R, V), and the updated cache."""
    return decode(params, cache, batch, attention, rope_dim=params.config.head_dim)


def attention(
    config: Any, weights: Attention, x_TE: Tensor, rope: Turn, kv: Any, batch: Any,
    attend: AttendFn = attend,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Attention by `attend`, over a paged cache if nothing else is said; and what that keeps."""
    q_THD, k_TKD, v_TKD = project(config, weights, x_TE)
    windowed = {} if weights.window is None else {"window": weights.window}
    out_THD, kv = attend(rotate(q_THD, rope), rotate(k_TKD, rope), v_TKD, kv, batch, **windowed)
    return join(out_THD, weights.wo, weights.bo), kv


def project(config: Any, weights: Attention, x_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (T, H, D), keys and values (T, K, D), biases included."""
    D = config.head_dim
    q_THD = heads(x_TE, weights.wq, D, weights.bq)
    return q_THD, heads(x_TE, weights.wk, D, weights.bk), heads(x_TE, weights.wv, D, weights.bv)


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    attns = (attention_of(config, window_of(config, i)) for i in range(config.num_layers))
    mlp = mlp_of(config.dim, config.mlp_dim)
    return params_of(config, [layer_of(config, attn, mlp) for attn in attns])


def attention_of(config: Any, window: int | None = None) -> Attention:
    """Shapes of one attention."""
    E, D = config.dim, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D
    bq, bkv = (shape(q), shape(kv)) if config.qkv_bias else (None, None)
    bo = shape(E) if config.out_bias else None
    return Attention(shape(q, E), shape(kv, E), shape(kv, E), shape(E, q), bq, bkv, bkv, bo, window)


def specs(config: Any) -> Specs:
    """How a model of this config is split over an axis "tp": heads, mlp, vocabulary."""
    mlp = mlp_splits("mlp", config.mlp_dim)
    return Specs({**vocabulary_splits(config), **attention_splits(config), **mlp}, SIZES)


SIZES = {"num_heads": Size(), "num_kv_heads": Size(repeated=True), "mlp_dim": Size()}
"""Of a config, what is shared out: of each kv head there may be several copies."""


def attention_splits(config: Any, *, wq: int = 1) -> dict[str, Split]:
    """How the weights of attention are split, for `splits.Specs`.

    Args:
        wq: rows of wq for each row of wo's columns.
    """
    D = config.head_dim
    q, kv = Each(config.num_heads, D * wq), Each(config.num_kv_heads, D, repeated=True)
    parts = {"wq": rows(q), "wk": rows(kv), "wv": rows(kv), "bq": rows(q), "bk": rows(kv),
             "bv": rows(kv), "wo": summed(Each(config.num_heads, D))}  # fmt: skip
    return {f"layers.*.attn.{name}": part for name, part in parts.items()}


def window_of(config: Any, layer: int) -> int | None:
    """Tokens that one sees in a layer; None: all before it."""
    return config.window if layer in config.window_layers else None


def empty(config: Any, room: Room) -> tuple[KV, ...]:
    """A cache without tokens: pages of k and v for each layer."""
    return tuple(pair(config, room) for _ in range(config.num_layers))


def pair(config: Any, room: Room) -> KV:
    """Pages of one layer's k and v."""
    K, D = config.num_kv_heads, config.head_dim
    return room.pages(K, D), room.pages(K, D)


UNBIASED = dict.fromkeys(("bq", "bk", "bv", "bo"), 0.0)
init_params = functools.partial(
    naming.init_params, blank, vectors=UNBIASED
)  # config, *, seed, device, dtype
init_cache = functools.partial(layers.init_cache, empty)  # config, num_blocks, *, block_size, ...


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json."""
    return Config(**read_fields(raw))


def read_fields(
    raw: loading.Raw, *, head_dim: int | None = None, num_kv_heads: int | None = None,
    share: float | None = None, tied: bool = False, rope: Rope | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What Llama's relatives say in the same words.

    Args:
        head_dim, num_kv_heads: of a config that has no such key; None: as many columns as E has
            for each head, as many heads as there are.
        share: of a head's columns that turn, likewise; what comes of it is `rope_dim`. None: all
            of them must.
        tied: whether the head is the embedding, likewise.
        rope: where the family has read it; None: `read_rope` does.

    Raises:
        ValueError: heads that cannot be shared out, or columns that turn and are no pairs; null
            where the family has a number of its own.
    """
    theta, scaling, part = rope or read_rope(raw, 1.0 if share is None else share)
    num_heads = raw["num_attention_heads"]
    found = {
        "num_key_value_heads": raw.get("num_key_value_heads", num_kv_heads),
        "head_dim": raw.get("head_dim", head_dim),
    }
    for key, own in (("num_key_value_heads", num_kv_heads), ("head_dim", head_dim)):
        if found[key] is None and own is not None:  # of which transformers makes nothing
            raise ValueError(f"{key} is None, not a whole number")
    num_kv_heads = found["num_key_value_heads"] or num_heads
    head_dim = found["head_dim"] or raw["hidden_size"] // num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads is {num_heads}, no multiple of num_key_value_heads, "
            f"{num_kv_heads}"
        )
    rope_dim = int(head_dim * part)
    if rope_dim % 2 or (share is None and rope_dim != head_dim):
        which = "pairs" if share else "all columns of a head, in pairs"
        raise ValueError(
            f"head_dim is {head_dim} and partial_rotary_factor {part}; only {which} can turn"
        )
    check_pairs(scaling, rope_dim)
    biased = raw.get("attention_bias", False)
    return {
        **({} if share is None else {"rope_dim": rope_dim}),
        "vocab_size": raw["vocab_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dim": raw["hidden_size"],
        "mlp_dim": raw["intermediate_size"],
        "rope_theta": theta,
        "norm_eps": raw["rms_norm_eps"],
        "tied": raw.get("tie_word_embeddings", tied),
        "rope_scaling": scaling,
        "max_len": longest(raw, scaling),
        "qkv_bias": biased,
        "out_bias": biased,
    }


def read_windows(kinds: Iterable[str], window: Any) -> dict[str, Any]:
    """The windows of layers of these kinds, as `layer_types` of a config.json names them.

    Raises:
        ValueError: a layer with a window, and no size of one.
    """
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if sliding and not (isinstance(window, int) and window > 0):
        raise ValueError(
            f"sliding_window is {window!r}, not how many tokens one sees, but layer {sliding[0]} "
            "has a window"
        )
    return {"window": window if sliding else 0, "window_layers": sliding}


ATTENTION_NAMES = {
    "layers.*.attn.wq": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attn.wk": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attn.wv": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attn.wo": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.attn.bq": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attn.bk": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attn.bv": "model.layers.*.self_attn.v_proj.bias",
    "layers.*.attn.bo": "model.layers.*.self_attn.o_proj.bias",
}
FORMAT = loading.Format(
    read_config,
    blank,
    names={**DECODER_NAMES, **ATTENTION_NAMES, **mlp_names("mlp", "mlp")},
    only={"hidden_act": "silu", "mlp_bias": False},
    skipped=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    renamed=WITHOUT_HEAD,
    specs=specs,
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype, mesh -> config, params
