"""What of the donated state a second run needs: the rows that a batch is about, or all of it.

A paged cache may fill the device, and a batch is about some blocks of it. Where primitives alone
touch a leaf, and say which rows they mean (`fg.ops.Pages`) by leaves of the batch that nothing else
reads, a copy of those rows is enough, with the batch's numbers changed to theirs:

    block_tables [[7, 2]]  slot_mapping [8 * 7 + 3]      rows 2 and 7 of the cache are copied
    block_tables [[1, 0]]  slot_mapping [8 * 1 + 3]      what the copy is called with

Any other leaf is copied whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fngraph.calls import PrimitiveCall
from fngraph.core.text import html, table
from fngraph.executable import Executable
from fngraph.fx.leaves import Role

Tensors = list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves whose rows have the same numbers.

    Attributes:
        caches: indices of donated leaves among all leaves of the arguments.
        rows: staged leaves, by their place in the batch, whose numbers are rows.
        slots: those whose numbers are row * size + place.
        size: of the second dim of the caches; 1 where nothing counts by it.
    """

    caches: tuple[int, ...]
    rows: tuple[int, ...]
    slots: tuple[int, ...]
    size: int


@dataclasses.dataclass(frozen=True)
class Parts:
    """What is copied of the state, worked out once.

    Attributes:
        groups: of leaves that are copied by rows.
        whole: donated leaves that are copied whole, each with the reason.
        paths: of all leaves.
    """

    groups: tuple[Group, ...]
    whole: Mapping[int, str]
    paths: tuple[str, ...]
    nbytes: Mapping[int, int]

    def _repr_html_(self) -> str:
        return html(self.as_text())

    def as_text(self) -> str:
        """A table: what a verified step copies of each donated leaf."""
        rows = []
        for group in self.groups:
            rows += [(self.paths[i], "the batch's own rows", "") for i in group.caches]
        for i, why in self.whole.items():
            rows.append((self.paths[i], f"whole, {self.nbytes[i]} bytes", why))
        return table(("leaf", "is copied, three times a verified step", "because"), rows)

    __repr__ = as_text

    @property
    def whole_bytes(self) -> int:
        """Bytes of the leaves that are copied whole."""
        return sum(self.nbytes[i] for i in self.whole)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The rows of each group that a batch is about.

    Attributes:
        numbers: of each group, ascending, int64 on the device.
        staged: the batch's leaves, with numbers among these rows.
    """

    numbers: tuple[torch.Tensor, ...]
    staged: tuple[torch.Tensor, ...]


def parts_of(executable: Executable) -> Parts:
    """Which leaves can be copied by rows, and why not the others."""
    args = executable.args
    staged = args.of(Role.STAGED)
    donated = args.of(Role.DONATED)
    whole: dict[int, str] = {}
    joined: list[set[int]] = []  # caches and the leaves that say their rows, joined
    for i in donated:
        if (why := _why_whole(executable, i)) is not None:
            whole[i] = why
        new = {i, *_said(executable, i)}
        for one in [one for one in joined if one & new]:
            joined.remove(one)
            new |= one
        joined.append(new)
    groups = []
    for one in joined:
        caches = sorted(one & set(donated))
        other = [i for i in caches if i in whole]
        if other:  # whose rows have the same numbers
            why = f"{args.leaves[other[0]].path} is, which has the same rows"
            whole |= {i: why for i in caches if i not in whole}
            continue
        made = _group(executable, caches, one - set(caches), staged)
        if isinstance(made, str):
            whole |= dict.fromkeys(caches, made)
        else:
            groups.append(made)
    nbytes = {i: args.leaves[i].nbytes for i in donated}
    return Parts(tuple(groups), whole, tuple(leaf.path for leaf in args.leaves), nbytes)


def _calls(executable: Executable, leaf: int) -> Iterator[tuple[str, Any, dict[str, int]]]:
    """Who reads a leaf: the instruction's name, the primitive or None, arguments by name."""
    for one, fn in zip(executable.program.instructions, executable.fns):
        if leaf in one.reads and isinstance(fn, PrimitiveCall):
            names = [a.name for a in fn.primitive.op._schema.arguments]
            given = {names[place]: number for place, number in zip(fn.cut.places, one.reads)}
            yield one.name, fn.primitive, given
        elif leaf in one.reads:
            yield one.name, None, {}


def _said(executable: Executable, leaf: int) -> set[int]:
    """The values of the program that say rows of a leaf to the primitives that read it."""
    found = set()
    for _, primitive, given in _calls(executable, leaf):
        pages = None if primitive is None else primitive.pages
        if pages is not None and leaf in [given.get(name) for name in pages.caches]:
            found |= {given[name] for name in (*pages.rows, *pages.slots)}
    return found


def _why_whole(executable: Executable, leaf: int) -> str | None:
    """Why a leaf is copied whole, as far as itself is concerned; None: it need not be."""
    args, calls = executable.args, list(_calls(executable, leaf))
    if not calls:
        return "nothing reads it, and it comes back"
    for name, primitive, given in calls:
        if primitive is None:
            return f"{name} of forward's own ops reads or writes it"
        pages = primitive.pages
        if pages is None or leaf not in [given.get(n) for n in pages.caches]:
            return f"{primitive.name} does not say which rows of it are meant"
        for argument in (*pages.rows, *pages.slots):
            number = given[argument]
            if number >= len(args.leaves):
                return f"{name} is told its {argument} by what forward computes"
            if args.leaves[number].role is not Role.STAGED:
                return f"{args.leaves[number].path} is no leaf of the batch"
    return None


def _group(
    executable: Executable, caches: list[int], said: set[int], staged: list[int]
) -> Group | str:
    """What caches have in common; or why they are copied whole."""
    args = executable.args
    rows: set[int] = set()
    slots: set[int] = set()
    for number in said:
        for _, primitive, given in _calls(executable, number):
            pages = None if primitive is None else primitive.pages
            for name in [name for name, i in given.items() if i == number] or [""]:
                if pages is None or name not in (*pages.rows, *pages.slots):
                    return f"forward also reads {args.leaves[number].path}, which says its rows"
                (rows if name in pages.rows else slots).add(number)
    if rows & slots:
        return f"{args.leaves[min(rows & slots)].path} says rows of one and slots of another"
    specs = [args.leaves[i].spec for i in caches]
    firsts = {spec.shape[:1] for spec in specs if spec is not None}
    sizes = {spec.shape[1:2] for spec in specs if spec is not None} if slots else {(1,)}
    if len(firsts) != 1 or len(sizes) != 1:
        return "caches whose rows have the same numbers have other shapes"
    size = int(next(iter(sizes))[0])
    return Group(
        tuple(caches), tuple(staged.index(i) for i in sorted(rows)),
        tuple(staged.index(i) for i in sorted(slots)), size,
    )  # fmt: skip


def rows_of(parts: Parts, executable: Executable, batch: Sequence[torch.Tensor]) -> Rows:
    """The rows that a batch is about, and its leaves with their numbers changed.

    Args:
        batch: its leaves, on the device.
    """
    staged, found = list(batch), []
    for group in parts.groups:
        spec = executable.args.leaves[group.caches[0]].spec
        assert spec is not None
        count = int(spec.shape[0])
        named = [staged[i].flatten().long() for i in group.rows]
        named += [staged[i].flatten().long() // group.size for i in group.slots]
        every = torch.cat(named)
        numbers = every[(every >= 0) & (every < count)].unique()
        if not len(numbers):  # a cache of no rows is no cache
            numbers = numbers.new_zeros(1)
        places = torch.zeros(count, dtype=torch.int64, device=numbers.device)
        places[numbers] = torch.arange(len(numbers), device=numbers.device)
        for i, size in (*((i, 1) for i in group.rows), *((i, group.size) for i in group.slots)):
            staged[i] = _renumbered(staged[i], places, size)
        found.append(numbers)
    return Rows(tuple(found), tuple(staged))


def _renumbered(x: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    """Rows or slots, by their new places; what names none stays as it is."""
    row = torch.div(x, size, rounding_mode="floor").long()
    there = (row >= 0) & (row < len(places))
    new = places[row.clamp(0, len(places) - 1)].to(x.dtype) * size + x % size
    return torch.where(there, new, x)


def needed(parts: Parts, rows: Rows, leaves: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """What is needed of each donated leaf: itself where that is all of it, else a copy of its rows.

    Args:
        leaves: the donated ones, by their index.
    """
    found = {i: leaves[i] for i in parts.whole}
    for group, numbers in zip(parts.groups, rows.numbers):
        found |= {i: leaves[i].index_select(0, numbers) for i in group.caches}
    return found


def copied(parts: Parts, rows: Rows, leaves: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """A copy of what is needed."""
    found = needed(parts, rows, leaves)
    return found | {i: found[i].clone() for i in parts.whole}
