"""Mistral as pure functions: Llama with a window in every layer, or in none.

Shape letters as in `fngraph.models.families.llama`.
"""

from __future__ import annotations

import functools

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
    """The config of a config.json.

    Raises:
        ValueError: numbers that cannot be, of which `sliding_window` may be null.
    """
    window = raw.get("sliding_window", 4096)
    kinds = ["full_attention" if window is None else "sliding_attention"]
    fields = llama.read_fields(raw, num_kv_heads=8)
    layers = fields["num_layers"] if isinstance(fields["num_layers"], int) else 0  # else: misfits
    return Config(**fields, **llama.read_windows(kinds * layers, window))


FORMAT = llama.FORMAT._replace(
    read=read_config,
    only={"hidden_act": "silu", "attention_bias": False, "layer_types": None},
    layers=("full_attention", "sliding_attention"),
)
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype, mesh -> config, params
