"""Two runs of one step, compared: by bits where both run the same kernels on the same sizes, else
within a tolerance of each row's largest element.

A row is what lies along the last dim. An element counts, not the norm of a row: one wrong logit of
a hundred thousand is wrong. A row of next to nothing is measured by the other rows, and what a mask
has put into a row (-inf, -1e9) measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

TOLERANCE = {
    torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-3, torch.complex64: 1e-3,
    torch.float16: 2e-2, torch.bfloat16: 5e-2,
}  # fmt: skip
"""Of a row's largest element, after all layers. Dtypes of a byte: one step of three bits; integers
and truth values must be equal."""
_BYTE = 0.13
_MASK = 1e3  # what is as large, and more than once the largest of its row, a mask has put there
_FAINT = 1e-2  # of the mean row's largest element: what a row is measured by at least


class Compared(NamedTuple):
    """One leaf of the results, or of the state, in both runs.

    Attributes:
        path: as the user reaches it.
        error: the largest, in parts of its row's largest element; inf where only one of the two is
            a number, or where integers differ.
        tolerance: what was allowed; None: every bit must be equal.
        at: index of the element with that error.
        elements: how many differ at all.
    """

    path: str
    error: float
    tolerance: float | None
    at: tuple[int, ...]
    elements: int

    def __str__(self) -> str:
        where = f"{self.path}[{', '.join(map(str, self.at))}]" if self.at else self.path
        allowed = "every bit" if self.tolerance is None else f"{self.tolerance:g}"
        return (
            f"{where} is off by {self.error:.3g} of its row's largest element ({self.elements} "
            f"elements differ; asked: {allowed})"
        )


def tolerance_of(dtype: torch.dtype, given: Mapping[torch.dtype, float]) -> float:
    """What is allowed of a dtype, in parts of a row's largest element."""
    if dtype in given:
        return given[dtype]
    if dtype.is_floating_point and dtype.itemsize == 1:
        return _BYTE
    return TOLERANCE.get(dtype, 0.0)


def errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Each element's error, in parts of its row's largest; inf where only one is a number. Equal
    bits are no error, NaN beside NaN is none either."""
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        return torch.where(got == want, 0.0, float("inf"))
    if want.dtype.itemsize == 1:  # fp8, which cannot be computed with
        got, want = got.float(), want.float()
    most = torch.finfo(want.dtype).max
    wide = torch.complex128 if want.dtype.is_complex else torch.float64
    if want.dtype.itemsize <= 2 or want.numel() > 1 << 24:
        wide = torch.complex64 if want.dtype.is_complex else torch.float32
    got, want = got.to(wide), want.to(wide)
    largest, is_masked = _largest(want.abs().nan_to_num(0.0, 0.0, 0.0), most)
    scale = torch.maximum(largest, torch.where(is_masked, 0.0, largest).mean() * _FAINT)
    found = (got - want).abs() / scale
    found = torch.where(got == want, 0.0, found)
    found = torch.where(got.isnan() & want.isnan(), 0.0, found)
    return found.nan_to_num(float("inf"), float("inf"))


def _largest(size: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row that no mask has put there, and whether masks have filled it all.

    A mask writes one number many times, -1e9, or the least of its dtype: a wrong number beside it
    is no less wrong.

    Args:
        size: absolute values; not a number is 0.
        most: that the dtype can hold.
    """
    if not size.dim():
        return size, size >= most
    largest = size.amax(-1, keepdim=True)
    is_largest = size == largest
    is_mask = (largest >= most) | ((largest >= _MASK) & (is_largest.sum(-1, keepdim=True) > 1))
    rest = torch.where(is_largest, 0.0, size).amax(-1, keepdim=True)
    return torch.where(is_mask & (rest > 0), rest, largest), is_mask & (rest == 0)


def differ(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Whether the bits of each element differ; NaN is equal to NaN."""
    if got.dtype.is_floating_point or got.dtype.is_complex:
        if got.dtype.itemsize == 1:
            return raw(got) != raw(want)
        same = (got == want) & (got.signbit() == want.signbit()) if got.is_floating_point() else (
            got == want
        )  # fmt: skip
        return ~(same | (got.isnan() & want.isnan()))
    return got != want


_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bits, as integers."""
    x = x.resolve_conj().resolve_neg().contiguous()
    if x.dtype.is_complex:
        x = torch.view_as_real(x)
    return x.view(_INTS[x.itemsize])


def compare(
    pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
    given: Mapping[torch.dtype, float],
    exact: bool,
) -> list[Compared]:
    """What differs by more than is allowed, in the order of `pairs`.

    The device is waited for once; twice where some bits differ.

    Args:
        pairs: path, what the step gave, what bare `forward` gave.
        given: tolerances by dtype, in place of ours.
        exact: whether bits are compared.
    """
    found = _where(pairs, lambda got, want: (raw(got) != raw(want)).any())  # mostly that is all
    if exact:
        found = _where(found, lambda got, want: differ(got, want).any())  # NaN is NaN
    else:
        found = _where(
            found, lambda got, want: (errors(got, want) > tolerance_of(got.dtype, given)).any()
        )
    return [_told(*pair, None if exact else tolerance_of(pair[1].dtype, given)) for pair in found]


_Pairs = Sequence[tuple[str, torch.Tensor, torch.Tensor]]


def _where(
    pairs: _Pairs, is_so: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Those of which it is so, and those that are not alike in shape or dtype."""
    flags = []
    for _, got, want in pairs:
        alike = got.shape == want.shape and got.dtype == want.dtype
        if alike and got.numel():
            flags.append(is_so(got, want))
        else:
            flags.append(torch.full((), not alike, device=got.device))
    answers = torch.stack(flags).tolist() if flags else []
    return [pair for pair, answer in zip(pairs, answers) if answer]


def _told(path: str, got: torch.Tensor, want: torch.Tensor, tolerance: float | None) -> Compared:
    if got.shape != want.shape or got.dtype != want.dtype:
        return Compared(path, float("inf"), tolerance, (), max(got.numel(), want.numel()))
    found = errors(got, want)
    unequal = differ(got, want)
    by = found if tolerance is not None else torch.where(unequal, found + 1e-30, 0.0)
    at = int(by.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), got.shape)]
    return Compared(path, float(found.flatten()[at]), tolerance, tuple(place), int(unequal.sum()))
