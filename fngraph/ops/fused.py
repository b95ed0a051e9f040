"""Ops that stand for several of torch's: norms, rotary embedding, the gate of an mlp.

Each has a plain form, the torch ops that it stands for in their order: on the CPU that is what
runs, and the results are those, bit for bit. On CUDA a kernel of Triton's does it in one launch
(`triton/fused.py`); it rounds where the plain form rounds, and adds in another order. Gradients,
tangents and `torch.func` go through the plain form. Results are contiguous.

Passes put these ops into a traced graph (`fngraph.passes`); they may be called as well. Those that
round to fp8 behind are in `fused_fp8.py`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fngraph.ops.opaque import define_op
from fngraph.ops.triton.launching import missing


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """See `PLAIN`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if centred:
        return (normed * (1 + weight.float())).to(x.dtype)
    return normed.to(x.dtype) * weight


def plain_add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """See `PLAIN`."""
    total = x + y
    return total, plain_rms_norm(total, weight, eps, centred)


def plain_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `PLAIN`."""
    return torch.nn.functional.silu(gate) * up


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = min(cos.shape[-1], x.shape[-1] // 2)
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    a, b, rest = wide.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos_a, sin_a = cos[..., :half], sin[..., :half]
    cos_b, sin_b = cos[..., -half:], sin[..., -half:]
    return torch.cat([a * cos_a - b * sin_a, b * cos_b + a * sin_b, rest], dim=-1).to(x.dtype)


def _norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, centred: bool
) -> Tensor:
    return _rope(plain_rms_norm(x, weight, eps, centred), cos, sin)


PLAIN: dict[str, tuple[str, Callable[..., Any]]] = {
    "rms_norm": ("(Tensor x, Tensor weight, float eps, bool centred) -> Tensor", plain_rms_norm),
    "add_rms_norm": (
        "(Tensor x, Tensor y, Tensor weight, float eps, bool centred) -> (Tensor, Tensor)",
        plain_add_rms_norm,
    ),
    "silu_mul": ("(Tensor gate, Tensor up) -> Tensor", plain_silu_mul),
    "rope": ("(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rope),
    "norm_rope": (
        "(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps, bool centred) -> Tensor",
        _norm_rope,
    ),
}
"""By name in the `fngraph` library: schema, and the torch ops that it stands for.

rms_norm(x, weight, eps, centred): `x` (..., E) over its root mean square, computed in float32,
    times `weight` (E,); with `centred` times 1 + weight, in float32.
add_rms_norm(x, y, ...): x + y, and the norm of that.
silu_mul(gate, up): silu(gate) * up, of one shape.
rope(x, cos, sin): `x` (..., T, H, D); pairs (i, i + C) turn, by `cos` and `sin` (..., T, 1, C), or
    (..., T, 1, D), of whose columns the second half is for the pairs' second parts. Columns past
    the pairs stay. With angles in float32 it is computed in float32, and rounded to x's dtype.
norm_rope(x, weight, cos, sin, ...): the rope of the norm of each head, `weight` (D,).
"""


def define_fused(
    name: str,
    schema: str,
    plain: Callable[..., Any],
    fake: Callable[..., Any],
    least: tuple[int, int] = (0, 0),
    module: str = "fused",
    takes: Callable[..., bool] = lambda *args: True,
) -> None:
    """An op of the `fngraph` library: its plain form, but on CUDA the kernel of its name.

    Args:
        fake: results of the right shapes and dtypes.
        least: the capability of the first devices that its kernel is for.
        module: of `fngraph.ops.triton`, where that is.
        takes: whether the kernel is for these arguments.
    """

    @functools.cache
    def kernel(device: int) -> Callable[..., Any] | None:
        if missing("cuda") is not None or torch.cuda.get_device_capability(device) < least:
            return None
        found = importlib.import_module(f"fngraph.ops.triton.{module}")  # loads Triton
        return getattr(found, name)  # type: ignore[no-any-return]

    def run(*args: Any) -> Any:
        if args[0].is_cuda and takes(*args):
            if (own := kernel(args[0].get_device())) is not None:
                return own(*args)
        made = plain(*args)
        whole = [x.contiguous() for x in (made if isinstance(made, tuple) else (made,))]
        return tuple(whole) if isinstance(made, tuple) else whole[0]

    define_op(name, schema, run, fake, plain)


def _one(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _two(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


for _name, (_schema, _plain) in PLAIN.items():
    define_fused(_name, _schema, _plain, _two if _name == "add_rms_norm" else _one)
