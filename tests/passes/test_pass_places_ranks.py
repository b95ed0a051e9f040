"""Where rows are shared out over processes, and products go with their sums and gathers; beside it,
where what looks alike is another thing. What is left is run by two threads in place of processes,
and gives what `forward` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import linear

import fngraph as fg
from fngraph.core.trees import flatten
from fngraph.models.families.layers import rms_norm
from tests.ranks.simulated import GROUP, make_world

pytestmark = pytest.mark.usefixtures("one_thread")
PASSES = ("sequence_parallel", "matmul_reduce_scatter", "all_gather_matmul")
TP = fg.Axis("tp", 2, 0, GROUP)
T, E = 5, 8
Body = Callable[[dict[str, Tensor], dict[str, Tensor], Tensor], Any]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def params(rank: int) -> dict[str, Tensor]:
    """Products of one's own, and what is alike."""
    own = {name: drawn(10 * rank + i, E, E) for i, name in enumerate("wab")}
    ids = torch.tensor([1, 4, 0])
    return own | {"g": drawn(90, E), "bias": drawn(91, E), "ids": ids, "narrow": ids.int()}


def state(rank: int) -> dict[str, Tensor]:
    return {"w": drawn(50 + rank, E, E)}


def added(h: Tensor, x: Tensor) -> Tensor:
    return fg.all_reduce(h, TP) + x


def norm(p: Any, x: Tensor) -> Tensor:
    return rms_norm(x, p["g"], 1e-5)


# --- products before a sum ------------------------------------------------------------------------


def summed(h: Callable[[Any, Any, Tensor], Tensor]) -> Body:
    return lambda p, s, x: norm(p, added(h(p, s, x), x))


def input_is_written(p: Any, s: Any, x: Tensor) -> Any:
    y = x.sin()
    h = linear(y, p["w"])
    y.add_(1)
    return norm(p, added(h, x)), y


def input_is_written_before(p: Any, s: Any, x: Tensor) -> Any:
    return norm(p, added(linear(x.sin().add_(1), p["w"]), x))


def input_is_written_behind(p: Any, s: Any, x: Tensor) -> Any:
    y = x.sin()
    n = norm(p, added(linear(y, p["w"]), x))
    y.add_(1)
    return n.sin(), y


def weight_is_written(p: Any, s: Any, x: Tensor) -> Any:
    h = linear(x, s["w"])
    s["w"].add_(1)
    return norm(p, added(h, x))


def own_is_added(y: Callable[[Tensor], Tensor]) -> Body:
    def body(p: Any, s: Any, x: Tensor) -> Any:
        h = linear(x, p["w"])
        return norm(p, added(h, y(h)))

    return body


def product_is_read(p: Any, s: Any, x: Tensor) -> Any:
    h = linear(x, p["w"])
    return norm(p, added(h, x)), h.sin()


def product_is_returned(p: Any, s: Any, x: Tensor) -> Any:
    h = linear(x, p["w"])
    return norm(p, added(h, x)), h


# --- products behind a gather ---------------------------------------------------------------------


def gathered(then: Callable[[Any, Any, Tensor], Any]) -> Body:
    return lambda p, s, x: then(p, s, norm(p, added(x * 2, x)))


def weight_is_written_between(p: Any, s: Any, n: Tensor) -> Any:
    turned = s["w"].t()
    first = linear(n, p["a"])
    s["w"].add_(1)
    return first, n @ turned


def weight_is_written_before(p: Any, s: Any, x: Tensor) -> Any:
    turned = s["w"].t()
    s["w"].add_(1)
    return norm(p, added(x * 2, x)) @ turned


# --- the sum itself -------------------------------------------------------------------------------


def totals(then: Callable[[Any, Tensor, Tensor], Any]) -> Body:
    """What is done with a sum of which there is a norm too."""

    def body(p: Any, s: Any, x: Tensor) -> Any:
        total = added(x * 2, x)
        return norm(p, total).sin(), then(p, total, x)

    return body


def chooses(*which: str) -> Body:
    return totals(lambda p, total, x: [total[p[name]].sin() for name in which])


def rows_and_all(p: Any, total: Tensor, x: Tensor) -> Any:
    return total[p["ids"]].sin(), total.cos()


def viewed(p: Any, total: Tensor, x: Tensor) -> Any:
    total.view(-1).add_(1)
    return norm(p, added(x.sin(), total))


class Case(NamedTuple):
    """A function, and what passes make of it.

    Attributes:
        matches: of each pass.
        summed: ops whose values are summed over processes as they are, in order.
    """

    body: Body
    matches: tuple[int, int, int]
    summed: tuple[str, ...] = ()


CASES: dict[str, Case] = {
    # products before a sum
    "a product": Case(summed(lambda p, s, x: linear(x, p["w"])), (1, 1, 0)),
    "by a weight of state": Case(summed(lambda p, s, x: linear(x, s["w"])), (1, 1, 0)),
    "by a weight that is computed": Case(summed(lambda p, s, x: linear(x, p["w"] * 2)), (1, 0, 0)),
    "by a weight that lies the other way": Case(summed(lambda p, s, x: x @ p["w"]), (1, 0, 0)),
    "with a bias": Case(summed(lambda p, s, x: linear(x, p["w"], p["bias"])), (1, 0, 0)),
    "no product": Case(summed(lambda p, s, x: x.sin()), (1, 0, 0)),
    "an input that is written": Case(input_is_written, (1, 0, 0)),
    "an input that was written before": Case(input_is_written_before, (1, 1, 0)),
    "an input that is written behind": Case(input_is_written_behind, (1, 1, 0)),
    "a weight that is written": Case(weight_is_written, (1, 0, 0)),
    "a product that others read": Case(product_is_read, (1, 0, 0)),
    "a product that is returned": Case(product_is_returned, (1, 0, 0)),
    # products behind a gather
    "one behind": Case(gathered(lambda p, s, n: linear(n, p["a"])), (1, 0, 1)),
    "two behind": Case(gathered(lambda p, s, n: (linear(n, p["a"]), linear(n, p["b"]))), (1, 0, 1)),
    "before and behind": Case(
        lambda p, s, x: linear(norm(p, added(linear(x, p["w"]), x)), p["a"]), (1, 1, 1)
    ),
    "one by a weight that is computed": Case(
        gathered(lambda p, s, n: (linear(n, p["a"]), linear(n, p["b"] * 2))), (1, 0, 0)
    ),
    "one by what others have": Case(
        gathered(lambda p, s, n: (linear(n, p["a"]), p["b"][:, :T] @ n)), (1, 0, 0)
    ),
    "rows that others read": Case(
        gathered(lambda p, s, n: (linear(n, p["a"]), n.sin())), (1, 0, 0)
    ),
    "rows that are returned": Case(gathered(lambda p, s, n: (linear(n, p["a"]), n)), (1, 0, 0)),
    "a weight that is written between": Case(gathered(weight_is_written_between), (1, 0, 0)),
    "a weight that was written before": Case(weight_is_written_before, (1, 0, 1)),
    # the sum itself
    "a sum that nobody reads": Case(totals(lambda p, total, x: x * 3), (1, 0, 0)),
    "a sum that is read": Case(totals(lambda p, total, x: total.sin()), (1, 0, 0), ("getitem",)),
    "a sum that the next one adds": Case(
        totals(lambda p, total, x: norm(p, added(x.sin(), total))), (2, 0, 0)
    ),
    "a sum that is summed again": Case(
        totals(lambda p, total, x: norm(p, added(total, x))), (2, 0, 0), ("getitem",)
    ),
    "a sum that is summed again and added": Case(
        totals(lambda p, total, x: norm(p, added(total, total))), (2, 0, 0), ("getitem",)
    ),
    "a sum that is written through a view": Case(totals(viewed), (2, 0, 0), ("getitem",)),
    "a product that is added to its sum": Case(
        own_is_added(lambda h: h), (0, 0, 0), ("mm.default",)
    ),
    "what is computed of a product": Case(own_is_added(torch.sin), (0, 0, 0), ("mm.default",)),
    "rows of a sum": Case(chooses("ids"), (1, 0, 0), ("index.Tensor",)),
    "rows of a sum, twice": Case(chooses("ids", "ids"), (1, 0, 0), ("index.Tensor",) * 2),
    "rows of a sum, by other integers": Case(chooses("narrow"), (1, 0, 0), ("getitem",)),
    "rows of a sum, and all": Case(totals(rows_and_all), (1, 0, 0), ("getitem",)),
    "elements of a sum": Case(
        totals(lambda p, total, x: total[p["ids"], p["ids"]].sin()), (1, 0, 0), ("getitem",)
    ),
    "columns of a sum": Case(
        totals(lambda p, total, x: total[:, p["ids"]].sin()), (1, 0, 0), ("getitem",)
    ),
}  # fmt: skip


def traced(body: Body, held: dict[str, Tensor], passes: tuple[str, ...] = PASSES) -> Any:
    def forward(params: Any, state: Any, x: Tensor) -> Any:
        return body(params, state, x), state

    fast = fg.graphify(forward, stage="x", modes="FULL", recorder="tape", donate="state",
                       passes=passes)  # fmt: skip
    return fast.trace(held, state(0), batch=drawn(99, T, E))


def summed_as_they_are(graph: fx.Graph) -> tuple[str, ...]:
    op = torch.ops.fngraph.all_reduce.default
    read: list[Any] = [node.args[0] for node in graph.nodes if node.target is op]
    return tuple(getattr(x.target, "__name__", "") for x in read)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_shared_out_where_they_can_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, matches, whole = CASES[name]
    found = traced(body, params(0))
    assert tuple(one.matches for one in found.passes) == matches
    assert summed_as_they_are(found.graph.gm.graph) == whole
    world, x = make_world(monkeypatch, TP.size), drawn(99, T, E)
    wanted = world.run(lambda rank: flatten((body(params(rank), own := state(rank), x), own))[0])

    def run(rank: int) -> Any:
        return fx.Interpreter(found.graph.gm).run(*flatten((params(rank), state(rank), x))[0])

    for got, want in zip(world.run(run), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_weights_side_by_side_go_at_once(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one product; others of the same rows as products of their own, in any order."""

    def body(p: Any, s: Any, x: Tensor) -> Any:
        n = norm(p, added(x.sin(), x))
        made = {name: linear(n, p[name]) for name in (order[0], "w", order[1])}
        return made["a"].sin() + made["b"], made["w"]

    laid = [fg.ops.lay_side_by_side(params(rank), [("a", "b")]) for rank in range(TP.size)]
    found = traced(body, laid[0])
    assert tuple(one.matches for one in found.passes) == (1, 0, 1)
    op = torch.ops.fngraph.all_gather_matmul.default
    (node,) = (node for node in found.graph.gm.graph.nodes if node.target is op)
    assert node.args[2] == [2, 1]
    world, x = make_world(monkeypatch, TP.size), drawn(99, T, E)
    wanted = world.run(lambda rank: flatten(body(laid[rank], None, x))[0])

    def run(rank: int) -> Any:
        return fx.Interpreter(found.graph.gm).run(*flatten((laid[rank], state(rank), x))[0])

    for got, want in zip(world.run(run), wanted, strict=True):
        for one, other in zip(got[: len(want)], want, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["a product", "two behind", "before and behind"])
def test_products_are_counted_as_without_passes(name: str) -> None:
    """What a model of launches goes by."""

    def products(passes: tuple[str, ...]) -> int:
        low = traced(CASES[name].body, params(0), passes).split().lower()
        sizes = {"T": T, "R": 1}
        works = [w for part in low.executable(()).count(sizes, sizes, None) for w in part.works]
        return sum(w.flops for w in works if w.kind == "product")

    assert products(PASSES) == products(()) > 0
