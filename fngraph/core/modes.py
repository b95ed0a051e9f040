"""The five graph modes, and how much of a batch an attention backend lets a graph capture."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum
from itertools import combinations

from fngraph.errors import ModesError, SpecError


class Mode(Enum):
    """What is captured: a pair (for uniform decode batches, for mixed batches).

    | mode               | decode    | mixed     |
    |--------------------|-----------|-----------|
    | NONE               | NONE      | NONE      |
    | PIECEWISE          | PIECEWISE | PIECEWISE |
    | FULL               | FULL      | FULL      |
    | FULL_DECODE_ONLY   | FULL      | NONE      |
    | FULL_AND_PIECEWISE | FULL      | PIECEWISE |

    NONE, PIECEWISE and FULL are also *runtime* modes: what one batch runs as.

    Source: vLLM 0.33 `CUDAGraphMode`; the names are the field's.
    """

    NONE = (0, 0)
    PIECEWISE = (1, 1)
    FULL = (2, 2)
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    # Members are singletons, so identity is a sound hash; Enum's own runs Python at every dict
    # lookup (0.15 us, and `Stats.observe` does one a step).
    __hash__ = object.__hash__

    @property
    def decode(self) -> Mode:
        """The runtime mode of uniform decode batches."""
        return RUNTIME_MODES[self.value[0]]

    @property
    def mixed(self) -> Mode:
        """The runtime mode of every other batch."""
        return RUNTIME_MODES[self.value[1]]

    @property
    def dual(self) -> bool:
        """Whether uniform and mixed batches run differently."""
        return self.value[0] != self.value[1]

    @property
    def strength(self) -> int:
        """0 for NONE, 1 for PIECEWISE, 2 for FULL; of a dual mode, its decode half's."""
        return self.value[0]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Mode.{self.name}"

    @staticmethod
    def parse(mode: str | Mode) -> Mode:
        """The mode of that name, in any case. A `Mode` comes back as it is.

        Raises:
            ModesError: no mode is called so.
        """
        if isinstance(mode, Mode):
            return mode
        found = Mode.__members__.get(mode.upper()) if isinstance(mode, str) else None
        if found is None:
            import difflib  # 8 ms, and only an error needs it

            names = list(Mode.__members__)
            near = difflib.get_close_matches(str(mode).upper(), names, cutoff=0.0)[0]
            raise ModesError(
                f'{mode!r} is not a mode. Pass "{near}", or one of {", ".join(names)}.'
            )
        return found


RUNTIME_MODES = (Mode.NONE, Mode.PIECEWISE, Mode.FULL)
"""What a batch can run as, weakest first, so that `strength` is the index."""


def runtime_modes(allowed: Iterable[Mode | str] | None) -> frozenset[Mode]:
    """`allowed=` as a set of runtime modes; None allows all three.

    Raises:
        ModesError: nothing is allowed, or something that no single batch can run as.
    """
    if allowed is None:
        return _ALL
    if type(allowed) is frozenset and allowed in _SUBSETS:  # an eighth of the time
        return allowed
    if not isinstance(allowed, Mode | Iterable):
        raise ModesError(f'allowed={allowed!r}: pass modes, ("FULL", "NONE"), or None for all.')
    modes = frozenset(map(Mode.parse, (allowed,) if isinstance(allowed, str | Mode) else allowed))
    if not modes:
        raise ModesError("allowed=() allows no mode at all. Pass allowed=None to allow every mode.")
    if not modes <= _ALL:
        dual = min(str(mode) for mode in modes - _ALL)
        raise ModesError(
            f"allowed= names {dual}, but one batch runs as NONE, PIECEWISE or FULL. "
            f'Pass allowed=["{Mode[dual].decode}", "{Mode[dual].mixed}"].'
        )
    return modes


_ALL = frozenset(RUNTIME_MODES)
_SUBSETS = {frozenset(modes) for n in (1, 2, 3) for modes in combinations(RUNTIME_MODES, n)}


class Support(IntEnum):
    """Which batches a backend lets a FULL graph capture; each level includes those below it.

    ALWAYS: any batch. UNIFORM_BATCH: batches whose requests all bring the same number of tokens.
    UNIFORM_SINGLE_TOKEN_DECODE: one token a request. NEVER: none; its op runs between graphs.

    Source: vLLM 0.33 `AttentionCGSupport`.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3

    @classmethod
    def _missing_(cls, value: object) -> Support:
        raise SpecError(f"{value!r} is no level of support. Pass one of {', '.join(map(str, cls))}")

    def __str__(self) -> str:
        return self.name
