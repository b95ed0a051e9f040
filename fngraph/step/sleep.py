"""Sleep and wake: a step's device memory given back between bursts of work, and taken again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fngraph.errors import SleepError, TreeError
from fngraph.fx.leaves import Role, TensorSpec
from fngraph.graphs.addresses import places
from fngraph.graphs.memory import empty, fill_again
from fngraph.step.ahead import capture_ahead
from fngraph.step.ambient import family
from fngraph.step.binding import Binding
from fngraph.step.book import Asleep
from fngraph.step.budget import begin_again

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def sleep(step: Captured, cache: bool = False) -> None:
    """Give back device memory: graphs, pool, static buffers, outputs. A call is then an error.

    Tensors over that memory (borrowed results, views of static buffers, a cache given back)
    must not be used before `wake`: torch does not check, and reads at address 0. With
    guards=True the use of a borrowed result is a `StaleError`.

    Args:
        cache: give back the donated leaves too. What they hold is lost.

    Raises:
        CaptureError: a donated leaf whose memory torch does not own; nothing is given back.
    """
    with step.recorder.turn.taken():
        donated = _donated(step.binding) if cache else []
        step.recorder.synchronize()
        emptied = empty(donated)  # first, since it may refuse
        for one in family(step):
            before = one.book.asleep or Asleep(tuple(one.replays), [])
            begin_again(one)
            one.recorder.loans.expire(one.outputs, "sleep()")
            own = [] if one.book.asleep else empty([*one.static.tensors, *one.outputs])
            shared = [(x, nbytes) for x, nbytes in emptied if nbytes]
            one.book.asleep = Asleep(before.keys, [*before.emptied, *own, *shared])
            _bind_again(one.binding)
        step.recorder.renew()  # once more: now it is all unused


def wake(step: Captured) -> None:
    """Take the memory again and capture the keys that were captured. A cache that was given
    back holds zeros, in the same tensors.

    Raises:
        TreeError: a bound leaf has another shape or dtype by now; the step sleeps on.
        CaptureError: too little memory, and the step sleeps on; or a key that fails.
        SleepError: a bound leaf that another function gave back: wake that one first.
    """
    with step.recorder.turn.taken():
        slept = [(one, one.book.asleep) for one in family(step) if one.book.asleep]
        for one, _ in slept:
            _check_specs(one.binding)
        for one, asleep in slept:
            fill_again(asleep.emptied)
            _check_filled(one.binding)
        for one, _ in slept:
            one.book.asleep = None
            _bind_again(one.binding)
        now = step.under_ambient()
        for one, asleep in slept:
            if one is now:  # graphs are captured under their own ambient state: others wait for it
                capture_ahead(one, asleep.keys)


def _donated(binding: Binding) -> list[torch.Tensor]:
    leaves = binding.args.leaves
    return [x for i, x in zip(binding.indices, binding.leaves) if leaves[i].role is Role.DONATED]


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


def _bind_again(binding: Binding) -> None:
    """The addresses of now are the right ones."""
    for old, new in zip(binding.recorded, places(binding.leaves)):
        old[:] = new  # type: ignore[index]
    binding.watch.reset()
