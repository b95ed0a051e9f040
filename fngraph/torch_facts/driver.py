"""The driver's interface through `cuda.bindings`, where torch has none; and its answers read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fngraph.errors import PackageError


def driver_for(what: str) -> Any:
    """`cuda.bindings.driver`.

    Raises:
        PackageError: it is not installed, and `what` needs it.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise PackageError(f"{what} needs cuda.bindings: pip install cuda-bindings") from error
    return driver


def newest(driver: Any, name: str, *versions: str) -> Any:
    """The newest form of a function: `f_v3` up to CUDA 12, where `f` is an older one; then `f`."""
    for version in versions:
        if found := getattr(driver, f"{name}_{version}", None):
            return found
    return getattr(driver, name)


def checked(driver: Any, result: tuple[Any, ...], failed: str) -> tuple[Any, ...]:
    """What a function of the driver's has returned, less its status.

    Raises:
        RuntimeError: `failed`, with the status.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{failed}: {status!r}")
    return tuple(values)


@contextlib.contextmanager
def relaxed(driver: Any) -> Iterator[None]:
    """Calls that set something up, and do nothing to what this thread captures, are let through."""
    modes = driver.CUstreamCaptureMode
    exchange = driver.cuThreadExchangeStreamCaptureMode
    failed = "cannot change the capture mode"
    (before,) = checked(driver, exchange(modes.CU_STREAM_CAPTURE_MODE_RELAXED), failed)
    try:
        yield
    finally:
        checked(driver, exchange(modes(int(before))), failed)
