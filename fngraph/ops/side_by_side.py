"""One product for several weights that lie side by side in memory.

A q, k and v projection of one input are one product, if their weights are rows of one matrix, and
their biases, if they have any, parts of one vector. `lay_side_by_side` puts them so: they stay
leaves of their own, as views of one tensor. The op reads them where they lie, and checks at each
call that they do; a graph, when it is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fngraph.core import trees
from fngraph.errors import AddressError, TransformError, TreeError
from fngraph.ops.fp8 import scaled_linear
from fngraph.ops.opaque import define_op
from fngraph.torch_facts.memory import storage_key

ROWS = (("wq", "wk", "wv"), ("bq", "bk", "bv"), ("w_gate", "w_up"),
        ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # fmt: skip
"""Names of weights and biases that have one input, in the families here and in those of
transformers."""


def lay_side_by_side(params: Any, groups: Sequence[Sequence[str]] = ROWS) -> Any:
    """The same tree, each group's matrices as rows of one tensor of its own; and so its biases.

    They are copied once; let go of the old tree, or both take memory. Weights are found by the
    last name of their path, or the last but one of `q_proj.weight` and `q_proj.bias`; those of a
    group have all else of their path in common. What lies so already is left as it is. Of a
    module, `state_dict()` is such a tree; load the result with `load_state_dict(..., assign=True)`.

    Weights in fp8 are `wq.values`, with `wq.scale` of each row likewise. Scales by which the one
    input is rounded, `wq.input_scale`, become one tensor where they are equal; others stay.

    Args:
        groups: names of weights (out, in), or of modules of a weight and a bias (out,), with one
            input.

    Raises:
        TreeError: those of a group differ in width, dtype or device, or share memory.
    """
    trees.register_dataclasses(params)
    leaves, treedef = trees.flatten(params)
    paths = trees.paths(treedef, "params")
    places: dict[tuple[str, str], dict[str, int]] = {}  # by what is around a name
    for i, path in enumerate(paths):
        if (found := _OF_MODULE.fullmatch(path) or _PLAIN.fullmatch(path)) is not None:
            before, name, after = found.groups()
            places.setdefault((before, after), {})[name] = i
    for (_, after), names in places.items():
        for group in groups:
            if len(group) > 1 and all(name in names for name in group):
                at = [names[name] for name in group]
                dims = {leaves[i].dim() for i in at}
                if dims == {0} and "input_scale" in after:
                    whole = _shared([leaves[i] for i in at])
                elif dims in ({1}, {2}):
                    whole = _together([paths[i] for i in at], [leaves[i] for i in at])
                else:  # stacks of matrices, as of experts; a scale for all of a weight
                    continue
                for i, x in zip(at, whole):
                    leaves[i] = x
    return trees.unflatten(treedef, leaves)


_OF_MODULE = re.compile(r"(.*\W)(\w+)(\W+(?:weight|bias|values|scale|input_scale)\W*)")
_PLAIN = re.compile(r"(.*\W)(\w+)(\W*)")


def _together(paths: Sequence[str], weights: Sequence[Tensor]) -> list[Tensor]:
    if why_apart(weights) is None:
        return list(weights)
    kinds = {(x.shape[1:], x.dtype, x.device) for x in weights}
    if len(kinds) > 1:
        told = ", ".join(f"{path} {tuple(x.shape)} {x.dtype}" for path, x in zip(paths, weights))
        raise TreeError(f"{told} cannot lie side by side: pass groups= without them")
    if len({storage_key(x) for x in weights}) < len(weights):
        raise TreeError(
            f"{', '.join(paths)} share memory (tied weights), which would be torn apart. Pass "
            "groups= without them"
        )
    with torch.no_grad():  # bytes: torch cannot join fp8 everywhere
        whole = torch.cat([x.view(torch.uint8) if x.itemsize == 1 else x for x in weights])
    return list(whole.view(weights[0].dtype).split([x.shape[0] for x in weights]))


def _shared(scales: Sequence[Tensor]) -> list[Tensor]:
    """One in the place of all, if they are equal."""
    first, *rest = scales
    alike = all((x.dtype, x.device) == (first.dtype, first.device) for x in rest)
    equal = alike and all(bool(torch.equal(x, first)) for x in rest)
    return [first] * len(scales) if equal else list(scales)


def why_apart(weights: Sequence[Tensor]) -> str | None:
    """Why matrices are not rows of one, or vectors parts of one, each right behind the one before;
    None: they are."""
    first, *rest = weights
    if any(x.dim() != first.dim() or x.shape[1:] != first.shape[1:] for x in weights):
        return "they are of different widths"
    if any(not x.is_contiguous() for x in weights):
        return "one has gaps, or is transposed"
    end = first.data_ptr() + first.nbytes
    for x in rest:
        if x.dtype != first.dtype or x.device != first.device:
            return "they are of different dtypes or devices"
        if x.data_ptr() != end or storage_key(x) != storage_key(first):
            return "one does not lie right behind the one before"
        end += x.nbytes
    return None


def the_scale(scales: Sequence[Tensor]) -> Tensor:
    """The one scale that all of these are.

    Raises:
        AddressError: they are not one memory.
    """
    first, *rest = scales
    if any(x.data_ptr() != first.data_ptr() for x in rest):
        raise AddressError(
            f"{len(scales)} scales by which one input is rounded to fp8 were one tensor when they "
            "were traced, and are not any more. Bind one for all, fg.ops.lay_side_by_side(params), "
            "or graphify without the passes linears_fp8, add_rms_norm_fp8, rms_norm_fp8 and "
            "silu_mul_fp8"
        )
    return first


def whole_of(what: str, parts: Sequence[Tensor]) -> Tensor:
    """The tensor whose rows these are, each right behind the one before.

    Raises:
        AddressError: they are not.
    """
    why = why_apart(parts)
    if why is not None:
        raise AddressError(
            f"{what} of shapes {[tuple(x.shape) for x in parts]} lay side by side when they "
            f"were traced, and do not any more: {why}. Bind {what} that do, "
            "fg.ops.lay_side_by_side(params), or graphify without the pass side_by_side"
        )
    return as_one(parts)


def as_one(parts: Sequence[Tensor]) -> Tensor:
    """The tensor whose rows these are, which they are known to be."""
    rows = sum(x.shape[0] for x in parts)
    return parts[0].as_strided((rows, *parts[0].shape[1:]), parts[0].stride())


def _linear(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """(T, E) by matrices (N, E) that are rows of one, and vectors (N,) that are parts of one, or
    none at all: (T, sum of N)."""
    turned = whole_of("weights", weights).t()
    return torch.addmm(whole_of("biases", biases), x, turned) if biases else x.mm(turned)


def _fake_linear(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], sum(w.shape[0] for w in weights))


def _scaled(
    x: Tensor, x_scales: list[Tensor], weights: list[Tensor], scales: list[Tensor],
    dtype: torch.dtype, held: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_linear` by matrices (N, K) that are rows of one, and so their scales (N, 1); the
    scales of `x` are one memory."""
    by = the_scale(x_scales)
    whole = whole_of("weights", weights), whole_of("scales", scales)
    return scaled_linear(x, by, *whole, dtype, held)


def _fake_scaled(
    x: Tensor, x_scales: list[Tensor], weights: list[Tensor], scales: list[Tensor],
    dtype: torch.dtype, held: bool = False,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], sum(w.shape[0] for w in weights)), dtype=dtype)


def define_merged(name: str, schema: str, run: Any, fake: Any, instead: str) -> None:
    """An op of products that a pass makes, which has no gradient.

    Args:
        run, fake: see `define_op`.
        instead: what to write for it.
    """

    def refuse(*args: Any) -> NoReturn:
        raise TransformError(
            f"{name} is what a pass makes of a traced product, and has no gradient. Write {instead}"
        )

    define_op(name, schema, run, fake, refuse)


define_merged(
    "linear_side_by_side", "(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor",
    _linear, _fake_linear, "torch.nn.functional.linear",
)  # fmt: skip
define_merged(
    "scaled_linear_side_by_side",
    "(Tensor x, Tensor[] x_scales, Tensor[] weights, Tensor[] scales, ScalarType dtype, "
    "bool held=False) -> Tensor",
    _scaled, _fake_scaled, "fg.ops.scaled_linear",
)  # fmt: skip
