"""The serving loop over ranks: two and four processes write what one does, in every mode; and what
goes wrong in one is an error in the others, soon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import starting
import torch

import fngraph as fg
from tests.ranks import serving_run as run

BOTH = ("NONE", "FULL_AND_PIECEWISE")  # the second has both kinds of graphs
SOON = 8.0  # seconds, other work of the machine included
ONE = {"dp": 1, "pp": 1, "tp": 1}


@pytest.fixture(scope="module")
def ranks() -> Callable[..., list[starting.Found]]:
    """What each of so many processes has found, which run once; what fails does so alone."""
    kept: dict[Any, list[starting.Found]] = {}

    def of(world: int, modes: tuple[str, ...] = BOTH) -> list[starting.Found]:
        key = world, modes
        if key not in kept:
            jobs = run.jobs(*key)
            kept[key] = starting.in_turn(run.streams, world, jobs, *key, "cpu", within=280)
        return kept[key]

    return of


@pytest.fixture(scope="module")
def one(one_thread: None) -> Callable[..., run.Ran]:
    """What one process writes, bare of graphs."""
    kept: dict[Any, run.Ran] = {}

    def of(**asked: bool) -> run.Ran:
        key = tuple(asked)
        if key not in kept:
            with torch.no_grad():
                kept[key] = run.stream(fg.make_mesh("cpu", **ONE), "NONE", **asked)
        return kept[key]

    return of


def by(modes: str) -> tuple[str, ...]:
    """The modes that run in the same processes."""
    return BOTH if modes in BOTH else (modes,)


def modes_of(modes: str) -> set[str]:
    return set(modes.split("_AND_"))


def check(ran: run.Ran, want: run.Ran, modes: str) -> None:
    """One leader's part of the stream."""
    assert ran.texts and set(ran.modes) == modes_of(modes)
    for number, tokens in ran.texts.items():
        full = want.texts[number]
        if number == run.CANCELLED:  # in another step, where there are other rows
            shorter = min(len(tokens), len(full))
            assert tokens[:shorter] == full[:shorter]
        else:
            assert tokens == full, number


def test_the_stream_has_everything(one):
    want = one()
    assert set(want.texts) == set(range(15))
    assert len(set().union(*want.texts.values())) > 50 and want.thrown
    assert set(want.kinds) == {
        "prefill", "mixed", "mixed lora", "decode", "decode lora", "verify", "verify lora"
    }  # fmt: skip
    plain = [i for i, asked in enumerate(run.requests(False)) if asked.adapter < 0]
    assert 0 < len(plain) < 14
    assert len(want.texts[run.CANCELLED]) < run.requests(False)[4].max_new


@pytest.mark.sampled("tp-FULL_AND_PIECEWISE", "pp-FULL_AND_PIECEWISE")
@pytest.mark.parametrize("modes", run.MODES)
@pytest.mark.parametrize("kind", ["tp", "pp"])
def test_a_team_of_two_writes_what_one_does(ranks, one, kind: str, modes: str):
    leads, follows = (found[kind, modes] for found in ranks(2, by(modes)))
    check(leads, one(), modes)
    assert leads.kinds == one().kinds and leads.thrown == one().thrown
    assert leads.texts == one().texts  # the one that was cancelled too
    assert not follows.events and not follows.kinds


def test_what_is_asked_of_logits_is_asked_over_ranks(ranks, one):
    leads, follows = (found["tp shaped"] for found in ranks(2))
    want = one(shaped=True, adapted=False)
    assert leads.texts == want.texts != one(adapted=False).texts
    assert [e.end for e in leads.events] == [e.end for e in want.events]
    told = [p for e in leads.events for p in e.logprobs]
    wanted = [p for e in want.events for p in e.logprobs]
    assert len(told) == len(wanted) > 30
    found = torch.tensor([p.logprob for p in told])
    torch.testing.assert_close(found, torch.tensor([p.logprob for p in wanted]))
    assert [[t for t, _ in p.top] for p in told] == [[t for t, _ in p.top] for p in wanted]
    assert not follows.events


@pytest.mark.sampled("[FULL_AND_PIECEWISE")
@pytest.mark.parametrize("modes", run.MODES)
def test_ranks_that_meet_write_what_one_does(ranks, one, modes: str):
    both = [found["dp", modes] for found in ranks(2, by(modes))]
    for ran in both:
        check(ran, one(), modes)
    assert not set(both[0].texts) & set(both[1].texts)
    assert len(both[0].texts) + len(both[1].texts) == 15
    assert all(any("verify" in kind for kind in ran.kinds) for ran in both)


def test_a_step_may_be_agreed_on_while_the_one_before_runs(ranks, one):
    """Drafts never change a text. Most steps decode, and ask nobody; all have as many of them."""
    both = [found["dp ahead"] for found in ranks(2)]
    late = {number: both[0][0].texts.pop(number) for number in range(15, 15 + len(run.LATE))}
    assert all(len(tokens) == 4 for tokens in late.values())
    for ran, asked, steps in both:
        check(ran, one(), "FULL_AND_PIECEWISE")
        assert 0 < asked < 0.8 * steps
    assert len(both[0][0].texts) + len(both[1][0].texts) == 15
    assert both[0][1:] == both[1][1:]


def test_ranks_that_do_not_meet_go_by_themselves(ranks, one):
    both = [found["dp apart"] for found in ranks(2)]
    for ran in both:
        check(ran, one(adapted=False), "FULL_AND_PIECEWISE")
    assert len(both[0].texts) + len(both[1].texts) == 15
    assert both[0].kinds.total() != both[1].kinds.total()


def test_one_stream_is_spread_over_ranks(ranks, one):
    both = [found["dp spread"] for found in ranks(2)]
    texts = both[0].texts | both[1].texts
    shares = [sum(len(t) for t in ran.texts.values()) for ran in both]
    assert sum(shares) == sum(map(len, texts.values())) and min(shares) > 0.4 * sum(shares)
    assert texts.pop(17) == texts[0]  # behind two that no process could make out
    assert {n: t for n, t in texts.items() if n != run.CANCELLED} == {
        n: t for n, t in one().texts.items() if n != run.CANCELLED
    }
    assert len(texts[run.CANCELLED]) == run.requests(False)[4].max_new  # nobody cancels it here


@pytest.mark.sampled("FULL_AND_PIECEWISE")
@pytest.mark.parametrize("modes", run.MODES)
def test_teams_that_meet_write_what_one_does(ranks, one, modes: str):
    found = [each["dp tp", modes] for each in ranks(4, (modes,))]
    for ran in found[::2]:
        check(ran, one(), modes)
    assert len(found[0].texts) + len(found[2].texts) == 15
    assert not any(ran.events for ran in found[1::2])


def test_stages_of_several_processes_write_what_one_does(ranks, one):
    found = [each["pp tp", "FULL_AND_PIECEWISE"] for each in ranks(4, run.MODES[-1:])]
    assert found[0].texts == one(adapted=False).texts
    assert not any(ran.events for ran in found[1:])


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "kind"), [(w, k) for w in run.STREAMS for k in run.STREAMS[w]])
def test_gpus_write_what_one_does(world: int, kind: str):
    env = starting.over_gpus(world)
    with torch.no_grad():
        want = run.stream(fg.make_mesh("cuda", **ONE), "NONE", adapted=kind != "pp tp")
    jobs, asked = [(kind, mode) for mode in run.MODES], (world, run.MODES, "cuda")
    ran = starting.in_turn(run.streams, world, jobs, *asked, within=70 * world, env=env)
    teams = run.STREAMS[world][kind].get("dp", 1)
    for found in ran[:: world // teams]:
        for mode in run.MODES:
            check(found[kind, mode], want, mode)


def test_followers_hear_why_their_leader_stopped(ranks):
    leads, follows = (found["raises"] for found in ranks(2))
    assert leads.error == "ZeroDivisionError: on purpose"
    assert follows.error.startswith("RankError: rank 0, which leads, stopped: ZeroDivisionError")
    assert max(leads.seconds, follows.seconds) < SOON


def test_a_loop_that_is_closed_ends_its_followers(ranks, one):
    for found in ranks(2):
        assert found["closes"].error == "" and found["closes"].seconds < SOON
    leads, follows = (found["after"] for found in ranks(2))
    assert leads.texts == one().texts and not follows.events


def test_a_rank_that_leaves_ends_those_that_it_meets(ranks):
    stays, leaves = (found["left"] for found in ranks(2))
    assert leaves.error == "ZeroDivisionError: on purpose"
    assert stays.error.startswith("Left: rank 1 has left")
    assert max(stays.seconds, leaves.seconds) < SOON


def test_where_the_one_that_takes_requests_fails_all_are_told(ranks):
    takes, waits = (found["taking"] for found in ranks(2))
    assert takes.error == "ZeroDivisionError: on purpose"
    assert waits.error.startswith("Left: rank 0 has left")
    assert max(takes.seconds, waits.seconds) < SOON


def test_a_follower_that_fails_ends_its_leader(ranks):
    leads, follows = (found["follower"] for found in ranks(2))
    assert follows.error == "ZeroDivisionError: on purpose"
    assert leads.error.startswith("RankError: the agreement to run a step as ")
    assert "rank 1 is gone" in leads.error, leads.error
    assert max(leads.seconds, follows.seconds) < SOON
