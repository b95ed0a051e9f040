"""Rounding to fp8: in one op with the norm or gate before it, and once for all that reads a value.

    add_rms_norm(x, y, ...), quantize_fp8_rows(norm)  ->  total, values, scales in one launch

A product in fp8 rounds its input first, by a scale that is known before or by one a row. What reads
a norm does it alike: q, k and v, gate and up. So the norm itself is read by nobody, and one op
gives what is rounded. Where somebody does read it (a router, a product that was not quantised) the
norm stays, and rounding is an op behind it.

Known scales of several products are leaves of their own. They are one where they were one memory
when they were traced, which the op looks at whenever it is recorded or called.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core.text import count
from fngraph.fx.leaves import Role
from fngraph.fx.nodes import line_of, op_name
from fngraph.passes.norms import norm_at, roots, sum_and_norm_at
from fngraph.passes.pattern import Found, insert, is_written_between, replace, writes_any
from fngraph.passes.running.checks import Rewritten
from fngraph.passes.silu_mul import gate_at
from fngraph.torch_facts.memory import storage_key

_PRODUCTS = ("fngraph::scaled_linear", "fngraph::scaled_linear_side_by_side")
KNOWN, BY_ROW = "fngraph::quantize_fp8", "fngraph::quantize_fp8_rows"


def fuse_add_rms_norm_fp8(graph: fx.Graph) -> Rewritten:
    """Norms of sums that are read rounded alone; the sum is a result too."""
    return _fuse(graph, roots(graph), sum_and_norm_at, "add_rms_norm_fp8", "total")


def fuse_rms_norm_fp8(graph: fx.Graph) -> Rewritten:
    """Norms of anything else, likewise."""
    return _fuse(graph, roots(graph), norm_at, "rms_norm_fp8")


def fuse_silu_mul_fp8(graph: fx.Graph) -> Rewritten:
    """Gates, likewise."""
    return _fuse(graph, list(graph.nodes), gate_at, "silu_mul_fp8")


def quantize_once(graph: fx.Graph) -> Rewritten:
    """What is rounded in one way several times."""
    ways: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        if op_name(node) in (KNOWN, BY_ROW):
            ways.setdefault((node.target, *node.args), []).append(node)
    matches = 0
    for readers in ways.values():
        if len(readers) > 1 and may_be_one(graph, readers):
            make_one(graph, readers)
            matches += 1
    return Rewritten(graph, matches)


def hold_weights(graph: fx.Graph) -> Rewritten:
    """Products by held leaves: their kernels may read these before the kernel ahead has ended."""
    matches = 0
    for node in graph.nodes:
        given = node.args[:5]
        if op_name(node) in _PRODUCTS and all(map(is_held, _nodes(given[2:4]))):
            node.args = (*given, True)
            matches += 1
    return Rewritten(graph, matches)


def _nodes(given: Sequence[Any]) -> list[fx.Node]:
    return [x for one in given for x in (one if isinstance(one, Sequence) else (one,))]


def is_held(node: Any) -> bool:
    """Whether a node is a held leaf, which nothing writes."""
    leaf = node.meta.get("leaf")
    return leaf is not None and leaf.role is Role.HELD


def _fuse(
    graph: fx.Graph,
    nodes: Iterable[fx.Node],
    find: Callable[[fx.Node], tuple[Found, tuple[Any, ...]] | None],
    name: str,
    *labels: str,
) -> Rewritten:
    """Put ops `name` and `name_rows` in the place of what `find` finds and of what rounds it.

    Args:
        labels: of what is found and is a result of these ops too.
    """
    matches = 0
    apart: list[str] = []
    for made in nodes:
        readers = sorted(made.users)
        kinds = set(map(op_name, readers))
        by_row = kinds == {BY_ROW}
        if not by_row and kinds != {KNOWN}:
            continue
        one = find(made)
        if one is None or any(reader.args[0] is not made for reader in readers):
            continue
        found, args = one
        scales: list[Any] = [] if by_row else list(dict.fromkeys(r.args[1] for r in readers))
        if not are_one(scales):
            apart.append(unlike(made, scales))
            continue
        first = found[labels[0]] if labels else readers[0]
        ahead = all(x < first for x in (*args, *scales) if isinstance(x, fx.Node))
        inside = tuple(sorted({*found.inside, *readers}))
        if ahead and not is_written_between(inside) and may_be_one(graph, readers):
            ends = dict(zip(("values", "scales"), make_one(graph, readers)))
            rounded = dataclasses.replace(
                found,
                values={**found.values, **ends},
                inside=tuple(sorted({*found.inside, readers[0], *ends.values()})),
            )
            op = getattr(torch.ops.fngraph, f"{name}_rows" if by_row else name).default
            given = args if by_row else (*args, scales)
            matches += replace(graph, rounded, op, given, *labels, *ends)
    return Rewritten(graph, matches, notes_of(apart))


def notes_of(apart: Sequence[str]) -> tuple[str, ...]:
    """What to say of values that several known scales round, each a line and its scales."""
    if not apart:
        return ()
    more = f", and {count(len(apart) - 1, 'other place')}" if len(apart) > 1 else ""
    advice = "Where they are equal, lay them as one: weights = fg.ops.lay_side_by_side(weights)"
    note = f"{apart[0]}{more}: scales of one input are tensors of their own, so each rounds it. "
    return (note + advice,)


def unlike(made: fx.Node, scales: Sequence[Any]) -> str:
    """The line of a value, and the scales by which it is rounded."""
    return f"{line_of(made)}: {', '.join(map(_path, scales))}"


def _path(scale: Any) -> str:
    leaf = scale.meta.get("leaf")
    return str(scale) if leaf is None else leaf.path


def are_one(scales: Sequence[Any]) -> bool:
    """Whether these are one value, or held leaves of one memory."""
    if len(scales) < 2:
        return True
    lies = {scale.meta["leaf"].lies if is_held(scale) else None for scale in scales}
    return len(lies) == 1 and None not in lies


def may_be_one(graph: fx.Graph, readers: Sequence[fx.Node]) -> bool:
    """Whether one may stand for all: what they read is the same at each, and nobody can tell that
    their results are the same memory."""
    if len(readers) == 1:
        return True
    if is_written_between(readers):
        return False
    made = {storage_key(x) for reader in readers for x in _values(reader)}
    if any(storage_key(n.meta["val"]) in made for n in graph.output_node().all_input_nodes):
        return False
    return not any(writes_any(node, made) for node in graph.nodes)


def _values(reader: fx.Node) -> Sequence[torch.Tensor]:
    value = reader.meta["val"]
    return value if op_name(reader) == BY_ROW else (value,)


def make_one(graph: fx.Graph, readers: Sequence[fx.Node]) -> list[fx.Node]:
    """Let all that reads one of these read the first; its results."""
    first, *others = readers
    if op_name(first) == KNOWN:
        for other in others:
            other.replace_all_uses_with(first)
            graph.erase_node(other)
        return [first]
    items = [insert(graph, first.next, operator.getitem, (first, i)) for i in range(2)]
    for item, value in zip(items, first.meta["val"]):
        item.meta = {key: x for key, x in first.meta.items() if key != "val"} | {"val": value}
    for reader in readers:
        for old in [user for user in reader.users if user not in items]:
            old.replace_all_uses_with(items[old.args[1]])  # type: ignore[index]
            graph.erase_node(old)
    for other in others:
        graph.erase_node(other)
    return items
