"""`guards=True`: padding and expired results are poisoned; a use that can be seen is an error."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import steps
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.core import trees
from fngraph.errors import StaleError, TreeError
from fngraph.graphs.loans import Borrowed, poison
from fngraph.torch_facts.names import DisableTorchFunctionSubclass

LIMITS = fg.Limits(max_tokens=8, max_reqs=4)
MODES = ["FULL", "PIECEWISE", "NONE"]


@fg.struct
class Batch:
    """T rows of x, of which each other field is a kind of pad."""

    x: Tensor = fg.buffer("T 2", "float32")
    half: Tensor = fg.buffer("T", "bfloat16")
    ids: Tensor = fg.buffer("T", "int32", min=1)
    flags: Tensor = fg.buffer("T", "bool")
    said: Tensor = fg.buffer("T", "float32", pad=0.5)
    slots: Tensor = fg.buffer("T", "int64", pad=-1)
    starts: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    weights: Tensor = fg.buffer("4", "float32")
    spec: fg.BatchSpec = fg.host()


def batch(T: int, device: Any = "cpu", value: float = 1.0) -> Batch:
    """A batch of one request; ids are 1 to T."""
    made = Batch(
        torch.full((T, 2), value), torch.full((T,), value).bfloat16(),
        torch.arange(1, T + 1).int(), torch.ones(T, dtype=torch.bool), torch.full((T,), value),
        torch.arange(T), torch.tensor([0, T]).int(), torch.ones(4), fg.BatchSpec(T, 1),
    )  # fmt: skip
    moved = {name: getattr(made, name).to(device) for name in fg.core.buffers_of(Batch)}
    return Batch(**moved, spec=made.spec)


def rows(table: Any, batch: Batch) -> Any:
    """Row by row."""
    y = table[batch.ids.long()] * batch.x[:, :1] + batch.half[:, None] + batch.weights.sum()
    z = torch.where(batch.flags, batch.said + batch.slots, 0.0)
    return {"y": y, "rest": [z, (batch.starts[1:] + 1, batch.ids + 1)]}


def simple(table: Any, batch: Batch) -> Any:
    """Floats and ints, row by row."""
    return table[batch.ids.long()] * batch.x[:, :1] + batch.half[:, None], batch.ids * 2


def table(device: Any) -> Tensor:
    """Of 9 rows: the ids of a batch of 8 fit."""
    return torch.arange(18.0, device=device).view(9, 2)


def make(fn: Any, device: Any, recorder: Any, modes: str = "FULL", **options: Any) -> Any:
    """A guarded step."""
    options = {"outputs": "borrow", "guards": True} | options
    fast = fg.graphify(fn, stage="batch", modes=modes, sizes=(4, 8))
    bound = fast.bind(table(device))
    return bound.capture(LIMITS, progress=False, recorder=recorder, **options)


def static(step: Any, name: str) -> Tensor:
    """A static buffer."""
    paths = [planned.path for planned in step.main.static.buffer_plan.buffers]
    return step.main.static.tensors[paths.index(f"batch.{name}")]


# --- padding --------------------------------------------------------------------------------------


def test_padding_is_poisoned_where_no_pad_is_declared(recorder_name, device):
    step = make(simple, device, recorder_name)
    for T in (8, 3, 2, 4):
        step(batch(T, device, value=2.0))
        for name in ("x", "half"):
            leaf = static(step, name)[: 4 if T <= 4 else 8]
            assert (leaf[:T] == 2).all() and leaf[T:].isnan().all()
        top = 4 if T <= 4 else 8
        assert static(step, "ids")[:top].tolist() == [*range(1, T + 1)] + [T] * (top - T)
        assert static(step, "flags")[:top].all()
        assert static(step, "said")[T:top].tolist() == [0.5] * (top - T)
        assert static(step, "slots")[T:top].tolist() == [-1] * (top - T)
        assert static(step, "starts")[:2].tolist() == [0, T]
        assert static(step, "weights").tolist() == [1] * 4


LIES = {
    "of another length": (
        dict(query_len=2),
        "request 0 brings 3 tokens, from 0 .* at most 2",
    ),
    "longer than the bound": (dict(host=fg.HostBounds(2, 9)), "request 0 brings 3 .* at most 2"),
}


@fg.struct
class Packed:
    """Sequences, of which a token is two rows."""

    x: Tensor = fg.buffer("T 2 4", "float32")
    starts: Tensor = fg.buffer("R + 1", "int32", pad="last")
    spec: fg.BatchSpec = fg.host()


def packed(params: Any, batch: Packed) -> Tensor:
    """Attention over each sequence's rows."""
    x = batch.x.flatten(0, 1).unsqueeze(1)
    return fg.ops.varlen_attention(x, x, x, batch.starts)


@pytest.mark.parametrize(
    "starts, says",
    [([0, 2, 6], None), ([0, 6, 2], r"falls from 6 to 2, at \[2\]. Offsets begin with 0 and"),
     ([0, 2, 9], "ends at 9, and what it divides has 6 rows")],
)  # fmt: skip
def test_offsets_that_repeat_their_last_are_looked_at_too(starts: list[int], says: str | None):
    """By the rows that the primitive is given with them, which T does not say."""
    fast = fg.graphify(packed, stage="batch", sizes=(4, 8), guards=True, recorder="tape")
    step = fast.bind({}).capture(fg.Limits(8, 4), progress=False)
    offsets = torch.tensor(starts, dtype=torch.int32)
    batch = Packed(torch.randn(3, 2, 4), offsets, fg.BatchSpec(3, 2))
    if says is None:
        torch.testing.assert_close(step(batch), packed({}, batch))
        return
    with pytest.raises(TreeError, match=f"batch.starts {says}"):
        step(batch)


@pytest.mark.parametrize("what", LIES)
def test_offsets_that_the_spec_denies_are_refused(what: str):
    """Of which backends made wrong numbers."""
    said, text = LIES[what]
    params, cache = toys.attention_params(1), toys.attention_cache(1)
    fast = fg.graphify(toys.attend, donate="cache", stage="batch", sizes=(4, 8), guards=True,
                       recorder="tape", backends={"attention": "sdpa"})  # fmt: skip
    step = fast.bind(params).capture(cache, toys.LIMITS, progress=False)
    right = toys.batch(3, 1)
    want = step(cache, right)[0].clone()
    with pytest.raises(TreeError, match=rf"batch.query_start_loc: {text}"):
        step(cache, dataclasses.replace(right, spec=fg.BatchSpec(4, 2, **said)))
    short = dataclasses.replace(right, query_start_loc=torch.tensor([0, 3, 5], dtype=torch.int32))
    with pytest.raises(TreeError, match=r"batch.query_start_loc ends at 5, and .* has 4 tokens"):
        step(cache, short)
    toys.assert_trees(step(cache, right)[0], want)


def test_a_number_below_its_fields_min_is_refused(recorder_name, device):
    step = make(simple, device, recorder_name)
    bad = batch(3, device)
    bad.ids[1] = 0
    with pytest.raises(TreeError, match=r"batch.ids: declared with min=1, and this batch has 0"):
        step(bad)
    assert (step(batch(3, device))[1] == torch.tensor([2, 4, 6], device=device)).all()


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("outputs", ["own", "borrow"])
def test_what_is_right_stays_right(recorder_name, device, modes: str, outputs: str):
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    fast = fg.graphify(
        toys.attend, donate="cache", stage="batch", modes=modes, sizes=toys.SIZES, guards=True,
        outputs=outputs, recorder=recorder_name,
    )  # fmt: skip
    step = fast.bind(params).capture(cache, toys.LIMITS, progress=False)
    for given in (toys.batch(3, 2), toys.decode(3, seed=1), toys.batch(5, 4, 1), toys.batch(1)):
        given = toys.on(given, device)
        want, after = toys.bare(toys.attend, params, cache, given)
        got, back = step(cache, given)
        assert back is cache and (type(got) is Borrowed) is (outputs == "borrow")
        toys.assert_trees((got, cache), (want, after), **toys.CLOSE)


def summed(table: Any, batch: Batch) -> Any:
    """Relies on padding of x being 0, as nobody declared, and of ids too; not on that of half."""
    counted_T = (batch.ids != 0).float()
    return batch.x.sum(0), (batch.half.float() * 2), counted_T.sum()


def test_a_pad_that_the_trace_relies_on_is_kept(recorder_name, device):
    step = make(summed, device, recorder_name)
    for T in (8, 3):
        total, _, number = step(batch(T, device))
        assert total.tolist() == [T, T] and number == T
        assert static(step, "half")[T:4].isnan().all() and not static(step, "x")[T:4].any()


def trusted(table: Any, batch: Batch) -> Any:
    """Says that it keeps its rows, and does not."""
    return batch.x - fg.trust_rows(batch.x.mean(0))


def test_a_promise_that_is_not_kept_shows(recorder_name, device):
    plain = make(trusted, device, recorder_name, guards=False)
    step = make(trusted, device, recorder_name)
    assert plain(batch(3, device)).isfinite().all()  # and wrong: the mean is over 4
    assert step(batch(3, device)).isnan().all()


# --- borrowed results -----------------------------------------------------------------------------


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_next_call_expires_what_was_borrowed(recorder_name, device, modes: str, mode: Any):
    step = make(simple, device, recorder_name, modes)
    with mode():
        first, doubled = step(batch(3, device))
        kept, plain = first.clone(), first.as_subclass(Tensor)
        ints, view, computed = doubled.as_subclass(Tensor), first[1:].t(), first + 1
        assert type(kept) is type(computed) is Tensor and type(view) is Borrowed
        want, _ = simple(table(device), batch(3, device))
        assert torch.equal(kept, want) and torch.equal(view, want[1:].t())
        step(batch(5, device))
        for stale in (first, view, doubled, first.shape and view):
            with pytest.raises(StaleError, match=r"simple \(call 1 of .*simple \(call 2 .*clone"):
                stale + 1
        uses = (first.tolist, first.sum, first.clone, lambda: first[0], lambda: first.add_(1),
                lambda: torch.cat([kept, first]), lambda: kept.copy_(first), first.cpu,
                lambda: torch.add(kept, kept, out=first))  # fmt: skip
        for use in uses:
            with pytest.raises(StaleError):
                use()
        assert first.shape == (3, 2) and first.dtype is torch.float32 and len(first) == 3
        assert repr(first) == "<a borrowed result that has expired>"
        assert torch.equal(computed, want + 1) and torch.equal(kept, want)
        if modes == "NONE":  # a tensor of its own, which nothing else would have overwritten
            assert plain.isnan().all() and (ints == torch.iinfo(torch.int32).min).all()


def test_poison_is_there_before_new_results_are_written(recorder_name, device):
    step = make(simple, device, recorder_name)
    first, doubled = step(batch(7, device))
    plain, ints = first.as_subclass(Tensor), doubled.as_subclass(Tensor)
    step(batch(1, device))  # of a smaller key, which writes 4 rows
    assert plain[4:].isnan().all() and (ints[4:] == torch.iinfo(torch.int32).min).all()


def test_a_failing_call_has_expired_results_too(recorder_name, device):
    step = make(simple, device, recorder_name)
    first, _ = step(batch(3, device))
    with pytest.raises(TreeError):
        step(Batch(*[torch.zeros(1)] * 8, spec=fg.BatchSpec(3, 1)))
    with pytest.raises(StaleError):
        first + 1
    second, _ = step(batch(3, device))
    assert torch.equal(second, simple(table(device), batch(3, device))[0])


@pytest.mark.parametrize("modes", MODES)
def test_a_borrowed_result_may_be_the_next_calls_input(recorder_name, device, modes: str):
    step = make(simple, device, recorder_name, modes)
    first, _ = step(batch(3, device))
    want, _ = simple(table(device), batch(3, device))
    for leaf in ("x", "half"):
        given = batch(3, device)
        new = first if leaf == "x" else first[:, 0].bfloat16()
        object.__setattr__(given, leaf, new)
        expected = batch(3, device)
        object.__setattr__(expected, leaf, want if leaf == "x" else want[:, 0].bfloat16())
        want, _ = simple(table(device), expected)
        first, _ = step(given)
        assert torch.equal(first, want)
    object.__setattr__(given, "x", first)
    step(batch(2, device))
    with pytest.raises(StaleError):
        step(given)


@pytest.mark.parametrize("modes", MODES)
def test_a_plain_alias_of_a_borrowed_result_may_be_an_input_too(recorder_name, device, modes: str):
    """Which its type does not tell, as its memory does."""
    step = make(simple, device, recorder_name, modes)
    y, _ = step(batch(3, device))
    with DisableTorchFunctionSubclass():
        alias = y.as_subclass(Tensor)
    want = torch.clone(alias)
    assert type(alias) is Tensor and alias.data_ptr() == y.data_ptr()
    got, _ = step(dataclasses.replace(batch(3, device), x=alias))
    torch.testing.assert_close(
        torch.clone(got), simple(table(device), dataclasses.replace(batch(3, device), x=want))[0]
    )


def test_exact_shapes_are_guarded_too(recorder_name, device):
    double = fg.graphify(
        lambda x: x * 2, stage="x", outputs="borrow", guards=True, recorder=recorder_name
    )
    first = double(torch.ones(3, device=device))
    second = double(first)  # as an input it is read before it expires
    assert second.tolist() == [4, 4, 4]
    third = double(torch.ones(2, device=device))  # another key of the same pool
    for stale in (first, second):
        with pytest.raises(StaleError):
            stale.tolist()
    assert third.tolist() == [2, 2]
    assert double(third[:1]).tolist() == [4]


def test_owned_results_never_expire(recorder_name, device):
    step = make(simple, device, recorder_name, outputs="own")
    first, _ = step(batch(3, device))
    step(batch(4, device))
    assert type(first) is Tensor
    assert torch.equal(first, simple(table(device), batch(3, device))[0])


def test_without_guards_nothing_is_poisoned(recorder_name, device):
    step = make(simple, device, recorder_name, guards=False)
    first, _ = step(batch(3, device))
    step(batch(2, device))
    assert type(first) is Tensor and not static(step, "x").isnan().any()


def product(table: Any, batch: Batch) -> Tensor:
    """Another trace under autocast."""
    return batch.x @ table.T


def test_a_step_of_another_ambient_state_is_guarded(recorder_name, device):
    step = make(product, device, recorder_name)
    first = step(batch(3, device))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        second = step(batch(3, device))
    assert type(second) is Borrowed and second.dtype is torch.bfloat16
    with pytest.raises(StaleError):
        first + 1


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int64, torch.bfloat16, torch.float64,
     torch.complex64, torch.float8_e4m3fn],
)  # fmt: skip
def test_poison_of_every_kind(device, dtype: torch.dtype):
    x = torch.zeros(3, device=device).to(dtype)
    poison(x)
    if dtype.is_floating_point or dtype.is_complex:
        assert x.to(torch.complex64 if dtype.is_complex else torch.float32).isnan().all()
    else:
        assert x.bool().all() and x.unique().numel() == 1


def test_views_expire_through_every_kind_of_view(device):
    loans = fg.graphs.recorders.make_recorder(None, torch.device("cpu")).loans
    (x,) = loans.lend("f", [torch.zeros(4, 2)])
    views = [x[0], x[0, 0], x.view(-1), x.split(2)[1], *x.unbind(1), x.detach(), x.T, x.real]
    assert all(type(v) is Borrowed for v in views)
    loans.begin("g")
    for view in views:
        with pytest.raises(StaleError, match=r"f .*g "):
            view.sum()


def test_rebind_keeps_the_guards(recorder_name, device):
    step = make(simple, device, recorder_name)
    step.rebind(table=table(device).double())
    first, _ = step(batch(3, device))
    assert first.dtype is torch.float64 and static(step, "x")[3:4].isnan().all()
    step(batch(3, device))
    with pytest.raises(StaleError):
        first + 1


def test_the_tree_of_results_is_the_same(recorder_name, device):
    step = make(rows, device, recorder_name)
    got, want = step(batch(3, device)), rows(table(device), batch(3, device))
    assert trees.flatten(got)[1] == trees.flatten(want)[1]
    for a, b in zip(toys.leaves(got), toys.leaves(want)):
        torch.testing.assert_close(a.clone(), b)


def test_a_guarded_step_prints_as_a_step_does(recorder_name, device):
    step = make(simple, device, recorder_name)
    assert repr(step).startswith("Step(") and len(repr(step)) < 200


@pytest.mark.parametrize("by", ["sleep", "times"])
def test_what_a_step_does_to_its_outputs_between_calls_expires_them(recorder_name, device, by: str):
    made = steps.make(recorder_name, device, outputs="borrow", guards=True)
    other = steps.make(
        recorder_name, device, outputs="borrow", guards=True, recorder=made.step.recorder
    )
    batch = toys.on(toys.batch(3, 2), device)
    for step, is_mine in ((made.step, True), (other.step, False)):
        result, _ = step(made.state if is_mine else other.state, batch)
        kept = result.clone()
        if by == "sleep":
            made.step.sleep()
            made.step.wake()
        else:
            made.step.times(made.step.dispatch(batch.spec).descriptor)
        if is_mine:
            with pytest.raises(StaleError, match=rf"{by}\(\) has expired it"):
                result + 1
        else:  # memory of its own
            assert torch.equal(result, kept)
