"""One file per model: weights as safetensors, their config as JSON in its metadata."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fngraph.models.families import llama, rope
from fngraph.models.weights import naming
from fngraph.models.weights.loading import CheckpointError, mismatches

BYTES = Path(__file__).parent.parent / "checkpoints" / "bytes.safetensors"


def save_checkpoint(path: Path, config: llama.Config, named: Mapping[str, Tensor]) -> None:
    """Write weights by name, in the dtype that they have, with `config`."""
    said, scaling = dataclasses.asdict(config), config.rope_scaling
    if scaling is not None:
        said["rope_scaling"] = {"kind": type(scaling).__name__, **scaling._asdict()}
    metadata = {"config": json.dumps(said)}
    write_whole(path, save({n: w.detach().cpu().contiguous() for n, w in named.items()}, metadata))


def write_whole(path: Path, raw: bytes) -> None:
    """Write a file, so that whenever this is cut short there is the old one or the new one.

    On the disk before it has its name, and the name before this returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_checkpoint(
    path: Path = BYTES,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[llama.Config, llama.Params]:
    """The config and the weights of a file, stored in bfloat16 and widened to `dtype`.

    Raises:
        CheckpointError: no such file, no config in it, or tensors missing, extra or misshapen;
            all of them are listed.
        TypeError: a dtype that weights cannot have.
    """
    naming.check_dtype(dtype)
    try:
        with safe_open(path, framework="pt") as file:
            described = (file.metadata() or {}).get("config")
            named = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        if Path(path).exists():  # and is not to be written over
            raise CheckpointError(f"{path} is no safetensors file: {error}") from None
        raise CheckpointError(
            f"{path}: there is no such file. Make one with: "
            f"python -m fngraph.models.train --out {path}"
        ) from None
    if described is None:
        raise CheckpointError(
            f"{path} has no config in its metadata, so it was not written by save_checkpoint"
        )
    config = _config_of(json.loads(described))
    blank, found = llama.blank(config), {n: tuple(w.shape) for n, w in named.items()}
    if wrong := mismatches(naming.shapes(blank), found):
        raise CheckpointError(f"{path} does not fit its config:\n" + "\n".join(wrong))
    return config, naming.replaced(blank, lambda n, _: named[n].to(device=device, dtype=dtype))


def _config_of(raw: Mapping[str, Any]) -> llama.Config:
    fields = _tuples(raw)
    if scaling := fields.get("rope_scaling"):
        kinds = {kind.__name__: kind for kind in get_args(rope.Scaling)}
        fields["rope_scaling"] = kinds[scaling.pop("kind")](**_tuples(scaling))
    return llama.Config(**fields)


def _tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {name: tuple(x) if isinstance(x, list) else x for name, x in raw.items()}
