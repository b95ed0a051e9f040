"""DeepSeek-OCR's two paths: transformers' modules, put together as published; packs in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packs import alone, captured, check_packs, close, drawn_packs, patches, split, widened
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPEncoder
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import (
    DeepseekOcr2SamVisionConfig,
)
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2SamVisionEncoder

from fngraph.errors import SpecError
from fngraph.models import naming
from fngraph.models.vision import clip, deepseek_ocr, pages, sam

CONFIG = deepseek_ocr.Config(
    sam=sam.Config(2, 2, 16, 24, 4, 16, window=5, whole=(1,), neck_dim=8, out_dims=(10, 12)),
    clip=clip.Config(1, 2, 12, 20, side=4), out_dim=14, view=64, crop=48,
)  # fmt: skip


class Published(nn.Module):
    """The modules, in eager torch, a page at a time."""

    def __init__(self) -> None:
        super().__init__()
        s, c, eager = CONFIG.sam, CONFIG.clip, {"attn_implementation": "eager"}
        self.sam_model = DeepseekOcr2SamVisionEncoder._from_config(
            DeepseekOcr2SamVisionConfig(
                hidden_size=s.dim, output_channels=s.neck_dim, num_hidden_layers=s.num_layers,
                num_attention_heads=s.num_heads, image_size=64, patch_size=s.patch_size,
                window_size=s.window, global_attn_indexes=list(s.whole), mlp_dim=s.mlp_dim,
                downsample_channels=list(s.out_dims),
            ),
            **eager,
        )  # fmt: skip
        config = CLIPVisionConfig(
            hidden_size=c.dim, intermediate_size=c.mlp_dim, num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads, hidden_act="quick_gelu", **eager,
        )  # fmt: skip
        self.summary, self.positions = (nn.Parameter(torch.empty(n, c.dim)) for n in (1, 17))
        self.pre_layrnorm, self.encoder = nn.LayerNorm(c.dim), CLIPEncoder(config)
        self.projector = nn.Linear(c.dim + s.out_dims[1], CONFIG.out_dim)
        self.newline, self.separator = (nn.Parameter(torch.empty(CONFIG.out_dim)) for _ in "ab")

    def places(self, pixels: Tensor) -> Tensor:
        seen = self.sam_model(pixels).last_hidden_state
        side = seen.shape[-1]
        table = self.positions[1:].T.reshape(1, -1, 4, 4)
        if side != 4:
            table = interpolate(table, size=(side, side), mode="bicubic", antialias=True)
        x = torch.cat([self.summary.expand(len(seen), 1, -1), seen.flatten(2).mT], 1)
        x = self.pre_layrnorm(x + torch.cat([self.positions[:1], table[0].flatten(1).T]))
        x = self.encoder(inputs_embeds=x).last_hidden_state
        return self.projector(torch.cat([x[:, 1:], seen.flatten(2).mT], -1))

    def forward(self, page: pages.Page) -> Tensor:
        def lined(x: Tensor) -> Tensor:
            return torch.cat([x, self.newline.expand(len(x), 1, -1)], 1).flatten(0, 1)

        found = [lined(self.places(page.view[None]).view(4, 4, -1)), self.separator[None]]
        if columns := page.grid[0]:
            made = self.places(page.crops).view(page.grid[1], columns, 3, 3, -1)
            found = [lined(made.transpose(1, 2).flatten(2, 3).flatten(0, 1)), *found]
        return torch.cat(found)

    def state(self) -> dict[str, Tensor]:
        """By the names of the published files."""
        found = {}
        for name, x in self.state_dict().items():
            for theirs, published in RENAMED.items():
                name = name.replace(theirs, published)
            if "blocks" in name:
                name = name.replace("layer_norm", "norm")
            found[f"model.{name}"] = x
        for name in [name for name in found if "q_proj" in name]:
            q, k, v = (found.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv")
            found[name.replace("q_proj", "qkv_proj")] = torch.cat([q, k, v])
        found["model.vision_model.embeddings.class_embedding"].squeeze_(0)
        found["model.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(1)
        return found | {"model.layers.0.mlp.up_proj.weight": torch.zeros(1)}


RENAMED = {
    "sam_model.layers.": "sam_model.blocks.", "patch_embed.projection": "patch_embed.proj",
    "neck.conv1": "neck.0", "neck.layer_norm1": "neck.1", "neck.conv2": "neck.2",
    "neck.layer_norm2": "neck.3", "sam_model.proj.conv1": "sam_model.net_2",
    "sam_model.proj.conv2": "sam_model.net_3", "encoder.layers": "vision_model.transformer.layers",
    "summary": "vision_model.embeddings.class_embedding",
    "positions": "vision_model.embeddings.position_embedding.weight",
    "pre_layrnorm": "vision_model.pre_layrnorm", "newline": "image_newline",
    "projector": "projector.layers", "separator": "view_seperator",
}  # fmt: skip


def page(columns: int, rows: int) -> pages.Page:
    k = columns * rows
    view = patches(64 + k, 3 * 64).view(-1, 3, 64)[:64].transpose(0, 1)
    crops = patches(48 * k + 1, 3 * 48)[1:].view(k, 48, 3, 48).transpose(1, 2)
    return pages.Page(view, crops, (columns, rows))


PAGES = [page(*grid) for grid in [(0, 0), (2, 1), (1, 2), (2, 3), (3, 2), (1, 4)]]


@pytest.fixture(scope="module")
def published() -> Any:
    return widened(Published())


@pytest.fixture(scope="module")
def params(published: Any) -> deepseek_ocr.Params:
    return deepseek_ocr.from_state(CONFIG, published.state())


def outputs(model: Any, params: Any, one: pages.Page) -> dict[str, Tensor]:
    present = ["global", "local"] if one.grid[0] else ["global"]
    return {path: alone(model, params, [one], path)[0] for path in present}


def test_pages_are_as_published(published, params):
    model = deepseek_ocr.encoder(CONFIG, params, max_tokens=200)
    for one in PAGES:
        close(model.postprocess(outputs(model, params, one), one), published(one), atol=1e-4)


@pytest.mark.sampled("global")
@pytest.mark.parametrize("path", ["global", "local"])
def test_packs_in_graphs(params, path: str):
    model = deepseek_ocr.encoder(CONFIG, params, max_tokens=200)
    unit = {"global": 20, "local": 9}[path]
    step = captured(
        model, params, path, sizes=(unit, 5 * unit, 18 * unit), max_tokens=18 * unit,
        max_reqs=18,
    )  # fmt: skip
    items = [one for one in PAGES if path == "global" or one.grid[0]]
    packs = [[one] for one in items] + list(drawn_packs(items, 8, 4))
    check_packs(step, model, params, packs, path)
    assert step.stats.share("FULL") == 1 and len({n for _, n, _ in step.stats.counts}) >= 2


def test_what_measure_says_and_refuses():
    model = deepseek_ocr.encoder(CONFIG, None)
    assert model.measured(PAGES[3]).tokens == {"global": 20, "local": 54}
    assert model.measured(PAGES[3]).sequences == {"global": 1, "local": 6}
    assert model.measured(PAGES[0]).tokens == {"global": 20, "local": 0}
    for wrong, told in (
        (PAGES[3]._replace(grid=(2, 2)), r"has crops of shape \(6, 3, 48, 48\)\. Pass \(4, 3"),
        (PAGES[3]._replace(view=PAGES[3].crops[0]), r"has view of shape \(3, 48, 48\)\. Pass"),
    ):
        with pytest.raises(SpecError, match=told):
            model.measured(wrong)


def test_the_published_sizes():
    config = deepseek_ocr.Config()
    assert config.sizes == (1024, 640, 272, 100)
    shapes = naming.shapes(deepseek_ocr.blank(config))
    assert shapes["sam.layers.2.by_rows"] == (127, 64) and shapes["out.weight"] == (1280, 2048)
    assert shapes["sam.layers.0.by_rows"] == (27, 64) and shapes["clip.positions"] == (257, 1024)


def test_neighbours_in_a_pack_change_no_bit(params):
    model = deepseek_ocr.encoder(CONFIG, params, max_tokens=200)
    step = captured(model, params, "global", sizes=(80,), max_tokens=80, max_reqs=4)
    rows = [
        split(step(model.collate("global", [before, PAGES[1], after])), [20] * 3)[1]
        for before, after in ((PAGES[0], PAGES[2]), (PAGES[3], PAGES[4]))
    ]
    close(rows[0], rows[1], atol=0, rtol=0)
