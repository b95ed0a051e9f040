"""A tiny Llama split by hand, over "tp" by heads and columns of its mlp, and over "dp" by columns
of an mlp whose tokens all ranks gather, as experts are split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from fngraph.models import llama, lora

SUM, GATHER, SCATTER = "sum", "gather", "scatter"


@fg.struct
class Part:
    """A rank's part of a weight, for `linear` alone.

    Attributes:
        how: results are summed, inputs gathered, or results summed and scattered.
    """

    weight: Tensor
    axis: fg.Axis = fg.static()
    how: str = fg.static()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        assert func is linear, func
        x_TI, self, *_ = args
        if self.how == GATHER:
            return linear(fg.all_gather(x_TI[None], self.axis), self.weight)
        out = linear(x_TI, self.weight)
        if self.how == SCATTER:
            return fg.reduce_scatter(out, self.axis)[0]
        return fg.all_reduce(out, self.axis)


def cut(x: Tensor, axis: fg.Axis, dim: int) -> Tensor:
    """This rank's part of a dim."""
    part = axis.part(x.shape[dim])
    return x.narrow(dim, part.start, len(part)).contiguous()


def split(params: llama.Params, tp: fg.Axis, dp: fg.Axis | None = None) -> llama.Params:
    """The part of one rank."""
    config = dataclasses.replace(
        params.config,
        num_heads=params.config.num_heads // tp.size,
        num_kv_heads=params.config.num_kv_heads // tp.size,
    )

    def layer_of(layer: Any) -> Any:
        attn, mlp = layer.attn, layer.mlp
        rows = {name: cut(getattr(attn, name), tp, 0) for name in ("wq", "wk", "wv")}
        attn = dataclasses.replace(attn, **rows, wo=Part(cut(attn.wo, tp, 1), tp, SUM))
        if dp is not None and dp.size > 1:
            into = {n: Part(cut(getattr(mlp, n), dp, 0), dp, GATHER) for n in ("w_gate", "w_up")}
            mlp = dataclasses.replace(mlp, **into, w_down=Part(cut(mlp.w_down, dp, 1), dp, SCATTER))
        else:
            into = {n: cut(getattr(mlp, n), tp, 0) for n in ("w_gate", "w_up")}
            mlp = dataclasses.replace(mlp, **into, w_down=Part(cut(mlp.w_down, tp, 1), tp, SUM))
        return dataclasses.replace(layer, attn=attn, mlp=mlp)

    return dataclasses.replace(params, layers=tuple(map(layer_of, params.layers)), config=config)


def split_adapters(adapters: Any, tp: fg.Axis) -> Any:
    """The part of adapters of projections whose rows are split, or of one slot's."""
    return tuple(
        {name: lora.LowRank(pair.a, cut(pair.b, tp, -1)) for name, pair in own.items()}
        for own in adapters
    )


def slots_for(params: llama.Params) -> Any:
    """Two empty slots, of all of the heads."""
    return lora.slots(params, count=2, rank=4, names=("wq", "wv"))


def drawn_adapters(params: llama.Params) -> list[Any]:
    """What goes into the slots."""
    generator = torch.Generator().manual_seed(8)
    draw = lambda x: torch.randn(x.shape[1:], generator=generator) * 0.5  # noqa: E731
    return [
        tuple(
            {name: lora.LowRank(draw(pair.a), draw(pair.b)) for name, pair in own.items()}
            for own in slots_for(params)
        )
        for _ in range(2)
    ]
