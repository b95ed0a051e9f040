"""Qwen3-VL's language model: transformers' own in fp32, with images and a video in the prompt."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from packs import widened
from torch import Tensor

import fngraph as fg
from fngraph.errors import SpecError
from fngraph.models import CheckpointError, generate, naming, pictures
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
    20, *[VIDEO] * 2, 21, *[VIDEO] * 2, 22, *[VIDEO] * 2, *[33, 9, 4], *[IMAGE] * 4, *[17, 80, 2],
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> Any:
    made = transformers.Qwen3VLForConditionalGeneration(config())
    made.set_attn_implementation("eager")
    return widened(made, seed=9)  # found by looking for a text that each picture changes


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("qwen3_vl")
    theirs.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def params(folder: Any) -> Any:
    return qwen3_vl.load(folder)[1]


def inputs(prompt: Sequence[int] = PROMPT) -> dict[str, Tensor]:
    """What theirs takes of the prompt and its pictures."""
    tokens = torch.tensor([prompt])
    made = {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE) + 2 * (tokens == VIDEO)}
    for kind, (values, grid) in {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }.items():
        some = [x for x in PICTURES if x.modality == kind]
        made |= {
            values: torch.cat([x.patches for x in some]),
            grid: torch.tensor([x.grid for x in some]),
        }
    return made  # fmt: skip


def test_positions_are_theirs(theirs):
    said = {k: x for k, x in inputs().items() if not k.startswith("pixel")}
    want, delta = theirs.model.get_rope_index(**said)
    got = prompts.positions(PROMPT, PICTURES, MARKS)
    assert torch.equal(got, want[:, 0].T)
    assert int(got.max()) + 1 == len(PROMPT) + int(delta)


def everywhere(params: Any, prompt: list[int], outputs: list[Any]) -> Any:
    """The batch of the whole prompt, with logits of all of its tokens, and a cache for it."""
    c, blocks = params.config, pictures.blocks_for(len(prompt) + NEW, generate.BLOCK_SIZE)
    takes, rows = pictures.prompt_rows(outputs, prompt, MARKS, c, "cpu")
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
    batch.rows[~batch.takes] = torch.nan  # of text, which has none
    got, _ = qwen3_vl.forward_pictures(params, cache, batch)
    want = theirs(**inputs()).logits[0]
    assert want.std() > 1
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


def greedy(theirs: Any, **asked: Tensor) -> tuple[int, ...]:
    """Their greedy text."""
    tokens = asked["input_ids"]
    out = theirs.generate(
        **asked, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, min_new_tokens=NEW,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return tuple(out[0, tokens.shape[1] :].tolist())


@pytest.fixture(scope="module")
def wanted(theirs: Any) -> tuple[int, ...]:
    return greedy(theirs, **inputs())


def test_greedy_tokens_of_bare_forward(theirs, params, wanted):
    """The prompt whole, then one token a step, with the logits of each."""
    assert len(set(wanted)) >= NEW - 1 and not {IMAGE, VIDEO} & {*wanted}
    text = [*PROMPT, *wanted]
    cache, batch = everywhere(params, PROMPT, seen(theirs))
    logits, cache = qwen3_vl.forward_pictures(params, cache, batch)
    blocks, at = batch.block_tables.shape[1], int(batch.positions.max())
    want = theirs(**inputs(text)).logits[0]
    for end in range(len(PROMPT), len(text)):
        torch.testing.assert_close(logits[-1], want[end - 1], atol=2e-4, rtol=2e-4)
        assert int(logits[-1].argmax()) == text[end]
        at += 1
        one = generate.alone(
            text[: end + 1], end, blocks, "cpu", qwen3_vl.Batch, positions=torch.full((1, 3), at)
        )
        logits, cache = qwen3_vl.forward(params, cache, one)


@pytest.fixture(scope="module")
def graphs(folder, params) -> Any:
    """Graphs on the tape, over a cache in which reading what was never written shows."""
    _, tower = vision.load(folder)
    blocks = pictures.blocks_for(len(PROMPT) + NEW, generate.BLOCK_SIZE)
    cache = qwen3_vl.init_cache(params.config, blocks, block_size=generate.BLOCK_SIZE)
    for x in naming.named(cache).values():
        x.fill_(torch.nan)
    made = pictures.make_graphs(
        tower, params, cache, max_len=len(PROMPT) + NEW, chunk=16, max_tokens=8, recorder="tape",
        guards=True,
    )  # fmt: skip
    return made, cache


@pytest.mark.sampled(1)
def test_one_call_describes_pictures(graphs, wanted):
    made, cache = graphs
    assert pictures.describe(made, cache, PROMPT, PICTURES, NEW) == wanted
    assert made.encoder.recorder is made.prefill.recorder is made.decode.recorder
    assert made.encoder.stats.hits() == len(PICTURES)
    assert made.prefill.stats.share("PIECEWISE") == made.decode.stats.share("FULL") == 1
    assert made.prefill.stats.steps == -(-len(PROMPT) // 16)
    assert made.decode.stats.steps == NEW - 1


def test_other_pictures_and_none_are_other_texts(graphs, theirs, wanted):
    """The same graphs, whose buffers still hold the rows of what came before."""
    made, cache = graphs
    for at in range(len(PICTURES)):
        others = [x._replace(patches=x.patches.flip(0)) if i == at else x
                  for i, x in enumerate(PICTURES)]  # fmt: skip
        assert pictures.describe(made, cache, PROMPT, others, NEW) != wanted
    text = [token for token in PROMPT if token not in MARKS]
    assert pictures.describe(made, cache, text, [], NEW) == greedy(
        theirs, input_ids=torch.tensor([text])
    )
    assert pictures.describe(made, cache, PROMPT, PICTURES, NEW) == wanted
    at = wanted.index(23)  # comes twice
    assert pictures.describe(made, cache, PROMPT, PICTURES, NEW, stop=[23]) == wanted[: at + 1]


def test_nothing_is_refused_and_padding_changes_nothing(theirs, params):
    cache, batch = everywhere(params, PROMPT, seen(theirs))
    batch = dataclasses.replace(batch, logits_indices=torch.tensor([len(PROMPT) - 1]))
    bare = {f.name: getattr(batch, f.name) for f in dataclasses.fields(qwen3_vl.Batch)}
    for forward, one in (
        (qwen3_vl.forward_pictures, batch),
        (qwen3_vl.forward, qwen3_vl.Batch(**bare)),
    ):
        report = fg.check(forward, params, cache, one, donate="cache", stage="batch", rehearse=True)
        assert report.ok, report.as_text()


def test_prompts_that_are_not_those_of_the_pictures_are_refused(graphs):
    made, cache = graphs
    image, video, _ = PICTURES
    for prompt, some, told in (
        ([3, IMAGE, IMAGE], [], r"tokens\[1\] is 90, a picture's, after all tokens of the 0 that"),
        (
            [3, *[IMAGE] * 5],
            [image],
            r"tokens\[1:7\] have to be 90, pictures\[0\], an image of gri",
        ),
        (
            [3, *[IMAGE] * 7],
            [image],
            r"tokens\[7\] is 90, a picture's, after all tokens of the 1 th",
        ),
        ([*[VIDEO] * 6], [image], r"tokens\[0:6\] have to be 90"),
        (
            [*[VIDEO] * 4, 5],
            [video],
            r"ends before pictures\[0\], a frame of a video of grid \(3, 4",
        ),
        ([4], [image._replace(grid=(2, 4, 6))], r"an image of 2 frames.*modality=\"video\""),
        ([4] * 32, [], r"32 tokens, and max_new=8 more are beyond max_len=39\. Pass max_new=7"),
        ([], [], "the prompt is empty"),
    ):
        with pytest.raises(SpecError, match=told):
            pictures.describe(made, cache, prompt, some, NEW)


def test_frames_that_touch_are_apart():
    """As no prompt of the model's has them; theirs takes two for one."""
    got = prompts.positions([VIDEO] * 4 + [IMAGE] * 2, [picture(2, 2, 4), picture(1, 4, 2)], MARKS)
    assert got.tolist() == [[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 2, 3], [4, 4, 4], [4, 5, 4]]


def test_parts_that_do_not_fit_are_refused(folder, params):
    c, tower = params.config, vision.load(folder)[1]
    narrow = dataclasses.replace(tower, config=dataclasses.replace(tower.config, out_dim=16))
    flat = dataclasses.replace(tower, config=dataclasses.replace(tower.config, deepstack=(1,)))
    for one, blocks, size, told in (
        (narrow, 3, 16, "rows of 16 numbers and 2 of deepstack, and the language model takes 32"),
        (flat, 3, 16, "and 1 of deepstack, and the language model takes 32 and 2"),
        (tower, 2, 16, r"2 blocks of 16 tokens, and max_len=39 takes 3 of 16\. Pass init_cache"),
        (tower, 6, 8, "6 blocks of 8 tokens"),
    ):
        cache = qwen3_vl.init_cache(c, blocks, block_size=size)
        with pytest.raises(SpecError, match=told):
            pictures.make_graphs(one, params, cache, max_len=39)


def test_rows_for_other_layers_are_refused(theirs, params):
    cache, batch = everywhere(params, PROMPT, seen(theirs))
    with pytest.raises(
        ValueError, match=r"2 rows a token, .* takes 3: .*Pass fg\.Limits\(\.\.\., N=3"
    ):
        few = dataclasses.replace(batch, rows=batch.rows[:, :2])
        qwen3_vl.forward_pictures(params, cache, few)


def test_weights_come_from_a_state_too(theirs, params):
    state = theirs.state_dict()
    tied = state | {"lm_head.weight": state["model.language_model.embed_tokens.weight"].clone()}
    config = dataclasses.replace(params.config, tied=True)
    for given, got in (
        (state, qwen3_vl.from_state(params.config, state)),
        (tied, qwen3_vl.from_state(config, tied)),
    ):
        want = naming.named(params)
        assert (got.head is None) == (given is tied)
        assert all(torch.equal(x, want[n]) for n, x in naming.named(got).items())
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: is another one than model\.lang"):
        qwen3_vl.from_state(config, state)


def test_what_config_json_says(folder, params, tmp_path):
    """Changed as transformers 4 wrote it, and into what cannot be run."""
    raw = json.loads((folder / "config.json").read_text())
    assert qwen3_vl.read_config(raw) == params.config
    text = raw["text_config"]
    rope = text.pop("rope_parameters")
    older = {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope | {"mrope_interleaved": True},
    }
    assert qwen3_vl.read_config(raw | {"text_config": text | older}) == params.config
    got = qwen3_vl.read_config(raw | {"text_config": text | {"rope_scaling": rope}})
    assert got == dataclasses.replace(params.config, rope_theta=500_000.0)  # transformers' own
    tied = qwen3_vl.read_config(raw | {"text_config": text | older, "tie_word_embeddings": True})
    assert tied.tied and not params.config.tied
    for said, told in (
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ({"rope_scaling": rope | {"mrope_interleaved": False}}, "mrope_interleaved is false"),
        (
            {"rope_scaling": rope | {"mrope_section": [4, 2]}},
            r"mrope_section is \[4, 2\], not three",
        ),
        ({"rope_scaling": rope | {"mrope_section": [4, 2, 1]}}, "make up head_dim, 16"),
        ({"windows": 3}, "windows is 3, which is not known here"),
        (
            {"rope_scaling": {**rope, "rope_type": "dynamic", "factor": 2.0}},
            "'dynamic' goes by the length of a text",
        ),
    ):
        (tmp_path / "config.json").write_text(
            json.dumps(raw | {"text_config": text | older | said})
        )
        with pytest.raises(CheckpointError, match=told):
            qwen3_vl.load(tmp_path)
