"""`python -m benchmarks encoder --tiny`, and how its figures are judged."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
import torch

import fngraph as fg
from benchmarks import encoder, harness
from benchmarks.encoder import kernels
from benchmarks.encoder.requests import Request, chat
from benchmarks.encoder.ways import as_asked, as_seen, make_tower

FLAGS = argparse.Namespace(model="tiny", device="cpu", seed=0, backend=None)


@pytest.fixture(scope="module")
def tower() -> Any:
    return make_tower(FLAGS)


@pytest.mark.sampled(0)
def test_a_tiny_run(tmp_path, capsys):
    path = tmp_path / "encoder.json"
    flags = ["--tiny", "--parts", "images", "budgets", "--json", str(path)]
    flags += ["--budgets", "asked", "planned"]
    assert harness.main(["encoder", *flags]) == 0
    found = json.loads(path.read_text())["figures"]
    bare, ours, planned = found["images"]
    ways = [bare["way"], ours["way"], planned["way"]]
    assert ways == ["bare", "FULL-none", "FULL-none, planned"]
    assert planned["hits"] == 1 and planned["padding"] < ours["padding"]
    assert bare["mean of bare"] == bare["worst kind of bare"] == 1
    assert ours["hits"] == 1 and 0 < ours["padding"] < 1 and ours["graphs MB"] > 0
    assert ours["mean of bare"] == pytest.approx(ours["mean ms"] / bare["mean ms"])
    sets = found["budgets"]
    assert [row["defers"] for row in sets] == [True, False] * 3
    assert all(0 <= row["padding"] < 1 and not row["eager"] for row in sets)
    assert min(sets, key=lambda row: row["padding"])["budgets"] == "planned from the stream"
    assert "graphs MB" in capsys.readouterr().out


@pytest.mark.sampled(0)
def test_a_tiny_run_of_the_other_parts(tmp_path):
    path = tmp_path / "encoder.json"
    flags = ["--tiny", "--parts", "video", "towers", "--ranks", "2", "--json", str(path)]
    flags += ["--budgets", "asked", "planned"]
    assert harness.main(["encoder", *flags]) == 0
    found = json.loads(path.read_text())["figures"]
    assert found["video"][1]["hits"] == 1
    assert (found["towers"][0]["hits, views"], found["towers"][0]["hits, crops"]) == (1, 0)
    assert [row["way"] for row in found["squares over ranks"]] == [
        "bare", "FULL-none", "FULL-none, planned",
    ]  # fmt: skip


def test_budgets_are_planned_from_what_came_before(tower):
    asked = as_seen(tower, [one.items() for one in chat(tower, 40, 0)])
    seen, most = asked["histogram"], asked["max_items"]
    assert all(most <= n <= tower.budgets[-1] and not n % 4 for n in seen), "whole tiles"
    assert sum(seen.values()) > 40, "a run each, and the largest graph's"
    assert max(as_seen(tower, [])["histogram"]) == tower.budgets[-1], "nothing later is eager"
    later = [one.items() for one in chat(tower, 60, 1)]
    padding = []
    for budgets in (asked, as_asked(tower)):
        encoder = fg.graphify_encoder(tower.model, tower.params, log_every=0, **budgets)
        runs = [run for items in later for run in encoder.pack(items).runs]
        assert all(run.budget for run in runs)
        padding.append(sum(run.budget for run in runs))
    assert padding[0] < padding[1]


def test_attention_alone_counts_true_products(tower, monkeypatch):
    monkeypatch.setattr(kernels, "_us", lambda call, device: (call(), 2.0)[1])
    rows = [row for row in kernels.attention_alone(tower, "cpu") if row["backend"] == "reference"]
    taken = [row["taken"] for row in rows]
    one, pack, again = rows[1], *rows[2:]
    assert taken == [True] * 4 and one["patches"] == 128
    assert one["TFLOP/s"] == pytest.approx(4 * 128**2 * 24 / 2e6)
    assert pack["TFLOP/s"] == again["TFLOP/s"] < one["TFLOP/s"] / 4, "each attends over itself"


def test_a_way_that_is_wrong_is_not_timed(tower):
    items = chat(tower, 1, 0)[0].items()
    tower.check({"bare": tower.bare}, items)

    def wrong(items: Any) -> Any:
        rows, deep = zip(*tower.bare(items))
        return [(x * 1.01, y) for x, y in zip(rows, deep)]

    with pytest.raises(harness.Mistake, match=r"wrong is off by 1\.0"):
        tower.check({"wrong": wrong}, items)


def test_a_stream_is_the_same_again_and_within_the_largest_graph(tower):
    requests = chat(tower, 200, 3)
    assert [one.grids for one in requests] == [one.grids for one in chat(tower, 200, 3)]
    tokens = [h * w // 4 for one in requests for _, h, w in one.grids]
    assert 1 <= min(tokens) and max(tokens) <= tower.budgets[-1]
    assert 0.6 < sum(len(one.grids) == 1 for one in requests) / 200 < 0.8


def test_ratios_are_of_bare_request_by_request():
    memory = torch.zeros(1, 1)
    requests = [Request(((1, 2, n),), memory) for n in (2, 4, 4000, 4000)]
    seconds = {"bare": [1.0, 1.0, 2.0, 2.0], "FULL": [0.5, 0.5, 2.2, 2.2]}
    _, row = encoder.rows_of("images", seconds, requests)
    assert row["mean of bare"] == pytest.approx(0.9) and row["small of bare"] == 0.5
    assert row["worst kind of bare"] == pytest.approx(1.1)
    on_gpu = argparse.Namespace(device="cuda")
    lines = encoder.missed({"images": [{**row, "way": "bare"}, row]}, on_gpu)
    assert [line.split(" is ")[0] for line in lines] == [
        f"images, FULL: {name}" for name in ("mean", "p99", "worst kind")
    ]
    assert encoder.missed({"images": [row]}, argparse.Namespace(device="cpu")) == []
