"""The levels of Triton's attention backends, proved: one capture, every batch of the class."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import toys
from test_attention import Case, bits
from triton_cases import WHERE, build, call, reference, run, wide, worst

import fngraph as fg
from fngraph.graphs.recorder import make_recorder
from fngraph.ops import AttentionMeta

GPU = WHERE == "cuda"
pytestmark = [pytest.mark.gpu] if GPU else []
RECORDER = "cuda" if GPU else "tape"
DEVICE = torch.device(WHERE, 0) if GPU else torch.device("cpu")
T, R, BLOCKS, B = 20, 4, 512, 64  # the key's tokens and requests; blocks of 4


def worst_case(heads: tuple[int, int, int], query_len: int | None) -> Case:
    """Static buffers of the key, all padding."""
    H, K, D = heads
    tokens = R * query_len if query_len else T
    zeros = lambda *shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype, device=WHERE)  # noqa: E731
    meta = AttentionMeta(
        torch.full((tokens,), -1, device=WHERE),
        zeros(R, dtype=torch.int32),
        torch.arange(R + 1, dtype=torch.int32, device=WHERE) * (query_len or 0),
        zeros(R, B, dtype=torch.int32),
    )
    caches = zeros(BLOCKS, 4, K, D), zeros(BLOCKS, 4, K, D)
    return Case(zeros(tokens, H, D), zeros(tokens, K, D), zeros(tokens, K, D), *caches, meta, [])


def draw(seed: int, query_len: int | None) -> list[tuple[int, int]]:
    """Requests of a batch of the class, of any size that the key serves."""
    chance = random.Random(seed)
    if query_len:
        return [(query_len, chance.randrange(150)) for _ in range(chance.randint(1, R))]
    rows, left = [], T
    for _ in range(chance.randint(1, R)):
        n = chance.choice((1, 1, 2, left))
        if 1 <= n <= left:
            rows.append((n, chance.randrange(150)))
            left -= n
    return rows


@pytest.mark.parametrize(
    ("backend", "query_len"),
    [
        ("triton", None),
        ("triton", 1),
        ("triton_decode", None),
        ("triton_decode", 1),
        ("triton_decode", 2),
    ],
)
@pytest.mark.parametrize("options", [{}, {"window": 30}] if GPU else [{"window": 100}], ids=str)
def test_one_capture_of_the_worst_case_serves_the_class_bit_for_bit(backend, query_len, options):
    heads = (4, 2, 64) if GPU else (4, 2, 16)
    static = worst_case(heads, query_len)
    out = torch.zeros_like(static.q)
    recorder: Any = make_recorder(RECORDER, DEVICE)

    def step() -> None:
        call(backend, static, out, query_len or len(static.q), **options)

    step()
    recorder.warm_up(step)
    recording, _ = recorder.record(step)
    for seed in range(40 if GPU else 2):
        rows = draw(seed, query_len)
        reqs = R - len(rows)
        tokens = len(static.q) - sum(n for n, _ in rows)
        c = build(
            *rows, heads=heads, pad_reqs=reqs, pad_tokens=tokens, query_len=query_len or 0,
            seed=seed,
        )  # fmt: skip
        want = reference(c, **options)
        c.meta = c.meta._replace(block_tables=wide(c.meta.block_tables, B))
        N = len(c.k_cache)
        for into, x in zip((static.q, static.k, static.v, *static.meta), (c.q, c.k, c.v, *c.meta)):
            into.copy_(x)
        static.k_cache[:N], static.v_cache[:N] = c.k_cache, c.v_cache
        out.fill_(float("nan"))
        recording.replay()
        assert worst(out, want) < 1e-5
        eager = run(backend, c, query_len, **options)
        assert bits(out).equal(bits(eager))
        assert bits(static.k_cache[:N]).equal(bits(c.k_cache))


@pytest.mark.parametrize("backend", ["triton", "triton_decode"])
def test_a_graphified_model_equals_bare_forward_one_graph_a_step(backend):
    params, cache = (
        fg.core.trees.map_leaves(lambda x: x.to(WHERE), tree)
        for tree in (toys.attention_params(), toys.attention_cache())
    )
    fast = fg.graphify(
        toys.attend, donate="cache", stage="batch", limits=toys.LIMITS, sizes=(2, 4, 8),
        modes="FULL", backends={"attention": backend}, recorder=RECORDER,
    )  # fmt: skip
    batches = [toys.batch(3, 5), toys.batch((2, 3), (1, 5)), toys.decode(2, past=6, seed=2),
               toys.decode(3, past=7, seed=3)]  # fmt: skip
    modes = []
    for batch in batches:
        batch = toys.on(batch, WHERE)
        want, after = toys.bare(toys.attend, params, cache, batch)
        before = fast.stats.copy()
        got, _ = fast(params, cache, batch)
        modes += [mode for _, _, mode in (fast.stats - before).counts]
        toys.assert_trees((got, cache), (want, after), atol=1e-5, rtol=1e-5)
    assert modes == [fg.Mode.FULL] * len(batches)
