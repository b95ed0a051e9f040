"""One random program, tried in every way: its facts node by node, and its graphs against `forward`.

What is refused must say so as an `FnGraphError`. What is accepted runs as a user would run it:
traced once, captured when a key is needed, called with batches of several sizes, twice in a row so
that its state moves, and with one that is beyond all keys. Each time results and state are those of
bare `forward`. A capture runs on a batch that is all padding, so that is tried too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import toys
from rows_torch import Defined, Elsewhere, Unwritten
from rows_whole import BATCHES, INVALID, KEYS, LIMITS, Program, batch, draw, params, state
from torch import Tensor

import fngraph as fg
from fngraph.core import trees
from fngraph.errors import FnGraphError
from fngraph.fx.nodes import is_op
from fngraph.fx.rows.boxes import elements
from fngraph.fx.rows.rehearsal import Untrue, rehearse
from fngraph.fx.rows.writes import WRITES
from fngraph.fx.schemas import plain_name
from fngraph.fx.tracing.refusals import Refusals
from fngraph.graphs.recorder import WAITS
from fngraph.graphs.tape.shapes import expected
from fngraph.rehearsing import padded_leaves

CALLS = ((7, 3, None), (7, 3, None), (16, 6, None), (4, 2, 2), (20, 5, None), (1, 1, None))
"""Batches of the calls in a row, over keys of 8 and 16 tokens; 20 runs without a graph."""
SIZES = (8, 16)
MODES = ("FULL", "FULL", "FULL_AND_PIECEWISE", "PIECEWISE")
NEAR = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
"""By dtype, how near results are that were computed in another order; 0.05 of the short ones."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        kind: "accepted", "refused", "shaky" (rounding alone changes what it computes, or memory
            that nobody wrote), "torch" (an op that gives other numbers elsewhere in memory),
            "wrong" or "raw" (an error of torch's own, where bare forward runs).
        why: the class of what it was refused by; or the fault, told.
        code: the traced graph, of a fault.
    """

    kind: str
    why: str = ""
    code: str = ""


def tried(program: Program, device: Any = "cpu", seed: int = 0) -> Outcome:
    """Trace, rehearse, capture, call and compare.

    Args:
        seed: which modes and options the graphs are made with.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _tried(program, torch.device(device), random.Random(seed))


def _tried(program: Program, device: torch.device, r: random.Random) -> Outcome:
    held = toys.moved(params(), device)
    runs = [sizes for sizes in dict.fromkeys(CALLS) if _runs(program, batch(*sizes), device)]
    guards = r.random() < 0.05
    asked = None if device.type == "cpu" else functools.partial(_runs, program, device=device)
    own = toys.moved(state(), device)
    wrong: list[str] = []
    code: list[str] = []
    dirty: list[Any] = []
    poisoned: list[bool] = []
    broken: list[Untrue] = []

    def look(args: Any, limits: Any, graph: Any, facts: Any) -> None:
        code.append(graph.gm.code)
        ops = [plain_name(node.target) for node in graph.gm.graph.nodes if is_op(node)]
        poisoned.append(guards and not set(WRITES).isdisjoint(ops))  # what padding adds as well
        (results,) = (facts[node] for node in graph.gm.graph.nodes if node.op == "output")
        dirty.extend(getattr(fact, "dirty", ()) for fact in results)
        found = list(differences(args, held, own, graph.gm, facts, asked))
        broken.extend(x for x in found if x.fact == "reserved")
        wrong.extend(str(x) for x in found if x.fact != "reserved")

    generator = (
        torch.cuda.default_generators[0] if device.type == "cuda" else torch.default_generator
    )
    made = fg.graphify(
        program, donate=1, stage=2, limits=LIMITS, modes=r.choice(MODES), sizes=SIZES,
        query_lens=(1, 2), guards=guards, generators=(generator,),
        outputs=r.choice(["own", "own", "borrow"]),
    )  # fmt: skip
    traced = None
    try:
        given = (held, own, toys.on(batch(*BATCHES[0]), device))
        traced = made.trace_call(given, Refusals(), look)
        if broken:  # the program's own word: true rows name a row that it keeps for padding
            return Outcome("refused", "rehearsed")
        if not wrong:
            step = traced.split().lower().compile().capture(held, own, lazy=True)
            if not (step.guards and any(poisoned)):
                calls = [x for x in CALLS if x in runs]
                wrong.extend(called(program, step, held, own, calls, dirty))
    except FnGraphError as error:
        if _is_torchs(error) and all(_runs(program, batch(*sizes)) for sizes in BATCHES):
            return Outcome("raw", told(error), "".join(code))  # it does not refuse it
        if not wrong and not _is_fault(error):
            return Outcome("refused", type(error).__name__)
        if not wrong and _of_shapes(error):
            return Outcome("refused", "CaptureError: torch's rule for the shape of an op fails")
        if not wrong:
            return Outcome("raw", told(error), "".join(code))
    except Exception as error:
        if traced is None and not all(_runs(program, batch(*sizes)) for sizes in BATCHES):
            return Outcome("refused", "runs for some sizes alone")
        return Outcome("raw", told(error), "".join(code))
    if not wrong:
        return Outcome("accepted")
    if wrong[0] == "shaky":
        return Outcome("shaky")
    if ops := _by_place(program, held, runs, device):
        return Outcome("torch", ", ".join(ops))
    return Outcome("wrong", wrong[0], code[0])


def _is_torchs(error: FnGraphError) -> bool:
    """Whether it says that torch refuses a call."""
    words = ("which torch refuses", "on tensors of different dtypes")
    return isinstance(error, fg.errors.OperatorError) and any(x in str(error) for x in words)


def _is_fault(error: FnGraphError) -> bool:
    """Whether what was accepted has failed after all: a batch of padding alone, in a capture. But
    not that torch itself waits for the device in some op, which CUDA says of captures alone."""
    waits = any(text in str(error) for text in WAITS)
    return not str(error) or (isinstance(error, fg.errors.CaptureError) and not waits)


def _of_shapes(error: BaseException | None) -> bool:
    """Whether it is torch that cannot say of what shape an op's result is, which the tape asks; or
    that says it wrongly."""
    if "torch's rule for it says" in str(error):
        return True
    while error is not None:
        frames = traceback.walk_tb(error.__traceback__)
        if any(frame.f_code is expected.__code__ for frame, _ in frames):
            return True
        error = error.__cause__
    return False


def _by_place(program: Program, held: Any, runs: list[Any], device: torch.device) -> list[str]:
    """The ops of a program that compute something else of the same numbers elsewhere in memory."""
    mode = Elsewhere()
    with mode:
        for sizes in runs:
            for loud in (False, True):
                given = toys.moved(state(), device)
                with contextlib.suppress(*INVALID):
                    toys.bare(program, held, given, toys.on(batch(*sizes, loud=loud), device))
    return sorted(mode.found)


def told(error: BaseException) -> str:
    """An error, its cause, and where it was raised."""
    lines = traceback.extract_tb(error.__traceback__)
    at = f" ({lines[-1].filename.rpartition('/')[2]}:{lines[-1].lineno})" if lines else ""
    cause = f"; from {told(error.__cause__)}" if error.__cause__ else ""
    return f"{type(error).__name__}: {error}{at}{cause}"


def _runs(program: Program, b: Any, device: Any = "cpu", own: Any = None) -> bool:
    """Whether bare forward runs: on the CPU, since a device would stop at a bad index, and then on
    the device, which has no kernel for some dtypes."""
    for on in dict.fromkeys((torch.device("cpu"), torch.device(device))):
        given = toys.moved(state() if own is None else own, on)
        both = torch.device(device).type != "cpu" and on.type == "cpu"
        try:
            with Defined() if both else contextlib.nullcontext():
                toys.bare(program, toys.moved(params(), on), given, toys.on(b, on))
        except INVALID:
            return False
    return True


def differences(
    args: Any, held: Any, own: Any, gm: Any, facts: Any, runs: Any = None
) -> Iterator[Untrue]:
    """The first fact that does not hold, of the batches for which bare forward runs.

    Args:
        own: the state, of which each batch gets a copy.
        runs: whether forward runs on a batch, to be asked first; None: the graph itself tells.
    """
    for sizes in BATCHES:
        T, R = KEYS[sizes[2]]
        for loud in (False, True):
            b = batch(*sizes, loud=loud)
            if runs is not None and not runs(b):
                continue
            leaves = [x.to(args.device) for x in trees.flatten(b)[0]]
            padded = padded_leaves(args, leaves, b.spec, {"T": T, "R": R}, LIMITS)
            true, key = ([*toys.leaves(held), *toys.leaves(toys.clone(own))] for _ in range(2))
            try:
                found = rehearse(gm, facts, [*true, *leaves], [*key, *padded])
            except INVALID:
                continue
            if found is not None:
                yield found
                return


def called(
    program: Program, step: Any, held: Any, own: Any, calls: list[Any], dirty: list[Any]
) -> Iterator[str]:
    """How results or state differ from bare forward's, of the first call in which they do.

    Args:
        dirty: of each leaf of the output, the rows that are kept for padding: they are the step's
            own, from call to call, and nothing else may differ for it.
    """
    theirs = toys.clone(own)
    for i, sizes in enumerate(calls):
        device = own["n"].device
        b = toys.on(batch(*sizes), device)
        before = toys.clone(theirs)
        if not _runs(program, b, device, before):  # not on a state that has moved
            return
        want, theirs = toys.bare(program, held, before, b)
        got, back = step(own, b)
        many = len(dirty) - len(toys.leaves(own))
        for what, a, z, rows in (("results", got, want, dirty[:many]),
                                 ("state", back, theirs, dirty[many:]),
                                 ("state", own, theirs, dirty[many:])):  # fmt: skip
            text = unlike(_cleaned(a, rows), _cleaned(z, rows))
            if text:
                shaky = is_shaky(program, held, before, b)
                ran = step.dispatch(b.spec)
                yield "shaky" if shaky else f"{what} of call {i}, {sizes}, as {ran}: {text}"
                return
        for leaf, new, rows in zip(toys.leaves(own), toys.leaves(theirs), dirty[many:]):
            leaf.copy_(torch.where(elements(rows, leaf), leaf, new))  # or rounding would add up


def _cleaned(tree: Any, dirty: list[Any]) -> Any:
    """With zeros in dirty rows."""
    leaves, form = trees.flatten(tree)
    cleaned = [
        torch.where(elements(rows, x), 0, x) if rows else x for x, rows in zip(leaves, dirty)
    ]
    return trees.unflatten(form, cleaned)


def unlike(got: Any, want: Any) -> str:
    """How two trees differ; "" if they do not."""
    if trees.flatten(got)[1] != trees.flatten(want)[1]:
        return f"{trees.flatten(got)[1]} for {trees.flatten(want)[1]}"
    paths = trees.paths(trees.flatten(want)[1], "output")
    for path, a, b in zip(paths, toys.leaves(got), toys.leaves(want)):
        if (a.shape, a.dtype) != (b.shape, b.dtype) or not near(a, b):
            return f"{path} is {_short(a)}, and {_short(b)} in forward"
    return ""


def near(a: Tensor, b: Tensor) -> bool:
    """Equal, but for the order in which floats were added up."""
    return bool(alike(a, b).all())


def alike(a: Tensor, b: Tensor) -> Tensor:
    """Which elements are `near`."""
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return a == b
    close = NEAR.get(a.dtype, 0.05)
    if a.dtype.is_complex:
        parts = (torch.view_as_real(x.resolve_conj()) for x in (a, b))
        return torch.isclose(*parts, close, close, equal_nan=True).all(-1)
    return torch.isclose(a.float() if a.itemsize < 4 else a, b.float() if b.itemsize < 4 else b,
                         close, close, equal_nan=True)  # fmt: skip


def _short(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype} {x.flatten()[:6].tolist() if x.itemsize > 1 else ''}"


def is_shaky(program: Program, held: Any, own: Any, b: Any) -> bool:
    """Whether forward's own results jump if its numbers are moved by as much as rounding does, or
    by what was in memory before."""
    g = torch.Generator().manual_seed(0)

    def moved(x: Tensor) -> Tensor:
        noise = (torch.rand(x.shape, generator=g) - 0.5).to(x.device) * 4e-6
        return x * (1 + noise) if x.dtype is torch.float32 else x

    want = toys.bare(program, held, own, b)
    for number in (0, math.nan, 3e4):
        with Unwritten(number):
            if unlike(toys.bare(program, held, own, b), want):
                return True
    for _ in range(16):
        near_by = dataclasses.replace(b, x=moved(b.x), y=moved(b.y))
        again = toys.bare(
            program, trees.map_leaves(moved, held), trees.map_leaves(moved, own), near_by
        )
        if unlike(again, want):
            return True
    return False


def outcome(seed: int, device: Any = "cpu") -> Outcome:
    """Of the program that a seed draws."""
    return tried(draw(random.Random(seed)), device, seed)


def code_of(seed: int) -> str:
    """The graph of what a seed draws, whatever becomes of it; "" where there is none."""
    found: list[str] = []
    made = fg.graphify(
        draw(random.Random(seed)), donate=1, stage=2, limits=LIMITS,
        generators=(torch.default_generator,),
    )  # fmt: skip
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = (params(), state(), batch(*BATCHES[0]))
        made.trace_call(given, Refusals(), lambda a, b, graph, d: found.append(graph.gm.code))
    return "".join(found)
