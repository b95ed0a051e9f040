"""The sum of each process's rows, the addition and the RMSNorm behind it, in one kernel.

    total = x of rank 0 + x of rank 1 + ... + y;  normed = RMSNorm(total) * weight

Processes read each other's memory (`fngraph.ops.peers`). All add in the order of ranks, in float32,
and round once, so that each has the same bits, in one shot as in two.

In one shot a program copies its row into a slot, meets its peers, reads the row of each, adds up
and norms. In two it copies as many rows as there are processes, meets them, sums one of these,
meets them again, and reads the sums of the others.

To meet is to write a number into a signal of each peer, release over acquire, and to wait for
theirs: the numbers only grow, so that no signal is put back, and a graph is launched again as it
is. A peer that does not come within `wait_s` seconds ends the kernel with a trap, which is an error
of CUDA's at the next call: nothing that was launched is waited for longer.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.peers import (
    ONE_SHOT,
    PROGRAMS,
    SIGNAL_BYTES,
    Shared,
    signals_bytes,
    slot_bytes,
)
from fngraph.ops.triton.fused import as_rows, warps_for
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.overlapping import overlap
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
def at(addresses, r, offset, kind: tl.constexpr):
    """A place in the block of process r; offsets are multiples of 16 bytes."""
    address = tl.load(addresses + r) + offset
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@triton.jit
def summed(
    addresses, offset, e, real, kind: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """What all processes have at an offset, added in the order of ranks and rounded once."""
    wide = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(WORLD):
        part = tl.load(at(addresses, r, offset, kind) + e, mask=real, other=0.0)
        wide += part.to(tl.float32)
    return as_rounded(wide, kind)


@triton.jit
def put_norm(row, wide, y, weight, total, out, y_row, eps, e, real, kind: tl.constexpr,
             E: tl.constexpr, CENTRED: tl.constexpr):  # fmt: skip
    """Row `row` of both results, of its sum over processes."""
    b = tl.load(y + row * y_row + e, mask=real, other=0.0).to(tl.float32)
    a = as_rounded(wide + b, kind)
    tl.store(total + row * E + e, a.to(kind), mask=real)
    root = tl.rsqrt(tl.sum(tl.where(real, a * a, 0.0)) / E + eps)
    by = tl.load(weight + e, mask=real, other=0.0).to(tl.float32)
    if CENTRED:
        normed = a * root * (1.0 + by)
    else:
        normed = as_rounded(a * root, kind) * by
    tl.store(out + row * E + e, normed.to(kind), mask=real)


@triton.jit(do_not_specialize=_COUNTED)
def one_shot_kernel(
    x, y, weight, addresses, total, out, turns, x_row, y_row, eps, T, wait_s,
    RANK: tl.constexpr, WORLD: tl.constexpr, MANY: tl.constexpr, SLOTS: tl.constexpr,
    SLOT: tl.constexpr, SIGNAL: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    CENTRED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Every so-many-th row."""
    overlap(EARLY)
    kind = x.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    real = e < E
    until = clock(wait_s)
    turn = tl.load(turns + program)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        row = tl.cast(t, tl.int64)
        slot = SLOTS + ((turn & 1) * MANY + program) * SLOT
        own = tl.load(x + row * x_row + e, mask=real, other=0.0)
        tl.store(at(addresses, RANK, slot, kind) + e, own, mask=real)
        meet(addresses, program, 2 * turn + 2, until, RANK, WORLD, SIGNAL)
        wide = summed(addresses, slot, e, real, kind, WORLD, BLOCK)
        put_norm(row, wide, y, weight, total, out, y_row, eps, e, real, kind, E, CENTRED)
        turn += 1
    tl.store(turns + program, turn)


@triton.jit(do_not_specialize=_COUNTED)
def two_shot_kernel(
    x, y, weight, addresses, total, out, turns, x_row, y_row, eps, T, wait_s,
    RANK: tl.constexpr, WORLD: tl.constexpr, MANY: tl.constexpr, SLOTS: tl.constexpr,
    SLOT: tl.constexpr, SIGNAL: tl.constexpr, ROW: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Every so-many-th group of WORLD rows, of which process r sums the r-th."""
    overlap(EARLY)
    kind = x.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    real = e < E
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
        wide = summed(addresses, slot + RANK * ROW, e, is_there, kind, WORLD, BLOCK)
        tl.store(at(addresses, RANK, slot + WORLD * ROW, kind) + e, wide.to(kind), mask=is_there)
        meet(addresses, program, 2 * turn + 2, until, RANK, WORLD, SIGNAL)
        for r in tl.static_range(WORLD):
            is_there = real & (first + r < T)
            theirs = tl.load(
                at(addresses, r, slot + WORLD * ROW, kind) + e, mask=is_there, other=0.0
            )
            put_norm(
                first + r, theirs.to(tl.float32), y, weight, total, out, y_row, eps, e, is_there,
                kind, E, CENTRED,
            )  # fmt: skip
        turn += 1
    tl.store(turns + program, turn)


def all_reduce_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, shared: Shared, way: str
) -> tuple[Tensor, Tensor]:
    """The sum of every process's `x` and of `y`, and the norm of that.

    Args:
        x, y: (..., E) in float32, bfloat16 or float16; `y` alike in all processes.
        weight: (E,).
        way: `ONE_SHOT` or `TWO_SHOT`, alike in all processes.
    """
    rows, others = as_rows(x), as_rows(y)
    (T, E), one_shot = rows.shape, way == ONE_SHOT
    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    row_bytes = -(-E * x.element_size() // 16) * 16
    units = T if one_shot else -(-T // shared.size)
    constants: dict[str, Any] = {} if one_shot else {"ROW": row_bytes}
    launch(
        one_shot_kernel if one_shot else two_shot_kernel,
        (min(units, PROGRAMS),),
        (rows, others, weight.contiguous(), shared.addresses),
        (total, out, shared.turns),
        (rows.stride(0), others.stride(0), eps, T, shared.wait_s),
        early=True,
        num_warps=warps_for(E),
        RANK=shared.rank,
        WORLD=shared.size,
        MANY=PROGRAMS,
        SLOTS=signals_bytes(shared.size),
        SLOT=slot_bytes(shared.size),
        SIGNAL=SIGNAL_BYTES,
        E=E,
        BLOCK=power_of_two(E),
        CENTRED=centred,
        **constants,
    )
    return total, out
