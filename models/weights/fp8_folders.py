"""Folders whose matrices are fp8 already: what their config.json may say, and where scales are.

Those of compressed-tensors ("float-quantized") and AutoFP8 ("fp8") are read: `weight` in
float8_e4m3fn, `weight_scale` beside it for the whole or for each row, and `input_scale` where
inputs have known ones. Which weights are fp8 is told by the files. A scale that a whole batch is
said to make of itself is made by each row here, which is nearer to the numbers as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fngraph.models.weights.configs import Raw, Said, unknown
from fngraph.models.weights.fp8 import LINEAR, Fp8Weight, misfits, wrong_scale

STORED = "F8_E4M3"  # as safetensors calls it
Shape = tuple[int, ...]


class Place(NamedTuple):
    """A weight in fp8 in the files: names of its tensors; its shape, and of those beside it."""

    values: str
    shape: Shape
    scale: str
    input_scale: str | None
    beside: Mapping[str, Shape]


def places_of(
    sources: Mapping[str, Mapping[str, Shape]],
    kinds: Mapping[str, str],
    shapes: Mapping[str, Shape],
    static: bool | None,
) -> dict[str, Place]:
    """By our name, the weights that are stored in fp8 and can be run so.

    Args:
        sources: by our name, the names and shapes of the tensors that make it up.
        kinds, shapes: of the tensors in the files.
        static: whether inputs have known scales; None: config.json says nothing of fp8.
    """
    found: dict[str, Place] = {}
    for name, parts in sources.items():
        values, shape = next(iter(parts.items()))
        if static is None or len(parts) > 1 or kinds.get(values) != STORED:
            continue
        if name.rsplit(".", 1)[-1] in LINEAR and len(shape) == 2:
            stem, rows = values.removesuffix("weight"), shape[0]
            scale, by = f"{stem}weight_scale", f"{stem}input_scale" if static else None
            given = shapes.get(scale)
            beside = {scale: given if given in ((), (1,), (rows,)) else (rows, 1)}
            if by is not None:
                beside[by] = (1,) if shapes.get(by) == (1,) else ()
            found[name] = Place(values, shape, scale, by, beside)
    return found


def read_weight(
    place: Place, get: Callable[[str], Tensor], device: torch.device | str
) -> Fp8Weight:
    """The weight, of `get(name)` of the files' tensors."""
    return Fp8Weight(get(place.values).to(device), *read_scales(place, get, device))


def read_scales(
    place: Place, get: Callable[[str], Tensor], device: torch.device | str
) -> tuple[Tensor, Tensor | None]:
    """That of the weight, () or (O, 1), and that of its input, () if it is known."""
    scale = get(place.scale).to(device=device, dtype=torch.float32)
    by = None if place.input_scale is None else get(place.input_scale).to(device).float().view(())
    return scale.view(()) if scale.numel() == 1 else scale.view(-1, 1), by


def wrong_in(places: Mapping[str, Place], get: Callable[[str], Tensor]) -> list[str]:
    """A line for each weight that cannot be run, or whose scales are none."""
    wrong = []
    for place in places.values():
        wrong += misfits(place.values, place.shape)
        for name in place.beside:
            wrong += wrong_scale(name, "scale", get(name).float())
    return wrong


def is_static(said: Any) -> bool:
    """Whether inputs have known scales, by the quantization_config of a config.json.

    Raises:
        ValueError: it is of another kind; all that is wrong with it, a line each.
    """
    if not isinstance(said, Mapping):
        raise ValueError(f"  it is {said!r}, not an object")
    raw = Said(said)
    method = raw.get("quant_method")
    if method == "compressed-tensors":
        static, wrong = _compressed(raw)
    elif method == "fp8":
        static, wrong = _auto_fp8(raw)
    else:
        methods = "'compressed-tensors' and 'fp8' with a scale a tensor or a row"
        raise ValueError(f"  quant_method is {method!r}; there are {methods}")
    if raw.get("kv_cache_scheme") is not None:
        wrong.append("kv_cache_scheme: caches are not stored in fp8 by a checkpoint's scales here")
    wrong += [line.strip() for line in unknown(raw.leftovers(_HARMLESS))]
    if wrong:
        raise ValueError("\n".join(f"  {line}" for line in wrong))
    return static


_HARMLESS = ("ignore", "ignored_layers", "modules_to_not_convert", "global_compression_ratio",
             "version", "observer*", "targets", "quantization_status")  # fmt: skip
"""Which weights are quantised is told by the files; the others say how it was done."""


def _auto_fp8(raw: Said) -> tuple[bool, list[str]]:
    wrong = []
    if raw.get("weight_block_size") is not None:
        wrong.append(
            f"weight_block_size is {raw['weight_block_size']!r}: blocks with scales of their own "
            "(weight_scale_inv) cannot be run, only a scale a tensor or a row"
        )
    scheme = raw.get("activation_scheme")
    if scheme not in ("static", "dynamic"):
        wrong.append(f"activation_scheme is {scheme!r}, not 'static' or 'dynamic'")
    wrong += _other(raw, {"fmt": (None, "e4m3"), "is_checkpoint_fp8_serialized": (None, True)})
    return scheme == "static", wrong


def _compressed(raw: Said) -> tuple[bool, list[str]]:
    formats = (None, "float-quantized", "naive-quantized")
    wrong = _other(raw, {"format": formats})
    groups = [Said(group) for group in (raw.get("config_groups") or {}).values()]
    statics = set()
    for group in groups:
        wrong += _other(group, {"format": formats, "output_activations": (None,)})
        wrong += _args(group, "weights", ("tensor", "channel"), (False,))
        wrong += _args(group, "input_activations", ("tensor", "token"), (True, False))
        inputs = group.get("input_activations")
        known = isinstance(inputs, Mapping) and inputs.get("dynamic") is False
        statics.add(known)
        if known and group["input_activations"].get("strategy") == "token":
            wrong.append("input_activations: known scales are one a weight, not one a token")
        wrong += [line.strip() for line in unknown(group.leftovers(_HARMLESS))]
    if len(statics) != 1:
        wrong.append("config_groups: groups whose inputs are scaled in one way are wanted")
    return statics == {True}, wrong


def _args(group: Said, name: str, strategies: Sequence[str], dynamic: Sequence[bool]) -> list[str]:
    if not isinstance(group.get(name), Mapping):
        return [f"{name} is {group.get(name)!r}: weights and inputs are wanted in fp8, both"]
    raw = Said(group[name])
    wanted = {"num_bits": (8,), "type": ("float",), "symmetric": (True, None),
              "strategy": strategies, "dynamic": dynamic}  # fmt: skip
    wrong = _other(raw, wanted) + [line.strip() for line in unknown(raw.leftovers(_HARMLESS))]
    return [f"{name}.{line}" for line in wrong]


def _other(raw: Raw, wanted: Mapping[str, Sequence[Any]]) -> list[str]:
    return [
        f"{key} is {raw.get(key)!r}, only {' or '.join(map(repr, values))} can be run"
        for key, values in wanted.items()
        if raw.get(key) not in values
    ]
