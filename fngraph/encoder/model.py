"""`EncoderModel`: what an encoder of images and videos is, as a value of pure functions.

An *item* is whatever the model's own functions take for one image or video: fngraph only hands it
on. It brings output *tokens* and attention *sequences* (an image is one, a video one a frame) to
each *path* of the encoder; most encoders have one path, some a tower for the whole image and one
for its crops.

    item --measure--> Measured        how many tokens and sequences, without running anything
    items --collate--> batch          what a path's `forward` is staged, on the host
    batch --forward--> rows           one row an output token, items end to end
    rows of one item --postprocess--> the item's output
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple

from fngraph.core.kinds import checked
from fngraph.core.text import a, did_you_mean, named, what_is, with_suggestions
from fngraph.errors import SizesError, SpecError, TreeError


class Measured(NamedTuple):
    """What one item brings, known before it runs.

    Attributes:
        modality: "image", "video", ...
        tokens: output tokens by path; a path left out has none.
        sequences: attention sequences by path; a path left out has one if it has tokens.
        frames: of a video; 0 of an image, which no frame limit counts.
    """

    modality: str
    tokens: Mapping[str, int]
    sequences: Mapping[str, int] = MappingProxyType({})
    frames: int = 0

    def __repr__(self) -> str:
        return named(self)


@checked
@with_suggestions
@dataclasses.dataclass(frozen=True)
class EncoderPath:
    """One tower of an encoder, with budgets and graphs of its own.

    Attributes:
        forward: (params, batch) -> rows (T, E), or a tree of tensors whose first dim is T: T output
            tokens, items end to end. Pure, as `fg.graphify` wants it. Its batch is annotated with
            an `fg.struct`, in which T counts output tokens, R attention sequences, and that has
            `spec: fg.BatchSpec = fg.host()`. What a token is made of is staged as rows of it,
            `fg.buffer("T 4 C", "float32")` for four patches; offsets as "R + 1" or "T + 1" with
            pad="last".
        min_budget: its smallest token budget.
        allow_zero: items may bring it no tokens at all (an image without crops).
        unit: output tokens of each sequence where all sequences are alike, 272 for a global view.
            Its keys are then uniform, whole sequences of so many tokens, and fields may have R
            rows, `fg.buffer("R 3 1024 1024", ...)`, which become 272 * R; a trace does not know
            that these are T, so that the two do not mix. None: sequences of any length.
        max_sequences: the most sequences that one image brings, where it is not one and has no
            `unit`; frames of a video are counted by frames.
    """

    forward: Callable[[Any, Any], Any]
    min_budget: int
    allow_zero: bool = False
    unit: int | None = None
    max_sequences: int = 1

    def __post_init__(self) -> None:
        if self.min_budget < 1:
            raise SizesError(
                f"EncoderPath(min_budget={self.min_budget}) holds no token. Pass min_budget=1 or "
                "more, and allow_zero=True where an item may bring none."
            )
        if self.max_sequences < 1:
            raise SizesError(
                f"EncoderPath(max_sequences={self.max_sequences}) holds no image. Pass 1 or more."
            )
        if self.unit is not None and self.unit < 1:
            raise SizesError(
                f"EncoderPath(unit={self.unit}): a sequence has at least one token. Pass unit=None "
                "where sequences differ in length."
            )


def rows_of_the_only_path(outputs: Mapping[str, Any], item: Any) -> Any:
    """The default `postprocess`: an item's rows, as the encoder's one path made them.

    Raises:
        TreeError: rows of several paths.
    """
    if len(outputs) != 1:
        raise TreeError(
            f"an item has rows of the paths {sorted(outputs)}, and nothing says how they become "
            "one output. Pass EncoderModel(postprocess=lambda outputs, item: ...)"
        )
    (rows,) = outputs.values()
    return rows


@checked
@with_suggestions
@dataclasses.dataclass(frozen=True)
class EncoderModel:
    """An encoder as pure functions; `fg.graphify_encoder` makes graphs of it.

    Attributes:
        paths: by name, {"default": EncoderPath(forward, 64)}.
        measure: item -> what it brings. On the host, and without a look at tensors' values.
        collate: (path, items) -> the batch of one run over these items, end to end in the order in
            which it is given them, since rows go back to items by it; on the host. All of them
            bring the path tokens. Which items, and in which order, is the plan's: not the call's.
            Its spec counts true tokens and sequences, the sums of what `measure` says.
        token_range: output tokens of the smallest item, and the most that a graph is for, over all
            its items: usually what a step of the decoder takes.
        postprocess: (rows by path, item) -> the item's output, a tensor or a tree. The rows are the
            item's own, and a path without tokens is absent. The default: the only path's rows.
        modalities: which items graphs serve; others run eagerly.
        max_frames: the most frames of one item; 0: no video.
        mixes: whether items of different modalities may be in one batch; else each modality has
            runs of its own.
        dims: how long the further letters of the batches' fields are, {"C": 1176}.
        eager_because: why this encoder runs without graphs and without a trace, item by item, such
            as token counts that depend on the data; None: it has graphs.

    Raises:
        SizesError: no path, a token range that is empty, negative frames, or no reason.
    """

    paths: Mapping[str, EncoderPath]
    measure: Callable[[Any], Measured]
    collate: Callable[[str, Sequence[Any]], Any]
    token_range: tuple[int, int]
    postprocess: Callable[[Mapping[str, Any], Any], Any] = rows_of_the_only_path
    modalities: tuple[str, ...] = ("image",)
    max_frames: int = 0
    mixes: bool = True
    dims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    eager_because: str | None = None

    def __post_init__(self) -> None:
        if not self.paths:
            raise SizesError(
                "EncoderModel(paths={}) has nothing to run. Pass "
                'paths={"default": EncoderPath(forward, min_budget)}.'
            )
        low, high = self.token_range
        if not 0 < low <= high:
            raise SizesError(
                f"EncoderModel(token_range={self.token_range}) is no range of token counts. Pass "
                "(tokens of the smallest item, most tokens of a graph), such as (64, 8192)."
            )
        if self.eager_because == "":
            raise SizesError(
                'EncoderModel(eager_because="") gives no reason. Say why, or pass None for graphs.'
            )
        if self.max_frames < 0:
            raise SizesError(
                f"EncoderModel(max_frames={self.max_frames}): pass 0 where there is no video."
            )
        for name in ("paths", "dims"):  # as they are now, whatever becomes of the caller's dict
            object.__setattr__(self, name, dict(getattr(self, name)))

    def measured(self, item: Any, where: str = "an item") -> Measured:
        """`measure(item)`, checked, with a count for every path.

        Raises:
            SpecError: no `Measured`; counts that are no whole numbers, or of unknown paths,
                negative ones, more sequences than tokens, or tokens that a path's `unit` does not
                divide.
        """
        measured = self.measure(item)
        if not isinstance(measured, Measured):
            kind = a(type(measured).__name__)
            raise SpecError(f"{where}: measure returned {kind}. Return {self._example()}.")
        modality, tokens, sequences, frames = measured
        if fault := next(_faults(measured, self._example()), None):
            raise SpecError(f"{where}: of what measure returned, {fault}.")
        for name in (*tokens, *sequences):
            if name not in self.paths:
                raise SpecError(
                    f"{where}: measure counts tokens or sequences of the path {name!r}, and the "
                    f"encoder has {sorted(self.paths)}.{did_you_mean(name, self.paths)} Name one "
                    "of those."
                )
        counts = {path: tokens.get(path, 0) for path in self.paths}
        given = {path: sequences.get(path, min(n, 1)) for path, n in counts.items()}
        if frames < 0:
            raise SpecError(f"{where}: measure says {frames} frames. Say 0 of an image.")
        for path, n in counts.items():
            s, unit = given[path], self.paths[path].unit
            if unit is not None and path not in sequences:
                given[path] = s = n // unit
                if n % unit:
                    raise SpecError(
                        f"{where}: measure says {n} tokens of the path {path!r}, whose sequences "
                        f"have {unit} tokens each. Say a multiple of {unit}, or leave unit= out."
                    )
            if not (0 < s <= n or s == n == 0):
                raise SpecError(
                    f"{where}: measure says {n} tokens in {s} sequences of the path {path!r}. A "
                    "sequence has at least one token, and tokens are in sequences."
                )
            if unit is not None and n != s * unit:
                raise SpecError(
                    f"{where}: measure says {n} tokens in {s} sequences of the path {path!r}, "
                    f"whose sequences have {unit} tokens each. Say {s * unit}, or leave unit= out."
                )
            if n == 0 and not self.paths[path].allow_zero:
                raise SpecError(
                    f"{where}: measure says no tokens of the path {path!r}, which every item must "
                    "bring some. Pass EncoderPath(allow_zero=True) if that is right."
                )
        return Measured(modality, counts, given, frames)

    def _example(self) -> str:
        """What `measure` may return."""
        return f'fg.Measured("image", tokens={{{next(iter(self.paths))!r}: number}})'


def _faults(measured: Measured, example: str) -> Iterator[str]:
    """What has another kind than it should have, and what to return."""
    modality, tokens, sequences, frames = measured
    if not isinstance(modality, str):
        yield f"{what_is('modality', modality)}. Return {example}"
    for name, counts in (("tokens", tokens), ("sequences", sequences)):
        if not isinstance(counts, Mapping):
            yield f"{what_is(name, counts)}. Return {example}"
            continue
        for path, n in counts.items():
            if not _is_count(n):
                yield f"{what_is(f'{name}[{path!r}]', n)}. Say a whole number"
    if not _is_count(frames):
        yield f"{what_is('frames', frames)}. Say a whole number, 0 of an image"


def _is_count(n: object) -> bool:
    return type(n) is int or (isinstance(n, Integral) and not isinstance(n, bool))
