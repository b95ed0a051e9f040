"""Models as pure functions over pytrees, and what trains, serves and shows them.

    from fngraph.models import Policy, advance, llama, make_steps, schedule, start, submit

A name comes in with what it needs when it is first asked for (PEP 562); weights need safetensors,
text needs tokenizers, serving rpds-py, what prints rich: `pip install fngraph[models]`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {  # name -> wing
    "bert": "families", "deepseek_v2": "families", "deepseek_v3": "families",
    "gemma3": "families", "llama": "families", "mamba2": "families", "mistral": "families",
    "qwen2": "families", "qwen3": "families",
    "qwen3_moe": "families", "qwen3_next": "families", "lora": "families",
    "deepseek_ocr": "vision", "kimi_vl": "vision", "qwen3_vl": "vision", "step3_vl": "vision",
    "sampling": "serving",
    "loading": "weights", "naming": "weights",
    "command": "", "demo": "", "generate": "", "pictures": "", "text": "", "train": "",
}  # fmt: skip
_EXPORTS = {  # name -> module that holds it
    # requests, and what a server is set to
    "Policy": "serving.policy", "Settings": "serving.sampling",
    "State": "serving.requests", "Event": "serving.requests",
    "start": "serving.requests", "submit": "serving.submitting", "cancel": "serving.requests",
    "forget": "serving.requests", "start_over": "serving.requests",
    "Logprob": "serving.requests",
    # the loop
    "Steps": "serving.steps", "make_steps": "serving.steps", "bare_steps": "serving.steps",
    "Drawn": "serving.logits", "on_host": "serving.logits",
    "schedule": "serving.loop", "advance": "serving.scheduling",
    "Served": "serving.loop", "serve": "serving.loop", "stream": "serving.loop",
    "gather": "serving.loop", "Tally": "serving.tally",
    # many processes
    "Ranks": "serving.ranks.circles", "make_ranks": "serving.ranks.circles",
    "over_ranks": "serving.ranks.following", "follow": "serving.ranks.following",
    "leading": "serving.ranks.following",
    "spread": "serving.ranks.spreading", "stage_of": "serving.ranks.stages",
    "stages_of": "families.decoder",
    # weights and text
    "CheckpointError": "weights.loading", "load_adapter": "weights.adapters",
    "shard": "weights.sharding", "shard_adapters": "weights.adapters",
    "load_checkpoint": "weights.checkpoint", "save_checkpoint": "weights.checkpoint",
    "Fp8Weight": "weights.fp8", "quantize_fp8": "weights.fp8",
    "BYTE_TEXT": "text", "read_text": "text",
}  # fmt: skip

if TYPE_CHECKING:
    from fngraph.models.families import (
        bert as bert,
        deepseek_v2 as deepseek_v2,
        deepseek_v3 as deepseek_v3,
        gemma3 as gemma3,
        llama as llama,
        lora as lora,
        mamba2 as mamba2,
        mistral as mistral,
        qwen2 as qwen2,
        qwen3 as qwen3,
        qwen3_moe as qwen3_moe,
        qwen3_next as qwen3_next,
    )
    from fngraph.models.families.decoder import stages_of as stages_of
    from fngraph.models.serving import sampling as sampling
    from fngraph.models.serving.logits import Drawn as Drawn, on_host as on_host
    from fngraph.models.serving.loop import (
        Served as Served,
        gather as gather,
        schedule as schedule,
        serve as serve,
        stream as stream,
    )
    from fngraph.models.serving.policy import Policy as Policy
    from fngraph.models.serving.ranks.circles import Ranks as Ranks, make_ranks as make_ranks
    from fngraph.models.serving.ranks.following import (
        follow as follow,
        leading as leading,
        over_ranks as over_ranks,
    )
    from fngraph.models.serving.ranks.spreading import spread as spread
    from fngraph.models.serving.ranks.stages import stage_of as stage_of
    from fngraph.models.serving.requests import (
        Event as Event,
        Logprob as Logprob,
        State as State,
        cancel as cancel,
        forget as forget,
        start as start,
        start_over as start_over,
    )
    from fngraph.models.serving.sampling import Settings as Settings
    from fngraph.models.serving.scheduling import advance as advance
    from fngraph.models.serving.steps import (
        Steps as Steps,
        bare_steps as bare_steps,
        make_steps as make_steps,
    )
    from fngraph.models.serving.submitting import submit as submit
    from fngraph.models.serving.tally import Tally as Tally
    from fngraph.models.text import BYTE_TEXT as BYTE_TEXT, read_text as read_text
    from fngraph.models.vision import (
        deepseek_ocr as deepseek_ocr,
        kimi_vl as kimi_vl,
        qwen3_vl as qwen3_vl,
        step3_vl as step3_vl,
    )
    from fngraph.models.weights import loading as loading, naming as naming
    from fngraph.models.weights.adapters import (
        load_adapter as load_adapter,
        shard_adapters as shard_adapters,
    )
    from fngraph.models.weights.checkpoint import (
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from fngraph.models.weights.fp8 import Fp8Weight as Fp8Weight, quantize_fp8 as quantize_fp8
    from fngraph.models.weights.loading import CheckpointError as CheckpointError
    from fngraph.models.weights.sharding import shard as shard


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = importlib.import_module(
            ".".join(filter(None, ("fngraph.models", _MODULES[name], name)))
        )
    elif name in _EXPORTS:
        value = getattr(importlib.import_module(f"fngraph.models.{_EXPORTS[name]}"), name)
    else:
        raise AttributeError(f"module 'fngraph.models' has no attribute {name!r}{_meant(name)}")
    globals()[name] = value
    return value


def _meant(name: str) -> str:
    """Which name may be meant; nothing of those that Python itself looks for."""
    if name.startswith("_"):
        return ""
    import fngraph as fg

    near = fg.core.text.did_you_mean(name, __all__)
    return f".{near}" if near else ""


def __dir__() -> list[str]:
    return __all__


__all__ = sorted([*_EXPORTS, *_MODULES])
