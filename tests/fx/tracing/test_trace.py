"""One trace, with T and R symbolic, serves every batch; output dims are known as expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.core import trees
from fngraph.errors import FnGraphError, TreeError

BATCHES = {
    "N = 1": toys.batch(1),
    "N = 2": toys.batch(2),
    "T = R": toys.batch(1, 1, 1),
    "T = R, uniform": toys.decode(4, past=0),
    "T > R": toys.batch(3, 1, 5),
    "T a power of two": toys.batch(8),
    "T at the limit": toys.batch(13, 3),
    "R at the limit": toys.batch(2, 1, 4, 3),
}


def graphified(fn: Callable[..., Any], modes: str = "NONE") -> Any:
    """`fn(p, s, b)` over the toys' limits, for batches that may come in any order."""
    return fg.graphify(fn, modes=modes, donate="s", stage="b", limits=toys.LIMITS, sizes=toys.SIZES)


def shapes(p: Any, s: Any, b: Any) -> Any:
    """Outputs whose shapes are expressions in T and R, and functions of staged values."""
    T = b.token_ids.shape[0]
    x = p["w"][b.token_ids]
    return {
        "T": x.tanh(),
        "R": b.seq_lens * 2,
        "R + 1": b.query_start_loc + 1,
        "R B": b.block_tables.flip(1),
        "2*T": torch.stack([x, -x], 1).reshape(2 * T, -1),
        "2*R": b.seq_lens.repeat_interleave(2),
        "T*E": x.reshape(-1) + 0,
        "constant": p["w"][:3] * 2,
        "scalar": p["w"].sum(),
        "R T": b.query_start_loc[1:, None] > torch.arange(T),
        "T last": x.t().contiguous(),
        "T in the middle": x[None].expand(2, T, -1) * 1,
    }, s


def test_one_trace_serves_every_batch():
    calls = []

    def counted(p: Any, s: Any, b: Any) -> Any:
        calls.append("traced")
        return shapes(p, s, b)

    params, state, fast = toys.tally_params(), toys.tally_state(), graphified(counted)
    for batch in BATCHES.values():
        got, _ = fast(params, state, batch)
        want, _ = toys.bare(shapes, params, state, batch)
        toys.assert_trees(got, want)
    assert calls == ["traced"]


@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL"])
def test_outputs_are_sliced_to_the_true_rows(modes: str):
    params, state, fast = toys.tally_params(), toys.tally_state(), graphified(shapes, modes)
    for which, batch in BATCHES.items():
        fast(params, state, toys.batch(5, 5, 3, 3))  # leaves larger rows behind
        got, _ = fast(params, state, batch)
        want, _ = toys.bare(shapes, params, state, batch)
        assert trees.flatten(got)[1] == trees.flatten(want)[1], which
        for name in want:
            assert torch.equal(got[name], want[name]), (which, name)


@pytest.mark.parametrize("fn", [toys.attend, toys.tally, toys.tally_])
def test_models_from_one_trace_equal_eager(fn: Any):
    attention = fn is toys.attend
    params = toys.attention_params() if attention else toys.tally_params()
    state = toys.attention_cache() if attention else toys.tally_state()
    fast = fg.graphify(fn, modes="NONE", donate=1, stage=2, limits=toys.LIMITS)
    for batch in (toys.batch(4, 2), *BATCHES.values()):
        want, after = toys.bare(fn, params, state, batch)
        got, state = fast(params, state, batch)
        toys.assert_trees(got, want)
        toys.assert_trees(state, after)


def dims_of(fn: Callable[..., Any]) -> list[str]:
    """Dims of each output, as text."""
    traced = graphified(fn).trace(toys.tally_params(), toys.tally_state(), batch=toys.batch(2))
    return [" ".join(map(str, dims)) for dims in traced.split().pieces.output_dims]


def test_output_dims_are_expressions():
    def fn(p: Any, s: Any, b: Any) -> Any:
        x = p["w"][b.token_ids]
        T = x.shape[0]
        outs = (
            x * 1, b.seq_lens + 1, b.query_start_loc * 1, x.repeat_interleave(2, 0),
            p["w"][:5] * 1, p["w"].sum(), x.t() * 1, x.new_zeros(T, T), b.block_tables * 1,
        )  # fmt: skip
        return outs, s

    E, B = toys.E, toys.B
    assert dims_of(fn) == [
        f"T {E}", "R", "R + 1", f"2*T {E}", f"5 {E}", "", f"{E} T", "T T", f"R {B}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[::2],
        lambda x: x[: x.shape[0] // 2],
        lambda x: torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 4)),
        lambda x: (x[:, 0, None] * x[:, 0]).flatten(),
        lambda x: x.new_zeros(20 - x.shape[0], 2),
        lambda x: x.reshape(-1),
        lambda x: torch.cat([x, -x]),
        lambda x: torch.cat([x, x.new_ones(2, x.shape[1])]),
        lambda x: torch.cat([x.new_ones(2, x.shape[1]), x]),
        lambda x: x.t().reshape(-1),
    ],
    ids=[
        "stride",
        "half",
        "pad to four",
        "T squared",
        "20 - T",
        "flat",
        "two blocks",
        "rows behind",
        "rows before",
        "columns end to end",
    ],
)
def test_odd_output_dims_are_right_or_refused(fn: Callable[[Tensor], Tensor]):
    def forward(p: Any, s: Any, b: Any) -> Any:
        return fn(p["w"][b.token_ids] * 1) + 0, s

    params, state = toys.tally_params(), toys.tally_state()
    try:
        fast = graphified(forward, "FULL")
        got = [fast(params, state, batch)[0] for batch in BATCHES.values()]
    except FnGraphError:
        return
    for batch, out in zip(BATCHES.values(), got):
        assert torch.equal(out, fn(params["w"][batch.token_ids]))


def test_letters_of_the_limits_are_sizes_too():
    traced = graphified(shapes).trace(toys.tally_params(), toys.tally_state(), batch=toys.batch(2))
    leaves = {leaf.path: leaf for leaf in traced.args.leaves}
    assert str(leaves["b.block_tables"].buffer) == "int32[R, B]"
    with pytest.raises(FnGraphError, match="B"):
        fg.graphify(shapes, donate="s", stage="b").trace(
            toys.tally_params(), toys.tally_state(), batch=toys.batch(2), limits=fg.Limits(16, 4)
        )


def test_the_trace_holds_only_placeholders_ops_and_constants():
    traced = graphified(shapes).trace(toys.tally_params(), toys.tally_state(), batch=toys.batch(2))
    assert {n.op for n in traced.graph.gm.graph.nodes} <= {
        "placeholder", "call_function", "get_attr", "output"
    }  # fmt: skip
    assert "def forward" in traced.as_text()


def test_nodes_carry_the_users_line():
    traced = graphified(shapes).trace(toys.tally_params(), toys.tally_state(), batch=toys.batch(2))
    tanh = [n for n in traced.graph.gm.graph.nodes if "tanh" in str(n.target)]
    assert len(tanh) == 1 and "test_trace.py:" in tanh[0].meta["stack_trace"]


def test_a_trace_needs_no_memory():
    params, state = fg.like(toys.tally_params()), fg.like(toys.tally_state())
    traced = graphified(shapes).trace(params, state, batch=toys.batch(2))
    assert "float32[11, 8]@cpu" in repr(params["w"])
    real = graphified(shapes).trace(toys.tally_params(), toys.tally_state(), batch=toys.batch(2))
    assert traced.as_text() == real.as_text() and fg.like(params)["w"] == params["w"]


def test_an_annotated_batch_needs_no_example():
    def fn(p: Any, s: Any, b: toys.Batch) -> Any:
        return shapes(p, s, b)

    traced = graphified(fn).trace(toys.tally_params(), toys.tally_state())
    assert len(traced.split().pieces.output_dims) == 12


def test_a_batch_that_is_neither_annotated_nor_given():
    with pytest.raises(TreeError, match=r"(?s)b .*fg\.buffer|b.*annotate|b.*example"):
        graphified(lambda p, s, b: (b, s)).trace(toys.tally_params(), toys.tally_state())


class Nest(NamedTuple):
    """A pytree with everything in it."""

    a: Any
    b: Any


def test_any_pytree_goes_in_and_out():
    def fn(p: Any, s: Any, b: Any) -> Any:
        x = p.a["w"][0][b.token_ids] + p.b[1]
        assert p.b[0] is None and p.a["e"] == () and s.a is None
        return Nest({"x": [x, None]}, (x * 2,)), s._replace(b={"n": s.b["n"] + 1})

    params = Nest({"w": [torch.rand(toys.V, 2)], "e": ()}, (None, torch.rand(2)))
    state = Nest(None, {"n": torch.zeros(3)})
    batch = toys.batch(2, 1)
    want, after = toys.bare(fn, params, state, batch)
    got, back = graphified(fn)(params, state, batch)
    assert isinstance(got, Nest) and got.a["x"][1] is None and back is state
    toys.assert_trees(got, want)
    toys.assert_trees(back, after)


@pytest.mark.parametrize(
    "ambient", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda f: f.__name__
)
def test_a_trace_may_be_made_under(ambient: Any):
    params, state = toys.tally_params(), toys.tally_state()
    params["w"].requires_grad_()
    with ambient():
        traced = graphified(shapes).trace(params, state, batch=toys.batch(2))
    plain = graphified(shapes).trace(toys.tally_params(), state, batch=toys.batch(2))
    assert traced.as_text() == plain.as_text()


def test_gradients_inside_forward_are_traced():
    """`grad_and_value` inside: a training step is a pure function too."""

    def fn(p: Any, s: Any, b: Any) -> Any:
        def loss(w: Tensor) -> Tensor:
            real_T = b.slot_mapping >= 0
            return torch.where(real_T[:, None], w[b.token_ids] ** 2, 0).sum()

        grads, value = torch.func.grad_and_value(loss)(s["w"])
        return value, {"w": s["w"] - 0.1 * grads}

    params, state = {}, {"w": torch.rand(toys.V, 2)}
    batch = toys.batch(3, 2)
    want, after = toys.bare(fn, params, state, batch)
    got, back = graphified(fn)(params, state, batch)
    toys.assert_trees((got, back), (want, after), atol=1e-6, rtol=1e-6)


# --- constants ------------------------------------------------------------------------------------


def with_constants(p: Any, s: Any, b: Any) -> Any:
    """A literal that is read, one that is written to, one of another dtype, and one returned."""
    x = p["w"][b.token_ids]
    gain = torch.tensor([1.0, 2.0])
    written = torch.tensor([0.0, 5.0, 0.0])
    written[0] = 7.0
    written.add_(1)
    half = torch.tensor([1.5], dtype=torch.float64).to(torch.float32)
    return (x[:, :2] * gain + written[:2] + half, written, torch.tensor([3, 4])), s


def test_constants_are_hoisted_and_listed():
    traced = graphified(with_constants).trace(
        toys.tally_params(), toys.tally_state(), batch=toys.batch(2)
    )
    listed = {tuple(c.flatten().tolist()) for c in traced.constants.values()}
    assert listed >= {(0.0, 5.0, 0.0), (1.0, 2.0), (1.5,), (3, 4)}
    assert all(c.dtype in (torch.float32, torch.int64) for c in traced.constants.values())


@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL"])
def test_constants_are_frozen_even_where_they_are_written(modes: str):
    params, state, fast = toys.tally_params(), toys.tally_state(), graphified(with_constants, modes)
    for batch in (*BATCHES.values(), toys.batch(2)):
        want, _ = toys.bare(with_constants, params, state, batch)
        (out, written, literal), _ = fast(params, state, batch)
        toys.assert_trees((out, written, literal), want)
        written.fill_(99)  # the caller's own copies: the constants are not reached through them
        literal.fill_(99)


def test_no_constants_no_list():
    traced = graphified(shapes).trace(toys.tally_params(), toys.tally_state(), batch=toys.batch(2))
    assert dict(traced.constants) == {}
