"""Random programs, node by node: every fact that the rules claim holds, on adversarial batches.

A sample runs here. `python tests/fuzz.py --programs 50000` runs as many as one likes, in processes,
and tells which rules, options and refusals they have reached.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import toys
from rows_programs import OPS
from torch import Tensor

import fngraph as fg
from fngraph.core import trees
from fngraph.errors import BranchError, FnGraphError, RowsError
from fngraph.fx.rows.rehearsal import Difference, rehearse
from fngraph.fx.tracing.refusals import Refusals
from fngraph.rehearsing import padded_leaves

E = toys.E
LIMITS = fg.Limits(max_tokens=24, max_reqs=6)
BATCHES = (
    (7, 3, None),
    (5, 4, None),
    (16, 6, None),
    (16, 4, None),
    (1, 1, None),
    (4, 2, 2),
    (9, 3, 3),
)
"""T, R, query_len; one fills its key, one is the least that there is."""
KEYS = {None: (16, 6), 2: (12, 6), 3: (18, 6)}
INVALID = (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError)
LOUD = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, 1.0, -2.5)
PROGRAMS = 100
EXTREMES = (2**63 - 1, -(2**63), -1, 0, 1, 1, 7)


@fg.struct
class Batch:
    """Leaves with every kind of padding."""

    ids: Tensor = fg.buffer("T", "int64")
    slot: Tensor = fg.buffer("T", "int64", pad=-1)
    place: Tensor = fg.buffer("T", "int64", pad=0)
    wild: Tensor = fg.buffer("T", "int64", pad=-1)
    x: Tensor = fg.buffer(f"T {E}", "float32")
    y: Tensor = fg.buffer("T", "float32", pad=1)
    lens: Tensor = fg.buffer("R", "int64", pad=0)
    starts: Tensor = fg.buffer("R + 1", "int64", pad="stride")
    spec: fg.BatchSpec = fg.host()


def batch(T: int, R: int, query_len: int | None, loud: bool = False) -> Batch:
    """Numbers that no padding has; loud: NaN, infinities, ties, extremes of ints."""
    g = torch.Generator().manual_seed(T)
    r = random.Random(T)
    ends = [(i + 1) * T // R for i in range(R)]
    starts = torch.tensor([0, *ends])
    x, y, wild = torch.randn(T, E, generator=g) + 0.1, torch.rand(T, generator=g), torch.arange(T)
    if loud:
        x = torch.tensor([[r.choice(LOUD) for _ in range(E)] for _ in range(T)])
        y = torch.tensor([r.choice(LOUD) for _ in range(T)])
        wild = torch.tensor([r.choice(EXTREMES) for _ in range(T)])
    return Batch(
        torch.randint(1, 11, (T,), generator=g), torch.randperm(T, generator=g),
        torch.randint(1, 11, (T,), generator=g), wild, x, y,
        starts.diff(), starts, fg.BatchSpec(T, R, query_len=query_len),
    )  # fmt: skip


def params() -> dict[str, Tensor]:
    """Row 0, which padding looks up, is loud."""
    w = torch.randn(12, E, generator=torch.Generator().manual_seed(1))
    w[0] = torch.linspace(40, -50, E)
    return {"w": w}


def start(p: Any, b: Any) -> list[Any]:
    """What a program begins with."""
    return [
        p["w"], b.ids, b.slot, b.place, b.x, b.lens, b.starts, p["w"][b.ids], b.slot >= 0, b.wild,
        b.y, torch.where((b.slot >= 0)[:, None], b.x, 0.0),
    ]  # fmt: skip


def draw(r: random.Random) -> list[tuple[Callable[..., Any], list[int]]]:
    """A program: functions, and which values so far each takes."""
    values, steps = start(params(), batch(*BATCHES[0])), []
    for _ in range(r.randint(1, 5)):
        for _ in range(60):
            arity, make = r.choice(OPS)
            at = [r.randrange(len(values)) if r.random() < 0.6 else len(values) - 1
                  for _ in range(arity)]  # fmt: skip
            examples = [values[i] for i in at]
            try:
                fn = make(r, *examples)
                value = fn(*examples)
            except INVALID:
                continue
            if isinstance(value, Tensor) and 0 < value.numel() < 5000:
                steps.append((fn, at))
                values.append(value)
                break
    return steps


def forward(steps: Any) -> Any:
    """The program as a function."""

    def run(p: Any, s: Any, b: Any) -> Any:
        values = start(p, b)
        for fn, at in steps:
            values.append(fn(*[values[i] for i in at]))
        return values[-1] * 1, s

    return run


def verdict(steps: Any) -> tuple[str, list[str]]:
    """invalid, refused or accepted; and facts that are not so."""
    fn, p = forward(steps), params()
    wrong: list[str] = []

    def look(args: Any, limits: Any, graph: Any, facts: Any) -> None:
        wrong.extend(f"{d}\n{graph.gm.code}" for d in differences(args, p, graph.gm, facts))

    made = fg.graphify(fn, donate=1, stage=2, limits=LIMITS)
    try:
        made.trace_call((p, {}, batch(*BATCHES[0])), Refusals(), look)
    except (RowsError, BranchError):
        return "refused", wrong
    except FnGraphError:
        return "invalid", wrong
    return "accepted", wrong


def differences(args: Any, p: Any, gm: Any, facts: Any) -> Iterator[Difference]:
    """The first fact that does not hold, of each batch for which bare forward runs."""
    held = trees.flatten(p)[0]
    for sizes in BATCHES:
        T, R = KEYS[sizes[2]]
        for loud in (False, True):
            b = batch(*sizes, loud=loud)
            leaves = trees.flatten(b)[0]
            padded = padded_leaves(args, leaves, b.spec, {"T": T, "R": R}, LIMITS)
            try:
                found = rehearse(gm, facts, [*held, *leaves], [*held, *padded])
            except INVALID:
                continue
            if found is not None:
                yield found
                return


@pytest.mark.filterwarnings("ignore")  # torch's own, of odd programs
def test_facts_of_random_programs_hold() -> None:
    """And both verdicts are common, so that neither is won by default."""
    seen = []
    for i in range(PROGRAMS):
        kind, wrong = verdict(draw(random.Random(i)))
        assert not wrong, (i, wrong[0])
        seen.append(kind)
    tried = len(seen) - seen.count("invalid")
    assert seen.count("accepted") >= tried / 4 and seen.count("refused") >= tried / 4
