"""What a call of attention has made, against what `reference` makes of the same: row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from fngraph.ops import AttentionMeta
from fngraph.testing.cases import Case

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}  # of a row's own norm
NAMES = ("q", "k", "v", "k_cache", "v_cache", *AttentionMeta._fields)


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """(T, H): each row's error by its own norm; infinite where it is NaN, or ought to be zero."""
    got, want = got.double(), want.double()
    error = (got - want).norm(dim=-1)
    relative = torch.where(error == 0, 0.0, error / want.norm(dim=-1))
    return relative.where(~relative.isnan(), float("inf"))


def worst_row(got: Tensor, want: Tensor) -> float:
    """The largest of `row_errors`."""
    return float(row_errors(got, want).max())


def bits(x: Tensor) -> Tensor:
    """The bytes: NaN equals NaN, and 0 is not -0."""
    return x.contiguous().view(torch.uint8)


def difference(got: Tensor, want: Tensor, mine: Case, theirs: Case) -> str:
    """What the call has written wrongly, elsewhere or else in its output; "" if nothing."""
    return _wrong_slot(mine, theirs) or _wrong_row(got, want)


def _wrong_row(got: Tensor, want: Tensor) -> str:
    errors, tolerance = row_errors(got, want), TOLERANCE[got.dtype]
    if errors.max() <= tolerance:
        return ""
    t, h = divmod(int(errors.argmax()), errors.shape[1])
    hint = ""
    if got[t, h].isnan().any():
        hint = ": NaN, so it is not written, or made of cache slots that hold nothing"
    elif not want[t, h].any():
        hint = ": its token belongs to no request, whose rows are zero"
    worst = f"worst row out[{t}, {h}] (token, head), error {errors[t, h]:.3g} of its norm"
    return f"{worst}, tolerance {tolerance:g}{hint}"


def _wrong_slot(mine: Case, theirs: Case) -> str:
    for name, a, b in zip(NAMES, mine.tensors, theirs.tensors):
        if bits(a).equal(bits(b)):
            continue
        if not name.endswith("cache"):
            return f"{name} is written to, and it is only there to be read"
        slots = (bits(a) != bits(b)).flatten(0, 1).flatten(1).any(1).nonzero().flatten()
        slot, named = int(slots[0]), mine.meta.slot_mapping.tolist()
        if slot in named:
            return (
                f"{name}: slot {slot} does not hold token {named.index(slot)}, which belongs there"
            )
        return (
            f"{name}: slot {slot} is written to, and slot_mapping does not name it "
            "(-1: the token is written nowhere)"
        )
    return ""
