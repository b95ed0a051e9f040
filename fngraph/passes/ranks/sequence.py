"""Sequence parallelism: norms of a process's own rows alone, and what is summed stays with them.

    total = x + all_reduce(h);  norm(total)
        ->  total, normed = fngraph::reduce_scatter_rms_norm(h, x, weight, ...)     own rows
            fngraph::gather_rows(normed)

The total goes on to the next such sum as it is, of which each process needs its own rows; where
something else reads it, it is summed over all. As much is sent as for a sum, and each process adds
and norms an n-th of it. Then products go at once with what is behind or before them:

    reduce_scatter_rms_norm(h @ w.t(), ...)          ->  fngraph::matmul_reduce_scatter_rms_norm
    gather_rows(normed) @ a.t(), ... @ b.t()         ->  fngraph::all_gather_matmul
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import is_tensor, mutates
from fngraph.passes.norms import roots, sum_and_norm_at
from fngraph.passes.pattern import dtype_of, insert, is_written_between, replace, writes_any
from fngraph.passes.ranks.norms import has_collectives, own_values, reduced_norm, unmatched
from fngraph.passes.running.checks import Rewritten
from fngraph.passes.side_by_side import put_for, runs_of
from fngraph.torch_facts.memory import storage_key

aten = torch.ops.aten
_OPS = torch.ops.fngraph


def share_out_rows(graph: fx.Graph) -> Rewritten:
    """Norms of sums of what was summed over processes, of own rows."""
    if not has_collectives(graph):
        return Rewritten(graph, 0)
    sums, own = list[fx.Node](), own_values(graph)
    for node in roots(graph):
        one = sum_and_norm_at(node, reduced_norm())
        if one is None or one[0]["y"] in own:
            continue
        found, args = one
        who, known = (found["axis"], found["group"]), set(_scatters(graph))
        op = _OPS.reduce_scatter_rms_norm.default
        if replace(graph, found, op, (*args, *who), "total", "normed"):
            (new,) = set(_scatters(graph)) - known
            total, normed = sorted(new.users)  # as they stand in the graph
            sums.append(total)
            _put_behind(graph, normed, _OPS.gather_rows.default, (normed, *who), normed.users)
    writers = [node for node in graph.nodes if mutates(node)]
    for total in sums:
        _make_whole(graph, total, writers)
    before = _OPS.all_reduce_rms_norm.default
    if not sums and any(node.target is before for node in graph.nodes):
        return Rewritten(graph, 0, ("'all_reduce_rms_norm' has its places: pass this before it",))
    return Rewritten(graph, len(sums), unmatched(graph, len(sums)))


def _scatters(graph: fx.Graph) -> Iterator[fx.Node]:
    op = _OPS.reduce_scatter_rms_norm.default
    return (node for node in graph.nodes if node.target is op)


def _put_behind(
    graph: fx.Graph, x: fx.Node, op: Any, args: tuple[Any, ...], users: Iterable[fx.Node]
) -> None:
    """Let users of a value read what an op makes of it."""
    users = list(users)
    with graph.inserting_after(x):
        new = graph.call_function(op, args)
    new.meta = dict(x.meta)
    for user in users:
        user.replace_input_with(x, new)


def _make_whole(graph: fx.Graph, total: fx.Node, writers: Sequence[fx.Node]) -> None:
    """Give all rows of a total to those that need them; where they choose some, these alone.

    Args:
        writers: what writes memory, in the graph.
    """
    scatter: Any = total.args[0]
    memory = {storage_key(total.meta["val"])}
    written = any(node > total and writes_any(node, memory) for node in writers)  # by a view too
    others = [user for user in total.users if written or not _adds_own_rows(user, total)]
    choose = [user for user in others if _chooses_rows(user, total)]
    whole = {total: others} if len(choose) < len(others) else {x: list(x.users) for x in choose}
    for x, users in whole.items():
        if users:
            _put_behind(graph, x, _OPS.all_reduce.default, (x, "sum", *scatter.args[-2:]), users)


def _adds_own_rows(user: fx.Node, total: fx.Node) -> bool:
    """Whether it is the next sum over processes, to which this is added."""
    reads = [i for i, x in enumerate(user.args) if x is total]
    return user.target is _OPS.reduce_scatter_rms_norm.default and reads == [1]


def _chooses_rows(user: fx.Node, total: fx.Node) -> bool:
    """Whether it is `total[ids]`."""
    if user.target is not aten.index.Tensor or user.args[0] is not total:
        return False
    indices: Any = user.args[1]
    return len(indices) == 1 and is_tensor(indices[0]) and dtype_of(indices[0]) == torch.int64


def matmul_and_scatter(graph: fx.Graph) -> Rewritten:
    """Products that only a sum of own rows reads."""
    matches = 0
    for node in list(graph.nodes) if has_collectives(graph) else ():
        if node.target is not _OPS.reduce_scatter_rms_norm.default:
            continue
        product = node.args[0]
        weight = _weight(product)
        if weight is None or len(product.users) > 1 or product in node.args[1:]:
            continue
        if is_written_between((product, node)):
            continue
        args = (product.args[0], weight, *node.args[1:])
        new = insert(graph, node, _OPS.matmul_reduce_scatter_rms_norm.default, args)
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        graph.erase_node(product)
        matches += 1
    return Rewritten(graph, matches, _notes(graph, matches))


def gather_and_matmul(graph: fx.Graph) -> Rewritten:
    """Products of what was gathered, if nothing else reads it; one for weights side by side."""
    matches, tried = 0, dict[Any, bool]()
    for node in list(graph.nodes) if has_collectives(graph) else ():
        if node.target is not _OPS.gather_rows.default:
            continue
        products = sorted(node.users)
        weights = [_weight(one) for one in products]
        if not products or None in weights:
            continue
        if any(one.args[0] is not node for one in products) or is_written_between(
            (node, *products)
        ):
            continue
        (x, *who), first = node.args, products[0]
        runs = runs_of(graph, products, tried)
        weights = [_weight(one) for run in runs for one in run]
        args = (x, weights, [len(run) for run in runs], *who)
        new = insert(graph, first, _OPS.all_gather_matmul.default, args)
        new.meta["val"] = [one[0].meta["val"] for one in runs]
        made = [insert(graph, first, operator.getitem, (new, i)) for i in range(len(runs))]
        for one, run in zip(made, runs):
            put_for(graph, one, run)
        graph.erase_node(node)
        matches += 1
    return Rewritten(graph, matches, _notes(graph, matches))


def _weight(product: Any) -> Any:
    """The argument of forward by which something is multiplied, x @ w.t(); None: it is no such."""
    if not is_tensor(product) or product.target is not aten.mm.default:
        return None
    turned = product.args[1]
    if turned.target is not aten.t.default or turned.args[0].op != "placeholder":
        return None
    return turned.args[0]


def _notes(graph: fx.Graph, matches: int) -> tuple[str, ...]:
    """Why it matched nowhere, or will not do what it is for."""
    if matches and next(iter(graph.nodes)).meta["val"].device.type != "cuda":
        return ("on the CPU product and collective run one after the other",)
    if not matches and has_collectives(graph):
        why = "it is for what 'sequence_parallel' leaves: pass that before it; and for products"
        return (f"{why} by arguments of forward, before 'linears' and 'side_by_side' merge them",)
    return ()
