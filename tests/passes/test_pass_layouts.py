"""Values that do not lie as a new tensor does: a pass leaves them so, or is refused where what
reads them may go by that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from places import EPS, D, H, angles, forward_of, params, turn
from test_frame import aten, traced
from test_graphify import Model, steps
from test_linears_fp8 import lin, params as params_fp8
from torch import Tensor, fx
from torch.nn.functional import linear, silu

import fngraph as fg
from fngraph.errors import PassError
from fngraph.models.families.layers import rms_norm
from fngraph.models.families.rope import rotate, turn_by
from fngraph.passes import Pass


@torch.library.custom_op("fn_layouts::lying", mutates_args=())
def lying(x: Tensor) -> Tensor:
    """Twice x where its first dim steps less far than its second: what a kernel is free to ask."""
    return (x * (2 if x.stride(0) < x.stride(1) else 1)).contiguous()


@torch.library.custom_op("fn_layouts::told", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def told(x: Tensor) -> Tensor:
    return (x * 2).contiguous()


@lying.register_fake
@told.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def seen(x: Tensor) -> Tensor:
    return fg.trust_rows(lying(x))


def turned(x: Tensor) -> Tensor:
    """(T, 8) as (H, T, D), which lies as (T, H, D)."""
    return x.unflatten(1, (H, D)).transpose(0, 1)


def back(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def inner(p: Any, x: Tensor) -> Tensor:
    """(T, 8) that lies as (8, T)."""
    return torch.mm(p["eye"], x.t()).t()


def normed_sum(p: Any, x: Tensor) -> Any:
    total = turned(x.sin()) + turned(x.exp())
    return back(seen(rms_norm(total, p["h"], EPS)) + seen(total))


def by_halves(p: Any, x: Tensor) -> Tensor:
    """(T, H, D) that lies as (H, T, D)."""
    q = back(turned(x).contiguous())
    cos, sin = (torch.cat([angle, angle], -1) for angle in angles(x))
    a, b = q[..., : D // 2], q[..., D // 2 :]
    return back(seen(back(q * cos + torch.cat([-b, a], -1) * sin)))


NORM = ("add_rms_norm", "rms_norm")
CASES: dict[str, tuple[Callable[..., Any], tuple[str, ...], str]] = {
    "a norm": (lambda p, x: back(seen(rms_norm(turned(x.sin()), p["h"], EPS))), NORM, "rms_norm"),
    "a norm of a sum": (normed_sum, NORM, "rms_norm"),
    "a gate": (
        lambda p, x: back(seen(silu(turned(x.sin())) * turned(x.exp()))), ("silu_mul",), "silu_mul",
    ),
    "a product and what it is added to": (
        lambda p, x: seen(inner(p, x.sin()) + linear(x, p["square"])), ("linears",), "more",
    ),
    "a product in fp8 and what it is added to": (
        lambda p, x: seen(inner(p, x.sin()) + lin(p, x, "eight")), ("linears_fp8",), "more",
    ),
    "a rope by halves": (by_halves, ("norm_rope", "rope"), "rope"),
    "a rope of every other column": (
        lambda p, x: rotate(torch.cat([x, x], 1)[:, ::2].unflatten(1, (H, D)), turn(x)),
        ("norm_rope", "rope"), "rope",
    ),
}  # fmt: skip


def given() -> dict[str, Tensor]:
    eight = params_fp8()
    p = params() | {"eye": torch.eye(8), "square": torch.linspace(-1, 1, 64).view(8, 8)}
    return p | {"eight": eight["square"], "eight by": eight["square by"]}


def fused(graph: fx.Graph) -> set[str]:
    """What there is of fused ops, by name; "more": a linear layer with a sum."""
    found = set()
    for node in graph.nodes:
        space, _, name = str(node.target).removesuffix(".default").partition(".")
        if space == "fngraph":
            adds = {"fused_linear": 3, "fused_linear_fp8": 5}.get(name)
            found |= {name, *(["more"] if adds and node.args[adds] is not None else [])}
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_lies_otherwise_stays_as_it_lies(name: str):
    body, passes, op = CASES[name]
    toy = Model(forward_of(body), given(), {"calls": torch.zeros(1)})
    for modes in ("FULL", "NONE"):
        fast = toy.graphify(passes=passes, modes=modes, sizes=(16,), recorder="tape")
        assert op not in fused(fast.trace(toy.params, toy.state).graph.gm.graph)
        for batch in (toys.batch(3), toys.batch(4)):
            toy.check(fast, batch)


def crossed(p: Any, state: Any, batch: toys.Batch) -> Any:
    """Turned q of as many heads as columns, and these in the place of one another."""
    x = p["w"][batch.token_ids]
    q, k, v = (torch.cat([z, z], 1).unflatten(1, (4, 4)) for z in (x.sin(), x.cos(), x))
    by = turn_by(*(angle[None] for angle in angles(x)))
    q, k = (rotate(z[None], by)[0].transpose(1, 2) for z in (q, k))
    return fg.ops.attention(q, k, v, state, batch)


def test_heads_in_the_place_of_columns_are_no_rope_of_attention():
    cache = tuple(torch.zeros(4 * toys.B, toys.S, 4, 4) for _ in range(2))
    toy = Model(crossed, params(), cache)
    passes = ("norm_rope", "rope", "rope_in_attention")
    fast = toy.graphify(passes=passes, modes="FULL", sizes=(16,), recorder="tape")
    assert [one.matches for one in fast.trace(toy.params, toy.state).passes] == [0, 2, 0]
    for batch in steps()[:3]:
        toy.check(fast, batch, atol=0, rtol=0)


# --- a pass of one's own --------------------------------------------------------------------------


def copied(read: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """What reads a copy, behind a view, that lies otherwise than what it is a copy of."""

    def forward(params: Any, state: Any, batch: toys.Batch) -> Any:
        x = turned(params["w"][batch.token_ids].sin())
        y = x.clone(memory_format=torch.contiguous_format)[:, :, :2]
        return back(fg.trust_rows(read(y))), state

    return forward


def looped(x: Tensor) -> Tensor:
    return fg.fori_loop(0, 2, lambda i, y: y * 2 + x, torch.zeros_like(x))


def uncopied(graph: fx.Graph) -> fx.Graph:
    """Copies away, whatever they are for."""
    for node in list(graph.nodes):
        if node.target is aten.clone.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return graph


GIVEN = (
    r"'uncopied' gives fn_layouts\.lying\.default a tensor that lies otherwise: slice_\d has "
    r"strides \(4, 8, 1\), and what was there strides \(4\*T, 4, 1\)\. .*flexible_layout"
)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lying, GIVEN),
        (lambda x: x.as_strided((2, 1, 2), (4, 4, 1)) + x, r"gives aten\.as_strided\.default a "),
        (looped, "a tensor that lies otherwise"),
        (told, ""), (Tensor.sin, ""),
    ],
    ids=["an op", "as_strided", "a loop", "an op that takes any strides", "torch's own"],
)  # fmt: skip
def test_a_pass_gives_no_other_layout_to_what_may_go_by_it(read: Any, words: str):
    fn = copied(read)
    if words:
        with pytest.raises(PassError, match=words):
            traced(uncopied, fn=fn)
        return
    toy = Model(fn, toys.tally_params(), toys.tally_state())
    fast = toy.graphify(passes=(Pass("mine", uncopied),), modes="FULL", recorder="tape")
    assert fast.trace(toy.params, toy.state).passes[0].matches == 1
    for batch in steps()[:3]:
        toy.check(fast, batch, atol=0, rtol=0)


def kept(state: Any, batch: toys.Batch) -> Any:
    """A part of what was there before this step's counts, and state that has them."""
    before = state["seen"].clone()[:2]
    grown = state["seen"] + 1.0
    return grown.sum() * 0 + before, {"seen": grown}


@pytest.mark.parametrize("modes", toys.MODES)
def test_a_view_of_another_value_is_that_one_s_memory(modes: str):
    """Or its new value would be put there while the old one is still read."""
    fast = fg.graphify(
        kept, donate="state", stage="batch", modes=modes, limits=toys.LIMITS, sizes=(4, 16),
        passes=(uncopied,), recorder="tape",
    )  # fmt: skip
    state = {"seen": torch.zeros(3)}
    for step in range(3):
        before, state = fast(state, toys.batch(3))
        assert before.tolist() == [step] * 2
