"""AdamW as a pure function over trees of weights; clipping, schedules and a running average.

Everything that changes from step to step is a tensor, the step's number too, so that a graph of one
step is a graph of all of them.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; the order of roundings
is that of `torch.optim.AdamW`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg

Schedule = Callable[[Tensor], Tensor]  # () int64, steps taken before -> () float32, learning rate


class AdamW(NamedTuple):
    """What stays as it is over a run.

    Attributes:
        clip: the norm of all gradients together is at most this; None: whatever it is.
        decays: of which weights; None: of those of two dims or more. A tree of the weights'
            structure that says True or False.
    """

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0
    decays: Any = None


@fg.struct
class Moments:
    """What AdamW keeps: donated state of a step."""

    step: Tensor  # () int64, steps taken
    first: Any  # as the weights, float32: the running mean of gradients
    second: Any  # likewise, of their squares
    average: Any = None  # likewise, of the weights; None: it is not kept


def init(params: Any, *, average: bool = False) -> Moments:
    """Before the first step; `average` says whether a running average of the weights is kept.

    Raises:
        TreeError: a leaf that is no tensor, by path.
    """
    leaves, treedef = fg.core.trees.flatten(params)
    for path, w in zip(fg.core.trees.paths(treedef, "params"), leaves):
        fg.core.text.expect(Tensor, "a weight, a tensor", fg.errors.TreeError, **{path: w})
    step = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
    own = fg.core.trees.map_leaves(torch.clone, params) if average else None
    return Moments(step, _zeros(params), _zeros(params), own)


def _zeros(params: Any) -> Any:
    return fg.core.trees.map_leaves(lambda w: torch.zeros_like(w, dtype=torch.float32), params)


def update(
    settings: AdamW, params: Any, grads: Any, opt: Moments, lr: Tensor
) -> tuple[Any, Moments]:
    """The weights and the moments after one step.

    Args:
        params, grads: trees of one structure, float32.
        lr: () float32.

    Raises:
        TreeError: gradients, moments, average or `settings.decays` of another structure; by path.
    """
    (slow, slower), step = settings.betas, opt.step + 1
    count = step.float()
    # 1 - beta ** step, which would lose its digits where the power is close to 1
    logs = (math.log(beta) if beta else -math.inf for beta in settings.betas)
    bias, bias_of_squares = (-torch.expm1(count * log) for log in logs)
    size, root = lr / bias, bias_of_squares.sqrt()
    weights, treedef = fg.core.trees.flatten(params)
    decays = _decays(settings, weights, treedef)
    gradients = leaves_like(treedef, grads, "grads")
    firsts = leaves_like(treedef, opt.first, "opt.first")
    seconds = leaves_like(treedef, opt.second, "opt.second")
    new: list[tuple[Tensor, Tensor, Tensor]] = []
    for w, g, first, second, decayed in zip(weights, gradients, firsts, seconds, decays):
        first = torch.lerp(first, g, 1 - slow)
        second = torch.addcmul(second * slower, g, g, value=1 - slower)
        kept = w * (1 - lr * settings.weight_decay) if decayed else w
        moved = kept - size * (first / (second.sqrt() / root + settings.eps))
        new.append((moved, first, second))
    params, first, second = (
        fg.core.trees.unflatten(treedef, list(part)) for part in zip(*new, strict=True)
    )
    return params, Moments(step, first, second, blended(opt.average, params, count))


def _decays(settings: AdamW, weights: Sequence[Tensor], treedef: Any) -> list[bool]:
    if settings.decays is None:
        return [w.ndim > 1 for w in weights]
    return leaves_like(treedef, settings.decays, "decays")


def leaves_like(treedef: Any, tree: Any, name: str) -> list[Any]:
    """The leaves of a tree in the order of the weights', whatever the order of keys.

    Args:
        treedef: the weights' structure.
        name: of the tree, for errors.

    Raises:
        TreeError: it is of another structure; by path.
    """
    leaves, found = fg.core.trees.flatten(fg.core.trees.ordered_as(tree, treedef))
    if found != treedef:
        lines = "\n".join(fg.core.trees.differences(treedef, found, name))
        raise fg.errors.TreeError(
            f"{name} is of another structure than the weights:\n{lines}\nGive it one leaf for each "
            "of theirs; what `init` makes of them has their structure"
        )
    return leaves


def check(settings: AdamW) -> None:
    """Refuse what would make weights grow, or no numbers.

    Raises:
        ValueError: by name, with what may be passed. TypeError: no settings.
    """
    fg.core.text.expect(AdamW, "AdamW(...)", TypeError, settings=settings)
    if not all(0 <= beta < 1 for beta in settings.betas):
        raise ValueError(f"AdamW(betas={settings.betas}): pass two numbers from 0 up to below 1")
    if settings.clip is not None and not settings.clip >= 0:
        raise ValueError(f"AdamW(clip={settings.clip}): pass a norm, 0 or more; None clips nothing")
    for name in ("eps", "weight_decay"):
        if not getattr(settings, name) >= 0:
            raise ValueError(f"AdamW({name}={getattr(settings, name)}): pass 0 or more")


def blended(average: Any, params: Any, count: Tensor) -> Any:
    """The running average, moved towards the weights after `count` steps; None stays None.

    It is of the last ninth of them, and of a thousand at most.
    """
    if average is None:
        return None
    weight = 1 - (count / (count + 9)).clamp(max=0.999)
    weights, treedef = fg.core.trees.flatten(params)
    averages = leaves_like(treedef, average, "opt.average")
    return fg.core.trees.unflatten(
        treedef, [torch.lerp(a, w, weight) for a, w in zip(averages, weights)]
    )


def clipped(grads: Any, most: float | None) -> tuple[Any, Tensor]:
    """Gradients whose norm, of all together, is at most `most`; and what it was, () float32."""
    leaves, treedef = fg.core.trees.flatten(grads)
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in leaves]))
    if most is None:
        return grads, norm
    scale = (most / (norm + 1e-6)).clamp(max=1.0)
    return fg.core.trees.unflatten(treedef, [g * scale for g in leaves]), norm


def cosine(peak: float, steps: int, *, warmup: float = 0.03, last: float = 0.02) -> Schedule:
    """From near 0 to `peak` over a share `warmup` of so many steps, then down along a cosine.

    Args:
        last: where it ends, as a share of `peak`.

    Raises:
        ValueError: of no step.
    """
    if steps < 1:
        raise ValueError(f"cosine(steps={steps}): pass 1 or more")

    def lr(step: Tensor) -> Tensor:
        done = (step / steps).clamp(max=1.0)
        rising = ((done + 1e-3) / max(warmup, 1e-3)).clamp(max=1.0)
        return peak * rising * ((1 + last) / 2 + (1 - last) / 2 * torch.cos(math.pi * done))

    return lr


def constant(peak: float) -> Schedule:
    """The same at every step."""
    return lambda step: torch.full((), peak, device=step.device)
