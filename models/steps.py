"""What the loop calls: a model's forward and the draw of its tokens, captured as one function.

What few batches need has a function of its own, over the same cache and pool: see `models.cases`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg
from models import lora
from models.ability import Ability, check_unused, count_blocks
from models.batches import batch_type, empty_batch
from models.cases import ADAPTED, PLAIN, Case, case_of, cases
from models.policy import Policy
from models.requests import State
from models.sample import sample

Forward = Callable[[Any, Any, Any], tuple[Tensor, Any]]


def no_slots(slot: int, adapter: Any, state: State) -> None:
    """`load_slot` of steps without adapters."""
    raise ValueError(
        f"slot {slot}: these steps load no adapters. Make slots for them: "
        "make_steps(..., adapters=lora.slots(params, count=8, rank=16))"
    )


class Steps(NamedTuple):
    """How the loop reaches a model.

    Attributes:
        host_batch: spec -> a batch to be filled.
        run: cache, batch -> token ids (R, Q), cache.
        dispatch: spec -> what it runs as; asked after the step, what it ran as.
        captured: the functions beneath, the one for plain batches first.
        can: what they were made for; None: nothing is refused.
        load_slot: slot, adapter, state -> writes what `load_adapter` or `lora.one_slot` made into
            the slot, between two steps; ValueError if a request uses it. Nothing is captured.
    """

    host_batch: Callable[[fg.BatchSpec], Any]
    run: Callable[[Any, Any], tuple[Tensor, Any]]
    dispatch: Callable[[fg.BatchSpec], fg.core.Dispatch]
    captured: tuple[Any, ...] = ()
    can: Ability | None = None
    load_slot: Callable[[int, Any, State], None] = no_slots

    def __repr__(self) -> str:
        keys = f"{sum(map(len, self.captured))} keys of {len(self.captured)} functions"
        return f"Steps({keys}; {self.can})"


def served_forward(forward: Forward, *more: str) -> Callable[..., tuple[Tensor, Any]]:
    """`forward`, then the draw: what is captured. Batches have the fields of `batch_type(*more)`.

    With "adapters" it takes them behind the params, as `lora.adapted(forward)` does.
    """

    def draw(logits_RQV: Tensor, batch: Any) -> Tensor:
        places_RQ = batch.positions[batch.logits_indices] + 1
        return sample(logits_RQV, batch, places_RQ, greedy="sampling" not in more)

    def step(params: Any, cache: Any, batch: Any) -> tuple[Tensor, Any]:
        logits_RQV, cache = forward(params, cache, batch)
        return draw(logits_RQV, batch), cache

    def adapted(params: Any, adapters: Any, cache: Any, batch: Any) -> tuple[Tensor, Any]:
        logits_RQV, cache = lora.adapted(forward)(params, adapters, cache, batch)
        return draw(logits_RQV, batch), cache

    chosen = adapted if "adapters" in more else step
    chosen.__annotations__["batch"] = batch_type(*more)
    return chosen


def make_steps(
    forward: Forward, params: Any, cache: Any, policy: Policy, *more: str, modes: str,
    adapters: Any = None, progress: bool = True, **options: Any,
) -> Steps:  # fmt: skip
    """`forward` and the draw, weights bound and graphs captured.

    Args:
        cache: of `init_cache`, with blocks of `policy.block_size`.
        more: what all batches have: "sampling", "states". Without "sampling", steps are greedy.
        adapters: `lora.slots(...)`.
        progress: show a progress bar for each function.
        options: `fg.graphify`'s.

    Raises:
        ValueError: what does not fit together, see `models.ability`.
    """
    can = Ability(policy, more, count_slots(adapters), count_blocks(cache, policy))
    captured: dict[Case, Any] = {}
    for case, names in cases(policy, adapters, more).items():
        query_lens = tuple(q for q in policy.query_lens if (q > 1) == case.verify)
        own: dict[str, Any] = {"modes": case.modes(modes), "query_lens": query_lens}
        if case.adapted:
            own["adapters"] = (can.adapters,)
        fast = fg.graphify(
            served_forward(forward, *names), donate="cache", stage="batch", **{**options, **own}
        )
        if captured:
            options["recorder"] = captured[PLAIN].recorder
        bound = fast.bind(params, adapters) if case.adapted else fast.bind(params)
        label = f"capturing {case.text}" if progress else False
        captured[case] = bound.capture(cache, case.policy(policy).limits, progress=label)
    functions = tuple(captured.values())
    if len(functions) == 1:
        (only,) = functions
        return Steps(only.host_batch, only, only.runs_as, functions, can)
    of = lambda spec: captured[case_of(spec)]  # noqa: E731

    def load_slot(slot: int, adapter: Any, state: State) -> None:
        check_unused(slot, state)  # all functions hold the same slots
        captured[ADAPTED].load_slot(slot, adapters=adapter)

    return Steps(
        lambda spec: of(spec).host_batch(spec),
        lambda cache, batch: of(batch.spec)(cache, batch),
        lambda spec: of(spec).runs_as(spec),
        functions,
        can,
        load_slot if can.adapters else no_slots,
    )


def bare_steps(
    forward: Forward, params: Any, policy: Policy, *more: str, adapters: Any = None,
    device: torch.device | str = "cpu",
) -> Steps:  # fmt: skip
    """The same without fngraph: `forward` itself, eager, which all modes are held to."""
    all_names = cases(policy, adapters, more)

    def host_batch(spec: fg.BatchSpec) -> Any:
        case = case_of(spec)
        return empty_batch(batch_type(*all_names[case]), case.policy(policy), spec)

    def run(cache: Any, batch: Any) -> tuple[Tensor, Any]:
        leaves = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in vars(batch).items()}
        case = case_of(batch.spec)
        held = (params, adapters) if case.adapted else (params,)
        step = served_forward(forward, *all_names[case])
        return step(*held, cache, type(batch)(**leaves))

    def dispatch(spec: fg.BatchSpec) -> fg.core.Dispatch:
        return fg.core.Dispatch(fg.Mode.NONE, spec.descriptor(), "bare forward")

    can = Ability(policy, more, count_slots(adapters))
    return Steps(host_batch, run, dispatch, can=can)


def count_slots(adapters: Any) -> int:
    """How many adapters there are slots for."""
    return 0 if adapters is None else lora.slot_count(adapters)
