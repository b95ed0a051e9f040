"""`check_backend`: a backend of attention against `reference`, over what a model may bring it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fngraph.core import HostBounds, Support
from fngraph.core.kinds import checked
from fngraph.core.spec import KeyBounds
from fngraph.core.text import with_suggestions
from fngraph.errors import BackendError, CaptureError, SpecError
from fngraph.graphs.recorder import Recorder
from fngraph.graphs.recorders import make_recorder
from fngraph.ops import ATTENTION, Backend
from fngraph.testing.cases import Case, Rows, arguments, call, case, cut_from_one
from fngraph.testing.differences import difference
from fngraph.testing.levels import batches, key_of, padding, planned, planner_of, replays, serves
from fngraph.testing.points import Point, calls_of, levels_of

T, R, LONGEST, REPLAYS = 12, 4, 64, 6  # of keys: tokens, requests, tokens of one at most; replays


class Checked(NamedTuple):
    """What `check_backend` has run, and what the backend refused, by reason."""

    backend: str
    device: str
    calls: int
    replays: int
    refused: dict[str, int]

    def __repr__(self) -> str:
        did = f"{self.calls} calls and {self.replays} replays are as 'reference' has them"
        lines = [f"{self.backend!r} on {self.device}: {did}"]
        return "\n".join(lines + [f"{n} calls refused: {why}" for why, n in self.refused.items()])


@checked
@with_suggestions
def check_backend(
    name: str, *, query_len: int | None = None, device: torch.device | str = "cpu"
) -> Checked:
    """Assert that a registered backend of attention does what `reference` does.

        fg.ops.ATTENTION.register(fg.ops.Backend("mine", run, support))
        fg.testing.check_backend("mine")

    Called: uniform batches and mixes of prefill and decode, with and without empty requests and
    tokens of nobody behind them, shared kv heads, small and large blocks, and all that a
    configuration may ask for; what the backend refuses is counted. Cache slots that hold nothing
    are NaN, q of nobody's tokens is, and so is `out` beforehand: it must be written in full, the
    cache at `slot_mapping` alone. With such tokens q, k and v are cut out of one tensor.

    Captured: a graph for each kind of key that its level allows (by the tape on a CPU), recorded on
    nothing but padding, replayed on batches of other numbers and lengths.

    Args:
        query_len: only uniform batches of this query length, up to 64, for what is one half of a
            `Hybrid`; None: any batch.

    Returns:
        What was run and what was refused; it prints.

    Raises:
        AssertionError: the first case that differs, with the worst row's error and the tolerance.
        BackendError: there is no such backend or device, or it refuses every case.
        SpecError: a query length that the keys tried have no room for.
    """
    if query_len not in (None, *range(1, LONGEST + 1)):
        raise SpecError(
            f"query_len={query_len!r}: pass how many tokens each request brings, 1 to {LONGEST}; "
            "or leave it out, for any batch"
        )
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"device={str(device)!r}: no CUDA here; leave device= out for the CPU")
    backend, device = ATTENTION.backend(name), torch.empty(0, device=device).device
    refused: Counter[str] = Counter()
    calls = 0
    for one in calls_of(query_len):
        reason = _call(backend, device, *one)
        refused.update([reason] if reason else [])
        calls += not reason
    if not calls:
        raise BackendError(f"backend {name!r} runs none of it on {device}: {'; '.join(refused)}")
    recorder = make_recorder(None, device)
    replayed = sum(_level(backend, device, recorder, *one) for one in levels_of(query_len))
    return Checked(name, str(device), calls, replayed, dict(refused))


def _call(
    backend: Backend, device: torch.device, point: Point, rows: Rows, Q: int | None, padded: bool
) -> str | None:
    """One call, with bounds from the host where it is padded; the reason if it is refused."""
    pads: dict[str, Any] = {}
    behind = ""
    if padded:
        pads = {"pad_reqs": 2, "pad_tokens": 2 * Q if Q else 3, "query_len": Q or 0}
        behind = f", then 2 empty requests and {pads['pad_tokens']} tokens of nobody"
    mine, theirs = (case(*rows, **point.made(device), **pads) for _ in range(2))
    if padded:
        mine, theirs = cut_from_one(mine), cut_from_one(theirs)
    options = point.asked(device)
    config = ATTENTION.configure(*arguments(mine, mine.q, **options))
    reason = backend.refusal(config)
    if reason is not None:
        return reason
    host = HostBounds(max(n for n, _ in rows)) if padded else None
    where = f"called with requests {_shown(rows)}{behind}; {point}"
    with _noted(backend, where):
        plan = planned(planner_of(backend, mine, config), None, mine.tensors)
        got = call(backend, mine, host, plan=plan, **options)
    want = call("reference", theirs, host, **options)
    _same(backend, where, difference(got, want, mine, theirs))
    return None


def _level(
    backend: Backend, device: torch.device, recorder: Recorder, point: Point, Q: int | None
) -> int:
    """One capture with its replays, whose number is returned."""
    key, options = key_of(R, Q, T), point.asked(device)
    made = point.made(device) | {"B": -(-LONGEST // point.block_size)}
    static = padding(key, **made)
    config = ATTENTION.configure(*arguments(static, static.q, **options))
    level = backend.level(config)
    if backend.refusal(config) is not None or not serves(level, Q):
        return 0
    where = f"captured as {level} for {key!r}; {point}"
    planner, out = planner_of(backend, static, config), torch.empty_like(static.q)

    def run() -> None:
        with _noted(backend, where):
            call(backend, static, KeyBounds(key), out, plan, **options)

    def plan_unpadded(c: Case) -> None:
        planned(planner, key, c.unpadded)

    try:
        plan = planned(planner, key, static.tensors)
        given = batches(key, range(REPLAYS), LONGEST, **made)
        for c in replays(run, static, out, given, recorder, plan_unpadded):
            want = call("reference", c, **options)
            replayed = f"{where}; replayed on requests {_shown(c.rows)}"
            _same(backend, replayed, difference(out, want, static, c))
    except CaptureError as error:
        lower = f"fg.Support.{Support(level - 1)}"
        if level - 1 > Support.NEVER:
            lower += "; or NEVER, if it reads back to the host for any batch"
        raise AssertionError(
            f"backend {backend.name!r} cannot be {where}\n    {error}\n"
            f"    Declare a lower level: support=lambda config: {lower}"
        ) from error
    return REPLAYS


def _same(backend: Backend, where: str, wrong: str) -> None:
    if wrong:
        raise AssertionError(
            f"backend {backend.name!r} differs from 'reference', {where}\n    {wrong}"
        )


@contextlib.contextmanager
def _noted(backend: Backend, where: str) -> Iterator[None]:
    """Say of what the backend raises what it was called with."""
    try:
        yield
    except Exception as error:
        error.add_note(f"backend {backend.name!r}, {where}")
        raise


def _shown(rows: Rows) -> str:
    return f"of (new, cached) tokens {', '.join(map(str, rows))}"
