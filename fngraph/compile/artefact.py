"""`Artefact`: compiled code for a range of sizes, made by Inductor or found on disk."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fngraph.compile.disk import Disk, Kept
from fngraph.compile.few_rows import taken_apart
from fngraph.compile.key import Pass, can_be_told, digest_of, facts_of
from fngraph.compile.results import Plan, with_numbers
from fngraph.core.collector import without_collector
from fngraph.core.compiling import Range, examples, trimmed
from fngraph.errors import CompileError
from fngraph.torch_facts.inductor import (
    Assumed,
    Made,
    Sizes,
    compile_ahead,
    made_of,
    settle_environment,
    size_at,
)
from fngraph.torch_facts.names import without_modes
from fngraph.torch_facts.portable import dumped, loaded

LOG = logging.getLogger("fngraph")
_ONE_AT_A_TIME = threading.RLock()  # Inductor has state of its own


@dataclasses.dataclass(frozen=True, eq=False)
class Artefact:
    """What serves a range.

    Attributes:
        range: where it holds, but for what is `assumed`.
        assumed: what else must be true of a size; None: nothing.
        symbolic: which of T (0) and R (1) its code is called with.
        us: how long it took to make or to load, in microseconds.
        loaded: whether it was found on disk.
    """

    range: Range
    made: Made
    assumed: Assumed | None
    symbolic: tuple[int, ...]
    us: int
    loaded: bool = False

    def serves(self, num_tokens: int, num_reqs: int) -> bool:
        """Whether it is right at these sizes."""
        if not self.range.covers(num_tokens, num_reqs):
            return False
        return self.assumed is None or self.assumed.holds({"T": num_tokens, "R": num_reqs})


class Source(NamedTuple):
    """What an artefact is made of, for any range.

    Attributes:
        name: for people, "piece 0".
        key: `Piece.key`.
        letters: symbol of the trace to "T" or "R".
        passes: those that have rewritten the piece, in order.
        disk: where artefacts are kept; None: nowhere.
    """

    name: str
    key: str
    plan: Plan
    letters: Mapping[Any, str]
    passes: Sequence[Pass] = ()
    disk: Disk | None = None


class Saved(NamedTuple):
    """An artefact as it is kept."""

    range: Range
    assumed: Assumed | None
    symbolic: tuple[int, ...]
    code: bytes


def make_artefact(source: Source, part: Range) -> Artefact:
    """Code for these sizes: what was kept on disk of the very same, else what Inductor makes now.

    Raises:
        CompileError: Inductor cannot.
    """
    with _ONE_AT_A_TIME, without_modes(), torch.inference_mode(False), torch.no_grad():
        began = time.perf_counter_ns()
        plan, device = source.plan, source.plan.inputs[0].device.type
        with without_collector():  # a compiler's work may take minutes, and has it
            settle_environment()
            facts = facts_of(source.key, plan.gm, plan.inputs, part, source.passes)
            digest, disk = digest_of(facts), source.disk if can_be_told(device) else None
            artefact = None if disk is None else _found(disk, digest)
        found = artefact is not None
        if artefact is None:
            if disk is not None:
                _say_why(source.name, part, disk, facts)
            artefact = _compiled(source, part, digest)
        us = (time.perf_counter_ns() - began) // 1000
        artefact = dataclasses.replace(artefact, us=us, loaded=found)
        LOG.info(
            "%s %s for %s: %.0f ms, %d kernels, %s", "loaded" if found else "compiled", source.name,
            artefact.range, us / 1000, artefact.made.kernels, artefact.made.path,
        )  # fmt: skip
        if disk is not None and not found:
            about = {"name": source.name, "holds": str(artefact.range), "ms": str(us // 1000)}
            about["kernels"] = str(artefact.made.kernels)
            why = _keep(disk, digest, artefact, facts | about)
            if why is not None:
                LOG.warning("%s for %s is not kept: %s", source.name, artefact.range, why)
        return artefact


def _say_why(name: str, part: Range, disk: Disk, facts: Mapping[str, str]) -> None:
    """One line, where something of the same piece is on disk, in what its key differs."""
    if not LOG.isEnabledFor(logging.INFO):  # headers of all files are read
        return
    if (nearest := disk.nearest(facts)) is not None:
        digest, parts = nearest
        LOG.info(
            "%s for %s is not on disk: %s, of the same piece, differs in %s",
            name, part, digest[:12], ", ".join(parts) or "nothing, and cannot be read",
        )  # fmt: skip


def _found(disk: Disk, digest: str) -> Artefact | None:
    kept = disk.read(digest)
    if kept is None:
        return None
    try:
        saved: Saved = pickle.loads(kept.body)
        made = made_of(loaded(saved.code))
        return Artefact(saved.range, made, saved.assumed, saved.symbolic, 0)
    except Exception as error:  # whatever torch raises for what it has written itself
        disk.discard(digest, f"torch cannot load it: {type(error).__name__}: {error}")
        return None


def _keep(disk: Disk, digest: str, artefact: Artefact, facts: Mapping[str, str]) -> str | None:
    """Keep it; or why it is not kept."""
    code = dumped(artefact.made.call)
    if isinstance(code, str):
        return code
    saved = Saved(artefact.range, artefact.assumed, artefact.symbolic, code)
    try:
        body = pickle.dumps(saved)
    except Exception as error:  # conditions are sympy's, and of any class
        return f"its conditions cannot be saved: {error}"
    return disk.write(digest, Kept(facts, body))


def _compiled(source: Source, part: Range, tag: str) -> Artefact:
    plan, spans = source.plan, {"T": part.tokens, "R": part.reqs}
    sizes = Sizes({n: x for n, x in examples(part).items() if not spans[n].exact})
    given: dict[str, Any] = {n: span.low for n, span in spans.items() if span.exact}
    given |= sizes.symbols
    at = {symbol: given[letter] for symbol, letter in source.letters.items()}
    with sizes.fakes:
        inputs = [
            torch.empty_strided(
                [size_at(n, at) for n in x.shape], [size_at(n, at) for n in x.stride()],
                dtype=x.dtype, device=x.device,
            )
            for x in plan.inputs
        ]  # fmt: skip
    gm = with_numbers(plan.gm, [None if n in sizes.symbols else given[n] for n in "TR"])
    gm = taken_apart(gm, part)
    try:
        made = compile_ahead(gm, [*sizes.symbols.values(), *inputs], sizes.fakes, tag)
    except Exception as error:  # whatever Inductor or a compiler raises
        raise CompileError(
            f"{source.name}, for {part}: Inductor cannot compile it: {error}. Pass "
            'compile="none" to run it as it was traced'
        ) from error
    assumed = sizes.assumed()
    symbolic = tuple(i for i, n in enumerate("TR") if n in sizes.symbols)
    holds = trimmed(part, lambda t, r: assumed.holds({"T": t, "R": r}))
    return Artefact(holds, made, assumed, symbolic, 0)
