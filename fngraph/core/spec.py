"""What arrives and what was captured: `BatchSpec`, a batch's counts, and `BatchDescriptor`, padded.

Both are tuples underneath: a step builds one spec and looks one key up, and a tuple is the cheapest
thing that Python builds and hashes (a frozen dataclass takes three times as long).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from numbers import Integral
from operator import index
from typing import Any, NamedTuple, Self

from fngraph.core.modes import Mode
from fngraph.core.text import count
from fngraph.errors import SpecError

Extra = tuple[tuple[str, Hashable], ...]
"""User-defined fields as sorted (name, value) pairs."""

ExtraLike = Mapping[str, Hashable] | Iterable[tuple[str, Hashable]]


COUNTS = slice(7)
"""`spec[COUNTS]`: all that dispatch looks at, a spec without its host bounds; every field of a
descriptor. A constant, since a step takes one, in 0.08 us; `[:7]` takes 0.09, a property more."""

CLASS = slice(2, 7)
"""`spec[CLASS]`, `descriptor[CLASS]`: the fields after the numbers of tokens and requests."""


class _BoundsTuple(NamedTuple):
    max_query_len: int | None
    max_seq_len: int | None


class HostBounds(_BoundsTuple):
    """Upper bounds that a scheduler knows and backends may bake in; never part of a key.

    A bound that does not hold gives wrong numbers: backends read no further. Only what a spec's
    counts refute is seen.

    Attributes:
        max_query_len: no request brings more tokens than this; None: not said.
        max_seq_len: no request is longer, this step's tokens included; None: not said.

    Raises:
        SpecError: what is no number, or below 0.
    """

    def __new__(cls, max_query_len: int | None = None, max_seq_len: int | None = None) -> Self:
        bounds = (
            bound
            if bound is None or (type(bound) is int and bound >= 0)
            else _bound(cls._fields[i], bound)
            for i, bound in enumerate((max_query_len, max_seq_len))
        )
        return tuple.__new__(cls, bounds)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]  # for _replace too
        return cls(*iterable)

    @property
    def key(self) -> BatchDescriptor | None:
        """What is being captured in one graph; None in an eager call over true rows."""
        return None


NO_BOUNDS = HostBounds()


class _SpecTuple(NamedTuple):
    num_tokens: int
    num_reqs: int
    query_len: int | None
    adapters: int
    cascade: bool
    encoder_outputs: bool
    extra: Extra
    host: HostBounds


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
        host: upper bounds for backends, beside `query_len`; never part of a key.

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
            and (
                query_len is None or (type(query_len) is int and num_tokens == num_reqs * query_len)
            )
            and type(adapters) is int
            and adapters >= 0
            and (cascade is False or cascade is True)
            and (encoder_outputs is False or encoder_outputs is True)
            and not extra
        ):
            if host is not NO_BOUNDS:
                _check_host(host, num_tokens, num_reqs)
            counts = (num_tokens, num_reqs, query_len, adapters, cascade, encoder_outputs)
            return tuple.__new__(cls, (*counts, (), host))
        checked = _counts(num_tokens, num_reqs, query_len, adapters)
        _check_host(host, *checked[:2])
        flags = _flag("cascade", cascade), _flag("encoder_outputs", encoder_outputs)
        return tuple.__new__(cls, (*checked, *flags, sorted_extra(extra), host))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]  # for _replace too
        return cls(*iterable)

    def descriptor(self) -> BatchDescriptor:
        """This batch unpadded: what NONE runs."""
        return tuple.__new__(BatchDescriptor, self[COUNTS])  # type: ignore[arg-type]

    @property
    def bounds(self) -> HostBounds:
        """What backends are told: `host`, and by `query_len` what it leaves unsaid."""
        host = self.host
        if self.query_len is None or host.max_query_len is not None:
            return host
        return HostBounds(self.query_len, host.max_seq_len)

    def __repr__(self) -> str:
        counts = f"num_tokens={self.num_tokens}, num_reqs={self.num_reqs}"
        return f"BatchSpec({counts}{_changed(self)})"


class _DescriptorTuple(NamedTuple):
    num_tokens: int
    num_reqs: int | None
    query_len: int | None
    adapters: int
    cascade: bool | None
    encoder_outputs: bool | None
    extra: Extra


class BatchDescriptor(_DescriptorTuple):
    """A padded batch that is captured. None in a field: it covers any value there.

    | key       | num_reqs              | query_len | cascade, encoder_outputs |
    |-----------|-----------------------|-----------|--------------------------|
    | FULL      | set                   | set       | False                    |
    | FULL      | min(tokens, max_reqs) | None      | False                    |
    | PIECEWISE | None, or bounded      | None      | None                     |

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
        return f"BatchDescriptor({counts}{_changed(self)})"


Key = tuple[Mode, BatchDescriptor]
"""What is captured, and what a step replays: a descriptor under one runtime mode."""


class KeyBounds(HostBounds):
    """The bounds that a descriptor itself sets, to be baked into its graph; `key` says which."""

    _key: BatchDescriptor

    def __new__(cls, key: BatchDescriptor) -> Self:
        self = super().__new__(cls, max_query_len=key.query_len or key.num_tokens)
        self._key = key
        return self

    @property
    def key(self) -> BatchDescriptor:
        """What is being captured."""
        return self._key


def sorted_extra(extra: ExtraLike) -> Extra:
    """User-defined fields in the one order in which they are compared and hashed.

    Raises:
        SpecError: no names with values.
    """
    pairs: Any = extra.items() if isinstance(extra, Mapping) else extra
    try:
        found = sorted((name, value) for name, value in pairs)
    except (TypeError, ValueError):
        found = [(None, None)]  # no pairs, or names that have no order
    if not all(isinstance(name, str) and _is_hashable(value) for name, value in found):
        raise SpecError(f'extra={extra!r}: pass a dict to what has a hash, {{"ubatches": 2}}')
    return tuple(found)


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _bound(name: str, bound: Any) -> int:
    """A bound as a plain int. Raises SpecError for what bounds nothing."""
    whole = _whole(name, bound)
    if whole < 0:
        raise SpecError(f"HostBounds({name}={bound}) is below 0. Pass None where it is not known.")
    return whole


def _check_host(host: Any, num_tokens: int, num_reqs: int) -> None:
    """Raise SpecError for what are no bounds, or bounds that the counts refute."""
    if not isinstance(host, HostBounds):
        raise SpecError(f"host={host!r}: pass host=fg.HostBounds(max_query_len=..., ...)")
    for name, most in zip(host._fields, host):
        if most is not None and most * num_reqs < num_tokens:
            raise SpecError(
                f"BatchSpec({num_tokens}, {num_reqs}, host=HostBounds({name}={most})): "
                f"{count(num_reqs, 'request')} of at most {count(most, 'token')} make "
                f"{most * num_reqs}, fewer than num_tokens. Pass the largest over the requests"
            )


def _counts(
    num_tokens: Any, num_reqs: Any, query_len: Any, adapters: Any
) -> tuple[int, int, int | None, int]:
    """The counts as plain ints, or the error that says which rule they break."""
    num_tokens, num_reqs = _whole("num_tokens", num_tokens), _whole("num_reqs", num_reqs)
    query_len = None if query_len is None else _whole("query_len", query_len)
    adapters = _whole("adapters", adapters)
    if num_tokens < 1:
        raise SpecError(
            f"BatchSpec(num_tokens={num_tokens}) is an empty step. Skip steps without tokens."
        )
    if num_reqs < 1:
        raise SpecError(
            f"BatchSpec(num_reqs={num_reqs}) serves no request. Skip steps without requests."
        )
    if adapters < 0:
        raise SpecError(
            f"BatchSpec(adapters={adapters}) is below zero. "
            "Pass adapters=0 for a batch without any."
        )
    if query_len is not None and num_tokens != num_reqs * query_len:
        raise SpecError(
            f"BatchSpec(query_len={query_len}) says every request has {count(query_len, 'token')}, "
            f"so {count(num_reqs, 'request')} make{'s' * (num_reqs == 1)} "
            f"{count(num_reqs * query_len, 'token')}, but num_tokens={num_tokens}. "
            "Pass query_len=None for a mixed batch."
        )
    if num_reqs > num_tokens:
        raise SpecError(
            f"BatchSpec(num_tokens={num_tokens}, num_reqs={num_reqs}) has more requests than "
            "tokens, and each brings at least one. Count only the requests of this step."
        )
    return num_tokens, num_reqs, query_len, adapters


def _flag(name: str, value: Any) -> bool:
    if hasattr(value, "is_cuda"):  # a tensor, whose value the device would have to be waited for
        raise SpecError(f"{name}={value!r} is not a host bool. Pass {name}=bool(...)")
    return bool(value)


def _whole(name: str, value: Any) -> int:
    # a tensor has __index__ too, which waits for its value
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise SpecError(
            f"{name}={value!r} is not a host integer. Pass {name}=int(...); a tensor is read "
            "before the step, not in it."
        )
    return index(value)


def _changed(item: Any) -> str:
    """`, name=value` for each field that is not as it would be if the two counts were all."""
    plain = type(item)(item.num_tokens, item.num_reqs)
    shown = (
        f", {name}={dict(value) if name == 'extra' else value!r}"
        for name, value, default in zip(item._fields, item, plain)
        if value != default
    )
    return "".join(shown)
