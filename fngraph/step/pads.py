"""Which pads does a trace rely on? One that nobody declared, it may still have counted on as 0.

    batch.x.sum(0)      # x: fg.buffer("T", "float32"): accepted, since its padding is 0

Such a program is right, and poison in its padding would be a false alarm. So `forward` is traced
with other pads: where that is refused as mixing rows, the pad is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from fngraph.core import Buffer
from fngraph.errors import RowsError
from fngraph.fx.leaves import Role
from fngraph.stages import Traced, trace_function

OTHER_INTS = (1, 101)  # no mask is likely to treat both as it treats 0


def unrelied(traced: Traced) -> tuple[bool, ...]:
    """For each staged leaf, whether its padding may hold anything: no pad is declared or used."""
    staged = traced.args.of(Role.STAGED)
    found = [i for i in staged if _is_free(traced.args.leaves[i].buffer)]
    if found and not _takes(traced, found):
        kept: list[int] = []
        for i in found:
            kept += [i] if _takes(traced, [*kept, i]) else []
        found = kept
    return tuple(i in found for i in staged)


def _is_free(buffer: Buffer | None) -> bool:
    if buffer is None or buffer.pad_given or not buffer.dims:
        return False
    return bool(buffer.dims[0].letters & {"T", "R"})


def _takes(traced: Traced, leaves: Iterable[int]) -> bool:
    """Whether the function is accepted with other padding in these leaves."""
    for other in OTHER_INTS:
        given = list(traced.args.leaves)
        for i in leaves:
            buffer = given[i].buffer
            assert buffer is not None
            changed = dataclasses.replace(buffer, pad=_pad(buffer.dtype, other))
            given[i] = dataclasses.replace(given[i], buffer=changed)
        args = dataclasses.replace(traced.args, leaves=tuple(given))
        try:
            trace_function(args, traced.options, traced.limits)
        except RowsError:
            return False
    return True


def _pad(dtype: str, other: int) -> Any:
    if dtype == "bool":
        return True
    return float("nan") if dtype.startswith(("float", "bfloat", "complex")) else other
