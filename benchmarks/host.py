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
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fngraph as fg
from benchmarks.record import write
from benchmarks.steps import BACKEND_HELP, BLOCK_SIZE, CONTEXT, attention_of, batch_of
from fngraph.models.families import llama

BURST = 4
Call = Callable[[], Any]


def shape(layers: int, dim: int) -> llama.Config:
    """Llama-3.2-1B's, or a smaller one of its kind."""
    return llama.Config(
        vocab_size=128256, num_layers=layers, num_heads=dim // 64, num_kv_heads=dim // 256,
        head_dim=64, dim=dim, mlp_dim=4 * dim, tied=True,
    )  # fmt: skip


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
        limits = fg.Limits(max_tokens=64, max_reqs=64, B=CONTEXT // BLOCK_SIZE)
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
    prepared, logits, ring = borrow.prepared[spec[:7]], borrow.outputs[0], borrow.ring
    (replay, _), view = prepared.calls[0], prepared.views[0]
    in_slot = next(iter(prepared.slots.values()))

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
        "part: look up what the counts decide": (lambda _: borrow.prepared.get(spec[:7]), int),
        "part: check ambient state": (lambda _: borrow.last_call.read_ambient(), int),
        "part: check addresses of bound leaves": (lambda _: borrow.binding.watch.moved(), int),
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
    prepared, ring = step.prepared[spec[:7]], step.ring

    parts = [fn.args if takes_host else fn for fn, takes_host in prepared.calls]

    def bare() -> None:
        for part in parts:
            if isinstance(part, tuple):
                copies(part[0], None)
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
    from benchmarks.peers import peers

    rows = []
    for name, call in peers(kit.params, kit.cache, kit.device).items():
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


def main(argv: list[str]) -> int:
    """Print the rows; `--json` keeps them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks host", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help=BACKEND_HELP)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--no-peers", action="store_true", help="they take a minute to compile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        config = shape(args.layers, args.dim)
        params = llama.init_params(config, device=args.device, dtype=torch.bfloat16)
        for num_reqs in (1, 64):
            cache = llama.init_cache(
                config, 64 * CONTEXT // BLOCK_SIZE, block_size=BLOCK_SIZE, device=args.device,
                dtype=torch.bfloat16,
            )  # fmt: skip
            host = batch_of(num_reqs, 1, "cpu")
            on_device = {
                n: getattr(host, n).to(args.device) for n in fg.core.buffers_of(llama.Batch)
            }
            kit = Kit(params, cache, dataclasses.replace(host, **on_device), host, args.backend)
            found = full(kit, args.repeats) + piecewise(kit, args.repeats)
            if num_reqs == 1 and not args.no_peers and args.device == "cuda":
                found += others(kit, args.repeats)
            rows += [{"batch": num_reqs, **row} for row in found]
    shown = lambda us: "-" if us is None else f"{us:.1f}"  # noqa: E731
    cells = [[r["batch"], r["call"], r["attention"], shown(r["first us"]), shown(r["later us"])]
             for r in rows]  # fmt: skip
    head = ["batch", "call", "attention", "first, idle, us", "later, busy, us"]
    print(fg.core.text.table(head, cells))
    if args.json:
        write(args.json, rows)
    return 0
