"""Launches of what Triton has compiled, without Triton's own look at each argument.

`JITFunction.run` finds a compiled kernel by what each argument is compiled for: some 40 us for 25
of them on the host of an H200. Here it runs once for each key that is as fine as its own; from then
on the compiled kernel's own launcher is called, with bare addresses.

Triton's private names are in this file. Where its version is another than those seen, where hooks
are set, or debugging and instrumentation are on, `JITFunction.run` launches each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

SEEN = ("3.6.", "3.7.", "3.8.")  # versions of Triton whose `JITFunction.run` does no more than this
NUMBERS = frozenset({int, float, bool, type(None)})
LEAST, MOST = -(1 << 31), 1 << 31  # a number from LEAST to below MOST is an i32
MOST_KEYS = 4096  # of a kernel; a program that brings more begins again


class Compiled(NamedTuple):
    """A compiled kernel.

    Attributes:
        start: `start(x, y, z, stream, function, packed, None, None, None, *arguments)`.
        function: its handle on the device.
        packed: what `start` goes by: warps, shared memory.
        rest: its constants in order, which stand behind the numbers.
        stream: `stream(device)` is the current one.
        plain: Triton's own object of it.
        by_address: whether tensors are all on a device, whose addresses are theirs there too.
    """

    start: Callable[..., None]
    function: int
    packed: Any
    rest: tuple[Any, ...]
    stream: Callable[[int], int]
    plain: Any
    by_address: bool


class Known:
    """A kernel, and what Triton has compiled of it by now.

    Attributes:
        free: the numbers of arguments at which Triton looks for their width alone.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.free = [i for i, p in enumerate(kernel.params) if p.do_not_specialize]
        self.made: dict[Any, Compiled] = {}

    def key(
        self,
        tensors: Sequence[Tensor],
        addresses: Sequence[int],
        numbers: Sequence[Any],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> tuple[Any, ...] | None:
        """Differs wherever Triton would launch another kernel; None: a number is of another type.

        Numbers stand for what Triton goes by, whether they are 1 and whether 16 divides them: those
        of a model's shapes are few, and to compare them takes less time than to ask. The tuple is
        flat, since that is the faster to hash.
        """
        types = [*map(type, numbers)]
        if not NUMBERS.issuperset(types):
            return None
        given = [*numbers]
        for i in self.free:
            i -= len(tensors)
            if 0 <= i < len(given) and types[i] is int and LEAST <= given[i] < MOST:
                given[i] = None
        return (
            *given, *types, *[x.dtype for x in tensors], *[x.get_device() for x in tensors],
            *[x & 15 for x in addresses], *constants, *constants.values(),
            *map(type, constants.values()), *options, *options.values(),
        )  # fmt: skip

    def keep(
        self, key: Any, plain: Any, tensors: Sequence[Tensor], rest: tuple[Any, ...]
    ) -> Compiled | None:
        """Keep what Triton has compiled; None where it is something else than was seen."""
        from triton.compiler.compiler import CompiledKernel
        from triton.runtime.driver import driver

        if type(plain) is not CompiledKernel or plain.metadata.target.backend != "cuda":
            return None
        if len(self.made) >= MOST_KEYS:
            self.made.clear()
        by_address = all(x.is_cuda for x in tensors)
        stream = driver.active.get_current_stream
        made = Compiled(
            plain.run, plain.function, plain.packed_metadata, rest, stream, plain, by_address
        )
        self.made[key] = made
        return made


@functools.cache
def known(kernel: Any) -> Known | None:
    """What is known of a kernel; None where Triton has to launch it itself."""
    from triton.runtime.jit import JITFunction

    return Known(kernel) if was_seen() and type(kernel) is JITFunction else None


@functools.cache
def was_seen() -> bool:
    """Whether this is a version of Triton whose private names are those used here."""
    import triton

    return bool(triton.__version__.startswith(SEEN))


@functools.cache
def _knobs() -> Any:
    from triton import knobs

    return knobs


def is_watched() -> bool:
    """Whether somebody has asked Triton to be told of launches."""
    runtime = _knobs().runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def is_altered(kernel: Any) -> bool:
    """Whether more than arguments and options decides what is compiled or done."""
    knobs = _knobs()
    return bool(
        knobs.runtime.debug
        or kernel.debug
        or kernel.pre_run_hooks
        or kernel.used_global_vals  # Triton raises where one has changed
        or knobs.compilation.instrumentation_mode
        or getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None
        or is_watched()
    )


def launch(
    kernel: Any,
    grid: Sequence[int],
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    device: int,
) -> Compiled | Any:
    """Launch a kernel on the current stream of the current device; what launched it.

    Args:
        device: the current one.

    Returns:
        What is kept of it; where nothing can be, what Triton's own launch returns.
    """
    of = known(kernel)
    key = None
    if of is not None and not is_altered(kernel):
        addresses = [x.data_ptr() for x in tensors]
        key = of.key(tensors, addresses, numbers, constants, options)
        if key is not None and (made := of.made.get((device, key))) is not None:
            start, function, packed, rest, stream, *_ = made
            x, y, z = (*grid, 1, 1)[:3]
            start(
                x, y, z, stream(device), function, packed, None, None, None,
                *(addresses if made.by_address else tensors), *numbers, *rest,
            )  # fmt: skip
            return made
    plain = kernel[tuple(grid)](*tensors, *numbers, **constants, **options)
    if of is None or key is None:
        return plain
    names = kernel.arg_names[len(tensors) + len(numbers) :]
    return of.keep((device, key), plain, tensors, tuple([constants[x] for x in names])) or plain


def again(made: Any, grid: Sequence[int], device: int) -> Callable[..., None]:
    """What makes a launch once more, given its arguments with addresses in place of tensors.

    Args:
        made: what `launch` returned.
        device: the current one whenever it is called.
    """
    size = (*grid, 1, 1)[:3]
    if not isinstance(made, Compiled):
        return made[size]  # type: ignore[no-any-return]
    start, function, packed, _, stream, plain, _ = made

    def launch(*arguments: Any) -> None:
        if is_watched():
            plain[size](*arguments)
        else:
            start(*size, stream(device), function, packed, None, None, None, *arguments)

    return launch
