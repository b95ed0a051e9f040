"""`Options`: what `graphify` was asked for, checked; each stage carries it along."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fngraph import core
from fngraph.core import BatchDescriptor, Field, Mode, adapter_counts
from fngraph.core.resolution import OLD_FLAGS
from fngraph.errors import BackendError, DonationError
from fngraph.fx.donation.table import COPY_LIMIT
from fngraph.ops.choice import Choices, check_choices


@dataclasses.dataclass(frozen=True)
class Options:
    """What `graphify` was asked for.

    Attributes:
        modes: requested; None: the default. Backends may lower them.
        sizes: capture sizes in tokens; None: the default ladder.
        query_lens: query lengths whose uniform batches get keys of their own.
        backends: primitive name to backends; a primitive left out takes its default.
        adapters: counts of active adapters that get keys of their own.
        fields: user-defined fields of specs and keys.
        cost: what "least" means, of a key; None: its token count.
        resolve: further arguments of `fngraph.core.resolve`, such as pooling=True.
        allow_copies: bytes of the largest donated leaf that may be copied; or False, True.
        on_ambient: "recapture" or "error", for calls under other ambient state.
        memory_budget: bytes that a step's pool and graphs may take; None: anything.
        on_failure: "raise", or "eager": a key that cannot be captured is served eagerly.
        generators: those that `forward` may draw from.
    """

    modes: Mode | None = None
    sizes: tuple[int, ...] | None = None
    query_lens: tuple[int, ...] = (1,)
    backends: Mapping[str, Choices] = dataclasses.field(default_factory=dict)
    adapters: tuple[int, ...] = (0,)
    fields: tuple[Field, ...] = ()
    cost: Callable[[BatchDescriptor], float] | None = None
    resolve: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    allow_copies: bool | int = COPY_LIMIT
    on_ambient: str = "recapture"
    memory_budget: int | None = None
    on_failure: str = "raise"
    generators: tuple[torch.Generator, ...] = ()


def parse_options(
    *,
    modes: Mode | str | None,
    sizes: Sequence[int] | None,
    query_lens: Iterable[int],
    backends: Mapping[str, Choices] | None,
    adapters: int | Iterable[int],
    fields: Iterable[Field],
    cost: Callable[[BatchDescriptor], float] | None,
    allow_copies: bool | int | None,
    on_ambient: str,
    memory_budget: int | None,
    on_failure: str,
    generators: Iterable[torch.Generator],
    resolve: Mapping[str, Any],
) -> Options:
    """`graphify`'s arguments as options; see there.

    Raises:
        ModesError, BackendError, DonationError, TypeError: one that names nothing.
    """
    if not isinstance(backends, Mapping | None):
        raise BackendError(
            f'backends={backends!r}: pass them by primitive, backends={{"attention": {backends!r}}}'
        )
    for name, choices in (backends or {}).items():
        check_choices(name, choices)  # unknown names fail here, where they are written
    for name in resolve.keys() - inspect.signature(core.resolve).parameters.keys():
        advice = OLD_FLAGS.get(name, "")
        raise TypeError(f"graphify() and fg.resolve() take no argument {name!r}{advice}")
    if on_ambient not in ("recapture", "error"):
        raise TypeError(f'on_ambient={on_ambient!r}: "recapture" or "error"')
    if not isinstance(allow_copies, int | None) or (allow_copies or 0) < 0:
        raise DonationError(f"allow_copies={allow_copies!r}: True, False or a number of bytes")
    generators = tuple(generators)
    for generator in generators:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"generators={generator!r}: a tuple of torch.Generator, (g,)")
    return Options(
        None if modes is None else Mode.parse(modes),
        None if sizes is None else tuple(sizes),
        tuple(query_lens),
        dict(backends or {}),
        adapter_counts(adapters, powers=True) if isinstance(adapters, int) else tuple(adapters),
        tuple(fields),
        cost,
        resolve,
        COPY_LIMIT if allow_copies is None else allow_copies,
        on_ambient,
        memory_budget,
        on_failure,
        generators,
    )
