"""Qwen2 as pure functions: Llama with biases on queries, keys and values, and windows where asked.

Shape letters as in `fngraph.models.families.llama`.
"""

from __future__ import annotations

import functools
from typing import Any

from fngraph.models.families import llama
from fngraph.models.families.llama import (
    Batch as Batch,
    Config as Config,
    Params as Params,
    blank as blank,
    forward as forward,
    init_cache as init_cache,
    init_params as init_params,
    specs as specs,
)
from fngraph.models.weights import loading


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json."""
    fields = llama.read_fields(raw, num_kv_heads=32) | {"qkv_bias": True, "out_bias": False}
    return Config(**fields, **windows_of(raw))


def windows_of(raw: loading.Raw) -> dict[str, Any]:
    """Windows as Qwen2 and Qwen3 say them: by layer, or in all from `max_window_layers` on.

    Raises:
        ValueError: a layer with a window, and no size of one.
    """
    first = raw.get("max_window_layers", 28)
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    kinds = raw.get("layer_types")
    if not kinds and window is not None:
        sliding = [i >= first for i in range(raw["num_hidden_layers"])]
        kinds = ["sliding_attention" if one else "full_attention" for one in sliding]
    return llama.read_windows(kinds or (), window)


FORMAT = llama.FORMAT._replace(
    read=read_config, only={"hidden_act": "silu"}, layers=("full_attention", "sliding_attention")
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype, mesh -> config, params
