"""What eager fallback of one path saves: DeepSeek-OCR with more crops than any graph holds."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import fngraph as fg
from fngraph.models.vision import clip, deepseek_ocr, sam
from fngraph.models.vision.pages import Page

TINY = deepseek_ocr.Config(
    sam=sam.Config(2, 2, 16, 24, 4, 16, window=5, whole=(1,), neck_dim=8, out_dims=(10, 12)),
    clip=clip.Config(1, 2, 12, 20, side=4), out_dim=14, view=64, crop=48,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pages:
    """A request of pages."""

    pages: tuple[Page, ...]

    def items(self) -> list[Any]:
        """The pages."""
        return list(self.pages)


def two_towers(
    flags: argparse.Namespace, timed: Callable[..., Mapping[str, Sequence[float]]]
) -> list[dict[str, Any]]:
    """A row for each way: the graph of views with crops run eagerly, and both run eagerly."""
    config = TINY if flags.model == "tiny" else deepseek_ocr.Config()
    dtype = torch.bfloat16 if flags.device.startswith("cuda") else torch.float32
    params = deepseek_ocr.init_params(config, seed=0, device=flags.device, dtype=dtype)
    unit, view = config.sizes.crop_tokens, config.sizes.view_tokens
    model = deepseek_ocr.encoder(config, params, max_tokens=max(2 * unit, view))
    encoder = fg.graphify_encoder(
        model, params, budgets={"local": (unit, 2 * unit), "global": (view,)}, max_items=1,
        log_every=0,
    ).capture()  # fmt: skip
    shape = (6, 3, config.crop, config.crop)
    page = Page(
        torch.randn(3, config.view, config.view, device=flags.device),
        torch.randn(shape, device=flags.device), (3, 2),
    )  # fmt: skip
    requests = [Pages((page,))] * max(3, flags.requests // 30)

    def eagerly(items: Sequence[Any]) -> list[Any]:
        made = []
        for item in items:
            rows = {}
            for path in model.paths:
                batch = model.collate(path, [item])
                batch = fg.core.trees.map_leaves(lambda x: x.to(flags.device), batch)
                rows[path] = model.paths[path].forward(params, batch)
            made.append(model.postprocess(rows, item))
        return made

    seconds = timed({"one of two paths": encoder, "bare": eagerly}, requests, flags.device, 1)
    stats = encoder.stats
    bare = statistics.fmean(seconds["bare"])
    rows = [
        {
            "part": "towers", "way": way, "requests": len(took),
            "mean ms": statistics.fmean(took) * 1e3, "mean of bare": statistics.fmean(took) / bare,
        }
        for way, took in seconds.items()
    ]  # fmt: skip
    rows[0] |= {"hits, views": stats.hit_rate("global"), "hits, crops": stats.hit_rate("local")}
    encoder.sleep()
    return rows
