"""Every vision encoder under `fg.graphify_encoder`: items come out as alone, however packed."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from typing import Any, NamedTuple

import pytest
import test_deepseek_ocr
import test_kimi_vl
import test_qwen3_vl
import test_step3_vl
import torch
from packs import close
from torch import Tensor
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


class Guarded(NamedTuple):
    """A case, its outputs alone, and its graphs, whose padding is poisoned."""

    case: Case
    wants: list[Any]
    encode: fg.Encoder


@pytest.fixture(scope="module")
def guarded() -> Any:
    """`Guarded` by name, made once. Nothing is deferred, or no two pages would share a run."""

    @functools.cache
    def of(name: str) -> Guarded:
        case = CASES[name]()
        encode = fg.graphify_encoder(
            case.model, case.params, budgets=case.budgets, max_items=4, eager_tokens=256,
            defer=False, recorder="tape", guards=True,
        )  # fmt: skip
        return Guarded(case, [bare(case, item) for item in case.items], encode)

    return of


@pytest.mark.sampled("qwen")
@pytest.mark.parametrize("name", CASES)
def test_each_item_is_as_alone(name: str, guarded: Any):
    case, wants, encode = guarded(name)
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


@pytest.mark.sampled("qwen", "step3")
@pytest.mark.parametrize("name", CASES)
def test_padding_of_each_leaf_is_poisoned_but_that_of_offsets(name: str, guarded: Any):
    """It says what it is; of no other pad does a trace count on anything."""
    _, _, encode = guarded(name)
    for step in encode.steps.values():
        leaves = step.main.executable.plan.buffers
        said = {leaf.path: leaf.buffer.pad for leaf in leaves if leaf.buffer.pad_given}
        assert set(said.values()) <= {"last"} and len(said) < len(leaves)
        free = [leaf.path not in said for leaf in leaves]
        assert list(step.main.poison.poisoned) == free


@pytest.mark.sampled("nan-qwen", "nan-step3")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_neighbours_change_no_bit_of_an_item(name: str, poison: float, guarded: Any):
    """The same runs, with other values in all items but one."""
    case, _, encode = guarded(name)
    items = [item for item in case.items if not eager(encode, item)][-4:]
    wants = encode(items)
    others = [
        item._replace(**{
            name: torch.full_like(x, poison)
            for name, x in item._asdict().items() if isinstance(x, Tensor)
        })
        for item in items
    ]  # fmt: skip
    before = encode.stats
    for at, item in enumerate(items):
        gots = encode([*others[:at], item, *others[at + 1 :]])
        close(gots[at], wants[at], atol=0, rtol=0)
        for got in gots[:at] + gots[at + 1 :]:
            assert not any(x.isfinite().all() for x in tree_leaves(got))
    assert not (encode.stats - before).misses()
    shared = [run for run in encode.pack(items).runs if len(run.items) > 1]
    assert shared, "or nobody has a neighbour"


def eager(encode: fg.Encoder, item: Any) -> bool:
    """Whether an item is beyond a budget."""
    return any(run.budget is None for run in encode.pack([item]).runs)


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
def test_two_hundred_calls(name: str, guarded: Any):
    case, wants, encode = guarded(name)
    draw, everyone = random.Random(7), range(len(case.items))
    met: collections.Counter[str] = collections.Counter()
    for _ in range(200):
        call = draw.choices(everyone, k=draw.randint(0, 9))
        items = [case.items[i] for i in call]
        for i, got in zip(call, encode(items), strict=True):
            close(got, wants[i])
        met += collections.Counter(situations(case, encode, items))
    wanted = {"none", "one", "more than a graph holds", "beyond every budget", "together"}
    more = {"qwen": {"videos"}, "kimi": set()}.get(name, {"without crops"})
    assert met.keys() == wanted | more and min(met.values()) >= 8, met


def situations(case: Case, encode: fg.Encoder, items: list[Any]) -> list[str]:
    """What is met in a call."""
    measured = [case.model.measured(item) for item in items]
    runs = encode.pack(items).runs
    found = {
        "none": not items,
        "one": len(items) == 1,
        "more than a graph holds": len(items) > encode.plan.max_items,
        "beyond every budget": any(run.budget is None for run in runs),
        "together": any(len(run.items) > 1 for run in runs),
        "videos": any(m.modality == "video" for m in measured),
        "without crops": any(not n for m in measured for n in m.tokens.values()),
    }
    return [what for what, here in found.items() if here]


def test_an_encoder_whose_tokens_depend_on_the_data_has_no_graphs():
    case = CASES["qwen"]()
    model = dataclasses.replace(case.model, eager_because="tokens are pruned by what they show")
    encode = fg.graphify_encoder(model, case.params)
    for item, got in zip(case.items, encode(case.items), strict=True):
        close(got, bare(case, item), atol=0, rtol=0)
