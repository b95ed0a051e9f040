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
import random
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import toys
from rows_whole import BATCHES, INVALID, KEYS, LIMITS, Program, batch, draw, params, state
from torch import Tensor

import fngraph as fg
from fngraph.core import trees
from fngraph.core.buffers import key_sizes
from fngraph.errors import FnGraphError
from fngraph.fx.nodes import is_op
from fngraph.fx.rows.indices import WRITES
from fngraph.fx.rows.rehearsal import Difference, rehearse
from fngraph.fx.rows.state import op_name
from fngraph.fx.tracing.refusals import Refusals
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
        kind: "accepted", "refused", "shaky" (rounding alone changes what it computes), "wrong" or
            "raw" (an error of torch's own, where bare forward runs).
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
    kept: list[Any] = []
    broken: list[Difference] = []

    def look(args: Any, limits: Any, graph: Any, facts: Any) -> None:
        code.append(graph.gm.code)
        ops = [op_name(node) for node in graph.gm.graph.nodes if is_op(node)]
        poisoned = guards and not set(WRITES).isdisjoint(ops)  # what padding adds as well
        if poisoned or any(getattr(fact, "reserved", None) for fact in facts.values()):
            kept.append(args)
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
            wrong.extend(called(program, step, held, own, [x for x in CALLS if x in runs], *kept))
    except FnGraphError as error:
        if wrong or not _is_fault(error):
            kind = "wrong" if wrong else "refused"
            return Outcome(kind, wrong[0] if wrong else type(error).__name__, *code[: bool(wrong)])
        return Outcome("raw", told(error), "".join(code))
    except Exception as error:
        if traced is None and not all(_runs(program, batch(*sizes)) for sizes in BATCHES):
            return Outcome("refused", "runs for some sizes alone")
        return Outcome("raw", told(error), "".join(code))
    if not wrong:
        return Outcome("accepted")
    return Outcome("shaky" if wrong[0] == "shaky" else "wrong", wrong[0], code[0])


def _is_fault(error: FnGraphError) -> bool:
    """Whether what was accepted has failed after all: a batch of padding alone, in a capture. But
    not that torch itself waits for the device in some op, which CUDA says of captures alone."""
    waits = "operation not permitted when stream is capturing" in str(error)
    return not str(error) or (isinstance(error, fg.errors.CaptureError) and not waits)


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
        try:
            toys.bare(program, toys.moved(params(), on), given, toys.on(b, on))
        except INVALID:
            return False
    return True


def differences(
    args: Any, held: Any, own: Any, gm: Any, facts: Any, runs: Any = None
) -> Iterator[Difference]:
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
    program: Program, step: Any, held: Any, own: Any, calls: list[Any], kept: Any = None
) -> Iterator[str]:
    """How results or state differ from bare forward's, of the first call in which they do.

    Args:
        kept: the trace's arguments, where padding writes to rows that are kept for it: nobody but
            a random program reads them. Then it is compared with forward on the padded batch.
    """
    if kept is not None and step.guards:
        return  # padding is poison
    for i, sizes in enumerate(calls):
        device = own["n"].device
        b = toys.on(batch(*sizes), device)
        before = toys.clone(own)
        if not _runs(program, b, device, before):  # not on a state that has moved
            return
        want, after = toys.bare(program, held, before, b)
        if kept is not None:
            as_keyed = _padded(b, step, kept)
            if not _runs(program, as_keyed, device, before):  # what is not used, nor in the graphs
                return
            padded, after = toys.bare(program, held, before, as_keyed)
            want = _leading(padded, want)
        got, back = step(own, b)
        for what, a, z in (("results", got, want), ("state", back, after), ("state", own, after)):
            text = unlike(a, z)
            if text:
                shaky = _is_shaky(program, held, before, b)
                ran = step.dispatch(b.spec)
                yield "shaky" if shaky else f"{what} of call {i}, {sizes}, as {ran}: {text}"
                return
        for leaf, new in zip(toys.leaves(own), toys.leaves(after)):
            leaf.copy_(new)  # or rounding would add up


def _padded(b: Any, step: Any, args: Any) -> Any:
    """A batch as its key has it."""
    chosen = step.dispatch(b.spec).descriptor
    key = key_sizes(chosen.num_tokens, chosen.num_reqs, LIMITS.max_reqs, {})
    leaves = padded_leaves(args, toys.leaves(b), b.spec, key, LIMITS)
    return dataclasses.replace(b, **dict(zip(fg.core.buffers_of(type(b)), leaves)))


def _leading(tree: Any, like: Any) -> Any:
    """Of each leaf what there is in the shape of another one."""
    leaves, form = trees.flatten(tree)
    return trees.unflatten(
        form, [x[tuple(map(slice, y.shape))] for x, y in zip(leaves, toys.leaves(like))]
    )


def unlike(got: Any, want: Any) -> str:
    """How two trees differ; "" if they do not."""
    if trees.flatten(got)[1] != trees.flatten(want)[1]:
        return f"{trees.flatten(got)[1]} for {trees.flatten(want)[1]}"
    for path, a, b in zip(
        trees.paths(trees.flatten(want)[1], "output"), toys.leaves(got), toys.leaves(want)
    ):
        if (a.shape, a.dtype) != (b.shape, b.dtype) or not near(a, b):
            return f"{path} is {_short(a)}, and {_short(b)} in forward"
    return ""


def near(a: Tensor, b: Tensor) -> bool:
    """Equal, but for the order in which floats were added up."""
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return torch.equal(a, b)
    close = NEAR.get(a.dtype, 0.05)
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return torch.allclose(a.float() if a.itemsize < 4 else a, b.float() if b.itemsize < 4 else b,
                          close, close, equal_nan=True)  # fmt: skip


def _short(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype} {x.flatten()[:6].tolist() if x.itemsize > 1 else ''}"


def _is_shaky(program: Program, held: Any, own: Any, b: Any) -> bool:
    """Whether forward's own results jump if its numbers are moved by as much as rounding does."""
    g = torch.Generator().manual_seed(0)

    def moved(x: Tensor) -> Tensor:
        noise = (torch.rand(x.shape, generator=g) - 0.5).to(x.device) * 4e-6
        return x * (1 + noise) if x.dtype is torch.float32 else x

    want = toys.bare(program, held, own, b)
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
