"""What is fixed in a model of transformers for a trace.

Two things in a model ask the values in a batch how to go on, and have another way that does not:
experts (loops over those that were hit, or one batched product) and rotary embeddings that change
with the longest request (not below the length that the model was made for).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fngraph.errors import ModelError


class Fixed(NamedTuple):
    """What `fixing` sets for the duration of a call.

    Attributes:
        experts: transformers' name for a way to run experts; None: leave them.
        ropes: paths of rotary embeddings that are not to look at the batch.
    """

    experts: str | None
    ropes: Mapping[str, Any]


@contextlib.contextmanager
def fixing(model: Any, fixed: Fixed) -> Iterator[None]:
    """For the duration, `model` runs with `fixed`; it is as it was after that."""
    experts = model.get_experts_implementation() if fixed.experts else None
    kinds = {path: rope.rope_type for path, rope in fixed.ropes.items()}
    try:
        if experts:
            model.set_experts_implementation(fixed.experts)
        for rope in fixed.ropes.values():
            rope.rope_type = "default"  # asked only whether to look at the positions
        yield
    finally:
        if experts:
            model.set_experts_implementation(experts)
        for path, rope in fixed.ropes.items():
            rope.rope_type = kinds[path]


def experts_of(model: Any, wanted: str | None) -> str | None:
    """How to run the experts with shapes that do not depend on the routing; None: has none.

    "grouped_mm" where the device runs it without the host (bfloat16, from Hopper on), else
    "batched_mm", which gathers each token's experts: exact, but memory grows with tokens.
    """
    if not model._can_set_experts_implementation():
        return None
    weight = next(iter(model.parameters()))
    if wanted is None and weight.device.type == "cuda" and weight.dtype == torch.bfloat16:
        if torch.cuda.get_device_capability(weight.device) >= (9, 0):
            return "grouped_mm"
    return wanted or "batched_mm"


def scaled_ropes(model: Any, longest: int) -> dict[str, Any]:
    """Rotary embeddings that would rescale for requests that are longer than `longest`, by path.

    Raises:
        ModelError: one that would for shorter ones too.
    """
    found = {}
    for path, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if not kinds & {"dynamic", "longrope"}:
            continue
        config = module.config
        until = getattr(module, "original_max_seq_len", config.max_position_embeddings)
        if kind == "longrope":
            until = config.rope_parameters["original_max_position_embeddings"]
        if isinstance(kind, dict) or longest > until:
            raise ModelError(
                f"{type(model).__name__}.{path} rescales (rope_type={kind!r}) once any request of "
                f"a batch has more than {until} tokens: on the host, and for all of them. A graph "
                f"would freeze that. Limits and block_size allow {longest} tokens a request; allow "
                f"{until}, or use a static rope_type (linear, llama3, yarn)"
            )
        found[path] = module
    return found
