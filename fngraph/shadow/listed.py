"""The ops of bare `forward`, listed as it runs, beside those of its trace.

Python that reads what is no argument (a global, a clock, a file) gave the trace one value forever.
An op of the trace is found in the list by its name and the user's line, in order; the first whose
result is another one is where `forward` and its trace part.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from fngraph.calls import PrimitiveCall
from fngraph.core.where import user_line
from fngraph.fx.generators import with_generators
from fngraph.fx.nodes import line_of
from fngraph.fx.rows.rehearsal import is_unwritten
from fngraph.shadow.nodes import difference, name_of
from fngraph.shadow.saved import Saved, drawn_from, held_of, run_bare
from fngraph.step.keys import Keys
from fngraph.torch_facts.names import TorchDispatchMode, tree_leaves

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


def first_not_traced(keys: Keys, saved: Saved) -> tuple[str, str, str] | None:
    """The first op of the trace that gives something else as `forward` runs now: its name, the
    user's line, and what differs; None: all that can be found in the list give the same."""
    listing = _Listing()
    with listing:
        run_bare(keys, saved)
    traced = _traced(keys, saved)
    at = 0
    for name, line, got in traced:
        found = next(
            (k for k in range(at, len(listing.ops)) if listing.ops[k][:2] == (name, line)), None
        )
        if found is None:
            continue
        at = found + 1
        want = listing.ops[found][2]
        if got is None or want is None:
            continue
        if (what := difference(got, want, {})) is not None:
            text = f"forward gives something else there than when it was traced: {what[0]}"
            return name, line, text
    return None


@torch.no_grad()
def _traced(keys: Keys, saved: Saved) -> list[_Op]:
    """The ops of the program, run one by one on the batch as it is, with what each gives."""
    executable = keys.executable
    args = executable.args
    values: dict[int, torch.Tensor] = dict(held_of(keys))
    values |= {i: x.clone() for i, x in saved.state.items()}
    staged = [i for i, leaf in enumerate(args.leaves) if leaf.buffer is not None]
    values |= dict(zip(staged, saved.rows.staged))
    values |= {len(args.leaves) + k: x for k, x in enumerate(keys.constants)}
    true = {"T": saved.counts.num_tokens, "R": saved.counts.num_reqs}
    found: list[_Op] = []
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
            given: dict[Any, Any] = {}
            rest = iter([true["T"], true["R"], *tensors])
            for node in gm.graph.nodes:
                if node.op == "placeholder":
                    given[node] = next(rest)
                elif node.op == "call_function":
                    look = lambda x: given[x]  # noqa: B023, E731
                    own, named = torch.fx.map_arg((node.args, dict(node.kwargs)), look)
                    given[node] = node.target(*own, **named)
                    held = None if is_unwritten(node) else _first(given[node])
                    found.append((name_of(node), line_of(node), held))
                elif node.op == "output":
                    results = torch.fx.map_arg(node.args[0], lambda x: given[x])  # noqa: B023
            values.update(zip(one.writes, results))
    return found
