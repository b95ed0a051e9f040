"""Copies at the end: new values that were not made in their buffers are put there last of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fngraph.fx.leaves import storage_key

aten = torch.ops.aten


def append_copies(
    gm: fx.GraphModule,
    inputs: Sequence[fx.Node],
    output: fx.Node,
    copies: Mapping[int, int],
    returned: set[int],
) -> None:
    """Clone what still reads an old value, copy the new ones in, return the buffers themselves.

    A buffer that another one still needs is written after it, so that `a, b = new, a` clones
    nothing; a swap has no such order, and one side is cloned.
    """
    results = list(output.args[0])  # type: ignore[arg-type]
    buffer = {k: storage_key(inputs[k].meta["val"]) for k in copies}

    def cloned(node: fx.Node) -> fx.Node:
        clone = gm.graph.call_function(aten.clone.default, (node,))
        clone.meta["val"] = torch.empty_like(node.meta["val"])
        return clone

    with gm.graph.inserting_before(output):
        for out, node in enumerate(results):
            if out not in returned and storage_key(node.meta["val"]) in buffer.values():
                results[out] = cloned(node)
        sources = {k: results[out] for k, out in copies.items()}
        while sources:
            needed = {storage_key(node.meta["val"]) for node in sources.values()}
            k = next((k for k in sources if buffer[k] not in needed), None)
            if k is None:
                k = next(iter(sources))
                for j, node in sources.items():
                    if storage_key(node.meta["val"]) == buffer[k]:
                        sources[j] = cloned(node)
            copy = gm.graph.call_function(aten.copy_.default, (inputs[k], sources.pop(k)))
            copy.meta["val"] = inputs[k].meta["val"]
            results[copies[k]] = inputs[k]
    output.args = (results,)
    gm.graph.lint()
