"""What users write, for random programs: masks, offsets, writes to state, attention, other dtypes.

Ops as in `rows_programs`, that name the values they are for. In most of them padding stays out; in
some of each kind it does not, or where it goes is left to the caller. What is drawn comes out the
same whatever the numbers are, so that two runs can be compared.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
import toys
from rows_programs import INF, Op
from torch import Tensor

NAN = float("nan")
LAST = 25
"""A row of a state that is for padding; so is row 0."""


def any_of(*fns: Op) -> Op:
    """One of some ops."""

    def make(r: random.Random, *_: Tensor) -> Op:
        return r.choice(fns)

    return make


def like(real: Tensor, x: Tensor) -> Tensor:
    """A mask over rows, in as many dims as x has."""
    return real.view(-1, *[1] * (x.dim() - 1))


def zeroed(x: Tensor, real: Tensor) -> Tensor:
    return torch.where(like(real, x), x, 0)


NEUTRAL: list[tuple[float, Op]] = [
    (0, lambda x: x.sum(0)), (0, lambda x: x.nansum(0)), (0, lambda x: x.count_nonzero(0)),
    (1, lambda x: x.prod(0)), (-INF, lambda x: x.amax(0)), (INF, lambda x: x.amin(0)),
    (-INF, lambda x: x.max(0)[0]), (-INF, lambda x: x.max(0)[1]), (INF, lambda x: x.min(0)[0]),
    (-INF, lambda x: x.argmax(0)), (INF, lambda x: x.argmin(0)), (-INF, lambda x: x.softmax(0)),
    (-INF, lambda x: x.log_softmax(0)), (-INF, lambda x: x.logsumexp(0)), (0, lambda x: x.norm()),
    (0, lambda x: torch.linalg.vector_norm(x, 1, 0)), (-INF, lambda x: x.max()),
    (0, lambda x: torch.linalg.vector_norm(x, INF, 0)), (0, lambda x: (x != 0).any(0)),
    (1, lambda x: (x != 0).all(0)), (NAN, lambda x: x.sort(0)[0]), (0, lambda x: x.abs().amax(0)),
    (-INF, lambda x: x.sort(0, descending=True, stable=True)[1]), (0, lambda x: x.mean(0)),
    (-INF, lambda x: x.topk(1, 0)[0]), (NAN, lambda x: x.argsort(0, stable=True)),
    (-INF, lambda x: x.sort(0, descending=True)[0]), (0, lambda x: x.sum(dtype=torch.float64)),
    (-INF, lambda x: x.softmax(0).sum(0)), (0, lambda x: x.var(0)), (0, lambda x: x.cumsum(0)[0]),
]  # fmt: skip


def over_rows(r: random.Random, x: Tensor, real: Tensor) -> Op:
    """A reduction of what is masked with the number that adds nothing to it."""
    n, fn = r.choice(NEUTRAL)
    if not x.dtype.is_floating_point:
        n = (
            0
            if x.dtype is torch.bool or abs(n) < 2
            else torch.iinfo(x.dtype).max * (1 - 2 * (n < 0))
        )
    by_fill = r.random() < 0.3

    def run(x: Tensor, real: Tensor) -> Tensor:
        mask = like(real, x)
        return fn(x.masked_fill(~mask, n) if by_fill else torch.where(mask, x, n))

    return run


def into(r: random.Random, state: Tensor, at: Tensor, rows: Tensor, real: Tensor) -> Op:
    """Rows into a state by slot, with padding where nobody reads, or adding nothing; or not."""
    how = r.choice(["index_put", "index_add", "index_copy", "index_fill", "index_reduce", "scatter",
                    "scatter_add", "scatter_reduce"])  # fmt: skip
    guards, zeros, adds, whole = (
        r.random() < 0.8,
        r.random() < 0.6,
        r.random() < 0.5,
        r.random() < 0.5,
    )
    reduced, to = r.choice(["sum", "amax", "prod", "amin"]), r.choice([LAST, LAST, 0])
    name = how + "_" * (r.random() < 0.5)

    def run(state: Tensor, at: Tensor, rows: Tensor, real: Tensor) -> Tensor:
        at = torch.where(real, at, to) if guards else at
        rows = (zeroed(rows, real) if zeros else rows).to(state.dtype)
        wide = at[:, None].expand_as(rows) if rows.dim() > 1 else at
        write = getattr(state, name)
        if how == "index_put":
            return write((at,), rows, accumulate=adds)
        if how == "index_fill":
            return write(0, at, 2)
        if how == "index_reduce":
            return write(0, at, rows, "amax", include_self=whole)
        if how == "scatter_reduce":
            return write(0, wide, rows, reduced, include_self=whole)
        return write(0, wide if how.startswith("scatter") else at, rows)

    return run


def overwrite(r: random.Random, state: Tensor, y: Tensor) -> Op:
    """A state in place, whole or a part of it."""
    a, b = sorted(r.sample(range(13), 2))
    return r.choice([
        lambda s, y: s.copy_(y), lambda s, y: s.add_(y), lambda s, y: s.mul_(0.5),
        lambda s, y: s[a:b].add_(1), lambda s, y: s[a:b].copy_(y[a:b]), lambda s, y: s.zero_(),
        lambda s, y: s.select(0, a).fill_(3), lambda s, y: s[a:].mul_(2),
        lambda s, y: s.clamp_(max=9),
        lambda s, y: s.copy_(s.flip(0)), lambda s, y: s.lerp_(y, 0.5),
        lambda s, y: s[: y.shape[0]].copy_(y),
    ])  # fmt: skip


def assigned(fn: Op) -> Op:
    """What an assignment makes of a copy."""

    def run(x: Tensor, *others: Tensor) -> Tensor:
        new = x.clone()
        fn(new, *others)
        return new

    return run


def attention(r: random.Random, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Op:
    """(T, E) each, over T: masked by hand or by torch."""
    cleans, causal, by_hand, softly = (r.random() < 0.7 for _ in range(4))
    if causal and not by_hand and q.shape[0] != k.shape[0]:
        raise ValueError("torch's causal kernel reads memory that nobody wrote, for more queries")
    if not by_hand and k.shape[0] != v.shape[0]:
        raise ValueError("torch's kernels read memory that nobody wrote, behind fewer values")

    def run(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        if not by_hand:  # a kernel lets NaN of a row that is masked through where it likes
            q, k, v = (torch.where(x.isfinite(), x, 1).clamp(-9, 9) for x in (q, k, v))
        k, v = (zeroed(k, real), zeroed(v, real)) if cleans else (k, v)
        if by_hand:
            scores = (q @ k.mT).masked_fill(~real, -INF)
            return (scores.softmax(-1) if softly else scores.sigmoid()) @ v
        mask = None if causal else real[None].expand(q.shape[0], -1)
        return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], mask,
                                              is_causal=causal)[0, 0]  # fmt: skip

    return run


def gradient(r: random.Random, x: Tensor) -> Op:
    """Of a sum of something made of it."""
    fn = r.choice([
        torch.relu, torch.tanh, lambda x: x[1:], lambda x: x[..., :2], lambda x: x.select(0, 0),
        lambda x: x.select(-1, 1), lambda x: x.square(), lambda x: F.gelu(x), lambda x: x.sigmoid(),
        lambda x: F.softmax(x, -1), lambda x: x.sum(-1).exp(), lambda x: F.hardtanh(x),
        lambda x: F.leaky_relu(x), lambda x: x.t(), lambda x: F.silu(x) * x, lambda x: x[:, 1:],
        lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x.mean(), lambda x: x[:-1],
    ])  # fmt: skip
    return lambda x: torch.func.grad(lambda y: fn(y).sum())(x)


def loss(r: random.Random, x: Tensor, ids: Tensor, real: Tensor) -> Op:
    how, masks, smooth = (
        r.choice(["sum", "mean", "none"]),
        r.random() < 0.7,
        r.choice([0.0, 0.0, 0.1]),
    )

    def run(x: Tensor, ids: Tensor, real: Tensor) -> Tensor:
        target = ids % 8
        target = torch.where(real, target, -100) if masks else target
        return F.cross_entropy(x, target, reduction=how, label_smoothing=smooth)

    return run


def at_once(fn: Op) -> Op:
    return any_of(fn)


def complexes(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def requests(starts: Tensor, y: Tensor) -> Tensor:
    """(T,) int64: the request of each token."""
    tokens = torch.arange(y.shape[0], device=y.device)
    return torch.searchsorted(starts, tokens, right=True) - 1


def chances(x: Tensor) -> Tensor:
    """One of each row's columns for sure."""
    return F.one_hot(x.argmax(-1), x.shape[-1]).float()


IDIOMS: list[tuple[int | str, Op]] = [
    *[("? real", over_rows)] * 4, *[(f"{state} slot {rows} real", into) for state, rows in (
        ("total", "x"), ("total", "rows"), ("seen", "ids"), ("other", "x"), ("total", "masked"),
    )], ("total ? ? real", into), ("other slot ? real", into),
    ("total w", overwrite), ("other total", overwrite), ("seen seen", overwrite),
    ("total ?", overwrite),
    ("half half", overwrite), ("n n", any_of(lambda n, _: n.add_(1), lambda n, _: n * 2)),
    ("n real", any_of(lambda n, real: n.add_(real.sum()), lambda n, real: n + real.sum())),
    ("x rows x real", attention), ("? ? ? real", attention), ("x x x real", attention),
    (1, gradient), ("rows", gradient), ("x ids real", loss), ("? ids real", loss),
    ("? real", any_of(
        zeroed, lambda x, m: m.to(x.dtype) @ x, lambda x, m: zeroed(x, m).t() @ zeroed(x, m),
        lambda x, m: x * like(m, x), lambda x, m: x.index_put((m,), x.new_tensor(1)),
        assigned(lambda new, m: new.__setitem__(m, 1)), lambda x, m: zeroed(x, m).sum() / m.sum(),
        lambda x, m: x.index_put((m,), x), lambda x, m: zeroed(x, m).cumsum(0),
        lambda x, m: torch.einsum("t,te->e", m.float(), x), lambda x, m: m.float().dot(x),
        lambda x, m: torch.addmm(x[:1], m.float()[None], x), lambda x, m: m.float().mv(x.t()),
        lambda x, m: torch.baddbmm(x[None], m.float()[None, :, None], x[None, :1]),
        lambda x, m: torch.addmv(x[0], zeroed(x, m).t(), m.float()), lambda x, m: x[m],
        lambda x, m: torch.linalg.vector_norm(zeroed(x, m), -1, 0),
    )),
    ("masked rows", any_of(
        lambda m, x: m.t() @ x, lambda m, x: x.t() @ m, lambda m, x: m @ x.t(),
        lambda m, x: x @ m.t(),
        lambda m, x: torch.einsum("te,tf->ef", m, x), lambda m, x: F.linear(m.t(), x.t()),
        lambda m, x: torch.bmm(m[None].mT, x[None]), lambda m, x: (m[:, None] @ x[..., None])[:, 0],
    )),
    ("w x", any_of(lambda w, x: x @ w.t(), lambda w, x: F.linear(x, w), lambda w, x: w @ x.t())),
    ("starts y", any_of(
        requests, lambda s, y: requests(s, y) % 7, lambda s, y: torch.searchsorted(s, y),
        lambda s, y: torch.bucketize(torch.arange(y.shape[0], device=s.device), s, right=True),
        lambda s, y: torch.searchsorted(s, torch.arange(y.shape[0], device=s.device)),
        lambda s, y: y[s[1:] - 1], lambda s, y: y[s[:-1]], lambda s, y: y[(s[1:] - 1).clamp(min=0)],
        lambda s, y: y[s[:-1].clamp(max=y.shape[0] - 1)], lambda s, y: s.diff(), lambda s, y: s[1:],
        lambda s, y: y.repeat_interleave(2),
        lambda s, y: torch.bucketize(y, y.new_tensor([0, 0.5])),
        lambda s, y: y.new_zeros(s.shape[0] - 1).index_add(0, requests(s, y), y),
        lambda s, y: torch.repeat_interleave(s[1:], s.diff(), output_size=y.shape[0]),
    )),
    ("starts y ? real", any_of(
        lambda s, y, x, m: x.new_zeros(s.shape[0] - 1, *x.shape[1:]).index_add(
            0, requests(s, y).clamp(max=s.shape[0] - 2), zeroed(x, m)),
        lambda s, y, x, m: x[torch.where(m, requests(s, y), 0)],
    )),
    ("?", any_of(
        lambda x: x.bfloat16().float(), lambda x: x.half(),
        lambda x: x.to(torch.float8_e4m3fn).float(),
        lambda x: x.bfloat16() * 2, lambda x: x.double(), lambda x: x.view(torch.int32),
        lambda x: complexes(x), lambda x: torch.view_as_real(complexes(x) * (1 + 2j)).flatten(-2),
        lambda x: complexes(x).conj().imag, lambda x: complexes(x).abs(),
        lambda x: complexes(x).real,
        lambda x: torch.view_as_real(complexes(x).conj().resolve_conj()),
        lambda x: torch.complex(x, x),
        lambda x: x.to(torch.float8_e5m2).to(torch.bfloat16), lambda x: x.int(),
        lambda x: x.to(torch.uint8),
    )),
    ("?", any_of(
        assigned(lambda new: new.__setitem__((slice(None), slice(1, 3)), 0)),
        lambda x: x.cummin(0)[0],
        assigned(lambda new: new[:2].add_(1)), assigned(lambda new: new[1:].copy_(new[:-1])),
        assigned(lambda new: new[:, 0].mul_(3)), assigned(lambda new: new.t().add_(1)),
        assigned(lambda new: new.select(0, 0).zero_()), lambda x: x.cumprod(0),
        lambda x: x.unfold(-1, 2, 1),
        lambda x: x.logcumsumexp(0), lambda x: x.median(-1)[0], lambda x: x.mode(-1)[0],
        lambda x: x.msort(),
        lambda x: x.select_scatter(x[0], 0, 1), lambda x: x.slice_scatter(x[:, :1], 1, 2, 3),
        lambda x: x.slice_scatter(x, 0, 0), lambda x: x.kthvalue(1, -1)[0], lambda x: x.std(-1),
        lambda x: torch.var_mean(x, -1)[0], lambda x: x.chunk(2, -1)[1],
        lambda x: x.split(2, -1)[0],
        lambda x: x.diagonal(0, 0, 1), lambda x: x.nanmedian(-1)[0], lambda x: x.unfold(0, 2, 1),
        lambda x: torch.std_mean(x, -1)[1], lambda x: x.argsort(-1, stable=True),
        lambda x: x.median(0)[0],
        lambda x: x.as_strided((2, 2), (1, 1)), lambda x: x.gather(-1, x.argsort(-1, stable=True)),
        lambda x: x.rot90(), lambda x: x.expand(2, *x.shape).movedim(1, 0),
        lambda x: x.movedim(-1, 0).flatten(),
        lambda x: x.unflatten(0, (1, -1)), lambda x: x.view(1, *x.shape).squeeze(0),
        lambda x: x.repeat(1, 2),
    )),
    ("w", any_of(lambda w: w.as_strided((5, 3), (8, 2), 1), lambda w: w.unfold(0, 3, 2).sum(-1),
                 lambda w: w.view(torch.int32), lambda w: w.t(), lambda w: w[::2],
                 lambda w: w.flip(0),
                 lambda w: w.mean(0), lambda w: w.sort(0)[0], lambda w: w.to(torch.float8_e4m3fn))),
    ("?", any_of(
        lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-3), lambda x: F.rms_norm(x, x.shape[-1:]),
        lambda x: F.group_norm(x, 2), lambda x: F.layer_norm(x, x.shape), lambda x: F.normalize(x),
        lambda x: F.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])),
        lambda x: F.batch_norm(x, None, None, training=True), lambda x: F.normalize(x, dim=0),
        lambda x: F.conv1d(F.pad(x.t()[None], (2, 0)), x.new_ones(1, x.shape[1], 3))[0],
        lambda x: F.conv1d(x[:, None], x.new_ones(2, 1, 3), padding=1)[:, 0],
        lambda x: F.conv_transpose1d(x.t()[None], x.new_ones(x.shape[1], 1, 2))[0],
        lambda x: F.gelu(x), lambda x: F.silu(x), lambda x: F.softplus(x),
        lambda x: x.nan_to_num(0, 1, -1),
    )),
    ("?", any_of(
        lambda x: torch.rand_like(x).floor(), lambda x: torch.bernoulli(torch.ones_like(x)),
        lambda x: F.dropout(x, 0.0, True), lambda x: torch.randint_like(x, 0, 1),
        lambda x: x.rand(1),
        lambda x: torch.multinomial(chances(x), 1), lambda x: torch.normal(x, torch.zeros_like(x)),
        lambda x: torch.rand(x.shape[0], device=x.device).floor(),
        lambda x: torch.bernoulli((x > 0).float()),
        lambda x: torch.randint(0, 1, (x.shape[0],), device=x.device),
        lambda x: torch.randn_like(x) * 0,
        lambda x: torch.bernoulli(x.sigmoid().ceil()),
        lambda x: torch.multinomial(x.softmax(-1).round(), 1),
        lambda x: torch.randint(0, x.shape[0], (3,), device=x.device) * 0,
        lambda x: x.bernoulli(x.abs() > 1),
        lambda x: torch.multinomial(chances(x)[:, 0] * 0 + chances(x)[:1, 0], 1) * 0,
        lambda x: torch.empty_like(x).uniform_(0, 0),
    )),
    ("?", any_of(toys.double, lambda x: toys.double(x, factor=3.0) + 1)),
    ("? real", any_of(lambda x, m: toys.double(zeroed(x, m)).sum(0))),
    ("head tail", any_of(torch.add, lambda a, b: a @ b.t(), lambda a, b: torch.cat([b, a]))),
    ("place slot ids", any_of(
        lambda p, s, i: i // p.clamp(min=1), lambda p, s, i: i // p, lambda p, s, i: i % (s + 2),
        lambda p, s, i: i // i, lambda p, s, i: (i & 7) | 8, lambda p, s, i: i >> 1,
        lambda p, s, i: i.clamp(2, 9), lambda p, s, i: 5 - i, lambda p, s, i: torch.minimum(i, p),
        lambda p, s, i: torch.maximum(s, p), lambda p, s, i: F.one_hot(i, 12),
        lambda p, s, i: s.relu(),
        lambda p, s, i: torch.where(s >= 0, i, 0), lambda p, s, i: torch.where(s >= 0, s, LAST) - 1,
    )),
    ("w place slot", any_of(
        lambda w, p, s: w.index_fill(0, p, 1), lambda w, p, s: w[p - 1],
        lambda w, p, s: w[p] * w[0],
        lambda w, p, s: w[s.clamp(0, 11)], lambda w, p, s: F.embedding(p, w),
        lambda w, p, s: w[s % 12],
        lambda w, p, s: w.index_add(0, p, w[p]), lambda w, p, s: w.index_put((p,), w[p] * 2),
        lambda w, p, s: w[torch.where(s >= 0, s, 0) % 12], lambda w, p, s: w[p, s % 8],
        lambda w, p, s: w[:, p % 8].t(), lambda w, p, s: w.gather(0, p[:, None]).squeeze(1),
        lambda w, p, s: w.index_copy(0, p, w[p]), lambda w, p, s: w.t().index_select(1, p).t(),
    )),
]  # fmt: skip
