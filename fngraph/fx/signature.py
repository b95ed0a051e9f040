"""A user's function and the role of each of its parameters: held, donated or staged."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fngraph.errors import TreeError
from fngraph.fx.leaves import Role

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
