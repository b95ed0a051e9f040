"""`Plan`: what a backend works out on the host before each step, into buffers that stay.

Some libraries schedule a batch on the CPU and leave the result in device memory, where a captured
graph reads it. So there is one set of buffers for each key that is captured in one graph, made
before its capture, and one more for all eager calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fngraph.core import BatchDescriptor


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The host side of a backend. Calls of one configuration and the same leaves share one plan.

    Attributes:
        leaves: names of the primitive's arguments that it reads on the host. Each must be a leaf
            of the batch as it was passed to `forward`, and come in host memory: nothing waits.
        buffers: `buffers(config, sizes, key) -> Any`: what `run` gets as `plan=`. `sizes` are the
            letters' (T, R, B, ...) largest values; `key` is None for eager calls.
        fill: `fill(buffers, config, sizes, leaves)`: before each step, with the leaves of the
            batch (unpadded, on the CPU) and `sizes` of what runs: the key's, or the true ones.
    """

    leaves: tuple[str, ...]
    buffers: Callable[[Any, Mapping[str, int], BatchDescriptor | None], Any]
    fill: Callable[[Any, Any, Mapping[str, int], Sequence[Tensor]], None]
