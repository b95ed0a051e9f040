"""`graphify_encoder` on toys: each item's output is what it gives alone, however it was packed."""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
from typing import Any

import pictures as toy
import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.core import trees
from fngraph.encoder.model import rows_of_the_only_path
from fngraph.encoder.run import EAGER_TOKENS
from fngraph.errors import (
    BranchError,
    DifferenceError,
    ModesError,
    SizesError,
    SleepError,
    SpecError,
    TreeError,
)
from fngraph.step import capture

NAN = float("nan")


@pytest.fixture
def make(recorder_name, device):
    return lambda kind, **options: toy.make(kind, device, recorder_name, **options)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", toy.KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"modes": "PIECEWISE"}, {"guards": True}, {"max_items": 2}], ids=str
)
def test_each_item_is_as_alone(make, kind: str, options: dict[str, Any]):
    """With guards, padding of every leaf that says nothing of it holds NaN, or a true row."""
    encoder, draw = make(kind, **options), random.Random(kind)
    for _ in range(12):
        toy.check(encoder, toy.random_items(kind, draw))
    stats = encoder.stats
    assert stats.calls == 12 and stats.hits() > 20 and 0 < stats.misses() < stats.hits()
    ran = {mode for step in encoder.steps.values() for _, _, mode in step.stats.counts}
    mode = options.get("modes", "FULL") if kind == "pictures" else "FULL"  # of a unit each
    assert ran == {fg.Mode.parse(mode), fg.Mode.NONE}
    for path, step in encoder.steps.items():  # what the statistics say is what the steps did
        assert stats.padding(path) == step.stats.padding
        assert stats.tokens(path) == step.stats.tokens
        if options.get("guards"):
            free = [b for b in step.main.executable.plan.buffers if not b.buffer.pad_given]
            assert free and sum(step.main.poison.poisoned) == len(free), "none is relied on"


def test_one_empty_and_too_large_items_by_themselves(make):
    encoder = make("pictures").capture()
    assert len(encoder.steps["default"]) == 4
    assert encoder([]) == []
    for one in (toy.picture(1), toy.picture(64), toy.picture(65), toy.picture(1, 1, 1, 1, 1)):
        toy.check(encoder, [one])
    toy.check(encoder, [toy.picture(2, seed=i) for i in range(23)])  # of which a graph holds 4
    assert encoder.stats.reasons == {"more tokens than the largest budget of default, 64": 1}
    assert encoder.steps["default"].stats.captures.keys() == {
        (fg.Mode.FULL, key, False) for _, key in encoder.steps["default"].table
    }


@pytest.mark.parametrize(
    ("crops", "runs"),
    [
        ([0], [("global", 272)]),  # nothing to run on the other path
        ([13], [("global", 272), ("local", None)]),  # one path eagerly, the other by its graph
        ([1, 1], [("global", 544), ("local", 200)]),
        ([0, 2], [("global", 544), ("local", 200)]),  # padded by nobody's tokens
    ],
)
def test_each_path_has_the_least_graph_that_fits(make, crops: list[int], runs: Any):
    encoder = make("pages")
    items = [toy.page(n, seed=n) for n in crops]
    assert [(run.path, run.budget) for run in encoder.pack(items).runs] == runs
    toy.check(encoder, items)
    ran = [(served.path, served.budget) for served in encoder.stats.counts]
    assert sorted(ran, key=str) == sorted(runs, key=str)
    assert encoder.stats.hits("local") == sum(n > 0 for n in crops if n < 13)
    assert len({id(step.recorder) for step in encoder.steps.values()}) == 1, "one pool"
    keys = {key for step in encoder.steps.values() for _, key in step.table}
    assert {(key.query_len, key.num_tokens == key.num_reqs * key.query_len) for key in keys} == {
        (272, True), (100, True)
    }  # fmt: skip


def test_images_and_videos_share_runs_only_where_they_may(make):
    items = [toy.picture(5), toy.picture(3, 4), toy.picture(6), toy.picture(2, 2, 1)]
    together, apart = make("pictures"), make("pictures", model={"mixes": False})
    assert [run.items for run in together.pack(items).runs] == [(0, 3, 2, 1)]
    assert [run.items for run in apart.pack(items).runs] == [(0, 2), (3, 1)]
    for encoder in (together, apart):
        toy.check(encoder, items)
    images_alone = make("pictures", model={"modalities": ("image",)})
    toy.check(images_alone, items)
    assert images_alone.stats.reasons == {"graphs are not for its modality": 2}
    assert images_alone.stats.hits() == 2


def test_the_longest_sequences_of_a_run_are_first(make):
    """Tiles of attention begin in the batch's order: a long one that begins last runs alone."""
    seen: list[list[int]] = []

    def collate(path: str, items: Any) -> Any:
        seen.append([max(map(len, item.frames)) for item in items])
        return toy.collate_pictures(path, items)

    encoder = make("pictures", model={"collate": collate}).capture()
    seen.clear()
    items = [toy.picture(5), toy.picture(4, 4, 4), toy.picture(11), toy.picture(5, seed=1)]
    assert [run.items for run in encoder.pack(items).runs] == [(0, 3, 2, 1)]
    toy.check(encoder, items)
    assert seen[0] == [11, 5, 5, 4], "not those of the most tokens in sum"


def test_an_item_is_deferred_where_two_graphs_are_smaller(make):
    items = [toy.picture(7), toy.picture(31)]
    for defer, budgets in ((True, [8, 32]), (False, [64])):
        encoder = make("pictures", defer=defer)
        assert [run.budget for run in encoder.pack(items).runs] == budgets
        toy.check(encoder, items)


def test_frames_and_sequences_bound_a_run(make):
    encoder = make("pictures", max_frames=3, max_items=2)
    assert encoder.plan.max_sequences == {"default": 5}
    assert {key.num_reqs for _, key in encoder.steps["default"].table} == {5}
    items = [toy.picture(2, 2), toy.picture(2, 3), toy.picture(1, 1, 1, 1), toy.picture(9)]
    toy.check(encoder, items)
    assert encoder.stats.reasons == {"more than 3 frames": 1}
    crowded = toy.Picture(tuple(toy.drawn(1, 4, toy.C, seed=i) for i in range(6)))  # an image
    toy.check(encoder, [crowded])
    assert encoder.stats.reasons["more than 5 sequences of default"] == 1


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE"])
def test_a_budget_has_a_graph_for_each_number_of_sequences(make, modes: str):
    """Images run as one of few, videos as one of many; nothing else is different."""
    encoder = make("pictures", sequences=(2, 12), modes=modes, guards=True)
    step = encoder.steps["default"]
    keys = [key[:2] for _, key in step.table]
    assert keys == [(64, 12), (64, 2), (32, 12), (32, 2), (16, 12), (16, 2), (8, 8), (8, 2)]
    assert encoder.plan.num_graphs == 8 and encoder.plan.max_sequences == {"default": 12}
    image, video = toy.picture(14), toy.picture(2, 5, 1, 4)
    runs = [[image], [video], [image, toy.picture(9)], [video, toy.picture(3, 3, 3, 3)]]
    for items, key in zip(runs, [(16, 2), (16, 12), (32, 2), (32, 12)], strict=True):
        before = set(step.stats.captures)
        toy.check(encoder, items)
        (captured,) = set(step.stats.captures) - before
        assert captured[0] is fg.Mode.parse(modes) and captured[1][:2] == key
    draw = random.Random(1)
    for _ in range(6):
        toy.check(encoder, toy.random_items("pictures", draw))
    crowded = toy.Picture(tuple(toy.drawn(1, 4, toy.C, seed=i) for i in range(13)))
    toy.check(encoder, [crowded])
    assert "more than 12 sequences of default" in encoder.stats.reasons


@fg.struct
class Tight:
    """As `toy.Patches`, with room for the windows that there may be: a part of one in each frame
    beside whole ones."""

    patches: Tensor = fg.buffer("T 4 C", "float32")
    positions: Tensor = fg.buffer("T", "int64", min=0)
    frames: Tensor = fg.buffer("R + 1", "int32", pad="last")
    windows: Tensor = fg.buffer("T // 3 + R + 1", "int32", pad="last")
    shapes: Tensor = fg.buffer("T // 3 + R 2", "float32")  # of each window
    window: Tensor = fg.buffer("T", "int64", pad=0, min=0)  # of each token
    spec: fg.BatchSpec = fg.host()


def see_tight(params: Any, batch: Tight) -> Any:
    """As `toy.see`, with rows that are windows' added to those of their tokens."""
    seen, of_window = toy.see(params, batch), torch.tanh(batch.shapes @ params["deep"][:2])
    return seen | {"rows": seen["rows"] + of_window[batch.window]}


def tight(path: str, items: Any) -> Tight:
    made = toy.collate_pictures(path, items)
    room = made.spec.num_tokens // 3 + made.spec.num_reqs + 1
    assert made.windows[room - 1 :].eq(made.spec.num_tokens).all()
    leaves = {name: getattr(made, name) for name in ("patches", "positions", "frames", "spec")}
    lengths = made.windows[:room].diff()
    window = torch.arange(room - 1).repeat_interleave(lengths)
    shapes = torch.stack([lengths.float(), -lengths.float() / 3], 1)
    return Tight(**leaves, windows=made.windows[:room], shapes=shapes, window=window)


def test_windows_have_as_many_rows_as_tokens_and_sequences_allow(make):
    """They are an axis of their own, offsets and rows, whose most follows from the other two."""
    model = {"paths": {"default": fg.EncoderPath(see_tight, 8)}, "collate": tight}
    encoder = make("pictures", model=model, sequences=(4, 16), guards=True)
    wide = make("pictures", guards=True)
    rows = {kind: leaf.shape for kind, leaf in (
        (of, leaf) for of, step in (("tight", encoder), ("wide", wide))
        for leaf in step.steps["default"].main.executable.plan.buffers
        if leaf.path.endswith("windows")
    )}  # fmt: skip
    assert rows == {"tight": (64 // 3 + 16 + 1,), "wide": (65,)}
    draw = random.Random(2)
    for _ in range(12):
        toy.check(encoder, toy.random_items("pictures", draw))
    assert encoder.stats.hits() > 20


# --- neighbours -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", toy.KINDS)
@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e30])
def test_nothing_of_its_neighbours_is_in_an_item(make, kind: str, poison: float):
    """Bit for bit: the runs are the same, with other values in all items but one."""
    encoder = make(kind)
    if kind == "pages":
        items = [toy.page(n, seed=n) for n in (1, 2, 0)]
        spoilt = [toy.Page(*(torch.full_like(x, poison) for x in item)) for item in items]
    else:
        items = [toy.picture(5), toy.picture(3, 4), toy.picture(6), toy.picture(1, 2)]
        spoilt = [
            item._replace(frames=tuple(torch.full_like(x, poison) for x in item.frames))
            for item in items
        ]
    want = encoder(items)
    for at in range(len(items)):
        among = [*spoilt[:at], items[at], *spoilt[at + 1 :]]
        got = encoder(among)
        torch.testing.assert_close(got[at], want[at], atol=0, rtol=0)
        assert not any(x.isfinite().all() for x in (got[:at] + got[at + 1 :])) or poison == 1e30
    assert encoder.stats.misses() == 0


READS_OTHERS: dict[str, Any] = {
    "sums of the rows before": lambda x: x + x.cumsum(0) / 9,
    "a place among all rows": lambda x: (
        x + torch.arange(x.shape[0], device=x.device).view(-1, *[1] * (x.dim() - 1))
    ),
    "the first row": lambda x: x - x[:1] / 2,
}


@pytest.mark.parametrize("kind", toy.KINDS)
def test_a_check_holds_items_to_themselves_alone(make, kind: str):
    encoder = make(kind)
    encoder.check(toy.random_items(kind, random.Random(kind)))
    encoder.check([])
    assert encoder.stats.calls == 0


@pytest.mark.parametrize("what", READS_OTHERS)
def test_a_check_finds_rows_that_go_by_their_neighbours(what: str, recorder_name, device):
    """Which a trace accepts: a row may see those before it, of other items too."""
    model, params = (fn() for fn in toy.KINDS["pictures"])
    (path,), wrong = model.paths.values(), READS_OTHERS[what]

    def forward(params: Any, batch: toy.Patches) -> Any:
        return trees.map_leaves(wrong, path.forward(params, batch))

    paths = {"default": dataclasses.replace(path, forward=forward)}
    encoder = fg.graphify_encoder(
        dataclasses.replace(model, paths=paths), toys.moved(params, device), recorder=recorder_name
    )
    items = [toy.picture(5), toy.picture(3, 4), toy.picture(6)]
    with pytest.raises(
        DifferenceError, match=r"path 'default': the rows of items\[\d\].* is off by"
    ):
        encoder.check(items)
    encoder.check(items[:1])


def test_a_check_finds_items_in_another_order(recorder_name, device):
    model, params = (fn() for fn in toy.KINDS["pictures"])
    turned = lambda path, items: model.collate(path, items[::-1])  # noqa: E731
    encoder = fg.graphify_encoder(
        dataclasses.replace(model, collate=turned), toys.moved(params, device),
        recorder=recorder_name,
    )  # fmt: skip
    with pytest.raises(
        DifferenceError, match=r"in one run with items \[.* collate keeps the order"
    ):
        encoder.check([toy.picture(4, seed=0), toy.picture(4, seed=1)])


@pytest.mark.parametrize("path", ["default", "global", "local"])
def test_padding_of_larger_keys_changes_no_true_row(path: str):
    """With NaN and infinities in all padding of which the trace claims nothing."""
    kind = "pictures" if path == "default" else "pages"
    items = {"pictures": [toy.picture(5), toy.picture(3, 4)], "pages": [toy.page(1), toy.page(2)]}
    model, params = (fn() for fn in toy.KINDS[kind])
    forward, batch = model.paths[path].forward, model.collate(path, items[kind])
    limits = fg.Limits(1000, 1000, **model.dims)
    report = fg.check(forward, params, batch, stage="batch", rehearse=True, limits=limits)
    assert report.ok and len(report.rehearsed) > 2, report


def test_outputs_are_the_callers(make):
    encoder, items = make("pictures"), [toy.picture(5), toy.picture(6)]
    first = encoder(items)
    kept = [x.clone() for x in first]
    for x in encoder(items):
        x.zero_()
    toys.assert_trees(first, kept)
    first[0].zero_()
    toys.assert_trees(first[1], kept[1])


# --- beside a decoder, and asleep -----------------------------------------------------------------


def test_on_one_pool_with_a_decoder(recorder_name, device):
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    fast = fg.graphify(toys.attend, donate="cache", stage="batch", sizes=toys.SIZES)
    step = fast.bind(params).capture(cache, toys.LIMITS, recorder=recorder_name, progress=False)
    encoder = toy.make("pages", device, step.recorder).capture()
    assert encoder.recorder is step.recorder
    draw = random.Random(3)
    for turn in range(6):
        toy.check(encoder, toy.random_items("pages", draw))
        batch = toys.on(toys.decode(draw.randint(1, 4), past=4 + turn % 4, seed=turn), device)
        want, after = toys.bare(toys.attend, params, cache, batch)
        got, _ = step(cache, batch)
        toys.assert_trees((got, cache), (want, after), **toys.CLOSE)
    assert step.stats.share("FULL") == 1 and encoder.stats.hits()


def test_it_sleeps_and_wakes(make):
    encoder, items = make("pages").capture(), [toy.page(2), toy.page(0)]
    toy.check(encoder, items)
    captured = {path: list(step) for path, step in encoder.steps.items()}
    encoder.sleep()
    with pytest.raises(SleepError, match="wake"):
        encoder(items)
    encoder.wake()
    assert {path: list(step) for path, step in encoder.steps.items()} == captured
    toy.check(encoder, items)
    assert encoder.memory.keys() == {"global", "local"}
    assert all(row.measured for table in encoder.memory.values() for row in table.rows)


def test_what_is_run_ahead_is_as_large_as_its_graphs(monkeypatch):
    """On a GPU, where kernels are compiled by their first launch; limits are 131,072 views."""
    ran: list[fg.BatchSpec] = []
    monkeypatch.setattr(capture, "compiles_kernels", lambda device: True)
    monkeypatch.setattr(capture, "_run_eager", lambda keys, spec: ran.append(spec))
    for kind, most in (("pages", (1200, 12)), ("pictures", (64, 20))):
        encoder = toy.make(kind, "cpu", "tape").capture()
        assert {step.limits.max_reqs for step in encoder.steps.values()} == {EAGER_TOKENS}
        assert ran and all(spec[0] <= most[0] and spec[1] <= most[1] for spec in ran)
        ran.clear()


# --- without graphs -------------------------------------------------------------------------------


def test_an_encoder_whose_tokens_depend_on_the_data_runs_without_graphs(make):
    """Its forward could not even be traced."""

    def pruned(params: Any, batch: toy.Patches) -> torch.Tensor:
        rows = toy.see(params, batch)["rows"]
        return rows[rows[:, 0] > 0]

    why = "video pruning: tokens depend on the data"
    changed = {
        "paths": {"default": fg.EncoderPath(pruned, 8)}, "eager_because": why,
        "postprocess": lambda outputs, item: outputs["default"],
    }  # fmt: skip
    encoder = make("pictures", model=changed)
    items = [toy.picture(9), toy.picture(3, 4)]
    toy.check(encoder.capture(), items)
    lengths = [len(x) for x in encoder(items)]
    assert lengths != [9, 7] and encoder.stats.reasons == {why: 4} and not encoder.steps
    assert f"no graphs: {why}" in encoder.as_text() and why in repr(encoder)
    assert encoder.recorder is None and not encoder.memory


# --- statistics -----------------------------------------------------------------------------------


def test_statistics_are_counted_shown_and_logged(make, caplog):
    encoder = make("pages", log_every=2)
    items = [toy.page(0), toy.page(3), toy.page(13)]
    with caplog.at_level(logging.INFO, logger="fngraph"):
        encoder(items[:2])
        assert not caplog.messages
        before = encoder.stats
        encoder(items)
    line = "encoder: 2 calls, 5 items; global: 5 by graph, 0.0% padding, 0 eagerly; local: 2 by "
    assert [text for text in caplog.messages if text.startswith("encoder")] == [
        f"{line}graph, 25.0% padding, 1 eagerly"
    ]
    stats = encoder.stats
    assert stats.as_text().split("\n\n")[1:] == [
        """\
| path   | ran as | runs | items | tokens | padding |
|--------|--------|-----:|------:|-------:|--------:|
| global | 272    |    1 |     1 |    272 |       0 |
| global | 544    |    2 |     4 |   1088 |       0 |
| local  | 400    |    2 |     2 |    600 |     200 |
| local  | eager  |    1 |     1 |   1300 |       0 |""",
        """\
| eager because                                      | items |
|----------------------------------------------------|------:|
| more tokens than the largest budget of local, 1200 |     1 |""",
    ]
    assert (stats.hit_rate(), stats.hit_rate("global")) == (7 / 8, 1.0)
    assert stats.histogram("local") == {300: 2, 1300: 1}
    assert stats - before + before == stats and (stats - before).items == 3
    assert before.calls == 1, "a value"
    assert stats - stats == fg.EncoderStats() and fg.EncoderStats().hit_rate() == 0


def test_budgets_that_its_own_statistics_ask_for(make):
    encoder = make("pictures", max_items=1)
    items = [toy.picture(n) for n in (11, 11, 23, 40, 40, 63)]
    encoder(items)
    seen = encoder.stats.histogram("default")
    better = make("pictures", max_items=1, histogram=seen, num_budgets=3)
    assert better.plan.path_budgets == {"default": (11, 40, 63)}
    toy.check(better, items)
    assert better.stats.padding() < encoder.stats.padding()


# --- plans and mistakes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "budgets"),
    [
        ("pictures", {}, {"default": (8, 16, 32, 64)}),
        ("pictures", {"max_tokens": 40}, {"default": (8, 16, 32, 40)}),
        ("pictures", {"budgets": (9, 50)}, {"default": (9, 50)}),
        ("pictures", {"histogram": [9, 9, 50, 999]}, {"default": (9, 50)}),
        (
            "pages", {"budgets": {"local": (300, 350)}},
            {"global": (272, 544, 1088), "local": (0, 300)},
        ),
        (
            "pages", {"histogram": {"global": {250: 3, 600: 1}}, "num_budgets": 1},
            {"global": (816,), "local": (0, 100, 200, 400, 800, 1200)},
        ),
    ],
)  # fmt: skip
def test_plans(kind: str, options: dict[str, Any], budgets: Any):
    encoder = toy.make(kind, "cpu", "tape", **options)
    assert encoder.plan.path_budgets == budgets
    for path, step in encoder.steps.items():
        assert [key.num_tokens for _, key in step.table][::-1] == [n for n in budgets[path] if n]


@pytest.mark.parametrize(
    ("kind", "options", "error", "says"),
    [
        ("pages", {"budgets": (300,)}, SizesError, r"Pass budgets=\{'global': ...\}"),
        ("pages", {"budgets": {"loca": (3,)}}, SizesError, r"'loca': .*\['global', 'local'\]"),
        ("pictures", {"budgets": (8,), "histogram": [8]}, SizesError, "Pass one of them"),
        ("pictures", {"num_budgets": 3}, SizesError, "num_budgets=3 .* Pass histogram= as well"),
        ("pictures", {"histogram": [999]}, SizesError, "no run of 1 to 64 tokens"),
        ("pictures", {"budgets": (9, 3)}, SizesError, r"budgets=\(9, 3\) must ascend"),
        ("pictures", {"sequences": (9, 3)}, SizesError, r"sequences=\(9, 3\) .* Pass \(3, 9\)"),
        ("pictures", {"sequences": ()}, SizesError, r"sequences=\(\) .* Pass \(8, 64\)"),
        ("pages", {"sequences": {"local": (2, 3)}}, SizesError, "'local': .* 100 tokens each"),
        ("pictures", {"budgets": (8,), "max_items": 9}, SizesError, "max_items=9 is more than"),
        ("pictures", {"modes": "NONE"}, ModesError, 'modes="FULL" or modes="PIECEWISE"'),
        ("pictures", {"modes": "FULL_AND_PIECEWISE"}, ModesError, 'modes="FULL_AND_PIECEWISE"'),
        ("pictures", {"sizes": (8,)}, TypeError, "no option 'sizes': the plan decides it"),
        ("pictures", {"outputs": "borrow"}, TypeError, "no option 'outputs'"),
        ("pictures", {"budget": (8,)}, TypeError, "no option 'budget'"),
        ("pictures", {"model": {"paths": {}}}, SizesError, "has nothing to run"),
        ("pictures", {"model": {"token_range": (0, 8)}}, SizesError, r"token_range=\(0, 8\)\)"),
        ("pictures", {"model": {"max_frames": -1}}, SizesError, "no video"),
        ("pictures", {"model": {"eager_because": "EVS"}, "ranks": 1}, SpecError, "EVS. Leave"),
        ("pictures", {"eager": True}, ModesError, "'default' has no graphs as .*eager=True"),
        ("pages", {"eager": True}, ModesError, "'global' has no graphs as"),
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused(kind: str, options: Any, error: Any, says: str):
    with pytest.raises(error, match=says):
        toy.make(kind, "cpu", "tape", **options)


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (("image", {"defaul": 3}), r"items\[1\]: measure counts .* the path 'defaul'"),
        (("image", {"default": 0}), r"items\[1\]: measure says no tokens of the path 'default'"),
        (("image", {"default": 3}, {"default": 4}), "3 tokens in 4 sequences"),
        (("image", {"default": 3}, {"default": 0}), "3 tokens in 0 sequences"),
        (("image", {"default": -1}), "-1 tokens"),
        (("image", {"default": 3}, {}, -1), "-1 frames. Say 0 of an image"),
        (
            None,
            r"items\[1\]: measure returned a tuple. Return fg.Measured\(\"image\", tokens=\{'def",
        ),
        (("image", {"default": 4}), r"made a batch of 3 tokens .* said to bring 4 in 1"),
    ],
)
def test_what_measure_cannot_mean_is_refused(measured: Any, says: str):
    second = fg.Measured(*measured) if measured else ("image", {"default": 3})
    count = iter([fg.Measured("image", {"default": 2}), second])
    told = {"measure": lambda item: next(count)}
    encoder = toy.make("pictures", "cpu", "tape", told, max_items=1)
    with pytest.raises(SpecError, match=says):
        encoder([toy.picture(2), toy.picture(3)])
    assert encoder.stats.calls == 0


def test_what_is_too_large_to_run_at_all_is_refused():
    encoder = toy.make("pictures", "cpu", "tape", eager_tokens=80)
    toy.check(encoder, [toy.picture(80)])
    with pytest.raises(SpecError, match=r"81 output tokens has no graph \(more .*_tokens=81\)"):
        encoder([toy.picture(81)])


def first_rows(params: Any, batch: toy.Patches) -> torch.Tensor:
    """Positions by their number in the run, of which the table has 64."""
    T = batch.positions.shape[0]
    return batch.patches.flatten(1) @ params["patch"] + params["position"][:T]


def test_an_error_of_a_forward_says_whose_it_is_and_how_it_is_told_so():
    model = {"paths": {"default": fg.EncoderPath(first_rows, 8)}, "mixes": True}
    with pytest.raises(BranchError, match="the way where T <= 64") as caught:
        toy.make("pictures", "cpu", "tape", model)
    (note,) = caught.value.__notes__
    assert (
        "path 'default'" in note and "Limits(max_tokens=131072" in note and "eager_tokens=" in note
    )
    toy.make("pictures", "cpu", "tape", model, eager_tokens=64)


def configured(width: int, params: Any, batch: toy.Patches) -> Any:
    """See `toy.see`."""
    assert width == toy.E
    return toy.see(params, batch)


def test_a_forward_may_be_a_partial_or_an_object():
    class Tower:
        def __call__(self, params: Any, batch: toy.Patches) -> Any:
            return toy.see(params, batch)

    for forward in (functools.partial(configured, toy.E), Tower(), Tower().__call__):
        model = {"paths": {"default": fg.EncoderPath(forward, 8)}}
        toy.check(toy.make("pictures", "cpu", "tape", model), [toy.picture(3), toy.picture(2, 2)])


def test_many_graphs_are_told(caplog):
    toy.make("pictures", "cpu", "tape", budgets=range(1, 65))
    assert not caplog.messages
    toy.make("pictures", "cpu", "tape", budgets=range(1, 66))
    assert caplog.messages == ["encoder: 65 graphs are many; pass fewer budgets="]


def test_paths_that_mean_nothing_are_refused():
    for options, says in (
        ({"min_budget": 0}, r"min_budget=0\) holds no token"),
        ({"min_budget": 8, "unit": 0}, r"unit=0\): a sequence has at least one token"),
        ({"min_budget": 8, "max_sequences": 0}, r"max_sequences=0\) holds no image"),
    ):
        with pytest.raises(SizesError, match=says):
            fg.EncoderPath(toy.see, **options)
    nine = fg.Measured("image", {"global": 9})
    uneven = toy.make("pages", "cpu", "tape", {"measure": lambda item: nine})
    with pytest.raises(SpecError, match=r"9 tokens of the path 'global', .* a multiple of 272"):
        uneven([toy.page(0)])
    bare = toy.make("pages", "cpu", "tape", {"postprocess": rows_of_the_only_path})
    with pytest.raises(TreeError, match=r"rows of the paths \['global', 'local'\]"):
        bare([toy.page(1)])
