"""Triton's latent attention against `reference`: on CUDA with `-m gpu`, else interpreted.

Without a GPU, test_triton_interpreter.py runs this file in a Python that interprets kernels.
"""

from __future__ import annotations

import pytest
import torch
from latent_cases import latent, reference, run
from triton_cases import ALL, BATCHES, DTYPES, GPU, UNIFORM, WHERE, padded, part, wide

from fngraph.testing.cases import NAN
from fngraph.testing.differences import TOLERANCE, bits, worst_row

pytestmark = [pytest.mark.gpu] if GPU else []
FP8 = torch.float8_e4m3fn
SIZES = [(6, 24, 5), (17, 16, 8), (3, 40, 0)]  # (heads, rank, rotated)
SMALL = (4, 16, 8)
if GPU:
    SIZES += [(16, 512, 64), (128, 512, 64), (71, 512, 64), (20, 256, 32), (32, 128, 64)]
    SMALL = (16, 512, 64)
BACKENDS = ["triton", "triton_decode"]
L = SMALL[1]


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", ALL if GPU else ALL[:2])
@pytest.mark.parametrize("backend", BACKENDS if GPU else BACKENDS[1:])
def test_any_mix_of_requests(backend, rows, dtype):
    """`triton_decode` too: in PIECEWISE it is called with whatever comes."""
    c = latent(*rows, sizes=SMALL, dtype=dtype, pad_tokens=3, pad_reqs=2)
    want = reference(c, L)
    got = run(backend, c, L)
    assert got[-3:].eq(0).all() and worst_row(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", UNIFORM)
@pytest.mark.parametrize("backend", BACKENDS if GPU else BACKENDS[1:])
def test_uniform_batches_padded_with_requests_of_no_length(backend, query_len, dtype):
    pads = {"pad_tokens": 2 * query_len, "pad_reqs": 2, "query_len": query_len}
    c = latent(*UNIFORM[query_len], sizes=SMALL, dtype=dtype, **pads)
    want = reference(c, L)
    got = run(backend, c, L, query_len)
    assert got[-2 * query_len :].eq(0).all() and worst_row(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_ranks_and_rotated_parts(sizes, dtype):
    for rows, query_len in (([(3, 5), (1, 40), (9, 0)], None), ([(2, 5), (2, 140)], 2)):
        c = latent(*rows, sizes=sizes, dtype=dtype, block_size=16)
        want = reference(c, sizes[1])
        assert worst_row(run("triton_decode", c, sizes[1], query_len), want) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="long contexts, of CUDA's kernels")
@pytest.mark.parametrize("cache", [None, FP8])
@pytest.mark.parametrize("query_len", [1, 2])
def test_a_batch_of_32_with_8k_of_context(query_len, cache):
    rows = [(query_len, 8192 - query_len - 250 * i) for i in range(32)]
    c = latent(*rows, sizes=SMALL, dtype=torch.bfloat16, block_size=64)
    c.k_cache = c.k_cache.to(cache or torch.bfloat16)
    want = reference(c, L)
    assert worst_row(run("triton_decode", c, L, query_len), want) < 1e-2
    assert worst_row(run("triton", c, L), want) < 1e-2


@pytest.mark.parametrize("block_size", [1, 16, 32, 256] if GPU else [1, 3, 16])
@pytest.mark.parametrize("query_len", [None, 1])
def test_block_sizes(block_size, query_len):
    rows = [(1, 5), (1, 150)] if query_len else [(3, 5), (1, 40), (9, 30)]
    c = latent(*rows, sizes=SMALL, block_size=block_size)
    want = reference(c, L)
    assert worst_row(run("triton_decode", c, L, query_len), want) < 1e-5


def test_the_scale_is_the_callers():
    c = latent((1, 5), (1, 30), sizes=SMALL)
    want = reference(c, L, scale=0.01)
    assert worst_row(run("triton", c, L, scale=0.01), want) < 1e-5
    assert worst_row(run("triton_decode", c, L, 1, scale=0.01), want) < 1e-5


@pytest.mark.parametrize("query_len", [None, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_in_fp8(query_len, dtype):
    """Rounded as `reference` does it: what is out of range is the largest number."""
    c = latent((1, 37), (1, 200), (1, 0), sizes=SMALL, dtype=dtype, block_size=16)
    c.k[0, 0, 3:5] = torch.tensor([900.0, -1e4])
    c.k_cache = c.k_cache.to(FP8)
    old = c.k_cache.clone()
    want = reference(c, L)
    assert worst_row(run("triton_decode", c, L, query_len), want) < TOLERANCE[dtype]
    rows = old.view(torch.uint8).view(-1, *c.k.shape[1:])
    rows[c.meta.slot_mapping] = c.k.float().clamp(-448, 448).to(FP8).view(torch.uint8)
    assert bits(c.k_cache).equal(bits(old))


@pytest.mark.parametrize("query_len", [None, 1])
def test_a_cache_in_another_dtype_than_queries(query_len):
    rows = [(1, 37), (1, 200)]
    c = latent(*rows, sizes=SMALL)
    c.k_cache = c.k_cache.bfloat16()
    want = reference(c, L)
    assert worst_row(run("triton_decode", c, L, query_len), want) < 1e-5
    c = latent(*rows, sizes=SMALL, dtype=torch.bfloat16)
    c.k_cache = c.k_cache.float()
    want = reference(c, L)
    assert worst_row(run("triton_decode", c, L, query_len), want) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_is_written_exactly_and_slot_minus_one_writes_nothing(dtype):
    c = latent((3, 6), (1, 3), (4, 0), sizes=SMALL, dtype=dtype, pad_tokens=3)
    slots = c.meta.slot_mapping.clone()
    slots[[0, 4]] = -1
    c.meta = c.meta._replace(slot_mapping=slots)
    for backend in BACKENDS:
        want = c.k_cache.clone()
        want.view(-1, *c.k.shape[1:])[slots[slots >= 0]] = c.k[slots >= 0]
        run(backend, c, L)
        assert bits(c.k_cache).equal(bits(want))


def test_strided_inputs_caches_and_outputs():
    """Queries and new rows cut out of one tensor; a cache that has gaps between its rows."""
    c = latent((3, 5), (1, 7), (4, 0), sizes=SMALL)
    want = reference(c, L)
    c.q, c.k = torch.cat([c.q, c.k], 1).split([SMALL[0], 1], 1)
    c.k_cache = torch.cat([c.k_cache, c.k_cache], -1)[..., : c.q.shape[-1]]
    assert not c.k_cache.is_contiguous()
    assert worst_row(run("triton", c, L), want) < 1e-5
    assert worst_row(run("triton_decode", c, L, 1), want) < 1e-5  # 1 is wrong, and T tells


@pytest.mark.parametrize(("rows", "query_len"), [(BATCHES["mixed"], None), (UNIFORM[3], 3)])
def test_real_rows_are_bitwise_the_same_whatever_padding_holds(rows, query_len):
    pads = {"pad_tokens": 2 * (query_len or 2), "pad_reqs": 2, "query_len": query_len or 0}
    plain, wild = (latent(*rows, sizes=SMALL, **pads) for _ in range(2))
    real = sum(n for n, _ in rows)
    wild.q[real:], wild.k[real:] = NAN, NAN
    wild.meta.block_tables[len(rows) :] = 10**6
    a, b = (run("triton_decode", c, L, query_len) for c in (plain, wild))
    assert bits(a[:real]).equal(bits(b[:real])) and b[real:].eq(0).all()


def test_an_offset_that_is_not_uniform_after_all_is_served_right():
    """T == R * query_len, yet requests differ, and the last rows are nobody's."""
    c = latent((1, 5), (3, 8), (2, 200), sizes=SMALL, pad_tokens=3)
    want = reference(c, L)
    got = run("triton_decode", c, L, 3)
    assert got[-3:].eq(0).all() and worst_row(got, want) < 1e-5


def test_long_queries_are_not_split():
    c = latent((20, 240), (20, 0), sizes=SMALL)
    want = reference(c, L)
    got = run("triton_decode", c, L, 20)
    assert worst_row(got, want) < 1e-5 and bits(got).equal(bits(run("triton", c, L)))


def test_a_batch_of_nothing_but_padding():
    for query_len in (None, 1):
        c = latent((1, 0), (1, 0), sizes=SMALL, pad_tokens=2)
        c.meta = c.meta._replace(
            slot_mapping=torch.full((4,), -1, device=WHERE),
            seq_lens=torch.zeros(4, dtype=torch.int32, device=WHERE),
            query_start_loc=torch.arange(5, dtype=torch.int32, device=WHERE) * (query_len or 0),
            block_tables=c.meta.block_tables[[0, 0, 1, 1]],
        )
        before = c.k_cache.clone()
        assert run("triton_decode", c, L, query_len).eq(0).all()
        assert bits(c.k_cache).equal(bits(before))


@pytest.mark.parametrize("query_len", [None, 1])
def test_a_table_of_no_blocks_is_a_batch_that_sees_nothing(query_len):
    c = latent((1, 5), (1, 9), sizes=SMALL)
    c.meta = c.meta._replace(
        block_tables=c.meta.block_tables[:, :0], slot_mapping=c.meta.slot_mapping.fill_(-1)
    )
    assert run("triton_decode", c, L, query_len).eq(0).all()


# --- batch invariance -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("backend", "query_len", "rows"),
    [("triton", None, [(1, 9), (20, 0), (1, 40), (3, 8)]), ("triton", 1, UNIFORM[1]),
     ("triton_decode", 1, UNIFORM[1]), ("triton_decode", 3, UNIFORM[3])],
)  # fmt: skip
def test_rows_are_bitwise_the_same_alone_and_in_any_batch(backend, query_len, rows, dtype):
    """Alone, among others, padded as for a larger key: one reduction order."""
    c = latent(*rows, sizes=SMALL, dtype=dtype)
    B = c.meta.block_tables.shape[1] + 1
    c.meta = c.meta._replace(block_tables=wide(c.meta.block_tables, B))
    alone = [part(c, r, B) for r in range(len(rows))]
    larger = padded(c, 7, query_len)
    want = torch.cat([run(backend, one, L, query_len) for one in alone])
    assert bits(run(backend, c, L, query_len)).equal(bits(want))
    assert bits(run(backend, larger, L, query_len)[: len(want)]).equal(bits(want))
