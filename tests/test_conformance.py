"""`fg.testing.check_backend`: right backends pass, wrong ones fail with what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.ops import ATTENTION, AttentionArgs, Backend, Plan
from fngraph.testing import points

ALL = ("bidirectional", "sinks", "cache scales", "fp8 cache")
check = fg.testing.check_backend
right: Any = ATTENTION.backend("reference").run


@pytest.fixture
def add():
    """Registers "mine"."""

    def add(run: Any, level: fg.Support = fg.Support.ALWAYS, **more: Any) -> None:
        ATTENTION.register(Backend("mine", run, lambda config: level, **more))

    yield add
    if "mine" in ATTENTION.backends:
        ATTENTION.unregister("mine")


@pytest.fixture
def one_page(monkeypatch):
    """One dtype and block size of the four: what the others are for, a right backend shows."""
    monkeypatch.setattr(points, "PAGES", points.PAGES[:1])


@pytest.mark.sampled(0)
def test_a_right_backend_passes(add):
    add(right, options=ALL)
    checked = check("mine")
    assert checked.calls > 200 and checked.replays > 100 and not checked.refused
    assert repr(checked).startswith(f"'mine' on cpu: {checked.calls} calls and {checked.replays}")


def test_what_is_refused_is_counted(one_page, add):
    add(right, supports=lambda c: None if c.window is None else "no window")
    refused = check("mine", query_len=1).refused
    assert list(refused) == ["no window", "it has no bidirectional", "it has no sinks",
                             "it has no cache scales and no fp8 cache"]  # fmt: skip
    assert "no window" in repr(check("mine", query_len=1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", fg.Support)
@pytest.mark.parametrize("query_len", [None, 3])
def test_only_what_the_level_and_the_query_length_allow_is_run(one_page, add, level, query_len):
    keys, lens = set(), set()

    def run(args: AttentionArgs, host: Any) -> None:
        if host is not None and host.key is not None:
            keys.add(host.key.query_len)
        else:
            lens.update(args.meta.query_start_loc.diff().tolist())
        right(args, host)

    add(run, level)
    check("mine", query_len=query_len)
    served = {0: set(), 1: {1}, 2: {1, 3}, 3: {1, 3, None}}[int(level)]
    assert keys == (served if query_len is None else served & {3})
    assert lens == {3} if query_len else lens > {0, 1, 3, 9}


# --- wrong ones -----------------------------------------------------------------------------------


def change(args: AttentionArgs, **fields: Any) -> AttentionArgs:
    """Other fields, those of the meta and of the configuration too."""
    meta = {name: fields.pop(name) for name in args.meta._fields if name in fields}
    config = {name: fields.pop(name) for name in args.config._fields if name in fields}
    return args._replace(
        meta=args.meta._replace(**meta), config=args.config._replace(**config), **fields
    )


def attend(args, **fields):
    """What `right` makes of the cache as it is."""
    nowhere = torch.full_like(args.meta.slot_mapping, -1)
    right(change(args, slot_mapping=nowhere, **fields), None)


def one_behind(args, host):
    """Positions are one too low."""
    right(args, host)
    attend(args, seq_lens=args.meta.seq_lens - 1)


def into_slot_minus_one(args, host):
    """-1 is the last row to torch."""
    for cache, new in zip(args.kv, (args.k, args.v)):
        cache.view(-1, *cache.shape[2:])[args.meta.slot_mapping] = new
    attend(args)


def without_window(args, host):
    right(change(args, window=None), host)


def without_softcap(args, host):
    right(change(args, softcap=None), host)


def as_far_ahead_as_there_is(args, host):
    """A window that bounds what is behind alone."""
    right(args if args.config.causal else change(args, window=None), host)


def as_if_dense(args, host):
    """Rows are taken to follow one another."""
    q, k, v = (
        x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))
        for x in (args.q, args.k, args.v)
    )
    right(change(args, q=q, k=k, v=v), host)


def with_all_rows_in_one_scale(args, host):
    """As where q is rounded to fp8 by its largest number, be it nobody's."""
    by = args.q.abs().amax()
    right(change(args, q=args.q / by * by), host)


def with_one_scale(args, host):
    """The first kv head's for all."""
    k, v = (None if x is None else x.flatten()[0] for x in (args.k_scale, args.v_scale))
    right(change(args, k_scale=k, v_scale=v), host)


def of_128_keys(args, host):
    blocks = -(-128 // args.config.block_size)
    right(change(args, block_tables=args.meta.block_tables[:, :blocks]), host)


def values_as_keys(args, host):
    right(change(args, k=args.v), host)


def heads_in_turn(args, host):
    """Head h reads kv head h % K."""
    turned = args.q.unflatten(1, (-1, args.config.num_kv_heads)).transpose(1, 2).flatten(1, 2)
    right(change(args, q=turned), host)
    out = args.out.unflatten(1, (args.config.num_kv_heads, -1)).transpose(1, 2).flatten(1, 2)
    args.out.copy_(out)


def real(args):
    """(T, 1, 1): tokens that are a request's."""
    return (torch.arange(len(args.q)) < args.meta.query_start_loc[-1])[:, None, None]


def true_rows_alone(args, host):
    """What is no request's is left as it was."""
    new = torch.empty_like(args.out)
    right(change(args, out=new), host)
    args.out.copy_(torch.where(real(args), new, args.out))


def the_last_request_goes_on(args, host):
    """What is no request's is attended for as well."""
    starts = args.meta.query_start_loc
    new, starts = (
        torch.empty_like(args.out),
        torch.cat([starts[:-1], starts.new_tensor([len(args.q)])]),
    )
    right(args, host)
    attend(args, query_start_loc=starts, out=new)
    args.out.copy_(torch.where(real(args), args.out, new + 1))


def unseen_times_zero(args, host):
    """0 * NaN, of slots that hold nothing."""
    right(args, host)
    args.out.add_(0 * args.v_cache[args.meta.block_tables.long()].sum())


def scaled_in_place(args, host):
    args.q.mul_(2.0)
    right(change(args, scale=args.config.scale / 2), host)


def as_if_uniform(args, host):
    """Right in eager calls; a graph has T // R tokens a request baked in."""
    if host is not None and host.key is not None:
        R = len(args.meta.seq_lens)
        starts = torch.arange(R + 1, dtype=torch.int32) * (len(args.q) // R)
        args = change(args, query_start_loc=starts)
    right(args, host)


def as_long_as_the_query(args, host):
    """Right in eager calls; a graph has the key's query length baked in as the longest context."""
    if host is not None and host.key is not None:
        blocks = -(-host.max_query_len // args.config.block_size)
        args = change(args, block_tables=args.meta.block_tables[:, :blocks])
    right(args, host)


def waiting(args, host):
    """It waits for a number from the device."""
    longest = int(args.meta.seq_lens.max())
    blocks = max(1, -(-longest // args.config.block_size))
    right(change(args, block_tables=args.meta.block_tables[:, :blocks]), host)


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


@pytest.mark.sampled(6)
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
    def run(args: Any, host: Any) -> None:
        raise ZeroDivisionError("mine")

    add(run)
    with pytest.raises(ZeroDivisionError) as raised:
        check("mine")
    (note,) = raised.value.__notes__
    assert note.startswith("backend 'mine', called with requests of (new, cached) tokens (1, 0); ")


def test_what_runs_nothing_is_no_pass(add):
    add(right, missing=lambda: "no such device")
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


def run_planned(args, host):
    right(change(args, seq_lens=args.plan), host)


def fill(lens, config, sizes, leaves):
    lens.zero_()[: len(leaves[0])] = leaves[0]


def fill_but_not_clear(lens, config, sizes, leaves):
    lens[: len(leaves[0])] = leaves[0]


@pytest.mark.sampled(0)
def test_a_plan_is_filled_before_each_call_and_replay(one_page, add):
    add(run_planned, plan=plan_of(fill))
    assert check("mine").replays
    add(run_planned, plan=plan_of(fill_but_not_clear))
    with pytest.raises(AssertionError, match="replayed on requests"):
        check("mine")
