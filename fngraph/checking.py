"""`fg.check`: everything in a function that a graph could not hold, at once.

`graphify` raises the first error; a check goes on behind each with a stand-in value of the same
type, so that porting a model is one list and not one error a run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fngraph.core import Limits
from fngraph.errors import FnGraphError, PurityError
from fngraph.fx.arguments import Names
from fngraph.fx.leaves import Role
from fngraph.fx.tracing.refusals import Refusals
from fngraph.graphified import graphify
from fngraph.passes.shipped import PassList
from fngraph.rehearsing import Keys, rehearsal


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What `fg.check` found; true if that is nothing.

    Attributes:
        errors: what `graphify` would raise, in the order of the trace, each line's once a class.
        rehearsed: T and R of the keys in which all true rows were the same.
    """

    errors: tuple[FnGraphError, ...]
    rehearsed: tuple[tuple[int, int], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    def __bool__(self) -> bool:
        return self.ok

    def raise_first(self) -> None:
        """Raise the first error, if there is one."""
        if self.errors:
            raise self.errors[0]

    def as_text(self) -> str:
        """A numbered paragraph for each error."""
        if self.ok:
            keys = ", ".join(f"T={t} R={r}" for t, r in self.rehearsed)
            same = f"; rehearsed in {keys}: true rows are the same" if keys else ""
            return f"nothing in forward that a graph could not hold{same}"
        named = (f"{type(error).__name__}: {error}" for error in self.errors)
        return "\n\n".join(f"{i}. {text}" for i, text in enumerate(named, 1))

    __repr__ = as_text


def check(
    forward: Callable[..., Any],
    *args: Any,
    donate: Names = None,
    stage: Names = None,
    limits: Limits | None = None,
    allow_copies: bool | int | None = None,
    generators: Iterable[torch.Generator] = (),
    compile: str = "none",
    passes: PassList = None,
    rehearse: Keys = False,
) -> Report:
    """Trace `forward` and report all that `graphify` would refuse, running nothing.

    Passes run where there is no error before them. What a pass raises ends the report.

    A later error may come of an earlier one's stand-in value (1, 1.0, True, a fresh tensor). Where
    `forward` cannot go on with one, the last entry says at which line the report ends.

    Args:
        args: all of forward's arguments, as in a call; tensors or `fg.like` specs.
        donate, stage, limits, allow_copies, generators: as for `graphify`.
        compile, passes: likewise; nothing is compiled.
        rehearse: True: then run the traced ops, on copies of what is donated, for the batch as it
            is and as keys of some more tokens and requests have it, and name the first value whose
            true rows differ, with its line. That tries what no trace can see: `fg.trust_rows`, rows
            that are said to be kept for padding, indices. Or which keys: [(T, R), ...]. Those of a
            batch without a `BatchSpec` are of exact shapes, with nothing to rehearse.

    Raises:
        TreeError: `donate` or `stage` names no parameter of `forward`; no tensors to rehearse with.
        SpecError: a key to rehearse that cannot hold the batch, or is none.
        PassError: `passes` has what is no pass.
    """
    made = graphify(
        forward, donate=donate, stage=stage, limits=limits, allow_copies=allow_copies,
        generators=generators, compile=compile, passes=passes,
    )  # fmt: skip
    refuse = Refusals(go_on=True)
    (staged,) = made.signature.positions(Role.STAGED)
    rehearsed: list[tuple[int, int]] = []
    look = None
    if rehearse is not False:
        look = rehearsal(args, args[staged], rehearse, refuse, rehearsed)
    try:
        with refuse.catching():
            made.trace_call(args, refuse, look).split()
    except Exception as error:  # of a stand-in that no check was ready for, or of a pass
        text = ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        why = "because of what is above " if refuse.errors else ""
        refuse(PurityError(f"forward: the report ends here, {why}({text})"))
    return Report(tuple(_distinct(refuse.errors)), tuple(rehearsed))


def _distinct(errors: list[FnGraphError]) -> list[FnGraphError]:
    """The first of each class and line; without a line, of each text."""
    found: dict[tuple[type, str], FnGraphError] = {}
    for error in errors:
        line = re.match(r"(.+?:\d+): ", str(error))
        found.setdefault((type(error), line[1] if line else str(error)), error)
    return list(found.values())
