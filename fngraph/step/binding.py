"""A binding: held and donated leaves at their addresses, checked at each call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fngraph.core import trees
from fngraph.errors import TreeError
from fngraph.executable import Executable
from fngraph.fx.arguments import Arguments, no_tensor
from fngraph.fx.leaves import Role, TensorSpec, check_aliases, check_memory
from fngraph.graphs.addresses import WRITE, Places, Watch, check_places, part, places
from fngraph.torch_facts.memory import Bytes, joined, storage_bytes


@dataclasses.dataclass(eq=False)
class Binding:
    """Bound leaves. Where they are, and of what specs, changes when they are bound again.

    Attributes:
        leaves: held and donated tensors.
        indices: the place of each among all leaves of the arguments.
        recorded: where the elements of each were when it was bound.
        inference: whether a donated leaf is an inference tensor, which only inference mode may
            write; results are inference tensors then too.
        spans: position of a held or donated parameter to the slice of `leaves` that it fills.
        fixes: position to what to do when another argument is passed.
        containers: position to the argument that was bound there.
        watch: over the leaves.
        keeps_order: whether an argument may have its keys in another order; see `Maker`.
        rebound: how often held leaves were given new values, which processes compare.
    """

    args: Arguments
    leaves: list[torch.Tensor]
    indices: list[int]
    paths: list[str]
    recorded: Places
    inference: bool
    spans: Mapping[int, slice]
    fixes: Mapping[int, str]
    containers: Mapping[int, Any]
    watch: Watch
    keeps_order: Callable[[int, Any], bool]
    rebound: int = 0

    def __repr__(self) -> str:
        return f"Binding({', '.join(map(repr, self.args.leaves))})"

    def check(self) -> None:
        """Raise `AddressError` unless every leaf is where it was."""
        if self.watch.moved():
            check_places(self.leaves, self.recorded, self.paths)
            self.watch.reset()

    def check_argument(self, position: int, value: Any) -> None:
        """Raise unless `value` is what was bound at `position`: the same memory, leaf by leaf.

        Raises:
            TreeError: another structure.
            AddressError: other tensors.
        """
        flat = flatten_as(self.args, position, value, self.keeps_order)
        span = self.spans[position]
        check_places(flat, part(self.recorded, span), self.paths[span], self.fixes[position])

    def bound_again(self, args: Arguments | None = None) -> None:
        """The leaves are right as they are now: where they are, and with the specs of `args`."""
        self.args = args or self.args
        self.__dict__.pop("written", None)
        self.recorded = places(self.leaves)
        self.watch = Watch(self.leaves)

    def donated(self) -> list[torch.Tensor]:
        """The donated leaves."""
        leaves = self.args.leaves
        return [x for i, x in zip(self.indices, self.leaves) if leaves[i].role is Role.DONATED]

    @functools.cached_property
    def written(self) -> list[Bytes]:
        """The memory of the donated leaves, which a step writes."""
        return joined(map(storage_bytes, self.donated()))

    def inputs(
        self, staged: Sequence[torch.Tensor], constants: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Every program input in order: leaves of the arguments, then constants."""
        values: list[Any] = [None] * len(self.args.leaves)
        for i, tensor in zip(self.indices, self.leaves):
            values[i] = tensor
        for i, tensor in zip(self.args.of(Role.STAGED), staged):
            values[i] = tensor
        return [*values, *constants]


def bind(executable: Executable, values: Sequence[Any]) -> Binding:
    """Bind held and donated arguments, given in `forward`'s order.

    Raises:
        TreeError: a number, structure, shape, dtype or device that differs from the trace.
        AliasError: a donated leaf shares memory with another leaf, or memory with itself.
    """
    args = executable.args
    keeps_order = functools.cache(executable.maker.keeps_order)  # which traces
    positions = args.signature.positions(Role.HELD, Role.DONATED)
    names = [args.signature.names[i] for i in positions]
    try:
        values = args.signature.values(values, {}, Role.HELD, Role.DONATED)
    except TreeError:
        raise TreeError(f"pass {len(names)} arguments {names}, got {len(values)}") from None
    leaves: list[torch.Tensor] = []
    spans = {}
    for position, value in zip(positions, values):
        flat = flatten_as(args, position, value, keeps_order)
        spans[position] = slice(len(leaves), len(leaves) + len(flat))
        leaves += flat
    indices = args.of(Role.HELD, Role.DONATED)
    paths = [args.leaves[i].path for i in indices]
    for i, path, tensor in zip(indices, paths, leaves):
        check_memory(path, tensor, args.leaves[i].role is Role.DONATED)
        expected, got = args.leaves[i].spec, TensorSpec.of(tensor)
        if got != expected:
            raise TreeError(f"{path}: traced as {expected}, given {got}. Trace with this one")
    check_aliases([args.leaves[i] for i in indices], leaves)
    donated = [x for i, x in zip(indices, leaves) if args.leaves[i].role is Role.DONATED]
    inference = any(x.is_inference() for x in donated)
    fixes = {position: _fix(executable, position) for position in positions}
    containers = dict(zip(positions, values))
    return Binding(
        args, leaves, indices, paths, places(leaves), inference, spans, fixes, containers,
        Watch(leaves), keeps_order,
    )  # fmt: skip


def _fix(executable: Executable, position: int) -> str:
    """What a person should do who passes another argument than the one that was bound."""
    args = executable.args
    name = args.signature.names[position]
    if args.signature.roles[position] is Role.DONATED:
        return f"Go on with the {name!r} that was passed first and came back, or capture again"
    write = f"{WRITE[0].lower()}{WRITE[1:]}"
    if args.batch_type is None:
        staged = ", ".join(f'"{part}"' for part in (*args.batch_name.split(", "), name))
        how = f"stage it, fg.graphify(..., stage=({staged}))"
    else:
        how = f"make it a field of {args.batch_type.__name__}, fg.buffer(...)"
    new = f"If {name!r} is new at each call, {how}. Else {write}"
    if _is_returned(executable, position):
        pairs = zip(args.signature.names, args.signature.roles)
        donated = [*(other for other, role in pairs if role is Role.DONATED), name]
        return (
            f"{name!r} looks like what forward returns: if it is state, donate it, "
            f"fg.graphify(..., donate={tuple(donated) if donated[1:] else name!r}), "
            f"and it is updated where it is. {new}"
        )
    return new


def _is_returned(executable: Executable, position: int) -> bool:
    """Whether a part of the output has the structure, shapes and dtypes of an argument."""
    args, out_tree = executable.args, executable.out_tree
    specs = [leaf.spec for leaf in args.leaves[args.span(position)]]
    want = [(tuple(map(str, spec.shape)), spec.dtype) for spec in specs if spec is not None]
    own = iter(zip(executable.output_dims, executable.output_dtypes))  # all but the donated ones
    updated = set(executable.returns.values())
    have = [
        None if i in updated else next((tuple(map(str, dims)), dtype) for dims, dtype in own)
        for i in range(out_tree.num_leaves)
    ]
    start = 0
    for tree in (out_tree, *trees.children(out_tree)):
        if tree == args.treedefs[position] and have[start : start + tree.num_leaves] == want:
            return True
        start += 0 if tree is out_tree else tree.num_leaves
    return False


def flatten_as(
    args: Arguments,
    position: int,
    value: Any,
    keeps_order: Callable[[int, Any], bool] = lambda position, treedef: False,
) -> list[torch.Tensor]:
    """The leaves of an argument, which must have the structure that was traced.

    Args:
        keeps_order: is asked where the keys of dicts are in another order, and nothing else is.

    Raises:
        TreeError: listing each path that differs.
    """
    flat, treedef = trees.flatten(value)
    if treedef != args.treedefs[position] or not all(isinstance(x, torch.Tensor) for x in flat):
        name = args.signature.names[position]
        traced = args.treedefs[position]
        if trees.Static in (traced.type, treedef.type):
            was = trees.unflatten(traced, traced.num_leaves * ["a tensor"])
            raise TreeError(
                f"{name} is {value!r}, and was traced as {was!r}: it is a part of the function. "
                "Trace with this one; or call the graphified function, which keeps both"
            )
        ordered = trees.ordered_as(value, traced)
        if ordered is not value and keeps_order(position, treedef):
            return flatten_as(args, position, ordered)
        for path, leaf in zip(args.signature.paths(treedef, position), flat):
            if not isinstance(leaf, torch.Tensor):
                raise TreeError(f"{path} is {no_tensor(path, leaf)}")
        lines = "\n".join(trees.differences(args.treedefs[position], treedef, name))
        raise TreeError(f"{name} differs in structure from what was traced:\n{lines}")
    return flat
