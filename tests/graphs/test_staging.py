"""Unpacking: true rows are copied in, the key's further rows get the field's padding, no others.

Where Triton interprets (tests/ops/test_triton_interpreter.py runs this file so), its kernels do it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.core import Buffer, plan_buffers
from fngraph.core.buffers import parse_dims
from fngraph.errors import TreeError
from fngraph.graphs.staging.buffers import (
    StaticBuffers,
    allocate,
    check_leaves,
    padding_rows,
    true_sizes,
)
from fngraph.graphs.staging.ring import make_ring
from fngraph.graphs.staging.unpack import unpacker, words_of
from fngraph.ops.triton.launching import interpreted
from fngraph.shadow.sides import declared

TOP = {"T": 16, "R": 6, "B": 3}


def buffers(**fields: tuple[Any, ...]) -> StaticBuffers:
    """Static buffers of (dims, dtype[, pad]) fields, for keys up to `TOP`."""
    declared = {n: Buffer(parse_dims(f[0]), *f[1:]) for n, f in fields.items()}
    return allocate(plan_buffers(declared, TOP), torch.device("cpu"))


def stage(
    static: StaticBuffers,
    leaves: list[Any],
    true: Any,
    sizes: Any,
    query_len: int,
    ring: Any = None,
) -> None:
    """Hand a batch over, and run the node of a key of `sizes`."""
    ring = ring or make_ring(static.buffer_plan, static.tensors[0].device)
    ring.put(words_of(static.buffer_plan, true, query_len), leaves)
    unpack(static, ring, sizes)


def unpack(static: StaticBuffers, ring: Any, sizes: Any) -> None:
    """The node of a key of `sizes`: as the CPU runs it, or by the kernels of CUDA, interpreted."""
    node: Any = unpacker(static, ring, sizes)
    if not interpreted():
        node()
        return
    from fngraph.graphs.staging.unpack_triton import launch

    table, words, state, _, nbytes = node.args
    launch(table, words, state, nbytes)


def scribble(static: StaticBuffers, value: int = 77) -> None:
    """Make every row recognisable."""
    for tensor in static.tensors:
        tensor.fill_(value)


def key(T: int, R: int) -> dict[str, int]:
    """Sizes of a key."""
    return {"T": T, "R": R, "B": 3}


# --- pad rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "pad", "leaf"),
    [
        ("int64", 0, [5, 6, 7]),
        ("int64", -1, [5, 6, 7]),
        ("int32", 3, [5, 6, 7]),
        ("bool", True, [False, False, False]),
        ("bool", False, [True, True, True]),
        ("float32", 0.5, [1.5, 2.5, 3.5]),
        ("bfloat16", float("-inf"), [1.5, 2.5, 3.5]),
        ("uint8", 255, [1, 2, 3]),
        ("uint8", 7, [1, 2, 3, 4]),  # whole words of 4 bytes, which CUDA pads at a time
        ("bool", True, [False] * 4),
        ("bfloat16", 0.5, [1.5, 2.5, 3.5, 4.5]),
        ("float16", float("-inf"), [1.5, 2.5]),
    ],
)
def test_rows_beyond_the_batch_are_filled_with_pad(dtype: str, pad: Any, leaf: list[Any]):
    static = buffers(x=("T", dtype, pad))
    scribble(static)
    stage(
        static, [torch.tensor(leaf, dtype=getattr(torch, dtype))], key(len(leaf), 1), key(8, 4), 0
    )
    assert static.tensors[0][:8].tolist() == leaf + [pad] * (8 - len(leaf))


@pytest.mark.parametrize("pad", [-1, "stride", "last"])
@pytest.mark.parametrize("query_len", [0, 3])
@pytest.mark.parametrize("reqs", [0, 2])
def test_torchs_ops_pad_as_the_node_does(pad: Any, query_len: int, reqs: int):
    static = buffers(x=("R + 1", "int32", pad))
    field, true = static.buffer_plan.buffers[0].buffer, key(3 * reqs + 1, reqs)
    leaf = 3 * torch.arange(reqs + 1, dtype=torch.int32) + 1
    stage(static, [leaf], true, TOP, query_len)
    assert declared(field, leaf, TOP, true["T"], query_len).tolist() == static.tensors[0].tolist()
    ring = make_ring(static.buffer_plan, torch.device("cpu"))
    ring.put_padding(static.buffer_plan, query_len)
    unpack(static, ring, TOP)
    assert padding_rows(field, (7,), 0, query_len, "cpu").tolist() == static.tensors[0].tolist()


def test_rows_beyond_the_key_are_left_alone():
    static = buffers(x=("T", "int64", -1), y=("R B", "int32", 0), z=("R + 1", "int32", "stride"))
    scribble(static)
    leaves = [torch.tensor([5, 6]), torch.ones(2, 3).int(), torch.tensor([0, 1, 2]).int()]
    stage(static, leaves, key(2, 2), key(4, 3), 0)
    x, y, z = static.tensors
    assert x.tolist() == [5, 6, -1, -1] + [77] * 12
    assert y.tolist() == [[1] * 3] * 2 + [[0] * 3] + [[77] * 3] * 3
    assert z.tolist() == [0, 1, 2, 2] + [77] * 3


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("apart", [False, True], ids=["in words", "by bytes"])
@pytest.mark.parametrize("leaf", [[0, 3, 1 << 20], [0], [0, -5, -7, -9], list(range(11))], ids=len)
def test_the_last_one_is_repeated(dtype: str, apart: bool, leaf: list[int]):
    static = buffers(x=("T", "uint8", 0), z=("T + 1", dtype, "last"))
    scribble(static)
    given = torch.tensor(leaf, dtype=getattr(torch, dtype))
    if apart:  # at an address that 4 does not divide
        held = torch.zeros(given.nbytes + 1, dtype=torch.uint8)[1:]
        given = held.copy_(given.view(torch.uint8)).view(torch.uint8)
    T = len(leaf) - 1
    ring = make_ring(static.buffer_plan, static.tensors[0].device)
    stage(static, [torch.zeros(T, dtype=torch.uint8), given], key(T, 1), key(12, 4), 0, ring)
    z = static.tensors[1]
    assert z[:13].tolist() == leaf + [leaf[-1]] * (12 - T) and (z[13:] == 77).all()
    ring.put_padding(static.buffer_plan, 0)
    unpack(static, ring, key(12, 4))
    assert not z[:13].any() and (z[13:] == 77).all()


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_large_leaves_are_unpacked_whole(dtype: str):
    wide = 100_003  # elements of a row
    static = buffers(x=(f"T {wide}", dtype, 3), y=("T", "int64", -1))
    scribble(static)
    rows = (torch.arange(14 * wide) % 251).view(14, wide).to(getattr(torch, dtype))
    stage(static, [rows, torch.arange(14)], key(14, 1), key(15, 4), 0)
    x, y = static.tensors
    assert torch.equal(x[:14], rows) and (x[14] == 3).all() and (x[15] == 77).all()
    assert y.tolist() == [*range(14), -1, 77]


@fg.struct
class Wide:
    """Rows of 4 MB."""

    x: torch.Tensor = fg.buffer("T 1000000", "float32")
    spec: fg.BatchSpec = fg.host()


@pytest.mark.gpu
def test_a_leaf_may_be_of_any_size(device: str = "cuda"):
    fast = fg.graphify(lambda batch: batch.x.amax(-1), modes="FULL", stage="batch", sizes=(24,))
    batch = Wide(torch.rand(23, 1_000_000, device=device), fg.BatchSpec(23, 23))
    assert torch.equal(fast(batch), batch.x.amax(-1))  # 96 MB of the key
    assert fast.stats.share("FULL") == 1


def test_a_batch_as_large_as_the_key_gets_no_padding():
    static = buffers(x=("T", "int64", -1), z=("R + 1", "int32", "stride"))
    scribble(static)
    stage(static, [torch.arange(4), torch.tensor([0, 4]).int()], key(4, 1), key(4, 1), 0)
    assert static.tensors[0].tolist() == [0, 1, 2, 3] + [77] * 12
    assert static.tensors[1].tolist() == [0, 4] + [77] * 5


def test_what_an_earlier_larger_batch_left_is_padded_over():
    static = buffers(x=("T", "int64", -1), y=("R B", "int32", 9))
    stage(static, [torch.arange(16), torch.arange(18).view(6, 3).int()], key(16, 6), key(16, 6), 0)
    stage(static, [torch.tensor([5]), torch.ones(1, 3).int()], key(1, 1), key(4, 4), 1)
    assert static.tensors[0][:4].tolist() == [5, -1, -1, -1]
    assert static.tensors[1][:4].tolist() == [[1] * 3] + [[9] * 3] * 3


@pytest.mark.parametrize(
    ("starts", "T", "R", "query_len", "want"),
    [
        # mixed keys repeat the last offset: padding requests are empty
        ([0, 3, 4], 8, 5, 0, [0, 3, 4, 4, 4, 4]),
        ([0, 3, 4], 8, 2, 0, [0, 3, 4]),
        # uniform keys go on with stride query_len: every request has its tokens
        ([0, 1, 2], 5, 5, 1, [0, 1, 2, 3, 4, 5]),
        ([0, 3, 6], 12, 4, 3, [0, 3, 6, 9, 12]),
        ([0, 2], 2, 1, 2, [0, 2]),
    ],
)
def test_offsets_go_on_with_the_stride_of_the_key(starts, T, R, query_len, want):
    static = buffers(z=("R + 1", "int32", "stride"))
    scribble(static)
    true = key(starts[-1], len(starts) - 1)
    stage(static, [torch.tensor(starts).int()], true, key(T, R), query_len)
    assert static.tensors[0][: R + 1].tolist() == want
    assert static.tensors[0][R + 1 :].tolist() == [77] * (6 - R)


def test_every_padding_offset_stays_within_the_key():
    static = buffers(z=("R + 1", "int64", "stride"))
    for query_len in (1, 2, 4):
        for reqs in range(1, 17 // query_len):
            for top in range(reqs, 17 // query_len):
                if top > TOP["R"]:
                    continue
                true, big = key(reqs * query_len, reqs), key(top * query_len, top)
                starts = torch.arange(reqs + 1) * query_len
                stage(static, [starts], true, big, query_len)
                got = static.tensors[0][: top + 1]
                assert torch.equal(got, torch.arange(top + 1) * query_len)


@pytest.mark.parametrize(("query_len", "want"), [(0, [0, 0, 0, 0]), (2, [0, 2, 4, 6])])
def test_an_all_padding_batch_has_no_tokens_of_its_own(query_len: int, want: list[int]):
    static = buffers(x=("T", "int64", -1), lens=("R", "int32", 0), z=("R + 1", "int32", "stride"))
    scribble(static)
    ring = make_ring(static.buffer_plan, torch.device("cpu"))
    ring.put_padding(static.buffer_plan, query_len)
    unpack(static, ring, key(6, 3))
    x, lens, z = static.tensors
    assert x.tolist() == [-1] * 6 + [77] * 10
    assert lens.tolist() == [0] * 3 + [77] * 3
    assert z.tolist() == want + [77] * 3


def test_a_field_of_constant_size_is_copied_whole():
    static = buffers(x=("4", "float32", 0), y=("T 2", "float32", 0))
    x, y = torch.rand(4), torch.rand(3, 2)
    stage(static, [x, y], key(3, 1), key(8, 4), 0)
    assert torch.equal(static.tensors[0], x)
    assert torch.equal(static.tensors[1][:8], torch.cat([y, torch.zeros(5, 2)]))


@pytest.mark.parametrize("dims", ["2*T", "T + R", "T*2 + 1"])
def test_dims_may_be_expressions(dims: str):
    static = buffers(x=(dims, "int64", -1))
    (planned,) = static.buffer_plan.buffers
    rows = {s: planned.buffer.dims[0](**key(*s)) for s in ((3, 1), (8, 4))}
    scribble(static)
    stage(static, [torch.arange(rows[3, 1])], key(3, 1), key(8, 4), 0)
    want = [*range(rows[3, 1])] + [-1] * (rows[8, 4] - rows[3, 1])
    assert static.tensors[0].tolist() == want + [77] * (len(static.tensors[0]) - rows[8, 4])


def test_views_are_leading_slices_at_the_same_address():
    static = buffers(x=("T", "int64", -1), z=("R + 1", "int32", "stride"), y=("R B", "int32", 0))
    for T, R in ((1, 1), (16, 6), (4, 2)):
        views = static.views(key(T, R))
        assert [v.shape[0] for v in views] == [T, R + 1, R]
        assert [v.data_ptr() for v in views] == [t.data_ptr() for t in static.tensors]


def test_buffers_reach_to_the_top():
    static = buffers(x=("T", "int64", -1), m=("R", "bool", True), y=("R B", "int32", 0))
    x, m, y = static.tensors
    assert x.shape == (16,) and m.shape == (6,) and y.shape == (6, 3)
    assert static.buffer_plan.nbytes == 16 * 8 + 6 + 18 * 4
    assert "x" in static.buffer_plan.as_text() and "int32[R, B]" in static.buffer_plan.as_text()


def test_buffers_made_in_inference_mode_can_be_written_outside_of_it():
    with torch.inference_mode():
        static = buffers(x=("T", "int64", -1))
    stage(static, [torch.arange(3)], key(3, 1), key(8, 4), 0)
    assert static.tensors[0][:4].tolist() == [0, 1, 2, -1]


def test_leaves_of_an_inference_mode_batch_can_be_staged():
    static = buffers(x=("T", "int64", -1))
    with torch.inference_mode():
        leaf = torch.arange(3)
    stage(static, [leaf], key(3, 1), key(4, 4), 0)
    assert static.tensors[0][:4].tolist() == [0, 1, 2, -1]


def test_a_strided_leaf_is_staged_by_value():
    static = buffers(y=("R B", "int32", 0))
    wide = torch.arange(12).int().view(2, 6)
    stage(static, [wide[:, ::2]], key(2, 2), key(2, 2), 0)
    assert static.tensors[0][:2].tolist() == [[0, 2, 4], [6, 8, 10]]


def test_true_sizes_are_the_specs_and_the_limits():
    assert true_sizes(fg.BatchSpec(7, 3), {"B": 4}) == {"T": 7, "R": 3, "B": 4}


# --- leaves that do not fit -----------------------------------------------------------------------

FIELDS = {"batch.ids": ("T", "int64", 0), "batch.tables": ("R B", "int32", 0)}
GOOD = [torch.zeros(5, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32)]
BAD: dict[str, tuple[int, Any, list[str]]] = {
    "dtype": (0, torch.zeros(5).int(), ["batch.ids", "int64[T]", "int32", "x.to(torch.int64)"]),
    "longer": (0, torch.zeros(6, dtype=torch.int64), ["batch.ids", "[5]", "T=5", "[6]"]),
    "shorter": (0, torch.zeros(4, dtype=torch.int64), ["batch.ids", "[5]", "T=5", "[4]"]),
    "empty": (0, torch.zeros(0, dtype=torch.int64), ["batch.ids", "[5]", "[0]"]),
    "rank above": (0, torch.zeros(5, 1, dtype=torch.int64), ["batch.ids", "[5]", "[5, 1]"]),
    "rank below": (1, torch.zeros(2, dtype=torch.int32), ["batch.tables", "[2, 3]", "R=2", "[2]"]),
    "a scalar": (0, torch.zeros((), dtype=torch.int64), ["batch.ids", "[5]", "[]"]),
    "another B": (1, torch.zeros(2, 4).int(), ["batch.tables", "[2, 3]", "B=3", "fg.Limits"]),
    "no tensor": (0, [0] * 5, ["batch.ids", "int64[T]", "list"]),
    "an int": (1, 3, ["batch.tables", "int32[R, B]", "int"]),
}  # fmt: skip


def test_leaves_that_fit_pass():
    check_leaves(buffers(**FIELDS).buffer_plan, GOOD, key(5, 2))


@pytest.mark.parametrize("what", BAD)
def test_a_leaf_that_does_not_fit_is_named_with_both_sides(what: str):
    index, leaf, words = BAD[what]
    leaves = [leaf if i == index else good for i, good in enumerate(GOOD)]
    with pytest.raises(TreeError) as error:
        check_leaves(buffers(**FIELDS).buffer_plan, leaves, key(5, 2))
    assert [word for word in words if word not in str(error.value)] == []
