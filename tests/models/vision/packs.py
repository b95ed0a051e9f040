"""What tests of vision encoders share: packs of items through graphs, each as it is alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import fngraph as fg

CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def widened(module: nn.Module, seed: int = 0) -> Any:
    """The module in evaluation, every weight random, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        weight.data = drawn * 0.3 + (1 if weight.ndim == 1 else 0)
    return module.eval()


def split(rows: Any, sizes: Sequence[int]) -> list[Any]:
    """The rows of each item, of a tree of tensors (T, ...)."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [tree_map(lambda x: x[end - n : end], rows) for n, end in zip(sizes, ends)]  # noqa: B023


def captured(
    model: Any, params: Any, path: str = "default", *, sizes: Sequence[int], max_tokens: int,
    max_reqs: int, modes: str = "FULL",
) -> Any:  # fmt: skip
    """A step of a path's `forward` on the tape, with padding poisoned."""
    unit = model.paths[path].unit
    fast = fg.graphify(
        model.paths[path].forward, stage="batch", modes=modes, sizes=sizes, recorder="tape",
        query_lens=(unit,) if unit else (1,),
    )  # fmt: skip
    limits = fg.Limits(max_tokens, max_reqs, **model.dims)
    return fast.bind(params).capture(limits, progress=False, guards=True)


def alone(model: Any, params: Any, items: Sequence[Any], path: str = "default") -> list[Any]:
    """The rows of each item, run eagerly and by itself."""
    return [model.paths[path].forward(params, model.collate(path, [item])) for item in items]


def check_packs(
    step: Any, model: Any, params: Any, packs: Sequence[Sequence[Any]], path: str = "default"
) -> None:
    """See that items in a pack come out as each does alone, and that all packs ran as graphs."""
    for items in packs:
        batch = model.collate(path, items)
        measured = [model.measured(item) for item in items]
        sizes = [m.tokens[path] for m in measured]
        assert batch.spec.num_tokens == sum(sizes)
        assert batch.spec.num_reqs == sum(m.sequences[path] for m in measured)
        for got, want in zip(split(step(batch), sizes), alone(model, params, items, path)):
            close(got, want)


def close(got: Any, want: Any, **how: Any) -> None:
    """See that trees of tensors are close, and hold something."""
    got, want = tree_leaves(got), tree_leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert b.abs().max() > 0.1
        torch.testing.assert_close(a, b, **(CLOSE | how))


def drawn_packs(items: Sequence[Any], count: int, most: int, seed: int = 0) -> Iterator[list[Any]]:
    """So many packs of up to `most` of the items, in any order."""
    draw = random.Random(seed)
    for _ in range(count):
        yield draw.sample(list(items), draw.randint(1, most))


def patches(n: int, width: int) -> Tensor:
    """(n, width) float32, the same for the same n."""
    return torch.randn(n, width, generator=torch.Generator().manual_seed(n))
