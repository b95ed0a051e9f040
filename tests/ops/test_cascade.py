"""Cascade attention equals attention, and is never captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from test_attention import naive

import fngraph as fg
from fngraph.ops import slots
from fngraph.ops.paged.cascades import merge
from fngraph.testing.cases import Case, case
from fngraph.testing.differences import bits


class Shared:
    """The case's meta, with a prefix."""

    def __init__(self, c: Case, prefix: int) -> None:
        self.slot_mapping, self.seq_lens, self.query_start_loc, self.block_tables = c.meta
        self.prefix_len = torch.tensor([prefix], dtype=torch.int32, device=c.q.device)


def shared(prefix_blocks: int, *rows: tuple[int, int], **given: Any) -> Case:
    """A case whose requests have the blocks of the first `prefix_blocks` in common."""
    c = case(*rows, **given)
    common = c.meta.block_tables[0, :prefix_blocks].clone()
    c.meta.block_tables[: len(rows), :prefix_blocks] = common
    return c


@pytest.mark.parametrize("prefix", [0, 1, 4, 7, 8])
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 9), (1, 14), (1, 8)], [(3, 8), (1, 20), (6, 9)], [(5, 8)],
        [(8, 0)], [(3, 5), (1, 9), (2, 8)],  # tokens of the prefix itself, in the same step
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_attention(where, prefix, rows, dtype):
    c = shared(2, *rows, pad_tokens=2, pad_reqs=1, dtype=dtype, device=where)
    plain = shared(2, *rows, pad_tokens=2, pad_reqs=1, dtype=dtype, device=where)
    got, _ = fg.ops.cascade(c.q, c.k, c.v, (c.k_cache, c.v_cache), Shared(c, prefix))
    plain.run()
    want = naive(plain)  # over a cache that holds what the step writes
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.double().cpu(), want, atol=tolerance, rtol=tolerance)
    assert bits(c.k_cache).equal(bits(plain.k_cache))
    assert got[sum(n for n, _ in rows) :].eq(0).all()


def test_it_is_attention_a_token_at_a_time(monkeypatch):
    monkeypatch.setattr(slots, "AT_ONCE", 1)
    test_it_is_attention("cpu", 7, [(3, 8), (1, 20), (6, 9)], torch.float32)


def test_what_is_shared_is_read_from_the_first_request_alone():
    """The others' tables need not even say where it is."""
    c, plain = shared(2, (1, 9), (1, 14)), shared(2, (1, 9), (1, 14))
    free = min(set(range(len(c.k_cache))) - set(c.meta.block_tables.flatten().tolist()))
    c.meta.block_tables[1, :2] = free
    c.k_cache[free], c.v_cache[free] = 1e4, 1e4
    got, _ = fg.ops.cascade(c.q, c.k, c.v, (c.k_cache, c.v_cache), Shared(c, 8))
    torch.testing.assert_close(got.double(), naive(plain), atol=1e-5, rtol=1e-5)


def test_a_merge_of_two_halves_is_the_softmax_over_both():
    scores, values = torch.randn(5, 12).double(), torch.randn(12, 3).double()
    halves = []
    for part in (slice(0, 7), slice(7, 12)):
        halves += [scores[:, part].softmax(-1) @ values[part], scores[:, part].logsumexp(-1)]
    torch.testing.assert_close(merge(*halves), scores.softmax(-1) @ values)
    nothing = torch.zeros(5, 3).double(), torch.full((5,), -torch.inf).double()
    torch.testing.assert_close(merge(*halves[:2], *nothing), halves[0])
    assert merge(*nothing, *nothing).eq(0).all()


@fg.struct
class Batch:
    """The toys' batch and a prefix."""

    token_ids: torch.Tensor = fg.buffer("T", "int64")
    slot_mapping: torch.Tensor = fg.buffer("T", "int64", pad=-1)
    seq_lens: torch.Tensor = fg.buffer("R", "int32", pad=0)
    query_start_loc: torch.Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: torch.Tensor = fg.buffer("R B", "int32", pad=0)
    prefix_len: torch.Tensor = fg.buffer("1", "int32")
    spec: fg.BatchSpec = fg.host()


def cascading(params: Any, cache: Any, batch: Batch) -> Any:
    """One layer."""
    x_TE, (layer,) = params["embed"][batch.token_ids], params["layers"]
    qkv = (x_TE @ layer["qkv"]).unflatten(-1, (toys.H + 2 * toys.K, toys.D))
    out, kv = fg.ops.cascade(*qkv.split([toys.H, toys.K, toys.K], dim=1), cache[0], batch)
    return out.flatten(1) @ layer["out"], (kv,)


def test_a_model_that_cascades_runs_piecewise(recorder_name, device):
    params, cache = toys.attention_params(1, device=device), toys.attention_cache(1, device=device)
    fast = fg.graphify(cascading, donate="cache", stage="batch", sizes=toys.SIZES)
    low = fast.trace(params, cache, limits=toys.LIMITS).split().lower()
    assert low.resolution.modes is fg.Mode.PIECEWISE
    assert "cascade 0 (reference) (NEVER) can never be captured" in low.resolution.reasons[0]
    step = low.compile().capture(params, cache, recorder=recorder_name)
    for rows in ([(1, 5), (1, 7), (1, 4)], [(2, 6), (1, 4)], [(3, 0)]):
        plain = toys.batch(*rows)
        tables = plain.block_tables.clone()
        tables[:, 0] = tables[0, 0]
        prefix = 4 if min(past for _, past in rows) >= 4 else 0
        spec = fg.BatchSpec(plain.spec.num_tokens, len(rows), cascade=True)
        fields = {**vars(plain), "block_tables": tables, "spec": spec,
                  "prefix_len": torch.tensor([prefix], dtype=torch.int32)}  # fmt: skip
        batch = Batch(**{k: v.to(device) if k != "spec" else v for k, v in fields.items()})
        want, after = toys.bare(cascading, params, cache, batch)
        got, _ = step(cache, batch)
        assert step.dispatch(spec).mode is fg.Mode.PIECEWISE
        torch.testing.assert_close(got, want)
        toys.assert_trees(cache, after, atol=1e-5, rtol=1e-5)


def test_a_cascading_batch_of_another_model_runs_piecewise_too():
    fast = fg.graphify(toys.attend, donate="cache", stage="batch", sizes=toys.SIZES)
    split = fast.trace(toys.attention_params(), toys.attention_cache(), limits=toys.LIMITS).split()
    table = split.lower().table
    for cascade, mode in ((False, fg.Mode.FULL), (True, fg.Mode.PIECEWISE)):
        assert fg.dispatch(table, fg.BatchSpec(3, 3, 1, cascade=cascade)).mode is mode
