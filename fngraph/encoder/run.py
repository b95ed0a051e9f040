"""`encode`: items packed into the budgets of a plan, each run on the key that was planned.

    items --balance--> this rank's --pack--> runs --collate--> batches --step--> rows by item

Each path of a plan (most encoders have one) is an ordinary captured step whose capture sizes are
the path's budgets and whose tokens are output tokens; an item is one request of it, or several. The
plan decides, and the step keeps to it: a run that was planned eager runs eagerly, and one that no
key serves is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fngraph.core import (
    BatchSpec,
    Dispatch,
    EncoderPlan,
    Item,
    Limits,
    Mode,
    Packed,
    Run,
    balance,
    host_field,
    item_of,
    pack,
    text,
    trees,
)
from fngraph.core.encoders.plans import ANY, DEFAULT_PATH
from fngraph.core.kinds import checked
from fngraph.errors import ModesError, SizesError, SpecError, TreeError
from fngraph.step.step import Step

Collate = Callable[[str, Sequence[Any]], Any]
Steps = Mapping[str, Step[Any]]

EAGER_TOKENS = 1 << 17
"""Output tokens that a run may bring to a step by default: as many as a long prompt has. What no
graph holds runs unpadded, on the batch's own memory, so that it costs nothing to allow them."""


class Ran(NamedTuple):
    """One run of one path.

    Attributes:
        path: the path.
        items: indices into the items that were passed, of those that brought the path tokens.
        tokens: how many, each.
        budget: the graph's tokens; None: it ran eagerly.
        why: why it ran so.
    """

    path: str
    items: tuple[int, ...]
    tokens: tuple[int, ...]
    budget: int | None
    why: str


class Encoded(NamedTuple):
    """What one rank made of its items.

    Attributes:
        indices: which of the items are this rank's, in the order in which they were given.
        outputs: for each of them, path to the item's own rows; a path without tokens is absent.
        packed: how they were planned; `hits` and `misses` say how many by graph.
        ran: how they ran. It differs from the plan where a graph could not be captured, and that is
            to be no error.
    """

    indices: tuple[int, ...]
    outputs: tuple[dict[str, Any], ...]
    packed: Packed
    ran: tuple[Ran, ...]


@checked
def encoder_limits(plan: EncoderPlan, path: str = DEFAULT_PATH, **dims: int) -> Limits:
    """The `fg.Limits` of a path's step: as wide as `EAGER_TOKENS`, for what no graph holds.

    Args:
        dims: bounds of further letters. `max_tokens` and `max_reqs` may be given too: smaller where
            `forward` needs it (a table of positions), larger for larger items.

    Raises:
        SpecError: a path that the plan does not have.
    """
    if path not in plan.path_budgets:
        raise SpecError(
            f"path={path!r}: the plan has the paths {sorted(plan.path_budgets)}."
            f"{text.did_you_mean(path, plan.path_budgets)} Name one of those."
        )
    widest = max(plan.path_budgets[path][-1], EAGER_TOKENS)
    return Limits(**{"max_tokens": widest, "max_reqs": widest, **dims})


@checked
def encode(
    steps: Step[Any] | Steps,
    plan: EncoderPlan,
    items: Sequence[Any],
    tokens: Sequence[int | Mapping[str, int] | Item],
    collate: Collate,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Encoded:
    """Run this rank's share of `items` in as few graph replays as the plan's budgets allow.

    Args:
        steps: batch to rows (tokens, ...), or to a tree of them, by path; one step where the plan
            has one path.
        tokens: output tokens of each item: a number, numbers by path, or `Item`s with frames and
            sequences.
        collate: path and some items to the batch of their run; its spec counts their tokens and
            sequences.
        rank, ranks: of how many ranks that share the items this one is which.

    Raises:
        SpecError: counts that do not belong to the plan, the items or the batch; or a batch beyond
            the step's limits.
        SizesError: a step whose keys are not the plan's budgets.
        TreeError: a step whose results are borrowed; or rows that are not one a token.
        ModesError: a run that its planned key does not cover.
    """
    by_path = dict(steps) if isinstance(steps, Mapping) else {DEFAULT_PATH: steps}
    check_steps(by_path, plan)
    if len(tokens) != len(items):
        raise SpecError(f"{len(items)} items, but token counts of {len(tokens)}. Pass one each.")
    counts = [item_of(count, plan) for count in tokens]
    mine = share_of([sum(count.tokens) for count in counts], rank, ranks)
    packed = pack([counts[i] for i in mine], plan)
    moved = [run._replace(items=tuple(mine[j] for j in run.items)) for run in packed.runs]
    rows, ran = execute(by_path, plan, moved, items, counts, collate)
    return Encoded(mine, tuple(rows[i] for i in mine), packed, ran)


def check_steps(steps: Steps, plan: EncoderPlan) -> None:
    """Raise unless there is a step for each path, whose results are kept and whose keys are the
    plan's.

    Raises:
        SpecError, TreeError, SizesError
    """
    if steps.keys() != plan.path_budgets.keys():
        raise SpecError(
            f"steps for the paths {sorted(steps)}, a plan with {sorted(plan.path_budgets)}. "
            "Pass one step a path."
        )
    for path, step in steps.items():
        if not isinstance(step, Step):
            raise TreeError(
                f"the step of the path {path!r} is a {type(step).__name__}, which takes no plan. "
                "Pass what capture returns: fg.graphify(...).bind(...).capture(...)"
            )
        if step.outputs == "borrow":
            raise TreeError(
                f"the step of the path {path!r} lends its results until the next run, which would "
                'overwrite those of earlier items. Capture it with outputs="own"'
            )
        wanted = [budget for budget in plan.path_budgets[path] if budget]
        found = sorted({key.num_tokens for _, key in step.table})
        if found != wanted:
            raise SizesError(
                f"the step of the path {path!r} has keys of {found} tokens, the plan budgets of "
                f"{wanted}. Capture it for them: fg.graphify(..., sizes={tuple(wanted)})"
            )


def share_of(totals: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """Which items are a rank's, ascending; `totals` are their tokens. Raises SpecError."""
    if not 0 <= rank < ranks:
        raise SpecError(f"rank={rank} is none of ranks={ranks}. Pass 0 to {ranks - 1}.")
    spread = balance(totals, ranks)
    start = sum(spread.counts[:rank])
    return tuple(sorted(spread.order[start : start + spread.counts[rank]]))


def execute(
    steps: Steps,
    plan: EncoderPlan,
    runs: Sequence[Run],
    items: Sequence[Any],
    counts: Sequence[Item],
    collate: Collate,
) -> tuple[dict[int, dict[str, Any]], tuple[Ran, ...]]:
    """Run what was planned: rows by item and path, in memory of their own, and how each run ran."""
    rows: dict[int, dict[str, Any]] = {at: {} for at in range(len(items))}
    ran: list[Ran] = []
    places = {path: place for place, path in enumerate(plan.path_budgets)}
    for run in runs:
        present = longest_first(run, counts, places[run.path])
        found = [counts[at] for at in present]
        tokens = tuple(count.tokens[places[run.path]] for count in found)
        sequences = sum(count.sequences[places[run.path]] for count in found)
        step = steps[run.path]
        batch = collate(run.path, [items[at] for at in present])
        spec = _spec_of(run.path, batch, sum(tokens), sequences)
        why = why_eager(run, counts, plan) if run.budget is None else ""
        decision = decide(step, spec, run.budget, why)
        made = step(batch, allowed=decision)
        for at, part in zip(present, split_rows(run.path, made, tokens)):
            rows[at][run.path] = part
        budget = None if decision.mode is Mode.NONE else run.budget
        ran.append(Ran(run.path, present, tokens, budget, decision.reason))
    return rows, tuple(ran)


def longest_first(run: Run, counts: Sequence[Item], place: int) -> tuple[int, ...]:
    """The run's items that bring the path tokens, those of the longest sequences first.

    Tiles of attention begin in the order of the batch, and last as long as their sequence is: with
    the longest at the end, most of a GPU would wait for them alone. `pack` has them there, as it
    takes items by rising size.
    """
    present = [at for at in run.items if counts[at].tokens[place]]
    if len(present) > 1:
        present.sort(key=lambda at: -counts[at].tokens[place] / counts[at].sequences[place])
    return tuple(present)


def why_eager(run: Run, counts: Sequence[Item], plan: EncoderPlan) -> str:
    """Why a run has no budget: the first limit of graphs that its items are beyond."""
    place = list(plan.path_budgets).index(run.path)
    top = plan.path_budgets[run.path][-1]
    most = plan.max_sequences.get(run.path, ANY)
    if sum(counts[at].frames for at in run.items) > plan.max_frames:
        return f"more than {text.count(plan.max_frames, 'frame')}"
    if sum(counts[at].tokens[place] for at in run.items) > top:
        return f"more tokens than the largest budget of {run.path}, {top}"
    if sum(counts[at].sequences[place] for at in run.items) > most:
        return f"more than {text.count(most, 'sequence')} of {run.path}"
    return "graphs are not for its modality"


def decide(step: Step[Any], spec: BatchSpec, budget: int | None, why: str) -> Dispatch:
    """The plan's decision as one of the step's: the key of that budget, or to run eagerly.

    Args:
        why: it runs eagerly by the plan, where it does.

    Raises:
        ModesError: no key of that budget covers the batch.
        SpecError: it is too large to run at all.
    """
    if budget is None:
        if spec.num_tokens > step.limits.max_tokens:
            raise SpecError(
                f"a run of {spec.num_tokens} output tokens has no graph ({why}), and at most "
                f"{step.limits.max_tokens} may run eagerly. Pass graphify_encoder(..., "
                f"eager_tokens={spec.num_tokens}), or encoder_limits(..., max_tokens=...)."
            )
        return Dispatch(Mode.NONE, spec.descriptor(), why)
    table = step.table
    for mode in (Mode.FULL, Mode.PIECEWISE):
        sized = [key for key in table.keys(mode) if key.num_tokens == budget]
        covering = [key for key in sized if all(f.covers(key, spec) for f in table.fields)]
        if covering:
            chosen = Dispatch(mode, min(covering, key=table.order), "planned")
            if failure := step.failed.get(chosen.key):
                return Dispatch(Mode.NONE, spec.descriptor(), f"capture failed: {failure}")
            return chosen
    keys = [key for _, key in table if key.num_tokens == budget]
    raise ModesError(
        f"{spec!r} was planned for a budget of {budget} tokens, and no key of the step covers it: "
        f"{keys or 'there is none'}. Capture keys for as many sequences as the plan allows, "
        "fg.graphify(..., key_reqs=...), or plan fewer: plan_encoder(..., max_sequences=...)."
    )


def _spec_of(path: str, batch: Any, tokens: int, sequences: int) -> BatchSpec:
    """A batch's spec, which must count what its items bring.

    Raises:
        SpecError: it does not. TreeError: there is none.
    """
    field = host_field(type(batch))
    spec = None if field is None else getattr(batch, field)
    if not isinstance(spec, BatchSpec):
        raise TreeError(
            f"collate({path!r}, items) made a {type(batch).__name__} without a spec. Make an "
            "fg.struct with spec: fg.BatchSpec = fg.host(), and fill it"
        )
    if (spec.num_tokens, spec.num_reqs) != (tokens, sequences):
        raise SpecError(
            f"collate({path!r}, items) made a batch of {spec.num_tokens} tokens in "
            f"{spec.num_reqs} sequences; its items were said to bring {tokens} in {sequences}. "
            "Make both count alike."
        )
    return spec


def split_rows(path: str, rows: Any, tokens: Sequence[int]) -> list[Any]:
    """The rows of each item, of a run's whole tree, copied so that no item holds its neighbours'.

    Raises:
        TreeError: a leaf that has not one row a token.
    """
    leaves, treedef = trees.flatten(rows)
    total = sum(tokens)
    for i, leaf in enumerate(leaves):
        if leaf.shape[:1] != (total,):
            raise TreeError(
                f"{trees.paths(treedef, 'output')[i]} of the path {path!r} has the shape "
                f"{list(leaf.shape)}, for {total} output tokens. Return one row a token, items end "
                "to end"
            )
    if len(tokens) == 1:
        return [rows]
    parts = [[part.clone() for part in leaf.split_with_sizes(tokens)] for leaf in leaves]
    return [trees.unflatten(treedef, list(leaves)) for leaves in zip(*parts)]


def with_query_len(batch: Any, unit: int | None) -> Any:
    """A batch whose sequences all have `unit` tokens, and whose spec says so."""
    field = host_field(type(batch))
    spec = None if field is None else getattr(batch, field)
    if unit is None or not isinstance(spec, BatchSpec) or spec.query_len is not None:
        return batch
    uniform = spec._replace(query_len=unit)
    return dataclasses.replace(batch, **{str(field): uniform})
