"""`resolve`: which modes the backends allow, which query lengths and sizes remain, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fngraph.core.kinds import checked
from fngraph.core.limits import Limits
from fngraph.core.modes import Mode, Support
from fngraph.core.sizes import Ladders, check_query_lens, default_sizes, ladders
from fngraph.core.text import with_suggestions
from fngraph.errors import ModesError

DEFAULT_MODES = Mode.FULL_AND_PIECEWISE
DEFAULT_LIMITS = Limits()
NOTHING = Ladders()

OLD_FLAGS = {
    "use_cudagraph": '. Pass modes="PIECEWISE", or modes="NONE" in place of False.',
    "full_cuda_graph": '. Pass modes="FULL", or modes="PIECEWISE" in place of False.',
}
"""What to pass in place of two flags that vLLM had before `cudagraph_mode`, of 0.10.1."""


class Resolution(NamedTuple):
    """What will be captured, and every step that led there.

    Attributes:
        modes: the resolved modes.
        requested: the modes that were asked for.
        query_lens: query lengths of the uniform batches that run FULL; empty where none do.
        sizes: the ladders to capture; empty where nothing is.
        reasons: one sentence for each change, in order; empty where nothing had to change.
    """

    modes: Mode
    requested: Mode
    query_lens: tuple[int, ...] = ()
    sizes: Ladders = NOTHING
    reasons: tuple[str, ...] = ()

    def as_text(self) -> str:
        """The walk from what was asked to what is captured."""
        lines = [f"{self.requested} requested", *self.reasons, f"{self.modes} resolved"]
        return "\n".join(lines)


@checked
@with_suggestions
def resolve(
    modes: Mode | str | None = None,
    support: Support | int | Mapping[str, Support | int] = Support.ALWAYS,
    cut: str = "yes",
    query_lens: Sequence[int] = (1,),
    *,
    limits: Limits = DEFAULT_LIMITS,
    sizes: Iterable[int] | None = None,
    align: str = "uniform",
    beyond: str = "cut",
    eager: bool = False,
    pooling: bool = False,
    encoder_decoder: bool = False,
    layerwise: bool = False,
    state_blocks: int | None = None,
) -> Resolution:
    """The strongest modes that keep every batch right.

    | requested, cut "yes" | ALWAYS | UNIFORM_BATCH | SINGLE_TOKEN   | NEVER     |
    |----------------------|--------|---------------|----------------|-----------|
    | PIECEWISE            | same   | same          | same           | same      |
    | FULL                 | same   | both          | both           | error     |
    | FULL_DECODE_ONLY     | same   | same          | same           | PIECEWISE |
    | FULL_AND_PIECEWISE   | same   | same          | same           | PIECEWISE |

    "Both" is FULL_AND_PIECEWISE. SINGLE_TOKEN keeps query length 1 alone; where that leaves no
    query length, PIECEWISE remains. Without a cut, PIECEWISE falls away: FULL_AND_PIECEWISE
    becomes FULL where the cut was "declined" and FULL_DECODE_ONLY where there is "no" cut, and
    what would become PIECEWISE becomes NONE.

    Args:
        modes: what is asked for; None: FULL_AND_PIECEWISE.
        support: the capture level of attention, or of each layer or backend by name; the lowest
            decides and is named in the reasons.
        cut: whether graphs can be cut at attention: "yes"; "declined" by the user; "no".
        query_lens: tokens a request of the uniform batches that will come.
        limits: bounds of every step, for the ladders.
        sizes: capture sizes; None: `default_sizes(limits, query_lens)`.
        align, beyond: how `ladders` rounds uniform sizes.
        eager: nothing is to be captured.
        pooling: a model without decode steps; FULL becomes PIECEWISE.
        encoder_decoder: cross attention reads fresh encoder outputs; only decode is captured.
        layerwise: something works between layers (a KV connector); FULL becomes PIECEWISE.
        state_blocks: blocks of recurrent state; each request of a FULL batch needs one.

    Raises:
        ModesError: FULL was asked of something that captures NEVER; fewer state blocks than
            requests; an unknown `cut`.

    Source: vLLM 0.33 `VllmConfig.__post_init__` and `resolve_cudagraph_mode_and_sizes`. Unlike
    there, PIECEWISE is never lost where a cut is available, and one query length that cannot be
    captured does not take the others with it.
    """
    check_cut(cut)
    check_query_lens(query_lens)
    requested = DEFAULT_MODES if modes is None else Mode.parse(modes)
    now, reasons = _by_model(
        requested, cut, eager=eager, pooling=pooling, encoder=encoder_decoder, layerwise=layerwise
    )
    if support == {}:  # a model without attention
        support = Support.ALWAYS
    now, kept, more = _by_support(now, support, cut, tuple(query_lens))
    reasons += more
    if now.decode is Mode.FULL and state_blocks is not None and state_blocks < limits.max_reqs:
        raise ModesError(
            f"{now} captures up to max_reqs={limits.max_reqs} requests, but there are "
            f"{state_blocks} blocks of recurrent state. Pass Limits(max_reqs={state_blocks}), "
            'or modes="PIECEWISE".'
        )
    chosen = NOTHING
    if now is not Mode.NONE:
        sizes = default_sizes(limits, query_lens) if sizes is None else sizes
        chosen = ladders(sizes, kept, limits.max_reqs, align, beyond=beyond)
    return Resolution(now, requested, kept, chosen, tuple(reasons))


def check_cut(cut: str) -> None:
    """Raise `ModesError` for a word that does not say whether graphs can be cut."""
    if cut not in ("yes", "declined", "no"):
        raise ModesError(f'cut={cut!r} is unknown. Pass cut="yes", "declined" or "no".')


def _by_model(
    modes: Mode, cut: str, *, eager: bool, pooling: bool, encoder: bool, layerwise: bool
) -> tuple[Mode, list[str]]:
    """What the kind of model and the missing cut leave of `modes`."""
    reasons: list[str] = []
    no_cut: dict[Mode, Mode] = {
        Mode.PIECEWISE: Mode.NONE,
        Mode.FULL_AND_PIECEWISE: Mode.FULL_DECODE_ONLY,
    }
    declined: dict[Mode, Mode] = {Mode.PIECEWISE: Mode.NONE, Mode.FULL_AND_PIECEWISE: Mode.FULL}
    none = dict.fromkeys(Mode, Mode.NONE)
    no_full: dict[Mode, Mode] = {mode: Mode.PIECEWISE for mode in Mode if mode.decode is Mode.FULL}
    decode: dict[Mode, Mode] = {
        mode: Mode.FULL_DECODE_ONLY for mode in Mode if mode is not Mode.NONE
    }
    steps: tuple[tuple[bool, dict[Mode, Mode], str], ...] = (
        (eager, none, "eager=True"),
        (cut == "no", no_cut, "nothing can cut the graph at attention"),
        (pooling, no_full, "a pooling model has no decode batches"),
        (encoder, decode, "prefill of an encoder-decoder model reads fresh encoder outputs"),
        (layerwise, no_full, "something has to run between the layers"),
        (cut == "no", no_cut, "nothing can cut the graph at attention"),
        (cut == "declined", declined, "cutting at attention was declined"),
    )
    for applies, change, why in steps:
        after = change.get(modes, modes) if applies else modes
        if after is not modes:
            reasons.append(f"{modes} -> {after}: {why}")
            modes = after
    return modes, reasons


def _by_support(
    modes: Mode,
    support: Support | int | Mapping[str, Support | int],
    cut: str,
    query_lens: tuple[int, ...],
) -> tuple[Mode, tuple[int, ...], list[str]]:
    """What the lowest capture level leaves of `modes` and of the query lengths."""
    reasons: list[str] = []
    level, who = _lowest(support)
    weaker = Mode.PIECEWISE if cut == "yes" else Mode.NONE

    def change(after: Mode, why: str) -> Mode:
        reasons.append(f"{modes} -> {after}: {who} {why}")
        return after

    if modes is Mode.FULL and level is Support.NEVER:
        instead = "FULL_AND_PIECEWISE" if cut == "yes" else "NONE"
        raise ModesError(f'modes="FULL", but {who} can never be captured. Pass modes="{instead}".')
    if modes is Mode.FULL and level is not Support.ALWAYS:
        after = Mode.FULL_AND_PIECEWISE if cut == "yes" else Mode.FULL_DECODE_ONLY
        modes = change(after, "captures uniform batches only")
    if modes.decode is not Mode.FULL:
        return modes, (), reasons
    if level is Support.NEVER:
        return change(weaker, "can never be captured"), (), reasons
    if level is Support.UNIFORM_SINGLE_TOKEN_DECODE and query_lens != (1,):
        kept = tuple(q for q in query_lens if q == 1)
        if not kept:
            why = f"captures query_len 1 only, and batches come with {_either(query_lens)}"
            return change(weaker, why), (), reasons
        lost = tuple(q for q in query_lens if q != 1)
        reasons.append(f"{modes} keeps query_len 1 but not {_either(lost)}: {who} stops there")
        return modes, kept, reasons
    return modes, query_lens, reasons


def _lowest(support: Support | int | Mapping[str, Support | int]) -> tuple[Support, str]:
    """The level that decides, and who declares it, in words."""
    if not isinstance(support, Mapping):
        return Support(support), f"attention ({Support(support)})"
    level = min(support.values())
    names = [name for name, declared in support.items() if declared == level]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Support(level), f"{names[0]}{more} ({Support(level)})"


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
