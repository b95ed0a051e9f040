"""However a decode batch is shared by programs, bits are the same: on CUDA, or interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_cases import WHERE, build, padded, part, reference as right, run, wide

from fngraph.ops import ATTENTION
from fngraph.ops.triton import launching as triton_launch
from fngraph.testing.cases import arguments
from fngraph.testing.differences import worst_row

GPU = WHERE == "cuda"
pytestmark = [pytest.mark.gpu] if GPU else []
if triton_launch.missing() is None:
    from fngraph.ops.triton.attention import decode as triton_decode
    from fngraph.ops.triton.attention.keys import Tile
# past tokens: up to 35 splits of 32, or 54, in spans of 256
LONG = (299, 1700 if GPU else 1100, 0)
SHORT = (200, 7, 253)  # in one span
CASES = [(Q, pasts, plain) for Q in (1, 3) for pasts in (LONG, SHORT) for plain in (True, False)]
if not GPU:  # each pair of them: interpreted, the product takes a minute
    CASES = [(1, LONG, False), (3, LONG, True), (1, SHORT, True), (3, SHORT, False)]
# whole spans of all, of the longer ones, of the longest, of none; by as many programs, or by fewer
WAYS = ((0, None), (0, 2), (7, 3), (9, None), (100, 1), (None, None), (None, 2))


def attend(c: Any, Q: int, how: Any, **options: Any) -> torch.Tensor:
    """Keys are read alone: `run` has written them."""
    out = torch.full_like(c.q, float("nan"))
    given = arguments(c, out, **options)
    triton_decode.attend(ATTENTION.make_args(given, ATTENTION.configure(*given), None), Q, how)
    return out


@pytest.mark.parametrize(("Q", "pasts", "plain"), CASES)
@pytest.mark.parametrize("tiles", [1, 2] if GPU else [None])  # of a split: both are read at once
def test_every_way_of_taking_units_gives_the_same_bits(Q, pasts, plain, tiles):
    keys = 32 // (tiles or (1 if plain else 2))
    dtype = torch.bfloat16 if GPU else torch.float32
    c = build(
        *((Q, past) for past in pasts), heads=(8, 2, 128) if GPU else (4, 2, 16), dtype=dtype,
        block_size=16, pad_tokens=Q, pad_reqs=1, query_len=Q,
    )  # fmt: skip
    c.meta = c.meta._replace(
        block_tables=wide(c.meta.block_tables, 16) if pasts is SHORT else c.meta.block_tables
    )
    options: dict[str, Any] = {}
    if not plain:
        options = {
            "window": 45,  # the first request's begins with the last key of a split and of a span
            "sinks": torch.randn(c.q.shape[1]).to(WHERE),
            "v_scale": torch.rand(2).to(WHERE) + 0.5, "k_scale": torch.tensor(0.7).to(WHERE),
        }  # fmt: skip
    run("reference", c, Q, **options)  # writes the caches
    c.v_cache = torch.cat([c.v_cache] * 2, -1)[..., : c.v_cache.shape[-1]]  # of other strides
    found, hows = [], []
    warps = (1, 2, 4) if GPU else (4,)
    for num_warps in warps:
        for many, each in WAYS:
            tile = Tile(16, keys, num_warps, 3 if GPU else 1)
            how = triton_decode.How(tile, 32, 2, many, each)
            hows.append(how)
            found.append(attend(c, Q, how, **options))
    assert all(x.equal(found[0]) for x in found[1:])
    if not plain:  # what is not finite is so in every way: a value in a tile that is not full
        block = c.meta.block_tables[0, (pasts[0] + Q - 1) // 16]
        c.v_cache[block, (pasts[0] + Q - 1) % 16, :, 1] = torch.inf
        odd = [attend(c, Q, how, **options) for how in hows]
        for x in odd[1:]:
            torch.testing.assert_close(x, odd[0], rtol=0, atol=0, equal_nan=True)
        assert not odd[0].isfinite().all()
    assert found[0][-Q:].eq(0).all()
    assert worst_row(found[0], right(c, **options)) < (1e-2 if GPU else 1e-5)


def test_more_spans_than_are_loaded_together_are_all_merged():
    """20 and 11 spans of 256 keys, of which 8 are loaded at a time."""
    c = build((1, 5000), (1, 2700), heads=(2, 1, 16), block_size=16, query_len=1)
    run("reference", c, 1)
    found = []
    for many, each in ((0, None), (0, 3), (100, None), (None, None)):
        found.append(attend(c, 1, triton_decode.How(Tile(16, 32, 4, 1), 32, 2, many, each)))
    assert all(x.equal(found[0]) for x in found[1:])
    assert worst_row(found[0], right(c)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 24, 64])
def test_what_bits_depend_on_follows_from_the_table_alone(rows, D, dtype):
    """Splits and tiles of keys are the same for one request and for thousands."""
    c = build((1, 0), heads=(4, 2, D), dtype=dtype)
    config = ATTENTION.configure(*arguments(c, c.q))._replace(device="cuda")
    for widest in (16, 4096, 4112, 16384, 16400, 131072):
        hows = [
            triton_decode.how_to(config, rows, widest, pairs, 132) for pairs in (1, 32, 600, 9999)
        ]
        assert len({(how.split, how.tile.keys) for how in hows}) == 1
        assert [how.many == 0 for how in hows] == [False, False, True, True]
        assert hows[0].split % hows[0].tile.keys == 0


def test_programs_that_share_units_are_fewer_and_fill_the_device():
    c = build((1, 0), heads=(4, 2, 128), dtype=torch.bfloat16)
    config = ATTENTION.configure(*arguments(c, c.q))._replace(device="cuda")
    each = {}
    for pairs in (1, 8, 16, 32, 64, 128, 131, 132, 512, 1024, 2400):
        for widest in (16, 1024, 4096, 8192, 32768, 131072):
            how = triton_decode.how_to(config, 4, widest, pairs, 132)
            each[pairs, widest] = how.each
            if how.each is not None:
                assert 1 <= how.each < how.units(widest)
                assert how.each * pairs <= 64 * 132 + pairs
                assert how.each * pairs >= 2 * 132 - pairs
    assert each[8, 4096] is each[512, 32768] is None
    assert each[32, 4096] == 8 and each[64, 1024] == 4  # 2 a multiprocessor, of splits
    assert each[32, 8192] == 16  # 4, of smaller tiles
    assert each[64, 4096] == 4 and each[8, 131072] == 33  # 2 a multiprocessor
    assert each[64, 32768] == 8  # as many as spans
    assert each[512, 131072] == 16 and each[1024, 131072] == 8  # 64 a multiprocessor


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="as many requests as a key of a serving loop has")
@pytest.mark.parametrize("Q", [1, 4])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_a_row_s_bits_are_the_same_whatever_the_size_of_the_key(Q, D, cache):
    """1 to 300 requests over tables for 400 to 8192 keys: units of every kind are chosen."""
    dtype = torch.float32 if cache is torch.float32 else torch.bfloat16
    for past in (390, 3000, 8000):
        rows = [(Q, past), (Q, past // 3)]
        c = build(*rows, heads=(8, 2, D), dtype=dtype, cache_dtype=cache, block_size=16)
        B = c.meta.block_tables.shape[1]
        want = torch.cat([run("triton_decode", part(c, r, B), Q) for r in range(2)])
        assert worst_row(want, right(c)) < (1e-5 if cache is torch.float32 else 1e-2)
        for more in (2, 14, 30, 62, 298):
            larger = padded(c, more, Q)
            assert run("triton_decode", larger, Q)[: len(want)].equal(want)
