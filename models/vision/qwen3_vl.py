"""Qwen3-VL's vision tower as a pure function: forward(params, batch) -> (rows, deepstack).

Patches of images and of frames of videos, 2 x 2 of which become one output token. Some layers'
states go to the language model as well, merged likewise: that is its deepstack. Each frame attends
over itself alone. Shape letters: T output tokens, P = 4*T patches, R frames (an image is one),
C numbers of a patch, E width of the tower, F mlp hidden, G width of the language model.

Source: Qwen3-VL, 2025, as transformers has it.
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

EPS = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a tower. Hashable, and part of the structure of its `Params`."""

    num_layers: int
    num_heads: int
    dim: int  # E
    mlp_dim: int  # F
    out_dim: int  # G
    patch_size: int  # pixels along a side
    frames: int  # of a patch
    channels: int
    side: int  # positions of the learned table, along each side
    deepstack: tuple[int, ...]  # layers whose states go to the language model
    rope_theta: float = 10_000.0

    @property
    def patch_dim(self) -> int:
        """C."""
        return self.channels * self.frames * self.patch_size**2


@fg.struct
class Merger:
    """Weights that make a token of 4 patches."""

    norm: Affine  # of a patch, or of all 4
    up: Affine  # (4*E, 4*E)
    down: Affine  # (G, 4*E)


@fg.struct
class Params:
    """Weights of a tower."""

    embed: Affine  # (E, channels, frames, patch_size, patch_size)
    positions: Tensor  # (side*side, E)
    layers: tuple[Layer, ...]
    merger: Merger
    deepstack: tuple[Merger, ...]
    config: Config = fg.static()


@fg.struct
class Batch:
    """One step's pictures, end to end; the 4 patches of a token are a row."""

    patches: Tensor = fg.buffer("T 4 C", "float32")
    positions: Tensor = fg.buffer("T 4 2", "int64")  # row and column
    taps: Tensor = fg.buffer("T 4 4", "int64")  # rows of the learned table
    weights: Tensor = fg.buffer("T 4 4", "float32")  # of each
    frame_starts: Tensor = fg.buffer("R + 1", "int32", pad="last")  # in patches
    spec: fg.BatchSpec = fg.host()


def forward(params: Params, batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(T, G) rows of the pictures, and (T, G) for each layer of `config.deepstack`."""
    config, features = params.config, {}
    D = config.dim // config.num_heads
    rope = turn_of(turns(batch.positions.flatten(0, 1), D, theta=config.rope_theta).flatten(1))
    x_PE = patched(params.embed, params.positions, batch)
    for i, layer in enumerate(params.layers):
        x_PE = encoder_layer(layer, x_PE, D, rope, batch.frame_starts, EPS)
        if i in config.deepstack:
            merger = params.deepstack[config.deepstack.index(i)]
            x_TF = norm(by_token(x_PE).flatten(1), merger.norm, EPS)
            features[i] = merged(merger, x_TF)
    x_TF = by_token(norm(x_PE, params.merger.norm, EPS)).flatten(1)
    return merged(params.merger, x_TF), tuple(features[i] for i in config.deepstack)


def merged(merger: Merger, x: Tensor) -> Tensor:
    """(T, G): of 4 patches side by side, normed before, (T, 4*E)."""
    return affine(merger.down, gelu(affine(merger.up, x)))


# --- on the host ----------------------------------------------------------------------------------


def encoder(config: Config, *, max_tokens: int = 8192, max_frames: int = 768) -> fg.EncoderModel:
    """What `fg.graphify_encoder` makes graphs of; its items are `grids.Picture`s.

    Args:
        max_tokens: output tokens of the largest graph.
        max_frames: of one video, two of its images being a frame.
    """
    return fg.EncoderModel(
        paths={"default": fg.EncoderPath(forward, min_budget=min(64, max_tokens))},
        measure=functools.partial(measure, config),
        collate=lambda path, pictures: collate(config, pictures),
        token_range=(min(64, max_tokens), max_tokens), modalities=("image", "video"),
        max_frames=max_frames, dims={"C": config.patch_dim},
    )  # fmt: skip


def measure(config: Config, picture: Picture) -> fg.Measured:
    """Output tokens, and a sequence for each frame.

    Raises:
        SpecError: patches that are not those of the grid.
    """
    return grids.measured(picture, MERGE, config.patch_dim)


def collate(config: Config, pictures: Sequence[Picture]) -> Batch:
    """The batch of a step's pictures, on the CPU. A picture of t frames is t requests of it."""
    one = [(h, w) for _, h, w in (picture.grid for picture in pictures)]
    every = functools.partial(grids.over_frames, pictures)
    found = [grids.taps(h, w, config.side, merge=MERGE, corners=True) for h, w in one]
    lengths = grids.frames(pictures)
    return Batch(
        patches=by_token(grids.joined([picture.patches for picture in pictures])),
        positions=by_token(every([grids.positions(h, w, MERGE) for h, w in one])),
        taps=by_token(every([index for index, _ in found])),
        weights=by_token(every([weight for _, weight in found])),
        frame_starts=grids.offsets(lengths),
        spec=fg.BatchSpec(sum(lengths) // MERGE**2, len(lengths)),
    )


# --- weights --------------------------------------------------------------------------------------


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, F, wide, size = config.dim, config.mlp_dim, MERGE**2 * config.dim, config.patch_size
    kernel = shape(E, config.channels, config.frames, size, size)
    gain, square = norm_of(E), matrix_of(wide, wide)
    layer = layer_of(E, F)
    down = matrix_of(config.out_dim, wide)
    return Params(
        Affine(kernel, shape(E)), shape(config.side**2, E), (layer,) * config.num_layers,
        Merger(gain, square, down),
        (Merger(norm_of(wide), square, down),) * len(config.deepstack), config,
    )  # fmt: skip


init_params = functools.partial(
    naming.init_params, blank, vectors={"bias": 0.0}
)  # config, *, seed, device, dtype


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json, which has the tower's inside of it.

    Raises:
        ValueError: a tower that is another one.
    """
    with part_of(raw, "vision_config", {"hidden_act": "gelu_pytorch_tanh"}) as said:
        if said["spatial_merge_size"] != MERGE:
            raise ValueError(f"spatial_merge_size is {said['spatial_merge_size']}, not {MERGE}")
        deepstack = tuple(said["deepstack_visual_indexes"])
        if not all(0 <= i < said["depth"] for i in deepstack):
            raise ValueError(f"deepstack_visual_indexes is {deepstack}, of {said['depth']} layers")
        table, rope = said["num_position_embeddings"], said.get("rope_parameters") or {}
        return Config(
            num_layers=said["depth"], num_heads=said["num_heads"], dim=said["hidden_size"],
            mlp_dim=said["intermediate_size"], out_dim=said["out_hidden_size"],
            patch_size=said["patch_size"], frames=said["temporal_patch_size"],
            channels=said["in_channels"], side=int(table**0.5),
            deepstack=deepstack, rope_theta=rope.get("rope_theta", 10_000.0),
        )  # fmt: skip


def _merger(ours: str, theirs: str) -> dict[str, str]:
    return {
        **affine_names(f"{ours}.norm", f"{theirs}.norm"),
        **affine_names(f"{ours}.up", f"{theirs}.linear_fc1"),
        **affine_names(f"{ours}.down", f"{theirs}.linear_fc2"),
    }


TOWER = "model.visual."  # where the tower is in the files
FORMAT = loading.Format(
    read_config,
    blank,
    names={
        **affine_names("embed", f"{TOWER}patch_embed.proj"),
        "positions": f"{TOWER}pos_embed.weight",
        **affine_names("layers.*.attn_norm", f"{TOWER}blocks.*.norm1"),
        **affine_names("layers.*.qkv", f"{TOWER}blocks.*.attn.qkv"),
        **affine_names("layers.*.out", f"{TOWER}blocks.*.attn.proj"),
        **affine_names("layers.*.mlp_norm", f"{TOWER}blocks.*.norm2"),
        **affine_names("layers.*.up", f"{TOWER}blocks.*.mlp.linear_fc1"),
        **affine_names("layers.*.down", f"{TOWER}blocks.*.mlp.linear_fc2"),
        **_merger("merger", f"{TOWER}merger"),
        **_merger("deepstack.*", f"{TOWER}deepstack_merger_list.*"),
    },
    only={},
    skipped=("model.language_model.*", "lm_head.*"),
    harmless=("text_config", "tie_word_embeddings"),
    copies={},
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype -> config, params
from_state = functools.partial(
    loading.from_state, blank, FORMAT.names, skipped=FORMAT.skipped, inside=TOWER
)  # config, state, *, device, dtype -> params
