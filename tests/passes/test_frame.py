"""The list of passes: what a pass gets, what is checked of what it returns, what is shown of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from test_graphify import Model, steps
from torch import fx

import fngraph as fg
from fngraph.errors import PassError, RowsError
from fngraph.fx.nodes import is_tensor
from fngraph.models.families import llama
from fngraph.passes import PASSES, Pass, Rewritten, call, match, name, replace
from fngraph.torch_facts.memory import storage_key

aten = torch.ops.aten
PassFn = Callable[[fx.Graph], Any]


def gated(params: Any, state: Any, batch: toys.Batch) -> Any:
    """An embedding, doubled by an attention of its own, and gated."""
    x_TE = params["w"][batch.token_ids]
    return torch.nn.functional.silu(x_TE) * torch.sin(x_TE), state


def traced(*passes: Any, fn: Any = gated, **options: Any) -> Any:
    toy = Model(fn, toys.tally_params(), toys.tally_state())
    fast = toy.graphify(passes=passes, **options)
    return fast.trace(toy.params, toy.state)


def calls(graph: Any) -> list[str]:
    nodes = graph.nodes if isinstance(graph, fx.Graph) else graph.graph.gm.graph.nodes
    return [str(n.target).removeprefix("aten.") for n in nodes if is_tensor(n) and n.args]


def cosines(graph: fx.Graph) -> fx.Graph:
    """sin(x) as cos(x - pi / 2): the same numbers, nearly, of ops that are there."""
    for node in list(graph.nodes):
        if node.target is aten.sin.default:
            with graph.inserting_before(node):
                moved = graph.call_function(aten.sub.Tensor, (node.args[0], torch.pi / 2))
                node.replace_all_uses_with(graph.call_function(aten.cos.default, (moved,)))
            graph.erase_node(node)
    return graph


def test_a_pass_of_one_s_own_in_every_mode(recorder_name, device):
    toy = Model(gated, toys.tally_params(device), toys.tally_state(device))
    for modes in toys.MODES:
        fast = toy.graphify(passes=(cosines, "silu_mul"), modes=modes, recorder=recorder_name)
        for batch in steps(device)[:4]:
            toy.check(fast, batch)
        seen = fast.steps[-1].main.executable.maker.traced
        assert [(x.one.name, x.matches) for x in seen.passes] == [("cosines", 1), ("silu_mul", 1)]
        assert calls(seen)[-1] == "fngraph.silu_mul.default"


def test_a_pass_gets_a_copy_with_values_lines_and_leaves():
    seen: dict[str, Any] = {}

    def look(graph: fx.Graph) -> fx.Graph:
        for node in graph.nodes:
            if node.op == "placeholder":
                seen[node.meta["leaf"].path] = node.meta["leaf"].role.value
            elif node.op == "call_function":
                assert "val" in node.meta and "test_frame.py" in node.meta["stack_trace"]
        graph.erase_node(next(n for n in reversed(graph.nodes) if n.op == "placeholder"))
        return graph

    with pytest.raises(PassError, match="'look' has changed the arguments of forward"):
        traced(look)
    assert seen["params['w']"] == "held" and seen["batch.token_ids"] == "staged"
    assert seen["state['total']"] == "donated"
    assert [x.matches for x in traced().passes] == []


def test_values_and_lines_of_new_nodes_are_worked_out():
    graph = traced(cosines).graph.gm.graph
    (moved,) = [n for n in graph.nodes if n.target is aten.sub.Tensor]
    (old,) = [n for n in traced().graph.gm.graph.nodes if n.target is aten.sin.default]
    assert moved.meta["val"].dtype == torch.float32 and moved.meta["val"].dim() == 2
    assert "test_frame.py" in moved.meta["stack_trace"]
    assert moved.meta["val"].stride() == old.meta["val"].stride()


def laid_out(x: torch.Tensor) -> tuple[Any, ...]:
    numbers = (*x.shape, *x.stride(), x.storage_offset())
    return x.dtype, *(n if isinstance(n, int) else n.node.expr for n in numbers)


def test_values_of_layers_that_repeat_are_those_of_their_ops():
    """Those of the second layer on are made again, not worked out: layouts, and memory shared."""
    config = llama.Config(64, 3, 4, 2, 4, 16, 24)
    params = fg.ops.lay_side_by_side(llama.init_params(config))
    toy = Model(llama.forward, params, llama.init_cache(config, 4 * toys.B, block_size=toys.S))
    fast = toy.graphify(passes=("no_ops", "side_by_side"), donate="cache")
    one = fast.trace(toy.params, toy.state)
    assert [x.matches for x in one.passes] == [0, 6]
    after = one.passes[-1].after
    assert after is not None
    for node in after.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
        made, known = node.target(*args, **kwargs), node.meta["val"]
        read = [x.meta["val"] for x in node.all_input_nodes if is_tensor(x)]
        assert laid_out(made) == laid_out(known), node.format_node()
        assert [storage_key(made) == storage_key(x) for x in read] == [
            storage_key(known) == storage_key(x) for x in read
        ], node.format_node()


def test_what_a_pass_did_is_printed_and_shown():
    one = traced("silu_mul", cosines)
    assert "passes: silu_mul x1, cosines x1" in repr(one)
    text = one.as_text()
    assert text.startswith("| pass") and "| silu_mul |       1 | silu(gate) * up |" in text
    shown = one.diff("silu_mul")
    assert "-    silu = torch.ops.aten.silu.default(index)" in shown
    assert "+    silu_mul_default = torch.ops.fngraph.silu_mul.default(index, sin)" in shown
    assert "cos" in one.diff("cosines") and "cos" not in shown
    assert traced("rope").diff("rope") == ""
    compiled = one.split().lower().compile()
    assert compiled.as_text().startswith("| pass") and "# piece 0" in compiled.as_text()
    assert all(x.before is None for x in compiled.executable.maker.traced.passes)
    with pytest.raises(PassError, match="no pass 'rope' has run; there were silu_mul, cosines"):
        one.diff("rope")


def test_matches_are_counted_and_logged(caplog):
    toy = Model(gated, toys.tally_params(), toys.tally_state())
    fast = toy.graphify(passes=("silu_mul", "rope"), modes="FULL")
    with caplog.at_level(logging.INFO, "fngraph"):
        step = fast.bind(toy.params).capture(toy.state, toys.LIMITS, recorder="tape")
    lines = [r.getMessage().partition(":")[0] for r in caplog.records]
    assert lines == ["the pass silu_mul matched 1 time", "the pass rope matched 0 times"]
    stats = step.stats
    assert stats.passes == {"silu_mul": 1} == step.stats.passes
    assert "| silu_mul |       1 |" in stats.as_text()
    assert (stats - stats.copy()).passes == {} and (stats + stats).passes == {"silu_mul": 2}
    more = {name: torch.cat([x, x]) for name, x in toy.params.items()}
    step.rebind(params=more)  # traced anew
    step(toy.state, toys.batch(3))
    assert step.stats.passes == {"silu_mul": 2}


def test_order_and_level():
    orders = [("silu_mul", cosines), (cosines, "silu_mul")]
    assert [[x.one.name for x in traced(*order).passes] for order in orders] == [
        ["silu_mul", "cosines"], ["cosines", "silu_mul"]
    ]  # fmt: skip
    of = {level: fg.graphify(gated, stage="batch", compile=level).options for level in LEVELS}
    assert {n: [x.name for x in o.passes_in_order] for n, o in of.items()} == LEVELS
    every = fg.graphify(gated, stage="batch", passes="all").options.passes
    assert every == PASSES


STOCK = ["no_ops", "fold_constants", "norm_rope", "rope", "rope_in_attention", "attention_fp8",
         "add_rms_norm_fp8", "rms_norm_fp8", "silu_mul_fp8", "quantize_once",
         "row_max", "side_by_side", "held_fp8"]  # fmt: skip
COMPILED = [*STOCK[:6], "all_reduce_rms_norm", "linears_fp8", *STOCK[6:-3], "linears",
            "paired_linears", "experts", *STOCK[-3:]]  # fmt: skip
LEVELS = {"none": [], "pieces": COMPILED, "once": COMPILED, "stock": STOCK}


def test_a_version_is_the_source_where_none_is_given():
    def other(graph: fx.Graph) -> fx.Graph:
        return graph

    keys = {Pass("x", cosines).key, Pass("x", other).key, Pass("x", cosines, "2").key}
    assert len(keys) == 3 and Pass("x", cosines).key == Pass("x", cosines).key
    assert ("x", "2") in keys


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ("silu_mul", r'expected several, or all of them. Pass passes=\("silu_mul",\)'),
        (("silu_mull",), r"no pass 'silu_mull'; there are .*\. Did you mean 'silu_mul'\?"),
        (("rope", "rope"), "passes has 'rope' twice"),
        ((3,), "3 is no pass. Pass a name, a function"),
        (7, "passes=7: expected several"),
    ],
)
def test_passes_that_mean_nothing_are_refused(passes: Any, words: str):
    with pytest.raises(PassError, match=words):
        fg.graphify(gated, stage="batch", passes=passes)


# --- what is checked ------------------------------------------------------------------------------


def root(graph: fx.Graph) -> fx.Node:
    """What `gated` returns."""
    (output,) = (n for n in graph.nodes if n.op == "output")
    return next(n for n in output.all_input_nodes if n.op != "placeholder")


def instead(op: Any, *more: Any, **kwargs: Any) -> PassFn:
    """A pass that puts op(root, ...) in the place of the root."""

    def swapped(graph: fx.Graph) -> fx.Graph:
        node = root(graph)
        with graph.inserting_after(node):
            new = graph.call_function(op, (node, *more), kwargs)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return graph

    return swapped


def returns_none(graph: fx.Graph) -> Any:
    graph.lint()


def breaks(graph: fx.Graph) -> fx.Graph:
    other = fx.Graph()
    node = root(graph)
    node.args = (other.placeholder("x"), node.args[1])
    return graph


def leaf_as(op: Any, *more: Any) -> PassFn:
    """A pass that returns op(leaf, ...) in place of a donated leaf."""

    def replaced(graph: fx.Graph) -> fx.Graph:
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        seen = next(n for n in inputs if n.meta["leaf"].path == "state['seen']")
        return _returns(graph, {seen: lambda x: graph.call_function(op, (x, *more))})

    return replaced


def _returns(graph: fx.Graph, new: dict[fx.Node, Any]) -> fx.Graph:
    (output,) = (n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        made = {x: make(x) for x, make in new.items()}
    output.args = ([made.get(x, x) for x in output.args[0]],)
    return graph


@pytest.mark.parametrize(
    ("one", "error", "words"),
    [
        (returns_none, PassError, "'returns_none' returned None. Return the graph"),
        (breaks, PassError, "'breaks' returned a graph that does not hold together"),
        (instead(aten.unsqueeze.default, 0), PassError, r"output 0 .* float32 \(T, 8\)"),
        (instead(aten._to_copy.default, dtype=torch.float64), PassError, r"float64 \(T, 8\)"),
        (instead(aten.mm.default, 3), PassError, r"aten\.mm\.default there, which cannot be"),
        (leaf_as(aten.clone.default), PassError, "other memory of an argument than it was"),
        (leaf_as(aten.as_strided.default, [toys.V], [0]), PassError, "other memory of an argument"),
        (instead(aten.cumsum.default, 0), None, ""),
        (instead(aten.flip.default, [0]), RowsError, r"after the pass 'swapped', .*flip"),
        (instead(aten.roll.default, [1], [0]), RowsError, "after the pass 'swapped'"),
    ],
)  # fmt: skip
def test_what_is_not_the_same_function_is_refused(one: PassFn, error: Any, words: str):
    if error is None:
        assert traced(one).passes[0].matches == 1
        return
    with pytest.raises(error, match=words):
        traced(one)


def test_an_error_in_a_pass_names_it():
    def broken(graph: fx.Graph) -> fx.Graph:
        raise KeyError("mine")

    with pytest.raises(KeyError) as raised:
        traced(broken)
    assert "in the pass 'broken'" in raised.value.__notes__


def test_an_op_edited_in_place_is_looked_at_anew():
    def other_dim(graph: fx.Graph) -> fx.Graph:
        for node in graph.nodes:
            if node.target is aten.flip.default:
                node.args = (node.args[0], [0])
        return graph

    def flipped(params: Any, state: Any, batch: toys.Batch) -> Any:
        return params["w"][batch.token_ids].flip(1), state

    with pytest.raises(RowsError, match="after the pass 'other_dim'"):
        traced(other_dim, fn=flipped)


def test_an_op_without_a_rule_needs_somebody_s_word():
    op = twice.default
    with pytest.raises(RowsError, match=r"after the pass 'swapped', calls fn_passes\.twice"):
        traced(instead(op))
    one = traced(Pass("mine", instead(op), keeps_rows=(op,)))
    assert "fn_passes.twice.default" in calls(one)[-1]


LIBRARY = torch.library.Library("fn_passes", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
twice = torch.ops.fn_passes.twice


def test_what_is_known_of_padding_holds_on():
    """A sum over T needs zeros in padding, of which an op of one's own says nothing."""

    def masked(params: Any, state: Any, batch: toys.Batch) -> Any:
        x_TE = params["w"][batch.token_ids]
        gate_TE = torch.where((batch.slot_mapping >= 0)[:, None], x_TE, 0)
        return (torch.nn.functional.silu(gate_TE) * gate_TE).sum(0), state

    def anew(graph: fx.Graph) -> fx.Graph:
        for node in list(graph.nodes):
            if node.target is aten.sum.dim_IntList:
                with graph.inserting_before(node):
                    node.replace_all_uses_with(graph.call_function(node.target, node.args))
                graph.erase_node(node)
        return graph

    assert [one.matches for one in traced("silu_mul", anew, fn=masked).passes] == [1, 1]
    toy = Model(masked, toys.tally_params(), toys.tally_state())
    fast = toy.graphify(passes=("silu_mul", "no_ops"), modes="FULL", sizes=(16,))
    for batch in steps()[:3]:
        toy.check(fast, batch)


def test_what_was_vouched_for_holds_on():
    def sorted_rows(params: Any, state: Any, batch: toys.Batch) -> Any:
        x_TE = params["w"][batch.token_ids]
        order_T = batch.slot_mapping.argsort()
        y_TE = x_TE[order_T]
        y_TE = torch.nn.functional.silu(y_TE) * y_TE
        y_TE = fg.trust_rows(y_TE[order_T.argsort()])
        return torch.nn.functional.silu(y_TE) * torch.sin(y_TE), state

    assert traced("silu_mul", fn=sorted_rows).passes[0].matches == 2

    def before_the_last(graph: fx.Graph) -> fx.Graph:
        *_, gate = [node for node in graph.nodes if node.target is aten.silu.default]
        with graph.inserting_before(gate):
            gate.args = (graph.call_function(aten.flip.default, (gate.args[0], [0])),)
        return graph

    with pytest.raises(RowsError, match="after the pass 'before_the_last'"):
        traced(before_the_last, fn=sorted_rows)


def test_a_fusion_of_one_s_own():
    pattern = call(aten.mul, call(aten.silu, name("x")), name("y"))

    def mine(graph: fx.Graph) -> Rewritten:
        found = [match(pattern, node) for node in list(graph.nodes)]
        op = torch.ops.fngraph.silu_mul.default
        made = [replace(graph, one, op, (one["x"], one["y"])) for one in found if one]
        return Rewritten(graph, sum(made), ("a note",))

    one = traced(Pass("mine", mine, "1", "a gate"))
    assert "mine: a note" in one.as_text() and one.passes[0].matches == 1
    assert one.graph.same_as(traced("silu_mul").graph)


# --- what `replace` puts there is asked what it gives ---------------------------------------------


def swap(old: Any, new: Any, *more: Any) -> PassFn:
    """A pass by `fg.passes.replace`: old(x) as new(x, ...)."""

    def swapped(graph: fx.Graph) -> fg.passes.Rewritten:
        pattern = fg.passes.call(old, fg.passes.name("x"))
        found = [fg.passes.match(pattern, node) for node in list(graph.nodes)]
        swaps = (fg.passes.replace(graph, one, new, (one["x"], *more)) for one in found if one)
        return fg.passes.Rewritten(graph, matches=sum(swaps))

    return swapped


def kept(state: Any, batch: toys.Batch) -> Any:
    """What was there before this step's counts, and state that has them."""
    before, grown = state["seen"].clone(), state["seen"] + 1.0
    return batch.token_ids * 1, grown.sum() * 0 + before, {"seen": grown}


@pytest.mark.parametrize("modes", toys.MODES)
def test_a_copy_that_becomes_a_view_is_the_memory_that_it_views(modes: str):
    fast = fg.graphify(
        kept, donate="state", stage="batch", modes=modes, limits=toys.LIMITS, sizes=(4, 16),
        passes=(swap(aten.clone, aten.alias.default),), recorder="tape",
    )  # fmt: skip
    state = {"seen": torch.zeros(3)}
    for step in range(3):
        _, before, state = fast(state, toys.batch(3))
        assert before.tolist() == [step] * 3


@pytest.mark.parametrize(
    ("op", "more", "error", "words"),
    [
        (aten.mean.dim, ([-1], True), PassError, r"output 0 .*\(T, 8\).* before, .*\(T, 1\)"),
        (aten.unsqueeze.default, (0,), PassError, r"output 0 .*\(1, T, 8\)"),
        (torch.ops.fngraph.silu_mul.default, (), PassError, "swapped.*silu_mul.*cannot be: .*'up'"),
        (aten.mm.default, (3,), PassError, "swapped.*aten.mm.default there, which cannot be"),
        (aten.tanh.default, (), None, ""),
    ],
)  # fmt: skip
def test_another_shape_or_a_call_that_cannot_be_is_refused(op, more, error, words):
    def alone(params: Any, state: Any, batch: toys.Batch) -> Any:
        return torch.nn.functional.silu(params["w"][batch.token_ids]), state

    with pytest.raises(error, match=words) if error else contextlib.nullcontext():
        assert traced(swap(aten.silu, op, *more), fn=alone).passes[0].matches == 1


def in_place(params: Any, state: Any, batch: toys.Batch) -> Any:
    """A sum in place, seen by a view from before, and written again."""
    x_TE = params["w"][batch.token_ids].sin()
    seen = x_TE.view(-1, 2, toys.E // 2)
    x_TE.add_(torch.exp(params["w"][batch.token_ids])).mul_(2)
    return seen.sum(1), state


def test_a_match_that_ends_with_a_write_of_what_it_reads_is_none():
    pattern = call(aten.add_.Tensor, name("x"), call(aten.exp, name("y")))

    def apart(graph: fx.Graph) -> Rewritten:
        found = [match(pattern, node) for node in list(graph.nodes)]
        made = [replace(graph, one, aten.logaddexp.default, (one["x"], one["y"]))
                for one in found if one]  # fmt: skip
        return Rewritten(graph, sum(made))

    toy = Model(in_place, toys.tally_params(), toys.tally_state())
    fast = toy.graphify(passes=(apart,), modes="FULL", sizes=(16,), recorder="tape")
    assert fast.trace(toy.params, toy.state).passes[0].matches == 0
    for batch in steps()[:2]:
        toy.check(fast, batch)
