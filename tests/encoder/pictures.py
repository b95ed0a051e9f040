"""Toy encoders: one of images and videos, and one with two towers, of 272 tokens and 100 a crop."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import toys
from torch import Tensor

import fngraph as fg

C, E, H = 6, 8, 2  # of a patch, of a row, heads
GLOBAL, LOCAL = 272, 100


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def starts_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


# --- images and videos, deep features beside rows -------------------------------------------------


class Picture(NamedTuple):
    """An image, or frames of a video: (tokens, 4, C) each."""

    frames: tuple[Tensor, ...]
    modality: str = "image"

    @property
    def tokens(self) -> int:
        return sum(map(len, self.frames))


@fg.struct
class Patches:
    """T output tokens of four patches each, in R frames; windows are of at most 3 tokens."""

    patches: Tensor = fg.buffer("T 4 C", "float32")
    positions: Tensor = fg.buffer("T", "int64", min=0)
    frames: Tensor = fg.buffer("R + 1", "int32", pad="last")
    windows: Tensor = fg.buffer("T + 1", "int32", pad="last")
    spec: fg.BatchSpec = fg.host()


def see(params: Any, batch: Patches) -> Any:
    """Rows (T, E), and deep features (T, 2, E)."""
    deep = []
    x_TE = batch.patches.flatten(1) @ params["patch"] + params["position"][batch.positions]
    for starts in (batch.frames, batch.windows):
        qkv = (x_TE @ params["qkv"]).unflatten(-1, (3, H, E // H))
        x_TE = x_TE + fg.ops.varlen_attention(*qkv.unbind(1), starts).flatten(1)
        deep.append(torch.tanh(x_TE @ params["deep"]))
    return {"rows": x_TE, "deep": torch.stack(deep, 1)}


def see_params() -> dict[str, Tensor]:
    return {
        "patch": drawn(4 * C, E) / 4, "position": drawn(64, E, seed=1),
        "qkv": drawn(E, 3 * E, seed=2) / 4, "deep": drawn(E, E, seed=3),
    }  # fmt: skip


def collate_pictures(path: str, items: Sequence[Picture]) -> Patches:
    frames = [frame for item in items for frame in item.frames]
    lengths, T = [len(frame) for frame in frames], sum(map(len, frames))
    ends = starts_of(lengths)[1:].tolist()
    begins = sorted({at for n, end in zip(lengths, ends) for at in range(end - n, end, 3)})
    windows = torch.tensor([*begins, *[T] * (T + 1 - len(begins))]).int()
    positions = torch.cat([torch.arange(n) % 64 for n in lengths])
    spec = fg.BatchSpec(T, len(frames))
    return Patches(torch.cat(frames), positions, starts_of(lengths), windows, spec)


def measure_picture(item: Picture) -> fg.Measured:
    count = {"default": len(item.frames)}
    shown = len(item.frames) if item.modality == "video" else 0
    return fg.Measured(item.modality, {"default": item.tokens}, count, shown)


def side_by_side(outputs: Mapping[str, Any], item: Any) -> Tensor:
    """(T, 3, E): rows, then deep features."""
    found = outputs["default"]
    return torch.cat([found["rows"][:, None], found["deep"]], 1)


def pictures(**changed: Any) -> fg.EncoderModel:
    options: dict[str, Any] = {
        "paths": {"default": fg.EncoderPath(see, 8)}, "measure": measure_picture,
        "collate": collate_pictures, "token_range": (4, 64), "postprocess": side_by_side,
        "modalities": ("image", "video"), "max_frames": 4, "dims": {"C": C},
    }  # fmt: skip
    return fg.EncoderModel(**options | changed)


def picture(*frames: int, seed: int = 0) -> Picture:
    """One frame is an image, more are a video."""
    made = tuple(drawn(n, 4, C, seed=seed + 31 * i + n) for i, n in enumerate(frames))
    return Picture(made, "image" if len(frames) == 1 else "video")


# --- two towers -----------------------------------------------------------------------------------


class Page(NamedTuple):
    """A global view (16, C), and crops (k, 10, C)."""

    view: Tensor
    crops: Tensor


@fg.struct
class Views:
    """R views, whose T = 272 R output tokens no leaf has."""

    view: Tensor = fg.buffer("R 16 C", "float32")
    spec: fg.BatchSpec = fg.host()


@fg.struct
class Crops:
    """R crops of 100 tokens each."""

    crop: Tensor = fg.buffer("R 10 C", "float32")
    starts: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    spec: fg.BatchSpec = fg.host()


def see_view(params: Any, batch: Views) -> Tensor:
    x_RNE = torch.einsum("rpc,np,ce->rne", batch.view, params["grow"], params["view"])
    scores = (x_RNE @ x_RNE.transpose(1, 2)).softmax(-1)
    return (scores @ x_RNE).flatten(0, 1)


def see_crops(params: Any, batch: Crops) -> Tensor:
    x_RNE = torch.einsum("rpc,np,ce->rne", batch.crop, params["crop_grow"], params["view"])
    x_TE = (x_RNE + params["position"]).flatten(0, 1)
    qkv = (x_TE @ params["qkv"]).unflatten(-1, (3, H, E // H))
    return x_TE + fg.ops.varlen_attention(*qkv.unbind(1), batch.starts).flatten(1)


def page_params() -> dict[str, Tensor]:
    return {
        "grow": drawn(GLOBAL, 16) / 4, "view": drawn(C, E, seed=1) / 2, "newline": drawn(E, seed=2),
        "crop_grow": drawn(LOCAL, 10, seed=3) / 4, "qkv": drawn(E, 3 * E, seed=4),
        "position": drawn(LOCAL, E, seed=5),
    }  # fmt: skip


def collate_pages(path: str, items: Sequence[Page]) -> Any:
    if path == "global":
        return Views(torch.stack([x.view for x in items]), spec_of(GLOBAL, len(items)))
    crops = torch.cat([x.crops for x in items])
    starts = torch.arange(len(crops) + 1).int() * LOCAL
    return Crops(crops, starts, spec_of(LOCAL, len(crops)))


def spec_of(unit: int, count: int) -> fg.BatchSpec:
    return fg.BatchSpec(unit * count, count)


def measure_page(item: Page) -> fg.Measured:
    return fg.Measured("image", {"global": GLOBAL, "local": LOCAL * len(item.crops)})


def assemble(outputs: Mapping[str, Any], item: Page) -> Tensor:
    """Crops, the view, and a separator of ones."""
    parts = [outputs[path] for path in ("local", "global") if path in outputs]
    return torch.cat([*parts, torch.ones_like(parts[0][:1])])


def pages(**changed: Any) -> fg.EncoderModel:
    options: dict[str, Any] = {
        "paths": {
            "global": fg.EncoderPath(see_view, GLOBAL, unit=GLOBAL),
            "local": fg.EncoderPath(see_crops, LOCAL, allow_zero=True, unit=LOCAL),
        },
        "measure": measure_page, "collate": collate_pages, "token_range": (GLOBAL, 1200),
        "postprocess": assemble, "dims": {"C": C},
    }  # fmt: skip
    return fg.EncoderModel(**options | changed)


def page(crops: int, seed: int = 0) -> Page:
    return Page(drawn(16, C, seed=seed), drawn(crops, 10, C, seed=seed + 1))


# --- what items give alone ------------------------------------------------------------------------


def alone(model: fg.EncoderModel, params: Any, item: Any) -> Any:
    """An item's output by bare forwards, without graphs, neighbours or padding."""
    device = next(iter(params.values())).device
    rows = {
        path: model.paths[path].forward(params, toys.on(model.collate(path, [item]), device))
        for path, n in model.measure(item).tokens.items()
        if n
    }
    return model.postprocess(rows, item)


def check(encoder: fg.Encoder, items: Sequence[Any]) -> None:
    """Each item's output is what it gives alone, but for what products of other shapes round."""
    for item, output in zip(items, encoder(items), strict=True):
        want = alone(encoder.model, encoder.params, item)
        torch.testing.assert_close(output, want, atol=1e-4, rtol=1e-4)


KINDS = {"pictures": (pictures, see_params), "pages": (pages, page_params)}


def make(kind: str, device: Any, recorder: Any, model: Any = None, **options: Any) -> fg.Encoder:
    """A toy encoder; `model` has what `EncoderModel` takes, the rest is `graphify_encoder`'s."""
    of_kind, params = KINDS[kind]
    weights = toys.moved(params(), device)
    return fg.graphify_encoder(of_kind(**(model or {})), weights, recorder=recorder, **options)


def random_items(kind: str, draw: random.Random, most: int = 9) -> list[Any]:
    """Items of many sizes, some beyond every budget; sometimes none."""
    if kind == "pages":
        crops = (0, 0, 1, 2, 3, 5, 13)
        return [page(draw.choice(crops), draw.randint(0, 99)) for _ in range(draw.randint(0, 4))]
    frames = (1, 1, 1, 2, 3, 4, 5)
    return [
        picture(*(draw.randint(1, draw.choice((4, 12, 30, 80))) for _ in range(n)), seed=n)
        for n in draw.choices(frames, k=draw.randint(0, most))
    ]
