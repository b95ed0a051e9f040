"""`fg.bisect` beside the planted faults: nothing to find, every mode, compiled code, graphs that
are damaged themselves, and what it refuses. What it looks at is as it was."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import planted
import pytest
import torch
import toys

import fngraph as fg
from fngraph.graphs.tape.ops import TapeOp

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten


def made(recorder: str, device: Any, forward: Any = toys.attend, **options: Any) -> Any:
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    stage = planted.compiled(forward, params, cache, **options)
    return stage.capture(params, cache, recorder=recorder, lazy=True), params, cache


@pytest.mark.sampled(1)
@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL"])
def test_where_nothing_differs_it_says_so_and_leaves_all_as_it_was(
    modes: str, recorder_name: str, device: Any
):
    step, _, cache = made(recorder_name, device, modes=modes)
    for batch in planted.traffic(6):
        batch = toys.on(batch, device)
        before = toys.clone(cache)
        found = fg.bisect(step, batch)
        assert not found.kind and not found.leaves and "come to the same" in str(found)
        toys.assert_trees(cache, before)
        step(cache, batch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL"])
def test_a_stale_weight_is_named_in_every_mode(modes: str, recorder_name: str, device: Any):
    step, params, _ = made(recorder_name, device, modes=modes)
    params["head"] = params["head"] + 1
    found = fg.bisect(step, toys.on(toys.batch(3), device))
    assert (found.kind, found.op) == ("program", "aten.mm.default")
    assert found.line == planted.line('x_TE @ params["head"]') and "params['head']" in found.what
    assert str(found.ran.mode) == modes


VIEWS: dict[str, Any] = {
    "one": lambda w: w.T.reshape(4, 4)[:, :3],
    "several": lambda w: w.split(2, 1)[1],
}


@pytest.mark.parametrize("views", VIEWS)
def test_a_stale_weight_that_is_read_through_views_is_named_where_it_is_used(views: str):
    def forward(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ VIEWS[views](params["w"]))

    params = {"w": torch.randn(4, 4)}
    x = torch.randn(2, 4)
    step = fg.graphify(forward, stage="x").bind(params).capture(batch=x, progress=False)
    params["w"] = params["w"] + 1
    found = fg.bisect(step, x)
    assert found.op in ("aten.mm.default", "aten.clone.default") and "params['w']" in found.what
    assert found.line.startswith("tests/shadow/test_bisect.py:")


@pytest.mark.parametrize(
    ("old", "new"),
    [(torch.tensor(0.0), torch.tensor(-0.0)),
     (torch.full((3,), 1.5), torch.full((3,), 1.5).view(torch.int32))],
    ids=["a scalar's sign", "the dtype alone"],
)  # fmt: skip
def test_a_stale_weight_is_named_whatever_about_it_differs(old: torch.Tensor, new: torch.Tensor):
    def forward(params: Any, x: torch.Tensor) -> torch.Tensor:
        return x / params["w"]

    params, x = {"w": old}, torch.ones(2, 3)
    step = fg.graphify(forward, stage="x").bind(params).capture(batch=x, progress=False)
    params["w"] = new
    found = fg.bisect(step, x)
    assert (found.kind, found.op) == ("program", "aten.div.Tensor") and "params['w']" in found.what


@pytest.mark.sampled(0)
def test_compiled_code_is_named_by_the_op_of_its_first_wrong_result(
    recorder_name: str, device: Any
):
    params, state = toys.tally_params(device), toys.tally_state(device)
    fast = fg.graphify(
        toys.tally, donate="state", stage="batch", sizes=(4,), compile="pieces", verify=1.0
    )
    stage = fast.trace(params, state, limits=toys.LIMITS).split().lower().compile()
    assert stage.executable.compiled
    step = stage.capture(params, state, recorder=recorder_name, lazy=True)
    batch = toys.on(toys.batch(3), device)
    step(state, batch)
    assert step.stats.differences == 0 and not fg.bisect(step, batch).kind
    (piece,) = stage.executable.compiled
    whole = piece.artefacts[0].made
    wrong = whole._replace(call=off(whole.call))
    piece.artefacts[0] = dataclasses.replace(piece.artefacts[0], made=wrong)
    piece._known.clear()
    found = fg.bisect(step, batch)
    assert found.kind == "program" and "compiled code gives something else" in found.what
    assert found.line.startswith("tests/toys.py:")


def off(call: Any) -> Any:
    """Code whose float results are off."""
    return lambda *args: [x * 1.5 if x.is_floating_point() else x for x in call(*args)]


def test_graphs_that_are_damaged_themselves_are_named_by_their_key():
    """The program is right; so the tape is changed as a fault of memory would change a graph."""
    step, _, cache = made("tape", "cpu", verify=1.0)
    batch = toys.decode(4)
    step(cache, batch)
    (replay,) = step.replays.values()
    (recording,) = replay.calls
    at = [i for i, op in enumerate(recording.graph) if op.fn is aten.tanh.default][1]
    graph = list(recording.graph)
    graph[at] = TapeOp(aten.sin.default, *graph[at][1:])
    object.__setattr__(recording, "graph", tuple(graph))
    with pytest.warns(UserWarning, match="differ"):
        step(cache, batch)
        assert step.differences
    before = toys.clone(cache)
    found = fg.bisect(step, step.differences[0])
    assert found.kind == "graphs" and "step.recapture(BatchDescriptor(4, 4" in found.what
    toys.assert_trees(cache, before)
    step.recapture(replay.descriptor)
    assert not fg.bisect(step, batch).kind


def test_what_is_no_step_and_no_batch_of_it_is_refused():
    step, *_ = made("tape", "cpu", verify=1.0)
    fault = planted.one_bit("tape", "cpu", verify=1.0, lazy=True)
    with pytest.warns(UserWarning, match="differ"):
        fault.step(fault.cache, toys.decode(2))
        assert fault.step.differences
    with pytest.raises(fg.errors.TreeError, match="expected a step"):
        fg.bisect(toys.attend, toys.decode(2))  # type: ignore[arg-type]
    params, state = toys.tally_params(), toys.tally_state()
    other = fg.graphify(toys.tally, donate="state", stage="batch").bind(params)
    with pytest.raises(fg.errors.TreeError, match="another step's"):
        fg.bisect(
            other.capture(state, toys.LIMITS, progress=False, lazy=True), fault.step.differences[0]
        )
    with pytest.raises(fg.errors.TreeError, match="'spec' is a BatchSpec; got Tensor with None"):
        fg.bisect(step, toys.decode(2).token_ids)
    with pytest.raises(
        fg.errors.TreeError, match=r"got 1 difference. Pass one: .*differences\[0\]"
    ):
        fg.bisect(fault.step, fault.step.differences)
    with pytest.raises(TypeError, match=r"write fg.Verify\(within=0.1\)"):
        fg.bisect(step, toys.decode(2), within=0.1)  # type: ignore[arg-type]
    step.sleep()
    with pytest.raises(fg.errors.SleepError):
        fg.bisect(step, toys.decode(2))


def test_a_difference_keeps_the_batch_that_its_caller_writes_anew():
    step, params, cache = made("tape", "cpu", verify=1.0)
    params["head"] = params["head"] * 2
    batch = toys.batch((2, 1), 3, seed=5)
    with pytest.warns(UserWarning, match="differ"):
        step(cache, batch)
        assert step.differences
    (difference,) = step.differences
    before = str(fg.bisect(step, difference))
    batch.token_ids.zero_(), batch.slot_mapping.fill_(-1), batch.seq_lens.fill_(1)
    assert str(fg.bisect(step, difference)) == before


def in_place(params: Any, state: Any, batch: toys.Batch) -> Any:
    """Writes its state."""
    state["n"].add_(1)
    return params["w"][batch.token_ids] + state["n"], state


def test_what_forward_writes_in_place_is_not_the_state_that_was_kept():
    params, state = toys.tally_params(), {"n": torch.zeros(1)}
    fast = fg.graphify(in_place, donate="state", stage="batch", sizes=(4,), verify=1.0)
    step = fast.bind(params).capture(state, toys.LIMITS, progress=False)
    params["w"] = params["w"] + 1
    with pytest.warns(UserWarning, match="differ"):
        step(state, toys.batch(3))
        (difference,) = step.differences
    first, second = (fg.bisect(step, difference) for _ in range(2))
    assert first.kind == "program" and first.leaves == difference.leaves
    assert (second.leaves, str(second)) == (first.leaves, str(first))


@fg.struct
class Changed(toys.Batch):
    """Block tables that come by changed rows."""

    block_tables: torch.Tensor = fg.buffer("R B", "int32", pad=0, rows="changed")


def changed_rows(params: Any, cache: Any, batch: Changed) -> Any:
    """`attend`."""
    return toys.attend(params, cache, batch)


def test_a_batch_of_changed_rows_is_looked_at_and_the_step_s_table_stays_as_it_was():
    step, _, cache = made("tape", "cpu", forward=changed_rows)
    like = toys.decode(3)
    step(cache, Changed(**vars(like)))
    table = step.shared.tables.tables["block_tables"].data
    before = table.clone()
    rows = fg.ChangedRows(torch.tensor([1]), torch.tensor([[9, 10, 11]], dtype=torch.int32))
    slots = torch.tensor([3, 39, 27])
    batch = Changed(**{**vars(like), "block_tables": rows, "slot_mapping": slots})
    assert not fg.bisect(step, batch).kind and torch.equal(table, before)


def test_what_is_drawn_is_drawn_again_and_generators_stay_as_they_were():
    generator = torch.Generator().manual_seed(3)

    def noisy(w: Any, x: Any) -> Any:
        return x * w + torch.rand(x.shape, generator=generator)

    fast = fg.graphify(noisy, stage="x", generators=(generator,), recorder="tape")
    w, x = torch.rand(4), torch.rand(3, 4)
    fast(w, x)
    before = generator.get_state()
    (step,) = fast.steps
    assert (fg.bisect(step, x).kind, fg.bisect(step, x).leaves) == ("", ())
    assert torch.equal(generator.get_state(), before)


# which op within a piece


def parted(params: Any, state: Any, batch: toys.Batch) -> Any:
    """Ops in a row, of one result and of several; the state is read after it is written."""
    x_TE = params["w"][batch.token_ids]  # read
    one, other = x_TE.split(4, 1)  # split
    both = torch.cat([one, other * 2], 1)
    real_T = batch.slot_mapping >= 0
    seen = state["seen"].index_add(0, batch.token_ids, real_T.long())  # seen
    return both * seen[batch.token_ids, None], {"seen": seen, "total": state["total"] + 1}


def first_scaled(op: Any) -> Any:
    """The first of several results, off."""

    def call(*args: Any, **kwargs: Any) -> Any:
        first, *rest = op(*args, **kwargs)
        return [first.neg(), *rest]

    return call


def through_views(op: Any) -> Any:
    """A result off by one bit, by ops of which the trace has others of the same name behind it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        made = op(*args, **kwargs)
        made.view(torch.int32).mul(1), made.view(torch.int32).view(-1)[:1].bitwise_xor_(1 << 22)
        return made

    return call


@pytest.mark.parametrize(
    ("op", "mark", "other"),
    [
        ("aten.index.Tensor", "read", through_views),
        ("aten.split.Tensor", "split", first_scaled),
        ("aten.index_add_.default", "seen", lambda op: lambda x, *args: x),
        ("aten.index_add_.default", "seen", lambda op: lambda x, *args: op(op(x, *args), *args)),
    ],
    ids=["views", "list", "left out", "twice"],
)
def test_the_op_is_named_and_not_one_that_reads_what_it_made(op: str, mark: str, other: Any):
    params, state = toys.tally_params(), toys.tally_state()
    fast = fg.graphify(parted, donate="state", stage="batch", sizes=(4,))
    stage = fast.trace(params, state, limits=toys.LIMITS).split().lower().compile()
    stage = planted.with_other_op(stage, op, 0, other)
    step = stage.capture(params, state, recorder="tape", lazy=True)
    found = fg.bisect(step, toys.batch(3))
    lines, first = inspect.getsourcelines(parted)
    (at,) = [i for i, text in enumerate(lines) if text.endswith(f"# {mark}\n")]
    assert (found.op, found.line) == (op, f"tests/shadow/test_bisect.py:{first + at}")


def test_it_runs_under_the_callers_state_of_torch_whatever_the_last_call_came_under():
    params, cache = toys.attention_params(), toys.attention_cache()
    fast = fg.graphify(toys.attend, donate="cache", stage="batch", sizes=toys.SIZES, verify=1.0)
    step = fast.bind(params).capture(cache, toys.LIMITS, progress=False, lazy=True)
    batch = toys.decode(2)
    with torch.autocast("cpu", torch.bfloat16):
        step(cache, batch)
    assert not fg.bisect(step, batch).kind
    step(cache, batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fg.bisect(step, batch).kind
        params["head"] = params["head"] * 2
        with pytest.warns(UserWarning, match="differ"):
            step(cache, batch)
            (difference,) = step.differences
    with pytest.raises(fg.errors.AmbientError, match="Call bisect under the same"):
        fg.bisect(step, difference)
    with torch.autocast("cpu", torch.bfloat16):
        assert "params['head']" in fg.bisect(step, difference).what


@torch.library.custom_op("bisected::product", mutates_args=())
def product(x_TE: torch.Tensor, m_EF: torch.Tensor) -> torch.Tensor:
    """One whose kernel for four rows and more rounds otherwise, on every processor."""
    if len(x_TE) < 4:
        return x_TE @ m_EF
    return (x_TE.double() @ m_EF.double()).float()


@product.register_fake
def _(x_TE: torch.Tensor, m_EF: torch.Tensor) -> torch.Tensor:
    return x_TE.new_empty(x_TE.shape[0], m_EF.shape[1])


def left_by_rounding(params: Any, state: Any, batch: toys.Batch) -> Any:
    """Means of what has none."""
    x_TE = fg.trust_rows(product(params["w"][batch.token_ids], params["m"]))
    return (x_TE - x_TE.mean(-1, keepdim=True)).mean(-1, keepdim=True), {"n": state["n"] + 1}


def test_what_rounding_leaves_is_told_as_that():
    torch.manual_seed(0)
    params, state = {**toys.tally_params(), "m": torch.randn(8, 64)}, {"n": torch.zeros(1)}
    fast = fg.graphify(left_by_rounding, donate="state", stage="batch", sizes=(4, 16), verify=1.0)
    step = fast.bind(params).capture(state, toys.LIMITS, progress=False, lazy=True)
    with pytest.warns(UserWarning, match="differ"):
        for seed in range(20):
            step(state, toys.batch(3, seed=seed))
    found = fg.bisect(step, step.differences[0])
    assert (found.kind, found.op) == ("rounding", "") and "within=" in found.what
    params["m"] = params["m"] * 1.1
    assert fg.bisect(step, step.differences[0]).kind == "program"


def swapped(params: Any, state: Any, batch: toys.Batch) -> Any:
    """A state that has to be copied at the end."""
    new = {"a": state["b"] + 0.5, "b": state["a"] + 1}  # copied
    return params["w"][batch.token_ids], new


def test_a_copy_at_the_end_is_named_by_the_line_of_what_it_copies():
    params, state = toys.tally_params(), {"a": torch.ones(3), "b": torch.zeros(3)}
    fast = fg.graphify(swapped, donate="state", stage="batch", sizes=(4,))
    stage = fast.trace(params, state, limits=toys.LIMITS).split().lower().compile()
    stage = planted.with_other_op(stage, "aten.copy_.default", 0, lambda op: lambda x, *args: x)
    found = fg.bisect(stage.capture(params, state, recorder="tape", lazy=True), toys.batch(3))
    at = inspect.getsourcelines(swapped)[1] + 2
    assert (found.op, found.line) == ("aten.copy_.default", f"tests/shadow/test_bisect.py:{at}")


TURNED = {"neg": False}


def turning(params: Any, state: Any, batch: toys.Batch) -> Any:
    """A branch that goes by what is no argument."""
    x_TE = params["w"][batch.token_ids] + 1
    if TURNED["neg"]:
        x_TE = x_TE.neg()  # sometimes
    return x_TE, {"n": state["n"] + 1}


@pytest.mark.parametrize("traced", [False, True])
def test_an_op_that_forward_alone_or_its_trace_alone_has_is_named(
    traced: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(TURNED, "neg", traced)
    params, state = toys.tally_params(), {"n": torch.zeros(1)}
    fast = fg.graphify(turning, donate="state", stage="batch", sizes=(4,))
    step = fast.bind(params).capture(state, toys.LIMITS, progress=False)
    monkeypatch.setitem(TURNED, "neg", not traced)
    found = fg.bisect(step, toys.batch(3))
    at = inspect.getsourcelines(turning)[1] + 4
    assert (found.kind, found.op) == ("trace", "aten.neg.default")
    assert found.line == f"tests/shadow/test_bisect.py:{at}"
    assert ("any more" in found.what) is traced


def in_a_row(params: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2 * 3 * params["w"]
    z = y + 1
    z.mul_(2 if TURNED["neg"] else 3)  # turned
    return z - 1


def test_ops_of_one_line_are_told_apart_and_each_by_what_it_gave_before_it_was_written(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(TURNED, "neg", False)
    x = torch.ones(2, 3)
    step = fg.graphify(in_a_row, stage="x").bind({"w": torch.ones(3)}).capture(
        batch=x, progress=False
    )  # fmt: skip
    monkeypatch.setitem(TURNED, "neg", True)
    found = fg.bisect(step, x)
    at = inspect.getsourcelines(in_a_row)[1] + 3
    assert (found.kind, found.line) == ("trace", f"tests/shadow/test_bisect.py:{at}")


@fg.struct
class Ended:
    """Rows that go on as the last one."""

    at: torch.Tensor = fg.buffer("T", "int64", pad="last")
    spec: fg.BatchSpec = fg.host()


def multiplied(params: Any, state: Any, batch: Ended) -> Any:
    return params["w"][0] * batch.at[:, None], {"n": state["n"] + 1}


def test_padding_that_goes_on_as_the_last_row_is_what_its_field_says():
    params, state = toys.tally_params(), {"n": torch.zeros(1)}
    fast = fg.graphify(multiplied, donate="state", stage="batch", sizes=(4,))
    step = fast.bind(params).capture(state, toys.LIMITS, progress=False)
    for rows in ([3, 1, 7], [5]):
        batch = Ended(at=torch.tensor(rows), spec=fg.BatchSpec(len(rows), 1))
        assert str(fg.bisect(step, batch)).endswith("come to the same")
    params["w"] = params["w"] + 1
    found = fg.bisect(step, batch)
    assert "params['w']" in found.what and "batch.at" not in found.what


@pytest.mark.parametrize("forward", [toys.tally, toys.attend])
def test_a_key_whose_graphs_are_wrong_is_replayed_on_what_was_kept_and_all_is_put_back(
    forward: Any,
):
    made = {toys.tally: (toys.tally_params, toys.tally_state),
            toys.attend: (toys.attention_params, toys.attention_cache)}  # fmt: skip
    params, state = (make() for make in made[forward])
    fast = fg.graphify(forward, donate=1, stage="batch", sizes=toys.SIZES, verify=1.0)
    step = fast.bind(params).capture(state, toys.LIMITS, progress=False, lazy=True)
    for past in (0, 1, 2, 3):
        step(state, toys.decode(4, past, seed=past))
    (recording,) = next(iter(step.replays.values())).calls
    ops = (aten.mul.Tensor, aten.mul.out, aten.mm.default, aten.mm.out)
    at = [i for i, op in enumerate(recording.graph) if op.fn in ops][-1]
    graph, right = list(recording.graph), recording.graph[at].fn
    graph[at] = TapeOp(lambda *args, **kwargs: right(*args, **kwargs).mul_(1.5), *graph[at][1:])
    object.__setattr__(recording, "graph", tuple(graph))
    with pytest.warns(UserWarning, match="differ"):
        step(state, toys.decode(4, 4, seed=9))
        assert step.differences
    for past in (1, 2, 3, 4):
        step(state, toys.decode(4, past, seed=20 + past))
    before = toys.clone(state)
    (difference, *_) = step.differences
    found = fg.bisect(step, difference)
    assert found.kind == "graphs" and found.leaves == difference.leaves
    toys.assert_trees(state, before)
