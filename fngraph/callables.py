"""What runs each piece of a program: its ops as they were traced, or what they were compiled to.

A loop is traced ops in either case: what takes turns is whoever records, or Python. Where pieces
are compiled, its functions are programs of their own, over pieces compiled like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from fngraph.calls import PrimitiveCall
from fngraph.core.program import run_program
from fngraph.fx.generators import Generators, with_generators
from fngraph.fx.loops.bound import has_loops, with_control
from fngraph.fx.pieces.code import blame, direct
from fngraph.fx.pieces.cuts import Piece
from fngraph.fx.pieces.functions import LoopFunction, graphs_within
from fngraph.graphs.control import recording_control
from fngraph.graphs.replay import InstructionFn

Calls = Mapping[fx.Node, PrimitiveCall]
"""Primitives within loops, by their nodes."""


class Callables:
    """One for each distinct piece, made when it is first asked for.

    Args:
        compiled: of the pieces that are, by `id`.
        functions: those of loops that are programs; a loop whose functions are not here runs them
            as they were traced.
    """

    def __init__(
        self, generators: Generators, calls: Calls, compiled: Mapping[int, InstructionFn],
        functions: Mapping[fx.GraphModule, LoopFunction],
    ) -> None:  # fmt: skip
        self.generators, self.calls, self.functions = generators, calls, functions
        self._made = dict(compiled)

    def of(self, piece: Piece) -> InstructionFn:
        """What runs a piece."""
        if id(piece) not in self._made:
            made = {
                gm: self._program(self.functions[gm])
                for gm in graphs_within(piece)
                if gm in self.functions
            }
            self._made[id(piece)] = _as_traced(piece, self.generators, self.calls, made)
        return self._made[id(piece)]

    def _program(self, function: LoopFunction) -> Callable[..., Any]:
        """A function of a loop as `f(context, *operands)`."""
        cuts = iter(function.cuts)
        fns = [
            self.of(part) if isinstance(part, Piece) else self.calls[next(cuts)]
            for part in function.parts
        ]
        program = function.program

        def call(context: Any, *operands: Any) -> list[Any]:
            return run_program(program, fns, operands, *context)

        return call


def _as_traced(
    piece: Piece, generators: Generators, inner: Calls,
    made: Mapping[fx.GraphModule, Callable[..., Any]],
) -> InstructionFn:  # fmt: skip
    calls = {
        node: lambda context, *tensors, call=call: call(*context, *tensors)
        for node, call in inner.items()
    }
    looped = has_loops(piece.gm)
    bound = with_control(piece.gm, recording_control, calls, made=made)
    gm = with_generators(bound, generators)
    forward = direct(gm)  # not gm(...): nn.Module.__call__ takes some 3 us a piece

    def call_piece(sizes: Mapping[str, int], host: Any, *tensors: Any) -> tuple[Any, ...]:
        try:
            if looped:
                return forward((sizes, host), sizes["T"], sizes["R"], *tensors)
            return forward(sizes["T"], sizes["R"], *tensors)
        except Exception as error:
            if (op := blame(gm, error)) is not None:
                error.add_note(f"in {op}")
            raise

    return call_piece
