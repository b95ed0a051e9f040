"""`Graphified`: what `graphify` returns; each call runs `forward`'s batch as its graphs.

Called without more, it traces, splits, lowers, compiles and binds at the first call, and captures
each key when it is first needed. `bind(...).capture(...)` does all of it ahead of time.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fngraph.bound import Bound
from fngraph.core import BatchSpec, Dispatch, Explanation, Limits, Stats, buffers_of, trees
from fngraph.errors import TreeError
from fngraph.fx.ambient import check_no_transform
from fngraph.fx.arguments import Names, arguments, signature
from fngraph.fx.leaves import Role
from fngraph.fx.tracing.purity import is_tracing
from fngraph.fx.tracing.refusals import Refusals
from fngraph.graphs.recorders import check_name
from fngraph.stages import Options, Traced, trace_function
from fngraph.step.allocate import check_outputs
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
            raise TreeError(
                f"bind takes {len(names)} held arguments, {names}, got {len(held)}. Say which of "
                "them come with each call: fg.graphify(..., donate=..., stage=...)"
            )
        return Bound(self, held)

    @property
    def stats(self) -> Stats:
        """What the calls so far ran as."""
        return sum((step.stats for step in self._captured.values()), self._evicted)

    def dispatch(self, spec: BatchSpec) -> Dispatch:
        """What `spec` runs as; after the first call."""
        return self._latest().dispatch(spec)

    def explain(self, spec: BatchSpec) -> Explanation:
        """Why `spec` runs as it does; after the first call."""
        return self._latest().explain(spec)

    def _latest(self) -> Captured:
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
