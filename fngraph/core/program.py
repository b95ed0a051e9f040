"""A program: a straight line of instructions, and how a mode groups them into graphs.

Values are numbered: 0..n-1 are the inputs (leaves, then constants), and each instruction writes new
ones. An instruction calls a piece (traced ops) or a cut (a primitive). The program is data:
`run_program` walks it once, `groups` says which runs of instructions one graph records, and neither
knows what an instruction does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fngraph.core.modes import Mode
from fngraph.core.text import html, table


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One call of a program.

    Attributes:
        name: for people, "piece 3" or "attention 3".
        cut: True for a primitive: eager between two graphs in PIECEWISE.
        kind: equal for instructions that share one callable.
        reads: values passed, in order.
        writes: values that it makes, in order.
        drops: values that nothing reads after this instruction.
    """

    name: str
    cut: bool
    kind: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    drops: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Instructions in order, the number of inputs, and the values that are returned."""

    num_inputs: int
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    @property
    def kinds(self) -> int:
        """Number of distinct callables; it does not grow with depth."""
        return len({(s.cut, s.kind) for s in self.instructions})

    def _repr_html_(self) -> str:
        return html(self.as_text())

    def as_text(self, names: Mapping[int, str] | None = None) -> str:
        """One line an instruction; values without a name print as %number."""
        named = names or {}

        def show(numbers: tuple[int, ...]) -> str:
            return ", ".join(named.get(i, f"%{i}") for i in numbers)

        rows = [[s.name, s.kind, show(s.reads), show(s.writes)] for s in self.instructions]
        return table(["step", "kind", "reads", "writes"], rows)


def run_program(
    program: Program, fns: Sequence[Callable[..., Any]], inputs: Sequence[Any], *context: Any
) -> list[Any]:
    """Call each instruction's `fn(*context, *values)`, which returns a tuple; the outputs."""
    env = dict(enumerate(inputs))
    for one, fn in zip(program.instructions, fns):
        values = fn(*context, *[env[i] for i in one.reads])
        env.update(zip(one.writes, values))
        for i in one.drops:
            del env[i]
    return [env[i] for i in program.outputs]


def groups(program: Program, mode: Mode) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """Runs of instructions, as (recorded in one graph?, their indices).

    FULL records everything in one graph; PIECEWISE leaves the cuts out; NONE records nothing.
    """
    if mode is Mode.NONE or not program.instructions:
        return
    if mode is Mode.FULL:
        yield True, tuple(range(len(program.instructions)))
        return
    pending: list[int] = []
    for i, one in enumerate(program.instructions):
        if not one.cut:
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
    for i, one in enumerate(program.instructions):
        last.update(dict.fromkeys((*one.reads, *one.writes), i))
    keep = {*range(program.num_inputs), *program.outputs}
    drops: list[list[int]] = [[] for _ in program.instructions]
    for number, i in last.items():
        if number not in keep:
            drops[i].append(number)
    dropped = (dataclasses.replace(s, drops=tuple(d)) for s, d in zip(program.instructions, drops))
    return dataclasses.replace(program, instructions=tuple(dropped))
