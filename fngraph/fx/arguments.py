"""A user's function, the role of each of its parameters, and its arguments as a trace needs them.

A parameter is held, donated or staged. Its abstract argument is a structure and leaves without
memory, made from tensors, from specs (`fg.like`), or, of the batch, from its class alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fngraph.core import Buffer, Dim, buffers_of, check_declared, host_field, trees
from fngraph.core.structs import hide_host_field
from fngraph.errors import MutationError, TreeError
from fngraph.fx.leaves import Leaf, Role, TensorSpec, check_aliases, check_kind, neighbours

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

    def call(self, values: Sequence[Any]) -> Any:
        """`fn` on one value a parameter, by keyword where it takes no other way."""
        parameters = inspect.signature(self.fn).parameters.values()
        only = [p.kind is p.KEYWORD_ONLY for p in parameters]
        named = {n: v for n, v, keyword in zip(self.names, values, only) if keyword}
        return self.fn(*[v for v, keyword in zip(values, only) if not keyword], **named)

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any], *roles: Role) -> list[Any]:
        """A call's arguments in the order of the parameters that have one of `roles`.

        Raises:
            TreeError: too few, too many, or an unknown name.
        """
        names = [self.names[i] for i in self.positions(*roles)]
        given = dict(zip(names, args)) | dict(kwargs)
        if len(args) + len(kwargs) != len(names) or set(given) != set(names):
            passed = [*names[: len(args)], *["one more"] * (len(args) - len(names)), *kwargs]
            raise TreeError(f"expected the arguments {names}, got {passed}")
        return [given[name] for name in names]

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
        orders: position to a structure that `forward` is to see, with the keys of its dicts in
            another order than the leaves are in.
    """

    signature: Signature
    treedefs: tuple[Any, ...]
    leaves: tuple[Leaf, ...]
    batch_type: type | None
    device: torch.device
    orders: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def batch_name(self) -> str:
        """The staged parameter's."""
        return next(
            n for n, role in zip(self.signature.names, self.signature.roles) if role is Role.STAGED
        )

    @property
    def fields(self) -> dict[str, Buffer]:
        """Path to declaration of each staged leaf."""
        return {leaf.path: leaf.buffer for leaf in self.leaves if leaf.buffer is not None}

    def batch_over(self, leaves: Sequence[Any]) -> Any:
        """The staged argument, over its leaves."""
        return trees.unflatten(self.treedefs[self.signature.names.index(self.batch_name)], leaves)

    def of(self, *roles: Role) -> list[int]:
        """Indices of the leaves that have one of `roles`."""
        return [i for i, leaf in enumerate(self.leaves) if leaf.role in roles]

    def span(self, position: int) -> slice:
        """The leaves of one parameter."""
        start = sum(treedef.num_leaves for treedef in self.treedefs[:position])
        return slice(start, start + self.treedefs[position].num_leaves)

    def unflatten(self, leaves: Sequence[Any], refuse: Callable[[Any], None]) -> list[Any]:
        """The arguments, over `leaves`; reads of the batch's host field are reported."""
        values = [
            trees.unflatten(treedef, leaves[self.span(i)])
            for i, treedef in enumerate(self.treedefs)
        ]
        for i, treedef in self.orders.items():
            values[i] = trees.ordered_as(values[i], treedef)
        if self.batch_type is not None:
            (staged,) = self.signature.positions(Role.STAGED)
            hide_host_field(values[staged], refuse)
        return values

    def in_their_order(self, result: Any) -> Any:
        """What `forward` returns, with dicts that are new donated values in the order of the old:
        it is the caller's own containers that come back."""
        donated = [self.treedefs[i] for i in self.signature.positions(Role.DONATED)]
        for treedef in donated:
            result = trees.ordered_as(result, treedef)
        values, level = trees.flatten(result, is_leaf=lambda x: x is not result)
        for treedef in donated:
            values = [trees.ordered_as(value, treedef) for value in values]
        return trees.unflatten(level, values)

    def check_held(self, values: Sequence[Any], given: Sequence[tuple[list[Any], Any]]) -> None:
        """Raise if `forward` has put another tensor into a container that it was given to read.

        Args:
            given: leaves and structure of each argument before the call.

        Raises:
            MutationError: with the argument's path.
        """
        for i in self.signature.positions(Role.HELD, Role.STAGED):
            name, (before, structure) = self.signature.names[i], given[i]
            after, treedef = trees.flatten(values[i])
            differs = [k for k, (a, b) in enumerate(zip(before, after)) if a is not b]
            if differs or treedef != structure:
                path = trees.paths(treedef, name)[differs[0]] if differs else name
                raise MutationError(
                    f"forward puts another tensor into {path}, which is "
                    f"{self.signature.roles[i].value}; the caller's own {name} would not change. "
                    f"Use a copy of the container: {name} = {{**{name}, ...}}"
                )


def abstract_arguments(sig: Signature, given: Mapping[str, Any]) -> Arguments:
    """Abstract arguments from tensors or `fg.like` specs; the batch comes from its class alone.

    Args:
        given: held and donated arguments by name; the staged one is optional if annotated.

    Raises:
        TreeError: a leaf that is no dense tensor, several devices, or a batch that is not a
            struct.
        AliasError: a donated leaf shares memory with another one.
    """
    leaves: list[Leaf] = []
    treedefs = []
    batch_type: type | None = None
    devices: dict[torch.device, str] = {}
    batch_device = torch.device("cpu")
    real: list[tuple[Leaf, torch.Tensor]] = []
    for name, role in zip(sig.names, sig.roles):
        if role is Role.STAGED:
            batch_type = _batch_type(sig, name, given.get(name))
            found, treedef = _staged(name, batch_type, given.get(name))
            example = [x for x in trees.flatten(given.get(name))[0] if hasattr(x, "device")]
            batch_device = example[0].device if example else batch_device
        else:
            _check_no_batch(sig, name, role, given[name])
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
    device = next(iter(devices), batch_device)  # held and donated leaves decide
    lies = {leaf.path: at for (leaf, _), at in zip(real, neighbours([x for _, x in real]))}
    placed = tuple(
        dataclasses.replace(leaf, device=device, lies=lies.get(leaf.path)) for leaf in leaves
    )
    return Arguments(sig, tuple(treedefs), placed, batch_type, device)


def _leaf(path: str, role: Role, value: Any) -> Leaf:
    if not isinstance(value, torch.Tensor | TensorSpec):
        raise TreeError(f"{path} is {_no_tensor(value)}")
    if isinstance(value, torch.Tensor):
        check_kind(path, value)
    spec = TensorSpec.of(value)
    return Leaf(path, role, spec.device, spec)


def _no_tensor(value: Any) -> str:
    """What a leaf is that is no tensor, and what to do with it."""
    kind = type(value).__name__
    if isinstance(value, nn.Module):
        return (
            f"a module ({kind}), and a graph reads tensors. Take them out: forward, params, "
            "buffers = fg.from_module(module.eval())"
        )
    return (
        f"{kind}, not a tensor. Numbers that configure the model belong in a static field "
        "(x: int = fg.static()), or are bound, functools.partial(forward, x=2); those that change "
        "belong in a tensor"
    )


def _check_no_batch(sig: Signature, name: str, role: Role, value: Any) -> None:
    """Raise `TreeError` where a batch is passed for another parameter than the staged one."""
    if buffers_of(type(value)) and host_field(type(value)) is not None:
        staged = sig.names[sig.roles.index(Role.STAGED)]
        raise TreeError(
            f"{name} is {role.value}, and was given a {type(value).__name__}, which is a batch: it "
            f"has fg.buffer fields and a spec. The batch is {staged!r}. Swap the arguments, "
            f"forward({', '.join(sig.names)}), or say which is the batch: stage={name!r}"
        )


def _batch_type(sig: Signature, name: str, example: Any) -> type | None:
    if example is not None:
        cls = type(example)
    else:
        try:
            cls = typing.get_type_hints(inspect.unwrap(sig.fn)).get(name, type(None))
        except NameError as error:  # a class that is local to some function
            raise TreeError(
                f"the annotation of {name!r} cannot be looked up ({error}). Pass an example: "
                "trace(..., batch=batch), capture(..., batch=batch)"
            ) from error
    if buffers_of(cls) or host_field(cls) is not None:
        if host_field(cls) is None:
            raise TreeError(
                f"{cls.__name__} has fg.buffer fields, but no spec to say how many tokens and "
                "requests a batch has. Add `spec: fg.BatchSpec = fg.host()`"
            )
        return cls
    if example is not None:
        return None  # exact shapes
    said = f"is annotated {cls.__name__}" if cls is not type(None) else "has no annotation"
    raise TreeError(
        f"forward's {name!r} {said}, which does not say how its leaves are staged. Annotate it "
        f"with an @fg.struct of fg.buffer(...) fields, forward(..., {name}: Batch), or pass an "
        "example: trace(..., batch=batch), capture(..., batch=batch)"
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
