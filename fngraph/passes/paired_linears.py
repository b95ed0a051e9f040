"""Linear layers with a sum and its norm between them: fngraph::paired_linears.

    total = x @ w.t() + residual;  fused_linear(total, weights, norm)      one op, two results

of the ops that `linears` has made. It changes nothing for few rows. For more, the norm is made
where the sum is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fngraph.passes.pattern import insert, writes_between
from fngraph.passes.running.checks import Rewritten
from fngraph.torch_facts.memory import storage_key

_LINEAR = torch.ops.fngraph.fused_linear.default
_PAIR = torch.ops.fngraph.paired_linears.default


def pair_linears(graph: fx.Graph) -> Rewritten:
    """Each sum with the first linear layer of its norm that can be made where the sum is."""
    matches = 0
    for second in list(graph.nodes):
        if second.target is not _LINEAR or not _is_sum(first := second.args[0]):
            continue
        _, weights, norm, more, eps, centred, gated, held, together = second.args
        if norm is None or more is not None or not held or _is_late(first, second):
            continue
        args = (first.args[0], first.args[1][0], first.args[3], norm, weights, eps, centred, gated,
                together)  # fmt: skip
        pair = insert(graph, first, _PAIR, args)
        pair.meta["val"] = tuple(old.meta["val"] for old in (first, second))
        for i, old in enumerate((first, second)):
            with graph.inserting_before(first):
                result = graph.call_function(operator.getitem, (pair, i))
            result.meta = dict(old.meta)
            old.replace_all_uses_with(result)
        graph.erase_node(second)
        graph.erase_node(first)
        matches += 1
    return Rewritten(graph, matches)


def _is_sum(node: Any) -> bool:
    """Whether it is a product by one held weight, and a sum."""
    if not isinstance(node, fx.Node) or node.target is not _LINEAR:
        return False
    _, weights, norm, more, _, _, gated, held, _ = node.args
    return len(weights) == 1 and norm is None and more is not None and not gated and bool(held)  # type: ignore[arg-type]


def _is_late(first: fx.Node, second: fx.Node) -> bool:
    """Whether the second layer reads what is not there yet at the first, or is another by then."""
    _, weights, norm, *_ = second.args
    read: list[Any] = [norm, *weights]  # type: ignore[misc]
    if any(not x < first for x in read):
        return True
    memory = {storage_key(x.meta["val"]) for x in (first, *read)}
    return writes_between(first.next, second, memory)
