"""JSON that others write: what is read of it is noted, and what is left over has to say nothing.

A key that nobody here reads may turn the model into another one. So it is refused, unless its value
is empty or it is known to change nothing in what is computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_type_hints

Raw = Mapping[str, Any]  # what a JSON file says


class CheckpointError(ValueError):
    """A checkpoint that is none, or whose tensors do not fit its config."""


HARMLESS = (  # in a config.json: where it comes from, how it was trained, how text is drawn
    "architectures", "auto_map", "model_type", "tokenizer_class", "transformers_version",
    "*name_or_path", "_commit_hash", "unsloth_*", "*dtype", "*attn_implementation*",
    "use_cache", "return_dict", "output_*", "problem_type", "id2label", "label2id",
    "task_specific_params", "chunk_size_feed_forward", "pretraining_tp",
    "sliding_window", "max_window_layers",  # where use_sliding_window and layer_types have none
    "initializer_*", "*dropout*", "*aux_loss*", "seq_aux", "*_token_id",
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "max_length", "num_beams",
    "num_beam_groups", "num_return_sequences", "length_penalty", "repetition_penalty",
)  # fmt: skip


class Said(Mapping[str, Any]):
    """What a JSON file says, and which of its keys have been asked for."""

    def __init__(self, raw: Raw) -> None:
        self._raw, self._asked = raw, set[str]()

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return self._raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def leftovers(self, harmless: Iterable[str]) -> dict[str, Any]:
        """The keys that nobody has asked for and that say something, with their values.

        Args:
            harmless: patterns of keys that change nothing.
        """
        patterns = tuple(harmless)
        return {
            key: value
            for key, value in self._raw.items()
            if key not in self._asked and value not in (None, False, 0, "", [], {})
            if not matches(key, patterns)
        }


@contextmanager
def part_of(raw: Raw, key: str, only: Raw, harmless: Iterable[str] = ()) -> Iterator[Said]:
    """The config inside of another one, as a `vision_config` is, held to the same rules.

    Args:
        only: what can be run no other way, by key.
        harmless: patterns of keys that change nothing, beside `HARMLESS`.

    Raises:
        ValueError: another value than that of `only`, or a key that nobody has asked for.
    """
    said = Said(raw[key])
    wrong = [
        f"  {name} is {said[name]!r}, only {value!r} can be run"
        for name, value in only.items()
        if name in said and said[name] != value
    ]
    if not wrong:
        yield said
        wrong = unknown(said.leftovers((*HARMLESS, *harmless)))
    if wrong:
        raise ValueError(f"in its {key}:\n" + "\n".join(wrong))


def unknown(leftovers: Raw) -> list[str]:
    """A line for each key that is left over."""
    return [
        f"  {key} is {value!r}, which is not known here. Take it out if it changes nothing"
        for key, value in leftovers.items()
    ]


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


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether any pattern fits."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def read_json(
    folder: Path, name: str = "config.json",
    saved: str = "a folder as transformers' save_pretrained writes it",
) -> dict[str, Any]:  # fmt: skip
    """A JSON file of a folder.

    Args:
        saved: what folder to pass, where it cannot be read.

    Raises:
        CheckpointError: it is not there, or no JSON object in UTF-8.
    """
    try:
        raw = json.loads((folder / name).read_text("utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"a {type(raw).__name__} where an object should be")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / name}: {error}. Pass {saved}") from None
    return raw
