"""Functions, the state of the call that they are traced in, and the state of a later one.

CASES is (name, forward, first, later, alike): whether nothing that forward computes depends on it.
"""

from __future__ import annotations

from typing import Any

import ambient_forwards as f
import torch
from ambient_states import Doubles, Negates, autocast, deterministic, device, dtype, none, precision

f32, f64, bf16 = dtype(torch.float32), dtype(torch.float64), dtype(torch.bfloat16)
CASES: list[tuple[str, Any, Any, Any, bool]] = [
    ("autocast, then not", f.matmul, autocast(), none, False),
    ("not, then autocast", f.matmul, none, autocast(), False),
    ("autocast linear, then not", f.linear, autocast(), none, False),
    ("not, then autocast linear", f.linear, none, autocast(), False),
    ("not, then autocast sdpa", f.sdpa, none, autocast(), False),
    ("bfloat16, then float16", f.matmul, autocast(), autocast(dtype=torch.float16), False),
    ("not, then autocast, state", f.state, none, autocast(), False),
    ("autocast, then not, state", f.state, autocast(), none, False),
    ("autocast disabled, then not", f.matmul, autocast(enabled=False), none, True),
    ("autocast all along", f.matmul, autocast(), autocast(), True),
    ("autocast of what it leaves alone", f.rowwise, none, autocast(), False),
    ("autocast without its cache", f.matmul, autocast(), autocast(cache_enabled=False), True),
    ("autocast inside, not outside", f.autocast_inside, none, none, True),
    ("autocast inside and later outside", f.autocast_inside, none, autocast(), False),
    ("autocast off inside", f.autocast_off_inside, autocast(), none, False),
    ("default dtype, zeros", f.factory, f32, f64, False),
    ("default dtype back, zeros", f.factory, f64, f32, False),
    ("default dtype, literal", f.literal, f32, f64, False),
    ("default dtype, literal product", f.literal_times, f32, f64, False),
    ("default dtype, int / int", f.promoted, f32, f64, False),
    ("default dtype, int * float", f.times_float, f32, f64, False),
    ("default dtype bfloat16, int * float", f.times_float, f32, bf16, False),
    ("default dtype, arange", f.float_arange, f32, f64, False),
    ("default dtype, sqrt of ints", f.int_mean, f32, f64, False),
    ("default dtype, read", f.reads_dtype, f32, f64, False),
    ("default dtype, all explicit", f.explicit, f32, f64, True),
    ("default dtype inside", f.dtype_scoped_inside, none, none, True),
    ("no_grad, then grad", f.rowwise, torch.no_grad, torch.enable_grad, True),
    ("inference_mode, then no_grad", f.rowwise, torch.inference_mode, torch.no_grad, True),
    ("no_grad, then inference_mode", f.rowwise, torch.no_grad, torch.inference_mode, True),
    ("inference_mode, then grad, state", f.state, torch.inference_mode, torch.enable_grad, True),
    ("grad mode, read", f.reads_grad, torch.no_grad, torch.enable_grad, False),
    ("grad mode, read, back", f.reads_grad, torch.enable_grad, torch.no_grad, False),
    ("autocast, read", f.reads_autocast, none, autocast(), False),
    ("no_grad inside", f.no_grad_inside, torch.enable_grad, torch.enable_grad, True),
    ("enable_grad inside", f.enable_grad_inside, torch.no_grad, torch.no_grad, True),
    ("inference_mode inside", f.inference_inside, none, none, True),
    ("matmul precision", f.matmul, precision("highest"), precision("medium"), False),
    ("matmul precision, read", f.reads_precision, precision("highest"), precision("medium"), False),
    ("determinism, read", f.reads_determinism, deterministic(False), deterministic(True), False),
    (
        "determinism, off, read",
        f.reads_determinism,
        deterministic(True),
        deterministic(False),
        False,
    ),
    ("default device, read", f.reads_device, none, device("meta"), False),
    ("default device, factories", f.factory, none, device("meta"), False),
    ("default device the same", f.factory, device("cpu"), device("cpu"), True),
    ("device inside", f.device_inside, none, none, True),
    ("a function mode, then not", f.tanh, Doubles, none, False),
    ("not, then a function mode", f.tanh, none, Doubles, False),
    ("a dispatch mode, then not", f.tanh, Negates, none, False),
    ("not, then a dispatch mode", f.tanh, none, Negates, False),
]
