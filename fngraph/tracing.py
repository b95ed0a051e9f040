"""How a function is traced: the first stage; and an executable made anew, by tracing it again.

`trace_function` runs `forward` over fakes (`fngraph.fx.tracing`), works out what is known of its
rows, checks it, runs passes over it, and settles its donation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.calls import check_within
from fngraph.core import Limits, trees
from fngraph.core.collector import without_collector
from fngraph.core.text import expect
from fngraph.errors import AmbientError, FnGraphError, RowsError, TreeError
from fngraph.executable import Executable
from fngraph.fx.advice import in_own_names
from fngraph.fx.arguments import Arguments
from fngraph.fx.donation.returns import match_donated
from fngraph.fx.donation.table import donate, drop_dead
from fngraph.fx.generators import check_untouched, preserved
from fngraph.fx.leaves import Leaf, TensorSpec
from fngraph.fx.loops.aliases import check_aliases
from fngraph.fx.nodes import inputs_of, is_op, line_of, name_of, results_of
from fngraph.fx.pieces.collectives import (
    are_of_rows,
    collectives_of,
    nothing_said,
    reads_dirty,
    told_of,
)
from fngraph.fx.rows.check import as_vouched, check_rows, facts_of, is_trusted, row_errors
from fngraph.fx.rows.pads import NOWHERE, check_pads
from fngraph.fx.rows.rehearsal import rehearsed
from fngraph.fx.rows.state import OFFSETS
from fngraph.fx.schemas import named
from fngraph.fx.tracing.ambient import Ambient, check_no_dispatch_mode, noted, read, unchanged
from fngraph.fx.tracing.constants import pin
from fngraph.fx.tracing.refusals import Refusals
from fngraph.fx.tracing.tracer import Graph, trace
from fngraph.ops.primitives import PRIMITIVES
from fngraph.ops.transforms import ASKED
from fngraph.options import Options
from fngraph.passes.running.everywhere import run_passes
from fngraph.passes.running.frame import Applied
from fngraph.stages import Traced
from fngraph.torch_facts.tracing import ONE_AT_A_TIME

Look = Callable[[Arguments, Limits, Graph, Mapping[Any, Any]], None]
"""What is shown a graph and the facts of its rows."""


def trace_function(
    args: Arguments,
    options: Options,
    limits: Limits,
    refuse: Refusals | None = None,
    look: Look | None = None,
) -> Traced:
    """Trace the function of `args`; see `fngraph.fx.tracing` for the errors, kept in `refuse`.

    Args:
        look: is shown the graph as it was traced, before donation changes it, and the facts of
            its rows.
    """
    refuse = refuse or Refusals()
    refuse.own_names = lambda text: in_own_names(text, args.leaves, args.signature)
    try:
        with ONE_AT_A_TIME, without_collector():
            return _traced(args, options, limits, refuse, look)
    except FnGraphError as error:
        refuse.let_go()
        raise error.with_traceback(None)  # noqa: B904


def _traced(
    args: Arguments, options: Options, limits: Limits, refuse: Refusals, look: Look | None
) -> Traced:
    found: dict[str, Any] = {}
    check_no_dispatch_mode()
    ambient = read(args.device.type)

    def flat_fn(leaves: list[torch.Tensor]) -> list[Any]:
        values = args.unflatten(leaves, refuse)
        given = [trees.flatten(value) for value in values]
        with torch.set_grad_enabled(ambient.grad):
            with refuse.catching(), unchanged(args.device.type, args.signature.fn):
                found["result"] = args.signature.call(values)
        if "result" not in found:
            raise refuse.errors[-1]
        with refuse.catching():
            args.check_held(values, given)
        result = found.pop("result")
        trees.register_dataclasses(result)
        outputs, found["tree"] = trees.flatten(args.in_their_order(result))
        return outputs

    generators = options.generators
    states = [g.get_state() for g in generators]
    with noted(ambient) as asked, preserved(generators):
        graph = trace(flat_fn, args.leaves, limits, found, refuse, generators)
        with refuse.catching():
            check_untouched(generators, states)
    with refuse.catching():
        pin(graph.gm, ambient.default_dtype)
    inputs, results = inputs_of(graph.gm.graph), results_of(graph.gm.graph)
    returns = match_donated(args, list(results), found["tree"], inputs, refuse)
    if not results and not refuse.errors:
        shown = trees.unflatten(found["tree"], [])
        refuse(TreeError(
            f"forward returns {shown!r}, which holds no tensor, so that nobody could read what it "
            "computes. Return it (is a return forgotten?)"
        ))  # fmt: skip
    paths = trees.paths(found["tree"], "output")
    drop_dead(graph.gm.graph, raising=True)
    if not refuse.errors:
        check_aliases(graph.gm, returns, refuse)
    updates = set(returns.values())
    facts, is_shared = _facts(graph, args, returns, lambda facts: [
        *row_errors(graph.gm, facts, paths, updates), *_pad_errors(graph, args, facts)
    ])  # fmt: skip
    if look is not None:
        look(args, limits, graph, facts)
    is_met = bool(collectives_of(graph.gm.graph))
    alike = told_of(graph.gm.graph, facts, graph.text, is_shared) if is_met else {}
    of_rows = are_of_rows(graph.gm.graph, facts)
    of_outputs = enumerate(facts[graph.gm.graph.output_node()])
    dirty = {i: x.dirty for i, x in of_outputs if getattr(x, "dirty", ())}
    vouched = as_vouched(graph.gm, facts)
    check_pads(graph.gm, args.leaves, facts, _told, refuse)
    check_rows(graph.gm, facts, paths, updates, refuse)
    applied: tuple[Applied, ...] = ()
    if options.passes_in_order and not refuse.errors:
        with refuse.catching():
            graph, applied = run_passes(
                options.passes_in_order, graph, args.leaves, vouched, refuse
            )
    if options.modes is not None and not refuse.errors:
        with refuse.catching():
            check_within(graph.gm, options.modes)
    donation = donate(graph, args.leaves, returns, options.allow_copies, refuse)
    graph.gm.recompile()  # constants and donation have changed the graph since
    return Traced(
        args, options, limits, graph, donation, found["tree"], returns, ambient, frozenset(asked),
        Retracer, applied, alike, of_rows, dirty,
    )  # fmt: skip


def _facts(
    graph: Graph,
    args: Arguments,
    returns: Mapping[int, int],
    errors: Callable[[Mapping[Any, Any]], Sequence[FnGraphError]],
) -> tuple[dict[Any, Any], bool]:
    """What is known of every value; whether that rests on other processes knowing the same.

    What comes out of a collective depends on what others know of their padding. Where rows are
    right whatever that is, nothing is said of it, and processes may know different things.
    """
    given = (graph.gm, args.leaves, graph.constants, graph.text, returns)
    if claims := nothing_said(graph.gm.graph):
        found = facts_of(*given, claims=claims)
        if not reads_dirty(graph.gm.graph, found) and not errors(found):
            return found, False
    return facts_of(*given), bool(claims)


def _pad_errors(graph: Graph, args: Arguments, facts: Mapping[Any, Any]) -> list[FnGraphError]:
    found: list[FnGraphError] = []
    check_pads(graph.gm, args.leaves, facts, _told, found.append)
    return found


def _told(node: fx.Node) -> dict[str, tuple[fx.Node, str]]:
    """What a primitive, or its plain form, is told of a batch, and how that must be padded."""
    if not is_op(node):
        return {}
    called, argument = node.meta.get("custom", {}).get(ASKED, ("", ""))
    primitive = PRIMITIVES.get(f"fngraph::{called}" if called else node.target.name())  # type: ignore[union-attr]
    if primitive is None:
        return {}
    args, kwargs = node.args, node.kwargs
    given = {argument: node.all_input_nodes[0]} if called else named(node.target, args, kwargs)
    roles = ((primitive.null_slots, NOWHERE), (primitive.offsets, OFFSETS))
    return {name: (given[name], what) for name, what in roles if name and name in given}


@dataclasses.dataclass(frozen=True)
class Retracer:
    """An executable's `Maker`: its first stage, to compare with, and the limits of the others."""

    traced: Traced
    limits: Limits

    def for_leaves(self, old: Executable, leaves: Sequence[Leaf]) -> Executable:
        """See `Maker`."""
        new = self._trace(leaves)
        lowered = new.split().lower(self.limits)
        if new.computes_as(self.traced) and lowered.runs(old.compiled):
            same = lowered.executable(old.fns, old.compiled, old.one_launch)
            return dataclasses.replace(same, planners=old.planners)  # what the old ones read
        alike = new.ambient.kernels == self.traced.ambient.kernels
        return lowered.compile(old.compiled if alike else ()).executable

    def under(self, ambient: Ambient) -> Executable | None:
        """See `Maker`."""
        old = self.traced
        free = {name: getattr(ambient, name) for name in ("grad", "inference")}
        kept = {name: value for name, value in free.items() if name not in old.asked}
        if old.ambient._replace(**kept) == ambient:
            return None
        new = self._trace(old.args.leaves)
        if new.computes_as(old):
            return None
        if old.options.on_ambient == "error":
            raise AmbientError(
                f"ambient state is not the trace's: {old.ambient.changes(ambient)}, and forward "
                "computes something else under it. Call under the same state, or "
                'fg.graphify(..., on_ambient="recapture")'
            )
        return new.split().lower(self.limits).compile().executable

    def keeps_order(self, position: int, treedef: Any) -> bool:
        """See `Maker`."""
        args = dataclasses.replace(self.traced.args, orders={position: treedef})
        try:
            new = trace_function(args, self.traced.options, self.traced.limits)
        except FnGraphError:
            return False
        return new.computes_as(self.traced)

    def rehearse(
        self, true: Sequence[torch.Tensor], padded: Sequence[torch.Tensor]
    ) -> tuple[str, str, str] | None:
        """See `Maker`."""
        found: list[tuple[str, str, str]] = []

        def look(args: Arguments, limits: Limits, graph: Graph, facts: Mapping[Any, Any]) -> None:
            for one in rehearsed(graph.gm, facts, true, padded):  # to its end, as other processes
                op = "fg.trust_rows" if is_trusted(one.node) else name_of(one.node)
                found.append((op, line_of(one.node), one.text))

        trace_function(self.traced.args, self.traced.options, self.traced.limits, look=look)
        return found[0] if found else None

    def accepts(self, leaves: Sequence[Leaf]) -> bool:
        """See `Maker`."""
        try:
            self._trace(leaves)
        except RowsError:
            return False
        return True

    def _trace(self, leaves: Sequence[Leaf]) -> Traced:
        args = dataclasses.replace(self.traced.args, leaves=tuple(leaves))
        return trace_function(args, self.traced.options, self.traced.limits)


def like(tree: Any) -> Any:
    """The same tree with shapes, dtypes and devices in place of memory, for `trace`."""
    trees.register_dataclasses(tree)
    leaves, treedef = trees.flatten(tree)
    for path, leaf in zip(trees.paths(treedef, "tree"), leaves):
        expect((torch.Tensor, TensorSpec), "a tensor", TreeError, **{path: leaf})
    return trees.unflatten(treedef, map(TensorSpec.of, leaves))
