"""What the step's program is run on, apart from the step: copies of the state, the batch padded as
the step pads it, and beside them what those leaves should be.

Two kinds of leaves may not be what they should: held ones, where the caller's container has another
tensor by now than the one that was bound; and padding, where it is not what the field says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from fngraph.core import Buffer, Mode, plan_buffers
from fngraph.core.buffers import LAST
from fngraph.fx.leaves import Role
from fngraph.graphs.staging.buffers import padding_rows
from fngraph.graphs.staging.unpack import padded
from fngraph.shadow.saved import Saved, held_of
from fngraph.step.keys import Keys
from fngraph.step.prepared import Prepared


@dataclasses.dataclass(frozen=True, eq=False)
class Sides:
    """A program's inputs, and what they should be.

    Attributes:
        sizes: of the key; of the batch, where it ran without one.
        true: of the batch.
        inputs: leaves and constants, as the step has them; the state is a copy.
        should: those that should be something else, by index.
        told: in what way they are not what they should be, by path.
    """

    sizes: Mapping[str, int]
    true: Mapping[str, int]
    inputs: list[torch.Tensor]
    should: dict[int, torch.Tensor]
    told: Mapping[str, str]

    @property
    def is_padded(self) -> bool:
        """Whether the key has more rows than the batch."""
        return dict(self.sizes) != dict(self.true)


@torch.no_grad()
def sides_of(keys: Keys, saved: Saved, prepared: Prepared) -> Sides:
    """The inputs of the program for a step that was saved."""
    executable, binding = keys.executable, keys.shared.binding
    args = executable.args
    mode, descriptor, _ = prepared.chosen
    true = prepared.true
    sizes = true if mode is Mode.NONE else executable.sizes(descriptor)
    stride = descriptor.query_len or 0
    values: list[Any] = [None] * len(args.leaves)
    for i, x in zip(binding.indices, binding.leaves):
        values[i] = x
    for i, x in saved.state.items():
        values[i] = x.clone()
    should: dict[int, torch.Tensor] = {}
    told: dict[str, str] = {}
    staged = list(saved.rows.staged)
    own = staged
    if mode is not Mode.NONE:
        fields = {planned.path: planned.buffer for planned in executable.plan.buffers}
        own = padded(plan_buffers(fields, sizes), staged, true, stride, args.device)
    for place, i in enumerate(args.of(Role.STAGED)):
        values[i] = own[place]
        buffer = args.leaves[i].buffer
        assert buffer is not None
        want = declared(buffer, staged[place], sizes, true["T"], stride)
        if want.shape != own[place].shape or _unlike(want, own[place]):
            should[i] = want
            told[args.leaves[i].path] = f"which is not padded as its field says, {buffer}"
    for i, x in held_of(keys).items():
        if x is not values[i] and (x.shape != values[i].shape or _unlike(x, values[i])):
            should[i] = x
            told[args.leaves[i].path] = (
                "of which the caller's container holds another tensor than the one that was bound; "
                "write into that one, or step.rebind(...)"
            )
    return Sides(sizes, true, [*values, *keys.constants], should, told)


def declared(
    buffer: Buffer, leaf: torch.Tensor, sizes: Mapping[str, int], tokens: int, stride: int
) -> torch.Tensor:
    """A leaf with the padding that its field declares, by torch's own ops."""
    missing = buffer.shape(sizes)[0] - len(leaf) if buffer.dims else 0
    if missing <= 0:
        return leaf
    first = tokens + stride
    if buffer.pad == LAST:
        first = int(leaf[-1]) if len(leaf) else 0
    shape = missing, *leaf.shape[1:]
    return torch.cat([leaf, padding_rows(buffer, shape, first, stride, leaf.device)])


def _unlike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether any byte differs."""
    if a.dtype != b.dtype:
        return True
    flat = (x.resolve_conj().resolve_neg().flatten().contiguous() for x in (a, b))
    return not torch.equal(*(x.view(torch.uint8) for x in flat))
