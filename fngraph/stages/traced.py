"""`Traced`: `forward` as an fx graph, and how a trace is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from fngraph.core import Limits, trees
from fngraph.fx.ambient import Ambient, check_no_dispatch_mode, noted, read, unchanged
from fngraph.fx.arguments import Arguments, Signature
from fngraph.fx.donation.returns import match_donated
from fngraph.fx.donation.table import DonationTable, donate
from fngraph.fx.generators import check_untouched, preserved
from fngraph.fx.leaves import TensorSpec
from fngraph.fx.pieces.cuts import split
from fngraph.fx.rows.check import check_rows
from fngraph.fx.tracing.constants import pin
from fngraph.fx.tracing.refusals import Refusals
from fngraph.fx.tracing.tracer import Graph, trace
from fngraph.ops.primitives import PRIMITIVES
from fngraph.options import Options
from fngraph.stages.split import Split


def like(tree: Any) -> Any:
    """The same tree with shapes, dtypes and devices in place of memory, for `trace`."""
    trees.register_dataclasses(tree)
    return trees.map_leaves(TensorSpec.of, tree)


@dataclasses.dataclass(frozen=True)
class Traced:
    """`forward` as an fx graph, pure and with its donation settled.

    Attributes:
        donation: how each donated leaf gets its new value.
        out_tree: structure of what `forward` returns.
        returns: index of a donated leaf to the index of the output leaf that is its new value.
        ambient: the state of torch that it was traced under.
        asked: which of grad and inference mode `forward` has asked for; the others are all one.
    """

    args: Arguments
    options: Options
    limits: Limits
    graph: Graph
    donation: DonationTable
    out_tree: Any
    returns: Mapping[int, int]
    ambient: Ambient
    asked: frozenset[str]

    def serves(self, ambient: Ambient) -> bool:
        """Whether a state differs from this one in nothing that could matter."""
        free = {name: getattr(ambient, name) for name in ("grad", "inference")}
        kept = {name: value for name, value in free.items() if name not in self.asked}
        return self.ambient._replace(**kept) == ambient

    def again(self) -> Traced:
        """The same function traced under the ambient state of now: itself, if that is all one."""
        traced = trace_function(self.args, self.options, self.limits)
        alike = traced.graph.same_as(self.graph) and traced.out_tree == self.out_tree
        return self if alike and traced.ambient.kernels == self.ambient.kernels else traced

    @property
    def signature(self) -> Signature:
        """The function and the roles of its arguments."""
        return self.args.signature

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Tensors made from literals inside `forward`: hoisted, frozen."""
        return self.graph.constants

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as it was asked for: primitives that are no cuts, streams that are one."""
        return tuple(
            f"{line}: {name} is inlined, as a gradient or a torch.func transform goes through it: "
            "its plain torch ops are captured, there is no cut, and no backend is asked"
            for name, line in self.graph.inlined
        ) + tuple(
            f"{line}: the side stream is ignored: forward runs on one stream, in program order"
            for line in self.graph.streams
        )

    def split(self) -> Split:
        """Cut at every primitive; equal pieces become one."""
        returned = set(self.returns.values())
        outputs = [i for i in range(self.out_tree.num_leaves) if i not in returned]
        return Split(self, split(self.graph, tuple(PRIMITIVES), outputs))

    def as_text(self) -> str:
        """The traced ops as Python."""
        self.graph.gm.recompile()  # constants and donation have changed the graph since
        return self.graph.gm.code.strip()

    def __repr__(self) -> str:
        ops = sum(n.op == "call_function" for n in self.graph.gm.graph.nodes)
        how = [row.how for row in self.donation.rows]
        donated = ", ".join(f"{how.count(h)} {h}" for h in dict.fromkeys(how)) or "none"
        inlined = "".join(f", {name} inlined at {line}" for name, line in self.graph.inlined)
        return f"Traced({self.signature!r}, {ops} ops, donated: {donated}{inlined})"


def trace_function(
    args: Arguments, options: Options, limits: Limits, refuse: Refusals | None = None
) -> Traced:
    """Trace the function of `args`. See `fngraph.fx.tracing.tracer` for the errors, kept in `refuse`."""
    found: dict[str, Any] = {}
    refuse = refuse or Refusals()
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
        outputs, found["tree"] = trees.flatten(result)
        return outputs

    generators = options.generators
    states = [g.get_state() for g in generators]
    with noted(ambient) as asked, preserved(generators):
        graph = trace(flat_fn, args.leaves, limits, found, refuse, generators)
        with refuse.catching():
            check_untouched(generators, states)
    with refuse.catching():
        pin(graph.gm, ambient.default_dtype)
    nodes = list(graph.gm.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    returns = match_donated(args, list(nodes[-1].args[0]), found["tree"], inputs, refuse)
    paths = trees.paths(found["tree"], "output")
    check_rows(graph.gm, args.leaves, graph.constants, paths, graph.text, refuse)
    donation = donate(graph, args.leaves, returns, options.allow_copies, refuse)
    return Traced(
        args, options, limits, graph, donation, found["tree"], returns, ambient, frozenset(asked)
    )
