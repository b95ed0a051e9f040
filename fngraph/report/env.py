"""What is here of all that fngraph runs on, and what runs slower for want of it: `python -m fngraph
env`. Nothing that is missing is an error, so that this is where to look, and what to put into a
report of a fault.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

import fngraph
from fngraph.compile.disk import disk_of
from fngraph.core.text import table
from fngraph.errors import PackageError
from fngraph.graphs import addresses
from fngraph.ops.megakernel import image
from fngraph.ops.megakernel.shapes import why_not_on
from fngraph.torch_facts.driver import driver_for
from fngraph.torch_facts.layout import word_addresses
from fngraph.torch_facts.portable import TRITON, installed


class Row(NamedTuple):
    """A line of the table: what, how it is here, and what that costs and how to mend it, or ""."""

    what: str
    here: str
    costs: str = ""


def rows(environment: Mapping[str, str]) -> Iterator[Row]:
    """All lines.

    Args:
        environment: the process's variables, for the folder of compiled code.
    """
    yield Row("fngraph", fngraph.__version__)
    yield Row("Python", f"{platform.python_version()}, {platform.machine()}")
    cuda = torch.version.cuda
    yield Row("torch", torch.__version__ + (f", CUDA {cuda}" if cuda else ""))
    yield from _kernels()
    yield from _devices()
    yield _leaves()
    if torch.cuda.is_available():
        yield _launches(torch.device("cuda"))
        yield _nodes()
    yield _compiled(environment)
    yield from _extras()


def _kernels() -> Iterator[Row]:
    found = installed(*TRITON)
    if not found:
        yield Row("Triton", "none", "kernels and attention are torch's ops: pip install triton")
        return
    from fngraph.ops.triton.direct import SEEN, was_seen

    seen = ", ".join(one + "*" for one in SEEN)
    slow = f"launches outside of graphs take the host some 40 us, of {seen} a few"
    yield Row("Triton", ", ".join(found.values()), "" if was_seen() else slow)


def _devices() -> Iterator[Row]:
    if not torch.cuda.is_available():
        yield Row("GPU", "none", "graphs are recorded on the CPU's tape, which replays op by op")
    for i in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(i)
        capability = f"compute capability {found.major}.{found.minor}"
        memory = f"{found.total_memory / 2**30:.0f} GiB"
        yield Row(f"GPU {i}", f"{found.name}, {capability}, {memory}")


def _leaves() -> Row:
    """How each call looks whether a bound leaf has moved."""
    what = "a look at bound leaves"
    if word_addresses(torch.zeros(2, device="cpu")) is None:
        slow = "some 0.1 ms a call for a model's: how this torch keeps tensors is not known"
        return Row(what, "tensor by tensor", slow)
    if addresses.watched is addresses.watched_in_python:
        slow = "twice as long, some us a call: install it with a C compiler and Python's headers"
        return Row(what, "by numpy", slow)
    return Row(what, "compiled")


def _launches(device: torch.device) -> Row:
    """Whether a decoder of few requests can be one launch."""
    what = "a decoder in one launch"
    if why := why_not_on(device):
        return Row(what, "no", why)
    try:
        return Row(what, f"NVRTC {image.version()}")
    except PackageError as error:
        return Row(what, "no", str(error))


def _nodes() -> Row:
    what = "nodes of CUDA graphs"
    try:
        driver_for("to look at them")
    except PackageError as error:
        return Row(what, "not to be seen", str(error))
    return Row(what, " ".join(["cuda.bindings", *installed("cuda-bindings").values()]))


def _compiled(environment: Mapping[str, str]) -> Row:
    what = "compiled code is kept"
    try:
        disk = disk_of(environment)
    except ValueError as error:
        return Row(what, "no", str(error))
    if disk is None:
        return Row(what, "no", "FNGRAPH_CACHE is off: each process compiles anew")
    why = disk.why_unused()
    return Row(what, "no" if why else str(disk), why or "")


def _extras() -> Iterator[Row]:
    """Packages that extras bring, but those for its own development."""
    told = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        told = importlib.metadata.requires("fngraph") or []
    by_name: dict[str, list[str]] = {}
    for one in told:
        found = re.fullmatch(r"([\w.-]+)[^;]*;.*extra == ['\"](\w+)['\"]", one)
        if found and found[2] not in ("dev", "docs") and found[1] != "fngraph":
            by_name.setdefault(found[1], []).append(found[2])
    for name, extras in by_name.items():
        if version := installed(name).get(name):
            yield Row(name, version)
        else:
            missing = " or ".join(f"pip install 'fngraph[{extra}]'" for extra in extras)
            yield Row(name, "none", missing)


def shown(environment: Mapping[str, str]) -> str:
    """The table."""
    return table(["", "here", "what that costs"], rows(environment))
