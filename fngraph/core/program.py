"""A program: a straight line of steps over numbered values, and how a mode groups it into graphs.

Values 0..n-1 are the inputs (leaves, then constants); each step writes new ones. A step is a piece
(traced ops) or a cut (a primitive). The program is data: `run` walks it once, `groups` says which
runs of steps one graph records, and neither knows what a step does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fngraph.core.modes import Mode
from fngraph.core.text import table


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One call of a program.

    Attributes:
        name: for people, "piece 3" or "attention 3".
        cut: True for a primitive: eager between two graphs in PIECEWISE.
        kind: equal for steps that share one callable.
        reads: values passed, in order.
        writes: values that it makes, in order.
        drops: values that nothing reads after this step.
    """

    name: str
    cut: bool
    kind: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    drops: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Steps in order, the number of inputs, and the values that are returned."""

    num_inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    @property
    def kinds(self) -> int:
        """Number of distinct callables; it does not grow with depth."""
        return len({(s.cut, s.kind) for s in self.steps})

    def as_text(self, names: Mapping[int, str] | None = None) -> str:
        """One line a step; values without a name print as %number."""
        named = names or {}

        def show(numbers: tuple[int, ...]) -> str:
            return ", ".join(named.get(i, f"%{i}") for i in numbers)

        rows = [[s.name, s.kind, show(s.reads), show(s.writes)] for s in self.steps]
        return table(["step", "kind", "reads", "writes"], rows)


def run(
    program: Program, fns: Sequence[Callable[..., Any]], inputs: Sequence[Any], *context: Any
) -> list[Any]:
    """Call every step's `fn(*context, *values)`, which returns a tuple, and return the outputs."""
    env = dict(enumerate(inputs))
    for step, fn in zip(program.steps, fns):
        values = fn(*context, *[env[i] for i in step.reads])
        env.update(zip(step.writes, values))
        for i in step.drops:
            del env[i]
    return [env[i] for i in program.outputs]


def groups(program: Program, mode: Mode) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """Runs of steps, as (recorded in one graph?, indices of steps).

    FULL records everything in one graph; PIECEWISE leaves the cuts out; NONE records nothing.
    """
    if mode is Mode.NONE or not program.steps:
        return
    if mode is Mode.FULL:
        yield True, tuple(range(len(program.steps)))
        return
    pending: list[int] = []
    for i, step in enumerate(program.steps):
        if not step.cut:
            pending.append(i)
            continue
        if pending:
            yield True, tuple(pending)
        pending = []
        yield False, (i,)
    if pending:
        yield True, tuple(pending)


def with_drops(program: Program) -> Program:
    """The same program with `drops` filled in: each value after its last reader."""
    last: dict[int, int] = {}
    for i, step in enumerate(program.steps):
        last.update(dict.fromkeys((*step.reads, *step.writes), i))
    keep = {*range(program.num_inputs), *program.outputs}
    drops: list[list[int]] = [[] for _ in program.steps]
    for number, i in last.items():
        if number not in keep:
            drops[i].append(number)
    steps = (dataclasses.replace(s, drops=tuple(d)) for s, d in zip(program.steps, drops))
    return dataclasses.replace(program, steps=tuple(steps))
