"""Small functions under `fg.graphify`, by which ops cost the host, and graphs the device.

    mixes of ops of several kinds   what a call of each kind costs the host in NONE; the gap before
                                    a kernel that is launched by itself; a step of one op
    layers of attention             a call of it in NONE and between graphs; a graph's boundaries;
                                    device times over bytes of the cache, and over FLOPs

What is measured is the difference between more and fewer of a thing in a step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import fngraph as fg
from benchmarks.decode import clocks
from benchmarks.decode.bench import Made
from benchmarks.device import in_graph, wait
from benchmarks.workload import BF16, BLOCK_SIZE

Of = Callable[[Tensor], float]
E = 768  # width of a mix
BURSTS = 25
BLOCKS = 6  # of all kinds of ops in a mix
FEW, MANY = 2, 8  # layers of attention that are compared
LEAST_US = 0.2


class Clocked(NamedTuple):
    """Microseconds of a step."""

    host: float
    device: float


def made_of(call: Callable[[], Any], device: str) -> Made:
    """A call as clocks take it."""
    return Made(lambda _: call(), lambda: None, lambda: [], lambda: wait(device))  # type: ignore[arg-type, return-value]


def clocked(call: Callable[[], Any], device: str, bursts: int = BURSTS) -> Clocked:
    """A step's own times, the device ahead of which all is launched."""
    made = made_of(call, device)
    for _ in range(3):
        call()
    steps, hold_s = clocks.burst_of(made, None)
    host = [us for _ in range(bursts) for us in clocks.host_us(made, None)]
    ms = [clocks.device_ms(made, None, steps, hold_s)[0] for _ in range(max(3, bursts // 5))]
    return Clocked(median(host), median(ms) * 1e3)


# --- mixes of ops ---------------------------------------------------------------------------------


@fg.struct
class Rows:
    x: Tensor = fg.buffer("T 768", "bfloat16")
    ids: Tensor = fg.buffer("T", "int64", min=0)
    spec: fg.BatchSpec = fg.host()


def _lookup(h: Tensor, params: Any, batch: Rows) -> Tensor:
    return h + params["table"][batch.ids]


OPS: dict[str, Callable[[Tensor, Any, Rows], Tensor]] = {
    "pointwise": lambda h, p, b: F.silu(h),
    "broadcast": lambda h, p, b: h * p["scale"],
    "reduction": lambda h, p, b: h * h.mean(-1, keepdim=True),
    "view": lambda h, p, b: h.view(-1, 12, E // 12).view(-1, E),
    "cat": lambda h, p, b: torch.cat([h[:, : E // 2], h[:, E // 2 :]], -1),
    "index": _lookup,
    "product": lambda h, p, b: h @ p["w"].t(),
}


class Mix(NamedTuple):
    """A step of a mix, and how many calls of each kind it has."""

    full: Callable[[], Any]
    none: Callable[[], Any]
    works: tuple[fg.core.Work, ...]

    @property
    def kernels(self) -> int:
        """Of all ops."""
        return sum(work.kernels for work in self.works)


def mix(names: Sequence[str], device: str) -> Mix:
    """Of one token, each of these ops in turn, every few with weights of their own, as layers are:
    a host that meets each call once a step has less of it in its caches."""

    def forward(params: Any, batch: Rows) -> Tensor:
        h = batch.x
        for i, name in enumerate(names):
            h = OPS[name](h, params[i // len(OPS)], batch)
        return h

    draw = lambda *shape: (torch.randn(shape, device=device) * 0.02).to(BF16)  # noqa: E731
    params = [
        {"scale": draw(E), "w": draw(E, E), "table": draw(100, E)}
        for _ in range(-(-len(names) // len(OPS)))
    ]
    batch = Rows(draw(1, E), torch.zeros(1, dtype=torch.int64, device=device), fg.BatchSpec(1, 1))
    fast = fg.graphify(
        forward, modes="FULL", stage="batch", sizes=(1,), limits=fg.Limits(1, 1), outputs="borrow"
    )
    lowered = fast.trace(params, batch=batch).split().lower()
    step = lowered.compile().capture(params)
    sizes = {"T": 1, "R": 1}
    (part,) = lowered.launch_model(NOTHING).count(sizes, sizes, None)
    return Mix(
        lambda: step(batch), lambda: step(batch, allowed=("NONE",)), part.works
    )  # fmt: skip


NOTHING = fg.core.Constants(
    fg.core.DeviceConstants("none", 1.0, {}, 0.0),
    fg.core.HostConstants("none", 0.0, 0.0, 0.0, 0.0, 0.0),
)


class Yardstick:
    """Says how fast the host is just now: a mix of ops in NONE, beside what its constants say.

    Others share its processors, memory and caches: within one run the same calls take up to twice
    as long as a minute before. One look is a burst of the mix, some 10 ms, so that it can lie
    beside each round of a step (`turns`). It has no attention, whose call runs more Python and
    fewer ops of torch's than the others: what slows Python alone may be told as faster than it is.
    """

    def __init__(self, device: str, host: fg.core.HostConstants, blocks: int = BLOCKS) -> None:
        self.device, self.mix = device, mix(list(OPS) * blocks, device)
        self.told_us = host.eager_step_us + sum(host.op(work) for work in self.mix.works)
        for _ in range(3):
            self.mix.none()

    def slower(self) -> float:
        """How many times as long it takes: the median of some calls of its own."""
        made = made_of(self.mix.none, self.device)
        return median(clocks.host_us(made, None)) / self.told_us


class Steps(NamedTuple):
    """What a step costs beside its ops, and an op of each kind the host.

    Attributes:
        eager_us, full_us: host, of a step of NONE without ops, and of FULL with one.
        node_us: host, more for each node of a graph.
        op_us: host, by kind.
        one_us: device, of a step of FULL with one op.
        gap_us: device, what a kernel takes longer by itself.
        mixed: device, of a mix without products in FULL, beside the step: its ops, and their time.
    """

    eager_us: float
    full_us: float
    node_us: float
    op_us: dict[str, float]
    one_us: float
    gap_us: float
    mixed: tuple[tuple[fg.core.Work, ...], float]


def steps(device: str, blocks: int = BLOCKS, bursts: int = BURSTS) -> Steps:
    """Mixes of all kinds, one of each kind with more of that."""
    kinds = list(OPS)
    base = kinds * blocks
    mixes = [mix(base, device)]
    for kind in kinds:
        more = [name for one in base for name in ((one, kind) if one != kind else (one,))]
        mixes.append(mix(more, device))
    kinds_of = [Counter(work.called or work.kind for work in one.works) for one in mixes]
    columns = sorted({kind for one in kinds_of for kind in one})
    counts = np.array([[1, *(one[kind] for kind in columns)] for one in kinds_of], dtype=float)
    taken = [clocked(one.none, device, bursts) for one in mixes]
    solved, *_ = np.linalg.lstsq(counts, np.array([one.host for one in taken]), rcond=None)
    eager_us, *op_us = (max(float(us), LEAST_US) for us in solved)
    one, many = mix(["pointwise"], device), mixes[0]
    of_one, of_many = clocked(one.full, device, bursts), clocked(many.full, device, bursts)
    more_nodes = many.kernels - one.kernels
    node_us = max((of_many.host - of_one.host) / more_nodes, 0.0)
    in_graph_us = (of_many.device - of_one.device) / more_nodes
    gap_us = taken[0].device / many.kernels - in_graph_us
    small = mix(["pointwise"] + [kind for kind in base if kind != "product"], device)
    mixed = clocked(small.full, device, bursts).device - of_one.device
    first, *rest = small.works  # the op that the other step has too
    assert first.kind == "pointwise"
    return Steps(
        eager_us, of_one.host, node_us, dict(zip(columns, op_us)), of_one.device, max(gap_us, 0.0),
        (tuple(rest), mixed),
    )  # fmt: skip


def replay_us(device: str) -> float:
    """Of the host, to replay a graph of one node."""
    if not device.startswith("cuda"):
        return LEAST_US  # the tape's replay is its ops
    x = torch.zeros(32, device=device)
    torch.neg(x)
    graph = in_graph(lambda: torch.neg(x))
    times = []
    for _ in range(100):
        wait(device)
        graph.replay()
        began = time.perf_counter_ns()
        graph.replay()
        times.append((time.perf_counter_ns() - began) / 1e3)
    return median(times)


# --- layers of attention --------------------------------------------------------------------------


@fg.struct
class Tokens:
    x: Tensor = fg.buffer("T W", "bfloat16")
    slot_mapping: Tensor = fg.buffer("T", "int64", pad=-1)
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: Tensor = fg.buffer("R B", "int32", pad=0)
    spec: fg.BatchSpec = fg.host()


class Heads(NamedTuple):
    """Of attention: queries, keys, and their width."""

    queries: int
    keys: int
    width: int


def layers(heads: Heads, count: int) -> Callable[..., Any]:
    """A function that attends so often, with one op between."""
    H, K, D = heads

    def forward(cache: Any, batch: Tokens) -> Any:
        x = batch.x
        for kv in cache:
            q = F.silu(x).view(-1, H, D)
            k = x[:, : K * D].reshape(-1, K, D)
            x = fg.ops.attention(q, k, k, kv, batch)[0].reshape(-1, H * D)
        return x, cache

    return forward


def tokens_of(heads: Heads, reqs: int, new: int, context: int, B: int, device: str) -> Tokens:
    """The last `new` tokens of each request, its blocks one after the other."""
    each = -(-context // BLOCK_SIZE)
    blocks = torch.arange(reqs * each, dtype=torch.int32).view(reqs, each)
    at = torch.arange(context - new, context).repeat(reqs)
    owner = torch.arange(reqs).repeat_interleave(new)
    slots = blocks[owner, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
    spec = fg.BatchSpec(
        reqs * new, reqs, query_len=1 if new == 1 else None, host=fg.HostBounds(new, context)
    )
    made = Tokens(
        torch.randn(reqs * new, heads.queries * heads.width).to(BF16), slots,
        torch.full((reqs,), context, dtype=torch.int32),
        torch.arange(0, reqs * new + 1, new, dtype=torch.int32), F.pad(blocks, (0, B - each)), spec,
    )  # fmt: skip
    leaves = {name: getattr(made, name).to(device) for name in fg.core.buffers_of(Tokens)}
    return Tokens(**leaves, spec=spec)


class Layers(NamedTuple):
    """Steps of some layers of attention, the work of one, and the ops beside it."""

    call: Callable[[Tokens, str], Any]
    work: Callable[[Tokens], Any]
    beside: Counter[str]


def made_layers(
    heads: Heads, count: int, sizes: Sequence[int], reqs: int, context: int, modes: str,
    device: str, backend: str | None,
) -> Layers:  # fmt: skip
    """Captured, of requests of so many tokens."""
    B = -(-context // BLOCK_SIZE)
    shape = (reqs * B, BLOCK_SIZE, heads.keys, heads.width)
    cache = tuple(
        tuple(torch.randn(shape, device=device, dtype=BF16) for _ in range(2))
        for _ in range(count)
    )  # fmt: skip
    limits = fg.Limits(max(sizes), reqs, B=B, W=heads.queries * heads.width)
    fast = fg.graphify(
        layers(heads, count), modes=modes, donate="cache", stage="batch", sizes=tuple(sizes),
        limits=limits, backends={"attention": backend}, outputs="borrow",
    )  # fmt: skip
    example = tokens_of(heads, 1, 1, 1, B, device)
    lowered = fast.trace(cache, batch=example).split().lower()
    step = lowered.compile().capture(cache)
    model = lowered.launch_model(NOTHING)

    def parts(spec: fg.BatchSpec) -> tuple[fg.core.Part, ...]:
        sizes = {"T": spec.num_tokens, "R": spec.num_reqs, **limits.dims}
        return model.count(sizes, sizes, spec.host.max_seq_len)

    def work(batch: Tokens) -> Any:
        return next(part.works[0] for part in parts(batch.spec) if part.cut)

    runs = (part for part in parts(example.spec) if not part.cut)
    beside = Counter(work.called or work.kind for part in runs for work in part.works)
    return Layers(lambda batch, mode: step(cache, batch, allowed=(mode,)), work, beside)


class Attention(NamedTuple):
    """What layers of attention were measured to take.

    Attributes:
        decode: over bytes.
        prefill: over FLOPs, by width of a head.
        boundary_us: device.
        call_us: host, of a call in NONE.
        cut_us: host, of a call between graphs.
    """

    decode: fg.core.Curve
    prefill: dict[int, fg.core.Curve]
    boundary_us: float
    call_us: float
    cut_us: float


class Asked(NamedTuple):
    """Where attention is measured."""

    heads: tuple[Heads, ...]
    reqs: tuple[int, ...]
    context: int
    chunks: tuple[int, ...]


WHOLE = Asked((Heads(16, 4, 64), Heads(16, 4, 128)), (1, 6, 24, 96), 1024, (384, 1536, 6144))
TINY = Asked((Heads(4, 2, 16),), (1, 3), 32, (16, 32))


def attention(
    asked: Asked, device: str, backend: str | None, found: Steps, replay: float, between_us: Of,
    bursts: int = BURSTS,
) -> Attention:  # fmt: skip
    """Differences between few and many layers.

    Args:
        found: of ops, which layers have too.
        replay: of the host.
        between_us: device, what a layer takes beside attention, of its operand.
    """
    heads, most = asked.heads[-1], max(asked.reqs)
    few, many = (
        made_layers(
            heads, n, asked.reqs, most, asked.context, "FULL_AND_PIECEWISE", device, backend
        )
        for n in (FEW, MANY)
    )
    more = MANY - FEW
    points, edges, hosts = [], [], []
    for reqs in asked.reqs:
        batch = tokens_of(heads, reqs, 1, asked.context, asked.context // BLOCK_SIZE, device)

        def per_layer(mode: str, batch: Tokens = batch) -> Clocked:
            less, all_ = (
                clocked(lambda: one.call(batch, mode), device, bursts)  # noqa: B023
                for one in (few, many)
            )
            return Clocked((all_.host - less.host) / more, (all_.device - less.device) / more)

        full = per_layer("FULL")
        us = full.device - between_us(batch.x)
        points.append((many.work(batch).nbytes, max(us, LEAST_US)))
        if reqs != max(asked.reqs):
            piecewise, none = per_layer("PIECEWISE"), per_layer("NONE")
            edges.append((piecewise.device - full.device) / 2)
            hosts.append((none.host, piecewise.host))
    calls = many.beside - few.beside
    beside_us = sum(count * found.op_us[kind] for kind, count in calls.items()) / more
    call_us = median(none for none, _ in hosts) - beside_us
    cut_us = median(piecewise for _, piecewise in hosts) - replay - found.node_us
    prefill = {
        one.width: prefill_curve(one, asked.chunks, device, backend, between_us, bursts)
        for one in asked.heads
    }
    return Attention(
        _rising(points, "nbytes"), prefill, max(median(edges), 0.0), max(call_us, LEAST_US),
        max(cut_us, LEAST_US),
    )  # fmt: skip


def prefill_curve(
    heads: Heads, chunks: Sequence[int], device: str, backend: str | None, between_us: Of,
    bursts: int,
) -> fg.core.Curve:  # fmt: skip
    """Of one request's first tokens."""
    most = max(chunks)
    few, many = (
        made_layers(heads, n, chunks, 1, most, "FULL", device, backend) for n in (1, 3)
    )  # fmt: skip
    points = []
    for chunk in chunks:
        batch = tokens_of(heads, 1, chunk, chunk, -(-most // BLOCK_SIZE), device)
        less, more = (
            clocked(lambda: one.call(batch, "FULL"), device, max(bursts // 5, 1)).device  # noqa: B023
            for one in (few, many)
        )
        us = (more - less) / 2 - between_us(batch.x)
        points.append((many.work(batch).flops, max(us, LEAST_US)))
    return _rising(points, "flops")


def _rising(points: Sequence[tuple[float, float]], over: str) -> fg.core.Curve:
    """A curve of points, of which none may be faster than a smaller one: that would be noise."""
    sizes, us = zip(*sorted(points))
    return fg.core.Curve(sizes, tuple(np.maximum.accumulate(us).tolist()), over)
