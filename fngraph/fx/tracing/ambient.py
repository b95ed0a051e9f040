"""Ambient state of torch that changes what a function computes: part of what a trace is for.

Autocast, the default dtype and function modes change the traced ops; matmul precision, determinism
and the choice of attention kernels change what a graph has recorded. It is read at each call. A
dispatch mode or a transform around a call, which a replay would go past, is refused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fngraph.core.structs import Exactly
from fngraph.core.where import defined_at, user_line
from fngraph.errors import AmbientError, TransformError
from fngraph.torch_facts.names import (
    SWITCHES,
    DeviceContext,
    are_transforms_active,
    choose_attention,
    count_dispatch_modes,
    count_function_modes,
    dispatch_modes,
    function_modes,
    get_precision,
    set_precision,
)


class Ambient(NamedTuple):
    """The state of one moment; equal ones make equal traces and equal graphs.

    Attributes:
        autocast: its dtype for the function's device; None where it is off.
        kernels: switches that choose among kernels of one op.
        modes: torch-function modes that are active, the default device among them.
    """

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    default_dtype: torch.dtype
    kernels: tuple[Any, ...]
    modes: tuple[Any, ...]

    def changes(self, other: Ambient) -> str:
        """`default_dtype: torch.float32, now torch.float64`."""
        old, new = (*self, *self.kernels), (*other, *other.kernels)
        pairs = zip((*self._fields, *_KERNELS), old, new)
        changed = [(name, a, b) for name, a, b in pairs if a != b and name != "kernels"]
        return "; ".join(f"{name}: {a}, now {b}" for name, a, b in changed)


def read(device: str) -> Ambient:
    """The state now, for a function on this type of device."""
    if device == "cuda" and torch.cuda.is_available():
        choose_attention()
    on = device != "meta" and torch.is_autocast_enabled(device)  # which meta does not know
    autocast = torch.get_autocast_dtype(device) if on else None
    modes = count_function_modes() and tuple(map(_named, function_modes()))
    return Ambient(
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast,
        torch.get_default_dtype(), kernels(), modes or (),
    )  # fmt: skip


def _named(mode: Any) -> Any:
    """A function mode by its class and what it holds, so that a new one at each call is the same;
    one that holds what may change (a list, a counter's dict) is but itself."""
    if isinstance(mode, DeviceContext):
        return "device", mode.device
    held = object.__getstate__(mode)
    try:
        hash(tuple(held.values()) if isinstance(held, dict) else held)
    except TypeError:
        return mode
    return Exactly([type(mode), held])


_SWITCHES = SWITCHES["cuda"] | SWITCHES["cpu"]
_KERNELS = ("float32 matmul precision", "float32 matmul precision on the CPU", *_SWITCHES)


def kernels() -> tuple[Any, ...]:
    """What chooses among kernels of one op, on any device: equal ones choose alike."""
    matmul = get_precision("cuda", "matmul"), get_precision("mkldnn", "matmul")
    now = [switch() for switch in _SWITCHES.values()]
    return (*matmul, *[tuple(x) if isinstance(x, list) else x for x in now])


def plain_state(device: str) -> Callable[[], tuple[Any, ...]]:
    """A quick look at the same state: equal tuples that are `is_plain` mean equal ambients.

    It is read at each call. So all calls are written into one expression, whose code is made here:
    a loop over them takes half as long again, and `read` four times as long.
    """
    cuda = device == "cuda"
    autocast: Callable[[], bool] = functools.partial(torch.is_autocast_enabled, device)
    if cuda:
        autocast = torch.is_autocast_enabled  # its own default, at half the price
    elif device == "meta":
        autocast = bool  # meta does not know autocast
    matmul = functools.partial(get_precision, "cuda" if cuda else "mkldnn", "matmul")
    around = count_function_modes, count_dispatch_modes, are_transforms_active, autocast
    calls = [*around, torch.is_grad_enabled, torch.is_inference_mode_enabled,
             torch.get_default_dtype, matmul, *SWITCHES.get(device, {}).values()]  # fmt: skip
    named = {f"call{i}": call for i, call in enumerate(calls)}
    state: Callable[[], tuple[Any, ...]]
    state = eval(f"lambda: ({', '.join(f'{name}()' for name in named)})", named)
    return state


_AROUND = 4  # of a plain state's answers, the first: what it cannot say all of


def is_plain(state: tuple[Any, ...]) -> bool:
    """Whether `plain_state` says all: no modes, transforms or autocast."""
    return not any(state[:_AROUND])


class Switches:
    """What chose among kernels when a trace began: its ops run under that, wherever they stand."""

    def __init__(self) -> None:
        self._before = self._now = self._seen()

    def changed(self, line: str) -> AmbientError | None:
        """The error about an op at `line` for which `forward` has set another choice; once each."""
        now = self._seen()
        if now == self._now:
            return None
        self._now = now
        names = [name for name, a in now.items() if a != self._before[name]]
        if not names:
            return None
        return AmbientError(
            f"{line}: forward sets {', '.join(names)} for a part of itself, and a graph's ops all "
            "run under what is set around the call. Set it there: torch.backends and "
            "torch.use_deterministic_algorithms are read at each call"
        )

    def _seen(self) -> dict[str, Any]:
        return {name: x for name, x in zip(_KERNELS, kernels()) if "sdp" not in name}


_ASKED = {"grad": "is_grad_enabled", "inference": "is_inference_mode_enabled"}


@contextlib.contextmanager
def noted(ambient: Ambient) -> Iterator[set[str]]:
    """Notes whether the user's code asks for grad or inference mode, and answers as outside.

    Nothing else that is computed depends on them, and serving code is captured under one and called
    under another. They pass no function mode, so torch's two functions are replaced meanwhile.
    """
    asked: set[str] = set()
    originals = {field: getattr(torch, name) for field, name in _ASKED.items()}

    def asking(field: str) -> Callable[[], bool]:
        def ask() -> bool:
            module = sys._getframe(1).f_globals.get("__name__", "")
            if module.startswith(("torch.", "fngraph.")) and not module.startswith(_USERS):
                return bool(originals[field]())
            asked.add(field)
            return ambient.inference if field == "inference" else bool(originals[field]())

        return ask

    for field, name in _ASKED.items():
        setattr(torch, name, asking(field))
    try:
        yield asked
    finally:
        for field, name in _ASKED.items():
            setattr(torch, name, originals[field])


_USERS = ("torch.nn", "torch.utils.checkpoint")  # modules of torch that branch on grad mode


@contextlib.contextmanager
def unchanged(device: str, fn: Any) -> Iterator[None]:
    """Refuse a body that leaves other state behind than it found; all is put back.

    Raises:
        AmbientError: naming what has changed.
    """
    before, seed = read(device), torch.initial_seed()
    deterministic = torch.are_deterministic_algorithms_enabled()
    precision_of_all = _matmul_precision()
    after, reseeded = before, False
    try:
        yield
    finally:
        after, reseeded = read(device), torch.initial_seed() != seed
        torch.set_grad_enabled(before.grad)
        torch.set_default_dtype(before.default_dtype)
        if device != "meta":
            torch.set_autocast_enabled(device, before.autocast is not None)
        if after.kernels != before.kernels:
            torch.use_deterministic_algorithms(deterministic)
            if precision_of_all is not None:  # which torch keeps beside those of the backends
                torch.set_float32_matmul_precision(precision_of_all)
            for backend, precision in zip(("cuda", "mkldnn"), before.kernels):
                set_precision(backend, "matmul", precision)
        if after.modes != before.modes:
            torch.set_default_device(next((m[1] for m in before.modes if type(m) is tuple), None))
    if after != before or reseeded:
        what = before.changes(after) or "the seed of torch's generator"
        raise AmbientError(
            f"{defined_at(fn)}: forward changes state outside of it ({what}), which a graph would "
            "not do again. Change it around the call, or for a part: with torch.autocast(...):"
        )


def _matmul_precision() -> str | None:
    """Of all backends; None: torch does not say, since each has been set by itself."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def check_no_dispatch_mode() -> None:
    """Raise `AmbientError` if a dispatch mode is active, which a replay would go past."""
    if count_dispatch_modes():
        names = ", ".join(type(mode).__name__ for mode in dispatch_modes())
        raise AmbientError(
            f"the dispatch mode {names} is active, and a graph replays without it. Call forward "
            "itself under the mode, or graphify a forward that does what the mode does"
        )


def check_no_transform() -> None:
    """Raise if a `torch.func` transform goes over a whole step: it would see constants.

    Raises:
        TransformError: always then.
    """
    if are_transforms_active():
        raise TransformError(
            f"{user_line()}: a torch.func transform goes over a graphified function, whose results "
            "are constants to it. Put the transform inside: fg.graphify(torch.func.vmap(f)), or "
            "call torch.func.grad(f) in the function that is graphified"
        )
