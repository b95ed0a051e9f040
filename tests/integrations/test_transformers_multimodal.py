"""Vision-language models of transformers as they are, held to transformers' own `generate`: images
and videos in some prompts of several, in one call."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fngraph as fg
from fngraph.errors import ModelError, SpecError
from fngraph.integrations.transformers import GraphifiedModel, Picture, graphify_model
from fngraph.integrations.transformers.fixed import Fixed
from fngraph.integrations.transformers.forward import Pictured, pure_forward
from tests.integrations.architectures import make
from tests.models.conftest import DEVICES
from tests.traced_once import Kept, traced_once

IMAGE, VIDEO, START = 90, 91, 92
NEW = 8
TOWER = {"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4}
TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
TOWERS: dict[str, dict[str, Any]] = {
    "Qwen3VL": {"out_hidden_size": 32, "num_position_embeddings": 49,
                "deepstack_visual_indexes": [0, 1]},
    "Qwen3VLMoe": {
        "out_hidden_size": 32, "num_position_embeddings": 49, "deepstack_visual_indexes": [0],
    },
    "Qwen2_5_VL": {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
    "Qwen2VL": {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
}  # fmt: skip
LIMITS = fg.Limits(12, 3, B=8)


def model_of(name: str) -> Any:
    """A tiny model whose text each picture changes; sections of its rope that all differ."""
    text, sections = TEXT, [2, 1, 1]
    if name.startswith("Qwen3VL"):
        text, sections = TEXT | {"head_dim": 16}, [4, 1, 3]
    if name == "Qwen3VLMoe":
        text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": sections}
    config = getattr(transformers, f"{name}Config")(
        vision_config=TOWER | TOWERS[name], text_config=text | {"rope_parameters": rope},
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    made = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    made.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(9)
    for weight in made.parameters():
        drawn = torch.randn(weight.shape, generator=generator) * 0.3
        weight.data = drawn + (weight.ndim == 1)
    return made.eval()


def picture(t: int, h: int, w: int, seed: int = 0) -> Picture:
    drawn = torch.randn(t * h * w, 96, generator=torch.Generator().manual_seed(h * w + seed))
    return Picture(drawn, (t, h, w), "video" if t > 1 else "image", 2.0 if t > 1 else 1.0)


def runs(name: str, picture: Picture) -> list[int]:
    """What a picture is in a prompt."""
    t, h, w = picture.grid
    if picture.modality == "image":
        return [IMAGE] * (h * w // 4)
    frame = [VIDEO] * (h * w // 4)
    if name.startswith("Qwen3VL"):
        return [token for i in range(t) for token in (20 + i, *frame)]
    return frame * t


MIXED = [picture(1, 4, 6), picture(3, 4, 2), picture(1, 2, 8)]
PICTURES = [MIXED, [], [picture(1, 6, 6, seed=1)], [picture(2, 2, 2, seed=2)], [MIXED[2]]]


def prompts(name: str) -> list[list[int]]:
    """A prompt for each list of PICTURES."""
    draw, made = random.Random(3), []
    for some in PICTURES:
        prompt = [draw.randrange(80) for _ in range(4)]
        for one in some:
            prompt += [*runs(name, one), draw.randrange(80), draw.randrange(80)]
        made.append(prompt)
    return made


def inputs(prompt: Sequence[int], pictures: Sequence[Picture]) -> dict[str, Tensor]:
    """What theirs takes."""
    tokens = torch.tensor([prompt])
    made = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if pictures:
        made["mm_token_type_ids"] = (tokens == IMAGE) + 2 * (tokens == VIDEO)
    for kind, values, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        if some := [x for x in pictures if x.modality == kind]:
            made[values] = torch.cat([x.patches for x in some])
            made[grid] = torch.tensor([x.grid for x in some])
            if kind == "video":
                made["second_per_grid_ts"] = torch.tensor([x.seconds for x in some])
    return made


def theirs(
    model: Any, prompt: Sequence[int], pictures: Sequence[Picture], new: int = NEW
) -> list[int]:
    """Their greedy text."""
    given = {name: x.to(model.device) for name, x in inputs(prompt, pictures).items()}
    if model.config.model_type != "qwen2_5_vl":
        given.pop("second_per_grid_ts", None)
    out = model.generate(**given, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@pytest.fixture(autouse=True, scope="module")
def without_gradients(one_thread: None):
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def qwen() -> Any:
    """A Qwen3-VL."""
    return model_of("Qwen3VL")


@pytest.fixture(scope="module")
def wanted(qwen: Any) -> list[list[int]]:
    """What it says itself of every prompt."""
    asked = zip(prompts("Qwen3VL"), PICTURES, strict=True)
    return [theirs(qwen, prompt, some) for prompt, some in asked]


@pytest.fixture(scope="module")
def traces() -> Kept:
    """Of the Qwen3-VL, for all tests."""
    return {}


@pytest.fixture(scope="module")
def fast(qwen: Any, traces: Kept) -> GraphifiedModel:
    """The same with graphs."""
    with traced_once(traces, "Qwen3VL"):
        return graphs(qwen)


def graphs(model: Any, **options: Any) -> GraphifiedModel:
    """The model under test, its cache full of NaN, so that reading unwritten slots shows; with
    fewer blocks than three texts come to, so that the last one may be thrown out."""
    given = {"sizes": (1, 2, 4, 12), "recorder": "tape", "lazy": True, "num_blocks": 6} | options
    fast = graphify_model(model, LIMITS, encoder={"budgets": (4, 16), "guards": True}, **given)
    for kv in fast.cache:
        for x in kv:
            x.fill_(torch.nan)
    return fast


def hold(fast: GraphifiedModel, name: str, want: list[list[int]], decode: str, mixed: str) -> None:
    """Serve all prompts in one call; texts, and how each step ran, must be right."""
    got: list[list[int]] = [[] for _ in want]
    pictured = uniform = steps = 0
    for served in fast.serve(prompts(name), NEW, pictures=PICTURES):
        for event in served.events:
            got[event.id] += event.tokens
        steps += 1
        pictured += hasattr(served.batch, "rows")
        uniform += served.batch.spec.query_len == 1
    assert got == want
    assert len({token for text in want for token in text}) >= 12
    prefill, encoder = fast.vision.prefill, fast.vision.encoder
    assert prefill.stats.steps == pictured >= 5 and prefill.stats.share(mixed) == 1
    assert fast.step.stats.steps == steps - pictured and uniform >= 10
    share = uniform / fast.step.stats.steps if decode != mixed else 1
    assert fast.step.stats.share(decode) == pytest.approx(share)
    if decode != "NONE":
        assert encoder.stats.hits() >= sum(map(len, PICTURES)) and not encoder.stats.misses()
        assert encoder.recorder is prefill.recorder is fast.step.recorder


@pytest.mark.sampled("Qwen3VL-")
@pytest.mark.parametrize("device, recorder", DEVICES)
@pytest.mark.parametrize("name", TOWERS)
def test_text_is_theirs(name: str, device: str, recorder: str, traces: Kept):
    model = model_of(name).to(device)
    asked = zip(prompts(name), PICTURES, strict=True)
    want = [theirs(model, prompt, some) for prompt, some in asked]
    with traced_once(traces, name if device == "cpu" else device + name):
        fast = graphs(model, recorder=recorder)
    hold(fast, name, want, "FULL", "PIECEWISE")


MODES = {"NONE": ("NONE",) * 2, "PIECEWISE": ("PIECEWISE",) * 2, "FULL": ("FULL",) * 2,
         "FULL_DECODE_ONLY": ("FULL", "NONE")}  # fmt: skip


@pytest.mark.sampled("FULL_DECODE_ONLY")
@pytest.mark.parametrize("modes", MODES)
def test_in_every_mode(modes: str, qwen: Any, wanted: Any, traces: Kept):
    with traced_once(traces, modes == "NONE" or "Qwen3VL"):  # which traces no tower
        fast = graphs(qwen, modes=modes)
    hold(fast, "Qwen3VL", wanted, *MODES[modes])


def test_text_right_behind_a_picture_is_that_of_passes_over_the_whole(fast: Any, qwen: Any):
    """Their `generate` counts on from the picture's last row and column, and says other things."""
    some = [MIXED[0]]
    prompt = [5, 6, *runs("Qwen3VL", some[0])]
    text = list(prompt)
    for _ in range(NEW):
        given = inputs(text, some)
        text.append(int(qwen(**given, use_cache=False).logits[0, -1].argmax()))
    assert fast.generate([prompt], NEW, pictures=[some]) == [text[len(prompt) :]]


def test_equal_tokens_may_stand_for_other_pictures(fast: GraphifiedModel, qwen: Any):
    """In one call, where blocks of prompts that begin alike could be shared, and in the next."""
    prompt = [40, 41, 42, *[IMAGE] * 6, *range(50, 62)]
    some = [[picture(1, 4, 6, seed=seed)] for seed in (0, 5, 0)]
    want = [theirs(qwen, prompt, one) for one in some]
    assert want[0] != want[1]
    assert fast.generate([prompt] * 3, NEW, pictures=some) == want
    assert fast.generate([prompt], NEW, pictures=[some[1]]) == want[1:2]
    text = [[*range(40, 60)]] * 2
    assert fast.generate(text, NEW) == [theirs(qwen, text[0], [])] * 2


def test_a_request_that_is_thrown_out_sees_again(fast: GraphifiedModel, qwen: Any):
    asked = [[every[i] for i in (0, 4, 2)] for every in (prompts("Qwen3VL"), PICTURES)]
    want = [theirs(qwen, *pair, new=24) for pair in zip(*asked, strict=True)]
    got: list[list[int]] = [[] for _ in want]
    thrown: set[int] = set()
    computed: dict[int, int] = {}
    before = fast.vision.encoder.stats
    for served in fast.serve(asked[0], 24, pictures=asked[1]):
        thrown |= {job.id for job, *_ in served.rows if job.computed < computed.get(job.id, 0)}
        computed |= {job.id: job.computed for job, *_ in served.rows}
        for event in served.events:
            got[event.id] += event.tokens
    assert got == want
    again = sum(len(asked[1][i]) for i in thrown)
    assert again and (fast.vision.encoder.stats - before).items == 5 + again


def test_padding_changes_nothing(fast: GraphifiedModel, qwen: Any):
    served = [x.batch for x in fast.serve(prompts("Qwen3VL"), 2, pictures=PICTURES)]
    batch = next(x for x in served if hasattr(x, "rows") and x.takes.any() and not x.takes.all())
    batch.rows[~batch.takes] = torch.nan  # of text, which has none
    forward = pure_forward(qwen, 128, Fixed(None, {}), Pictured)
    cache = tuple((k.clone().nan_to_num(), v.clone().nan_to_num()) for k, v in fast.cache)
    report = fg.check(
        forward, fast.params, cache, batch, donate="cache", stage="batch", rehearse=True
    )
    assert report.ok, report.as_text()
    logits, _ = forward(fast.params, cache, batch)
    assert logits.isfinite().all()


def test_the_model_stays_as_it_is(qwen: Any, traces: Kept):
    qwen.set_attn_implementation({"vision_config": "sdpa"})
    try:
        before = qwen.config.to_dict()
        with traced_once(traces, "Qwen3VL"):
            graphs(qwen).generate(prompts("Qwen3VL")[:1], 2, pictures=PICTURES[:1])
        assert qwen.config.to_dict() == before
        assert qwen.config.vision_config._attn_implementation == "sdpa"
        assert qwen.config.text_config._attn_implementation == "eager"
        language = qwen.model.language_model
        assert "_deepstack_process" not in vars(language) and not language._forward_pre_hooks
    finally:
        qwen.set_attn_implementation("eager")


# --- what is refused ------------------------------------------------------------------------------

IMAGE_46, VIDEO_42, _ = MIXED
WRONG: dict[str, tuple[list[int], list[Picture], str]] = {
    "no pictures": ([3, *[IMAGE] * 6], [], r"prompt 1 has runs of token 90 .* images make \[\]"),
    "no run": ([3, 4], [IMAGE_46], r"of the lengths \[\], and its images make \[6\]"),
    "too short": ([*[IMAGE] * 5, 3], [IMAGE_46], r"lengths \[5\], and its images make \[6\]"),
    "touching": ([*[IMAGE] * 12], [IMAGE_46] * 2, r"lengths \[12\].* make \[6, 6\]\..* between"),
    "frames in one": ([*[VIDEO] * 6, 1], [VIDEO_42],
                      r"token 91 of the lengths \[6\], and its videos make \[2, 2, 2\]"),
    "another kind": ([3], [IMAGE_46._replace(modality="audio")], 'modality is "image" or "video"'),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_prompt_that_is_not_that_of_its_pictures_is_refused(what: str, fast: GraphifiedModel):
    prompt, some, told = WRONG[what]
    with pytest.raises(SpecError, match=told):
        fast.generate([[1], prompt], 2, pictures=[[], some])
    with pytest.raises(SpecError, match=r"2 prompts, and pictures= for 1\. Pass a list"):
        fast.generate([[1], prompt], 2, pictures=[some])
    for one in (IMAGE_46, [IMAGE_46, IMAGE_46]):
        with pytest.raises(SpecError, match=r"pass a list of them for each prompt, pictures=\[\["):
            fast.generate([[1], prompt], 2, pictures=one)


def test_a_model_that_takes_no_pictures_here_says_so():
    model = make("Llama")
    model.config.image_token_id = 7
    fast = graphify_model(model, LIMITS, recorder="tape", lazy=True, sizes=(1,))
    with pytest.raises(ModelError, match=r"prompt 1 comes with pictures.* takes none here: qwen2"):
        fast.generate([[1], [2]], 2, pictures=[[], [IMAGE_46]])
    with pytest.raises(ModelError, match=r"encoder= is for .*LlamaForCausalLM is none of qwen2_5"):
        graphify_model(model, LIMITS, encoder={"budgets": (8,)})
    with pytest.raises(SpecError, match="prompt 0 has token 7, which stands for a picture"):
        fast.generate([[1, 7, 7]], 2)
    assert fast.vision is None and len(fast.generate([[1, 8]], 2)[0]) == 2
