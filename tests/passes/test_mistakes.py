"""Mistakes in a pass of one's own: each error names the pass, what is wrong, and what to write."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from test_frame import aten, calls, gated, traced
from torch import fx

import fngraph as fg
from fngraph.errors import PassError, RowsError
from fngraph.passes import DEFAULTS, PASSES, Pass, Rewritten, call, match, name, replace, why_not

SILU = aten.silu.default
PassFn = Callable[[fx.Graph], Any]


@torch.library.custom_op("fn_mistakes::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


TWICE = torch.ops.fn_mistakes.twice


def own(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def at_silu(edit: Callable[[fx.Graph, fx.Node], Any]) -> PassFn:
    """A pass that does something at each silu."""

    def edits(graph: fx.Graph) -> fx.Graph:
        for node in list(graph.nodes):
            if node.target is SILU:
                with graph.inserting_before(node):
                    edit(graph, node)
        return graph

    return edits


def to(op: Any, *more: Any) -> PassFn:
    """A pass that puts op(x, ...) in the place of silu(x), and erases nothing."""
    return at_silu(
        lambda graph, node: node.replace_all_uses_with(
            graph.call_function(op, (node.args[0], *more))
        )
    )


def itself(graph: fx.Graph) -> fx.Graph:
    (node,) = [node for node in graph.nodes if node.target is SILU]
    with graph.inserting_after(node):
        node.replace_all_uses_with(graph.call_function(aten.neg.default, (node,)))
    return graph


@at_silu
def drawing(graph: fx.Graph, node: fx.Node) -> None:
    """Noise on what silu reads, of no generator."""
    noise = graph.call_function(aten.rand_like.default, node.args)
    node.args = (graph.call_function(aten.add.Tensor, (node.args[0], noise)),)


@at_silu
def made_of_numbers(graph: fx.Graph, node: fx.Node) -> None:
    """A tanh, of what a tensor of no other is added to."""
    three = graph.call_function(aten.full.default, ([toys.E], 3.0))
    sum = graph.call_function(aten.add.Tensor, (node.args[0], three))
    node.replace_all_uses_with(graph.call_function(aten.tanh.default, (sum,)))


def too_late(graph: fx.Graph) -> fx.Graph:
    (node,) = [node for node in graph.nodes if node.target is SILU]
    node.replace_all_uses_with(graph.call_function(aten.tanh.default, node.args))
    return graph


def of_found(use: Callable[[fx.Graph, fg.passes.Found], Any]) -> PassFn:
    """A pass that does something with each silu(x) that a pattern has found."""

    def uses(graph: fx.Graph) -> fx.Graph:
        found = [match(call(aten.silu, name("x")), node) for node in list(graph.nodes)]
        for one in found:
            _ = use(graph, one) if one else None
        return graph

    return uses


def outputs(change: Callable[[Any], Any]) -> PassFn:
    def changes(graph: fx.Graph) -> fx.Graph:
        (node,) = [node for node in graph.nodes if node.op == "output"]
        node.args = change(node.args[0])
        return graph

    return changes


TENSOR = r"Write torch\.ops\.aten\.mul\.Tensor or torch\.ops\.aten\.mul\.Scalar"
SUMMED = (
    r"cannot read what the pass 'edits' has put before it.*sum\.dim_IntList gives float32 \(T\).* "
    r"in place of aten\.silu\.default.*\(T, 8\)"
)
OUTPUT = "has changed the output of forward, which is one node of several values"


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (to(aten.tanh), r"tanh there, which is no op .*Write torch\.ops\.aten\.tanh\.default$"),
        (to(aten.mul, 2.0), f"torch.ops.aten.mul there.*{TENSOR}$"),
        (to(torch.mul, 2.0), f"torch.mul there.*{TENSOR}$"),
        (to(operator.mul, 2.0), f"mul there.*{TENSOR}$"),
        (to(torch.nn.functional.silu), r"silu there.*Write torch\.ops\.aten\.silu\.default$"),
        (to(own), "own there.*Write an op of your own, torch.library.custom_op"),
        (to(TWICE), r"Write torch\.ops\.fn_mistakes\.twice\.default$"),
        (to(lambda x: x), "<lambda> there"),
        (to(aten.add.Tensor, torch.ones(1)), "gives torch.ops.aten.add.Tensor a tensor that is"),
        (at_silu(lambda graph, node: node.replace_all_uses_with(
            graph.call_method("tanh", node.args))), r"call_method of 'tanh' there.*tanh\.default"),
        (at_silu(lambda graph, node: setattr(node, "args", ())), "silu.default there, which canno"),
        (to(aten.sum.dim_IntList, [-1]), SUMMED),
        (to(aten._to_copy.default), None),
        (to(aten.div.Tensor, 2.0), None),
        (itself, r"read itself: .*delete_user_cb=.*\n\+    neg_default = .*\n-    mul.*\n\+"),
        (too_late, "Insert a node before what reads it"),
        (outputs(lambda values: (values[0],)), OUTPUT),
        (lambda graph: fx.GraphModule({}, graph), r"returned GraphModule\. Return its \.graph"),
        (lambda graph: (graph, 1), "returned tuple. Return the graph"),
        (lambda graph: Rewritten(graph, None), "says that it matched None times. Count them"),
        (lambda graph: Rewritten(graph, 0, "text"), r"notes='text': expected several texts"),
        (lambda graph: Rewritten(graph, 0, None), r"notes=None: expected several texts"),
        (drawing, r"random ops of forward: aten\.rand_like\.default new"),
        (made_of_numbers, None),
        (of_found(lambda graph, one: one["y"]), "test_mistakes.py.*no name or label 'y'; it has x"),
        (of_found(lambda graph, one: replace(graph, one, SILU, (one["x"],), "y")), "label 'y'"),
        (of_found(lambda graph, one: replace(graph, one, SILU, one["x"])), "index: pass several"),
        (of_found(lambda graph, one: replace(graph, one, twice, (one["x"],))), r"ops\.fn_mistakes"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_what_to_write(one: PassFn, words: str | None):
    if words is None:
        assert SILU not in [n.target for n in traced(one).graph.gm.graph.nodes]
        return
    with pytest.raises(PassError) as raised:
        traced(one)
    said = str(raised.value)
    assert re.search(words, said, re.DOTALL), said
    assert "the pass '" in said and len(said) < 900 and "graph():" not in said


def test_fx_itself_says_it_without_the_graph():
    with pytest.raises(ValueError, match="has type str but a Callable") as raised:
        traced(to("tanh"))
    assert "graph():" not in str(raised.value) and "name = 'tanh'" in str(raised.value)
    assert raised.value.__notes__[0] == "in the pass 'edits'"
    assert "torch.ops.aten.tanh.default" in raised.value.__notes__[1]


def test_what_was_replaced_and_not_erased_is_not_computed():
    assert calls(traced(to(aten.tanh.default))) == calls(traced(to(aten.tanh.default), "no_ops"))
    assert "silu.default" not in calls(traced(to(aten.tanh.default)))

    def for_nothing(graph: fx.Graph) -> Rewritten:
        (output,) = [node for node in graph.nodes if node.op == "output"]
        with graph.inserting_before(output):
            graph.call_function(aten.neg.default, (output.args[0][0],))
        return Rewritten(graph, 1)

    (one,) = traced(for_nothing).passes
    assert one.matches == 0 and one.diff() == ""


def test_a_pass_that_changed_something_has_matched():
    def silent(graph: fx.Graph) -> Rewritten:
        return Rewritten(to(aten.tanh.default)(graph), 0)

    assert traced(silent).passes[0].matches == 1


def test_another_dtype_is_told_where_it_begins():
    def wide(params: Any, state: Any, batch: toys.Batch) -> Any:
        return torch.sin(torch.nn.functional.silu(params["w"][batch.token_ids])), state

    words = r"output 0 .*float64 .* after\. .*_to_copy\.default gives float64 \(T, 8\).*silu"
    with pytest.raises(PassError, match=words):
        traced(at_silu(lambda graph, node: node.replace_all_uses_with(graph.call_function(
            aten._to_copy.default, node.args, {"dtype": torch.float64}))), fn=wide)  # fmt: skip


def test_rows_of_an_op_of_one_s_own_are_vouched_for_by_the_pass():
    with pytest.raises(RowsError, match=r"keeps_rows=\(torch\.ops\.fn_mistakes\.twice\.default,\)"):
        traced(to(TWICE.default))
    one = Pass("mine", to(TWICE.default), keeps_rows=(TWICE.default,))
    assert "fn_mistakes.twice.default" in calls(traced(one))


# --- the list -------------------------------------------------------------------------------------


def two(graph: fx.Graph, op: Any) -> fx.Graph:
    return graph


def mine(graph: fx.Graph) -> fx.Graph:
    return graph


@pytest.mark.parametrize("level", DEFAULTS)
def test_the_level_s_own_stand_where_the_dots_are(level: str):
    def asked(passes: Any) -> list[str]:
        made = fg.graphify(gated, stage="batch", compile=level, passes=passes).options
        return [one.name for one in made.passes_in_order]

    own = list(DEFAULTS[level])
    assert asked((mine, ...)) == ["mine", *own] and asked((..., mine)) == [*own, "mine"]
    assert asked(...) == asked(None) == own and asked(()) == []
    assert asked((print, functools.partial(two, op=SILU), lambda *graphs: graphs[0]))
    assert asked(["all", mine]) == [*(one.name for one in PASSES), "mine"]


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ("linear", r"passes=\(\.\.\., my_pass\)\. Did you mean 'linears'\?"),
        ("ALL", r"Did you mean 'all'\?"),
        (mine, r"expected several, passes=\(mine,\), or none, \(\)"),
        ((mine, mine), "has 'mine' twice. Leave one out"),
        ((..., "no_ops"), "has 'no_ops' twice"),
        ((PASSES, mine), r"several in one place\. Unpack them: passes=\(\*PASSES, my_pass\)"),
        ((type("Mine", (), {}),), "Mine is a class. Pass an object of it"),
        ((lambda: 1,), "'<lambda>' cannot be called with a graph: too many .*def mine\\(graph\\)"),
        ((lambda graph, op: graph,), "cannot be called with a graph: missing .* argument: 'op'"),
    ],
)
def test_lists_that_mean_nothing(passes: Any, words: str):
    with pytest.raises(PassError, match=words):
        fg.graphify(gated, stage="batch", compile="pieces", passes=passes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: Pass(None, mine), r'Pass\(None, mine\): expected a name and a function'),  # type: ignore[arg-type]
        (lambda: Pass(mine, "x"), "expected a name and a function"),  # type: ignore[arg-type]
        (lambda: Pass("x", mine, 2), "version=2 of the pass 'x': expected a text"),  # type: ignore[arg-type]
        (lambda: Pass("x", mine, keeps_rows=TWICE.default), "expected several ops"),  # type: ignore[arg-type]
        (lambda: Pass("x", mine, keeps_rows=(TWICE,)), r"Write torch\.ops\.fn_mistakes\.twice\.d"),
        (lambda: call("mul"), f"'mul' is no op with its overload. {TENSOR}"),
        (lambda: call(torch.mul), f"torch.mul is no op with its overload. {TENSOR}"),
        (lambda: call(aten.sum, name("x")), r"aten\.sum is no op .*dim_IntList or .*default"),
        (lambda: call(aten.silu, "x"), r"takes a tensor as self, .*Write name\('x'\)"),
        (lambda: call(aten.silu, aten.tanh), r"Write call\(torch\.ops\.aten\.tanh, \.\.\.\)"),
        (lambda: call(aten.silu, name("x"), 2), "takes 1 argument, and the pattern has 2"),
        (lambda: call(aten.gelu, name("x"), aproximate="tanh"), "Did you mean 'approximate'"),
    ],
)  # fmt: skip
def test_a_pass_and_a_pattern_are_looked_at_where_they_are_written(given: Any, words: str):
    with pytest.raises(PassError, match=words):
        given()


# --- what one sees --------------------------------------------------------------------------------


def test_diff_takes_what_was_in_the_list():
    swap = to(aten.tanh.default)
    for given in (swap, Pass("mine", swap), functools.partial(swap)):
        made = traced(given)
        shown = made.diff(given)
        assert "tanh" in shown and shown == made.diff(made.passes[0].one.name)
    with pytest.raises(PassError, match=r"no pass 'mine' has run; .* passes=\(\.\.\., mine\)\)"):
        traced(swap).diff(mine)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (call(aten.mul, call(aten.silu, name("x")), name("y")), "^$"),
        (call(aten.mul, call(aten.silu, name("x")), name("x")), "'x' is index in one place and si"),
        (call(aten.mul, call(aten.tanh, name("x")), name("y")), "aten.tanh.default is looked for,"),
        (call(aten.silu, call(aten.index, name("w"), [name("i"), name("j")])), "2 values are"),
        (call(aten.silu, call(aten.silu, name("x"))), "and it is aten.index.Tensor .*test_frame"),
        (call(aten.mm, name("x"), name("y")), "no node calls aten.mm.default"),
        (call(aten.sum.dim_IntList, name("x"), [0]), "no node calls aten.sum.dim_IntList"),
        (call(aten.silu, call(aten.index, name("w"), name("i"))), "index is read by sin .* as w"),
    ],
)  # fmt: skip
def test_a_pattern_that_matches_nowhere_says_why(pattern: Any, words: str):
    graph = traced().graph.gm.graph
    assert re.search(words, why_not(pattern, graph)), why_not(pattern, graph)
    assert (why_not(pattern, graph) == "") == any(match(pattern, node) for node in graph.nodes)


def test_a_check_runs_passes_as_graphify_does():
    params, state, batch = toys.tally_params(), toys.tally_state(), toys.batch(3)
    check = functools.partial(fg.check, gated, params, state, batch, donate=1, stage=2)
    assert check(limits=toys.LIMITS, passes=(to(aten.tanh.default),))
    assert check(limits=toys.LIMITS, compile="pieces", passes=(..., mine))
    (error,) = check(limits=toys.LIMITS, passes=(to(aten.tanh),)).errors
    assert isinstance(error, PassError) and "torch.ops.aten.tanh.default" in str(error)

    def broken(graph: fx.Graph) -> fx.Graph:
        raise KeyError("mine")

    (error,) = check(limits=toys.LIMITS, passes=(broken,)).errors
    assert str(error).endswith("ends here, (KeyError: 'mine', in the pass 'broken')")
    with pytest.raises(PassError, match="Did you mean 'linears'"):
        check(passes="linear")
