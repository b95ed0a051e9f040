"""The `triton` and `triton_decode` backends of attention. Triton is loaded when one first runs."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from fngraph.core import Support
from fngraph.errors import BackendError
from fngraph.ops.primitive import Backend
from fngraph.ops.triton_launch import missing

MULTIPLIED = (torch.float32, torch.float16, torch.bfloat16)
STORED = (*MULTIPLIED, torch.float8_e4m3fn)


def supports(config: Any) -> str | None:
    """Why neither backend can run a configuration, or None."""
    if config.dtype not in MULTIPLIED:
        return f"it multiplies float32, float16 and bfloat16, not {config.dtype}"
    if config.cache_dtype not in STORED:
        return f"its cache holds those, or float8_e4m3fn, not {config.cache_dtype}"
    if config.head_dim > 256:
        return f"its tiles hold head dims up to 256, not {config.head_dim}"
    return None


@functools.cache
def _loaded(primitive: str, name: str, module: str, device: str) -> Any:
    reason = missing(device)
    if reason is not None:
        raise BackendError(f"backend {name!r} of {primitive}: {reason}")
    return importlib.import_module(f"fngraph.ops.{module}")


def _backend(name: str, module: str, level: Support) -> Backend:
    def run(q_THD: torch.Tensor, *args: Any, **options: Any) -> None:
        _loaded("attention", name, module, q_THD.device.type).run(q_THD, *args, **options)

    return Backend(
        name,
        run,
        lambda config: level,
        supports,
        options=("bidirectional", "sinks", "cache scales", "fp8 cache"),
        needs="Triton, CUDA",
        missing=missing,
    )


BACKENDS = (
    _backend("triton", "triton_unified", Support.ALWAYS),
    _backend("triton_decode", "triton_decode", Support.UNIFORM_BATCH),
)
