"""The stages between a function and its graphs, each an immutable value with the next verb.

    Traced --split--> Split --lower--> Lowered --compile--> Compiled --capture--> Step

Every stage prints (`repr`, `as_text()`) and runs without a GPU. The last one hands down an
`Executable`, which holds no stage. They stand here from the last to the first, since each makes the
one above it; `fngraph.tracing` makes the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import fx

from fngraph.callables import Callables
from fngraph.calls import (
    Asked,
    PrimitiveCall,
    check_within,
    choose,
    choose_within,
    divided,
    one_by_one,
    with_planners,
)
from fngraph.compile.artefact import Source
from fngraph.compile.disk import Disk, disk_of
from fngraph.compile.key import own_source
from fngraph.compile.piece import CompiledPiece, artefact_rows
from fngraph.compile.results import Plan, plan_of
from fngraph.core import (
    BatchDescriptor,
    BufferPlan,
    DispatchTable,
    Limits,
    Mode,
    Resolution,
    Support,
    build_table,
    check_sizes,
    key_sizes,
    plan_buffers,
    resolve,
)
from fngraph.core.buffers import COUNTED
from fngraph.core.compiling import check_compile_sizes, resolve_level, whole
from fngraph.core.costs.launch import Count, LaunchModel
from fngraph.core.costs.roofline import Constants
from fngraph.core.memory import Bytes, KeyMemory, MemoryTable
from fngraph.core.program import Program
from fngraph.core.text import count, did_you_mean, expect, html, table
from fngraph.errors import PassError, SpecError, TreeError
from fngraph.executable import Executable, Maker, launch_model_of, sizes_of
from fngraph.fx.arguments import Arguments
from fngraph.fx.donation.table import DonationTable
from fngraph.fx.leaves import Leaf
from fngraph.fx.loops.bound import has_loops
from fngraph.fx.loops.node import loops_of
from fngraph.fx.pieces.collectives import collectives_of
from fngraph.fx.pieces.cuts import Cut, Piece, Pieces, split
from fngraph.fx.pieces.functions import LoopFunction, functions_of
from fngraph.fx.pieces.memory import estimate, lifetimes
from fngraph.fx.pieces.work import counter
from fngraph.fx.rows.boxes import Boxes
from fngraph.fx.signatures import Signature
from fngraph.fx.tracing.ambient import Ambient
from fngraph.fx.tracing.tracer import Graph
from fngraph.graphs.replay import InstructionFn
from fngraph.one_launch import Layers, OneLaunch, find_layers
from fngraph.ops.primitives import PRIMITIVES
from fngraph.options import (
    CaptureDict,
    Options,
    check_names,
    check_outputs,
    check_record,
    verify_of,
)
from fngraph.passes.running.frame import Applied, Pass, as_text
from fngraph.passes.shipped import name_of
from fngraph.ranks.agreement import Peers
from fngraph.shadow.recorded import make_recorded
from fngraph.shadow.verified import make_verified
from fngraph.step.step import Step, make_step
from fngraph.torch_facts.portable import versions


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A callable for each instruction of the program. Equal pieces share theirs.

    Attributes:
        executable: what a step is made of.
        pieces: each distinct piece once.
        passes: how often each pass has matched, without graphs.
    """

    executable: Executable
    options: Options
    pieces: tuple[Piece, ...]
    passes: tuple[Applied, ...] = ()

    def capture(self, *bound: Any, **options: Unpack[CaptureDict]) -> Step[Any]:
        """Bind the held and donated arguments (in `forward`'s order) and capture every key.

        Args:
            recorder: "cuda", "tape", None for the one of the arguments' device, or one to share,
                `recorder=step.recorder`.
            outputs: "own": results are the caller's; "borrow": views, good until the next call.
            progress: show a progress bar; a string is its label. Left out: none.
            lazy: capture each key when it is first dispatched to, not now.
            memory_budget: bytes that the pool and all graphs may take together. Keys beyond it are
                captured when they are needed, and the least recently used ones go for them.
            on_failure: of a key that cannot be captured: "raise", or "eager": its batches run
                eagerly, and the reason is counted.
            guards: poison padding and expired results, to find what reads them.
            verify: the share of steps to run again through bare `forward`; or a `fg.Verify`.
            record: how many of the last steps `step.log` keeps.

        What is left out or None, but for `progress` and `lazy`, is as `graphify` was told.

        Raises:
            AliasError: a donated leaf shares memory with another leaf.
            TreeError: arguments that differ from the traced ones.
            CaptureError: a key that could not be captured.
        """
        told, (guards, outputs) = self.options, (options.get("guards"), options.get("outputs"))
        check_names("capture", options, CaptureDict, ("batch",))
        check_outputs(told.outputs if outputs is None else outputs)
        flags = {
            name: options[name] for name in ("lazy", "guards") if options.get(name) is not None
        }  # type: ignore[literal-required]
        expect(bool, "True or False", TreeError, **flags)
        verify = verify_of(told.verify if (v := options.get("verify")) is None else v)
        check_record(last := told.record if (n := options.get("record")) is None else n)
        make: Any = make_step
        if last:
            make = functools.partial(make_recorded, last, verify)
        elif verify.share:
            make = functools.partial(make_verified, verify)
        step: Step[Any] = make(
            self.executable,
            bound,
            recorder=told.recorder if (named := options.get("recorder")) is None else named,
            outputs=told.outputs if outputs is None else outputs,
            rules=told.rules(options.get("memory_budget"), options.get("on_failure")),
            guards=told.guards if guards is None else guards,
        )
        if not options.get("lazy"):
            step.capture_all(progress=options.get("progress", False))
        return step

    @property
    def level(self) -> str:
        """The level of compilation, after primitives have had their say."""
        return self.executable.level

    def _repr_html_(self) -> str:
        return html(self.as_text())

    def as_text(self) -> str:
        """How often each pass matched; the code of each distinct piece; which compiled code serves
        which sizes, and keys."""
        codes = [piece.gm.code.strip() for piece in self.pieces]
        parts = [as_text(self.passes)] if self.passes else []
        parts += [f"# piece {i}\n{code}" for i, code in enumerate(codes)]
        parts += [loop.as_text() for piece in self.pieces for loop in loops_of(piece.gm)]
        keys, own = self.executable.table, self.executable.one_launch
        compiled = self.executable.compiled + (own.compiled if own is not None else ())
        rows = [row for one in compiled for row in artefact_rows(one)]
        if rows:
            parts.append(table(["piece", "sizes", "was", "ms", "kernels", "generated code"], rows))
            sizes = [(mode, key, self.executable.sizes(key)) for mode, key in keys]
            uses = [
                (mode, key, one.name, one.artefact(at["T"], at["R"]).range)
                for mode, key, at in sizes
                for one in self.executable.compiled_of((mode, key))
            ]
            parts.append(table(["mode", "key", "compiled", "sizes"], uses))
        if own is not None:
            most = own.layers.most
            of = f"{most} requests at most, a token each" if most > 1 else "one token and request"
            parts.append(f"FULL keys of {of}: {own!r}")
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        fns, compiled = self.executable.fns, self.executable.compiled
        callables, instructions = count(len(set(fns)), "callable"), count(len(fns), "instruction")
        made = count(sum(len(one.artefacts) for one in compiled), "artefact")
        level = f', compile="{self.level}": {made}' if self.level != "none" else ""
        return f"Compiled({callables} for {instructions}{level})"


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """Everything decided that can be without running: modes, backends, keys, buffers.

    Attributes:
        calls: the cuts with their backends.
        resolution: modes and sizes after the backends have had their say, with reasons.
        table: the dispatch table.
        plan: the static buffers.
        inner: primitives within loops, by their nodes, with their backends.
    """

    split: Split
    limits: Limits
    calls: tuple[PrimitiveCall, ...]
    resolution: Resolution
    table: DispatchTable
    plan: BufferPlan
    inner: Mapping[fx.Node, PrimitiveCall] = dataclasses.field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Why anything is not as it was asked for."""
        calls = (*self.calls, *self.inner.values())
        passed_over = dict.fromkeys(call.note for call in calls if call.note)
        reasons = self.resolution.reasons + self._level[1] + tuple(passed_over)
        return reasons + self.split.traced.notes + tuple(
            f"{name} is not compiled: {plan}"
            for name, (_, plan) in self._plans.items()
            if isinstance(plan, str)
        )  # fmt: skip

    @property
    def level(self) -> str:
        """The level of compilation that serves every mode."""
        return self._level[0]

    @functools.cached_property
    def _level(self) -> tuple[str, tuple[str, ...]]:
        loops = [f"{loop}, {loop.line}" for p in self.split.distinct for loop in loops_of(p.gm)]
        return resolve_level(
            self.split.traced.options.compile, tuple(call.name for call in self.calls), loops
        )

    @functools.cached_property
    def _plans(self) -> dict[str, tuple[Piece, Plan | str]]:
        """Each piece, by name, with how its compiled code is called, or why it has none. A piece
        that is a loop runs as it was traced, over the pieces of its functions."""
        if self.level == "none":
            return {}
        return {
            f"piece {i}": (p, plan_of(p.gm))
            for i, p in enumerate(self.split.pieces_within)
            if not has_loops(p.gm)
        }

    def compile(
        self, known: Sequence[CompiledPiece] = (), progress: bool | str = False
    ) -> Compiled:
        """One callable for each distinct piece: as it was traced, or as Inductor compiles it.

        Args:
            known: pieces that were compiled for the same limits and under the same state.
            progress: show a progress bar, of pieces; a string is its label.

        Raises:
            BackendError: a backend that is but a name with a level.
            CompileError: a piece that Inductor cannot compile.
        """
        options, calls = self.split.traced.options, iter(self.calls)
        of_piece: dict[int, InstructionFn] = {}
        compiled, before = [], {one.key: one for one in known}
        with contextlib.ExitStack() as bar:
            plans: Iterable[str] = self._plans
            if progress and self._plans:
                from fngraph.report.progress import track

                label = progress if isinstance(progress, str) else "compiling"
                plans = bar.enter_context(contextlib.closing(track(list(self._plans), label)))
            for name in plans:
                piece, plan = self._plans[name]
                if isinstance(plan, Plan):
                    exact = options.compile_sizes
                    made = before.get(piece.key) or self._compiled(
                        name, piece, plan, self.limits, exact, self._sizes
                    )
                    of_piece[id(piece)] = made
                    compiled.append(made)
        around_launch: list[CompiledPiece] = []
        if isinstance(layers := self.one_launch, Layers):
            sizes = [(key.num_tokens, key.num_tokens) for mode, key in self.table
                     if mode is Mode.FULL and layers.serves(key)]  # fmt: skip
            most = max(sizes, default=(0, 0))
            for i, piece in enumerate((*layers.around.ahead, *layers.around.behind)):
                if sizes and self.level != "none" and isinstance(plan := plan_of(piece.gm), Plan):
                    name, few = f"piece {i} of one launch", Limits(*most, **self.limits.dims)
                    of_piece[id(piece)] = made = self._compiled(name, piece, plan, few, (), sizes)
                    around_launch.append(made)
        for call in self.inner.values():
            call.check_shipped()
        functions = self.split.functions if self.level != "none" else {}
        callables = Callables(options.generators, self.inner, of_piece, functions)
        fns: list[InstructionFn] = []
        for part in self.split.pieces.parts:
            if isinstance(part, Cut):
                fns.append(call := next(calls))
                call.check_shipped()
            else:
                fns.append(callables.of(part))
        one_launch = None
        if isinstance(layers, Layers):
            around = layers.around
            ahead, behind = (tuple(map(callables.of, x)) for x in (around.ahead, around.behind))
            one_launch = OneLaunch(layers, ahead, behind, tuple(around_launch), self._disk)
        made_of = self.executable(tuple(fns), tuple(compiled), one_launch)
        passes = tuple(one.counted() for one in self.split.traced.passes)
        return Compiled(made_of, options, tuple(self.split.distinct), passes)

    def runs(self, compiled: Sequence[CompiledPiece]) -> bool:
        """Whether these are its compiled pieces: code is for shapes as well."""
        wanted = {piece.key for piece, plan in self._plans.values() if isinstance(plan, Plan)}
        return wanted == {one.key for one in compiled}

    @functools.cached_property
    def one_launch(self) -> Layers | str:
        """The layers that FULL keys of a few requests, a token each, run as one launch; or why they
        run kernel by kernel."""
        traced, modes = self.split.traced, self.table.modes
        if not traced.options.megakernel:
            return "megakernel=False"
        if Mode.FULL not in (modes.decode, modes.mixed):
            return "there are no FULL keys"
        if traced.options.backends.get("attention") is not None:
            return "attention has a backend that was asked for"
        return find_layers(traced.graph, traced.outputs)

    @functools.cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        """(T, R) of every key, and of the extremes of what runs without one."""
        keys = [sizes_of(key, self.limits) for _, key in self.table]
        within = whole(self.limits)
        most_tokens, most_reqs = within.tokens.high, within.reqs.high
        corners = [(1, 1), (most_tokens, 1), (most_tokens, min(most_tokens, most_reqs))]
        return list(dict.fromkeys([(at["T"], at["R"]) for at in keys] + corners))

    def _compiled(
        self, name: str, piece: Piece, plan: Plan, limits: Limits, exact: Iterable[int],
        sizes: Iterable[tuple[int, int]],
    ) -> CompiledPiece:  # fmt: skip
        """A piece compiled for what comes within `limits`, and ahead as `compile_ahead` says."""
        letters = self.split.traced.graph.letters
        passes = [one.key for one in self.split.traced.options.passes_in_order]
        source = Source(name, piece.key, plan, letters, passes, self._disk)
        made = CompiledPiece(source, whole(limits), self.level)
        made.compile_ahead(exact, sizes)
        return made

    @functools.cached_property
    def _disk(self) -> Disk | None:
        """What keeps compiled code, if it is to be kept."""
        return disk_of(os.environ) if self.split.traced.options.cache else None

    def executable(
        self, fns: tuple[InstructionFn, ...], compiled: tuple[CompiledPiece, ...] = (),
        one_launch: OneLaunch | None = None,
    ) -> Executable:  # fmt: skip
        """What a step is made of, with these callables, one an instruction."""
        traced, pieces = self.split.traced, self.split.pieces
        planners = {id(p): p for call in self.calls for p in call.planners.values()}
        return Executable(
            args=traced.args,
            out_tree=traced.out_tree,
            returns=traced.returns,
            program=pieces.program,
            fns=fns,
            row_dims=tuple(p.row_dims if isinstance(p, Cut) else () for p in pieces.parts),
            planners=tuple(planners.values()),
            output_dims=pieces.output_dims,
            output_dtypes=pieces.output_dtypes,
            output_aliased=pieces.output_aliased,
            constants=tuple(traced.constants.values()),
            backends={c.name: ", ".join(b.name for b in c.backends) for c in self.calls},
            donation=traced.donation,
            notes=self.notes,
            generators=traced.options.generators,
            table=self.table,
            limits=self.limits,
            query_lens=traced.options.query_lens,
            plan=self.plan,
            estimate=self._estimate,
            count=self._count,
            level=self.level,
            compiled=compiled,
            matches={one.one.name: one.matches for one in traced.passes},
            maker=traced.maker(self.limits),
            modules=tuple(p.gm if isinstance(p, Piece) else None for p in pieces.parts),
            asked=traced.asked,
            dirty=traced.dirty,
            peers=self._peers(),
            divided=divided(pieces.program, self.calls),
            one_launch=one_launch,
        )

    def _peers(self) -> Peers | None:
        """Who the collectives meet, and all that must be alike there; see `fngraph.step.agreed`."""
        traced = self.split.traced
        found = collectives_of(traced.graph.gm.graph)
        if not found:
            return None
        options, leaves = traced.options, traced.args.leaves
        told = {
            "fngraph": own_source()[:16],
            **versions(),
            "limits": repr(self.limits),
            "modes": str(self.table.modes),
            "the dispatch table": f"{self.table!r} {self.table.plan_hash}",
            "compile": self.level,
            "passes": str([one.key for one in options.passes_in_order]),
            "generators": str(len(options.generators)),
            **{f"the backend of {c.name}": ", ".join(b.name for b in c.backends)
               for c in self.calls},
            **{leaf.path: _kind(leaf) for leaf in leaves},
            **{name: text for name, (text, _) in traced.alike.items()},
            "collectives": ", ".join(f"{one.op} over {one.axis}" for one in found),
        }  # fmt: skip
        return Peers(
            # names of groups differ from row to row, so that they are no order
            groups=tuple(
                sorted(
                    dict.fromkeys((one.axis, one.group) for one in found),
                    key=operator.itemgetter(0),
                )
            ),
            told=told,
            places={name: line for name, (_, line) in traced.alike.items()},
            counts=traced.of_rows,
            calls=tuple((one.op, one.axis, one.line) for one in found),
        )

    def estimate(self, mode: Mode, descriptor: BatchDescriptor) -> Bytes:
        """Bytes that a key will take in the pool and for its graphs.

        Raises:
            ModesError, SpecError: no mode, or no key.
        """
        return self._estimate(Mode.parse(mode), descriptor)

    @property
    def memory(self) -> MemoryTable:
        """What every key will take, estimated."""
        return MemoryTable(tuple(KeyMemory(*key, self.estimate(*key)) for key in self.table))

    @functools.cached_property
    def _estimate(self) -> Callable[[Mode, BatchDescriptor], Bytes]:
        """`estimate` by itself, without the stage."""
        pieces, limits, graph = self.split.pieces, self.limits, self.split.traced.graph
        outputs = len(pieces.program.outputs)
        alive = functools.cache(lambda: lifetimes(pieces, graph))  # some ms, once asked for

        def of_key(mode: Mode, descriptor: BatchDescriptor) -> Bytes:
            return estimate(pieces, alive(), mode, sizes_of(descriptor, limits), outputs)

        return of_key

    def launch_model(self, constants: Constants, context: int | None = None) -> LaunchModel:
        """What steps will take in each mode, predicted: `print(model.as_text())`.

        Args:
            constants: of the machine, `fg.core.Constants.loads(text)`; what measures them is
                `python -m benchmarks launch --constants FILE`.
            context: tokens of each request where a batch's spec does not say.
        """
        layers = self.one_launch if isinstance(self.one_launch, Layers) else None
        return launch_model_of(self._count, self.table, self.level, layers, constants, context)

    @functools.cached_property
    def _count(self) -> Count:
        """What the parts do, without the stage."""
        return counter(self.split.pieces, self.split.traced.graph)

    def _repr_html_(self) -> str:
        return html(self.as_text())

    def as_text(self) -> str:
        """Backends, modes, keys and buffers."""
        calls = (*self.calls, *self.inner.values())
        rows = [[i, *pair] for i, c in enumerate(calls) for pair in c.levels()]
        parts = [self.table.as_text(), self.plan.as_text()]
        parts += [table(["cut", "primitive (backend)", "support"], rows)] if rows else []
        parts += self.notes
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return (
            f"Lowered({self.table!r}, {len(self.plan.buffers)} static buffers of "
            f"{self.plan.nbytes} bytes, notes: {list(self.notes) or 'none'})"
        )


def _kind(leaf: Leaf) -> str:
    """What a leaf is, on whichever of a host's devices."""
    what = str(leaf.buffer)
    if leaf.spec is not None:
        dtype = str(leaf.spec.dtype).removeprefix("torch.")
        what = f"{dtype}{list(leaf.spec.shape)} of strides {list(leaf.spec.stride)}"
    return f"{leaf.role.value} {what} on {leaf.device.type}"


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Pieces of traced ops, with a primitive between one and the next."""

    traced: Traced
    pieces: Pieces

    @property
    def program(self) -> Program:
        """The instructions as data."""
        return self.pieces.program

    @property
    def distinct(self) -> list[Piece]:
        """Each distinct piece once; it is compiled once."""
        return list(dict.fromkeys(p for p in self.pieces.parts if isinstance(p, Piece)))

    @functools.cached_property
    def functions(self) -> Mapping[fx.GraphModule, LoopFunction]:
        """The functions of loops as programs."""
        return functions_of(self.traced.graph, self.distinct, tuple(PRIMITIVES))

    @property
    def pieces_within(self) -> list[Piece]:
        """Each distinct piece once, and then each of the functions of loops."""
        parts = [part for one in self.functions.values() for part in one.parts]
        inner = (part for part in parts if isinstance(part, Piece))
        return list(dict.fromkeys((*self.distinct, *inner)))

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
            CompileError: compile_sizes beyond the limits.
        """
        traced, options = self.traced, self.traced.options
        limits = limits or traced.limits
        if limits.dims != traced.limits.dims:
            raise SpecError(
                f"traced with {traced.limits!r}, lowered with {limits!r}: letters other than T and "
                "R are fixed by the trace. Trace with the same: trace(..., limits=limits)"
            )
        traced.graph.check_limits(limits)
        check_compile_sizes(options.compile_sizes, limits)
        asked = Asked(traced.graph.gm, options.backends)
        calls = choose(self.pieces, asked)
        inner = choose_within(self.distinct, traced.graph, asked)
        every = (*calls, *inner.values())
        support = dict(pair for call in every for pair in call.levels()) or Support.ALWAYS
        resolution = resolve(
            options.modes, support, query_lens=options.query_lens, limits=limits,
            sizes=None if options.sizes is None else check_sizes(options.sizes, limits),
            **options.resolve,
        )  # fmt: skip
        if inner:
            check_within(traced.graph.gm, resolution.modes)
        dispatch_table = build_table(
            resolution.modes, resolution.sizes, limits, options.adapters, options.fields,
            options.cost, own_uniform=any(call.own_uniform for call in every),
            key_reqs=options.key_reqs,
        )  # fmt: skip
        top = key_sizes(dispatch_table.top, None, limits.max_reqs, limits.dims)
        top["R"] = max((sizes_of(key, limits)["R"] for _, key in dispatch_table), default=0)
        plan = plan_buffers(traced.args.fields, top)
        most = {**limits.dims, "T": limits.max_tokens, "R": limits.max_reqs}
        most |= {name: max(most[name], top[name]) for name in COUNTED}
        calls = with_planners(calls, self.pieces, traced.args.leaves, most)
        return Lowered(self, limits, calls, resolution, dispatch_table, plan, inner)

    def as_text(self) -> str:
        """One line an instruction, with the leaves that it reads by name; equal kinds are one."""
        leaves = [leaf.path for leaf in self.traced.args.leaves] + list(self.traced.constants)
        return self.program.as_text(dict(enumerate(leaves)))

    def __repr__(self) -> str:
        return (
            f"Split({count(len(self.program.instructions), 'instruction')}: "
            f"{count(len(self.cuts), 'cut')}, {count(len(self.distinct), 'distinct piece')})"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """`forward` as an fx graph, pure and with its donation settled.

    Attributes:
        donation: how each donated leaf gets its new value.
        out_tree: structure of what `forward` returns.
        returns: index of a donated leaf to the index of the output leaf that is its new value.
        ambient: the state of torch that it was traced under.
        asked: which of grad and inference mode `forward` has asked for; the others are all one.
        maker_of: `Retracer`: what makes an executable of it again, within limits.
        passes: what each pass did to the graph, in order.
        alike: what processes that its collectives meet must have alike of it, by name, with lines.
        of_rows: whether they must bring as many tokens and requests.
        dirty: index of an output to its elements that are not bare `forward`'s, kept for padding.
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
    maker_of: Callable[[Traced, Limits], Maker]
    passes: tuple[Applied, ...] = ()
    alike: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    of_rows: bool = False
    dirty: Mapping[int, Boxes] = dataclasses.field(default_factory=dict)

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
        """What is not as it was asked for: primitives that are no cuts, streams that are one, what
        passes have left."""
        notes = [f"{one.one.name}: {note}" for one in self.passes for note in one.notes]
        notes += [
            f"{line}: {name} is inlined, as a gradient or a torch.func transform goes through it: "
            "its plain torch ops are captured, there is no cut, and no backend is asked"
            for name, line in self.graph.inlined
        ]
        notes += [
            f"{line}: the side stream is ignored: forward runs on one stream, in program order"
            for line in self.graph.streams
        ]
        return tuple(notes)

    def diff(self, one: str | Pass | Callable[[Any], Any]) -> str:
        """What a pass changed, as a unified diff of the graph's code; "" where it did not match.

        Args:
            one: its name, or what was in the list of passes.

        Raises:
            PassError: no pass of that name has run.
        """
        name = name_of(one)
        ran = {one.one.name: one for one in self.passes}
        if name not in ran:
            known = ", ".join(ran) or "none"
            given = repr(one) if isinstance(one, str) else name
            raise PassError(
                f"no pass {name!r} has run; there were {known}.{did_you_mean(name, ran)} Pass "
                f"fg.graphify(..., passes=(..., {given}))"
            )
        return ran[name].diff()

    @property
    def outputs(self) -> list[int]:
        """Indices of the output leaves that a program gives: all but donated leaves' new values."""
        returned = set(self.returns.values())
        return [i for i in range(self.out_tree.num_leaves) if i not in returned]

    def split(self) -> Split:
        """Cut at every primitive; equal pieces become one."""
        outputs = self.outputs
        by_loops, apart = self.options.compile != "none", one_by_one(self.options.backends)
        return Split(self, split(self.graph, tuple(PRIMITIVES), outputs, by_loops, apart))

    def maker(self, limits: Limits) -> Maker:
        """What makes its executable again; without the graphs of passes, which take memory."""
        passes = tuple(one.counted() for one in self.passes)
        return self.maker_of(dataclasses.replace(self, passes=passes), limits)

    def computes_as(self, other: Traced) -> bool:
        """Whether two traces are the same program, run by the same kernels."""
        alike = self.graph.same_as(other.graph) and self.out_tree == other.out_tree
        return alike and self.ambient.kernels == other.ambient.kernels

    def as_text(self) -> str:
        """The traced ops as Python; before them, how often each pass has matched, and behind them
        the functions of loops."""
        gm = self.graph.gm
        parts = [as_text(self.passes)] if self.passes else []
        parts += [gm.code.strip(), *(loop.as_text() for loop in loops_of(gm))]
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        ops = sum(n.op == "call_function" for n in self.graph.gm.graph.nodes)
        how = [row.how for row in self.donation.rows]
        donated = ", ".join(f"{how.count(h)} {h}" for h in dict.fromkeys(how)) or "none"
        inlined = "".join(f", {name} inlined at {line}" for name, line in self.graph.inlined)
        passes = ", ".join(f"{one.one.name} x{one.matches}" for one in self.passes)
        ran = f", passes: {passes}" if passes else ""
        return f"Traced({self.signature!r}, {ops} ops, donated: {donated}{inlined}{ran})"
