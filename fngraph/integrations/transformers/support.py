"""What runs the attention of each layer of a model of transformers, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from fngraph.core import Mode, Support
from fngraph.core.text import html, table
from fngraph.integrations.transformers.attention import Layer
from fngraph.stages import Lowered


class LayerSupport(NamedTuple):
    """What runs a layer's attention.

    Attributes:
        layer: the path of its module.
        level: the largest class of batches that one captured graph of it serves.
        reason: what the layer asks of a backend, and which backends refuse that.
    """

    layer: str
    backend: str
    level: Support
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSupport:
    """Every attention layer in order, and the modes that they resolve to."""

    rows: tuple[LayerSupport, ...]
    modes: Mode
    notes: tuple[str, ...]

    def _repr_html_(self) -> str:
        return html(self.as_text())

    def as_text(self) -> str:
        """A table, the modes, and why they are not those that were asked for."""
        return "\n\n".join(
            [
                table(["layer", "backend", "level", "reason"], self.rows),
                f"{self.modes}",
                *self.notes,
            ]
        )

    __repr__ = as_text


def support_of(model: Any, layers: Sequence[Layer], lowered: Lowered) -> ModelSupport:
    """The table of a lowered model."""
    paths = {id(module): path for path, module in model.named_modules()}
    rows = []
    for layer, call in zip(layers, lowered.calls):
        asks = [f"{n} {getattr(call.config, n)}" for n in ("window", "softcap")
                if getattr(call.config, n) is not None]  # fmt: skip
        others = [b for b in call.primitive.backends.values() if b not in call.backends]
        usable = [b for b in others if b.missing() is None]
        refused = [f"not {b.name}: {why}" for b in usable if (why := b.refusal(call.config))]
        rows.append(
            LayerSupport(
                paths[id(layer.module)], " + ".join(b.name for b in call.backends),
                min(level for _, level in call.levels()),
                "; ".join([*asks, *refused]) or "causal, nothing more",
            )
        )  # fmt: skip
    return ModelSupport(tuple(rows), lowered.resolution.modes, lowered.notes)
