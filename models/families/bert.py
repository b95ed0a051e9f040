"""BERT and MiniLM as pure functions: sentence embeddings, forward(params, cache, batch).

An encoder: every token sees all of its text, so a text comes whole, in one step. Nothing outlives
the step; the cache is where attention finds the step's own keys and values, one for all layers.
There are no decode batches: `fg.graphify(forward, pooling=True, ...)` resolves to PIECEWISE.
Shape letters as in `fngraph.models.families.llama`; W words of a vocabulary, P positions.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import torch
from einops import einsum
from torch import Tensor
from torch.nn.functional import gelu, normalize

import fngraph as fg
from fngraph.models.families import layers
from fngraph.models.families.layers import (
    Affine,
    Room,
    affine,
    affine_names,
    heads,
    matrix_of,
    norm,
    norm_of,
)
from fngraph.models.weights import loading, naming
from fngraph.models.weights.configs import Said, unknown
from fngraph.models.weights.naming import shape

KV = tuple[Tensor, Tensor]  # (k, v), each (N, S, H, D)


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a model. Hashable, and part of the structure of its `Params`."""

    vocab_size: int
    num_layers: int
    num_heads: int  # H
    dim: int  # E
    mlp_dim: int  # F
    max_len: int  # P
    num_types: int
    norm_eps: float


@fg.struct
class Layer:
    """Weights of one layer."""

    q: Affine
    k: Affine
    v: Affine
    out: Affine
    attn_norm: Affine
    up: Affine
    down: Affine
    mlp_norm: Affine


@fg.struct
class Params:
    """Weights of a model."""

    embed: Tensor  # (W, E)
    positions: Tensor  # (P, E)
    types: Tensor  # (num_types, E)
    norm: Affine
    layers: tuple[Layer, ...]
    config: Config = fg.static()


@fg.struct
class Batch:
    """One step's texts, whole ones, laid end to end."""

    token_ids: Tensor = fg.buffer("T", "int64")
    positions: Tensor = fg.buffer("T", "int64")
    slot_mapping: Tensor = fg.buffer("T", "int64", pad=-1)  # -1: write nowhere
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: Tensor = fg.buffer("R B", "int32", pad=0)
    spec: fg.BatchSpec = fg.host()


def forward(params: Params, cache: KV, batch: Batch) -> tuple[Tensor, KV]:
    """(R, E): the mean of each text's last states, of length 1; and the cache."""
    config = params.config
    embedded_TE = (
        params.embed[batch.token_ids] + params.types[0] + params.positions[batch.positions]
    )
    x_TE = norm(embedded_TE, params.norm, config.norm_eps)
    for layer in params.layers:
        x_TE, cache = encoder_layer(config, layer, x_TE, cache, batch)
    return normalize(mean(x_TE, batch), dim=-1), cache


@fg.block
def encoder_layer(
    config: Config, layer: Layer, x_TE: Tensor, kv: KV, batch: Batch
) -> tuple[Tensor, KV]:
    """norm(x + attention(x)), then norm(x + mlp(x)); and the cache."""
    q_THD, k_THD, v_THD = (
        heads(x_TE, w.weight, config.dim // config.num_heads, w.bias)
        for w in (layer.q, layer.k, layer.v)
    )
    out_THD, kv = fg.ops.attention(q_THD, k_THD, v_THD, kv, batch, causal=False)
    x_TE = norm(x_TE + affine(layer.out, out_THD.flatten(1)), layer.attn_norm, config.norm_eps)
    hidden_TF = gelu(affine(layer.up, x_TE))
    return norm(x_TE + affine(layer.down, hidden_TF), layer.mlp_norm, config.norm_eps), kv


def mean(x_TE: Tensor, batch: Batch) -> Tensor:
    """(R, E) float32: the mean over each request's own rows; zero of a padding request.

    NaN where one of its rows is not finite, and nowhere else: the sums run over numbers alone.
    """
    starts = batch.query_start_loc.long()
    token_T = torch.arange(x_TE.shape[0], device=x_TE.device)
    real_T = batch.slot_mapping >= 0
    own_RT = (token_T >= starts[:-1, None]) & (token_T < starts[1:, None])
    x_TE = torch.where(real_T[:, None], x_TE.float(), 0)
    spoilt_R = (own_RT & ~x_TE.isfinite().all(-1)).any(-1)
    sum_RE = einsum(own_RT.float(), x_TE.nan_to_num(0, 0, 0), "r t, t e -> r e")
    sum_RE = torch.where(spoilt_R[:, None], torch.nan, sum_RE)
    return sum_RE / batch.seq_lens.clamp(min=1)[:, None]


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, F = config.dim, config.mlp_dim
    square, gain, up, down = matrix_of(E, E), norm_of(E), matrix_of(F, E), matrix_of(E, F)
    layer = Layer(square, square, square, square, gain, up, down, gain)
    embed, positions, types = (
        shape(n, E) for n in (config.vocab_size, config.max_len, config.num_types)
    )
    return Params(embed, positions, types, gain, (layer,) * config.num_layers, config)


def empty(config: Config, room: Room) -> KV:
    """Pages of k and v for the tokens of one step, all layers'."""
    H, D = config.num_heads, config.dim // config.num_heads
    return room.pages(H, D), room.pages(H, D)


init_params = functools.partial(
    naming.init_params, blank, vectors={"bias": 0.0}
)  # config, *, seed, device, dtype
init_cache = functools.partial(layers.init_cache, empty)  # config, num_blocks, *, block_size, ...


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json."""
    return Config(
        vocab_size=raw["vocab_size"], num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"], dim=raw["hidden_size"],
        mlp_dim=raw["intermediate_size"], max_len=raw["max_position_embeddings"],
        num_types=raw["type_vocab_size"], norm_eps=raw["layer_norm_eps"],
    )  # fmt: skip


FORMAT = loading.Format(
    read_config,
    blank,
    names={
        "embed": "embeddings.word_embeddings.weight",
        "positions": "embeddings.position_embeddings.weight",
        "types": "embeddings.token_type_embeddings.weight",
        **affine_names("norm", "embeddings.LayerNorm"),
        **affine_names("layers.*.q", "encoder.layer.*.attention.self.query"),
        **affine_names("layers.*.k", "encoder.layer.*.attention.self.key"),
        **affine_names("layers.*.v", "encoder.layer.*.attention.self.value"),
        **affine_names("layers.*.out", "encoder.layer.*.attention.output.dense"),
        **affine_names("layers.*.attn_norm", "encoder.layer.*.attention.output.LayerNorm"),
        **affine_names("layers.*.up", "encoder.layer.*.intermediate.dense"),
        **affine_names("layers.*.down", "encoder.layer.*.output.dense"),
        **affine_names("layers.*.mlp_norm", "encoder.layer.*.output.LayerNorm"),
    },
    only={"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False},
    skipped=("pooler.*", "embeddings.position_ids", "cls.*", "classifier.*", "qa_outputs.*"),
    renamed=(  # of a model with a head, and of its early days
        (r"^bert\.", ""),
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
    ),
    harmless=("pooler_*", "directionality", "tie_word_embeddings"),
    copies={},
)


def load(
    folder: str | Path, *, device: torch.device | str | None = None,
    dtype: torch.dtype | None = None, mesh: fg.Mesh | None = None,
) -> tuple[Config, Params]:  # fmt: skip
    """A Hugging Face folder; see `fngraph.models.weights.loading.load`.

    Raises:
        CheckpointError: also of a folder of sentence-transformers that makes its embeddings by
            other means than the mean.
    """
    if wrong := other_means(Path(folder)):
        raise loading.CheckpointError(
            f"{folder} asks for more or other pooling than the mean:\n" + "\n".join(wrong)
        )
    config, params = loading.load(FORMAT, folder, device=device, dtype=dtype, mesh=mesh)
    return config, params


def other_means(folder: Path) -> list[str]:
    """A line for each module of sentence-transformers that does more than the mean, of length 1.

    Its folders are numbered, `1_Pooling`, or named in modules.json. Up to version 5 a key for each
    way to pool was true or false, and all true ones were put side by side; version 6 names them.
    """
    parts = {part.name: part.name.split("_", 1)[1] for part in folder.glob("[0-9]*_*")}
    if (folder / "modules.json").exists():
        modules = json.loads((folder / "modules.json").read_text("utf-8"))
        parts = {module["path"]: module["type"].rsplit(".", 1)[-1] for module in modules}
    wrong = []
    for path, kind in parts.items():
        if kind == "Pooling":
            said = Said(loading.read_json(folder / path))
            named = said.get("pooling_mode", [])
            ways = {named} if isinstance(named, str) else set(named)
            ways |= {key for key in said if key.startswith("pooling_mode_") and said[key]}
            if ways not in ({"mean"}, {"pooling_mode_mean_tokens"}):
                wrong.append(
                    f"  {path}/config.json pools by {', '.join(sorted(ways)) or 'nothing'}"
                )
            else:
                sizes = ("word_embedding_dimension", "embedding_dimension", "include_prompt")
                wrong += unknown(said.leftovers(sizes))
        elif kind not in ("Transformer", "Normalize"):
            wrong.append(f"  {path} is a {kind}")
    return wrong
