"""Does padding stay out of the true rows? An abstract run of the graph that says so, or why not.

A batch runs as a key of more tokens and requests, so dims in T and R are longer than true. A value
*keeps its rows* if its leading slice of the true shape is what bare `forward` computes. Staged
leaves do; each op's rule (`rules`) says whether its result does when its arguments do. A sum over T
does if padding adds nothing, so what is known of padding goes along.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fngraph.core.buffers import LAST, RAMPS, STRIDE
from fngraph.core.text import expect
from fngraph.errors import RowsError, TreeError
from fngraph.fx.leaves import Leaf
from fngraph.fx.nodes import (
    REFUSED,
    flat,
    inputs_of,
    is_loop,
    is_op,
    is_size,
    is_tensor,
    line_of,
    mutates,
    operands,
    written_by,
)
from fngraph.fx.rows import folds
from fngraph.fx.rows.bounds import ANY, bounded, of_constant, of_leaf, size_of
from fngraph.fx.rows.boxes import WHOLE, Boxes, joined
from fngraph.fx.rows.dirty import part_of, seen_through, unreturnable, with_dirty
from fngraph.fx.rows.fills import DIVISIONS, dtype_of
from fngraph.fx.rows.loops import Several, failures, of_loop
from fngraph.fx.rows.rules import is_primitive, keeps_finite, rule
from fngraph.fx.rows.state import (
    OFFSETS,
    RISING,
    Kept,
    Mixed,
    Mixes,
    OpCall,
    is_finite,
    moving_dims,
)
from fngraph.fx.rows.weights import weights_of
from fngraph.fx.rows.writes import WINDOW
from fngraph.fx.schemas import reads_nothing
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import DisableTorchFunction

_TRUSTED = "fngraph.trust_rows"
_STEPS = 3  # steps of a donated leaf that are followed, row by row


def check_rows(
    gm: fx.GraphModule,
    facts: Mapping[fx.Node, Any],
    paths: Sequence[str],
    updates: Collection[int],
    refuse: Callable[[RowsError], None],
) -> None:
    """Refuse what `row_errors` finds. Take out `trust_rows`.

    Raises:
        RowsError: naming the first op that lets padding in, with its line.
    """
    for error in row_errors(gm, facts, paths, updates):
        refuse(error)
    _drop_trusted(gm)


def _drop_trusted(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if is_trusted(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        elif is_loop(node):
            for inner in node.target.graphs:
                _drop_trusted(inner)
                inner.recompile()


def row_errors(
    gm: fx.GraphModule,
    facts: Mapping[fx.Node, Any],
    paths: Sequence[str],
    updates: Collection[int],
) -> Iterator[RowsError]:
    """Outputs that do not keep their rows, and ops that may fail in padding, which run whoever
    reads them; each culprit once.

    Args:
        facts: what `facts_of` says of the graph.
        paths: where each output is.
        updates: which outputs are new values of donated leaves.
    """
    output = gm.graph.output_node()
    known = set()
    for i, (path, mixed, x) in enumerate(zip(paths, facts[output], output.args[0])):  # type: ignore[arg-type]
        if isinstance(mixed, Kept) and i not in updates and (why := unreturnable(x, mixed)):
            yield RowsError(f"{line_of(x)}: forward {why}. It reaches {path}")
        if isinstance(mixed, Mixed) and mixed.node not in known:
            known.add(mixed.node)
            told = f"{line_of(mixed.node)}: forward {mixed.why}"
            yield RowsError(f"{told}. It reaches {path}")
    known |= vouched_for(gm)
    failing = [(x, s) for x, s in facts.items() if isinstance(s, Mixed) and s.fails]
    for node, mixed in (*failing, *failures(facts)):
        if not {node, mixed.node} & known:
            known.add(mixed.node)
            told = f"{line_of(node)}: forward {mixed.fails}"
            yield RowsError(f"{told}. No output is made of it, but it runs")


def facts_of(
    gm: fx.GraphModule,
    leaves: Sequence[Leaf],
    constants: Mapping[str, torch.Tensor],
    text: Callable[[Any], str],
    returns: Mapping[int, int],
    known: Mapping[fx.Node, Any] | None = None,
    claims: Mapping[fx.Node, Any] | None = None,
) -> dict[fx.Node, Any]:
    """What is known of every value of a graph: the abstract run.

    What a call leaves dirty in a donated leaf is so when the next one begins: run again with that.

    Args:
        text: a size in T and R, as a person writes it.
        returns: index of a donated leaf to the index of the output that is its new value.
        known: what is known of some nodes beforehand, when they are made.
        claims: what holds of other nodes, unless their own op mixes rows.

    Returns:
        by node, a `Kept` or a `Mixed`: of its value when it is made, and of what it writes then;
        by the output node, those of the results at the end.
    """
    output = gm.graph.output_node()
    dirty: dict[int, Boxes] = {}
    is_told = known is not None and all(node in known for node in inputs_of(gm.graph))
    weights = set() if is_told else weights_of(gm, leaves, returns)
    with _on_the_cpu():
        for run in itertools.count():
            found, _ = _facts(
                gm, leaves, constants, text, weights, dirty, known or {}, claims or {}
            )
            grown = {}
            for leaf, i in returns.items():
                state, before = found[output][i], dirty.get(leaf, ())
                shape = output.args[0][i].meta["val"].shape  # type: ignore[index,union-attr]
                after = joined([*before, *getattr(state, "dirty", ())], shape)
                if after != before:  # rows that go on from step to step reach them all
                    grown[leaf] = after if run < _STEPS else WHOLE
            if not grown:
                return found
            dirty |= grown
    raise AssertionError


def _on_the_cpu() -> Any:
    """A context: what rules compute with is there, whatever the caller's default device is."""
    off = DisableTorchFunction()  # and with it modes, that of the default device among them
    with off:
        there = torch.empty(0).device.type == "cpu"
    return DisableTorchFunction() if there else torch.device("cpu")


def _facts(
    gm: fx.GraphModule,
    leaves: Sequence[Leaf],
    constants: Mapping[str, torch.Tensor],
    text: Callable[[Any], str],
    weights: Collection[fx.Node],
    dirty: Mapping[int, Boxes],
    known: Mapping[fx.Node, Any],
    claims: Mapping[fx.Node, Any],
) -> tuple[dict[fx.Node, Any], dict[fx.Node, Any]]:
    """What is known of each value when it is made, and of each at the end."""
    found: dict[fx.Node, Any] = {}
    states: dict[fx.Node, Any] = {}
    views: dict[int, list[fx.Node]] = {}  # by the memory that they are in
    inputs = enumerate(leaves)
    tokens = _tokens(gm, leaves)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            i, leaf = next(inputs, (0, None))
            if node in known:
                states[node] = known[node]
            else:
                assert leaf is not None
                was = dirty.get(i, ())
                held = not was and node in weights
                kept = dataclasses.replace(_leaf(leaf), held=held, dirty=was)
                states[node] = of_leaf(kept, leaf, node.meta["val"], tokens)
        elif node in known:
            states[node] = known[node]
        elif node.op == "get_attr":
            value = constants[node.name].cpu()
            states[node] = of_constant(Kept(value=value, held=is_finite(value)))
        elif is_loop(node):
            states[node] = of_loop(node, states, functools.partial(_of_function, constants, text))
        elif node.op == "call_function":
            states[node] = own = _result(node, states, text)
            claim = claims.get(node, own)
            if isinstance(claim, Mixed) or not isinstance(own, Mixed):
                states[node] = claim
        else:
            found[node] = [states[x] for x in node.args[0]]  # type: ignore[union-attr,index]
            break
        found[node] = state = states[node]
        if is_tensor(node):
            views.setdefault(storage_key(node.meta["val"]), []).append(node)
        for target in written_by(node):
            others = views[storage_key(target.meta["val"])]
            views_of = [view for view in others if view is not node]
            after = _after(node, target, state)
            _rewrite(target, after, states, views_of)
    return found, states


def _of_function(
    constants: Mapping[str, torch.Tensor],
    text: Callable[[Any], str],
    gm: fx.GraphModule,
    given: Mapping[fx.Node, Any],
) -> tuple[dict[fx.Node, Any], dict[fx.Node, Any]]:
    """The same of a function of a loop, of whose inputs all is told."""
    return _facts(gm, (), constants, text, (), {}, given, {})


def _tokens(gm: fx.GraphModule, leaves: Sequence[Leaf]) -> Any:
    """T as an expression; None if no leaf has T rows."""
    for node, leaf in zip(inputs_of(gm.graph), leaves):
        if leaf.buffer is not None and leaf.buffer.dims and leaf.buffer.dims[0].text == "T":
            return size_of(node.meta["val"].shape[0])
    return None


def is_trusted(node: fx.Node) -> bool:
    """Whether it is what `trust_rows` has made."""
    return bool(node.meta.get("custom", {}).get(_TRUSTED))


def as_vouched(gm: fx.GraphModule, facts: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """`facts`, where what `trust_rows` was told of a value holds of the value itself; so in the
    functions of loops."""
    found = dict(facts)
    for node in gm.graph.nodes:
        if is_trusted(node):
            found[node.args[0]] = facts[node]
        elif is_loop(node):
            graphs = map(as_vouched, node.target.graphs, facts[node].graphs)
            found[node] = dataclasses.replace(facts[node], graphs=tuple(graphs))
    return found


def vouched_for(gm: fx.GraphModule) -> set[fx.Node]:
    """What `trust_rows` has made, and all that it is made of."""
    found: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node in found or is_trusted(node):
            found.update((node, *node.all_input_nodes))
    return found


def _leaf(leaf: Leaf) -> Kept:
    if not leaf.padded:
        return Kept(span=ANY)
    if leaf.buffer is None or leaf.buffer.pad in RAMPS:
        marks: dict[Any, str] = {STRIDE: OFFSETS, LAST: RISING}
        return Kept({} if leaf.buffer is None else {0: marks[leaf.buffer.pad]})
    pad = torch.tensor(leaf.buffer.pad, dtype=getattr(torch, leaf.buffer.dtype))
    counts = not (pad.dtype.is_floating_point or pad.dtype.is_complex)
    names_a_row = counts and leaf.buffer.pad_given and float(leaf.buffer.pad) >= 0
    return Kept({0: pad}, said="pad") if names_a_row else Kept({0: pad}, unsaid=leaf.path)


def _result(node: fx.Node, states: Mapping[fx.Node, Any], text: Any) -> Kept | Mixed:
    if node.target is operator.getitem and isinstance(of := states[node.args[0]], Several):  # type: ignore[index]
        return of.results[node.args[1]]  # type: ignore[index,no-any-return]
    if _is_inlined(node) and is_tensor(node):
        return _inlined(node, states)
    read = [] if reads_nothing(node.target) else map(states.get, node.all_input_nodes)
    mixed = next((s for s in read if isinstance(s, Mixed)), None)
    if mixed is not None and not is_trusted(node):
        found = folds.through(node, states, text) if isinstance(mixed, folds.Folded) else None
        return found or folds.plain(mixed, _failure(node, states, text))
    if node.target is operator.getitem:  # one of several results
        state = states[node.args[0]]  # type: ignore[index]
        call = OpCall(node, {}, states, text)
        kept = isinstance(state, Kept) and is_tensor(node)
        if not kept:
            return state
        dirty = part_of(node, state.dirty, states, text)
        return bounded(call, dataclasses.replace(state, low=-math.inf, dirty=dirty))
    if is_size(node) or mixed is not None:
        return Kept(low=0, span=ANY) if is_trusted(node) else Kept()
    call = OpCall.of(node, states, text)
    try:
        if any(states[target].window for target in written_by(node)):
            raise Mixes(WINDOW.format(call.name))
        _check_sizes(call)
        found = with_dirty(call, rule(call))
        given = [x for x in operands(node) if isinstance(states[x], Kept)]
        if any(states[x].window for x in given) and _is_part(node, given, states):
            found = dataclasses.replace(found, window=True)
        if is_trusted(node):
            return dataclasses.replace(found, low=0, span=ANY, dirty=())
        if given and all(states[x].held for x in given) and keeps_finite(call):
            found = dataclasses.replace(found, held=True)
        return bounded(call, found) if is_tensor(node) else found
    except Mixes as error:
        fails = str(error) if error.fails else ""
        return (
            Kept()
            if node.meta.get("custom", {}).get(REFUSED)
            else Mixed(node, str(error), fails)
            if fails
            else folds.fold(call, str(error))
        )


def _is_part(node: fx.Node, given: Iterable[fx.Node], states: Mapping[fx.Node, Any]) -> bool:
    """Whether it is a view of a window, whatever op says so: fit for reading alone as well."""
    windows = {storage_key(x.meta["val"]) for x in given if states[x].window}
    results = [x for x in flat(node.meta.get("val")) if isinstance(x, torch.Tensor)]  # or nothing
    return not mutates(node) and any(storage_key(x) in windows for x in results)


def _failure(node: fx.Node, states: Mapping[fx.Node, Any], text: Any) -> str:
    """How an op may fail at padding that is in true rows already; "" if it does not."""
    if not is_op(node):
        return ""
    given = ((x, states[x]) for x in node.all_input_nodes)
    known = {x: state if isinstance(state, Kept) else Kept() for x, state in given}
    call = OpCall.of(node, known, text)
    try:
        rule(call)
    except Mixes as error:
        if error.fails:
            return str(error)
    for name in _JUDGED if not is_primitive(call) else ():
        for x in flat(call.args.get(name)):
            state = states.get(x)
            if isinstance(state, Mixed) and may_raise(call, name, x):
                return f"gives {call.name} what may be an error to it in padding: it {state.why}"
    return ""


_JUDGED = ("self", "other", "index", "indices", "target", "p", "std")
"""Arguments whose numbers an op may refuse."""


_JUDGING = {"multinomial": ("self",), "bernoulli": ("self", "p"), "normal": ("std",)}
"""Ops that do, beside those that look up or divide, and of which arguments."""


_OF_SIZES = {
    torch.SymInt: torch.int64, torch.SymBool: torch.bool, torch.SymFloat: torch.float64,
}  # fmt: skip


def may_raise(call: OpCall, name: str, x: fx.Node) -> bool:
    """Whether an op raises an error, or ends the process, at some numbers of an argument: a tensor,
    or a number that is made of T and R."""
    value = x.meta["val"]
    kind = _OF_SIZES[type(value)] if is_size(x) else value.dtype
    if name in ("index", "indices", "target"):
        return kind not in (torch.bool, torch.uint8)  # masks
    if name == "other":
        whole = not any(k.is_floating_point or k.is_complex for k in (kind, dtype_of(call)))
        return call.name in DIVISIONS and whole
    return name in _JUDGING.get(call.name, ())


def _inlined(node: fx.Node, states: Mapping[fx.Node, Any]) -> Kept | Mixed:
    """An op of a primitive's plain form: it takes care of padding, if what goes in keeps its rows.

    The ops of its gradient are not marked, but for the first ones and the last.
    """
    pending, seen = list(node.all_input_nodes), set()
    while pending:
        source = pending.pop()
        if source in seen:
            continue
        seen.add(source)
        at_end = "inlined_end" in node.meta["custom"]
        if at_end and source.op == "call_function" and not _is_inlined(source):
            pending += source.all_input_nodes
        elif isinstance(states[source], Mixed):
            return folds.plain(states[source])
    left = {x: getattr(states[x], "dirty", ()) for x in written_by(node)}
    return Kept({dim: torch.tensor(0) for dim in moving_dims(node)}, left=left)


def unfinished(node: fx.Node) -> bool:
    """Whether it is a step on the way of a primitive's plain form, of which nothing is claimed."""
    return "inlined" in node.meta.get("custom", {})


def _is_inlined(node: fx.Node) -> bool:
    return any(mark in node.meta.get("custom", {}) for mark in ("inlined", "inlined_end"))


def _check_sizes(call: OpCall) -> None:
    for x in flat(call.node.meta.get("val")):
        for size in x.shape if isinstance(x, torch.Tensor) else ():
            if not _grows(size):
                raise Mixes(
                    f"makes a tensor of {call.text(size)} rows ({call.name}), which in a key may "
                    "be fewer than its batch has. Make one for each token or request, and mask"
                )


def _grows(size: Any) -> bool:
    """Whether a size is at least as large for more tokens or requests."""
    if isinstance(size, torch.SymInt):
        size = size.node.expr
    if not isinstance(size, sympy.Expr) or size.is_number or size.is_Symbol:
        return True
    if isinstance(size, sympy.Mul):
        return all(_grows(a) and not (a.is_number and a < 0) for a in size.args)
    if type(size).__name__ in ("FloorDiv", "CleanDiv"):
        return _grows(size.args[0]) and bool(size.args[1].is_number and size.args[1] > 0)
    sums = isinstance(size, sympy.Add) or type(size).__name__ in ("Max", "Min")
    return sums and all(map(_grows, size.args))


def _after(node: fx.Node, target: fx.Node, state: Any) -> Kept | Mixed:
    """What an op leaves in a tensor that it writes; a primitive writes true rows alone."""
    if isinstance(state, Several):
        return state.left[node.args.index(target)]
    if not isinstance(state, Kept):
        return state
    return dataclasses.replace(state, dirty=state.left.get(target, state.dirty), left={})


def _rewrite(
    target: fx.Node, state: Kept | Mixed, states: dict[fx.Node, Any], views: Iterable[fx.Node]
) -> None:
    """After a write: every view of the memory has padding in it, or padding that is not known."""
    for node in views:
        if node is not target:
            if isinstance(state, Mixed):
                states[node] = state
            elif isinstance(known := states[node], Kept):
                dirty = seen_through(target, state.dirty, node, known.dirty)
                states[node] = Kept(window=known.window, dirty=dirty)
            elif isinstance(known, folds.Folded):  # of which dirty rows are not followed
                states[node] = folds.plain(known)
    states[target] = state


def trust_rows(x: torch.Tensor) -> torch.Tensor:
    """Say of `x` that each of its true rows depends on true rows alone, whatever padding holds.

    For what no rule can see, such as rows sorted by expert and put back in order. Of an index it
    also says that it is not negative, and that what padding names is there. No trace can check it:
    where it is not so, results are wrong with padding; `fg.check(..., rehearse=True)` tries it.
    Costs nothing: no op is left of it.

    Raises:
        TreeError: no tensor.
    """
    expect(torch.Tensor, "", TreeError, x=x)
    with fx.traceback.annotate({_TRUSTED: True}):
        return torch.ops.aten.alias.default(x)  # type: ignore[no-any-return]
