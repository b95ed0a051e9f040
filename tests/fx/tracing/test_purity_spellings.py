"""More spellings of what is refused: by class, at the user's line, with the fix.

Each function gives one value from `(params, state, batch)` of the toys; the state goes through.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toys
from torch import Tensor

import fngraph as fg
from fngraph.errors import (
    BranchError,
    ClosureError,
    HostFieldError,
    HostSyncError,
    MutationError,
    OperatorError,
    PurityError,
    RandomError,
)

Value = Callable[[Any, Any, Any], Any]
E = toys.E


def rows(p: Any, b: Any) -> Tensor:
    """(T, E)"""
    return p["w"][b.token_ids]


def graphified(value: Value) -> Any:
    return fg.graphify(
        lambda p, s, b: (value(p, s, b), s),
        modes="FULL", donate="s", stage="b", limits=toys.LIMITS, sizes=toys.SIZES,
    )  # fmt: skip


# --- tensors that were not passed -----------------------------------------------------------------

W, SCALAR, IDS = torch.ones(E), torch.tensor(2.0), torch.tensor([0, 1])
TREE = {"w": [torch.ones(E)]}
MODULE = types.ModuleType("weights")
MODULE.w = torch.ones(E)


class Model:
    w = torch.ones(E)

    def step(self, x: Tensor) -> Tensor:
        return x * self.w


@functools.cache
def table() -> Tensor:
    return torch.arange(E).float()


table()  # filled before a trace
MODEL, CYCLE = Model(), itertools.cycle([torch.ones(E)])


CLOSED: dict[str, Value] = {
    "module attribute": lambda p, s, b: rows(p, b) * MODULE.w,
    "class attribute": lambda p, s, b: rows(p, b) * Model.w,
    "attribute of self": lambda p, s, b: MODEL.step(rows(p, b)),
    "nested containers": lambda p, s, b: rows(p, b) * TREE["w"][0],
    "cached": lambda p, s, b: rows(p, b) * table(),
    "iterator": lambda p, s, b: rows(p, b) * next(CYCLE),
    "partial": lambda p, s, b: functools.partial(torch.mul, W)(rows(p, b)),
    "detach": lambda p, s, b: rows(p, b) * W.detach(),
    "view": lambda p, s, b: rows(p, b) * W.view(1, E),
    "dlpack": lambda p, s, b: rows(p, b) * torch.from_dlpack(W),
    "foreach": lambda p, s, b: torch._foreach_mul([rows(p, b)], [W])[0],
    "scalar as a bound": lambda p, s, b: rows(p, b).clamp(min=SCALAR),
    "scalar on the left": lambda p, s, b: SCALAR * rows(p, b),
    "if": lambda p, s, b: rows(p, b) * (2 if SCALAR > 1 else 3),
    "index": lambda p, s, b: p["w"][IDS] * 1,
    "functional weight": lambda p, s, b: F.linear(rows(p, b), p["w"], torch.cat([W, W[:3]])),
    "copied in": lambda p, s, b: torch.empty(E).copy_(W) * rows(p, b),
    "written by out=": lambda p, s, b: torch.mul(p["w"][0], 2, out=W) * 1,
}

# --- values on the host ---------------------------------------------------------------------------

SYNCED: dict[str, Value] = {
    "of donated": lambda p, s, b: rows(p, b) * s["seen"][0].item(),
    "list index": lambda p, s, b: [rows(p, b), rows(p, b) * 2][b.seq_lens[0] % 2],
    "operator.index": lambda p, s, b: rows(p, b) * operator.index(b.seq_lens[0]),
    "range": lambda p, s, b: sum(rows(p, b) for _ in range(b.seq_lens[0])),
    "math": lambda p, s, b: rows(p, b) * math.sqrt(p["w"].abs().sum()),
    "tensor in list": lambda p, s, b: rows(p, b) * (2 if b.token_ids[0] in [1, 2] else 3),
    "number in tensor": lambda p, s, b: rows(p, b) * (2 if 5 in b.token_ids else 3),
    "sorted": lambda p, s, b: torch.stack(sorted([b.token_ids[0], b.seq_lens[0]])),
    "is_nonzero": lambda p, s, b: rows(p, b) * torch.is_nonzero(b.token_ids[0]),
    "arange": lambda p, s, b: torch.arange(b.seq_lens[0]),
    "index by a 0-dim tensor": lambda p, s, b: p["w"][b.token_ids[0]] * 1,
    "one_hot without a number": lambda p, s, b: F.one_hot(b.token_ids),
    "np.asarray": lambda p, s, b: rows(p, b) * np.asarray(b.token_ids)[0],
    "argwhere": lambda p, s, b: torch.argwhere(p["w"] > 0),
    "sum of a mask index": lambda p, s, b: p["w"][p["w"] > 0].sum(),
    "unique_consecutive": lambda p, s, b: b.token_ids.unique_consecutive(),
    "bincount": lambda p, s, b: b.token_ids.bincount(minlength=toys.V),
}

# --- sizes, host fields, generators, writes -------------------------------------------------------

BRANCHES: dict[str, Value] = {
    "size(0)": lambda p, s, b: rows(p, b) * (2 if b.token_ids.size(0) > 3 else 3),
    "numel": lambda p, s, b: rows(p, b) * (2 if rows(p, b).numel() > 30 else 3),
    "parity": lambda p, s, b: rows(p, b) * (2 if b.token_ids.shape[0] % 2 == 0 else 3),
    "in a tuple": lambda p, s, b: rows(p, b) * (2 if b.token_ids.shape[0] in (1, 2) else 3),
    "equal shapes": lambda p, s, b: rows(p, b) * (1 + (b.token_ids.shape == b.seq_lens.shape)),
    "min": lambda p, s, b: rows(p, b)[: min(b.token_ids.shape[0], 4)] * 1,
    "max": lambda p, s, b: torch.zeros(max(b.token_ids.shape[0], 4)),
    "broadcast of T and R": lambda p, s, b: b.token_ids + b.seq_lens,
}
NUMBERS: dict[str, Value] = {
    "float": lambda p, s, b: rows(p, b) * float(b.token_ids.shape[0]),
    "math": lambda p, s, b: rows(p, b) * math.log2(b.token_ids.shape[0]),
    "a literal": lambda p, s, b: torch.tensor(b.token_ids.shape[0]) * 1,
    "zip": lambda p, s, b: torch.stack([x * y for x, y in zip(rows(p, b), b.token_ids)]),
    "unbind": lambda p, s, b: torch.stack(rows(p, b).unbind(0)),
    "chunk by T": lambda p, s, b: torch.cat(rows(p, b).chunk(b.token_ids.shape[0])),
}
FIELDS: dict[str, Value] = {
    "getattr": lambda p, s, b: rows(p, b) * getattr(b.spec, "num_tokens", 5),
    "hasattr": lambda p, s, b: rows(p, b) * hasattr(b.spec, "query_len"),
    "len": lambda p, s, b: rows(p, b) * len(b.spec),
}
DRAWS: dict[str, Value] = {
    "uniform_": lambda p, s, b: torch.empty(E).uniform_() * rows(p, b),
    "bernoulli": lambda p, s, b: torch.bernoulli(p["w"].abs()),
}
WRITES: dict[str, Value] = {
    "unbind": lambda p, s, b: p["w"].unbind(0)[0].add_(1) * 1,
    "inplace=": lambda p, s, b: F.relu(p["w"], inplace=True) * 1,
    "running statistics": lambda p, s, b: F.batch_norm(rows(p, b), *p["w"][:2], training=True),
    "max_norm": lambda p, s, b: F.embedding(b.token_ids, p["w"], max_norm=0.1),
    "resize_": lambda p, s, b: p["w"].resize_(3, 3) * 1,
    "vmap": lambda p, s, b: torch.func.vmap(lambda r: r.add_(1))(p["w"]) * 1,
    "bytes": lambda p, s, b: p["w"].view(torch.int32).add_(1) * 1,
}
COND: dict[str, Value] = {
    "cond": lambda p, s, b: torch.cond(p["w"].sum() > 0, torch.sin, torch.cos, (rows(p, b),)),
}

REFUSED: list[tuple[type[PurityError], str, dict[str, Value]]] = [
    (ClosureError, "Make it an argument: forward(", CLOSED),
    (HostSyncError, "", SYNCED),
    (BranchError, "Write one computation for every size (masks, torch.where)", BRANCHES),
    (BranchError, "fixes the number of tokens at T = ", NUMBERS),
    (HostFieldError, "from a staged leaf", FIELDS),
    (RandomError, "pass the numbers in as an argument", DRAWS),
    (MutationError, "writes into p['w']", WRITES),
    (OperatorError, "torch.where(condition, a, b)", COND),
]


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        pytest.param(value, error, words, id=f"{error.__name__}: {name}")
        for error, words, group in REFUSED
        for name, value in group.items()
    ],
)
def test_refused_at_the_users_line(value: Value, error: type[PurityError], words: str):
    with pytest.raises(error) as caught:
        graphified(value)(toys.tally_params(), toys.tally_state(), toys.batch(3, 2))
    text, where = str(caught.value), f"{Path(__file__).name}:"
    assert words in text and where in text, text
    line = int(text.split(where)[1].split(":")[0])
    lines = {n for f in (value, Model.step) for *_, n in f.__code__.co_lines() if n}
    assert line in lines, text
