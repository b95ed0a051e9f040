"""Step3-VL's two paths: plain torch as published, and packs in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packs import alone, captured, check_packs, close, drawn_packs, patches, widened
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fngraph.errors import SpecError
from fngraph.models import naming
from fngraph.models.vision import pages, step3_vl

CONFIG = step3_vl.Config(
    num_layers=2, num_heads=2, dim=12, mlp_dim=20, mid_dim=10, out_dim=14, patch_size=4, view=40,
    crop=24,
)  # fmt: skip


class Layer(nn.Module):
    """By torch's own attention, which has its matrices in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(12, 20), nn.Linear(20, 12)
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(12, 1e-6) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer_norm1(self.attention(x, x, x, need_weights=False)[0])
        hidden = self.fc1(x)
        return x + self.layer_norm2(self.fc2(hidden * (1.702 * hidden).sigmoid()))


class Published(nn.Module):
    """The modules, in eager torch, an image at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, 12, 4, 4)
        self.class_embedding = nn.Parameter(torch.empty(1, 12))
        self.position_embedding = nn.Embedding(101, 12)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.vit_downsampler = nn.Conv2d(12, 10, 2, 2)
        self.vit_downsampler2 = nn.Conv2d(10, 20, 3, 2, 1)
        self.vit_large_projector = nn.Linear(20, 14, bias=False)

    def places(self, pixels: Tensor) -> Tensor:
        grid = self.patch_embedding(pixels)
        side, table = grid.shape[-1], self.position_embedding.weight
        found = table[1:].T.reshape(1, 12, 10, 10)
        if side != 10:
            found = interpolate(found, (side, side), mode="bicubic", antialias=True)
        first = self.class_embedding + table[:1]
        x = torch.cat([first.expand(len(grid), 4, -1), (grid + found).flatten(2).mT], 1)
        for layer in self.layers:
            x = layer(x)
        x = x[:, 4:].mT.reshape(-1, 12, side, side)
        x = self.vit_downsampler2(self.vit_downsampler(x))
        return self.vit_large_projector(x.flatten(2).mT)

    def forward(self, page: pages.Page) -> Tensor:
        found = [self.places(page.view[None])]
        if len(page.crops):
            found.insert(0, self.places(page.crops))
        return torch.cat([x.flatten(0, 1) for x in found])

    def state(self) -> dict[str, Tensor]:
        """By the names of the published files."""
        found = {"model.norm.weight": torch.zeros(1)}
        for name, x in self.state_dict().items():
            for theirs, published in RENAMED.items():
                name = name.replace(theirs, published)
            found[name] = x
        return found


RENAMED = {
    "patch_embedding": "vision_model.embeddings.patch_embedding",
    "class_embedding": "vision_model.embeddings.class_embedding",
    "position_embedding": "vision_model.embeddings.position_embedding",
    "attention.in_proj_": "self_attn.qkv_proj.", "attention.out_proj": "self_attn.out_proj",
    "fc": "mlp.fc", "layers": "vision_model.transformer.layers",
}  # fmt: skip


def page(columns: int, rows: int) -> pages.Page:
    k = columns * rows
    view = patches(40 + k, 3 * 40)[:40].view(40, 3, 40).transpose(0, 1)
    crops = patches(24 * k + 1, 3 * 24)[1:].view(k, 24, 3, 24).transpose(1, 2)
    return pages.Page(view, crops, (columns, rows))


PAGES = [page(*grid) for grid in [(0, 0), (2, 1), (1, 2), (2, 3), (1, 1)]]
MODEL = step3_vl.encoder(CONFIG, max_tokens=90)


@pytest.fixture(scope="module")
def published() -> Any:
    return widened(Published())


@pytest.fixture(scope="module")
def params(published: Any) -> step3_vl.Params:
    return step3_vl.from_state(CONFIG, published.state())


def test_images_are_as_published(published, params):
    for one in PAGES:
        present = ["global", "local"] if len(one.crops) else ["global"]
        outputs = {path: alone(MODEL, params, [one], path)[0] for path in present}
        close(MODEL.postprocess(outputs, one), published(one))


@pytest.mark.parametrize(("path", "unit"), [("global", 9), ("local", 4)])
def test_packs_in_graphs(params, path: str, unit: int):
    sizes = (unit, 4 * unit, 12 * unit)
    step = captured(MODEL, params, path, sizes=sizes, max_tokens=12 * unit, max_reqs=12)
    items = [one for one in PAGES if path == "global" or len(one.crops)]
    packs = [[one] for one in items] + list(drawn_packs(items, 6, 4))
    check_packs(step, MODEL, params, packs, path)
    assert step.stats.share("FULL") == 1 and len({n for _, n, _ in step.stats.counts}) >= 2


def test_what_measure_says_and_refuses():
    assert MODEL.measured(PAGES[3]).tokens == {"global": 9, "local": 24}
    assert MODEL.measured(PAGES[3]).sequences == {"global": 1, "local": 6}
    with pytest.raises(SpecError, match=r"of shape \(6, 3, 24, 24\)\. Pass \(2, 3"):
        MODEL.measured(PAGES[3]._replace(grid=(2, 1)))


def test_the_published_sizes():
    config = step3_vl.Config()
    assert config.sizes == (728, 504, 169, 81)
    shapes = naming.shapes(step3_vl.blank(config))
    assert shapes["positions"] == (2705, 1792) and shapes["out"] == (7168, 8192)
