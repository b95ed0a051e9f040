"""The levels of Triton's latent attention, proved: one capture, every batch of the class."""

from __future__ import annotations

from typing import Any

import pytest
import test_other_primitives as others
import torch
import toys
from latent_cases import call, latent, reference, run
from test_attention import bits
from test_triton_levels import DEVICE, GPU, RECORDER, B, R, draw, worst_case
from triton_cases import LIMIT, WHERE, wide, worst

import fngraph as fg
from fngraph.graphs.recorder import make_recorder

pytestmark = [pytest.mark.gpu] if GPU else []
SIZES = [((4, 16, 8), torch.float32)]
if GPU:
    SIZES = [((4, 64, 16), torch.float32), ((16, 512, 64), torch.bfloat16)]


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
@pytest.mark.parametrize(("sizes", "dtype"), SIZES)
def test_one_capture_of_the_worst_case_serves_the_class_bit_for_bit(
    backend, query_len, sizes, dtype
):
    H, L, D = sizes
    static = worst_case((H, 1, L + D), query_len)
    static.q, static.k, static.k_cache = (x.to(dtype) for x in (static.q, static.k, static.k_cache))
    out = torch.zeros_like(static.q[..., :L])
    recorder: Any = make_recorder(RECORDER, DEVICE)

    def step() -> None:
        call(backend, static, out, query_len or len(static.q))

    step()
    recorder.warm_up(step)
    recording, _ = recorder.record(step)
    for seed in range(40 if GPU else 3):
        rows = draw(seed, query_len)
        pads = {"pad_reqs": R - len(rows), "query_len": query_len or 0}
        pads["pad_tokens"] = len(static.q) - sum(n for n, _ in rows)
        c = latent(*rows, sizes=sizes, dtype=dtype, seed=seed, **pads)
        want = reference(c, L)
        c.meta = c.meta._replace(block_tables=wide(c.meta.block_tables, B))
        N = len(c.k_cache)
        for into, x in zip((static.q, static.k, *static.meta), (c.q, c.k, *c.meta)):
            into.copy_(x)
        static.k_cache[:N] = c.k_cache
        out.fill_(float("nan"))
        recording.replay()
        assert worst(out, want) < LIMIT[dtype]
        eager = run(backend, c, L, query_len)
        assert bits(out).equal(bits(eager))
        assert bits(static.k_cache[:N]).equal(bits(c.k_cache))


@pytest.mark.parametrize("backend", ["triton", "triton_decode"])
def test_a_graphified_model_equals_bare_forward_one_graph_a_step(backend):
    params, cache = others.setup(others.latent, WHERE)
    fast = fg.graphify(
        others.latent, donate="cache", stage="batch", limits=toys.LIMITS, sizes=toys.SIZES,
        modes="FULL", backends={"mla": backend}, recorder=RECORDER,
    )  # fmt: skip
    modes = []
    for rows, query_len in others.STEPS:
        given = others.batch(WHERE, *rows, query_len=query_len)
        want, after = toys.bare(others.latent, params, cache, given)
        before = fast.stats.copy()
        got, _ = fast(params, cache, given)
        modes += [mode for _, _, mode in (fast.stats - before).counts]
        toys.assert_trees((got, cache), (want, after), atol=1e-5, rtol=1e-5)
    assert modes == [fg.Mode.FULL] * len(others.STEPS)
