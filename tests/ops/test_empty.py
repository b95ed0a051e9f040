"""Batches of no tokens, no requests or no blocks: every backend of every primitive.

Those of Triton run here too where test_triton_interpreter.py runs this file.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fngraph.core import HostBounds
from fngraph.ops import PRIMITIVES, primitive
from fngraph.ops.triton.launching import missing

NAN = float("nan")
H, K, D, B = 4, 2, 8, 3
PAGED = ("slot_mapping", "seq_lens", "query_start_loc", "block_tables")
STATES = ("state_slots", "seq_lens", "query_start_loc")
EMPTY = {  # tokens, requests, columns of the block table
    "no tokens": (0, 3, B), "no requests": (5, 0, B), "neither": (0, 0, B), "nothing": (0, 0, 0),
    "no blocks": (5, 3, 0),
}  # fmt: skip


def heads(T: int) -> tuple[torch.Tensor, ...]:
    z = torch.zeros
    return z(T, H, D), z(T, K, D), z(T, K, D), z(6, 4, K, D), z(6, 4, K, D)


def conv(T: int, taps: int) -> tuple[torch.Tensor, ...]:
    return torch.zeros(T, 9), torch.zeros(9, taps), torch.zeros(7, 9, taps - 1)


# by name: tensors of T tokens, fields of the batch, what else the op takes, columns of the output
CALLS: dict[str, tuple[Any, tuple[str, ...], tuple[Any, ...], tuple[int, ...]]] = {
    "attention": (
        heads, PAGED, (0.5, None, None, True, *[None] * 7, 0.0, False, None), (H, D),
    ),
    "cascade": (heads, (*PAGED, "prefix_len"), (0.5,), (H, D)),
    "mla": (
        lambda T: (torch.zeros(T, H, 12), torch.zeros(T, 12), torch.zeros(6, 4, 12)),
        PAGED, (8, 0.5), (H, 8),
    ),
    "gated_delta": (
        lambda T: (*(torch.zeros(T, *of) for of in ((K, D), (K, D), (H, 6), (H,), (H,))),
                   torch.ones(7, H, D, 6)),
        STATES, (0.5,), (H, 6),
    ),
    "ssd": (
        lambda T: (torch.zeros(T, H, 6), torch.zeros(T, H), torch.zeros(H), torch.zeros(T, K, D),
                   torch.zeros(T, K, D), torch.ones(7, H, 6, D)),
        STATES, (), (H, 6),
    ),
    "causal_conv": (lambda T: conv(T, 4), STATES, (), (9,)),
    "causal_conv of one tap": (lambda T: conv(T, 1), STATES, (), (9,)),
    "varlen_attention": (lambda T: heads(T)[:3], ("cu_seqlens",), (0.5, False), (H, D)),
}  # fmt: skip
BACKENDS = [
    (call, backend.name)
    for call in CALLS
    for backend in primitive(call.split()[0]).backends.values()
    if backend.shipped
]


def backend_for(name: str, known: Any, args: Any) -> tuple[Any, Any, Any]:
    """A backend, what it is called with, and the config; skips where it does not run."""
    config, found = known.configure(*args), known.backend(name)
    reason = found.refusal(config)
    if name.startswith("triton"):
        reason = reason or missing(args[0].device.type)
    if reason is not None:
        pytest.skip(reason)
    return found, args, config


def run(
    call: str, backend: str, T: int, R: int, columns: int, where: str
) -> tuple[torch.Tensor, list[Any]]:
    """The output, over NaN, and what else was passed: caches and states."""
    tensors, fields, more, width = CALLS[call]
    whole = lambda *shape: torch.zeros(shape, dtype=torch.int32)  # noqa: E731
    batch = SimpleNamespace(
        slot_mapping=torch.full((T,), -1), state_slots=torch.full((R,), -1), seq_lens=whole(R),
        query_start_loc=whole(R + 1), block_tables=whole(R, columns), prefix_len=whole(1),
        cu_seqlens=whole(R + 1),
    )  # fmt: skip
    given = [x.to(where) for x in tensors(T)]
    known, out = primitive(call.split()[0]), torch.full((T, *width), NAN, device=where)
    args = (*given, *(getattr(batch, name).to(where) for name in fields), out, *more)
    known.call(*backend_for(backend, known, args), HostBounds(max_query_len=max(T, 1)))
    return out, given


@pytest.mark.parametrize("what", EMPTY)
@pytest.mark.parametrize(("call", "backend"), BACKENDS)
def test_nothing_comes_of_nothing(call: str, backend: str, what: str, where: str):
    out, given = run(call, backend, *EMPTY[what], where)
    assert out.eq(0).all()
    for before, after in zip(CALLS[call][0](EMPTY[what][0]), given, strict=True):
        assert before.equal(after.cpu())


@pytest.mark.parametrize("backend", [name for call, name in BACKENDS if call.endswith("tap")])
def test_a_convolution_of_one_tap_keeps_no_state(backend: str, where: str):
    known = primitive("causal_conv")
    x, weight, state = torch.randn(3, 9), torch.randn(9, 1), torch.zeros(7, 9, 0)
    meta = (
        torch.tensor([2, 5]),
        *(torch.tensor(n, dtype=torch.int32) for n in ([2, 8], [0, 2, 3])),
    )
    args = [t.to(where) for t in (x, weight, state, *meta, torch.full((3, 9), NAN))]
    known.call(*backend_for(backend, known, args), None)
    torch.testing.assert_close(args[-1].cpu(), x * weight[:, 0])


def test_every_primitive_is_here():
    shipped = {p.name for p in PRIMITIVES.values() if re.match(r"fngraph\.", _module(p))}
    assert {call.split()[0] for call in CALLS} == shipped


def _module(known: Any) -> str:
    return str(getattr(next(iter(known.backends.values())).run, "__module__", ""))
