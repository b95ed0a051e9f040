"""What is asked of a decode step on an H200, and which rows are short of it.

1, 2  one request and 512 tokens: at most so many ms on the device
3     at every point so many times as fast as the best of others, or so near to the bound
4     in the fastest FULL step hardly any time without a kernel on the device
5     PIECEWISE at one request: hardly more than FULL, by the wall's clock
7     logits nearly as near to the reference as those of the step by hand, called

6 is of `benchmarks host`. docs/performance.md has them with their reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from benchmarks.decode.judging import broken
from benchmarks.harness import Row

AGAIN = ", again"  # a way that is measured twice: the better one of two is no fair figure
MOST_MS = {"1B": 0.74, "8B": 3.9, "0.6B": 0.42}
AHEAD, OF_BOUND = 1.1, 0.92  # of the best peer, of the copy bandwidth
IDLE, OF_FULL, OF_EAGER = 0.02, 1.25, 1.2  # of a span, of FULL's wall ms, of the error by hand


def short_of(rows: list[Row], peers: Collection[str], on_gpu: bool) -> list[str]:
    """A line for each goal that is not met; a way of ours that failed, or a peer that is wrong.

    Args:
        peers: the ways that are not ours.
    """
    lines = [
        f"{row['model']}, batch {row['batch']}, context {row['context']}, {row['way']}: "
        f"{row['failed']}"
        for row in rows
        if broken(row, peers)
    ]
    if not on_gpu:
        return lines
    points = dict[tuple[str, int, int], list[Row]]()
    for row in rows:
        points.setdefault((row["model"], row["batch"], row["context"]), []).append(row)
    weakest: list[tuple[float, str]] = []
    for (model, batch, context), here in points.items():
        timed = [row for row in here if "wall ms" in row and not row["way"].endswith(AGAIN)]
        mine = [row for row in timed if row["way"] not in peers]
        others = [row for row in timed if row["way"] in peers]
        if not mine:
            continue
        where = f"{model}, batch {batch}, context {context}"
        if (batch, context) == (1, 512) and model in MOST_MS:
            least, most = min(row["device ms"] for row in mine), MOST_MS[model]
            if least > most:
                goal = 1 if model == "1B" else 2
                lines.append(f"goal {goal}: {where}: {least:.3f} ms, and at most {most} is asked")
        if others:
            best, peer = (min(ways, key=lambda row: row["wall ms"]) for ways in (mine, others))
            ahead = peer["wall ms"] / best["wall ms"]
            line = (
                f"{where}: {best['way']} is {ahead:.2f} times as fast as {peer['way']}, and at "
                f"{best['share']:.0%} of the bound"
            )
            weakest.append((ahead, line))
            if ahead < AHEAD and best["share"] < OF_BOUND:
                lines.append(f"goal 3: {line}; {AHEAD} or {OF_BOUND:.0%} is asked")
        lines.extend(f"goal {line}" for line in _of_modes(where, batch, mine, here))
    return [*lines, *([f"the weakest point: {min(weakest)[1]}"] if weakest and lines else [])]


def _of_modes(where: str, batch: int, mine: list[Row], here: list[Row]) -> Iterator[str]:
    full, pieces = (
        [row for row in mine if row["way"].startswith(mode)] for mode in ("FULL", "PIECEWISE")
    )
    if full:
        fastest = min(full, key=lambda row: row["wall ms"])
        idle = fastest.get("idle")
        said = "not measured" if idle is None else f"{idle:.1%}"
        if idle is None or idle > IDLE:
            yield (
                f"4: {where}: of {fastest['way']} the time without a kernel is {said}, {IDLE:.0%} "
                "at most is asked"
            )
    if batch == 1 and full and pieces:
        as_long = min(row["wall ms"] for row in pieces) / min(row["wall ms"] for row in full)
        if as_long > OF_FULL:
            yield (
                f"5: {where}: PIECEWISE takes {as_long:.2f} times as long as FULL, {OF_FULL} at "
                "most is asked"
            )
    for eager in (row for row in here if row["way"] == "eager"):
        if "error" not in eager:
            yield f"7: {where}: not judged, as the step by hand failed: {eager['failed']}"
            continue
        worst = max(mine, key=lambda row: row["error"])
        if worst["error"] > OF_EAGER * eager["error"]:
            yield (
                f"7: {where}: {worst['way']} is off by {worst['error']:.4f}, the step by hand by "
                f"{eager['error']:.4f}, {OF_EAGER} times that at most is asked"
            )
