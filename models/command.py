"""What words of a command mean: types for `argparse` that refuse what cannot be, with its bound.

    p.add_argument("--max-new", type=whole(1), default=96)      # --max-new 0: 0 is not 1 or more
    p.add_argument("--prompts", type=file)                      # ... there is no such file

A mistake ends a command with 2 and a line that says what to write; Ctrl-C ends it with 130.

    with processes(parser, device=None, tp=flags.tp) as mesh:     # under torchrun, or one by itself
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

import fngraph as fg

N = TypeVar("N", int, float)
STOPPED = 130  # what a shell gives a command that Ctrl-C ended: 128 and the signal's number


def run(main: Callable[[list[str]], int | None]) -> None:
    """Do a command, and end Python with its status."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(STOPPED)


@contextlib.contextmanager
def processes(
    parser: argparse.ArgumentParser, *, device: str | None = None, **sizes: int
) -> Iterator[fg.Mesh]:
    """The mesh of a command's processes, until it is done with them; another number of processes
    is a mistake.

    Args:
        device: None: cuda where each process has one.
        sizes: of its axes.
    """
    try:
        try:
            mesh = fg.make_mesh(None if device is None else device.partition(":")[0], **sizes)
        except fg.errors.RankError as error:
            mistake(parser, error)
        own = device if mesh.size == 1 and device is not None else mesh.device
        yield dataclasses.replace(mesh, device=own)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def mistake(parser: argparse.ArgumentParser, error: Exception) -> NoReturn:
    """End a command with 2, and what is wrong, told by the first of its processes."""
    if os.environ.get("RANK", "0") != "0":
        sys.exit(2)
    told = str(error)
    if isinstance(error, fg.errors.RankError):  # of several lines
        told = "; ".join(line.strip().rstrip(":") for line in told.splitlines())
    parser.error(told)


def whole(least: int = 1, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""
    return _number(int, "whole number", least, most)


def real(least: float = 0.0, most: float = math.inf) -> Callable[[str], float]:
    """A number from `least` to `most`."""
    return _number(float, "number", least, most)


def _number(kind: type[N], what: str, least: float, most: float) -> Callable[[str], N]:
    def number(word: str) -> N:
        try:
            found = kind(word)
        except ValueError:
            raise ArgumentTypeError(f"{word!r} is no {what}") from None
        check_bounds(word, found, least, most)
        return found

    return number


def check_bounds(word: str, found: float, least: float, most: float) -> None:
    """NaN is within none."""
    if not found >= least:
        raise ArgumentTypeError(f"{word} is not {least} or more")
    if found > most:
        raise ArgumentTypeError(f"{word} is more than {most}")


def file(word: str) -> Path:
    """A file that is there to be read."""
    path = Path(word)
    if path.is_dir():
        raise ArgumentTypeError(f"{word} is a folder; pass a file")
    if not path.is_file():
        raise ArgumentTypeError(f"{word}: there is no such file")
    if not os.access(path, os.R_OK):
        raise ArgumentTypeError(f"{word} may not be read")
    return path


def folder(word: str) -> Path:
    """A folder that is there."""
    path = Path(word)
    if not path.is_dir():
        told = "is a file; pass the folder it is in" if path.exists() else "there is no such folder"
        raise ArgumentTypeError(f"{word}: {told}")
    return path


def new_file(word: str) -> Path:
    """A file that can be written; its folder is made where it is not there yet."""
    path = Path(word)
    if path.is_dir():
        raise ArgumentTypeError(f"{word} is a folder; pass a file in it")
    there = path if path.exists() else next(p for p in path.absolute().parents if p.exists())
    if not os.access(there, os.W_OK) or not (there.is_dir() or there == path):
        raise ArgumentTypeError(f"{word} cannot be written: see {there}")
    return path


def new_folder(word: str) -> Path:
    """A folder that can be written in; it is made where it is not there yet."""
    path = Path(word)
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir():
        told = "is a file; pass a folder" if there == path else f"cannot be made: see {there}"
        raise ArgumentTypeError(f"{word} {told}")
    if not os.access(there, os.W_OK):
        raise ArgumentTypeError(f"{word} cannot be written: see {there}")
    return path


def device(word: str) -> str:
    """A device of torch's that tensors can be on, with memory."""
    try:
        on_it = torch.empty(0, device=word)
    except (RuntimeError, AssertionError, ImportError) as error:  # Assertion: built without CUDA
        told = str(error).splitlines()[0]
        raise ArgumentTypeError(f"{word!r} is no device here ({told}); pass {_devices()}") from None
    if on_it.is_meta:
        raise ArgumentTypeError(f"{word!r} has no memory; pass {_devices()}")
    return word


def _devices() -> str:
    return "cpu or cuda" if torch.cuda.is_available() else "cpu"
