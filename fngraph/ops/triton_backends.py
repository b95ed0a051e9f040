"""The `triton` and `triton_decode` backends. Triton is loaded when one first runs.

Both serve any batch. `triton_decode` splits the keys of uniform ones, by the key that is captured
or the bounds of an eager step, and runs what `triton` runs else; so it is what is taken where none
is named. A row's bits are the same in any batch with `triton`, in any uniform one with both.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from fngraph.core import Support
from fngraph.errors import BackendError
from fngraph.ops.primitive import Backend
from fngraph.ops.triton_launch import missing

MULTIPLIED = (torch.float32, torch.float16, torch.bfloat16)
STORED = (*MULTIPLIED, torch.float8_e4m3fn)


def _dtypes(config: Any) -> str | None:
    if config.dtype not in MULTIPLIED:
        return f"it multiplies float32, float16 and bfloat16, not {config.dtype}"
    if config.cache_dtype not in STORED:
        return f"its cache holds those, or float8_e4m3fn, not {config.cache_dtype}"
    return None


def supports(config: Any) -> str | None:
    """Why neither backend of attention can run a configuration, or None."""
    if config.head_dim > 256:
        return f"its tiles hold head dims up to 256, not {config.head_dim}"
    return _dtypes(config)


def supports_latent(config: Any) -> str | None:
    """Why neither backend of latent attention can run a configuration, or None."""
    if config.rank > 512 or config.rope_dim > 64:
        return (
            "its tiles hold ranks up to 512 and rotated keys up to 64, "
            f"not {config.rank} and {config.rope_dim}"
        )
    return _dtypes(config)


@functools.cache
def loaded(primitive: str, name: str, module: str, device: str) -> Any:
    """The module of a backend's kernels, imported when it first runs.

    Raises:
        BackendError: Triton cannot run on such devices.
    """
    reason = missing(device)
    if reason is not None:
        raise BackendError(f"backend {name!r} of {primitive}: {reason}")
    return importlib.import_module(f"fngraph.ops.{module}")


def _backends(
    primitive: str,
    unified: str,
    decode: str,
    supports: Callable[[Any], str | None],
    options: tuple[str, ...],
) -> tuple[Backend, Backend]:
    """By the modules that have their `run`."""

    def backend(name: str, module: str) -> Backend:
        def run(q: torch.Tensor, *args: Any, **given: Any) -> None:
            loaded(primitive, name, module, q.device.type).run(q, *args, **given)

        return Backend(
            name, run, lambda config: Support.ALWAYS, supports,
            options=options, needs="Triton, CUDA", missing=missing,
            preferred=lambda config: name == "triton_decode" and config.device == "cuda",
        )  # fmt: skip

    return backend("triton", unified), backend("triton_decode", decode)


ATTENTION = _backends(
    "attention", "triton_unified", "triton_decode", supports,
    ("bidirectional", "sinks", "cache scales", "fp8 cache"),
)  # fmt: skip
LATENT = _backends(
    "mla", "triton_latent_unified", "triton_latent_decode", supports_latent, ("fp8 cache",)
)
