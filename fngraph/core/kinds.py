"""Arguments of another kind than a function's annotations say, refused at its door, by name.

    @checked
    def default_sizes(limits: Limits, query_lens: Sequence[int] = (1,), ceiling: int = 512): ...

    default_sizes([1, 8])          limits=[1, 8] is a list. Pass fg.Limits(max_tokens=..., ...)
    default_sizes(limits, [1.5])   query_lens[0]=1.5 is a float. Pass an int

Not for what runs at each step: a call takes some 5 us more, and a list as long as it is.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from fngraph.core.text import a, what_is
from fngraph.errors import FnGraphError, SpecError

_LISTS = (collections.abc.Iterable, collections.abc.Collection, collections.abc.Sequence)

F = TypeVar("F", bound=Callable[..., Any])

EXAMPLES = {
    "Limits": "fg.Limits(max_tokens=..., max_reqs=...)",
    "BatchSpec": "fg.BatchSpec(num_tokens=..., num_reqs=...), or batch.spec",
    "BatchDescriptor": "fg.BatchDescriptor(num_tokens=...)",
    "DispatchTable": "a DispatchTable, as step.table is",
    "Axis": "an axis of a mesh, mesh['tp']",
    "Callable": "a function",
}
"""What to pass, where a class says less."""


class Misfit(NamedTuple):
    """A value of another kind, where it is within an argument, and the kind that it should be."""

    where: str
    value: object
    kind: Any


def checked(made: F) -> F:
    """A function or a dataclass that refuses arguments of another kind than is annotated.

    Where it refuses them itself, it is heard first, since it has more to say; so it must do nothing
    that lasts before that. Wrong counts and unknown names are left to it, and so is what an
    annotation cannot say.

    Raises:
        SpecError: when it is called; it names the argument, what it is and what to pass.
    """
    if isinstance(made, type):
        cls: Any = made
        cls.__init__ = _checked(cls.__init__, cls)
        return made
    return _checked(made, made)  # type: ignore[no-any-return]


def _checked(fn: Any, annotated: Any) -> Any:
    """`fn`, whose arguments are annotated there."""
    kinds: dict[str, Any] = {}
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kinds:  # at the first call: names may be of modules that are imported later
            kinds.update(_hints(annotated))
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return fn(*args, **kwargs)  # which says so itself
        misfit = next(_all_misfits(signature, kinds, given), None)
        if misfit is None:
            return fn(*args, **kwargs)
        try:
            fn(*args, **kwargs)
        except FnGraphError as error:
            if not _is_of_kinds(error):
                raise
        except Exception:
            pass  # of what some line inside missed in it
        raise SpecError(said(misfit))

    return call


def _is_of_kinds(error: FnGraphError) -> bool:
    """Whether it is of a checked function that was called with it, by a name of its own."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename == __file__


def _all_misfits(
    signature: inspect.Signature, kinds: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[Misfit]:
    for name, value in given.items():
        for where, each in _each(signature.parameters[name], value):
            yield from _misfits(each, kinds.get(name, Any), where)


def _hints(annotated: Any) -> dict[str, Any]:
    """By argument or field. What a function returns may be of a module that is never imported."""
    if isinstance(annotated, type):
        return typing.get_type_hints(annotated)
    fn = inspect.unwrap(annotated)
    taken = {name: hint for name, hint in fn.__annotations__.items() if name != "return"}
    return typing.get_type_hints(types.SimpleNamespace(__annotations__=taken), fn.__globals__)


def _each(parameter: inspect.Parameter, value: Any) -> Iterable[tuple[str, Any]]:
    """Values with what they are called: of *args and **kwargs there may be some."""
    if parameter.kind is parameter.VAR_KEYWORD:
        return value.items()  # type: ignore[no-any-return]
    if parameter.kind is parameter.VAR_POSITIONAL:
        return [(f"{parameter.name}[{i}]", x) for i, x in enumerate(value)]
    return [(parameter.name, value)]


def said(misfit: Misfit) -> str:
    """What is wrong, and what to pass.

    >>> said(Misfit("limits", 4, int | None))
    'limits=4 is an int. Pass an int or None'
    """
    where, value, kind = misfit
    return f"{what_is(where, value)}. Pass {worded(kind)}"


def worded(kind: Any) -> str:
    """An annotation in words.

    >>> worded(typing.Sequence[int]), worded(Mapping[str, int | None]), worded(bool)
    ('a list of ints', 'a dict to an int or None', 'True or False')
    """
    if kind in (None, type(None)):
        return "None"
    if kind is bool:
        return "True or False"
    if kind is float:
        return "a number"
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(worded, inner)))
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    plain = origin or kind
    name = getattr(plain, "__name__", str(plain))
    if name in EXAMPLES:
        return EXAMPLES[name]
    if plain is tuple and inner[1:] not in ((), (Ellipsis,)):
        return f"a tuple of {', '.join(map(worded, inner))}"
    if plain is tuple or plain in _LISTS:
        return "a list" + _of(inner[:1], "of")
    if plain in (dict, Mapping):
        return "a dict" + _of(inner[1:], "to")
    return a(name)


def _of(inner: tuple[Any, ...], word: str) -> str:
    """What a container holds, where that can be said."""
    if not inner or inner[0] is Any or isinstance(inner[0], TypeVar):
        return ""
    words = worded(inner[0])
    article, _, noun = words.partition(" ")
    several = article in ("a", "an") and noun.isidentifier()
    return f" {word} {noun}s" if several else f" {word} {words}"


def _misfits(value: Any, kind: Any, where: str) -> Iterator[Misfit]:
    """Values that do not fit, within an argument, in order."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        tried = [list(_misfits(value, each, where)) for each in inner]
        if all(tried):  # one within it, where it is a container as it should be
            deep = [found[0] for found in tried if found[0].where != where]
            yield deep[0] if len(deep) == 1 else Misfit(where, value, kind)
    elif origin is typing.Literal:
        if value not in inner:
            yield Misfit(where, value, kind)
    elif not _fits(value, origin or kind):
        yield Misfit(where, value, kind)
    elif _is(origin, Mapping) and isinstance(value, Mapping):
        for key, each in value.items():
            yield from _misfits(key, inner[0], f"a key of {where}")
            yield from _misfits(each, inner[1], f"{where}[{key!r}]")
    elif inner and _is(origin, collections.abc.Iterable):
        if not isinstance(value, collections.abc.Collection):
            return  # an iterator: to look into it would use it up
        if origin is tuple and inner[-1] is not Ellipsis:
            if len(value) != len(inner):
                yield Misfit(where, value, kind)
                return
        else:
            inner = inner[:1] * len(value)
        for i, (each, one) in enumerate(zip(value, inner)):
            yield from _misfits(each, one, f"{where}[{i}]")


def _is(kind: Any, base: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a plain kind; of one that nothing can be told of, it is."""
    if kind is None:
        return value is None
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not isinstance(kind, type) or kind is object:
        return True  # Any, a type variable
    if kind is collections.abc.Callable:
        return callable(value)
    if kind is tuple or kind in _LISTS:
        return isinstance(value, collections.abc.Iterable) and not isinstance(value, str | bytes)
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol whose members are not looked at
        return True
