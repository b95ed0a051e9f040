"""Tables of the docs hold what was measured: the files of benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_table_of_what_a_step_costs_is_that_of_the_results():
    figures = json.loads((ROOT / "benchmarks/results/h200/serve_1b.json").read_text())["figures"]
    ms = {(r["way"], r["batch"]): r["ms"] for r in figures[0]["decode"]}
    lines = (ROOT / "docs/serving.md").read_text().split("## What it costs")[1].splitlines()
    told = [re.findall(r"[^|]+", line) for line in lines if re.search(r"\d\.\d\d \|", line)]
    assert told
    for way, *numbers in told:
        for batch, number in zip((1, 8, 64), numbers):
            assert float(number) == round(ms[way.strip(" `").replace("`", ""), batch], 2)
