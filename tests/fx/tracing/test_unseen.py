"""What no op shows: text, memory, arrays, sizes as keys, rebinding; each refused by name."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toys
from values import Value, rows, trace

from fngraph.errors import (
    BranchError,
    ClosureError,
    HostSyncError,
    MutationError,
    PurityError,
    RandomError,
)

WEIGHT, ARRAY, BOX = torch.ones(toys.E), np.ones(toys.E, dtype=np.float32), {"w": np.ones(2)}


def in_a_thread(p: Any, s: Any, b: Any) -> Any:
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(p["w"] * 2))
    thread.start()
    thread.join()
    return out.pop()


def in_a_thread_then_used(p: Any, s: Any, b: Any) -> Any:
    return in_a_thread(p, s, b) + 1


UNSEEN: dict[str, tuple[Value, type[Exception], str]] = {
    "str": (lambda p, s, b: rows(p, b) * len(str(p["w"])), HostSyncError, "text"),
    "format": (lambda p, s, b: rows(p, b) * len(f"{p['w'].sum():.2f}"), HostSyncError, "text"),
    "repr of the batch": (lambda p, s, b: rows(p, b) * len(repr(b)), HostSyncError, "text"),
    "T as text": (
        lambda p, s, b: {f"x{b.token_ids.shape[0]}": rows(p, b) * 1},
        BranchError,
        "tokens",
    ),
    "a shape as text": (
        lambda p, s, b: rows(p, b) * len(str(b.seq_lens.shape)),
        BranchError,
        "requests",
    ),
    "T formatted": (
        lambda p, s, b: rows(p, b) * len(f"{b.token_ids.shape[0]:03d}"),
        BranchError,
        "symbolic",
    ),
    "T as a key": (
        lambda p, s, b: rows(p, b) * {}.get(b.token_ids.shape[0], 1),
        BranchError,
        "hashes",
    ),
    "T & 1": (
        lambda p, s, b: rows(p, b) * (2 if b.token_ids.shape[0] & 1 else 3),
        BranchError,
        "T",
    ),
    "tolist of a global": (
        lambda p, s, b: rows(p, b) * WEIGHT.tolist()[0],
        ClosureError,
        "WEIGHT",
    ),
    "item of a global": (
        lambda p, s, b: rows(p, b) * WEIGHT[0].item(),
        ClosureError,
        "WEIGHT",
    ),
    "from_numpy": (
        lambda p, s, b: rows(p, b) * torch.from_numpy(ARRAY),
        ClosureError,
        "ARRAY",
    ),
    "an array": (lambda p, s, b: rows(p, b) * torch.tensor(ARRAY), ClosureError, "ARRAY"),
    "an array inside": (
        lambda p, s, b: rows(p, b) * torch.as_tensor(BOX["w"]).sum(),
        ClosureError,
        "BOX['w']",
    ),
    "tensors in a literal": (
        lambda p, s, b: torch.tensor([b.seq_lens[0], 3]) * 1,
        HostSyncError,
        "torch.stack",
    ),
    "allclose": (
        lambda p, s, b: rows(p, b) * torch.allclose(p["w"], p["w"] * 2),
        HostSyncError,
        "isclose",
    ),
    ".data =": (
        lambda p, s, b: (setattr(p["w"], "data", p["w"] * 2), rows(p, b))[1],
        MutationError,
        "p['w']",
    ),
    ".data = of donated": (
        lambda p, s, b: (setattr(s["total"], "data", s["total"] * 2), rows(p, b))[1],
        MutationError,
        "s['total']",
    ),
    "set_ of donated": (
        lambda p, s, b: (s["seen"].set_(torch.zeros(toys.V, dtype=torch.int64)), rows(p, b))[1],
        MutationError,
        "s['seen']",
    ),
    "storage": (
        lambda p, s, b: (p["w"].untyped_storage().resize_(0), rows(p, b))[1],
        MutationError,
        "p['w']",
    ),
    "data_ptr": (
        lambda p, s, b: rows(p, b) * (b.token_ids.data_ptr() % 7),
        MutationError,
        "b.token_ids",
    ),
    "sparse": (
        lambda p, s, b: p["w"].to_sparse().to_dense(),
        PurityError,
        "plain",
    ),
    "copied by pickle": (
        lambda p, s, b: copy.copy(p["w"]) * 1,
        HostSyncError,
        "x.clone()",
    ),
    "thread": (in_a_thread, PurityError, "thread"),
    "thread, then used": (in_a_thread_then_used, PurityError, "thread"),
    "a held dict": (
        lambda p, s, b: (p.update(w=p["w"] * 2), rows(p, b))[1],
        MutationError,
        "p['w']",
    ),
    "bernoulli_": (
        lambda p, s, b: rows(p, b) * torch.empty(toys.E).bernoulli_(),
        RandomError,
        "generator",
    ),
    "alpha_dropout": (
        lambda p, s, b: F.alpha_dropout(p["w"], training=True),
        RandomError,
        "generator",
    ),
}


@pytest.mark.parametrize("what", UNSEEN)
def test_what_no_op_shows_is_refused(what: str):
    value, error, words = UNSEEN[what]
    with pytest.raises(error) as caught:
        trace(value)
    assert words in str(caught.value) and "s47" not in str(caught.value), caught.value


FINE: dict[str, Value] = {
    "deepcopy": lambda p, s, b: copy.deepcopy(p)["w"][copy.deepcopy(b).token_ids],
    "dropout that is off": lambda p, s, b: F.dropout(rows(p, b), training=False) * 1,
    "rrelu in eval": lambda p, s, b: F.rrelu(p["w"]),
    "an array made here": lambda p, s, b: rows(p, b) * torch.tensor(np.arange(toys.E)),
    "a literal's number": lambda p, s, b: rows(p, b) * torch.tensor(2.0).item(),
    "a copy of a dict": lambda p, s, b: {**p, "w": p["w"] * 2}["w"][b.token_ids],
    "a constant size as text": lambda p, s, b: rows(p, b) * len(f"{p['w'].shape}"),
}


@pytest.mark.parametrize("what", FINE)
def test_what_only_looks_like_it_is_fine(what: str):
    trace(FINE[what])
