"""What stands in a tree of params where a process has a part of a weight, and something is still
to be done over all processes. Models call `linear(x, weight)` and `embed[ids]` as before.

Parts of which nothing is to be done (columns of queries, keys and values, of an mlp's hidden layer)
are plain tensors. Shape letters: O and I what a projection gives and takes, V vocab, E model dim,
n processes along the axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg


@fg.struct
class SummedWeight:
    """A matrix whose columns are split, as of `wo` and `w_down`: `linear(x, weight, bias)`, of an x
    whose columns are split alike, is the sum over all processes, and the bias once."""

    weight: Any  # (O, I/n): a tensor, or what stands for one, as Fp8Weight does
    axis: fg.Axis = fg.static()

    STANDS_FOR = "weight"  # see `naming.replaced`

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        x, self, *rest = refuse_but_linear(cls, func, args)
        bias = rest[0] if rest else (kwargs or {}).get("bias")
        out = fg.all_reduce(linear(x, self.weight), self.axis)
        return out if bias is None else out + bias


@fg.struct
class SplitVocabulary:
    """An embedding or a head whose rows are split: `embed[ids]` is whole on every process, and so
    are the logits `linear(x, head)`. Filled up with zeros where V is no multiple of n."""

    weight: Tensor  # (ceil(V/n), E)
    axis: fg.Axis = fg.static()
    count: int = fg.static()  # V

    STANDS_FOR = "weight"

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the weight."""
        return self.weight.device

    def __getitem__(self, ids: Tensor) -> Tensor:
        """(..., E), of ids from 0 to V - 1: the sum of what each process has of them."""
        each = self.weight.shape[0]
        local = ids - self.axis.rank * each
        is_own = (local >= 0) & (local < each)
        found = self.weight[local.clamp(0, each - 1)]
        return fg.all_reduce(torch.where(is_own[..., None], found, 0), self.axis)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        x, self, *rest = refuse_but_linear(cls, func, args)
        part = linear(x, self.weight, *rest, **(kwargs or {}))
        return fg.all_gather(part, self.axis, dim=-1)[..., : self.count]


@fg.struct
class SplitGain:
    """The gain of a norm over columns that are split; see `layers.rms_norm`."""

    weight: Tensor  # (E/n,)
    axis: fg.Axis = fg.static()

    STANDS_FOR = "weight"

    def float(self) -> SplitGain:
        """In float32."""
        return SplitGain(self.weight.float(), self.axis)

    def over_all(self, mean_T1: Tensor) -> Tensor:
        """The mean over all columns, of those over each process's."""
        return fg.all_reduce(mean_T1, self.axis) / self.axis.size


@fg.struct
class SplitStack:
    """The last matrices of experts: whole experts are spread over one axis, and the columns of each
    over another; see `experts.mix`, which sums over both."""

    weight: Tensor  # (X/n, E, F/m)
    experts: fg.Axis = fg.static()  # of n
    columns: fg.Axis = fg.static()  # of m

    STANDS_FOR = "weight"


def refuse_but_linear(cls: type, func: Callable[..., Any], args: Any) -> Any:
    """The arguments of `linear(x, weight)`.

    Raises:
        TypeError: another function.
    """
    if func is not linear or len(args) < 2 or not isinstance(args[1], cls):
        raise TypeError(
            f"{getattr(func, '__name__', func)} meets a {cls.__name__}, of which a process has a "
            "part; it is for linear(x, weight) alone. Leave it whole: take it out of the specs"
        )
    return args
