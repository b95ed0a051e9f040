"""The laws of dispatch, over every spec up to 64 tokens and every table of a family; then beyond.

`_covers` and `_less` below say the rules once more, in plain comparisons, so that neither
`dispatch` nor `dispatch_by_definition` is its own judge.
"""

import pickle
from collections.abc import Iterator
from itertools import chain, combinations, product

import pytest
from hypothesis import given, settings, strategies as st

from fngraph.core import (
    BatchSpec,
    Limits,
    Mode,
    build_table,
    dispatch,
    dispatch_by_definition,
    ladders,
)
from fngraph.core.spec import COUNTS
from fngraph.errors import ModesError

NONE, PIECEWISE, FULL = Mode.NONE, Mode.PIECEWISE, Mode.FULL


def _counts(most: int) -> list[tuple[int, int, int | None]]:
    """Every (num_tokens, num_reqs, query_len) up to `most` tokens."""
    mixed = ((tokens, reqs, None) for tokens in range(1, most + 1) for reqs in range(1, tokens + 1))
    uniform = (
        (tokens, tokens // query_len, query_len)
        for tokens in range(1, most + 1)
        for query_len in range(1, tokens + 1)
        if tokens % query_len == 0
    )
    return [*mixed, *uniform]


def _table(modes, sizes, query_lens, max_reqs, align="uniform", **options):
    steps = ladders(sizes, query_lens, max_reqs, align)
    return build_table(modes, steps, Limits(64, max_reqs), **options)


COUNT_FAMILY = [
    pytest.param((modes, sizes, query_lens, max_reqs, align), options)
    for modes, sizes, (query_lens, align), max_reqs in product(
        [mode.name for mode in Mode],
        ((1, 2, 4, 8, 16, 32, 64), (3, 10, 20, 49)),
        (((1,), "uniform"), ((1, 3), "uniform"), ((1, 3), "all"), ((4, 5), "uniform")),
        (7, 64),
    )
    for options in ({}, {"own_uniform": True}, {"key_reqs": 3}, {"key_reqs": (2, 5)})
    if not options or modes == "FULL" or ("key_reqs" in options and "PIECEWISE" in modes)
]
ADAPTERS = (
    {"adapters": (0,)},
    {"adapters": (0, 1, 2, 4), "overflow": "eager"},
    {"adapters": (0, 1, 2, 4), "overflow": "clamp"},
    {"adapters": (5,), "overflow": "clamp"},
)


def _rounded(adapters: int, options: dict) -> int | None:
    captured = options.get("adapters", (0,))
    if adapters == 0:
        return 0 if 0 in captured else None
    fits = [count for count in captured if count >= adapters]
    if not fits and options.get("overflow") == "clamp" and max(captured) > 0:
        return max(captured)
    return min(fits, default=None)


def _covers(key, spec: BatchSpec, options: dict) -> bool:
    return (
        key.num_tokens >= spec.num_tokens
        and (key.num_reqs is None or key.num_reqs >= spec.num_reqs)
        and (key.query_len is None or key.query_len == spec.query_len)
        and key.adapters == _rounded(spec.adapters, options)
        and (key.cascade is None or key.cascade == spec.cascade)
        and (key.encoder_outputs is None or key.encoder_outputs == spec.encoder_outputs)
    )


def _less(one, other) -> bool:
    """Fewer tokens; then fewer requests, any number being most; then a set query_len."""
    many = float("inf")
    return (one.num_tokens, one.num_reqs or many, one.query_len or many) < (
        other.num_tokens,
        other.num_reqs or many,
        other.query_len or many,
    )


def _check(table, spec: BatchSpec, options: dict):
    """All laws about one spec and one table."""
    answer = dispatch(table, spec)
    mode, key, reason = answer
    assert mode in (NONE, PIECEWISE, FULL) and reason
    assert (mode, key) == dispatch_by_definition(table, spec)
    covering = {
        m: [k for k in table.keys(m) if _covers(k, spec, options)] for m in (FULL, PIECEWISE)
    }
    assert not any(covering[m] for m in covering if m.strength > mode.strength), "stronger covers"
    if mode is NONE:
        assert key == spec.descriptor() == spec[COUNTS]
        return answer
    assert key in covering[mode], "must cover"
    assert not any(_less(other, key) for other in covering[mode]), "a smaller key covers"
    again = BatchSpec(
        key.num_tokens,
        key.num_reqs or spec.num_reqs,
        key.query_len,
        key.adapters,
        spec.cascade,
        spec.encoder_outputs,
    )
    assert dispatch(table, again).key == (mode, key), "idempotence"
    return answer


def _check_monotone(answers: dict[tuple, tuple]) -> None:
    """Within a mode, more tokens or more requests never pad to less."""
    for fixed, moving in ((1, 0), (0, 1)):
        padded: dict[tuple, int] = {}
        for counts, (mode, key, _) in sorted(answers.items(), key=lambda item: item[0][moving]):
            line = (counts[fixed] if counts[2] is None else counts[2], counts[2] is None, mode)
            assert padded.get(line, 0) <= key.num_tokens
            padded[line] = key.num_tokens


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("args", "options"), COUNT_FAMILY)
def test_every_count_up_to_64_tokens(args, options):
    table = _table(*args, **options)
    before = pickle.dumps(table)
    _check_monotone({counts: _check(table, BatchSpec(*counts), {}) for counts in _counts(64)})
    assert pickle.dumps(table) == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("modes", [mode.name for mode in Mode])
def test_every_kind_of_batch_up_to_64_tokens(modes):
    options = ADAPTERS[1]
    table = _table(modes, (1, 7, 24, 64), (1, 3), 24, **options)
    for kind in ((3,), (5,), (0, True), (0, False, True), (3, True, True)):
        for counts in _counts(64):
            _check(table, BatchSpec(*counts, *kind), options)


def _subsets() -> Iterator[tuple[Mode, ...]]:
    return chain.from_iterable(combinations((NONE, PIECEWISE, FULL), n) for n in (1, 2, 3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", ADAPTERS, ids=str)
@pytest.mark.parametrize("modes", [mode.name for mode in Mode])
def test_every_kind_and_every_allowed_up_to_10_tokens(modes, options):
    table = _table(modes, (1, 4, 9), (1, 3), 5, **options)
    flags_of = product((False, True), repeat=2)
    for counts, adapters, flags in product(_counts(10), (0, 1, 3, 5, 6), flags_of):
        spec = BatchSpec(*counts, adapters, *flags)
        free = _check(table, spec, options)
        for allowed in _subsets():
            _check_allowed(table, spec, frozenset(allowed), free)


def _check_allowed(table, spec, allowed, free):
    given, names = set(allowed), {mode.name.lower() for mode in allowed}
    try:
        mode, key, reason = dispatch(table, spec, given)
    except ModesError as error:
        assert NONE not in allowed and repr(spec) in str(error)
        with pytest.raises(ModesError):
            dispatch_by_definition(table, spec, given)
        return
    assert mode in allowed and reason and given == allowed
    assert (
        (mode, key)
        == dispatch_by_definition(table, spec, names)
        == dispatch(table, spec, names).key
    )
    if free.mode in allowed:
        assert (mode, key) == free.key, "a mode that is not needed was barred, and it mattered"


@st.composite
def _problem(draw):
    """A table far beyond the enumerated family, and specs on both sides of its edges."""
    sizes = sorted(draw(st.sets(st.integers(1, 3000), min_size=1, max_size=12)))
    query_lens = tuple(draw(st.sets(st.integers(1, 9), min_size=1, max_size=4)))
    max_reqs = draw(st.integers(1, 600))
    adapters = tuple(sorted(draw(st.sets(st.integers(0, 100), min_size=1, max_size=4))))
    options = {"adapters": adapters, "overflow": draw(st.sampled_from(("eager", "clamp")))}
    modes = draw(st.sampled_from(list(Mode)))
    steps = ladders(sizes, query_lens, max_reqs)
    table = build_table(modes, steps, Limits(3000, max_reqs), **options)
    edges = st.sampled_from([size + i for size in sizes for i in (-1, 0, 1) if size + i > 0])
    if draw(st.booleans()):
        query_len = draw(st.sampled_from((*query_lens, 10)))
        reqs = max(1, draw(edges) // query_len)
        counts = (reqs * query_len, reqs, query_len)
    else:
        tokens = draw(edges)
        counts = (tokens, draw(st.integers(1, tokens)), None)
    count = draw(st.sampled_from((0, *adapters, *(a + 1 for a in adapters))))
    return table, BatchSpec(*counts, count, draw(st.booleans()), draw(st.booleans())), options


@pytest.mark.sampled(0)
@settings(max_examples=400, deadline=None)
@given(_problem())
def test_beyond(problem):
    _check(*problem)
