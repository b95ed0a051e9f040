"""`graphify`: the transform. A drop-in for `forward` that runs each batch as CUDA graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from fngraph.core import BatchDescriptor, Field, Limits, Mode
from fngraph.fx.arguments import Names
from fngraph.graphified import Graphified
from fngraph.ops.choice import Choices
from fngraph.options import parse_options
from fngraph.step.book import Rules


def graphify(
    fn: Callable[..., Any] | None = None,
    *,
    modes: Mode | str | None = None,
    donate: Names = None,
    stage: Names = None,
    limits: Limits | None = None,
    sizes: Sequence[int] | None = None,
    query_lens: Iterable[int] = (1,),
    backends: Mapping[str, Choices] | None = None,
    recorder: str | None = None,
    outputs: str = "own",
    max_keys: int = 4,
    adapters: int | Iterable[int] = 0,
    fields: Iterable[Field] = (),
    cost: Callable[[BatchDescriptor], float] | None = None,
    allow_copies: bool | int | None = None,
    on_ambient: str = "recapture",
    memory_budget: int | None = None,
    on_failure: str = "raise",
    generators: Iterable[torch.Generator] = (),
    guards: bool = False,
    **resolve: Any,
) -> Any:
    """Turn a pure function into one that runs each batch as CUDA graphs.

    A batch is padded to its key's size, so what mixes rows over T or R (a mean, `x[-1]`, a sort)
    is an error, unless primitives or masks keep padding out (`RowsError`, `fg.trust_rows`).
    Results carry no gradients, whatever requires them: take gradients inside, `torch.func.grad`.
    What it calls under `torch.compile` is traced as the function that was compiled.

    Args:
        fn: `forward(params, cache, batch) -> (outputs, cache)`; left out: a decorator.
        modes: NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE (the default).
        donate: names or positions of arguments that are updated in place and returned.
        stage: the batch's name or position: an `fg.struct` with `fg.buffer` fields and a spec, or
            any tree of tensors, whose exact shapes are the key then, as in `jax.jit`.
        limits: bounds of every step; None: 8192 tokens, 256 requests, the rest as the first batch.
        sizes: capture sizes in tokens; None: the default ladder.
        query_lens: query lengths whose uniform batches get FULL keys of their own.
        backends: primitive name to backend name, {"attention": "reference"}; to an `fg.ops.Hybrid`;
            or to one of them a call, as a list or {number of the call: ...}.
        recorder: "cuda" or "tape"; None: by the arguments' device.
        outputs: "own": results are yours; "borrow": views, good until the next call.
        adapters: most adapters (LoRA) that a batch brings; each power of two gets keys of its own.
            Or the counts that do, (4,): a batch runs as the next one; without a 0, those without
            adapters run eagerly.
        fields: user-defined fields of specs and keys, with their covering rules.
        cost: what "least" means, of a key; None: its token count.
        resolve: what else `fg.resolve` takes: pooling=, encoder_decoder=, layerwise=,
            state_blocks=, cut=, align=, eager=.
        max_keys: of a batch without a spec, how many exact shapes are kept; the least recently
            used goes first.
        allow_copies: whether a donated leaf may be copied where its new value cannot be made in its
            buffer: True, False, or up to how many bytes; None: 64 MiB. See `Traced.donation`.
        on_ambient: of a call under other autocast, default dtype, grad or inference mode, matmul
            precision, determinism, ... than the trace. Where forward computes the same under it,
            nothing happens; else "recapture", or "error", which raises `AmbientError`.
        memory_budget, on_failure: of every step; see `Compiled.capture`.
        generators: what `forward` may draw from, `torch.rand(n, generator=g)`. A call advances them
            as eager does at the padded size; seed them between calls.
        guards: for finding bugs, at some cost: padding rows, where no pad is declared or relied on,
            hold NaN or a copy of a true row; borrowed results are poisoned when the next guarded
            call on the pool begins, and to use one then is a `StaleError`.

    Raises:
        ModesError, TreeError, BackendError, DonationError: an option that names nothing.
    """
    if fn is None:
        return functools.partial(
            graphify, modes=modes, donate=donate, stage=stage, limits=limits, sizes=sizes,
            query_lens=query_lens, backends=backends, recorder=recorder, outputs=outputs,
            max_keys=max_keys, adapters=adapters, fields=fields, cost=cost,
            allow_copies=allow_copies, on_ambient=on_ambient, memory_budget=memory_budget,
            on_failure=on_failure, generators=generators, guards=guards, **resolve,
        )  # fmt: skip
    options = parse_options(
        modes=modes, sizes=sizes, query_lens=query_lens, backends=backends, adapters=adapters,
        fields=fields, cost=cost, allow_copies=allow_copies, on_ambient=on_ambient,
        memory_budget=memory_budget, on_failure=on_failure, generators=generators, resolve=resolve,
    )  # fmt: skip
    Rules(memory_budget, on_failure)  # what means nothing fails here
    return Graphified(fn, options, donate, stage, limits, recorder, outputs, max_keys, guards)


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return graphify(*args, **kwargs)


# `import fngraph.graphify` puts this module where the function of the same name is expected
sys.modules[__name__].__class__ = _Callable
