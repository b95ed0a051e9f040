"""A model small enough for hundreds of steps, wild enough that its greedy text keeps changing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import pytest
import torch

from fngraph.models import Event, gather, llama, naming

DEVICES = [
    pytest.param("cpu", "tape", id="tape"),
    pytest.param("cuda", "cuda", id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="session")
def config() -> llama.Config:
    """Three query heads a kv head, an odd head dim of pairs, an untied head."""
    return llama.Config(
        vocab_size=256, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=12, dim=32, mlp_dim=48
    )


@pytest.fixture(scope="session")
def params(config: llama.Config) -> llama.Params:
    """See `wide_params`."""
    return wide_params(config)


def wide_params(config: llama.Config, *, seed: int = 3, device: str = "cpu") -> llama.Params:
    """Matrices ten times as wide as `init_params` makes them, norms between 0.5 and 1.5."""
    generator = torch.Generator().manual_seed(seed)

    def widen(_: str, weight: torch.Tensor) -> torch.Tensor:
        vector = torch.rand(weight.shape, generator=generator) + 0.5
        return (weight * 10 if weight.ndim == 2 else vector).to(device)

    return naming.replaced(llama.init_params(config, seed=seed), widen)


def gathered(events: Iterable[Event]) -> dict[int, tuple[int, ...]]:
    """`gather`, which is to warn where a request failed, and of nothing else."""
    found = list(events)
    failed = any(event.failed for event in found)
    with pytest.warns(UserWarning, match="failed") if failed else contextlib.nullcontext():
        return gather(found)


@pytest.fixture(autouse=True, scope="module")
def small_and_quiet(one_thread: None):
    """No gradients, and one thread."""
    with torch.no_grad():
        yield
