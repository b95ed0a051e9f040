"""`Compiled`: a callable for each distinct piece, and how it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fngraph.core import Dim
from fngraph.core.text import count
from fngraph.fx.arguments import Arguments
from fngraph.fx.generators import Generators, with_generators
from fngraph.fx.pieces.code import blame, direct
from fngraph.fx.pieces.cuts import Cut, Piece
from fngraph.graphs.recorder import Recorder
from fngraph.ops.backend import Planner

if TYPE_CHECKING:
    from fngraph.stages.lowered import Lowered
    from fngraph.step.captured import Captured


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A callable for each step of the program. Equal pieces share theirs.

    Attributes:
        planners: what is planned on the host before each step.
    """

    lowered: Lowered
    fns: tuple[Callable[..., tuple[Any, ...]], ...]
    planners: tuple[Planner, ...] = ()

    @property
    def args(self) -> Arguments:
        """The abstract arguments."""
        return self.lowered.split.traced.args

    @property
    def rows(self) -> tuple[tuple[Dim | None, ...], ...]:
        """For each step, the varying first dims of its arguments; empty for a piece."""
        return tuple(p.rows if isinstance(p, Cut) else () for p in self.lowered.split.pieces.parts)

    def capture(
        self,
        *bound: Any,
        recorder: str | Recorder | None = None,
        outputs: str = "own",
        progress: bool | str = False,
        lazy: bool = False,
        memory_budget: int | None = None,
        on_failure: str | None = None,
        guards: bool = False,
    ) -> Captured:
        """Bind the held and donated arguments (in `forward`'s order) and capture every key.

        Args:
            recorder: "cuda", "tape", None for the one of the arguments' device, or one to share.
            outputs: "own": results are the caller's; "borrow": views, good until the next call.
            progress: show a progress bar; a string is its label.
            lazy: capture each key when it is first dispatched to, not now.
            memory_budget: bytes that the pool and all graphs may take together. Keys beyond it are
                captured when they are needed, and the least recently used ones go for them.
                None: as graphify was told.
            on_failure: of a key that cannot be captured: "raise", or "eager": its batches run
                eagerly, and the reason is counted. None: as graphify was told, which is "raise".
            guards: poison padding and expired results, to find what reads them.

        Raises:
            AliasError: a donated leaf shares its storage with another leaf.
            TreeError: arguments that differ from the traced ones.
            CaptureError: a key that could not be captured.
        """
        from fngraph.step.allocate import bind_and_allocate
        from fngraph.step.book import Rules

        options = self.lowered.split.traced.options
        budget = options.memory_budget if memory_budget is None else memory_budget
        rules = Rules(budget, on_failure or options.on_failure)
        captured = bind_and_allocate(self, bound, recorder, outputs, rules, guards).under_ambient()
        if not lazy:
            captured.capture_all(progress=progress)
        return captured

    def as_text(self) -> str:
        """The code of each distinct piece."""
        codes = [p.gm.code.strip() for p in self.lowered.split.distinct]
        return "\n\n".join(f"# piece {i}\n{code}" for i, code in enumerate(codes))

    def __repr__(self) -> str:
        callables, steps = count(len(set(self.fns)), "callable"), count(len(self.fns), "step")
        return f"Compiled({callables} for {steps})"


def compile_parts(lowered: Lowered) -> Compiled:
    """See `Lowered.compile`."""
    shared: dict[int, Callable[..., tuple[Any, ...]]] = {}
    calls, generators = iter(lowered.calls), lowered.split.traced.options.generators
    fns = [
        next(calls).compile()
        if isinstance(p, Cut)
        else shared.setdefault(id(p), _piece_fn(p, generators))
        for p in lowered.split.pieces.parts
    ]
    planners = {id(p): p for call in lowered.calls for p in call.planners.values()}
    return Compiled(lowered, tuple(fns), tuple(planners.values()))


def _piece_fn(piece: Piece, generators: Generators) -> Callable[..., tuple[Any, ...]]:
    gm = with_generators(piece.gm, generators)
    forward = direct(gm)  # not gm(...): nn.Module.__call__ takes some 3 us a piece

    def run(sizes: Mapping[str, int], host: Any, *tensors: torch.Tensor) -> tuple[Any, ...]:
        try:
            return forward(sizes["T"], sizes["R"], *tensors)
        except Exception as error:
            if (op := blame(gm, error)) is not None:
                error.add_note(f"in {op}")
            raise

    return run
