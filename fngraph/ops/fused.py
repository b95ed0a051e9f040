"""Ops that stand for several of torch's: norms, rotary embedding, the gate of an mlp.

Each has a plain form, the torch ops that it stands for in their order: on the CPU that is what
runs, and the results are those, bit for bit. On CUDA a kernel of Triton's does it in one launch
(`triton/fused.py`); it rounds where the plain form rounds, and adds in another order. Gradients,
tangents and `torch.func` go through the plain form. Results are contiguous.

Passes put these ops into a traced graph (`fngraph.passes`); they may be called as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fngraph.ops.primitives import LIBRARY
from fngraph.ops.transforms import is_transformed
from fngraph.ops.triton.launching import missing
from fngraph.torch_facts.names import BelowAutograd


def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if centred:
        return (normed * (1 + weight.float())).to(x.dtype)
    return normed.to(x.dtype) * weight


def _add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, rms_norm(total, weight, eps, centred)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = min(cos.shape[-1], x.shape[-1] // 2)
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos_a, sin_a = cos[..., :half], sin[..., :half]
    cos_b, sin_b = cos[..., -half:], sin[..., -half:]
    return torch.cat([a * cos_a - b * sin_a, b * cos_b + a * sin_b, rest], dim=-1)


def _norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, centred: bool
) -> Tensor:
    return _rope(rms_norm(x, weight, eps, centred), cos, sin)


PLAIN: dict[str, tuple[str, Callable[..., Any]]] = {
    "rms_norm": ("(Tensor x, Tensor weight, float eps, bool centred) -> Tensor", rms_norm),
    "add_rms_norm": (
        "(Tensor x, Tensor y, Tensor weight, float eps, bool centred) -> (Tensor, Tensor)",
        _add_rms_norm,
    ),
    "silu_mul": ("(Tensor gate, Tensor up) -> Tensor", silu_mul),
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
    the pairs stay.
norm_rope(x, weight, cos, sin, ...): the rope of the norm of each head, `weight` (D,).
"""


def _define(name: str, schema: str, plain: Callable[..., Any]) -> None:
    LIBRARY.define(name + schema)
    op = getattr(torch.ops.fngraph, name).default

    def run(*args: Any) -> Any:
        if args[0].is_cuda and missing("cuda") is None:
            from fngraph.ops.triton import fused  # loads Triton

            return getattr(fused, name)(*args)
        made = plain(*args)
        whole = [x.contiguous() for x in (made if isinstance(made, tuple) else (made,))]
        return tuple(whole) if isinstance(made, tuple) else whole[0]

    def with_gradients(*args: Any) -> Any:
        if is_transformed(*args):
            return plain(*args)
        with BelowAutograd():
            return op(*args)

    def fake(*args: Any) -> Any:
        if name == "add_rms_norm":
            return tuple(args[0].new_empty(args[0].shape) for _ in range(2))
        return args[0].new_empty(args[0].shape)

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    LIBRARY.impl(name, with_gradients, "Autograd")
    LIBRARY.impl(name, plain, "FuncTorchBatched")
    torch.library.register_fake(f"fngraph::{name}", fake, lib=LIBRARY)


for _name, (_schema, _plain) in PLAIN.items():
    _define(_name, _schema, _plain)
