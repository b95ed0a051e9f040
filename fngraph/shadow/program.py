"""A step's program run again, instruction by instruction, each captured by itself with its results
kept; beside each, what its ops give of the same inputs, one by one and outside of a graph.

A primitive is held to what bare `forward` calls there: the backend that suits, over true rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fngraph.calls import PrimitiveCall
from fngraph.core import HostBounds, Mode
from fngraph.core.program import Instruction
from fngraph.fx.generators import preserved, with_generators
from fngraph.fx.nodes import inputs_of, line_of, name_of, results_of, storages_written
from fngraph.fx.pieces.cuts import LETTERS
from fngraph.graphs.recorder import Recorder
from fngraph.graphs.recorders import make_recorder
from fngraph.graphs.replay import EagerCall
from fngraph.shadow.inside import Found, look_inside
from fngraph.shadow.nodes import Place, Tolerances, difference, true_part, walk
from fngraph.shadow.saved import Ran, Saved, drawn_from
from fngraph.shadow.sides import Sides
from fngraph.step.capture import bounds_of, plan_step
from fngraph.step.keys import Keys
from fngraph.step.prepared import Prepared
from fngraph.torch_facts.memory import storage_key


@dataclasses.dataclass(frozen=True)
class RanProgram:
    """A program that has run.

    Attributes:
        ran: its results, cut to the batch.
        places: where an instruction gave something else than its ops, in order.
    """

    ran: Ran
    places: tuple[Place, ...]


@dataclasses.dataclass(eq=False)
class _Run:
    keys: Keys
    prepared: Prepared
    sides: Sides
    bounds: HostBounds  # of the batch
    recorder: Recorder
    within: Tolerances
    values: dict[int, torch.Tensor]  # of the program
    should: dict[int, torch.Tensor]  # those that should be something else
    places: list[Place] = dataclasses.field(default_factory=list)

    @property
    def mode(self) -> Mode:
        return self.prepared.chosen.mode


def run_program_again(
    keys: Keys, saved: Saved, prepared: Prepared, sides: Sides, within: Tolerances
) -> RanProgram:
    """Run it all, whatever is found: other processes do, and wait in its collectives."""
    executable = keys.executable
    recorder = make_recorder(keys.shared.recorder.name, keys.shared.recorder.device)
    run = _Run(
        keys, prepared, sides, saved.counts.bounds, recorder, within,
        dict(enumerate(sides.inputs)), dict(sides.should),
    )  # fmt: skip
    with drawn_from(keys, saved), keys.fixed_ambient():
        if executable.planners:
            host = [x.cpu() for x in saved.rows.staged]
            plan_step(keys, prepared.chosen, prepared.true, host)
        for at, one in enumerate(executable.program.instructions):
            (_cut if one.cut else _piece)(run, at, one)
            for i in one.drops:
                run.values.pop(i, None)
                run.should.pop(i, None)
        outputs = [run.values[i] for i in executable.program.outputs]
        outputs = [x.clone() for x in keys.cut(outputs, prepared.true)]
    new = {i: sides.inputs[i] for i in saved.state}
    return RanProgram(Ran(tuple(outputs), new), tuple(run.places))


def _recorded(run: _Run, fn: Any) -> Any:
    """What `fn` gives, as a graph does it; by itself in a step without graphs."""
    if run.mode is Mode.NONE:
        return fn()
    generators = run.keys.executable.generators
    recording, result = run.recorder.record(fn, generators=generators, watched=False)
    recording.replay()
    run.recorder.synchronize()
    return result


def _warmed(run: _Run, fn: Any, tensors: Sequence[torch.Tensor]) -> None:
    """A kernel's first run does what no recording may hold."""
    if run.recorder.lazy_kernels and run.mode is not Mode.NONE:
        with preserved(run.keys.executable.generators):
            fn(*[x.clone() for x in tensors])


def _piece(run: _Run, at: int, one: Instruction) -> None:
    executable = run.keys.executable
    traced = executable.modules[at]
    assert traced is not None
    gm, fn = with_generators(traced, executable.generators), executable.fns[at]
    tensors = [run.values[i] for i in one.reads]
    written = _written(gm)
    copies, fresh, again = ([x.clone() if k in written else x for k, x in enumerate(tensors)]
                            for _ in range(3))  # fmt: skip
    should = {k: run.should[i] for k, i in enumerate(one.reads) if i in run.should}
    sizes = run.sides.sizes
    host = run.bounds if run.mode is Mode.NONE else bounds_of(run.prepared.chosen.key)
    with preserved(executable.generators):
        walked = walk(
            gm, sizes, run.sides.true, copies, should, (at, one.name), _paths(run, one), run.within
        )
    _warmed(run, lambda *xs: fn(sizes, host, *xs), tensors)
    results = _recorded(run, lambda: fn(sizes, host, *tensors))
    run.places += walked.found
    given, made = inputs_of(gm.graph)[2:], results_of(gm.graph)
    pairs = [(node, x, walked.made[node], "gives") for node, x in zip(made, results)]
    pairs += [(given[k], tensors[k], copies[k], "leaves in an argument") for k in sorted(written)]
    seen = [place for pair in pairs if (place := _other(run, at, one, gm, *pair)) is not None]
    if seen or executable.peers is not None:  # who run it as often
        inputs = [sizes["T"], sizes["R"], *again]
        with preserved(executable.generators):
            inside = look_inside(
                gm, walked.made, lambda: fn(sizes, host, *fresh), inputs, run.within
            )
        if seen:
            run.places += _named(at, one, gm, inside) or [min(seen, key=lambda place: place.at)]
    run.values.update(zip(one.writes, results))
    for number, node in zip(one.writes, made):
        if node in walked.should:
            run.should[number] = walked.should[node]


def _other(
    run: _Run, at: int, one: Instruction, gm: fx.GraphModule, node: fx.Node, got: Any, want: Any,
    verb: str,
) -> Place | None:  # fmt: skip
    """Where the piece has something else than its ops one by one, by what makes that result."""
    sizes, true = run.sides.sizes, run.sides.true
    a, b = (true_part(node, x, sizes, true, gm.meta[LETTERS]) for x in (got, want))
    what = None if a is None or b is None else difference(a, b, run.within)
    if what is None:
        return None
    executable = run.keys.executable
    is_compiled = any(piece is executable.fns[at] for piece in executable.compiled)
    how = "compiled code" if is_compiled else "the piece, captured,"
    text = f"{how} {verb} something else than its ops one by one: {what[0]}"
    number = list(gm.graph.nodes).index(node)
    writer = node
    if node.op == "placeholder":
        key = storage_key(node.meta["val"])
        writes = [n for n in gm.graph.nodes if key in storages_written([n])]
        writer = writes[-1] if writes else node
    return Place((at, number), one.name, name_of(writer), line_of(writer), text, what[1])


def _named(at: int, one: Instruction, gm: fx.GraphModule, inside: Sequence[Found]) -> list[Place]:
    """What was seen inside of a piece's function: the first op of it, and the first far off."""
    order = list(gm.graph.nodes)
    firsts = [next((x for x in inside if not x[2]), None), next(iter(inside), None)]
    return [
        Place((at, order.index(node)), one.name, name_of(node), line_of(node), text, is_close)
        for node, text, is_close in dict.fromkeys(filter(None, firsts))
    ]


def _cut(run: _Run, at: int, one: Instruction) -> None:
    executable, prepared, true = run.keys.executable, run.prepared, run.prepared.true
    fn, dims = executable.fns[at], executable.row_dims[at]
    tensors = [run.values[i] for i in one.reads]
    own = [run.should.get(i, x).clone() for i, x in zip(one.reads, tensors)]
    rows = [x if d is None else x[: d(**true)] for x, d in zip(own, dims)]
    if isinstance(fn, PrimitiveCall):
        fn.bare(*rows)
    if run.mode is Mode.PIECEWISE:
        EagerCall(one.name, fn, tuple(tensors), dims).bind(true)(host=run.bounds)
    elif run.mode is Mode.NONE:
        fn(true, run.bounds, *tensors)
    else:
        host, sizes = bounds_of(prepared.chosen.key), run.sides.sizes
        _warmed(run, lambda *xs: fn(sizes, host, *xs), tensors)
        _recorded(run, lambda: fn(sizes, host, *tensors))
    if not isinstance(fn, PrimitiveCall):
        return
    schema = fn.primitive.op._schema.arguments
    stale = sorted(
        run.keys.executable.args.leaves[i].path for i in one.reads if i in run.sides.should
    )
    for k, (place, x, want, d) in enumerate(zip(fn.cut.places, tensors, rows, dims)):
        name = schema[place].name
        if not schema[place].alias_info:
            continue
        what = difference(x if d is None else x[: d(**true)], want, run.within)
        if what is None:
            continue
        key = prepared.chosen.key[1] if run.mode is Mode.FULL else None
        backend = fn.backend if key is None or key.query_len is None else fn.uniform or fn.backend
        suited = fn.primitive.suited(fn.config).name
        other = "itself over true rows" if suited == backend.name else f"{suited!r}"
        text = f"backend {backend.name!r} writes other values into {name} than {other}: {what[0]}"
        op = str(fn.primitive.op)
        run.places.append(Place((at, k), one.name, op, fn.cut.line, text, what[1], tuple(stale)))


def _paths(run: _Run, one: Instruction) -> dict[int, str]:
    """Arguments of an instruction that are leaves, by their place."""
    leaves = run.keys.executable.args.leaves
    return {k: leaves[i].path for k, i in enumerate(one.reads) if i < len(leaves)}


def _written(gm: fx.GraphModule) -> set[int]:
    """Which tensors a piece may write, by their place: those that an op writes, or a view of."""
    touched = storages_written(gm.graph.nodes)
    given = inputs_of(gm.graph)[2:]
    return {k for k, x in enumerate(given) if storage_key(x.meta["val"]) in touched}
