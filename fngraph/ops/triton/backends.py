"""How a Triton backend is built, and all of them. Triton is loaded when one first runs.

Both of attention serve any batch. `triton_decode` splits the keys of uniform ones, by the key that
is captured or the bounds of an eager step, and runs what `triton` runs else; so it is what is taken
where none is named. A row's bits are the same in any batch with `triton`, in any uniform one with
both.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from fngraph.core import HostBounds, Support
from fngraph.errors import BackendError
from fngraph.ops.backend import Backend, Bound
from fngraph.ops.triton.launching import missing
from fngraph.ops.triton.repeating import Recalled, Repeated

MULTIPLIED = (torch.float32, torch.float16, torch.bfloat16)
STORED = (*MULTIPLIED, torch.float8_e4m3fn)


def _dtypes(config: Any) -> str | None:
    reason = _multiplies(config)
    if reason is None and config.cache_dtype not in STORED:
        return f"its cache holds those, or float8_e4m3fn, not {config.cache_dtype}"
    return reason


def _multiplies(config: Any) -> str | None:
    if config.dtype not in MULTIPLIED:
        return f"it multiplies float32, float16 and bfloat16, not {config.dtype}"
    return None


def _holds(config: Any) -> str | None:
    if config.head_dim > 256:
        return f"its tiles hold head dims up to 256, not {config.head_dim}"
    return None


def supports(config: Any) -> str | None:
    """Why neither backend of attention can run a configuration, or None."""
    return _holds(config) or _dtypes(config)


def supports_varlen(config: Any) -> str | None:
    """Why the backend of attention without a cache cannot run a configuration, or None."""
    return _holds(config) or _multiplies(config)


def supports_latent(config: Any) -> str | None:
    """Why neither backend of latent attention can run a configuration, or None."""
    if config.rank > 512 or config.rope_dim > 64:
        return (
            "its tiles hold ranks up to 512 and rotated keys up to 64, "
            f"not {config.rank} and {config.rope_dim}"
        )
    return _dtypes(config)


def supports_state(config: Any) -> str | None:
    """Why no backend over recurrent state can run a configuration, or None."""
    for what, dtype in (("tokens", config.dtype), ("states", config.state_dtype)):
        if dtype not in MULTIPLIED:
            return f"its {what} are float32, float16 or bfloat16, not {dtype}"
    for what in ("key_dim", "value_dim", "state_dim", "head_dim"):
        if getattr(config, what, 0) > 256:
            return f"its tiles hold a {what} up to 256, not {getattr(config, what)}"
    return None


@functools.cache
def loaded(primitive: str, name: str, module: str, device: str) -> Any:
    """The module of a backend's kernels, imported when it first runs.

    Raises:
        BackendError: Triton cannot run on such devices.
    """
    reason = missing(device)
    if reason is not None:
        raise BackendError(f"backend {name!r} of {primitive}: {reason}")
    return importlib.import_module(f"fngraph.ops.triton.{module}")


def backend(
    primitive: str,
    module: str,
    supports: Callable[[Any], str | None],
    *,
    name: str = "triton",
    function: str = "run",
    options: tuple[str, ...] = (),
    preferred: bool = False,
    own_uniform: bool = False,
) -> Backend:
    """One that serves any batch by a function of `module`, which is imported when it first runs.

    The function is `function(args, host, kept=None)`; see `Repeated`, `Recalled`.

    Args:
        module: of `fngraph.ops.triton`.
        preferred: whether it is taken on CUDA where none is named.
        own_uniform: see `Backend`.
    """

    @functools.cache
    def recalled(device: str) -> Recalled:
        return Recalled(getattr(loaded(primitive, name, module, device), function))

    def run(args: Any, host: HostBounds | None) -> None:
        recalled(args.out.device.type)(args, host)

    def bind(args: Any) -> Bound:
        kernels = loaded(primitive, name, module, args.out.device.type)
        return Repeated(getattr(kernels, function), args)

    return Backend(
        name, run, lambda config: Support.ALWAYS, supports,
        options=options, needs="Triton, CUDA", missing=missing, bind=bind,
        preferred=lambda config: preferred and config.device == "cuda", own_uniform=own_uniform,
    )  # fmt: skip


_OPTIONS = ("bidirectional", "sinks", "cache scales", "fp8 cache", "rope",
            "fp8 output")  # fmt: skip
_DECODE: dict[str, Any] = {"name": "triton_decode", "preferred": True, "own_uniform": True}
ATTENTION = (
    backend("attention", "attention.unified", supports, options=_OPTIONS),
    backend("attention", "attention.decode", supports, options=_OPTIONS, **_DECODE),
)
_LATENT: dict[str, Any] = {"options": ("fp8 cache",)}
LATENT = (
    backend("mla", "attention.latent", supports_latent, function="unified", **_LATENT),
    backend("mla", "attention.latent", supports_latent, function="decode", **_LATENT, **_DECODE),
)
VARLEN = backend("varlen_attention", "attention.varlen", supports_varlen, preferred=True)
GATED_DELTA, SSD, CAUSAL_CONV = (
    backend(primitive, module, supports_state, function=function, preferred=True)
    for primitive, module, function in (
        ("gated_delta", "recurrent.linear", "gated_delta"),
        ("ssd", "recurrent.linear", "ssd"),
        ("causal_conv", "recurrent.convolution", "run"),
    )
)
