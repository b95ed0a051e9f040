"""`python -m benchmarks encoder --tiny`, and how its figures are judged."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
import torch

from benchmarks import encoder, harness
from benchmarks.encoder.requests import Request, chat
from benchmarks.encoder.ways import make_tower

FLAGS = argparse.Namespace(model="tiny", device="cpu", seed=0, backend=None)


@pytest.fixture(scope="module")
def tower() -> Any:
    return make_tower(FLAGS)


@pytest.mark.sampled(0)
def test_a_tiny_run(tmp_path, capsys):
    path = tmp_path / "encoder.json"
    flags = ["--tiny", "--parts", "images", "budgets", "--json", str(path)]
    assert harness.main(["encoder", *flags]) == 0
    found = json.loads(path.read_text())["figures"]
    bare, ours = found["images"]
    assert (bare["way"], ours["way"]) == ("bare", "FULL-none")
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
    assert harness.main(["encoder", *flags]) == 0
    found = json.loads(path.read_text())["figures"]
    assert found["video"][1]["hits"] == 1
    assert (found["towers"][0]["hits, views"], found["towers"][0]["hits, crops"]) == (1, 0)
    assert [row["way"] for row in found["squares over ranks"]] == ["bare", "FULL-none"]


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
