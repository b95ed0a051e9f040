"""Train the byte-level Llama on English of Python itself: python -m fngraph.models.train_bytes

It saves the weights and, beside them, a card that says what they are and how they came to be. The
text is what every installation carries: language topics, docstrings and comments, about 2 MB by the
Python authors (PSF license). What counts as a sentence is decided one paragraph at a time; code,
tables and grammar are left out, and so is anything seen before.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib
import math
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fngraph.models.command import device as device_of, new_file, real, run, whole
from fngraph.models.families import llama
from fngraph.models.train import cut, evaluate, fit
from fngraph.models.weights.checkpoint import BYTES, save_checkpoint

HELD_OUT_EVERY = 20  # documents: a module or a topic
MAX_MODULE_BYTES = 1_000_000  # larger ones hold generated tables

# not installed everywhere, or not the library's own text
_SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip"}
_ASCII = str.maketrans(
    {"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2014": "-", "\u2026": "..."}
)
_BREAK = re.compile(r"\n\s*\n|\n(?=\s*[*-] )")  # an empty line, or the next bullet
_SENTENCE = re.compile(r"""["'`*(\[]?[A-Za-z0-9][\x20-\x7e]*[.:!?)]""")


def main(argv: list[str] | None = None) -> None:
    """Train, then save the weights and the card that says what they are."""
    flags = parser().parse_args(argv)
    torch.manual_seed(flags.seed)
    torch.set_num_threads(flags.threads)
    config = tiny_bytes()
    train, held_out = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8).to(flags.device) for text in corpus()
    )
    if flags.context >= len(held_out):
        parser().error(f"--context {flags.context}: the held-out text has {len(held_out)} bytes")
    looked_at = cut(held_out, flags.context)
    named, steps, minutes = fit(config, train, looked_at, flags)
    stored = {n: w.detach().bfloat16() for n, w in named.items()}
    save_checkpoint(flags.out, config, stored)
    widened = {n: w.float() for n, w in stored.items()}  # the losses are those of what is stored
    as_many = cut(train, flags.context)[::HELD_OUT_EVERY]
    nats = [evaluate(config, widened, text_NS, flags) for text_NS in (as_many, looked_at)]
    passes = steps * flags.batch * flags.context / len(train)
    command = " ".join(sys.argv[1:] if argv is None else argv)
    facts = {
        "config": config,
        "parameters": f"{sum(w.numel() for w in named.values()):,}, stored in bfloat16",
        "file": f"{flags.out.stat().st_size:,} bytes",
        "training text": f"{len(train):,} bytes",
        "held-out text": f"{len(held_out):,} bytes, every {HELD_OUT_EVERY}th topic or module",
        "steps": f"{steps:,} of {flags.batch} x {flags.context} bytes, {passes:.1f} passes",
        "time": f"{minutes:.1f} minutes on {device_name(flags.device)}",
        "training loss": f"{nats[0]:.3f} nats a byte",
        "held-out loss": f"{nats[1]:.3f} nats a byte",
        "seed": flags.seed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "command": f"`python -m fngraph.models.train_bytes {command}`",
    }
    flags.out.with_suffix(".md").write_text(card(facts))
    print(card(facts))


def tiny_bytes() -> llama.Config:
    """1.9 million parameters over bytes: deep and narrow reads best at this size."""
    return llama.Config(
        vocab_size=256, num_layers=6, num_heads=6, num_kv_heads=2, head_dim=32, dim=192,
        mlp_dim=352, tied=True,
    )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m fngraph.models.train_bytes")
    p.add_argument("--device", type=device_of, default="cpu")
    p.add_argument("--steps", type=whole(), default=6000, help="the schedule ends here ...")
    p.add_argument(
        "--minutes", type=real(0.001), default=math.inf, help="... or here, if that is sooner"
    )
    p.add_argument("--batch", type=whole(), default=64, help="sequences a step")
    p.add_argument("--context", type=whole(), default=512, help="bytes a sequence")
    p.add_argument("--lr", type=real(0, 1), default=3e-3)
    p.add_argument("--weight-decay", type=real(0, 1), default=0.1)
    p.add_argument("--drop", type=real(0, 0.99), default=0.1, help="dropout on the weight matrices")
    p.add_argument("--looks", type=whole(), default=25, help="evaluations of the held-out text")
    p.add_argument("--seed", type=whole(0), default=0)
    p.add_argument("--threads", type=whole(), default=torch.get_num_threads())
    p.add_argument("--out", type=new_file, default=BYTES)
    return p


def card(facts: Mapping[str, Any]) -> str:
    """The checkpoint's card, in Markdown."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""# bytes.safetensors

A byte-level Llama (`fngraph.models.train_bytes.tiny_bytes`) that gives the demo and the tests
something legible to write. It is no use for anything else.

Data: language topics, docstrings and comments of Python's own standard library (by the Python
authors, PSF license). Selected and written by `fngraph.models.train_bytes`.

| | |
|---|---|
{rows}
"""


def device_name(device: str) -> str:
    """What the card calls it."""
    return (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"{device}, {platform.machine()}"
    )


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


if __name__ == "__main__":
    run(main)
