"""Adapters (LoRA) over any family whose projections are `linear`: each row uses its own, or none.

    forward = lora.adapted(llama.forward)              # (params, adapters, cache, batch)
    adapters = lora.slots(params, count=8, rank=16)    # held leaves, stacked along the first dim
    step.load_slot(3, adapters=load_adapter(folder, ...))  # fngraph.models.weights.adapters

A row's update goes through two products over all slots at once; between them the row's own slot is
selected: two more matrix products a projection, whatever adapters a batch mixes. Nothing that is in
a slot reaches the rows of others, no infinity or NaN either. Batches
without any are better served by the plain `forward`, over the same cache: see
`fngraph.models.serving.steps`. Loading an adapter captures nothing.

Shape letters: T tokens, N slots, r rank of the slots, I and O what a projection takes and gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from fngraph.models.families.layers import paired
from fngraph.models.weights import naming
from fngraph.models.weights.fp8 import Fp8Weight

ATTENTION = ("wq", "wk", "wv", "wo")
_WEIGHTS = (Tensor, Fp8Weight)


@fg.struct
class LowRank:
    """The updates of one projection, x @ a.T @ b; a slot has neither N dim."""

    a: Tensor  # (N, r, I)
    b: Tensor  # (N, r, O), the scale included


Adapters = tuple[Mapping[str, LowRank], ...]
"""For each layer its adapted projections, by the paths of its weights: "wq" or "attn.wq"."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdaptedWeight:
    """Stands for a weight where the model calls `linear(x, weight)`, and nowhere else.

    Attributes:
        weight: (O, I).
        gate: (T, N, 1), true, or not 0, at each token's own slot.
    """

    weight: Tensor | Fp8Weight
    pair: LowRank
    gate: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        if func is not linear or len(args) < 2 or not isinstance(args[1], cls):
            raise TypeError(
                f"{getattr(func, '__name__', func)} meets an adapted weight, which is for "
                "linear(x, weight) alone. Adapt other projections: lora.slots(params, names=...)"
            )
        x_TI, self, *bias = args
        a_NrI, b_NrO = self.pair.a, self.pair.b
        # all slots meet in the second product, where 0 of another's row times inf would be NaN: it
        # runs over numbers alone, and the slots that have others are NaN before, for their own rows
        spoilt_Nr = (b_NrO * 0).sum(-1)
        narrow_TNr = linear(x_TI, a_NrI.flatten(0, 1), spoilt_Nr.flatten())
        narrow_TNr = torch.where(self.gate.bool(), narrow_TNr.unflatten(1, a_NrI.shape[:2]), 0)
        plain_TO = linear(x_TI, self.weight, *bias, **(kwargs or {}))
        numbers_NrO = b_NrO.nan_to_num(0, 0, 0)
        return torch.addmm(plain_TO, narrow_TNr.flatten(1), numbers_NrO.flatten(0, 1))


def adapted(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward(params, cache, batch)` as `(params, adapters, cache, batch)`.

    `params.layers` are structs with the adapted weights; `batch.adapter_ids` are (T,) int64, the
    slot of each token or -1, padded with -1.
    """

    def adapted_forward(params: Any, adapters: Adapters, cache: Any, batch: Any) -> Any:
        """`forward`, each token with the update of its own adapter."""
        if not hasattr(batch, "adapter_ids"):
            raise TypeError(
                f"{type(batch).__name__} has no adapter_ids, which say each token's slot. Give it, "
                'before its spec, adapter_ids: Tensor = fg.buffer("T", "int64", pad=-1)'
            )
        count = slot_count(adapters)
        slots_N1 = torch.arange(count, device=batch.adapter_ids.device)[:, None]
        own_TN1 = batch.adapter_ids[:, None, None] == slots_N1

        def weight(x: Any, pair: LowRank) -> Any:
            return AdaptedWeight(x, pair, own_TN1)

        def adapt(layer: Any, own: Mapping[str, LowRank]) -> Any:
            adapted = lambda n, x: weight(x, own[n]) if n in own else x  # noqa: E731
            return naming.replaced(layer, adapted, _WEIGHTS)

        both = paired(params.layers, adapters, "adapters", "lora.slots(params, ...) of this model")
        layers = tuple(adapt(*pair) for pair in both)
        return forward(dataclasses.replace(params, layers=layers), cache, batch)

    return adapted_forward


def slots(params: Any, *, count: int, rank: int, names: Sequence[str] = ATTENTION) -> Adapters:
    """Empty slots for adapters of at most `rank`, which change nothing until one is loaded.

    Args:
        names: last names of weights, wherever a layer has them; a layer without has no slots.

    Raises:
        ValueError: no layer has any of them.
    """

    def empty(weight: Any) -> LowRank:
        stored = weight.values if isinstance(weight, Fp8Weight) else weight
        dtype = params.embed.dtype if isinstance(weight, Fp8Weight) else weight.dtype
        zeros = lambda width: stored.new_zeros(count, rank, width, dtype=dtype)  # noqa: E731
        out_dim, in_dim = stored.shape
        return LowRank(zeros(in_dim), zeros(out_dim))

    made = tuple(
        {n: empty(x) for n, x in weights_of(layer).items() if n.rsplit(".", 1)[-1] in names}
        for layer in params.layers
    )
    if not any(made):
        raise ValueError(f"no layer has weights called {', '.join(names)}: pass names=")
    return made


def weights_of(layer: Any) -> dict[str, Any]:
    """The weights of a layer by path, those in fp8 whole."""
    found: dict[str, Any] = {}
    naming.replaced(layer, lambda name, x: found.setdefault(name, x), _WEIGHTS)
    return found


def slot_count(adapters: Adapters) -> int:
    """N.

    Raises:
        TypeError: they are no adapters.
    """
    fix = "lora.slots(params, count=8, rank=16)"
    fg.core.text.expect(tuple | list, fix, TypeError, adapters=adapters)
    if not any(isinstance(own, Mapping) and own for own in adapters):
        raise TypeError(f"adapters{fg.core.text.shown(adapters)} has no slots. Pass {fix}")
    return next(len(pair.a) for own in adapters for pair in own.values())


def one_slot(adapters: Adapters, pairs: Mapping[tuple[int, str], tuple[Tensor, Tensor]]) -> Any:
    """What `step.load_slot(i, adapters=...)` takes, of a (r, I) and b (r, O) by layer and name.

    A lower rank is filled up with zeros, and so is what the adapter leaves out.

    Raises:
        ValueError: all pairs that have no place, or another shape, one a line.
    """
    slot, wrong = filled_slot(adapters, pairs)
    if wrong:
        raise ValueError("an adapter does not fit the slots:\n" + "\n".join(wrong))
    return slot


def filled_slot(
    adapters: Adapters, pairs: Mapping[tuple[int, str], tuple[Tensor, Tensor]]
) -> tuple[Any, list[str]]:
    """The slot of `one_slot`, and a line for each pair that does not fit."""
    zeros = lambda p: LowRank(torch.zeros_like(p.a[0]), torch.zeros_like(p.b[0]))  # noqa: E731
    layers, wrong = [{n: zeros(p) for n, p in own.items()} for own in adapters], []
    for (i, name), (a, b) in pairs.items():
        place = layers[i].get(name) if i < len(layers) else None
        if place is None:
            last = name.rsplit(".", 1)[-1]
            wrong.append(f"layers.{i}.{name}: no slots; lora.slots(params, names=(..., {last!r}))")
        elif not _fits(place, a, b):
            want = f"rank {len(place.a)} at most, {place.a.shape[1]} to {place.b.shape[1]}"
            more = a.dim() == b.dim() == 2 and len(a) == len(b) > len(place.a)
            fix = f". Pass lora.slots(params, rank={len(a)}, ...)" if more else ""
            got = f"a {list(a.shape)}, b {list(b.shape)}"
            wrong.append(f"layers.{i}.{name}: {want}; given {got}{fix}")
        else:
            place.a[: len(a)], place.b[: len(b)] = a, b
    return tuple(layers), wrong


def _fits(place: LowRank, a: Tensor, b: Tensor) -> bool:
    widths = (place.a.shape[1], place.b.shape[1])
    two = a.dim() == b.dim() == 2
    return two and len(a) == len(b) <= len(place.a) and (a.shape[1], b.shape[1]) == widths
