"""What a process refuses before it has a step for it: others are told once it can be."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from fngraph.step.agreed import as_told


class Untold:
    """Calls of a graphified function that this process has refused before it had a step for them,
    and that nobody was told of.

    Others may go on with such a call, and wait in the agreement before its step: who does not come
    there would come with its next call, which they would take for this one. A step knows whom its
    collectives meet. Before there is one, nobody does: then the call that makes one tells them.
    """

    def __init__(self) -> None:
        self._calls: collections.Counter[tuple[Fixed, str]] = collections.Counter()

    def refuse(self, steps: Mapping[tuple[Any, Any], Any], fixed: Fixed, error: Exception) -> None:
        """Tell the others of a call, or keep it until a step can.

        Args:
            steps: of the function, by arguments that are a part of it, and exact shapes; the most
                recently used is last.
        """
        why = as_told(error)
        own = [step for (known, _), step in steps.items() if fixed in (None, known)]
        meeting = [step for step in own or steps.values() if _meets(step)]
        if meeting:
            meeting[-1]._tell_refused(why)
        elif not own:
            self._calls[fixed, why] += 1

    def step_made(self, step: Any, fixed: Fixed) -> None:
        """Tell those who wait in the calls before this one, which has made a step."""
        if _meets(step):
            for _, why in self._calls.elements():
                step._tell_refused(why)
            self._calls.clear()
        for one in [one for one in self._calls if one[0] in (None, fixed)]:
            del self._calls[one]  # they would have met nobody


Fixed = tuple[Any, ...] | None
"""Arguments that are a part of the function; None: of a call that was refused before them."""


def _meets(step: Any) -> bool:
    """Whether its graph has collectives."""
    return step.main.executable.peers is not None
