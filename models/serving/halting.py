"""How the host ends a launch of several tokens while it runs: at the token that it is at.

    done or halt -> a turn's requests are all done, so the loop on the device ends behind it

The launch reads one flag on the device in each turn. The host raises it by a copy on a stream of
its own, which waits for nothing: so who comes in the middle of 128 tokens waits for one of them.
Texts stay those of single steps, of which a halted launch has drawn fewer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Halt:
    """A flag that launches of several tokens read, and who waits for them may raise.

    Attributes:
        leaf: (1,) bool, where the model is. Launches hold it as they hold weights.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.leaf = torch.zeros(1, dtype=torch.bool, device=device)
        self._stream: Any = None
        if self.leaf.is_cuda:
            self._stream = torch.cuda.Stream(self.leaf.device)
            self._values = torch.tensor([False, True]).pin_memory()

    def __repr__(self) -> str:
        return f"Halt({self.leaf.device})"

    def set(self, halted: bool = True) -> None:
        """Raise the flag: a launch draws one token from then on. Or lower it, before what the
        current stream is given next."""
        if self._stream is None:
            self.leaf.fill_(halted)
            return
        with torch.cuda.stream(self._stream):
            self.leaf.copy_(self._values.narrow(0, int(halted), 1), non_blocking=True)
        if not halted:
            torch.cuda.current_stream(self.leaf.device).wait_stream(self._stream)

    def wait(self, drawn: Tensor, pending: Callable[[], bool]) -> None:
        """Wait until a launch is over, and end it at its next token once `pending()` says so.

        Args:
            drawn: what the launch gives; of the current stream. On a CPU it is there at once.
            pending: asked again and again, on this thread.
        """
        if not drawn.is_cuda:
            return
        over = torch.cuda.Event()
        over.record(torch.cuda.current_stream(drawn.device))
        while not over.query():
            if pending():
                self.set()
                try:
                    over.synchronize()
                finally:
                    self.set(False)  # or each later launch would end at once
                return
            time.sleep(0)  # who else wants the processor may have it
