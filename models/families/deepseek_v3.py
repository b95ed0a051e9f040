"""DeepSeek-V3 as pure functions: V2 with experts that are chosen by a sigmoid and a bias.

Its module for the token after next is not read. Shape letters as in
`fngraph.models.families.deepseek_v2`.

Source: DeepSeek-V3, 2024, section 2.1.2.
"""

from __future__ import annotations

import functools

from fngraph.models.families import deepseek_v2
from fngraph.models.families.deepseek_v2 import (
    Batch as Batch,
    Config as Config,
    Params as Params,
    blank as blank,
    forward as forward,
    init_cache as init_cache,
    init_params as init_params,
    read_fields,
    read_groups,
    specs as specs,
)
from fngraph.models.weights import loading


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json.

    Raises:
        ValueError: numbers that cannot be.
    """
    groups = read_groups(raw, raw.get("n_group", 8), raw.get("topk_group", 4), least=2)
    return Config(
        **read_fields(raw, num_dense=3), num_groups=groups[0], num_chosen_groups=groups[1],
        corrected=True, normalized=raw.get("norm_topk_prob", True),
    )  # fmt: skip


FORMAT = deepseek_v2.FORMAT._replace(
    read=read_config,
    only={
        "hidden_act": "silu", "rope_interleave": True, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "moe_layer_freq": 1,
    },
    skipped=(*deepseek_v2.FORMAT.skipped, "model.layers.61.*"),
    harmless=("head_dim", "qk_head_dim", "ep_size", "num_nextn_predict_layers", "num_mtp_layers"),
)  # fmt: skip
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype, mesh -> config, params
