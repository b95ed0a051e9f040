"""What a rule says of padding by its place, bits or class does not outlive a move of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys
from torch import Tensor

import fngraph as fg
from fngraph.errors import RowsError
from fngraph.fx.rows import rules
from fngraph.torch_facts.schemas import is_view

INF = float("inf")


@fg.struct
class Batch:
    """Integers with each kind of padding."""

    ids: Tensor = fg.buffer("T", "int64", min=0)
    slot: Tensor = fg.buffer("T", "int64", pad=-1)
    bytes: Tensor = fg.buffer("T", "uint8")
    x: Tensor = fg.buffer("T 4", "float32")
    starts: Tensor = fg.buffer("R + 1", "int64", pad="stride")
    spec: fg.BatchSpec = fg.host()


BATCH = Batch(
    torch.arange(3), torch.arange(3), torch.ones(3, dtype=torch.uint8), torch.rand(3, 4),
    torch.tensor([0, 1, 3]), fg.BatchSpec(3, 2),
)  # fmt: skip


def softmax(b: Any) -> Tensor:
    return torch.softmax(torch.where(b.slot[:, None] >= 0, b.x, -INF), 0)


def tokens(b: Any) -> Tensor:
    return torch.arange(b.x.shape[0])


def by_requests(b: Any) -> Tensor:
    """(T, R), zero for padding of T, but not of R."""
    real = torch.where(b.slot[:, None] >= 0, b.x[:, :1], 0.0)
    return real.expand(-1, b.starts.shape[0] - 1)


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "zeros of T as zeros of R": lambda w, b: torch.unbind_copy(
        by_requests(b).expand(2, -1, -1))[1].sum(1),
    "the same of a view": lambda w, b: by_requests(b).expand(2, -1, -1).unbind()[1].sum(1),
    "a softmax that is overwritten": lambda w, b: softmax(b).copy_(b.x + 1).sum(0),
    "a softmax as bools": lambda w, b: softmax(b).bool().sum(0),
    "a softmax without its first row": lambda w, b: softmax(b)[1:].sum(0),
    "tokens that are counted twice": lambda w, b: torch.zeros_like(b.x[:, :2]).reshape(-1)
    .index_fill(0, tokens(b)[:, None].expand(-1, 2).reshape(-1), 1.0),
    "tokens from the second on": lambda w, b: torch.searchsorted(
        b.starts, torch.arange(b.x.shape[0] + 1)[1:], right=True),
    "every other token": lambda w, b: torch.searchsorted(
        b.starts, torch.arange(2 * b.x.shape[0])[::2], right=True),
    "tokens that are overwritten": lambda w, b: torch.searchsorted(
        b.starts, tokens(b).copy_(b.ids + 100), right=True),
    "an eye that is not square": lambda w, b: torch.eye(b.x.shape[0], 3).sum(0),
    "an eye of requests by tokens": lambda w, b: torch.eye(
        b.starts.shape[0] - 1, b.x.shape[0]).sum(0),
    "logsumexp of bytes": lambda w, b: torch.logsumexp(b.bytes, 0),
    "a class that is none": lambda w, b: F.nll_loss(b.x, b.slot, reduction="none"),
    "heads as wide as there are tokens": lambda w, b: F.scaled_dot_product_attention(
        *[b.x.t().contiguous()[None, None]] * 3).sum(-2),
    "a mask of no rows beside an index": lambda w, b: torch.zeros(2, 12).index_put(
        (torch.tensor([True, False]), b.ids), torch.tensor(1.0)),
    "as many rows as a mask of no rows has": lambda w, b: torch.zeros(12, 4).index_put(
        (torch.arange(12) > 8,), torch.where(b.slot[:, None] >= 0, b.x, 0.0)),
    "a mask of bytes": lambda w, b: b.x.index_put(
        ((b.slot >= 0).to(torch.uint8),), b.x * 0, accumulate=True),
    "remainders of the dividend's sign": lambda w, b: b.x[torch.fmod(b.slot, 4)],
    "halves of what may be negative": lambda w, b: b.x[b.slot >> 1],
    "what is vouched for, or 5": lambda w, b: b.x[
        torch.where(b.ids > 2, fg.trust_rows(b.ids), 5) - 5],
    "what is vouched for, at most 5": lambda w, b: b.x[
        torch.minimum(fg.trust_rows(b.ids), torch.tensor(5)) - 5],
    "a softmax in rows of another length": lambda w, b: softmax(b).view(-1, 2).sum(0),
    "a loss of no class, for its shape": lambda w, b: torch.zeros_like(
        F.nll_loss(b.x, b.slot)),
    "chances that are padding in two dims": lambda w, b: torch.bernoulli(
        (b.slot[:, None] == b.slot).float()),
    "a norm over tokens": lambda w, b: torch.ops.fngraph.rms_norm(
        b.x.t().contiguous(), torch.ones_like(b.x[:, 0]), 1e-5, False),
    "norms over tokens, rounded": lambda w, b: torch.ops.fngraph.rms_norm_fp8(
        b.x.t().contiguous(), torch.ones_like(b.x[:, 0]), 1e-5, False, [w[0, 0]]).float(),
    "a gate over tokens, rounded": lambda w, b: torch.ops.fngraph.silu_mul_fp8_rows(
        b.x.t().contiguous(), b.x.t().contiguous())[0].float(),
    "products over tokens": lambda w, b: torch.ops.fngraph.linear_side_by_side(
        (b.x + 1).t().contiguous(), [(b.x + 1).t().contiguous()], []),
    "weights that nobody wrote": lambda w, b: (
        torch.empty_like(w)[b.ids.clamp(max=3)] * (b.slot >= 0)[:, None]).sum(0),
    "some columns of all but the last": lambda w, b: (
        lambda y: (y[:-1][:, :1].fill_(9), y))(b.x[:, :1] + b.starts[None, 1:])[1],
    "bytes and a wider number": lambda w, b: torch.where(
        ((b.bytes + torch.tensor([250], dtype=torch.uint8)) == 250)[:, None], b.x + 1, 0.0).sum(0),
}  # fmt: skip
KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "halves of numbers": lambda w, b: b.x[b.ids >> 1] + b.x[(b.ids * 1).__irshift__(1)],
    "remainders by a divisor above 0": lambda w, b: w[b.slot % 4],
    "a softmax of some columns": lambda w, b: softmax(b)[:, 1:].sum(0),
    "a square eye": lambda w, b: torch.eye(b.x.shape[0]) @ torch.where(
        b.slot[:, None] >= 0, b.x, 0.0),
    "tokens as a column": lambda w, b: torch.searchsorted(
        b.starts, tokens(b)[:, None], right=True),
    "a class that there is": lambda w, b: F.nll_loss(b.x, b.ids.clamp(max=3), reduction="none"),
    "all but the last, by an op that returns nothing": lambda w, b: toys.double(b.x[:-1]),
}  # fmt: skip


def trace(fn: Callable[[Any, Any], Any]) -> Any:
    """The stage; with `fn(weights, batch)` as the output."""
    fast = fg.graphify(
        lambda w, b: fn(w, b) * 1, stage="b", limits=fg.Limits(8, 4),
        generators=(torch.default_generator,),
    )  # fmt: skip
    return fast.trace(torch.ones(12, 4), batch=BATCH)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_it_is_refused(name: str) -> None:
    with pytest.raises(RowsError, match="test_rows_moved"):
        trace(REFUSED[name])


aten = torch.ops.aten
pairs = torch.view_as_complex
VIEWS: dict[str, Callable[[Any], Any]] = {
    "alias": aten.alias,
    "_reshape_alias": lambda x: aten._reshape_alias(x, x.shape, x.stride()),
    "chunk": lambda x: x.chunk(2, 1)[1], "contiguous": Tensor.contiguous, "detach": Tensor.detach,
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2), "expand": lambda x: x.expand(1, *x.shape),
    "imag": lambda x: pairs(x).imag, "real": lambda x: pairs(x).real, "t": lambda x: x[:, 0].t(),
    "narrow": lambda x: x.narrow(2, 1, 1),
    "numpy_T": lambda x: x[:, 0].T, "permute": lambda x: x.permute(1, 2, 0),
    "reshape": lambda x: x.reshape(-1, 4), "resolve_conj": Tensor.resolve_conj,
    "resolve_neg": Tensor.resolve_neg, "select": lambda x: x[:, 1], "slice": lambda x: x[:, 1:],
    "split": lambda x: x.split(1, 1)[0], "split_with_sizes": lambda x: x.split([1, 1], 2)[1],
    "squeeze": lambda x: x[:, :1].squeeze(1), "transpose": lambda x: x.mT,
    "unbind": lambda x: x.unbind(2)[0], "unfold": lambda x: x.unfold(1, 2, 1),
    "unsqueeze": lambda x: x[None], "view": lambda x: x.view(-1, 4), "view_as_complex": pairs,
    "view_as_real": lambda x: torch.view_as_real(pairs(x)),
}  # fmt: skip


def test_each_view_that_has_a_rule_is_tried() -> None:
    packets = [getattr(aten, name) for name in rules._RULES if hasattr(aten, name)]
    views = {p.__name__ for p in packets if any(is_view(getattr(p, o)) for o in p.overloads())}
    assert set(VIEWS) == views - {"_conj", "_neg_view", "lift_fresh"}  # which torch writes itself


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_part_is_no_more_than_one(name: str) -> None:
    """All but the last token are written through it, of a key more than there are."""

    def written(b: Any, whole: bool) -> Tensor:
        y = (b.x + 0).view(-1, 2, 2)
        VIEWS[name](y if whole else y[:-1]).fill_(9)
        return y

    with pytest.raises(RowsError, match=r"writes as many .* into memory that has more"):
        trace(lambda w, b: written(b, whole=False))
    trace(lambda w, b: written(b, whole=True))


WRITTEN: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda c, b: c.index_put((b.ids,), 1 / b.x[:1]),
    "rows of a view": lambda c, b: c.view(4, 12).view(12, 4).index_put((b.ids,), 1 / b.x[:1]),
    "rows of what is made of it": lambda c, b: (c * 2).index_add(0, b.ids[:1], 1 / b.x[:1]),
    "one row": lambda c, b: c.select_scatter(1 / b.x[0], 0, 3),
    "a part of it, in place": lambda c, b: (c[:3].add_(1), c)[1],
    "a running maximum": lambda c, b: torch.maximum(c, b.x[:1] * 1),
    "a running maximum, in place": lambda c, b: c.clamp_(min=b.x[:1]),
    "rows that a mask chooses": lambda c, b: torch.where(torch.arange(12)[:, None] > 3, c, b.x[:1]),
    "another value": lambda c, b: c.copy_(1 / b.x[:1]),
    "another value, and a sum": lambda c, b: c.copy_(1 / b.x[:1]).add_(1),
    "nothing, here": lambda c, b: c,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_state_that_is_written_by_rows_is_not_taken_to_be_finite(name: str) -> None:
    """For one request's row may be NaN, which padding of another one's batch looks up."""

    def forward(c: Any, b: Any) -> Any:
        got = torch.where(b.slot[:, None] >= 0, b.x, 0.0).t() @ c[b.ids]
        return got, WRITTEN[name](c, b)

    fast = fg.graphify(forward, donate="c", stage="b", limits=fg.Limits(8, 4))
    with pytest.raises(RowsError, match="takes mm over T"):
        fast.trace(torch.ones(12, 4), batch=BATCH)


TRAINED: dict[str, Callable[[Any, Any], Any]] = {
    "a step": lambda w, grad: w - grad,
    "in place": lambda w, grad: w.sub_(grad, alpha=0.1),
    "decayed and clipped": lambda w, grad: w.mul(0.9).addcdiv(grad, grad.abs() + 1).clamp(-9, 9),
    "one that may be left out": lambda w, grad: torch.where(grad.sum().isfinite(), w - grad, w),
    "of several at once": lambda w, grad: torch._foreach_add([w], [grad])[0],
}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_are_trained_are_taken_to_be_finite(name: str, frozen: bool) -> None:
    """And others beside them that are not."""

    def forward(w: Any, b: Any) -> Any:
        x = torch.where(b.slot[:, None] >= 0, b.x, 0.0)
        looked_up = w["frozen" if frozen else "trained"]
        grad = torch.zeros_like(looked_up).index_add(0, torch.arange(4), x.t() @ looked_up[b.ids])
        return x.sum(), {**w, "trained": TRAINED[name](w["trained"], grad)}

    weights = {"trained": torch.ones(12, 4), "frozen": torch.ones(12, 4)}
    fg.graphify(forward, donate="w", stage="b", limits=fg.Limits(8, 4)).trace(weights, batch=BATCH)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_as_it_was_is_kept(name: str) -> None:
    trace(KEPT[name])
