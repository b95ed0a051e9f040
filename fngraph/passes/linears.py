"""Linear layers with what is around them: fngraph::fused_linear.

    norm(x) @ [w_q, w_k, w_v].t()                  one op, whose results are slices of one
    silu(norm(x) @ w_gate.t()) * (norm(x) @ w_up.t())
    x @ w_o.t() + residual

It is for decoding, where each of these is one launch that reads weights once; what a prefill gains
is little. Weights are held leaves, read where they are: they need not lie side by side, though more
rows than the kernel takes are one product only where they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import is_tensor
from fngraph.ops.fused_linear import MOST_WEIGHTS
from fngraph.passes.norms import is_norm, norm_of
from fngraph.passes.pattern import (
    Found,
    call,
    dtype_of,
    insert,
    is_dense,
    match,
    name,
    put,
    sizes,
    writes_between,
)
from fngraph.passes.running.checks import Rewritten
from fngraph.passes.side_by_side import follows, given_of, put_for, why_not_one
from fngraph.torch_facts.memory import storage_key

aten = torch.ops.aten
_OP = torch.ops.fngraph.fused_linear.default
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _product(weight: str, label: str) -> Any:
    return call(aten.mm, name("x"), call(aten.t, name(weight)), label=label)


_GATE = call(aten.mul, call(aten.silu, _product("a", "one")), _product("b", "two"))
_SUM = call(aten.add, _product("a", "one"), name("more"))
_NORM = norm_of(name("x"))


def fuse_linears(graph: fx.Graph) -> Rewritten:
    """Gates, then sums, then what is left of one input; each takes the norm before it along."""
    made = [*_gates(graph), *_sums(graph), *_parallel(graph)]
    for node in made:
        _take_norm(graph, node)
    return Rewritten(graph, len(made))


def _gates(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in list(graph.nodes):
        found = match(_GATE, node) if node.target is aten.mul.Tensor else None
        if found is None or not _is_ours(found["one"], found["two"]):
            continue
        kinds = {dtype_of(node), dtype_of(found["one"]), dtype_of(found["two"])}
        alike = sizes(found["one"]) == sizes(found["two"]) == sizes(node)
        if alike and len(kinds) == 1:  # and dense, as products are
            weights = [found["a"], found["b"]]
            yield _put(
                graph,
                found,
                (found["x"], weights, None, None, 0.0, False, True, True, lie_together(weights)),
            )


def _sums(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in list(graph.nodes):
        found = match(_SUM, node) if node.target is aten.add.Tensor else None
        if found is None or not _is_ours(found["one"]) or not isinstance(found["more"], fx.Node):
            continue
        more = found["more"]
        alike = sizes(more) == sizes(node) == sizes(found["one"])
        kinds = {dtype_of(more), dtype_of(node), dtype_of(found["one"])}
        if alike and len(kinds) == 1 and is_dense(node):
            args = (found["x"], [found["a"]], None, more, 0.0, False, False, True, False)
            yield _put(graph, found, args)


def _put(graph: fx.Graph, found: Found, args: tuple[Any, ...]) -> fx.Node:
    root = found.inside[-1]
    new = insert(graph, root, _OP, args)
    new.meta["val"] = root.meta["val"]
    put(graph, found, new)
    return new


def _parallel(graph: fx.Graph) -> Iterator[fx.Node]:
    """Other products by their input; several of them are slices of one result."""
    inputs: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is aten.mm.default and _is_ours(node):
            inputs.setdefault(node.args[0], []).append(node)
    tried: dict[Any, bool] = {}
    for products in inputs.values():
        while products:
            run, products = products[:MOST_WEIGHTS], products[MOST_WEIGHTS:]
            while len(run) > 1 and why_not_one(graph, run, tried) is not None:
                products.insert(0, run.pop())
            yield _merged(graph, run)


def _merged(graph: fx.Graph, run: Sequence[fx.Node]) -> fx.Node:
    first = min(run)
    weights: list[Any] = [_weight(node) for node in run]
    args = (first.args[0], weights, None, None, 0.0, False, False, True, lie_together(weights))
    new = insert(graph, first, _OP, args)
    put_for(graph, new, run)
    return new


def _weight(product: fx.Node) -> fx.Node | None:
    """A product's weight, if it is a held leaf and there is no bias."""
    given = given_of(product)
    return given.weight if given is not None and product.target is aten.mm.default else None


def lie_together(weights: Sequence[fx.Node]) -> bool:
    """Whether there are several, each right behind the one before."""
    leaves = [x.meta["leaf"] for x in weights]
    return len(leaves) > 1 and all(map(follows, leaves, leaves[1:]))


def _is_ours(*products: fx.Node) -> bool:
    """Whether these are products by held weights of the input's dtype."""
    for node in products:
        weight = _weight(node)
        if weight is None or dtype_of(node) not in _DTYPES:
            return False
        if not dtype_of(weight) == dtype_of(node) == dtype_of(node.args[0]):
            return False
    return True


def _take_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Let the op compute the norm that its input is, if nobody else reads that."""
    found = norm_before(node)
    if found is None:
        return
    _, weights, _, more, _, _, gated, *rest = node.args
    node.args = (
        found["x"], weights, found["weight"], more, found["eps"], "centred" in found.values, gated,
        *rest,
    )  # fmt: skip
    drop(graph, found)


def norm_before(node: fx.Node) -> Found | None:
    """The norm that an op's first argument is, if nobody else reads that, and what the norm reads
    is the same where the op is."""
    normed: Any = node.args[0]
    if len(normed.users) > 1 or not is_tensor(normed):
        return None
    found = match(_NORM, normed)
    if found is None or not is_norm(found, found["x"], normed):
        return None
    read = {storage_key(found[key].meta["val"]) for key in ("x", "weight")}
    return None if writes_between(normed.next, node, read) else found


def drop(graph: fx.Graph, found: Found) -> None:
    """Take out what nobody reads any more."""
    for inside in reversed(found.inside):
        if not inside.users:
            graph.erase_node(inside)
