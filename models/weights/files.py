"""The safetensors of a folder: which file holds which tensor, and what is in it, whole or in part.

A part is read out of a file that is opened for it and closed behind it, so that no more of the file
stays in memory than what is being copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fngraph.models.weights.configs import CheckpointError, read_json
from fngraph.models.weights.splits import Block


class Stored(NamedTuple):
    """A tensor in a file that is open, and its name there."""

    path: Path
    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Read without the tensor."""
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def kind(self) -> str:
        """Its dtype, as safetensors calls it."""
        kind: str = self.file.get_slice(self.name).get_dtype()
        return kind

    def whole(self) -> Tensor:
        """All of it, on the CPU."""
        made: Tensor = self.file.get_tensor(self.name)
        return made

    def copy_part(self, block: Block, to: Tensor) -> None:
        """Copy a part, a slice for each dim, into a tensor of its shape."""
        with safe_open(self.path, framework="pt") as file:
            to.copy_(file.get_slice(self.name)[block] if block else file.get_tensor(self.name))


def open_tensors(folder: Path, stack: ExitStack) -> dict[str, Stored]:
    """Each tensor of a folder, in a file that is open.

    Raises:
        CheckpointError: no safetensors, a file that cannot be read, or an index of no files.
    """
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        files = read_json(folder, index.name).get("weight_map")
        if not (isinstance(files, dict) and all(isinstance(n, str) for n in files.values())):
            raise CheckpointError(f"{index} has no weight_map, from tensors to files")
        if not (folder / "model.safetensors").exists():  # or the index is left over
            names = set(files.values())
    found: dict[str, Stored] = {}
    for name in sorted(names):
        path = folder / name
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        found |= {n: Stored(path, file, n) for n in file.keys()}
    return found


def renamed(files: Mapping[str, Stored], patterns: Iterable[tuple[str, str]]) -> dict[str, Stored]:
    """Where each tensor is, by the name that a `Format` knows it by; see `Format.renamed`."""
    found = dict(files)
    for n in files:
        new = n
        for pattern, instead in patterns:
            new = re.sub(pattern, instead, new)
        if new not in found:
            found[new] = found.pop(n)
    return found
