"""`fg.check`: every impurity of a function in one report, each with its own line."""

from __future__ import annotations

import dataclasses
import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys

import fngraph as fg
from fngraph import errors
from fngraph.core import trees

WEIGHT = torch.ones(toys.E)
KEPT: list[Any] = []


def impure(p: Any, s: Any, b: Any) -> Any:
    """Each line that breaks a rule ends in the class that says so."""
    x = p["w"][b.token_ids]
    x = x * b.seq_lens.max().item()  # HostSyncError
    x = x * WEIGHT  # ClosureError
    if b.token_ids.shape[0] > 3:  # BranchError
        x = x + 1
    x = x + torch.rand(toys.E)  # RandomError
    p["w"].add_(1)  # MutationError
    x = x * b.spec.num_tokens  # HostFieldError
    x = x * int(b.token_ids.shape[0])  # BranchError
    x = x * len(b.token_ids.nonzero())  # HostSyncError
    x = x * sum(b.token_ids.tolist())  # HostSyncError
    x = x * b.seq_lens.float().numpy().mean()  # HostSyncError
    x = x * len(str(p["w"]))  # HostSyncError
    x = F.dropout(x)  # RandomError
    mean = x.mean(0)  # RowsError
    for row in b.seq_lens:  # BranchError RowsError
        x = x + row
    x.data = x * 2  # MutationError
    KEPT.append(x.exp())  # LeakError
    return {"x": x, "mean": mean}, s


def check(forward: Any, **options: Any) -> Any:
    options = {"donate": "s", "stage": "b", "limits": toys.LIMITS} | options
    return fg.check(forward, toys.tally_params(), toys.tally_state(), toys.batch(3, 2), **options)


def promised(forward: Any) -> list[tuple[str, str]]:
    """(class, file:line) of each comment that names one."""
    lines, first = inspect.getsourcelines(forward)
    told = [(line.rpartition("# ")[2].split(), first + i) for i, line in enumerate(lines)]
    return [
        (name, f"{Path(__file__).name}:{n}:")
        for names, n in told for name in names if name.endswith("Error")
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    KEPT.clear()


def test_a_pure_function_has_an_empty_report():
    state = fg.like(toys.tally_state())  # specs will do
    report = fg.check(
        toys.tally, toys.tally_params(), state, toys.batch(2), donate="state", stage="batch",
        limits=toys.LIMITS,
    )  # fmt: skip
    assert report and report.ok and report.errors == ()
    assert repr(report) == report.as_text() == "nothing in forward that a graph could not hold"
    report.raise_first()


def test_all_impurities_at_once_each_at_its_line():
    report = check(impure)
    found = [(type(e).__name__, str(e)) for e in report.errors]
    for name, line in promised(impure):
        assert [text for kind, text in found if kind == name and line in text], (name, line)
    assert len(found) == len(promised(impure)) == 17 and not report
    text = repr(report)
    assert text.startswith("1. HostSyncError: ") and "\n\n17. " in text
    with pytest.raises(errors.HostSyncError):
        report.raise_first()


def test_a_line_in_a_loop_is_reported_once():
    def forward(p: Any, s: Any, b: Any) -> Any:
        x = p["w"][b.token_ids]
        for _ in range(3):
            x = x * WEIGHT
        return x, s

    assert [type(e) for e in check(forward).errors] == [errors.ClosureError]


def test_what_comes_after_forward_is_reported_too():
    def forward(p: Any, s: Any, b: Any) -> Any:
        x = p["w"][b.token_ids] * random.random()
        torch.set_default_dtype(torch.float64)
        return (x, p["w"], b.token_ids, 3, WEIGHT, x.sum(0)), {"seen": s["seen"]}

    kinds = [type(e).__name__ for e in check(forward).errors]
    assert sorted(kinds) == [
        "AmbientError", "ClosureError", "DonationError", "OutputError", "OutputError",
        "OutputError", "RandomError", "RowsError",
    ]  # fmt: skip
    assert torch.get_default_dtype() is torch.float32


def test_donated_leaves_that_do_not_fit_or_must_be_copied():
    def forward(p: Any, s: Any, b: Any) -> Any:
        return p["w"][b.token_ids] * 1, {
            "seen": s["seen"].float(),
            "total": s["total"].sort().values,
        }

    report = check(forward, allow_copies=False)
    assert [type(e) for e in report.errors] == [errors.DonationError] * 2
    assert "s['seen']" in str(report.errors[0]) and "s['total']" in str(report.errors[1])


def test_where_forward_cannot_go_on_the_report_says_so():
    def forward(p: Any, s: Any, b: Any) -> Any:
        names = {1: "one"}
        scale = names[b.seq_lens.sum().item() + 1]  # 2 is not there
        return p["w"] * scale, s

    first, last = check(forward).errors
    assert isinstance(first, errors.HostSyncError)
    assert "forward ends here with KeyError: 2" in str(last) and "not checked" in str(last)


@pytest.mark.parametrize(
    "spell",
    [
        lambda b: min(b.spec.num_tokens, 4),
        lambda b: b.spec + 1,
        lambda b: float(b.spec.num_reqs),
        lambda b: 2 if isinstance(b.spec, fg.BatchSpec) else 3,
        lambda b: len(f"{b.spec}"),
        lambda b: {b.spec: 2}.get(b.spec, 1),
        lambda b: sum(b.spec),
    ],
)
def test_a_read_of_the_spec_goes_on(spell: Any):
    report = check(lambda p, s, b: (p["w"][b.token_ids] * spell(b) * WEIGHT, s))
    assert [type(e) for e in report.errors] == [errors.HostFieldError, errors.ClosureError]


def test_nothing_of_a_check_is_left_behind():
    p, s, b = toys.tally_params(), toys.tally_state(), toys.batch(2)
    before = toys.clone((p, s))
    fg.check(impure, p, s, b, donate="s", stage="b", limits=toys.LIMITS)
    toys.assert_trees((p, s), before)
    assert check(lambda p, s, b: (p["w"][b.token_ids] * 1, s))


def test_a_wrong_name_is_raised():
    with pytest.raises(errors.TreeError):
        check(impure, donate="cache")


GOOD = toys.batch(3, 2)
BAD = {
    "spec": {"spec": fg.BatchSpec(6, 2)},
    "spec of requests": {"spec": fg.BatchSpec(5, 3)},
    "no spec": {"spec": None},
    "another spec": {"spec": (5, 2)},
    "beyond the limits": {"spec": fg.BatchSpec(17, 2)},
    "dtype": {"seq_lens": GOOD.seq_lens.long()},
    "rank": {"token_ids": GOOD.token_ids[None]},
    "width": {"block_tables": GOOD.block_tables[:, :1]},
    "missing": {"slot_mapping": None},
    "more": {"slot_mapping": {"a": GOOD.slot_mapping}},
    "two": {"slot_mapping": {"a": GOOD.slot_mapping, "b": GOOD.slot_mapping}},
    "sparse": {"seq_lens": GOOD.seq_lens.to_sparse()},
    "number": {"seq_lens": 3},
    "list": {"seq_lens": [3, 2]},
}


@pytest.mark.parametrize("rehearse", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_batch_that_a_step_refuses_is_refused_in_the_same_words(name: str, rehearse: bool):
    batch = dataclasses.replace(GOOD, **BAD[name])
    args = toys.tally_params(), toys.tally_state(), batch
    options = {"donate": "state", "stage": "batch", "limits": toys.LIMITS}
    with pytest.raises(fg.errors.FnGraphError) as told:
        fg.graphify(toys.tally, **options)(*args)
    report = fg.check(toys.tally, *args, rehearse=rehearse, **options)
    first = report.errors[0]
    assert (type(first), str(first)) == (told.type, str(told.value))
    assert not report.rehearsed
    if name not in ("spec", "spec of requests", "beyond the limits"):
        assert len(report.errors) == 1


def test_all_leaves_that_do_not_fit_are_told_and_forward_too():
    batch = dataclasses.replace(GOOD, spec=fg.BatchSpec(4, 2), seq_lens=GOOD.seq_lens.long())

    def forward(p: Any, s: Any, b: Any) -> Any:
        return p["w"][b.token_ids] * WEIGHT, s

    told = fg.check(
        forward, toys.tally_params(), toys.tally_state(), batch, donate="s", stage="b",
        limits=toys.LIMITS,
    ).errors  # fmt: skip
    assert [str(e).partition(": ")[0] for e in told[:3]] == [
        "b.token_ids", "b.slot_mapping", "b.seq_lens",
    ]  # fmt: skip
    assert [type(e).__name__ for e in told] == 3 * ["TreeError"] + ["ClosureError"]


@pytest.mark.parametrize(
    "made", [fg.like, lambda tree: trees.map_leaves(lambda x: x.to("meta"), tree)]
)
def test_a_batch_without_memory_is_compared_by_its_shapes_and_its_spec(made: Any):
    state, options = toys.tally_state(), {"donate": "state", "stage": "batch"}
    without = made(GOOD)  # its spec is hidden: there are no counts
    assert fg.check(toys.tally, toys.tally_params(), state, without, **options).ok
    right = dataclasses.replace(without, spec=GOOD.spec)
    assert fg.check(toys.tally, toys.tally_params(), state, right, **options).ok
    wrong = dataclasses.replace(right, seq_lens=made(GOOD.seq_lens[:1]))
    (error,) = fg.check(toys.tally, toys.tally_params(), state, wrong, **options).errors
    assert str(error).startswith("batch.seq_lens: expected int32[R] = [2] for R=2, got [1]")


def test_a_leaf_that_cannot_be_written_is_told_as_a_call_tells_it():
    state = toys.tally_state() | {"total": torch.zeros(toys.E).expand(toys.V, toys.E)}
    options = {"donate": "state", "stage": "batch", "limits": toys.LIMITS}
    with pytest.raises(fg.errors.AliasError) as told:
        fg.graphify(toys.tally, **options)(toys.tally_params(), state, GOOD)
    (error,) = fg.check(toys.tally, toys.tally_params(), state, GOOD, **options).errors
    assert (type(error), str(error)) == (told.type, str(told.value))


def test_a_loop_that_goes_on_while_a_value_says_so_ends():
    """With a stand-in value it would never."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        x = p["w"][b.token_ids]
        while x.abs().max() > 1e-3:
            x = x * 0.5
        return x, s

    report = fg.check(
        forward, toys.tally_params(), toys.tally_state(), toys.batch(3, 2),
        donate="s", stage="b", limits=toys.LIMITS,
    )  # fmt: skip
    first, last = report.errors
    assert isinstance(first, errors.HostSyncError | errors.BranchError)
    assert "test_check.py:" in str(first)
    assert "the report ends here" in str(last) and "fg.while_loop" in str(last)


def test_a_row_kept_for_padding_is_looked_at_in_its_own_index_alone():
    """Row 0 is nobody's; place 0 of another row is."""

    @fg.struct
    class Batch:
        x: Any = fg.buffer("T 8", "float32")
        row: Any = fg.buffer("T", "int64", pad=0)
        place: Any = fg.buffer("T", "int64")
        spec: Any = fg.host()

    def forward(cache: Any, b: Any) -> Any:
        cache[b.row, b.place] = b.x
        return cache[b.row].sum(1), cache

    def errors_of(row: list[int]) -> Any:
        spec = fg.BatchSpec(3, 2)
        batch = Batch(torch.ones(3, 8), torch.tensor(row), torch.tensor([0, 1, 0]), spec)
        cache, limits = torch.zeros(4, 3, 8), fg.Limits(16, 4)
        return fg.check(
            forward, cache, batch, donate="cache", stage="b", rehearse=True, limits=limits
        ).errors

    assert errors_of([1, 1, 2]) == ()
    assert "true rows name [0] too" in str(errors_of([0, 1, 2]))
