"""`graphify`: a drop-in for `forward` that runs each batch as CUDA graphs.

Called without more, what it returns traces, splits, lowers, compiles and binds at the first call,
and captures each key when it is first needed; `bind(...).capture(...)` does all of it ahead.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, Unpack, overload

from fngraph.core import BatchSpec, Dispatch, Explanation, Limits, Stats, buffers_of, trees
from fngraph.core.text import expect
from fngraph.core.where import users_part
from fngraph.errors import RankError, TreeError
from fngraph.fx.arguments import Arguments, abstract_arguments
from fngraph.fx.leaves import Role
from fngraph.fx.signatures import Names, as_static, signature
from fngraph.fx.tracing.ambient import check_no_transform
from fngraph.fx.tracing.purity import is_tracing
from fngraph.fx.tracing.refusals import Refusals
from fngraph.options import (
    CaptureDict,
    Options,
    OptionsDict,
    check_names,
    parse_options,
    signature_with_options,
)
from fngraph.ranks.faults import say_failed
from fngraph.shadow.saved import is_bare
from fngraph.stages import Traced
from fngraph.step.step import Step
from fngraph.step.untold import Untold
from fngraph.torch_facts.tracing import run_by_python
from fngraph.tracing import Look, trace_function

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
        fn: `forward(params, cache, batch) -> (outputs, cache)`; left out: a decorator. Arguments
            that a call leaves to their defaults, and text, flags, dtypes and None, are static: part
            of the function, which is traced and captured for each of their values.
        donate: names or positions of arguments that are updated in place and returned.
        stage: the batch's name or position: an `fg.struct` with `fg.buffer` fields and a spec, or
            any tree of tensors, whose exact shapes are the key then, as in `jax.jit`; several
            parameters are such a tree too: ("x", "t").
        modes: NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE (the default).
        limits: bounds of every step in tokens and requests, and the sizes of other letters,
            `fg.Limits(8192, 256, B=512)`: each batch's leaves are exactly so wide. None: 8192
            tokens, 256 requests, other letters as the first batch has them.
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
        key_reqs: requests that a key of mixed batches holds; or several such numbers, with a key
            for each at each size. None: as many as `limits` allow. Batches with more of them run
            eagerly. For encoders, whose eager batches may be large.
        max_keys: of a batch without a spec, how many exact shapes are kept; the least recently
            used goes first. `stats` counts each, and the second that goes is a warning.
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
        megakernel: whether FULL keys of up to four requests, a token each, run a decoder's layers
            and head as one launch, where passes have fused them and the GPU is of compute
            capability 9.0 or later: docs/compile.md. `Compiled` prints it; `Lowered.one_launch`
            says why not.
        compile: "none": pieces run op by op, as they were traced. "pieces": Inductor compiles each
            distinct piece once, its sizes symbols. "once": the whole function at once, for all
            sizes; only without primitives. "stock": it is under `torch.compile`, with its guards;
            likewise. Results are then close to `forward`'s, no longer equal in every bit.
        compile_sizes: numbers of tokens that "pieces" has code of their own for.
        cache: keep what is compiled, and load it in the next process, from the folder that the
            environment's FNGRAPH_CACHE says ("off": none), or `fngraph` in your cache folder.
        verify: the share of steps, 1e-3 say, that run a second time through bare `forward`, on
            copies of what is donated; or a `fg.Verify`, which has more to say. What differs is
            counted in `stats`, kept in `step.differences`, and a warning; docs/instruments.md.
        record: how many of the last steps `step.log` keeps: what each was, and its times; 0: none.
        guards: for finding bugs, at some cost: padding rows, where no pad is declared or relied on,
            hold NaN or a copy of a true row; borrowed results are poisoned when the next guarded
            call on the pool begins, and to use one then is a `StaleError`.

    Raises:
        ModesError, TreeError, BackendError, DonationError, TypeError: an option that names nothing.
    """
    if fn is None:
        return lambda given: graphify(given, donate=donate, stage=stage, **options)
    expect(Callable, "a function", TreeError, fn=fn)
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
        self._untold = Untold()
        self._evicted = Stats()
        self._evictions: collections.Counter[Any] = collections.Counter()  # by structure
        self._lock = threading.RLock()

    @run_by_python
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """`forward`'s own signature and meaning; donated arguments are updated in place.

        Inside of another graphified function it is `forward` itself, and traced as a part of it;
        so it is where that one runs bare, for `verify=` and `fg.bisect`.

        Raises:
            FnGraphError: see the classes in `fngraph.errors`.
        """
        if is_tracing() or is_bare():
            return self.signature.fn(*args, **kwargs)
        fixed = None  # arguments that are a part of the function; None: not known
        try:
            check_no_transform()
            values = self._values(args, kwargs)
            held = self.signature.positions(Role.HELD)
            fixed = tuple([values[i] for i in held if type(values[i]) is trees.Static])
            with self._lock:  # or the first calls of several threads would each make a step
                step = self._step_for(values, held, fixed)
        except Exception as error:
            with self._lock:
                self._untold.refuse(self._steps, fixed, error)
            raise users_part(error)  # noqa: B904 - the same error
        return step(*[v for i, v in enumerate(values) if i not in held])

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a function is that stands in a class: a method, whose `self` is the first argument."""
        return self if instance is None else types.MethodType(self, instance)

    def _step_for(self, values: list[Any], held: list[int], fixed: tuple[Any, ...]) -> Step[R]:
        (staged,) = self.signature.positions(Role.STAGED)
        key = fixed, _exact_shapes(values[staged])
        step = self._steps.get(key)
        if step is None and trees.register_dataclasses(values):
            key = fixed, _exact_shapes(values[staged])
        if step is None:
            step = self._first_call(values, staged)
            self._untold.step_made(step, fixed)
        else:
            for position in held:
                step.binding.check_argument(position, values[position])
            del self._steps[key]
        self._steps[key] = step  # the most recently used is last
        if len(self._steps) > self.options.max_keys:
            oldest = next(iter(self._steps))
            evicted = self._steps.pop(oldest)
            evicted.release()  # waits for the device, which may still run a graph of it
            self._evicted = self._evicted + _with_shape(oldest, evicted.stats)
            self._note_eviction(oldest, key)
        return step

    def _note_eviction(self, oldest: Any, key: Any) -> None:
        """Warn at the second one of a structure: shapes that come back are captured each time."""
        kind = oldest[1] and oldest[1][0]
        self._evictions[kind] += 1
        if self._evictions[kind] == 2:
            name = getattr(self.signature.fn, "__name__", "forward")
            warnings.warn(
                f"{name} keeps max_keys={self.options.max_keys} exact shapes of its batch, and "
                f"lets the second one go: {_shape_text(oldest)} for {_shape_text(key)}. What has "
                "gone is traced and captured again when it comes back. Keep more, "
                f"fg.graphify(..., max_keys={4 * self.options.max_keys}); or pad batches to "
                "fewer shapes, which a batch with a spec does by itself (@fg.struct, fg.buffer)",
                stacklevel=4,
            )

    def _first_call(self, values: list[Any], staged: int) -> Step[R]:
        limits = _with_dims(self.options.limits or Limits(), values[staged])
        bound = [v for i, v in enumerate(values) if i != staged]
        compiled = self.trace(*bound, batch=values[staged], limits=limits).split().lower().compile()
        recorder = self.steps[-1].recorder if self.steps else None  # exact shapes share one pool
        return compiled.capture(*bound, recorder=recorder, lazy=True)

    @run_by_python
    def trace(self, *bound: Any, batch: Any = None, limits: Limits | None = None) -> Traced:
        """Trace over held and donated arguments (tensors or `fg.like` specs), in order.

        Args:
            batch: an example, needed only where the staged parameter is not annotated.
            limits: sizes of the letters other than T and R, and bounds of those two.

        Raises:
            PurityError: see its subclasses. DonationError, TreeError.
        """
        sig = self.signature
        names = [sig.names[i] for i in sig.positions(Role.HELD, Role.DONATED)]
        values = self._bound("trace", bound, Role.HELD, Role.DONATED)
        trees.register_dataclasses((values, batch))
        given = dict(zip(names, values))
        (staged,) = sig.positions(Role.STAGED)
        if batch is not None:
            parts = sig.together is not None and not isinstance(batch, sig.together)
            given[sig.names[staged]] = sig.together(*batch) if parts else batch
        try:
            args = abstract_arguments(sig, given)
            return self._trace(args, limits or self.options.limits or Limits(), Refusals())
        except Exception as error:
            raise users_part(error)  # noqa: B904 - the same error

    def trace_call(
        self,
        args: Sequence[Any],
        refuse: Refusals,
        look: Look | None = None,
        meet: Callable[[list[Any], Arguments, Limits], None] | None = None,
    ) -> Traced:
        """Trace over all arguments of a call; what is refused goes to `refuse`.

        Args:
            look: see `trace_function`.
            meet: is shown the arguments before they are traced: as they are, as a trace has them,
                and their limits.
        """
        values = self._values(tuple(args), {})
        trees.register_dataclasses(values)
        (staged,) = self.signature.positions(Role.STAGED)
        limits = _with_dims(self.options.limits or Limits(), values[staged])
        abstract = abstract_arguments(self.signature, dict(zip(self.signature.names, values)))
        if meet is not None:
            meet(values, abstract, limits)
        return self._trace(abstract, limits, refuse, look)

    def _trace(
        self, args: Arguments, limits: Limits, refuse: Refusals, look: Look | None = None
    ) -> Traced:
        if args.batch_type is None:  # exact shapes: one key of one "token"
            options = dataclasses.replace(self.options, sizes=(1,), query_lens=(1,))
            return trace_function(args, options, Limits(1, 1), refuse, look)
        return trace_function(args, self.options, limits, refuse, look)

    def bind(self, /, *held: Any, **named: Any) -> Bound[R]:
        """Bind the held arguments: they are flattened once, and a step no longer takes them.

        Args:
            held, named: in order, or by name: bind(params), bind(params=params).

        It is the tensors that are bound. One that moves is noticed at the next call; a new tensor
        put into the container that was passed here is not seen any more.
        """
        return Bound(self, tuple(self._bound("bind", held, Role.HELD, named=named)))

    def _bound(
        self, verb: str, given: Sequence[Any], *roles: Role, named: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Arguments of some roles, in order or by name; defaults are left out or not."""
        try:
            return self.signature.values(given, named or {}, *roles)
        except TreeError:
            names = [self.signature.names[i] for i in self.signature.positions(*roles)]
            got = len(given) + len(named or {})
            raise TreeError(
                f"{verb} takes {len(names)} arguments, {names}, which are "
                f"{' or '.join(role.value for role in roles)}; got {got}. Say which of them "
                "come with each call: fg.graphify(..., donate=..., stage=...)"
            ) from None

    @property
    def stats(self) -> Stats:
        """What the calls so far ran as."""
        ran = (_with_shape(key, step.stats) for key, step in self._steps.items())
        return sum(ran, self._evicted)

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
            sig = self.signature
            bound = ", ".join(sig.names[i] for i in sig.positions(Role.HELD, Role.DONATED))
            raise TreeError(
                "nothing is known of the arguments before the first call. Call it once, or use "
                f".trace({bound}).split().lower(limits).table"
            )
        return self.steps[-1]

    def _values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        sig = self.signature
        if kwargs or len(args) != len(sig.names) or sig.together is not None:
            return sig.values(args, kwargs, *Role)
        return [as_static(x) if role is Role.HELD else x for x, role in zip(args, sig.roles)]

    def __repr__(self) -> str:
        return f"graphify({self.signature!r}, modes={self.options.modes or 'default'})"


class Bound(Generic[R]):
    """A graphified function with its held arguments bound; `capture` makes the step."""

    def __init__(self, graphified: Graphified[..., R], held: tuple[Any, ...]) -> None:
        self.graphified, self.held = graphified, held

    @run_by_python
    def capture(self, *donated: Any, batch: Any = None, **options: Unpack[CaptureDict]) -> Step[R]:
        """Trace, lower, compile and capture every key: `capture(cache, limits)`.

        Args:
            donated: the donated arguments in order, then `fg.Limits` (unless graphify has them).
            batch: an example, needed only where the staged parameter is not annotated.
            options: see `Compiled.capture`; but a progress bar is shown unless progress=False.

        Raises:
            FnGraphError: see the classes in `fngraph.errors`.
        """
        try:
            return self._capture(donated, batch, options)
        except Exception as error:
            if not isinstance(error, RankError):  # which the others have as well
                say_failed(error)  # to those who wait for this process to capture with them
            raise users_part(error)  # noqa: B904 - the same error

    def _capture(self, donated: tuple[Any, ...], batch: Any, options: CaptureDict) -> Step[R]:
        check_names("capture", options, CaptureDict, ("batch",))
        fn = self.graphified
        limits, given = fn.options.limits, donated
        if donated and isinstance(donated[-1], Limits):
            *rest, limits = donated
            donated = tuple(rest)
        names = [fn.signature.names[i] for i in fn.signature.positions(Role.DONATED)]
        if len(donated) != len(names):
            raise TreeError(
                f"capture takes {self._capture_takes()}, in this order; got "
                f"{', '.join(type(x).__name__ for x in given) or 'nothing'}"
            )
        values = dict(zip(fn.signature.positions(Role.HELD), self.held))
        values |= dict(zip(fn.signature.positions(Role.DONATED), donated))
        bound = [values[i] for i in sorted(values)]
        lowered = fn.trace(*bound, batch=batch, limits=limits).split().lower()
        compiled = lowered.compile(progress=bool(options.setdefault("progress", True)))
        return compiled.capture(*bound, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """What is bound has no graphs yet: `capture` makes the step.

        Raises:
            TreeError: always.
        """
        names = self._capture_takes()
        raise TreeError(
            f"bind(...) is called once it is captured: step = bound.capture({names}), then "
            "step(...). Or call the graphified function, with all of its arguments"
        )

    def _capture_takes(self) -> str:
        """The arguments of `capture`, as they are written."""
        sig = self.graphified.signature
        names = [sig.names[i] for i in sig.positions(Role.DONATED)]
        (staged,) = sig.positions(Role.STAGED)
        if sig.together is not None:  # exact shapes
            return ", ".join([*names, f"batch=({sig.names[staged]})"])
        return ", ".join([*names, "fg.Limits(max_tokens=..., max_reqs=...)"])

    def __repr__(self) -> str:
        return f"Bound({self.graphified!r})"


def _with_dims(limits: Limits, batch: Any) -> Limits:
    """Limits that also say the letters (B, ...) that only the first batch tells."""
    dims = dict(limits.dims)
    for name, buffer in buffers_of(type(batch)).items():  # by name: what is None is no leaf
        for dim, size in zip(buffer.dims, getattr(getattr(batch, name), "shape", ())):
            if dim.text.isalpha() and not dim.moves:
                dims.setdefault(dim.text, int(size))
    return Limits(limits.max_tokens, limits.max_reqs, **dims)


def _exact_shapes(batch: Any) -> Any:
    """The key of a batch without a spec: structure, shapes and dtypes. None for one with a spec."""
    if buffers_of(type(batch)):
        return None
    leaves, treedef = trees.flatten(batch)
    return treedef, tuple((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves)


def _shape_text(key: Any) -> str:
    """Exact shapes and static arguments, "float32[64, 4], 'relu'"."""
    fixed, exact = key
    shapes = () if exact is None else exact[1]
    leaves = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in shapes]
    return ", ".join([*leaves, *map(repr, fixed)])


def _with_shape(key: Any, stats: Stats) -> Stats:
    """What ran at a key of `Graphified`, which counts by shape where there is no spec."""
    return stats if key[1] is None else stats.of_shape(_shape_text(key))
