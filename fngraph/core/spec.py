"""What arrives: `BatchSpec`, the counts of one batch, checked when it is made.

It is a tuple underneath, like `BatchDescriptor`: a step builds one spec and looks one key up, and
a tuple is the cheapest thing that Python builds and hashes (a frozen dataclass takes three times
as long).
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any, NamedTuple, NoReturn, Self

from fngraph.core.descriptor import BatchDescriptor, Extra, ExtraLike, changed, sorted_extra
from fngraph.errors import SpecError


class HostBounds(NamedTuple):
    """Upper bounds that a scheduler knows and backends may bake in; never part of a key.

    Attributes:
        max_query_len: no request brings more tokens than this; None: not said.
        max_seq_len: no request is longer, this step's tokens included; None: not said.
    """

    max_query_len: int | None = None
    max_seq_len: int | None = None


NO_BOUNDS = HostBounds()


class _SpecTuple(NamedTuple):
    num_tokens: int
    num_reqs: int
    query_len: int | None = None
    adapters: int = 0
    cascade: bool = False
    encoder_outputs: bool = False
    extra: Extra = ()
    host: HostBounds = NO_BOUNDS


class BatchSpec(_SpecTuple):
    """The counts of one batch, all of them host integers.

    Attributes:
        num_tokens: query tokens of the step, over all requests; at least 1.
        num_reqs: requests in the batch; each brings at least one token.
        query_len: tokens of every request, where the scheduler *knows* the batch to be uniform
            decode (or verify) work. None: mixed, the safe default, so that a prefill of three
            tokens is never taken for a verify step of three.
        adapters: distinct adapters at work; 0: none.
        cascade: attention shares a prefix over requests (cascade attention).
        encoder_outputs: the batch carries fresh encoder outputs for cross attention.
        extra: user-defined fields, `{"ubatches": 2}`; the table's `Field` says what covers them.
        host: upper bounds for backends; never part of a key.

    Raises:
        SpecError: the counts contradict one another.

    >>> BatchSpec(6, 2, query_len=3)
    BatchSpec(num_tokens=6, num_reqs=2, query_len=3)
    """

    __slots__ = ()

    def __new__(
        cls,
        num_tokens: int,
        num_reqs: int,
        query_len: int | None = None,
        adapters: int = 0,
        cascade: bool = False,
        encoder_outputs: bool = False,
        extra: ExtraLike = (),
        host: HostBounds = NO_BOUNDS,
    ) -> Self:
        if (
            type(num_tokens) is int
            and type(num_reqs) is int
            and num_tokens >= num_reqs > 0
            and (query_len is None or num_tokens == num_reqs * query_len)
            and not extra
            and type(adapters) is int
            and adapters >= 0
        ):
            counts = (num_tokens, num_reqs, query_len, adapters, cascade, encoder_outputs)
            return tuple.__new__(cls, (*counts, (), host))
        checked = _counts(num_tokens, num_reqs, query_len, adapters)
        flags = (bool(cascade), bool(encoder_outputs))
        return tuple.__new__(cls, (*checked, *flags, sorted_extra(extra), host))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]  # for _replace too
        return cls(*iterable)

    def descriptor(self) -> BatchDescriptor:
        """The key that this batch would have unpadded: what NONE runs."""
        return tuple.__new__(BatchDescriptor, self[:7])

    def __repr__(self) -> str:
        counts = f"num_tokens={self.num_tokens}, num_reqs={self.num_reqs}"
        return f"BatchSpec({counts}{changed(self, 2, BatchSpec(1, 1))})"


def _counts(
    num_tokens: Any, num_reqs: Any, query_len: Any, adapters: Any
) -> tuple[int, int, int | None, int]:
    """The counts as plain ints, or the error that says which rule they break."""
    num_tokens, num_reqs = _whole("num_tokens", num_tokens), _whole("num_reqs", num_reqs)
    query_len = None if query_len is None else _whole("query_len", query_len)
    adapters = _whole("adapters", adapters)
    if num_tokens < 1:
        _refuse(f"num_tokens={num_tokens}: a step runs at least one token", "skip empty steps")
    if num_reqs < 1:
        _refuse(f"num_reqs={num_reqs}: a step serves at least one request", "skip empty steps")
    if adapters < 0:
        _refuse(f"adapters={adapters} is negative", "pass adapters=0 for a batch without any")
    if query_len is not None and num_tokens != num_reqs * query_len:
        tokens = f"{num_reqs} request{'s' * (num_reqs != 1)} make {num_reqs * query_len} tokens"
        raise SpecError(
            f"BatchSpec(query_len={query_len}) says every request has {query_len} "
            f"token{'s' * (query_len != 1)}, so {tokens}, but num_tokens={num_tokens}. "
            f"Pass query_len=None for a mixed batch."
        )
    if num_reqs > num_tokens:
        _refuse(
            f"num_reqs={num_reqs} is more than num_tokens={num_tokens}, yet every request brings "
            "at least one token",
            "count only the requests scheduled in this step",
        )
    return num_tokens, num_reqs, query_len, adapters


def _whole(name: str, value: Any) -> int:
    try:
        return index(value)
    except TypeError:
        raise SpecError(
            f"{name}={value!r} is not a host integer. Pass {name}=int(...); a tensor is read "
            "before the step, not in it."
        ) from None


def _refuse(rule: str, fix: str) -> NoReturn:
    raise SpecError(f"BatchSpec({rule}). Fix: {fix}.")
