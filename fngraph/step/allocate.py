"""Memory for a step: leaves bound, static buffers, outputs and ring allocated, nothing captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fngraph.core import Stats, trees
from fngraph.errors import TreeError
from fngraph.fx.ambient import plain_state
from fngraph.graphs.recorder import Recorder
from fngraph.graphs.recorders import make_recorder
from fngraph.graphs.staging.buffers import allocate
from fngraph.graphs.staging.ring import make_ring
from fngraph.stages import Compiled
from fngraph.step.assemble import assembler
from fngraph.step.binding import bind
from fngraph.step.book import Book, Rules
from fngraph.step.captured import Captured
from fngraph.step.entry import CALLED, make_entry
from fngraph.step.guards import guarded
from fngraph.step.prepared import LastCall
from fngraph.step.tables import Tables, make_tables


def check_outputs(outputs: str) -> None:
    """Raise `TreeError` unless `outputs` says who owns results."""
    if outputs not in ("own", "borrow"):
        raise TreeError(
            f'outputs={outputs!r}: "own" (yours to keep) or "borrow" (views, good for one call)'
        )


def anew(step: Captured, compiled: Compiled) -> Captured:
    """Memory for another trace of the function, over the step's leaves and in its pool."""
    treedefs, leaves = compiled.args.treedefs, step.binding.leaves
    values = [trees.unflatten(treedefs[i], leaves[s]) for i, s in step.binding.spans.items()]
    outputs = "borrow" if step.borrow else "own"
    return bind_and_allocate(
        compiled, values, step.recorder, outputs, step.book.rules, step.guards, step.tables
    )


@torch.inference_mode(False)  # graphs write these buffers, whatever mode the caller is in
def bind_and_allocate(
    compiled: Compiled,
    values: Sequence[Any],
    recorder: str | Recorder | None,
    outputs: str,
    rules: Rules | None = None,
    guards: bool = False,
    tables: Tables | None = None,
) -> Captured:
    """A `Captured` with nothing captured yet: leaves bound, static buffers allocated.

    Args:
        tables: those of the step that this one stands in for.

    Raises:
        TreeError, AliasError: see `bind`. CaptureError: an unknown recorder.
    """
    check_outputs(outputs)
    lowered = compiled.lowered
    binding = bind(compiled.args, values, lowered.split.traced.out_tree)
    made = make_recorder(recorder, compiled.args.device)
    static = allocate(lowered.plan, made.device)
    pieces = lowered.split.pieces
    buffers = tuple(
        torch.zeros(
            [max(d(**lowered.plan.sizes), 0) for d in dims], dtype=dtype, device=made.device
        )
        for dims, dtype in zip(pieces.output_dims, pieces.output_dtypes)
    )
    traced = lowered.split.traced
    constants = tuple(c.to(made.device) for c in traced.constants.values())
    assemble = assembler(
        traced.args, traced.out_tree, traced.returns, traced.args.signature.positions(*CALLED)
    )
    entry = make_entry(compiled.args, binding)
    tables = tables or make_tables(compiled.args, lowered.limits, made.device)
    if tables is not None:
        entry = dataclasses.replace(entry, leaves=tables.reader(compiled.args, entry.leaves))
        assemble = tables.assembler(assemble)
    step = Captured(
        compiled, binding, made, static, constants, buffers, outputs == "borrow", assemble, {},
        Stats(), entry, make_ring(lowered.plan, made.device), {},
        LastCall(plain_state(made.device.type)), Book(rules or Rules()), tables=tables,
    )  # fmt: skip
    return guarded(step) if guards else step
