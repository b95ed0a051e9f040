"""Mistakes of who writes an attention backend: each is refused by its name, with the fix."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fngraph as fg
from fngraph.errors import BackendError
from fngraph.ops import ATTENTION, Backend, Plan, reference

ROOT = Path(__file__).parents[1]
always = lambda config: fg.Support.ALWAYS  # noqa: E731
unplanned = (lambda config, sizes, key: None, lambda buffers, config, sizes, leaves: None)


@pytest.fixture(autouse=True)
def _restored():
    before = dict(ATTENTION.backends)
    yield
    ATTENTION.backends.clear()
    ATTENTION.backends.update(before)
    ATTENTION._suited.clear()


def no_host(q: Any, k: Any, v: Any, kv: Any, meta: Any, out: Any, *, config: Any) -> None: ...


def returned(q: Any, k: Any, v: Any, kv: Any, meta: Any, out: Any, *, config: Any, host: Any) -> Any:
    mine = out.new_empty(out.shape)
    reference.run(q, k, v, kv, meta, mine, config=config, host=host)
    return mine


MADE = {
    "support gives a str": lambda: Backend("mine", reference.run, lambda config: "ALWAYS"),
    "support gives None": lambda: Backend("mine", reference.run, lambda config: None),
    "run takes no host": lambda: Backend("mine", no_host, always),
    "run returns": lambda: Backend("mine", returned, always),
    "options of no such name": lambda: Backend("mine", reference.run, always, options=("sink",)),
    "options a str": lambda: Backend("mine", reference.run, always, options="sinks"),
    "plan a function": lambda: Backend("mine", reference.run, always, plan=lambda config: 1),
    "plan of no such leaf": lambda: Backend(
        "mine", reference.run, always, plan=Plan(("seqlens",), *unplanned)
    ),
}


@pytest.mark.parametrize("how", MADE)
def test_a_mistake_is_refused_by_the_backends_name(how):
    with pytest.raises(BackendError, match="mine"):
        ATTENTION.register(MADE[how]())
        fg.testing.check_backend("mine", query_len=1)


def test_the_definition_is_not_replaced_silently():
    with pytest.raises(BackendError, match="reference"):
        ATTENTION.register(Backend("reference", returned, always))


def test_the_table_of_what_a_step_costs_is_that_of_the_results():
    figures = json.loads((ROOT / "benchmarks/results/h200/serve_1b.json").read_text())["figures"]
    ms = {(r["way"], r["batch"]): r["ms"] for r in figures[0]["decode"]}
    lines = (ROOT / "docs/serving.md").read_text().split("## What it costs")[1].splitlines()
    told = [re.findall(r"[^|]+", line) for line in lines if re.search(r"\d\.\d\d \|", line)]
    assert told
    for way, *numbers in told:
        for batch, number in zip((1, 8, 64), numbers):
            assert float(number) == round(ms[way.strip(" `").replace("`", ""), batch], 2)
