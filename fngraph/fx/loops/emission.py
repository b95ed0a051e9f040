"""A loop becomes one node of the trace that goes on: what its functions may do, and what it gives.

A function may write what it has made, and what the loop was given to keep: a carry that comes back
as the same tensor, or a tensor from around it, that is donated or an intermediate. Such memory is
an operand that the node writes. What a turn makes anew goes through the loop's own buffers.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.errors import (
    AliasError,
    FnGraphError,
    MutationError,
    OperatorError,
    RandomError,
    TransformError,
)
from fngraph.fx.generators import drawn
from fngraph.fx.leaves import Role, same_place
from fngraph.fx.loops.bodies import (
    Body,
    fake_like,
    fakes_of,
    is_constant,
    node_of,
    outline,
    shape_of,
    trace_body,
    track,
)
from fngraph.fx.loops.closures import Flat
from fngraph.fx.loops.node import Loop, SizeOperand
from fngraph.fx.nodes import is_op, is_tensor, line_of, storages_written, written_by
from fngraph.fx.pieces.collectives import is_collective
from fngraph.fx.tracing.purity import PurityMode, unwritable
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.tracing import node_of_size


@dataclasses.dataclass(frozen=True)
class Called:
    """How the user has called a loop.

    Attributes:
        name: "fg.scan".
        line: the user's.
        paths: of what it is given, "carry['h']", in order.
        given: where a gradient goes through it, the tensors that its functions may close over:
            all that the gradient knows of. It sees no memory that is written.
    """

    name: str
    line: str
    paths: tuple[str, ...] = ()
    given: tuple[torch.Tensor, ...] | None = None

    def of(self, given: Sequence[torch.Tensor] | None = None) -> Called:
        """The same, of other operands, under a gradient."""
        return dataclasses.replace(self, paths=(), given=None if given is None else tuple(given))

    def path(self, i: int) -> str:
        """The name of an operand."""
        return self.paths[i] if i < len(self.paths) else "an operand"


def emit_while(
    mode: PurityMode, called: Called, cond: Flat, body: Flat, carry: Sequence[Any]
) -> list[torch.Tensor]:
    """The node of a `while_loop`; its results."""
    names = [f"carry_{i}" for i in range(len(carry))]
    test = trace_body(mode, cond, [fake_like(x) for x in carry], names, carries=False)
    turn = trace_body(mode, body, [fake_like(x) for x in carry], names)
    return _emit(mode, called, "while_loop", (test, turn), carry, (), {})


def emit_scan(
    mode: PurityMode, called: Called, body: Flat, carry: Sequence[Any], xs: Sequence[Any],
    turns: int, reverse: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The node of a `scan`; the carry that it gives, and what it stacks."""
    names = [f"carry_{i}" for i in range(len(carry))] + [f"x_{i}" for i in range(len(xs))]
    examples = [fake_like(x) for x in carry] + [fake_like(x, shape_of(x)[1:]) for x in xs]
    turn = trace_body(mode, body, examples, names)
    more = {"turns": turns, "reverse": reverse}
    return _emit(mode, called, "scan", (turn,), carry, xs, more)


def emit_cond(
    mode: PurityMode, called: Called, pred: torch.Tensor, a: Flat, b: Flat
) -> list[torch.Tensor]:
    """The node of a `cond`; its results."""
    yes = trace_body(mode, a, (), (), carries=False)
    no = trace_body(mode, b, (), (), carries=False)
    return _emit(mode, called, "cond", (yes, no), (pred,), (), {})


def _emit(
    mode: PurityMode, called: Called, kind: str, functions: Sequence[Body], state: Sequence[Any],
    xs: Sequence[Any], more: Mapping[str, Any],
) -> list[torch.Tensor]:  # fmt: skip
    tracer, last, line = mode.tracer, functions[-1], called.line
    inits = [node_of(mode, x, line) for x in (*state, *xs)]
    threaded = _threaded(last, state, inits) if last.carries else {}
    try:
        _check_ops(called, functions)
        _check_writes(mode, called, kind, functions, threaded, (*state, *xs))
    except FnGraphError as error:
        mode.refuse(error)
        raise
    own = [x for i, x in enumerate(inits) if i not in threaded]
    carried = [] if kind == "cond" else [i for i in range(len(state)) if i not in threaded]
    others = last.fakes[len(state) :] if last.carries else functions[0].fakes
    others = () if kind == "while_loop" else others
    shapes = [(*((more["turns"],) if kind == "scan" else ()), *shape_of(x)) for x in others]
    sizes = [n for shape in shapes for n in shape if not isinstance(n, int)]
    graphs, reads = outline(tracer, functions, threaded, [node_of_size(n, tracer) for n in sizes])
    args = (*own, *reads)

    def at(n: Any) -> Any:
        return n if isinstance(n, int) else SizeOperand(args.index(node_of_size(n, tracer)))

    results = [fake_like(state[i]) for i in carried]
    results += [fake_like(x, shape) for x, shape in zip(others, shapes)]
    written = storages_written(node for gm in graphs for node in gm.graph.nodes)
    loop = Loop(
        kind, tuple(graphs), len(own) - len(xs), tuple(results),
        tuple(tuple(map(at, shape)) for shape in shapes), len(xs), line=line,
        called=called.name,
        writes=tuple(
            i for i, x in enumerate(args)
            if i >= len(own) and is_tensor(x) and storage_key(x.meta["val"]) in written
        ), **more,
    )  # fmt: skip
    if called.given is not None and (refused := _hidden(mode, called, loop, reads)) is not None:
        mode.refuse(refused)
        raise refused
    node = tracer.graph.create_node("call_function", loop, args, {}, kind)
    node.meta |= {"stack_trace": line, "val": loop.results}
    made = [_result(tracer, node, i, x) for i, x in enumerate(fakes_of(loop.results))]
    mode.made.note(made, line)
    found: list[Any] = [state[i] for i in range(len(state))] if kind != "cond" else []
    for i, x in zip(carried, made):
        found[i] = x
    return [*found, *made[len(carried) :]]


def _hidden(
    mode: PurityMode, called: Called, loop: Loop, reads: Sequence[fx.Node]
) -> FnGraphError | None:
    """What is wrong with a loop that a gradient goes through, and which would not know of it."""
    if loop.writes:
        return MutationError(
            f"{called.line}: a function of {called.name} writes in place what the loop was given, "
            "and a gradient goes through it. Return new values: x.index_put(...), x + y"
        )
    known = {node_of(mode, x, called.line) for x in called.given or ()}
    for x in reads:
        value = x.meta.get("val")
        smooth = isinstance(value, torch.Tensor) and value.is_floating_point()
        if smooth and x not in known and not is_constant(x):
            return TransformError(
                f"{called.line}: a function of {called.name} closes over a tensor "
                f"({line_of(x)}) that it uses where it cannot be seen, as a "
                "torch.autograd.Function does, and a gradient goes through the loop. Pass it in: "
                "as a part of the carry"
            )
    return None


def _result(tracer: Any, node: fx.Node, i: int, x: torch.Tensor) -> torch.Tensor:
    item = tracer.graph.create_node("call_function", operator.getitem, (node, i), {}, "getitem")
    item.meta["stack_trace"] = node.meta["stack_trace"]
    return track(x, item, tracer)  # type: ignore[no-any-return]


def _threaded(body: Body, state: Sequence[Any], inits: Sequence[fx.Node]) -> dict[int, fx.Node]:
    """Carries that come back as the tensors that they are, by number: they stay where they are."""
    return {
        i: inits[i]
        for i, (given, new) in enumerate(zip(body.inputs, body.fakes[: len(state)]))
        if same_place(given.meta["val"], new) and tuple(new.stride()) == tuple(state[i].stride())
    }


def _check_ops(called: Called, functions: Sequence[Body]) -> None:
    """Raise for an op that a turn cannot do again as Python would."""
    for node in (node for one in functions for node in one.nodes):
        if drawn(node) is not None:
            raise RandomError(
                f"{line_of(node)}: a function of {called.name} draws random numbers "
                f"({node.target}), and a graph would draw the same ones at each turn. Draw them "
                "before the loop, a row for each turn, and scan over them: "
                "xs=torch.rand(n, ..., generator=g)"
            )
        if is_op(node) and is_collective(node):
            raise OperatorError(
                f"{line_of(node)}: a function of {called.name} calls the collective {node.target}, "
                "for which all processes would have to take the same turns. Call it before the "
                "loop, or after it"
            )


def _check_writes(
    mode: PurityMode, called: Called, kind: str, functions: Sequence[Body],
    threaded: Mapping[int, fx.Node], given: Sequence[Any],
) -> None:  # fmt: skip
    """Raise where a function writes what is not the loop's to write, or what another reads."""
    outer: dict[int, fx.Node] = {}
    for one in functions:
        of_input = {storage_key(x.meta["val"]): i for i, x in enumerate(one.inputs)}
        around = {storage_key(x.meta["val"]) for x in one.reads if is_tensor(x)}
        for node in one.nodes:
            for key in (storage_key(x.meta["val"]) for x in written_by(node)):
                if key in of_input:
                    _check_input(mode, called, one, node, of_input[key], threaded, given)
                    outer[storage_key(given[of_input[key]])] = node
                elif key in around:
                    outer[key] = node
                if key in around and kind == "while_loop" and not one.carries:
                    raise MutationError(
                        f"{line_of(node)}: cond of fg.while_loop writes ({node.target}). It may "
                        "only look: write in the body"
                    )
    for i, x in enumerate(given):
        if i not in threaded and (writer := outer.get(storage_key(x))) is not None:
            raise AliasError(
                f"{called.line}: {called.path(i)} of {called.name} shares memory with a tensor "
                f"that the loop writes at {line_of(writer)}. Pass a copy: {called.path(i)}.clone()"
            )


def _check_input(
    mode: PurityMode, called: Called, one: Body, node: fx.Node, i: int,
    threaded: Mapping[int, fx.Node], given: Sequence[Any],
) -> None:  # fmt: skip
    """The same of a write into what a function was given."""
    if i not in threaded or not one.carries:
        raise MutationError(
            f"{line_of(node)}: a function of {called.name} writes into {called.path(i)} "
            f"({node.target}), which is another turn's too. Return a new value, "
            "x.index_put(...) or x + y; or, to write it in place, return that very tensor as its "
            "new value"
        )
    leaf = mode.owners.get(storage_key(given[i]))
    if leaf is not None and leaf.role is not Role.DONATED:
        raise unwritable(line_of(node), node.target, leaf, mode.owners)
