"""Qwen3-VL's language model as pure functions: Qwen3 with three positions a token, and pictures.

A picture is a run of one token in the prompt. These tokens take the rows that the vision tower
made (`fngraph.models.vision.qwen3_vl`): the first of each in place of its embedding, the others,
its deepstack, added after the first layers. There are two kinds of batches, so that a decode's
graph copies no rows: `forward` takes batches without them, and `forward_pictures` those with.

Shape letters as in `fngraph.models.families.llama`; N rows of a token, 1 and its deepstack's.

Source: Qwen3-VL, 2025, as transformers has it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.families import llama, qwen3
from fngraph.models.families.decoder import Params as Params, all_layers, entered, left
from fngraph.models.families.llama import KV, init_cache as init_cache
from fngraph.models.families.qwen3 import attention, blank as blank
from fngraph.models.families.rope import Sections, rotation, unscaled
from fngraph.models.weights import loading, naming
from fngraph.models.weights.configs import part_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    """Sizes of a model. Hashable, and part of the structure of its `Params`."""

    sections: Sections  # pairs that turn by time, row and column
    deepstack: int  # layers after which rows are added, N - 1
    image_token: int
    video_token: int


@fg.struct
class Batch(llama.Batch):
    """Llama's, with three positions a token."""

    positions: Tensor = fg.buffer("T 3", "int64")  # time, row, column


@fg.struct
class Rows:
    """What the tokens of pictures take."""

    takes: Tensor = fg.buffer("T", "bool", pad=False)  # whether a token is a picture's
    rows: Tensor = fg.buffer("T N E", "float32")  # of these tokens; else they are not read


@fg.struct
class PictureBatch(Batch, Rows):
    """A step's tokens, some of which are pictures'."""


def forward(params: Params, cache: tuple[KV, ...], batch: Batch) -> tuple[Tensor, tuple[KV, ...]]:
    """The logits of each request's rows `logits_indices`, (R, V), and the updated cache."""
    return _decode(params, cache, batch, entered(params, batch), ())


def forward_pictures(
    params: Params, cache: tuple[KV, ...], batch: PictureBatch
) -> tuple[Tensor, tuple[KV, ...]]:
    """As `forward`, of a batch with pictures.

    Raises:
        ValueError: rows for more or fewer layers than the model has deepstack.
    """
    N, wanted = batch.rows.shape[1], 1 + params.config.deepstack
    if N != wanted:
        raise ValueError(
            f"batch.rows has {N} rows a token, and the model takes {wanted}: its embedding, and "
            f"one for each of {wanted - 1} layers. Pass fg.Limits(..., N={wanted})"
        )
    x_TE = params.embed[batch.token_ids]
    first_TE, *deep = batch.rows.to(x_TE.dtype).unbind(1)
    takes_T1 = batch.takes[:, None]
    x_TE = torch.where(takes_T1, first_TE, x_TE)
    added = [torch.where(takes_T1, row_TE, 0) for row_TE in deep]
    return _decode(params, cache, batch, x_TE, added)


def _decode(
    params: Params, cache: tuple[KV, ...], batch: Batch | PictureBatch, x_TE: Tensor,
    added: Sequence[Tensor],
) -> tuple[Tensor, tuple[KV, ...]]:  # fmt: skip
    c = params.config
    rope = rotation(
        batch.positions, c.head_dim, c.rope_theta, x_TE.dtype, c.rope_scaling, c.sections
    )
    x_TE, cache = all_layers(params, x_TE, rope, cache, batch, attention, added=added)
    return left(params, x_TE, batch), cache


# --- weights --------------------------------------------------------------------------------------


init_params = functools.partial(naming.init_params, blank)  # config, *, seed, device, dtype


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json, which has the language model's inside of it.

    Raises:
        ValueError: a language model that is another one.
    """
    text = dict(raw["text_config"])
    rope = dict(text.pop("rope_scaling", None) or text.pop("rope_parameters", None) or {})
    sections = tuple(rope.pop("mrope_section", (24, 20, 20)))
    if not rope.pop("mrope_interleaved", True):
        raise ValueError("mrope_interleaved is false; only pairs in turn can be run")
    rope.setdefault("rope_theta", text.pop("rope_theta", 500_000.0))
    only = {"hidden_act": "silu", "attention_bias": False}
    with part_of({"text_config": text | {"rope_parameters": rope}}, "text_config", only) as said:
        fields = llama.read_fields(said, head_dim=128, num_kv_heads=32)
        said.get("tie_word_embeddings")  # of the two, transformers goes by the outer one
    if unscaled(fields["rope_scaling"]) is not None:
        raise ValueError(
            f"rope of type {rope.get('rope_type', rope.get('type'))!r} goes by the length of a "
            "text, and a token of a picture has three positions"
        )
    if len(sections) != 3 or 2 * sum(sections) != fields["head_dim"]:
        raise ValueError(
            f"mrope_section is {list(sections)}, not three counts of pairs that make up head_dim, "
            f"{fields['head_dim']}"
        )
    return Config(
        **fields | {"tied": raw.get("tie_word_embeddings", False)},
        sections=sections, deepstack=len(raw["vision_config"]["deepstack_visual_indexes"]),
        image_token=raw["image_token_id"], video_token=raw["video_token_id"],
    )  # fmt: skip


def _inside(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


FORMAT = loading.Format(
    read_config,
    blank,
    names={ours: _inside(theirs) for ours, theirs in qwen3.FORMAT.names.items()},
    only={},
    skipped=("model.visual.*",),
    copies={theirs: _inside(of) for theirs, of in qwen3.FORMAT.copies.items()},
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype -> config, params
from_state = functools.partial(
    loading.from_state, blank, FORMAT.names, skipped=FORMAT.skipped, copies=FORMAT.copies
)  # config, state, *, device, dtype -> params
