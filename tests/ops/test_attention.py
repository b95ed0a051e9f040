"""`reference` attention against one request at a time, one head at a time, in float64."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fngraph as fg
from fngraph.core import HostBounds
from fngraph.errors import BackendError
from fngraph.ops import (
    PRIMITIVES,
    AttentionMeta,
    Backend,
    attention,
    primitive,
    slots,
)
from fngraph.ops.paged import config as attention_config
from fngraph.ops.recurrent import requests as recurrent
from fngraph.testing.cases import BATCHES, NAN, Case, arguments, call, case
from fngraph.testing.differences import bits


def naive(
    c: Case, scale: float | None = None, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """What attention is: float64, a loop over requests, heads and tokens. Padding rows are zero."""
    q, k, v, k_cache, v_cache = (x.double().cpu() for x in (c.q, c.k, c.v, c.k_cache, c.v_cache))
    # a cache of lower precision rounds what is written to it
    k, v = (x.to(cache.dtype).double() for x, cache in ((k, c.k_cache), (v, c.v_cache)))
    S, (H, K) = k_cache.shape[1], (q.shape[1], k.shape[1])
    out = torch.zeros_like(q)
    first = 0
    for r, (n, past) in enumerate(c.rows):
        table = c.meta.block_tables[r].tolist()
        old = [(table[i // S], i % S) for i in range(past)]
        keys = torch.stack([k_cache[b, s] for b, s in old] + list(k[first : first + n]))
        values = torch.stack([v_cache[b, s] for b, s in old] + list(v[first : first + n]))
        for i in range(n):
            for h in range(H):
                seen = slice(max(0, past + i + 1 - (window or 10**9)), past + i + 1)
                scores = keys[seen, h // (H // K)] @ q[first + i, h]
                scores *= q.shape[2] ** -0.5 if scale is None else scale
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                out[first + i, h] = scores.softmax(0) @ values[seen, h // (H // K)]
        first += n
    return out


def check(c: Case, **options: Any) -> None:
    """Output equal to the naive one, caches written at the slots and nowhere else."""
    want = naive(c, **options)
    before = [x.clone() for x in (c.k_cache, c.v_cache)]
    got = c.run(**options)
    assert got.dtype == c.q.dtype and got.shape == c.q.shape
    tolerance = 2e-2 if c.q.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double().cpu(), want, atol=tolerance, rtol=tolerance)
    real = sum(n for n, _ in c.rows)
    assert got[real:].eq(0).all()  # rows that belong to no request, exactly
    for cache, old, new in zip((c.k_cache, c.v_cache), before, (c.k, c.v)):
        old.view(-1, *cache.shape[2:])[c.meta.slot_mapping[:real]] = new[:real].to(cache.dtype)
        assert bits(cache).equal(bits(old))


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_mix_of_requests(where, rows, dtype):
    check(case(*rows, dtype=dtype, device=where))


@pytest.mark.parametrize(
    "heads", [(1, 1, 8), (4, 4, 8), (4, 1, 8), (6, 2, 8), (8, 2, 16), (6, 3, 5)]
)
def test_query_heads_share_kv_heads_in_order(where, heads):
    check(case((3, 5), (1, 7), (4, 0), heads=heads, device=where))


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 32])
def test_any_block_size(where, block_size):
    check(case((3, 5), (1, 7), (4, 0), block_size=block_size, device=where))


@pytest.mark.parametrize("pad_reqs", [0, 1, 3])
def test_a_mixed_batch_padded_with_empty_requests(where, pad_reqs):
    """Offsets repeat the last one; the further tokens belong to nobody."""
    check(case((3, 5), (1, 7), pad_tokens=4, pad_reqs=pad_reqs, device=where))


@pytest.mark.parametrize(("query_len", "pad_reqs"), [(1, 1), (1, 5), (3, 2)])
def test_a_uniform_batch_padded_with_requests_of_no_length(where, query_len, pad_reqs):
    """Offsets go on with the stride: each padding request has tokens, but seq_lens 0."""
    rows = [(query_len, 5), (query_len, 9)]
    check(
        case(*rows, pad_tokens=query_len * pad_reqs, pad_reqs=pad_reqs, query_len=query_len,
             device=where)
    )  # fmt: skip


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_real_rows_are_bitwise_the_same_whatever_the_padding_rows_hold(where, rows):
    plain = case(*rows, pad_tokens=3, pad_reqs=2, device=where)
    wild = case(*rows, pad_tokens=3, pad_reqs=2, device=where)
    real = sum(n for n, _ in rows)
    for x in (wild.q, wild.k, wild.v):
        x[real:] = NAN
    wild.meta.block_tables[len(rows) :] = 1
    a, b = plain.run(), wild.run()
    assert bits(a[:real]).equal(bits(b[:real])) and b[real:].eq(0).all()
    assert bits(plain.k_cache).equal(bits(wild.k_cache))
    assert bits(plain.v_cache).equal(bits(wild.v_cache))


def test_unused_slots_may_hold_anything(where):
    """The case's unwritten slots are NaN already; infinities and large numbers hurt as little."""
    want = naive(case((3, 5), (1, 7), device=where))
    for poison in (float("inf"), float("-inf"), 1e30):
        c = case((3, 5), (1, 7), device=where)
        for cache in (c.k_cache, c.v_cache):
            cache.nan_to_num_(poison)
        torch.testing.assert_close(c.run().double().cpu(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("first", [0, 1])
def test_slot_minus_one_writes_nothing_slot_zero_included(where, first):
    c = case((4, 0), device=where)
    c.k_cache.view(-1)[:] = torch.arange(c.k_cache.numel(), device=where) + 0.25
    c.v_cache.copy_(-c.k_cache)
    slots = torch.tensor([-1, 5, -1, 7] if first else [5, -1, 7, -1], device=where)
    before, c.meta = c.k_cache.clone(), c.meta._replace(slot_mapping=slots)
    c.run()
    changed = (c.k_cache != before).flatten(2).any(2).flatten().nonzero().flatten().tolist()
    assert changed == [5, 7]
    written = c.k_cache.view(-1, *c.k.shape[1:])
    assert torch.equal(written[5], c.k[first]) and torch.equal(written[7], c.k[first + 2])


@pytest.mark.parametrize("poison", [NAN, -0.0, 3.5])
def test_a_batch_of_nothing_but_padding_leaves_the_cache_bitwise_alone(where, poison):
    c = case((4, 0), device=where)
    c.k_cache[:] = poison
    c.v_cache[:] = poison
    before = c.k_cache.clone()
    c.meta = AttentionMeta(
        slot_mapping=torch.full((4,), -1, device=where),
        seq_lens=torch.zeros(1, dtype=torch.int32, device=where),
        query_start_loc=torch.zeros(2, dtype=torch.int32, device=where),
        block_tables=torch.zeros_like(c.meta.block_tables),
    )
    out = c.run()
    assert bits(c.k_cache).equal(bits(before)) and bits(c.v_cache).equal(bits(before))
    assert out.eq(0).all()


def test_slot_zero_is_a_slot_like_any_other(where):
    c = case((2, 0), device=where)
    c.meta = c.meta._replace(
        slot_mapping=torch.tensor([0, 1], device=where),
        block_tables=torch.zeros_like(c.meta.block_tables),
    )
    c.run()
    assert torch.equal(c.k_cache.view(-1, *c.k.shape[1:])[:2], c.k)


@pytest.mark.parametrize("scale", [0.0, 1.0, 0.3])
def test_a_scale_of_ones_own(where, scale):
    check(case((3, 5), (1, 7), device=where), scale=scale)


def test_the_default_scale_is_one_over_the_root_of_head_dim(where):
    a, b = case((3, 5), device=where), case((3, 5), device=where)
    assert torch.equal(a.run(), b.run(scale=8**-0.5))


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [1, 2, 4, 5, 100])
def test_a_window_hides_what_is_further_back(where, rows, window):
    check(case(*rows, pad_tokens=2, pad_reqs=1, device=where), window=window)


def test_what_is_outside_of_the_window_may_be_overwritten_with_anything(where):
    c = case((1, 9), (2, 7), device=where)
    want = naive(c, window=3)
    for r, (_, past) in enumerate(c.rows):
        for i in range(past - 2):  # the oldest token that the first new one sees is past - 2
            block = int(c.meta.block_tables[r, i // 4])
            c.k_cache[block, i % 4], c.v_cache[block, i % 4] = NAN, float("inf")
    torch.testing.assert_close(c.run(window=3).double().cpu(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
def test_a_softcap_bounds_the_scores(where, softcap):
    check(case((3, 5), (1, 7), (4, 0), device=where), softcap=softcap)


def test_scale_window_and_softcap_together(where):
    check(
        case((3, 5), (1, 7), (9, 0), heads=(6, 2, 8), device=where),
        scale=0.7, window=4, softcap=2.0,
    )  # fmt: skip


@pytest.mark.parametrize("option", [{"window": 0}, {"window": -1}, {"softcap": 0.0}])
def test_a_window_or_softcap_that_hides_everything_is_refused(option):
    with pytest.raises(ValueError, match="above 0, or None"):
        case((3, 5)).run(**option)


@fg.struct
class Batch:
    """One attention's whole input."""

    x: Tensor = fg.buffer("T 2 8", "float32")
    slot_mapping: Tensor = fg.buffer("T", "int64", pad=-1)
    seq_lens: Tensor = fg.buffer("R", "int32")
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: Tensor = fg.buffer("R B", "int32")
    spec: fg.BatchSpec = fg.host()


def test_a_backend_sees_window_and_softcap_in_its_configuration(monkeypatch):
    """So it can refuse them, by `supports`, before anything runs."""
    attend = primitive("attention")
    plain = Backend(
        "plain", attend.backend("reference").run, lambda config: fg.Support.ALWAYS,
        lambda config: None if config.window is None else "it has no sliding window",
    )  # fmt: skip
    monkeypatch.setitem(attend.backends, "plain", plain)

    def lowered(**options: Any) -> Any:
        def forward(params: Any, cache: Any, batch: Batch) -> Any:
            return attention(batch.x, batch.x, batch.x, cache, batch, **options)

        fast = fg.graphify(forward, donate="cache", stage="batch", backends={"attention": "plain"})
        cache = (torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8))
        traced = fast.trace({}, cache, limits=fg.Limits(16, 4, B=2))
        return traced.split().lower()

    (call,) = lowered(softcap=3.0).calls
    assert (call.config.window, call.config.softcap) == (None, 3.0)
    with pytest.raises(BackendError, match=r"'plain' cannot run attention .*no sliding window"):
        lowered(window=3)


def test_a_prefill_in_chunks_equals_the_prefill_in_one(where):
    whole = case((9, 0), device=where)
    want = whole.run()
    parts = case((9, 0), device=where)
    got = []
    for a, b in ((0, 4), (4, 5), (5, 9)):
        meta = AttentionMeta(
            parts.meta.slot_mapping[a:b],
            torch.tensor([b], dtype=torch.int32, device=where),
            torch.tensor([0, b - a], dtype=torch.int32, device=where),
            parts.meta.block_tables,
        )
        q, k, v = (x[a:b] for x in (parts.q, parts.k, parts.v))
        got.append(attention(q, k, v, (parts.k_cache, parts.v_cache), meta)[0])
    torch.testing.assert_close(torch.cat(got), want, atol=1e-6, rtol=1e-5)
    assert bits(parts.k_cache).equal(bits(whole.k_cache))


def test_a_token_sees_no_later_token_of_its_own_step(where):
    a, b = case((6, 2), device=where), case((6, 2), device=where)
    b.k[4:], b.v[4:] = 100.0, NAN if where == "cpu" else 1e4  # in a tile 0 * NaN is NaN
    assert torch.equal(a.run()[:4], b.run()[:4])


def test_a_request_sees_no_other(where):
    a, b = case((3, 2), (3, 2), device=where), case((3, 2), (3, 2), device=where)
    b.k[3:], b.v[3:] = 100.0, NAN
    assert torch.equal(a.run()[:3], b.run()[:3])


def test_a_cache_of_lower_precision_rounds_what_it_holds(where):
    c = case((3, 5), (1, 7), device=where)
    c.k_cache, c.v_cache = c.k_cache.bfloat16(), c.v_cache.bfloat16()
    check(c)


def test_the_cache_comes_back_as_it_was_passed():
    c = case((3, 0))
    kv = [c.k_cache, c.v_cache]
    _, back = attention(c.q, c.k, c.v, kv, c.meta)
    assert back is kv


def test_meta_may_be_anything_with_the_fields():
    c, d = case((3, 5)), case((3, 5))

    class Loose:
        slot_mapping, seq_lens, query_start_loc, block_tables = d.meta
        other = "whatever"

    d.meta = Loose  # type: ignore[assignment]
    assert torch.equal(c.run(), d.run())


# --- the registry ---------------------------------------------------------------------------------


def test_the_default_backend_is_reference_and_captures_any_batch():
    backend = primitive("attention").backend("reference")
    assert backend.name == "reference" and backend is primitive("attention").backend("reference")
    assert backend.support(None) is fg.Support.ALWAYS
    assert "fngraph::attention" in PRIMITIVES and "reference" in repr(primitive("attention"))


def test_an_unknown_backend_lists_those_there_are_and_the_nearest():
    with pytest.raises(
        BackendError, match=r"'attention'.*'refrence'.*'reference'.*mean 'reference'"
    ):
        primitive("attention").backend("refrence")


def test_an_unknown_primitive_lists_those_there_are():
    with pytest.raises(BackendError, match=r"'atention'.*attention"):
        primitive("atention")


def test_the_op_has_an_abstract_rule():
    """With fake tensors it returns nothing, computes nothing, and says what it writes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    c, mode = case((3, 5)), FakeTensorMode()
    fields = {f: mode.from_tensor(getattr(c, f)) for f in ("q", "k", "v", "k_cache", "v_cache")}
    fake = dataclasses.replace(c, **fields, meta=AttentionMeta(*map(mode.from_tensor, c.meta)))
    with mode:
        out = fake.run()
    assert out.shape == (3, 4, 8) and out.fake_mode is mode
    written = [a.name for a in PRIMITIVES["fngraph::attention"].op._schema.arguments if a.is_write]
    assert written == ["k_cache", "v_cache", "out"]


def test_what_backends_are_told_has_no_gaps():
    columns = torch.arange(8).view(4, 2)
    for meta_of, names in (
        (attention_config.meta_of, fg.ops.AttentionMeta._fields),
        (recurrent.meta_of, fg.ops.StateMeta._fields),
    ):
        meta = meta_of(SimpleNamespace(**dict.fromkeys(names, columns[:, 1])))
        assert all(x.is_contiguous() and x.tolist() == [1, 3, 5, 7] for x in meta)


def test_autocast_of_the_caller_changes_nothing_as_in_a_graph(where):
    """It had raised: a mask's float32 became a bfloat16 that cannot hold it."""
    made = []
    for enabled in (False, True):
        c = case((3, 2), (1, 5), device=where)
        out = torch.full_like(c.q, NAN)
        with torch.autocast(out.device.type, torch.bfloat16, enabled=enabled):
            fg.ops.ATTENTION.op(*arguments(c, out))
        made.append(bits(out))
    assert torch.equal(*made)


def test_no_requests():
    c = case((3, 0))
    none = AttentionMeta(*(x[:0] for x in c.meta[:2]), c.meta[2][:1], c.meta[3][:0])
    out, _ = attention(c.q, c.k, c.v, (c.k_cache, c.v_cache), none._replace(slot_mapping=c.meta[0]))
    assert out.eq(0).all()


@pytest.mark.parametrize("few", [1, 2])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "flex"])
@pytest.mark.parametrize("rows", ["mixed", "verify, three tokens each"])
def test_rows_are_as_right_a_few_at_a_time(monkeypatch, backend, rows, few):
    """Those of a test all fit into one go else. Uniform ones are requests, or tokens."""
    a, b = (case(*BATCHES[rows], pad_tokens=2, pad_reqs=1, query_len=3) for _ in range(2))
    host = HostBounds(max(n for n, _ in BATCHES[rows]))
    want = call("reference", a, host)
    monkeypatch.setattr(slots, "AT_ONCE", few * a.meta.block_tables.shape[1] * a.k_cache[0].numel())
    assert len(list(slots.some_at_a_time(5, a.meta.block_tables, a.k_cache))) == -(-5 // few)
    got = call(backend, b, host)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert bits(a.k_cache).equal(bits(b.k_cache))
