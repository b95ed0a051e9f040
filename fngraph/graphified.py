"""`graphify`: a drop-in for `forward` that runs each batch as CUDA graphs.

Called without more, what it returns traces, splits, lowers, compiles and binds at the first call,
and captures each key when it is first needed; `bind(...).capture(...)` does all of it ahead.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, overload

from fngraph.core import BatchSpec, Dispatch, Explanation, Limits, Stats, buffers_of, trees
from fngraph.errors import TreeError
from fngraph.fx.ambient import check_no_transform
from fngraph.fx.arguments import Names, abstract_arguments, signature
from fngraph.fx.leaves import Role
from fngraph.fx.tracing.purity import is_tracing
from fngraph.fx.tracing.refusals import Refusals
from fngraph.options import (
    CaptureDict,
    Options,
    OptionsDict,
    parse_options,
    signature_with_options,
)
from fngraph.stages import Look, Traced, trace_function
from fngraph.step.step import Step

P = ParamSpec("P")
R = TypeVar("R")


@overload
def graphify(
    fn: Callable[P, R], *, donate: Names = None, stage: Names = None, **options: Unpack[OptionsDict]
) -> Graphified[P, R]: ...
@overload
def graphify(
    fn: None = None, *, donate: Names = None, stage: Names = None, **options: Unpack[OptionsDict]
) -> Callable[[Callable[P, R]], Graphified[P, R]]: ...
def graphify(
    fn: Callable[P, R] | None = None,
    *,
    donate: Names = None,
    stage: Names = None,
    **options: Unpack[OptionsDict],
) -> Graphified[P, R] | Callable[[Callable[P, R]], Graphified[P, R]]:
    """Turn a pure function into one that runs each batch as CUDA graphs.

    A batch is padded to its key's size, so what mixes rows over T or R (a mean, `x[-1]`, a sort)
    is an error, unless primitives or masks keep padding out (`RowsError`, `fg.trust_rows`).
    Results carry no gradients, whatever requires them: take gradients inside, `torch.func.grad`.
    What it calls under `torch.compile` is traced as the function that was compiled.

    Args:
        fn: `forward(params, cache, batch) -> (outputs, cache)`; left out: a decorator.
        donate: names or positions of arguments that are updated in place and returned.
        stage: the batch's name or position: an `fg.struct` with `fg.buffer` fields and a spec, or
            any tree of tensors, whose exact shapes are the key then, as in `jax.jit`.
        modes: NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE (the default).
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
        resolve: what else `fg.resolve` is told of the model: pooling=, encoder_decoder=,
            layerwise=, state_blocks=, cut=, align=, beyond=, eager=.
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
        passes: rewrites of the traced graph, in order: names of `fg.passes.PASSES`, functions of an
            `fx.Graph`, `...` for those of the level, "all" for all; None: those of the level, none
            at compile="none". `Traced` prints how often each matched.
        compile: "none": pieces run op by op, as they were traced. "pieces": Inductor compiles each
            distinct piece once, its sizes symbols. "once": the whole function at once, for all
            sizes; only without primitives. "stock": it is under `torch.compile`, with its guards;
            likewise. Results are then close to `forward`'s, no longer equal in every bit.
        compile_sizes: numbers of tokens that "pieces" has code of their own for.
        cache: keep what is compiled, and load it in the next process, from the folder that the
            environment's FNGRAPH_CACHE says ("off": none), or `fngraph` in your cache folder.
        guards: for finding bugs, at some cost: padding rows, where no pad is declared or relied on,
            hold NaN or a copy of a true row; borrowed results are poisoned when the next guarded
            call on the pool begins, and to use one then is a `StaleError`.

    Raises:
        ModesError, TreeError, BackendError, DonationError, TypeError: an option that names nothing.
    """
    if fn is None:
        return lambda given: graphify(given, donate=donate, stage=stage, **options)
    return Graphified(fn, parse_options(options), donate, stage)


graphify.__signature__ = signature_with_options(graphify)  # type: ignore[attr-defined]


class Graphified(Generic[P, R]):
    """A graphified function. Immutable but for what its calls have captured; see `graphify`."""

    def __init__(
        self, fn: Callable[P, R], options: Options, donate: Names = None, stage: Names = None
    ) -> None:
        functools.update_wrapper(self, fn)
        self.options, self.signature = options, signature(fn, donate, stage)
        self._steps: dict[Any, Step[R]] = {}  # by exact shapes; one under None for a spec
        self._evicted = Stats()
        self._lock = threading.RLock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
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
        with self._lock:  # or the first calls of several threads would each make a step
            step = self._step_for(values, held)
        return step(*[v for i, v in enumerate(values) if i not in held])

    def _step_for(self, values: list[Any], held: list[int]) -> Step[R]:
        (staged,) = self.signature.positions(Role.STAGED)
        key = _exact_shapes(values[staged])
        step = self._steps.get(key)
        if step is None and trees.register_dataclasses(values):
            key = _exact_shapes(values[staged])
        if step is None:
            step = self._first_call(values, staged)
        else:
            for position in held:
                step.binding.check_argument(position, values[position])
            del self._steps[key]
        self._steps[key] = step  # the most recently used is last
        if len(self._steps) > self.options.max_keys:
            evicted = self._steps.pop(next(iter(self._steps)))
            evicted.release()  # waits for the device, which may still run a graph of it
            self._evicted = self._evicted + evicted.stats
        return step

    def _first_call(self, values: list[Any], staged: int) -> Step[R]:
        limits = _with_dims(self.options.limits or Limits(), values[staged])
        bound = [v for i, v in enumerate(values) if i != staged]
        compiled = self.trace(*bound, batch=values[staged], limits=limits).split().lower().compile()
        recorder = self.steps[-1].recorder if self.steps else None  # exact shapes share one pool
        return compiled.capture(*bound, recorder=recorder, lazy=True)

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
        return self._trace(given, limits or self.options.limits or Limits(), Refusals())

    def trace_call(self, args: Sequence[Any], refuse: Refusals, look: Look | None = None) -> Traced:
        """Trace over all arguments of a call; what is refused goes to `refuse`."""
        values = self._values(tuple(args), {})
        trees.register_dataclasses(values)
        (staged,) = self.signature.positions(Role.STAGED)
        limits = _with_dims(self.options.limits or Limits(), values[staged])
        return self._trace(dict(zip(self.signature.names, values)), limits, refuse, look)

    def _trace(
        self,
        given: Mapping[str, Any],
        limits: Limits,
        refuse: Refusals,
        look: Look | None = None,
    ) -> Traced:
        args = abstract_arguments(self.signature, given)
        if args.batch_type is None:  # exact shapes: one key of one "token"
            options = dataclasses.replace(self.options, sizes=(1,), query_lens=(1,))
            return trace_function(args, options, Limits(1, 1), refuse, look)
        return trace_function(args, self.options, limits, refuse, look)

    def bind(self, *held: Any) -> Bound[R]:
        """Bind the held arguments: they are flattened once, and a step no longer takes them.

        It is the tensors that are bound. One that moves is noticed at the next call; a new tensor
        put into the container that was passed here is not seen any more.
        """
        names = [self.signature.names[i] for i in self.signature.positions(Role.HELD)]
        if len(held) != len(names):
            raise TreeError(
                f"bind takes {len(names)} held arguments, {names}, got {len(held)}. Say which of "
                "them come with each call: fg.graphify(..., donate=..., stage=...)"
            )
        return Bound(self, held)

    @property
    def stats(self) -> Stats:
        """What the calls so far ran as."""
        return sum((step.stats for step in self.steps), self._evicted)

    def dispatch(self, spec: BatchSpec) -> Dispatch:
        """What `spec` runs as; after the first call."""
        return self._latest().dispatch(spec)

    def explain(self, spec: BatchSpec) -> Explanation:
        """Why `spec` runs as it does; after the first call."""
        return self._latest().explain(spec)

    @property
    def steps(self) -> tuple[Step[R], ...]:
        """What calls have made so far: a step for each exact shape, or one; last used is last."""
        return tuple(self._steps.values())

    def _latest(self) -> Step[R]:
        if not self._steps:
            raise TreeError(
                "nothing is known of the arguments before the first call. Call it once, or use "
                "fast_fwd.trace(params, cache).split().lower(limits).table"
            )
        return self.steps[-1]

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


class Bound(Generic[R]):
    """A graphified function with its held arguments bound; `capture` makes the step."""

    def __init__(self, graphified: Graphified[..., R], held: tuple[Any, ...]) -> None:
        self.graphified, self.held = graphified, held

    def capture(self, *donated: Any, batch: Any = None, **options: Unpack[CaptureDict]) -> Step[R]:
        """Trace, lower, compile and capture every key: `capture(cache, limits)`.

        Args:
            donated: the donated arguments in order, then `fg.Limits` (unless graphify has them).
            batch: an example, needed only where the staged parameter is not annotated.
            options: see `Compiled.capture`; but a progress bar is shown unless progress=False.

        Raises:
            FnGraphError: see the classes in `fngraph.errors`.
        """
        fn = self.graphified
        limits, given = fn.options.limits, donated
        if donated and isinstance(donated[-1], Limits):
            *rest, limits = donated
            donated = tuple(rest)
        names = [fn.signature.names[i] for i in fn.signature.positions(Role.DONATED)]
        if len(donated) != len(names):
            raise TreeError(
                f"capture takes {', '.join((*names, 'fg.Limits(...)'))}, in this order; got "
                f"{', '.join(type(x).__name__ for x in given) or 'nothing'}"
            )
        values = dict(zip(fn.signature.positions(Role.HELD), self.held))
        values |= dict(zip(fn.signature.positions(Role.DONATED), donated))
        bound = [values[i] for i in sorted(values)]
        lowered = fn.trace(*bound, batch=batch, limits=limits).split().lower()
        compiled = lowered.compile(progress=bool(options.setdefault("progress", True)))
        return compiled.capture(*bound, **options)

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
