"""Whole random programs: weights that share memory, donated state, a batch, and nested outputs.

A program is drawn on one batch: ops of `rows_programs`, `rows_idioms` and `rows_odd` on what it has
so far, each run at once, so that one that torch refuses is drawn again. What it returns is drawn as
well: its last value and others, inputs and views among them; of each leaf of the state a new value,
the leaf itself or another one's.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import toys
from rows_idioms import IDIOMS, LAST
from rows_odd import ODD
from rows_programs import OPS
from torch import Tensor

import fngraph as fg

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
INVALID = (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What torch, or Python, raises where a program is none."""
LOUD = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, 1.0, -2.5)
EXTREMES = (2**63 - 1, -(2**63), -1, 0, 1, 1, 7)
OF_STATE = ("total", "other", "seen", "half", "n")


@fg.struct
class Batch:
    """Leaves with every kind of padding."""

    ids: Tensor = fg.buffer("T", "int64", min=0)
    slot: Tensor = fg.buffer("T", "int64", pad=-1)
    place: Tensor = fg.buffer("T", "int64", pad=0, min=0)
    wild: Tensor = fg.buffer("T", "int64", pad=-1)
    x: Tensor = fg.buffer(f"T {E}", "float32")
    y: Tensor = fg.buffer("T", "float32", pad=1)
    lens: Tensor = fg.buffer("R", "int64", pad=0)
    starts: Tensor = fg.buffer("R + 1", "int64", pad="stride")
    far: Tensor = fg.buffer("T", "int64", pad=10, min=0)
    small: Tensor = fg.buffer("T", "uint8")
    narrow: Tensor = fg.buffer("T", "int32", pad=0)
    on: Tensor = fg.buffer("T", "bool")
    x16: Tensor = fg.buffer(f"T {E}", "float16")
    spec: fg.BatchSpec = fg.host()


@fg.struct
class Out:
    """What some programs return."""

    value: Any
    rest: Any


def _odd(g: torch.Generator, *shape: int) -> Tensor:
    """Odd sixteenths, which no padding holds; their sums and products are exact in any order."""
    return (torch.randint(-16, 16, shape, generator=g) * 2 + 1) / 16


def batch(T: int, R: int, query_len: int | None, loud: bool = False) -> Batch:
    """Numbers that no padding has; loud: NaN, infinities, ties, extremes of ints."""
    g = torch.Generator().manual_seed(T)
    r = random.Random(T)
    starts = torch.tensor([0, *[(i + 1) * T // R for i in range(R)]])
    x, y, wild = _odd(g, T, E), _odd(g, T).abs(), torch.arange(T)
    x16, small, narrow = x.half(), torch.arange(T) % 11 + 1, torch.arange(T) % 9 + 2
    if loud:
        x = torch.tensor([[r.choice(LOUD) for _ in range(E)] for _ in range(T)])
        y = torch.tensor([r.choice(LOUD) for _ in range(T)])
        wild = torch.tensor([r.choice(EXTREMES) for _ in range(T)])
        x16, small = x.half(), torch.tensor([r.choice((0, 1, 4, 255)) for _ in range(T)])
        narrow = torch.tensor([r.choice((-(2**31), 2**31 - 1, -1, 46341)) for _ in range(T)])
    return Batch(
        torch.randint(1, 11, (T,), generator=g), torch.randperm(T, generator=g) + 1,
        torch.randint(1, 11, (T,), generator=g), wild, x, y,
        starts.diff(), starts, torch.arange(T) % 6 + 1, small.to(torch.uint8), narrow.int(),
        torch.arange(T) % 3 > 0, x16, fg.BatchSpec(T, R, query_len=query_len),
    )  # fmt: skip


def params() -> dict[str, Tensor]:
    """Row 0, which padding looks up, is loud; head and tail are parts of one memory.

    Row 0 of w16 is near the end of its dtype, that of zero is 0, of neg below it, of odds no
    chance.
    """
    g = torch.Generator().manual_seed(1)
    w, both = _odd(g, 12, E), _odd(g, 6, E)
    w[0] = torch.arange(40, -50, -12)[:E]
    w16, zero, neg, odds = _odd(g, 12, E).half(), w.clone(), w.clone(), w.abs() / 4 + 0.01
    w16[0], zero[0], neg[0], odds[0] = 60000, 0, -1, 2
    return {
        "w": w, "tied": w, "head": both[:3], "tail": both[3:], "i": torch.tensor([0, 1, -1, 2]),
        "w16": w16, "zero": zero, "neg": neg, "odds": odds,
    }  # fmt: skip


def state() -> dict[str, Tensor]:
    """A row for each slot, and one for padding; the numbers of rows are unlike T and R."""
    g, rows = torch.Generator().manual_seed(2), LAST + 1
    return {
        "total": _odd(g, rows, E), "other": _odd(g, rows, E), "seen": torch.arange(rows),
        "half": _odd(g, rows, 4).bfloat16(), "n": torch.tensor(3),
    }  # fmt: skip


STARTS: dict[str, Callable[[Any, Any, Any], Tensor]] = {
    "w": lambda p, s, b: p["w"], "ids": lambda p, s, b: b.ids, "slot": lambda p, s, b: b.slot,
    "place": lambda p, s, b: b.place, "x": lambda p, s, b: b.x, "lens": lambda p, s, b: b.lens,
    "starts": lambda p, s, b: b.starts, "rows": lambda p, s, b: p["w"][b.ids],
    "real": lambda p, s, b: b.slot >= 0, "wild": lambda p, s, b: b.wild, "y": lambda p, s, b: b.y,
    "masked": lambda p, s, b: torch.where((b.slot >= 0)[:, None], b.x, 0.0),
    "total": lambda p, s, b: s["total"], "other": lambda p, s, b: s["other"],
    "seen": lambda p, s, b: s["seen"], "half": lambda p, s, b: s["half"],
    "n": lambda p, s, b: s["n"], "tied": lambda p, s, b: p["tied"], "i": lambda p, s, b: p["i"],
    "head": lambda p, s, b: p["head"], "tail": lambda p, s, b: p["tail"],
    "w16": lambda p, s, b: p["w16"], "zero": lambda p, s, b: p["zero"],
    "neg": lambda p, s, b: p["neg"], "odds": lambda p, s, b: p["odds"],
    "far": lambda p, s, b: b.far, "small": lambda p, s, b: b.small,
    "narrow": lambda p, s, b: b.narrow, "on": lambda p, s, b: b.on, "x16": lambda p, s, b: b.x16,
}  # fmt: skip
"""What programs begin with; each makes those that it uses."""
NAMES = list(STARTS)


@dataclasses.dataclass(frozen=True)
class Program:
    """`forward(p, s, b)`.

    Attributes:
        steps: functions, and which of the values so far each takes.
        news: of each leaf of the state, the value that it becomes.
        outputs: which values are returned, the last one first, and how they are nested.
    """

    steps: Sequence[tuple[Callable[..., Any], Sequence[int]]]
    news: Sequence[int]
    outputs: Sequence[int]
    nested: str

    def __call__(self, p: Any, s: Any, b: Any) -> Any:
        used = {*self.news, *self.outputs}.union(*(at for _, at in self.steps))
        given = enumerate(STARTS.values())
        values: list[Any] = [make(p, s, b) if i in used else None for i, make in given]
        for fn, at in self.steps:
            values.append(fn(*[values[i] for i in at]))
        news = dict(zip(OF_STATE, (values[i] for i in self.news)))
        first, *rest = (values[i] for i in self.outputs)
        result: Any = first
        if self.nested == "struct":
            result = Out(first, tuple(rest))
        elif self.nested == "dict":
            result = {"first": first, "rest": {str(i): x for i, x in enumerate(rest)}}
        elif rest:
            result = (first, [Out(x, ()) for x in rest])
        return result, news


def draw(r: random.Random) -> Program:
    """A program that runs on the first batch."""
    given = params(), state(), batch(*BATCHES[0])
    values = [make(*given) for make in STARTS.values()]
    steps: list[Any] = []
    for _ in range(r.randint(1, 4)):
        for _ in range(60):
            takes, make = r.choice(r.choice((OPS, IDIOMS, ODD)))
            wanted = ["?"] * takes if isinstance(takes, int) else takes.split()
            at = [_pick(r, len(values), name) for name in wanted]
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
    return _returned(r, values, steps)


def _pick(r: random.Random, n: int, name: str) -> int:
    if name != "?":
        return NAMES.index(name)
    return r.randrange(n) if r.random() < 0.6 else n - 1


def _returned(r: random.Random, values: list[Tensor], steps: list[Any]) -> Program:
    outputs, news = [len(values) - 1], {name: NAMES.index(name) for name in OF_STATE}
    if r.random() < 0.5:  # any, views and inputs among them, and some twice
        outputs += [r.randrange(len(values)) for _ in range(r.randint(1, 3))]
    for name in OF_STATE:
        old = values[news[name]]
        fitting = [
            i for i in range(len(NAMES), len(values))
            if values[i].shape == old.shape and values[i].dtype == old.dtype
        ]  # fmt: skip
        if fitting and r.random() < 0.8:
            news[name] = r.choice(fitting)
    if r.random() < 0.1:
        news["total"], news["other"] = news["other"], news["total"]
    theirs = {values[i].untyped_storage().data_ptr() for i in range(len(NAMES))}
    for k, i in enumerate(outputs):  # mostly of its own memory; else it may be refused
        if values[i].untyped_storage().data_ptr() in theirs and r.random() < 0.9:
            steps.append((torch.clone, [i]))
            outputs[k] = len(NAMES) + len(steps) - 1
    return Program(steps, list(news.values()), outputs, r.choice(["tuple", "dict", "struct"]))
