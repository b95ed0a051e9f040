"""Each attention backend against `reference`: the worst (token, head) row, over a grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from test_attention import BATCHES, Case, bits, case
from torch import Tensor

import fngraph as fg
from fngraph.ops import ATTENTION, AttentionMeta

NAN = float("nan")
NAMES = ["sdpa", "varlen", "flex", "flash_attn", "flash_attn_3"]
CASES = [pytest.param(name, "cpu", id=f"{name}-cpu") for name in ("sdpa", "flex")] + [
    pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu) for name in NAMES
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def arguments(c: Case, out: Tensor, **options: Any) -> tuple[Any, ...]:
    """The op's arguments, as a backend is called with them."""
    given = {
        "scale": c.q.shape[-1] ** -0.5, "window": None, "softcap": None, "causal": True,
        "sinks": None, "k_scale": None, "v_scale": None,
    } | options  # fmt: skip
    return (c.q, c.k, c.v, c.k_cache, c.v_cache, *c.meta, out, *given.values())


def run(name: str, c: Case, host: fg.HostBounds | None = None, **options: Any) -> Tensor:
    """The backend's output, poisoned before; skips what it says it cannot do."""
    backend = ATTENTION.backend(name)
    args = arguments(c, torch.full_like(c.q, NAN), **options)
    config = ATTENTION.configure(*args)
    reason = backend.refusal(config)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    ATTENTION.call(backend, args, config, host)
    return args[9]


def worst_row(got: Tensor, want: Tensor) -> float:
    """Relative error of the worst (token, head) row; rows that are zero must be zero."""
    got, want = got.double(), want.double()
    norm = want.norm(dim=-1)
    empty = norm == 0
    assert got[empty].eq(0).all()
    return float(((got - want).norm(dim=-1) / norm)[~empty].max())


def check(name: str, host: fg.HostBounds | None, *rows: Any, **given: Any) -> None:
    """Equal outputs, and bitwise equal caches."""
    options = {k: given.pop(k) for k in list(given) if k not in case.__kwdefaults__}
    a, b = case(*rows, **given), case(*rows, **given)
    got, want = run(name, a, host, **options), run("reference", b, **options)
    assert not got.isnan().any()
    assert worst_row(got, want) < TOLERANCE[a.q.dtype]
    assert bits(a.k_cache).equal(bits(b.k_cache)) and bits(a.v_cache).equal(bits(b.v_cache))


@pytest.mark.parametrize("name, device", CASES)
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounded", [False, True])
def test_any_mix_of_requests_padded_with_empty_ones(name, device, rows, dtype, bounded):
    host = fg.HostBounds(max_query_len=max(n for n, _ in rows)) if bounded else None
    check(name, host, *rows, heads=(4, 2, 64), dtype=dtype, device=device, pad_reqs=2, pad_tokens=3)


@pytest.mark.parametrize("name, device", CASES)
@pytest.mark.parametrize("heads", [(8, 8, 64), (8, 1, 80), (6, 2, 96), (16, 2, 128), (4, 1, 256)])
@pytest.mark.parametrize("block_size", [1, 16, 32, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_and_blocks(name, device, heads, block_size, dtype):
    rows = [(3, 61), (1, 7), (40, 0), (1, 300)]
    check(name, None, *rows, heads=heads, block_size=block_size, dtype=dtype, device=device)


@pytest.mark.parametrize("name, device", CASES)
@pytest.mark.parametrize("query_len", [1, 2, 5])
def test_uniform_batches_with_padding_requests_of_no_length(name, device, query_len):
    rows = [(query_len, 5), (query_len, 9), (query_len, 0), (query_len, 100)]
    check(
        name, fg.HostBounds(max_query_len=query_len), *rows, heads=(8, 2, 64), block_size=16,
        query_len=query_len, pad_reqs=3, pad_tokens=3 * query_len, device=device,
        dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("name, device", CASES)
def test_tokens_of_nobody_behind_full_requests(name, device):
    """A mixed key's padding: tokens, but no further request."""
    check(
        name, fg.HostBounds(max_query_len=3), (3, 5), (3, 0), heads=(4, 2, 64), pad_tokens=2,
        dtype=torch.bfloat16, device=device,
    )  # fmt: skip


@pytest.mark.parametrize("name, device", CASES)
@pytest.mark.parametrize("window", [1, 3, 8, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows(name, device, window, dtype):
    rows = [(3, 12), (1, 30), (17, 0), (2, 2)]
    check(name, None, *rows, heads=(4, 2, 64), dtype=dtype, device=device, window=window)


@pytest.mark.parametrize("name, device", CASES)
def test_a_softcap(name, device):
    check(name, None, (3, 12), (1, 30), (17, 0), heads=(4, 2, 64), device=device, softcap=0.8)
    check(
        name, None, (3, 12), (1, 30), heads=(4, 2, 64), device=device, softcap=0.8,
        dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("name, device", CASES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_directions(name, device, window, dtype):
    rows = [(9, 0), (1, 0), (4, 0), (12, 0)]
    check(
        name, None, *rows, heads=(4, 2, 64), dtype=dtype, device=device, causal=False,
        window=window, pad_reqs=1, pad_tokens=2,
    )  # fmt: skip


@pytest.mark.parametrize("name, device", CASES)
def test_an_fp8_cache_with_scales(name, device):
    scales = torch.tensor(0.02, device=device), torch.tensor(0.05, device=device)
    outs = []
    for backend in (name, "reference"):
        c = case((3, 0), (9, 0), (1, 0), heads=(4, 2, 64), device=device, pad_tokens=1)
        c.k_cache, c.v_cache = (
            x.nan_to_num(0).to(torch.float8_e4m3fn) for x in (c.k_cache, c.v_cache)
        )
        outs.append((run(backend, c, None, sinks=None, k_scale=scales[0], v_scale=scales[1]), c))
    (got, a), (want, b) = outs
    assert worst_row(got, want) < 1e-5
    assert bits(a.k_cache).equal(bits(b.k_cache)) and bits(a.v_cache).equal(bits(b.v_cache))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("past", [2047, 8191])
def test_long_contexts(name, past):
    check(
        name, None, (1, past), (64, past // 2), (1, 1), heads=(8, 2, 128), block_size=256,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["reference", *(name for name in NAMES if name != "flex")])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("block_size", [16, 256])
def test_a_graph_captured_at_the_worst_case_serves_every_batch_of_its_class(
    name, query_len, block_size
):
    """Uniform batches of up to 6 requests; captured on padding, replayed on fresh ones."""
    R, B = 6, -(-1024 // block_size)
    config = dict(heads=(8, 2, 64), block_size=block_size, dtype=torch.bfloat16, device="cuda")
    host = fg.HostBounds(max_query_len=query_len)
    static = case(*[(query_len, B * block_size - query_len)] * R, **config)
    static.meta.slot_mapping.fill_(-1)
    static.meta.seq_lens.zero_()
    out = torch.full_like(static.q, NAN)
    args = arguments(static, out)
    backend, cfg = ATTENTION.backend(name), ATTENTION.configure(*args)
    if (reason := backend.refusal(cfg)) is not None:
        pytest.skip(reason)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ATTENTION.call(backend, args, cfg, host)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ATTENTION.call(backend, args, cfg, host)
    for seed in range(8):
        lens = torch.randint(0, 1000, (1 + seed % R,), generator=torch.manual_seed(seed)).tolist()
        live = len(lens)
        c = case(*[(query_len, n) for n in lens], seed=seed, query_len=query_len,
                 pad_reqs=R - live, pad_tokens=(R - live) * query_len, **config)  # fmt: skip
        n = min(static.k_cache.shape[0], c.k_cache.shape[0])
        static.k_cache[:n], static.v_cache[:n] = c.k_cache[:n], c.v_cache[:n]
        for a, b in ((static.q, c.q), (static.k, c.k), (static.v, c.v)):
            a.copy_(b)
        wide = c.meta.block_tables.shape[1]
        static.meta.block_tables.zero_()[:, : min(wide, B + 1)] = c.meta.block_tables
        for name_ in ("slot_mapping", "seq_lens", "query_start_loc"):
            getattr(static.meta, name_).copy_(getattr(c.meta, name_))
        out.fill_(NAN)
        want = run("reference", c)
        graph.replay()
        assert worst_row(out, want) < 1e-2


# --- levels, by whole models ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", "sdpa", "flex"])
@pytest.mark.parametrize("modes", ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE"])
@pytest.mark.parametrize("query_lens", [(1,), (1, 3)])
def test_a_batch_outside_of_the_class_is_never_one_graph(
    name, modes, query_lens, recorder_name, device
):
    """And every batch is as bare `forward` with `reference` has it, whatever it ran as."""
    move = lambda tree: fg.core.trees.map_leaves(lambda x: x.to(device), tree)  # noqa: E731
    params, cache = move(toys.attention_params()), move(toys.attention_cache())
    fast = fg.graphify(
        toys.attend, modes=modes, donate="cache", stage="batch", sizes=toys.SIZES,
        query_lens=query_lens, backends={"attention": name},
    )  # fmt: skip
    split = fast.trace(params, cache, limits=toys.LIMITS).split()
    if (name, modes) == ("flex", "FULL"):
        with pytest.raises(fg.errors.ModesError, match=r"flex.* \(NEVER\) can never be captured"):
            split.lower()
        return
    call, _ = split.lower().calls
    level = call.backend.support(call.config)
    step = fast.bind(params).capture(cache, toys.LIMITS, recorder=recorder_name, progress=False)
    plain = toys.clone(cache)
    for rows, query_len in [
        ([3, 1, 5], None), ([(1, 3), (1, 1), (1, 5)], 1), ([(3, 4), (3, 2), (3, 6)], 3),
        ([(1, 7), (1, 5)], 1), ([(1, 8), (1, 6), (1, 9)], None), ([(3, 9), (3, 7)], 3),
    ]:  # fmt: skip
        batch = toys.on(toys.batch(*rows, query_len=query_len, seed=len(rows)), device)
        want, plain = toys.bare(toys.attend, params, plain, batch)
        got, _ = step(cache, batch)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        mode = step.dispatch(batch.spec).mode
        if level is not fg.Support.ALWAYS and query_len not in query_lens:
            assert mode is not fg.Mode.FULL
        elif level is not fg.Support.NEVER and modes != "PIECEWISE":
            always = modes == "FULL" and level is fg.Support.ALWAYS
            assert (mode is fg.Mode.FULL) == (always or query_len in query_lens)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options, reason",
    [
        ("sdpa", {"softcap": 3.0}, "no softcap"),
        ("sdpa", {"sinks": torch.zeros(4)}, "no sinks"),
        ("varlen", {"sinks": torch.zeros(4)}, "no sinks"),
        ("varlen", {"k_scale": torch.ones(())}, "no cache scales"),
        ("varlen", {}, "CUDA, not on cpu"),
        ("flash_attn", {}, "not installed: pip install flash-attn"),
        ("flash_attn_3", {}, "not installed"),
        ("flashinfer", {}, "not installed: pip install flashinfer-python"),
        ("FlashMLA", {}, "not shipped"),
    ],
)
def test_a_refusal_says_why(name, options, reason):
    c = case((3, 5))
    config = ATTENTION.configure(*arguments(c, c.q, **options))
    assert reason in str(ATTENTION.backend(name).refusal(config))


def test_what_a_backend_has_not_heard_of_is_refused():
    """A new option in the configuration reaches only backends that list it."""
    old = fg.ops.Backend("old", lambda *a, **k: None, lambda config: fg.Support.ALWAYS)
    c = case((3, 5))
    plain = ATTENTION.configure(*arguments(c, c.q))
    assert old.refusal(plain) is None
    for option in ({"causal": False}, {"sinks": torch.zeros(4)}, {"v_scale": torch.ones(())}):
        assert "it has no" in str(old.refusal(ATTENTION.configure(*arguments(c, c.q, **option))))


def test_the_listing_is_a_table_of_every_backend(capsys):
    listing = fg.ops.attention.backends()
    assert not capsys.readouterr().out  # a notebook would show it twice
    assert all(word in repr(listing) for word in (*listing[0]._fields, "CUTLASS MLA"))
    rows = {row.backend: row for row in listing}
    assert next(iter(rows)) == "reference"
    assert {"reference", "sdpa", "varlen", "flex", "flash_attn", "flashinfer"} <= set(rows)
    assert rows["reference"].usable == rows["sdpa"].usable == "yes"
    assert "pip install" in rows["flashinfer"].usable
    levels = {name: rows[name].level.name for name in ("reference", *NAMES, "flashinfer")}
    uniform = {"flex": "NEVER"}
    uniform |= dict.fromkeys(("sdpa", "varlen", "flash_attn"), "UNIFORM_BATCH")
    always = dict.fromkeys(("reference", "flash_attn_3"), "ALWAYS")
    assert levels == uniform | always | {"flashinfer": "UNIFORM_SINGLE_TOKEN_DECODE"}
    assert rows["CUTLASS MLA"].level is fg.Support.UNIFORM_SINGLE_TOKEN_DECODE
    assert "not shipped" in rows["FlashMLA"].usable


def test_a_level_can_be_resolved_without_the_backend():
    level = fg.ops.attention.level
    assert level("FlashMLA") is fg.Support.UNIFORM_BATCH
    assert fg.resolve("FULL", level("FlashMLA")).modes is fg.Mode.FULL_AND_PIECEWISE
    with pytest.raises(fg.errors.BackendError, match=r"no backend 'FlashMLB'.*mean 'FlashMLA'"):
        level("FlashMLB")


def test_meta_stays_what_it_is():
    assert AttentionMeta._fields == (
        "slot_mapping", "seq_lens", "query_start_loc", "block_tables",
    )  # fmt: skip
