"""config.json of a Hugging Face folder: read, and judged by the types of a family's config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

Raw = Mapping[str, Any]


class CheckpointError(ValueError):
    """A checkpoint that is none, or whose tensors do not fit its config."""


def read_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A JSON file of a folder.

    Raises:
        CheckpointError: it is not there, or no JSON object in UTF-8.
    """
    try:
        raw = json.loads((folder / name).read_text("utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"a {type(raw).__name__} where an object should be")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / name}: {error}. Pass a folder as transformers' save_pretrained writes it"
        ) from None
    return raw


def misfits(config: Any, path: str = "") -> list[str]:
    """A line for each field of a config, and of its scaling, whose value is not of its type."""
    lines = []
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if hasattr(value, "_fields"):
            lines += misfits(value, f"{path}{name}.")
        elif hint is bool and not isinstance(value, bool):
            lines.append(f"  {path}{name} is {value!r}, not true or false")
        elif hint is float and not number:
            lines.append(f"  {path}{name} is {value!r}, not a number")
        elif hint is int and not (number and isinstance(value, int) and value >= 0):
            lines.append(f"  {path}{name} is {value!r}, not a whole number")
    return lines
