"""`Bound`: a graphified function over its weights, from which a step is captured ahead of time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fngraph.core import Limits
from fngraph.errors import TreeError
from fngraph.fx.leaves import Role
from fngraph.graphs.recorder import Recorder
from fngraph.step.captured import Captured

if TYPE_CHECKING:
    from fngraph.graphified import Graphified


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
        limits, given = fn.limits, donated
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
        compiled = fn.trace(*bound, batch=batch, limits=limits).split().lower().compile()
        return compiled.capture(
            *bound, recorder=recorder or fn.recorder, outputs=outputs or fn.outputs,
            progress=progress, lazy=lazy, memory_budget=memory_budget, on_failure=on_failure,
            guards=fn.guards if guards is None else guards,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"Bound({self.graphified!r})"
