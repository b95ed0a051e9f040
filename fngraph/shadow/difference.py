"""`Difference`: a step that came to something else than bare `forward`, kept to be looked into."""

from __future__ import annotations

import dataclasses
import weakref

from fngraph.core import Dispatch
from fngraph.core.text import count
from fngraph.executable import Executable
from fngraph.shadow.compared import Compared
from fngraph.shadow.saved import Saved


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """A verified step that differs; `fg.bisect(step, difference)` runs it again and says where.

    Attributes:
        call: the how many-th call of the step it was.
        ran: what it ran as, and why.
        saved: the batch, what it needed of the state, and generators, copied before the step.
        leaves: results and state that differ; none where another process alone differs.
        executable: what ran, of the ambient state (autocast, ...) that the call came under.
    """

    call: int
    ran: Dispatch
    saved: Saved
    leaves: tuple[Compared, ...]
    executable: weakref.ref[Executable]

    def as_text(self, name: str = "forward") -> str:
        """What differs, in a line or two."""
        mode, key, _ = self.ran
        head = f"call {self.call}, {self.saved.counts!r}, which ran as {mode} {key!r}"
        if not self.leaves:
            return f"{head}: another process differs from bare {name}, this one does not"
        more = len(self.leaves) - 1
        rest = f", and {count(more, 'leaf')} more".replace("leafs", "leaves") if more else ""
        return f"{head}, and bare {name} differ: {self.leaves[0]}{rest}"

    def __repr__(self) -> str:
        return f"Difference({self.as_text()})"
