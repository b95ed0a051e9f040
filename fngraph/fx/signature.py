"""The arguments of a user's function: their roles, their leaves, and what comes back as what."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core import Buffer, Dim, buffers_of, check_declared, host_field, trees
from fngraph.errors import DonationError, TreeError
from fngraph.fx.aliases import check_aliases
from fngraph.fx.leaves import Leaf, Role, TensorSpec, same_place

Names = str | int | Iterable[str | int] | None


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function and the role of each of its parameters."""

    fn: Callable[..., Any]
    names: tuple[str, ...]
    roles: tuple[Role, ...]

    def positions(self, *roles: Role) -> list[int]:
        """Indices of the parameters that have one of `roles`."""
        return [i for i, role in enumerate(self.roles) if role in roles]

    def __repr__(self) -> str:
        params = ", ".join(f"{n}: {r.value}" for n, r in zip(self.names, self.roles))
        return f"{getattr(self.fn, '__name__', 'forward')}({params})"


def signature(fn: Callable[..., Any], donate: Names, stage: Names) -> Signature:
    """Roles by name or position; a parameter that is in neither is held.

    Raises:
        TreeError: a name that is no parameter, or one in both.
    """
    parameters = list(inspect.signature(fn).parameters.values())
    variadic = [p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if variadic:
        raise TreeError(f"forward takes *{variadic[0]}; name its parameters, each has one role")
    names = tuple(p.name for p in parameters)

    def resolve(what: str, given: Names) -> set[str]:
        many = [given] if isinstance(given, str | int) else list(given or ())
        found = {names[x] if isinstance(x, int) and x < len(names) else x for x in many}
        unknown = found - set(names)
        if unknown:
            raise TreeError(f"{what}={unknown.pop()!r} is no parameter of forward{names}")
        return typing.cast(set[str], found)

    donated, staged = resolve("donate", donate), resolve("stage", stage)
    if len(staged) != 1:
        raise TreeError(
            f"stage={stage!r} names {len(staged)} parameters of forward{names}. Name the one that "
            'is the batch, which may be a tree of tensors: stage="batch"'
        )
    if donated & staged:
        raise TreeError(f"{(donated & staged).pop()!r} cannot be both donated and staged")
    roles = tuple(
        Role.DONATED if n in donated else Role.STAGED if n in staged else Role.HELD for n in names
    )
    return Signature(fn, names, roles)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flattened abstract arguments: one structure a parameter, and all leaves in order.

    Attributes:
        batch_type: the staged struct; None where the batch has exact shapes and no spec.
    """

    signature: Signature
    treedefs: tuple[Any, ...]
    leaves: tuple[Leaf, ...]
    batch_type: type | None
    device: torch.device

    @property
    def fields(self) -> dict[str, Buffer]:
        """Path to declaration of each staged leaf."""
        return {leaf.path: leaf.buffer for leaf in self.leaves if leaf.buffer is not None}

    def of(self, *roles: Role) -> list[int]:
        """Indices of the leaves that have one of `roles`."""
        return [i for i, leaf in enumerate(self.leaves) if leaf.role in roles]

    def unflatten(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments, over `leaves`."""
        args, start = [], 0
        for treedef in self.treedefs:
            args.append(trees.unflatten(treedef, leaves[start : start + treedef.num_leaves]))
            start += treedef.num_leaves
        return args


def arguments(sig: Signature, given: Mapping[str, Any]) -> Arguments:
    """Abstract arguments from tensors or `fg.like` specs; the batch comes from its class alone.

    Args:
        given: held and donated arguments by name; the staged one is optional if annotated.

    Raises:
        TreeError: a leaf that is no tensor, several devices, or a batch that is not a struct.
        AliasError: a donated leaf shares its storage with another one.
    """
    leaves: list[Leaf] = []
    treedefs = []
    batch_type: type | None = None
    devices: dict[torch.device, str] = {}
    real: list[tuple[Leaf, torch.Tensor]] = []
    for name, role in zip(sig.names, sig.roles):
        if role is Role.STAGED:
            batch_type = _batch_type(sig, name, given.get(name))
            found, treedef = _staged(name, batch_type, given.get(name))
        else:
            flat, treedef = trees.flatten(given[name])
            found = [_leaf(p, role, x) for p, x in zip(trees.paths(treedef, name), flat)]
            devices.update({leaf.device: leaf.path for leaf in found})
            real += [(leaf, x) for leaf, x in zip(found, flat) if isinstance(x, torch.Tensor)]
        leaves += found
        treedefs.append(treedef)
    if len(devices) > 1:
        (a, path_a), (b, path_b) = list(devices.items())[:2]
        raise TreeError(f"{path_a} is on {a}, {path_b} on {b}; one function runs on one device")
    check_aliases([leaf for leaf, _ in real], [tensor for _, tensor in real])
    device = next(iter(devices), torch.device("cpu"))
    placed = tuple(dataclasses.replace(leaf, device=device) for leaf in leaves)
    return Arguments(sig, tuple(treedefs), placed, batch_type, device)


def _leaf(path: str, role: Role, value: Any) -> Leaf:
    if not isinstance(value, torch.Tensor | TensorSpec):
        raise TreeError(
            f"{path} is {type(value).__name__}, not a tensor. Numbers that configure the model "
            "belong in a static field (x: int = fg.static()), others in a tensor"
        )
    spec = TensorSpec.of(value)
    return Leaf(path, role, spec.device, spec)


def _batch_type(sig: Signature, name: str, example: Any) -> type | None:
    if example is not None:
        cls = type(example)
    else:
        cls = typing.get_type_hints(inspect.unwrap(sig.fn)).get(name, type(None))
    if buffers_of(cls) and host_field(cls) is not None:
        return cls
    if example is not None and not buffers_of(cls):
        return None  # exact shapes
    raise TreeError(
        f"{name} is {cls.__name__}, which does not say how its leaves are staged. Make it an "
        "@fg.struct with fg.buffer(...) fields and `spec: fg.BatchSpec = fg.host()`, and annotate "
        f"it, forward(..., {name}: Batch); or pass an example, whose exact shapes are the key then"
    )


def _staged(name: str, batch_type: type | None, example: Any) -> tuple[list[Leaf], Any]:
    """Staged leaves, declared by the fields of a struct or by an example's exact shapes."""
    cpu = torch.device("cpu")  # until the function's device is known
    if batch_type is not None:
        fields = buffers_of(batch_type)
        check_declared(batch_type, example is not None)
        names, treedef = trees.flatten(trees.unflatten_struct(batch_type, fields, example))
        buffers = [fields[n] for n in names]
    else:
        tensors, treedef = trees.flatten(example)
        specs = [_leaf(p, Role.STAGED, x).spec for p, x in zip(trees.paths(treedef, name), tensors)]
        buffers = [
            Buffer(tuple(Dim(str(n)) for n in s.shape), str(s.dtype).removeprefix("torch."))
            for s in specs
            if s is not None
        ]
    where = trees.paths(treedef, name)
    return [Leaf(p, Role.STAGED, cpu, buffer=b) for p, b in zip(where, buffers)], treedef


def match_donated(
    args: Arguments, outputs: Sequence[fx.Node], out_tree: Any, inputs: Sequence[fx.Node]
) -> dict[int, int]:
    """For each donated leaf, the index of the output leaf that is its new value.

    A donated argument comes back as the whole output or as one child of it with equal structure.

    Raises:
        DonationError: it does not, or more than one child could be meant.
    """
    parts = [(out_tree, 0)]
    start = 0
    for child in trees.children(out_tree):
        parts.append((child, start))
        start += child.num_leaves
    taken: set[int] = set()
    returns: dict[int, int] = {}
    for i in args.signature.positions(Role.DONATED):
        first = sum(t.num_leaves for t in args.treedefs[:i])
        leaves = range(first, first + args.treedefs[i].num_leaves)
        fits = [s for t, s in parts if t == args.treedefs[i] and s not in taken]
        rivals = sum(
            t == args.treedefs[i]
            for j, t in enumerate(args.treedefs)
            if j >= i and args.signature.roles[j] is Role.DONATED
        )
        if len(fits) > rivals:
            fits = _narrow(fits, [inputs[k].meta["val"] for k in leaves], outputs)
        if not fits:
            _refuse_missing(args, i, out_tree)
        if len(fits) > rivals:
            raise DonationError(
                f"{len(fits)} parts of the output have the structure of the donated argument "
                f"{args.signature.names[i]!r}, so which one is its new value is not known. "
                "Return it inside a container of its own, e.g. donate a one-field fg.struct"
            )
        taken.add(fits[0])
        returns.update({k: fits[0] + j for j, k in enumerate(leaves)})
    return returns


def _narrow(fits: list[int], olds: list[Any], outputs: Sequence[fx.Node]) -> list[int]:
    """Candidates whose leaves have the donated shapes and dtypes; of these, the buffer itself."""
    news = {s: [outputs[s + j].meta["val"] for j in range(len(olds))] for s in fits}
    alike = [
        s for s in fits
        if all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(olds, news[s]))
    ]  # fmt: skip
    same = [s for s in alike if all(same_place(a, b) for a, b in zip(olds, news[s]))]
    return same or alike


def _refuse_missing(args: Arguments, i: int, out_tree: Any) -> None:
    name, want = args.signature.names[i], args.treedefs[i]
    children = trees.children(out_tree) or [out_tree]
    nearest = max(
        children,
        key=lambda t: len(set(trees.paths(t, name)) & set(trees.paths(want, name))),
    )
    lines = "\n".join(trees.differences(want, nearest, name))
    raise DonationError(
        f"the donated argument {name!r} does not come back with its own structure:\n{lines}\n"
        f"Return it updated: return logits, {name}"
    )
