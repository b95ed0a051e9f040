"""A process's part of a model: of params in memory, or of what files hold.

    mesh = fg.make_mesh(tp=2)                                    # under torchrun
    params = shard(params, llama.specs(params.config), mesh)     # of a tree that is whole
    config, params = llama.load(folder, mesh=mesh)               # or only this part is ever read

`forward`, `init_cache` and serving take them as they are: `params.config` says the process's own
heads, and what has to be summed or gathered is done by what stands for the weight
(`fngraph.models.weights.sharded`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.weights import naming
from fngraph.models.weights.fp8 import Fp8Weight, misfits
from fngraph.models.weights.sharded import SplitGain, SplitStack, SplitVocabulary, SummedWeight
from fngraph.models.weights.splits import (
    Block,
    Each,
    Layout,
    Specs,
    Split,
    axes_of,
    blocks,
    length,
    own,
    own_config,
    split_of,
)

Copy = Callable[[Block, Tensor], Any]  # a slice for each dim, and a tensor of its shape to copy to
MOST = 8 << 20
"""Bytes of a whole that are looked at in one go, about: what is read of a file is in memory twice
meanwhile."""


class Along(NamedTuple):
    """What a process has along one dim: which elements, and of how many there is room."""

    ranges: list[range]
    room: int


class Share(NamedTuple):
    """What this process has of a model.

    Attributes:
        specs: how the whole is split.
        axes: by name, of one process where the mesh has no such axis.
        config: this process's own.
    """

    specs: Specs
    axes: dict[str, fg.Axis]
    config: Any

    def parts(self, name: str, shape: Sequence[int]) -> list[Along]:
        """By dim, what this process has of a weight of this shape.

        Raises:
            fg.errors.RankError: a weight that is laid out otherwise than its spec says.
        """
        split, found = split_of(self.specs, name) or Split({}), []
        for dim, size in enumerate(shape):
            axis, layout = split.along.get(dim, ("", size))
            if length(layout) != size:
                raise fg.errors.RankError(
                    f"{name} is {tuple(shape)}, and its spec lays {length(layout)} out along dim "
                    f"{dim}. Make the specs of the same config: specs(params.config)"
                )
            found.append(along(layout, self.axes.get(axis, fg.Axis(axis))))
        return found

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of this process's part."""
        return tuple(one.room for one in self.parts(name, shape))

    def part(self, name: str, shape: Sequence[int], copy: Copy, **kind: Any) -> Tensor:
        """This process's part of a weight of this shape, in memory of its own; see `assembled`."""
        return assembled(self.parts(name, shape), shape, copy, **kind)

    def columns(self, name: str, shape: Sequence[int], dim: int, x: Tensor) -> Tensor:
        """Of x (r, n), whose columns go with a dim of a weight of this shape, this process's."""
        parts = [along(len(x), fg.Axis("")), self.parts(name, shape)[dim]]
        return assembled(parts, x.shape, copying(x), device=x.device, dtype=x.dtype)

    def standing(self, name: str, part: Any, shape: Sequence[int]) -> Any:
        """What stands in the tree for a part of a weight of this shape."""
        split = split_of(self.specs, name)
        if split is None or split.stands == "tensor":
            return part
        axes = [self.axes[axis] for axis, _ in split.along.values()]
        if all(axis.size == 1 for axis in axes):
            return part
        if split.stands == "experts":
            return SplitStack(part, experts=axes[0], columns=axes[1])
        if split.stands == "vocabulary":
            return SplitVocabulary(part, axes[0], shape[0])
        return {"summed": SummedWeight, "gain": SplitGain}[split.stands](part, axes[0])


def share_of(config: Any, specs: Specs, mesh: fg.Mesh) -> Share:
    """What this process of a mesh has.

    Raises:
        fg.errors.RankError: a mesh that the model cannot be split over, or no mesh.
    """
    error, expect = fg.errors.RankError, fg.core.text.expect
    expect(Specs, "the family's specs(config): llama.specs(config)", error, specs=specs)
    expect(fg.Mesh, "the whole mesh, fg.make_mesh(tp=2)", error, mesh=mesh)
    return Share(specs, axes_of(specs, mesh), own_config(config, specs, mesh))


def shard(params: Any, specs: Specs, mesh: fg.Mesh) -> Any:
    """This process's part of params that are whole, on the mesh's device.

    What is split is copied, so that the old tree can be let go; what is not is the same tensors,
    where they are on that device already. Weights in fp8 are split with the scales of their rows.

    Args:
        params: a family's.
        specs: the family's `specs(params.config)`.

    Raises:
        fg.errors.RankError: a mesh that the model cannot be split over, or that it is split over
            already; specs of another config; parts of weights in fp8 that tensor cores cannot take.
    """
    share, wrong = share_of(params.config, specs, mesh), list[str]()

    def part(name: str, x: Any) -> Any:
        if isinstance(x, _SPLIT):
            raise fg.errors.RankError(f"{name} is split already. Pass params that are whole")
        if split_of(specs, name) is None:
            return _moved(x, mesh.device)
        values = x.values if isinstance(x, Fp8Weight) else x
        kind = {"device": mesh.device, "dtype": values.dtype}
        made: Any = share.part(name, values.shape, copying(values), **kind)
        if isinstance(x, Fp8Weight):
            wrong.extend(misfits(name, made.shape))
            scale = own_scale(share, name, values.shape, x.scale)
            made = _moved(Fp8Weight(made, scale, x.input_scale), mesh.device)
        return share.standing(name, made, values.shape)

    with torch.no_grad():
        made = naming.replaced(params, part, (Tensor, Fp8Weight, *_SPLIT))
    if wrong:
        raise fg.errors.RankError("\n".join([TOO_SMALL, *wrong]))
    return dataclasses.replace(made, config=share.config)


def with_own_tokens(params: Any) -> Any:
    """The same part of a model, for processes along "ep" that have each a batch of its own.

    Each layer of experts then gathers the tokens of all, and scatters the sums to whose they are.
    All processes must run steps of one size at a time, padding included.

    Raises:
        fg.errors.RankError: no experts are spread over processes.
    """
    found = list[str]()

    def told(name: str, x: Any) -> Any:
        if not isinstance(x, SplitStack) or x.experts.size == 1:
            return x
        found.append(name)
        return dataclasses.replace(x, own_tokens=True)

    made = naming.replaced(params, told, (Tensor, Fp8Weight, *_SPLIT))
    if not found:
        raise fg.errors.RankError("no experts are spread over processes. Load with make_mesh(ep=2)")
    return made


TOO_SMALL = "weights whose parts cannot be fp8; split them over fewer processes:"
_SPLIT = (SummedWeight, SplitVocabulary, SplitGain, SplitStack)


def own_scale(share: Share, name: str, shape: Sequence[int], scale: Tensor) -> Tensor:
    """The scale, (O, 1) or (), of this process's part of a weight in fp8, (O, I)."""
    return share.columns(name, shape, 0, scale.mT).mT.contiguous() if scale.ndim else scale


def _moved(x: Any, device: str) -> Any:
    return naming.replaced(x, lambda _, one: one.to(device))


def along(layout: Layout, axis: fg.Axis) -> Along:
    """What this process has along a dim."""
    ranges = own(layout, axis.size, axis.rank)
    if isinstance(layout, Each) and layout.padded:
        return Along(ranges, -(-layout.count // axis.size) * length(layout.of))
    return Along(ranges, sum(map(len, ranges)))


def copying(x: Tensor) -> Copy:
    """Of a tensor in memory."""
    return lambda block, to: to.copy_(x[block])


def assembled(
    parts: Sequence[Along], shape: Sequence[int], copy: Copy, *,
    device: torch.device | str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """A tensor of what is there, block by block, and zeros where there is room for more.

    Args:
        shape: of the whole.
        copy: copies a block of it.
    """
    made = torch.zeros([one.room for one in parts], device=device, dtype=dtype)
    row = max(1, math.prod(shape[1:]) * made.itemsize)
    for there, here in blocks([one.ranges for one in parts], max(1, MOST // row)):
        copy(here, made[there])
    return made
