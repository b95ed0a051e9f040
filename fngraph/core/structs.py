"""`fg.struct`: a frozen dataclass that is a pytree, whose fields say what role they play.

| declared as        | in the tree    | meaning                                             |
|--------------------|----------------|-----------------------------------------------------|
| `x: Tensor`        | a child        | any tensor or subtree                               |
| `fg.buffer(...)`   | a child        | a staged leaf with symbolic dims and a pad rule     |
| `fg.static()`      | structure      | hashable configuration: another value, another tree |
| `fg.host()`        | not in it      | host data such as `spec`; not readable in `forward` |
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, dataclass_transform

from fngraph.core.buffers import Buffer, buffer, declare
from fngraph.core.text import expect
from fngraph.core.where import is_user, user_line
from fngraph.errors import FieldError, HostFieldError

NAMESPACE = "fngraph"  # of the optree registry; global registrations are seen too


def host() -> Any:
    """Declare a host field: data for dispatch that is no leaf and that `forward` may not read."""
    return declare(host, "fg.host()", default=None)


def static(**kwargs: Any) -> Any:
    """Declare a static field: hashable configuration that is part of the tree's structure."""
    said = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
    return declare(static, f"fg.static({said})", **kwargs)


class HiddenHostField:
    """What a traced function finds in place of a host field: any use raises `HostFieldError`.

    Args:
        refuse: is given the error; where it does not raise, a read gives 1.
    """

    __slots__ = ("_name", "_refusal")

    def __init__(self, name: str, refuse: Callable[[HostFieldError], None] | None = None) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_refusal", refuse)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        name, refuse = (object.__getattribute__(self, x) for x in ("_name", "_refusal"))
        error = HostFieldError(
            f"{user_line()}: forward reads the host field .{name}, which a captured graph would "
            "freeze at its value during capture. Read the counts on the device instead, from a "
            'staged leaf that holds them: fg.buffer("R", "int32")'
        )
        if refuse is None:
            raise error
        refuse(error)
        return 1

    def __getattr__(self, attribute: str) -> Any:
        return self._refuse()

    __len__ = __getitem__ = __int__ = __index__ = __call__ = __hash__ = __reduce_ex__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __floordiv__ = __mod__ = __truediv__ = __float__ = _refuse

    def _refuse_truth(self, *args: Any) -> bool:
        return bool(self._refuse())

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse_truth

    def _refuse_text(self, *args: Any) -> str:
        return str(self._refuse())

    __str__ = __format__ = _refuse_text

    def __iter__(self) -> Iterator[int]:
        return iter([self._refuse()])

    def __copy__(self, *args: Any) -> Any:
        return self

    __deepcopy__ = __copy__

    @property  # type: ignore[misc]  # mypy knows __class__ as an attribute alone
    def __class__(self) -> type:
        if is_user(sys._getframe(1)):  # isinstance(batch.spec, ...)
            self._refuse()
        return HiddenHostField

    def __repr__(self) -> str:
        return f"<host field .{object.__getattribute__(self, '_name')}, not readable in forward>"


def hide_host_field(tree: Any, refuse: Callable[[HostFieldError], None]) -> None:
    """Report reads of the host field of `tree`, an `fg.struct` fresh from `unflatten`."""
    name = host_field(type(tree))
    if name is not None:
        tree.__dict__[name] = HiddenHostField(name, refuse)


class Exactly:
    """Values that equal only those that compute alike: 2 is not 2.0, True not 1, 0.0 not -0.0.

    Lists, dicts and sets among them are as they were then, whatever their owner does to them, or
    who is given `values`.
    """

    __slots__ = ("_key", "_values")

    def __init__(self, values: Any) -> None:
        self._key, self._values = _key(values), _copied(values)

    @property
    def values(self) -> Any:
        """They, with containers of the reader's own."""
        return _copied(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exactly) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self._values)


def _copied(x: Any) -> Any:
    """A value with copies of the lists, dicts and sets in it; itself where there is none, and where
    it is a tuple of the user's own kind, which nothing says how to make."""
    make = tuple if type(x) is tuple else getattr(type(x), "_make", None)
    if isinstance(x, tuple):
        parts = [_copied(y) for y in x]
        return x if make is None or all(map(operator.is_, parts, x)) else make(parts)
    if not isinstance(x, list | dict | set):
        return x
    new: Any = copy.copy(x)
    places = () if isinstance(x, set) else x.items() if isinstance(x, dict) else enumerate(x)
    for place, y in places:
        if (part := _copied(y)) is not y:  # a container of the user's may refuse to be written
            new[place] = part
    return new


def _key(x: Any, within: tuple[int, ...] = ()) -> Any:
    """A value with its type, all the way down; what has no hash counts by its identity, and so does
    what holds itself."""
    kind = type(x)
    if isinstance(x, tuple | list):
        return kind, *(_key(y, within) for y in x)
    if isinstance(x, dict):
        return kind, *((_key(name, within), _key(value, within)) for name, value in x.items())
    if isinstance(x, set | frozenset):
        return kind, frozenset(_key(y, within) for y in x)
    if dataclasses.is_dataclass(x) and kind.__hash__ not in (None, object.__hash__):
        return kind, x, *(_key(getattr(x, field.name), within) for field in dataclasses.fields(x))
    alone = not isinstance(x, Hashable) or hasattr(x, "data_ptr")  # tensors compare by element
    if alone or kind.__hash__ is object.__hash__ or id(x) in within:
        return kind, id(x) if alone else x
    value = repr(x) if isinstance(x, float | complex) else x
    held = _held(x)
    return (kind, value, _key(held, (*within, id(x)))) if held else (kind, value)


def _held(x: Any) -> Any:
    """What an object holds, which its own equality may leave out; not what it has only noted of
    itself since it was made."""
    held = None if isinstance(x, os.PathLike) else object.__getstate__(x)
    if not isinstance(held, dict):
        return held  # None: a number, text
    kind, noted = type(x), functools.cached_property
    return {n: y for n, y in held.items() if not isinstance(getattr(kind, n, None), noted)}


@dataclass_transform(
    frozen_default=True, field_specifiers=(dataclasses.field, buffer, host, static)
)
def struct(cls: Any) -> Any:
    """Make `cls` a frozen dataclass and register it as a pytree.

    `dataclasses.replace` makes changed copies. Static fields count by value, lists and dicts
    as they were when the tree was flattened; what has no hash counts by its identity.

    Raises:
        FieldError: more than one host field, or no class.
    """
    expect(type, "a class: @fg.struct above it", FieldError, cls=cls)
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    roles = {f.name: f.metadata.get("fngraph") for f in dataclasses.fields(cls)}
    children = tuple(n for n, role in roles.items() if role not in (host, static))
    statics = tuple(n for n, role in roles.items() if role is static)
    hosts = tuple(n for n, role in roles.items() if role is host)
    if len(hosts) > 1:
        raise FieldError(f"{cls.__name__} has the host fields {hosts}; at most one is allowed")
    cls.__fngraph_roles__ = roles

    def flatten(tree: Any) -> tuple[tuple[Any, ...], Any, tuple[str, ...]]:
        get = tree.__dict__.__getitem__
        meta = Exactly(tuple(map(get, statics))) if statics else ()
        return tuple(map(get, children)), meta, children

    def unflatten(meta: Any, leaves: Any) -> Any:
        new: Any = object.__new__(cls)
        new.__dict__.update(zip(children, leaves))
        new.__dict__.update(zip(statics, meta.values if statics else ()))
        new.__dict__.update({name: HiddenHostField(name) for name in hosts})
        return new

    import optree  # here, so that `import fngraph.core` stays under 50 ms

    optree.register_pytree_node(cls, flatten, unflatten, namespace=NAMESPACE)
    return cls


def buffers_of(cls: type) -> Mapping[str, Buffer]:
    """The `fg.buffer` fields of a struct by name; empty for any other class."""
    roles = getattr(cls, "__fngraph_roles__", {})
    return {name: role for name, role in roles.items() if isinstance(role, Buffer)}


def check_declared(cls: type, with_example: bool) -> None:
    """Raise unless every child of a staged struct is an `fg.buffer`, and static fields are known.

    Raises:
        FieldError: naming the field.
    """
    roles = getattr(cls, "__fngraph_roles__", {})
    for name, role in roles.items():
        if role is None:
            raise FieldError(
                f"{cls.__name__}.{name} does not say how it is staged. Declare its dims and dtype: "
                f'{name}: Tensor = fg.buffer("T", "int64")'
            )
        if role is static and not with_example:
            raise FieldError(
                f"{cls.__name__}.{name} is static, so the class alone does not give the batch's "
                "structure. Pass an example: trace(..., batch=batch), capture(..., batch=batch)"
            )


def host_field(cls: type) -> str | None:
    """The name of a struct's host field, or None."""
    roles = getattr(cls, "__fngraph_roles__", {})
    return next((name for name, role in roles.items() if role is host), None)
