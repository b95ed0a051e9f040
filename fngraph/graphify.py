"""`graphify`: the transform. A drop-in for `forward` that runs each batch as CUDA graphs.

Called without more, it traces, splits, lowers, compiles and binds at the first call, and captures
each key when it is first needed. `bind(...).capture(...)` does all of it ahead of time.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from fngraph import core
from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Dispatch,
    Explanation,
    Field,
    Limits,
    Mode,
    Stats,
    adapter_counts,
    buffers_of,
    trees,
)
from fngraph.errors import BackendError, DonationError, TreeError
from fngraph.fx.arguments import arguments
from fngraph.fx.donation import COPY_LIMIT
from fngraph.fx.leaves import Role
from fngraph.fx.purity import is_tracing
from fngraph.fx.refusals import Refusals
from fngraph.fx.signature import Names, signature
from fngraph.graphs.recorder import Recorder, check_name
from fngraph.ops.choice import Choices, check_choices
from fngraph.stages import Options, Traced, trace_function
from fngraph.step.allocate import check_outputs
from fngraph.step.book import Rules
from fngraph.step.call import check_no_transform
from fngraph.step.captured import Captured


class Graphified:
    """A graphified function. Immutable but for what its calls have captured; see `graphify`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        options: Options,
        donate: Names,
        stage: Names,
        limits: Limits | None,
        recorder: str | None,
        outputs: str,
        max_keys: int,
        guards: bool,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.options, self.limits, self.recorder, self.outputs = options, limits, recorder, outputs
        self.max_keys, self.guards = max_keys, guards
        self.signature = signature(fn, donate, stage)
        check_outputs(outputs)
        check_name(recorder)
        self._captured: dict[Any, Captured] = {}  # by exact shapes; one under None for a spec
        self._evicted = Stats()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward`'s own signature and meaning; donated arguments are updated in place.

        Inside of another graphified function it is `forward` itself, and traced as a part of it.

        Raises:
            FnGraphError: see the classes in `fngraph.errors`.
        """
        if is_tracing():
            return self.signature.fn(*args, **kwargs)
        check_no_transform()
        values = self._values(args, kwargs)
        held = self.signature.positions(Role.HELD)
        (staged,) = self.signature.positions(Role.STAGED)
        key = _exact_shapes(values[staged])
        step = self._captured.get(key)
        if step is None and trees.register_dataclasses(values):
            key = _exact_shapes(values[staged])
        if step is None:
            step = self._first_call(values, staged)
        else:
            for position in held:
                step.binding.check_argument(position, values[position])
            del self._captured[key]
        self._captured[key] = step  # the most recently used is last
        if len(self._captured) > self.max_keys:
            evicted = self._captured.pop(next(iter(self._captured)))
            evicted.release()  # waits for the device, which may still run a graph of it
            self._evicted = self._evicted + evicted.stats
        return step(*[v for i, v in enumerate(values) if i not in held])

    def _first_call(self, values: list[Any], staged: int) -> Captured:
        limits = _with_dims(self.limits or Limits(), values[staged])
        bound = [v for i, v in enumerate(values) if i != staged]
        compiled = self.trace(*bound, batch=values[staged], limits=limits).split().lower().compile()
        others = list(self._captured.values())  # exact shapes share one pool
        recorder = others[-1].recorder if others else self.recorder
        return compiled.capture(
            *bound, recorder=recorder, outputs=self.outputs, lazy=True, guards=self.guards
        )

    def trace(self, *bound: Any, batch: Any = None, limits: Limits | None = None) -> Traced:
        """Trace over held and donated arguments (tensors or `fg.like` specs), in order.

        Args:
            batch: an example, needed only where the staged parameter is not annotated.
            limits: sizes of the letters other than T and R, and bounds of those two.

        Raises:
            PurityError: see its subclasses. DonationError, TreeError.
        """
        names = [self.signature.names[i] for i in self.signature.positions(Role.HELD, Role.DONATED)]
        if len(bound) != len(names):
            raise TreeError(f"trace takes {len(names)} arguments {names}, got {len(bound)}")
        trees.register_dataclasses((bound, batch))
        given = dict(zip(names, bound))
        (staged,) = self.signature.positions(Role.STAGED)
        if batch is not None:
            given[self.signature.names[staged]] = batch
        return self._trace(given, limits or self.limits or Limits(), Refusals())

    def trace_call(self, args: Sequence[Any], refuse: Refusals) -> Traced:
        """Trace over all arguments of a call; what is refused goes to `refuse`."""
        values = self._values(tuple(args), {})
        trees.register_dataclasses(values)
        (staged,) = self.signature.positions(Role.STAGED)
        limits = _with_dims(self.limits or Limits(), values[staged])
        return self._trace(dict(zip(self.signature.names, values)), limits, refuse)

    def _trace(self, given: Mapping[str, Any], limits: Limits, refuse: Refusals) -> Traced:
        args = arguments(self.signature, given)
        if args.batch_type is None:  # exact shapes: one key of one "token"
            options = dataclasses.replace(self.options, sizes=(1,), query_lens=(1,))
            return trace_function(args, options, Limits(1, 1), refuse)
        return trace_function(args, self.options, limits, refuse)

    def bind(self, *held: Any) -> Bound:
        """Bind the held arguments: they are flattened once, and a step no longer takes them.

        It is the tensors that are bound. One that moves is noticed at the next call; a new tensor
        put into the container that was passed here is not seen any more.
        """
        names = [self.signature.names[i] for i in self.signature.positions(Role.HELD)]
        if len(held) != len(names):
            raise TreeError(f"bind takes {len(names)} arguments {names}, got {len(held)}")
        return Bound(self, held)

    @property
    def stats(self) -> Stats:
        """What the calls so far ran as."""
        return sum((step.stats for step in self._captured.values()), self._evicted)

    def dispatch(self, spec: BatchSpec) -> Dispatch:
        """What `spec` runs as; after the first call."""
        return self._ready().dispatch(spec)

    def explain(self, spec: BatchSpec) -> Explanation:
        """Why `spec` runs as it does; after the first call."""
        return self._ready().explain(spec)

    def _ready(self) -> Captured:
        if not self._captured:
            raise TreeError(
                "nothing is known of the arguments before the first call. Call it once, or use "
                "fast_fwd.trace(params, cache).split().lower(limits).table"
            )
        return list(self._captured.values())[-1]

    def _values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        if not kwargs and len(args) == len(self.signature.names):
            return list(args)
        defaults = {
            name: p.default
            for name, p in inspect.signature(self.signature.fn).parameters.items()
            if p.default is not p.empty and name not in kwargs
        }
        for name in self.signature.names[: len(args)]:
            defaults.pop(name, None)
        return self.signature.values(args, defaults | dict(kwargs), *Role)

    def __repr__(self) -> str:
        return f"graphify({self.signature!r}, modes={self.options.modes or 'default'})"


class Bound:
    """A graphified function with its held arguments bound; `capture` makes the step."""

    def __init__(self, graphified: Graphified, held: tuple[Any, ...]) -> None:
        self.graphified, self.held = graphified, held

    def capture(
        self,
        *donated: Any,
        outputs: str | None = None,
        recorder: str | Recorder | None = None,
        progress: bool | str = True,
        batch: Any = None,
        lazy: bool = False,
        memory_budget: int | None = None,
        on_failure: str | None = None,
        guards: bool | None = None,
    ) -> Captured:
        """Trace, lower, compile and capture every key: `capture(cache, limits)`.

        Args:
            donated: the donated arguments in order, then `fg.Limits` (unless graphify has them).
            outputs: "own" or "borrow"; None: as graphify was told.
            recorder: a name; or another step's, `recorder=step.recorder`, to share its pool.
            guards: poison padding and expired results; None: as graphify was told.
            progress: show a progress bar; a string is its label.
            lazy, memory_budget, on_failure: see `Compiled.capture`.

        Raises:
            FnGraphError: see the classes in `fngraph.errors`.
        """
        fn = self.graphified
        limits = fn.limits
        if donated and isinstance(donated[-1], Limits):
            *rest, limits = donated
            donated = tuple(rest)
        names = [fn.signature.names[i] for i in fn.signature.positions(Role.DONATED)]
        if len(donated) != len(names):
            raise TreeError(
                f"capture takes the donated arguments {names} and fg.Limits, got {len(donated)}"
            )
        values = dict(zip(fn.signature.positions(Role.HELD), self.held))
        values |= dict(zip(fn.signature.positions(Role.DONATED), donated))
        bound = [values[i] for i in sorted(values)]
        compiled = fn.trace(*bound, batch=batch, limits=limits).split().lower().compile()
        return compiled.capture(
            *bound, recorder=recorder or fn.recorder, outputs=outputs or fn.outputs,
            progress=progress, lazy=lazy, memory_budget=memory_budget, on_failure=on_failure,
            guards=fn.guards if guards is None else guards,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"Bound({self.graphified!r})"


def _with_dims(limits: Limits, batch: Any) -> Limits:
    """Limits that also bound the letters (B, ...) that only the first batch tells."""
    leaves, _ = trees.flatten(batch)
    dims = dict(limits.dims)
    for leaf, buffer in zip(leaves, buffers_of(type(batch)).values()):
        for dim, size in zip(buffer.dims, getattr(leaf, "shape", ())):
            if dim.text.isalpha() and dim.text not in ("T", "R"):
                dims.setdefault(dim.text, int(size))
    return Limits(limits.max_tokens, limits.max_reqs, **dims)


def _exact_shapes(batch: Any) -> Any:
    """The key of a batch without a spec: structure, shapes and dtypes. None for one with a spec."""
    if buffers_of(type(batch)):
        return None
    leaves, treedef = trees.flatten(batch)
    return treedef, tuple((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves)


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
            state_blocks=, cut=, align=, eager=, and the old use_cudagraph= and full_cuda_graph=.
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
    if not isinstance(backends, Mapping | None):
        raise BackendError(
            f'backends={backends!r}: pass them by primitive, backends={{"attention": {backends!r}}}'
        )
    for name, choices in (backends or {}).items():
        check_choices(name, choices)  # unknown names fail here, where they are written
    for name in resolve.keys() - inspect.signature(core.resolve).parameters.keys():
        raise TypeError(f"graphify() and fg.resolve() take no argument {name!r}")
    if on_ambient not in ("recapture", "error"):
        raise TypeError(f'on_ambient={on_ambient!r}: "recapture" or "error"')
    if not isinstance(allow_copies, int | None) or (allow_copies or 0) < 0:
        raise DonationError(f"allow_copies={allow_copies!r}: True, False or a number of bytes")
    generators = tuple(generators)
    for generator in generators:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"generators={generator!r}: a tuple of torch.Generator, (g,)")
    options = Options(
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
    Rules(memory_budget, on_failure)  # what means nothing fails here
    return Graphified(fn, options, donate, stage, limits, recorder, outputs, max_keys, guards)


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return graphify(*args, **kwargs)


# `import fngraph.graphify` puts this module where the function of the same name is expected
sys.modules[__name__].__class__ = _Callable
