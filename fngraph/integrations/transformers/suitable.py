"""Which models of transformers can become a step over a paged cache, and where the others go.

What only a trace can tell is left to the trace.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from fngraph.core import Limits
from fngraph.errors import ModelError

WHOLE = (
    "fg.from_module(model) makes a function of it that runs whole inputs, without a cache: see "
    "docs/transformers.md"
)
NATIVE = ("mamba2", "qwen3_next")
"""Of `model_type`: those with states that are modules of `fngraph.models`."""
TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
"""Last names of embeddings of positions."""
OFFSET = 2
"""Rows that such a table may have in front, as OPT's; one of a picture's positions is shorter."""


def refuse_unsuitable(model: Any) -> None:
    """Raise unless `model` may become a step.

    Raises:
        ModelError: says what it is, and what to do.
    """
    name, is_module = type(model).__name__, isinstance(model, nn.Module)
    if not is_module or not hasattr(model, "set_attn_implementation"):
        told = "Load one: AutoModelForCausalLM.from_pretrained(...)"
        if is_module:
            told += f". Of another module {WHOLE}"
        raise ModelError(f"{name} is no causal LM of transformers. {told}")
    if what := _other_kind(model):
        raise ModelError(f"{name} is {what}")
    takes = inspect.signature(model.forward).parameters
    missing = [n for n in ("input_ids", "position_ids", "logits_to_keep") if n not in takes]
    if missing:
        raise ModelError(
            f"{name}.forward takes no {' and no '.join(missing)}, by which a batch of several "
            "requests is told apart. It may have positions of its own, or none, as with ALiBi. "
            f"{WHOLE}, use_cache=False"
        )
    if model.training:
        raise ModelError(f"{name} is in training mode, so dropout may be on. Call model.eval()")
    if not model._can_set_attn_implementation():
        raise ModelError(
            f"the attention of {name} does not go through transformers' AttentionInterface, so it "
            "cannot be led to a paged cache"
        )
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{name} has layers of another kind ({', '.join(sorted(other))}), whose state a paged "
            f"cache does not hold. {_instead(model)}"
        )
    if getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{name} has layers of another kind (recurrent), whose state a paged cache does not "
            f"hold. {_instead(model)}"
        )


def _other_kind(model: Any) -> str:
    """What a model is, and where it goes; "": a causal LM, as far as can be seen from outside."""
    if getattr(model.config, "is_encoder_decoder", False):
        return (
            "an encoder and a decoder, which attends to what the encoder made; a paged cache holds "
            f"a text's own tokens. {WHOLE}, use_cache=False"
        )
    if "cache_params" in inspect.signature(model.forward).parameters:
        return f"recurrent: it keeps a state, and no keys and values to page. {_instead(model)}"
    if not model.can_generate():
        return (
            "no causal LM, as it has no head that writes text. If there is one, load it with "
            f"AutoModelForCausalLM.from_pretrained(...); else, as of an encoder, {WHOLE}"
        )
    return ""


def _instead(model: Any) -> str:
    """Where a model goes that keeps states."""
    kind = getattr(model.config, "model_type", "")
    if kind in NATIVE:
        return f"fngraph.models.{kind} runs it: config, params = {kind}.load(folder)"
    return f"{WHOLE}, use_cache=False"


def refuse_long(model: Any, limits: Limits, block_size: int) -> None:
    """Raise where requests may have blocks beyond a table of positions that the model looks in.

    Raises:
        ModelError: with the B that fits.
    """
    rows = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for path, module in model.named_modules():
        if rows is None or path.rpartition(".")[2] not in TABLES:
            continue
        own = isinstance(module, nn.Embedding) and rows <= module.num_embeddings <= rows + OFFSET
        if own and limits["B"] > (fit := -(-rows // block_size)):
            raise ModelError(
                f"{type(model).__name__}.{path} is a table of {rows} positions, but Limits(B="
                f"{limits['B']}) with block_size={block_size} allows requests of "
                f"{limits['B'] * block_size} tokens, which would read beyond it. Pass "
                f"Limits(..., B={fit})"
            )
