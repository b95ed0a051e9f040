"""The checker of facts: it finds what a rule claims wrongly, and what a user promises wrongly."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys
from rows_given import masked, params, real, rows
from rows_tried import differences
from rows_whole import BATCHES, LIMITS, batch

import fngraph as fg
from fngraph.errors import RowsError, SpecError, TreeError
from fngraph.fx.rows import (
    bounds,
    boxes,
    check,
    dirty,
    dirty_moves,
    dirty_uses,
    fills,
    folds,
    indices,
    inner,
    rules,
    shapes,
    sums,
    writes,
)
from fngraph.fx.tracing.refusals import Refusals

INF, NAN = float("inf"), float("nan")
W = {"w": torch.linspace(-2, 3, 96).view(12, 8), "i": torch.tensor([0, 1, -1, 2]),
     "h": torch.full((12, 8), 6e4, dtype=torch.float16)}  # fmt: skip


def spread(b: Any) -> Any:
    """(T, 1) bool, false for padding."""
    return (b.slot >= 0)[:, None]


def zeroed(b: Any) -> Any:
    """(T, E), zeros in padding."""
    return torch.where(spread(b), b.x, 0)


def looked_up(p: Any, b: Any) -> Any:
    """(T, E), weights; in padding, of row 0."""
    return p["w"][b.ids]


def tokens(b: Any) -> Any:
    """(T,) counted from 0."""
    return torch.arange(b.x.shape[0])


def table(b: Any) -> Any:
    """(12, E), of which padding has written row 0."""
    return torch.zeros(12, 8).index_put((b.place,), b.x + 1)


def numbers(b: Any) -> Any:
    """(12,) int64, likewise."""
    return torch.ones(12, dtype=torch.int64).index_put((b.place,), b.ids)


# What was accepted once, and is wrong for some batch: (the rule's mend, taken out again; program).
WRONG: dict[str, tuple[Any, str, str, Callable[[Any, Any], Any]]] = {
    "a product of zeros with 1 / 0": (
        sums, "return nothing and finite_padding(call, *other)", "return nothing",
        lambda p, b: (b.slot >= 0).float() @ (1 / b.x),
    ),
    "keys and values of padding, masked": (
        sums, "if not finite_padding(call, x, ndim(x) - 2)", "if False",
        lambda p, b: F.scaled_dot_product_attention(
            *[b.x[None, None]] * 2, (b.x / b.x.norm(dim=-1, keepdim=True))[None, None],
            attn_mask=(b.slot >= 0)[None],
        )[0, 0],
    ),
    "a masked softmax times values over their norm": (
        sums, "return nothing and finite_padding(call, *other)", "return nothing",
        lambda p, b: (b.x @ b.x.t()).masked_fill(~(b.slot >= 0), -INF).softmax(-1)
        @ (zeroed(b) / b.x.norm(dim=-1, keepdim=True)),
    ),
    "rows times a mask": (
        fills, 'if name == "mul" and among(0) and given <= finite:',
        'if name == "mul" and among(0):',
        lambda p, b: (looked_up(p, b).log() * spread(b)).sum(0),
    ),
    "the gradient of rows that a mask leaves out": (
        fills, "return call.zero if given <= finite else None", "return call.zero",
        lambda p, b: torch.func.grad(
            lambda y: torch.where(spread(b), torch.sigmoid(y), 0).sum()
        )(looked_up(p, b).log()).sum(0),
    ),
    "weights that padding finds, squared in half precision": (
        fills, "if call.value.dtype not in WIDE:", "if False:",
        lambda p, b: ((looked_up(p, b).half() * 1e5) * spread(b)).sum(0),
    ),
    "integers that half precision does not hold, times zeros": (
        fills, "return torch.iinfo(own).max <= torch.finfo(dtype).max", "return True",
        lambda p, b: (b.narrow[:, None] * torch.where(spread(b), b.x16, 0)[None, :, 0]).sum(1),
    ),
    "a softmax, two rows of it for each": (
        shapes, '[n for n in old if n != "1"] == [n for n in new if n != "1"]',
        "len(old) == len(new)",
        lambda p, b: torch.where(spread(b), b.x, -INF).softmax(0).view(-1, 4).sum(0),
    ),
    "a softmax without its last row": (
        shapes, "if d != dim or _is_mark(f, on)", "if d != dim or isinstance(f, str)",
        lambda p, b: torch.where(spread(b), b.x, -INF).softmax(0)[:-1].sum(0),
    ),
    "scores of -1e9 beside lower ones": (
        sums, 'if is_all(fill, _limit(neutral, x.meta["val"].dtype)):',
        "if isinstance(fill, torch.Tensor) and bool((fill <= -1e4).all()):",
        lambda p, b: torch.where(spread(b), b.x.clamp(min=-3e38), -1e9).softmax(0),
    ),
    "a softmax of NaN": (
        sums, "Kept(dict.fromkeys(across, VANISHING) if softmax else {})",
        "Kept(dict.fromkeys(across, torch.zeros(())) if softmax else {})",
        lambda p, b: torch.where(spread(b), b.x, -INF).softmax(0).isnan().sum(0),
    ),
    "negative indices that are held": (
        bounds, "    if leaf.buffer is None:\n        return state",
        "    if leaf.buffer is None:\n        return dataclasses.replace(state, low=0)",
        lambda p, b: b.x[p["i"]] * 1,
    ),
    "an identity over T": (
        sums, "    if summed:\n        return Kept()\n", "",
        lambda p, b: (torch.eye(b.x.shape[0]).long() @ (b.ids + 1)[:, None]).sum(0),
    ),
    "a triangle times its other half": (
        sums, "    if summed:\n        return Kept()\n", "",
        lambda p, b: (lambda t: ((t * t.t()) @ (b.ids + 1)[:, None]).sum(0))(
            torch.ones(b.x.shape[0], b.x.shape[0], dtype=torch.int64).tril()
        ),
    ),
    "a kept row that many rows are sent to": (
        fills, "if not _tells_apart(call)", "if False",
        lambda p, b: torch.zeros(12).index_fill(0, b.place // 8, 1.0),
    ),
    "a kept row by remainders": (
        fills, "if not _tells_apart(call)", "if False",
        lambda p, b: torch.zeros(12).index_fill(0, b.place % 5, 1.0),
    ),
    "a kept row by clamping": (
        fills, "if not _tells_apart(call)", "if False",
        lambda p, b: torch.zeros(12).index_fill(0, b.place.clamp(min=3), 1.0),
    ),
    "offsets less one, searched from the right": (
        fills, "return call.name in _COPIES and not wraps",
        "return (call.name in _COPIES or call.name == 'sub') and not wraps",
        lambda p, b: torch.searchsorted(b.starts - 1, tokens(b), right=True),
    ),
    "offsets less two, without the first": (
        fills, "return call.name in _COPIES and not wraps",
        "return (call.name in _COPIES or call.name == 'sub') and not wraps",
        lambda p, b: b.x[(b.starts - 2)[1:].clamp(min=-1)] * 1,
    ),
    "a difference by alpha": (
        bounds, "by = 1 if by is None else by", "by = 1",
        lambda p, b: b.x[torch.sub(b.starts[1:], 1, alpha=2).clamp(-1, 0)] * 1,
    ),
    "an index clamped from above by a count less one": (
        bounds, "a = Span(_least(a.low, b.low), _least(a.high, b.high))",
        "a = Span(a.low, _least(a.high, b.high))",
        lambda p, b: b.x[tokens(b).clamp(max=(b.place > 50).sum() - 1)] * 1,
    ),
    "the last one of equals": (
        sums, 'if (positions or call.name == "argsort") and not args.get("stable")', "if False",
        lambda p, b: torch.where(b.slot >= 0, b.y.clamp(max=0) - INF, -INF).topk(1).indices,
    ),
    "infinity behind NaN": (
        sums, "last = isinstance(fill, torch.Tensor) and bool(fill.isnan().all())",
        "last = is_all(fill, math.inf)",
        lambda p, b: torch.where(b.slot >= 0, b.y, INF).sort().values,
    ),
    "first tokens, where offsets reach the key's end": (
        indices, "return named is not None and named.within(least, size - 1)", "return True",
        lambda p, b: b.x[b.starts[:-1]] * 1,
    ),
    "-1 of padding, added to": (
        indices, "return named is not None and named.within(least, size - 1)", "return True",
        lambda p, b: torch.zeros(16, 8).index_add(0, b.slot, zeroed(b)),
    ),
    "integers divided by padding's 0": (
        fills, "    _refuse_zero_divisors(call)\n", "",
        lambda p, b: b.place // b.lens.sum().expand_as(b.place) + b.ids // b.place,
    ),
    "as many rows as a mask is true": (
        writes, "if more or (several and not none_of_padding):", "if False:",
        lambda p, b: b.x.index_put((b.slot >= 0,), b.x * 2),
    ),
    "a mask beside an index": (
        writes, "if more or (several and not none_of_padding):", "if False:",
        lambda p, b: b.x.index_put(
            ((tokens(b) == 0) | (b.slot < 0), torch.tensor([1, 2])), torch.tensor(5.0)
        ),
    ),
    "tokens beside requests": (
        writes, "told.dim in corner and", "",
        lambda p, b: b.x.index_put((tokens(b)[:, None], b.lens[None] % 8), torch.tensor(5.0)),
    ),
    "a kept row beside requests": (
        writes, "told.dim in corner and", "",
        lambda p, b: torch.zeros(12, 8).index_put(
            (b.place[:, None], b.lens[None] % 8), torch.tensor(5.0)
        )[1:] * 1,
    ),
    "zeros of padding, once for each request": (
        writes, "told.dim in corner and", "",
        lambda p, b: torch.zeros(12, 8).index_put(
            (b.ids[:, None], b.lens[None] * 0), zeroed(b)[:, :1], accumulate=True
        ),
    ),
    "zeros of padding, scaled by infinity": (
        writes, "spread.values is not None and finite and", "spread.values is not None and",
        lambda p, b: (p["w"] * 1).index_add(0, b.ids, zeroed(b), alpha=INF),
    ),
    "an identity, padding in both of its dims": (
        writes, "and not told.beside & corner", "",
        lambda p, b: torch.zeros(12).index_put(
            (torch.where(torch.eye(b.x.shape[0]) > 0, 5, 0),), torch.tensor(1.0), accumulate=True
        )[1:] * 1,
    ),
    "weights that are no numbers any more": (
        rules, "return is_smooth(call)", "return True",
        lambda p, b: (p["w"].log()[b.ids] * spread(b)).sum(0),
    ),
    "other bits of weights": (
        rules, 'return "dtype" not in call.args  # other bits', "return True",
        lambda p, b: ((p["w"].long() * 0 - 1).view(torch.float64)[b.ids] * spread(b)).sum(0),
    ),
    "a constant that is not finite": (
        check, "held=is_finite(value)", "held=True",
        lambda p, b: (torch.tensor([[-INF, 0.0]] * 12)[b.ids] * spread(b)).sum(0),
    ),
    "other bits of an index": (
        bounds, 'if name in _ALONG and "dtype" not in args:', "if name in _ALONG:",
        lambda p, b: b.x[(p["i"] * 0 + 255).to(torch.uint8).repeat(2).view(torch.int64)] * 1,
    ),
    "pairs of ones as one complex number": (
        shapes, "if call.name not in _PAIRS and (number := one_number(fill)) is not None",
        "if (number := one_number(fill)) is not None",
        lambda p, b: torch.view_as_real(
            torch.view_as_complex(b.y[:, None].expand(-1, 2).contiguous()).prod(0)
        ),
    ),
    "what counts up to T, from its end": (
        sums, "if not down and isinstance(fill, str)", "if isinstance(fill, str)",
        lambda p, b: torch.arange(b.x.shape[0]).sort(descending=True)[0],
    ),
    "zeros times a sum that may be NaN": (
        sums, "return state.held if state.value is None else is_finite(state.value)",
        "return not moving_dims(x)",
        lambda p, b: (zeroed(b) @ zeroed(b).sum(0).expand(8, 8)).sum(0),
    ),
    "repeats of padding": (
        sums, "if not is_all(call.rows(counts).fills.get(d), 0):", "if False:",
        lambda p, b: torch.repeat_interleave(((b.slot == 1) | (b.slot < 0)).long(), output_size=1),
    ),
    "chances of padding": (
        shapes, "if is_tensor(x) and moving_dims(x) and not is_chance(call, x)", "if False",
        lambda p, b: torch.bernoulli((b.y.nan_to_num(0.5, 0.5, 0.5).clamp(0, 1) + b.slot * 0) / 0.5
                                     * 0.5 - 2 * (b.slot < 0).float()),
    ),
    "offsets side by side, sliced in the other dim": (
        bounds, 'mark = call.rows(x).fills.get(args["dim"] % max(x.meta["val"].dim(), 1))',
        "mark = call.rows(x).fills.get(0)",
        lambda p, b: b.x[b.starts[:, None].expand(-1, 2)[:, 1:].reshape(-1) - 1] * 1,
    ),
    "positions that counts repeat": (
        bounds, 'if name == "repeat_interleave" and "self" not in args:', "if False:",
        lambda p, b: b.x[torch.repeat_interleave(torch.tensor([2, 1]), output_size=3) - 1] * 1,
    ),
    "numbers that wrap around": (
        bounds, "and (span == ANY or span.within(whole.low, whole.high))", "",
        lambda p, b: b.x[(tokens(b) * 2**62 // 2**62).clamp(max=0)] * 1,
    ),
    "half precision, summed": (
        sums, "call.value.dtype in _FINITE.get(call.name, ())", "call.name in _FINITE",
        lambda p, b: (p["h"][b.ids].sum(1) * (b.slot >= 0)).sum(),
    ),
    "weights in half precision, times 100": (
        rules, "    if dtype not in WIDE:\n        return False\n", "",
        lambda p, b: ((p["w"] * 1e5).half()[b.ids] * spread(b)).sum(0),
    ),
    "a norm of zeros without eps": (
        sums, "and eps > 0", "",
        lambda p, b: (F.layer_norm(p["w"] * 0, (8,), eps=0.0)[b.ids] * spread(b)).sum(0),
    ),
    "a norm by what is infinite": (
        sums, "and held and eps", "and eps",
        lambda p, b: torch.where(spread(b), 1.0, 0.0).t()
        @ F.layer_norm(looked_up(p, b), (8,), 1 / torch.zeros(8)),
    ),
    "zeros of either sign": (
        fills, "            return None\n    return result", "            pass\n    return result",
        lambda p, b: torch.reciprocal((-p["w"].abs() - 1)[b.ids] * spread(b)).amin(0),
    ),
    "zeros of either sign in a complex number": (
        fills, "_PARTS if complexes else _PARTS[:1]", "_PARTS[:0] if complexes else _PARTS[:1]",
        lambda p, b: torch.complex(*[looked_up(p, b) * spread(b)] * 2).angle().sum(0),
    ),
    "zeros of either sign in its imaginary part": (
        fills, "_PARTS if complexes else _PARTS[:1]", "_PARTS[1:2]",
        lambda p, b: (torch.complex(torch.where(spread(b), b.x, -1.0), looked_up(p, b) * spread(b))
                      .sqrt().imag - 1).sum(0),
    ),
    "rows of products times infinity": (
        sums, "finite = call.value.dtype in WIDE and all(map(math.isfinite, scales))",
        "finite = call.value.dtype in WIDE",
        lambda p, b: (torch.addmm(p["w"][0], looked_up(p, b).abs() + 1, p["w"][:8].abs() + 1,
                                  alpha=INF) * spread(b)).sum(0),
    ),
    "rows of products and of an infinite part": (
        sums, "finite = call.value.dtype in WIDE and all(map(math.isfinite, scales))",
        "finite = call.value.dtype in WIDE",
        lambda p, b: (torch.addmm(p["w"][0], looked_up(p, b), p["w"][:8], beta=INF)
        * spread(b)).sum(0),
    ),
    "the gradient of what has none": (
        fills, "if name in _SLOPES and dtype in WIDE and", 'if name.endswith("_backward") and',
        lambda p, b: torch.ops.aten.logit_backward(zeroed(b), looked_up(p, b)).sum(0),
    ),
    "a mask of two dims before an index": (
        indices, "dim += ndim(x) if x is not None and is_mask(x) else 1", "dim += 1",
        lambda p, b: torch.zeros(b.x.shape[0]).expand(2, 3, -1).clone().index_put(
            (torch.tensor([[True, False, False], [False] * 3]), torch.tensor([-1])),
            torch.tensor(1.0),
        ),
    ),
    "the least integer without its sign": (
        sums, '("relu",) if whole else', '("abs",) if whole else',
        lambda p, b: torch.where(b.slot >= 0, -(2**63), 0).abs().amax(0),
    ),
    "what is vouched for, and five": (
        bounds, 'return _whole(x.meta["val"].dtype) if known == ANY else known', "return known",
        lambda p, b: p["w"][fg.trust_rows(torch.where(b.slot >= 0, 0, 11)) + 5] * 1,
    ),
}  # fmt: skip
# Likewise, of ops that compute over some dims.
WRONG |= {
    "a transform over tokens": (
        inner, "        if d in over:\n", "        if d in over and d > 9:\n",
        lambda p, b: torch.fft.fft(torch.complex(b.x + 1, b.x), dim=0)),
    "norms over tokens": (
        inner, "        if d in over:\n", "        if d in over and d > 9:\n",
        lambda p, b: (b.x + 1).renorm(2, 1, 1.0)),
    "distances of 26 rows": (
        inner, 'if rows and call.args.get("p") == 2', 'if False and call.args.get("p") == 2',
        lambda p, b: torch.ops.aten._cdist_forward(b.x.view(-1, 2), p["w"][:, :2] + 0, 2.0, None)),
    "what is not finite, decomposed": (
        inner, "if len(moving) > 1 or not all(finite_padding", "if not all(True or finite_padding",
        lambda p, b: torch.linalg.svdvals(
            (b.ids / b.ids)[:, None].expand(-1, 8).reshape(-1, 2, 4))),
    "bags that end elsewhere": (
        inner, "each * _size(offsets) == _size(index)", "True",
        lambda p, b: F.embedding_bag(b.ids, p["w"], torch.arange(0, 12, 4), mode="sum")),
    "bags of what is not there": (
        inner, "    check_index(call, weight, 0, index, from_end=False)\n", "",
        lambda p, b: F.embedding_bag(
            torch.where(b.slot >= 0, 1, -1)[:, None].expand(-1, 2), p["w"], mode="sum")),
    "unpooled to where padding says": (
        inner, "if moving_dims(index) and not is_there(", "if False and not is_there(",
        lambda p, b: F.max_unpool2d(
            b.x.view(-1, 2, 2, 2), (b.slot.clamp(max=0) * 9)[:, None, None, None] + (b.x > 99)
            .long().view(-1, 2, 2, 2), 1)),
    "elements behind those of padding": (
        inner, "for d in moving_dims(x) if d]", "for d in moving_dims(x) if False]",
        lambda p, b: b.x.t().masked_scatter(b.x.t() == b.x.t(), b.x.t() + 1)),
    "more elements than there are": (
        inner, "if not spared and not at_most(", "if False and not at_most(",
        lambda p, b: b.x.masked_scatter(
            (b.slot <= 0)[:, None], torch.arange(8.0))),
    "among padding": (
        inner, 'if is_tensor(x) and name.startswith("test_element"):', "if False:",
        lambda p, b: torch.isin(torch.tensor([0, 99]), b.ids)),
    "a mean of losses": (
        inner, 'if moving and call.args["reduction"] != 0:', "if False:",
        lambda p, b: F.mse_loss(b.x, b.y[:, None].expand(-1, 8)) * 1),
    "chances that are none": (
        inner, "if any(moving_dims(y) and not is_chance(call, y) for y in both):", "if False:",
        lambda p, b: F.binary_cross_entropy(
            torch.where(spread(b), 0.5, 2), torch.where(spread(b), 0.5, 0), reduction="none")),
    "products summed over tokens": (
        inner, "enumerate(dims) if e in", "enumerate(dims) if e < 0 and e in",
        lambda p, b: torch.ops.aten._trilinear(
            b.x + 1, p["w"][:8] + 0, b.x + 1, [2], [0], [2], [0, 1])),
    "stretches of another length": (
        folds, "if after == folded.stretches:", "if after > 1:",
        lambda p, b: torch.stack([b.x, b.x + 1]).reshape(-1, 4).reshape(4, -1, 4) * 1),
    "stretches beside rows": (
        folds, "return kept and not moving_dims(x)", "return kept",
        lambda p, b: (torch.stack([b.x, b.x + 1]).reshape(-1, 8) + b.x.view(-1, 4).repeat(1, 2))
        .reshape(2, -1, 8)),
    "stretches of two kinds": (
        folds, "s.stretches, call.dim(x, s.dim)) for", "folded[0][1].stretches, 0) for",
        lambda p, b: (torch.stack([b.x] * 2).reshape(-1, 4)
                      + torch.stack([b.x[:, :4]] * 4).reshape(-1, 4)).reshape(2, -1, 4)),
}  # fmt: skip
# Likewise, of rows that are kept for padding and read.
WRONG |= {
    "a sum over a kept row": (
        dirty_uses, "sorted(box.keys() & over)", "()", lambda p, b: table(b).sum(0)),
    "what a write adds to it": (
        dirty, "joined([*boxes, *new], shape)", "joined(boxes, shape)",
        lambda p, b: table(b).sum(0)),
    "a product over it": (
        dirty_uses, "if summed in box:", "if False:", lambda p, b: torch.ones(3, 12) @ table(b)),
    "a lookup of any row": (
        dirty_uses, "if any(_leaves_out(", "if True or any(_leaves_out(",
        lambda p, b: table(b)[b.ids // 8]),
    "a lookup by what happens to be 0 in padding": (
        dirty_uses, "if not state.said or not pads", "if not pads",
        lambda p, b: table(b)[b.ids // 8]),
    "a lookup by what it holds": (
        dirty_uses, "    for x in others:", "    for x in ():",
        lambda p, b: torch.arange(99)[numbers(b).clamp(0, 9)]),
    "rows behind others": (
        dirty_moves, "frozenset(r + start for r in here)", "here",
        lambda p, b: torch.cat([p["w"], table(b)])[1:].sum(0)),
    "rows behind zeros": (
        dirty_moves, "frozenset(r + before.get(d, 0) for r in rows)", "rows",
        lambda p, b: F.pad(table(b), (0, 0, 2, 0))[1:].sum(0)),
    "columns that were rows": (
        dirty_moves, "order.index", "lambda d: d", lambda p, b: table(b).t()[1:].sum(1)),
    "rows of an expanded table": (
        dirty_moves, "lambda d: d + lead", "lambda d: d",
        lambda p, b: table(b).expand(3, 12, 8)[1:].sum(1)),
    "a table added to a greater one": (
        dirty_moves, "lead=lead: d + lead", "lead=lead: d",
        lambda p, b: (table(b) + torch.zeros(2, 12, 8))[1:].sum(1)),
    "a mask of another row": (
        dirty_moves, "return left if mask.any() and all(left.values()) else None", "return None",
        lambda p, b: torch.where((torch.arange(12) != 1)[:, None], table(b), 0).sum(0)),
    "all elements in a row": (
        boxes, "here.seen_in(part, there) if part", "part if part",
        lambda p, b: table(b).view(-1)[1:].sum()),
    "a part that begins later": (
        dirty, "start = start + part.shape[dim]", "start = start",
        lambda p, b: torch.zeros(12, 8).index_put((torch.where(b.slot >= 0, b.ids, 11),), b.x)
        .split([5, 7])[1].sum(0)),
    "scores of rows": (
        dirty_uses, "rank - 1 if d == last and", "0 if d == last and",
        lambda p, b: F.linear(p["w"], table(b))[1:].sum(1)),
    "columns that are looked up by row": (
        dirty_uses, "ndim(by[0]) + d - 1", "d",
        lambda p, b: F.embedding(torch.tensor([[1, 2]]), table(b).t())[:, 1:].sum(2)),
    "written over elsewhere": (
        dirty_uses, "dim: box[dim] - set(over)", "dim: frozenset()",
        lambda p, b: table(b).slice_scatter(p["w"][:2], 0, 3, 5).sum(0)),
    "written into others": (
        dirty_uses, "frozenset(over[r] for r in rows)", "frozenset(over[:1])",
        lambda p, b: p["w"].slice_scatter(torch.cat([p["w"][:2], table(b)[:2]]), 0, 3, 7)[4:]
        .sum(0)),
    "written to a row that is counted from the end": (
        writes, "((fill >= 0) & (fill < size))", "(fill < size)",
        lambda p, b: torch.zeros(12, 8).index_put((torch.where(b.slot >= 0, b.ids, -1),), b.x)[
            11]),
    "written through a view": (
        dirty, "[seen for box in boxes if", "[seen for box in () if",
        lambda p, b: (lambda x: (x.view(12, 2, 4).index_put_((b.place,), b.x.view(-1, 2, 4)), x))(
            p["w"] * 1)[1].sum(0)),
    "another row made clean": (
        dirty, "if not here.covers(box, there)", "if False",
        lambda p, b: (lambda x: (x[3:5].zero_(), x))(table(b))[1].sum(0)),
    "integers divided by it": (
        dirty_moves, "    _refuse_zero_divisors(call)\n", "",
        lambda p, b: (7 // numbers(b))[1:]),
}  # fmt: skip


def judged(program: Callable[[Any, Any], Any]) -> tuple[Any, list[Any]]:
    """What a trace says of a program, and the facts of it that do not hold."""
    wrong: list[Any] = []

    def look(args: Any, limits: Any, graph: Any, facts: Any) -> None:
        wrong.extend(differences(args, W, {}, graph.gm, facts))

    def forward(p: Any, s: Any, b: Any) -> Any:
        return program(p, b), s

    made = fg.graphify(
        forward, donate=1, stage=2, limits=LIMITS, generators=(torch.default_generator,)
    )
    try:
        made.trace_call((W, {}, batch(*BATCHES[0])), Refusals(), look)
    except RowsError as error:
        return error, wrong
    return None, wrong


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_and_without_its_mend_the_checker_finds_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, mend, without, program = WRONG[name]
    error, wrong = judged(program)
    assert error is not None and "test_rehearsal.py:" in str(error) and not wrong
    source = inspect.getsource(module)
    assert source.count(mend) == 1
    planted: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(mend, without), module.__file__, "exec"), planted)
    for key, fn in inspect.getmembers(module, inspect.isfunction):
        if fn.__module__ == module.__name__ and fn.__code__ != planted[key].__code__:
            monkeypatch.setattr(fn, "__code__", planted[key].__code__)
    error, wrong = judged(program)
    assert error is None and wrong


# --- for a user's own function --------------------------------------------------------------------


def report(value: Callable[..., Any], **options: Any) -> fg.Report:
    """`fg.check` of an output `value(x, p, b)`, rehearsed."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        return value(rows(p, b), p, b), s

    options = {"rehearse": True} | options
    state = options.pop("state", toys.tally_state())
    return fg.check(
        forward, params(), state, toys.batch(3, 2), donate=1, stage=2, limits=toys.LIMITS, **options
    )


def test_a_word_that_is_kept_is_no_error():
    assert report(lambda x, p, b: masked(p, b).sum(0)).ok
    assert report(lambda x, p, b: fg.trust_rows(torch.cdist(x, p["w"]))).ok


@pytest.mark.parametrize(
    "number",
    [
        lambda i: i * 0, lambda i: i * i, lambda i: i // i, lambda i: i - i, lambda i: i & 3,
        lambda i: i.clamp(min=0), lambda i: i % 3, lambda i: i.cumsum(0),
        lambda i: (i * 2).cumsum(0),
        lambda i: torch.minimum(i, i * i), lambda i: i // 2, lambda i: i.maximum(i + 1),
    ],
)  # fmt: skip
def test_what_is_vouched_for_can_be_computed_with(number: Any):
    assert report(lambda x, p, b: number(fg.trust_rows(b.token_ids) + 1) * 1).ok


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(x.shape[0], 9).flip(1), lambda x: torch.randint(9**9, (9,)).roll(1),
        lambda x: torch.randint(0, 2, (99,), dtype=torch.bool).flip(0),
        lambda x: torch.randn(9, dtype=torch.complex64).flip(0),
    ],
)  # fmt: skip
def test_what_is_drawn_is_the_same_in_both_runs(draw: Any):
    assert report(lambda x, p, b: draw(x), generators=(torch.default_generator,)).ok


def test_a_word_that_is_not_kept_is_named_with_its_line_and_the_key():
    wrong = report(lambda x, p, b: x - fg.trust_rows(x.sum(0)))
    (error,) = wrong.errors
    assert isinstance(error, RowsError)
    assert "test_rehearsal.py:" in str(error) and "in a rehearsed key of T=" in str(error)
    assert "what fg.trust_rows says here is not so: true rows are [" in str(error)
    assert report(lambda x, p, b: x - fg.trust_rows(x.sum(0)), rehearse=False).ok
    exact = (3 + 2 * 1, 3)  # a key that the batch fills has no padding
    T, R = toys.batch(3, 2).spec[:2]
    assert report(lambda x, p, b: x - fg.trust_rows(x.sum(0)), rehearse=[(T, R)]).ok, exact


def test_what_fails_in_padding_is_not_run_there_and_the_rest_is():
    def value(x: Any, p: Any, b: Any) -> Any:
        at = b.token_ids - 20 * (b.slot_mapping < 0).long()
        shape = torch.zeros_like(p["w"][at])
        return shape - fg.trust_rows(x.sum(0))

    rehearsed, fails = report(value).errors
    assert "true rows are [" in str(rehearsed) and "looks up what the padding" in str(fails)


def test_rows_that_are_kept_for_padding_hold_what_they_like_if_no_true_row_names_them():
    def errors(write: Any, most: int = 10) -> list[str]:
        def forward(p: Any, s: Any, b: Any) -> Any:
            at = torch.where(real(b), b.token_ids % most, 10)
            return at * 1, {**s, "total": write(s["total"], at, rows(p, b) + 1, masked(p, b))}

        b = dataclasses.replace(toys.batch(3, 2), token_ids=torch.tensor([3, 10, 4, 5, 6]))
        told = fg.check(
            forward, params(), toys.tally_state(), b, donate=1, stage=2, limits=toys.LIMITS,
            rehearse=True,
        )  # fmt: skip
        return [str(error) for error in told.errors]

    for write in (
        lambda s, at, x, zeros: s.index_put((at,), x),
        lambda s, at, x, zeros: s.index_add_(0, at, x),
        lambda s, at, x, zeros: s.index_reduce(0, at, x, "amax"),
    ):
        assert not errors(write)
        (error,) = errors(write, most=11)
        assert "true rows name [10] too, which padding writes to" in error
    assert not errors(
        lambda s, at, x, zeros: s.index_add(0, at, zeros), most=11
    )  # nothing is added


@fg.struct
class Picked:
    """A row of x for each request."""

    x: Any = fg.buffer("T", "float32")
    row: Any = fg.buffer("R", "int64")
    told: Any = fg.buffer("R", "int64", min=0)
    spec: fg.BatchSpec = fg.host()


def test_indices_that_are_not_what_their_field_says_are_named():
    def errors(fn: Any, told: int) -> Any:
        spec, told = fg.BatchSpec(3, 2), torch.tensor([1, told])
        b = Picked(torch.rand(3), torch.tensor([0, 1]), told, spec)
        return fg.check(fn, b, stage=0, limits=toys.LIMITS, rehearse=True).errors

    (error,) = errors(lambda b: b.x[b.row] * 1, told=0)
    assert 'it has none where it is declared, fg.buffer("R", "int64", min=0)' in str(error)
    assert not errors(lambda b: b.x[b.told] * 1, told=0)
    (error,) = errors(lambda b: b.x[b.told] * 1, told=-1)
    assert str(error).startswith("b.told is not what its field says (")
    assert "should be 0 or more: [1, -1]" in str(error)
    (error,) = errors(lambda b: b.x[b.told] * 1, told=7)
    assert "forward fails on the batch as it is: IndexError: index 7 is out of bounds" in str(error)


def test_donated_state_is_not_written_and_no_memory_is_no_rehearsal():
    state = toys.tally_state()
    before = {k: v.clone() for k, v in state.items()}
    update = fg.check(
        toys.tally_, params(), state, toys.batch(3, 2), donate=1, stage=2, limits=toys.LIMITS,
        rehearse=True,
    )  # fmt: skip
    assert update.ok
    toys.assert_trees(state, before)
    with pytest.raises(TreeError, match="pass tensors"):
        report(lambda x, p, b: x * 1, state=fg.like(toys.tally_state()))
    with pytest.raises(SpecError, match="cannot hold the batch"):
        report(lambda x, p, b: x * 1, rehearse=[(1, 1)])
    assert real(toys.batch(1)).all()


def test_a_report_says_in_which_keys_all_was_the_same():
    given = report(lambda x, p, b: x * 1, rehearse=[(5, 2), (10, 4)])
    assert given.rehearsed == ((5, 2), (10, 4))
    assert "rehearsed in T=5 R=2, T=10 R=4: true rows are the same" in str(given)
    assert len(report(lambda x, p, b: x * 1).rehearsed) > 2
    wrong = report(lambda x, p, b: x - fg.trust_rows(x.sum(0)), rehearse=[(5, 2), (10, 2)])
    assert wrong.rehearsed == ((5, 2),) and not wrong.ok
    assert "rehearsed" not in str(report(lambda x, p, b: x * 1, rehearse=False))


@pytest.mark.parametrize(
    "keys", [(6, 4), 8, [(8,)], "yes", [], None, [(4.0, 2)], [(0, 1)]], ids=repr
)
def test_what_is_no_list_of_keys_is_refused(keys: Any):
    with pytest.raises(SpecError, match=r"rehearse=.*: pass True, or the keys .*\[\(T, R\), ...\]"):
        report(lambda x, p, b: x * 1, rehearse=keys)
