"""A run's loss by step, as a picture."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

SMOOTHED = 0.98  # of the line: how much of the step before stays


def draw_losses(path: Path, losses: Tensor, looks: Tensor, title: str) -> None:
    """Write a PNG of a run's losses, in nats a byte, and of those of held-out text.

    Args:
        losses: of each step, (steps,).
        looks: (looks, 2): a step, and the loss after it.
    """
    from matplotlib.figure import Figure  # without pyplot's global state

    figure = Figure(figsize=(7, 4), layout="constrained", dpi=100)
    axis = figure.subplots()
    steps = range(1, len(losses) + 1)
    axis.plot(steps, losses.tolist(), color="#bcd0e5", linewidth=0.5, label="a step")
    axis.plot(steps, smoothed(losses.tolist()), color="#1f5fa8", label="steps, smoothed")
    if len(looks):
        axis.plot(*looks.T.tolist(), "o-", color="#e6731a", markersize=3, label="held out")
    axis.set(title=title, xlabel="step", ylabel="nats a byte", yscale="log")
    axis.grid(alpha=0.3, which="both")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def smoothed(values: list[float]) -> list[float]:
    """A running mean that does not begin at zero."""
    total = weight = 0.0
    found = []
    for value in values:
        total, weight = SMOOTHED * total + value, SMOOTHED * weight + 1
        found.append(total / weight)
    return found
