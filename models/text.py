"""Text to tokens and back: bytes, or the tokenizer.json of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fngraph.models.weights.loading import CheckpointError, read_json

Decode = Callable[[Sequence[int]], str]


class Text(NamedTuple):
    """How a model reads and writes.

    Attributes:
        encode: text to tokens, with what the model wants in front.
        decode: tokens to text, all of them.
        stops: tokens that end a text.
    """

    encode: Callable[[str], tuple[int, ...]]
    decode: Decode
    stops: frozenset[int] = frozenset()


def to_tokens(text: str) -> tuple[int, ...]:
    """UTF-8 bytes."""
    return tuple(text.encode("utf-8"))


def to_text(tokens: Sequence[int]) -> str:
    """What the bytes read as; a broken character shows as one replacement mark."""
    return bytes(tokens).decode("utf-8", errors="replace")


BYTE_TEXT = Text(to_tokens, to_text)


def read_text(folder: str | Path) -> Text:
    """The tokenizer of a folder.

    Raises:
        CheckpointError: no tokenizer.json, or one that cannot be read.
    """
    from tokenizers import Tokenizer  # here: training and the demo go without it

    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no tokenizer.json. Write one with transformers: "
            f"AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # whatever the package raises is a plain Exception
        raise CheckpointError(f"{path}: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return Text(
        lambda text: tuple(tokenizer.encode(text).ids),
        lambda tokens: str(tokenizer.decode(list(tokens))),
        frozenset(_stops(folder)),
    )


def _stops(folder: Path) -> list[int]:
    """`eos_token_id`, of generation_config.json where there is one."""
    name = "generation_config.json"
    found = read_json(folder, name if (folder / name).exists() else "config.json")
    ends = found.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
