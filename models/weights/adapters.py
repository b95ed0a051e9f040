"""An adapter from a folder that PEFT saved: adapter_config.json, adapter_model.safetensors.

    step.load_slot(3, adapters=load_adapter(folder, adapters, llama.FORMAT.names))

Source: the layout is PEFT's; a projection's update is (alpha / r) B A, or alpha / sqrt(r) under
rsLoRA, with the alpha of its own that `alpha_pattern` may give it. The scale goes into B here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import fngraph as fg
from fngraph.models.families.lora import Adapters, LowRank, filled_slot
from fngraph.models.weights.configs import CheckpointError, Said, read_json
from fngraph.models.weights.sharding import Share, share_of
from fngraph.models.weights.splits import Specs

ONLY: dict[str, tuple[Any, ...]] = {  # what the update above is right for
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "lora_bias": (False,),
    "fan_in_fan_out": (False,), "modules_to_save": (None, []),
}  # fmt: skip
HARMLESS = (  # where it comes from, how it began and was trained; ranks are those of the tensors
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type",
    "peft_version", "r", "rank_pattern", "lora_dropout", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "eva_config",
    "corda_config", "loftq_config", "lora_ga_config", "runtime_config",
)  # fmt: skip
SAVED = "a folder as PEFT's save_pretrained writes it"
CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")  # inits that change base weights
TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


def load_adapter(
    folder: str | Path, adapters: Adapters, names: Mapping[str, str], *, share: Share | None = None
) -> Any:
    """The adapter as a slot of `adapters`, for `step.load_slot`.

    Args:
        names: of the family's `FORMAT`, what the files call each weight, by our name of it.
        share: what this process has of the model, where `adapters` are slots over a part of it:
            `sharding.share_of(config, specs, mesh)`, of the whole model's config.

    Raises:
        CheckpointError: no such files, or none that can be read; or all that is wrong in them, a
            line each: options that are not computed or not known here, tensors that are missing,
            unknown, or do not fit the slots.
        TypeError: `adapters` or `names` are something else.
    """
    check_arguments(adapters, names)
    config = Said(read_json(Path(folder), "adapter_config.json", SAVED))
    tensors = read_tensors(Path(folder))
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
    alpha: Any = config.get("lora_alpha")
    rslora = config.get("use_rslora")
    alphas = config.get("alpha_pattern") or {}
    wrong_alpha = wrong_alphas(alpha, alphas)
    wrong += wrong_alpha
    wrong += [
        f"adapter_config.json: {key}={value!r} is not supported"
        for key, value in config.leftovers(HARMLESS).items()
    ]
    halves, modules, unknown = places(tensors, names)
    wrong += [f"{name}: unknown" for name in unknown]
    if unknown:
        known = {theirs.split(".")[-2] for n, theirs in names.items() if n.startswith("layers.")}
        wrong.append(f"known are lora_A and lora_B of {', '.join(sorted(known))}")
    pairs: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    for (layer, name), found in halves.items():
        if found.keys() != {"A", "B"}:
            wrong.append(f"layers.{layer}.{name}: lora_{'BA'['B' in found]} is missing")
        elif found["A"].dim() != 2 or found["B"].dim() != 2 or not len(found["A"]):
            got = f"{list(found['A'].shape)} and {list(found['B'].shape)}"
            wrong.append(f"layers.{layer}.{name}: A and B are {got}, not (r, in) and (out, r)")
        elif not wrong_alpha:
            rank = len(found["A"]) ** (0.5 if rslora else 1)
            scale = alpha_of(modules[layer, name], alphas, alpha) / rank
            pairs[layer, name] = found["A"], found["B"].T * scale
    own = pairs if share is None else {at: own_pair(share, at, *pair) for at, pair in pairs.items()}
    slot, misfits = filled_slot(adapters, own)
    if wrong := wrong + misfits:
        raise CheckpointError(f"{folder} cannot be loaded:\n" + "\n".join(wrong))
    return slot


def own_pair(share: Share, at: tuple[int, str], a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Of A (r, I) and B (r, O) of a layer's weight (O, I), what goes with this process's part."""
    name, shape = f"layers.{at[0]}.{at[1]}", (b.shape[1], a.shape[1])
    try:
        return share.columns(name, shape, 1, a), share.columns(name, shape, 0, b)
    except fg.errors.RankError:  # of another model: what fits it is said with all that does not
        return a, b


def shard_adapters(adapters: Any, config: Any, specs: Specs, mesh: fg.Mesh) -> Any:
    """This process's part of slots or of one slot, for params that `shard` has split.

    Args:
        config, specs: of the whole model.

    Raises:
        fg.errors.RankError: a mesh that the model cannot be split over.
    """
    share = share_of(config, specs, mesh)

    def part(name: str, pair: LowRank) -> LowRank:
        rows, columns = share.parts(name, (pair.b.shape[-1], pair.a.shape[-1]))
        return LowRank(_taken(pair.a, columns.ranges), _taken(pair.b, rows.ranges))

    return tuple(
        {name: part(f"layers.{i}.{name}", pair) for name, pair in own.items()}
        for i, own in enumerate(adapters)
    )


def _taken(x: Tensor, ranges: Sequence[range]) -> Tensor:
    """These of the last dim."""
    return torch.cat([x[..., one.start : one.stop] for one in ranges], -1)


def check_arguments(adapters: Any, names: Any) -> None:
    """Refuse what are no slots, or no names.

    Raises:
        TypeError: with what to pass.
    """
    if not isinstance(names, Mapping) or "embed" not in names:
        raise TypeError(
            f"names is a {type(names).__name__}: pass what the family's files call each weight, "
            "llama.FORMAT.names"
        )
    if not isinstance(adapters, tuple) or not all(isinstance(own, Mapping) for own in adapters):
        raise TypeError(
            f"adapters is a {type(adapters).__name__}: pass the slots that the step has, "
            "lora.slots(params, count=8, rank=16)"
        )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter.

    Raises:
        CheckpointError: no safetensors, or some that cannot be read.
    """
    path = folder / "adapter_model.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        fix = f"Pass {SAVED}"
        if (folder / "adapter_model.bin").exists():
            fix = (
                "There is adapter_model.bin, a pickle: load it with PEFT and save it again, "
                "model.save_pretrained(folder)"
            )
        raise CheckpointError(f"{path}: {error}. {fix}") from None


def wrong_alphas(alpha: Any, alphas: Any) -> list[str]:
    """A line for each alpha that is none."""
    number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)  # noqa: E731
    where = "adapter_config.json: "
    wrong = [] if number(alpha) else [f"{where}lora_alpha is {alpha!r}, not a number"]
    if not isinstance(alphas, Mapping):
        return [*wrong, f"{where}alpha_pattern is {alphas!r}, not alphas by module"]
    for key, value in alphas.items():
        try:
            re.compile(key)
        except re.error as error:
            wrong.append(f"{where}alpha_pattern has {key!r}, no regular expression: {error}")
        if not number(value):
            wrong.append(f"{where}alpha_pattern of {key!r} is {value!r}, not a number")
    return wrong


def alpha_of(module: str, alphas: Mapping[str, float], other: float) -> float:
    """The alpha of a module: that of the first pattern that its name ends in, as PEFT has it."""
    found = (a for key, a in alphas.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, other)


def places(
    tensors: Mapping[str, Tensor], names: Mapping[str, str]
) -> tuple[dict[tuple[int, str], dict[str, Tensor]], dict[tuple[int, str], str], Iterable[str]]:
    """The halves A and B by layer and our name of the weight, and their modules' own names; and
    the names of no weight."""
    ours = [
        (re.compile(re.escape(theirs.removesuffix(".weight")).replace(r"\*", r"(\d+)")), name)
        for name, theirs in names.items()
        if name.startswith("layers.*.")
    ]
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    modules: dict[tuple[int, str], str] = {}
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
        modules[place] = module
    return halves, modules, unknown
