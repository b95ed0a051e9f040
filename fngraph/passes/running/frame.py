"""What a pass is, and how a list of them runs: each on a copy of the graph, checked afterwards.

A pass is a function `fx.Graph -> fx.Graph`, or `-> Rewritten`, which also says how often it
matched. It gets a copy that it may edit, after the rows of the graph were checked and before
donation: every value is a tensor of its own or a view, and nothing is written but what `forward`
writes and what primitives write into their `out`. Of its nodes,

    meta["val"]          a fake: shape in T and R, strides, dtype, device; views share its storage
    meta["stack_trace"]  the user's line
    meta["leaf"]         of a placeholder: its `Leaf`, with path and role
    meta["value"]        of a `get_attr`: the tensor, a constant. A pass may read others than it was
                         given: it inserts a `get_attr` of a new name with its "val" and "value"

What it returns computes the same, in every row, those of padding too. That cannot be checked; what
can, is: the graph holds together (`lint`), reads the same placeholders, says the value of each
constant, calls the same primitives and draws the same random numbers in the same order, gives what
may go by layouts (`layouts.py`) the same ones, and outputs of the same shapes, dtypes and memory.
Each new op is asked the rule of its rows (`fngraph.fx.rows`): one that mixes them, or that has no
rule, is a `RowsError` that names the pass. What a new value stands for is what was in its place, so
that all that is known of its padding holds on. New nodes need no `meta`: their `val` is what the op
gives, whatever a pass says, and a missing line is that of the nearest node that has one.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import fx

from fngraph.core.text import count, table, with_suggestions
from fngraph.core.where import user_line
from fngraph.errors import FnGraphError, PassError, RowsError
from fngraph.fx.donation.table import drop_dead
from fngraph.fx.leaves import Leaf
from fngraph.fx.nodes import line_of, operands
from fngraph.fx.rows.check import facts_of
from fngraph.fx.rows.state import VOUCHED, Kept, Mixed
from fngraph.fx.tracing.tracer import Graph
from fngraph.passes.overloads import meant, named
from fngraph.passes.pattern import sizes
from fngraph.passes.running.checks import (
    Rewritten,
    check_constants,
    check_same,
    check_whole,
    constants_of,
    outside_of,
    result_of,
    without_graph,
)
from fngraph.passes.running.copies import Copy
from fngraph.passes.running.layouts import check_layouts
from fngraph.passes.running.values import Known, complete
from fngraph.torch_facts.names import OpOverload
from fngraph.torch_facts.sources import text_of
from fngraph.torch_facts.tracing import LazyGraphModule

LOG = logging.getLogger("fngraph")


PassFn = Callable[[fx.Graph], fx.Graph | Rewritten]
Facts = Mapping[fx.Node, Any]
"""What is known of the rows of each value."""


@with_suggestions
@dataclasses.dataclass(frozen=True)
class Pass:
    """A function over graphs with a name, by which it is asked for, and a version.

    Attributes:
        version: changes with what it does; code on disk that was made after another one is not
            used. Left out: the source of the function.
        keeps_rows: ops that the pass puts there of which row i of the result depends on row i
            alone, by its author's word, as `fg.trust_rows` has it: those that have no rule.
        about: a line for people.
    """

    name: str
    fn: PassFn
    version: str = ""
    about: str = ""
    keeps_rows: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not callable(self.fn):
            raise PassError(
                f"Pass({named(self.name)}, {named(self.fn)}): expected a name and a function of an "
                'fx.Graph, fg.passes.Pass("mine", mine)'
            )
        if isinstance(self.fn, type):
            raise PassError(
                f"{self.fn.__qualname__} is a class. Pass an object of it, or a function, that "
                "takes an fx.Graph"
            )
        if why := _why_not_of_one(self.fn):
            raise PassError(
                f"the pass {self.name!r} cannot be called with a graph: {why}. A pass is a "
                "function of one fx.Graph that returns it, def mine(graph): ...; return graph"
            )
        if not isinstance(self.version, str):
            raise PassError(f"version={self.version!r} of the pass {self.name!r}: expected a text")
        if not isinstance(self.keeps_rows, list | tuple):
            raise PassError(
                f"keeps_rows={self.keeps_rows!r} of the pass {self.name!r}: expected several ops, "
                "keeps_rows=(torch.ops.mine.op.default,)"
            )
        for op in self.keeps_rows:
            if not isinstance(op, OpOverload):
                raise PassError(
                    f"keeps_rows of the pass {self.name!r} has {named(op)}, which is no op with "
                    f"its overload. Write {meant(op)}"
                )

    @property
    def key(self) -> tuple[str, str]:
        """Name and version, for a cache."""
        return self.name, self.version or text_of(self.fn)

    def __repr__(self) -> str:
        return f"Pass({self.name!r})"


def _why_not_of_one(fn: PassFn) -> str:
    """Why a function cannot be called with a graph alone; "": it can, as far as it says."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # written in C, and says nothing
        return ""
    try:
        signature.bind(object())
    except TypeError as error:
        return str(error)
    return ""


class Applied(NamedTuple):
    """What a pass did to one graph.

    Attributes:
        matches, notes: those in the functions of its loops too.
        before, after: the graphs; None where nothing matched.
        where: which function of a loop it is; "": `forward`.
        within: the same of the functions of its loops.
    """

    one: Pass
    matches: int
    notes: tuple[str, ...]
    before: fx.GraphModule | None = None
    after: fx.GraphModule | None = None
    where: str = ""
    within: tuple[Applied, ...] = ()

    @classmethod
    def merged(cls, parts: Sequence[Applied]) -> Applied:
        """What a pass did to a graph, with what it did to the functions of its loops."""
        first, *inner = parts
        notes = dict.fromkeys(note for one in parts for note in one.notes)
        matches = sum(one.matches for one in parts)
        return first._replace(matches=matches, notes=tuple(notes), within=tuple(inner))

    def counted(self) -> Applied:
        """The same without graphs, which take memory."""
        return self._replace(before=None, after=None, within=())

    def diff(self) -> str:
        """The graph's code before and after, as a unified diff, and then that of the functions of
        its loops; "" where nothing matched."""
        inner = [one.diff() for one in self.within]
        if self.before is None or self.after is None:
            return "\n".join(filter(None, inner))
        name, old, new = self.one.name, _lines(self.before), _lines(self.after)
        place = f" in {self.where}" if self.where else ""
        lines = difflib.unified_diff(
            old, new, f"before {name}{place}", f"{name}{place}", lineterm="", n=1
        )
        return "\n".join(filter(None, ["\n".join(lines), *inner]))


_CLEARED = re.compile(r"(?m);  \w+ = .*$")  # what is not read again, as fx prints it


def _lines(gm: fx.GraphModule) -> list[str]:
    return _CLEARED.sub("", gm.code).splitlines()


def as_text(applied: Sequence[Applied]) -> str:
    """A table: each pass in order, and how often it matched; then the notes."""
    if not applied:
        return ""
    rows = [(one.one.name, one.matches, one.one.about) for one in applied]
    notes = [f"{one.one.name}: {note}" for one in applied for note in one.notes]
    return "\n".join([table(["pass", "matches", "what it does"], rows), *notes])


def run_over(
    passes: Sequence[Pass],
    graph: Graph,
    leaves: Sequence[Leaf],
    facts: Facts,
    refuse: Callable[[RowsError], None],
    where: str = "",
) -> tuple[Graph, tuple[Applied, ...], Facts]:
    """One graph after all passes, what each did, and what is known of the rows then. The one that
    is given stays as it is, and so do the functions of its loops.

    Args:
        graph: nodes of arguments have their leaves, those of constants their values.
        facts: what is known of its rows, with what was vouched for.
        where: which function of a loop it is; "": `forward`.

    Raises:
        PassError: a pass that fails, or returns what is not the same function.
        RowsError: a new op that mixes rows.
    """
    applied = []
    gm = graph.gm
    known: Known = {}
    copy: Copy | None = None
    outside = outside_of(gm.graph)
    for one in passes:
        began = time.perf_counter()
        copy = copy or Copy.of(gm.graph)
        try:
            made = one.fn(copy.graph)
        except Exception as error:
            _note(error, one.name)
            raise
        result = result_of(one.name, made)
        differs = copy.differs(result.graph)
        if differs:
            check_whole(one.name, gm.graph, result.graph, copy)
            drop_dead(result.graph)  # what it has replaced and not erased would still be computed
            differs = copy.differs(result.graph)
        if not differs:
            applied.append(_said(Applied(one, 0, result.notes, where=where), began))
            copy = copy if copy.has_its_metas() else None  # the next one's
            continue
        stays = {x: copy.twins[x] for x in result.graph.nodes if x in copy.twins}
        touched = copy.touched(stays)
        complete(one.name, result.graph, stays, touched, copy.edited(touched), known)
        copy, before = None, outside
        outside = outside_of(result.graph)
        check_same(one.name, gm.graph, result.graph, before, outside, stays)
        check_constants(one.name, result.graph, stays)
        check_layouts(one.name, stays)
        after = module_of(result.graph)
        claims = _claims(facts, stays, touched)
        facts = _facts_after(one, graph, after, leaves, facts, stays, claims, refuse)
        fewer = len(gm.graph.nodes) - len(result.graph.nodes)
        matches = result.matches if result.matches > 0 else len(claims) or max(fewer, 1)
        applied.append(_said(Applied(one, matches, result.notes, gm, after, where), began))
        gm = after
    if gm is not graph.gm:  # what `diff` shows stays as it is while donation goes on
        copy = copy or Copy.of(gm.graph)
        facts = {x: facts[old] for x, old in copy.twins.items() if old in facts}
        gm = module_of(copy.graph)
    constants = {node.name: node.meta["value"] for node in constants_of(gm.graph)}
    return dataclasses.replace(graph, gm=gm, constants=constants), tuple(applied), facts


def module_of(graph: fx.Graph) -> fx.GraphModule:
    """A graph as a module that has its constants."""
    return LazyGraphModule({str(n.target): n.meta["value"] for n in constants_of(graph)}, graph)


def _note(error: Exception, name: str) -> None:
    """Say in which pass something was raised, without the graph that fx puts into its errors."""
    if isinstance(error, FnGraphError):  # of a pattern, or of what is replaced
        error.args = (f"{user_line(error.__traceback__)}: the pass {name!r}: {error}",)
        return
    if error.args and isinstance(error.args[0], str):
        error.args = (without_graph(error.args[0]), *error.args[1:])
    error.add_note(f"in the pass {name!r}")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if Path(frame.filename).parent == Path(fx.__file__).parent:
        error.add_note(
            "what a graph calls is an op with its overload, torch.ops.aten.tanh.default; what is "
            "read by others is erased after them: docs/compile.md, a pass of one's own"
        )


def _said(applied: Applied, began: float) -> Applied:
    ms = (time.perf_counter() - began) * 1e3
    times = count(applied.matches, "time") + (f" in {applied.where}" if applied.where else "")
    LOG.info("the pass %s matched %s: %.0f ms", applied.one.name, times, ms)
    return applied


# --- what is known of rows ------------------------------------------------------------------------


def _claims(
    facts: Mapping[fx.Node, Any], stays: Mapping[fx.Node, fx.Node], touched: Iterable[fx.Node]
) -> dict[fx.Node, Any]:
    """For each new value, what is known of the one in whose place it is read.

    Args:
        touched: nodes that read others than they did.
    """
    claims: dict[fx.Node, Any] = {}
    for node in touched:
        if node not in stays:  # it is another op
            continue
        for x, y in zip(operands(node), operands(stays[node])):
            if x not in stays and sizes(x) == sizes(y) and y in facts:
                claims.setdefault(x, facts[y])
    return claims


def _facts_after(
    one: Pass,
    graph: Graph,
    after: fx.GraphModule,
    leaves: Sequence[Leaf],
    facts: Mapping[fx.Node, Any],
    stays: Mapping[fx.Node, fx.Node],
    claims: Mapping[fx.Node, Any],
    refuse: Callable[[RowsError], None],
) -> Mapping[fx.Node, Any]:
    """What is known of the rows of a graph after a pass.

    Of a node that has stayed, what was; of a new one, what is known of the value in whose place it
    is, if its own rule does not say that it mixes rows.
    """
    known = {x: facts[old] for x, old in stays.items() if old in facts and x.op != "output"}
    trusted = [x for x in after.graph.nodes if x not in stays and x.target in one.keeps_rows]
    known |= {x: claims.get(x, Kept()) for x in trusted}
    constants = {node.name: node.meta["value"] for node in constants_of(after.graph)}
    found = facts_of(after, leaves, constants, graph.text, {}, known, claims)
    told = set()
    for node, state in found.items():
        if node in known or not isinstance(state, Mixed) or state.node in told:
            continue
        if state.node.graph is after.graph and state.node not in known:  # the op is the pass's
            told.add(state.node)
            vouched = f"fg.passes.Pass(..., keeps_rows=(torch.ops.{state.node.target},))"
            why = state.why.replace(VOUCHED, vouched)
            refuse(RowsError(f"{line_of(state.node)}: forward, after the pass {one.name!r}, {why}"))
    return found
