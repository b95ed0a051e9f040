"""A function's arguments as a trace needs them: a structure, and leaves without memory.

They are made from tensors, from specs (`fg.like`), or, of the batch, from its class alone.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fngraph.core import Buffer, Dim, buffers_of, check_declared, host_field, trees
from fngraph.core.structs import hide_host_field
from fngraph.core.text import a
from fngraph.errors import MutationError, TreeError
from fngraph.fx.leaves import Leaf, Role, TensorSpec, check_aliases, check_kind, neighbours
from fngraph.fx.signatures import Signature


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
                path = self.signature.paths(treedef, i)[differs[0]] if differs else name
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
    for i, (name, role) in enumerate(zip(sig.names, sig.roles)):
        if role is Role.STAGED:
            batch_type = _batch_type(sig, name, given.get(name))
            found, treedef = _staged(sig, i, batch_type, given.get(name))
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
        raise TreeError(f"{path} is {no_tensor(path, value)}")
    if isinstance(value, torch.Tensor):
        check_kind(path, value)
    spec = TensorSpec.of(value)
    return Leaf(path, role, spec.device, spec)


def no_tensor(path: str, value: Any) -> str:
    """What a leaf is that is no tensor, and what to do with it."""
    kind = type(value).__name__
    if isinstance(value, nn.Module):
        return (
            f"a {kind}, not a tensor. Take a module's tensors out: forward, params, buffers = "
            "fg.from_module(module.eval())"
        )
    if path == "self":
        return (
            f"of class {kind}, not a tensor or a tree of them. Make the class one, @fg.struct "
            "above it; or graphify a function of its tensors"
        )
    name = path if path.isidentifier() else "x"
    shown = repr(value) if isinstance(value, bool | int | float) else "x"
    return (
        f"{a(kind)}, not a tensor. One that changes is passed as "
        f"one, torch.tensor({shown}); one that configures the model is bound, "
        f"functools.partial(forward, {name}={shown}), or a static field ({name}: int = fg.static())"
    )


def _annotated(fn: Any) -> Any:
    """The function that a callable's annotations stand at: of a partial, or of an object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    return fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn).__call__


def _check_no_batch(sig: Signature, name: str, role: Role, value: Any) -> None:
    """Raise `TreeError` where a batch is passed for another parameter than the staged one."""
    if buffers_of(type(value)) and host_field(type(value)) is not None:
        staged = sig.names[sig.roles.index(Role.STAGED)]
        raise TreeError(
            f"{name} is {role.value}, and was given a {type(value).__name__}, which is a batch: it "
            f"has fg.buffer fields and a spec. The batch is {staged!r}. Swap the arguments, "
            f"forward({', '.join(sig.names)}), or say which is the batch: stage={name!r}"
        )


def _check_no_spec(names: Sequence[str], values: Sequence[Any]) -> None:
    """Raise `TreeError` where one of several staged arguments is a batch with a spec."""
    for name, value in zip(names, values):
        if host_field(type(value)) is not None:
            others = ", ".join(other for other in names if other != name)
            raise TreeError(
                f"{name} is a {type(value).__name__}, whose spec says how all that is staged is "
                f"padded, and {others} is staged beside it. Make {others} a field of it: "
                'fg.buffer("T", "float32"), or fg.buffer("", "float32") for a number'
            )


def _batch_type(sig: Signature, name: str, example: Any) -> type | None:
    if example is not None:
        cls = type(example)
    else:
        try:
            cls = typing.get_type_hints(_annotated(sig.fn)).get(name, type(None))
        except NameError as error:  # a class that is local to some function
            raise TreeError(
                f"the annotation of {name!r} cannot be looked up ({error}). Pass an example: "
                f"trace(..., batch={name}), capture(..., batch={name})"
            ) from error
    if buffers_of(cls) or host_field(cls) is not None:
        if host_field(cls) is None:
            raise TreeError(
                f"{cls.__name__} has fg.buffer fields, but no spec to say how many tokens and "
                "requests a batch has. Add `spec: fg.BatchSpec = fg.host()`"
            )
        return cls
    if example is not None:
        if sig.together is not None:
            _check_no_spec(name.split(", "), example)
        return None  # exact shapes
    if sig.together is not None:
        quoted = ", ".join(map(repr, name.split(", ")))
        raise TreeError(
            f"forward's {quoted} have no annotation that says how they are staged. Pass examples: "
            f"trace(..., batch=({name})), capture(..., batch=({name}))"
        )
    said = f"is annotated {cls.__name__}" if cls is not type(None) else "has no annotation"
    raise TreeError(
        f"forward's {name!r} {said}, which does not say how its leaves are staged. Annotate it "
        f"with an @fg.struct of fg.buffer(...) fields, forward(..., {name}: Batch), or pass an "
        f"example: trace(..., batch={name}), capture(..., batch={name})"
    )


def _staged(
    sig: Signature, position: int, batch_type: type | None, example: Any
) -> tuple[list[Leaf], Any]:
    """Staged leaves, declared by the fields of a struct or by an example's exact shapes."""
    cpu = torch.device("cpu")  # until the function's device is known
    if batch_type is not None:
        fields = buffers_of(batch_type)
        check_declared(batch_type, example is not None)
        names, treedef = trees.flatten(trees.unflatten_struct(batch_type, fields, example))
        buffers = [fields[n] for n in names]
    else:
        tensors, treedef = trees.flatten(example)
        where = sig.paths(treedef, position)
        specs = [_leaf(p, Role.STAGED, x).spec for p, x in zip(where, tensors)]
        buffers = [
            Buffer(tuple(Dim(str(n)) for n in s.shape), str(s.dtype).removeprefix("torch."))
            for s in specs
            if s is not None
        ]
    where = sig.paths(treedef, position)
    return [Leaf(p, Role.STAGED, cpu, buffer=b) for p, b in zip(where, buffers)], treedef
