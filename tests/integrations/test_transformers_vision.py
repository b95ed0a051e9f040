"""Vision towers of transformers as they are: under `fg.graphify_encoder` as by themselves."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import fngraph as fg
from fngraph.errors import ModelError, SpecError
from fngraph.integrations.transformers.vision import (
    NAME,
    Picture,
    attend_packed,
    pictures,
    vision_encoder,
)

SMALL = {"depth": 2, "num_heads": 2, "patch_size": 4}
SIZES = SMALL | {"hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 20}
TEXT = {
    "hidden_size": 20, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32,
}  # fmt: skip
TILES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
}  # fmt: skip
CLOSE = {"atol": 3e-5, "rtol": 3e-5}


@pytest.fixture(autouse=True, scope="module")
def without_gradients():
    with torch.no_grad():
        yield


def widened(module: Any) -> Any:
    """In evaluation, every weight random."""
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.3 + (weight.ndim == 1)
    return module.eval()


# --- towers over packed patches -------------------------------------------------------------------


class Tower(NamedTuple):
    """A tower of transformers, and the config that it is in."""

    kind: Any
    config: Any
    vision: dict[str, Any]


TOWERS = {
    "qwen2_vl": Tower(
        Qwen2VisionTransformerPretrainedModel, transformers.Qwen2VLConfig,
        SMALL | {"embed_dim": 24, "hidden_size": 20, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": Tower(
        Qwen2_5_VisionTransformerPretrainedModel, transformers.Qwen2_5_VLConfig,
        SIZES | {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": Tower(
        Qwen3VLVisionModel, transformers.Qwen3VLConfig,
        SIZES | {"num_position_embeddings": 49, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5": Tower(
        Qwen3_5VisionModel, transformers.Qwen3_5Config, SIZES | {"num_position_embeddings": 49}
    ),
    "glm4v": Tower(Glm4vVisionModel, transformers.Glm4vConfig, SIZES | {"image_size": 28}),
}  # fmt: skip
GRIDS = [(1, 2, 2), (1, 6, 10), (3, 4, 4), (1, 2, 10), (2, 6, 6), (1, 12, 12)]


def tower_of(name: str) -> Any:
    tower = TOWERS[name]
    config = tower.config(vision_config=tower.vision).vision_config
    return widened(tower.kind._from_config(config, attn_implementation="eager"))


def items_of(tower: Any) -> list[Any]:
    width = tower.patch_embed.proj.weight[0].numel()
    total = sum(t * h * w for t, h, w in GRIDS)
    pixels = torch.randn(total, width, generator=torch.Generator().manual_seed(1))
    found = pictures(pixels, torch.tensor(GRIDS))
    return [x._replace(modality="video") if x.grid[0] > 1 else x for x in found]


def theirs(name: str, tower: Any, item: Any) -> Any:
    t, h, w = item.grid
    grid = [[1, h, w]] * t if name == "glm4v" else [[t, h, w]]  # which counts frames there
    out = tower(item.patches, torch.tensor(grid))
    deep = getattr(out, "deepstack_features", None)
    return out.pooler_output if deep is None else (out.pooler_output, tuple(deep))


def check_call(encode: Any, items: list[Any], wants: list[Any], order: list[int]) -> None:
    for i, got in zip(order, encode([items[i] for i in order]), strict=True):
        torch.testing.assert_close(got, wants[i], **CLOSE)
        rows = got[0] if isinstance(got, tuple) else got
        assert rows.abs().max() > 0.1


def check_leaves(encode: Any) -> None:
    """Padding of each leaf is poisoned, but that of offsets, which say what theirs is."""
    step = encode.steps["default"]
    leaves = step.main.executable.plan.buffers
    assert {leaf.buffer.pad for leaf in leaves if leaf.buffer.pad_given} <= {"last"}
    free = [not leaf.buffer.pad_given for leaf in leaves]
    assert any(free) and list(step.main.poison.poisoned) == free


def check_neighbours(encode: Any, items: list[Any], spoilt: list[Any]) -> None:
    """The same run, with NaN in all items but one, changes no bit of that one."""
    (run,) = encode.pack(items).runs
    assert run.budget and len(run.items) == len(items) > 1
    wants = encode(items)
    for i, want in enumerate(wants):
        gots = encode([*spoilt[:i], items[i], *spoilt[i + 1 :]])
        torch.testing.assert_close(gots[i], want, atol=0, rtol=0)
        assert not any(rows[0].isfinite().all() for rows in gots[:i] + gots[i + 1 :])


def check_calls(encode: Any, items: list[Any], wants: list[Any]) -> None:
    """200 calls, with all that may be in one."""
    draw, met = random.Random(5), collections.Counter[str]()
    for _ in range(200):
        order = draw.choices(range(len(items)), k=draw.randint(0, 8))
        check_call(encode, items, wants, order)
        runs = encode.pack([items[i] for i in order]).runs
        met["none"] += not order
        met["one"] += len(order) == 1
        met["more than a graph holds"] += len(order) > encode.plan.max_items
        met["beyond every budget"] += any(run.budget is None for run in runs)
        met["together"] += any(len(run.items) > 1 for run in runs)
    assert min(met.values()) >= 8, met


@pytest.mark.sampled(0)  # a minute each
@pytest.mark.parametrize("name", TOWERS)
def test_two_hundred_calls(name: str):
    tower = tower_of(name)
    items = items_of(tower)
    wants = [theirs(name, tower, item) for item in items]
    encode = fg.graphify_encoder(
        *vision_encoder(tower), budgets=(8, 32), max_items=4, recorder="tape", guards=True
    )
    check_calls(encode, items, wants)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TOWERS)
def test_packed_towers(name: str):
    tower = tower_of(name)
    items = items_of(tower)
    wants = [theirs(name, tower, item) for item in items]
    model, params = vision_encoder(tower, max_tokens=32)
    encode = fg.graphify_encoder(
        model, params, budgets=(8, 32), max_items=4, recorder="tape", guards=True
    )
    for order in [[i] for i in range(len(items))] + [[], [3, 0, 2], [4, 1, 0, 5, 2, 3]]:
        check_call(encode, items, wants, order)
    check_leaves(encode)
    some = [items[i] for i in (0, 2, 3)]
    spoilt = [item._replace(patches=torch.full_like(item.patches, torch.nan)) for item in some]
    check_neighbours(encode, some, spoilt)
    packed = encode.pack(items)
    assert [run.items for run in packed.runs if run.budget is None] == [(5,)]
    assert tower.config._attn_implementation == "eager", "as it was"
    torch.testing.assert_close(theirs(name, tower, items[1]), wants[1], atol=0, rtol=0)


def test_there_is_room_for_the_windows_of_any_grid():
    """Of one token each at worst, and most of all where a frame is one token high."""
    tower = tower_of("qwen2_5_vl")
    model, _ = vision_encoder(tower)
    least = 99
    for h, w, t in itertools.product(range(2, 16, 2), range(2, 16, 2), (1, 3)):
        patches = torch.zeros(t * h * w, tower.patch_embed.proj.weight[0].numel())
        batch = model.collate("default", [Picture(patches, (t, h, w))])
        assert len(batch.windows) == batch.spec.num_tokens // 2 + batch.spec.num_reqs + 1
        assert batch.windows[-1] == t * h * w
        least = min(least, int(batch.windows.eq(batch.windows[-1]).sum()))
    assert least == 1, "no room is left over where it is needed"


def test_the_tower_of_a_whole_model():
    config = transformers.Qwen2_5_VLConfig(
        vision_config=TOWERS["qwen2_5_vl"].vision,
        text_config=TEXT
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 1]}},
    )
    whole = widened(transformers.Qwen2_5_VLForConditionalGeneration(config))
    model, params = vision_encoder(whole)
    assert set(params) == {
        name
        for name, _ in (*whole.model.visual.named_parameters(), *whole.model.visual.named_buffers())
    }
    item = items_of(whole.model.visual)[2]
    got = model.paths["default"].forward(params, model.collate("default", [item]))
    want = whole.model.get_video_features(item.patches, torch.tensor([item.grid])).pooler_output
    torch.testing.assert_close(got, torch.cat(list(want)), **CLOSE)


# --- towers over tiles ----------------------------------------------------------------------------


def internvl() -> tuple[Any, Callable[[Tensor], Tensor]]:
    made = widened(
        transformers.InternVLModel(
            transformers.InternVLConfig(
                vision_config=TILES | {"image_size": [16, 16], "patch_size": [4, 4]},
                text_config=TEXT | {"model_type": "qwen2"},
            )
        )
    )
    return made, lambda tiles: made.get_image_features(tiles, return_dict=True).pooler_output


def llama4() -> tuple[Any, Callable[[Tensor], Tensor]]:
    made = widened(
        transformers.Llama4ForConditionalGeneration(
            transformers.Llama4Config(
                vision_config=TILES | {
                    "image_size": 16, "patch_size": 4, "vision_output_dim": 40,
                    "projector_input_dim": 40, "projector_output_dim": 40,
                },
                text_config=TEXT | {
                    "intermediate_size_mlp": 8, "head_dim": 8, "num_local_experts": 1
                },
            )
        )
    )  # fmt: skip
    return made, lambda tiles: made.multi_modal_projector(made.vision_model(tiles)[0])


def over_tiles(model: Any, params: Any) -> fg.Encoder:
    """Under guards; nothing is deferred, or one picture would hardly ever share a run."""
    return fg.graphify_encoder(
        model, params, budgets=(4, 16, 32), max_items=4, defer=False, recorder="tape", guards=True
    )


def tiles() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(k, 3, 16, 16, generator=generator) for k in (1, 4, 2, 9, 3)]


@pytest.mark.sampled(0)  # half a minute each
@pytest.mark.parametrize("make", [internvl, llama4])
def test_two_hundred_calls_over_tiles(make: Any):
    owner, theirs = make()
    items = tiles()
    encode = over_tiles(*vision_encoder(owner, max_tokens=32))
    check_calls(encode, items, [theirs(item).flatten(0, 1) for item in items])


@pytest.mark.parametrize("make", [internvl, llama4])
def test_towers_over_tiles(make: Any):
    owner, theirs = make()
    model, params = vision_encoder(owner, max_tokens=32)
    assert model.paths["default"].unit == 4 and not any("language" in name for name in params)
    items = tiles()
    encode = over_tiles(model, params)
    wants = [theirs(item).flatten(0, 1) for item in items]
    for order in ([], [0], [1, 2], [4, 3, 0, 2, 1], [0, 2, 0, 0, 0]):
        check_call(encode, items, wants, order)
    check_leaves(encode)
    some = [items[0], items[2], items[0]]
    check_neighbours(encode, some, [torch.full_like(item, torch.nan) for item in some])
    with pytest.raises(SpecError, match=r"tiles of shape \(1, 3, 8, 16\)\. Pass \(1, 3, 16, 16\)"):
        encode([items[0][:, :, :8]])


# --- what is refused ------------------------------------------------------------------------------


def test_what_is_refused():
    tower = tower_of("qwen2_vl")
    model, _ = vision_encoder(tower)
    item = items_of(tower)[0]
    with pytest.raises(SpecError, match=r"grid \(1, 4, 1\).*rows and columns are even"):
        model.measured(item._replace(grid=(1, 4, 1)))
    with pytest.raises(ModelError, match=r"is in training mode.*Call model\.eval\(\)"):
        vision_encoder(tower.train())
    tower.eval().config.spatial_merge_size = 3
    with pytest.raises(ModelError, match="a token of 3 x 3 patches; those of 2 x 2"):
        vision_encoder(tower)
    with pytest.raises(ModelError, match=r"Linear has no vision tower.*glm4v_vision.*Llama 4"):
        vision_encoder(torch.nn.Linear(2, 2).eval())
    with pytest.raises(ModelError, match="Linear attends without offsets"):
        attend_packed(torch.nn.Linear(2, 2), *[torch.zeros(1, 2, 4, 8)] * 3, None)
    assert NAME.count("flash") == 1, "or towers loop over their sequences"
