"""Triton attention for uniform batches of any query length: split-KV, in one launch.

Each request's keys are cut into splits and spans of a fixed number of keys, whose sums are folded
in one order (see `merging`), by the program that is the last of its request and kv head. How long
they are follows from the block table's width and the config; how many programs share them, from
static shapes too, and changes no bit. So one graph serves every batch of its class, and a row's
bits do not depend on the batch around it or on the size that served it.

A unit is what a program sums at a time: a split, or a whole span of splits if the request is long
enough to fill the device so. There is a program for every unit that a request could have, or, where
these are more than run at once, each takes several in turn. Those past the end of their request
read its length and are done; the device gives each next one to whichever multiprocessor is free,
which requests of any lengths share well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops.paged.config import AttentionArgs, dense, sees_nothing
from fngraph.ops.triton.attention import unified
from fngraph.ops.triton.attention.keys import Tile, compute_dtype, finish, options, score
from fngraph.ops.triton.attention.merging import SPLITS, by_spans, empty, fold, merge_units
from fngraph.ops.triton.attention.turning import turn_and_write
from fngraph.ops.triton.attention.writing import scale_of
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two, processors
from fngraph.ops.triton.overlapping import ask_for_rows, let_next, wait
from fngraph.ops.triton.repeating import Launches
from fngraph.ops.triton.rounding import put_rounded
from fngraph.ops.triton.strides import by_step

MAX_ROWS = 64  # query rows of one kv head: more is prefill


def run(args: AttentionArgs, host: HostBounds | None, kept: Launches | None = None) -> None:
    """See `fngraph.ops.attention`. A batch not known to be uniform goes to the unified kernel."""
    T, R = args.q.shape[0], args.meta.seq_lens.shape[0]
    Q = host.max_query_len if host is not None else None
    rows = (Q or 0) * (args.config.num_heads // args.config.num_kv_heads)
    if Q is None or T != R * Q or rows > MAX_ROWS:
        unified.run(args, host, kept)
        return
    done = args.q.new_empty((R, args.config.num_kv_heads), dtype=torch.int32)
    attend(turn_and_write(args, done, kept), Q, None, done, kept)


def attend(
    args: AttentionArgs, Q: int, how: How | None = None, done: Tensor | None = None,
    kept: Launches | None = None,
) -> None:  # fmt: skip
    """Attention of R * Q rows, where no request brings more than Q tokens, into all of them.

    Args:
        done: (R, K) int32 zeros, in which programs of a request and kv head count themselves;
            None: made here, by a kernel more.
    """
    q_THD, k_cache, v_cache, out_THD = dense(args.q), args.k_cache, args.v_cache, args.out
    meta, config = args.meta, args.config
    sinks = None if args.sinks is None else dense(args.sinks)
    R, K, D = meta.seq_lens.shape[0], config.num_kv_heads, config.head_dim
    if sees_nothing(meta):
        args.out.zero_()
        return
    numbers, constants = options(config, args.kv)
    rows = Q * constants["GROUP"]
    widest = meta.block_tables.shape[1] * config.block_size
    how = how or how_to(config, rows, widest, R * K, processors(q_THD.device))
    tile, split, programs, many, each, early = how
    units = how.units(widest)
    each = min(each or units, units)
    final = units == 1
    if done is None:
        done = q_THD.new_zeros((R, K), dtype=torch.int32)
    sums = None if final else empty(q_THD, R, K, units, rows, D)
    by_k, k_step = scale_of(args.k_scale, q_THD)
    by_v, v_step = scale_of(args.v_scale, q_THD)
    launch(
        split_kernel,
        (K, R, each),
        (q_THD, k_cache, v_cache, meta.query_start_loc, meta.seq_lens, meta.block_tables,
         q_THD if sinks is None else sinks, by_k, by_v,
         q_THD if args.out_scale is None else args.out_scale),
        (*(sums or (out_THD,) * 3), done, out_THD),
        (R, K, units, each, many or 0, *q_THD.stride()[:2],
         *k_cache.stride()[:3], *v_cache.stride()[:3], meta.block_tables.stride(0),
         *out_THD.stride()[:2], k_step, v_step, *numbers),
        ROWS=tile.rows,
        KEYS=tile.keys,
        Q=Q,
        SPLIT=split,
        SPAN=split if many is None else split * SPLITS,
        PER=SPLITS,
        SHARED=each < units,
        FINAL=final,
        K_SCALED=args.k_scale is not None,
        V_SCALED=args.v_scale is not None,
        ROUNDS=args.out_scale is not None,
        SINKS=sinks is not None,
        early=early,
        programs=programs,
        kept=kept,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **constants,
    )  # fmt: skip


class How(NamedTuple):
    """Static choices of the split kernel. Bits depend on `split` and the tile's keys alone.

    Attributes:
        tile: query rows and keys of a product, and how its kernel is compiled.
        split: keys of a split, a multiple of the tile's.
        programs: that a multiprocessor's registers are to hold.
        many: splits of a request, beyond which its programs take whole spans; None: never.
        each: programs that share the units of a request and a kv head; None: one for each unit.
        early: whether the kernel is launched while the one ahead still runs.
    """

    tile: Tile
    split: int
    programs: int
    many: int | None
    each: int | None = None
    early: bool = True

    def units(self, widest: int) -> int:
        """The most that a request has of them under a block table of so many keys."""
        splits = -(-widest // self.split)
        return splits if self.many is None else max(min(self.many, splits), -(-splits // SPLITS))


def how_to(config: Any, rows: int, widest: int, pairs: int, places: int) -> How:
    """By static shapes: `widest` keys in the block table, `pairs` of a request and a kv head.

    Requests go by spans where spans alone fill the multiprocessors (`places`), if all requests were
    as long. Splits and keys follow from `widest` and the config: bits are the same for any R.
    """
    rows = power_of_two(rows, at_least=16)
    width = power_of_two(config.head_dim, at_least=16)
    exact, large = compute_dtype(config) == torch.float32, rows > 16 or width > 128
    split = next(split for most, split in LENGTHS if widest <= most)
    keys = 64 if widest <= SHORT and width <= 128 and not exact else 32
    if width > 128 and widest <= SHORT // 4 and not exact:
        split = 2 * keys
    how = How(Tile(rows, keys, 4, 1 if exact else 3), split, 2, None)
    splits, wide = how.units(widest), keys * width > 4096  # numbers of a tile
    many = 0 if pairs >= places else SPLITS * places // pairs
    if many >= splits:
        each = (2 if wide else 4) * places // pairs
        if each < splits and not large:  # as many as run at once
            return how._replace(each=each, programs=-(-pairs * each // places))
        if split <= 2 * keys:  # FEW: both tiles in registers
            return how._replace(programs=2 if large else 3)
    else:
        how = how._replace(many=many)
        how = how._replace(each=shared(how.units(widest), -(-splits // SPLITS), pairs, places))
    there = -(-pairs * (how.each or how.units(widest)) // places)
    warps, stages, programs = compiled_for(there, rows, keys, width, how.units(widest) == 1)
    if not exact:
        how = how._replace(tile=Tile(rows, keys, warps, stages))
    return how._replace(programs=min(programs, there))


def compiled_for(there: int, rows: int, keys: int, width: int, whole: bool) -> tuple[int, int, int]:
    """Warps, stages, and programs that registers are for, where `there` share a processor.

    Fewer programs have more of their keys on the way at a time. us of 8 kv heads on an H200, tables
    as wide as requests are long: of heads of 128, 32 x 512 takes 22 by three stages, 29 by two; 16
    x 4096 72 by four programs, 87 by three, where one more is left for each to end alone; 64 x 512
    38 by two warps, 40 by four, longer ones as much less by four. Of heads of 64, 64 x 4096 takes
    135 by eight programs, 141 by four; 24 x 4096 55 by six, 65 by four.

    Args:
        whole: whether a program has all keys of its request.
    """
    wide = keys * width > 4096
    if rows > 16 or width > 128:
        fits = 4 if rows <= 32 and width <= 128 else 2
        return (4, 2, 2) if wide and width <= 128 else (4, 3, fits)
    if there <= 3:
        return 4, 3, there
    if wide:
        return 2 if whole else 4, 2, 4
    if keys == 64 and there > 4 and not whole:
        return (2, 3, 6) if there <= 6 else (2, 2, 8)
    return 2, 3, 4


def shared(units: int, spans: int, pairs: int, places: int) -> int | None:
    """Programs of a pair that take its units in turn; None: as many as units.

    As many as spans, and at least FILL a multiprocessor; if a multiprocessor came to have over
    MOST, as many fewer as make whole turns.
    """
    enough = max(spans, FILL * places // pairs)
    turns = -(-enough * pairs // (MOST * places))
    each = -(-enough // turns)
    return each if each < units else None


# Keys in the table, in a split: on an H200 1 x 4096 takes 8.5 us by 128, 9.8 by 256; 1 x 32768
# 40 by 512, 51 by 256. Tiles of 64 keys bring steps of 8 x 4096 from 5.71 to 5.47 ms (8B) and from
# 1.43 to 1.37 (1B); longer requests gain nothing by them.
SHORT = 4096
LENGTHS = ((SHORT, 128), (16384, 256), (float("inf"), 512))
# Programs of a multiprocessor: 8 x 4096 takes 40 us by 2, 44 by 4; 64 x 512 in a table for 131072
# 52 by 64, 61 by 124.
FILL, MOST = 2, 64


@triton.jit(do_not_specialize=COUNTS)
def split_kernel(
    q, k_cache, v_cache, starts, lens, tables, sinks, k_scale, v_scale, out_scale,
    parts, tops, totals, done, out, R, HEADS, UNITS, EACH, many, q_row, q_head,
    k_block, k_slot, k_head, v_block, v_slot, v_head, table_row,
    out_row, out_head, k_step, v_step, scale, softcap, window,
    ALIKE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, FLOAT32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    Q: tl.constexpr, SPLIT: tl.constexpr, SPAN: tl.constexpr, PER: tl.constexpr,
    SHARED: tl.constexpr, FINAL: tl.constexpr, K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr, ROUNDS: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One unit of the keys that a request sees, or with SHARED every EACH-th of them.

    They count from the first of which it sees any key. Requests of more than `many` splits go by
    spans of SPAN keys, if it is more than SPLIT. With FINAL one unit holds all keys of a request,
    if there are any. Else whichever program of a request and kv head is the last merges them.

    What is read before the wait are integers of the batch, which no kernel that starts the next
    one early writes; keys and values are asked for by then, and read behind it. Where a unit is one
    tile or two (FEW), they are read before the next kernel begins: its weights would come first.
    """
    head = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1)
    unit = tl.program_id(2)  # late ones last: most are past the end
    m = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    length = tl.load(lens + r)
    begin = tl.load(starts + r)
    new = tl.load(starts + r + 1) - begin
    query_head = head * GROUP + m % GROUP
    first = 0
    if WINDOW:
        first = tl.maximum(length - tl.maximum(new, 1) - window + 1, 0)
    size = SPLIT
    if SPAN > SPLIT:
        size = tl.where(by_spans(first, length, many, SPLIT), SPAN, SPLIT)
    count = (length + size - 1) // size - first // size
    table = tables + r.to(tl.int64) * table_row
    k_cache += head * by_step(k_head, STEP)
    v_cache += head * by_step(v_head, STEP)
    k_block, k_slot = by_step(k_block, STEP), by_step(k_slot, STEP)
    v_block, v_slot = by_step(v_block, STEP), by_step(v_slot, STEP)
    FIT: tl.constexpr = ROWS * WIDTH <= 8192  # with two tiles in registers
    FEW: tl.constexpr = FIT and SPLIT <= 2 * KEYS and SPAN == SPLIT and not SHARED
    key = first // size * size + unit * size
    if EARLY:
        if count > unit:
            n = within(key + tl.arange(0, SPLIT), first, length)
            block = tl.load(table + n // SIZE).to(tl.int64)
            ask_for_rows(k_cache + block * k_block + n % SIZE * k_slot, D)
            ask_for_rows(v_cache + block * v_block + n % SIZE * v_slot, D)
    blocks, keys, values = (), (), ()  # one a tile; mypy takes () for a tuple that stays empty
    if FEW:
        for tile in tl.static_range(SPLIT // KEYS):
            n, _, some = seen(key + tile * KEYS, first, length, KEYS)
            blocks += (tl.load(table + n // SIZE, mask=some, other=0),)  # type: ignore[assignment]
    wait(EARLY)
    if unit == 0:  # rows past the last request; with FINAL always
        row = r * Q + m // GROUP
        at = row.to(tl.int64) * out_row + query_head * out_head
        past = (m < Q * GROUP) & (row >= tl.load(starts + R))
        zeros = tl.zeros((ROWS, WIDTH), out.dtype.element_ty)
        tl.store(out + at[:, None] + d[None, :], zeros, mask=past[:, None] & (d < D)[None, :])
    real = m < new * GROUP
    token = (begin + m // GROUP).to(tl.int64)
    there = real[:, None] & (d < D)[None, :]
    at = token * q_row + query_head * q_head
    x = tl.load(q + at[:, None] + d[None, :], mask=there, other=0.0)
    by_k = tl.load(k_scale + head * k_step) if K_SCALED else 1.0
    by_v = tl.load(v_scale + head * v_step) if V_SCALED else 1.0
    out_at = (token * out_row + query_head * out_head)[:, None] + d[None, :]
    pair = (r.to(tl.int64) * HEADS + head) * UNITS * (Q * GROUP)  # the first of its sums
    units = tl.minimum(count, UNITS)  # a length past the table must not reach what is another's
    if FEW:
        for tile in tl.static_range(SPLIT // KEYS):
            n, _, some = seen(key + tile * KEYS, first, length, KEYS)
            block, row = blocks[tile].to(tl.int64), n % SIZE
            k_at = (block * k_block + row * k_slot)[:, None] + d[None, :]
            v_at = k_at if ALIKE else (block * v_block + row * v_slot)[:, None] + d[None, :]
            mask = some[:, None] & (d < D)[None, :]
            keys += (tl.load(k_cache + k_at, mask=mask, other=0.0),)
            values += (tl.load(v_cache + v_at, mask=mask, other=0.0),)
    let_next(EARLY)  # not before: weights that it reads ahead would be in front of these
    alone = units <= 1  # whose sums are the result; one program, too, for tokens that see no key
    rounds = 1
    if SHARED:
        rounds = tl.cdiv(tl.maximum(units, 1) - unit, EACH)
    elif not FINAL:
        rounds = (tl.maximum(units, 1) > unit).to(tl.int32)
    IN_ONE: tl.constexpr = SHARED and SPAN == SPLIT  # by spans it would be 4 % of the time longer
    at = pair + unit * (Q * GROUP) + m
    for _ in tl.range(0, tl.minimum(rounds, 1) if IN_ONE else rounds, num_stages=1):
        query = x.to(tl.float32) if FLOAT32 else x
        position = length - new + m // GROUP
        if FEW:
            acc, top, weights = nothing(ROWS, WIDTH)
            for tile in tl.static_range(SPLIT // KEYS):
                n, live, _ = seen(key + tile * KEYS, first, length, KEYS)
                acc, top, weights = sum_tile(
                    query, keys[tile], values[tile], n.to(tl.int32), live, position,
                    acc, top, weights, scale * by_k, softcap, window,
                    CAUSAL, WINDOW, SOFTCAP, KEYS, Q,
                )  # fmt: skip
            total = tl.max(weights, 1)
        else:
            end = tl.minimum(length, (first // size + units) * size)
            acc, top, total, at = sum_units(
                query, position, key, size, first, end, rounds, EACH, table,
                k_cache, v_cache, k_block, k_slot, v_block, v_slot, scale * by_k, softcap, window,
                parts, tops, totals, at, real,
                ALIKE, SIZE, D, WIDTH, CAUSAL, WINDOW, SOFTCAP, ROWS, KEYS, Q, SPLIT, SPAN, IN_ONE,
                Q * GROUP,
            )  # fmt: skip
        if FINAL or alone:
            acc *= finish(top, total, sinks, query_head, real, by_v, SINKS)[:, None]
            put_rounded(out + out_at, acc, out_scale, q, there, ROUNDS)
        else:
            put_sums(parts, tops, totals, at, acc, top, total, real, D, WIDTH)
        key += EACH * size
        at += EACH * (Q * GROUP)
    if not FINAL:
        sharers = tl.minimum(units, EACH)
        if not alone and unit < sharers:
            tl.debug_barrier()
            before = tl.atomic_add(done + r * HEADS + head, 1, sem="acq_rel", scope="gpu")
            if before == sharers - 1:
                COUNT: tl.constexpr = triton.next_power_of_2(Q * GROUP)  # ROWS has more
                i = tl.arange(0, COUNT)
                used = i < new * GROUP
                owner = head * GROUP + i % GROUP
                # PER loads go together: of a span's splits, or of PER spans
                if SPAN > SPLIT and size > SPLIT:
                    sums, most, weight = merge_units(
                        parts + pair * D, tops + pair, totals + pair, i, used, first // size, units,
                        1, D, WIDTH, COUNT, Q * GROUP, 1, PER,
                    )  # fmt: skip
                else:
                    sums, most, weight = merge_units(
                        parts + pair * D, tops + pair, totals + pair, i, used, first // size, units,
                        PER, D, WIDTH, COUNT, Q * GROUP, PER, 1,
                    )  # fmt: skip
                sums *= finish(most, weight, sinks, owner, used, by_v, SINKS)[:, None]
                into = out + (begin + i // GROUP).to(tl.int64) * out_row + owner * out_head
                real_sums = used[:, None] & (d < D)[None, :]
                put_rounded(into[:, None] + d[None, :], sums, out_scale, q, real_sums, ROUNDS)


@triton.jit
def sum_units(
    q, position, key, size, first, end, rounds, EACH, table, k_cache, v_cache,
    k_block, k_slot, v_block, v_slot, scale, softcap, window, parts, tops, totals, at, real,
    ALIKE: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, Q: tl.constexpr, SPLIT: tl.constexpr, SPAN: tl.constexpr,
    IN_ONE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A unit's keys, which are `size` from `key` on, in splits: weighted values, largest scores,
    sums of weights; and `at`, where they belong.

    With IN_ONE `rounds` units, each a split, EACH from one another, are one row of tiles: those of
    the next are on their way while the last one's are summed. All sums but the last are put.

    A tile's blocks are looked up while the tile before is summed, so that its keys can be on their
    way a tile earlier.
    """
    d = tl.arange(0, WIDTH)
    part, part_top, part_total = nothing(ROWS, WIDTH)
    acc, top, total = part, part_top, tl.zeros((ROWS,), tl.float32)
    hop = 0  # from the end of a unit to the next one
    stop = tl.minimum(end, key + size)
    if IN_ONE:
        hop = (EACH - 1) * SPLIT
        stop = tl.minimum(end, key + (rounds - 1) * EACH * SPLIT + SPLIT) - (rounds - 1) * hop
    begin = tl.maximum(key, first // KEYS * KEYS)
    ahead = tl.load(table + within(begin + tl.arange(0, KEYS), first, end) // SIZE)
    for start in tl.range(begin, stop, KEYS):
        n = start + (start - key) // SPLIT * hop + tl.arange(0, KEYS)
        after = start + KEYS
        after += (after - key) // SPLIT * hop
        block = ahead.to(tl.int64)
        ahead = tl.load(table + within(after + tl.arange(0, KEYS), first, end) // SIZE)
        row = within(n, first, end) % SIZE
        k_at = (block * k_block + row * k_slot)[:, None] + d[None, :]
        v_at = k_at if ALIKE else (block * v_block + row * v_slot)[:, None] + d[None, :]
        if WIDTH == D:
            k = tl.load(k_cache + k_at)
            v = tl.load(v_cache + v_at)
        else:
            k = tl.load(k_cache + k_at, mask=(d < D)[None, :], other=0.0)
            v = tl.load(v_cache + v_at, mask=(d < D)[None, :], other=0.0)
        live = (n >= first) & (n < end)
        part, part_top, part_total = sum_tile(
            q, k, v, n, live, position, part, part_top, part_total, scale, softcap, window,
            CAUSAL, WINDOW, SOFTCAP, KEYS, Q,
        )  # fmt: skip
        if SPAN > SPLIT or IN_ONE:
            if (start + KEYS) % SPLIT == 0:
                acc, top, total = fold(acc, top, total, part, part_top, tl.max(part_total, 1))
                part, part_top, part_total = nothing(ROWS, WIDTH)
                if IN_ONE:
                    if start + KEYS < stop:
                        put_sums(parts, tops, totals, at, acc, top, total, real, D, WIDTH)
                        acc, top, _ = nothing(ROWS, WIDTH)
                        total = tl.zeros((ROWS,), tl.float32)
                        at += EACH * STEP
    acc, top, total = fold(acc, top, total, part, part_top, tl.max(part_total, 1))
    return acc, top, total, at


@triton.jit
def put_sums(
    parts, tops, totals, at, acc, top, total, real, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Those of a unit, for who merges them: rows `at` that are `real`."""
    d = tl.arange(0, WIDTH)
    tl.store(tops + at, top, mask=real)
    tl.store(totals + at, total, mask=real)
    tl.store(parts + at[:, None] * D + d[None, :], acc, mask=real[:, None] & (d < D)[None, :])


@triton.jit
def sum_tile(
    q, k, v, n, live, position, part, top, total, scale, softcap, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KEYS: tl.constexpr,
    Q: tl.constexpr,
):  # fmt: skip
    """A split's sums so far, and those of a further tile of its keys n.

    Weights are summed by a product with ones: no warp waits for another, and the order of the sum
    is the tile's, however many warps share it.
    """
    scores = score(
        q, k, n, live, position, scale, softcap, window, CAUSAL and Q > 1, WINDOW, SOFTCAP, True
    )
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None]).to(q.dtype)
    fade = tl.exp2(top - base)[:, None]
    ones = tl.full((KEYS, 16), 1.0, q.dtype)
    total = tl.dot(weights, ones, total * fade, input_precision="ieee")
    part = tl.dot(weights, v.to(q.dtype), part * fade, input_precision="ieee")
    return part, higher, total


@triton.jit
def nothing(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A split's sums before its first tile: values, largest scores, weights 16 times."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    return tl.zeros((ROWS, WIDTH), tl.float32), top, tl.zeros((ROWS, 16), tl.float32)


@triton.jit
def seen(begin, first, length, KEYS: tl.constexpr):
    """What `sum_units` reads of a tile: the nearest keys first <= n < length; which of the tile's
    are such themselves; whether any is, for each."""
    n = begin + tl.arange(0, KEYS)
    some = (begin + tl.zeros_like(n) < length) & (begin + KEYS + tl.zeros_like(n) > first)
    return within(n, first, length), (n >= first) & (n < length), some


@triton.jit
def within(n, first, last):
    """The nearest keys first <= n < last: ones to read, if the table has `last` of them."""
    return tl.maximum(tl.minimum(n, last - 1), first).to(tl.uint32)
