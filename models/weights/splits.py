"""Which part of each weight a process has: data that a family says, and whole numbers made of it.

    Each(H, D)                          # H heads of D rows each: so many heads for each process
    Each(K, D, repeated=True)           # kv heads: with fewer than processes, several have the same
    (Each(H, P), Each(G, N))            # two parts laid end to end, each shared out by itself
    {"layers.*.attn.wq": rows(Each(H, D)), "layers.*.attn.wo": summed(Each(H, D))}

A family says as `Specs` how the weights of a config are split, by name as `loading.Format` has it;
a weight that is not named is whole everywhere. Nothing here has tensors.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import fngraph as fg

Layout = Any  # an int, which every process has whole; an Each; a tuple of these, end to end
Block = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Each:
    """So many units, laid end to end and shared out in order.

    Attributes:
        of: what a unit is laid out as.
        repeated: whether several processes may have one unit, of which each then has its own part,
            where there are fewer units than processes.
        padded: whether the last processes may have fewer, filled up with zeros.
    """

    count: int
    of: Layout = 1
    repeated: bool = False
    padded: bool = False


class Split(NamedTuple):
    """How one weight is split.

    Attributes:
        along: by dim, the name of the axis and how the dim is laid out.
        stands: what stands in the tree for a process's part: "tensor", or one of
            `fngraph.models.weights.sharded`, by which is known what is still to be done: "summed",
            "vocabulary", "gain", "experts".
    """

    along: Mapping[int, tuple[str, Layout]]
    stands: str = "tensor"


class Size(NamedTuple):
    """What a number of a config is to a mesh.

    Attributes:
        axis: over which so many are shared out.
        repeated: as of `Each`.
        whole: whether the config of a process says the whole number nevertheless.
    """

    axis: str = "tp"
    repeated: bool = False
    whole: bool = False


class Specs(NamedTuple):
    """How a model is split.

    Attributes:
        weights: by name, "layers.*.attn.wq", the star for a layer's number.
        sizes: by field of the config, those that are shared out.
    """

    weights: Mapping[str, Split]
    sizes: Mapping[str, Size]


def rows(layout: Layout, axis: str = "tp") -> Split:
    """A matrix (out, in) or a vector, whose outputs are split: a product by it is split too."""
    return Split({0: (axis, layout)})


def columns(layout: Layout, axis: str = "tp") -> Split:
    """A matrix (out, in) whose inputs are split: a product by it is one term of a sum."""
    return Split({1: (axis, layout)})


def summed(layout: Layout, axis: str = "tp") -> Split:
    """As `columns`, and `linear(x, weight)` is the sum over all processes."""
    return Split({1: (axis, layout)}, "summed")


def length(layout: Layout) -> int:
    """Elements in all."""
    if isinstance(layout, Each):
        return layout.count * length(layout.of)
    return sum(map(length, layout)) if isinstance(layout, tuple) else layout


def own(layout: Layout, size: int, rank: int, start: int = 0) -> list[range]:
    """Which elements, from `start` on, the process `rank` of `size` has; neighbours as one range.

    Raises:
        fg.errors.RankError: units that cannot be shared out so.
    """
    if isinstance(layout, Each):
        unit, count = length(layout.of), layout.count
        if count % size == 0 or layout.padded:
            each = -(-count // size)
            first, end = (min(n * each, count) for n in (rank, rank + 1))
            return [range(start + first * unit, start + end * unit)]
        if layout.repeated and size % count == 0:
            among = size // count
            return own(layout.of, among, rank % among, start + rank // among * unit)
        raise fg.errors.RankError(f"{count} units cannot be shared out to {size} processes")
    if not isinstance(layout, tuple):
        return [range(start, start + layout)]
    found: list[range] = []
    for part in layout:
        for one in own(part, size, rank, start):
            if found and found[-1].stop == one.start:
                one = range(found.pop().start, one.stop)
            found.append(one)
        start += length(part)
    return found


def blocks(
    ranges: Sequence[Sequence[range]], most: int | None = None
) -> Iterator[tuple[Block, Block]]:
    """Where each block goes, and where it comes from, of ranges by dim.

    Args:
        most: of the first dim, so many in a block.
    """
    by_dim = [pieces(along, None if dim else most) for dim, along in enumerate(ranges)]
    for block in product(*by_dim):
        yield tuple(there for there, _ in block), tuple(here for _, here in block)


def pieces(ranges: Sequence[range], most: int | None) -> Iterator[tuple[slice, slice]]:
    """Of one dim."""
    at = 0
    for one in ranges:
        step = most or len(one)
        for start in range(one.start, one.stop, step or 1):
            count = min(step, one.stop - start)
            yield slice(at, at + count), slice(start, start + count)
            at += count


def split_of(specs: Specs, name: str) -> Split | None:
    """How the weight of this name is split; None: it is whole."""
    return specs.weights.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def axes_of(specs: Specs, mesh: fg.Mesh) -> dict[str, fg.Axis]:
    """The axes that a model can be split over; those that the mesh has not are of one process.

    Raises:
        fg.errors.RankError: the mesh has none of them.
    """
    names = dict.fromkeys(size.axis for size in specs.sizes.values())
    if not any(name in mesh for name in names):
        told = ", or ".join(f"make_mesh({name}={mesh.size})" for name in names)
        raise fg.errors.RankError(
            f"{mesh!r} has no axis {' or '.join(map(repr, names))}, over which this model can be "
            f"split. Make it: {told}; or leave the mesh out, and each process has the whole"
        )
    return {name: mesh[name] if name in mesh else fg.Axis(name) for name in names}


def own_config(config: Any, specs: Specs, mesh: fg.Mesh) -> Any:
    """The config of this process's part: its own heads, its own columns.

    Raises:
        fg.errors.RankError: numbers that cannot be shared out, with what could be; all are listed.
    """
    wrong, own = [], {}
    axes = axes_of(specs, mesh)
    for name, size in specs.sizes.items():
        total, axis = getattr(config, name), axes[size.axis]
        if not fits(total, size, axis.size):
            wrong.append(f"  {name} is {total}, which {axis.size} processes cannot share")
        elif not size.whole:
            own[name] = max(1, total // axis.size)
    if wrong:
        could = ", ".join(
            f"{axis}={' or '.join(map(str, possible(config, specs, axis)))}"
            for axis in axes
            if axes[axis].size not in possible(config, specs, axis)
        )
        raise fg.errors.RankError(
            f"this model cannot be split over {mesh!r}:\n" + "\n".join(wrong) + f"\nIt can, by "
            f"make_mesh with {could}"
        )
    return dataclasses.replace(config, **own)


def fits(total: int, size: Size, ranks: int) -> bool:
    """Whether so many processes can share so many."""
    return total % ranks == 0 or (size.repeated and total > 0 and ranks % total == 0)


def possible(config: Any, specs: Specs, axis: str) -> list[int]:
    """The sizes of an axis, up to 64, over which all numbers of a config can be shared out."""
    sizes = {name: size for name, size in specs.sizes.items() if size.axis == axis}
    most = math.gcd(*(getattr(config, n) for n, size in sizes.items() if not size.repeated))
    return [
        ranks
        for ranks in range(1, min(most, 64) + 1)
        if all(fits(getattr(config, name), size, ranks) for name, size in sizes.items())
    ]
