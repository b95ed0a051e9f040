"""The kernel that sums over processes, adds and norms, interpreted: processes of a fork share plain
memory in place of GPUs that read each other's. Run by test_triton_interpreter.py; on CUDA,
tests/ranks/test_reduced_norms.py."""

from __future__ import annotations

import multiprocessing
import random
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from fast_interpreter import speed_up
from torch import Tensor

from fngraph.ops.fused import plain_add_rms_norm
from fngraph.ops.symmetric import (
    APART,
    LARGEST,
    MOST_PROGRAMS,
    ONE_SHOT,
    PROGRAMS,
    ROW_BYTES,
    TWO_SHOT,
    WORDS_BYTES,
    SymmetricMemory,
    block_bytes,
    programs_for,
    signals_bytes,
    slot_bytes,
    way_of,
    words_at,
)
from fngraph.ops.triton.launching import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="for the interpreter")
if interpreted():
    speed_up()

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-9}
"""Of norms. The interpreter cuts bfloat16 off in place of rounding, here and in the sum."""


class Call(NamedTuple):
    rows: int
    width: int
    dtype: torch.dtype
    way: str
    centred: bool = False


def shared_by(size: int) -> list[SymmetricMemory]:
    """Blocks that a fork's processes see at one address."""
    blocks = [torch.zeros(block_bytes(size), dtype=torch.uint8) for _ in range(size)]
    for block in blocks:
        block.share_memory_()
    addresses = torch.tensor([block.data_ptr() for block in blocks])
    turns = [torch.zeros(MOST_PROGRAMS, dtype=torch.int64) for _ in blocks]
    return [
        SymmetricMemory(block, addresses, turns[rank], rank, size, 10, blocks)
        for rank, block in enumerate(blocks)
    ]


def arguments(call: Call, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, of this process alone; y and the weight. x and y are cut out of longer rows."""
    own, alike = (torch.Generator().manual_seed(n) for n in (seed * 16 + rank, seed))
    draw = lambda g, *shape: torch.randn(*shape, generator=g).to(call.dtype)  # noqa: E731
    x, y = (draw(g, call.rows, call.width + 3)[:, : call.width] for g in (own, alike))
    return x, y, draw(alike, call.width)


def run(shared: SymmetricMemory, calls: Sequence[Call], seed: int, pipe: Any) -> None:
    """One process; slow at other times than the others."""
    from fngraph.ops.triton.reducing import all_reduce_rms_norm

    torch.set_num_threads(1)
    late = random.Random(seed * 16 + shared.rank)
    made: Any = []
    try:
        for i, call in enumerate(calls):
            x, y, weight = arguments(call, shared.rank, seed + i)
            time.sleep(late.choice((0, 0, 0.003)))
            made.append(all_reduce_rms_norm(x, y, weight, 1e-5, call.centred, shared, call.way))
    except BaseException:
        made = traceback.format_exc()
    pipe.send([(a.float().numpy(), b.float().numpy()) for a, b in made] if made else made)
    pipe.close()


def run_all(size: int, calls: Sequence[Call], seed: int = 0) -> list[Any]:
    """What each process made of each call."""
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(size)]
    started = [
        fork.Process(target=run, args=(shared, calls, seed, ours), daemon=True)
        for shared, (_, ours) in zip(shared_by(size), pipes)
    ]
    for one in started:
        one.start()
    try:
        found = []
        for theirs, _ in pipes:
            assert theirs.poll(60), "they wait for each other"
            found.append(theirs.recv())
        return found
    finally:
        for one in started:
            one.kill()
            one.join()


def check(size: int, calls: Sequence[Call], seed: int = 0) -> None:
    """All have the same bits, which are the plain form's within a rounding."""
    found = run_all(size, calls, seed)
    for i, call in enumerate(calls):
        given = [arguments(call, rank, seed + i) for rank in range(size)]
        _, y, weight = given[0]
        x = given[0][0].float()
        for other, *_ in given[1:]:
            x = x + other.float()
        total, normed = plain_add_rms_norm(x.to(call.dtype), y, weight, 1e-5, call.centred)
        for got in found:
            for a, b in zip(got[i], found[0][i]):
                assert (a == b).all(), (call, "other bits in another process")
            bound = CLOSE[call.dtype]
            off = bound if call.dtype == torch.bfloat16 else 0
            for one, want, by in zip(got[i], (total, normed), (off, bound)):
                close = torch.testing.assert_close
                close(torch.from_numpy(one), want.float(), atol=by, rtol=by)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that some have several rows of few."""
    from fngraph.ops.triton import reducing

    monkeypatch.setattr(reducing, "PROGRAMS", 4)


@pytest.mark.parametrize("way", [ONE_SHOT, TWO_SHOT])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_it_is_the_plain_form(size: int, way: str):
    """Of rows fewer and more than programs and processes, and of no row; of every dtype."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    calls = [Call(rows, 20, torch.float32, way) for rows in (1, 0, 5, 4 * size + 3)]
    calls += [Call(size, width, kind, way, True) for kind in kinds for width in (24, 33, 1)]
    check(size, calls)


@pytest.mark.parametrize("size", [2, 3])
def test_the_longest_rows_lie_beside_each_other(size: int):
    """Those of two programs, and of one shot and two, of half a slot and of all of it."""
    widths = (8192, 4096, 8192)
    calls = [Call(4, w, torch.float32, way) for w in widths for way in (ONE_SHOT, TWO_SHOT)]
    check(size, calls, 50)


@pytest.mark.parametrize("size", [2, 4])
def test_slots_take_turns_whatever_comes_after_what(size: int):
    """Many calls of random kinds, in processes that are late now and then."""
    draw = random.Random(size)
    calls = [
        Call(draw.choice((1, 2, 3, 7, 18)), draw.choice((1, 8, 33)), torch.float32,
             draw.choice((ONE_SHOT, TWO_SHOT)), draw.random() < 0.5)
        for _ in range(40)
    ]  # fmt: skip
    check(size, calls, seed=100)


@pytest.mark.parametrize("slow", [0, 1])
def test_sums_are_read_before_other_rows_come(slow: int, monkeypatch: pytest.MonkeyPatch):
    """Longer ones, whose slots lie elsewhere: over those from which one process still reads."""
    from fngraph.ops.triton import reducing

    meet = reducing.meet

    class Late:
        def __call__(self, *args: Any) -> None:
            meet(*args)
            if args[4] == slow:
                time.sleep(0.02)

    monkeypatch.setattr(reducing, "meet", Late())
    check(2, [Call(2, width, torch.float32, TWO_SHOT) for width in (8, 8, 8192) * 2], seed=200)


def test_a_block_has_room_for_all_slots():
    """Signals, then slots of two shots, then words, in all of which nothing overlaps; for rows that
    are shorter there are more slots, until there are programs enough."""
    for size in LARGEST:
        slots = 2 * PROGRAMS * slot_bytes(ROW_BYTES, size)
        assert words_at(size) == signals_bytes(size) + slots
        words = 2 * PROGRAMS * (size - 1) * WORDS_BYTES
        assert block_bytes(size) == words_at(size) + words
        assert signals_bytes(size) % 16 == words_at(size) % 16 == 0
        assert slot_bytes(ROW_BYTES, size) == (size + 1) * ROW_BYTES
        assert slot_bytes(1, size) == (size + 1) * 16
        for row in (1, 8192, 8193, 16384, 20000, ROW_BYTES):
            assert PROGRAMS <= programs_for(row, size) <= MOST_PROGRAMS
            assert 2 * programs_for(row, size) * slot_bytes(row, size) <= slots
        assert [programs_for(row << 10, size) for row in (8, 16, 32)] == [256, 128, 64]


def test_which_way_by_size():
    """A row that has no room goes apart."""
    assert [way_of(rows, 8192, 2) for rows in (1, 256, 257, 8192, 8193)] == [
        ONE_SHOT, ONE_SHOT, TWO_SHOT, TWO_SHOT, APART
    ]  # fmt: skip
    assert [way_of(rows, 8192, 4) for rows in (32, 33, 512, 513)] == [
        ONE_SHOT, TWO_SHOT, TWO_SHOT, APART
    ]  # fmt: skip
    assert way_of(1, ROW_BYTES + 1, 4) == way_of(1, 64, 9) == APART
