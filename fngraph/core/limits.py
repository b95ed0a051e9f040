"""`Limits`: the largest step that will ever arrive, which bounds static buffers and eager runs."""

from __future__ import annotations

from dataclasses import dataclass

from fngraph.core.buffers import COUNTED
from fngraph.core.spec import BatchSpec
from fngraph.core.text import did_you_mean, expect
from fngraph.errors import SpecError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every step, eager ones too. Frozen and hashable.

    Attributes:
        max_tokens: query tokens a step (T).
        max_reqs: requests a step (R).
        dims: sizes of the further shape letters, `Limits(8192, 256, B=512)`: unlike T and R they
            are the same in every batch, whose leaves are padded to them by the caller.

    Raises:
        SpecError: a bound that is not a positive integer, or a letter bounded twice.
    """

    max_tokens: int
    max_reqs: int
    _dims: tuple[tuple[str, int], ...]

    def __init__(self, max_tokens: int = 8192, max_reqs: int = 256, **dims: int) -> None:
        for name, bound in {"max_tokens": max_tokens, "max_reqs": max_reqs, **dims}.items():
            if type(bound) is not int or bound < 1:
                raise SpecError(
                    f"Limits({name}={bound!r}) is not a positive integer. Pass {name}=1 or more."
                )
        for name in dims:
            if len(name) != 1 or not name.isupper():
                near = did_you_mean(name, ("max_tokens", "max_reqs"))
                raise SpecError(
                    f"Limits({name}={dims[name]}): {name!r} is no shape letter.{near} Pass "
                    "max_tokens=, max_reqs=, and single capitals such as B=512."
                )
        if clash := dims.keys() & COUNTED:
            letter = min(clash)
            raise SpecError(
                f"Limits({letter}={dims[letter]}) bounds {letter} twice. "
                f"Pass {'max_tokens' if letter == 'T' else 'max_reqs'}={dims[letter]}."
            )
        object.__setattr__(self, "max_tokens", max_tokens)
        object.__setattr__(self, "max_reqs", max_reqs)
        object.__setattr__(self, "_dims", tuple(sorted(dims.items())))

    @property
    def dims(self) -> dict[str, int]:
        """Bounds of the further letters, as a fresh dict."""
        return dict(self._dims)

    def __getitem__(self, letter: str) -> int:
        """The bound of one shape letter; T and R are `max_tokens` and `max_reqs`."""
        bounds = {"T": self.max_tokens, "R": self.max_reqs, **dict(self._dims)}
        if letter not in bounds:
            raise SpecError(
                f"Limits bound {', '.join(bounds)}, not {letter!r}. Pass Limits(..., {letter}=...)."
            )
        return bounds[letter]

    def check(self, spec: BatchSpec) -> None:
        """Raises SpecError, naming the limit, where `spec` is beyond one, or is no spec."""
        expect(BatchSpec, "fg.BatchSpec(num_tokens, num_reqs), or batch.spec", spec=spec)
        if spec.num_tokens > self.max_tokens:
            raise SpecError(
                f"{spec!r} is beyond Limits(max_tokens={self.max_tokens}). "
                f"Schedule fewer tokens, or pass Limits(max_tokens={spec.num_tokens})."
            )
        if spec.num_reqs > self.max_reqs:
            raise SpecError(
                f"{spec!r} is beyond Limits(max_reqs={self.max_reqs}). "
                f"Schedule fewer requests, or pass Limits(max_reqs={spec.num_reqs})."
            )

    def __repr__(self) -> str:
        bounds = {"max_tokens": self.max_tokens, "max_reqs": self.max_reqs, **dict(self._dims)}
        return f"Limits({', '.join(f'{name}={bound}' for name, bound in bounds.items())})"
