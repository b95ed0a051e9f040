"""One piece of traced ops, run op by op twice: on what the step has, and on what it should have.

After each op the two are the same again: what an op gave the step is what the next one reads on
both sides. So the first op that differs is the one that is wrong, and not one that it has fed; and
what rounding does in one is no difference in the next. Only values that differ in padding alone go
on as two, since an op may come that lets padding into true rows.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core.buffers import COUNTED
from fngraph.fx.loops.node import NAMES
from fngraph.fx.loops.running import LoopCall, run_noted
from fngraph.fx.nodes import computed, given_to, is_loop, is_op, line_of, name_of, written_by
from fngraph.fx.pieces.collectives import is_collective
from fngraph.fx.pieces.cuts import LETTERS
from fngraph.fx.rows.rehearsal import is_unwritten
from fngraph.shadow.compared import Compared, compare
from fngraph.torch_facts.inductor import size_at
from fngraph.torch_facts.schemas import is_view

Tolerances = Mapping[torch.dtype, float]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where two runs first differ.

    Attributes:
        at: index of the instruction, and of the op within it.
        instruction: its name: "piece 3", "attention 1".
        op: "aten.mm.default".
        line: the user's.
        what: how they differ.
        is_close: whether that is within the tolerances, and only bits tell.
        reads: paths of the leaves that the op reads and that are not what they should be.
    """

    at: tuple[int, int]
    instruction: str
    op: str
    line: str
    what: str
    is_close: bool = False
    reads: tuple[str, ...] = ()

    def __str__(self) -> str:
        stale = f"; it reads {', '.join(self.reads)}" if self.reads else ""
        return f"{self.instruction}, {self.op}, from {self.line}: {self.what}{stale}"


@dataclasses.dataclass
class Walked:
    """A piece after its ops have run.

    Attributes:
        made: what each node gave the step.
        should: what it should have given, where that is not the same.
        found: where they differ, in order.
        inside: of loops: the first op of their functions that differs, as text.
    """

    made: dict[fx.Node, Any]
    should: dict[fx.Node, Any]
    found: list[Place] = dataclasses.field(default_factory=list)
    inside: dict[fx.Node, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Walk:
    """What is the same all through a piece.

    Attributes:
        sizes: of the key.
        true: of the batch.
        letters: of the piece's symbols.
        named: index of the instruction, and its name.
    """

    sizes: Mapping[str, int]
    true: Mapping[str, int]
    letters: Mapping[Any, str]
    named: tuple[int, str]
    within: Tolerances


def true_part(
    node: fx.Node,
    x: torch.Tensor,
    sizes: Mapping[str, int],
    true: Mapping[str, int],
    letters: Mapping[Any, str],
) -> torch.Tensor | None:
    """The true rows of a value that was computed at a key's sizes; None: they cannot be told, as
    rows of T are folded with others, or it has none yet."""
    fake = node.meta.get("val")
    if is_unwritten(node):
        return None
    if not isinstance(fake, torch.Tensor) or fake.dim() != x.dim():
        return None
    if all(sizes[name] == true[name] for name in COUNTED):
        return x
    at_key = {symbol: sizes[letter] for symbol, letter in letters.items()}
    at_true = {symbol: true[letter] for symbol, letter in letters.items()}
    cut = []
    for size in fake.shape:
        padded, own = int(size_at(size, at_key)), int(size_at(size, at_true))
        apart = {sizes[n] - true[n] for n in COUNTED}
        if padded - own not in apart | {0}:
            return None
        cut.append(slice(own))
    return x[tuple(cut)]


def walk(
    gm: fx.GraphModule,
    sizes: Mapping[str, int],
    true: Mapping[str, int],
    tensors: Sequence[torch.Tensor],
    should: Mapping[int, torch.Tensor],
    named: tuple[int, str],
    paths: Mapping[int, str],
    within: Tolerances,
) -> Walked:
    """Run a piece op by op. `tensors` are written where it writes them.

    Args:
        sizes: of the key.
        should: arguments, by index, that are not what they should be, as they should be.
        named: index of the instruction, and its name.
        paths: of those arguments that are leaves.
    """
    walk = Walk(sizes, true, gm.meta[LETTERS], named, within)
    given = [sizes["T"], sizes["R"], *tensors]
    behind = {i + 2: path for i, path in paths.items()}
    return _walk(walk, gm, given, {i + 2: x for i, x in should.items()}, behind)


def _walk(
    walk: Walk, gm: fx.GraphModule, given: Sequence[Any], should: Mapping[int, torch.Tensor],
    paths: Mapping[int, str],
) -> Walked:  # fmt: skip
    """`walk`, over all that a graph is given: sizes of a piece, too."""
    run = Walked({}, {})
    sources: dict[fx.Node, set[str]] = {}  # leaves behind a value that is not what it should be
    for number, node in enumerate(gm.graph.nodes):
        if node.op == "placeholder":
            run.made[node] = given[number]
            if number in should:
                run.should[node] = should[number]
                sources[node] = {paths[number]} if number in paths else set()
            continue
        if node.op == "output":
            break
        if node.op == "get_attr":
            run.made[node] = getattr(gm, str(node.target))
            continue
        other = [x for x in node.all_input_nodes if x in run.should]
        if not other or is_collective(node):  # which others come to as often as this process
            run.made[node] = computed(node, run.made)
            continue
        mixed = {**run.made, **run.should}
        if is_loop(node):
            run.inside[node] = _inside(walk, node, run.made, mixed)
        writes = written_by(node)
        for x in writes:
            mixed[x] = mixed[x].clone()
        wanted = computed(node, mixed)
        run.made[node] = computed(node, run.made)
        behind = set().union(*(sources.get(x, set()) for x in other))
        results = [(x, run.made[x], mixed[x]) for x in writes]
        if not any(wanted is mixed[x] for x in writes):
            results.append((node, run.made[node], wanted))
        source: Any = node.args[0] if node.target is operator.getitem else node
        viewed = is_op(source) and is_view(source.target)
        for x, got, want in results:
            if viewed or not isinstance(got, torch.Tensor):
                if isinstance(got, torch.Tensor | list | tuple):
                    _go_on(run, sources, x, want, behind)
                continue
            a, b = (true_part(x, y, walk.sizes, walk.true, walk.letters) for y in (got, want))
            what = None if a is None or b is None else difference(a, b, walk.within)
            if what is not None:
                text, is_close = what
                text += run.inside.get(source, "")
                at, instruction = walk.named
                run.found.append(
                    Place((at, number), instruction, name_of(node), line_of(node), text, is_close,
                          tuple(sorted(behind)))
                )  # fmt: skip
            elif difference(got, want, walk.within) is not None:  # in padding, which goes on
                _go_on(run, sources, x, want, behind)
            else:
                run.should.pop(x, None)
    return run


def _inside(
    walk: Walk, node: fx.Node, made: Mapping[fx.Node, Any], mixed: Mapping[fx.Node, Any]
) -> str:
    """The first op of a loop's functions at which its turns differ; "" where none is seen."""
    loop: Any = node.target
    ours, should = _turns(node, made), _turns(node, mixed)
    for k, (one, other) in enumerate(zip(ours, should)):
        if one.number != other.number:
            return ", and it takes other turns"
        apart = {
            i: y
            for i, (x, y) in enumerate(zip(one.given, other.given))
            if isinstance(x, torch.Tensor) and difference(x, y, walk.within) is not None
        }
        found = _walk(walk, loop.graphs[one.number], one.given, apart, {}).found
        if found:
            first = next((place for place in found if not place.is_close), found[0])
            turn = sum(before.number == one.number for before in ours[:k])
            name = NAMES[loop.kind][one.number]
            where = f"branch {name!r}" if loop.kind == "cond" else f"{name}, turn {turn}"
            return f"; in its {where}: first {first.op}, from {first.line}: {first.what}"
    return ""


def _turns(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[LoopCall]:
    loop: Any = node.target
    given, _ = given_to(node, values)
    operands = [x.clone() if i in loop.writes else x for i, x in enumerate(given)]
    turns: list[LoopCall] = []
    run_noted(loop, operands, turns)
    return turns


def _go_on(
    run: Walked, sources: dict[fx.Node, set[str]], node: fx.Node, want: Any, behind: set[str]
) -> None:
    run.should[node] = want
    sources[node] = behind


def difference(
    got: torch.Tensor, want: torch.Tensor, within: Tolerances
) -> tuple[str, bool] | None:
    """How two tensors differ, and whether that is within the tolerances; None if no bit does."""
    found = compare([("", got, want)], within, exact=False)
    if found:
        return said(found[0]), False
    found = compare([("", got, want)], within, exact=True)
    return (said(found[0]), True) if found else None


def said(one: Compared) -> str:
    """A difference of one value, which has no path."""
    where = f" at [{', '.join(map(str, one.at))}]" if one.at else ""
    elements = "1 element differs" if one.elements == 1 else f"{one.elements} elements differ"
    return f"{elements}, by up to {one.error:.3g} of a row's largest{where}"
