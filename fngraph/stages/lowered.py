"""`Lowered`: all that can be decided without running, and how it is decided."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from fngraph.calls import PrimitiveCall, choose, with_planners
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
from fngraph.core.memory import Bytes, KeyMemory, MemoryTable
from fngraph.core.program import Instruction
from fngraph.core.text import table
from fngraph.errors import FieldError, SpecError
from fngraph.fx.leaves import Leaf
from fngraph.fx.pieces.cuts import Cut
from fngraph.fx.pieces.memory import Lifetimes, estimate, lifetimes
from fngraph.ops.primitives import PRIMITIVES
from fngraph.stages.compiled import Compiled, compile_parts

if TYPE_CHECKING:
    from fngraph.stages.split import Split


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
        return compile_parts(self)

    def sizes(self, key: BatchDescriptor) -> dict[str, int]:
        """{"T": padded tokens, "R": padded requests, ...} of a key."""
        limits = self.limits
        return key_sizes(key.num_tokens, key.num_reqs, limits.max_reqs, limits.dims)

    def estimate(self, mode: Mode, descriptor: BatchDescriptor) -> Bytes:
        """Bytes that a key will take in the pool and for its graphs. See `fngraph.fx.pieces.memory`."""
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


def lower(split: Split, limits: Limits) -> Lowered:
    """See `Split.lower`."""
    traced, options = split.traced, split.traced.options
    if limits.dims != traced.limits.dims:
        raise SpecError(
            f"traced with {traced.limits!r}, lowered with {limits!r}: letters other than T and "
            "R are fixed by the trace. Trace with the same: trace(..., limits=limits)"
        )
    traced.graph.check_limits(limits)
    calls = choose(split.pieces, options.backends)
    _check_null_slots(split)
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
    calls = with_planners(calls, split.pieces, traced.args.leaves, most)
    return Lowered(split, limits, calls, resolution, dispatch_table, plan)


def _check_null_slots(split: Split) -> None:
    """Padding must write nowhere: the slots of each primitive are a leaf padded with -1."""
    for step, part in zip(split.program.instructions, split.pieces.parts):
        name = PRIMITIVES[part.op].null_slots if isinstance(part, Cut) else None
        if name is None:
            continue
        leaf = _leaf_of(split, step, part, name)
        if leaf is not None and (leaf.buffer is None or leaf.buffer.pad != -1):
            raise FieldError(
                f"{leaf.path} says where {step.name} writes, and its padding would write too. "
                f"Pad it with -1, which writes nowhere: fg.buffer(..., pad=-1)"
            )


def _leaf_of(split: Split, step: Instruction, cut: Any, name: str) -> Leaf | None:
    """The argument's leaf, if the cut reads it as it was passed to `forward`."""
    names = [a.name for a in PRIMITIVES[cut.op].op._schema.arguments]
    number = step.reads[cut.places.index(names.index(name))]
    leaves = split.traced.args.leaves
    return leaves[number] if number < len(leaves) else None
