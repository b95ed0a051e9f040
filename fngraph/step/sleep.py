"""Sleep and wake: device memory given back between bursts of work, and taken again."""

from __future__ import annotations

from collections.abc import Sequence

from fngraph.core.spec import Key
from fngraph.errors import SleepError, TreeError
from fngraph.fx.leaves import TensorSpec
from fngraph.graphs.memory import empty, fill_again
from fngraph.step.binding import Binding
from fngraph.step.keys import Asleep, Keys, Shared


def give_back(shared: Shared, family: Sequence[Keys], cache: bool) -> None:
    """Give back graphs, pool, static buffers and outputs; with `cache`, the donated leaves too.

    Raises:
        CaptureError: a donated leaf whose memory torch does not own; nothing is given back.
    """
    recorder, binding = shared.recorder, shared.binding
    donated = binding.donated() if cache else []
    recorder.synchronize()
    emptied = [(x, nbytes) for x, nbytes in empty(donated) if nbytes]  # first: it may refuse
    if not any(keys.asleep for keys in family):
        binding.rebound = 0  # a process that is new has as many, when this one wakes beside it
    for keys in family:
        before = keys.asleep or Asleep(tuple(keys.replays), [])
        keys.begin_again()
        recorder.loans.expire(keys.outputs, "sleep()")
        own = [] if keys.asleep else empty([*keys.static.tensors, *keys.outputs])
        keys.asleep = Asleep(before.keys, [*before.emptied, *own, *emptied])
    binding.bound_again()
    recorder.renew()  # once more: now it is all unused


def take_again(shared: Shared, family: Sequence[Keys]) -> list[tuple[Keys, tuple[Key, ...]]]:
    """Memory again for all that sleep; returns what was captured there, which is not yet again.

    Raises:
        TreeError: a bound leaf has another shape or dtype by now. CaptureError: too little memory.
        SleepError: a bound leaf that another function gave back. The step sleeps on.
    """
    slept = [(keys, keys.asleep) for keys in family if keys.asleep is not None]
    if not slept:
        return []
    _check_specs(shared.binding)
    for _, asleep in slept:
        fill_again(asleep.emptied)
    _check_filled(shared.binding)
    shared.binding.bound_again()
    for keys, _ in slept:
        keys.asleep = None
    return [(keys, asleep.keys) for keys, asleep in slept]


def _check_specs(binding: Binding) -> None:
    """A leaf may have moved meanwhile, but graphs are made for what was traced."""
    for i, path, x in zip(binding.indices, binding.paths, binding.leaves):
        traced, now = binding.args.leaves[i].spec, TensorSpec.of(x)
        if now != traced:
            raise TreeError(f"{path}: traced as {traced}, but {now} by now. Put it back and wake")


def _check_filled(binding: Binding) -> None:
    """Raise `SleepError` if a leaf has no memory: another function that sleeps gave it back."""
    for path, x in zip(binding.paths, binding.leaves):
        if x.numel() and not x.untyped_storage().nbytes():
            raise SleepError(
                f"{path} has no memory: another function over it sleeps and gave it back. "
                "Wake that one first, other.wake(), then this one"
            )
