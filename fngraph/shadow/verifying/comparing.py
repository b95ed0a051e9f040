"""A verified step's second run and the comparison: now, or later in a thread beside the steps."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fngraph.calls import PrimitiveCall
from fngraph.core import Mode
from fngraph.fx.rows.boxes import Boxes, elements
from fngraph.fx.tracing.tried import said
from fngraph.options import Verify
from fngraph.ranks.faults import say_failed
from fngraph.shadow.compared import Compared, compare
from fngraph.shadow.parts import Parts, copied, needed
from fngraph.shadow.saved import Ran, Saved, donated_of, output_paths, run_bare
from fngraph.shadow.verifying.moment import Moment
from fngraph.step.keys import Keys
from fngraph.step.prepared import Prepared


class Due(NamedTuple):
    """A step that has run, and what it takes to run it again."""

    number: int
    keys: Keys
    prepared: Prepared
    saved: Saved
    verify: Verify


class Answer(NamedTuple):
    """What was found of it, or why nothing could be."""

    due: Due
    found: list[Compared]
    why: str = ""


def compared(due: Due, got: Ran) -> Answer:
    """Run it again through bare `forward`, and compare.

    Raises:
        Exception: what `forward` raises, where other processes are to be told.
    """
    _, keys, prepared, saved, verify = due
    try:
        want = run_bare(keys, saved)
    except Exception as error:
        if keys.executable.peers is not None:  # who wait for it in a collective
            say_failed(error)
            raise
        return Answer(due, [], f"bare forward raised {said(error)}")
    return Answer(due, differences(keys, got, want, verify, claims_bits(keys, prepared)))


def compared_later(due: Due, got: Ran, moment: Moment) -> Answer:
    """The same in another thread, under what the call came under; raises nothing."""
    keys = due.keys
    try:
        with moment.entered():
            why = moment.changed(keys)
            answer = Answer(due, [], why) if why else compared(due, got)
            return answer if why else answer._replace(why=moment.changed(keys) or answer.why)
    except Exception as error:
        return Answer(due, [], f"the comparison raised {said(error)}")


def stays(keys: Keys, verify: Verify) -> bool:
    """Whether a step is compared in its call: a difference is that call's error, processes meet in
    `forward`, or it draws from generators, which are the caller's again afterwards."""
    executable = keys.executable
    raises = verify.on_difference == "raise"
    return raises or executable.peers is not None or bool(executable.generators)


def why_not(keys: Keys, prepared: Prepared) -> str:
    """Why a step that ran so cannot be compared; "" if it can."""
    if not keys.executable.generators or not is_padded(keys, prepared):
        return ""
    return (
        "forward draws random numbers, and a key draws for its padding too; steps are verified "
        "that have none"
    )


def is_padded(keys: Keys, prepared: Prepared) -> bool:
    """Whether the key had more rows than the batch."""
    mode, descriptor, _ = prepared.chosen
    return mode is not Mode.NONE and keys.executable.sizes(descriptor) != prepared.true


def claims_bits(keys: Keys, prepared: Prepared) -> bool:
    """Whether a step that ran so ran bare `forward`'s own kernels on its own sizes: no padding,
    nothing compiled or rewritten, and no primitive, whose backends go by bounds as well."""
    executable = keys.executable
    is_plain = executable.level == "none" and not any(executable.matches.values())
    no_calls = not any(isinstance(fn, PrimitiveCall) for fn in executable.fns)
    return is_plain and no_calls and not is_padded(keys, prepared)


def differences(keys: Keys, got: Ran, want: Ran, verify: Verify, exact: bool) -> list[Compared]:
    """What two runs do not have alike."""
    executable = keys.executable
    leaves, back = executable.args.leaves, executable.returns
    own = [k for k in range(executable.out_tree.num_leaves) if k not in set(back.values())]
    triples = list(zip(own, output_paths(keys), got.outputs, want.outputs))
    triples += [(back[i], leaves[i].path, x, want.state[i]) for i, x in got.state.items()]
    pairs = [(path, _but_dirty(executable.dirty.get(k, ()), a, b), b) for k, path, a, b in triples]
    return compare(pairs, verify.by_dtype, exact)


def _but_dirty(dirty: Boxes, got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """A result, with rows that are kept for padding as the other run has them."""
    if not dirty or got.shape != want.shape:
        return got
    made = got.clone()
    at = elements(dirty, made)
    made[at] = want[at]
    return made


@torch.no_grad()
def with_state(keys: Keys, parts: Parts, saved: Saved, ran: Ran) -> Ran:
    """The step's own outputs, and the bound leaves as they are now, cut to the rows."""
    return Ran(ran.outputs, needed(parts, saved.rows, donated_of(keys)))


@torch.no_grad()
def copied_with_state(keys: Keys, parts: Parts, saved: Saved, ran: Ran) -> Ran:
    """The same, that steps which follow do not change.

    Raises:
        torch.OutOfMemoryError: too little memory.
    """
    outputs = tuple(x.clone() for x in ran.outputs)
    return Ran(outputs, copied(parts, saved.rows, donated_of(keys)))
