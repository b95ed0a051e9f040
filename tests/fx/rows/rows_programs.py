"""Random programs over values with T or R rows, for which the rules on rows are tried.

An op is `(takes, make)`: how many values it takes, whichever they are, or the names of those that
it is for, "?" among them for any one. `make(r, *examples)` picks dims and numbers and gives the
function. What torch refuses for the examples is drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Op = Callable[..., Any]
INF = float("inf")


def dim(r: random.Random, x: Tensor) -> int:
    return r.randrange(-x.dim(), x.dim()) if x.dim() else 0


def of_dim(fn: Op) -> Op:
    """An op along some dim."""

    def make(r: random.Random, x: Tensor) -> Op:
        d, keep = dim(r, x), r.random() < 0.5
        return lambda x: fn(x, d, keep)

    return make


def plain(*fns: Op) -> Op:
    """One of some ops without numbers."""

    def make(r: random.Random, *_: Tensor) -> Op:
        return r.choice(fns)

    return make


def number(*fns: Op) -> Op:
    """One of some ops with a small int."""

    def make(r: random.Random, *_: Tensor) -> Op:
        fn, n = r.choice(fns), r.choice([-3, -2, -1, 0, 1, 2, 3])
        return lambda *ts: fn(*ts, n)

    return make


def cut(r: random.Random, x: Tensor) -> Op:
    d, a, b, s = dim(r, x), r.choice([None, 0, 1, -1]), r.choice([None, -1, 1]), r.choice([1, 2])
    at = (slice(None),) * (d % x.dim())
    return lambda x: x[(*at, slice(a, b, s))]


def swap(r: random.Random, x: Tensor) -> Op:
    a, b = dim(r, x), dim(r, x)
    return lambda x: x.transpose(a, b)


def write(r: random.Random, x: Tensor, i: Tensor, y: Tensor) -> Op:
    d, how = dim(r, x), r.choice(["index_add", "index_copy", "scatter", "scatter_add", "index_put"])
    reduced, whole, adds = r.choice(["sum", "amax", "prod"]), r.random() < 0.5, r.random() < 0.5
    if how == "index_put":
        return lambda x, i, y: x.index_put((i,), y, accumulate=adds)
    if how == "scatter" and adds:
        return lambda x, i, y: x.scatter_reduce(
            d, i.view(-1, *[1] * (y.dim() - 1)).expand_as(y), y, reduced, include_self=whole
        )
    if how.startswith("scatter"):
        return lambda x, i, y: getattr(x, how)(d, i.view(-1, *[1] * (y.dim() - 1)).expand_as(y), y)
    return lambda x, i, y: getattr(x, how)(d, i, y)


def assign(r: random.Random, x: Tensor, y: Tensor) -> Op:
    part, fn = cut(r, x), r.choice(["copy_", "add_", "mul_"])

    def run(x: Tensor, y: Tensor) -> Tensor:
        new = x.clone()
        getattr(part(new), fn)(y)
        return new

    return run


def shape(r: random.Random, x: Tensor) -> Op:
    return r.choice([
        lambda x: x.flatten(), lambda x: x.flatten(1), lambda x: x.unflatten(-1, (2, -1)),
        lambda x: x.unsqueeze(0), lambda x: x.unsqueeze(-1), lambda x: x.movedim(0, -1),
        lambda x: x.reshape(-1, 4), lambda x: x[None].expand(x.shape[0], *x.shape),
        lambda x: x[..., None].expand(*x.shape, 3), lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
        lambda x: x.repeat_interleave(2, 0), lambda x: x.contiguous(), lambda x: x.clone(),
    ])  # fmt: skip


def mask(r: random.Random, x: Tensor, m: Tensor) -> Op:
    n, d = r.choice([0.0, 1.0, -INF, INF, 2.0]), r.randrange(x.dim() or 1)
    if not x.dtype.is_floating_point:
        n = -1  # not a row that it would be right to write to

    def spread(x: Tensor, m: Tensor) -> Tensor:
        return m.view(*[1] * d, -1, *[1] * (x.dim() - d - 1))

    return r.choice([
        lambda x, m: torch.where(spread(x, m), x, n), lambda x, m: x * spread(x, m),
        lambda x, m: x.masked_fill(~spread(x, m), n), lambda x, m: torch.where(spread(x, m), n, x),
    ])  # fmt: skip


def made(r: random.Random, x: Tensor) -> Op:
    return r.choice([
        lambda x: torch.arange(x.shape[0], device=x.device), torch.ones_like, torch.zeros_like,
        lambda x: torch.ones(x.shape[0], device=x.device), lambda x: x.new_full((x.shape[0],), 3),
        lambda x: torch.eye(x.shape[0], device=x.device), lambda x: x.new_zeros(x.shape[0], 8),
        lambda x: torch.zeros(x.shape[0], dtype=torch.int64, device=x.device),
        lambda x: torch.arange(x.shape[0] - 1, -1, -1, device=x.device),
        lambda x: torch.zeros(12, 8, device=x.device),
        lambda x: x.new_empty(x.shape[0], 8).fill_(2),
        lambda x: torch.arange(1, 2 * x.shape[0] + 1, 2, device=x.device),
        lambda x: torch.full((3,), x.shape[0], device=x.device),
        lambda x: torch.empty_like(x).zero_(),
        lambda x: torch.arange(2, 8, 3, device=x.device), lambda x: torch.full_like(x, 7),
    ])  # fmt: skip


OPS: list[tuple[int | str, Op]] = [
    *[(1, of_dim(fn)) for fn in (
        lambda x, d, k: x.sum(d, keepdim=k), lambda x, d, k: x.mean(d, keepdim=k),
        lambda x, d, k: x.amax(d, keepdim=k), lambda x, d, k: x.prod(d, keepdim=k),
        lambda x, d, k: x.argmax(d, keepdim=k), lambda x, d, k: x.min(d, keepdim=k)[0],
        lambda x, d, k: x.softmax(d), lambda x, d, k: x.log_softmax(d),
        lambda x, d, k: x.logsumexp(d, keepdim=k), lambda x, d, k: x.norm(dim=d, keepdim=k),
        lambda x, d, k: x.any(d, keepdim=k), lambda x, d, k: x.all(d, keepdim=k),
        lambda x, d, k: x.cumsum(d), lambda x, d, k: x.cummax(d)[0], lambda x, d, k: x.flip(d),
        lambda x, d, k: x.sort(d, descending=k, stable=True)[0], lambda x, d, k: x.diff(dim=d),
        lambda x, d, k: x.sort(d, descending=k, stable=True)[1], lambda x, d, k: x.roll(1, d),
        lambda x, d, k: x.topk(1, d, largest=k)[0], lambda x, d, k: x.unbind(d)[0],
        lambda x, d, k: x.select(d, 0), lambda x, d, k: x.var(d, correction=0),
        lambda x, d, k: torch.linalg.vector_norm(x, -INF, d), lambda x, d, k: x.narrow(d, 0, 1),
        lambda x, d, k: x.count_nonzero(d), lambda x, d, k: x.split([1, x.shape[d] - 1], d)[1],
        lambda x, d, k: torch.linalg.vector_norm(x, 1, d), lambda x, d, k: x.renorm(2, d, 1.0),
        lambda x, d, k: F.glu(x, d), lambda x, d, k: x.argsort(d),
    )],
    (1, plain(torch.sum, torch.argmax, torch.amax, lambda x: x.t(), lambda x: x.mT, torch.tril,
              lambda x: x.triu(), lambda x: x.roll(1), lambda x: x.diagonal(), torch.trace,
              lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x.squeeze(0))),
    (1, plain(torch.relu, torch.neg, torch.abs, torch.sigmoid, torch.square, lambda x: x.float(),
              lambda x: x.long(), lambda x: x > 0, lambda x: ~x, lambda x: x == 0, torch.isfinite)),
    (1, number(torch.add, torch.sub, torch.mul, lambda x, n: n - x, lambda x, n: x // n,
               lambda x, n: x % n, lambda x, n: x.clamp(min=n), lambda x, n: x.clamp(max=n))),
    (1, number(lambda x, n: F.pad(x, (n, 0)), lambda x, n: F.pad(x, (0, n)), torch.eq,
               lambda x, n: F.pad(x, (0, 0, n, 0)), lambda x, n: F.pad(x, (0, 0, 0, n)))),
    (1, number(lambda x, n: x.tril(n), lambda x, n: x.roll(n, 0), lambda x, n: x * (x.shape[0] > n),
               lambda x, n: x[n], lambda x, n: x.select(0, n), lambda x, n: x[n:])),
    (1, cut), (1, cut), (1, swap), (1, shape), (1, shape), (1, made),
    (2, plain(torch.add, torch.sub, torch.mul, torch.maximum, torch.div, torch.eq, torch.lt)),
    (2, plain(torch.matmul, lambda x, y: x @ y.mT, lambda x, y: x.mT @ y, torch.isin, torch.outer,
              lambda x, y: torch.searchsorted(x, y), torch.logical_and, torch.logical_or)),
    (2, plain(lambda x, i: x[i], lambda x, i: x.index_select(0, i), lambda x, i: x.gather(0, i),
              lambda x, i: F.embedding(i, x), lambda x, i: x[:, i], lambda x, i: x.take(i))),
    (2, plain(lambda x, y: torch.cat([x, y]), lambda x, y: torch.stack([x, y]),
              lambda x, y: torch.cat([x, y], -1), lambda x, y: x.slice_scatter(y[:-1], 0, 0, -1))),
    (2, plain(lambda x, y: torch.einsum("i...,j...->ij", x, y), lambda x, y: torch.dot(x, y),
              lambda x, y: F.conv1d(x.t()[None], y.new_ones(1, x.shape[1], 2), padding=1)[0])),
    (3, plain(torch.where, torch.addmm, torch.addcmul, lambda x, y, z: x.lerp(y, z))),
    (2, mask), (2, mask), (2, assign), (3, write), (3, write),
]  # fmt: skip
