"""`PrimitiveCall`: a cut with the backends that run it, one instruction of a program.

A backend is chosen for each cut when a split graph is lowered, or two where uniform batches have
one of their own; what they plan on the host is settled then, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core import BatchDescriptor, HostBounds, Mode, Support
from fngraph.core.buffers import Dim
from fngraph.core.program import Instruction, Program
from fngraph.core.text import did_you_mean
from fngraph.errors import BackendError, OperatorError
from fngraph.fx.leaves import Leaf
from fngraph.fx.loops.bound import calls_of, primitives_within
from fngraph.fx.nodes import line_of, op_name
from fngraph.fx.pieces.cuts import Cut, Piece, Pieces, cut_of
from fngraph.fx.tracing.tracer import Graph
from fngraph.ops.backend import Backend, Bound, Planner
from fngraph.ops.choice import Choice, Choices, Hybrid, choices_of
from fngraph.ops.primitives import PRIMITIVES, Primitive


@dataclasses.dataclass(frozen=True, eq=False)
class PrimitiveCall:
    """A cut with the backend that runs it and the configuration that it was chosen for.

    As a function of the program it is `call(sizes, host, *tensors) -> ()`.

    Attributes:
        uniform: the backend of uniform keys, if they have one of their own.
        planners: of backends that plan on the host, by their name.
        note: why the backend is not the one that would have been preferred, or "".
    """

    name: str
    cut: Cut
    primitive: Primitive
    backend: Backend
    config: Any
    uniform: Backend | None = None
    planners: Mapping[str, Planner] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def backends(self) -> tuple[Backend, ...]:
        """All that may run it."""
        return (self.backend,) if self.uniform is None else (self.uniform, self.backend)

    @property
    def own_uniform(self) -> bool:
        """Whether uniform batches should have keys of their own, whatever the mode."""
        return self.uniform is not None or self.backend.own_uniform

    def levels(self) -> list[tuple[str, Support]]:
        """The level of each backend, by name and layer."""
        kinds = [""] if self.uniform is None else ["uniform: ", "mixed: "]
        return [
            (f"{self.name} ({kind}{backend.name})", backend.level(self.config))
            for kind, backend in zip(kinds, self.backends)
        ]

    def check_shipped(self) -> None:
        """Raise `BackendError` if a backend is but a name with a level."""
        for backend in self.backends:
            if not backend.shipped:
                raise BackendError(
                    f"{self.name} cannot run: fngraph does not ship {backend.name!r}, whose level "
                    f"alone is known, so that Lowered can be studied. Write its run(...) and "
                    f"register it: fg.ops.Backend({backend.name!r}, run, support)"
                )

    def bind(self, tensors: Sequence[torch.Tensor]) -> Bound:
        """The eager call over these tensors, which takes the step's bounds as `host=`."""
        args, plan = self._given(self.backend, tensors, None)
        return self.primitive.bind(self.backend, args, self.config, **plan, stay=True)

    def __call__(self, sizes: Any, host: HostBounds | None, *tensors: torch.Tensor) -> tuple[()]:
        """Call it once: by the bounds, for a key that is captured in one graph, or eagerly.

        Raises:
            BackendError: the backend returned something.
        """
        key = None if host is None else host.key
        own = None if key is None or key.query_len is None else self.uniform
        backend = own or self.backend
        args, plan = self._given(backend, tensors, key)
        self.primitive.call(backend, args, self.config, host, **plan)
        return ()

    def bare(self, *tensors: torch.Tensor) -> None:
        """Call it as the op does outside of a graph: by what suits, over rows that are all true."""
        backend = self.primitive.suited(self.config)
        args, _ = self._given(backend, tensors, None)
        self.primitive.call(backend, args, self.config, None)

    def _given(
        self, backend: Backend, tensors: Sequence[torch.Tensor], key: BatchDescriptor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The op's arguments, and what the backend has planned, by name."""
        args = list(self.cut.template)
        for i, tensor in zip(self.cut.places, tensors):
            args[i] = tensor
        planner = self.planners.get(backend.name)
        return tuple(args), {} if planner is None else {"plan": planner.buffers(key)}


def divided(program: Program, calls: Sequence[PrimitiveCall]) -> dict[int, Dim]:
    """Inputs of a program that tell a primitive where sequences begin, by their number, and the
    rows that these are of.

    Args:
        calls: one a cut, in order.
    """
    found = dict[int, Dim]()
    for one, call in zip((x for x in program.instructions if x.cut), calls, strict=True):
        if call.primitive.offsets is not None:
            names = [x.name for x in call.primitive.op._schema.arguments]
            place = call.cut.places.index(names.index(call.primitive.offsets))
            rows = call.cut.row_dims[0]
            if one.reads[place] < program.num_inputs and rows is not None:
                found[one.reads[place]] = rows
    return found


class Asked:
    """What `backends=` says of each call of a primitive, in the order of the trace: a call in a
    loop has its number among them, one for all turns."""

    def __init__(self, gm: fx.GraphModule, backends: Mapping[str, Choices]) -> None:
        outside: dict[str, list[Choice]] = {}
        self.within: dict[fx.Node, Choice] = {}
        calls = list(calls_of(gm, PRIMITIVES))
        ops = [op_name(node) for _, node in calls]
        left = {
            op: iter(choices_of(PRIMITIVES[op], backends.get(PRIMITIVES[op].name), ops.count(op)))
            for op in dict.fromkeys(ops)
        }
        for op, (loop, node) in zip(ops, calls):
            if loop is None:
                outside.setdefault(op, []).append(next(left[op]))
            else:
                self.within[node] = next(left[op])
        self.outside = {op: iter(found) for op, found in outside.items()}


def one_by_one(backends: Mapping[str, Choices]) -> bool:
    """Whether backends are listed by the number of the call."""
    return any(not isinstance(choice, str | Hybrid | None) for choice in backends.values())


def choose(pieces: Pieces, asked: Asked) -> tuple[PrimitiveCall, ...]:
    """A backend, or two, for each cut.

    Raises:
        BackendError: one that is unknown, or cannot run the configuration.
    """
    names = [one.name for one in pieces.program.instructions if one.cut]
    cuts = [part for part in pieces.parts if isinstance(part, Cut)]
    return tuple(_choose(name, cut, next(asked.outside[cut.op])) for name, cut in zip(names, cuts))


def choose_within(
    pieces: Sequence[Piece], graph: Graph, asked: Asked
) -> dict[fx.Node, PrimitiveCall]:
    """A backend, or two, for each primitive within a loop, by its node.

    Raises:
        BackendError: one that is unknown, cannot run the configuration, or plans on the host.
    """
    found: dict[fx.Node, PrimitiveCall] = {}
    for piece in pieces:
        for loop, node in primitives_within(piece.gm, PRIMITIVES):
            cut = cut_of(graph, node)
            name = f"{PRIMITIVES[cut.op].name} {len(found)} in {loop}"
            found[node] = call = _choose(name, cut, asked.within[node])
            if planned := [backend.name for backend in call.backends if backend.plan is not None]:
                raise BackendError(
                    f"{line_of(node)}: {name} would run on {planned[0]!r}, which plans on the host "
                    "before each step, and a loop's turns differ. Choose another backend: "
                    f'backends={{"{PRIMITIVES[cut.op].name}": "reference"}}'
                )
    return found


def check_within(gm: fx.GraphModule, modes: Mode) -> None:
    """Raise where PIECEWISE would have to cut within a loop.

    Raises:
        OperatorError: with the line of the primitive.
    """
    if Mode.PIECEWISE not in (modes.decode, modes.mixed):
        return
    for loop, node in primitives_within(gm, PRIMITIVES):
        raise OperatorError(
            f"{line_of(node)}: forward calls {node.target} within {loop}, where PIECEWISE cannot "
            'cut. Capture the loop whole: modes="FULL", or "FULL_DECODE_ONLY"; or call it outside '
            "of the loop"
        )


def _choose(name: str, cut: Cut, choice: Choice) -> PrimitiveCall:
    primitive = PRIMITIVES[cut.op]
    config = primitive.configure(*cut.example)
    uniform, note = None, ""
    if choice is None:
        backend = primitive.suited(config)
        over = primitive.passed_over(config)
        if over and not backend.preferred(config):
            note = f"{primitive.name} runs on {backend.name}, not on {'; '.join(over)}"
    elif isinstance(choice, str):
        backend = primitive.backend(choice)
    else:
        uniform, backend = primitive.backend(choice.uniform), primitive.backend(choice.mixed)
    call = PrimitiveCall(name, cut, primitive, backend, config, uniform, note=note)
    for one in call.backends:
        reason = one.refusal(config) if one.shipped else None
        if reason is not None:
            where = f"{name}: " if uniform else ""
            raise BackendError(
                f"{where}backend {one.name!r} cannot run {primitive.name} with {config}: {reason}"
            )
    return call


def with_planners(
    calls: Sequence[PrimitiveCall], pieces: Pieces, leaves: Sequence[Leaf], most: Mapping[str, int]
) -> tuple[PrimitiveCall, ...]:
    """The calls with planners for backends that plan on the host, shared where all is equal.

    Args:
        leaves: of the function's arguments.
        most: the largest size of each letter.

    Raises:
        BackendError: a leaf that the plan reads is not on the host.
    """
    staged = [i for i, leaf in enumerate(leaves) if leaf.buffer is not None]
    cuts = [one for one in pieces.program.instructions if one.cut]
    shared: dict[Any, Planner] = {}
    planned = []
    for one, call in zip(cuts, calls):
        planners = {}
        for backend in call.backends:
            if backend.plan is None:
                continue
            read = [_host_leaf(one, call, backend, name, leaves) for name in backend.plan.leaves]
            numbers = tuple(staged.index(i) for i in read)
            paths = tuple(leaves[i].path for i in read)
            planners[backend.name] = shared.setdefault(
                (backend.name, call.config, numbers),
                Planner(backend.name, backend.plan, call.config, numbers, paths, most),
            )
        planned.append(dataclasses.replace(call, planners=planners))
    return tuple(planned)


def _host_leaf(
    one: Instruction, call: PrimitiveCall, backend: Backend, name: str, leaves: Sequence[Leaf]
) -> int:
    """Number of the leaf that a plan reads as argument `name`."""
    names = [a.name for a in call.primitive.op._schema.arguments]
    read = [names[place] for place in call.cut.places]
    if name not in read:
        raise BackendError(
            f"backend {backend.name!r}: its plan reads {name!r}, and {one.name} has the tensors "
            f"{', '.join(read)}.{did_you_mean(name, read)}"
        )
    number = one.reads[read.index(name)]
    buffer = leaves[number].buffer if number < len(leaves) else None
    if buffer is None:
        why = f"{name}, which is no leaf of the batch: forward computes it, or holds it"
    elif buffer.changed:
        why = f'{leaves[number].path}, which lives on the device (rows="changed")'
    else:
        return number
    raise BackendError(
        f"backend {backend.name!r} of {one.name} plans on the host, where it reads {why}. "
        f"Pass {name} as a field of the batch, in host memory; or choose another backend"
    )
