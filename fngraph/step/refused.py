"""Calls of a graphified function that are refused before they come to a step, and who is told.

Other processes may go on with such a call, and wait in the agreement before its step: who does not
come there would come with its next call, which they would take for this one. So a call that is
refused comes to an agreement as well, to say so. A step knows whom its collectives meet. Before
there is one, nobody does; then it is kept, and told by the call that makes one.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from fngraph.step.agreed import as_told
from fngraph.step.step import Step

Fixed = tuple[Any, ...] | None
"""The arguments that are a part of the function; None: a call that did not come so far."""
Steps = Mapping[tuple[Any, Any], Step[Any]]
"""Of a function, by such arguments and exact shapes; the most recently used is last."""


class Untold:
    """The refused calls of a function that nobody was told of yet."""

    def __init__(self) -> None:
        self._calls: collections.Counter[tuple[Fixed, str]] = collections.Counter()

    def refuse(self, steps: Steps, fixed: Fixed, error: Exception) -> None:
        """Tell the others that this process does not run a call, or keep it until a step can."""
        why = as_told(error)
        own = [step for (known, _), step in steps.items() if fixed in (None, known)]
        meeting = [step for step in own or steps.values() if _meets(step)]
        if meeting:
            meeting[-1]._tell_refused(why)
        elif not own:
            self._calls[fixed, why] += 1

    def step_made(self, step: Step[Any], fixed: Fixed) -> None:
        """Tell of the calls before this one, which has made a step, to those who wait in them."""
        if _meets(step):
            for _, why in self._calls.elements():
                step._tell_refused(why)
            self._calls.clear()
        for one in [one for one in self._calls if one[0] in (None, fixed)]:
            del self._calls[one]  # they would have met nobody


def _meets(step: Step[Any]) -> bool:
    """Whether its graph has collectives."""
    return step.main.executable.peers is not None
