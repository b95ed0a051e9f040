"""Triton's attention kernels against `reference`: on CUDA with `-m gpu`, else interpreted.

Without a GPU, test_triton_interpreter.py runs this file in a Python that interprets kernels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from triton_cases import (
    ALL,
    BATCHES,
    DTYPES,
    GPU,
    UNIFORM,
    WHERE,
    build,
    dense,
    padded,
    part,
    reference,
    run,
    turn,
    wide,
)  # fmt: skip

from fngraph.errors import BackendError
from fngraph.testing.cases import NAN, Case, cut_from_one
from fngraph.testing.differences import TOLERANCE, bits, worst_row

pytestmark = [pytest.mark.gpu] if GPU else []
FP8 = torch.float8_e4m3fn
HEADS = [(4, 2, 16), (6, 2, 24), (5, 1, 8), (2, 2, 80)]  # (query heads, kv heads, head dim)
BLOCKS = [1, 3, 16]
if GPU:
    HEADS = [
        (32, 8, 128), (8, 8, 64), (12, 3, 80), (8, 1, 96), (28, 4, 128), (16, 2, 256), (71, 1, 64),
        (6, 2, 112), (4, 4, 192),
    ]  # fmt: skip
    BLOCKS = [1, 16, 32, 256]
BACKENDS = ["triton", "triton_decode"]


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("backend", BACKENDS if GPU else BACKENDS[1:])
def test_any_mix_of_requests(backend, rows, dtype):
    """`triton_decode` too: in PIECEWISE it is called with whatever comes."""
    c = build(*rows, dtype=dtype, pad_tokens=3, pad_reqs=2)
    want = reference(c)
    got = run(backend, c)
    assert got[-3:].eq(0).all() and worst_row(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", UNIFORM)
@pytest.mark.parametrize("backend", BACKENDS if GPU else BACKENDS[1:])
def test_uniform_batches_padded_with_requests_of_no_length(backend, query_len, dtype):
    c = build(
        *UNIFORM[query_len], dtype=dtype, pad_tokens=2 * query_len, pad_reqs=2, query_len=query_len
    )
    want = reference(c)
    got = run(backend, c, query_len)
    assert got[-2 * query_len :].eq(0).all() and worst_row(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims_and_groups(heads, dtype):
    for rows, query_len in (([(3, 5), (1, 40), (9, 0)], None), ([(2, 5), (2, 140)], 2)):
        c = build(*rows, heads=heads, dtype=dtype, block_size=16)
        want = reference(c)
        assert worst_row(run("triton_decode", c, query_len), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("query_len", [None, 1])
def test_block_sizes(block_size, query_len):
    rows = [(1, 5), (1, 150)] if query_len else [(3, 5), (1, 40), (9, 30)]
    c = build(*rows, block_size=block_size, heads=(4, 2, 16))
    want = reference(c)
    assert worst_row(run("triton_decode", c, query_len), want) < 1e-5


@pytest.mark.parametrize("options", [
    {"window": 1}, {"window": 130}, {"softcap": 50.0}, {"scale": 0.0},
    {"softcap": 1e-3}, {"softcap": 1.0}, {"softcap": 1e3}, {"softcap": 1e6},
    {"scale": 0.7, "window": 33, "softcap": 2.0},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("query_len", [None, 2])
def test_windows_softcaps_and_scales(options, query_len):
    rows = [(2, 5), (2, 0), (2, 158)] if query_len else [(3, 5), (1, 70), (20, 3)]
    c = build(*rows, heads=(4, 2, 16))
    want = reference(c, **options)
    assert worst_row(run("triton_decode", c, query_len, **options), want) < 1e-5


TURNS: dict[str, dict[str, Any]] = {
    "turned": {"normed": False}, "a share of a head": {"normed": False, "share": 6},
    "by whole angles": {"normed": False, "share": 1}, "normed": {"normed": True},
    "centred": {"normed": True, "centred": True},
}  # fmt: skip


@pytest.mark.parametrize("how", TURNS)
@pytest.mark.parametrize("query_len", [None, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_q_and_k_are_turned_on_the_way(how, query_len, dtype):
    """In one launch with what writes the cache, which is that of an op each, but for a norm's last
    place; padding, whose angles are NaN, is written nowhere."""
    rows = [(1, 5), (1, 150)] if query_len else [(3, 5), (1, 40), (9, 30)]
    more = {"pad_tokens": 2, "pad_reqs": 2, "query_len": query_len or 0}
    c = cut_from_one(build(*rows, heads=(6, 2, 24), dtype=dtype, block_size=16, **more))
    options = turn(c, **TURNS[how])
    want = reference(c, **options)
    theirs = dataclasses.replace(c, k_cache=c.k_cache.clone(), v_cache=c.v_cache.clone())
    run("reference", theirs, **options)
    off = worst_row(run("triton_decode", c, query_len, **options), want)
    assert off < 1.5 * TOLERANCE[dtype]  # one rounding more
    assert bits(c.v_cache).equal(bits(theirs.v_cache))
    if options["q_norm"] is None and not GPU:
        assert bits(c.k_cache).equal(bits(theirs.k_cache))
    last = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(c.k_cache, theirs.k_cache, atol=last, rtol=last, equal_nan=True)


@pytest.mark.parametrize("rows, query_len", [
    ([(3, 5), (1, 40), (9, 30)], None), ([(1, 5), (1, 60)], 1), ([(1, 400)], 1),
    ([(2, 5), (2, 0), (2, 158)], 2),
], ids=["mixed", "one unit", "several units", "verify"])  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_in_fp8(rows, query_len, dtype):
    """Rounded in the kernel that makes it, next to what an op behind it would give at most."""
    reqs = 2 if len(rows) > 1 else 0  # one alone is split: its units are merged
    more = {"pad_tokens": reqs * (query_len or 1), "pad_reqs": reqs, "query_len": query_len or 0}
    heads = (4, 2, 24) if reqs else (4, 1, 24)
    c = build(*rows, heads=heads, dtype=dtype, block_size=16, **more)
    scale = torch.tensor(0.0004, device=WHERE)
    plain = run("triton_decode", c, query_len)
    out = torch.full(c.q.shape, NAN, device=WHERE).to(FP8)
    got = run("triton_decode", c, query_len, out=out, out_scale=scale)
    want = torch.ops.fngraph.quantize_fp8(plain, scale)
    assert got.dtype == FP8 and (want.float().abs() == 448).any()
    assert got.float().equal(want.float())


@pytest.mark.parametrize("query_len", [None, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_in_fp8(query_len, dtype):
    c = build((1, 37), (1, 200), (1, 0), heads=(4, 2, 32), dtype=dtype, block_size=16)
    c.k_cache, c.v_cache = c.k_cache.to(FP8), c.v_cache.to(FP8)
    want_caches = [x.clone() for x in (c.k_cache, c.v_cache)]
    got = run("triton_decode", c, query_len)
    assert worst_row(got, dense(c)) < TOLERANCE[dtype]
    for cache, old, new in zip((c.k_cache, c.v_cache), want_caches, (c.k, c.v)):
        rows = old.view(torch.uint8).view(-1, *new.shape[1:])
        rows[c.meta.slot_mapping] = new.float().to(FP8).view(torch.uint8)
        assert bits(cache).equal(bits(old))


@pytest.mark.parametrize("query_len", [None, 1])
@pytest.mark.parametrize("window", [None, 9] if GPU else [9])
@pytest.mark.parametrize("what", ["sinks", "bidirectional", "scales", "cut out", "all"])
def test_sinks_cache_scales_and_bidirectional_attention(what, window, query_len):
    rows = [(1, 0), (1, 140)] if query_len else [(1, 0), (20, 0), (3, 60)]
    pads = {"pad_reqs": 2, "query_len": 1} if query_len else {}  # as a uniform key has them
    c = build(*rows, heads=(4, 2, 16), pad_tokens=2, **pads)
    options: dict[str, Any] = {"window": window} | {
        "sinks": {"sinks": torch.tensor([3.0, -1.0, 0.0, 90.0], device=WHERE)},
        "bidirectional": {"causal": False},
        "scales": {"k_scale": torch.tensor(0.7, device=WHERE),
                   "v_scale": torch.tensor([3.0, 0.2], device=WHERE)},
        "cut out": {"sinks": torch.tensor([3.0, 7.0, -1.0, 7.0, 0.0, 7.0, 90.0]).to(WHERE)[::2],
                    "k_scale": torch.tensor([0.7, 9.0, 1.3], device=WHERE)[::2],
                    "v_scale": torch.tensor([3.0, 9.0, 0.2], device=WHERE)[::2]},
    }.get(what, {})  # fmt: skip
    if what == "all":
        options |= {
            "causal": False, "sinks": torch.randn(4, device=WHERE),
            "k_scale": torch.rand(2, device=WHERE) + 0.5, "v_scale": torch.tensor(2.0).to(WHERE),
        }  # fmt: skip
    got = run("triton_decode", c, query_len, **options)
    real = got[:, :3]  # head 3's sink takes nearly all: nothing comes of it
    want = dense(c, **options)
    assert worst_row(real, want[:, :3]) < 1e-5
    assert got[-2:].eq(0).all() and (got[:, 3] - want[:, 3]).abs().max() < 1e-5


@pytest.mark.parametrize("scale", [0.03, 20.0])
def test_an_fp8_cache_with_scales_holds_what_is_left_after_dividing(scale):
    c = build((3, 6), (1, 30), heads=(4, 2, 16), block_size=16)
    c.k_cache, c.v_cache = c.k_cache.to(FP8), c.v_cache.to(FP8)
    c.v[0] *= 1e5  # what is left of it is beyond the range
    by = torch.tensor([scale, 2 * scale], device=WHERE)
    before = [x.clone() for x in (c.k_cache, c.v_cache)]
    got = run("triton", c, k_scale=by, v_scale=by)
    assert worst_row(got, dense(c, k_scale=by, v_scale=by)) < 1e-5
    for cache, old, new in zip((c.k_cache, c.v_cache), before, (c.k, c.v)):
        rows = old.view(torch.uint8).view(-1, *new.shape[1:])
        rows[c.meta.slot_mapping] = (new / by[:, None]).clamp(-448, 448).to(FP8).view(torch.uint8)
        assert bits(cache).equal(bits(old))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_is_written_exactly_and_slot_minus_one_writes_nothing(dtype):
    c = build((3, 6), (1, 3), (4, 0), dtype=dtype, pad_tokens=3)
    slots = c.meta.slot_mapping.clone()
    slots[[0, 4]] = -1
    c.meta = c.meta._replace(slot_mapping=slots)
    want = [x.clone() for x in (c.k_cache, c.v_cache)]
    run("triton", c)
    for cache, old, new in zip((c.k_cache, c.v_cache), want, (c.k, c.v)):
        old.view(-1, *new.shape[1:])[slots[slots >= 0]] = new[slots >= 0]
        assert bits(cache).equal(bits(old))


def test_strided_inputs_caches_and_outputs():
    """q, k and v cut out of one tensor; two caches of different strides."""
    c = build((3, 5), (1, 7), (4, 0), heads=(4, 2, 8))
    want = reference(c)
    qkv = torch.cat([c.q, c.k, c.v], 1)
    c.q, c.k, c.v = qkv.split([4, 2, 2], 1)
    both = torch.stack([c.k_cache, c.k_cache], 1)
    c.k_cache = both[:, 0]
    assert not c.k_cache.is_contiguous()
    assert worst_row(run("triton", c), want) < 1e-5
    assert worst_row(run("triton_decode", c, 1), want) < 1e-5  # 1 is wrong, and T tells


@pytest.mark.parametrize(("rows", "query_len"), [(BATCHES["mixed"], None), (UNIFORM[3], 3)])
def test_real_rows_are_bitwise_the_same_whatever_padding_holds(rows, query_len):
    pads = {"pad_tokens": 2 * (query_len or 2), "pad_reqs": 2, "query_len": query_len or 0}
    plain, wild = build(*rows, **pads), build(*rows, **pads)
    real = sum(n for n, _ in rows)
    for x in (wild.q, wild.k, wild.v):
        x[real:] = NAN
    wild.meta.block_tables[len(rows) :] = 10**6
    a, b = (run("triton_decode", c, query_len) for c in (plain, wild))
    assert bits(a[:real]).equal(bits(b[:real])) and b[real:].eq(0).all()


def poison_behind_a_window_of_3(c: Case) -> None:
    for r, (_, past) in enumerate(c.rows):
        for i in range(past - 2):
            block = int(c.meta.block_tables[r, i // 4])
            c.k_cache[block, i % 4], c.v_cache[block, i % 4] = NAN, float("inf")


def test_what_is_outside_of_the_window_may_be_anything():
    for query_len, rows in ((None, [(1, 9), (2, 70)]), (1, [(1, 9), (1, 300)])):
        c = build(*rows, heads=(4, 2, 16))
        want = reference(c, window=3)
        poison_behind_a_window_of_3(c)
        assert worst_row(run("triton_decode", c, query_len, window=3), want) < 1e-5


def test_a_request_that_brings_less_than_the_query_length_has_its_own_window():
    """The key of one mixed request has as many rows; what is behind its window may be anything.

    Its first split is nothing but that, though not for four tokens.
    """
    for query_len, rows, pad_tokens in ((4, [(2, 131)], 2), (3, [(1, 5), (3, 8), (2, 161)], 3)):
        c = build(*rows, heads=(4, 2, 16), pad_tokens=pad_tokens)
        want = reference(c, window=3)
        poison_behind_a_window_of_3(c)
        assert worst_row(run("triton_decode", c, query_len, window=3), want) < 1e-5


def test_nothing_is_read_past_the_end_of_a_request_that_brings_nothing():
    c = build((3, 5), (0, 68), heads=(4, 2, 16), pad_tokens=3)
    want = reference(c, window=1)
    c.meta.block_tables[1, 17:] = 10**8  # no block there is
    assert worst_row(run("triton_decode", c, 3, window=1), want) < 1e-5


def test_an_offset_that_is_not_uniform_after_all_is_served_right():
    """T == R * query_len, yet requests differ, and the last rows are nobody's."""
    c = build((1, 5), (3, 8), (2, 200), pad_tokens=3)
    want = reference(c)
    got = run("triton_decode", c, 3)
    assert got[-3:].eq(0).all() and worst_row(got, want) < 1e-5


def test_a_batch_of_nothing_but_padding():
    for query_len in (None, 1):
        c = build((1, 0), (1, 0), pad_tokens=2)
        c.meta = c.meta._replace(
            slot_mapping=torch.full((4,), -1, device=WHERE),
            seq_lens=torch.zeros(4, dtype=torch.int32, device=WHERE),
            query_start_loc=torch.arange(5, dtype=torch.int32, device=WHERE) * (query_len or 0),
            block_tables=c.meta.block_tables[[0, 0, 1, 1]],
        )
        before = c.k_cache.clone()
        assert run("triton_decode", c, query_len).eq(0).all()
        assert bits(c.k_cache).equal(bits(before))


# --- batch invariance -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("backend", "query_len", "rows"),
    [("triton", None, [(1, 9), (20, 0), (1, 40), (3, 8)]), ("triton", 1, UNIFORM[1]),
     ("triton_decode", 1, UNIFORM[1]), ("triton_decode", 3, UNIFORM[3])],
)  # fmt: skip
def test_rows_are_bitwise_the_same_alone_and_in_any_batch(backend, query_len, rows, dtype):
    """Alone, among others, padded as for a larger key: one reduction order."""
    heads = (8, 2, 128) if GPU else (4, 2, 16)
    c = build(*rows, heads=heads, dtype=dtype)
    B = c.meta.block_tables.shape[1] + 1
    c.meta = c.meta._replace(block_tables=wide(c.meta.block_tables, B))
    alone = [part(c, r, B) for r in range(len(rows))]
    larger = padded(c, 7, query_len)
    want = torch.cat([run(backend, one, query_len) for one in alone])
    assert bits(run(backend, c, query_len)).equal(bits(want))
    assert bits(run(backend, larger, query_len)[: len(want)]).equal(bits(want))


def test_a_cache_with_gaps_in_its_last_dim_is_refused():
    c = build((3, 5))
    c.k_cache = torch.cat([c.k_cache, c.k_cache], -1)[..., ::2]
    with pytest.raises(BackendError, match="gaps in its last dim"):
        run("triton", c)
