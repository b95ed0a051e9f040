"""What a step costs the host, part by part, beside bare `replay()`: python -m benchmarks host

Wall time of the Python call alone, of the 1B Llama shape with random weights (--layers and --dim
make it smaller), checks on. Calls come in bursts of four, as many as the ring has slots, each burst
after a wait for the GPU: the first call of a burst finds the GPU idle and the processor's caches
cold, the later ones find the GPU busy and the caches warm. Medians over the bursts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

import fngraph as fg
from benchmarks.harness import BACKEND, DEVICE, Benchmark, count, kept, show
from benchmarks.host.others import ways
from benchmarks.workload import (
    BF16,
    BLOCKS,
    COUNTS,
    QUICK,
    SHAPE,
    attention_of,
    batch_of,
    new_cache,
    shape,
    to_device,
)
from fngraph.models.families import llama

BURST = 4
Call = Callable[[], Any]


def times_us(call: Callable[[Any], Any], before: Call, repeats: int) -> tuple[float, float]:
    """Median us of a burst's first call and of its later ones; `before` makes the argument."""
    first: list[int] = []
    later: list[int] = []
    for i in range(repeats + 5):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for k in range(BURST):
            given = before()
            began = time.perf_counter_ns()
            call(given)
            taken = time.perf_counter_ns() - began
            if i >= 5:
                (later if k else first).append(taken)
    return median(first) / 1e3, median(later) / 1e3


@dataclasses.dataclass(frozen=True)
class Kit:
    """A model, its cache, and a decode batch, on the device and in host memory."""

    params: Any
    cache: Any
    device: llama.Batch
    host: llama.Batch
    backend: str | None

    def step(self, **options: Any) -> Any:
        """A captured step."""
        limits = fg.Limits(max_tokens=64, max_reqs=64, B=BLOCKS)
        outputs = options.pop("outputs", "borrow")
        options = {"backends": {"attention": self.backend}} | options
        fast = fg.graphify(llama.forward, donate="cache", stage="batch", sizes=(1, 64), **options)
        return fast.bind(self.params).capture(self.cache, limits, outputs=outputs, progress=False)


def full(kit: Kit, repeats: int) -> list[dict[str, Any]]:
    """Rows of a FULL key: the whole call in four ways, and its parts."""
    borrow, own = kit.step(modes="FULL"), kit.step(modes="FULL", outputs="own")
    spec, cache, num_reqs = kit.host.spec, kit.cache, kit.host.spec.num_reqs
    pinned = borrow.host_batch(spec)
    for name in fg.core.buffers_of(llama.Batch):
        getattr(pinned, name).copy_(getattr(kit.host, name))
    want = own(cache, kit.device)[0]
    assert torch.equal(borrow(cache, pinned)[0], want), "pinned"
    assert torch.equal(borrow(cache, kit.host)[0], want), "host"
    keys = borrow.main
    prepared, logits, ring = keys.prepared[spec[COUNTS]], keys.outputs[0], keys.ring
    (replay, _), view = prepared.calls[0], prepared.views[0]
    in_slot = next(iter(prepared.slots.values()))
    looks = "compiled" if inspect.isbuiltin(borrow.binding.watch.moved) else "in Python"

    def stage() -> None:
        ring.memory[in_slot.place] = in_slot.words

    call = functools.partial(borrow, cache)
    calls: dict[str, tuple[Callable[[Any], Any], Call]] = {
        "bare replay and a view": (lambda _: (replay(), logits[:num_reqs]), int),
        "step, pinned batch, borrowed": (call, lambda: borrow.host_batch(spec)),
        "step, device batch, borrowed": (call, lambda: kit.device),
        "step, device batch, owned": (functools.partial(own, cache), lambda: kit.device),
        "step, host batch, borrowed": (call, lambda: kit.host),
        "part: host_batch (before the call)": (lambda _: borrow.host_batch(spec), int),
        "part: dispatch, any spec": (lambda _: fg.dispatch(borrow.table, spec), int),
        "part: look up what the counts decide": (lambda _: keys.prepared.get(spec[COUNTS]), int),
        "part: check ambient state": (lambda _: borrow.last.read_ambient(), int),
        f"part: check where leaves are, {looks}": (lambda _: borrow.binding.watch.moved(), int),
        "part: check the slot's leaves": (lambda _: in_slot.watch.moved(), int),
        "part: stage a pinned batch": (lambda _: stage(), int),
        "part: replay": (lambda _: replay(), int),
        "part: a view of the outputs": (lambda _: view.detach(), int),
        "part: own the outputs": (lambda _: view.clone(), int),
        "nothing": (lambda _: None, int),
    }  # fmt: skip
    rows = []
    for name, (timed, before) in calls.items():
        rows.append((name, *times_us(timed, before, repeats)))
        ring.resume()  # a bare replay is no step
    ran = attention_of(borrow)
    return [{"call": n, "attention": ran, "first us": a, "later us": b} for n, a, b in rows]


def copies(args: fg.ops.AttentionArgs, host: fg.HostBounds | None) -> None:
    """A backend of one copy, so that what is around its call can be seen."""
    args.out.copy_(args.q)


def piecewise(kit: Kit, repeats: int) -> list[dict[str, Any]]:
    """Rows of a PIECEWISE key over `copies`: the step, its replays and direct calls of the backend
    alone, and the rest for each piece."""
    always = lambda config: fg.Support.ALWAYS  # noqa: E731
    fg.ops.ATTENTION.register(fg.ops.Backend("copies", copies, always))
    step = kit.step(modes="PIECEWISE", backends={"attention": "copies"})
    fg.ops.ATTENTION.unregister("copies")
    spec = kit.host.spec
    step(kit.cache, kit.device)
    prepared, ring = step.main.prepared[spec[COUNTS]], step.main.ring

    parts = [fn.args if takes_host else fn for fn, takes_host in prepared.calls]

    def bare() -> None:
        for part in parts:
            if isinstance(part, tuple):
                copies(part[-1], None)  # behind the backend
            else:
                part()
        prepared.views[0].detach()

    pieces = sum(not takes_host for _, takes_host in prepared.calls)
    whole = times_us(functools.partial(step, kit.cache), lambda: step.host_batch(spec), repeats)
    ring.resume()
    alone = times_us(lambda _: bare(), int, repeats)
    ring.resume()
    each = [(a - b) / pieces for a, b in zip(whole, alone)]
    named = (
        ("PIECEWISE step, pinned batch, borrowed", whole),
        ("its replays and backend calls alone", alone),
        (f"the rest, for each of {pieces} pieces", each),
    )
    return [{"call": n, "attention": "copies", "first us": a, "later us": b} for n, (a, b) in named]


def others(kit: Kit, repeats: int) -> list[dict[str, Any]]:
    """Rows of what one would use otherwise."""
    rows = []
    for name, call in ways(kit.params, kit.cache, kit.device).items():
        row: dict[str, Any] = {"call": name, "attention": ""}
        try:
            for _ in range(4):  # compiles and captures
                call()
            first, later = times_us(lambda _: call(), int, repeats)  # noqa: B023
            rows.append(row | {"first us": first, "later us": later})
        except Exception as error:  # a torch that cannot compile one has the others' rows
            rows.append(row | {"first us": None, "later us": None, "failed": str(error)[:200]})
            print(f"{name} failed: {error}")
    return rows


NO_PEERS = {"action": "store_true", "help": "they take a minute to compile"}


@Benchmark(
    DEVICE | BACKEND | SHAPE | {"--repeats": count(100), "--no-peers": NO_PEERS},
    quick={**QUICK, "repeats": 1},
)
@torch.no_grad()
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of 1 and of 64 requests."""
    rows = kept(flags, rows_of(flags))
    show(rows, "us of a call: the first of a burst, on an idle GPU, and the later ones")
    return rows


def rows_of(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of each kind of step, and of what others do."""
    config, device = shape(flags), flags.device
    params = llama.init_params(config, device=device, dtype=BF16)
    for num_reqs in (1,) if flags.quick else (1, 64):
        cache, host = new_cache(config, device), batch_of(num_reqs, 1)
        kit = Kit(params, cache, to_device(host, device), host, flags.backend)
        parts = [full, piecewise]
        if num_reqs == 1 and not flags.no_peers and device == "cuda":
            parts.append(others)
        for part in parts:
            yield from ({"batch": num_reqs, **row} for row in part(kit, flags.repeats))
