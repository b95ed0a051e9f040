"""Refusals that forward cannot swallow: the first is raised, whatever its `except` does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from values import rows, trace

from fngraph import errors

WEIGHT = torch.ones(toys.E)


def tried(part: Callable[[], Any], caught: type[BaseException] = Exception) -> Any:
    try:
        return part()
    except caught:
        return 0


def suppressed(part: Callable[[], Any]) -> Any:
    with contextlib.suppress(RuntimeError):
        return part()
    return 0


def finally_returns(part: Callable[[], Any]) -> Any:
    try:
        return part()
    finally:
        return 0  # noqa: B012


PARTS: dict[str, tuple[Callable[[Any, Any, Any], Any], type[Exception]]] = {
    ".item()": (lambda p, s, b: b.token_ids.sum().item(), errors.HostSyncError),
    "if tensor": (lambda p, s, b: 2 if b.token_ids[0] > 3 else 3, errors.HostSyncError),
    ".tolist()": (lambda p, s, b: sum(b.token_ids.tolist()), errors.HostSyncError),
    ".numpy()": (lambda p, s, b: float(p["w"].numpy().sum()), errors.HostSyncError),
    "nonzero": (lambda p, s, b: len(b.token_ids.nonzero()), errors.HostSyncError),
    "if T": (lambda p, s, b: 2 if b.token_ids.shape[0] > 3 else 3, errors.BranchError),
    "int(T)": (lambda p, s, b: int(b.token_ids.shape[0]), errors.BranchError),
    "spec": (lambda p, s, b: b.spec.num_tokens, errors.HostFieldError),
    "closure": (lambda p, s, b: p["w"][0] * WEIGHT, errors.ClosureError),
    "write": (lambda p, s, b: p["w"].add_(1)[0], errors.MutationError),
    "rand": (lambda p, s, b: torch.rand(()), errors.RandomError),
}


@pytest.mark.parametrize("swallow", [tried, suppressed, finally_returns])
@pytest.mark.parametrize("what", PARTS)
def test_a_refusal_that_forward_swallows_is_raised(what: str, swallow: Any):
    part, error = PARTS[what]
    with pytest.raises(error, match=rf"{Path(__file__).name}:\d+: "):
        trace(lambda p, s, b: rows(p, b) * swallow(lambda: part(p, s, b)))


def test_the_first_refusal_is_raised_even_if_forward_raises_another_error():
    def value(p: Any, s: Any, b: Any) -> Any:
        try:
            return rows(p, b) * WEIGHT
        except errors.ClosureError as error:
            raise KeyError("mine") from error

    with pytest.raises(errors.ClosureError, match="WEIGHT"):
        trace(value)


def test_exceptions_of_forwards_own_may_be_swallowed():
    trace(lambda p, s, b: rows(p, b) * (1 + tried(lambda: {}["a"], KeyError)))


def test_tensors_of_two_devices_in_one_op_are_told_as_that():
    """Torch's rule raises an error of fakes, which is no word of memory or of copies."""
    import fngraph as fg

    def forward(p: Any, x: Any) -> Any:
        return x + torch.ones(3, device="meta")

    (error,) = fg.check(forward, torch.ones(3), torch.ones(2, 3), stage="x").errors
    assert isinstance(error, errors.OperatorError)
    assert "tensors of two devices" in str(error) and "test_refusals.py:" in str(error)
