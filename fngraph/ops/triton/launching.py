"""Launching Triton kernels: straight on CUDA; on the CPU, interpreted, as one op.

The op makes an interpreted kernel visible to what records ops, so that the `tape` captures it. A
kernel takes the tensors that it reads, those that it writes, numbers, then constants by name.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fngraph.ops.primitives import LIBRARY
from fngraph.ops.triton import direct
from fngraph.ops.triton.repeating import Launches

COUNTS = ("T", "R", "UNITS", "EACH", "many", "count")
"""Numbers that differ from batch to batch, as kernels call them. Triton would compile a form for
each that is 1, one for what 16 divides and one for any other: in the middle of traffic. So kernels
say `@triton.jit(do_not_specialize=COUNTS)`, and one form serves all."""

LIBRARY.define(
    "interpret(str module, str kernel, int[] grid, Tensor[] reads, Tensor(a!)[] writes, "
    "Scalar[] numbers, str[] names, Scalar[] constants) -> ()"
)


def launch(
    kernel: Any,
    grid: Sequence[int],
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
    numbers: Sequence[float] = (),
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    early: bool | None = None,
    programs: int | None = None,
    kept: Launches | None = None,
    **constants: Any,
) -> None:
    """Launch `kernel`, if its grid is not empty, on the current stream of the device it writes to.

    Args:
        kept: where to keep the launch, so that it can be made again.
        early: whether to launch it while the kernel ahead still runs, where that can be: it has
            a constant EARLY, by which it waits before anything else. None: it has none.
        programs: compile it to so few registers that as many run on a multiprocessor at a time.
    """
    if 0 in grid:
        return
    device = writes[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current one, whatever it is given
            launch(
                kernel, grid, reads, writes, numbers, num_warps=num_warps, num_stages=num_stages,
                early=early, programs=programs, kept=kept, **constants,
            )  # fmt: skip
        return
    if early is not None:
        early = early and overlaps(device)
        constants["EARLY"] = early
    if device.type == "cuda":
        options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
        if early:
            options["launch_pdl"] = True
        if programs is not None:
            options["maxnreg"] = min(255, REGISTERS // (32 * num_warps * programs) // 8 * 8)
        tensors = (*reads, *writes)
        made = direct.launch(kernel, grid, tensors, numbers, constants, options, device.index)
        if kept is not None:
            given = (*tensors, *numbers)
            rest = [constants[name] for name in kernel.arg_names[len(given) :]]
            kept.add(direct.again(made, grid, device.index), (*given, *rest))
        return
    name, module = kernel.fn.__name__, kernel.fn.__module__
    names, values = list(constants), list(constants.values())

    def run(*given: Any) -> None:
        read, written = given[: len(reads)], given[len(reads) : len(reads) + len(writes)]
        more = given[len(reads) + len(writes) :]
        torch.ops.fngraph.interpret(module, name, grid, read, written, more, names, values)

    given = (*reads, *writes, *numbers)
    run(*given)
    if kept is not None:
        kept.add(run, given)


REGISTERS = 65536  # of a multiprocessor


_INTERPRETS = threading.RLock()  # one thread: Triton's interpreter keeps its place in a global


def _interpret(
    module: str,
    kernel: str,
    grid: list[int],
    reads: list[Tensor],
    writes: list[Tensor],
    numbers: list[float],
    names: list[str],
    constants: list[Any],
) -> None:
    fn = getattr(importlib.import_module(module), kernel)
    with _INTERPRETS:
        fn[tuple(grid)](*reads, *writes, *numbers, **dict(zip(names, constants)))


LIBRARY.impl("interpret", _interpret, "CPU")


def missing(device: str | None = None) -> str | None:
    """Why Triton kernels cannot run on devices of this type (None: on any there is), or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if (device or ("cuda" if torch.cuda.is_available() else "cpu")) != "cuda" and not interpreted():
        return "it runs on CUDA; on the CPU, slowly, if TRITON_INTERPRET=1 is set beforehand"
    return None


def interpreted() -> bool:
    """Whether Triton was told to interpret its kernels."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one ahead of it has finished, and wait inside."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; two of the CPU, so that programs share work there too."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Of a multiprocessor's own memory, what one program may have."""
    if device.type != "cuda":
        return 1 << 20
    known = torch.cuda.get_device_properties(device)
    return int(getattr(known, "shared_memory_per_block_optin", known.shared_memory_per_block))


def power_of_two(n: int, at_least: int = 1) -> int:
    """The least power of two that is neither below `n` nor below `at_least`."""
    return max(at_least, 1 << (max(n, 1) - 1).bit_length())
