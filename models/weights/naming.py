"""Weights by name: `layers.0.attn.wq` is the path of a tensor in `Params`.

A family says its weights once, as `Params` of meta tensors: shapes without memory. Initial
values, files and training all go by the names of that tree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import fngraph as fg


def shape(*dims: int) -> Tensor:
    """A tensor of this shape and no memory."""
    return torch.empty(dims, device="meta")


def named(tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree of structs and tuples, by path."""
    found: dict[str, Tensor] = {}
    replaced(tree, lambda name, x: found.setdefault(name, x))
    return found


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a tree's tensors, by path."""
    return {name: tuple(x.shape) for name, x in named(tree).items()}


def filled(tree: Any, values: Mapping[str, Tensor]) -> Any:
    """The tree with the tensor of each name in `values`."""
    return replaced(tree, lambda name, x: values[name])


def replaced(
    tree: Any, new: Callable[[str, Any], Any], whole: tuple[type, ...] = (Tensor,), path: str = ""
) -> Any:
    """The tree of structs, tuples, lists and dicts with `new(path, x)` for each of its tensors;
    anything else stays. A weight that a struct stands for, by its `STANDS_FOR`, keeps its path.

    Args:
        whole: what counts as one, such as a struct that stands for a weight.
    """
    if isinstance(tree, whole):
        return new(path, tree)
    dot = f"{path}." if path else ""
    if isinstance(tree, dict):
        return type(tree)((k, replaced(x, new, whole, f"{dot}{k}")) for k, x in tree.items())
    if isinstance(tree, list | tuple):
        names = getattr(tree, "_fields", range(len(tree)))
        made = [replaced(x, new, whole, f"{dot}{name}") for name, x in zip(names, tree)]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    if not dataclasses.is_dataclass(tree):
        return tree
    parts = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    seen_through = getattr(tree, "STANDS_FOR", None)
    at = {name: path if name == seen_through else f"{dot}{name}" for name in parts}
    kind: Any = type(tree)
    return kind(**{name: replaced(x, new, whole, at[name]) for name, x in parts.items()})


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_dtype(dtype: Any) -> None:
    """Refuse what weights cannot be cast to.

    Raises:
        TypeError: it is no dtype, or one of integers or of 8 bits, which would cut numbers off.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: pass one of torch's, dtype=torch.bfloat16")
    if dtype not in DTYPES:
        raise TypeError(
            f"dtype={dtype}: weights would be cut off, without scales. Pass "
            f"{', '.join(map(str, DTYPES))}; weights in fp8 are "
            "quantize_fp8(params) of those in torch.bfloat16"
        )


def check_config(config: Any, verb: str) -> None:
    """Refuse what is no config of a model.

    Raises:
        TypeError: it is something else, weights for one.
    """
    if dataclasses.is_dataclass(config) and hasattr(config, "num_layers"):
        return
    fix = f"{verb}(params.config, ...)" if hasattr(config, "config") else "a family's Config"
    raise TypeError(f"{fg.core.text.what_is('config', config)}. Pass {fix}")


def init_params(
    blank: Callable[[Any], Any],
    config: Any,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    vectors: Mapping[str, float] | None = None,
) -> Any:
    """Random weights, the same on every device: those of `blank(config)`, drawn.

    Matrices are normal, 0.02 wide, less where layers add up (`wo`, `w_down`). A vector is 1, or
    what `vectors` says of its last name.

    Raises:
        TypeError: a dtype that weights cannot have; what is no config.
    """
    check_config(config, "init_params")
    check_dtype(dtype)
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, x: Tensor) -> Tensor:
        last = name.rsplit(".", 1)[-1]
        if x.ndim == 1:
            value = torch.full(x.shape, (vectors or {}).get(last, 1.0))
        else:
            residual = last in ("wo", "w_down")
            std = 0.02 / math.sqrt(2 * config.num_layers) if residual else 0.02
            value = torch.randn(x.shape, generator=generator) * std
        return value.to(device=device, dtype=dtype)

    return replaced(blank(config), draw)
