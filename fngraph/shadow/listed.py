"""The ops of bare `forward`, listed as it runs, beside those of its trace.

Python that reads what is no argument (a global, a clock, a file) gave the trace one value forever.
An op of the trace is found in the list by its name and the user's line, in order; the first whose
result is another one is where `forward` and its trace part.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import fx

from fngraph.calls import PrimitiveCall
from fngraph.core.where import user_line
from fngraph.fx.generators import with_generators
from fngraph.fx.loops.running import run as run_loop
from fngraph.fx.nodes import (
    computed,
    given_to,
    inputs_of,
    is_loop,
    is_op,
    line_of,
    name_of,
    results_of,
)
from fngraph.fx.rows.rehearsal import is_unwritten
from fngraph.shadow.nodes import difference
from fngraph.shadow.saved import Ran, Saved, drawn_from, held_of, run_bare
from fngraph.step.keys import Keys
from fngraph.torch_facts.names import TorchDispatchMode, tree_leaves

_OF_NO_MATTER = {"aten.detach", "aten.view", "aten.alias", "aten.clone", "aten.copy"}
_Op = tuple[str, str, Any]  # name, line, first result


class _Listing(TorchDispatchMode):
    """Lists each op with a copy of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops.append((str(func), user_line(), _first(result)))
        return result


def _first(result: Any) -> Any:
    tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    return tensors[0].detach().clone() if tensors else None


def run_traced(keys: Keys, saved: Saved) -> tuple[list[_Op], Ran]:
    """The program op by op on the batch as it is, without padding: its ops, and what it gives."""
    found: list[_Op] = []
    return found, _traced(keys, saved, found)


def first_not_traced(keys: Keys, saved: Saved, traced: list[_Op]) -> tuple[str, str, str] | None:
    """The first op of the trace that gives something else as `forward` runs now: its name, the
    user's line, and what differs; None: all that can be found in the list give the same.

    Args:
        traced: the ops of the program, from `run_traced`.
    """
    listing = _Listing()
    run_bare(keys, saved, listing)
    places = [(_plain(name), line) for name, line, _ in listing.ops]
    at = 0
    for name, line, got in traced:
        try:
            found = places.index((_plain(name), line), at)
        except ValueError:
            continue
        at = found + 1
        want = listing.ops[found][2]
        if got is None or want is None:
            continue
        if (what := difference(got, want, {})) is not None:
            text = f"forward gives something else there than when it was traced: {what[0]}"
            return listing.ops[found][0], line, text
    if any(keys.executable.matches.values()):  # passes have put ops into the places of others
        return None
    return _in_one_alone([op[:2] for op in listing.ops], [op[:2] for op in traced])


def _in_one_alone(
    runs: list[tuple[str, str]], traced: list[tuple[str, str]]
) -> tuple[str, str, str] | None:
    """The first op that `forward` runs and its trace does not have at that line, else the first
    that it does not run any more; views and primitives aside."""
    for ops, others, text in (
        (runs, traced, "forward runs it there, and the trace has no such op at that line"),
        (traced, runs, "the trace has it, and forward does not run it there any more"),
    ):
        known = {(_plain(name), line) for name, line in others}
        for name, line in ops:
            if (_plain(name), line) in known or _plain(name) in _OF_NO_MATTER:
                continue
            if not name.startswith("fngraph."):
                return name, line, text
    return None


def _plain(name: str) -> str:
    """`aten.add` of aten.add.Tensor, and of the forms into which donation may have put it."""
    return ".".join(name.split(".")[:2]).removesuffix("_")


@torch.no_grad()
def _traced(keys: Keys, saved: Saved, found: list[_Op]) -> Ran:
    """What the program gives, and its ops, run one by one, each with what it gives."""
    executable = keys.executable
    args = executable.args
    values: dict[int, torch.Tensor] = dict(held_of(keys))
    values |= {i: x.clone() for i, x in saved.state.items()}
    staged = [i for i, leaf in enumerate(args.leaves) if leaf.buffer is not None]
    values |= dict(zip(staged, saved.rows.staged))
    values |= {len(args.leaves) + k: x for k, x in enumerate(keys.constants)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(drawn_from(keys, saved))
        stack.enter_context(keys.fixed_ambient())
        for at, one in enumerate(executable.program.instructions):
            tensors = [values[i] for i in one.reads]
            fn, made = executable.fns[at], executable.modules[at]
            if isinstance(fn, PrimitiveCall):
                fn.bare(*tensors)
                continue
            assert made is not None
            gm = with_generators(made, executable.generators)
            results = _listed(gm, found, saved.counts.num_tokens, saved.counts.num_reqs, *tensors)
            values.update(zip(one.writes, results))
    outputs = tuple(values[i] for i in executable.program.outputs)
    return Ran(outputs, {i: values[i] for i in saved.state})


def _listed(gm: fx.GraphModule, found: list[_Op], *given: Any) -> Any:
    """What a graph gives, with its ops listed, those of its loops' functions turn by turn."""
    values: dict[fx.Node, Any] = dict(zip(inputs_of(gm.graph), given))
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(gm, str(node.target))
        elif is_loop(node):
            runs = [functools.partial(_listed, one, found) for one in node.target.graphs]  # type: ignore[union-attr]
            values[node] = run_loop(node.target, runs, None, given_to(node, values)[0])
        elif node.op == "call_function":
            values[node] = computed(node, values)
            if is_op(node):
                held = None if is_unwritten(node) else _first(values[node])
                found.append((name_of(node), line_of(node), held))
    return fx.map_arg(results_of(gm.graph), values.__getitem__)
