"""The sum of each process's rows, the addition and the RMSNorm behind it, in one kernel.

    total = x of rank 0 + x of rank 1 + ... + y;  normed = RMSNorm(total) * weight

Processes write into each other's memory (`fngraph.ops.symmetric`). All add in the order of ranks,
in float32, and round once, so that each has the same bits, in one shot as in two.

In one shot a program writes its row into a slot of each peer, in words: one is four bytes of the
row, and the number of the turn, by which the peer knows, word by word, that it is here. That is one
way over the link: no fence, no signal, nothing to be fetched, for twice as many bytes. Then it adds
up and norms. In two it copies as many rows as there are processes into its own slot, meets its
peers, sums one of these, meets them again, and reads the sums of the others.

To meet is to write a number into a signal of each peer, release over acquire, and to wait for
theirs. Turns are counted, and never begun anew, so that no signal and no word is put back, and a
graph is launched again as it is. A peer that does not come within `wait_s` seconds ends the kernel
with a trap, which is an error of CUDA's at the next call: nothing that was launched is waited for
longer.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.symmetric import (
    ONE_SHOT,
    PROGRAMS,
    SIGNAL_BYTES,
    WORDS_BYTES,
    SymmetricMemory,
    place_bytes,
    programs_for,
    signals_bytes,
    slot_bytes,
    words_at,
)
from fngraph.ops.triton.fused import as_rows
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.overlapping import let_next, overlap, wait
from fngraph.ops.triton.rounding import BY_HAND, as_rounded

_COUNTED = (*COUNTS, "wait_s")


@triton.jit
def tell(address, number, thread):
    """Write a number into a peer's signal behind all that this program has written."""
    if BY_HAND:
        tl.store(address.to(tl.pointer_type(tl.int64)), number)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred own;
            .reg .u32 tid;
            mov.u32 tid, %tid.x;
            setp.eq.u32 own, tid, $3;
            @own st.release.sys.global.b64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r", [address, number, thread], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def hear(address, number, thread, until):
    """Wait for a number in an own signal; what its peer has written before can be read then."""
    if BY_HAND:
        while tl.load(address.to(tl.pointer_type(tl.int64)), volatile=True) < number:
            pass
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is;
            .reg .u32 tid;
            .reg .u64 seen;
            mov.u32 tid, %tid.x;
            setp.ne.u32 is, tid, $3;
            @is bra there;
            again:
            ld.acquire.sys.global.b64 seen, [$1];
            setp.ge.s64 is, seen, $2;
            @is bra there;
            mov.u64 seen, %globaltimer;
            setp.lt.u64 is, seen, $4;
            @is bra again;
            trap;
            there:
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r,l", [address, number, thread, until], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def clock(wait_s):
    """The device's clock in so many seconds, ns."""
    if BY_HAND:
        return tl.zeros((), tl.int64)
    now = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer; mov.u32 $1, $2;", "=l,=r,r", [wait_s],
        dtype=(tl.int64, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return now[0] + wait_s.to(tl.int64) * 1000000000


@triton.jit
def meet(addresses, program, number, until, RANK: tl.constexpr, WORLD: tl.constexpr,
         SIGNAL: tl.constexpr):  # fmt: skip
    """Go on when the programs of this number are here in all processes. Thread r is for peer r."""
    tl.debug_barrier()  # all threads have written
    for r in tl.static_range(WORLD):
        if r != RANK:
            tell(tl.load(addresses + r) + (program * WORLD + RANK) * SIGNAL, number, r)
    own = tl.load(addresses + RANK) + program * WORLD * SIGNAL
    for r in tl.static_range(WORLD):
        if r != RANK:
            hear(own + r * SIGNAL, number, r, until)
    tl.debug_barrier()  # and may read


@triton.jit
def send(address, words, number, there):
    """Write words with a turn's number into a peer's slot, those that are `there`."""
    wide = (number.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    if BY_HAND:
        tl.store(address.to(tl.pointer_type(tl.int64)), wide, mask=there)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred there;
            setp.ne.u32 there, $3, 0;
            @there st.relaxed.sys.global.b64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r", [address, wide, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def _hears(count: int) -> tuple[tl.constexpr, tl.constexpr]:
    """PTX that asks for so many words at once until all of them are here, and its constraints.

    Each word comes with its address, the turn's number and the time when waiting ends; the last two
    are the same for all, so the first word's are read.
    """
    every = range(count)
    number, until = f"${2 * count}", f"${3 * count}"
    lines = [
        ".reg .pred is;",
        ".reg .u64 now;",
        f".reg .b64 seen<{count}>;",
        f".reg .b32 turn<{count}>;",
        "again:",
        *(f"ld.relaxed.sys.global.b64 seen{i}, [${count + i}];" for i in every),
        *(f"mov.b64 {{${i}, turn{i}}}, seen{i};" for i in every),
        *(f"xor.b32 turn{i}, turn{i}, {number};" for i in every),
        *(f"or.b32 turn0, turn0, turn{i};" for i in every if i),
        "setp.eq.u32 is, turn0, 0;",
        "@is bra there;",
        "mov.u64 now, %globaltimer;",
        f"setp.lt.u64 is, now, {until};",
        "@is bra again;",
        "trap;",
        "there:",
    ]
    kinds = ("=&r", "l", "r", "l")
    constraints = ",".join(kind for kind in kinds for _ in every)
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}"), tl.constexpr(constraints)


HEAR_1, OF_1 = _hears(1)
HEAR_2, OF_2 = _hears(2)
HEAR_4, OF_4 = _hears(4)


@triton.jit
def heard(address, number, until, HELD: tl.constexpr):
    """Words of an own slot, as soon as each has the turn's number.

    Args:
        HELD: how many a thread has; up to four are asked for at once.
    """
    if BY_HAND:
        at = address.to(tl.pointer_type(tl.int64))
        wide = tl.load(at, volatile=True)
        while tl.max(((wide >> 32).to(tl.int32) != number).to(tl.int32)) > 0:
            wide = tl.load(at, volatile=True)
        words = wide.to(tl.int32)
    elif HELD % 4 == 0:
        words = tl.inline_asm_elementwise(
            HEAR_4, OF_4, [address, number, until], dtype=tl.int32, is_pure=False, pack=4
        )
    elif HELD == 2:
        words = tl.inline_asm_elementwise(
            HEAR_2, OF_2, [address, number, until], dtype=tl.int32, is_pure=False, pack=2
        )
    else:
        words = tl.inline_asm_elementwise(
            HEAR_1, OF_1, [address, number, until], dtype=tl.int32, is_pure=False, pack=1
        )
    return words


@triton.jit
def as_words(x, PER: tl.constexpr):
    """A row's numbers, as `columns` lays them out, as (W,) words of four bytes."""
    if PER == 1:
        words = x.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(x.to(tl.int16, bitcast=True).to(tl.int32))
        words = (low & 0xFFFF) | (high << 16)
    return words


@triton.jit
def as_numbers(words, kind: tl.constexpr, PER: tl.constexpr):
    """(W,) words as the numbers that they hold, in float32, as `columns` lays them out."""
    if PER == 1:
        numbers = words.to(tl.float32, bitcast=True)
    elif kind == tl.bfloat16:
        low, high = words << 16, words & -65536
        numbers = tl.join(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))
    else:
        low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
        numbers = tl.join(low.to(kind, bitcast=True), high.to(kind, bitcast=True)).to(tl.float32)
    return numbers


@triton.jit
def columns(BLOCK: tl.constexpr, PER: tl.constexpr):
    """Those of a row, as (W, PER) if a word holds PER of them, or as (W,) if it holds one.

    So Triton gives neighbouring words to neighbouring threads, in one shot and in two: a warp's
    words are 256 bytes side by side, few are moved between threads, and a norm is summed in the
    same order either way. Of what lies side by side it would give each thread several.
    """
    if PER == 1:
        e = tl.max_contiguous(tl.arange(0, BLOCK), 1)
    else:
        e = PER * tl.arange(0, BLOCK // PER)[:, None] + tl.arange(0, PER)[None, :]
    return e


@triton.jit
def at(addresses, r, offset, kind: tl.constexpr):
    """A place in the block of process r; offsets are multiples of 16 bytes."""
    address = tl.load(addresses + r) + offset
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@triton.jit
def put_norm(row, wide, b, by, total, out, eps, e, real, kind: tl.constexpr, E: tl.constexpr,
             PER: tl.constexpr, CENTRED: tl.constexpr):  # fmt: skip
    """Row `row` of both results, of its sum over processes, what is added to it, and the weight."""
    a = as_rounded(wide + b.to(tl.float32), kind)
    tl.store(total + row * E + e, a.to(kind), mask=real)
    squares = tl.where(real, a * a, 0.0)
    if PER > 1:
        squares = tl.sum(squares, 1)
    root = tl.rsqrt(tl.sum(squares, 0) / E + eps)
    by = by.to(tl.float32)
    if CENTRED:
        normed = a * root * (1.0 + by)
    else:
        normed = as_rounded(a * root, kind) * by
    tl.store(out + row * E + e, normed.to(kind), mask=real)


@triton.jit(do_not_specialize=_COUNTED)
def one_shot_kernel(
    x, y, weight, addresses, total, out, turns, x_row, y_row, eps, T, wait_s,
    RANK: tl.constexpr, WORLD: tl.constexpr, MANY: tl.constexpr, WORDS: tl.constexpr,
    ROOM: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
    HELD: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows `program`, `program + programs`, ..., whole."""
    let_next(EARLY)
    blocks = ()  # mypy takes () for a tuple that stays empty
    for r in tl.static_range(WORLD):
        blocks += (tl.load(addresses + r),)  # type: ignore[assignment]
    wait(EARLY)
    kind = x.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    e = columns(BLOCK, PER)
    real = e < E
    word = tl.arange(0, BLOCK // PER)
    until = clock(wait_s)
    turn = tl.load(turns + program)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        row = tl.cast(t, tl.int64)
        own = as_words(tl.load(x + row * x_row + e, mask=real, other=0.0), PER)
        slot = WORDS + ((turn & 1) * MANY + program) * (WORLD - 1) * ROOM
        number = (turn % 0xFFFFFFFF + 1).to(tl.int32)  # never 0, which a word is at first
        for r in tl.static_range(WORLD):
            if r != RANK:
                place = blocks[r] + slot + (RANK - r + WORLD - 1) % WORLD * ROOM
                send(place + word * 8, own, number, word * PER < E)
        b = tl.load(y + row * y_row + e, mask=real, other=0.0)
        by = tl.load(weight + e, mask=real, other=0.0)
        wide = tl.zeros(e.shape, tl.float32)
        for r in tl.static_range(WORLD):
            if r == RANK:
                wide += as_numbers(own, kind, PER)
            else:  # past the row's end its last word, again
                place = blocks[RANK] + slot + (r - RANK + WORLD - 1) % WORLD * ROOM
                place += tl.minimum(word, (E - 1) // PER) * 8
                wide += as_numbers(heard(place, number, until, HELD), kind, PER)
        wide = as_rounded(wide, kind)
        put_norm(row, wide, b, by, total, out, eps, e, real, kind, E, PER, CENTRED)
        tl.debug_barrier()  # all threads have read the slot, which a peer may write from now on
        turn += 1
    tl.store(turns + program, turn)


@triton.jit(do_not_specialize=_COUNTED)
def two_shot_kernel(
    x, y, weight, addresses, total, out, turns, x_row, y_row, eps, T, wait_s,
    RANK: tl.constexpr, WORLD: tl.constexpr, MANY: tl.constexpr, SLOTS: tl.constexpr,
    SLOT: tl.constexpr, SIGNAL: tl.constexpr, ROW: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, PER: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Groups of WORLD rows, `program`, `program + programs`, ...; process r sums the r-th."""
    overlap(EARLY)
    kind = x.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    e = columns(BLOCK, PER)
    real = e < E
    by = tl.load(weight + e, mask=real, other=0.0)
    until = clock(wait_s)
    turn = tl.load(turns + program)
    for group in range(tl.program_id(0), tl.cdiv(T, WORLD), tl.num_programs(0)):
        first = tl.cast(group, tl.int64) * WORLD
        slot = SLOTS + ((turn & 1) * MANY + program) * SLOT
        for r in tl.static_range(WORLD):
            is_there = real & (first + r < T)
            own = tl.load(x + (first + r) * x_row + e, mask=is_there, other=0.0)
            tl.store(at(addresses, RANK, slot + r * ROW, kind) + e, own, mask=is_there)
        meet(addresses, program, 2 * turn + 1, until, RANK, WORLD, SIGNAL)
        is_there = real & (first + RANK < T)
        wide = tl.zeros(e.shape, tl.float32)
        for r in tl.static_range(WORLD):
            theirs = at(addresses, r, slot + RANK * ROW, kind)
            wide += tl.load(theirs + e, mask=is_there, other=0.0).to(tl.float32)
        wide = as_rounded(wide, kind)
        tl.store(at(addresses, RANK, slot + WORLD * ROW, kind) + e, wide.to(kind), mask=is_there)
        meet(addresses, program, 2 * turn + 2, until, RANK, WORLD, SIGNAL)
        for r in tl.static_range(WORLD):
            is_there = real & (first + r < T)
            theirs = tl.load(
                at(addresses, r, slot + WORLD * ROW, kind) + e, mask=is_there, other=0.0
            )
            b = tl.load(y + (first + r) * y_row + e, mask=is_there, other=0.0)
            put_norm(
                first + r, theirs.to(tl.float32), b, by, total, out, eps, e, is_there, kind, E,
                PER, CENTRED,
            )  # fmt: skip
        turn += 1
    meet(addresses, program, 2 * turn + 1, until, RANK, WORLD, SIGNAL)  # all have read
    tl.store(turns + program, turn + 1)


def warps_of(words: int) -> int:
    """Of a row of so many words: such that a thread has four, as far as 512 threads do."""
    return min(16, max(4, words // 128))


def all_reduce_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, shared: SymmetricMemory,
    way: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum of every process's `x` and of `y`, and the norm of that.

    Args:
        x, y: (..., E) in float32, bfloat16 or float16; `y` alike in all processes.
        weight: (E,).
        way: `ONE_SHOT` or `TWO_SHOT`, alike in all processes.
    """
    rows, others = as_rows(x), as_rows(y)
    (T, E), one_shot = rows.shape, way == ONE_SHOT
    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    row_bytes = E * x.element_size()
    units = T if one_shot else -(-T // shared.size)
    most = PROGRAMS if one_shot else programs_for(row_bytes, shared.size)
    per, block = 4 // x.element_size(), power_of_two(E, at_least=4)  # two words at least
    warps = warps_of(block // per)
    constants: dict[str, Any] = {
        "WORDS": words_at(shared.size), "ROOM": WORDS_BYTES,
        "HELD": max(1, block // per // (32 * warps)),
    } if one_shot else {
        "SLOTS": signals_bytes(shared.size), "SLOT": slot_bytes(row_bytes, shared.size),
        "SIGNAL": SIGNAL_BYTES, "ROW": place_bytes(row_bytes),
    }  # fmt: skip
    launch(
        one_shot_kernel if one_shot else two_shot_kernel,
        (min(units, most),),
        (rows, others, weight.contiguous(), shared.addresses),
        (total, out, shared.turns),
        (rows.stride(0), others.stride(0), eps, T, shared.wait_s),
        early=True,
        num_warps=warps,
        RANK=shared.rank,
        WORLD=shared.size,
        MANY=most,
        E=E,
        BLOCK=block,
        PER=per,
        CENTRED=centred,
        **constants,
    )
    return total, out
