"""Qwen3-VL's vision tower: transformers' own in fp32, and packs of images and videos in graphs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import transformers
from packs import captured, check_packs, close, drawn_packs, patches, split, widened
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import fngraph as fg
from fngraph.errors import SpecError
from fngraph.models import CheckpointError
from fngraph.models.vision import grids, qwen3_vl

VISION = {
    "depth": 4, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 20, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
CONFIG = qwen3_vl.Config(
    num_layers=4, num_heads=2, dim=24, mlp_dim=40, out_dim=20, patch_size=4, frames=2, channels=3,
    side=7, deepstack=(0, 2),
)  # fmt: skip
GRIDS = [(1, 2, 2), (1, 6, 4), (1, 2, 14), (1, 8, 8), (1, 10, 2), (2, 4, 4), (5, 2, 4), (3, 6, 2)]


def picture(grid: tuple[int, int, int]) -> grids.Picture:
    t, h, w = grid
    made = patches(t * h * w, CONFIG.patch_dim)
    return grids.Picture(made, grid, "video" if t > 1 else "image")


PICTURES = [picture(grid) for grid in GRIDS]
MODEL = qwen3_vl.encoder(CONFIG, max_tokens=64)


@pytest.fixture(scope="module")
def tower() -> Any:
    config = transformers.Qwen3VLConfig(vision_config=VISION).vision_config
    return widened(Qwen3VLVisionModel._from_config(config, attn_implementation="eager"))


@pytest.fixture(scope="module")
def params(tower: Any) -> qwen3_vl.Params:
    return qwen3_vl.from_state(CONFIG, tower.state_dict())


def test_it_is_transformers_tower(tower, params):
    got = qwen3_vl.forward(params, qwen3_vl.collate(CONFIG, PICTURES))
    pixels, grid = torch.cat([x.patches for x in PICTURES]), torch.tensor(GRIDS)
    want = tower(pixels, grid)
    close(got, (want.pooler_output, want.deepstack_features))
    sizes = [len(x.patches) // 4 for x in PICTURES]
    for one, rows in zip(PICTURES, split(got, sizes)):
        made = tower(one.patches, torch.tensor([one.grid]))
        close(rows, (made.pooler_output, made.deepstack_features))


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE"])
def test_packs_in_graphs(params, modes: str):
    step = captured(MODEL, params, sizes=(8, 16, 32, 64), max_tokens=64, max_reqs=16, modes=modes)
    packs = [[x] for x in PICTURES] + list(drawn_packs(PICTURES, 12, 5))
    check_packs(step, MODEL, params, packs)
    assert step.stats.share(modes) == 1
    assert {padded for _, padded, _ in step.stats.counts} == {8, 16, 32, 64}


def test_what_measure_says_and_refuses():
    assert MODEL.measured(PICTURES[4]) == fg.Measured("image", {"default": 5}, {"default": 1}, 0)
    assert MODEL.measured(PICTURES[6]) == fg.Measured("video", {"default": 10}, {"default": 5}, 5)
    for wrong, told in (
        (PICTURES[0]._replace(grid=(1, 4, 1)), "rows and columns are multiples of 2"),
        (PICTURES[0]._replace(grid=(0, 2, 2)), "at least one frame"),
        (PICTURES[0]._replace(grid=(1, 2, 4)), r"of shape \(4, 96\)\. Pass \(8, 96\)"),
    ):
        with pytest.raises(SpecError, match=told):
            MODEL.measured(wrong)


def test_it_is_read_from_a_folder(tower, params, tmp_path):
    config = transformers.Qwen3VLConfig(
        vision_config=VISION,
        text_config={
            "vocab_size": 32, "hidden_size": 20, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
    )  # fmt: skip
    model = transformers.Qwen3VLForConditionalGeneration(config)
    model.model.visual.load_state_dict(tower.state_dict())
    model.save_pretrained(tmp_path)
    found, read = qwen3_vl.load(tmp_path)
    assert found == CONFIG
    batch = qwen3_vl.collate(CONFIG, PICTURES[:3])
    close(qwen3_vl.forward(read, batch), qwen3_vl.forward(params, batch), atol=0, rtol=0)
    said = json.loads((tmp_path / "config.json").read_text())
    for key, value, told in (
        ("spatial_merge_size", 3, "spatial_merge_size is 3, not 2"),
        ("hidden_act", "silu", "hidden_act is 'silu', only 'gelu_pytorch_tanh'"),
        ("deepstack_visual_indexes", [4], "deepstack_visual_indexes is (4,), of 4 layers"),
        ("windows", 8, "in its vision_config:\n  windows is 8, which is not known here"),
    ):
        other = said | {"vision_config": said["vision_config"] | {key: value}}
        (tmp_path / "config.json").write_text(json.dumps(other))
        with pytest.raises(CheckpointError, match=re.escape(told)):
            qwen3_vl.load(tmp_path)


def test_a_state_that_is_not_its_own_is_refused(params, tower):
    state = tower.state_dict()
    del state["merger.norm.bias"]
    state |= {"more": torch.zeros(1), "pos_embed.weight": torch.zeros(4, 24)}
    with pytest.raises(CheckpointError) as caught:
        qwen3_vl.from_state(CONFIG, state)
    lines = str(caught.value).splitlines()[1:]
    assert lines == [
        "  model.visual.merger.norm.bias: missing, expected (24,)",
        "  model.visual.more: unknown, of shape (1,)",
        "  model.visual.pos_embed.weight: expected (49, 24), got (4, 24)",
    ]


def test_neighbours_in_a_pack_change_no_bit(params):
    step = captured(MODEL, params, sizes=(32,), max_tokens=32, max_reqs=16)
    others = [x._replace(patches=x.patches.flip(0) * 3) for x in PICTURES]
    rows = [
        split(step(qwen3_vl.collate(CONFIG, [of[0], PICTURES[6], of[1]])), [1, 10, 6])[1]
        for of in (PICTURES, others)
    ]
    close(rows[0], rows[1], atol=0, rtol=0)
