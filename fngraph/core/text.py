"""Small text tables, what every `as_text` of core is made of; the nearest of known names; and what
is said of an argument, or of a file, that is of another kind."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from fngraph.errors import SpecError

F = TypeVar("F", bound=Callable[..., Any])


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, padded so that it also reads as plain text. Numbers align right, and a cell
    is one line."""
    cells = [[" ".join(str(cell).split("\n")).replace("|", r"\|") for cell in row] for row in rows]
    columns = list(zip(header, *cells))
    widths = [max(map(len, column)) for column in columns]
    right = [bool(cells) and all(map(_number, column[1:])) for column in columns]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (width + 1) + (":" if r else "-") for width, r in zip(widths, right))
    return "\n".join([line(header), f"|{rule}|", *map(line, cells)])


def html(text: str) -> str:
    """Text with Markdown tables as HTML, for notebooks: `_repr_html_` of what prints tables."""
    from html import escape

    parts: list[str] = []
    for block in text.split("\n\n"):
        lines = block.splitlines()
        at = next((i for i, line in enumerate(lines) if line.startswith("|")), len(lines))
        if at:
            parts.append(f"<pre>{escape(chr(10).join(lines[:at]))}</pre>")
        if at < len(lines):
            parts.append(_html_table(lines[at:], escape))
    return "\n".join(parts)


def _html_table(lines: Sequence[str], escape: Callable[[str], str]) -> str:
    import re

    bars = re.compile(r"(?<!\\)\|")  # those of the table, not of a cell
    rows = [[cell.strip().replace(r"\|", "|") for cell in bars.split(line)[1:-1]] for line in lines]
    header, rule, *rest = rows
    sides = ["right" if mark.endswith(":") else "left" for mark in rule]

    def row(cells: Sequence[str], tag: str) -> str:
        made = (
            f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
            for cell, side in zip(cells, sides)
        )
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(row(cells, "td") for cells in rest)
    return f"<table><thead>{row(header, 'th')}</thead><tbody>{body}</tbody></table>"


def _number(cell: str) -> bool:
    return cell.replace(".", "", 1).replace("%", "", 1).isdigit()


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """` Did you mean 'sinks'?`: the nearest of the known names; "" if none is near."""
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near is not None else ""


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The nearest of the known names, in any case; None if none is near."""
    import difflib  # 8 ms, and only an error needs it

    by_lower = {each.lower(): each for each in reversed(list(known))}
    near = difflib.get_close_matches(str(name).lower(), by_lower)
    return by_lower[near[0]] if near else None


def with_suggestions(made: F) -> F:
    """A function or a class whose `TypeError` about an unknown keyword says which may be meant.

    Python itself says so from 3.13 on; there it is left as it is. Not for what runs at each step,
    since it is a frame more, nor for what takes any keyword.
    """
    if sys.version_info >= (3, 13):
        return made
    if not isinstance(made, type):
        return _told(made, made.__name__)
    name = "__init__" if "__init__" in vars(made) else "__new__"
    maker = vars(made)[name]
    told = _told(getattr(maker, "__func__", maker), made.__name__)
    setattr(made, name, told if name == "__init__" else staticmethod(told))
    return made


def _told(fn: Any, name: str) -> Any:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # of what it does
            known = inspect.signature(fn).parameters
            unknown = [word for word in kwargs if word not in known]
            if not unknown:
                raise
            raise TypeError(unexpected(name, unknown[0], known)) from None

    return call


def expect(
    kind: Any, fix: str = "", error: type[Exception] = SpecError, /, **given: object
) -> None:
    """Refuse the first of these values that is of another kind.

    Args:
        kind: a class, or some.
        fix: what to pass; "": one of that kind.

    Raises:
        SpecError, or `error`: with the value's name, and what it is.

    >>> expect(int, repeats="5")
    Traceback (most recent call last):
        ...
    fngraph.errors.SpecError: repeats='5' is a str. Pass an int
    """
    for name, value in given.items():
        if not isinstance(value, kind):
            raise error(f"{what_is(name, value)}. Pass {fix or a(kind.__name__)}")


LONGEST = 80
"""Characters of a value that a message shows."""


def what_is(name: str, value: object) -> str:
    """What a value is called, itself where that takes a few words, and its kind.

    >>> what_is("repeats", "5"), what_is("sizes", [*range(99)])
    ("repeats='5' is a str", 'sizes is a list')
    """
    return f"{name}{shown(value)} is {a(type(value).__name__)}"


def shown(value: object) -> str:
    """`=4`, as a message shows an argument: "" where it takes more than a few words, as lists and
    trees of tensors do; text is cut.

    >>> shown({"a": 3}), shown([*range(99)]), shown("x" * 99)[-9:]
    ("={'a': 3}", '', "xxxxx...'")
    """
    if isinstance(value, str) and len(value) > LONGEST:
        return f"={value[:LONGEST] + '...'!r}"
    said = repr(value) if _brief(value, 3) else ""
    return f"={said}" if 0 < len(said) <= LONGEST and "\n" not in said else ""


def _brief(value: object, depth: int) -> bool:
    """Whether a value may be written out at all: that of a tensor waits for its device."""
    if isinstance(value, Mapping):
        parts: Sequence[object] = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = [*value]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return not hasattr(value, "shape")
    return depth > 0 and len(parts) <= LONGEST and all(_brief(part, depth - 1) for part in parts)


def a(noun: str) -> str:
    """With its article.

    >>> a("int"), a("str")
    ('an int', 'a str')
    """
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def what_is_off(dumped: str, error: Exception, version: str | None = None) -> str:
    """Why a text could not be read, in a few words that begin with "it".

    Args:
        error: what its reader ran into.
        version: which `format` the reader reads; None: of its files there is but one.
    """
    import json  # 2 ms that dispatch never needs

    if not dumped.strip():
        return "it is empty"
    try:
        found = json.loads(dumped)
    except ValueError as why:
        return f"it is no JSON ({why})"
    if not isinstance(found, dict):
        return f"it is JSON of a {type(found).__name__}"
    if version is not None and (other := found.get("format")) != version:
        if type(other) is str and other.startswith(version.rpartition(" ")[0]):
            return (
                f"it is of another version of fngraph ({other!r}, and this one reads {version!r}). "
                "Read it with that one, or write it again with this one"
            )
        if "traceEvents" in found:
            return "it is a trace, for Perfetto and TensorBoard"
        held = ", ".join(map(repr, list(found)[:4])) or "nothing"
        return f"it is JSON of something else, which holds {held}"
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return f"a part of it cannot be read ({type(error).__name__}: {error})"


def unexpected(name: str, word: str, known: Iterable[str]) -> str:
    """What to say of a keyword that a function does not have, as Python does from 3.13 on."""
    return f"{name}() got an unexpected keyword argument {word!r}.{did_you_mean(word, known)}"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers with their even runs folded: `1, 2, 4, 8..256 by 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        run = runs[-1] if runs else []
        if len(run) == 1 or (run and number - run[-1] == run[-1] - run[-2]):
            run.append(number)
        elif run and len(run) < FOLDED:
            runs.append([run.pop(), number])  # its last may start the next one
        else:
            runs.append([number])
    return ", ".join(map(_folded, runs))


FOLDED = 4
"""Runs from this length on are folded: a fold must be shorter than what it folds."""


def _folded(run: list[int]) -> str:
    if len(run) < FOLDED:
        return ", ".join(map(str, run))
    step = run[1] - run[0]
    return f"{run[0]}..{run[-1]}" + (f" by {step}" if step != 1 else "")


def count(number: int, noun: str) -> str:
    """`1 key`, `2 keys`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def named(values: Any) -> str:
    """What a named tuple prints as, a mapping that cannot be written as the dict that it holds."""
    parts = (dict(x) if isinstance(x, MappingProxyType) else x for x in values)
    said = ", ".join(f"{name}={part!r}" for name, part in zip(values._fields, parts))
    return f"{type(values).__name__}({said})"
