"""A user's function, the role of each of its parameters, and a call's arguments in their order.

A parameter is held, donated or staged. Two kinds of it take no tensors, or several at once:

    forward(params, x, train=False)       # static: False is a part of the function, as in jax.jit
    graphify(..., stage=("x", "t"))       # x and t are one batch, of exact shapes
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fngraph.core import text, trees
from fngraph.errors import TreeError
from fngraph.fx.leaves import Role, TensorSpec

Names = str | int | Iterable[str | int] | None
_STATIC = str | bool | None | torch.dtype | torch.device | torch.memory_format | enum.Enum
_ARRAYS = torch.Tensor | TensorSpec


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function and the role of each of its parameters.

    Attributes:
        names: of the parameters; several that are staged are one, ("w", "x, t").
        together: the class of a batch that is made of several parameters, with a field for each.
    """

    fn: Callable[..., Any]
    names: tuple[str, ...]
    roles: tuple[Role, ...]
    together: Any = None

    def positions(self, *roles: Role) -> list[int]:
        """Indices of the parameters that have one of `roles`."""
        return [i for i, role in enumerate(self.roles) if role in roles]

    def paths(self, treedef: Any, position: int) -> list[str]:
        """How to reach each leaf of an argument."""
        name = self.names[position]
        found = trees.paths(treedef, name)
        if self.together is not None and self.roles[position] is Role.STAGED:
            return [path.removeprefix(f"{name}.") for path in found]
        return found

    @functools.cached_property
    def _parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.fn).parameters)

    def call(self, values: Sequence[Any]) -> Any:
        """`fn` on one value for each of `names`, by keyword where it takes no other way."""
        given = dict(zip(self.names, values))
        if self.together is not None:
            batch = self.names[self.roles.index(Role.STAGED)]
            given |= zip(batch.split(", "), given.pop(batch))
        args, named = [], {}
        for name, parameter in self._parameters.items():
            value = given[name]
            value = value.value if isinstance(value, trees.Static) else value
            if parameter.kind is parameter.KEYWORD_ONLY:
                named[name] = value
            else:
                args.append(value)
        return self.fn(*args, **named)

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any], *roles: Role) -> list[Any]:
        """A call's arguments, in the order of those of `names` that have one of `roles`. One that
        is left out is its default.

        Raises:
            TreeError: too few, too many, or an unknown name.
        """
        of = dict(zip(self.names, self.roles))
        names = [name for name in self._parameters if of.get(name, Role.STAGED) in roles]
        given = dict(zip(names, args)) | dict(kwargs)
        defaults = {n: self._parameters[n].default for n in names if n not in given}
        left = {n: x for n, x in defaults.items() if x is not inspect.Parameter.empty}
        known = len(given) == len(args) + len(kwargs) and set(given) <= set(names)
        if not known or len(given) + len(left) != len(names):
            raise TreeError(_misfit(names, args, kwargs, given | left))
        given |= left
        found = []
        for name, role in zip(self.names, self.roles):
            if role is Role.HELD and role in roles:
                found.append(as_static(given[name], name in left))
            elif role is Role.STAGED and role in roles and self.together is not None:
                found.append(self.together(*[given[part] for part in name.split(", ")]))
            elif role in roles:
                found.append(given[name])
        return found

    def __repr__(self) -> str:
        params = ", ".join(f"{n}: {r.value}" for n, r in zip(self.names, self.roles))
        return f"{getattr(self.fn, '__name__', 'forward')}({params})"


def _misfit(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], known: Iterable[str]
) -> str:
    """What is wrong with the arguments of a call that takes `names`."""
    missing = [repr(name) for name in names if name not in known]
    twice = [repr(name) for name in names[: len(args)] if name in kwargs]
    strange = [name for name in kwargs if name not in names]
    told = [f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"] * bool(missing)
    if len(args) > len(names):
        told.append(f"{len(args)} were passed (what was bound, if anything, is not passed again)")
    told += [f"{name!r} is none of them{_meant(name, names)}" for name in strange]
    told += [f"{name} was passed twice" for name in twice]
    return f"expected the arguments {', '.join(map(repr, names))}; {'; '.join(told)}"


def _meant(name: str, names: Sequence[str]) -> str:
    near = text.nearest(name, names)
    return f" (did you mean {near!r}?)" if near is not None else ""


def as_static(value: Any, is_default: bool = False) -> Any:
    """An argument, as a part of the function where it is no data: text, a flag, a dtype, None.

    Args:
        is_default: what a call has left out. Then numbers and others without a tensor are static
            too; passed, they may be others at each call.
    """
    fixed = isinstance(value, _STATIC)
    if is_default and not fixed:
        fixed = not any(isinstance(x, _ARRAYS | nn.Module) for x in trees.flatten(value)[0])
    return trees.Static(value) if fixed else value


def signature(fn: Callable[..., Any], donate: Names, stage: Names) -> Signature:
    """Roles by name or position; a parameter that is in neither is held.

    Raises:
        TreeError: a name that is no parameter, or one in both; a module.
    """
    if isinstance(fn, nn.Module):
        raise TreeError(
            f"{type(fn).__name__} is a module, and graphify takes a function of tensors. Take them "
            "out: forward, params, buffers = fg.from_module(module.eval()); fast = "
            'fg.graphify(forward, stage="x")'
        )
    text.expect(Callable, "a function of tensors", TreeError, forward=fn)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):  # of C, which does not say
        name = getattr(fn, "__name__", repr(fn))
        raise TreeError(
            f"Python cannot read which parameters {name} has. Name them: "
            f'def forward(x): return {name}(x), and graphify(forward, stage="x")'
        ) from None
    variadic = [p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if variadic:
        raise TreeError(f"forward takes *{variadic[0]}; name its parameters, each has one role")
    names = tuple(p.name for p in parameters)

    def resolve(what: str, given: Names) -> set[str]:
        text.expect(
            (str, int, Iterable, type(None)), f"{what}='x', or 0", TreeError, **{what: given}
        )
        many = [given] if isinstance(given, str | int) else list(given or ())
        found = {names[x] if type(x) is int and x < len(names) else x for x in many}
        unknown = found - set(names)
        if unknown:
            name = unknown.pop()
            near = text.nearest(name, names)
            meant = f'. Did you mean {what}="{near}"?' if near is not None else ""
            raise TreeError(f"{what}={name!r} is no parameter of forward{names}{meant}")
        return typing.cast(set[str], found)

    donated, staged = resolve("donate", donate), resolve("stage", stage)
    if not staged:
        raise TreeError(
            f"stage={stage!r} names no parameter of forward{names}. Name what is new at each call: "
            'stage="batch", or several, stage=("x", "t")'
        )
    if donated & staged:
        raise TreeError(f"{(donated & staged).pop()!r} cannot be both donated and staged")
    batch = [name for name in names if name in staged]
    together = collections.namedtuple("Batch", batch, rename=True) if len(batch) > 1 else None  # type: ignore[misc]
    roles = {name: Role.DONATED if name in donated else Role.HELD for name in names}
    roles |= {batch[0]: Role.STAGED}
    kept = [name for name in names if name not in batch[1:]]
    return Signature(
        fn,
        tuple(", ".join(batch) if name == batch[0] else name for name in kept),
        tuple(roles[name] for name in kept),
        together,
    )
