"""`build_table`: the keys that resolved modes capture on their ladders.

Every other field multiplies them by the values that it is captured at; which numbers of adapters
those are is `adapter_counts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from numbers import Real

from fngraph.core.covering import BUILT_IN, Field, built_in_fields, user_defined
from fngraph.core.kinds import checked
from fngraph.core.limits import Limits
from fngraph.core.modes import Mode
from fngraph.core.resolution import Resolution
from fngraph.core.sizes import Ladders, check_sizes
from fngraph.core.spec import BatchDescriptor, sorted_extra
from fngraph.core.table import Cost, DispatchTable
from fngraph.core.text import with_suggestions
from fngraph.errors import SizesError, SpecError


@checked
@with_suggestions
def build_table(
    modes: Mode | str | Resolution,
    ladders: Ladders | Limits | None = None,
    limits: Limits | None = None,
    adapters: int | Iterable[int] = (0,),
    fields: Iterable[Field] = (),
    cost: Cost | None = None,
    *,
    overflow: str = "eager",
    own_uniform: bool = False,
    key_reqs: int | Iterable[int] | None = None,
) -> DispatchTable:
    """Every key that `modes` captures on these ladders: `build_table(modes, ladders, limits)`; or
    of what `resolve` says, which has both: `build_table(resolution, limits)`.

    Args:
        adapters: adapter counts that get keys, ascending; without 0, batches without adapters
            run eagerly. One number: the most that a batch uses, for
            `adapter_counts(most, powers=True)`.
        fields: user-defined fields; each multiplies the keys by its captured values.
        cost: what a key costs to run; a batch goes to the cheapest key that covers it. None: the
            one of fewest tokens.
        overflow: what a batch with more adapters than any key gets: "eager" or "clamp".
        own_uniform: capture uniform FULL keys in mode FULL too, because uniform batches have a
            backend of their own.
        key_reqs: requests of a key for mixed batches, PIECEWISE ones too; a batch with more has no
            such key. Several: a key for each of them at each size. None: as many as may come.

    Raises:
        SizesError: a ladder beyond the limits, or none; keys of no request.
        SpecError: bad adapters or fields; a cost that is no number.

    Source: the kinds of keys are vLLM 0.33's (uniform FULL, mixed FULL, PIECEWISE).
    """
    if isinstance(modes, Resolution):
        resolved = modes
        given = limits if limits is not None else ladders
        modes, ladders, limits = resolved.modes, resolved.sizes, given  # type: ignore[assignment]
    if not isinstance(ladders, Ladders) or not isinstance(limits, Limits):
        raise SizesError(
            f"build_table got {type(ladders).__name__} as ladders and {type(limits).__name__} as "
            "limits. Pass build_table(resolution, limits), or build_table(modes, ladders(...), "
            "limits)."
        )
    modes = Mode.parse(modes)
    counts = adapter_counts(adapters, powers=True) if isinstance(adapters, int) else adapters
    fields = _all_fields(tuple(counts), tuple(fields), overflow)
    if modes is not Mode.NONE:
        check_sizes(ladders.mixed, limits)
    full: list[BatchDescriptor] = []
    if modes.decode is Mode.FULL and (modes.dual or own_uniform):
        for query_len, sizes in ladders.by_query_len:
            rungs = _uniform(query_len, sizes, limits)
            uniform = ((size, size // query_len, query_len) for size in rungs)
            full += _keys(Mode.FULL, uniform, fields)
    reqs = _reqs(key_reqs, limits)
    if modes.mixed is Mode.FULL:
        full += _keys(Mode.FULL, _mixed(ladders.mixed, reqs or (limits.max_reqs,)), fields)
    piecewise: list[BatchDescriptor] = []
    if modes.mixed is Mode.PIECEWISE:
        piecewise = _keys(Mode.PIECEWISE, _mixed(ladders.mixed, reqs), fields)
    if cost is not None:
        for key in (*full, *piecewise):
            if not isinstance(of_key := cost(key), Real) or of_key != of_key:  # a NaN
                raise SpecError(f"cost({key!r}) gives {of_key!r}. Return a number.")
    return DispatchTable(modes, _ordered(full), _ordered(piecewise), limits, fields, cost)


def _reqs(key_reqs: int | Iterable[int] | None, limits: Limits) -> tuple[int, ...]:
    """What keys of mixed batches hold, largest first; (): any number."""
    if key_reqs is None:
        return ()
    given = tuple(key_reqs) if isinstance(key_reqs, Iterable) else (key_reqs,)
    if not given or min(given) < 1:
        raise SizesError(f"key_reqs={key_reqs} holds no request. Pass key_reqs=1 or more.")
    return tuple(sorted({min(n, limits.max_reqs) for n in given}, reverse=True))


def _mixed(
    sizes: Iterable[int], reqs: Sequence[int]
) -> Iterable[tuple[int, int | None, int | None]]:
    """The counts of keys of mixed batches: at each size, one for each number of requests."""
    for size in sizes:
        if not reqs:
            yield size, None, None
        for n in dict.fromkeys(min(size, n) for n in reqs):
            yield size, n, None


def _all_fields(
    adapters: tuple[int, ...], extra: tuple[Field, ...], overflow: str
) -> tuple[Field, ...]:
    names = [item.name for item in extra]
    for name in names:
        if name in BUILT_IN or names.count(name) > 1:
            raise SpecError(f"Field {name!r} is declared twice. Name it otherwise.")
    return built_in_fields(adapters, overflow) + extra


def _uniform(query_len: int, sizes: Sequence[int], limits: Limits) -> Sequence[int]:
    """A uniform ladder, checked: whole requests only, and no more of them than can come."""
    if not sizes:
        return ()
    check_sizes(sizes, limits)
    most = limits.max_reqs * query_len
    odd = [size for size in sizes if size % query_len or size > most]
    if odd:
        rule = "is not a multiple of" if odd[0] % query_len else f"is above {limits.max_reqs} times"
        raise SizesError(
            f"Uniform size {odd[0]} {rule} query_len={query_len}. "
            "Make the ladders with ladders(sizes, query_lens, limits.max_reqs)."
        )
    return sizes


def _keys(
    mode: Mode,
    counts: Iterable[tuple[int, int | None, int | None]],
    fields: tuple[Field, ...],
) -> list[BatchDescriptor]:
    """One a combination of (tokens, requests, query_len) and values of the other fields."""
    _, _, _, *others = fields  # the counts say those three
    captured = [item.full if mode is Mode.FULL else item.piecewise for item in others]
    names = [item.name for item in user_defined(fields)]
    combos = []
    for adapters, cascade, encoder_outputs, *added in product(*captured):
        extra = sorted_extra([(n, value) for n, value in zip(names, added) if value is not None])
        combos.append((adapters, cascade, encoder_outputs, extra))
    new, cls = tuple.__new__, BatchDescriptor  # built by the thousand; the fields are checked
    return [new(cls, count + combo) for count in counts for combo in combos]


def _ordered(keys: list[BatchDescriptor]) -> tuple[BatchDescriptor, ...]:
    """Capture order: largest first, so that small keys reuse the pool of large ones."""
    return tuple(sorted(keys, key=lambda key: (-key.num_tokens, -key.adapters)))


@checked
def adapter_counts(
    max_adapters: int, *, powers: bool = False, without: bool = True
) -> tuple[int, ...]:
    """The `adapters=` of `build_table`, ascending.

    | max_adapters | powers | without | counts          |
    |--------------|--------|---------|-----------------|
    | 0            |        |         | (0,)            |
    | 4            | False  | True    | (0, 5)          |
    | 4            | True   | True    | (0, 1, 2, 4, 5) |
    | 4            | False  | False   | (5,)            |

    The largest is one more than `max_adapters`, since rows without any adapter are a group too.

    Args:
        max_adapters: adapters that one batch can use; 0: adapters are off.
        powers: capture powers of two in between, so that few adapters cost less than all.
        without: capture batches without adapters too; else they run eagerly.

    Raises:
        SpecError: `max_adapters` is negative.

    Source: vLLM 0.33, `specialize_active_lora` (powers) and `cudagraph_specialize_lora`, without
    which its first dispatcher captures the largest count alone.
    """
    if max_adapters < 0:
        raise SpecError(f"max_adapters={max_adapters} is negative. Pass 0 where there are none.")
    if max_adapters == 0:
        return (0,)
    between = [2**i for i in range(max_adapters.bit_length())] if powers else []
    return (*([0] if without else []), *between, max_adapters + 1)
