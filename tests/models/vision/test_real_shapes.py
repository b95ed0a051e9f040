"""Vision encoders at their published sizes, in bfloat16 with random weights: graphs as eager.

On a GPU; the same code runs on the CPU with narrower models. In bfloat16 sums in another order are
other numbers: padding makes another product of the same rows. So what is held to is the norm of the
difference, `WITHIN` of the rows' own, and that rows of another picture are far beyond that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import test_deepseek_ocr
import test_step3_vl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fngraph as fg
from fngraph.models import naming
from fngraph.models.vision import deepseek_ocr, grids, kimi_vl, pages, qwen3_vl, step3_vl

WITHIN = 0.05  # of the norm: up to 63 layers, each of which rounds to 8 bits; 27 are off by 0.01
MOST = 20 << 30  # bytes of the device, in all

QWEN = qwen3_vl.Config(  # that of Qwen3-VL-8B
    num_layers=27, num_heads=16, dim=1152, mlp_dim=4304, out_dim=4096, patch_size=16, frames=2,
    channels=3, side=48, deepstack=(8, 16, 24),
)  # fmt: skip
THIN = {"num_layers": 2, "num_heads": 2, "dim": 32, "mlp_dim": 48, "out_dim": 24}


class Real(NamedTuple):
    """A family, its config as published and a narrower one, and budgets that two items share."""

    family: Any
    published: Any
    narrow: Any
    budgets: Any


def units(config: Any) -> dict[str, tuple[int, ...]]:
    """Budgets of one and two views, and of two and six crops."""
    sizes = config.sizes
    view, crop = sizes.view_tokens, sizes.crop_tokens
    return {"global": (view, 2 * view), "local": (2 * crop, 6 * crop)}


REAL = {
    "qwen": Real(
        qwen3_vl, QWEN, dataclasses.replace(QWEN, **THIN, deepstack=(0,)), lambda c: (512, 1024)
    ),
    "kimi": Real(
        kimi_vl, kimi_vl.Config(), dataclasses.replace(kimi_vl.Config(), **THIN),
        lambda c: (512, 1024),
    ),
    "ocr": Real(deepseek_ocr, deepseek_ocr.Config(), test_deepseek_ocr.CONFIG, units),
    "step3": Real(step3_vl, step3_vl.Config(), test_step3_vl.CONFIG, units),
}  # fmt: skip


def drawn(shape: Any, device: str, seed: int) -> Tensor:
    """Where they are needed: billions of numbers take a minute on the host."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


def weights(family: Any, config: Any, device: str) -> Any:
    """Random ones that keep a row's size: matrices by their columns, vectors about 1 or 0."""
    seeds = iter(range(10_000))

    def draw(name: str, x: Tensor) -> Tensor:
        if x.ndim == 1:
            made = drawn(x.shape, device, next(seeds)) * 0.1 + (not name.endswith("bias"))
        else:
            made = drawn(x.shape, device, next(seeds)) * x[0].numel() ** -0.5
        return made.bfloat16()

    return naming.replaced(family.blank(config), draw)


def items_of(name: str, config: Any) -> list[Any]:
    """Pictures of sizes that people send, a video if there may be; pages with crops and none."""
    if name in ("qwen", "kimi"):
        sizes = [(1, 28, 38), (1, 12, 20), (3 if name == "qwen" else 1, 16, 24)]
        return [
            grids.Picture(
                drawn((t * h * w, config.patch_dim), "cpu", i), (t, h, w),
                "video" if t > 1 else "image",
            )
            for i, (t, h, w) in enumerate(sizes)
        ]  # fmt: skip
    V, C = config.view, config.crop
    return [
        pages.Page(drawn((3, V, V), "cpu", n), drawn((a * b, 3, C, C), "cpu", n + 9), (a, b))
        for n, (a, b) in enumerate([(2, 1), (0, 0), (1, 3)])
    ]


def bare(model: Any, params: Any, item: Any, device: str) -> Any:
    """An item's output, eagerly and alone."""
    rows = {}
    for path, tokens in model.measured(item).tokens.items():
        if tokens:
            batch = model.collate(path, [item])
            batch = fg.core.trees.map_leaves(lambda x: x.to(device), batch)
            rows[path] = model.paths[path].forward(params, batch)
    return model.postprocess(rows, item)


def off(got: Tensor, want: Tensor) -> float:
    """The norm of the difference, of the rows' own."""
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Its memory is given back, and counted."""
    if request.param == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield request.param
    if request.param == "cuda":
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        assert peak < MOST


def rows_are_apart() -> bool:
    """Whether a NaN stays in its row of a product on this processor. With AMX oneDNN reads rows of
    bfloat16, whose depth is no multiple of 32, up to one, on into the next row, and multiplies what
    it finds there by 0."""
    x, weight = torch.ones(64, 588, dtype=torch.bfloat16), torch.ones(64, 588, dtype=torch.bfloat16)
    x[1:] = float("nan")
    return bool((x @ weight.t())[0].isfinite().all())


@pytest.mark.sampled("cpu-step3")
@pytest.mark.parametrize("name", REAL)
def test_graphs_are_as_eager(name: str, device: str):
    family, published, narrow, budgets = REAL[name]
    config = published if device == "cuda" else narrow
    params = weights(family, config, device)
    kept = (params,) if name == "ocr" else ()
    model = family.encoder(config, *kept, max_tokens=1 << 12)
    encode = fg.graphify_encoder(
        model, params, budgets=budgets(config), max_items=4, defer=False,
        guards=device == "cuda" or rows_are_apart(), recorder="tape" if device == "cpu" else "cuda",
    )  # fmt: skip
    items = items_of(name, config)
    wants = [bare(model, params, item, device) for item in items]
    assert any(len(run.items) > 1 for run in encode.pack(items).runs)
    for call in ([0, 1, 2], [1], [2, 0]):
        for i, got in zip(call, encode([items[j] for j in call]), strict=True):
            for x, want in zip(tree_leaves(got), tree_leaves(wants[i]), strict=True):
                assert x.dtype is torch.bfloat16 and x.shape == want.shape
                assert x.isfinite().all() and off(x, want) < WITHIN
                assert off(x.flip(0), want) > 5 * WITHIN, "or any rows would do"
    assert not encode.stats.misses()
    for step in encode.steps.values():
        assert step.stats.share("FULL") == 1
    encode.sleep()
