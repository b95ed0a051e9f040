"""The tower that is measured, and the ways to run it (`benchmarks encoder`)."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from benchmarks.encoder.requests import MOST_IMAGES, PIXELS
from benchmarks.harness import Mistake
from fngraph.models.vision import qwen3_vl

SIZES = {
    "qwen3-vl": qwen3_vl.Config(
        num_layers=27, num_heads=16, dim=1152, mlp_dim=4304, out_dim=4096, patch_size=16, frames=2,
        channels=3, side=48, deepstack=(8, 16, 24),
    ),
    "tiny": qwen3_vl.Config(
        num_layers=2, num_heads=2, dim=24, mlp_dim=40, out_dim=20, patch_size=4, frames=2,
        channels=3, side=7, deepstack=(0,),
    ),
}  # fmt: skip
BUDGETS = (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864)
PLANNED = 64  # budgets that are planned from a stream: 2.3% of its rows are padding, of 24 5.7%
TILE = 32  # tokens whose 128 patches products compute at once, so that less saves nothing
TINY_BUDGETS, TINY_PIXELS = (8, 16, 32), 600.0
MOST_ITEMS = 8  # of a graph
OFF = 1.5  # times bare `forward`'s own error, and no more


def as_asked(tower: Tower, most: int = MOST_ITEMS) -> dict[str, Any]:
    """The tower's budgets, and so many items a graph."""
    return {"budgets": tower.budgets, "max_items": min(most, tower.budgets[0])}


def as_seen(
    tower: Tower, requests: Iterable[Sequence[Any]], most: int = MOST_ITEMS
) -> dict[str, Any]:
    """Budgets planned from the runs of what came before, up to the tower's largest."""
    asked = as_asked(tower, most)
    plan = fg.core.plan_encoder(*tower.model.token_range, **asked)
    tile = min(TILE, tower.budgets[0] // 2)
    seen = {tower.budgets[-1]: 1}  # what comes later may be as large
    for items in requests:
        tokens = [tower.model.measure(item).tokens["default"] for item in items]
        for run in fg.core.pack(tokens, plan).runs:
            held = sum(tokens[i] for i in run.items)
            held = min(max(-(-held // tile) * tile, asked["max_items"]), tower.budgets[-1])
            seen[held] = seen.get(held, 0) + 1
    return {"histogram": seen, "num_budgets": PLANNED, "max_items": asked["max_items"]}


@dataclasses.dataclass(frozen=True)
class Tower:
    """What is measured.

    Attributes:
        memory: (most patches, C) on the device, of which pictures are cut.
        pixels: of the median image. side: of an output token.
    """

    config: qwen3_vl.Config
    params: Any
    model: fg.EncoderModel
    budgets: tuple[int, ...]
    memory: Tensor
    pixels: float
    side: int

    def bare(self, items: Sequence[Any]) -> list[Any]:
        """`forward` over all items in one call, and each item's own rows."""
        return self._bare(self.params, items)

    def _bare(self, params: Any, items: Sequence[Any]) -> list[Any]:
        batch = self.model.collate("default", items)
        batch = fg.core.trees.map_leaves(
            lambda x: x.to(self.memory.device, non_blocking=True), batch
        )
        made = self.model.paths["default"].forward(params, batch)
        counts = [self.model.measure(item).tokens["default"] for item in items]
        leaves, treedef = fg.core.trees.flatten(made)
        parts = zip(*[leaf.split(counts) for leaf in leaves])
        return [fg.core.trees.unflatten(treedef, part) for part in parts]

    def check(self, ways: Mapping[str, Callable[..., Any]], items: Sequence[Any]) -> None:
        """See that every way is as close to float32 as bare `forward` is.

        Raises:
            Mistake: one is not.
        """
        wide = fg.core.trees.map_leaves(lambda x: x.float(), self.params)
        want = self._bare(wide, items)
        own = off(self.bare(items), want)
        for name, way in ways.items():
            found = off(way(items), want)
            if not found <= OFF * own + 1e-5:
                raise Mistake(f"{name} is off by {found:.2e}, bare forward by {own:.2e}")


def off(got: Any, want: Any) -> float:
    """The largest relative error of a leaf, in the norm."""
    pairs = zip(fg.core.trees.flatten(got)[0], fg.core.trees.flatten(want)[0], strict=True)
    return max(float((a.double() - b).norm() / b.double().norm()) for a, b in pairs)


def make_tower(flags: argparse.Namespace) -> Tower:
    """Random weights on the device."""
    config, is_tiny = SIZES[flags.model], flags.model == "tiny"
    budgets = TINY_BUDGETS if is_tiny else BUDGETS
    dtype = torch.bfloat16 if flags.device.startswith("cuda") else torch.float32
    torch.manual_seed(flags.seed)
    params = qwen3_vl.init_params(config, seed=flags.seed, device=flags.device, dtype=dtype)
    most = MOST_IMAGES * budgets[-1] * qwen3_vl.MERGE**2
    memory = torch.randn(most, config.patch_dim, device=flags.device)
    model = qwen3_vl.encoder(config, max_tokens=budgets[-1], max_frames=16)
    side = config.patch_size * qwen3_vl.MERGE
    pixels = TINY_PIXELS if is_tiny else PIXELS
    return Tower(config, params, model, budgets, memory, pixels, side)


def named(level: str, budgets: str) -> str:
    """What a way is called."""
    return f"FULL-{level}" + ("" if budgets == "asked" else f", {budgets}")


def way_of(tower: Tower, level: str, flags: argparse.Namespace, **asked: Any) -> Any:
    """A captured encoder at a level, as `asked` of `graphify_encoder`."""
    backends = {} if flags.backend is None else {"varlen_attention": flags.backend}
    widest = max(math.prod(tower.memory.shape[:1]) // qwen3_vl.MERGE**2, tower.budgets[-1])
    encoder = fg.graphify_encoder(
        tower.model, tower.params, max_frames=16,
        eager_tokens=widest, compile="none" if level == "fused" else level,
        passes="all" if level == "fused" else None, backends=backends, log_every=0, **asked,
    )  # fmt: skip
    return encoder.capture()
