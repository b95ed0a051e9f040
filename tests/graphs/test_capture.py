"""Capture and replay of one key: state left alone, sizes that share one pool."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
import toys
from toys import FULL, PIECEWISE

import fngraph as fg
from fngraph.core import BatchDescriptor, Dim, HostBounds
from fngraph.core.program import Instruction, Program, run_program, with_drops
from fngraph.errors import CaptureError
from fngraph.graphs import memory
from fngraph.graphs.memory import preserved
from fngraph.graphs.replay import EagerCall, capture
from fngraph.step import capture as ahead

HOST = HostBounds(max_query_len=1)


# --- one key by hand ------------------------------------------------------------------------------


class Hand:
    """A program of "p" (x * 2 + 1) and "c" (state += rows; out = x + 10) steps, by hand.

    Inputs: slot 0 is x (T,), slot 1 a state (1,). A piece before a cut makes the cut's output,
    zeros, as the traced graph of a primitive does.
    """

    def __init__(self, kit: Any, cuts: str, top: int = 8) -> None:
        self.kit, self.cuts = kit, cuts
        self.x = torch.zeros(top, device=kit.device)
        self.state = torch.zeros(1, device=kit.device)
        self.out = torch.zeros(top, device=kit.device)
        self.seen: list[int] = []  # rows that each run of a cut was given
        self.hosts: list[Any] = []
        steps, fns, rows, slot = [], [], [], 2
        now, made = 0, None
        for i, kind in enumerate(cuts):
            if kind == "p":
                with_out = cuts[i + 1 : i + 2] == "c"
                steps.append(
                    Instruction(f"p {i}", False, 0, (now,), (slot, slot + 1)[: 1 + with_out])
                )
                fns.append(self.piece_with_out if with_out else self.piece)
                rows.append(())
                now, made = slot, slot + 1 if with_out else None
                slot += 1 + with_out
            else:
                steps.append(Instruction(f"c {i}", True, 1, (now, 1, made), ()))
                fns.append(self.cut)
                rows.append((Dim("T"), None, Dim("T")))
                now = made
        self.program = with_drops(Program(2, tuple(steps), (now,)))
        self.fns, self.rows = fns, rows

    def piece(self, sizes: Any, host: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2 + 1,)

    def piece_with_out(self, sizes: Any, host: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2 + 1, torch.zeros_like(x)

    def cut(self, sizes: Any, host: Any, x: Any, state: Any, out: Any) -> tuple[()]:
        self.seen.append(len(x))
        self.hosts.append(host)
        state += sizes["T"]
        out.copy_(x + 10)
        return ()

    def capture(self, mode: fg.Mode, T: int) -> Any:
        """Capture the key of T tokens."""
        inputs = [self.x[:T], self.state]
        sizes = {"T": T, "R": 1}
        return capture(
            self.kit.recorder, self.program, self.fns, self.rows, inputs, mode,
            BatchDescriptor(T), sizes, HOST, (self.out[:T],), lambda: None,
        )  # fmt: skip

    def step(self, replay: Any, x: list[float], host: Any = None) -> list[float]:
        """Stage x, replay, and read the true rows back."""
        self.x.fill_(0)
        self.x[: len(x)] = torch.tensor(x)
        replay({"T": len(x), "R": 1}, host)
        return self.out[: len(x)].tolist()


def expected(cuts: str, x: list[float]) -> list[float]:
    """What the program computes."""
    for kind in cuts:
        x = [v * 2 + 1 if kind == "p" else v + 10 for v in x]
    return x


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize("cuts", ["p", "pp", "pcp", "pc", "pcpcp"])
def test_a_replay_computes_the_program(kit, cuts: str, mode: fg.Mode):
    hand = Hand(kit, cuts)
    replay = hand.capture(mode, 4)
    for x in ([1.0, 2.0, 3.0], [5.0], [1.0, 2.0, 3.0, 4.0]):
        assert hand.step(replay, x) == expected(cuts, x)


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize("wrong", ["shape", "dtype"])
def test_a_result_that_is_another_than_traced_is_no_copy(kit, wrong: str, mode: fg.Mode):
    """It would be repeated, or converted, without a word."""
    hand = Hand(kit, "p")
    hand.fns[0] = lambda sizes, host, x: (x[:1] if wrong == "shape" else x > 0,)
    made = "float32[1]" if wrong == "shape" else "bool[4]"
    says = re.escape(f"result 0 of the graph is {made}, and torch's rule for it says float32[4]")
    with pytest.raises(CaptureError, match=says):
        hand.capture(mode, 4)


def test_full_is_one_graph_and_piecewise_one_a_run_of_pieces(kit):
    hand = Hand(kit, "ppcpcp")
    full, piecewise = hand.capture(FULL, 4), hand.capture(PIECEWISE, 4)
    assert len(full.graphs) == 1 and full.graph is full.graphs[0]
    kinds = [isinstance(c, EagerCall) for c in piecewise.calls]
    assert kinds == [False, True, False, True, False] and len(piecewise.graphs) == 3
    assert "FULL" in repr(full) and "3 graphs, 2 eager" in repr(piecewise)


def test_a_program_that_ends_in_a_cut_still_delivers(kit):
    hand = Hand(kit, "pc")
    replay = hand.capture(PIECEWISE, 4)
    assert [isinstance(c, EagerCall) for c in replay.calls] == [False, True, False]
    assert hand.step(replay, [1.0, 2.0]) == [13, 15]


def test_piecewise_calls_a_cut_with_the_true_rows_and_the_rest_of_its_output_is_zero(kit):
    hand = Hand(kit, "pc")
    replay = hand.capture(PIECEWISE, 8)
    assert hand.seen == []  # not called by the capture
    hand.out.fill_(99)
    bounds = HostBounds(max_query_len=5, max_seq_len=7)
    hand.step(replay, [1.0, 2.0, 3.0], bounds)
    assert hand.seen == [3] and hand.hosts == [bounds]
    assert hand.out.tolist() == [13, 15, 17, 0, 0, 0, 0, 0]
    hand.step(replay, [1.0], None)  # fewer rows: those of the step before are zero again
    assert hand.seen == [3, 1] and hand.out.tolist() == [13] + [0] * 7
    assert hand.state.item() == 4  # the cut was told the true sizes


def test_full_calls_a_cut_once_with_the_keys_rows_and_bounds(kit):
    hand = Hand(kit, "pc")
    replay = hand.capture(FULL, 8)
    assert hand.seen == [8] and hand.hosts == [HOST]
    hand.step(replay, [1.0, 2.0, 3.0], HostBounds(max_query_len=5))
    assert hand.seen == [8]  # the replay runs no Python


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_capture_leaves_the_state_as_it_was(kit, mode: fg.Mode):
    hand = Hand(kit, "pcpc")
    hand.state.fill_(3.5)
    replay = hand.capture(mode, 4)
    assert hand.state.tolist() == [3.5]
    assert hand.out.eq(0).all()
    hand.step(replay, [1.0, 2.0, 3.0, 4.0])
    assert hand.state.tolist() == [3.5 + 2 * 4]


@pytest.mark.parametrize("on_device", [8 << 20, 0], ids=["a few bytes", "on the host"])
def test_warm_up_leaves_what_is_written_as_it_was(kit, on_device, monkeypatch):
    monkeypatch.setattr(memory, "ON_DEVICE", on_device)
    hand = Hand(kit, "pcp")
    hand.state.fill_(float("nan"))
    hand.state.view(torch.int32).bitwise_or_(77)  # a payload that a sum would lose
    before = hand.state.view(torch.int32).clone()
    inputs, sizes = [hand.x[:4], hand.state], {"T": 4, "R": 1}
    with preserved([hand.state]):
        kit.recorder.warm_up(lambda: run_program(hand.program, hand.fns, inputs, sizes, HOST))
        hand.state.zero_()  # the tape has nothing to warm up
    assert torch.equal(hand.state.view(torch.int32), before)


def test_warm_up_that_fails_leaves_what_is_written_as_it_was(kit):
    if kit.recorder.name == "tape":
        kit.recorder.warm_up = lambda fn: fn()  # the tape has nothing to warm up
    hand = Hand(kit, "pcp")

    def explode(*args: Any) -> Any:
        raise ValueError("boom")

    inputs, sizes = [hand.x[:4], hand.state], {"T": 4, "R": 1}
    fns = [*hand.fns[:-1], explode]
    with pytest.raises(ValueError, match="boom"), preserved([hand.state]):
        kit.recorder.warm_up(lambda: run_program(hand.program, fns, inputs, sizes, HOST))
    assert hand.state.item() == 0 and hand.seen == [4]


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_two_sizes_share_a_pool_and_do_not_disturb_one_another(kit, mode: fg.Mode):
    hand = Hand(kit, "pcpcp")
    large, small = hand.capture(mode, 8), hand.capture(mode, 2)
    first, second = [1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0]
    for replay, x in [(large, first), (small, second), (large, first), (small, second)] * 2:
        assert hand.step(replay, x) == expected("pcpcp", x)


def test_modes_of_one_size_do_not_disturb_one_another(kit):
    hand = Hand(kit, "pcpcp")
    replays = [hand.capture(mode, 4) for mode in (PIECEWISE, FULL, PIECEWISE, FULL)]
    for replay in replays + replays[::-1]:
        assert hand.step(replay, [1.0, 2.0]) == expected("pcpcp", [1.0, 2.0])


def test_smaller_sizes_reuse_the_pool_of_larger_ones(kit):
    hand = Hand(kit, "pcpcp", top=1 << 20)
    keep = [hand.capture(FULL, 1 << 20)]
    used = kit.used
    for T in (1 << 19, 1 << 18, 1 << 10):
        keep.append(hand.capture(FULL, T))
        keep.append(hand.capture(PIECEWISE, T))
    assert kit.used == used  # nothing of a key lives on between its replays
    for replay in keep:
        assert hand.step(replay, [1.0, 2.0]) == expected("pcpcp", [1.0, 2.0])


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_capture_that_fails_leaves_pool_and_state_as_they_were(kit, mode: fg.Mode, at: int):
    hand = Hand(kit, "pcpcp")
    good = hand.capture(mode, 8)
    used, fns = kit.used, list(hand.fns)

    def explode(sizes: Any, host: Any, x: torch.Tensor) -> Any:
        y = x + 1  # noqa: F841  in the pool when it fails
        raise ValueError("boom")

    hand.fns = [*fns[:at], explode, *fns[at + 1 :]]
    with pytest.raises(CaptureError, match="boom") as error:
        hand.capture(mode, 4)
    assert hand.state.item() == 0
    assert kit.used == used, "the error that the caller holds keeps memory of the pool"
    del error
    hand.fns = fns
    for replay in (good, hand.capture(mode, 4)):
        assert hand.step(replay, [1.0, 2.0]) == expected("pcpcp", [1.0, 2.0])


def test_a_graph_of_several_runs_has_no_single_graph(kit):
    replay = Hand(kit, "pcp").capture(PIECEWISE, 4)
    with pytest.raises(ValueError, match="unpack"):
        replay.graph  # noqa: B018


# --- every key, through the stages ----------------------------------------------------------------


def compiled(fn: Any, params: Any, state: Any, modes: str) -> Any:
    """Up to `Compiled`, over the toys' limits."""
    name = "cache" if fn is toys.attend else "state"
    made = fg.graphify(
        fn, modes=modes, donate=name, stage="batch", limits=toys.LIMITS, sizes=toys.SIZES
    )
    return made.trace(params, state).split().lower().compile()


def fresh(fn: Any, device: Any) -> tuple[Any, Any]:
    """Params, and a state with something in every element."""
    if fn is toys.attend:
        params, state = toys.attention_params(), toys.attention_cache()
    else:
        params, state = toys.tally_params(), toys.tally_state()
    for i, leaf in enumerate(toys.leaves(state)):
        leaf.copy_(torch.arange(leaf.numel()).view(leaf.shape) + i)
    return toys.moved((params, state), device)


@pytest.mark.parametrize("modes", ["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("fn", [toys.attend, toys.tally, toys.tally_])
def test_capture_leaves_donated_state_bitwise_as_it_was(recorder_name, device, fn, modes):
    params, state = fresh(fn, device)
    before = toys.clone(state)
    captured = compiled(fn, params, state, modes).capture(params, state, recorder=recorder_name)
    assert len(captured) == len(captured.table) > 0
    toys.assert_trees(state, before)


@pytest.mark.parametrize("modes", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_keys_are_captured_largest_first(recorder_name, device, modes: str):
    params, cache = fresh(toys.attend, device)
    captured = compiled(toys.attend, params, cache, modes).capture(
        params, cache, recorder=recorder_name
    )
    for mode in (FULL, PIECEWISE):
        sizes = [d.num_tokens for m, d in captured.replays if m is mode]
        assert sizes == sorted(sizes, reverse=True)
    assert [d.num_tokens for d in captured][:1] == [16]


def test_nothing_of_a_key_lives_on_in_the_pool():
    params, cache = fresh(toys.attend, torch.device("cpu"))
    captured = compiled(toys.attend, params, cache, "FULL_AND_PIECEWISE").capture(params, cache)
    assert not captured.recorder.arena.live and captured.recorder.arena.nbytes


# --- steps without graphs -------------------------------------------------------------------------


def test_what_steps_without_graphs_run_is_run_ahead_and_once(monkeypatch):
    """As on CUDA, where a kernel is compiled by its first launch."""
    ran, run_eager = [], ahead._run_eager
    monkeypatch.setattr(ahead, "compiles_kernels", lambda device: True)
    monkeypatch.setattr(
        ahead, "_run_eager", lambda keys, spec: ran.append(spec) or run_eager(keys, spec)
    )
    params, cache = fresh(toys.attend, "cpu")
    before = toys.clone(cache)
    step = compiled(toys.attend, params, cache, "FULL").capture(params, cache, recorder="tape")
    toys.assert_trees(cache, before)
    decode = [(n, n, 1) for n in (1, 2, 4)]
    mixed = [(1, 1, None), (16, 1, None), (16, 4, None)]
    assert sorted(map(str, ran)) == sorted(str(fg.BatchSpec(*one)) for one in decode + mixed)
    ran.clear()
    step.capture_all()
    step.recapture(next(iter(step)))
    step.sleep()
    step.wake()
    assert not ran


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_a_batch_that_cannot_run_ahead_fails_as_a_key_does(monkeypatch, on_failure: str):
    def fails(*args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(ahead, "compiles_kernels", lambda device: True)
    monkeypatch.setattr(ahead, "_padding_of", fails)  # this toy plans nothing, so no key needs it
    params, cache = fresh(toys.attend, "cpu")
    made = compiled(toys.attend, params, cache, "FULL")
    with pytest.raises(CaptureError) if on_failure == "raise" else contextlib.nullcontext() as told:
        step = made.capture(params, cache, recorder="tape", on_failure=on_failure)
        assert len(step) == len(step.table) and not step.failed
    assert on_failure == "eager" or re.search(
        r"BatchSpec.*without a graph: .*no such kernel", str(told.value)
    )
