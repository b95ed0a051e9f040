"""Two small requests, run as one step and each alone, before anything is captured of a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fngraph.errors import ModelError
from fngraph.integrations.transformers.attention import Layer, attending_with
from fngraph.integrations.transformers.forward import Batch, Forward, init_cache
from fngraph.integrations.transformers.multimodal import batch_of
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.requests import start
from fngraph.models.serving.scheduling import advance, plan
from fngraph.models.serving.submitting import submit

CHECKED = Policy(4, 2, 1, block_size=8, share=False, reserve=0)
"""A prompt of 6 comes in two chunks, the second beside a decode."""


@torch.no_grad()
def check_step(
    model: Any, forward: Forward, params: dict[str, Tensor], layers: list[Layer],
    kind: type[Batch] = Batch,
) -> None:  # fmt: skip
    """Raise unless the logits of the step are those of the model, two small requests each alone.

    A flattened row of requests is right only if nothing but attention looks from one token to
    another, and nothing but `position_ids` says where a token is. No trace can tell; this can.

    Raises:
        ModelError: with the relative error; or the model's own logits are not finite.
    """
    device, vocab = model.device, model.config.get_text_config().vocab_size
    prompts = [[(7 * i + 3) % vocab for i in range(2)], [(11 * i + 5) % vocab for i in range(6)]]
    state = start(2, CHECKED)
    for prompt in prompts:
        state = submit(state, CHECKED, prompt, 2)
    cache = init_cache(layers, num_blocks=2, block_size=8, device=device)
    with attending_with(model, "eager"):  # their sdpa leaves out soft caps
        alone = {
            i: model(torch.tensor([p], device=device), use_cache=False).logits[0, -1]
            for i, p in enumerate(prompts)
        }
    name, errors = type(model).__name__, []
    if not all(logits.isfinite().all() for logits in alone.values()):
        raise ModelError(
            f"{name} gives logits that are not finite for a small request by itself, so there is "
            "nothing to compare with. Look for weights that are not finite, or a dtype that its "
            "numbers leave. If that is as it should be, pass check=False"
        )
    while state.live:
        state = plan(state, CHECKED)
        batch = batch_of(kind, state.rows, CHECKED)
        leaves = {n: x.to(device) for n, x in vars(batch).items() if isinstance(x, Tensor)}
        logits_RV, cache = forward(params, cache, dataclasses.replace(batch, **leaves))
        for (job, new, _), got in zip(state.rows, logits_RV):
            if job.computed + new == len(job.request.prompt):
                want = alone[job.id]
                errors.append((got - want).norm() / want.norm().clamp(min=1e-6))
        state, _ = advance(state, logits_RV.argmax(-1, keepdim=True).tolist())
    tolerance = 1e-3 if next(iter(alone.values())).dtype in (torch.float32, torch.float64) else 0.1
    worst = float(torch.stack(errors).max())  # NaN where there is one
    if not worst <= tolerance:
        raise ModelError(
            f"{name} gives other logits for a request beside another one than "
            f"alone (relative error {worst:.2g}): a part of it other than attention looks from one "
            "token to another, or goes by something other than position_ids. If that is as it "
            "should be, pass check=False"
        )
