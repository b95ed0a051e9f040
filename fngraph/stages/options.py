"""`Options`: what `graphify` was asked for, which each stage carries along."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fngraph.core import BatchDescriptor, Field, Mode
from fngraph.fx.donation import COPY_LIMIT
from fngraph.ops.choice import Choices


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
