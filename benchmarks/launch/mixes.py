"""Mixes of ops under `fg.graphify`, by which ops cost the host, and graphs the device.

What a call of each kind costs the host in NONE, the gap before a kernel that is launched by itself,
and a step of one op: each is the difference between more and fewer of a thing in a step. Others
share the host, which may be half as fast from one moment to the next, so what is compared is
measured in turns.
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
from benchmarks.workload import BF16

E = 768  # width of a mix
BURSTS = 25
BLOCKS = 6  # of all kinds of ops in a mix
LEAST_US = 0.2


class Clocked(NamedTuple):
    """Microseconds of a step."""

    host: float
    device: float


def made_of(call: Callable[[], Any], device: str) -> Made:
    """A call as clocks take it."""
    return Made(lambda _: call(), lambda: None, lambda: [], lambda: wait(device))  # type: ignore[arg-type, return-value]


def clocked(call: Callable[[], Any], device: str, bursts: int = BURSTS) -> Clocked:
    """A step's own times."""
    made, on_device = made_of(call, device), device_us(call, device, bursts)
    host = [us for _ in range(bursts) for us in clocks.host_us(made, None)]
    return Clocked(median(host), on_device)


def device_us(call: Callable[[], Any], device: str, bursts: int = BURSTS) -> float:
    """Device microseconds of a step, all of which is launched ahead."""
    made = made_of(call, device)
    for _ in range(3):
        call()
    steps, hold_s = clocks.burst_of(made, None)
    ms = [clocks.device_ms(made, None, steps, hold_s)[0] for _ in range(max(3, bursts // 5))]
    return median(ms) * 1e3


def hosts_in_turn(
    calls: Sequence[Callable[[], Any]], device: str, rounds: int = BURSTS
) -> list[float]:
    """Host microseconds of several calls that are compared: a burst of each, round by round.

    Each round has its own slowness, the mean of its bursts; a call's time is the median of what it
    took of that, at the median slowness.
    """
    bursts = [made_of(call, device) for call in calls]
    for call in calls:
        for _ in range(3):
            call()
    taken = np.array(
        [[median(clocks.host_us(made, None)) for made in bursts] for _ in range(rounds)]
    )
    slowness = taken.mean(1, keepdims=True)
    found: list[float] = (np.median(taken / slowness, 0) * np.median(slowness)).tolist()
    return found


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


def each_kind(device: str, blocks: int) -> list[Mix]:
    """A mix of all kinds of ops, and one of each kind with more of that."""
    base = list(OPS) * blocks
    more = [[name for one in base for name in ((one, kind) if one != kind else (one,))]
            for kind in OPS]  # fmt: skip
    return [mix(names, device) for names in (base, *more)]


class Yardstick:
    """Says how fast the host is just now: mixes of ops in NONE, beside what its constants say.

    Within one run the same calls take up to twice as long as a minute before. One look is a burst
    of each of the mixes by which ops were timed, some 50 ms, so that it can lie beside each round
    of a step (`turns`). They take turns as they did then: a mix that runs again and again finds
    more of itself in the host's caches, and takes 0.7 to 0.8 times as long. They have no attention,
    whose call runs more Python and fewer ops of torch's than the others: what slows Python alone
    may be told as faster than it is.
    """

    def __init__(self, device: str, host: fg.core.HostConstants, blocks: int = BLOCKS) -> None:
        mixes = each_kind(device, blocks)
        self.made = [made_of(one.none, device) for one in mixes]
        works = [work for one in mixes for work in one.works]
        self.told_us = len(mixes) * host.eager_step_us + sum(map(host.op, works))
        self.slower()  # the first call of each is not like the others

    def slower(self) -> float:
        """How many times as long they take: of each the median of some calls."""
        return sum(median(clocks.host_us(made, None)) for made in self.made) / self.told_us


class Steps(NamedTuple):
    """What a step costs beside its ops, and an op of each kind the host.

    Attributes:
        eager_us, full_us: host, of a step of NONE without ops, and of FULL with one.
        node_us: host, more for each node of a graph.
        op_us: host, by kind.
        one_us: device, of a step of FULL with one op.
        gap_us: device, what a kernel takes longer by itself.
        mixed: device, of a mix without products in FULL, beside the step: its ops, and their time.
        none, none_us: a mix in NONE, and what it took of the host then, by which others see how
            fast that is when they measure.
    """

    eager_us: float
    full_us: float
    node_us: float
    op_us: dict[str, float]
    one_us: float
    gap_us: float
    mixed: tuple[tuple[fg.core.Work, ...], float]
    none: Callable[[], Any]
    none_us: float


def steps(device: str, blocks: int = BLOCKS, bursts: int = BURSTS) -> Steps:
    """Mixes of all kinds, one of each kind with more of that."""
    mixes = each_kind(device, blocks)
    kinds_of = [Counter(work.called or work.kind for work in one.works) for one in mixes]
    columns = sorted({kind for one in kinds_of for kind in one})
    counts = np.array([[1, *(one[kind] for kind in columns)] for one in kinds_of], dtype=float)
    hosts = hosts_in_turn([one.none for one in mixes], device, bursts)
    solved, *_ = np.linalg.lstsq(counts, np.array(hosts), rcond=None)
    eager_us, *op_us = (max(float(us), LEAST_US) for us in solved)
    one, many = mix(["pointwise"], device), mixes[0]
    of_one, of_many = clocked(one.full, device, bursts), clocked(many.full, device, bursts)
    more_nodes = many.kernels - one.kernels
    node_us = max((of_many.host - of_one.host) / more_nodes, 0.0)
    in_graph_us = (of_many.device - of_one.device) / more_nodes
    gap_us = device_us(many.none, device, bursts) / many.kernels - in_graph_us
    small = mix(["pointwise"] + [kind for kind in OPS if kind != "product"] * blocks, device)
    mixed = device_us(small.full, device, bursts) - of_one.device
    first, *rest = small.works  # the op that the other step has too
    assert first.kind == "pointwise"
    return Steps(
        eager_us, of_one.host, node_us, dict(zip(columns, op_us)), of_one.device, max(gap_us, 0.0),
        (tuple(rest), mixed), many.none, hosts[0],
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
