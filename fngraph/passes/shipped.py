"""The passes that are shipped, in the order in which they run, and which of them a level has.

| level | passes, if nothing is said |
|---|---|
| "none" | none: what runs is what was traced, bit for bit |
| "pieces", "once" | all but those of norms and gates alone, and of own rows over processes |
| "stock" | the same without experts, linears, paired or not, those in fp8, sums over processes |

Inductor makes the fusions of norms, ropes and gates itself, with what is around them; an op of
their own would stop it there. So those are for level "none", where one asks for them, since they
round otherwise on a GPU. One product in place of three is nothing that Inductor does; rounding to
fp8 is an op that it cannot look into, so a norm or a gate with it is one kernel less; and the
highest of a row it looks for in one program, as torch does. A sum over processes it leaves to NCCL,
and cannot join with the norm behind it. "stock" has that pass neither: it would take the norms that
`add_rms_norm_fp8` rounds there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import EllipsisType
from typing import Any

from fngraph.core.text import did_you_mean
from fngraph.errors import PassError
from fngraph.passes.attention import attention_fp8, rope_in_attention
from fngraph.passes.constants import fold_constants
from fngraph.passes.experts import fuse_experts
from fngraph.passes.fp8.linears import fuse_linears_fp8
from fngraph.passes.fp8.rounding import (
    fuse_add_rms_norm_fp8,
    fuse_rms_norm_fp8,
    fuse_silu_mul_fp8,
    hold_weights,
    quantize_once,
)
from fngraph.passes.linears import fuse_linears
from fngraph.passes.no_ops import drop_no_ops
from fngraph.passes.norms import fuse_add_rms_norm, fuse_rms_norm
from fngraph.passes.paired_linears import pair_linears
from fngraph.passes.ranks.norms import fuse_all_reduce_rms_norm
from fngraph.passes.ranks.sequence import gather_and_matmul, matmul_and_scatter, share_out_rows
from fngraph.passes.rope import fuse_norm_rope, fuse_rope
from fngraph.passes.row_max import fuse_row_max
from fngraph.passes.running.frame import Pass
from fngraph.passes.side_by_side import merge_side_by_side
from fngraph.passes.silu_mul import fuse_silu_mul

PASSES: tuple[Pass, ...] = (
    Pass("no_ops", drop_no_ops, "1", "views that are their base, copies that nobody can tell"),
    Pass("fold_constants", fold_constants, "1", "what is made of literals, computed once"),
    Pass("norm_rope", fuse_norm_rope, "1", "rotary embedding of normed heads"),
    Pass("rope", fuse_rope, "2", "rotary embedding"),
    Pass("rope_in_attention", rope_in_attention, "1", "what turns q and k, in attention's call"),
    Pass("attention_fp8", attention_fp8, "1", "attention, rounded to fp8 by a known scale"),
    Pass("all_reduce_rms_norm", fuse_all_reduce_rms_norm, "1", "a sum over processes and its norm"),
    Pass("sequence_parallel", share_out_rows, "1", "norms of sums over processes, of own rows"),
    Pass("matmul_reduce_scatter", matmul_and_scatter, "1", "a product, while its rows are summed"),
    Pass("all_gather_matmul", gather_and_matmul, "1", "products, while their rows are gathered"),
    Pass("linears_fp8", fuse_linears_fp8, "1", "linear layers in fp8 with what is around them"),
    Pass("add_rms_norm_fp8", fuse_add_rms_norm_fp8, "1", "a sum and its RMSNorm, rounded to fp8"),
    Pass("rms_norm_fp8", fuse_rms_norm_fp8, "1", "RMSNorm, rounded to fp8"),
    Pass("silu_mul_fp8", fuse_silu_mul_fp8, "1", "silu(gate) * up, rounded to fp8"),
    Pass("quantize_once", quantize_once, "1", "what is rounded to fp8 several times, once"),
    Pass("linears", fuse_linears, "1", "linear layers with the norm, gate or sum around them"),
    Pass("paired_linears", pair_linears, "1", "those with a sum and its norm between them"),
    Pass("experts", fuse_experts, "1", "experts' rows sorted, their gates and products"),
    Pass("add_rms_norm", fuse_add_rms_norm, "1", "a sum and its RMSNorm"),
    Pass("rms_norm", fuse_rms_norm, "1", "RMSNorm"),
    Pass("silu_mul", fuse_silu_mul, "1", "silu(gate) * up"),
    Pass("row_max", fuse_row_max, "1", "the highest of each row, which programs share"),
    Pass(
        "side_by_side",
        merge_side_by_side,
        "1",
        "products of one input, by weights that lie together",
    ),
    Pass("held_fp8", hold_weights, "1", "weights in fp8 that kernels may read ahead"),
)
_COMPILED = (
    "no_ops", "fold_constants", "norm_rope", "rope", "rope_in_attention", "attention_fp8",
    "all_reduce_rms_norm", "linears_fp8", "add_rms_norm_fp8", "rms_norm_fp8", "silu_mul_fp8",
    "quantize_once", "linears", "paired_linears", "experts", "row_max", "side_by_side", "held_fp8",
)  # fmt: skip
DEFAULTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "pieces": _COMPILED,
    "once": _COMPILED,
    "stock": tuple(  # one code for any rows
        name
        for name in _COMPILED
        if "linears" not in name and name not in ("experts", "all_reduce_rms_norm")
    ),
}

Wanted = str | Pass | Callable[[Any], Any] | EllipsisType
"""A pass by name, one of one's own, or a function over graphs, which is called by its name; `...`
for those that the level has, "all" for all that are shipped."""


PassList = str | Iterable[Wanted] | EllipsisType | None
"""What `passes=` may be: "all", or several in order; None or `...`: those of the level."""


def passes_of(wanted: PassList, level: str) -> tuple[Pass, ...]:
    """The passes that are asked for, in the order given; None or `...`: the level's own.

    Raises:
        PassError: a name that there is none of, or that comes twice; what is no pass.
    """
    if wanted is None or wanted is ...:
        wanted = (...,)
    if isinstance(wanted, str):
        if wanted != "all":
            advice = 'passes="all", or several, passes=(..., my_pass).'
            advice += did_you_mean(wanted, ("all", *_BY_NAME))
            advice = f'passes=("{wanted}",)' if wanted in _BY_NAME else advice
            raise PassError(f"passes={wanted!r}: expected several, or all of them. Pass {advice}")
        wanted = (wanted,)
    if not isinstance(wanted, Iterable):
        one = getattr(wanted, "__name__", "my_pass")
        raise PassError(f"passes={wanted!r}: expected several, passes=({one},), or none, ()")
    return _distinct([one for asked in wanted for one in _passes(asked, level)])


def name_of(one: Any) -> str:
    """By which name a pass is known: a text, a `Pass`, or a function."""
    if isinstance(one, str | Pass):
        return one if isinstance(one, str) else one.name
    plain = one.func if isinstance(one, functools.partial) else one
    if not callable(one):
        return repr(one)
    return getattr(plain, "__name__", type(plain).__name__)


_BY_NAME = {one.name: one for one in PASSES}


def _passes(one: Any, level: str) -> Sequence[Pass]:
    if one is ...:
        return [_BY_NAME[name] for name in DEFAULTS[level]]
    if isinstance(one, Pass):
        return [one]
    if isinstance(one, str):
        if one != "all" and one not in _BY_NAME:
            raise PassError(
                f"there is no pass {one!r}; there are {', '.join(_BY_NAME)}."
                f"{did_you_mean(one, _BY_NAME)}"
            )
        return PASSES if one == "all" else [_BY_NAME[one]]
    if callable(one):
        return [Pass(name_of(one), one)]
    if isinstance(one, list | tuple):
        raise PassError("passes has several in one place. Unpack them: passes=(*PASSES, my_pass)")
    raise PassError(
        f"{one!r} is no pass. Pass a name, a function of an fx.Graph, or fg.passes.Pass(name, fn)"
    )


def _distinct(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    names = [one.name for one in passes]
    for name in names:
        if names.count(name) > 1:
            raise PassError(
                f"passes has {name!r} twice. Leave one out; or give one another name: "
                'fg.passes.Pass("again", fn)'
            )
    return tuple(passes)
