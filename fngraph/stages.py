"""The stages between a function and its graphs, each an immutable value with the next verb.

    Traced --split--> Split --lower--> Lowered --compile--> Compiled --capture--> Captured

Every stage prints (`repr`, `as_text()`), and runs without a GPU; `Captured` does on the tape.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fngraph.calls import PrimitiveCall, choose, with_planners
from fngraph.core import (
    BatchDescriptor,
    BufferPlan,
    Dim,
    DispatchTable,
    Field,
    Limits,
    Mode,
    Resolution,
    Support,
    build_table,
    check_sizes,
    key_sizes,
    plan_buffers,
    resolve,
    trees,
)
from fngraph.core.memory import Bytes, KeyMemory, MemoryTable
from fngraph.core.program import Program, Step
from fngraph.core.text import count, table
from fngraph.errors import FieldError, SpecError
from fngraph.fx.ambient import Ambient, check_modes, noted, read, unchanged
from fngraph.fx.arguments import Arguments
from fngraph.fx.blame import blame
from fngraph.fx.direct import direct
from fngraph.fx.donation import COPY_LIMIT, DonationTable, donate
from fngraph.fx.dtypes import pin
from fngraph.fx.estimate import Lifetimes, estimate, lifetimes
from fngraph.fx.generators import Generators, check_untouched, preserved, with_generators
from fngraph.fx.leaves import Leaf, TensorSpec
from fngraph.fx.refusals import Refusals
from fngraph.fx.returns import match_donated
from fngraph.fx.rows.check import check_rows
from fngraph.fx.signature import Signature
from fngraph.fx.split import Cut, Piece, Pieces, split
from fngraph.fx.trace import Graph, trace
from fngraph.graphs.recorder import Recorder
from fngraph.ops.choice import Choices
from fngraph.ops.plan import Planner
from fngraph.ops.primitive import PRIMITIVES

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


@dataclasses.dataclass(frozen=True)
class Options:
    """What `graphify` was asked for.

    Attributes:
        modes: requested; None: the default. Backends may lower them.
        sizes: capture sizes in tokens; None: the default ladder.
        query_lens: query lengths whose uniform batches get keys of their own.
        backends: primitive name to backends; a primitive left out takes its default.
        adapters: counts of active adapters that get keys of their own.
        fields: user-defined fields of specs and keys.
        cost: what "least" means, of a key; None: its token count.
        resolve: further arguments of `fngraph.core.resolve`, such as pooling=True.
        allow_copies: bytes of the largest donated leaf that may be copied; or False, True.
        on_ambient: "recapture" or "error", for calls under other ambient state.
        memory_budget: bytes that a step's pool and graphs may take; None: anything.
        on_failure: "raise", or "eager": a key that cannot be captured is served eagerly.
        generators: those that `forward` may draw from.
    """

    modes: Mode | None = None
    sizes: tuple[int, ...] | None = None
    query_lens: tuple[int, ...] = (1,)
    backends: Mapping[str, Choices] = dataclasses.field(default_factory=dict)
    adapters: tuple[int, ...] = (0,)
    fields: tuple[Field, ...] = ()
    cost: Callable[[BatchDescriptor], float] | None = None
    resolve: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    allow_copies: bool | int = COPY_LIMIT
    on_ambient: str = "recapture"
    memory_budget: int | None = None
    on_failure: str = "raise"
    generators: tuple[torch.Generator, ...] = ()


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
    """Trace the function of `args`. See `fngraph.fx.trace` for the errors, kept in `refuse`."""
    found: dict[str, Any] = {}
    refuse = refuse or Refusals()
    check_modes()
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


@dataclasses.dataclass(frozen=True)
class Split:
    """Pieces of traced ops, with a primitive between one and the next."""

    traced: Traced
    pieces: Pieces

    @property
    def program(self) -> Program:
        """The steps as data."""
        return self.pieces.program

    @property
    def distinct(self) -> list[Piece]:
        """Each distinct piece once; it is compiled once."""
        return list(dict.fromkeys(p for p in self.pieces.parts if isinstance(p, Piece)))

    @property
    def cuts(self) -> list[Cut]:
        """Calls of primitives, in order."""
        return [p for p in self.pieces.parts if isinstance(p, Cut)]

    def lower(self, limits: Limits | None = None) -> Lowered:
        """Choose backends, resolve modes, lay out the dispatch table and the static buffers.

        Raises:
            BackendError: a backend that is unknown or does not support the configuration.
            ModesError: modes that the backends cannot serve.
            SizesError: capture sizes beyond the limits.
        """
        traced, options = self.traced, self.traced.options
        limits = limits or traced.limits
        if limits.dims != traced.limits.dims:
            raise SpecError(
                f"traced with {traced.limits!r}, lowered with {limits!r}: letters other than T and "
                "R are fixed by the trace. Trace with the same: trace(..., limits=limits)"
            )
        traced.graph.check_limits(limits)
        calls = choose(self.pieces, options.backends)
        self._check_null_slots()
        support = dict(pair for call in calls for pair in call.levels()) or Support.ALWAYS
        resolution = resolve(
            options.modes, support, query_lens=options.query_lens, limits=limits,
            sizes=None if options.sizes is None else check_sizes(options.sizes, limits),
            **options.resolve,
        )  # fmt: skip
        dispatch_table = build_table(
            resolution.modes, resolution.sizes, limits, options.adapters, options.fields,
            options.cost, own_uniform=any(call.uniform is not None for call in calls),
        )  # fmt: skip
        top = key_sizes(dispatch_table.top, None, limits.max_reqs, limits.dims)
        plan = plan_buffers(traced.args.fields, top)
        most = {**limits.dims, "T": limits.max_tokens, "R": limits.max_reqs}
        most |= {name: max(most[name], top[name]) for name in ("T", "R")}
        calls = with_planners(calls, self.pieces, traced.args.leaves, most)
        return Lowered(self, limits, calls, resolution, dispatch_table, plan)

    def _check_null_slots(self) -> None:
        """Padding must write nowhere: the slots of each primitive are a leaf padded with -1."""
        for step, part in zip(self.program.steps, self.pieces.parts):
            name = PRIMITIVES[part.op].null_slots if isinstance(part, Cut) else None
            if name is None:
                continue
            leaf = self._leaf_of(step, part, name)
            if leaf is not None and (leaf.buffer is None or leaf.buffer.pad != -1):
                raise FieldError(
                    f"{leaf.path} says where {step.name} writes, and its padding would write too. "
                    f"Pad it with -1, which writes nowhere: fg.buffer(..., pad=-1)"
                )

    def _leaf_of(self, step: Step, cut: Any, name: str) -> Leaf | None:
        """The argument's leaf, if the cut reads it as it was passed to `forward`."""
        names = [a.name for a in PRIMITIVES[cut.op].op._schema.arguments]
        slot = step.reads[cut.places.index(names.index(name))]
        leaves = self.traced.args.leaves
        return leaves[slot] if slot < len(leaves) else None

    def as_text(self) -> str:
        """One line a step, with the leaves that it reads by name; equal kinds are one piece."""
        leaves = [leaf.path for leaf in self.traced.args.leaves] + list(self.traced.constants)
        return self.program.as_text(dict(enumerate(leaves)))

    def __repr__(self) -> str:
        return (
            f"Split({count(len(self.program.steps), 'step')}: {count(len(self.cuts), 'cut')}, "
            f"{count(len(self.distinct), 'distinct piece')})"
        )


@dataclasses.dataclass(frozen=True)
class Lowered:
    """Everything decided that can be without running: modes, backends, keys, buffers.

    Attributes:
        calls: the cuts with their backends.
        resolution: modes and sizes after the backends have had their say, with reasons.
        table: the dispatch table.
        plan: the static buffers.
    """

    split: Split
    limits: Limits
    calls: tuple[PrimitiveCall, ...]
    resolution: Resolution
    table: DispatchTable
    plan: BufferPlan

    @property
    def notes(self) -> tuple[str, ...]:
        """Why anything is not as it was asked for."""
        passed_over = dict.fromkeys(call.note for call in self.calls if call.note)
        return self.resolution.reasons + tuple(passed_over) + self.split.traced.notes

    def compile(self) -> Compiled:
        """One callable for each distinct piece."""
        shared: dict[int, Callable[..., tuple[Any, ...]]] = {}
        calls, generators = iter(self.calls), self.split.traced.options.generators
        fns = [
            next(calls).compile()
            if isinstance(p, Cut)
            else shared.setdefault(id(p), _piece_fn(p, generators))
            for p in self.split.pieces.parts
        ]
        planners = {id(p): p for call in self.calls for p in call.planners.values()}
        return Compiled(self, tuple(fns), tuple(planners.values()))

    def sizes(self, key: BatchDescriptor) -> dict[str, int]:
        """{"T": padded tokens, "R": padded requests, ...} of a key."""
        limits = self.limits
        return key_sizes(key.num_tokens, key.num_reqs, limits.max_reqs, limits.dims)

    def estimate(self, mode: Mode, descriptor: BatchDescriptor) -> Bytes:
        """Bytes that a key will take in the pool and for its graphs. See `fngraph.fx.estimate`."""
        pieces, sizes = self.split.pieces, self.sizes(descriptor)
        outputs = len(pieces.program.outputs)
        return estimate(pieces, self._lifetimes, mode, sizes, outputs)

    @property
    def memory(self) -> MemoryTable:
        """What every key will take, estimated."""
        return MemoryTable(tuple(KeyMemory(*key, self.estimate(*key)) for key in self.table))

    @functools.cached_property
    def _lifetimes(self) -> Lifetimes:
        return lifetimes(self.split.pieces, self.split.traced.graph)

    def as_text(self) -> str:
        """Backends, modes, keys and buffers."""
        rows = [[i, *pair] for i, c in enumerate(self.calls) for pair in c.levels()]
        parts = [self.table.as_text(), self.plan.as_text()]
        parts += [table(["cut", "primitive (backend)", "support"], rows)] if rows else []
        parts += self.notes
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return (
            f"Lowered({self.table!r}, {len(self.plan.buffers)} static buffers of "
            f"{self.plan.nbytes} bytes, notes: {list(self.notes) or 'none'})"
        )


def _piece_fn(piece: Piece, generators: Generators) -> Callable[..., tuple[Any, ...]]:
    gm = with_generators(piece.gm, generators)
    forward = direct(gm)  # not gm(...): nn.Module.__call__ takes some 3 us a piece

    def run(sizes: Mapping[str, int], host: Any, *tensors: torch.Tensor) -> tuple[Any, ...]:
        try:
            return forward(sizes["T"], sizes["R"], *tensors)
        except Exception as error:
            if (op := blame(gm, error)) is not None:
                error.add_note(f"in {op}")
            raise

    return run


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A callable for each step of the program. Equal pieces share theirs.

    Attributes:
        planners: what is planned on the host before each step.
    """

    lowered: Lowered
    fns: tuple[Callable[..., tuple[Any, ...]], ...]
    planners: tuple[Planner, ...] = ()

    @property
    def args(self) -> Arguments:
        """The abstract arguments."""
        return self.lowered.split.traced.args

    @property
    def rows(self) -> tuple[tuple[Dim | None, ...], ...]:
        """For each step, the varying first dims of its arguments; empty for a piece."""
        return tuple(p.rows if isinstance(p, Cut) else () for p in self.lowered.split.pieces.parts)

    def capture(
        self,
        *bound: Any,
        recorder: str | Recorder | None = None,
        outputs: str = "own",
        progress: bool | str = False,
        lazy: bool = False,
        memory_budget: int | None = None,
        on_failure: str | None = None,
        guards: bool = False,
    ) -> Captured:
        """Bind the held and donated arguments (in `forward`'s order) and capture every key.

        Args:
            recorder: "cuda", "tape", None for the one of the arguments' device, or one to share.
            outputs: "own": results are the caller's; "borrow": views, good until the next call.
            progress: show a progress bar; a string is its label.
            lazy: capture each key when it is first dispatched to, not now.
            memory_budget: bytes that the pool and all graphs may take together. Keys beyond it are
                captured when they are needed, and the least recently used ones go for them.
                None: as graphify was told.
            on_failure: of a key that cannot be captured: "raise", or "eager": its batches run
                eagerly, and the reason is counted. None: as graphify was told, which is "raise".
            guards: poison padding and expired results, to find what reads them.

        Raises:
            AliasError: a donated leaf shares its storage with another leaf.
            TreeError: arguments that differ from the traced ones.
            CaptureError: a key that could not be captured.
        """
        from fngraph.step.allocate import bind_and_allocate
        from fngraph.step.book import Rules

        options = self.lowered.split.traced.options
        budget = options.memory_budget if memory_budget is None else memory_budget
        rules = Rules(budget, on_failure or options.on_failure)
        captured = bind_and_allocate(self, bound, recorder, outputs, rules, guards).under_ambient()
        if not lazy:
            captured.capture_all(progress=progress)
        return captured

    def as_text(self) -> str:
        """The code of each distinct piece."""
        codes = [p.gm.code.strip() for p in self.lowered.split.distinct]
        return "\n\n".join(f"# piece {i}\n{code}" for i, code in enumerate(codes))

    def __repr__(self) -> str:
        callables, steps = count(len(set(self.fns)), "callable"), count(len(self.fns), "step")
        return f"Compiled({callables} for {steps})"
