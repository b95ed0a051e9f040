"""`fg.check`: everything in a function that a graph could not hold, at once.

`graphify` raises the first error; a check goes on behind each with a stand-in value of the same
type, so that porting a model is one list and not one error a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from fngraph.core import BatchSpec, Limits, host_field, plan_buffers, trees
from fngraph.core.structs import HiddenHostField
from fngraph.core.text import expect, with_suggestions
from fngraph.errors import FieldError, FnGraphError, PurityError, SpecError, TreeError
from fngraph.fx.arguments import Arguments
from fngraph.fx.leaves import Role, TensorSpec, check_memory
from fngraph.fx.signatures import Names
from fngraph.fx.tracing.refusals import Refusals
from fngraph.graphified import graphify
from fngraph.graphs.staging.buffers import leaf_errors, true_sizes
from fngraph.passes.shipped import PassList
from fngraph.rehearsing import Keys, rehearsal
from fngraph.step.call import no_spec
from fngraph.step.prepared import reader


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What `fg.check` found; true if that is nothing.

    Attributes:
        errors: what `graphify` would raise, in the order of the trace, each line's once a class.
        rehearsed: T and R of the keys in which all true rows were the same.
    """

    errors: tuple[FnGraphError, ...]
    rehearsed: tuple[tuple[int, int], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    def __bool__(self) -> bool:
        return self.ok

    def raise_first(self) -> None:
        """Raise the first error, if there is one."""
        if self.errors:
            raise self.errors[0]

    def as_text(self) -> str:
        """A numbered paragraph for each error."""
        if self.ok:
            keys = ", ".join(f"T={t} R={r}" for t, r in self.rehearsed)
            same = f"; rehearsed in {keys}: true rows are the same" if keys else ""
            return f"nothing in forward that a graph could not hold{same}"
        named = (f"{type(error).__name__}: {error}" for error in self.errors)
        return "\n\n".join(f"{i}. {text}" for i, text in enumerate(named, 1))

    __repr__ = as_text


@with_suggestions
def check(
    forward: Callable[..., Any],
    *args: Any,
    donate: Names = None,
    stage: Names = None,
    limits: Limits | None = None,
    allow_copies: bool | int | None = None,
    generators: Iterable[torch.Generator] = (),
    compile: str = "none",
    passes: PassList = None,
    rehearse: Keys = False,
) -> Report:
    """Trace `forward` and report all that `graphify` would refuse, running nothing.

    First what the first step would refuse of the arguments, in its words: a batch whose leaves are
    not what its fields and its spec say, or that is beyond the limits. `fg.like` of a whole batch
    leaves out its spec, and so the counts to compare with: `dataclasses.replace(fg.like(batch),
    spec=batch.spec)` has them. Values are looked at by `rehearse` alone.

    Passes run where there is no error before them. What a pass raises ends the report.

    A later error may come of an earlier one's stand-in value (1, 1.0, True, a fresh tensor). Where
    `forward` cannot go on with one, the last entry says at which line the report ends.

    Args:
        args: all of forward's arguments, as in a call; tensors, `fg.like` specs or meta tensors.
        donate, stage, limits, allow_copies, generators: as for `graphify`.
        compile, passes: likewise; nothing is compiled.
        rehearse: True: then run the traced ops, on copies of what is donated, for the batch as it
            is and as keys of some more tokens and requests have it, and name the first value whose
            true rows differ, with its line. That tries what no trace can see: `fg.trust_rows`, rows
            that are said to be kept for padding, indices. Or which keys: [(T, R), ...]. Those of a
            batch without a `BatchSpec` are of exact shapes, with nothing to rehearse.

    Raises:
        TreeError: `donate` or `stage` names no parameter of `forward`; no tensors to rehearse with.
        SpecError: a key to rehearse that cannot hold the batch, or is none.
        PassError: `passes` has what is no pass.
    """
    expect(Callable, "a function", TreeError, forward=forward)
    made = graphify(
        forward, donate=donate, stage=stage, limits=limits, allow_copies=allow_copies,
        generators=generators, compile=compile, passes=passes,
    )  # fmt: skip
    refuse = Refusals(go_on=True)
    (staged,) = made.signature.positions(Role.STAGED)
    rehearsed: list[tuple[int, int]] = []
    rehearsing = None
    if rehearse is not False:
        values = made.signature.values(args, {}, *Role)
        rehearsing = rehearsal(values, values[staged], rehearse, refuse, rehearsed)
    unfit: list[FnGraphError] = []

    def meet(values: list[Any], args: Arguments, limits: Limits) -> None:
        _check_memory(values, args, refuse)
        unfit.extend(_unfit(values[staged], args, limits))
        for error in unfit:
            refuse(error)

    def look(*traced: Any) -> None:
        if rehearsing is not None and not unfit:  # it runs on the batch
            rehearsing(*traced)

    try:
        with refuse.catching():
            made.trace_call(args, refuse, look, meet).split()
    except Exception as error:  # of a stand-in that no check was ready for, or of a pass
        text = ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        why = "because of what is above " if refuse.errors else ""
        refuse(PurityError(f"forward: the report ends here, {why}({text})"))
    return Report(tuple(_distinct(refuse.errors)), tuple(rehearsed))


def _check_memory(values: Sequence[Any], args: Arguments, refuse: Refusals) -> None:
    """Refuse what cannot be bound of held and donated tensors."""
    for i in args.signature.positions(Role.HELD, Role.DONATED):
        leaves, tensors = args.leaves[args.span(i)], trees.flatten(values[i])[0]
        for leaf, x in zip(leaves, tensors):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                with refuse.catching():
                    check_memory(leaf.path, x, leaf.role is Role.DONATED)


def _unfit(batch: Any, args: Arguments, limits: Limits) -> Iterator[FnGraphError]:
    """What the first step would refuse of its batch, whose sizes are told by its spec."""
    field = None if args.batch_type is None else host_field(args.batch_type)
    if field is None:
        return  # exact shapes: the batch is the key
    spec = getattr(batch, field, None)
    if type(spec) is HiddenHostField:
        return  # of fg.like
    if type(spec) is not BatchSpec:
        yield no_spec(args, field, batch)
        return
    try:
        limits.check(spec)
    except SpecError as error:
        yield error
    (position,) = args.signature.positions(Role.STAGED)
    try:
        leaves = reader(args, position)(trees.map_leaves(_like_memory, batch))
    except TreeError as error:
        yield error
        return
    true = true_sizes(spec, limits.dims)
    with contextlib.suppress(FieldError):  # of a letter that nobody has told; the trace says so
        yield from leaf_errors(plan_buffers(args.fields, true), leaves, true)


def _like_memory(x: Any) -> Any:
    """A spec or a meta tensor as a tensor of its shape and dtype, over one element."""
    if isinstance(x, TensorSpec) or (isinstance(x, torch.Tensor) and x.is_meta):
        return torch.empty((), dtype=x.dtype).expand(x.shape)
    return x


def _distinct(errors: list[FnGraphError]) -> list[FnGraphError]:
    """The first of each class and line; without a line, of each text."""
    found: dict[tuple[type, str], FnGraphError] = {}
    for error in errors:
        line = re.match(r"(.+?:\d+): ", str(error))
        found.setdefault((type(error), line[1] if line else str(error)), error)
    return list(found.values())
