"""An adapter from a folder that PEFT saved: adapter_config.json, adapter_model.safetensors.

    step.load_slot(3, adapters=load_adapter(folder, adapters, llama.FORMAT.names))

Source: the layout is PEFT's; a projection's update is (alpha / r) B A, or alpha / sqrt(r) under
rsLoRA. The scale goes into B here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from fngraph.models.families.lora import Adapters, filled_slot

ONLY: dict[str, Any] = {  # what the update above is right for, where a config says anything
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "lora_bias": (False,),
    "fan_in_fan_out": (False,), "modules_to_save": (None, []), "alpha_pattern": (None, {}),
}  # fmt: skip
CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")  # inits that change base weights
TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


def load_adapter(folder: str | Path, adapters: Adapters, names: Mapping[str, str]) -> Any:
    """The adapter as a slot of `adapters`, for `step.load_slot`.

    Args:
        names: of the family's `FORMAT`, what the files call each weight, by our name of it.

    Raises:
        ValueError: all that is wrong, a line each: options that are not computed here, tensors
            that are missing, unknown, or do not fit the slots.
    """
    config = json.loads((Path(folder) / "adapter_config.json").read_text("utf-8"))
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    wrong = [
        f"adapter_config.json: {key}={config[key]!r} is not supported"
        for key, allowed in ONLY.items()
        if key in config and config[key] not in allowed
    ]
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGED):
        wrong.append(
            f"adapter_config.json: init_lora_weights={init!r} fits base weights that it changed; "
            "save it with save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    halves, unknown = places(tensors, names)
    wrong += [f"{name}: unknown" for name in unknown]
    pairs: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    for (layer, name), found in halves.items():
        if found.keys() != {"A", "B"}:
            wrong.append(f"layers.{layer}.{name}: lora_{'BA'['B' in found]} is missing")
            continue
        rank = len(found["A"]) ** (0.5 if config.get("use_rslora") else 1)
        pairs[layer, name] = found["A"], found["B"].T * (config["lora_alpha"] / rank)
    slot, misfits = filled_slot(adapters, pairs)
    if wrong := wrong + misfits:
        raise ValueError(f"{folder} cannot be loaded:\n" + "\n".join(wrong))
    return slot


def places(
    tensors: Mapping[str, Tensor], names: Mapping[str, str]
) -> tuple[dict[tuple[int, str], dict[str, Tensor]], Iterable[str]]:
    """The halves A and B by layer and our name of the weight; and the names of no weight."""
    ours = [
        (re.compile(re.escape(theirs.removesuffix(".weight")).replace(r"\*", r"(\d+)")), name)
        for name, theirs in names.items()
        if name.startswith("layers.*.")
    ]
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    unknown = []
    for full, tensor in tensors.items():
        found = TENSOR.fullmatch(full)
        module = found["module"] if found else ""
        hits = [(m, name) for pattern, name in ours if (m := pattern.fullmatch(module))]
        if not found or not hits:
            unknown.append(full)
            continue
        (match, name), half = hits[0], found["half"]
        place = int(match[1]), name.removeprefix("layers.*.")
        halves.setdefault(place, {})[half] = tensor
    return halves, unknown
