"""How results become `forward`'s whole output again.

Each donated argument comes back as the very container that was passed in, since its leaves were
updated in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fngraph.core import trees
from fngraph.fx.arguments import Arguments
from fngraph.fx.leaves import Role

Assemble = Callable[[Sequence[torch.Tensor], Sequence[Any]], Any]


def assembler(
    args: Arguments, out_tree: Any, returns: Mapping[int, int], called: Sequence[int]
) -> Assemble:
    """A function that makes `forward`'s whole output.

    It takes the outputs that are not donated, in order, and the arguments of the call, among them
    the donated containers.

    Args:
        called: the parameters that a call passes, in order.
    """
    places: dict[int, int] = {}  # first output leaf of a container to its place in the call
    for position in args.signature.positions(Role.DONATED):
        if args.treedefs[position].num_leaves:
            places[returns[args.span(position).start]] = called.index(position)
    whole = places.get(0)
    if whole is not None and args.treedefs[called[whole]] == out_tree:
        return lambda results, given: given[whole]

    parts: list[tuple[int | None, Any]] = []  # (place, structure) of each child of the output
    start = 0
    for child in trees.children(out_tree) or [out_tree]:
        parts.append((places.get(start) if child.num_leaves else None, child))
        start += child.num_leaves
    if out_tree.type is tuple and all(p is not None or c.is_leaf() for p, c in parts):
        order = [(p, sum(p is None for p, _ in parts[:i])) for i, (p, _) in enumerate(parts)]
        at = order[-1][0]
        if len(order) == 2 and order[0][0] is None and at is not None:  # (logits, cache)
            return lambda results, given: (results[0], given[at])
        return lambda results, given: tuple(
            [results[i] if p is None else given[p] for p, i in order]
        )

    def assemble(results: Sequence[torch.Tensor], given: Sequence[Any]) -> Any:
        rest = iter(results)
        values = [
            trees.unflatten(child, [next(rest) for _ in range(child.num_leaves)])
            if place is None
            else given[place]
            for place, child in parts
        ]
        return trees.unflatten_one_level(out_tree, values)

    return assemble
