"""The levels of Triton's latent attention, proved: one capture, every batch of the class."""

from __future__ import annotations

import pytest
import test_other_primitives as others
import torch
import toys
from latent_cases import call, reference, run
from test_triton_levels import DEVICE, GPU, LONGEST, RECORDER, B, R, T
from triton_cases import WHERE

import fngraph as fg
from fngraph.graphs.recorders import make_recorder
from fngraph.testing.differences import TOLERANCE, bits, worst_row
from fngraph.testing.levels import batches, key_of, padding, replays

pytestmark = [pytest.mark.gpu] if GPU else []
SIZES = [((2, 16, 8), torch.float32)]  # each head of a token is a program of the merge
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
    key = key_of(R, query_len, T)
    made = {"heads": (H, 1, L + D), "dtype": dtype, "B": B, "device": WHERE}
    static = padding(key, **made)
    out = torch.empty_like(static.q[..., :L])
    run_static = lambda: call(backend, static, out, query_len or T)  # noqa: E731
    given = batches(key, range(40 if GPU else 2), LONGEST, **made)
    for c in replays(run_static, static, out, given, make_recorder(RECORDER, DEVICE)):
        assert worst_row(out, reference(c, L)) < TOLERANCE[dtype]
        assert bits(out).equal(bits(run(backend, c, L, query_len)))
        assert bits(static.k_cache).equal(bits(c.k_cache))


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
