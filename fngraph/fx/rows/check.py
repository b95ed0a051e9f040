"""Does padding stay out of the true rows? An abstract run of the graph that says so, or why not.

A batch runs as a key of more tokens and requests, so dims in T and R are longer than true. A value
*keeps its rows* if its leading slice of the true shape is what bare `forward` computes. Staged
leaves do; each op's rule (`rules`) says whether its result does when its arguments do. A sum over T
does if padding adds nothing, so what is known of padding goes along.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fngraph.errors import RowsError
from fngraph.fx.leaves import Leaf, Role
from fngraph.fx.nodes import REFUSED, is_op, is_size, is_tensor, line_of, operands, written_by
from fngraph.fx.rows.bounds import ANY, bounded, of_constant, of_leaf, size_of
from fngraph.fx.rows.fills import keeps_finite
from fngraph.fx.rows.indices import WINDOW, WRITES
from fngraph.fx.rows.rules import rule
from fngraph.fx.rows.state import (
    OFFSETS,
    Kept,
    Mixed,
    Mixes,
    OpCall,
    is_finite,
    moving_dims,
    op_name,
)
from fngraph.fx.schemas import named, reads_nothing
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import tree_leaves

_TRUSTED = "fngraph.trust_rows"


def check_rows(
    gm: fx.GraphModule,
    facts: Mapping[fx.Node, Any],
    paths: Sequence[str],
    refuse: Callable[[RowsError], None],
) -> None:
    """Refuse outputs that do not keep their rows, and ops that may fail in padding, which run
    whoever reads them; each culprit once. Take out `trust_rows`.

    Args:
        facts: what `facts_of` says of the graph.
        paths: where each output is.

    Raises:
        RowsError: naming the first op that lets padding in, with its line.
    """
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    known = set()
    for path, mixed in zip(paths, facts[output]):
        if isinstance(mixed, Mixed) and mixed.node not in known:
            known.add(mixed.node)
            told = f"{line_of(mixed.node)}: forward {mixed.why}"
            refuse(RowsError(f"{told}. It reaches {path}"))
    known |= vouched_for(gm)
    for node, mixed in facts.items():
        if isinstance(mixed, Mixed) and mixed.fails and not {node, mixed.node} & known:
            known.add(mixed.node)
            told = f"{line_of(node)}: forward {mixed.fails}"
            refuse(RowsError(f"{told}. No output is made of it, but it runs"))
    for node in filter(is_trusted, gm.graph.nodes):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def facts_of(
    gm: fx.GraphModule,
    leaves: Sequence[Leaf],
    constants: Mapping[str, torch.Tensor],
    text: Callable[[Any], str],
    known: Mapping[fx.Node, Any] | None = None,
    claims: Mapping[fx.Node, Any] | None = None,
) -> dict[fx.Node, Any]:
    """What is known of every value of a graph: the abstract run.

    Args:
        text: a size in T and R, as a person writes it.
        known: what is known of some nodes beforehand, when they are made.
        claims: what holds of other nodes, unless their own op mixes rows.

    Returns:
        by node, a `Kept` or a `Mixed`: of its value when it is made, and of what it writes then;
        by the output node, those of the results at the end.
    """
    with torch.device("cpu"):
        return _facts(gm, leaves, constants, text, known or {}, claims or {})


def _facts(
    gm: fx.GraphModule,
    leaves: Sequence[Leaf],
    constants: Mapping[str, torch.Tensor],
    text: Callable[[Any], str],
    known: Mapping[fx.Node, Any],
    claims: Mapping[fx.Node, Any],
) -> dict[fx.Node, Any]:
    found: dict[fx.Node, Any] = {}
    states: dict[fx.Node, Kept | Mixed] = {}
    views: dict[int, list[fx.Node]] = {}  # by the memory that they are in
    inputs = iter(leaves)
    tokens = _tokens(gm, leaves)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            kept = dataclasses.replace(_leaf(leaf := next(inputs)), held=_is_held(leaf, node))
            states[node] = of_leaf(kept, leaf, node.meta["val"], tokens)
        elif node.op == "get_attr":
            value = constants[node.name].cpu()
            states[node] = of_constant(Kept(value=value, held=is_finite(value)))
        elif node in known:
            states[node] = known[node]
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
            _rewrite(target, state, states, [view for view in others if view is not node])
    return found


def _is_held(leaf: Leaf, node: fx.Node) -> bool:
    """Weights: what is held, and donated values that no row of padding is written into."""
    if leaf.role is Role.DONATED:
        return not any(is_op(x) and op_name(x) in WRITES for x in node.users)
    return leaf.role is Role.HELD


def _tokens(gm: fx.GraphModule, leaves: Sequence[Leaf]) -> Any:
    """T as an expression; None if no leaf has T rows."""
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, leaf in zip(nodes, leaves):
        if leaf.buffer is not None and leaf.buffer.dims and leaf.buffer.dims[0].text == "T":
            return size_of(node.meta["val"].shape[0])
    return None


def is_trusted(node: fx.Node) -> bool:
    """Whether it is what `trust_rows` has made."""
    return bool(node.meta.get("custom", {}).get(_TRUSTED))


def as_vouched(gm: fx.GraphModule, facts: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """`facts`, where what `trust_rows` was told of a value holds of the value itself."""
    trusted = filter(is_trusted, gm.graph.nodes)
    return {**facts, **{node.args[0]: facts[node] for node in trusted}}


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
    if leaf.buffer is None or leaf.buffer.pad == "stride":
        return Kept({} if leaf.buffer is None else {0: OFFSETS})
    pad = torch.tensor(leaf.buffer.pad, dtype=getattr(torch, leaf.buffer.dtype))
    counts = not (pad.dtype.is_floating_point or pad.dtype.is_complex)
    names_a_row = counts and leaf.buffer.pad_given and float(leaf.buffer.pad) >= 0
    return Kept({0: pad}, said="pad") if names_a_row else Kept({0: pad}, unsaid=leaf.path)


def _result(node: fx.Node, states: Mapping[fx.Node, Any], text: Any) -> Kept | Mixed:
    if _is_inlined(node) and is_tensor(node):
        return _inlined(node, states)
    read = [] if reads_nothing(node.target) else map(states.get, node.all_input_nodes)
    mixed = next((s for s in read if isinstance(s, Mixed)), None)
    if mixed is not None and not is_trusted(node):
        return dataclasses.replace(mixed, fails=_failure(node, states, text))
    if node.target is operator.getitem:  # one of several results
        state = states[node.args[0]]  # type: ignore[index]
        call = OpCall(node, {}, states, text)
        kept = isinstance(state, Kept) and is_tensor(node)
        return bounded(call, dataclasses.replace(state, low=-math.inf)) if kept else state
    if is_size(node) or mixed is not None:
        return Kept(low=0, span=ANY) if is_trusted(node) else Kept()
    call = OpCall(node, named(node.target, node.args, node.kwargs), states, text)
    try:
        if any(states[target].window for target in written_by(node)):
            raise Mixes(WINDOW.format(call.name))
        _check_sizes(call)
        found = rule(call)
        if is_trusted(node):
            return dataclasses.replace(found, low=0, span=ANY)
        given = [states[x] for x in operands(node)]
        held = all(isinstance(x, Kept) and x.held for x in given)
        if given and held and keeps_finite(call):
            found = dataclasses.replace(found, held=True)
        return bounded(call, found) if is_tensor(node) else found
    except Mixes as error:
        fails = str(error) if error.fails else ""
        return (
            Kept() if node.meta.get("custom", {}).get(REFUSED) else Mixed(node, str(error), fails)
        )


def _failure(node: fx.Node, states: Mapping[fx.Node, Any], text: Any) -> str:
    """How an op may fail at padding that is in true rows already; "" if it does not."""
    if not is_op(node):
        return ""
    given = ((x, states[x]) for x in node.all_input_nodes)
    known = {x: state if isinstance(state, Kept) else Kept() for x, state in given}
    call = OpCall(node, named(node.target, node.args, node.kwargs), known, text)
    try:
        rule(call)
    except Mixes as error:
        return str(error) if error.fails else ""
    return ""


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
            return states[source]  # type: ignore[no-any-return]
    return Kept({dim: torch.tensor(0) for dim in moving_dims(node)})


def unfinished(node: fx.Node) -> bool:
    """Whether it is a step on the way of a primitive's plain form, of which nothing is claimed."""
    return "inlined" in node.meta.get("custom", {})


def _is_inlined(node: fx.Node) -> bool:
    return any(mark in node.meta.get("custom", {}) for mark in ("inlined", "inlined_end"))


def _check_sizes(call: OpCall) -> None:
    for x in tree_leaves(call.node.meta.get("val")):
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


def _rewrite(
    target: fx.Node, state: Kept | Mixed, states: dict[fx.Node, Any], views: Iterable[fx.Node]
) -> None:
    """After a write: every view of the memory has padding in it, or padding that is not known."""
    for node in views:
        if node is not target:
            if isinstance(state, Mixed):
                states[node] = state
            elif isinstance(known := states[node], Kept):
                states[node] = Kept(window=known.window)
    states[target] = state


def trust_rows(x: torch.Tensor) -> torch.Tensor:
    """Say of `x` that each of its true rows depends on true rows alone, whatever padding holds.

    For what no rule can see, such as rows sorted by expert and put back in order. Of an index it
    also says that it is not negative, and that what padding names is there. No trace can check it:
    where it is not so, results are wrong with padding; `fg.check(..., rehearse=True)` tries it.
    Costs nothing: no op is left of it.
    """
    with fx.traceback.annotate({_TRUSTED: True}):
        return torch.ops.aten.alias.default(x)  # type: ignore[no-any-return]
