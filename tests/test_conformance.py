"""`fg.testing.check_backend`: right backends pass, wrong ones fail with what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.ops import ATTENTION, Backend, Plan
from fngraph.ops.paged import reference
from fngraph.testing import points

ALL = ("bidirectional", "sinks", "cache scales", "fp8 cache")
check = fg.testing.check_backend


@pytest.fixture
def add(monkeypatch):
    """Registers "mine"."""

    def add(run: Any, level: fg.Support = fg.Support.ALWAYS, **more: Any) -> None:
        monkeypatch.setitem(
            ATTENTION.backends, "mine", Backend("mine", run, lambda config: level, **more)
        )

    return add


@pytest.fixture
def one_page(monkeypatch):
    """One dtype and block size of the four: what the others are for, a right backend shows."""
    monkeypatch.setattr(points, "PAGES", points.PAGES[:1])


def test_a_right_backend_passes(add):
    add(reference.run, options=ALL)
    checked = check("mine")
    assert checked.calls > 200 and checked.replays > 100 and not checked.refused
    assert repr(checked).startswith(f"'mine' on cpu: {checked.calls} calls and {checked.replays}")


def test_what_is_refused_is_counted(one_page, add):
    add(reference.run, supports=lambda c: None if c.window is None else "no window")
    refused = check("mine", query_len=1).refused
    assert list(refused) == ["no window", "it has no bidirectional", "it has no sinks",
                             "it has no cache scales and no fp8 cache"]  # fmt: skip
    assert "no window" in repr(check("mine", query_len=1))


@pytest.mark.parametrize("level", fg.Support)
@pytest.mark.parametrize("query_len", [None, 3])
def test_only_what_the_level_and_the_query_length_allow_is_run(one_page, add, level, query_len):
    keys, lens = set(), set()

    def run(*args: Any, host: Any, **options: Any) -> None:
        if host is not None and host.key is not None:
            keys.add(host.key.query_len)
        else:
            lens.update(args[4].query_start_loc.diff().tolist())
        reference.run(*args, host=host, **options)

    add(run, level)
    check("mine", query_len=query_len)
    served = {0: set(), 1: {1}, 2: {1, 3}, 3: {1, 3, None}}[int(level)]
    assert keys == (served if query_len is None else served & {3})
    assert lens == {3} if query_len else lens > {0, 1, 3, 9}


# --- wrong ones -----------------------------------------------------------------------------------


def one_behind(q, k, v, kv, meta, out, *, config, host):
    """Positions are one too low."""
    reference.run(q, k, v, kv, meta, out, config=config, host=host)
    behind = meta._replace(seq_lens=meta.seq_lens - 1)
    reference.attend_to(q, kv, behind, out, config)


def into_slot_minus_one(q, k, v, kv, meta, out, *, config, host):
    """-1 is the last row to torch."""
    for cache, new in zip(kv, (k, v)):
        cache.view(-1, *cache.shape[2:])[meta.slot_mapping] = new
    reference.attend_to(q, kv, meta, out, config)


def without_window(*args, config, host):
    reference.run(*args, config=config._replace(window=None), host=host)


def without_softcap(*args, config, host):
    reference.run(*args, config=config._replace(softcap=None), host=host)


def as_far_ahead_as_there_is(*args, config, host):
    """A window that bounds what is behind alone."""
    ahead = not config.causal and config.window is not None
    reference.run(*args, config=config._replace(window=None) if ahead else config, host=host)


def as_if_dense(q, k, v, kv, meta, out, *, config, host):
    """Rows are taken to follow one another."""
    q, k, v = (x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1)) for x in (q, k, v))
    reference.run(q, k, v, kv, meta, out, config=config, host=host)


def with_all_rows_in_one_scale(q, *args, config, host):
    """As where q is rounded to fp8 by its largest number, be it nobody's."""
    by = q.abs().amax()
    reference.run(q / by * by, *args, config=config, host=host)


def with_one_scale(*args, config, host, k_scale=None, v_scale=None):
    """The first kv head's for all."""
    scales = (None if x is None else x.flatten()[0] for x in (k_scale, v_scale))
    named = dict(zip(("k_scale", "v_scale"), scales))
    reference.run(*args, config=config, host=host, **named)


def of_128_keys(q, k, v, kv, meta, out, *, config, host):
    blocks = -(-128 // config.block_size)
    few = meta._replace(block_tables=meta.block_tables[:, :blocks])
    reference.run(q, k, v, kv, few, out, config=config, host=host)


def values_as_keys(q, k, v, kv, meta, out, *, config, host):
    reference.run(q, v, v, kv, meta, out, config=config, host=host)


def heads_in_turn(q, k, v, kv, meta, out, *, config, host):
    """Head h reads kv head h % K."""
    turned = q.unflatten(1, (-1, config.num_kv_heads)).transpose(1, 2).flatten(1, 2)
    reference.run(turned, k, v, kv, meta, out, config=config, host=host)
    out.copy_(out.unflatten(1, (config.num_kv_heads, -1)).transpose(1, 2).flatten(1, 2))


def true_rows_alone(q, k, v, kv, meta, out, *, config, host):
    """What is no request's is left as it was."""
    new = torch.empty_like(out)
    reference.run(q, k, v, kv, meta, new, config=config, host=host)
    real = torch.arange(len(q)) < meta.query_start_loc[-1]
    out.copy_(torch.where(real[:, None, None], new, out))


def the_last_request_goes_on(q, k, v, kv, meta, out, *, config, host):
    """What is no request's is attended for as well."""
    starts = torch.cat([meta.query_start_loc[:-1], meta.query_start_loc.new_tensor([len(q)])])
    reference.run(q, k, v, kv, meta, out, config=config, host=host)
    new = torch.empty_like(out)
    reference.attend_to(q, kv, meta._replace(query_start_loc=starts), new, config)
    real = torch.arange(len(q)) < meta.query_start_loc[-1]
    out.copy_(torch.where(real[:, None, None], out, new + 1))


def unseen_times_zero(q, k, v, kv, meta, out, *, config, host):
    """0 * NaN, of slots that hold nothing."""
    reference.run(q, k, v, kv, meta, out, config=config, host=host)
    out += 0 * kv[1][meta.block_tables.long()].sum()


def scaled_in_place(q, *args, config, host):
    q *= 2.0
    reference.run(q, *args, config=config._replace(scale=config.scale / 2), host=host)


def as_if_uniform(q, k, v, kv, meta, out, *, config, host):
    """Right in eager calls; a graph has T // R tokens a request baked in."""
    if host is not None and host.key is not None:
        R = len(meta.seq_lens)
        starts = torch.arange(R + 1, dtype=torch.int32) * (len(q) // R)
        meta = meta._replace(query_start_loc=starts)
    reference.run(q, k, v, kv, meta, out, config=config, host=host)


def as_long_as_the_query(q, k, v, kv, meta, out, *, config, host):
    """Right in eager calls; a graph has the key's query length baked in as the longest context."""
    if host is not None and host.key is not None:
        blocks = -(-host.max_query_len // config.block_size)
        meta = meta._replace(block_tables=meta.block_tables[:, :blocks])
    reference.run(q, k, v, kv, meta, out, config=config, host=host)


def waiting(q, k, v, kv, meta, out, *, config, host):
    """It waits for a number from the device."""
    longest = int(meta.seq_lens.max())
    blocks = meta.block_tables[:, : max(1, -(-longest // config.block_size))]
    short = meta._replace(block_tables=blocks)
    reference.run(q, k, v, kv, short, out, config=config, host=host)


CALLED, CAPTURED = "differs from 'reference', called with", "differs from 'reference', captured as"
ROW = r"worst row out\[\d+, \d+\] \(token, head\), error "
WRONG = {
    one_behind: [CALLED, r"of \(new, cached\) tokens \(1, 0\); heads=", f"{ROW}1 of its norm",
                 "tolerance 1e-05$"],
    into_slot_minus_one: [CALLED, "then 2 empty requests and 3 tokens of nobody; ",
                          r"k_cache: slot \d+ is written to",
                          r"slot_mapping does not name it \(-1"],
    without_window: [CALLED, "window=1\n", ROW],
    without_softcap: [CALLED, "softcap=0.8\n", ROW],
    as_far_ahead_as_there_is: [CALLED, "causal=False, window=2\n", ROW],
    as_if_dense: [CALLED, "3 tokens of nobody", r"k_cache: slot \d+ does not hold token \d+, "],
    with_all_rows_in_one_scale: [CALLED, "3 tokens of nobody", f"{ROW}inf"],
    with_one_scale: [CALLED, r"k_scale=\(0.02, 0.05\), v_scale=\(0.07, 0.01\)\n",
                     r"k_cache: slot \d+ does not hold token"],
    of_128_keys: [CALLED, r"\(1, 300\), \(20, 0\), \(3, 130\); heads=\(4, 2, 64\)", ROW],
    values_as_keys: [CALLED, r"k_cache: slot \d+ does not hold token 0, which belongs there"],
    heads_in_turn: [CALLED, r"heads=\(4, 2, 64\), torch.float32, blocks of 4\n", ROW],
    true_rows_alone: [CALLED, "3 tokens of nobody", f"{ROW}inf", "NaN, so it is not written"],
    the_last_request_goes_on: [CALLED, "3 tokens of nobody", f"{ROW}inf", "belongs to no request"],
    unseen_times_zero: [CALLED, f"{ROW}inf", "made of cache slots that hold nothing"],
    scaled_in_place: [CALLED, "q is written to, and it is only there to be read"],
    as_if_uniform: [CAPTURED, r" ALWAYS for BatchDescriptor\(12, 4\)", "replayed on", ROW],
    as_long_as_the_query: [CAPTURED, "replayed on requests", ROW],
    waiting: ["cannot be captured as ALWAYS", r"test_conformance.py:\d+",
              "support=lambda config: fg.Support.UNIFORM_BATCH; or NEVER, if it reads back"],
}  # fmt: skip


ASKED = {
    as_far_ahead_as_there_is: ("bidirectional",), with_one_scale: ("cache scales", "fp8 cache"),
}  # fmt: skip


@pytest.mark.parametrize("run", WRONG, ids=lambda run: run.__name__)
def test_a_wrong_backend_is_told_what_is_wrong(one_page, add, run):
    add(run, options=ASKED.get(run, ()))
    with pytest.raises(AssertionError) as raised:
        check("mine")
    said = str(raised.value)
    assert "backend 'mine' " in said
    for words in WRONG[run]:
        assert re.search(words, said), f"{words!r} is not in:\n{said}"


def test_what_it_raises_is_told_with_the_case(add):
    def run(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("mine")

    add(run)
    with pytest.raises(ZeroDivisionError) as raised:
        check("mine")
    (note,) = raised.value.__notes__
    assert note.startswith("backend 'mine', called with requests of (new, cached) tokens (1, 0); ")


def test_what_runs_nothing_is_no_pass(add):
    add(reference.run, missing=lambda: "no such device")
    with pytest.raises(fg.errors.BackendError, match=r"'mine' runs none of it on cpu: .*no such"):
        check("mine")
    with pytest.raises(fg.errors.BackendError, match="no backend 'mime'"):
        check("mime")


@pytest.mark.parametrize("query_len", [0, -1, 65, "1"])
def test_a_query_length_that_no_key_has_is_refused(query_len):
    with pytest.raises(fg.errors.SpecError, match=f"^query_len={query_len!r}: pass .* 1 to 64"):
        check("reference", query_len=query_len)


def test_a_device_that_is_not_there_is_no_difference(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(fg.errors.BackendError, match="device='cuda:0': no CUDA here"):
        check("reference", device="cuda:0")


# --- plans on the host ----------------------------------------------------------------------------


def plan_of(fill: Any) -> Plan:
    return Plan(("seq_lens",), lambda config, sizes, key: torch.zeros(sizes["R"]).int(), fill)


def run_planned(q, k, v, kv, meta, out, *, config, host, plan):
    reference.run(q, k, v, kv, meta._replace(seq_lens=plan), out, config=config, host=host)


def fill(lens, config, sizes, leaves):
    lens.zero_()[: len(leaves[0])] = leaves[0]


def fill_but_not_clear(lens, config, sizes, leaves):
    lens[: len(leaves[0])] = leaves[0]


def test_a_plan_is_filled_before_each_call_and_replay(one_page, add):
    add(run_planned, plan=plan_of(fill))
    assert check("mine").replays
    add(run_planned, plan=plan_of(fill_but_not_clear))
    with pytest.raises(AssertionError, match="replayed on requests"):
        check("mine")
