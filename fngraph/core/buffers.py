"""Static buffers as data: symbolic dims, each field's pad rule, and the plan of what to allocate.

    fg.buffer("R + 1", "int32", pad="stride")

says that a leaf has one more row than the batch has requests, and how rows beyond them are filled.
Dims are sums and products of ints and letters: T query tokens, R requests, and the further letters
of `Limits` (B blocks per request, ...), which are one size for all batches. A space separates dims;
operators bind their neighbors.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import re
import types
from collections.abc import Mapping
from typing import Any

from fngraph.core.kinds import checked
from fngraph.core.text import did_you_mean, expect, html, table, with_suggestions
from fngraph.errors import FieldError

ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "uint16": 2, "uint32": 4,
    "uint64": 8, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
COUNTED = ("T", "R")
"""The letters that a batch decides: its tokens, its requests."""
Sizes = Mapping[str, int]
"""Letters -> how many of each there are, {"T": 8, "R": 8, "B": 16}."""

_OPERATORS = ast.Add | ast.Sub | ast.Mult | ast.FloorDiv | ast.Mod | ast.Pow


@checked
@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """One dimension, such as `T`, `R + 1`, `2*T` or `64`, evaluated with `dim(T=3, R=2)`."""

    text: str

    def __post_init__(self) -> None:
        self.letters  # noqa: B018  parse now, so that a bad dim fails where it is written

    @property
    def letters(self) -> frozenset[str]:
        """The letters that this dim depends on; empty for a constant."""
        return _parse_dim(self.text)[1]

    @property
    def moves(self) -> bool:
        """Whether batches decide it, by T or R; other letters are one size for all of them."""
        return not self.letters.isdisjoint(COUNTED)

    def __call__(self, **sizes: int) -> int:
        try:
            return eval(_parse_dim(self.text)[0], {"__builtins__": {}}, sizes)  # checked code
        except NameError as error:
            raise FieldError(
                f"dim {self.text!r} needs a size for {error.name!r}; known: {sorted(sizes)}. "
                f"Pass it in the limits: fg.Limits(..., {error.name}=64)"
            ) from None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Dim({self.text!r})"


@functools.cache
def _parse_dim(text: str) -> tuple[types.CodeType, frozenset[str]]:
    """Compiled code and letters, once what it may hold has been checked."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        raise FieldError(f"dim {text!r} is not an expression such as 'T', 'R + 1' or 64") from None
    letters = set()
    for node in ast.walk(tree.body):
        if isinstance(node, ast.Name):
            if len(node.id) != 1 or not node.id.isupper():
                raise FieldError(
                    f"dim {text!r} has the letter {node.id!r}; they are single capitals: T tokens, "
                    "R requests, others as Limits has them"
                )
            letters.add(node.id)
        elif isinstance(node, ast.Constant):
            if type(node.value) is not int:
                raise FieldError(f"dim {text!r} has the constant {node.value!r}; sizes are ints")
        elif not isinstance(node, ast.BinOp | ast.expr_context | _OPERATORS):
            raise FieldError(f"dim {text!r} may hold letters, ints and + - * // % ** only")
    return compile(tree, "<string>", "eval"), frozenset(letters)


def parse_dims(text: str) -> tuple[Dim, ...]:
    """`"R B"` is two dims, `"R + 1"` is one.

    Raises:
        FieldError: text that is not dims.
    """
    expect(str, "dims, as 'T 8' is", FieldError, dims=text)
    tight = re.sub(r"\s*(\+|-|\*|//|%)\s*", r"\1", text.strip())
    return tuple(Dim(re.sub(r"(\+|-|\*|//|%)", r" \1 ", part)) for part in tight.split())


STRIDE, LAST = "stride", "last"
RAMPS: dict[Any, int] = {STRIDE: 1, LAST: 2}
"""Pads that are no number; by the numbers that the graph's first node knows them by."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Buffer:
    """What a staged leaf looks like and how it is padded.

    Attributes:
        dims: symbolic shape.
        dtype: torch's dtype name, e.g. "int64".
        pad: the number in every row beyond the batch's own; "last": the batch's own last one,
            again and again, of offsets that end where their tokens do; or "stride": (R + 1,)
            offsets that go on with stride query_len in a uniform key and repeat the last one in a
            mixed key.
        pad_given: whether the declaration says it; a row that padding writes to must be said.
        changed: whether a batch may bring an `fg.ChangedRows` in place of the whole leaf.
        min: a number that no element of a batch is below, of integers; None: nothing is said.
    """

    dims: tuple[Dim, ...]
    dtype: str
    pad: int | float | bool | str = 0
    pad_given: bool = True
    changed: bool = False
    min: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            near = did_you_mean(self.dtype, ITEMSIZE)
            raise FieldError(f"dtype {self.dtype!r} is none of {', '.join(ITEMSIZE)}.{near}")
        if self.min is not None and (type(self.min) is not int or "int" not in self.dtype):
            raise FieldError(f"min={self.min!r} of {self.dtype}: a whole number, of integers")
        if not isinstance(self.pad, str):
            _check_pad(self.pad, self.dtype, self.min if self.pad_given else None)
        else:
            if self.pad not in RAMPS:
                raise FieldError(
                    f"pad={self.pad!r}: a number, 'stride' for query_start_loc, or 'last' for "
                    "other offsets"
                )
            if self.pad == STRIDE and [d.text for d in self.dims] != ["R + 1"]:
                raise FieldError("pad='stride' is for offsets of dims 'R + 1'")
            if self.pad == LAST and (len(self.dims) != 1 or self.dtype not in ("int32", "int64")):
                raise FieldError(
                    f"pad='last' is for offsets, int32 or int64 of one dim such as 'R + 1', not "
                    f"{self}"
                )
        if self.changed and [d.text for d in self.dims[:1]] != ["R"]:
            raise FieldError(
                f"rows='changed' is for a table with a row for each request, dims such as 'R B', "
                f"not {' '.join(map(str, self.dims))!r}"
            )
        moving = [d for d in self.dims[1:] if d.moves]
        if moving:
            raise FieldError(
                f"dims {self} vary in {moving[0]}, which is not the first dim; descriptors are "
                "leading slices, so put T or R first"
            )

    def rows(self, sizes: Sizes) -> int | None:
        """The leading dim under `sizes`; None for a scalar, which has none."""
        return self.dims[0](**sizes) if self.dims else None

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The concrete shape under sizes such as {"T": 40, "R": 40, "B": 16}."""
        return tuple(d(**sizes) for d in self.dims)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"

    def __repr__(self) -> str:
        said = [_quoted(" ".join(map(str, self.dims))), _quoted(self.dtype)]
        said += [f"pad={_quoted(self.pad)}"] if self.pad_given else []
        said += ['rows="changed"'] if self.changed else []
        said += [f"min={self.min}"] if self.min is not None else []
        return f"fg.buffer({', '.join(said)})"


def _quoted(x: Any) -> str:
    return f'"{x}"' if isinstance(x, str) else repr(x)


def _check_pad(pad: Any, dtype: str, least: int | None) -> None:
    """Raise FieldError for a pad that a row of this dtype cannot hold, or must not."""
    if not isinstance(pad, int | float):
        raise FieldError(f"pad={pad!r} of {dtype}: a number, 'stride' or 'last'")
    bits = 8 * ITEMSIZE[dtype]
    whole = isinstance(pad, int) or pad.is_integer()
    if dtype == "bool":
        low, high = 0, 1
    elif dtype.startswith("uint"):
        low, high = 0, 2**bits - 1
    elif dtype.startswith("int"):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    else:
        return
    if not (whole and low <= pad <= high):
        raise FieldError(f"pad={pad!r} of {dtype}: a whole number, {low} to {high}")
    if least is not None and pad < least:
        raise FieldError(f"pad={pad!r} is below min={least}, which is said of every number")


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A staged leaf at its place in the batch, with the shape that serves every key."""

    path: str
    buffer: Buffer
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffer."""
        return math.prod(self.shape) * ITEMSIZE[self.buffer.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class BufferPlan:
    """Every static buffer of a function, sized for the ladder's top."""

    buffers: tuple[PlannedBuffer, ...]
    sizes: Sizes

    @property
    def nbytes(self) -> int:
        """Bytes of all static buffers together."""
        return sum(b.nbytes for b in self.buffers)

    def _repr_html_(self) -> str:
        return html(self.as_text())

    def as_text(self) -> str:
        """One line a buffer: path, type, allocated shape, pad and bytes."""
        rows = [[b.path, b.buffer, b.shape, b.buffer.pad, b.nbytes] for b in self.buffers]
        return table(["leaf", "type", "allocated", "pad", "bytes"], rows)

    __repr__ = as_text


@checked
def plan_buffers(fields: Mapping[str, Buffer], top: Sizes) -> BufferPlan:
    """The static buffers of `fields` (path to `Buffer`) at sizes `top`, the largest of any key."""
    planned = (PlannedBuffer(path, buf, buf.shape(top)) for path, buf in fields.items())
    return BufferPlan(tuple(planned), dict(top))


@with_suggestions
def buffer(
    dims: str,
    dtype: Any,
    *,
    pad: int | float | bool | str | None = None,
    rows: str = "all",
    min: int | None = None,
) -> Any:
    """Declare a staged leaf of an `fg.struct`.

    Args:
        dims: a word each, in order: T (tokens), R (requests), other capitals (one size for all
            batches, given by `Limits`), numbers, and sums and products of these: "T", "R + 1",
            "R B", "T 8".
        dtype: torch's, or its name: torch.int32 or "int32".
        pad: see `Buffer`; left out: 0.
        rows: "all", or "changed" for tables with a row for each request, such as block tables: a
            step may be told just those that changed since the step before, by `fg.ChangedRows`.
        min: your word that no number of a batch is below it: 0 for integers that index rows of
            T or R, where -1 would be a key's last row. `guards=True` and
            `fg.check(..., rehearse=True)` look.

    Raises:
        FieldError: a bad declaration, where it is written.
    """
    if rows not in ("all", "changed"):
        raise FieldError(f'rows={rows!r}: "all" or "changed"')
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if isinstance(pad, float) and name.startswith(("int", "uint", "bool")):
        raise FieldError(f"pad={pad!r} of {name}: a whole number, which all of its rows can hold")
    declared = Buffer(
        parse_dims(dims), name, 0 if pad is None else pad, pad is not None, rows == "changed", min
    )
    return declare(declared, repr(declared))


class Declared(dataclasses.Field):  # type: ignore[type-arg]
    """A field of a struct as it is declared, which prints as the call that made it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self.metadata["fngraph.text"])


def declare(role: Any, text: str, **options: Any) -> Any:
    """A dataclass's field with a role, that prints as `text`.

    Args:
        options: those of `dataclasses.field`.
    """
    made: Any = dataclasses.field(metadata={"fngraph": role, "fngraph.text": text}, **options)
    made.__class__ = Declared  # whose constructor takes what this Python's dataclasses pass
    return made


@checked
def key_sizes(
    num_tokens: int, num_reqs: int | None, limits_reqs: int, dims: Sizes
) -> dict[str, int]:
    """{"T", "R", ...} of a key; one that covers any number of requests holds all that can come."""
    reqs = min(num_tokens, limits_reqs) if num_reqs is None else num_reqs
    return {**dims, "T": num_tokens, "R": reqs}
