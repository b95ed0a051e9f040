"""Kernels are warmed once, not once a size: keys of one kind run the same ones.

A kernel's first run loads it, and Triton compiles for a number that is 1, for one that is divisible
by 16 and for any other. So a kind is that of each size, and one key of each kind, the largest, is
run for real. cuBLAS may take another kernel for another size of the same kind, which CUDA loads
within a capture; what cannot be done there makes that capture fail, and then that key is warmed and
captured again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fngraph.core import BatchDescriptor, HostBounds, KeyBounds, Mode
from fngraph.core.program import run_program
from fngraph.graphs.memory import kept
from fngraph.graphs.staging.unpack import unpacker
from fngraph.step.backend_plans import plan_padding
from fngraph.step.book import Key

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


class Operands(NamedTuple):
    """What the program of one key is called with: sizes, bounds, inputs and the first node."""

    sizes: dict[str, int]
    host: HostBounds
    inputs: list[torch.Tensor]
    first: Any


def operands(step: Captured, key: Key) -> Operands:
    """For a key, at the addresses of now; what is planned on the host is planned for padding."""
    mode, descriptor = key
    sizes = sizes_of(step, descriptor)
    host = bounds_of(key)
    plan_padding(step, mode, descriptor, sizes)
    inputs = step.binding.inputs(step.static.views(sizes), step.constants)
    first = step.guard(unpacker(step.static, step.ring, sizes), sizes)
    return Operands(sizes, host, inputs, first)


def sizes_of(step: Captured, key: BatchDescriptor) -> dict[str, int]:
    """{"T", "R", ...} of a key."""
    return step.compiled.lowered.sizes(key)


def bounds_of(key: Key) -> HostBounds:
    """A key's own upper bounds; those of one graph say which key it is."""
    mode, descriptor = key
    return KeyBounds(descriptor) if mode is Mode.FULL else HostBounds(descriptor.num_tokens)


def kind(sizes: Mapping[str, int], descriptor: BatchDescriptor) -> Hashable:
    """Equal for keys that run the same kernels, as far as one can tell without running them."""
    return descriptor[2:], tuple((n == 1, n % 16 == 0) for n in sizes.values())


def run_padding(step: Captured, key: Key) -> None:
    """Run one key for real on an all-padding batch, whose writes go to null slots.

    Other writes land: see `preserved` and `written`.
    """
    sizes, host, inputs, first = operands(step, key)
    with kept(step.static.views(sizes)):  # the next batch may be there already
        try:
            step.ring.put_padding(step.static.buffer_plan, key[1].query_len or 0)
            first()
        except BaseException:  # or the next step would read another slot than its own
            step.ring.resume()
            raise
        split, fns = step.compiled.lowered.split, step.compiled.fns
        step.recorder.warm_up(lambda: run_program(split.program, fns, inputs, sizes, host))
    step.book.warm[kind(sizes, key[1])] = key


def written(step: Captured) -> list[torch.Tensor]:
    """Donated leaves that are written other than by primitives, whose slots are null."""
    rows = {row.path: row for row in step.compiled.lowered.split.traced.donation.rows}
    named = zip(step.binding.paths, step.binding.leaves)
    return [x for path, x in named if path in rows and not rows[path].null_slots]


def cold(step: Captured, keys: list[Key]) -> list[Key]:
    """The first of `keys` of each kind that has not run yet."""
    found: dict[Hashable, Key] = {}
    for key in keys:
        found.setdefault(kind(sizes_of(step, key[1]), key[1]), key)
    return [key for of, key in found.items() if of not in step.book.warm]
