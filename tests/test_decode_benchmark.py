"""`python -m benchmarks decode`, `prefill` and `compile`: what is timed, and what is not."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import benchmarks.compile
import benchmarks.prefill
from benchmarks import decode, harness
from benchmarks.decode import clocks, elsewhere, ours, peers, plain
from benchmarks.decode.bench import Bench, Made, Right, make_bench
from benchmarks.decode.judging import Left, Wrong, judge, made_ready
from benchmarks.decode.models import MODELS, bytes_read
from benchmarks.decode.picture import figure_of
from benchmarks.harness import LATE
from fngraph.models.weights.naming import named

TINY = ("tiny", "tiny-qwen3", "tiny-moe")
CUDA = argparse.Namespace(device="cuda")


@functools.cache
def bench_of(model: str) -> tuple[Bench, Right]:
    """Three requests of 32 tokens, and what is right."""
    bench = make_bench(model, 32, (1, 3), "cpu", None)
    return bench, bench.right(3)


# --- what runs ------------------------------------------------------------------------------------


@pytest.mark.sampled(0)
def test_a_tiny_run(tmp_path, capsys):
    path = tmp_path / "decode.json"
    flags = ["--tiny", "--models", "tiny-moe", "--batch", "1", "3", "--repeats", "3"]
    ways = ["FULL-none", "PIECEWISE-none", "bare", "captured", "vllm"]
    assert harness.main(["decode", *flags, "--ways", *ways, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["figures"]
    each = [*ways, "FULL-none, again"]
    assert [(r["batch"], r["way"]) for r in rows] == [(n, way) for n in (1, 3) for way in each]
    for row in rows:
        if row["way"] == "vllm":
            assert row["failed"].startswith("not installed: import vllm: ModuleNotFoundError")
            assert "wall ms" not in row
            continue
        assert row["context"] == 32 and 0 < row["error"] < 0.03 and 0 < row["kept error"] < 0.03
        assert row["host us"] > 0 and row["wall ms"] > 0 and row["kernels us"] > 0
        assert row["share"] == pytest.approx(row["GB"] / row["device ms"] / row["copy TB/s"])
        if "none" in row["way"]:
            assert row["ran as"] == row["way"].split("-")[0] and row["nodes"] > 100
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "tiny-moe, batch 3, context 32" in capsys.readouterr().out


def uncompiled(bench: Bench) -> Any:
    """gpt-fast's module, called."""
    weights = plain.weights_of(bench.params)

    def at(num_reqs: int) -> Made:
        module = plain.Module(bench.config, weights, bench.contiguous(num_reqs))
        kept = peers.Kept(bench, num_reqs)
        return peers.made_of(bench, num_reqs, "", kept, peers.called(module, kept))

    return at


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("way", ["eager", "captured", "module", "transformers", "jax"])
def test_others_are_right(model: str, way: str):
    """And fed with their own tokens they give those of bare `forward`, fed likewise."""
    if way == "jax":
        pytest.importorskip("jax")
    bench, right = bench_of(model)
    made = (decode.WAYS | {"module": uncompiled})[way](bench)(3)
    found = judge(bench, right, made)
    assert found["error"] < 0.03 and found["kept error"] < 0.03
    texts = []
    for one in (made, ours.bare(bench)(3)):
        bench.fill(one.views(), right.away)
        ids, text = right.ids, []
        for _ in range(2):
            ids = one.step(ids)
            one.wait()
            text.append(torch.from_dlpack(ids).tolist())
        texts.append(text)
    assert texts[0] == texts[1]


@pytest.mark.sampled(0)
def test_a_compiled_step_is_right(monkeypatch):
    model = MODELS["tiny"]._replace(config=dataclasses.replace(MODELS["tiny"].config, num_layers=1))
    monkeypatch.setitem(MODELS, "tiny", model)
    bench = make_bench("tiny", 32, (3,), "cpu", None)
    judge(bench, bench.right(3), peers.WAYS["compile"](bench)(3))


# --- what is refused ------------------------------------------------------------------------------


def without_query_norm(weights: plain.Weights) -> plain.Weights:
    layers = [x._replace(q_norm=x.q_norm * 2) for x in weights.layers]
    return weights._replace(layers=tuple(layers))


def but_for_its_own(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return plain.folded_heads(q, k[:, :, :-1], v[:, :, :-1], seen[..., :-1])


MISTAKES: dict[str, tuple[str, Any]] = {  # model, and a step that is wrong
    "another position": (
        "tiny", lambda config, weights, cache, ids, positions: plain.step(
            config, weights, cache, ids, positions - 1
        )
    ),
    "a cache that is not written": (
        "tiny", lambda config, weights, cache, *more: plain.step(
            config, weights, [(k.clone(), v.clone()) for k, v in cache], *more
        )
    ),
    "its own token is not seen": (
        "tiny", lambda *given: plain.step(*given, but_for_its_own)
    ),
    "another layer's cache": (
        "tiny", lambda config, weights, cache, *more: plain.step(
            config, weights, cache[::-1], *more
        )
    ),
    "a token that is not the likeliest": (
        "tiny", lambda *given: (plain.step(*given)[0] + 1, plain.step(*given)[1])
    ),
    "logits of nothing": (
        "tiny", lambda *given: (plain.step(*given)[0], plain.step(*given)[1] * torch.nan)
    ),
    "norms that differ": (
        "tiny-qwen3", lambda config, weights, *more: plain.step(
            config, without_query_norm(weights), *more
        )
    ),
    "an expert too few": (
        "tiny-moe", lambda config, weights, *more: plain.step(
            dataclasses.replace(config, num_chosen=1), weights, *more
        )
    ),
    "requests in another order": (
        "tiny", lambda *given: tuple(x.flip(0) for x in plain.step(*given))
    ),
}  # fmt: skip


def of_step(bench: Bench, step: Any) -> Made:
    """A way that runs it."""
    weights, cache, kept = plain.weights_of(bench.params), bench.contiguous(3), peers.Kept(bench, 3)
    run = lambda ids, positions: step(bench.config, weights, cache, ids, positions)  # noqa: E731
    return peers.made_of(bench, 3, "", kept, peers.called(run, kept))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_way_is_not_timed(mistake: str):
    model, step = MISTAKES[mistake]
    bench, right = bench_of(model)
    judge(bench, right, of_step(bench, plain.step))
    with pytest.raises(Wrong):
        judge(bench, right, of_step(bench, step))


def test_a_wrong_way_has_no_figures(monkeypatch, capsys, tmp_path):
    _, wrong = MISTAKES["another position"]
    monkeypatch.setitem(decode.WAYS, "bare", lambda bench: lambda _: of_step(bench, wrong))
    path = tmp_path / "decode.json"
    flags = ["--tiny", "--batch", "3", "--ways", "eager", "bare", "--json", str(path)]
    assert harness.main(["decode", *flags]) == 1
    assert "tiny, batch 3, context 32, bare: Wrong: logits are off" in capsys.readouterr().out
    rows = {row["way"]: row for row in json.loads(path.read_text())["figures"]}
    assert "wall ms" in rows["eager"] and "wall ms" in rows["eager, again"]
    assert not rows["bare"].keys() & {"wall ms", "device ms", "host us", "share", "kernels"}


def test_what_is_left_out_is_said():
    bench, right = bench_of("tiny")

    def make(way: str) -> Made:
        if way == "absent":
            raise Left("not installed")
        if way == "broken":
            raise ValueError("no such kernel\nmore")
        return of_step(bench, plain.step)

    ways = ("right", "absent", "broken")
    ready, judged = made_ready(ways, make, bench, right, float("inf"))
    assert list(ready) == ["right"] and "failed" not in judged["right"]
    failed = [judged[way]["failed"] for way in ways[1:]]
    assert failed == ["not installed", "ValueError: no such kernel"]
    ready, judged = made_ready(ways, make, bench, right, time.monotonic() - 1)
    assert not ready and {row["failed"] for row in judged.values()} == {LATE}


def test_what_cannot_be_imported_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(Left, match=r"not installed: import vllm: ModuleNotFoundError: .*vllm"):
        elsewhere.WAYS["vllm"](bench_of("tiny")[0])


# --- a prompt -------------------------------------------------------------------------------------


@functools.cache
def prompt() -> tuple[Bench, Right]:
    """One of 32 tokens."""
    bench = dataclasses.replace(bench_of("tiny")[0], batches=(1,), new=32)
    ids = bench.ids(1, torch.Generator().manual_seed(0))
    return bench, bench.reference(ids, torch.float32, benchmarks.prefill.repeated_heads)[0]


def seeing_all(config: Any, weights: Any, cache: Any, *given: Any) -> tuple[Any, Any]:
    """What is behind a token too."""
    attend = lambda q, k, v, _: plain.causal_heads(q.flip(2), k, v, None).flip(2)  # noqa: E731
    logits = plain.chunk_step(config, weights, cache, *given, attend)
    return logits.argmax(-1), logits


def test_a_prompt_is_right_or_not_timed(monkeypatch):
    bench, right = prompt()
    for way in ("eager", "captured", "bare"):
        assert judge(bench, right, benchmarks.prefill.WAYS[way](bench, right))["error"] < 0.03
    monkeypatch.setattr(benchmarks.prefill, "first_chunk", seeing_all)
    with pytest.raises(Wrong):
        judge(bench, right, benchmarks.prefill.WAYS["eager"](bench, right))


def test_what_a_prompt_needs():
    """What torch counts, but for half of the scores."""
    bench, right = prompt()
    given = bench.config, plain.weights_of(bench.params), bench.contiguous(1), right.ids[None]
    with FlopCounterMode(display=False) as counter:
        benchmarks.prefill.first_chunk(*given, torch.arange(32)[None])
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    products = sum(n for op, n in counts.items() if "attention" not in op)
    scores = 4 * 32 * 33 / 2 * bench.config.num_heads * bench.config.head_dim * 2  # layers
    assert benchmarks.prefill.operations(*given[:2], 32) == products + scores


# --- clocks ---------------------------------------------------------------------------------------


def slept(calls: list[str], name: str, host_s: float, queued_s: float) -> Made:
    """A way whose call takes so long, and whose device so much longer, till one waits for it."""
    due = [0.0]

    def step(ids: int) -> int:
        calls.append(name)
        time.sleep(host_s)
        due[0] = max(due[0], time.perf_counter()) + queued_s
        return ids + 1

    def wait() -> None:
        time.sleep(max(0.0, due[0] - time.perf_counter()))

    unused: Any = None
    return Made(step, unused, unused, wait)


def test_clocks_are_apart_and_ways_take_turns():
    calls: list[str] = []
    made = {"a": slept(calls, "a", 1e-3, 0), "b": slept(calls, "b", 1e-3, 8e-3)}
    rows = clocks.in_turns(made, 0, 24)
    assert list(rows) == ["a", "b", "a, again"]
    for name, device_ms in (("a", 1), ("b", 8), ("a, again", 1)):
        row = rows[name]
        assert 900 < row["host us"] < 5000, name
        for clock in ("device ms", "wall ms"):
            assert 0.9 * device_ms < row[clock] < 2 * device_ms + 4, (name, clock)
    runs = [name for name, before in zip(calls, [None, *calls]) if name != before]
    assert runs == ["a", "b", "a", "b", "a", "b", "a"]  # warm; then two rounds, "a" again in each
    warm = 3 + clocks.BURST + (4 + 2 + 1)  # how much is launched ahead is tried
    assert calls.count("b") == warm + 3 * 24


# --- what a step reads, and what is asked of it ---------------------------------------------------


@pytest.mark.parametrize("model", TINY)
def test_what_a_step_reads(model: str):
    bench, _ = bench_of(model)
    config, weights = bench.config, plain.weights_of(bench.params)
    sizes = {name: x.nbytes for name, x in named(bench.params).items()}
    experts = sum(n for name, n in sizes.items() if ".experts." in name)
    rest = sum(sizes.values()) - experts - (0 if config.tied else bench.params.embed.nbytes)
    for num_reqs, of_all in ((1, 2 / 8), (3, 1 - 0.75**3)):
        cache = 2 * 2 * num_reqs * 32 * config.num_kv_heads * config.head_dim * config.num_layers
        wanted = rest + experts * of_all + cache
        assert bytes_read(config, weights, num_reqs, 32) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "model, GB", [("1B", 2.49), ("8B", 15.07), ("0.6B", 1.25)]
)  # weights of 2.47, 15.0 and 1.19, and 512 tokens
def test_sizes_are_those_of_the_models(model: str, GB: float):
    config = MODELS[model].config
    shapes = named(MODELS[model].family.blank(config))
    count = sum(x.numel() for name, x in shapes.items() if config.tied or name != "embed")
    kept = 2 * 512 * config.num_kv_heads * config.head_dim * config.num_layers
    assert 2 * (count + kept) / 1e9 == pytest.approx(GB, rel=0.005)


def row(way: str, ms: float, share: float = 0.5, **more: Any) -> dict[str, Any]:
    """Figures of a way."""
    found = {"model": "1B", "batch": 1, "context": 512, "way": way, "wall ms": ms}
    return found | {"device ms": ms, "share": share, "error": 0.01, "idle": 0.0} | more


GOOD = [row("FULL-fused", 0.7), row("NONE-none", 4.0), row("gpt-fast", 0.8), row("eager", 4.5)]
LARGE = [row("FULL-none", 5, 0.7, batch=8), row("jax", 5.2, batch=8)]
JUDGED: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "all is met": (GOOD, []),
    "goal 1": (
        [row("FULL-fused", 0.8), row("gpt-fast", 1.0)],
        ["goal 1: 1B, batch 1, context 512: 0.800 ms, and at most 0.74", "the weakest point: 1B"],
    ),
    "goal 2": (
        [row("FULL-fused", 0.5, model="0.6B")],
        ["goal 2: 0.6B, batch 1, context 512: 0.500 ms, and at most 0.42"],
    ),
    "goal 2 is of one request": ([row("FULL-fused", 5.0, model="8B", batch=2)], []),
    "goal 3": (
        GOOD + LARGE,
        ["goal 3: 1B, batch 8, context 512: FULL-none is 1.04 times as fast as jax, and at 70%",
         "the weakest point: 1B, batch 8"],
    ),
    "goal 4": (
        [row("FULL-fused", 0.7, idle=0.03), row("NONE-none", 4, idle=0.8)],
        ["goal 4: 1B, batch 1, context 512: of FULL-fused the time without a kernel is 3.0%"],
    ),
    "goal 4 is of the fastest FULL step": (
        [row("FULL-fused", 0.7, idle=0.01), row("FULL-none", 0.73, idle=0.5)], []
    ),
    "a slow one without a gap hides nothing": (
        [row("FULL-fused", 0.7, idle=0.3), row("FULL-none", 0.73)],
        ["goal 4: 1B, batch 1, context 512: of FULL-fused the time without a kernel is 30.0%, 2%"],
    ),
    "goal 4 was not measured": (
        [row("FULL-fused", 0.7, idle=None)],
        ["goal 4: 1B, batch 1, context 512: of FULL-fused the time without a kernel is not mea"],
    ),
    "goal 7 cannot be judged": (
        [row("FULL-fused", 0.7), {"model": "1B", "batch": 1, "context": 512, "way": "eager",
                                  "failed": "OutOfMemoryError: 9 GB"}],
        ["goal 7: 1B, batch 1, context 512: not judged, as the step by hand failed: OutOf"],
    ),
    "goal 5": (
        [row("FULL-fused", 0.7), row("PIECEWISE-fused", 0.9)],
        ["goal 5: 1B, batch 1, context 512: PIECEWISE takes 1.29 times as long as FULL, 1.25 at"],
    ),
    "goal 5 is of one request": (
        [row("FULL-fused", 0.7, batch=2), row("PIECEWISE-fused", 0.9, batch=2)], []
    ),
    "goal 7": (
        [row("FULL-fused", 0.7, error=0.013), row("eager", 4.5, error=0.010)],
        ["goal 7: 1B, batch 1, context 512: FULL-fused is off by 0.0130, the step by hand by",
         "the weakest point: 1B"],
    ),
    "what is measured again is no other way": (
        [row("FULL-fused", 0.8), row("FULL-fused, again", 0.7), row("gpt-fast", 0.8)],
        ["goal 1: 1B, batch 1, context 512: 0.800 ms", "goal 3: 1B, batch 1, context 512: FULL-fu",
         "the weakest point: 1B"],
    ),
    "close to the bound": ([*GOOD, row("FULL-none", 5, 0.93, batch=8), LARGE[1]], []),
    "ours failed": (
        [*GOOD, {"model": "1B", "batch": 1, "context": 512, "way": "FULL-none", "failed": "X: y"}],
        ["1B, batch 1, context 512, FULL-none: X: y", "the weakest point"],
    ),
    "theirs failed": (
        [*GOOD, {"model": "1B", "batch": 1, "context": 512, "way": "jax", "failed": "X: y"}], []
    ),
    "left out": (
        [{"model": "1B", "batch": 1, "context": 512, "way": "FULL-none", "failed": LATE}], []
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "spans, share",
    [([(3, 5)], 0), ([(0, 4), (2, 5)], 0), ([(6, 10), (0, 4)], 0.2), ([(2, 2)], 0),
     ([(0, 8), (1, 2), (9, 10)], 0.1)],
)  # fmt: skip
def test_how_long_a_device_has_nothing(spans: list[tuple[float, float]], share: float):
    assert clocks.idle(spans) == pytest.approx(share)


@pytest.mark.parametrize("case", JUDGED)
def test_what_is_not_met_is_said(case: str):
    rows, wanted = JUDGED[case]
    lines = decode.missed(rows, CUDA)
    assert len(lines) == len(wanted)
    assert all(line.startswith(start) for line, start in zip(lines, wanted)), lines


def test_of_a_prompt_and_of_compilation_too():
    chunk = {"model": "8B", "chunk": 512}
    mine, other = ({**chunk, "way": w, "share": s} for w, s in (("NONE-none", 0.4), ("eager", 0.5)))
    (line,) = benchmarks.prefill.missed([mine, other], CUDA)
    assert line == "8B, chunk of 512: NONE-none at 40% of the peak, eager at 50%"
    assert benchmarks.prefill.missed([{**mine, "share": 0.5}, other], CUDA) == []

    here = {"model": "1B", "batch": 8}
    full = {**here, "level": "fused", "mode": "FULL", "ms": 1.0, "nodes": 200}
    hand = {**here, "level": "torch.compile, default", "mode": "captured by hand", "ms": 1.1}
    missed = functools.partial(benchmarks.compile.missed, flags=CUDA)
    assert missed([full, {**full, "mode": "NONE", "ms": 9.0}, hand]) == []
    assert missed([full, hand, {**hand, "ms": 1.05}]) == [
        "1B, batch 8, fused: 1.05 times as fast as the best by hand, 1.1 is asked"
    ]
    assert missed([{**full, "nodes": 201}, hand]) == [
        "1B, batch 8, fused: 201 nodes, and at most 200 are asked"
    ]


def test_the_picture_has_a_panel_a_model_and_a_line_a_way():
    rows = [*GOOD, *LARGE, row("FULL-fused", 0.4, model="0.6B")]
    figure = figure_of(rows, decode.OURS)
    above, right, below, _ = figure.axes
    assert [above.get_title(), right.get_title()] == ["1B, context 512", "0.6B, context 512"]
    lines = {line.get_label(): line for line in below.lines}
    assert lines.keys() == {row["way"] for row in rows}
    assert lines["FULL-none"].get_xydata().tolist() == [[8, 0.7]]
    assert [lines[way].get_linestyle() for way in ("FULL-none", "jax")] == ["-", "--"]
    assert [line.get_ydata().tolist() for line in right.lines] == [[0.4]]
