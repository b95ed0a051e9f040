"""The `triton` and `triton_decode` backends of attention. Triton is loaded when one first runs."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fngraph.core import Support
from fngraph.ops.primitive import Backend
from fngraph.ops.triton_launch import why_not

MULTIPLIED = (torch.float32, torch.float16, torch.bfloat16)
STORED = (*MULTIPLIED, torch.float8_e4m3fn)


def supports(config: Any) -> str | None:
    """Why neither backend can run a configuration, or None."""
    reason = why_not(config.device)
    if reason is not None:
        return reason
    if config.dtype not in MULTIPLIED:
        return f"it multiplies float32, float16 and bfloat16, not {config.dtype}"
    if config.cache_dtype not in STORED:
        return f"its cache holds those, or float8_e4m3fn, not {config.cache_dtype}"
    if config.head_dim > 256:
        return f"its tiles hold head dims up to 256, not {config.head_dim}"
    return None


def _lazily(module: str) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        importlib.import_module(f"fngraph.ops.{module}").run(*args, **kwargs)

    return run


BACKENDS = (
    Backend("triton", _lazily("triton_unified"), lambda config: Support.ALWAYS, supports),
    Backend("triton_decode", _lazily("triton_decode"), lambda c: Support.UNIFORM_BATCH, supports),
)
