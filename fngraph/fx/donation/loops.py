"""Loops in place: a donated buffer is a loop's carry, and a turn updates the carry where it lies.

    params = fg.fori_loop(0, 10, lambda i, p: p - lr * g(p), params)      # params is donated

A loop's carry has a buffer of its own, into which what it begins with is copied. Where nothing else
needs that, it is the buffer: the carry has its *seat* there, and the loop writes it.
"""

from __future__ import annotations

from torch import fx

from fngraph.fx.donation.inplace import make_in_place
from fngraph.fx.donation.liveness import Memory
from fngraph.fx.leaves import same_place
from fngraph.fx.loops.node import Loop
from fngraph.fx.nodes import inputs_of, results_of


def settle(gm: fx.GraphModule) -> None:
    """In the functions of a graph's loops, compute each new carry in the buffer of the old one, if
    nothing is lost by it. What cannot be is copied there at a turn's end."""
    for node in gm.graph.nodes:
        if not isinstance(node.target, Loop):
            continue
        loop = node.target
        for inner in loop.graphs:
            settle(inner)
        if loop.kind == "cond":
            continue
        body = loop.graphs[-1]
        inputs, memory = inputs_of(body.graph), Memory(body.graph)
        for i in range(loop.state):
            new, old = results_of(body.graph)[i], inputs[i]  # the last one may have changed it
            if not same_place(old.meta["val"], new.meta["val"]):
                make_in_place(new, old, memory)
        body.graph.lint()
        body.recompile()
