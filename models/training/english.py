"""English of Python itself, to train on and to hold out, and where in it each step reads.

The text is what every installation carries: language topics, docstrings and comments, about 2 MB
by the Python authors (PSF license). What counts as a sentence is decided one paragraph at a time;
code, tables and grammar are left out, and so is anything seen before.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor

HELD_OUT_EVERY = 20  # documents: a module or a topic
MAX_MODULE_BYTES = 1_000_000  # larger ones hold generated tables

# not installed everywhere, or not the library's own text
_SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip"}
_ASCII = str.maketrans(
    {"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2014": "-", "\u2026": "..."}
)
_BREAK = re.compile(r"\n\s*\n|\n(?=\s*[*-] )")  # an empty line, or the next bullet
_SENTENCE = re.compile(r"""["'`*(\[]?[A-Za-z0-9][\x20-\x7e]*[.:!?)]""")


def cut(data: Tensor, context: int) -> Tensor:
    """All of `data` as (N, S + 1) sequences, each begun by the last byte of the one before."""
    return data.unfold(0, context + 1, context)


def batch_at(data: Tensor, step: int, batch: int, context: int, seed: int) -> Tensor:
    """The sequences of one step, (N, S + 1): a pure function of the step and the seed.

    Each pass over the text begins a few bytes further on, and reads its sequences in an order of
    its own. A step may lie across two passes.
    """
    count = (len(data) - context) // context  # of a pass, wherever it begins
    places = range(step * batch, (step + 1) * batch)
    starts = [_starts(seed, place // count, count, context)[place % count] for place in places]
    offset_S = torch.arange(context + 1)
    return data[rearrange(torch.stack(starts), "n -> n 1") + offset_S]


@functools.lru_cache(2)  # a step reads of two passes at most, unless the text is short
def _starts(seed: int, turn: int, count: int, context: int) -> Tensor:
    """Where the sequences of one pass begin, in its order."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {turn}".encode()))  # 32 bits
    first = torch.randint(context, (), generator=generator)
    return first + context * torch.randperm(count, generator=generator)


def corpus() -> tuple[bytes, bytes]:
    """The text to train on and the text held out, one paragraph a line, in a fixed order."""
    seen: set[str] = set()
    parts: tuple[list[str], list[str]] = ([], [])
    for i, document in enumerate(documents()):
        fresh = [p for p in paragraphs(document) if p not in seen]
        seen.update(fresh)
        parts[i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].extend(dict.fromkeys(fresh))
    train, held_out = ("".join(f"{p}\n" for p in part).encode("ascii") for part in parts)
    return train, held_out


def documents() -> Iterator[str]:
    """Each language topic, then the prose of each module of the standard library."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # Debian packs pydoc_data apart from python3-minimal
        topics = {}
    yield from (topics[name] for name in sorted(topics))
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.rglob("*.py")):
        if _SKIP.isdisjoint(path.relative_to(stdlib).parts):
            yield "\n\n".join(prose(path))


def prose(path: Path) -> Iterator[str]:
    """Docstrings of a module, outermost first, then its blocks of comment lines."""
    raw = path.read_bytes()
    try:
        source = raw.decode("utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the library carries a few files that are bad on purpose
        return
    if len(raw) > MAX_MODULE_BYTES:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    yield comments(source.splitlines())


def comments(lines: Iterable[str]) -> str:
    """Comment lines without their marks; any other line ends a paragraph."""
    stripped = (line.strip() for line in lines)
    return "\n".join(s.lstrip("#").strip() if s.startswith("#") else "" for s in stripped)


def paragraphs(document: str) -> Iterator[str]:
    """The paragraphs that read as English, each on one line."""
    for block in _BREAK.split(document.translate(_ASCII)):
        line = " ".join(block.split()).removeprefix("* ").removeprefix("- ")
        plain = sum(c.islower() or c == " " for c in line)
        long_enough = line.count(" ") >= 4
        if long_enough and plain >= 0.82 * len(line) and _SENTENCE.fullmatch(line):
            if ">>>" not in line:
                yield line
