"""Encoders in core: budgets, what is captured, runs of items, and items over ranks."""

import pytest
from hypothesis import given, settings, strategies as st

from fngraph.core import (
    EncoderPlan,
    Item,
    Packed,
    Path,
    Run,
    balance,
    fit,
    pack,
    plan_encoder,
    token_budgets,
)
from fngraph.errors import FnGraphError, SizesError, SpecError


@pytest.mark.parametrize(
    ("low", "high", "budgets"),
    [
        (64, 8192, (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
        (64, 800, (64, 128, 256, 512, 800)),
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


def test_what_means_nothing_is_refused():
    for call, says in (
        (lambda: token_budgets(64, 4), r"\(64, 4\): none is within. Pass low <= high."),
        (lambda: fit(4, (32, 8, 4)), r"budgets=\(32, 8, 4\) must ascend. Pass .*\(4, 8, 32\)"),
        (lambda: fit(-4, (8,)), r"fit\(-4, ...\): tokens are not negative"),
        (lambda: balance([4, -3], 2), r"sizes\[1\]=-3: tokens are not negative"),
        (lambda: plan_encoder(4, 128, paths={}), "paths={} has nothing to run"),
        (lambda: Path(-16), r"Path\(min_budget=-16\) holds no token"),
        (lambda: Path(16, unit=0), r"Path\(unit=0\) holds no token"),
        (lambda: Path("16"), "min_budget='16' is a str. Pass an int"),
        (lambda: Path(16, budgets=(8, 4)), r"budgets=\(8, 4\) must ascend"),
        (lambda: plan_encoder(4, 128, paths={"a": Path(1000)}),
         "min_budget=1000 is beyond the largest budget, 128 tokens. Pass min_budget=128 or less"),
        (lambda: pack([Item((2.5,))], plan_encoder(4, 128)), r"Item\(tokens=\(2.5,\).* whole"),
        (lambda: pack([Item(4)], plan_encoder(4, 128)), r"Item\(tokens=4.* a tuple each"),
        (lambda: pack([4, 3.5], plan_encoder(4, 128)), "an item=3.5 is a float. Pass its tok"),
        (lambda: pack([True], plan_encoder(4, 128)), "an item=True is a bool. Pass its tok"),
    ):  # fmt: skip
        with pytest.raises(FnGraphError, match=says):
            call()


def test_a_plan_prints_as_what_made_it_and_as_its_table():
    plan = plan_encoder(4, 16, max_items=2)
    assert "max_sequences={}" in repr(plan) and "mappingproxy" not in repr(plan)
    assert str(plan) == plan.as_text()


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
    assert (
        plan.as_text()
        == """at most 50 items, 50 frames a graph

| path   | graphs | token budgets                                         |
|--------|-------:|-------------------------------------------------------|
| global |      7 | 272, 544, 1088, 2176, 4352, 8704, 13824               |
| local  |      9 | 0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 13824 |"""
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


# --- packing --------------------------------------------------------------------------------------

ONE = plan_encoder(64, 512, max_items=4)  # budgets 64, 128, 256, 512


def runs(packed):
    return [run[1:] for run in packed.runs]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], []),
        ([64], [((0,), 64)]),
        ([60, 250], [((0,), 64), ((1,), 256)]),  # deferred: 64 + 256 is less than 512
        ([60, 300], [((0, 1), 512)]),  # one 512 either way
        ([250, 60], [((1,), 64), ((0,), 256)]),
        ([30, 30], [((0, 1), 64)]),
        ([64, 64], [((0, 1), 128)]),  # two of 64 cost as much as one of 128
        ([1, 1, 1, 1, 1], [((0, 1, 2, 3), 64), ((4,), 64)]),  # at most 4 items
        ([500, 13], [((1,), 64), ((0,), 512)]),  # 513 is too many
        ([500, 12], [((1, 0), 512)]),
        ([600, 513], [((1,), None), ((0,), None)]),  # no budget holds them
        ([5, 3, 5, 3], [((1, 3, 0, 2), 64)]),  # ascending, and stable
        ([100, 129], [((0, 1), 256)]),
        ([100, 157], [((0,), 128), ((1,), 256)]),
    ],
)
def test_one_path(items, expected):
    packed = pack(items, ONE)
    assert runs(packed) == expected
    hits = sum(len(items) for items, budget in expected if budget)
    assert (packed.hits, packed.misses) == (hits, len(items) - hits)
    assert all(run.path == "default" for run in packed.runs)


def test_nothing_is_deferred_where_the_plan_says_so():
    assert runs(pack([60, 250], ONE._replace(defer=False))) == [((0, 1), 512)]
    assert runs(pack([500, 13], ONE._replace(defer=False))) == [((1,), 64), ((0,), 512)]


TWO = plan_encoder(
    64, 512, max_items=8, paths={"big": Path(64), "small": Path(32, allow_zero=True)}
)


@pytest.mark.parametrize(
    ("items", "expected", "hits", "misses"),
    [
        ([(64, 0)], [Run("big", (0,), 64)], 1, 0),  # nothing to run on the other path
        ([(64, 20)], [Run("big", (0,), 64), Run("small", (0,), 32)], 2, 0),
        ([(600, 20)], [Run("big", (0,), None), Run("small", (0,), 32)], 1, 0),
        ([(600, 600)], [Run("big", (0,), None), Run("small", (0,), None)], 0, 1),
        (
            [(64, 0), (64, 900)],
            [Run("big", (0,), 64), Run("big", (1,), 64), Run("small", (1,), None)],
            2,
            0,
        ),
        (
            [(10, 0), (10, 100), (10, 200)],  # 100 and 200 would need 512 together
            [
                Run("big", (0, 1), 64),
                Run("small", (0, 1), 128),
                Run("big", (2,), 64),
                Run("small", (2,), 256),
            ],
            5,  # the first brings nothing to the small path, where it is no hit
            0,
        ),
        ([(0, 0)], [], 0, 0),
    ],
)
def test_two_paths(items, expected, hits, misses):
    by_name = [{"big": big, "small": small} for big, small in items]
    assert pack(by_name, TWO) == Packed(tuple(expected), hits, misses)
    assert pack([Item(tokens) for tokens in items], TWO) == Packed(tuple(expected), hits, misses)


def test_frames_close_a_batch():
    plan = plan_encoder(64, 512, max_items=4, max_frames=10)
    items = [Item((10,), 6), Item((10,), 4), Item((10,), 1), Item((10,))]
    assert runs(pack(items, plan)) == [((0, 1), 64), ((2, 3), 64)]
    images = [Item((10,), 10), Item((10,)), Item((10,)), 10]
    assert runs(pack(images, plan)) == [((0, 1, 2, 3), 64)]  # images bring no frames
    too_long = pack([Item((10,), 11), Item((10,))], plan)
    assert runs(too_long) == [((0,), None), ((1,), 64)] and too_long.misses == 1
    no_video = plan_encoder(64, 512, max_items=4, frames_per_item=0)
    assert runs(pack([Item((9,), 1), 10, 10], no_video)) == [((0,), None), ((1, 2), 64)]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            [{"big": 1}],
            (
                "An item with tokens for ['big'] does not suit a plan with the paths "
                "['big', 'small']. Pass {'big': tokens, 'small': tokens}."
            ),
        ),
        ([5], "An item with tokens for ['default'] does not suit"),
        ([Item((1,))], "Item(tokens=(1,), frames=0, sequences=()) needs 2 token counts, none neg"),
        ([Item((1, -1))], "tokens=(1, -1), frames=0, sequences=()) needs 2 token counts, none neg"),
        ([Item((1, 1), -1)], "frames=-1, sequences=()) needs 2 token counts"),
        ([Item((1, 1), 0, (1,))], "sequences=(1,)) needs 2 counts of sequences, each with a token"),
        ([Item((1, 1), 0, (2, 1))], "sequences=(2, 1)) needs 2 counts of sequences"),
        ([Item((1, 1), 0, (0, 1))], "sequences=(0, 1)) needs 2 counts of sequences"),
        ([Item((1, 0), 0, (1, 1))], "or none. Pass sequences=() where an item is one sequence."),
    ],
)
def test_bad_items(items, message):
    with pytest.raises(SpecError) as info:
        pack(items, TWO)
    assert message in str(info.value)


def test_sequences_close_a_batch():
    plan = plan_encoder(64, 512, max_items=4, max_sequences={"default": 10})
    items = [Item((10,), 0, (6,)), Item((10,), 0, (4,)), Item((10,), 0, (1,)), 10]
    assert runs(pack(items, plan)) == [((0, 1), 64), ((2, 3), 64)]
    too_wide = pack([Item((11,), 0, (11,)), 5], plan)
    assert runs(too_wide) == [((1,), 64), ((0,), None)] and too_wide.misses == 1
    one_each = plan_encoder(64, 512, max_items=4, max_sequences={"default": 4})
    assert runs(pack([9, 9, 9, 9], one_each)) == [((0, 1, 2, 3), 64)]
    two = plan_encoder(
        64, 512, max_items=8, paths={"big": Path(64), "small": Path(32)}, max_sequences={"small": 2}
    )
    packed = pack([Item((10, 9), 0, (9, 3))], two)
    assert runs(packed) == [((0,), 64), ((0,), None)], "the other path has its graph"
    assert two.as_text().startswith("at most 8 items, 8 frames a graph, 2 sequences of small\n\n")
    one = plan_encoder(64, 512, paths={"small": Path(64)}, max_sequences={"small": 1})
    assert runs(pack([{"small": 9}, {"small": 8}], one)) == [((1,), 64), ((0,), 64)]
    for bad in ({"small": 0}, {"smal": 1}):
        with pytest.raises(SizesError, match=r"pass 1 or more, of a path that there is"):
            plan_encoder(64, 512, paths={"small": Path(64)}, max_sequences=bad)


def test_numbers_of_sequences_are_graphs_of_their_own():
    plan = plan_encoder(4, 16, max_items=4, max_sequences={"default": 12})
    assert plan.num_graphs == 3
    more = plan._replace(sequences={"default": (4, 12)})
    assert more.num_graphs == 5  # budgets 4, 8, 16; the first holds 4 sequences at most
    assert "4 or 12 sequences of default" in more.as_text()
    assert "| default |      5 | 4, 8, 16      |" in more.as_text()
    assert pack([Item((1,), 1, (1,))] * 4, more) == pack([Item((1,), 1, (1,))] * 4, plan)


def test_paths_with_budgets_of_whole_sequences_and_of_their_own():
    paths = {"global": Path(272, unit=272), "local": Path(100, True, 100, (150, 250, 1000))}
    assert Path(64) == Path(64, False, None, None) and Item((1,)) == ((1,), 0, ())
    plan = plan_encoder(272, 1300, paths=paths)
    assert plan.path_budgets == {"global": (272, 544, 1088), "local": (0, 100, 200, 1000)}
    with pytest.raises(SizesError, match="No budget up to 1300 holds a sequence of unit=2000 tok"):
        plan_encoder(64, 1300, paths={"one": Path(64, unit=2000)})


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.integers(0, 700)] * 2, st.integers(0, 3), st.integers(1, 9)), max_size=30
    ),
    st.integers(1, 9),
    st.integers(0, 20),
)
def test_packing_keeps_every_limit(items, max_items, frames):
    paths = {"big": Path(64), "small": Path(32, allow_zero=True)}
    wide = {"small": 7}
    plan = plan_encoder(
        64, 512, max_items=max_items, paths=paths, max_frames=frames, max_sequences=wide
    )
    known = [
        Item((big, small), count, (min(big, 1), min(small, many)))
        for big, small, count, many in items
    ]
    packed = pack(known, plan)
    for i, path in enumerate(paths):
        mine = [run for run in packed.runs if run.path == path]
        served = [at for run in mine for at in run.items]
        assert len(served) == len(set(served)), "no item runs twice"
        some = [at for at in range(len(known)) if known[at].tokens[i] and at not in served]
        assert not some, "every item with tokens runs"
        for run in mine:
            total = sum(known[at].tokens[i] for at in run.items)
            assert len(run.items) <= max_items
            fits = sum(known[at].frames for at in run.items) <= frames
            fits &= sum(known[at].sequences[i] for at in run.items) <= wide.get(path, 999)
            assert run.budget == (fit(total, plan.path_budgets[path]) if fits else None)
            if run.budget is None:
                assert len(run.items) == 1, "only an item that fits nowhere runs eagerly"


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ([1000, 100, 200, 50], 2, ((0, 2, 1, 3), (1, 3), (1000, 350))),
        ([], 2, ((), (0, 0), (0, 0))),
        ([5, 5, 5], 2, ((0, 2, 1), (2, 1), (10, 5))),  # ties: first item, lowest rank
        ([1, 2, 3], 1, ((2, 1, 0), (3,), (6,))),
        ([1], 3, ((0,), (1, 0, 0), (1, 0, 0))),
    ],
)
def test_balance(sizes, ranks, expected):
    assert balance(sizes, ranks) == expected


def test_somebody_works():
    with pytest.raises(SpecError) as info:
        balance([1], 0)
    assert str(info.value) == "ranks=0: at least one rank works. Pass ranks=1 or more."


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 5))
def test_balanced_loads_differ_by_at_most_one_item(sizes, ranks):
    order, counts, loads = balance(sizes, ranks)
    assert sorted(order) == list(range(len(sizes))) and sum(counts) == len(sizes)
    at, expected = 0, []
    for count in counts:
        expected.append(sum(sizes[item] for item in order[at : at + count]))
        at += count
    assert list(loads) == expected
    assert max(loads) - min(loads) <= max(sizes, default=0)
