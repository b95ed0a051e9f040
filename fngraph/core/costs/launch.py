"""The launch model: what a step takes in NONE, PIECEWISE and FULL, predicted before it is built.

A step is parts: runs of ops, with cuts between them. The host and the device each do their share,
and steps that follow one another without a wait take as long as the slower of the two:

| mode      | host                           | device                                         |
|-----------|--------------------------------|------------------------------------------------|
| NONE      | each op's call                 | each kernel, and a gap before it               |
| PIECEWISE | the step, replays, cuts' calls | the step, each kernel, boundaries of the graphs |
| FULL      | the step, one replay           | the step, each kernel                          |

So graphs pay where the host is slower, or the gaps count; from the `crossing` on, neither does.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fngraph.core.buffers import key_sizes
from fngraph.core.costs.planner import Cost
from fngraph.core.costs.roofline import BOUNDS, Constants, Work
from fngraph.core.dispatching import dispatch
from fngraph.core.kinds import checked
from fngraph.core.modes import RUNTIME_MODES, Mode
from fngraph.core.spec import BatchDescriptor, BatchSpec
from fngraph.core.table import DispatchTable
from fngraph.core.text import expect, html, table
from fngraph.errors import ModesError, SpecError

BatchOf = Callable[[int], BatchSpec]
"""Which batch has so many tokens."""
SHARE = 0.05
"""What a graph must bring to be worth its memory, of a step's time, where nothing is said."""
SIZES = "some numbers of tokens, (1, 8)"


class Part(NamedTuple):
    """What runs between two cuts, or a cut.

    Attributes:
        works: its ops, in order.
        cut: whether it runs between two graphs in PIECEWISE.
    """

    works: tuple[Work, ...]
    cut: bool = False


class StepTime(NamedTuple):
    """What a step takes, microseconds.

    Attributes:
        mode: what it runs as.
        host_us: that the host is busy.
        device_us: that the device is, if it never waits for the host.
        wall_us: of one step of many that follow one another without a wait.
        bound: what to make less of: "launch" (the host's calls; or the device's least times of
            kernels, gaps and boundaries), "memory" or "compute".
        launches: replays, and calls by themselves.
        parts_us: of the device's time, what goes by each of "launch", "memory", "compute".
    """

    mode: Mode
    host_us: float
    device_us: float
    wall_us: float
    bound: str
    launches: int
    parts_us: tuple[float, float, float]

    def gain(self, other: StepTime) -> float:
        """By how much of its own time it is faster than another: 0.5 where that takes 1.5 of it."""
        return other.wall_us / self.wall_us - 1 if self.wall_us else 0.0

    def __repr__(self) -> str:
        return (
            f"StepTime({self.mode}: {self.wall_us:.0f} us, {self.bound} bound; host "
            f"{self.host_us:.0f}, device {self.device_us:.0f}, {self.launches} launches)"
        )


def predict(parts: Sequence[Part], constants: Constants, mode: Mode | str) -> StepTime:
    """What a step of these parts takes.

    Raises:
        ModesError: no runtime mode.
    """
    expect(Sequence, "those of a launch model, model.count(...)", parts=parts)
    expect(Constants, "fg.core.Constants", constants=constants)
    mode = Mode.parse(mode)
    if mode not in RUNTIME_MODES:
        raise ModesError(
            f"A step runs as NONE, PIECEWISE or FULL, not as {mode}. Pass one of them."
        )
    device, host = constants.device, constants.host
    spent = dict.fromkeys(BOUNDS, 0.0)
    for part in parts:
        for work in part.works:
            us, bound = device.time(work)
            spent[bound] += us
    if mode is Mode.NONE:
        calls = [work for part in parts for work in part.works]
        host_us = host.eager_step_us + sum(map(host.op, calls))
        spent["launch"] += device.gap_us * sum(work.kernels for work in calls)
        return _step(mode, host_us, spent, len(calls))
    spent["launch"] += device.step_us
    if mode is Mode.FULL:
        nodes = sum(work.kernels for part in parts for work in part.works)
        return _step(mode, host.step_us + host.replay(nodes), spent, 1)
    graphs, cuts = _launches(parts)
    spent["launch"] += device.boundary_us * max(len(graphs) + len(cuts) - 1, 0)
    host_us = host.step_us + sum(map(host.replay, graphs)) + sum(map(host.cut, cuts))
    return _step(mode, host_us, spent, len(graphs) + len(cuts))


def _launches(parts: Sequence[Part]) -> tuple[list[int], list[Work]]:
    """Nodes of each graph of PIECEWISE, and the calls between them. The batch is taken in by the
    first, and results are put where they belong by the last."""
    graphs, is_open = [0], True
    cuts: list[Work] = []
    for part in parts:
        if part.cut:
            cuts += part.works
            is_open = False
            continue
        if not is_open:
            graphs.append(0)
            is_open = True
        graphs[-1] += sum(work.kernels for work in part.works)
    if not is_open:
        graphs.append(0)
    return graphs, cuts


def _step(mode: Mode, host_us: float, spent: Mapping[str, float], launches: int) -> StepTime:
    parts = tuple(spent[name] for name in BOUNDS)
    device_us = sum(parts)
    bound = "launch" if host_us > device_us else max(BOUNDS, key=spent.__getitem__)
    wall_us = max(host_us, device_us)
    return StepTime(mode, host_us, device_us, wall_us, bound, launches, parts)  # type: ignore[arg-type]


@checked
def crossing(gain: Callable[[int], float], most: int, share: float = SHARE) -> int | None:
    """The least size from which on graphs bring no more than `share`; None: they do up to `most`.

    Args:
        gain: what graphs bring at a size, as `StepTime.gain` has it. It is asked at powers of two,
            and between the last that brings more and the next, where it is taken to fall.
        most: the largest size that comes.

    >>> crossing(lambda size: 3 / size, most=1000, share=0.1)
    30
    """
    expect(int, most=most)
    expect((float, int), "a share, 0.05 for 5 %", share=share)
    if isinstance(share, bool) or not share >= 0:
        raise SpecError(f"share={share!r}: pass one of 0 or more, 0.05 for 5 %")
    sizes = [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]
    pays = [i for i, size in enumerate(sizes) if gain(size) > share]
    if not pays:
        return 1
    if pays[-1] == len(sizes) - 1:
        return None
    low, high = sizes[pays[-1]], sizes[pays[-1] + 1]
    between = range(low + 1, high)
    return low + 1 + bisect_left(between, True, key=lambda size: gain(size) <= share)


Count = Callable[[Mapping[str, int], Mapping[str, int], int | None], tuple[Part, ...]]
"""The parts of a program: of the sizes that its pieces run at, those that its cuts do, and the
longest request, None: not said.

Raises:
    SpecError: a cut's work depends on how long requests are, and nobody has said.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchModel:
    """What steps of a lowered function take. `print(model.as_text())` shows where graphs pay.

    Attributes:
        count: what its parts do.
        table: which keys there are.
        constants: of the machine.
        notes: what is not counted as it will run.
        context: tokens of each request, this step's included, where a spec does not say; a request
            that brings more than that has those.

    Raises:
        TypeError: constants or a context that are none.
    """

    count: Count
    table: DispatchTable
    constants: Constants
    notes: tuple[str, ...] = ()
    context: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.constants, Constants):
            raise TypeError(
                f"launch_model({self.constants!r}): expected Constants. Read those that were "
                "measured: fg.core.Constants.loads(Path(file).read_text())"
            )
        said = self.context
        if said is not None and (isinstance(said, bool) or not isinstance(said, int) or said < 1):
            raise TypeError(f"context={said!r}: a number of tokens, 1 or more; None: not said")

    def predict(
        self, spec: BatchSpec, mode: Mode | str | None = None, padded: bool = True
    ) -> StepTime:
        """What a batch takes.

        Args:
            spec: its `host.max_seq_len` is how long requests are.
            mode: FULL, PIECEWISE or NONE, whether there is such a key or not; None: what it is
                dispatched to.
            padded: to the least key of that mode that covers it, if there is one; False: as if
                there were a key of just its size.

        Raises:
            ModesError: no runtime mode.
            SpecError: nobody says how long requests are, and attention goes by that; a spec beyond
                the limits, or with a field that the table does not know.
        """
        self.table.limits.check(spec)
        mode = dispatch(self.table, spec).mode if mode is None else Mode.parse(mode)
        key = spec.descriptor()
        if padded and mode in (Mode.FULL, Mode.PIECEWISE):
            found = dispatch(self.table, spec, (mode, Mode.NONE))
            key = found.descriptor if found.mode is mode else key
        parts = self.count(self._sizes(key), self._sizes(spec.descriptor()), self._longest(spec))
        return predict(parts, self.constants, mode)

    def _sizes(self, key: BatchDescriptor) -> dict[str, int]:
        limits = self.table.limits
        return key_sizes(key.num_tokens, key.num_reqs, limits.max_reqs, limits.dims)

    def _longest(self, spec: BatchSpec) -> int | None:
        said = spec.host.max_seq_len or self.context
        brought = -(-spec.num_tokens // spec.num_reqs)
        return None if said is None else max(said, brought)

    def batch(self, size: int) -> BatchSpec:
        """The batch of so many tokens that is asked about where none is named: one token of each
        request, or where that is more requests than may come, a chunk of one."""
        expect(int, "a number of tokens", size=size)
        if size <= self.table.limits.max_reqs:
            return BatchSpec(size, size, query_len=1)
        return BatchSpec(size, 1)

    def _batch_of(self, batch: BatchOf | None) -> BatchOf:
        """What makes the batch of a size."""
        expect((Callable, type(None)), "a function of the size", batch=batch)
        return batch or self.batch

    def times(
        self, sizes: Iterable[int], batch: BatchOf | None = None
    ) -> list[tuple[BatchSpec, dict[Mode, StepTime]]]:
        """For each size its batch, and what it takes in each mode, if there were a key of just that
        size. Raises as `predict`."""
        expect(Iterable, SIZES, sizes=sizes)
        made = self._batch_of(batch)
        specs = [made(size) for size in sizes]
        return [(spec, {m: self.predict(spec, m, False) for m in RUNTIME_MODES}) for spec in specs]

    def gain(self, size: int, batch: BatchOf | None = None, mode: Mode | str = Mode.FULL) -> float:
        """What a graph of just that size brings over NONE, of its own time. Raises as `predict`."""
        spec = self._batch_of(batch)(size)
        return self.predict(spec, mode, False).gain(self.predict(spec, Mode.NONE))

    def crossing(
        self, share: float = SHARE, batch: BatchOf | None = None, mode: Mode | str = Mode.FULL
    ) -> int | None:
        """Tokens from which on a graph brings no more than `share`; None: it does up to the limits.

        Raises as `predict`.
        """
        most = self.table.limits.max_tokens
        return crossing(lambda size: self.gain(size, batch, mode), most, share)

    def ceiling(
        self, share: float = SHARE, batch: BatchOf | None = None, mode: Mode | str = Mode.FULL
    ) -> int:
        """The largest size that is worth a graph, 0 if none is:
        `fg.core.default_sizes(limits, ceiling=model.ceiling())`. Raises as `predict`."""
        found = self.crossing(share, batch, mode)
        return self.table.limits.max_tokens if found is None else found - 1

    def cost(self, mode: Mode | str = Mode.FULL, batch: BatchOf | None = None) -> Cost:
        """Microseconds of a step that runs at a size: `plan_sizes(histogram, 8, model.cost())`."""
        made = self._batch_of(batch)
        return lambda size: self.predict(made(size), mode, False).wall_us

    def key_cost(self, key: BatchDescriptor) -> float:
        """Microseconds of a key that is full, for `graphify(cost=model.key_cost)`. One for any
        number of requests is taken for PIECEWISE. Raises as `predict`."""
        expect(BatchDescriptor, "a key", key=key)
        reqs = min(key.num_reqs or key.num_tokens, self.table.limits.max_reqs)
        spec = BatchSpec(key.num_tokens, reqs, key.query_len)
        mode = Mode.PIECEWISE if key.num_reqs is None else Mode.FULL
        return self.predict(spec, mode, False).wall_us

    def split_cost(self, spec: BatchSpec) -> StepTime:
        """What one more cut adds to a step of PIECEWISE: of the host a replay and a call, of the
        device two boundaries; to the wall, what is left of that. Raises as `predict`."""
        self.table.limits.check(spec)
        parts = self.count(
            self._sizes(spec.descriptor()), self._sizes(spec.descriptor()), self._longest(spec)
        )
        calls = [work for part in parts if part.cut for work in part.works] or [Work("cut")]
        more = Part((calls[0]._replace(kernels=0, nbytes=0.0, flops=0.0, shape=None),), cut=True)
        # between two of its ops: a cut next to another would not split a graph
        at = next((i for i, part in enumerate(parts) if not part.cut and len(part.works) > 1), None)
        if at is None:
            split = [*parts, more, Part(())]
        else:
            first, *rest = parts[at].works
            split = [*parts[:at], Part((first,)), more, Part(tuple(rest)), *parts[at + 1 :]]
        before, after = (predict(x, self.constants, Mode.PIECEWISE) for x in (parts, split))
        latency, memory, compute = (b - a for a, b in zip(before.parts_us, after.parts_us))
        return StepTime(
            Mode.PIECEWISE, after.host_us - before.host_us, after.device_us - before.device_us,
            after.wall_us - before.wall_us, after.bound, after.launches - before.launches,
            (latency, memory, compute),
        )  # fmt: skip

    def _repr_html_(self) -> str:
        return html(self.as_text())

    def as_text(self, sizes: Iterable[int] = (), batch: BatchOf | None = None) -> str:
        """A line a size: each mode's time, what bounds it, and what FULL brings. Raises as
        `predict`.

        Args:
            sizes: tokens; none: powers of two up to the limits.
        """
        most = self.table.limits.max_tokens
        rows = []
        expect(Iterable, SIZES, sizes=sizes)
        for spec, times in self.times(tuple(sizes) or _powers(most), batch):
            none, piecewise, full = (times[mode] for mode in RUNTIME_MODES)
            rows.append(
                [spec.num_tokens, spec.num_reqs,
                 *(f"{t.wall_us:.0f}" for t in (none, piecewise, full)),
                 *(t.bound for t in (none, piecewise, full)),
                 f"{full.gain(none):.0%}", f"{full.gain(piecewise):.0%}"]
            )  # fmt: skip
        header = ("tokens", "requests", "NONE us", "PIECEWISE us", "FULL us", "NONE is bound by",
                  "PIECEWISE by", "FULL by", "FULL brings", "over PIECEWISE")  # fmt: skip
        found = self.crossing(batch=batch)
        told = f"up to {most} tokens FULL brings more than {SHARE:.0%}"
        if found is not None:
            told = f"from {found} tokens on FULL brings no more than {SHARE:.0%}"
        source = f"constants: {self.constants.source or self.constants.device.name}"
        return "\n\n".join([table(header, rows), told, source, *self.notes])

    def __repr__(self) -> str:
        return f"LaunchModel({self.table!r}, {self.constants!r})"


def _powers(most: int) -> tuple[int, ...]:
    return (*(1 << i for i in range(most.bit_length()) if 1 << i < most), most)
