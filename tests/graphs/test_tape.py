"""What the tape alone promises: poison, fixed addresses, an arena that merges, results as they are;
and what it refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from fngraph.errors import CaptureError
from fngraph.graphs.tape import shapes
from fngraph.graphs.tape.arena import POISON, Arena, subtract
from fngraph.torch_facts.names import tree_leaves

aten = torch.ops.aten


# --- poison ---------------------------------------------------------------------------------------


def test_outputs_are_poison_before_the_first_replay(tape):
    x = torch.ones(5)
    _, (f, b, i, m) = tape.record(lambda: (x + 1, x.bfloat16() + 1, x.long() + 1, x > 0))
    assert f.isnan().all() and b.isnan().all()
    assert i.tolist() == [-1] * 5 and m.view(torch.uint8).tolist() == [POISON] * 5


def test_memory_used_before_is_poison_again_before_the_first_replay(tape):
    x = torch.ones(5)
    first, out = tape.record(lambda: x + 1)
    first.replay()
    alias = tape.unowned(out)
    del out, first
    _, again = tape.record(lambda: x + 2)
    assert again.data_ptr() == alias.data_ptr() and again.isnan().all()


def test_dead_intermediates_are_poison_between_replays(tape):
    x, seen = torch.ones(100), []

    def fn() -> torch.Tensor:
        y = x + 1
        seen.append(tape.unowned(y))
        return (y * 2).sum()

    recording, out = tape.record(fn)
    for _ in range(2):
        recording.replay()
        assert out.item() == 400 and seen[0].isnan().all()


def test_live_outputs_are_not_poisoned_by_their_own_replay(tape):
    x = torch.ones(100)
    recording, outs = tape.record(lambda: [x + i for i in range(5)])
    recording.replay()
    recording.replay()
    assert [o[0].item() for o in outs] == [1, 2, 3, 4, 5]


def test_nan_flows_to_a_reader_of_expired_memory(tape):
    x, seen = torch.ones(100), []

    def first() -> torch.Tensor:
        expired = x + 1
        seen.append(tape.unowned(expired))
        return expired.sum()

    a, _ = tape.record(first)
    b, out = tape.record(lambda: seen[0] * 2 + 1)  # reads what is dead once `first` has run
    a.replay()
    b.replay()
    assert out.isnan().all()  # garbage on CUDA; "3" is what one would have hoped for


def test_a_replay_overwrites_a_later_recording_that_took_its_memory(tape):
    x, seen = torch.ones(100), []

    def first() -> torch.Tensor:
        temporary = x + 1
        seen.append(temporary.data_ptr())
        return temporary.sum()

    a, _ = tape.record(first)
    b, out = tape.record(lambda: x * 5)
    assert out.data_ptr() == seen[0]
    b.replay()
    assert out[0].item() == 5
    a.replay()  # uses its temporary memory, which is b's result
    assert out.isnan().all()


def test_inputs_are_never_poisoned(tape):
    x, state = torch.ones(100), torch.zeros(100)
    recording, _ = tape.record(lambda: (x + 1, state.add_(1))[0].sum())
    recording.replay()
    assert x.eq(1).all() and state.eq(1).all()


# --- addresses ------------------------------------------------------------------------------------


def test_addresses_are_fixed_for_every_call_of_the_tape(tape):
    x = torch.rand(3, 4)
    recording, out = tape.record(lambda: (x @ x.t()).softmax(-1).sum(0))

    def addresses() -> list[int]:
        tensors = tree_leaves(list(recording.graph))
        return [t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)]

    before = addresses()
    for _ in range(3):
        recording.replay()
        gc.collect()
    assert addresses() == before and out.data_ptr() in before


def test_views_vanish_from_the_tape_and_empty_runs_nothing(tape):
    x = torch.rand(3, 4)
    recording, _ = tape.record(
        lambda: torch.empty(4, 3).copy_(x.t().view(4, 3)[:, :].unsqueeze(0).squeeze(0))
    )
    assert [op.fn for op in recording.graph] == [aten.copy_.default]


def test_the_tape_prints_one_line_an_op(tape):
    x = torch.rand(3, 4)
    recording, _ = tape.record(lambda: (x @ x.t()) + 1)
    lines = recording.as_text().splitlines()
    assert len(lines) == len(recording.graph) == 2
    assert "mm" in lines[0] and "float32[3, 4]" in lines[0]
    assert "2 ops" in repr(recording)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(), lambda x: x.nonzero(), lambda x: 1 if x else 2,
        lambda x: aten.index.Tensor(x[None], [x[None].to(torch.uint8)]),
    ],
)  # fmt: skip
def test_a_refused_host_read_points_at_the_line_and_the_fix(tape, read: Any):
    x = torch.tensor(1.0)
    with pytest.raises(CaptureError, match=r"test_tape\.py:\d+.*torch\.where"):
        tape.record(lambda: read(x))


def test_a_write_of_something_elsewhere_is_refused(tape):
    x = torch.ones(2, device="meta")
    with pytest.raises(CaptureError, match=r"test_tape\.py:\d+.*meta"):
        tape.record(lambda: x + 1)


# --- results that torch's rules do not tell, or that are not there --------------------------------


def lstm(*args: Any, **kwargs: Any) -> nn.Module:
    return nn.LSTM(4, 3, *args, **kwargs)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), (3, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 4)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (3, 4)),
    "batch norm in eval": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(),
        (3, 4),
    ),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 5)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2)), (2, 2, 6, 6)),
    "convolution to more": (lambda: nn.ConvTranspose1d(4, 3, 2), (2, 4, 5)),
    "lstm": (lstm, (5, 2, 4)),
    "lstm both ways": (lambda: lstm(2, bidirectional=True, batch_first=True), (2, 5, 4)),
    "gru": (lambda: nn.GRU(4, 3), (5, 2, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (3, 2, 4)),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2,
                                    (torch.bfloat16, torch.float32)], ids=str)  # fmt: skip
@pytest.mark.parametrize("what", NETS)
def test_nets_and_their_gradients_replay_as_eager_runs_them(tape, what: str, dtypes: Any):
    """Masked gradients are undefined, a kernel's workspace has no size, and what a norm saves has a
    dtype of the device's choice. Only norms take weights of another dtype than their input's."""
    make, shape = NETS[what]
    net, x = make().to(dtypes[1]), torch.zeros(shape, dtype=dtypes[0])
    if dtypes[0] is not dtypes[1] and not what.endswith("norm"):
        net = net.to(dtypes[0])
    elif isinstance(net, nn.Sequential):
        net[0].to(dtypes[0])
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        own = params | {name: b.clone() for name, b in net.named_buffers()}
        out, *_ = tree_leaves(functional_call(net, own, (x,)))
        return out.float().pow(2).sum()

    step = torch.func.grad_and_value(loss)
    recording, got = tape.record(lambda: step(params, x))
    x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    recording.replay()
    with torch.no_grad():
        want = step(params, x)
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


@torch.library.custom_op("test_tape::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x[: len(x) // 2].clone()


@halved.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)  # wrong: twice as long


def test_a_result_that_is_not_what_its_rule_says_is_refused(tape):
    x = torch.ones(4)
    recording, _ = tape.record(lambda: halved(x) + 1)
    with pytest.raises(CaptureError, match=r"test_tape::halved.*gave float32\[2\].*float32\[4\]"):
        recording.replay()


def test_a_result_that_is_not_dense_is_refused(tape):
    x, at = torch.ones(4, 4), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(CaptureError, match=r"test_tape\.py:\d+.*sparse.*not dense"):
        tape.record(lambda: torch.sparse_coo_tensor(at, x, (4, 4), check_invariants=False))


def test_results_keep_the_memory_that_was_recorded(tape):
    x = torch.rand(3, 4)
    recording, (values, indices) = tape.record(lambda: torch.topk(x, 2))
    (op,) = recording.graph
    assert [t.data_ptr() for t in op.into] == [values.data_ptr(), indices.data_ptr()]


# --- torch's rules, asked once --------------------------------------------------------------------

INTS, SQUARE = torch.arange(3), torch.arange(9.0).view(3, 3)


ALIKE: dict[str, tuple[Callable[[], Any], ...]] = {  # and not the same
    "2, 2.0 and True": tuple(lambda n=n: (INTS > 1) * n for n in (2, 2.0, True)),
    "as many in a list": (lambda: torch.stack([INTS, INTS]), lambda: torch.stack([INTS] * 3)),
    "strides": (lambda: SQUARE + 1, lambda: SQUARE.t() + 1),
    "dtypes": (lambda: INTS + INTS, lambda: INTS.int() + INTS.int()),
    "keywords": tuple(lambda n=n: INTS.sum(0, dtype=n) for n in (torch.int32, torch.float32)),
    "several results": (lambda: SQUARE.sort(0), lambda: SQUARE.t()[:2].sort(0)),
}


@pytest.mark.parametrize("what", ALIKE)
@pytest.mark.parametrize("turn", [1, -1])
def test_arguments_that_are_nearly_alike_have_rules_of_their_own(tape, what, turn):
    for fn in ALIKE[what][::turn]:
        recording, got = tape.record(fn)
        recording.replay()
        for x, want in zip(tree_leaves(got), tree_leaves(fn()), strict=True):
            assert torch.equal(x, want) and x.dtype == want.dtype and x.stride() == want.stride()


def test_another_default_dtype_is_another_rule(tape):
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            recording, out = tape.record(lambda: INTS / 2)
            recording.replay()
            assert out.tolist() == [0, 0.5, 1] and out.dtype == dtype
    finally:
        torch.set_default_dtype(default)


def test_torch_s_rule_is_asked_once_and_another_s_each_time(tape, monkeypatch):
    asked = []
    as_computed = shapes.as_computed
    monkeypatch.setattr(
        shapes, "as_computed", lambda op, *rest: asked.append(op.name()) or as_computed(op, *rest)
    )
    rows = [3]  # what a rule of somebody's own may look at

    @torch.library.custom_op("test_tape::of_rows", mutates_args=())
    def of_rows(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(rows[0])

    @of_rows.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(rows[0])

    for rows[0] in (3, 4):
        recording, out = tape.record(lambda: of_rows(torch.full((11, 13), 7).abs()))
        recording.replay()
        assert out.tolist() == [1.0] * rows[0]
    assert asked.count("test_tape::of_rows") == 2 and asked.count("aten::abs") <= 1


# --- compiled code --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def artifact() -> Callable[[torch.Tensor], torch.Tensor]:
    """Two products, as Inductor makes them: the first one's memory is no op's."""
    from torch._inductor.compile_fx import compile_fx

    x = torch.ones(2, 2)
    return compile_fx(make_fx(lambda x: torch.mm(torch.mm(x, x), x))(x), [x])


def test_compiled_code_is_refused_with_the_line_and_the_fix(tape, artifact: Any):
    x = torch.ones(2, 2)
    with pytest.raises(CaptureError, match=r"test_tape\.py:\d+: a compiled function .*custom_op"):
        tape.record(lambda: artifact(x))
    assert artifact(x).eq(4).all()  # it runs elsewhere
    recording, out = tape.record(lambda: torch.mm(x, x))
    recording.replay()
    assert out.eq(2).all()  # and the tape goes on


def test_compiled_code_within_an_op_is_one_op(tape, artifact: Any):
    @torch.library.custom_op("test_tape::compiled", mutates_args=())
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return artifact(x)

    compiled.register_fake(torch.empty_like)
    x = torch.ones(2, 2)
    recording, out = tape.record(lambda: compiled(x))
    x.fill_(2)
    recording.replay()
    assert out.eq(32).all() and len(recording.graph) == 1


def test_a_function_under_torch_compile_is_recorded_as_it_is_written(tape):
    double = torch.compile(lambda x: x * 2 + 1, backend="eager")
    x = torch.ones(3)
    with torch.no_grad():
        double(x)  # compiled by now
    recording, out = tape.record(lambda: double(x))
    x.fill_(4)
    recording.replay()
    assert out.eq(9).all() and len(recording.graph) == 2


# --- the arena ------------------------------------------------------------------------------------


def byte_set(ranges: Any) -> set[int]:
    """Every address in (address, bytes) ranges."""
    return {a for start, size in ranges for a in range(start, start + size)}


def check(arena: Arena, tensors: dict[int, torch.Tensor]) -> None:
    """What must hold of an arena at any time."""
    chunks = sorted((c.data_ptr(), c.numel()) for c in arena.chunks)
    blocks = sorted([*arena.free, *arena.live.items()])
    starts = {start for start, _ in chunks}
    assert arena.free == sorted(arena.free)
    for (a, size), (b, _) in pairwise(blocks):
        assert a + size <= b, "blocks overlap"
    for (a, size), (b, _) in pairwise(arena.free):
        assert a + size < b or b in starts, "adjacent free blocks were not merged"
    assert sum(size for _, size in blocks) == arena.nbytes == sum(n for _, n in chunks)
    assert sorted(arena.live) == sorted(t.untyped_storage().data_ptr() for t in tensors.values())


def test_blocks_of_two_chunks_stay_apart():
    """Wherever the chunks are: they may touch."""
    arena, memory = Arena(), torch.zeros(192, dtype=torch.uint8)
    start = memory.data_ptr()
    arena.chunks = list(memory.split(64))
    for order in ((0, 64, 128), (128, 64, 0), (64, 0, 128)):
        arena.free = []
        for place in order:
            arena._give(start + place, 64)
        assert arena.free == [(start, 64), (start + 64, 64), (start + 128, 64)]


STEPS = st.lists(
    st.tuples(
        st.booleans(), st.integers(0, 30), st.sampled_from([1, 7, 64, 1000, 300_000, 2_000_000])
    ),
    max_size=40,
)  # fmt: skip


@settings(deadline=None, max_examples=60, database=None)
@given(STEPS)
def test_an_arena_never_hands_out_the_same_byte_twice_and_merges_what_comes_back(steps):
    arena, tensors, serial = Arena(), {}, 0
    for take, pick, size in steps:
        if take or not tensors:
            tensors[serial] = arena.empty((size,), (1,), torch.uint8).fill_(serial % 251)
            serial += 1
        else:
            del tensors[sorted(tensors)[pick % len(tensors)]]
        check(arena, tensors)
    assert all(tensor.eq(number % 251).all() for number, tensor in tensors.items())
    tensors.clear()
    check(arena, {})
    assert len(arena.free) == len(arena.chunks)  # all of it merged again


@settings(deadline=None, max_examples=30, database=None)
@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=20))
def test_an_arena_that_gets_everything_back_does_not_grow(sizes: list[int]):
    arena, held = Arena(), []
    for _ in range(3):
        tensors = [arena.empty((n,), (1,), torch.uint8) for n in sizes]
        held.append(arena.nbytes)
        del tensors
    assert held == held[:1] * 3 and not arena.live


def test_the_smallest_block_that_fits_is_reused():
    arena = Arena()
    tensors = [arena.empty((n,), (1,), torch.uint8) for n in (640, 64, 320, 64, 128, 64)]
    addresses = [t.data_ptr() for t in tensors]
    tensors[0] = tensors[2] = tensors[4] = None
    assert arena.empty((100,), (1,), torch.uint8).data_ptr() == addresses[4]


def test_neighbours_merge_on_both_sides():
    arena = Arena()
    a, b, c, keep = (arena.empty((640,), (1,), torch.uint8) for _ in range(4))
    first = a.data_ptr()
    del a, c
    assert len(arena.free) == 3
    del b
    assert arena.free[0] == (first, 3 * 640) and keep.numel() == 640


def test_a_view_keeps_its_block_and_the_last_one_gives_it_back():
    arena = Arena()
    x = arena.empty((4, 6), (6, 1), torch.float32)
    view = x[1:, ::2].t()
    del x
    assert arena.live
    del view
    assert not arena.live


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((), ()), ((3,), (1,)), ((3, 4), (1, 3)), ((2, 3), (0, 1)), ((2, 3), (9, 2)), ((0,), (1,))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.bfloat16])
def test_a_block_has_the_shape_the_strides_and_the_room(shape, stride, dtype):
    arena = Arena()
    x = arena.empty(shape, stride, dtype)
    assert (tuple(x.shape), x.stride(), x.dtype) == (shape, stride, dtype)
    if x.numel():
        end = x.data_ptr() + (1 + sum((n - 1) * s for n, s in zip(shape, stride))) * dtype.itemsize
        (address, size), = arena.live.items()  # fmt: skip
        assert x.data_ptr() == address and end <= address + size and address % 64 == 0


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 15)), max_size=6)


@settings(deadline=None, database=None)
@given(RANGES, RANGES)
def test_subtract_is_a_difference_of_sets(ranges, holes):
    left = subtract(ranges, holes)
    assert byte_set(left) == byte_set(ranges) - byte_set(holes)
    assert all(size > 0 for _, size in left)


@settings(deadline=None, max_examples=50, database=None)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 100)), max_size=6))
def test_windows_cover_their_ranges_and_nothing_else(spans):
    arena = Arena()
    whole = arena.empty((1000,), (1,), torch.uint8).fill_(0)
    base = whole.data_ptr()
    for window in arena.windows([(base + start, size) for start, size in spans]):
        window += 1  # once each: windows are disjoint
    want = byte_set(spans)
    assert [i for i, x in enumerate(whole.tolist()) if x] == sorted(want)
    assert set(whole.tolist()) <= {0, 1}
