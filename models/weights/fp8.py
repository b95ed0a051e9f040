"""Weights in fp8: what stands in a tree of params where a matrix stood, and what makes it.

    params = quantize_fp8(params)                      # of bfloat16, after it was loaded
    config, params = qwen3.load(folder)                # or of a folder that is in fp8 already

`linear(x, weight)` of such a weight rounds each row of x to fp8, by the row's own scale or by one
that is known, and multiplies in fp8: models call it as before, adapters too. Nothing else may be
done with it. Shape letters: O and I what a projection gives and takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from fngraph.models.weights import naming

LINEAR = (
    "wq",
    "wk",
    "wv",
    "wo",
    "w_gate",
    "w_up",
    "w_down",
    "w_latent",
    "w_q_latent",
    "w_q_up",
    "w_qkvz",
    "w_in",
    "w_out",
)
"""Last names of the weights that families multiply by `linear` and by nothing else. Routers, gates
of one column and the decays of states are not among them: they are small, their errors large."""
STEP = 16
"""Tensor cores take sizes in steps of so many."""


@fg.struct
class Fp8Weight:
    """Stands for a weight where a model calls `linear(x, weight)`, and nowhere else. It is values *
    scale."""

    values: Tensor  # (O, I) float8_e4m3fn
    scale: Tensor  # () or (O, 1) float32
    input_scale: Tensor | None  # () float32, by which x is rounded; None: each row by its own

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        if func is not linear or len(args) < 2 or not isinstance(args[1], cls):
            raise TypeError(
                f"{getattr(func, '__name__', func)} meets a weight in fp8, which is for "
                "linear(x, weight) alone. Leave it as it was: quantize_fp8(params, which=...) with "
                "the names of others"
            )
        return _linear(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """(..., O) in the dtype of x, (..., I)."""
    rows = x.flatten(0, -2) if x.dim() != 2 else x
    by: Tensor | None = weight.input_scale
    if by is None:
        values, by = fg.ops.quantize_fp8_rows(rows)
    else:
        values = fg.ops.quantize_fp8(rows, by)
    out = fg.ops.scaled_linear(values, by, weight.values, weight.scale, x.dtype)
    if bias is not None:
        out = out + bias
    return out if x.dim() == 2 else out.unflatten(0, x.shape[:-1])


def quantize_fp8(
    params: Any,
    which: Sequence[str] = LINEAR,
    *,
    rows: bool = True,
    input_scales: Mapping[str, float] | None = None,
) -> Any:
    """The tree with matrices in fp8, each rounded to the nearest; all else is the same tensors.

    Embedding, head, routers and experts (stacks of matrices) stay. Let go of the old tree, or both
    take memory.

    Args:
        params: a tree of structs and tuples, such as a family's `Params`.
        which: last names of the weights (O, I), wherever a layer has them.
        rows: whether each row of a weight, a column of the product, has a scale of its own.
        input_scales: by path, "layers.0.attn.wq", the scale of a product's input, if it is known:
            the largest absolute value that comes, / 448. Others are made by each row.

    Raises:
        ValueError: no such weights, or some that cannot be: all are listed. A path in
            `input_scales` that is no such weight.
    """
    scales, wrong, done = dict(input_scales or {}), list[str](), 0

    def quantized(name: str, x: Any) -> Any:
        nonlocal done
        if name.rsplit(".", 1)[-1] not in which or (isinstance(x, Tensor) and x.ndim != 2):
            return x
        by = scales.pop(name, None)
        lines = [f"  {name}: is in fp8 already"] if isinstance(x, Fp8Weight) else []
        lines += lines or [*misfits(name, x.shape), *wrong_scale(name, "input_scale", by)]
        if not lines and not bool(x.isfinite().all()):
            lines = [f"  {name}: holds what is no number, or infinite"]
        wrong.extend(lines)
        done += 1
        if lines:
            return x
        known = None if by is None else torch.tensor(by, dtype=torch.float32, device=x.device)
        return Fp8Weight(*_rounded(x, rows), known)

    with torch.no_grad():
        made = naming.replaced(params, quantized, (Tensor, Fp8Weight))
    if not done and not wrong:
        raise ValueError(f"no weights are called {', '.join(which)}: pass which=")
    wrong += [f"  {name}: is in input_scales, and is none of the weights" for name in scales]
    if wrong:
        told = "weights that cannot be fp8; which= names those that can:"
        raise ValueError("\n".join([told, *wrong]))
    return made


def _rounded(x: Tensor, rows: bool) -> tuple[Tensor, Tensor]:
    if rows:
        return fg.ops.quantize_fp8_rows(x)
    scale = (x.abs().amax().float() / 448).clamp(min=2.0**-126)  # as of a row
    return fg.ops.quantize_fp8(x, scale), scale


def misfits(name: str, shape: Sequence[int]) -> list[str]:
    """A line for a weight that tensor cores cannot take."""
    if any(n % STEP for n in shape):
        return [f"  {name}: is {tuple(shape)}, and fp8 takes multiples of {STEP}"]
    return []


def wrong_scale(name: str, what: str, scale: Any) -> list[str]:
    """A line for a scale by which nothing can be divided or multiplied."""
    if scale is None:
        return []
    given = torch.as_tensor(scale)
    if bool(((given > 0) & given.isfinite()).all()):
        return []
    return [f"  {name}: {what} is not above 0 and finite everywhere"]
