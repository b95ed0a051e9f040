"""Kimi-VL's vision tower as a pure function: MoonViT and its projector, forward(params, batch).

Patches of pictures of any size, end to end; 2 x 2 become one output token at the end. Positions are
turned in two dims, and added out of a learned table, resized by cubics. Shape letters: T output
tokens, P = 4*T patches, R pictures, C numbers of a patch, E width of the tower, F mlp hidden, G
width of the language model.

Source: Kimi Team, "Kimi-VL Technical Report", 2025, and the modules published with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import gelu

import fngraph as fg
from fngraph.models.families.layers import Affine, affine, affine_names, matrix_of, norm, norm_of
from fngraph.models.vision import grids
from fngraph.models.vision.grids import MERGE, Picture, by_token
from fngraph.models.vision.parts import Layer, encoder_layer, layer_of, patched, turn_of, turns
from fngraph.models.weights import loading, naming
from fngraph.models.weights.configs import part_of
from fngraph.models.weights.naming import shape

EPS = 1e-5


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a tower, as published. Hashable, and part of the structure of its `Params`."""

    num_layers: int = 27
    num_heads: int = 16
    dim: int = 1152  # E
    mlp_dim: int = 4304  # F
    out_dim: int = 2048  # G
    patch_size: int = 14  # pixels along a side
    side: int = 64  # positions of the learned table, along each side

    @property
    def patch_dim(self) -> int:
        """C."""
        return 3 * self.patch_size**2


@fg.struct
class Params:
    """Weights of a tower and its projector."""

    embed: Affine  # (E, 3, patch_size, patch_size)
    positions: Tensor  # (side, side, E)
    layers: tuple[Layer, ...]
    norm: Affine
    merger_norm: Affine
    merger_up: Affine  # (4*E, 4*E)
    merger_down: Affine  # (G, 4*E)
    config: Config = fg.static()


@fg.struct
class Batch:
    """One step's pictures, end to end; the 4 patches of a token are a row."""

    patches: Tensor = fg.buffer("T 4 C", "float32")
    positions: Tensor = fg.buffer("T 4 2", "int64")  # column and row
    taps: Tensor = fg.buffer("T 4 16", "int64")  # rows of the learned table
    weights: Tensor = fg.buffer("T 4 16", "float32")  # of each
    starts: Tensor = fg.buffer("R + 1", "int32", pad="last")  # of pictures, in patches
    spec: fg.BatchSpec = fg.host()


def forward(params: Params, batch: Batch) -> Tensor:
    """(T, G) rows of the pictures."""
    config = params.config
    D, table_NE = config.dim // config.num_heads, params.positions.flatten(0, 1)
    angles = turns(batch.positions.flatten(0, 1), D)
    rope = turn_of(angles.transpose(1, 2).flatten(1))  # columns and rows take turns
    x_PE = patched(params.embed, table_NE, batch)
    for layer in params.layers:
        x_PE = encoder_layer(layer, x_PE, D, rope, batch.starts, EPS, neighbours=True)
    x_PE = norm(norm(x_PE, params.norm, EPS), params.merger_norm, EPS)
    return affine(params.merger_down, gelu(affine(params.merger_up, by_token(x_PE).flatten(1))))


# --- on the host ----------------------------------------------------------------------------------


def encoder(config: Config, *, max_tokens: int = 8192) -> fg.EncoderModel:
    """What `fg.graphify_encoder` makes graphs of; its items are `grids.Picture`s of one frame.

    Args:
        max_tokens: output tokens of the largest graph.
    """
    return fg.EncoderModel(
        paths={"default": fg.EncoderPath(forward, min_budget=min(64, max_tokens))},
        measure=functools.partial(measure, config),
        collate=lambda path, pictures: collate(config, pictures),
        token_range=(min(64, max_tokens), max_tokens), dims={"C": config.patch_dim},
    )  # fmt: skip


def measure(config: Config, picture: Picture) -> fg.Measured:
    """Output tokens, in one sequence.

    Raises:
        SpecError: patches that are not those of the grid, or more frames than one.
    """
    if picture.grid[0] != 1:
        raise fg.errors.SpecError(
            f"a picture of grid {picture.grid}: Kimi-VL knows no videos. Pass each frame as a "
            "picture of grid (1, rows, columns)"
        )
    return grids.measured(picture, MERGE, config.patch_dim)


def collate(config: Config, pictures: Sequence[Picture]) -> Batch:
    """The batch of a step's pictures, on the CPU; their patches lie row by row."""
    sizes = [(h, w) for _, h, w in (picture.grid for picture in pictures)]
    found = [grids.taps(h, w, config.side, merge=MERGE, cubic=True) for h, w in sizes]
    patches = [
        picture.patches[grids.merged_order(h, w, MERGE)]
        for picture, (h, w) in zip(pictures, sizes, strict=True)
    ]
    at = [grids.positions(h, w, MERGE).flip(1) for h, w in sizes]
    lengths = [h * w for h, w in sizes]
    return Batch(
        patches=by_token(grids.joined(patches)),
        positions=by_token(grids.joined(at)),
        taps=by_token(grids.joined([index for index, _ in found])),
        weights=by_token(grids.joined([weight for _, weight in found])),
        starts=grids.offsets(lengths),
        spec=fg.BatchSpec(sum(lengths) // MERGE**2, len(lengths)),
    )


# --- weights --------------------------------------------------------------------------------------


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, F, wide, size = config.dim, config.mlp_dim, MERGE**2 * config.dim, config.patch_size
    gain = norm_of(E)
    layer = layer_of(E, F)
    return Params(
        Affine(shape(E, 3, size, size), shape(E)), shape(config.side, config.side, E),
        (layer,) * config.num_layers, gain, gain, matrix_of(wide, wide),
        matrix_of(config.out_dim, wide), config,
    )  # fmt: skip


init_params = functools.partial(
    naming.init_params, blank, vectors={"bias": 0.0}
)  # config, *, seed, device, dtype


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json, which has the tower's inside of it.

    Raises:
        ValueError: a tower that is another one.
    """
    with part_of(raw, "vision_config", {"merge_kernel_size": [MERGE, MERGE]}) as said:
        sides = said["init_pos_emb_height"], said["init_pos_emb_width"]
        if sides[0] != sides[1]:
            raise ValueError(f"a table of {sides[0]} x {sides[1]} positions, which is no square")
        return Config(
            num_layers=said["num_hidden_layers"], num_heads=said["num_attention_heads"],
            dim=said["hidden_size"], mlp_dim=said["intermediate_size"],
            out_dim=raw["text_config"]["hidden_size"], patch_size=said["patch_size"],
            side=sides[0],
        )  # fmt: skip


TOWER, BLOCK = "vision_tower.", "vision_tower.encoder.blocks.*."
FORMAT = loading.Format(
    read_config,
    blank,
    names={
        **affine_names("embed", f"{TOWER}patch_embed.proj"),
        "positions": f"{TOWER}patch_embed.pos_emb.weight",
        **affine_names("layers.*.attn_norm", f"{BLOCK}norm0"),
        **affine_names("layers.*.qkv", f"{BLOCK}wqkv"),
        **affine_names("layers.*.out", f"{BLOCK}wo"),
        **affine_names("layers.*.mlp_norm", f"{BLOCK}norm1"),
        **affine_names("layers.*.up", f"{BLOCK}mlp.fc0"),
        **affine_names("layers.*.down", f"{BLOCK}mlp.fc1"),
        **affine_names("norm", f"{TOWER}encoder.final_layernorm"),
        **affine_names("merger_norm", "multi_modal_projector.pre_norm"),
        **affine_names("merger_up", "multi_modal_projector.linear_1"),
        **affine_names("merger_down", "multi_modal_projector.linear_2"),
    },
    only={},
    skipped=("language_model.*",),
    harmless=("ignore_index", "vocab_size", "tie_word_embeddings"),
    copies={},
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype -> config, params
from_state = functools.partial(
    loading.from_state, blank, FORMAT.names, skipped=FORMAT.skipped
)  # config, state, *, device, dtype -> params
