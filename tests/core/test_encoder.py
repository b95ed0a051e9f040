"""`fngraph.core.encoder`: budgets, the one that fits, and what is captured."""

import pytest

from fngraph.core import EncoderPlan, Path, fit, plan_encoder, token_budgets
from fngraph.errors import SizesError


@pytest.mark.parametrize(
    ("low", "high", "budgets"),
    [
        (64, 8192, (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
        (64, 800, (64, 128, 256, 512, 800)),
        (272, 256, (256,)),
        (5, 5, (5,)),
        (1, 2, (1, 2)),
        (1, 1, (1,)),
    ],
)
def test_budgets(low, high, budgets):
    assert token_budgets(low, high) == budgets


@pytest.mark.parametrize(("low", "high"), [(0, 8), (8, 0), (-1, 8)])
def test_budgets_are_positive(low, high):
    with pytest.raises(SizesError) as info:
        token_budgets(low, high)
    assert str(info.value) == (
        f"token_budgets({low}, {high}): budgets are positive. Pass 1 or more."
    )


def test_fit():
    assert [fit(tokens, (0, 4, 9)) for tokens in (0, 1, 4, 5, 9, 10)] == [0, 4, 4, 9, 9, None]
    assert fit(1, ()) is None


DEFAULT = {"default": (64, 128, 256)}


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, EncoderPlan((64, 128, 256), DEFAULT, 4, 4)),
        ({"max_items": 100}, EncoderPlan((100, 200, 256), {"default": (100, 200, 256)}, 100, 100)),
        ({"max_items": 256}, EncoderPlan((256,), {"default": (256,)}, 256, 256)),
        ({"max_items": 1}, EncoderPlan((64, 128, 256), DEFAULT, 1, 1)),
        ({"budgets": [3, 9]}, EncoderPlan((3, 9), {"default": (3, 9)}, 3, 3)),
        ({"budgets": (64, 128, 256)}, EncoderPlan((64, 128, 256), DEFAULT, 4, 4)),
        ({"budgets": (7,), "max_items": 7}, EncoderPlan((7,), {"default": (7,)}, 7, 7)),
        ({"max_items": 2, "frames_per_item": 8}, EncoderPlan((64, 128, 256), DEFAULT, 2, 16)),
        ({"max_items": 2, "frames_per_item": 0}, EncoderPlan((64, 128, 256), DEFAULT, 2, 0)),
        ({"max_items": 2, "max_frames": 5}, EncoderPlan((64, 128, 256), DEFAULT, 2, 5)),
    ],
)
def test_plan(options, plan):
    assert plan_encoder(64, 256, **options) == plan
    assert plan.num_graphs == len(plan.budgets)


def test_paths_have_budgets_of_their_own():
    paths = {"global": Path(272), "local": Path(100, allow_zero=True)}
    plan = plan_encoder(272, 13824, paths=paths)
    assert plan.path_budgets == {
        "global": (272, 544, 1088, 2176, 4352, 8704, 13824),
        "local": (0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 13824),
    }
    assert (plan.max_items, plan.num_graphs) == (50, 16)
    assert plan.as_text() == (
        """at most 50 items, 50 frames a graph

| path   | graphs | token budgets                                          |
|--------|-------:|--------------------------------------------------------|
| global |      7 | 272, 544, 1088, 2176, 4352, 8704, 13824                |
| local  |      9 | 0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 13824 |""".replace(
            "budgets                                          |",
            "budgets                                         |",
        )
        .replace("-----------------|\n| global", "----------------|\n| global")
        .replace("13824                |", "13824               |")
    )


def test_items_of_one_token():
    plan = plan_encoder(1, 4)
    assert plan.budgets == (1, 2, 4) and plan.max_items == 1 and plan.num_graphs == 3
    assert plan_encoder(9, 9, budgets=(1, 4), max_items=1).budgets == (1, 4)
    assert plan.as_text().splitlines()[-1] == "| default |      3 | 1, 2, 4       |"


def test_the_range_is_needed_only_to_derive_something():
    assert plan_encoder(272, 256, budgets=[300], max_items=8).max_items == 8
    for options in ({}, {"budgets": [300]}, {"max_items": 1}):
        with pytest.raises(SizesError) as info:
            plan_encoder(272, 256, **options)
        assert str(info.value) == (
            "Items of 272 to 256 tokens leave no budget. Pass low <= high, both positive, or "
            "both budgets= and max_items=."
        )
    with pytest.raises(SizesError, match="Items of 0 to 256 tokens"):
        plan_encoder(0, 256)
    assert plan_encoder(256, 256).budgets == (256,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"budgets": (4, 9), "max_items": 5},
            (
                "max_items=5 is more than the smallest budget, 4 tokens, and an item brings at "
                "least one. Pass max_items=4, or drop that budget."
            ),
        ),
        ({"max_items": 257}, "max_items=257 is more than the smallest budget, 256 tokens"),
        ({"max_frames": -1}, "-1 frames a graph. Pass max_frames=0 where there is no video."),
        ({"max_items": 0}, "max_items=0 holds no item. Pass max_items=1 or more."),
        ({"budgets": ()}, "budgets=() must ascend from 1 or more. Pass budgets=(64,)."),
        ({"budgets": (4, 2)}, "budgets=(4, 2) must ascend from 1 or more. Pass budgets=(2, 4)."),
        ({"budgets": (2, 2)}, "budgets=(2, 2) must ascend from 1 or more. Pass budgets=(2,)."),
        ({"budgets": (2, 1)}, "budgets=(2, 1) must ascend from 1 or more. Pass budgets=(1, 2)."),
        ({"budgets": (0, 2)}, "budgets=(0, 2) must ascend from 1 or more. Pass budgets=(2,)."),
        ({"budgets": (0,)}, "budgets=(0,) must ascend from 1 or more. Pass budgets=(64,)."),
    ],
)
def test_bad_plans(options, message):
    with pytest.raises(SizesError) as info:
        plan_encoder(64, 256, **options)
    assert message in str(info.value)
