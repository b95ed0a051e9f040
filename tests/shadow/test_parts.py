"""What a verified step copies of the state: the rows that a batch is about where primitives say
which, else all of a leaf, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.fx.leaves import Role
from fngraph.shadow.parts import copied, parts_of, rows_of


def executable_of(forward: Any, params: Any, cache: Any, limits: Any = toys.LIMITS) -> Any:
    fast = fg.graphify(forward, donate="cache", stage="batch", sizes=(4,))
    return fast.trace(params, cache, limits=limits).split().lower().compile().executable


def test_a_cache_is_copied_by_the_rows_that_the_batch_names():
    cache = toys.attention_cache()
    made = executable_of(toys.attend, toys.attention_params(), cache)
    parts = parts_of(made)
    assert not parts.whole and parts.whole_bytes == 0
    (group,) = parts.groups
    leaves = dict(zip(made.args.of(Role.DONATED), toys.leaves(cache)))
    assert group.caches == tuple(leaves) and group.size == toys.S
    batch = toys.batch((1, 5), (2, 0))
    batch.block_tables[1] = torch.tensor([11, 7, -1])
    slots = torch.tensor([5, 11 * toys.S, -1])
    staged = [batch.token_ids, slots, batch.seq_lens, batch.query_start_loc, batch.block_tables]
    rows = rows_of(parts, made, staged)
    assert rows.numbers[0].tolist() == [0, 1, 2, 7, 11]
    assert rows.staged[4].tolist() == [[0, 1, 2], [4, 3, -1]]
    assert rows.staged[1].tolist() == [toys.S + 1, 4 * toys.S, -1]
    for i, x in leaves.items():
        x.copy_(torch.randn(x.shape))
        assert torch.equal(copied(parts, rows, leaves)[i], x[[0, 1, 2, 7, 11]])


@pytest.mark.parametrize("none", [-1, 4 * toys.B, 10**6], ids=["none", "one past", "far"])
def test_a_batch_that_names_no_row_has_one(none: int):
    made = executable_of(toys.attend, toys.attention_params(), toys.attention_cache())
    staged = [torch.full(shape, none) for shape in ((2,), (2,), (1,), (2,), (1, toys.B))]
    staged[1] *= toys.S
    rows = rows_of(parts_of(made), made, staged)
    assert rows.numbers[0].tolist() == [0] and rows.staged[4].tolist() == [[none] * toys.B]


def reads_its_cache(params: Any, cache: Any, batch: toys.Batch) -> Any:
    """`attend`, and all of the first layer's keys besides."""
    logits, cache = toys.attend(params, cache, batch)
    return logits + cache[0][0].sum(), cache


def counts_blocks(params: Any, cache: Any, batch: toys.Batch) -> Any:
    """`attend`, and arithmetic with the numbers of blocks."""
    logits, cache = toys.attend(params, cache, batch)
    return (logits, batch.block_tables * 2), cache


def own_slots(params: Any, cache: Any, batch: toys.Batch) -> Any:
    """`attend`, to slots that forward makes."""
    import dataclasses

    shifted = torch.where(batch.slot_mapping >= 0, batch.slot_mapping + 0, -1)
    return toys.attend(params, cache, dataclasses.replace(batch, slot_mapping=shifted))


@pytest.mark.parametrize(
    "forward, whole, why",
    [(reads_its_cache, 4, "forward's own ops reads or writes it"),
     (counts_blocks, 4, "forward also reads batch.block_tables, which says its rows"),
     (own_slots, 4, "is told its slot_mapping by what forward computes")],
)  # fmt: skip
def test_a_leaf_of_which_that_cannot_be_told_is_copied_whole(forward: Any, whole: int, why: str):
    made = executable_of(forward, toys.attention_params(), toys.attention_cache())
    parts = parts_of(made)
    assert len(parts.whole) == whole and any(why in text for text in parts.whole.values())
    bytes_of_one = 4 * toys.B * toys.S * toys.K * toys.D * 4
    assert parts.whole_bytes == whole * bytes_of_one
    assert why in parts.as_text() and f"whole, {bytes_of_one} bytes" in repr(parts)


def _take(args: Any, host: Any) -> None:
    raise NotImplementedError  # nothing runs it


TAKE = fg.ops.define(
    "taking", "(Tensor(a!) cache, Tensor rows, Tensor slots, Tensor other, Tensor(b!) out)",
    default=fg.ops.Backend("plain", _take, lambda config: fg.Support.ALWAYS),
    pages=fg.ops.Pages(("cache",), ("rows",), ("slots",)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "other", "leaf", "why"),
    [("ids", "w", "c", "batch.slot_mapping says rows of one and slots of another"),
     ("held", "w", "c", "p['held'] is no leaf of the batch"),
     ("ids", "d", "d", "taking does not say which rows of it are meant")],
    ids=["rows and slots", "held", "no cache"],
)  # fmt: skip
def test_a_cache_is_copied_whole_where_the_primitive_is_not_told_its_rows_by_the_batch_alone(
    rows: str, other: str, leaf: str, why: str
):
    def forward(p: Any, cache: Any, batch: toys.Batch) -> Any:
        said = {"ids": batch.slot_mapping, "held": p["held"]}[rows]
        out = torch.zeros_like(p["w"])
        TAKE.op(cache["c"], said, batch.slot_mapping, (p | cache)[other], out)
        return out + batch.token_ids.sum(), cache

    p = toys.tally_params() | {"held": torch.zeros(1, dtype=torch.int64)}
    cache = {name: torch.zeros(6, 2, toys.E) for name in "cd"}
    parts = parts_of(executable_of(forward, p, cache))
    assert parts.whole[parts.paths.index(f"cache['{leaf}']")] == why


def test_caches_of_other_shapes_that_share_a_table_are_copied_whole():
    (small,), (large,) = (toys.attention_cache(1, n * toys.B) for n in (4, 5))
    parts = parts_of(executable_of(toys.attend, toys.attention_params(), (small, large)))
    assert not parts.groups and len(parts.whole) == 4
    assert "other shapes" in parts.as_text()


def test_whole_and_by_rows_are_verified_alike(recorder_name: str, device: Any):
    for forward in (toys.attend, reads_its_cache, counts_blocks, own_slots):
        params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
        fast = fg.graphify(forward, donate="cache", stage="batch", sizes=(4, 8), verify=1.0)
        step = fast.bind(params).capture(
            cache, toys.LIMITS, progress=False, recorder=recorder_name, lazy=True
        )
        for batch in (toys.batch((2, 1), 3), toys.decode(3), toys.decode(4)):
            step(cache, toys.on(batch, device))
        assert (step.stats.verified, step.stats.differences) == (3, 0)


@fg.struct
class Rows:
    """Requests with a state each."""

    x: Tensor = fg.buffer("T 4", "float32")
    state_slots: Tensor = fg.buffer("R", "int32", pad=-1)
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    spec: fg.BatchSpec = fg.host()


def convolve(params: Any, cache: Any, batch: Rows) -> Any:
    """A recurrent state, of slots."""
    return fg.ops.causal_conv(batch.x, params, cache, batch)


def test_a_recurrent_state_is_copied_by_its_slots():
    params, cache = torch.randn(4, 3), torch.randn(9, 4, 2)
    fast = fg.graphify(convolve, donate="cache", stage="batch", sizes=(4,), verify=1.0)
    step: Any = fast.bind(params).capture(cache, fg.Limits(8, 4), progress=False, lazy=True)
    (group,) = step.parts.groups
    assert group.size == 1 and not group.slots
    batch = Rows(
        x=torch.randn(3, 4), state_slots=torch.tensor([7, 2], dtype=torch.int32),
        seq_lens=torch.tensor([5, 1], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 2, 3], dtype=torch.int32), spec=fg.BatchSpec(3, 2),
    )  # fmt: skip
    step(cache, batch)
    assert (step.stats.verified, step.stats.differences) == (1, 0)
    assert fg.bisect(step, batch).kind == ""
