"""Capture sizes: the default ladder, checked ladders, and one ladder for each kind of batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fngraph.core.kinds import checked
from fngraph.core.limits import Limits
from fngraph.core.text import with_suggestions
from fngraph.errors import SizesError

Ladder = tuple[int, ...]


@checked
@with_suggestions
def default_sizes(
    limits: Limits,
    query_lens: Sequence[int] = (1,),
    ceiling: int = 512,
    *,
    top: int | None = None,
    dense: bool = False,
) -> Ladder:
    """The ladder of token counts to capture when the user names none.

    1, 2, 4, then every 8 up to 256, then every 16: fine where batches are small and padding
    hurts. It ends at twice the largest decode batch, at `ceiling`, or at `limits.max_tokens`,
    whichever comes first. The largest batches of each query length are always on it, so that no
    batch at `max_reqs` falls between rungs.

    Args:
        query_lens: tokens a request of the uniform batches that will be served.
        ceiling: the largest size that is worth a graph.
        top: ends the ladder here instead, whatever `ceiling` and `max_reqs` say, and then
            no rungs are added for decode batches.
        dense: every size up to 32, for interactive use, where one token more is felt.

    Source: vLLM 0.33 `VllmConfig._set_cudagraph_sizes`. Here several query lengths add their
    rungs at once.
    """
    check_query_lens(query_lens)
    asked = min(limits.max_reqs * max(query_lens) * 2, ceiling) if top is None else top
    last = min(asked, limits.max_tokens)
    rungs = _grid(last) | {limits.max_tokens}
    if dense:
        rungs.update(range(3, 33))
    if top is None:
        reqs = _grid(limits.max_reqs) | {limits.max_reqs}
        rungs.update(query_len * count for query_len in query_lens for count in reqs)
    sizes = tuple(sorted(size for size in rungs if size <= last))
    if not sizes:
        if top is None and ceiling < 1:
            raise SizesError(
                f"ceiling={ceiling} leaves no size at all: no graph is worth it. Pass "
                'modes="NONE" to graphify, or ceiling=1 or more.'
            )
        raise SizesError(f"top={top} leaves no size at all. Pass top=1 or more.")
    return sizes


def _grid(last: int) -> set[int]:
    """1, 2, 4, then every 8, from 256 on every 16, as far as `last`."""
    small = (1, 2, 4, *range(8, 256, 8))
    return {*(size for size in small if size <= last), *range(256, last + 1, 16)}


@checked
def check_sizes(sizes: Iterable[int], limits: Limits | None = None) -> Ladder:
    """A user's ladder as a tuple.

    Raises:
        SizesError: it is empty, unsorted, repeats a size, holds anything but positive integers,
            or goes beyond `limits.max_tokens`.
    """
    sizes = tuple(sizes)
    if not sizes:
        raise SizesError("The ladder is empty. Pass sizes=default_sizes(limits).")
    odd = [size for size in sizes if type(size) is not int or size < 1]
    if odd:
        raise SizesError(f"Size {odd[0]!r} is not a positive integer. Drop it from the ladder.")
    if list(sizes) != sorted(set(sizes)):
        low, high = next((a, b) for a, b in pairwise(sizes) if a >= b)
        rule = f"repeats {low}" if low == high else f"is not ascending: {high} comes after {low}"
        raise SizesError(f"The ladder {rule}. Pass sizes={tuple(sorted(set(sizes)))}.")
    if limits is not None and sizes[-1] > limits.max_tokens:
        raise SizesError(
            f"Size {sizes[-1]} is beyond Limits(max_tokens={limits.max_tokens}): no step will "
            f"ever need it. Drop it, or pass Limits(max_tokens={sizes[-1]})."
        )
    return sizes


def check_query_lens(query_lens: Sequence[int]) -> None:
    """Raises SizesError unless these are distinct positive integers, at least one."""
    if not query_lens or len(set(query_lens)) != len(query_lens) or min(query_lens) < 1:
        raise SizesError(
            f"query_lens={tuple(query_lens)} must be distinct and positive. "
            "Pass query_lens=(1,) for plain decoding, (1, 4) with up to 3 drafted tokens."
        )


@checked
@dataclass(frozen=True, slots=True)
class Ladders:
    """Token counts to capture, ascending, for each kind of batch.

    Attributes:
        mixed: for batches of any shape; empty where nothing is captured.
        by_query_len: (query_len, its sizes) pairs for uniform batches; each size is a multiple
            of its query_len, so that padding adds whole requests.
    """

    mixed: Ladder = ()
    by_query_len: tuple[tuple[int, Ladder], ...] = ()

    @property
    def uniform(self) -> dict[int, Ladder]:
        """query_len -> its sizes, as a fresh dict."""
        return dict(self.by_query_len)


def check_rounding(align: str, beyond: str) -> None:
    """Raise `SizesError` for words of `ladders` that mean nothing."""
    if align not in ("uniform", "all"):
        raise SizesError(f'align={align!r} is unknown. Pass align="uniform" or align="all".')
    if beyond not in ("cut", "drop"):
        raise SizesError(f'beyond={beyond!r} is unknown. Pass beyond="cut" or beyond="drop".')


@checked
@with_suggestions
def ladders(
    sizes: Iterable[int],
    query_lens: Sequence[int] = (1,),
    max_reqs: int = 256,
    align: str = "uniform",
    *,
    beyond: str = "cut",
) -> Ladders:
    """One ladder for mixed batches and one for each query length of uniform ones.

    A uniform rung is a size rounded up to a multiple of its query length.

    Args:
        align: "uniform" rounds the uniform ladders alone. "all" rounds one shared ladder, mixed
            batches included, so that fewer distinct sizes are captured.
        beyond: what becomes of a uniform rung that is larger than `max_reqs` requests or than the
            largest size: "cut" lowers it to the largest batch that can come, so that no batch
            falls between the last rung and `max_reqs`; "drop" leaves it out.

    Raises:
        SizesError: bad sizes or query lengths; or with "all", no size can be rounded.

    Source: "uniform" is vLLM 0.33's second runner, "all" its first
    (`adjust_cudagraph_sizes_for_spec_decode`); both drop what is beyond. With "all" and several
    query lengths, the shared ladder holds every rounding of every size.
    """
    sizes = check_sizes(sizes)
    check_rounding(align, beyond)
    if query_lens:
        check_query_lens(query_lens)
    cut, shared = beyond == "cut", align == "all" and len(query_lens) > 0
    mixed = _shared(sizes, query_lens, cut) if shared else sizes
    uniform = []
    for query_len in query_lens:
        most = min(max_reqs, mixed[-1] // query_len) * query_len
        rungs = [up for size in mixed if (up := _round_up(size, query_len)) == size or not shared]
        uniform.append((query_len, _at_most(most, rungs, cut)))
    return Ladders(mixed, tuple(uniform))


def _shared(sizes: Ladder, query_lens: Sequence[int], cut: bool) -> Ladder:
    """Every rounding of every size up to the largest; if there is none, the query lengths."""
    top = sizes[-1]
    rungs: set[int] = set()
    for q in query_lens:
        rungs.update(_at_most(top // q * q, [_round_up(size, q) for size in sizes], cut))
    rungs = rungs or {q for q in query_lens if q <= top}
    if not rungs:
        q = min(query_lens)
        raise SizesError(
            f"No size up to {top} is a multiple of query_len={q}. Pass a ladder that reaches {q}."
        )
    return tuple(sorted(rungs))


def _at_most(most: int, rungs: Iterable[int], cut: bool) -> Ladder:
    """The rungs up to `most`, ascending; larger ones are lowered to it, or left out."""
    return tuple(sorted({min(size, most) for size in rungs if size <= most or cut} - {0}))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
