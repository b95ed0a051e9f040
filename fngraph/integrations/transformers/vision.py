"""Vision towers of transformers as they are, for `fg.graphify_encoder`.

    encode = fg.graphify_encoder(*vision_encoder(model))
    rows = encode(pictures(pixel_values, image_grid_thw))

Towers over packed patches (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4V) take what depends on
the sizes of pictures as arguments: it is worked out on the host by transformers' own functions, and
staged. Their attention reaches `fg.ops.varlen_attention` by a name with "flash" in it, which is how
they know that sequences lie end to end. Towers over tiles of one size (InternVL, Llama 4) are in
`tiles`. Shape letters: T output tokens, P = 4*T patches, R frames, C numbers of a patch, N rows of
a learned table that a position is made of, S tokens along a window, H heads, D head dim.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

import fngraph as fg
from fngraph.errors import ModelError, SpecError
from fngraph.integrations.transformers.tiles import over_tiles, tiled
from fngraph.ops import varlen_attention

NAME = "fngraph_flash"  # of the attention of packed towers
Params = dict[str, Tensor]


class Picture(NamedTuple):
    """An image or a video, as a processor of transformers makes it.

    Attributes:
        patches: (frames * rows * columns, C) float32.
        grid: frames, rows and columns, in patches: its row of `image_grid_thw`.
        modality: "image" or "video".
        seconds: from a frame of a video to the next, where positions in a prompt go by it
            (Qwen2.5-VL): its number in `second_per_grid_ts`.
    """

    patches: Tensor
    grid: tuple[int, int, int]
    modality: str = "image"
    seconds: float = 1.0


@fg.struct
class Patches:
    """Of one step's pictures, end to end; the 4 patches of a token are a row."""

    patches: Tensor = fg.buffer("T 4 C", "float32")
    positions: Tensor = fg.buffer("T 4 2", "int64")  # row and column
    frames: Tensor = fg.buffer("R + 1", "int32", pad="last")  # where they begin, in patches


@fg.struct
class Plain(Patches):
    """Pictures, and nothing else."""

    spec: fg.BatchSpec = fg.host()


@fg.struct
class Resized(Patches):
    """Pictures with positions out of a learned table."""

    taps: Tensor = fg.buffer("T 4 N", "int64")  # its rows
    weights: Tensor = fg.buffer("T 4 N", "float32")  # of each
    spec: fg.BatchSpec = fg.host()


@fg.struct
class Windowed(Patches):
    """Pictures whose tokens lie window by window."""

    windows: Tensor = fg.buffer("T // S + R + 1", "int32", pad="last")  # begin there, in patches
    places: Tensor = fg.buffer("T", "int64", min=0)  # of each token of a picture, among windows
    spec: fg.BatchSpec = fg.host()


class TowerKind(NamedTuple):
    """What a tower over packed patches is given beside its patches.

    Attributes:
        batch: the fields that are staged.
        taps: rows of its learned table that a position is made of; 0: it has none.
        options: of transformers' function that says which rows these are.
        told: whether the tower is told of them; else its `embeddings` are replaced.
    """

    batch: type[Patches]
    taps: int = 0
    options: Mapping[str, Any] = MappingProxyType({})
    told: bool = True


_LINEAR = TowerKind(Resized, 4, {"mode": "bilinear", "align_corners": True})
_CUBIC = TowerKind(Resized, 16, {"mode": "bicubic", "align_corners": False}, told=False)
PACKED: dict[str, TowerKind] = {  # by the model_type of the tower's config
    "qwen2_vl_vision": TowerKind(Plain), "qwen2_5_vl_vision": TowerKind(Windowed),
    "qwen3_vl_vision": _LINEAR, "qwen3_vl_moe_vision": _LINEAR,
    "qwen3_5_vision": _LINEAR, "qwen3_5_moe_vision": _LINEAR,
    "glm4v_vision": _CUBIC, "glm4v_moe_vision": _CUBIC,
}  # fmt: skip


def vision_encoder(model: Any, *, max_tokens: int = 8192) -> tuple[fg.EncoderModel, Params]:
    """What `fg.graphify_encoder` takes: the vision part of a model of transformers, as functions.

    Args:
        model: with or without its head, in evaluation; or the tower alone, of packed patches. The
            functions read its weights in place.
        max_tokens: output tokens of the largest graph.

    Returns:
        an encoder whose items are `Picture`s, or tiles (k, 3, S, S) float32; and its weights by
        name. An output is (tokens, E), or with deepstack ((tokens, E), ((tokens, E), ...)).

    Raises:
        ModelError: no vision part that is known here, or one in training mode.
    """
    inner = getattr(model, "model", model)
    tower = next(filter(None, (getattr(m, "visual", None) for m in (inner, model))), model)
    if tower.training:
        raise ModelError(
            f"{type(tower).__name__} is in training mode, so dropout may be on. Call model.eval()"
        )
    kind = PACKED.get(getattr(getattr(tower, "config", None), "model_type", ""))
    if kind is not None:
        return _packed(tower, kind, max_tokens), _weights(tower, "")
    for owner in (inner, model):
        if (found := tiled(owner)) is not None:
            return over_tiles(owner, found, max_tokens), _weights(owner, "vision_", "multi_modal_")
    raise ModelError(
        f"{type(model).__name__} has no vision tower that is known here: those of "
        f"{', '.join(sorted(PACKED))}, InternVL and Llama 4. Write an fg.EncoderModel"
    )


def _weights(owner: Any, *parts: str) -> Params:
    """Parameters and buffers of some of a model's parts, in place."""
    every = (*owner.named_parameters(), *owner.named_buffers())
    return {name: x.detach() for name, x in every if name.startswith(parts)}


# --- towers over packed patches -------------------------------------------------------------------


def pictures(
    pixels: Tensor, grids: Any, modality: str = "image", seconds: Any = None
) -> list[Picture]:
    """Items, out of a processor's `pixel_values` and `image_grid_thw`; or those of videos, with
    `second_per_grid_ts` where there is one."""
    sizes = [tuple(map(int, grid)) for grid in grids]
    parts = pixels.split([t * h * w for t, h, w in sizes])
    apart = [1.0] * len(sizes) if seconds is None else [float(x) for x in seconds]
    made = zip(parts, sizes, apart, strict=True)
    return [Picture(x, grid, modality, between) for x, grid, between in made]  # type: ignore[arg-type]


def _packed(tower: Any, kind: TowerKind, max_tokens: int) -> fg.EncoderModel:
    if (merge := tower.config.spatial_merge_size) != 2:
        raise ModelError(
            f"{type(tower).__name__} makes a token of {merge} x {merge} patches; those of 2 x 2 "
            "can be staged here"
        )

    def forward(params: Params, batch: Any) -> Any:
        return _run_packed(tower, kind, params, batch)

    forward.__annotations__["batch"] = kind.batch
    width = tower.patch_embed.proj.weight[0].numel()
    dims = {"C": width} | ({"N": kind.taps} if kind.taps else {})
    if kind.batch is Windowed:
        dims["S"] = _window(tower)
    return fg.EncoderModel(
        paths={"default": fg.EncoderPath(forward, min(64, max_tokens))},
        measure=functools.partial(_measure, width),
        collate=lambda path, items: _collate(tower, kind, items),
        token_range=(min(64, max_tokens), max_tokens), modalities=("image", "video"),
        max_frames=768, dims=dims,
    )  # fmt: skip


def _run_packed(tower: Any, kind: TowerKind, params: Params, batch: Any) -> Any:
    """The tower's output, or that and its deepstack."""
    given = {
        "position_ids": batch.positions.flatten(0, 1), "cu_seqlens": batch.frames,
        "max_seqlen": 1, "max_window_seqlen": 1,  # not read: offsets say it all
    }  # fmt: skip
    if kind.batch is Windowed:  # tokens lie as the tower wants them, so that it moves none
        given["window_index"] = torch.arange(batch.places.shape[0], device=batch.places.device)
        given["cu_window_seqlens"] = batch.windows
    else:
        given.pop("max_window_seqlen")
    embed: Callable[..., Tensor] | None = None
    if kind.taps:
        taps, weights = batch.taps.flatten(0, 1), batch.weights.flatten(0, 1)
        if kind.told:
            given |= {"interp_indices": taps, "interp_weights": weights}
        else:
            embed = functools.partial(_positions, tower, taps, weights)
    with _led(tower, embed):
        out = functional_call(tower, params, (batch.patches.flatten(0, 1), None), given)
    rows = out.pooler_output
    if kind.batch is Windowed:
        return rows[batch.places]
    deep = getattr(out, "deepstack_features", None)
    return rows if deep is None else (rows, tuple(deep))


def _positions(tower: Any, taps: Tensor, weights: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """GLM-4V's `embeddings`, whose own way asks every patch which picture it is of."""
    table = tower.embeddings.position_embedding.weight
    parts = zip(taps.unbind(1), weights.unbind(1), strict=True)
    found = sum(table[at].float() * weight[:, None] for at, weight in parts)
    return x + found.to(x.dtype)  # type: ignore[union-attr]


def attend_packed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *,
    scaling: float | None = None, cu_seq_lens_q: Tensor | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function of packed towers: (1, H, P, D) in, (1, P, H, D) out.

    Raises:
        ModelError: sequences without offsets.
    """
    if cu_seq_lens_q is None or attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} attends without offsets of its sequences, so that pictures "
            "of one step would see each other. Write an fg.EncoderModel for it"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen_attention(q, k, v, cu_seq_lens_q, scale=scaling)[None], None


@contextlib.contextmanager
def _led(tower: Any, embed: Callable[..., Tensor] | None) -> Iterator[None]:
    """For the duration, `tower` attends with `attend_packed`, and embeds positions with `embed`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend_packed)
    before = tower.config._attn_implementation
    try:
        tower.config._attn_implementation = NAME  # the setter of a model looks for a package
        if embed is not None:
            tower.embeddings.forward = embed
        yield
    finally:
        tower.config._attn_implementation = before
        if embed is not None:
            del tower.embeddings.forward


def _measure(width: int, item: Picture) -> fg.Measured:
    t, h, w = item.grid
    if min(item.grid) < 1 or h % 2 or w % 2 or tuple(item.patches.shape) != (t * h * w, width):
        raise SpecError(
            f"a picture of grid {item.grid} with patches {tuple(item.patches.shape)}: rows and "
            f"columns are even, and there is a row of {width} numbers for each patch. Pass what "
            "the model's processor makes of it: pictures(pixel_values, image_grid_thw)"
        )
    tokens, frames = {"default": t * h * w // 4}, {"default": t}
    return fg.Measured(item.modality, tokens, frames, t if item.modality == "video" else 0)


def _collate(tower: Any, kind: TowerKind, items: Sequence[Picture]) -> Any:
    """The batch of a step, on the CPU, by transformers' own functions."""
    from transformers import vision_utils as utils

    grid = torch.tensor([item.grid for item in items])
    starts = utils.get_vision_cu_seqlens(grid)
    spec = fg.BatchSpec(int(starts[-1]) // 4, len(starts) - 1)
    by_token: dict[str, Tensor] = {
        "patches": torch.cat([item.patches for item in items]),
        "positions": utils.get_vision_position_ids(grid, 2),
    }
    if kind.taps:
        side = round(_table(tower).shape[0] ** 0.5)
        by_token["taps"], by_token["weights"] = utils.get_vision_interpolation_indices_and_weights(
            grid, side, spatial_merge_size=2, **kind.options
        )
    by_token = {name: x.unflatten(0, (-1, 4)) for name, x in by_token.items()}
    if kind.batch is not Windowed:
        made: Any = kind.batch  # with a spec, as all but their base have one
        return made(**by_token, frames=starts, spec=spec)
    order, windows = utils.get_vision_window_index(
        grid, 2, tower.config.window_size, tower.config.patch_size
    )
    # a frame of n tokens has at most n / S windows, rounded up: as many if it is one token high
    room = spec.num_tokens // _window(tower) + spec.num_reqs + 1
    rest = windows[-1:].expand(room - len(windows))
    return Windowed(
        **{name: x[order] for name, x in by_token.items()}, frames=starts, spec=spec,
        windows=torch.cat([windows, rest]), places=order.argsort(),
    )  # fmt: skip


def _window(tower: Any) -> int:
    """Tokens along a window."""
    side: int = tower.config.window_size // tower.config.patch_size // 2
    return side


def _table(tower: Any) -> Tensor:
    """The learned table of positions."""
    owner = tower.embeddings.position_embedding if hasattr(tower, "embeddings") else tower.pos_embed
    weight: Tensor = owner.weight
    return weight
