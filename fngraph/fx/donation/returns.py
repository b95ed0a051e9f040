"""Which output leaf is the new value of which donated leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fngraph.core import trees
from fngraph.errors import DonationError
from fngraph.fx.arguments import Arguments
from fngraph.fx.leaves import Role, same_place
from fngraph.fx.nodes import storages_written
from fngraph.fx.tracing.refusals import Refusals
from fngraph.torch_facts.memory import storage_key


def match_donated(
    args: Arguments,
    outputs: Sequence[fx.Node],
    out_tree: Any,
    inputs: Sequence[fx.Node],
    refuse: Refusals,
) -> dict[int, int]:
    """For each donated leaf, the index of the output leaf that is its new value.

    A donated argument comes back as the whole output or as one child of it with equal structure.

    Raises:
        DonationError: it does not, or more than one child could be meant.
    """
    parts = [(out_tree, 0)]
    start = 0
    for child in trees.children(out_tree):
        parts.append((child, start))
        start += child.num_leaves
    taken: set[int] = set()
    returns: dict[int, int] = {}
    whole = not trees.children(out_tree)
    for i in args.signature.positions(Role.DONATED):
        leaves = range(len(args.leaves))[args.span(i)]
        fits = [s for t, s in parts if t == args.treedefs[i] and s not in taken]
        rivals = sum(
            t == args.treedefs[i]
            for j, t in enumerate(args.treedefs)
            if j >= i and args.signature.roles[j] is Role.DONATED
        )
        olds = [inputs[k].meta["val"] for k in leaves]
        if whole and fits and not _narrow(fits, olds, outputs):  # a result alone: it was forgotten
            fits = []
        if len(fits) > rivals:
            fits = _narrow(fits, olds, outputs)
        if not fits:
            refuse(_missing(args, i, out_tree, olds, outputs))
            continue
        if len(fits) > rivals:
            refuse(
                DonationError(
                    f"{len(fits)} parts of the output have the structure of the donated argument "
                    f"{args.signature.names[i]!r}, so which one is its new value is not known (the "
                    "old value that is returned too is one of them). Keep it in a container of its "
                    'own: donate {"state": x}, or a one-field fg.struct, and return that'
                )
            )
        taken.add(fits[0])
        returns.update({k: fits[0] + j for j, k in enumerate(leaves)})
    return returns


def _narrow(fits: list[int], olds: list[Any], outputs: Sequence[fx.Node]) -> list[int]:
    """Candidates whose leaves have the donated shapes and dtypes; of these, the buffer itself, if
    it was written: else the old value is returned as a result, and the new one is another."""
    news = {s: [outputs[s + j].meta["val"] for j in range(len(olds))] for s in fits}
    alike = [
        s for s in fits
        if all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(olds, news[s]))
    ]  # fmt: skip
    same = [s for s in alike if all(same_place(a, b) for a, b in zip(olds, news[s]))]
    nodes = outputs[0].graph.nodes if outputs else ()
    written = storages_written(nodes).intersection(map(storage_key, olds))
    return same if same and written else alike


def _missing(
    args: Arguments, i: int, out_tree: Any, olds: Sequence[Any], outputs: Sequence[fx.Node]
) -> DonationError:
    name, want = args.signature.names[i], args.treedefs[i]
    if not trees.children(want):  # one tensor
        paths = trees.paths(out_tree, "output")
        results = [f"{p}: {_brief(x.meta['val'])}" for p, x in zip(paths, outputs)]
        return DonationError(
            f"the donated argument {name!r} does not come back: it is {_brief(olds[0])}, and no "
            f"result is: {', '.join(results) or 'there is none'}. Return its new value in that "
            f"shape and dtype: return ..., {name}"
        )
    children = trees.children(out_tree) or [out_tree]
    nearest = max(
        children,
        key=lambda t: len(set(trees.paths(t, name)) & set(trees.paths(want, name))),
    )
    lines = "\n".join(trees.differences(want, nearest, name))
    return DonationError(
        f"the donated argument {name!r} does not come back with its own structure:\n{lines}\n"
        f"Return it updated: return ..., {name}"
    )


def _brief(tensor: Any) -> str:
    sizes = ", ".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"
