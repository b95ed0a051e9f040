"""Stops as text, wherever in the tokens they begin and end; the text that comes before them."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from fngraph.models import BYTE_TEXT, Policy, advance, start, submit
from fngraph.models.serving.scheduling import plan
from fngraph.models.serving.texts.detokenize import Reading, overlap, read
from fngraph.models.text import to_text

POLICY = Policy(64, 2, 64, 4)
PIECES = ["a", "ab", "b\n", "\n", "\nc", "EN", "D", "ND", " the", "x" * 3, "E"]  # by token


def decode(tokens) -> str:
    return "".join(PIECES[token] for token in tokens)


def tell(tokens, at_once=1, *, how=decode, max_new=None, **asked):
    """(text, tokens it got, end, texts as they came) where a model says these tokens."""
    state = submit(start(64, POLICY), POLICY, (1,), max_new or len(tokens), decode=how, **asked)
    came, got, end = [], [], None
    left = list(tokens)
    while state.live:
        state = plan(state, POLICY)
        (row,) = state.rows
        guess = tuple(left[: at_once - 1])  # as if they had been drafts, all of them accepted
        state = dataclasses.replace(state, rows=(row._replace(drafts=guess),))
        state, (event,) = advance(state, [left[:at_once]])
        left = left[at_once:]
        came.append(event.text)
        got += event.tokens
        end = event.end
    return "".join(came), got, end, came


def by_hand(tokens, stops, min_tokens=0):
    """The text up to the first stop, and how many tokens that took."""
    text = ""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        start_at = len(decode(tokens[:min_tokens]))
        found = [at for s in stops if (at := text.find(s, start_at)) >= 0]
        if found and count > min_tokens:
            return text[: min(found)], count, "stop"
    return text, len(tokens), "length"


@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
def test_a_stop_is_found_across_tokens_and_the_text_before_it_is_kept(at_once):
    """However many tokens come at once."""
    rng, ended = random.Random(2), set()
    for _ in range(300):
        tokens = rng.choices(range(len(PIECES)), k=rng.randint(1, 12))
        stops = rng.sample(["END", "\n\n", "ab\nc", "xx", "D the", "c\n"], k=rng.randint(1, 3))
        least = min(len(tokens), rng.choice([0, 0, 3]))
        text, got, end, _ = tell(tokens, at_once, stop=stops, min_tokens=least)
        want, count, why = by_hand(tokens, stops, least)
        assert (text, len(got), end) == (want, count, why), (tokens, stops, least)
        ended.add(end)
    assert ended == {"stop", "length"}


def test_nothing_is_given_out_that_a_stop_may_take_back():
    tokens = [PIECES.index(piece) for piece in ("a", "EN", "E", "ND", "b\n")]
    text, got, end, came = tell(tokens, stop=["END"])
    assert (text, end, len(got)) == ("aEN", "stop", 4)
    assert came == ["a", "", "EN", ""]


def test_held_text_comes_at_the_end():
    tokens = [PIECES.index(piece) for piece in ("a", "EN")]
    assert tell(tokens, stop=["END"])[3] == ["a", "EN"]


def test_tokens_that_stop_are_no_text():
    """Nor are those that a run of them begins with, as long as it may be one."""
    assert tell([0, 8, 4, 9], stop=[4])[:3] == ("a the", [0, 8, 4], "stop")
    text, got, end, came = tell([0, 8, 4, 0, 8, 9, 0], stop=[[8, 9]])
    assert (text, got, end) == ("a the\nca", [0, 8, 4, 0, 8, 9], "stop")
    assert came == ["a", "", " the\nc", "a", "", ""]


def test_runs_and_text_both_stop_whichever_is_first():
    assert tell([0, 5, 6, 8], stop=["END", 8])[:3] == ("a", [0, 5, 6], "stop")
    assert tell([0, 8, 5, 6], stop=["END", 8])[:3] == ("a", [0, 8], "stop")


def test_stops_before_min_tokens_are_overlooked():
    assert tell([8, 8, 8, 0], stop=[[8, 8]], min_tokens=2)[:3] == (" the", [8, 8, 8], "stop")
    assert tell([5, 6, 5, 6], stop=["END"], min_tokens=2)[:3] == ("END", [5, 6, 5, 6], "stop")


def test_min_tokens_hold_without_text_too():
    for at_once in (1, 2, 3):
        assert tell([8, 8, 8, 0], at_once, how=None, stop=[[8, 8]], min_tokens=2)[1] == [8, 8, 8]
        assert tell([8, 8, 8, 0], at_once, how=None, stop=[[8, 8]])[1] == [8, 8]


def test_a_character_of_many_tokens_comes_whole():
    said = "né 漢字 🙂 end"
    tokens = list(said.encode())
    text, _, end, came = tell(tokens, how=BYTE_TEXT.decode)
    assert text == said and end == "length"
    assert not any("\ufffd" in part for part in came) and came.count("") == len(tokens) - len(said)
    assert tell(tokens, how=to_text, stop=["🙂"])[0] == "né 漢字 "


def test_bytes_that_are_no_text_are_all_there():
    rng = random.Random(0)
    for _ in range(200):
        tokens = rng.choices([65, 0xC3, 0xA9, 0xF0, 0x9F, 0xFF], k=rng.randint(1, 9))
        assert tell(tokens, how=to_text)[0] == to_text(tokens)


def test_a_decoder_that_writes_a_token_by_what_is_before_it():
    """As sentencepiece's do: no space in front of the first word."""

    def words(tokens) -> str:
        return " ".join("abcdefg"[token] for token in tokens)

    assert tell([0, 1, 2, 3], how=words)[0] == "a b c d"
    assert tell([0, 1, 2, 3], how=words, stop=["b c"])[0] == "a "


def test_what_is_left_when_time_is_up_or_the_logits_are_no_numbers():
    state = submit(start(64, POLICY), POLICY, (1,), 9, decode=decode, stop=["END"], deadline=5.0)
    state, (event,) = advance(plan(state, POLICY), [[PIECES.index("EN")]], now=1.0)
    assert event.text == "" and event.end is None
    _, (late,) = advance(plan(state, POLICY), [[PIECES.index("E")]], now=5.0)
    assert (late.text, late.end, len(late.tokens)) == ("ENE", "time", 1)
    _, (failed,) = advance(plan(state, POLICY), [[-1]], now=1.0)
    assert failed.text == "EN" and failed.failed


@pytest.mark.parametrize("given", [None, b"a"])
def test_a_decode_that_gives_no_text_is_told_so(given):
    state = submit(start(64, POLICY), POLICY, (1,), 9, decode=lambda tokens: given, stop=["END"])
    _, (bad,) = advance(plan(state, POLICY), [[0]])
    assert bad.end.endswith(f"TypeError: it returned a {type(given).__name__}, no str")


def test_a_decode_that_raises_ends_its_request_alone():
    state = submit(start(64, POLICY), POLICY, (1,), 9, decode=decode)
    state = submit(state, POLICY, (1,), 9, decode=decode)
    state, _ = advance(plan(state, POLICY), [[0], [0]])
    state, (bad, good) = advance(plan(state, POLICY), [[len(PIECES)], [1]])
    assert bad.end == "failed: its decode raised IndexError: list index out of range"
    assert (good.text, good.end) == ("ab", None) and [job.id for job in state.running] == [1]

    broken = []

    def breaks(tokens):
        return decode(tokens) if not broken else broken[1]

    state = submit(start(64, POLICY), POLICY, (1,), 9, decode=breaks, stop=["END"])
    state, _ = advance(plan(state, POLICY), [[PIECES.index("EN")]])  # which is held back
    faulty = dataclasses.replace(plan(state, POLICY), faults={0: "no slot"})
    assert advance(faulty, [[0]])[1][0][2:4] == ("failed: no slot", "EN")
    broken.append("")  # from now on there is nothing at 1
    assert advance(faulty, [[0]])[1][0][2:4] == ("failed: no slot", "")


def test_reading_is_a_value():
    new = np.array([0, 5])
    one, text, _ = read(Reading(), new, decode, ["END"])
    assert (text, one.held) == ("a", "EN")
    assert read(one, np.array([0, 5, 6]), decode, ["END"])[1:] == ("", True)
    assert read(one, np.array([0, 5, 0]), decode, ["END"])[1:] == ("ENa", False)
    assert overlap("EN", ["END"]) == 2 and overlap("END", ["END"]) == 0 and overlap("x", []) == 0


@pytest.mark.parametrize(
    "asked, error, says",
    [
        ({"stop": ["END"]}, ValueError, "pass decode=text.decode too"),
        ({"stop": "END"}, TypeError, r"pass a list, stop=\['END'\]"),
        ({"stop": [""], "decode": decode}, ValueError, "no empty stop"),
        ({"min_tokens": 9}, ValueError, "pass 0 to max_new=4"),
        ({"min_tokens": 1.5}, TypeError, "min_tokens=1.5 is a float"),
        ({"logprobs": -1}, ValueError, "logprobs=-1"),
        ({"n": 0}, ValueError, "n=0"),
        ({"priority": "high"}, TypeError, "priority='high' is a str"),
        ({"deadline": float("nan")}, ValueError, "deadline=nan"),
        ({"deadline": "soon"}, ValueError, "deadline='soon': pass time"),
        ({"decode": "utf-8"}, TypeError, "decode='utf-8': pass a function"),
        ({"grammar": [1, 2]}, TypeError, r"grammar=\[1, 2\]: pass a function"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked, error, says):
    with pytest.raises(error, match=says):
        submit(start(64, POLICY), POLICY, (1,), 4, **asked)
