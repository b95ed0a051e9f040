"""What the tests of Triton's recurrent kernels share: batches, calls, exact results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus
from triton_cases import WHERE

from fngraph.core import HostBounds
from fngraph.ops import StateMeta, primitive
from fngraph.testing.cases import NAN

Rows = Sequence[tuple[int, int]]  # (new tokens, tokens before) of each request
DIMS = {"gated_delta": (1, 2, 16, 24), "ssd": (2, 1, 24, 16), "causal_conv": (12, 4)}
KINDS = list(DIMS)


@dataclasses.dataclass
class Case:
    """One call: arguments by their order, of which those at `ragged` are (T, ...)."""

    kind: str
    args: list[Tensor]
    ragged: tuple[int, ...]
    state: Tensor
    meta: StateMeta
    rows: Rows

    @property
    def tokens(self) -> int:
        """Of requests that are there."""
        return sum(n for n, _ in self.rows)

    @property
    def like(self) -> Tensor:
        """What the output looks like."""
        return self.args[2 if self.kind == "gated_delta" else 0]


def arguments(kind: str, T: int, dims: Any, draw: Any) -> tuple[list[Tensor], Any, tuple[int, ...]]:
    """Arguments, which of them are ragged, the shape of a state.

    Queries and keys are positive, as few outputs then are small differences of large numbers, which
    would measure the numbers and not the kernel.
    """
    if kind == "gated_delta":
        G, H, D, V = dims
        q, k = (normalize(draw(T, G, D).abs(), dim=-1) for _ in range(2))
        args = [q, k, draw(T, H, V), -draw(T, H).abs(), draw(T, H).sigmoid()]
        return args, (0, 1, 2, 3, 4), (H, D, V)
    if kind == "ssd":
        H, G, P, N = dims
        b, c = (draw(T, G, N).abs() for _ in range(2))
        args = [draw(T, H, P), softplus(draw(T, H)), -draw(H).abs(), b, c]
        return args, (0, 1, 3, 4), (H, P, N)
    C, W = dims
    return [draw(T, C), draw(C, W)], (0,), (C, W - 1)


def build(
    kind: str, *rows: tuple[int, int], dims: Any = None, dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32, pad_tokens: int = 0, pad_reqs: int = 0,
    query_len: int = 0, seed: int = 0, spare: int = 2,
) -> Case:  # fmt: skip
    """Requests in random slots; `spare` other slots and those of fresh requests hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    T = sum(n for n, _ in rows) + pad_tokens
    args, ragged, shape = arguments(kind, T, dims or DIMS[kind], draw)
    state = torch.full((len(rows) + spare, *shape), NAN)
    slots = torch.randperm(len(state), generator=generator)[: len(rows)]
    for slot, (_, past) in zip(slots, rows):
        if past:
            state[slot] = draw(*shape)
    starts = [0]
    for n, _ in rows:
        starts.append(starts[-1] + n)
    starts += [starts[-1] + query_len * (i + 1) for i in range(pad_reqs)]
    meta = StateMeta(
        torch.cat([slots, torch.full((pad_reqs,), -1)]),
        torch.tensor([n + past for n, past in rows] + [0] * pad_reqs, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
    )
    low = [x.to(dtype) if x.dim() > 1 else x for x in args]
    args = [x.to(WHERE) for x in low]
    for i in ragged:
        args[i][T - pad_tokens :] = NAN
    meta = StateMeta(*[x.to(WHERE) for x in meta])
    return Case(kind, args, ragged, state.to(WHERE, state_dtype), meta, rows)


def call(c: Case, out: Tensor, query_len: int | None = None, backend: str = "triton") -> None:
    """One run into `out`; the state is written."""
    known = primitive(c.kind)
    scale = [c.args[0].shape[-1] ** -0.5] if c.kind == "gated_delta" else []
    args = (*c.args, c.state, *c.meta, out, *scale)
    config = known.configure(*args)
    chosen = known.backend(backend)
    assert chosen.supports(config) is None, chosen.supports(config)
    known.call(chosen, args, config, HostBounds(max_query_len=query_len))


def run(c: Case, query_len: int | None = None) -> Tensor:
    """What Triton makes of it, over poison."""
    out = torch.full_like(c.like, NAN)
    call(c, out, query_len)
    return out


def exact(c: Case) -> tuple[Tensor, Tensor]:
    """`reference` in float64, from the same numbers: what comes out, and the states."""
    same = dataclasses.replace(c, args=[x.double() for x in c.args], state=c.state.double())
    out = torch.full_like(same.like, NAN)
    call(same, out, backend="reference")
    return out, same.state


def off(got: Tensor, want: Tensor) -> float:
    """The largest error of a (token, head) row or of a (slot, head) state, by its own norm.

    What is NaN must be so on both sides, and what is zero exactly zero.
    """
    got, want = (x.double().flatten(2) if x.dim() == 4 else x.double() for x in (got, want))
    assert got.isnan().equal(want.isnan())
    error, norm = (got - want).nan_to_num().norm(dim=-1), want.nan_to_num().norm(dim=-1)
    assert error[norm == 0].eq(0).all()
    return float((error / norm.clamp(min=1e-30)).max())
