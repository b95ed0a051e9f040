"""One piece of traced ops, run op by op twice: on what the step has, and on what it should have.

After each op the two are the same again: what an op gave the step is what the next one reads on
both sides. So the first op that differs is the one that is wrong, and not one that it has fed; and
what rounding does in one is no difference in the next. Only values that differ in padding alone go
on as two, since an op may come that lets padding into true rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import is_op, line_of, written_by
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
        found: where they differ: the first op beyond the tolerances, the first at all.
    """

    made: dict[fx.Node, Any]
    should: dict[fx.Node, Any]
    found: list[Place] = dataclasses.field(default_factory=list)


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
    if all(sizes[name] == true[name] for name in ("T", "R")):
        return x
    at_key = {symbol: sizes[letter] for symbol, letter in letters.items()}
    at_true = {symbol: true[letter] for symbol, letter in letters.items()}
    cut = []
    for size in fake.shape:
        padded, own = int(size_at(size, at_key)), int(size_at(size, at_true))
        apart = {sizes[n] - true[n] for n in ("T", "R")}
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
    letters = gm.meta[LETTERS]
    run = Walked({}, {})
    sources: dict[fx.Node, set[str]] = {}  # leaves behind a value that is not what it should be
    given = iter([sizes["T"], sizes["R"], *tensors])
    for number, node in enumerate(gm.graph.nodes):
        if node.op == "placeholder":
            run.made[node] = next(given)
            if number - 2 in should:
                run.should[node] = should[number - 2]
                sources[node] = {paths[number - 2]} if number - 2 in paths else set()
            continue
        if node.op == "output":
            break
        if node.op == "get_attr":
            run.made[node] = getattr(gm, str(node.target))
            continue
        other = [x for x in node.all_input_nodes if x in run.should]
        if not other or is_collective(node):  # which others come to as often as this process
            run.made[node] = _call(node, run.made)
            continue
        mixed = {**run.made, **run.should}
        writes = written_by(node)
        for x in writes:
            mixed[x] = mixed[x].clone()
        wanted = _call(node, mixed)
        run.made[node] = _call(node, run.made)
        behind = set().union(*(sources.get(x, set()) for x in other))
        results = [(x, run.made[x], mixed[x]) for x in writes]
        if not any(wanted is mixed[x] for x in writes):
            results.append((node, run.made[node], wanted))
        viewed = is_op(node) and is_view(node.target)
        for x, got, want in results:
            if not isinstance(got, torch.Tensor):
                if not viewed and isinstance(got, list | tuple):
                    _go_on(run, sources, x, want, behind)
                continue
            if viewed:
                _go_on(run, sources, x, want, behind)
                continue
            a, b = (true_part(x, y, sizes, true, letters) for y in (got, want))
            what = None if a is None or b is None else difference(a, b, within)
            if what is not None:
                text, is_close = what
                run.found.append(
                    Place((named[0], number), named[1], name_of(node), line_of(node), text,
                          is_close, tuple(sorted(behind)))
                )  # fmt: skip
            elif difference(got, want, within) is not None:  # in padding, which goes on
                _go_on(run, sources, x, want, behind)
            else:
                run.should.pop(x, None)
    return run


def _go_on(
    run: Walked, sources: dict[fx.Node, set[str]], node: fx.Node, want: Any, behind: set[str]
) -> None:
    run.should[node] = want
    sources[node] = behind


def _call(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    look = lambda x: values[x]  # noqa: E731
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), look)  # type: ignore[misc]
    return node.target(*args, **kwargs)  # type: ignore[operator]


def name_of(node: fx.Node) -> str:
    """An op, as it is printed in a graph."""
    return str(node.target)


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
