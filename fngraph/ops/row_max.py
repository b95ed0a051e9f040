"""The highest number of each row and where it is: `argmax` and `max` over the last dim.

Torch reduces a row in one program. Of logits, few rows and 100,000 columns or more, that takes 33
to 37 us of a step on an H200, as much as a layer; here as many programs share a row as fill the
device (`triton/highest.py`): alone 2.3 us of one row of 128,256, where torch takes 26, and 19 of 64
where it takes 27. Of 256 it takes 72 and torch 46, so more than MOST_ROWS are torch's.

Results are torch's, bit for bit, on the CPU its own: the first of equal ones (-0 and 0 are equal),
a NaN above all numbers.

The pass `row_max` puts it into a traced graph; it may be called as well. Gradients, tangents and
`torch.func` go through torch's `max`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fngraph.ops.fused import define_fused

SCHEMA = "(Tensor x, bool keepdim) -> (Tensor values, Tensor indices)"
MOST_ROWS = 64
KINDS = (torch.float32, torch.bfloat16, torch.float16)  # that the kernel takes


def _plain(x: Tensor, keepdim: bool) -> tuple[Tensor, Tensor]:
    values, indices = x.max(-1, keepdim)
    return values, indices


def _takes(x: Tensor, keepdim: bool) -> bool:
    return x.dtype in KINDS and x.dim() > 0 and 0 < x.numel() <= MOST_ROWS * x.shape[-1]


def _fake(x: Tensor, keepdim: bool) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], *[1] * (keepdim and x.dim() > 0))
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


define_fused("row_max", SCHEMA, _plain, _fake, module="highest", takes=_takes)
