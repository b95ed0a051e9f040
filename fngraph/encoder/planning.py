"""The plan of a model's graphs: budgets doubled, the user's, or the ones that a histogram asks for;
how many items, frames and sequences each graph holds; and, for some items, how they will run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from fngraph.core import EncoderPlan, Item, Packed, Path, Run, pack, plan_encoder, plan_sizes
from fngraph.core.costs.planner import Histogram, counts_of
from fngraph.core.kinds import checked
from fngraph.core.text import did_you_mean
from fngraph.encoder.model import EncoderModel, EncoderPath, Measured
from fngraph.errors import SizesError

Budgets: TypeAlias = Iterable[int] | Mapping[str, Iterable[int]]
Histograms: TypeAlias = Histogram | Mapping[str, Histogram]
"""What is given for the only path, or for some by name."""


BUDGETS = 8  # that a histogram asks for at most, if nothing is said


@checked
def plan_model(
    model: EncoderModel,
    *,
    budgets: Budgets | None = None,
    histogram: Histograms | None = None,
    num_budgets: int | None = None,
    max_items: int | None = None,
    max_frames: int | None = None,
    max_tokens: int | None = None,
    sequences: Budgets | None = None,
    defer: bool = True,
) -> EncoderPlan:
    """What to capture for a model; see `graphify_encoder` for the arguments.

    Raises:
        SizesError: budgets or numbers of sequences that do not ascend; both budgets and a
            histogram, or one without a run, or `num_budgets` without one; limits that leave
            nothing; one value for several paths; sequences of a path whose `unit` says how many
            there are.
        SpecError: an argument of another kind.
    """
    if budgets is not None and histogram is not None:
        raise SizesError(
            "budgets= and histogram= both say which budgets there are. Pass one of them."
        )
    if num_budgets is not None and num_budgets < 1:
        raise SizesError(f"num_budgets={num_budgets} leaves no budget. Pass 1 or more.")
    if num_budgets is not None and histogram is None:
        raise SizesError(
            f"num_budgets={num_budgets} is how many budgets a histogram may ask for, and there is "
            "none. Pass histogram= as well, or budgets=, which says them."
        )
    low, high = model.token_range
    high = high if max_tokens is None else min(high, max_tokens)
    own = {path: tuple(given) for path, given in _by_path("budgets", budgets, model).items()}
    for path, seen in _by_path("histogram", histogram, model).items():
        own[path] = _planned(path, model.paths[path], seen, num_budgets or BUDGETS, high)
    paths = {
        name: Path(path.min_budget, path.allow_zero, path.unit, own.get(name))
        for name, path in model.paths.items()
    }
    only = own.get(next(iter(paths))) if len(paths) == 1 else None
    plan = plan_encoder(
        low, high, budgets=only, max_items=max_items, paths=paths, max_frames=max_frames,
        frames_per_item=model.max_frames,
    )  # fmt: skip
    shown = plan.max_frames if model.max_frames else 0
    most = {
        name: plan.max_items * path.max_sequences + shown
        for name, path in model.paths.items()
        if path.unit is None
    }
    numbers = {}
    for name, given in _by_path("sequences", sequences, model).items():
        numbers[name] = _checked(name, tuple(given), model.paths[name])
        most[name] = numbers[name][-1]
    return plan._replace(max_sequences=most, sequences=numbers, defer=defer)


def _checked(name: str, given: tuple[int, ...], path: EncoderPath) -> tuple[int, ...]:
    """Numbers of sequences of a path's graphs. Raises SizesError."""
    if path.unit is not None:
        raise SizesError(
            f"sequences= of the path {name!r}: its sequences have {path.unit} tokens each, so that "
            "its budgets say how many there are. Leave it out."
        )
    if not given or list(given) != sorted(set(given)) or given[0] < 1:
        good = tuple(sorted({n for n in given if n > 0})) or (8, 64)
        raise SizesError(
            f"sequences={given} of the path {name!r} must ascend from 1 or more. Pass {good}."
        )
    return given


def _by_path(name: str, given: Any, model: EncoderModel) -> Mapping[str, Any]:
    """What was given for each path; for the only one, it may be given as it is."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and given and all(isinstance(key, str) for key in given):
        if unknown := given.keys() - model.paths.keys():
            raise SizesError(
                f"{name}={{{min(unknown)!r}: ...}}: the encoder has the paths "
                f"{sorted(model.paths)}.{did_you_mean(min(unknown), model.paths)} Name one of "
                "those."
            )
        return given
    if len(model.paths) > 1:
        raise SizesError(
            f"{name}= is one for the paths {sorted(model.paths)}, which have budgets of their own. "
            f"Pass {name}={{{next(iter(model.paths))!r}: ...}}."
        )
    return {next(iter(model.paths)): given}


def _planned(
    name: str, path: EncoderPath, seen: Histogram, num_budgets: int, high: int
) -> tuple[int, ...]:
    """The budgets under which these runs pad least, up to `high`: what is larger has no graph."""
    pairs = counts_of(seen).items()
    unit, counts = path.unit or 1, dict[int, float]()
    for tokens, count in pairs:
        whole = -(-tokens // unit) * unit
        if 0 < whole <= high:
            counts[whole] = counts.get(whole, 0) + count
    if not counts:
        raise SizesError(
            f"histogram of the path {name!r} has no run of 1 to {high} tokens. Record some: "
            "encoder.stats.histogram(path)."
        )
    return plan_sizes(counts, k=num_budgets)


def item_counts(measured: Measured, plan: EncoderPlan) -> Item:
    """What an item brings, in the plan's order of paths."""
    _, tokens, sequences, frames = measured
    paths = plan.path_budgets
    return Item(tuple([tokens[x] for x in paths]), frames, tuple([sequences[x] for x in paths]))


def pack_measured(
    model: EncoderModel,
    plan: EncoderPlan,
    measured: Sequence[Measured],
    counts: Sequence[Item],
    mine: Sequence[int],
) -> Packed:
    """How the items `mine` of those that were measured run; runs name items by their place there.

    Modalities that may not be mixed are packed apart, in the order of their first items; items of
    one that graphs are not for run eagerly, each alone. `counts` are the `item_counts` of all.
    """
    groups: dict[str, list[int]] = {}
    for at in mine:
        if measured[at].modality in model.modalities:
            groups.setdefault("" if model.mixes else measured[at].modality, []).append(at)
    runs: list[Run] = []
    hits = misses = 0
    for group in groups.values():
        packed = pack([counts[at] for at in group], plan)
        runs += [run._replace(items=tuple(group[i] for i in run.items)) for run in packed.runs]
        hits, misses = hits + packed.hits, misses + packed.misses
    for at in mine:
        if measured[at].modality not in model.modalities:
            alone = [Run(path, (at,), None) for path, n in measured[at].tokens.items() if n]
            runs, misses = runs + alone, misses + bool(alone)
    return Packed(tuple(runs), hits, misses)
