"""Split-KV decode of what should not come, or hardly ever: nobody else's memory is written."""

from __future__ import annotations

import pytest
import torch
from test_triton_splits import attend
from triton_cases import GPU, WHERE, build, run

from fngraph.errors import BackendError
from fngraph.ops import ATTENTION
from fngraph.ops.triton import launching as triton_launch
from fngraph.testing.cases import arguments
from fngraph.testing.differences import worst_row

pytestmark = [pytest.mark.gpu] if GPU else []
if triton_launch.missing() is None:
    from fngraph.ops.triton.attention import decode as triton_decode, merging as triton_merge
    from fngraph.ops.triton.attention.keys import Tile, check_near, options


@pytest.mark.parametrize(("many", "each"), [(0, None), (0, 1), (None, None), (None, 3)])
def test_a_length_past_the_table_writes_into_nobody_s_memory(many, each):
    """Of the request that has it, the result is anything; there is room for units of the table."""
    B = 32  # 512 keys: two spans, or 16 splits
    c = build((1, 100), (1, 300), heads=(4, 2, 16), block_size=16, query_len=1, B=B)
    run("reference", c, 1)
    tables = c.meta.block_tables.repeat(1, 5)  # what lies behind the columns names blocks, too
    c.meta = c.meta._replace(block_tables=tables[:, :B])
    for cache in (c.k_cache, c.v_cache):
        cache.nan_to_num_()
    how = triton_decode.How(Tile(16, 32, 4, 1), 32, 2, many, each)
    want = attend(c, 1, how)
    c.meta.seq_lens[1] = 1200
    room = torch.zeros(4_000_000, device=WHERE)  # sums within it: writes past them are seen

    def empty(like, R, K, units, rows, D):
        n, m = R * K * units * rows * D, R * K * units * rows
        room.zero_()
        cut = lambda at, size, *shape: room[at : at + size].view(shape)  # noqa: E731
        return triton_merge.Sums(
            cut(0, n, R, K, units, rows, D), cut(1_000_000, m, R, K, units, rows),
            cut(2_000_000, m, R, K, units, rows),
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_decode, "empty", empty)
        found = attend(c, 1, how)
    assert found[0].equal(want[0])
    rows = 2 * 2 * how.units(16 * B) * 2  # of sums there is room for
    past = (slice(rows * 16, 1_000_000), slice(1_000_000 + rows, 2_000_000))
    written = sum(int(room[behind].count_nonzero()) for behind in past)  # values, largest scores
    assert not written, f"{written} numbers past the end of the sums"


def test_a_batch_of_no_requests():
    c = build((1, 5), heads=(4, 2, 16), block_size=16)
    meta = c.meta
    c.q, c.k, c.v = c.q[:0], c.k[:0], c.v[:0]
    c.meta = type(meta)(
        meta.slot_mapping[:0], meta.seq_lens[:0], meta.query_start_loc[:1], meta.block_tables[:0]
    )
    assert run("triton_decode", c, 1).shape[0] == 0


@pytest.mark.parametrize("backend", ["triton_decode", "triton"])
def test_a_table_of_no_blocks_is_a_batch_that_sees_nothing(backend):
    c = build((1, 5), (1, 9), heads=(4, 2, 16), block_size=16, query_len=1)
    c.meta = c.meta._replace(
        block_tables=c.meta.block_tables[:, :0], slot_mapping=c.meta.slot_mapping.fill_(-1)
    )
    assert run(backend, c, 1).eq(0).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("backend", ["triton_decode", "triton"])
def test_a_window_that_no_request_fills_is_none(backend, window, causal):
    """Positions are added to it in 32 bits."""
    c = build((1, 5), (1, 40), heads=(4, 2, 16), block_size=16, query_len=1)
    want = run("reference", c, 1, causal=causal)
    assert worst_row(run(backend, c, 1, causal=causal, window=window), want) < 1e-5


def test_slots_too_far_apart_for_32_bits_are_refused():
    """Memory that is only named: kernels never run."""
    c = build((1, 5), heads=(4, 2, 16), block_size=16, query_len=1)
    far = torch.empty(0, device="meta").as_strided((2, 16, 2, 16), (16, 2**28, 16, 1))
    config = ATTENTION.configure(*arguments(c, c.q))
    with pytest.raises(BackendError, match=f"v_cache: slots of a block lie {2**28} elements"):
        options(config, (c.k_cache, far))
    with pytest.raises(BackendError, match="cache: slots of a block"):  # as latent attention asks
        check_near("cache", far[:, :, 0], 16)
    check_near("cache", far[:, :, 0], 8)


def test_rows_past_the_last_request_are_zero_where_sums_are_merged():
    c = build((1, 1100), (2, 5), heads=(4, 2, 16), block_size=16, pad_tokens=3, query_len=3)
    assert run("triton_decode", c, 3)[3:].eq(0).all()
