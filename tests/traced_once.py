"""A trace kept for several tests: modes, sizes and counts of adapters are chosen after it, and
passes after the run of `forward`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from torch import fx

Kept = dict[Any, Any]


@contextlib.contextmanager
def traced_once(kept: Kept, label: Any) -> Iterator[None]:
    """Within, the n-th trace is the n-th one that was made under `label`, if there is one.

    Args:
        label: stands for the functions that are traced, in order.
    """
    module: Any = importlib.import_module("fngraph.graphified")
    trace, made, numbers = module.trace_function, kept.setdefault(label, []), itertools.count()

    def once(args: Any, options: Any, limits: Any, *more: Any) -> Any:
        i = next(numbers)
        if i == len(made):
            made.append(trace(args, options, limits, *more))
        old = made[i]
        given = args.leaves, args.treedefs, limits
        assert given == (old.args.leaves, old.args.treedefs, old.limits), f"{label} is not alike"
        return dataclasses.replace(old, args=args, options=options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "trace_function", once)
        yield


@contextlib.contextmanager
def graph_once(kept: Kept, label: Any) -> Iterator[None]:
    """Within, `forward` runs over fakes once for each label; what follows gets a copy each time.

    Args:
        label: stands for the function, and for the arguments that it is traced for.
    """
    module: Any = importlib.import_module("fngraph.tracing")
    trace = module.trace

    def once(flat_fn: Any, leaves: Any, limits: Any, found: Any, refuse: Any, *more: Any) -> Any:
        if label not in kept:
            graph = trace(flat_fn, leaves, limits, found, refuse, *more)
            kept[label] = graph, (leaves, limits), found["tree"], refuse.symbols
        graph, given, found["tree"], refuse.symbols = kept[label]
        assert given == (leaves, limits), f"{label} is not alike"
        copy = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        results = copy.graph_copy(graph.gm.graph, env)
        (last,) = graph.gm.graph.find_nodes(op="output")
        copy.output(results).meta = dict(last.meta)
        return dataclasses.replace(graph, gm=fx.GraphModule(graph.gm, copy))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "trace", once)
        yield
