"""A step's program run again, instruction by instruction, each captured by itself with its results
kept; beside each, what its ops give of the same inputs, one by one and outside of a graph.

A primitive is held to what bare `forward` calls there: the backend that suits, over true rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.calls import PrimitiveCall
from fngraph.core import HostBounds, Mode
from fngraph.core.program import Instruction
from fngraph.fx.generators import with_generators
from fngraph.fx.nodes import line_of, written_by
from fngraph.fx.pieces.cuts import LETTERS
from fngraph.graphs.recorder import Recorder
from fngraph.graphs.recorders import make_recorder
from fngraph.graphs.replay import EagerCall
from fngraph.shadow.nodes import Place, Tolerances, Walked, difference, name_of, true_part, walk
from fngraph.shadow.saved import Ran, Saved
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
    states = [g.get_state() for g in executable.generators]
    try:
        for generator, state in zip(executable.generators, saved.generators):
            generator.set_state(state)
        with keys.fixed_ambient():
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
    finally:
        for generator, state in zip(executable.generators, states):
            generator.set_state(state)
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
        states = [g.get_state() for g in run.keys.executable.generators]
        fn(*[x.clone() for x in tensors])
        for generator, state in zip(run.keys.executable.generators, states):
            generator.set_state(state)


def _piece(run: _Run, at: int, one: Instruction) -> None:
    executable = run.keys.executable
    made = executable.modules[at]
    assert made is not None
    gm, fn = with_generators(made, executable.generators), executable.fns[at]
    tensors = [run.values[i] for i in one.reads]
    written = _written(gm)
    copies = [x.clone() if k in written else x for k, x in enumerate(tensors)]
    should = {k: run.should[i] for k, i in enumerate(one.reads) if i in run.should}
    paths = _paths(run, one)
    states = [g.get_state() for g in executable.generators]
    walked = walk(
        gm, run.sides.sizes, run.sides.true, copies, should, (at, one.name), paths, run.within
    )
    for generator, state in zip(executable.generators, states):
        generator.set_state(state)
    sizes = run.sides.sizes
    host = run.bounds if run.mode is Mode.NONE else bounds_of(run.prepared.chosen.key)
    _warmed(run, lambda *xs: fn(sizes, host, *xs), tensors)
    results = _recorded(run, lambda: fn(sizes, host, *tensors))
    run.places += walked.found
    _hold_to_ops(run, at, one, gm, walked, results)
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"][2:]
    for k in written:
        _note(run, at, one, nodes[k], tensors[k], copies[k], "writes into an argument")
    run.values.update(zip(one.writes, results))
    for number, node in zip(one.writes, _results(gm)):
        if node in walked.should:
            run.should[number] = walked.should[node]


def _hold_to_ops(
    run: _Run, at: int, one: Instruction, gm: fx.GraphModule, walked: Walked, results: Sequence[Any]
) -> None:
    """Compare what the piece gave with what its ops gave, one by one."""
    order = {node: k for k, node in enumerate(gm.graph.nodes)}
    pairs = sorted(zip(_results(gm), results), key=lambda pair: order[pair[0]])
    for node, got in pairs:
        if _note(run, at, one, node, got, walked.made[node], "gives"):
            return  # the first op; what it has fed comes later


def _note(
    run: _Run, at: int, one: Instruction, node: fx.Node, got: Any, want: Any, verb: str
) -> bool:
    """Keep the place, if the piece has something else there than its ops make."""
    sizes, true = run.sides.sizes, run.sides.true
    letters = _letters(run, at)
    a, b = (true_part(node, x, sizes, true, letters) for x in (got, want))
    if a is None or b is None:
        return False
    what = difference(a, b, run.within)
    if what is None:
        return False
    how = "compiled code" if not _is_plain(run, at) else "the piece, captured,"
    text = f"{how} {verb} something else than its ops one by one: {what[0]}"
    number = list(run_nodes(run, at)).index(_twin(run, at, node))
    op = name_of(node) if node.op != "placeholder" else "a write"
    run.places.append(Place((at, number), one.name, op, line_of(node), text, what[1]))
    return True


def run_nodes(run: _Run, at: int) -> Sequence[fx.Node]:
    """The nodes of a piece as it was traced."""
    made = run.keys.executable.modules[at]
    assert made is not None
    return list(made.graph.nodes)


def _twin(run: _Run, at: int, node: fx.Node) -> fx.Node:
    """The same node of the piece as it was traced, which one with generators is a copy of."""
    nodes = run_nodes(run, at)
    return nodes[list(node.graph.nodes).index(node)]


def _letters(run: _Run, at: int) -> Mapping[Any, str]:
    made = run.keys.executable.modules[at]
    assert made is not None
    found: Mapping[Any, str] = made.meta[LETTERS]
    return found


def _is_plain(run: _Run, at: int) -> bool:
    executable = run.keys.executable
    return all(one is not executable.fns[at] for one in executable.compiled)


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
    schema = [a for a in fn.primitive.op._schema.arguments]
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


def _results(gm: fx.GraphModule) -> list[fx.Node]:
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    return list(output.args[0])


def _written(gm: fx.GraphModule) -> set[int]:
    """Which tensors a piece may write, by their place: those that an op writes, or a view of."""
    given = [node for node in gm.graph.nodes if node.op == "placeholder"][2:]
    touched = {
        storage_key(x.meta["val"])
        for node in gm.graph.nodes
        for x in written_by(node)
        if isinstance(x.meta.get("val"), torch.Tensor)
    }
    return {k for k, x in enumerate(given) if storage_key(x.meta["val"]) in touched}
