"""`rows="changed"`: a table on the device, told of changed rows, is the table passed whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import fngraph as fg
from fngraph.errors import StaleError, TreeError

B, TOP = 3, 6
LIMITS = fg.Limits(max_tokens=8, max_reqs=TOP, B=B)
MODES = ["FULL", "PIECEWISE", "NONE", "FULL_DECODE_ONLY"]


@fg.struct
class Batch:
    """A table with a row for each request."""

    ids: Tensor = fg.buffer("T", "int64", pad=0)
    tables: Tensor = fg.buffer("R B", "int32", pad=0, rows="changed")
    spec: fg.BatchSpec = fg.host()


def forward(params: Tensor, state: Any, batch: Batch) -> Any:
    """Looks each row's blocks up."""
    read = params[batch.tables.long()] * torch.arange(1, B + 1, device=params.device)
    return (read.sum(1), batch.ids * 2), state


def make(device: Any, recorder: str, modes: str = "FULL", **options: Any) -> Any:
    """A captured step and its params."""
    params = torch.arange(100.0, device=device)
    fast = fg.graphify(
        forward, donate="state", stage="batch", modes=modes, sizes=(1, 2, 4, 8),
        recorder=recorder, **options,
    )  # fmt: skip
    return fast.bind(params).capture({}, LIMITS, progress=False), params


def batch(tables: Any, reqs: int, uniform: bool = True) -> Batch:
    """A decode batch over a table or changed rows."""
    spec = fg.BatchSpec(reqs, reqs, query_len=1 if uniform else None)
    return Batch(torch.arange(reqs), tables, spec)


def changed(rows: list[int], values: Any, device: Any = "cpu") -> fg.ChangedRows:
    """Rows on the host, values where asked."""
    values = torch.as_tensor(values, dtype=torch.int32, device=device).view(-1, B)
    return fg.ChangedRows(torch.tensor(rows, dtype=torch.int64), values)


def check(step: Any, params: Tensor, given: Any, whole: Tensor, uniform: bool = True) -> None:
    """A step on what is given against bare forward on the whole table."""
    reqs = len(whole)
    want, _ = forward(params, {}, batch(whole.to(params.device), reqs))
    got, _ = step({}, batch(given, reqs, uniform))
    assert torch.equal(got[0], want[0]) and got[1].tolist() == want[1].tolist()


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("guards", [False, True])
def test_changed_rows_are_the_table_passed_whole(
    recorder_name, device, modes: str, where: str, guards: bool
):
    step, params = make(device, recorder_name, modes, guards=guards)
    draw = random.Random(modes)
    values_on = device if where == "device" else "cpu"
    table = torch.zeros(TOP, B, dtype=torch.int32)
    known = 0  # rows that were given at some time
    for turn in range(60):
        reqs = draw.randint(1, TOP)  # joins and leaves: a smaller batch, then a larger one again
        rows = sorted(draw.sample(range(reqs), draw.randint(0, reqs)), key=lambda _: draw.random())
        rows += [row for row in range(known, reqs) if row not in rows]
        new = torch.tensor([[draw.randrange(100) for _ in range(B)] for _ in rows])
        table[rows] = new.view(-1, B).int()
        known = max(known, reqs)
        if turn == 0 or draw.random() < 0.1:
            given: Any = table[:reqs].clone().to(values_on)
        else:
            given = changed(rows, new, values_on)
        check(step, params, given, table[:reqs], uniform=draw.random() < 0.7)
        if isinstance(given, fg.ChangedRows):
            given.rows.fill_(0)  # it was copied
            if where == "cpu":
                given.values.fill_(99)


def test_a_row_beyond_the_batch_may_be_given_ahead(recorder_name, device):
    step, params = make(device, recorder_name)
    table = torch.arange(TOP * B, dtype=torch.int32).view(TOP, B)
    check(step, params, table[:2], table[:2])
    check(step, params, changed([5, 3], table[[5, 3]]), table[:2])
    check(step, params, changed([2, 4], table[[2, 4]]), table)


@pytest.mark.parametrize("guards", [False, True])
def test_a_batch_of_host_batch_gives_whole_rows_or_changed_ones(recorder_name, device, guards):
    step, params = make(device, recorder_name, guards=guards)
    table = torch.arange(TOP * B, dtype=torch.int32).view(TOP, B)
    for turn in range(8):
        row, spec = turn % 4, fg.BatchSpec(4, 4, query_len=1)
        if turn % 3 == 0:
            table = table + 1
            filled = step.host_batch(spec)
            filled.tables.copy_(table[:4])
        else:
            table[row] += 7
            filled = step.host_batch(spec, tables=changed([row], table[row]))
        filled.ids.copy_(torch.arange(4))
        got, _ = step({}, filled)
        want, _ = forward(params, {}, batch(table[:4].to(device), 4))
        assert torch.equal(got[0], want[0])
    with pytest.raises(TreeError, match=r"'ids'.*tables\."):
        step.host_batch(spec, ids=changed([row], table[row]))


def product(params: Tensor, state: Any, batch: Batch) -> Any:
    """Another trace under autocast."""
    return params[batch.tables.long()] @ params[:B], state


def test_another_ambient_state_goes_on_with_the_table(recorder_name, device):
    params = torch.arange(100.0, device=device)
    fast = fg.graphify(product, donate="state", stage="batch", sizes=(8,), recorder=recorder_name)
    step = fast.bind(params).capture({}, LIMITS, progress=False)
    table = torch.arange(TOP * B, dtype=torch.int32).view(TOP, B)
    given: Any = table
    for turn in range(5):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=turn % 2 == 1):
            want, _ = product(params, {}, batch(table.to(device), TOP))
            got, _ = step({}, batch(given, TOP))
        assert torch.equal(got, want) and (got.dtype is torch.bfloat16) is (turn % 2 == 1)
        table[turn] += 1
        given = changed([turn], table[turn])


def test_a_rebound_step_goes_on_with_the_table(recorder_name, device):
    step, params = make(device, recorder_name)
    table = torch.arange(TOP * B, dtype=torch.int32).view(TOP, B)
    check(step, params, table, table)
    step.rebind(params=params.double() + 1)
    table[1] += 1
    check(step, params, changed([1], table[1]), table)
    assert params.dtype is torch.float64


# --- what cannot be -------------------------------------------------------------------------------

ROW = [[1] * B]
BAD: dict[str, tuple[fg.ChangedRows, list[str]]] = {
    "beyond": (changed([TOP], ROW), ["[6]", "max_reqs"]),
    "negative": (changed([-1], ROW), ["[-1]", "6 rows"]),
    "twice": (changed([1, 0, 1], ROW * 3), ["[1]", "more than once"]),
    "never given": (changed([2], ROW), ["[3]", "never given", "whole"]),
    "rows of another dtype": (
        fg.ChangedRows(torch.tensor([1]).int(), torch.ones(1, B).int()), ["rows", "int64"]),
    "rows of another rank": (
        fg.ChangedRows(torch.tensor([[1]]), torch.ones(1, B).int()), ["rows", "(n,)"]),
    "values of another dtype": (
        fg.ChangedRows(torch.tensor([1]), torch.ones(1, B)), ["int32 [1, 3]", "float32"]),
    "values of another width": (
        fg.ChangedRows(torch.tensor([1]), torch.ones(1, B + 1).int()), ["[1, 3]", "[1, 4]"]),
    "too few values": (
        fg.ChangedRows(torch.tensor([1, 2]), torch.ones(1, B).int()), ["[2, 3]", "[1, 3]"]),
    "no tensor": (fg.ChangedRows(torch.tensor([1]), 3), ["values", "3"]),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_rows_that_cannot_be_replaced_are_named(recorder_name, device, what: str):
    given, words = BAD[what]
    step, params = make(device, recorder_name)
    table = torch.arange(TOP * B, dtype=torch.int32).view(TOP, B)
    check(step, params, table[:2], table[:2])
    with pytest.raises(TreeError) as error:
        step({}, batch(given, 4))
    assert [word for word in ["batch.tables", *words] if word not in str(error.value)] == []
    with pytest.raises(TreeError, match="failed"):  # the table may be half written
        step({}, batch(changed([0], ROW), 2))
    check(step, params, table[:4], table[:4])
    check(step, params, changed([], []), table[:4])
    with pytest.raises(TreeError, match="never given"):  # given before the failure, not after
        step({}, batch(changed([0], ROW), 5))


def test_after_a_step_that_failed_elsewhere_the_whole_is_needed(recorder_name, device):
    step, params = make(device, recorder_name)
    table = torch.ones(2, B, dtype=torch.int32)
    check(step, params, table, table)
    wrong = Batch(torch.arange(3), changed([0], ROW), fg.BatchSpec(2, 2, query_len=1))
    with pytest.raises(TreeError, match=r"batch\.ids"):
        step({}, wrong)
    with pytest.raises(TreeError, match="failed"):
        step({}, batch(changed([0], ROW), 2))
    check(step, params, table, table)


def test_rows_that_were_given_before_a_failure_are_given_no_more(recorder_name, device):
    """A smaller whole leaf after it says nothing of the rows behind it."""
    step, params = make(device, recorder_name)
    table = torch.arange(TOP * B, dtype=torch.int32).view(TOP, B)
    check(step, params, table, table)
    with pytest.raises(TreeError, match="ids"):
        step({}, Batch(torch.arange(4).int(), changed([0], table[0]), fg.BatchSpec(4, 4)))
    check(step, params, table[:2], table[:2])
    with pytest.raises(TreeError, match=r"rows \[3\] of 4 were never given"):
        step({}, batch(changed([2], table[2]), 4))


def test_the_first_step_needs_the_whole(recorder_name, device):
    step, params = make(device, recorder_name)
    with pytest.raises(TreeError, match=r"batch.tables: ChangedRows .* whole"):
        step({}, batch(changed([0, 1], ROW * 2), 2))
    table = torch.ones(2, B, dtype=torch.int32)
    check(step, params, table, table)


def test_a_whole_leaf_that_does_not_fit_is_refused_as_ever(recorder_name, device):
    step, _ = make(device, recorder_name)
    for wrong in (torch.ones(2, B), torch.ones(3, B).int(), torch.ones(2, B + 1).int(), 3):
        with pytest.raises(TreeError, match=r"batch\.tables"):
            step({}, batch(wrong, 2))


def test_changed_values_may_be_a_borrowed_result(recorder_name, device):
    next_tables = fg.graphify(
        lambda x: x + 1, stage="x", outputs="borrow", guards=True, recorder=recorder_name
    )
    table = torch.arange(2 * B, dtype=torch.int32, device=device).view(2, B)
    values = next_tables(table)
    (other,) = next_tables.steps
    params = torch.arange(100.0, device=device)
    fast = fg.graphify(forward, donate="state", stage="batch", sizes=(2, 4), guards=True)
    step = fast.bind(params).capture(
        {}, LIMITS, progress=False, recorder=other.recorder, outputs="borrow"
    )
    check(step, params, table, table)
    values = next_tables(table)
    check(step, params, fg.ChangedRows(torch.arange(2), values), table + 1)
    filled = step.host_batch(
        fg.BatchSpec(2, 2, query_len=1), tables=fg.ChangedRows(torch.arange(2), next_tables(table))
    )
    filled.ids.copy_(torch.arange(2))
    want, _ = forward(params, {}, batch(table + 1, 2))
    assert torch.equal(step({}, filled)[0][0].clone(), want[0])
    values = next_tables(table)
    step({}, batch(table, 2))
    with pytest.raises(StaleError):
        step({}, batch(fg.ChangedRows(torch.arange(2), values), 2))
