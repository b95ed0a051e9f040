"""Qwen3-VL's language model: transformers' own in fp32, with images and a video in the prompt."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
import transformers
from packs import widened
from torch import Tensor

import fngraph as fg
from fngraph.errors import SpecError
from fngraph.models import CheckpointError, describe, generate
from fngraph.models.families import qwen3_vl
from fngraph.models.vision import grids, prompts, qwen3_vl as vision

IMAGE, VIDEO = 90, 91
MARKS = prompts.Marks(IMAGE, VIDEO)
NEW = 8


def config(**text: Any) -> Any:
    """Four layers, of which two take rows; sections that all differ; more kv heads than one."""
    return transformers.Qwen3VLConfig(
        vision_config={
            "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2,
            "patch_size": 4, "out_hidden_size": 32, "num_position_embeddings": 49,
            "deepstack_visual_indexes": [0, 1],
        },
        text_config={
            "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 256, "eos_token_id": None, "bos_token_id": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 1, 3],
            },
        } | text,
        image_token_id=IMAGE, video_token_id=VIDEO, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip


def picture(t: int, h: int, w: int) -> grids.Picture:
    drawn = torch.randn(t * h * w, 96, generator=torch.Generator().manual_seed(h * w))
    return grids.Picture(drawn, (t, h, w), "video" if t > 1 else "image")


PICTURES = [picture(1, 4, 6), picture(3, 4, 2), picture(1, 2, 8)]
PROMPT = [
    *[7, 50, 3, 88], *[IMAGE] * 6, *[5, 61],
    *[20, *[VIDEO] * 2, 21, *[VIDEO] * 2, 22, *[VIDEO] * 2], *[33, 9, 4], *[IMAGE] * 4, *[17, 80, 2],
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> Any:
    made = transformers.Qwen3VLForConditionalGeneration(config())
    made.set_attn_implementation("eager")
    return widened(made, seed=3)


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("qwen3_vl")
    theirs.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def params(folder: Any) -> Any:
    return qwen3_vl.load(folder)[1]


def inputs(prompt: list[int] = PROMPT) -> dict[str, Tensor]:
    """What theirs takes of the prompt and its pictures."""
    tokens = torch.tensor([prompt])
    made = {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE) + 2 * (tokens == VIDEO)}
    for kind, (values, grid) in {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }.items():
        some = [x for x in PICTURES if x.modality == kind]
        made |= {values: torch.cat([x.patches for x in some]),
                 grid: torch.tensor([x.grid for x in some])}
    return made  # fmt: skip


def test_positions_are_theirs(theirs):
    said = {k: x for k, x in inputs().items() if not k.startswith("pixel")}
    want, delta = theirs.model.get_rope_index(**said)
    got = prompts.positions(PROMPT, PICTURES, MARKS)
    assert torch.equal(got, want[:, 0].T)
    assert int(got.max()) + 1 == len(PROMPT) + int(delta)


def everywhere(params: Any, prompt: list[int], outputs: list[Any]) -> Any:
    """The batch of the whole prompt, with logits of all of its tokens, and a cache for it."""
    c, blocks = params.config, describe.blocks_for(len(prompt), generate.BLOCK_SIZE)
    takes, rows = describe.prompt_rows(outputs, prompt, MARKS, c, "cpu")
    batch = generate.alone(
        prompt, 0, blocks, "cpu", qwen3_vl.PictureBatch, takes=takes, rows=rows,
        positions=prompts.positions(prompt, PICTURES, MARKS),
        logits_indices=torch.arange(len(prompt)),
    )  # fmt: skip
    return qwen3_vl.init_cache(c, blocks, block_size=generate.BLOCK_SIZE), batch


def seen(theirs: Any) -> list[Any]:
    """What their tower makes of each picture."""
    made = [theirs.model.visual(x.patches, torch.tensor([x.grid])) for x in PICTURES]
    return [(x.pooler_output, x.deepstack_features) for x in made]


def test_logits_of_a_prefill(theirs, params):
    cache, batch = everywhere(params, PROMPT, seen(theirs))
    got, _ = qwen3_vl.forward_pictures(params, cache, batch)
    want = theirs(**inputs()).logits[0]
    assert want.std() > 1
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
