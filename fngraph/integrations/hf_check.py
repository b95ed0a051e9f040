"""A model's step against the model itself, on two small requests, before anything is captured.

A flattened row of requests is right only if nothing but attention looks from one token to another,
and nothing but `position_ids` says where a token is. No trace can tell; this can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fngraph.core import Limits
from fngraph.errors import ModelError
from fngraph.integrations.hf_attention import Layer
from fngraph.integrations.hf_forward import Batch, Forward, init_cache
from fngraph.integrations.serving import advance, lay_out, schedule, start

LIMITS = Limits(4, 2, B=1)  # so that a prompt of 6 comes in two chunks, the second beside a decode


@torch.no_grad()
def check_step(
    model: Any, forward: Forward, params: dict[str, Tensor], layers: list[Layer]
) -> None:
    """Raise unless the logits of the step are those of the model, each request alone.

    Raises:
        ModelError: with the relative error.
    """
    device, vocab = model.device, model.config.get_text_config().vocab_size
    prompts = [[(7 * i + 3) % vocab for i in range(2)], [(11 * i + 5) % vocab for i in range(6)]]
    state = start(prompts, 2, LIMITS, num_blocks=2, block_size=8)
    cache = init_cache(layers, num_blocks=2, block_size=8, device=device)
    with _eager(model):
        alone = {
            i: model(torch.tensor([p], device=device), use_cache=False).logits[0, -1]
            for i, p in enumerate(prompts)
        }
    worst = 0.0
    while state.live:
        state, rows = schedule(state, LIMITS)
        fields = lay_out(rows, LIMITS, state.block_size)
        placed: dict[str, Any] = {
            n: x.to(device) if isinstance(x, Tensor) else x for n, x in fields.items()
        }
        logits_RV, cache = forward(params, cache, Batch(**placed))
        for (request, num_new), got in zip(rows, logits_RV):
            if request.computed + num_new == request.prompt_len:
                want = alone[request.id]
                worst = max(worst, float((got - want).norm() / want.norm().clamp(min=1e-6)))
        state = advance(state, rows, logits_RV.argmax(-1).tolist())
    tolerance = 1e-3 if next(iter(alone.values())).dtype in (torch.float32, torch.float64) else 0.1
    if not worst <= tolerance:
        raise ModelError(
            f"{type(model).__name__} gives other logits for a request beside another one than "
            f"alone (relative error {worst:.2g}): a part of it other than attention looks from one "
            "token to another, or goes by something other than position_ids. If that is as it "
            "should be, pass check=False"
        )


@contextlib.contextmanager
def _eager(model: Any) -> Iterator[None]:
    """With transformers' plainest attention: its sdpa leaves out soft caps."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        yield
    finally:
        model.set_attn_implementation(before)
