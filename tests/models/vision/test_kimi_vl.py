"""Kimi-VL's tower: that of Kimi K2.5 in transformers on single frames, and packs in graphs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from einops import rearrange
from packs import captured, check_packs, close, drawn_packs, patches, split, widened
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import (
    Kimi_K25MultimodalProjection,
    Kimi_K25VisionModel,
)

from fngraph.errors import SpecError
from fngraph.models import CheckpointError
from fngraph.models.vision import grids, kimi_vl

CONFIG = kimi_vl.Config(3, 2, 24, 40, 20, patch_size=4, side=6)
GRIDS = [(1, 2, 2), (1, 6, 6), (1, 6, 4), (1, 2, 14), (1, 8, 8), (1, 10, 2), (1, 12, 4)]
PICTURES = [grids.Picture(patches(h * w, CONFIG.patch_dim), (1, h, w)) for _, h, w in GRIDS]
MODEL = kimi_vl.encoder(CONFIG, max_tokens=48)


class Published(nn.Module):
    """Kimi K2.5's tower, which on one frame is Kimi-VL's but for the order of rotary columns."""

    def __init__(self) -> None:
        super().__init__()
        c = CONFIG
        config = Kimi_K25VisionConfig(
            patch_size=c.patch_size, pos_emb_height=c.side, pos_emb_width=c.side,
            num_attention_heads=c.num_heads, num_hidden_layers=c.num_layers, hidden_size=c.dim,
            intermediate_size=c.mlp_dim, rope_parameters={"rope_type": "axial", "rope_theta": 1e4},
        )  # fmt: skip
        self.vision_tower = Kimi_K25VisionModel._from_config(config, attn_implementation="eager")
        self.multi_modal_projector = Kimi_K25MultimodalProjection(
            SimpleNamespace(
                vision_config=config, projection_hidden_size=c.dim, projection_layer_norm_eps=1e-5,
                text_config=SimpleNamespace(hidden_size=c.out_dim),
            )
        )  # fmt: skip

    def forward(self, pictures: list[grids.Picture]) -> Tensor:
        pixels = torch.cat([x.patches for x in pictures]).view(-1, 3, 4, 4)
        grid = torch.tensor([x.grid for x in pictures])
        return self.multi_modal_projector(self.vision_tower(pixels, grid).pooler_output)[:, 0]

    def state(self) -> dict[str, Tensor]:
        """By the names, and in the order, of the published files."""
        found = {}
        for name, x in self.state_dict().items():
            if "q_proj" in name or "k_proj" in name:
                x = rearrange(x, "(h two i) ... -> (h i two) ...", two=2, h=CONFIG.num_heads)
            for theirs, published in RENAMED.items():
                name = name.replace(theirs, published)
            found[name] = x
        for name in [name for name in found if "q_proj" in name]:
            q, k, v = (found.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv")
            found[name.replace("attn.q_proj", "wqkv")] = torch.cat([q, k, v])
        return found


RENAMED = {
    "norm2": "norm1_", "norm1.": "norm0.", "norm1_": "norm1",
    "tower.layers": "tower.encoder.blocks", "mlp.fc1": "mlp.fc0", "mlp.fc2": "mlp.fc1",
    "attn.proj": "wo", "in_proj": "linear_1", "out_proj": "linear_2",
    "pos_emb.position_embeddings": "pos_emb.weight",
    "tower.final_layernorm": "tower.encoder.final_layernorm",
}  # fmt: skip


@pytest.fixture(scope="module")
def published() -> Any:
    return widened(Published())


@pytest.fixture(scope="module")
def params(published: Any) -> kimi_vl.Params:
    return kimi_vl.from_state(CONFIG, published.state())


def test_it_is_as_published(published, params):
    got = kimi_vl.forward(params, kimi_vl.collate(CONFIG, PICTURES))
    close(got, published(PICTURES), atol=1e-4)
    for one, rows in zip(PICTURES, split(got, [len(x.patches) // 4 for x in PICTURES])):
        close(rows, published([one]), atol=1e-4)


def test_packs_in_graphs(params):
    step = captured(MODEL, params, sizes=(8, 16, 48), max_tokens=48, max_reqs=8)
    packs = [[x] for x in PICTURES] + list(drawn_packs(PICTURES, 10, 4))
    check_packs(step, MODEL, params, packs)
    assert step.stats.share("FULL") == 1
    assert {padded for _, padded, _ in step.stats.counts} == {8, 16, 48}


def test_a_video_is_refused():
    with pytest.raises(SpecError, match="Kimi-VL knows no videos"):
        MODEL.measured(PICTURES[1]._replace(grid=(9, 2, 2)))


def test_it_is_read_from_a_folder(published, params, tmp_path):
    said = {
        "model_type": "kimi_vl", "text_config": {"hidden_size": 20}, "ignore_index": -100,
        "media_placeholder_token_id": 7, "vision_config": {
            "model_type": "moonvit", "patch_size": 4, "num_attention_heads": 2,
            "num_hidden_layers": 3, "hidden_size": 24, "intermediate_size": 40,
            "merge_kernel_size": [2, 2], "init_pos_emb_height": 6, "init_pos_emb_width": 6,
        },
    }  # fmt: skip
    state = {name: x.contiguous() for name, x in published.state().items()}
    save_file(state | {"language_model.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(said))
    found, read = kimi_vl.load(tmp_path)
    assert found == CONFIG
    batch = kimi_vl.collate(CONFIG, PICTURES)
    close(kimi_vl.forward(read, batch), kimi_vl.forward(params, batch), atol=0, rtol=0)
    for key, value, told in (
        ("merge_kernel_size", [2, 1], r"only \[2, 2\] can be run"),
        ("init_pos_emb_width", 7, "6 x 7 positions, which is no square"),
    ):
        other = said | {"vision_config": said["vision_config"] | {key: value}}
        (tmp_path / "config.json").write_text(json.dumps(other))
        with pytest.raises(CheckpointError, match=told):
            kimi_vl.load(tmp_path)
