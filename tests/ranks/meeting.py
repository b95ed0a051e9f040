"""A Llama whose mlps are split over "dp": all ranks gather each other's tokens, and sum what they
make of them, as is done with experts. So all must bring as many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from fngraph.models import llama


@fg.struct
class Part:
    """A rank's part of a weight, for `linear` alone: of an mlp's first ones, rows, which see the
    tokens of all; of its last one, columns, whose results are summed and scattered."""

    weight: Tensor
    axis: fg.Axis = fg.static()
    last: bool = fg.static()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        assert func is linear, func
        x_TE, self = args
        if self.last:
            return fg.reduce_scatter(linear(x_TE, self.weight), self.axis)[0]
        return linear(fg.all_gather(x_TE[None], self.axis), self.weight)


def meeting(params: llama.Params, whole: llama.Params, axis: fg.Axis) -> llama.Params:
    """`params` with mlps of `whole`, split."""

    def mlp_of(mlp: Any) -> Any:
        part = axis.part(len(mlp.w_gate))
        rows = lambda x: Part(x[part.start : part.stop].clone(), axis, False)  # noqa: E731
        last = Part(mlp.w_down[:, part.start : part.stop].clone(), axis, True)
        return dataclasses.replace(mlp, w_gate=rows(mlp.w_gate), w_up=rows(mlp.w_up), w_down=last)

    layers = [
        dataclasses.replace(own, mlp=mlp_of(layer.mlp))
        for own, layer in zip(params.layers, whole.layers)
    ]
    return dataclasses.replace(params, layers=tuple(layers))
