"""No function of core exists for the recorded cases alone.

Whatever `tests/core/field_cases.py` imports from core is also executed on the way of a product:
`graphify`, agreement over ranks, or the encoder.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import test_encode
import torch

import fngraph as fg
from fngraph import core
from fngraph.encoder.run import encode

CASES = Path(__file__).parent / "core" / "field_cases.py"


@fg.struct
class Batch:
    x: torch.Tensor = fg.buffer("T", "float32")
    spec: fg.BatchSpec = fg.host()


def through_graphify() -> None:
    fast = fg.graphify(lambda batch: batch.x + 1, stage="batch", adapters=2, recorder="tape")
    batch = Batch(x=torch.ones(3), spec=fg.BatchSpec(3, 1, adapters=1))
    assert fast(batch).tolist() == [2, 2, 2]
    sized = fg.graphify(lambda batch: batch.x * 2, stage="batch", sizes=(4,), recorder="tape")
    assert sized(batch).tolist() == [2, 2, 2]


def through_agreement() -> None:
    table = core.build_table("FULL", core.ladders([4, 8], (1,), 8), fg.Limits(8, 8))
    specs = [fg.BatchSpec(3, 3, query_len=1), fg.BatchSpec(7, 7, query_len=1)]
    decisions = core.agree([core.propose(table, spec) for spec in specs])
    ran = [core.settle(table, spec, one) for spec, one in zip(specs, decisions)]
    assert {answer.descriptor.num_tokens for answer in ran} == {8}


def through_the_encoder() -> None:
    plan = core.plan_encoder(8, 64)
    given = test_encode.images(8, 30)
    encode(test_encode.step_for(plan), plan, given, [8, 30], test_encode.collate, ranks=1)


def executed(run: Callable[[], None]) -> set[CodeType]:
    """The code objects that ran."""
    found: set[CodeType] = set()

    def look(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            found.add(frame.f_code)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def functions_of_the_cases() -> dict[str, Any]:
    """Every function of core that the cases' adapter names, whether imported or as core.name."""
    tree = ast.parse(CASES.read_text())
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "fngraph.core"
        for alias in node.names
    }
    names |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "core"
    }
    found = {name: getattr(core, name) for name in names}
    return {name: f for name, f in found.items() if inspect.isfunction(f)}


def test_every_function_of_the_cases_is_reached_by_a_product() -> None:
    ran = executed(through_graphify) | executed(through_agreement) | executed(through_the_encoder)
    wanted = functions_of_the_cases()
    assert {"resolve", "dispatch", "pack", "agree", "balance"} <= wanted.keys()
    assert [
        name for name, f in sorted(wanted.items()) if inspect.unwrap(f).__code__ not in ran
    ] == []
