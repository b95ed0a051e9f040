"""`graphify_encoder`: an encoder whose items run as CUDA graphs, one a path and token budget.

model --plan--> EncoderPlan --a step a path--> Encoder
items --measure, pack--> runs --collate, replay--> rows --gather--> --postprocess--> outputs
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist

from fngraph.core import EncoderPlan, Mode, Packed, trees
from fngraph.core.text import expect, html
from fngraph.encoder.model import EncoderModel, Measured
from fngraph.encoder.planning import Budgets, Histograms, item_counts, pack_measured, plan_model
from fngraph.encoder.ranks import Rows, gather, shares_of
from fngraph.encoder.run import (
    EAGER_TOKENS,
    Ran,
    Steps,
    check_steps,
    encoder_limits,
    execute,
    with_query_len,
)
from fngraph.encoder.statistics import EncoderMemory, EncoderStats
from fngraph.errors import DifferenceError, FnGraphError, ModesError, SpecError, TreeError
from fngraph.graphified import graphify
from fngraph.graphs.recorder import Recorder
from fngraph.options import OptionsDict, check_names
from fngraph.shadow.compared import compare
from fngraph.step.step import Step

LOG = logging.getLogger("fngraph")

MANY = 64  # graphs, from which on one is told
OURS = ("sizes", "query_lens", "limits", "outputs", "key_reqs")  # what the plan decides


def graphify_encoder(
    model: EncoderModel,
    params: Any,
    *,
    budgets: Budgets | None = None,
    histogram: Histograms | None = None,
    num_budgets: int | None = None,
    max_items: int | None = None,
    max_frames: int | None = None,
    max_tokens: int | None = None,
    sequences: Budgets | None = None,
    eager_tokens: int = EAGER_TOKENS,
    defer: bool = True,
    ranks: dist.ProcessGroup | None = None,
    recorder: str | Recorder | None = None,
    log_every: int = 100,
    **options: Any,
) -> Encoder:
    """An encoder that runs items as CUDA graphs, packed into token budgets.

    Every path is traced now, and its graphs are captured when they are first needed, or ahead of
    that by `encoder.capture()`. All of them share one pool of memory.

    Args:
        model: the encoder as pure functions.
        params: what each path's `forward` takes first. It is bound: see `fg.graphify`.
        budgets: output tokens of the graphs, ascending; by path where there are several. None: each
            path's `min_budget` doubled up to the model's range.
        histogram: what budgets are planned from instead: tokens of a run -> how often it came, or
            the runs' tokens themselves; by path where there are several. What an encoder has seen
            is in `encoder.stats.histogram(path)`.
        num_budgets: how many a histogram may ask for, a path; None: 8.
        max_items: items of a run; None: as many of the smallest as the largest budget holds.
        max_frames: frames of a run; None: the model's `max_frames` for each of its items.
        max_tokens: what a step of the decoder takes, where that is less than the model's range.
        sequences: numbers of attention sequences, ascending, for each of which a budget has a graph
            of its own; a run takes the least that holds it. The last bounds every run. By path
            where there are several. None: one number, as many as those items and frames bring.
        eager_tokens: output tokens that one run may bring at all; what is beyond the budgets runs
            eagerly up to here. Fewer where `forward` has a table of so many rows.
        defer: keep an item for a run of its own where two graphs are smaller than one for both.
        ranks: a `torch.distributed` group whose ranks share the items of each call: every rank
            passes the same items, runs its part of them, and gets all outputs.
        recorder: as `fg.graphify`'s; or another step's, `step.recorder`, to share its pool.
        log_every: calls from one INFO line with the statistics to the next; 0: none.
        options: of `fg.graphify`: modes ("FULL", or "PIECEWISE" for paths without a `unit`),
            backends, compile, passes, guards, memory_budget, on_failure, ...

    Raises:
        SizesError: a plan that is none. ModesError: other modes.
        TypeError: an option that the plan decides, or that there is not.
        FnGraphError: as `fg.graphify`, of a path's `forward`.
        SpecError: ranks for an encoder without graphs; an argument of another kind.
    """
    own = inspect.signature(graphify_encoder).parameters
    check_names("graphify_encoder", options, OptionsDict, tuple(own))
    expect(EncoderModel, "fg.EncoderModel(...), then its params", TreeError, model=model)
    expect(bool, "True or False", defer=defer)
    for name, count in (("eager_tokens", eager_tokens), ("log_every", log_every)):
        expect(int, "a whole number", **{name: count})
        if count < 0:
            raise SpecError(f"{name}={count} is below 0. Pass 0 for none, or more.")
    if ranks is not None:
        if model.eager_because is not None:
            raise SpecError(
                f"ranks= shares items by their tokens, and this encoder runs item by item: "
                f"{model.eager_because}. Leave ranks= out, and pass each rank its own items."
            )
        expect(dist.ProcessGroup, "torch.distributed.group.WORLD, or another group", ranks=ranks)
    for name in OURS:
        if name in options:
            raise TypeError(
                f"graphify_encoder() takes no option {name!r}: the plan decides it. Pass budgets=, "
                "max_items=, max_frames= or max_tokens="
            )
    plan = plan_model(
        model, budgets=budgets, histogram=histogram, num_budgets=num_budgets, max_items=max_items,
        max_frames=max_frames, max_tokens=max_tokens, sequences=sequences, defer=defer,
    )  # fmt: skip
    if plan.num_graphs > MANY:
        LOG.warning("encoder: %d graphs are many; pass fewer budgets=", plan.num_graphs)
    steps: dict[str, Step[Any]] = {}
    if model.eager_because is None:
        for path in model.paths:
            steps[path] = _step(model, path, params, plan, recorder, eager_tokens, options)
            recorder = steps[path].recorder
        check_steps(steps, plan)
    return Encoder(model, params, plan, steps, ranks, log_every)


def _step(
    model: EncoderModel,
    name: str,
    params: Any,
    plan: EncoderPlan,
    recorder: str | Recorder | None,
    eager_tokens: int,
    options: Mapping[str, Any],
) -> Step[Any]:
    """A path's step, of whose keys none is captured yet: uniform ones where its sequences are."""
    path, given = model.paths[name], dict(options)
    modes = Mode.parse(given.pop("modes", None) or Mode.FULL)
    if modes not in (Mode.FULL, Mode.PIECEWISE):
        raise ModesError(
            f'modes="{modes}": runs of an encoder are graphs or pieces of one kind. Pass '
            'modes="FULL" or modes="PIECEWISE"; without graphs, EncoderModel(eager_because=...)'
        )
    given["sizes"] = tuple(budget for budget in plan.path_budgets[name] if budget)
    if path.unit is not None:
        given["query_lens"] = (path.unit,)
        modes = Mode.FULL_DECODE_ONLY
    else:
        given["key_reqs"] = plan.sequences.get(name, plan.max_sequences[name])
    widest = max(given["sizes"][-1], eager_tokens)
    limits = encoder_limits(plan, name, max_tokens=widest, max_reqs=widest, **model.dims)
    fast = graphify(path.forward, stage=1, modes=modes, **given)
    try:
        step = fast.bind(params).capture(limits, recorder=recorder, lazy=True, progress=False)
    except FnGraphError as error:
        error.add_note(
            f"in forward of the path {name!r}. graphify_encoder makes its limits, {limits!r}: "
            "max_tokens is eager_tokens=, further letters are EncoderModel(dims=...)"
        )
        raise
    if not len(step.table) or (path.unit is not None and step.table.piecewise):
        raise ModesError(
            f"the path {name!r} has no graphs as it was to have, modes={str(modes)!r}: "
            f"{'; '.join(step.notes) or step.table!r}. Choose backends that a graph may hold, "
            "backends={...}, or pass EncoderModel(eager_because=...)"
        )
    return step


class Encoder:
    """A graphified encoder: `encoder(items)` gives an output for each item.

    What it holds of its own is what its steps do, memory and graphs, and its counts.

    Attributes:
        model: what it runs.
        params: what its paths were bound to.
        plan: its budgets, and what a graph holds.
        steps: the captured step of each path; empty where the model has no graphs.
        ranks: those that share each call's items, if any do.
    """

    def __init__(
        self,
        model: EncoderModel,
        params: Any,
        plan: EncoderPlan,
        steps: Steps,
        ranks: dist.ProcessGroup | None = None,
        log_every: int = 100,
    ) -> None:
        self.model, self.params, self.plan, self.ranks = model, params, plan, ranks
        self.steps, self.log_every = MappingProxyType(dict(steps)), log_every
        self._stats = EncoderStats(known=tuple(model.paths))

    def __call__(self, items: Iterable[Any]) -> list[Any]:
        """An output for each item, in the order of the items, in memory of its own.

        Args:
            items: what the model's functions take, images and videos mixed. Those that no graph
                holds run eagerly. With ranks: the same on every rank.

        Raises:
            SpecError: `measure` and `collate` count what cannot be, or differently; or an item is
                beyond `eager_tokens`.
            TreeError: rows that are not one a token.
            FnGraphError: as a step.
        """
        expect(Iterable, "a list of items", items=items)
        items = list(items)
        measured = self._measured(items)
        if self.model.eager_because is not None:
            rows, ran = self._bare(items, measured)
        else:
            rows, ran = self._graphs(items, measured)
        outputs = [self.model.postprocess(rows[at], item) for at, item in enumerate(items)]
        self._stats.observe(ran)
        if self.log_every and self._stats.calls % self.log_every == 0:
            LOG.info(self._stats.line())
        return outputs

    def check(self, items: Iterable[Any]) -> None:
        """Hold the rows of each item to those that it has by itself, through bare `forward`.

        What no graph shows of itself: a `forward` in which rows depend on those before them, which
        in a run are other items', or a `collate` that puts items in another order. Where such a run
        is a graph's, rows are also what its padding leaves of them. Nothing is counted.

        Args:
            items: as a call takes them, several that share runs: see `pack`.

        Raises:
            DifferenceError: rows that differ by more than kernels do, as `verify=` has it; of the
                first such item, with its path.
        """
        expect(Iterable, "a list of items", items=items)
        items = list(items)
        measured = self._measured(items)
        if self.model.eager_because is not None:
            return  # a call runs item by item, and so would this
        rows, ran = self._graphs(items, measured)
        alone, _ = self._bare(items, measured)
        for run in ran:
            for at in run.items:
                got, want = rows[at][run.path], alone[at][run.path]
                (leaves, _), (wanted, treedef) = trees.flatten(got), trees.flatten(want)
                paths = trees.paths(treedef, f"the rows of items[{at}]")
                pairs = zip(paths, leaves, wanted, strict=True)
                if wrong := compare(list(pairs), {}, exact=False):
                    others = [i for i in run.items if i != at]
                    beside = f"in one run with items {others}" if others else "alone in its run"
                    raise DifferenceError(
                        f"path {run.path!r}: {wrong[0]}, {beside}, beside bare forward of that "
                        "item alone. In a run rows of other items lie before and behind its own: a "
                        "cumsum, a shift or a position along T goes by the sequences' offsets, and "
                        "collate keeps the order of items"
                    )

    def pack(self, items: Iterable[Any]) -> Packed:
        """How these items would run on one rank, without running them."""
        expect(Iterable, "a list of items", items=items)
        measured = self._measured(list(items))
        counts = [item_counts(one, self.plan) for one in measured]
        return pack_measured(self.model, self.plan, measured, counts, range(len(counts)))

    def _measured(self, items: Sequence[Any]) -> list[Measured]:
        return [self.model.measured(item, f"items[{at}]") for at, item in enumerate(items)]

    def _graphs(
        self, items: Sequence[Any], measured: Sequence[Measured]
    ) -> tuple[Rows, Sequence[Ran]]:
        """Rows by item and path, and how this rank's runs went."""
        model, plan = self.model, self.plan
        counts = [item_counts(one, plan) for one in measured]
        mine: Sequence[int] = range(len(items))
        if self.ranks is not None:
            shares = shares_of(counts, dist.get_world_size(self.ranks))
            mine = shares[dist.get_rank(self.ranks)]
        packed = pack_measured(model, plan, measured, counts, mine)

        def collate(path: str, some: Sequence[Any]) -> Any:
            return with_query_len(model.collate(path, some), model.paths[path].unit)

        rows, ran = execute(self.steps, plan, packed.runs, items, counts, collate)
        if self.ranks is None:
            return rows, ran
        return gather(rows, counts, shares, plan, self.steps, self.ranks), ran

    @torch.no_grad()
    def _bare(
        self, items: Sequence[Any], measured: Sequence[Measured]
    ) -> tuple[Rows, Sequence[Ran]]:
        """Item by item, without a trace: what a model is that has no graphs."""
        model, why = self.model, str(self.model.eager_because)
        leaves, _ = trees.flatten(self.params)
        device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), None)
        rows: dict[int, dict[str, Any]] = {}
        ran = []
        for at, item in enumerate(items):
            rows[at] = {}
            for path, tokens in measured[at].tokens.items():
                if tokens:
                    batch = model.collate(path, [item])
                    if device is not None:
                        batch = trees.map_leaves(lambda x: x.to(device), batch)
                    rows[at][path] = model.paths[path].forward(self.params, batch)
                    ran.append(Ran(path, (at,), (tokens,), None, why))
        return rows, ran

    def capture(self, progress: bool | str = False) -> Self:
        """Capture every graph now, largest first; returns the encoder.

        Raises:
            CaptureError, SleepError, AddressError: as `Step.capture_all`.
        """
        for path, step in self.steps.items():
            step.capture_all(f"capturing {path}" if progress is True else progress)
        return self

    @property
    def stats(self) -> EncoderStats:
        """What the calls so far ran as, on this rank; later calls do not change it."""
        return self._stats.copy()

    @property
    def recorder(self) -> Recorder | None:
        """Whose pool the graphs are in, to share: `graphify(...).capture(recorder=...)`."""
        return next((step.recorder for step in self.steps.values()), None)

    @property
    def memory(self) -> EncoderMemory:
        """Memory of each path's graphs: estimated, measured, last used."""
        return EncoderMemory({path: step.memory for path, step in self.steps.items()})

    def sleep(self) -> None:
        """Give back the memory of graphs and buffers. A call is then an error; see `Step.sleep`."""
        for step in self.steps.values():
            step.sleep()

    def wake(self) -> None:
        """Take the memory again, and capture what was captured; see `Step.wake`."""
        for step in self.steps.values():
            step.wake()

    def _repr_html_(self) -> str:
        return html(self.as_text())

    def as_text(self) -> str:
        """The plan, why anything is not as it was asked for, and the statistics."""
        parts = [self.plan.as_text()]
        if self.model.eager_because is not None:
            parts = [f"no graphs: {self.model.eager_because}"]
        parts += [f"{path}: {note}" for path, step in self.steps.items() for note in step.notes]
        return "\n\n".join([*parts, self.stats.as_text()])

    def __repr__(self) -> str:
        if self.model.eager_because is not None:
            return f"Encoder(no graphs: {self.model.eager_because}; {self.stats!r})"
        done = ", ".join(
            f"{path}: {len(step)} of {len(step.table)} graphs" for path, step in self.steps.items()
        )
        return f"Encoder({done}; {self.stats!r})"
