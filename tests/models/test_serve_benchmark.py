"""`python -m benchmarks serve --tiny`, and how its figures are judged."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

import fngraph as fg
from benchmarks import harness, serve
from benchmarks.serve import streams
from benchmarks.serve.many import missed_by
from benchmarks.serve.right import share_of_texts, share_right
from benchmarks.serve.streams import Clock
from benchmarks.serve.turns import DRAWN, beside, broken, decode_batch
from benchmarks.traffic import Arrival, stream
from fngraph.models import Policy, Settings, Steps, bare_steps, llama, lora
from tests.traced_once import Kept, traced_once

MEANING = {  # what decode batches and the others run as
    "NONE": ("NONE", "NONE"), "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}  # fmt: skip


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "modes, more",
    [
        (["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"], []),
        (["FULL_AND_PIECEWISE"], ["--sampled", "--adapters", "2"]),
    ],
    ids=["greedy", "sampled and adapted"],
)
def test_a_tiny_run(modes, more, tmp_path, capsys):
    flags = ["--tiny", "--modes", *modes, "--json", str(tmp_path / "serve.json"), *more]
    assert harness.main(["serve", *flags]) == 0
    written = json.loads((tmp_path / "serve.json").read_text())
    assert written["environment"]["torch"] == torch.__version__
    (found,) = written["figures"]
    assert (found["model"], found["attention"]) == ("tiny", "reference")
    ways = ["bare forward", *modes]
    assert [(r["batch"], r["way"]) for r in found["decode"]] == [
        (n, w) for n in (1, 3) for w in ways
    ]
    for row in found["decode"]:
        assert row["tokens/s"] == pytest.approx(row["batch"] / row["ms"] * 1e3)
        assert 0 < row["least ms"] <= row["ms"] <= row["most ms"] and row["right"] == 1
        bare = found["decode"][ways.index("bare forward") + len(ways) * (row["batch"] == 3)]
        least, most = row["least ms"] / bare["most ms"], row["most ms"] / bare["least ms"]
        assert least <= row["of bare"] <= most
    profile = dataclasses.replace(serve.TINY, adapters=2 * bool(more), adapted=0.5)
    asked = sum(one.max_new for one in stream(profile, 12, vocab_size=256))
    for row in found["traffic"]:
        assert row["requests"] == 12
        assert row["new tokens"] == asked and row["right"] == 1
        assert 0 < row["between tokens p50 ms"] <= row["between tokens p99 ms"]
        assert 0 < row["the loop's part p50 ms"] < row["step p50 ms"]
        assert 0 < row["first token p50 ms"] <= row["first token p99 ms"]
        assert (row["padding"] > 0) == (row["modes"] not in ("NONE", "FULL_DECODE_ONLY"))
    for mode in modes:
        lines = [line for line in found["shares"] if line["modes"] == mode]
        for count in ("of steps", "of tokens"):
            assert sum(line[count] for line in lines) == pytest.approx(1)
        ran = {(line["kind"].split()[0], line["mode"]) for line in lines}
        decode, other = MEANING[mode]
        assert ran == {("decode", decode), ("prefill", other), ("mixed", other)}
        adapted = {line["kind"].split()[0] for line in lines if line["kind"].endswith(" lora")}
        assert {"decode", "mixed"} <= adapted if more else not adapted
    shown = capsys.readouterr().out
    assert all(mode in shown for mode in modes) and "tokens/s" in shown


def test_the_same_stream_beside_transformers(tmp_path):
    flags = ["--tiny", "--parts", "traffic", "--modes", "FULL_AND_PIECEWISE", "--beside", "0"]
    assert harness.main(["serve", *flags, "--json", str(tmp_path / "serve.json")]) == 0
    (found,) = json.loads((tmp_path / "serve.json").read_text())["figures"]
    ours, theirs = found["traffic"]
    assert theirs["modes"] == "generate_batch, level 0"
    for key in ("requests", "new tokens", "right"):
        assert theirs[key] == ours[key]
    assert theirs["right"] == 1 and theirs["tokens/s"] > 0
    assert 0 < theirs["between tokens p50 ms"] <= theirs["between tokens p99 ms"]
    assert 0 < theirs["first token p50 ms"] <= theirs["first token max ms"]
    assert harness.main(["serve", *flags, "--sampled"]) == 2


def test_what_is_asked_beside_transformers():
    rows = [
        {"modes": "NONE", "tokens/s": 10, "first token p50 ms": 1.0},
        {"modes": "FULL", "tokens/s": 30, "first token p50 ms": 5.0},
    ]
    its = {"modes": "generate_batch, level 0", "tokens/s": 20, "first token p50 ms": 5.0}
    assert serve.slower(rows) == [] == serve.slower([*rows, its])
    (line,) = serve.slower([*rows, its | {"tokens/s": 21}])
    assert line == "FULL: 1.43 times generate_batch, level 0, and 1.5 is asked"
    (line,) = serve.slower([*rows, its | {"first token p50 ms": 4.0}])
    assert line == "FULL: first token after 5.0 ms, generate_batch, level 0: 4.0"


def test_a_stream_is_served_as_it_comes(monkeypatch: pytest.MonkeyPatch):
    """Each request once, in order, when it is due and not before, with its adapter and its draws;
    and what it waited for its first token is counted from when it was due."""
    profile = dataclasses.replace(serve.TINY, adapters=3, adapted=0.5, sampled=0.5, rate=40)
    arrivals, asked, clock = stream(profile, 24, vocab_size=256), [], [0.0]
    policy = Policy(16, 3, 4, 16)
    real = streams.submit

    def noted(state, policy, prompt, max_new, *, adapter, settings):
        asked.append((state.submitted, clock[0], tuple(prompt), max_new, adapter, settings))
        return real(state, policy, prompt, max_new, adapter=adapter, settings=settings)

    class Ticking(Clock):
        def now(self) -> float:
            return clock[0]

        def jump(self, to: float) -> None:
            clock[0] = max(clock[0], to)

    def run(cache, batch):
        clock[0] += 0.01
        return torch.zeros(batch.logits_indices.shape, dtype=torch.int64), cache

    monkeypatch.setattr(streams, "submit", noted)
    monkeypatch.setattr(streams, "Clock", Ticking)
    adapters = lora.slots(llama.init_params(serve.SHAPES["tiny"]), count=3, rank=1)
    steps = bare_steps(llama.forward, None, policy, "sampling", adapters=adapters)
    row, _, texts = streams.served(steps._replace(run=run), None, policy, 12, arrivals)
    want = [
        (i, one.prompt, one.max_new, one.adapter,
         Settings() if one.seed is None else DRAWN._replace(seed=one.seed))
        for i, one in enumerate(arrivals)
    ]  # fmt: skip
    assert [(i, *rest) for i, _, *rest in asked] == want
    assert len({one.adapter for one in arrivals}) == 4 and len({one.seed for one in arrivals}) > 6
    late = [at - one.at for (_, at, *_), one in zip(asked, arrivals)]
    assert all(0 <= waited < 0.0101 for waited in late)  # no longer than the step under way
    assert {i: len(text) for i, text in texts.items()} == {
        i: one.max_new for i, one in enumerate(arrivals)
    }
    assert row["first token p50 ms"] >= 10 and row["between tokens p50 ms"] == pytest.approx(10)
    assert row["most waiting"] >= 1


def of_zeros(steps: Steps) -> Steps:
    """A stub: it draws token 0."""

    def run(cache, batch):
        return torch.zeros(batch.logits_indices.shape, dtype=torch.int64), cache

    return steps._replace(run=run)


def over_zeros(steps: Steps) -> Steps:
    """What the steps before have left in the cache is not read."""

    def run(cache, batch):
        for pair in cache:
            for leaf in pair:
                leaf.zero_()
        return steps.run(cache, batch)

    return steps._replace(run=run)


def without_adapters(steps: Steps) -> Steps:
    """Every token is said to use none."""

    def run(cache, batch):
        if batch.spec.adapters:
            batch.adapter_ids.fill_(-1)
        return steps.run(cache, batch)

    return steps._replace(run=run)


@pytest.fixture(scope="module")
def traces() -> Kept:
    """Of steps with and without adapters."""
    return {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", ["decode", "traffic"])
@pytest.mark.parametrize(
    "break_, more",
    [(of_zeros, []), (over_zeros, []), (without_adapters, ["--adapters", "2"])],
)
def test_wrong_tokens_are_not_measured(break_, more, part, monkeypatch, capsys, traces):
    real = serve.make_steps
    monkeypatch.setattr(serve, "make_steps", lambda *args, **opts: break_(real(*args, **opts)))
    one_layer = dataclasses.replace(serve.SHAPES["tiny"], num_layers=1)
    monkeypatch.setitem(serve.SHAPES, "tiny", one_layer)
    with traced_once(traces, len(more)):
        flags = ["--tiny", "--modes", "FULL_AND_PIECEWISE", "--parts", part, *more]
        assert harness.main(["serve", *flags]) == 1
    what = "traffic" if part == "traffic" else "batch 3"
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith(f"tiny, {what}: FULL_AND_PIECEWISE draws other") for line in lines
    ), lines


def test_a_token_is_right_where_it_is_as_good():
    logits_NV = torch.tensor([[4.0, 4.0, 3.98, -4.0]] * 4)
    drawn_N, wanted_N = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 1, 1, 1])
    assert share_right(logits_NV.bfloat16(), drawn_N, wanted_N) == 0.5
    assert share_right(logits_NV, drawn_N, wanted_N) == 0.25
    assert share_right(logits_NV * torch.nan, wanted_N, wanted_N) == 0


def test_texts_are_judged_where_they_part():
    asked = []

    def logits_after(one, text):
        asked.append((one, text))
        return torch.tensor([0.0, 4.0, 4.0, 1.0])

    arrivals = [Arrival(0.0, (i,), 3) for i in range(4)]
    wanted = dict.fromkeys(range(4), (3, 1, 0))
    texts = {0: (3, 1, 0), 1: (3, 2, 3), 2: (3, 3, 0), 3: (3, 1)}
    assert share_of_texts(texts, wanted, arrivals, logits_after) == 0.5
    assert asked == [(arrivals[1], (3,)), (arrivals[2], (3,))]


def test_a_decode_batch_reads_blocks_of_its_own():
    batch = decode_batch(3, 20, Policy(16, 8, 8, 4), "cpu", "sampling", vocab_size=256)
    assert batch.spec == fg.BatchSpec(3, 3, query_len=1, host=fg.HostBounds(1, 20))
    assert batch.seq_lens.tolist() == [20] * 3 and batch.positions.tolist() == [19] * 3
    assert batch.block_tables[:, :5].tolist() == [list(range(i, i + 5)) for i in (0, 5, 10)]
    assert batch.slot_mapping.tolist() == [19, 39, 59] and len(set(batch.keys.tolist())) == 3
    assert (batch.temperature > 0).all()


GOOD: dict[str, float] = {
    "bare forward": 10.0, "NONE": 10.4, "PIECEWISE": 6.0, "FULL": 4.0, "FULL_DECODE_ONLY": 3.9,
    "FULL_AND_PIECEWISE": 3.95,
}  # fmt: skip


def rows(batch: int = 4, waits: int = 0, **changed: float) -> list[dict[str, Any]]:
    """Figures of one batch."""
    ms = GOOD | {way.replace("_forward", " forward"): ms for way, ms in changed.items()}
    return [
        {"batch": batch, "way": way, "ms": ms[way], "of bare": ms[way] / ms["bare forward"],
         "waits": waits}
        for way in ms
    ]  # fmt: skip


def test_what_is_not_met_is_said():
    assert broken(rows()) == []
    assert broken(rows(PIECEWISE=3.0)) == ["batch 4: FULL_AND_PIECEWISE is 0.759 of the best mode"]
    assert broken(rows(bare_forward=9.0)) == ["batch 4: NONE takes 1.156 times bare forward"]
    slow = rows(FULL_AND_PIECEWISE=4.2, FULL=4.2, FULL_DECODE_ONLY=4.2)
    assert broken(slow) == ["batch 4: FULL_AND_PIECEWISE is 2.48 times NONE"]
    assert broken([{**row, "batch": 16} for row in slow]) == []
    assert len(broken(rows(waits=1))) == 5 and "NONE: a step waits" in broken(rows(waits=1))[3]
    assert broken([row for row in rows() if row["way"] == "FULL_AND_PIECEWISE"]) == []


def test_none_is_held_to_what_bare_forward_took_beside_it():
    assert beside([2.0, 4.0, 9.0], [1.0, 4.0, 3.0]) == 2
    drifted = [{**row, "of bare": 1.02} for row in rows(bare_forward=9.0)]
    assert broken(drifted) == []
    slower = [{**row, "of bare": 1.06} for row in rows()]
    assert broken(slower) == ["batch 4: NONE takes 1.060 times bare forward"]


def test_idle_time_is_skipped():
    clock = Clock()
    clock.jump(100.0)
    assert 100 <= clock.now() < 101
    clock.jump(50.0)
    assert clock.now() >= 100


def test_tiny_leaves_flags_that_were_given():
    args = harness.parse("serve", ["--tiny", "--requests", "5", "--backend", "sdpa"])
    assert (args.requests, args.backend) == (5, "sdpa")
    assert (args.models, args.device) == (["tiny"], "cpu")


@pytest.mark.sampled(0)
@pytest.mark.parametrize("drafts", [0, 2])
def test_several_tokens_a_launch(tmp_path, capsys, drafts: int):
    flags = ["--tiny", "--many", "4", "--context", "9", "--json", str(tmp_path / "serve.json")]
    assert harness.main(["serve", *flags, "--drafts", str(drafts)]) == 0
    (found,) = json.loads((tmp_path / "serve.json").read_text())["figures"]
    assert [(row["batch"], row["tokens"], row["same"]) for row in found["launches"]] == [
        (1, 4, 1), (3, 4, 1)
    ]  # fmt: skip
    for row in found["launches"]:
        assert row["host us of its replay"] > 0
        assert row["of a step"] == pytest.approx(row["ms a token"] / row["a step, device ms"])
    by = {(row["at a time"], row["decode_many"]): row for row in found["streams"]}
    assert set(by) == {(n, k) for n in (1, 3) for k in (1, 4)}
    assert {row["drafts"] for row in by.values()} == {drafts}
    for (n, k), row in by.items():
        assert row["same"] == 1 and row["new tokens"] == 4 * n * 12
        assert k == 1 or row["steps"] < by[n, 1]["steps"]
    assert harness.main(["serve", *flags, "--sampled"]) == 2
    assert "neither --sampled nor --adapters" in capsys.readouterr().err


def test_what_is_asked_of_several_tokens_a_launch():
    launch = {
        "tokens": 128, "batch": 1, "same": 1.0, "host us a launch": 30.0, "of a step": 1.0,
        "of 10 steps": 1.05,
    }  # fmt: skip
    plain = {"at a time": 2, "decode_many": 1, "tokens/s": 100.0, "first token p50 ms": 10.0}
    many = plain | {"decode_many": 8, "tokens/s": 120.0, "first token p50 ms": 10.5, "right": 1.0}
    found = {"launches": [launch], "streams": [plain, many]}
    assert missed_by(found) == [] == missed_by({})
    for name, bad, said in (
        ("host us a launch", 41.0, "costs the host 41 us"), ("of a step", 1.02, "1.020 of a step"),
        ("of 10 steps", 1.2, "done after 10 it takes 1.20 of"), ("same", 0.5, "0.50 of the texts"),
    ):  # fmt: skip
        (line,) = missed_by({"launches": [launch | {name: bad}]})
        assert said in line and "128 tokens at batch 1" in line
        others = launch | {name: bad, "batch": 2}, launch | {name: bad, "tokens": 64}
        assert len(missed_by({"launches": others})) == 2 * (name == "same")
    for name, bad, said in (
        ("tokens/s", 105.0, "1.05 times the tokens"), ("right", 0.8, "0.80 of the texts"),
        ("first token p50 ms", 12.0, "comes 1.20 times as late"),
    ):  # fmt: skip
        (line,) = missed_by({"streams": [plain, many | {name: bad}]})
        assert said in line and "2 at a time" in line


def test_a_part_that_there_is_not(capsys):
    with pytest.raises(SystemExit):
        harness.parse("serve", ["--parts", "decod"])
    assert "decode" in capsys.readouterr().err
