"""The padded key of one graph (`BatchDescriptor`), and user-defined fields in canonical order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple, Self

Extra = tuple[tuple[str, Hashable], ...]
"""User-defined fields as sorted (name, value) pairs."""

ExtraLike = Mapping[str, Hashable] | Iterable[tuple[str, Hashable]]


class _DescriptorTuple(NamedTuple):
    num_tokens: int
    num_reqs: int | None
    query_len: int | None
    adapters: int
    cascade: bool | None
    encoder_outputs: bool | None
    extra: Extra


class BatchDescriptor(_DescriptorTuple):
    """The padded key of one graph. None in a field: the key covers any value of it.

    | key       | num_reqs              | query_len | cascade, encoder_outputs |
    |-----------|-----------------------|-----------|--------------------------|
    | FULL      | set                   | set       | False                    |
    | FULL      | min(tokens, max_reqs) | None      | False                    |
    | PIECEWISE | None                  | None      | None                     |

    `cascade` and `encoder_outputs` left out are therefore False where `num_reqs` is set, else None.

    >>> BatchDescriptor(40, 40, query_len=1)
    BatchDescriptor(40, 40, query_len=1)
    """

    __slots__ = ()

    def __new__(
        cls,
        num_tokens: int,
        num_reqs: int | None = None,
        query_len: int | None = None,
        adapters: int = 0,
        cascade: Any = ...,
        encoder_outputs: Any = ...,
        extra: ExtraLike = (),
    ) -> Self:
        unsaid = None if num_reqs is None else False
        flags = (
            unsaid if cascade is ... else cascade,
            unsaid if encoder_outputs is ... else encoder_outputs,
        )
        counts = (num_tokens, num_reqs, query_len, adapters)
        return tuple.__new__(cls, (*counts, *flags, sorted_extra(extra)))

    def __repr__(self) -> str:
        counts = (
            f"{self.num_tokens}" if self.num_reqs is None else f"{self.num_tokens}, {self.num_reqs}"
        )
        return f"BatchDescriptor({counts}{changed(self, 2, BatchDescriptor(1, self.num_reqs))})"


def sorted_extra(extra: ExtraLike) -> Extra:
    """User-defined fields in the one order in which they are compared and hashed."""
    return tuple(sorted(extra.items() if isinstance(extra, Mapping) else extra))


def changed(item: Any, start: int, plain: tuple) -> str:
    """`, name=value` for each field from `start` on that is not as in `plain`."""
    pairs = zip(item._fields[start:], item[start:], plain[start:])
    shown = ((n, dict(v) if n == "extra" else v) for n, v, default in pairs if v != default)
    return "".join(f", {name}={value!r}" for name, value in shown)
