"""`fg.bisect(step, batch)`: the first op, and the user's line, at which a step and bare `forward`
come to something else.

    1. Each instruction of the step's program is captured by itself and replayed, on copies; its ops
       run one by one beside it, on the same inputs. The first that differs is the place: a kernel,
       a backend, compiled code, a weight that is not the caller's any more, a wrong pad.
    2. If all are right, yet the whole is not: padding has reached true rows. The function as it was
       traced runs on the batch and in a key, and what it claims of padding is compared op by op.
    3. If that is right too, and the program without padding is as bare `forward`: it is rounding,
       which is another at other sizes.
    4. If it is not: `forward` no longer does what was traced. Its ops are listed as it runs
       and compared with the trace's.
    5. If the program is right, and the key's graphs are not, it is the graphs: the key is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fngraph.core import Dispatch, Mode
from fngraph.core.text import count, with_suggestions
from fngraph.errors import AmbientError, TreeError
from fngraph.fx.leaves import Role
from fngraph.options import Verify
from fngraph.ranks.agreement import tell_all
from fngraph.shadow.compared import Compared
from fngraph.shadow.difference import Difference
from fngraph.shadow.kept_graphs import replayed
from fngraph.shadow.listed import first_not_traced, run_traced
from fngraph.shadow.nodes import Place
from fngraph.shadow.parts import parts_of
from fngraph.shadow.program import RanProgram, run_program_again
from fngraph.shadow.saved import Ran, Saved, prepared_of, run_bare, save
from fngraph.shadow.sides import Sides, sides_of
from fngraph.shadow.verified import VerifiedStep, keys_of_now
from fngraph.shadow.verifying.comparing import claims_bits, differences
from fngraph.step.capture import find_replay
from fngraph.step.keys import Keys
from fngraph.step.prepared import Prepared
from fngraph.step.step import Step

GRAPHS, PADDING, TRACE, PROGRAM = "graphs", "padding", "trace", "program"
ROUNDING = "rounding"


@dataclasses.dataclass(frozen=True)
class Bisection:
    """Where a step and bare `forward` first differ. `str()` is the text.

    Attributes:
        ran: what the batch runs as, and why.
        leaves: results and state that differ.
        kind: "program", "padding", "rounding", "trace" or "graphs": see docs/instruments.md; "" if
            nothing differs.
        instruction: "piece 3", "attention 1"; "" where it is of no instruction.
        op: "aten.mm.default", "fngraph.attention.default".
        line: the user's, "model.py:12".
        what: what was found there.
        rank: the process it was found in first, of those that the function's collectives meet; None
            without any.
        told: what each of those has found, by rank.
    """

    ran: Dispatch
    leaves: tuple[Compared, ...]
    kind: str = ""
    instruction: str = ""
    op: str = ""
    line: str = ""
    what: str = ""
    rank: int | None = None
    told: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def as_text(self) -> str:
        """What differs, and where it begins."""
        mode, key, _ = self.ran
        head = f"{mode} {key!r}"
        if not self.kind and not self.leaves:
            return f"{head}: the step and bare forward come to the same"
        where = f" on rank {self.rank}" if self.rank is not None else ""
        named = ", ".join(filter(None, (self.instruction, self.op)))
        lines = [f"{head}, first{where}: {named}, from {self.line}", f"  {self.what}"]
        if not self.op:
            lines = [f"{head}{where}: {self.what}"]
        lines += [f"  {one}" for one in self.leaves]
        lines += [f"  rank {rank}: {text}" for rank, text in sorted(self.told.items())]
        return "\n".join(lines)

    __str__ = __repr__ = as_text


@with_suggestions
def bisect(step: Step[Any], batch: Any, *, within: Verify | None = None) -> Bisection:
    """The first op and the user's line at which a step and bare `forward` differ.

    Everything runs on copies: of the batch, and of what it needs of the state. Where a graph's own
    memory must be looked at, donated leaves are put back as they were. It takes as long as some
    captures of that key. Processes that the function's collectives meet must all call it.

    Args:
        batch: a batch, run on the state of now; or a `fg.Difference`, on the state it has kept.
        within: tolerances, as `verify=` takes them; None: the step's own, or the default ones.

    Raises:
        TreeError: no batch of this step. SpecError, ModesError: as the step.
        TypeError: `within` is no `fg.Verify`.
        AmbientError: a difference that was found under another ambient state of torch (autocast).
        Exception: what bare `forward` raises on it.
    """
    if not isinstance(step, Step):
        raise TreeError(f"bisect(step, batch): expected a step, got {type(step).__name__}")
    if within is not None and not isinstance(within, Verify):
        raise TypeError(f"bisect(within={within!r}): write fg.Verify(within={within!r})")
    if isinstance(batch, Sequence) and all(isinstance(one, Difference) for one in batch):
        raise TreeError(
            f"bisect(step, batch): got {count(len(batch), 'difference')}. Pass one: "
            "bisect(step, step.differences[0]), or a batch where there is none"
        )
    rule = within or (step.verify if isinstance(step, VerifiedStep) else Verify())
    with step._between_steps():
        keys = keys_of_now(step)
        keys.check_awake()
        parts = parts_of(keys.executable)
        if isinstance(batch, Difference):
            saved, chosen = batch.saved, batch.ran
            _check_same(keys, saved)
            _check_ambient(step, keys, batch)
        else:
            saved, chosen = save(keys, parts, batch), None
        prepared = _prepared(keys, saved, chosen)
        return _bisect(keys, saved, prepared, rule)


def _check_same(keys: Keys, saved: Saved) -> None:
    """Raise unless a difference is of this step."""
    donated = keys.executable.args.of(Role.DONATED)
    staged = keys.executable.args.of(Role.STAGED)
    if set(saved.state) != set(donated) or len(saved.leaves) != len(staged):
        raise TreeError("this difference is another step's: bisect(step, step.differences[0])")


def _check_ambient(step: Step[Any], keys: Keys, difference: Difference) -> None:
    """Raise if a difference is of another ambient state's program: bare `forward` would run under
    the one of now, and come to something else for that alone."""
    ran = difference.executable()
    others = [one.executable for one in step.by_ambient.values()]
    if ran is not keys.executable and any(ran is one for one in others):
        raise AmbientError(
            f"bisect(step, difference): call {difference.call} came under another state of torch "
            "(autocast, gradients, precision, ...) than this one. Call bisect under the same: "
            "with torch.autocast(...): fg.bisect(...)"
        )


def _prepared(keys: Keys, saved: Saved, chosen: Dispatch | None) -> Prepared:
    decided = chosen if chosen is not None and chosen.mode is not Mode.NONE else None
    prepared = prepared_of(keys, saved, decided)
    if chosen is not None and chosen.mode is Mode.NONE:
        prepared = dataclasses.replace(prepared, chosen=chosen, replay=None)
    elif prepared.replay is None and prepared.chosen.mode is not Mode.NONE:
        find_replay(keys, prepared, saved.counts)
    return prepared


def _bisect(keys: Keys, saved: Saved, prepared: Prepared, rule: Verify) -> Bisection:
    sides = sides_of(keys, saved, prepared)
    again = run_program_again(keys, saved, prepared, sides, rule.by_dtype)
    want = run_bare(keys, saved)
    exact = claims_bits(keys, prepared)
    leaves = tuple(differences(keys, again.ran, want, rule, exact))
    found = Bisection(prepared.chosen, leaves)
    peers = keys.executable.peers
    if leaves:
        found = _of_program(found, again, sides, exact, rounding=peers is not None)
    if peers is None:
        if not leaves:
            return _of_graphs(found, keys, saved, prepared, rule, want, exact)
        if not found.kind:
            found = _of_padding(found, keys, saved, sides)
        if not found.kind:
            found = _of_trace(found, keys, saved, sides, rule, want)
        return found if found.kind else _of_program(found, again, sides, exact)
    own = {"at": repr(_at(again, exact) if leaves else None), "found": found.as_text()}
    own |= {name: str(getattr(found, name)) for name in ("kind", "instruction", "op", "line")}
    own |= {"what": found.what, "digest": _digest(again.ran), "bare": _digest(want)}
    return _first_of(found, tell_all(peers, "bisect a step", own))


def _at(again: RanProgram, exact: bool) -> tuple[int, int] | None:
    place = _chosen(again.places, exact)
    return None if place is None else place.at


def _chosen(places: Sequence[Place], exact: bool, rounding: bool = True) -> Place | None:
    """The first place that is beyond the tolerances; else the first of those where both ran one
    kernel; else, if `rounding` counts, the first where a backend rounds in another way."""
    in_order = sorted(places, key=lambda place: place.at)
    far = [place for place in in_order if not place.is_close]
    same_kernels = [p for p in in_order if exact or not p.op.startswith("fngraph.")]
    return next(iter(far or same_kernels or (in_order if rounding else ())), None)


def _of_program(
    found: Bisection, again: RanProgram, sides: Sides, exact: bool, rounding: bool = True
) -> Bisection:
    place = _chosen(again.places, exact, rounding)
    if place is None:
        return found
    why = "".join(f"; it reads {path}, {sides.told[path]}" for path in place.reads
                  if path in sides.told)  # fmt: skip
    return dataclasses.replace(
        found, kind=PROGRAM, instruction=place.instruction, op=place.op, line=place.line,
        what=place.what + why,
    )  # fmt: skip


def _of_padding(found: Bisection, keys: Keys, saved: Saved, sides: Sides) -> Bisection:
    if not sides.is_padded or keys.executable.args.batch_type is None:
        return found
    args = keys.executable.args
    true, padded = [], []
    staged = dict(zip(args.of(Role.STAGED), saved.rows.staged))
    for i, leaf in enumerate(args.leaves):
        x = saved.state.get(i, sides.should.get(i, sides.inputs[i]))
        pair = staged.get(i, x), x
        one, other = pair if leaf.role is Role.HELD else (y.clone() for y in pair)
        true.append(one)
        padded.append(other)
    with torch.no_grad():
        told = keys.executable.maker.rehearse(true, padded)
    if told is None:
        return found
    op, line, text = told
    return dataclasses.replace(found, kind=PADDING, op=op, line=line, what=text)


def _of_trace(
    found: Bisection, keys: Keys, saved: Saved, sides: Sides, rule: Verify, want: Ran
) -> Bisection:
    traced, ran = run_traced(keys, saved)
    if sides.is_padded and not differences(keys, ran, want, rule, exact=False):
        what = (
            "each instruction is right, and without padding the program gives what bare forward "
            "does: at the key's sizes kernels round otherwise, and these results are what rounding "
            "leaves, of nearly equal numbers or of a sum that is near 0. "
            "verify=fg.Verify(share, within=...) allows more"
        )
        return dataclasses.replace(found, kind=ROUNDING, what=what)
    told = first_not_traced(keys, saved, traced)
    if told is None:
        what = (
            "each instruction of the program is right, and bare forward comes to something else: "
            "it no longer does what was traced. What does it read that is no argument?"
        )
        return dataclasses.replace(found, kind=TRACE, what=what)
    op, line, text = told
    return dataclasses.replace(found, kind=TRACE, op=op, line=line, what=text)


def _of_graphs(
    found: Bisection, keys: Keys, saved: Saved, prepared: Prepared, rule: Verify, want: Ran,
    exact: bool,
) -> Bisection:  # fmt: skip
    if prepared.replay is None or prepared.chosen.mode is Mode.NONE:
        return found
    got = replayed(keys, saved, prepared)
    leaves = tuple(differences(keys, got, want, rule, exact))
    if not leaves:
        return found
    what = (
        "the program is right, captured anew too, and this key's graphs are not: memory that they "
        "read has changed, or they were captured under another state. step.recapture"
        f"({prepared.chosen.descriptor!r}) captures them again"
    )
    return dataclasses.replace(found, leaves=leaves, kind=GRAPHS, what=what)


def _first_of(found: Bisection, told: Mapping[int, Mapping[str, str]]) -> Bisection:
    """What the processes have found, together: where it is first, and in which of them."""
    at = {rank: one["at"] for rank, one in told.items()}
    places = {rank: tuple(map(int, text.strip("()").split(","))) for rank, text in at.items()
              if text != "None"}  # fmt: skip
    lines = {}
    for rank, one in told.items():
        same = "the same bits" if one["digest"] == one["bare"] else "other bits"
        lines[rank] = (
            f"{one['instruction']}, {one['op']}, {one['what']}" if rank in places
            else f"no instruction of its own differs; step and bare forward give {same}"
        )  # fmt: skip
    if not places:
        return dataclasses.replace(found, told=lines)
    rank = min(places, key=lambda r: (places[r], r))
    first = told[rank]
    return dataclasses.replace(
        found, kind=first["kind"], instruction=first["instruction"], op=first["op"],
        line=first["line"], what=first["what"], rank=rank, told=lines,
    )  # fmt: skip


def _digest(ran: Ran) -> str:
    """A hash of all results, by which processes compare them."""
    import hashlib

    made = hashlib.sha256()
    for x in (*ran.outputs, *(ran.state[i] for i in sorted(ran.state))):
        raw = x.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).cpu()
        made.update(raw.numpy().tobytes())
    return made.hexdigest()[:16]
