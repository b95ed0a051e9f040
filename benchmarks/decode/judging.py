"""Whether a way gives what it should, before it is timed; and which ways are left.

Shape letters as in benchmarks/decode/bench.py.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from benchmarks.decode.bench import Bench, Made, Right
from benchmarks.harness import LATE, Row

MOST_ERROR = 0.05  # of logits and of k and v, by their norms; bfloat16 is off by 0.003 to 0.016


class Wrong(Exception):
    """A way's results are not those of the reference: its times mean nothing."""


class Left(Exception):
    """A way that is left out, for a reason that says all."""


def off(got: Tensor, want: Tensor) -> float:
    """The difference by the norm of what is wanted."""
    return float((got.to(want.dtype) - want).norm() / want.norm())


@torch.no_grad()
def judge(bench: Bench, right: Right, made: Made) -> dict[str, float]:
    """How far a way is off, over `fill`'s tokens.

    Raises:
        Wrong: too far, in logits, in the token that is likeliest, or in the k and v that it keeps.
    """
    bench.fill(made.views(), right.away)
    made.wait()  # a way of its own stream would not
    ids = made.step(right.ids)
    made.wait()
    got, kept = made.logits(), 0.0
    error = off(got, right.logits)
    for pair, wanted in zip(made.views(), right.new, strict=True):
        kept = max(kept, *(off(x[:, -1], want) for x, want in zip(pair, wanted)))
    if not (error < MOST_ERROR and kept < MOST_ERROR):
        raise Wrong(f"logits are off by {error:.3f}, k and v by {kept:.3f}, of {MOST_ERROR}")
    if not torch.equal(torch.from_dlpack(ids).long(), got.argmax(-1)):
        raise Wrong("the next tokens are not the likeliest ones by its logits")
    return {"error": error, "kept error": kept}


def made_ready(
    ways: Iterable[str], make: Callable[[str], Made], bench: Bench, right: Right, ends: float
) -> tuple[dict[str, Made], dict[str, Row]]:
    """The ways whose results are right; and of each how far it is off, or why it is not here.

    Args:
        ends: the time, in seconds of `time.monotonic`, after which no way is begun.
    """
    ready: dict[str, Made] = {}
    judged: dict[str, Row] = {}
    for way in ways:
        began = time.monotonic()
        try:
            if began > ends:
                raise Left(LATE)
            made = make(way)
            judged[way] = judge(bench, right, made)
        except Exception as error:
            judged[way] = {"failed": told(error)}
            gc.collect()  # what it has left behind
        else:
            ready[way] = made
        judged[way]["ready s"] = time.monotonic() - began
        print(f"  {way}: {judged[way].get('failed', 'ready')}", flush=True)
    return ready, judged


def told(error: Exception) -> str:
    """In a line."""
    lines = str(error).strip().splitlines() or [""]
    kind = "" if isinstance(error, Left) else f"{type(error).__name__}: "
    return f"{kind}{lines[0]}"[:200]


def broken(row: Row, peers: Iterable[str]) -> bool:
    """A way of ours that failed, or one of others whose results are wrong."""
    failed = row.get("failed", LATE)
    return failed != LATE and (row["way"] not in peers or failed.startswith("Wrong"))
