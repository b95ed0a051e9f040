"""Each attention backend against `reference`; levels by whole models; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph.core.spec import KeyBounds
from fngraph.graphs.recorders import make_recorder
from fngraph.ops import ATTENTION, AttentionMeta, Backend
from fngraph.testing import points
from fngraph.testing.cases import Case, arguments, call, case
from fngraph.testing.differences import difference, worst_row
from fngraph.testing.levels import batches, key_of, padding, replays

NAMES = ["sdpa", "varlen", "flex", "flash_attn", "flash_attn_3"]
CASES = [pytest.param(name, "cpu", id=f"{name}-cpu") for name in ("sdpa", "flex")] + [
    pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu)
    for name in (*NAMES, "triton", "triton_decode")
]


def skip_refused(name: str, c: Case) -> None:
    """Skip what a backend says that it cannot do."""
    reason = ATTENTION.backend(name).refusal(ATTENTION.configure(*arguments(c, c.q)))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


def check(name: str, *rows: Any, **made: Any) -> None:
    """Equal outputs, and bitwise equal caches."""
    a, b = case(*rows, **made), case(*rows, **made)
    skip_refused(name, a)
    assert not difference(call(name, a), call("reference", b), a, b)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name, device", CASES)
def test_it_conforms(name, device, monkeypatch):
    """On the CPU "flex" is slow, and what differs from page to page it shares with "sdpa"."""
    if (name, device) == ("flex", "cpu"):
        monkeypatch.setattr(points, "PAGES", points.PAGES[::2])
    if (reason := ATTENTION.backend(name).missing()) is not None:
        pytest.skip(f"{name}: {reason}")
    checked = fg.testing.check_backend(name, device=device)
    assert checked.calls > 50 and (checked.replays > 0) == (name != "flex")


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name, device", [*CASES, pytest.param("mine", "cpu", id="mine")])
def test_what_a_backend_cannot_turn_is_turned_before_it(name, device, normed):
    """One that has not heard of `turn` gets q and k turned; the cache has the same bits."""
    seen = []

    def run(args: Any, host: Any) -> None:
        seen.append(args.turn.cos)
        ATTENTION.backend("reference").run(args, host)

    mine = Backend("mine", run, lambda config: fg.Support.ALWAYS)
    a, b = (case((3, 5), (1, 7), heads=(4, 2, 64), block_size=16, device=device) for _ in "ab")
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
    options: dict[str, Any] = {"cos": draw(4, 1, 32), "sin": draw(4, 1, 32), "eps": 1e-5}
    if normed:
        options |= {"q_norm": draw(64), "k_norm": draw(64)}
    if name != "mine":
        skip_refused(name, a)
    got = call(mine if name == "mine" else name, a, **options)
    want, plain = call("reference", b, **options), call("reference", b)
    call("reference", b, **options)
    assert not difference(got, want, a, b)
    assert seen == ([None] if name == "mine" else [])
    assert (want - plain).abs().max() > 0.01  # it matters


@pytest.mark.parametrize("name, device", CASES)
def test_what_a_backend_cannot_round_is_rounded_behind_it(name, device):
    c = case((3, 5), (1, 7), heads=(4, 2, 64), block_size=16, device=device, pad_tokens=2)
    skip_refused(name, c)
    scale = torch.tensor(0.002, device=device)
    want = torch.ops.fngraph.quantize_fp8(call(name, c), scale)
    out = torch.full(c.q.shape, 3.0, device=device).to(torch.float8_e4m3fn)
    assert call(name, c, out=out, out_scale=scale).float().equal(want.float())
    assert (want.float().abs() == 448).any() and not want[-2:].float().any()


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name, device", CASES)
@pytest.mark.parametrize("heads", [(8, 8, 64), (8, 1, 80), (6, 2, 96), (16, 2, 128), (4, 1, 256)])
@pytest.mark.parametrize("block_size", [1, 16, 32, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_and_blocks(name, device, heads, block_size, dtype):
    rows = [(3, 61), (1, 7), (40, 0), (1, 300)]
    check(name, *rows, heads=heads, block_size=block_size, dtype=dtype, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("past", [2047, 8191])
def test_long_contexts(name, past):
    check(
        name, (1, past), (64, past // 2), (1, 1), heads=(8, 2, 128), block_size=256,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["reference", *(name for name in NAMES if name != "flex")])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("block_size", [16, 256])
def test_a_graph_serves_requests_of_up_to_a_thousand_tokens(name, query_len, block_size):
    key, made = key_of(6, query_len, 0), {"heads": (8, 2, 64), "block_size": block_size}
    made |= {"B": -(-1024 // block_size), "dtype": torch.bfloat16, "device": "cuda"}
    static = padding(key, **made)
    skip_refused(name, static)
    out = torch.empty_like(static.q)
    recorder = make_recorder("cuda", torch.device("cuda", 0))
    run = lambda: call(name, static, KeyBounds(key), out)  # noqa: E731
    for c in replays(run, static, out, batches(key, range(8), 1000, **made), recorder):
        assert worst_row(out, call("reference", c)) < 1e-2


# --- levels, by whole models ---------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["reference", "sdpa", "flex"])
@pytest.mark.parametrize("modes", ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE"])
@pytest.mark.parametrize("query_lens", [(1,), (1, 3)])
def test_a_batch_outside_of_the_class_is_never_one_graph(
    name, modes, query_lens, recorder_name, device
):
    """And every batch is as bare `forward` with `reference` has it, whatever it ran as."""
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
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
    old = fg.ops.Backend("old", lambda args, host: None, lambda config: fg.Support.ALWAYS)
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
