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
constant, calls the same primitives and draws the same random numbers in the same order, and gives
outputs of the same shapes, dtypes and memory. Each new op is asked the rule of its rows
(`fngraph.fx.rows`): one that mixes them, or that has no rule, is a `RowsError` that names the pass.
What a new value stands for is what was in its place, so that all that is known of its padding holds
on. New nodes need no `meta`: their `val` is what the op gives, whatever a pass says, and a missing
line is that of the nearest node that has one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.core.text import count, table
from fngraph.errors import PassError, RowsError
from fngraph.fx.generators import drawn
from fngraph.fx.leaves import Leaf, same_place
from fngraph.fx.nodes import is_tensor, line_of, written_by
from fngraph.fx.rows.check import facts_of
from fngraph.fx.rows.state import Kept, Mixed
from fngraph.fx.tracing.tracer import Graph
from fngraph.passes.copies import Copy
from fngraph.passes.pattern import sizes
from fngraph.passes.values import Known, complete
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.portable import text_of
from fngraph.torch_facts.tracing import LazyGraphModule

LOG = logging.getLogger("fngraph")


class Rewritten(NamedTuple):
    """What a pass may return in place of a graph alone.

    Attributes:
        matches: how often its pattern was replaced.
        notes: why it was not, where somebody might expect it, a line each.
    """

    graph: fx.Graph
    matches: int
    notes: tuple[str, ...] = ()


PassFn = Callable[[fx.Graph], fx.Graph | Rewritten]


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

    @property
    def key(self) -> tuple[str, str]:
        """Name and version, for a cache."""
        return self.name, self.version or text_of(self.fn)

    def __repr__(self) -> str:
        return f"Pass({self.name!r})"


class Applied(NamedTuple):
    """What a pass did to one graph.

    Attributes:
        before, after: the graphs; None where nothing matched.
    """

    one: Pass
    matches: int
    notes: tuple[str, ...]
    before: fx.GraphModule | None = None
    after: fx.GraphModule | None = None

    def counted(self) -> Applied:
        """The same without graphs, which take memory."""
        return self._replace(before=None, after=None)

    def diff(self) -> str:
        """The graph's code before and after, as a unified diff; "" where nothing matched."""
        if self.before is None or self.after is None:
            return ""
        name, old, new = self.one.name, _lines(self.before), _lines(self.after)
        return "\n".join(difflib.unified_diff(old, new, f"before {name}", name, lineterm="", n=1))


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


def run_passes(
    passes: Sequence[Pass],
    graph: Graph,
    leaves: Sequence[Leaf],
    facts: Mapping[fx.Node, Any],
    refuse: Callable[[RowsError], None],
) -> tuple[Graph, tuple[Applied, ...]]:
    """The graph after all passes, and what each did. The one that is given stays as it is.

    Args:
        facts: what is known of its rows, with what was vouched for.

    Raises:
        PassError: a pass that fails, or returns what is not the same function.
        RowsError: a new op that mixes rows.
    """
    applied = []
    gm = graph.gm
    known: Known = {}
    copy: Copy | None = None
    for node, leaf in zip((n for n in gm.graph.nodes if n.op == "placeholder"), leaves):
        node.meta["leaf"] = leaf
    for node in _constants_of(gm.graph):
        node.meta["value"] = graph.constants[node.name]
    outside = _outside(gm.graph)
    for one in passes:
        began = time.perf_counter()
        copy = copy or Copy.of(gm.graph)
        try:
            made = one.fn(copy.graph)
        except Exception as error:
            error.add_note(f"in the pass {one.name!r}")
            raise
        result = _result_of(one, made)
        if not copy.differs(result.graph):
            applied.append(_said(Applied(one, 0, result.notes), began))
            copy = copy if copy.has_its_metas() else None  # the next one's
            continue
        _check_whole(one, result.graph)
        stays = {x: copy.twins[x] for x in result.graph.nodes if x in copy.twins}
        touched = copy.touched(stays)
        complete(one.name, result.graph, stays, copy.edited(touched), known)
        copy, before = None, outside
        outside = _outside(result.graph)
        _check_same(one, gm.graph, result.graph, before, outside)
        _check_constants(one, result.graph, stays)
        after = _module(result.graph)
        claims = _claims(facts, stays, touched)
        facts = _facts_after(one, graph, after, leaves, facts, stays, claims, refuse)
        fewer = len(gm.graph.nodes) - len(result.graph.nodes)
        matches = result.matches if result.matches >= 0 else len(claims) or max(fewer, 1)
        applied.append(_said(Applied(one, matches, result.notes, gm, after), began))
        gm = after
    if gm is not graph.gm:  # what `diff` shows stays as it is while donation goes on
        gm = _module((copy or Copy.of(gm.graph)).graph)
    constants = {node.name: node.meta["value"] for node in _constants_of(gm.graph)}
    return dataclasses.replace(graph, gm=gm, constants=constants), tuple(applied)


def _constants_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "get_attr"]


def _module(graph: fx.Graph) -> fx.GraphModule:
    """A graph as a module that has its constants."""
    return LazyGraphModule({str(n.target): n.meta["value"] for n in _constants_of(graph)}, graph)


def _said(applied: Applied, began: float) -> Applied:
    ms = (time.perf_counter() - began) * 1e3
    times = count(applied.matches, "time")
    LOG.info("the pass %s matched %s: %.0f ms", applied.one.name, times, ms)
    return applied


def _result_of(one: Pass, made: Any) -> Rewritten:
    result = made if isinstance(made, Rewritten) else Rewritten(made, -1)
    if not isinstance(result.graph, fx.Graph):
        raise PassError(
            f"the pass {one.name!r} returned {type(made).__name__}. Return the graph that it was "
            "given, edited, or another fx.Graph; or fg.passes.Rewritten(graph, matches)"
        )
    return result


def _check_whole(one: Pass, graph: fx.Graph) -> None:
    """Raise `PassError` for nodes that read what is not there, or comes after them."""
    try:
        graph.lint()
    except Exception as error:  # fx raises RuntimeError and others
        raise PassError(
            f"the pass {one.name!r} returned a graph that does not hold together: {error}"
        ) from error


# --- what is checked ------------------------------------------------------------------------------


def _outside(graph: fx.Graph) -> dict[str, list[str]]:
    """What a pass must leave, by what people call it."""

    def named(op: str) -> list[str]:
        return [str(n.target) for n in graph.nodes if n.op == op]

    opaque = [n for n in graph.nodes if _may_be_opaque(n.target) and _is_opaque(n)]
    return {
        "arguments": named("placeholder"),
        "calls of primitives and random ops": [str(n.target) for n in opaque],
    }


def _check_same(
    one: Pass, old: fx.Graph, new: fx.Graph, before: dict[str, list[str]],
    after: dict[str, list[str]],
) -> None:  # fmt: skip
    """Raise `PassError` where the outside of a function has changed.

    Args:
        before, after: what `_outside` says of both.
    """
    for what in before:
        if before[what] != after[what]:
            raise PassError(
                f"the pass {one.name!r} has changed the {what} of forward: {before[what]} before, "
                f"{after[what]} after. A pass changes what lies between them"
            )
    pairs = list(zip(_results(old), _results(new)))
    if len(_results(old)) != len(_results(new)):
        raise PassError(
            f"the pass {one.name!r} returns {count(len(_results(new)), 'output')}, and forward "
            f"{len(_results(old))}"
        )
    owned = {storage_key(n.meta["val"]) for n in old.nodes if n.op in ("placeholder", "get_attr")}
    made: set[int] = set()
    for i, (was, now) in enumerate(pairs):
        a, b = was.meta["val"], now.meta.get("val")
        if not is_tensor(now) or (sizes(was), a.dtype, a.device) != (sizes(now), b.dtype, b.device):
            raise PassError(
                f"the pass {one.name!r} makes output {i} ({line_of(was)}) another tensor: "
                f"{_brief(a)} before, {_brief(b)} after. Give it the shape, dtype and device that "
                "it had"
            )
        was_given, is_given = storage_key(a) in owned, storage_key(b) in owned
        if was_given != is_given or (was_given and not same_place(a, b)):
            raise PassError(
                f"the pass {one.name!r} makes output {i} ({line_of(was)}) other memory of an "
                "argument than it was. Leave in-place updates, and copies that are returned"
            )
        made.add(storage_key(b))
    if len(made) < len({storage_key(was.meta["val"]) for was, _ in pairs}):
        raise PassError(
            f"the pass {one.name!r} makes two outputs one memory, which were two. Leave the copy"
        )


def _check_constants(one: Pass, new: fx.Graph, stays: Mapping[fx.Node, fx.Node]) -> None:
    """Raise `PassError` for a constant without a value, or with another one than it had."""
    for node in _constants_of(new):
        value, val = node.meta.get("value"), node.meta.get("val")
        if node in stays and value is not stays[node].meta["value"]:
            raise PassError(
                f"the pass {one.name!r} has changed the constants of forward: {node.target} has "
                "another value. Insert a get_attr of a new name"
            )
        if not isinstance(value, torch.Tensor) or not isinstance(val, torch.Tensor):
            raise PassError(
                f"the pass {one.name!r} has changed the constants of forward: it reads "
                f'{node.target}, of which it gives no value. Put the tensor into meta["value"], '
                'and a fake of it into meta["val"]'
            )
        if (value.dtype, value.shape, value.stride()) != (val.dtype, val.shape, val.stride()):
            raise PassError(
                f"the pass {one.name!r} gives the constant {node.target} a value of "
                f"{value.dtype} {tuple(value.shape)}, and its fake is of {val.dtype} "
                f"{tuple(val.shape)}"
            )


def _results(graph: fx.Graph) -> Sequence[Any]:
    (output,) = (n for n in graph.nodes if n.op == "output")
    return output.args[0]  # type: ignore[return-value]


def _brief(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return f"{type(x).__name__}"
    shape = ", ".join(str(n if isinstance(n, int) else n.node.expr) for n in x.shape)
    return f"{str(x.dtype).removeprefix('torch.')} ({shape}) on {x.device}"


@functools.cache
def _may_be_opaque(target: Any) -> bool:
    """Whether calls of an op may draw, or write what they are given and return nothing, as
    primitives do."""
    schema = getattr(target, "_schema", None)
    draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return draws or (schema is not None and schema.is_mutable and not schema.returns)


def _is_opaque(node: fx.Node) -> bool:
    return drawn(node) is not None or bool(written_by(node))


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
        for x, y in zip(_tensors(node), _tensors(stays[node])):
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
    constants = {node.name: node.meta["value"] for node in _constants_of(after.graph)}
    found = facts_of(after, leaves, constants, graph.text, {}, known, claims)
    told = set()
    for node, state in found.items():
        if node in known or not isinstance(state, Mixed) or state.node in told:
            continue
        if state.node.graph is after.graph and state.node not in known:  # the op is the pass's
            told.add(state.node)
            refuse(
                RowsError(
                    f"{line_of(state.node)}: forward, after the pass {one.name!r}, {state.why}"
                )
            )
    return found


def _tensors(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return [x for x in found if is_tensor(x)]
