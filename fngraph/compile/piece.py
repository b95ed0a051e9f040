"""`CompiledPiece`: a piece as the code that Inductor has made of it, an artefact for each range.

As an instruction of a program it is `piece(sizes, host, *tensors) -> tensors`, as a traced one is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from fngraph.compile.artefact import Artefact, Source, make_artefact
from fngraph.compile.few_rows import few
from fngraph.compile.op import COMPILED, Tensors, register
from fngraph.core.compiling import Range, narrowest, to_try
from fngraph.errors import CompileError
from fngraph.torch_facts.inductor import Made, size_at, under_torch_compile

LOG = logging.getLogger("fngraph")
MOST_SIZES = 4096  # whose layouts are kept


class Layout(NamedTuple):
    """How a tensor lies in memory: sizes, strides, and the offset in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class AtSizes(NamedTuple):
    """What a call at some T and R needs to know.

    Attributes:
        inputs: index and layout of each argument whose layout varies from batch to batch.
        made: layouts of the results of the code.
        views: layouts of the piece's results, each with the offset from its base's.
    """

    artefact: Artefact
    inputs: tuple[tuple[int, Layout], ...]
    made: tuple[Layout, ...]
    views: tuple[Layout, ...]


class CompiledPiece:
    """One distinct piece of a program, compiled.

    Attributes:
        name: for people, "piece 0".
        key: `Piece.key`: pieces of one key compute the same from equal kinds of inputs.
        within: all sizes that may come.
        artefacts: what serves, in order; more come only where a size turns up that none serves.
        made: what was made or loaded, with how long it took.
    """

    def __init__(self, source: Source, within: Range, level: str) -> None:
        self.source, self.within, self.level = source, within, level
        self.name, self.key, self.plan = source.name, source.key, source.plan
        self.artefacts: list[Artefact] = []
        self._tried: set[Range] = set()  # what code was asked for
        self.made: list[Artefact] = []  # in order, and each time that torch.compile compiled
        self.is_ahead = True  # what is made now is made before any step
        self.handle = register(self)
        self._reads = [i for i, w in enumerate(self.plan.written) if not w]
        self._writes = [i for i, w in enumerate(self.plan.written) if w]
        self._varying = [i for i, x in enumerate(self.plan.inputs) if not _is_fixed(x)]
        self._known: dict[tuple[int, int], AtSizes] = {}

    # making it

    def compile_ahead(self, exact: Iterable[int], sizes: Iterable[tuple[int, int]]) -> None:
        """Make the artefacts: for all sizes, for exact numbers of tokens, for what is then left.

        Args:
            sizes: (T, R) that will come.

        Raises:
            CompileError: Inductor cannot.
        """
        sizes = tuple(sizes)
        self._make(self.within)
        for part in few(self.plan.gm, self.within, sizes) if self.level == "pieces" else ():
            self._make(part)
        for num_tokens in exact:
            self._make(self.within.at(num_tokens))
        for num_tokens, num_reqs in sizes:
            self.at(num_tokens, num_reqs)
        self.is_ahead = False

    def artefact(self, num_tokens: int, num_reqs: int) -> Artefact:
        """What serves these sizes, made now if nothing does.

        Raises:
            CompileError: Inductor cannot; or level "once" has it for other sizes alone.
        """
        found = self._find(num_tokens, num_reqs)
        if found is not None:
            return found
        if self.level == "once" and not self.is_ahead:
            made_for = "; ".join(str(a.range) for a in self.artefacts)
            raise CompileError(
                f"{self.name} was compiled once, for {made_for}; {num_tokens} tokens of "
                f'{num_reqs} requests are another size. Pass compile="pieces", which compiles '
                "what is missing"
            )
        for part in to_try(self.within, num_tokens, num_reqs):
            if part in self._tried:  # and does not serve them
                continue
            made = self._make(part)
            if made.serves(num_tokens, num_reqs):
                return made
        raise CompileError(
            f"{self.name} cannot be compiled for {num_tokens} tokens and {num_reqs} requests: what "
            'Inductor assumes of sizes excludes them. Pass compile="none", and report it'
        )

    def _find(self, num_tokens: int, num_reqs: int) -> Artefact | None:
        serving = {a.range: a for a in self.artefacts if a.serves(num_tokens, num_reqs)}
        best = narrowest(serving, num_tokens, num_reqs)
        return None if best is None else serving[best]

    def _make(self, part: Range) -> Artefact:
        self._tried.add(part)
        if self.level == "stock":
            call = under_torch_compile(self.plan.gm, self._told)
            artefact = Artefact(part, Made(call, "that of torch.compile", 0), None, (0, 1), 0)
        else:
            artefact = make_artefact(self.source, part)
            self._note(artefact)
        self.artefacts.append(artefact)
        self._known.clear()
        return artefact

    def _told(self, made: Made, us: int) -> None:
        LOG.info(
            "torch.compile has compiled %s: %.0f ms, %d kernels, %s",
            self.name, us / 1000, made.kernels, made.path,
        )  # fmt: skip
        self.made.append(Artefact(self.within, made, None, (0, 1), us))

    def _note(self, artefact: Artefact) -> None:
        self.made.append(artefact)
        if not self.is_ahead:
            LOG.warning(
                "%s was compiled in a step, which took %.0f ms: nothing made ahead serves its size",
                self.name, artefact.us / 1000,
            )  # fmt: skip

    # calling it

    def __call__(
        self, sizes: Mapping[str, int], host: Any, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """One call of the op, and the piece's results out of what it gives."""
        num_tokens, num_reqs = sizes["T"], sizes["R"]
        reads = [tensors[i] for i in self._reads]
        writes = [tensors[i] for i in self._writes]
        made = COMPILED(self.handle, num_tokens, num_reqs, reads, writes)
        bases = (*tensors, *made)
        views = self.at(num_tokens, num_reqs).views
        return tuple(
            bases[view.of]
            if view.whole
            else bases[view.of].as_strided(
                layout.size, layout.stride, bases[view.of].storage_offset() + layout.offset
            )
            for view, layout in zip(self.plan.views, views)
        )

    def run(self, num_tokens: int, num_reqs: int, reads: Tensors, writes: Tensors) -> Tensors:
        """What the op does. Layouts are those of the trace, whatever comes in or out."""
        tensors: Tensors = [*reads, *writes]
        for place, i in enumerate((*self._reads, *self._writes)):
            tensors[i] = reads[place] if place < len(reads) else writes[place - len(reads)]
        at = self.at(num_tokens, num_reqs)
        put_back = []
        for i, layout in at.inputs:
            given = tensors[i]
            if not _alike(given, layout):
                tensors[i] = given.new_empty_strided(layout.size, layout.stride).copy_(given)
                if self.plan.written[i]:
                    put_back.append((given, tensors[i]))
        numbers = (num_tokens, num_reqs)
        results = at.artefact.made.call(*[numbers[i] for i in at.artefact.symbolic], *tensors)
        for into, value in put_back:
            into.copy_(value)
        owned = {x.untyped_storage().data_ptr() for x in tensors}
        made: Tensors = []
        for result, layout in zip(results, at.made, strict=True):
            address = result.untyped_storage().data_ptr()
            if not _alike(result, layout) or (address in owned and result.numel()):
                fresh = result.new_empty_strided(layout.size, layout.stride)
                result = fresh.copy_(result)
                address = result.untyped_storage().data_ptr()
            owned.add(address)
            made.append(result)
        return made

    def shapes(self, num_tokens: int, num_reqs: int) -> Tensors:
        """What the op gives, without memory."""
        layouts = self.at(num_tokens, num_reqs).made
        return [
            torch.empty_strided(layout.size, layout.stride, dtype=x.dtype, device="meta")
            for x, layout in zip(self.plan.made, layouts)
        ]

    def at(self, num_tokens: int, num_reqs: int) -> AtSizes:
        """What a call at these sizes needs to know, kept for the next one.

        Raises:
            CompileError: see `artefact`.
        """
        found = self._known.get((num_tokens, num_reqs))
        if found is not None:
            return found
        artefact = self.artefact(num_tokens, num_reqs)
        values = {"T": num_tokens, "R": num_reqs}
        known = {symbol: values[letter] for symbol, letter in self.source.letters.items()}

        def layout(x: torch.Tensor, base: torch.Tensor | None = None) -> Layout:
            offset = 0
            if base is not None:
                offset = size_at(x.storage_offset(), known) - size_at(base.storage_offset(), known)
            size = tuple(int(size_at(n, known)) for n in x.shape)
            return Layout(size, tuple(int(size_at(n, known)) for n in x.stride()), int(offset))

        found = AtSizes(
            artefact,
            tuple((i, layout(self.plan.inputs[i])) for i in self._varying),
            tuple(layout(x) for x in self.plan.made),
            tuple(layout(view.like, view.base) for view in self.plan.views),
        )
        if len(self._known) >= MOST_SIZES:
            self._known.clear()
        self._known[num_tokens, num_reqs] = found
        return found

    def __repr__(self) -> str:
        return f"CompiledPiece({self.name}: {', '.join(str(a.range) for a in self.artefacts)})"


def _is_fixed(x: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in (*x.shape, *x.stride()))


def _alike(x: torch.Tensor, layout: Layout) -> bool:
    """Whether a tensor lies as said; a dim of one has no stride."""
    return all(n == 1 or s == t for n, s, t in zip(x.shape, x.stride(), layout.stride))


def artefact_rows(piece: CompiledPiece) -> list[tuple[str, Range, str, str, int, str]]:
    """Piece, sizes, how it came, ms, kernels and path of each artefact, for a table."""
    return [
        (
            piece.name, a.range, "loaded" if a.loaded else "compiled", f"{a.us / 1000:.0f}",
            a.made.kernels, a.made.path,
        )
        for a in piece.made
    ]  # fmt: skip
