"""Every vision encoder under `fg.graphify_encoder`: items come out as alone, however packed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, NamedTuple

import pytest
import test_deepseek_ocr
import test_kimi_vl
import test_qwen3_vl
import test_step3_vl
import torch
from packs import close
from torch.utils._pytree import tree_leaves

import fngraph as fg
from fngraph.models import naming
from fngraph.models.vision import deepseek_ocr, kimi_vl, qwen3_vl, step3_vl


class Case(NamedTuple):
    """A tiny encoder, its items, and budgets that some items are beyond."""

    model: fg.EncoderModel
    params: Any
    items: list[Any]
    budgets: Any
    beyond: int


def wide(family: Any, config: Any) -> Any:
    """Weights that are wide enough for a wrong one to show."""
    made = family.init_params(config, seed=1)
    return naming.replaced(made, lambda name, x: x * 8 if x.ndim > 1 else x + 0.2)


def qwen() -> Case:
    config = test_qwen3_vl.CONFIG
    items = [*test_qwen3_vl.PICTURES, test_qwen3_vl.picture((1, 14, 14))]
    model = qwen3_vl.encoder(config, max_tokens=40)
    return Case(model, wide(qwen3_vl, config), items, (4, 16, 40), 1)


def kimi() -> Case:
    config, items = test_kimi_vl.CONFIG, test_kimi_vl.PICTURES
    return Case(kimi_vl.encoder(config), wide(kimi_vl, config), items, (4, 12), 1)


def ocr() -> Case:
    config, items = test_deepseek_ocr.CONFIG, test_deepseek_ocr.PAGES
    params = wide(deepseek_ocr, config)
    budgets = {"global": (20, 80), "local": (18, 36)}
    return Case(deepseek_ocr.encoder(config, params), params, items, budgets, 2)


def step3() -> Case:
    config, items = test_step3_vl.CONFIG, test_step3_vl.PAGES
    budgets = {"global": (9, 36), "local": (4, 16)}
    return Case(step3_vl.encoder(config), wide(step3_vl, config), items, budgets, 1)


CASES = {made.__name__: made for made in (qwen, kimi, ocr, step3)}


def bare(case: Case, item: Any) -> Any:
    """The item's output by the model's own functions, eagerly."""
    model, rows = case.model, {}
    for path, tokens in model.measured(item).tokens.items():
        if tokens:
            rows[path] = model.paths[path].forward(case.params, model.collate(path, [item]))
    return model.postprocess(rows, item)


@pytest.mark.sampled("qwen")
@pytest.mark.parametrize("name", CASES)
def test_each_item_is_as_alone(name: str):
    case = CASES[name]()
    wants = [bare(case, item) for item in case.items]
    encode = fg.graphify_encoder(
        case.model, case.params, budgets=case.budgets, max_items=4, eager_tokens=256,
        recorder="tape", guards=True,
    )  # fmt: skip
    assert encode([]) == []
    draw, everyone = random.Random(3), range(len(case.items))
    calls = [[i] for i in everyone] + [[*everyone, *everyone]]
    calls += [draw.choices(everyone, k=draw.randint(2, 6)) for _ in range(4)]
    for call in calls:
        for i, got in zip(call, encode([case.items[i] for i in call]), strict=True):
            close(got, wants[i])
    packed = encode.pack(case.items)
    eager = [run for run in packed.runs if run.budget is None]
    assert len(eager) == case.beyond and len(packed.runs) > len(eager)
    for step in encode.steps.values():
        assert step.stats.share("FULL") >= 0.4


@pytest.mark.parametrize("name", CASES)
def test_in_bfloat16(name: str):
    """Rows are of the weights' dtype, and within its rounding of those in float32."""
    case = CASES[name]()
    low = naming.replaced(case.params, lambda name, x: x.bfloat16())
    for path in case.model.paths:
        items = [x for x in case.items if case.model.measured(x).tokens[path]][:3]
        batch = case.model.collate(path, items)
        wants, gots = (
            tree_leaves(case.model.paths[path].forward(params, batch))
            for params in (case.params, low)
        )
        for got, want in zip(gots, wants, strict=True):
            assert got.dtype is torch.bfloat16
            assert (got.float() - want).norm() < 0.1 * want.norm()


@pytest.mark.sampled(0)  # a minute each
@pytest.mark.parametrize("name", CASES)
def test_two_hundred_calls(name: str):
    case = CASES[name]()
    wants = [bare(case, item) for item in case.items]
    encode = fg.graphify_encoder(
        case.model, case.params, budgets=case.budgets, eager_tokens=256, recorder="tape"
    )
    draw, everyone = random.Random(7), range(len(case.items))
    for _ in range(200):
        call = draw.choices(everyone, k=draw.randint(0, 9))
        for i, got in zip(call, encode([case.items[i] for i in call]), strict=True):
            close(got, wants[i])


def test_an_encoder_whose_tokens_depend_on_the_data_has_no_graphs():
    case = CASES["qwen"]()
    model = dataclasses.replace(case.model, eager_because="tokens are pruned by what they show")
    encode = fg.graphify_encoder(model, case.params)
    for item, got in zip(case.items, encode(case.items), strict=True):
        close(got, bare(case, item), atol=0, rtol=0)
