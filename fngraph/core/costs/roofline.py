"""What one op takes, from measured constants: a roofline that knows small sizes too.

An op is `Work`: its kind, the bytes that it moves, its FLOPs, its kernels. The constants of a
device hold measured times by kind, as a `Curve` over bytes or FLOPs, and of matrix products as a
`Grid` over their three sizes. What has none goes by the roofline: the largest of its kernels' least
time, its bytes over the bandwidth, and its FLOPs over the rate. `python -m benchmarks launch`
measures them all.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

from fngraph.core.kinds import checked
from fngraph.core.text import expect, what_is_off
from fngraph.errors import SpecError

BOUNDS = ("launch", "memory", "compute")
"""What a time is made of: kernels' least times and gaps, bytes, FLOPs."""


class Work(NamedTuple):
    """One op.

    Attributes:
        kind: by which its times were measured: "pointwise", "product", ...; "view" does nothing.
        nbytes: that it reads and writes at least.
        flops: that it computes.
        kernels: that it launches; 0: it is the host's alone.
        dtype: of its operands.
        shape: of a matrix product, its rows, columns and depth.
        called: by which the host's time is known, where that is not `kind`.
    """

    kind: str
    nbytes: float = 0.0
    flops: float = 0.0
    kernels: int = 1
    dtype: str = "bfloat16"
    shape: tuple[int, int, int] | None = None
    called: str = ""


@checked
@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Measured times over a size, straight from one to the next.

    Below the first it takes as long as that, above the last in proportion.

    Attributes:
        sizes: ascending, of bytes or FLOPs.
        us: microseconds at each.
        over: "nbytes" or "flops".

    Raises:
        SpecError: sizes that do not ascend, times that are not above 0.
    """

    sizes: tuple[float, ...]
    us: tuple[float, ...]
    over: str = "nbytes"

    def __post_init__(self) -> None:
        _check_axis("Curve", self.sizes)
        _check_times("Curve", self.us, len(self.sizes))
        if self.over not in ("nbytes", "flops"):
            raise SpecError(f'Curve(over={self.over!r}): pass over="nbytes" or "flops".')

    def __call__(self, size: float) -> float:
        """Microseconds at this size."""
        if size >= self.sizes[-1]:
            return self.us[-1] * size / self.sizes[-1]
        i, share = _cell(self.sizes, size)
        return self.us[i] + share * (self.us[min(i + 1, len(self.us) - 1)] - self.us[i])


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Measured times of matrix products, (rows, depth) by (depth, columns).

    Between the points they are a sum of products of the three sizes, as a time is that has a part
    for the launch, one for the weights and one for the FLOPs. Beyond the last point of an axis it
    grows in proportion, below the first it takes as long as that.

    Attributes:
        rows, columns, depth: ascending.
        us: microseconds; depth varies fastest, then columns.

    Raises:
        SpecError: axes that do not ascend, or times that are not one a point and above 0.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    depth: tuple[int, ...]
    us: tuple[float, ...]

    def __post_init__(self) -> None:
        for axis in self.axes:
            _check_axis("Grid", axis)
        _check_times("Grid", self.us, math.prod(map(len, self.axes)))

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """Rows, columns, depth."""
        return self.rows, self.columns, self.depth

    def __call__(self, rows: int, columns: int, depth: int) -> float:
        """Microseconds of one product."""
        beyond, cells = 1.0, []
        for axis, size in zip(self.axes, (rows, columns, depth)):
            beyond *= max(size / axis[-1], 1.0)
            cells.append(_cell(axis, size))
        total = 0.0
        for corner in product((0, 1), repeat=3):
            weight, at = 1.0, 0
            for axis, (i, share), step in zip(self.axes, cells, corner):
                weight *= share if step else 1 - share
                at = at * len(axis) + min(i + step, len(axis) - 1)
            if weight:
                total += weight * self.us[at]
        return total * beyond


def _cell(axis: Sequence[float], size: float) -> tuple[int, float]:
    """The point below a size, and how far it is on the way to the next, 0 to 1."""
    if size <= axis[0]:
        return 0, 0.0
    if size >= axis[-1]:
        return len(axis) - 1, 0.0
    i = bisect_right(axis, size) - 1
    return i, (size - axis[i]) / (axis[i + 1] - axis[i])


def _check_axis(what: str, axis: Sequence[float]) -> None:
    if not axis or not axis[0] > 0 or not all(a < b for a, b in pairwise((*axis, math.inf))):
        raise SpecError(f"{what}: sizes {list(axis)} do not ascend from above 0. Sort them.")


def _check_times(what: str, us: Sequence[float], points: int) -> None:
    if len(us) != points or not all(0 < x < math.inf for x in us):
        raise SpecError(
            f"{what}: {points} sizes have the times {list(us)[:8]}. Pass one above 0 for each."
        )


def _check_numbers(constants: Any, rates: set[str], others: tuple[str, ...]) -> None:
    """Raise unless all fields but `others` are times from 0 on, or `rates` above 0."""
    for field in dataclasses.fields(constants):
        given = getattr(constants, field.name)
        values = given.values() if isinstance(given, Mapping) else [given]
        for x in values if field.name not in others else ():
            least = "above" if field.name in rates else "from"
            is_number = isinstance(x, int | float) and not isinstance(x, bool)
            if not is_number or not 0 <= x < math.inf or (field.name in rates and not x):
                raise SpecError(
                    f"{type(constants).__name__}({field.name}={given!r}): {x!r} is no number "
                    f"{least} 0. Measure it, or leave out a kind that was not."
                )


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceConstants:
    """What a device was measured to do.

    Attributes:
        name: of the device.
        bytes_per_us: that it reads and writes, from memory.
        flops_per_us: of large products, by dtype; one that is not there computes as the slowest.
        kernel_us: of a tiny kernel inside of a graph, one after the other.
        switch_us: what a kernel takes longer behind one of another kind than behind its own, as
            curves and grids were measured.
        gap_us: what a kernel takes longer where it is launched by itself.
        boundary_us: between a graph and what runs next to it in a step of PIECEWISE.
        step_us: what a graph's step takes beside `forward`: to take its batch in, to put results
            where they are returned from.
        curves: by kind of work.
        products: by dtype.

    Raises:
        SpecError: rates that are not above 0, times below 0, or no numbers.
    """

    name: str
    bytes_per_us: float
    flops_per_us: Mapping[str, float]
    kernel_us: float
    switch_us: float = 0.0
    gap_us: float = 0.0
    boundary_us: float = 0.0
    step_us: float = 0.0
    curves: Mapping[str, Curve] = dataclasses.field(default_factory=dict)
    products: Mapping[str, Grid] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers(self, {"bytes_per_us", "flops_per_us"}, ("name", "curves", "products"))

    def time(self, work: Work) -> tuple[float, str]:
        """Microseconds of an op inside of a graph, and what bounds it: one of `BOUNDS`.

        A curve over bytes knows no FLOPs, and one over FLOPs no bytes: what the roofline says of
        these is the least.
        """
        if not work.kernels:
            return 0.0, "launch"
        rates = self.flops_per_us
        rate = rates.get(work.dtype) or min(rates.values(), default=math.inf)
        parts = (
            work.kernels * self.kernel_us, work.nbytes / self.bytes_per_us, work.flops / rate,
        )  # fmt: skip
        bound, switch = BOUNDS[parts.index(max(parts))], work.kernels * self.switch_us
        grid, curve = self.products.get(work.dtype), _nearest(self.curves, work.kind)
        if work.shape is not None and grid is not None:
            return max(grid(*work.shape), parts[0]) + switch, bound
        if curve is not None:
            beside = parts[2] if curve.over == "nbytes" else parts[1]
            return max(curve(getattr(work, curve.over)), parts[0], beside) + switch, bound
        return max(parts) + switch, bound


def _nearest(curves: Mapping[str, Curve], kind: str) -> Curve | None:
    """The curve of a kind; of one that ends in a number, "attention 96", that of the nearest."""
    if kind in curves:
        return curves[kind]
    stem, _, number = kind.rpartition(" ")
    if not number.isdigit():
        return None
    others = {name: name.rpartition(" ") for name in curves}
    alike = [name for name, (s, _, n) in others.items() if s == stem and n.isdigit()]
    if not alike:
        return None
    return curves[min(alike, key=lambda name: abs(int(others[name][2]) - int(number)))]


@dataclasses.dataclass(frozen=True, slots=True)
class HostConstants:
    """What the host was measured to take, microseconds.

    Attributes:
        name: of the host's processor.
        step_us: of a step that replays, beside its replays: the call, dispatch, staging, results.
        replay_us: of one replay of a graph.
        node_us: more for each of its nodes.
        eager_step_us: of a step of NONE, beside its ops.
        other_us: of an op whose kind is not in `op_us`.
        op_us: of an op that is called by itself, as in NONE, by kind.
        cut_us: of a primitive's call between two graphs, by its name; others as in NONE.

    Raises:
        SpecError: times below 0, or no numbers.
    """

    name: str
    step_us: float
    replay_us: float
    node_us: float
    eager_step_us: float
    other_us: float
    op_us: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cut_us: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers(self, set(), ("name",))

    def op(self, work: Work) -> float:
        """Of an op that is called by itself."""
        return self.op_us.get(work.called or work.kind, self.other_us)

    def cut(self, work: Work) -> float:
        """Of a primitive between two graphs."""
        return self.cut_us.get(work.called or work.kind, self.op(work))

    def replay(self, nodes: int) -> float:
        """Of one replay of a graph of so many nodes."""
        return self.replay_us + nodes * self.node_us

    def slower(self, by: float) -> HostConstants:
        """Of the same host while all takes `by` times as long: others share the machine."""
        times: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            x = getattr(self, field.name)
            if isinstance(x, Mapping):
                times[field.name] = {kind: us * by for kind, us in x.items()}
            elif field.name != "name":
                times[field.name] = x * by
        return HostConstants(self.name, **times)


class Constants(NamedTuple):
    """What a machine was measured to do.

    Attributes:
        source: where the figures come from, in words.
    """

    device: DeviceConstants
    host: HostConstants
    source: str = ""

    def dumps(self) -> str:
        """As JSON."""
        import json  # 2 ms that dispatch never needs

        told = {"source": self.source, "device": dataclasses.asdict(self.device),
                "host": dataclasses.asdict(self.host)}  # fmt: skip
        return json.dumps(told, indent=1) + "\n"

    @classmethod
    def loads(cls, dumped: str) -> Constants:
        """What `dumps` wrote: `fg.core.Constants.loads(path.read_text())`.

        Raises:
            SpecError: another text.
        """
        import json

        expect(str, "what dumps() gave: path.read_text()", dumped=dumped)
        try:
            told = json.loads(dumped)
            device, host = dict(told["device"]), told["host"]
            device["curves"] = {k: Curve(*_tuples(c)) for k, c in device["curves"].items()}
            device["products"] = {k: Grid(*_tuples(g)) for k, g in device["products"].items()}
            return cls(DeviceConstants(**device), HostConstants(**host), told["source"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SpecError(
                f"these are no constants: {what_is_off(dumped, error)}. Measure them: "
                "python -m benchmarks launch --constants FILE."
            ) from error

    def __repr__(self) -> str:
        return f"Constants({self.device.name}, {self.host.name}; {self.source or 'no source'})"


def _tuples(fields: Mapping[str, Any]) -> list[Any]:
    return [tuple(x) if isinstance(x, list) else x for x in fields.values()]
