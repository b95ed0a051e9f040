"""Functions whose result depends on torch's ambient state: `(p, s, b)` of the toys."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from ambient_states import dtype


def _x(p: Any, b: Any) -> torch.Tensor:
    return p["w"][b.token_ids]


def matmul(p: Any, s: Any, b: Any) -> Any:
    return _x(p, b) @ p["w"].t(), s


def linear(p: Any, s: Any, b: Any) -> Any:
    return F.linear(_x(p, b), p["w"]), s


def sdpa(p: Any, s: Any, b: Any) -> Any:
    x = _x(p, b)[None, None]
    return F.scaled_dot_product_attention(x, x, x, is_causal=True), s


def rowwise(p: Any, s: Any, b: Any) -> Any:
    return F.silu(_x(p, b)), s


def state(p: Any, s: Any, b: Any) -> Any:
    return _x(p, b) * 1, {**s, "total": s["total"] + (p["w"] @ p["w"].t() @ p["w"]).float()}


def factory(p: Any, s: Any, b: Any) -> Any:
    return torch.zeros(b.token_ids.shape[0]) + torch.ones(()), s


def literal(p: Any, s: Any, b: Any) -> Any:
    return torch.tensor([0.1, 0.2]) * 3, s


def literal_times(p: Any, s: Any, b: Any) -> Any:
    return _x(p, b)[:, :2] * torch.tensor([0.1, 0.2]), s


def promoted(p: Any, s: Any, b: Any) -> Any:
    return b.token_ids / 3, s


def times_float(p: Any, s: Any, b: Any) -> Any:
    return b.token_ids * 0.1, s


def float_arange(p: Any, s: Any, b: Any) -> Any:
    return torch.arange(0.0, 1.0, 0.1) * 1, s


def int_mean(p: Any, s: Any, b: Any) -> Any:
    return torch.sqrt(b.token_ids) + b.token_ids.exp(), s


def explicit(p: Any, s: Any, b: Any) -> Any:
    x = _x(p, b)
    return x * 0.1 + x.new_ones(8) + torch.ones(8, dtype=torch.float32, device=x.device), s


def reads_dtype(p: Any, s: Any, b: Any) -> Any:
    return _x(p, b).to(torch.get_default_dtype()) * 1, s


def reads_autocast(p: Any, s: Any, b: Any) -> Any:
    return _x(p, b) * (2 if torch.is_autocast_enabled("cpu") else 3), s


def reads_grad(p: Any, s: Any, b: Any) -> Any:
    return _x(p, b) * (2 if torch.is_grad_enabled() else 3), s


def reads_precision(p: Any, s: Any, b: Any) -> Any:
    return _x(p, b) * (2 if torch.get_float32_matmul_precision() == "highest" else 3), s


def reads_determinism(p: Any, s: Any, b: Any) -> Any:
    return _x(p, b) * (2 if torch.are_deterministic_algorithms_enabled() else 3), s


def reads_device(p: Any, s: Any, b: Any) -> Any:
    return _x(p, b) * (2 if torch.get_default_device().type == "cpu" else 3), s


def tanh(p: Any, s: Any, b: Any) -> Any:
    return torch.tanh(_x(p, b)), s


# --- state changed inside -------------------------------------------------------------------------


def autocast_inside(p: Any, s: Any, b: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _x(p, b) @ p["w"].t(), s


def autocast_off_inside(p: Any, s: Any, b: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return _x(p, b) @ p["w"].t(), s


def no_grad_inside(p: Any, s: Any, b: Any) -> Any:
    with torch.no_grad():
        return _x(p, b) * 2, s


def inference_inside(p: Any, s: Any, b: Any) -> Any:
    with torch.inference_mode():
        return _x(p, b) * 2, s


def enable_grad_inside(p: Any, s: Any, b: Any) -> Any:
    with torch.enable_grad():
        return _x(p, b) * 2, s


def dtype_scoped_inside(p: Any, s: Any, b: Any) -> Any:
    with dtype(torch.float64)():
        return torch.ones(b.token_ids.shape[0]) * 0.1, s


def device_inside(p: Any, s: Any, b: Any) -> Any:
    with torch.device(p["w"].device):
        return _x(p, b) * torch.ones(8), s


# --- state changed inside, and left changed: a side effect, which a graph cannot have -------------


def sets_dtype(p: Any, s: Any, b: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    return _x(p, b) * 2, s


def sets_grad(p: Any, s: Any, b: Any) -> Any:
    torch.set_grad_enabled(False)
    return _x(p, b) * 2, s


def sets_precision(p: Any, s: Any, b: Any) -> Any:
    torch.set_float32_matmul_precision("medium")
    return _x(p, b) * 2, s


def sets_determinism(p: Any, s: Any, b: Any) -> Any:
    torch.use_deterministic_algorithms(True)
    return _x(p, b) * 2, s


def sets_autocast(p: Any, s: Any, b: Any) -> Any:
    torch.set_autocast_enabled("cpu", True)
    return _x(p, b) * 2, s


def sets_seed(p: Any, s: Any, b: Any) -> Any:
    torch.manual_seed(0)
    return _x(p, b) * 2, s


def sets_default_device(p: Any, s: Any, b: Any) -> Any:
    torch.set_default_device("cpu")
    return _x(p, b) * 2, s


LEFT_CHANGED = [
    sets_dtype,
    sets_grad,
    sets_precision,
    sets_determinism,
    sets_autocast,
    sets_seed,
    sets_default_device,
]
"""Each leaves global state changed: to be refused, with the state as it was before."""
