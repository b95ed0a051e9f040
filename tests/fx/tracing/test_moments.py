"""What holds for a part of `forward` alone: an array's numbers, a choice among kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toys
from torch.nn.attention import SDPBackend, sdpa_kernel
from values import rows, trace

import fngraph as fg
from fngraph.errors import AmbientError, PurityError

Forward = Callable[[Any, Any], torch.Tensor]
N = toys.E


def ones(dtype: Any = np.float32) -> Any:
    return np.ones(N, dtype=dtype)


def changed_after(make: Callable[[Any], Any], array: Any) -> Forward:
    """Makes something of an array, which then is another one."""

    def forward(p: Any, b: Any) -> torch.Tensor:
        mine = array.copy()
        made = make(mine)
        mine[0] = 3
        return rows(p, b) * made

    return forward


def of_another_dtype(p: Any, b: Any) -> torch.Tensor:
    mine = ones(np.float64)
    made = torch.tensor(mine, dtype=torch.float32)
    mine[0] = 3
    return rows(p, b) * made


def new_one(p: Any, b: Any) -> torch.Tensor:
    mine = ones()
    made = p["w"].new_tensor(mine)
    mine[0] = 3
    return rows(p, b) * made


def indexed(p: Any, b: Any) -> torch.Tensor:
    at = np.array([1, 2])
    out = rows(p, b)[:, at]
    at[0] = 5
    return out * 1


def written_at(p: Any, b: Any) -> torch.Tensor:
    at, out = np.array([1, 2]), rows(p, b).clone()
    out[:, at] = 3.0
    at[0] = 5
    return out


COPIED: dict[str, Forward] = {
    "tensor": changed_after(torch.tensor, ones()),
    "tensor of a dtype": of_another_dtype,
    "new_tensor": new_one,
    "a list": changed_after(lambda a: torch.tensor(list(a)), ones()),
    "clone of from_numpy": lambda p, b: rows(p, b) * torch.from_numpy(ones()).clone().mul_(2),
    "as_tensor of a list": lambda p, b: rows(p, b) * torch.as_tensor([1.0] * N).mul_(2),
    "from_numpy": lambda p, b: rows(p, b) * torch.from_numpy(ones()),
    "from_numpy of NaN": lambda p, b: rows(p, b) * torch.from_numpy(ones() * np.nan),
    "an index": indexed,
    "an index that is written at": written_at,
}


@pytest.mark.parametrize("modes", ["NONE", "FULL"])
@pytest.mark.parametrize("case", COPIED)
def test_an_array_is_read_where_it_is_read(case: str, modes: str):
    def forward(p: Any, s: Any, b: Any) -> Any:
        return COPIED[case](p, b), s

    fast = fg.graphify(forward, modes=modes, donate="s", stage="b", limits=toys.LIMITS)
    params, batch = toys.tally_params(), toys.batch(3, 1)
    want = COPIED[case](params, batch)
    torch.testing.assert_close(fast(params, {}, batch)[0], want, equal_nan=True)


SHARED: dict[str, Forward] = {
    "from_numpy": changed_after(torch.from_numpy, ones()),
    "as_tensor": changed_after(torch.as_tensor, ones()),
    "asarray": changed_after(torch.asarray, ones()),
    "NaN": changed_after(torch.from_numpy, ones() * np.nan),
    "written by an op": lambda p, b: rows(p, b) * torch.from_numpy(ones()).mul_(2),
    "a view of it": lambda p, b: rows(p, b) * torch.as_tensor(ones())[1:].mul_(2).sum(),
}


@pytest.mark.parametrize("case", SHARED)
def test_memory_that_a_tensor_shares_with_an_array_may_not_change(case: str):
    with pytest.raises(PurityError, match=r"array.*torch\.tensor\(array\)") as caught:
        trace(lambda p, s, b: SHARED[case](p, b))
    assert "test_moments.py:" in str(caught.value)


def deterministic(p: Any, b: Any) -> torch.Tensor:
    torch.use_deterministic_algorithms(True)
    try:
        return rows(p, b) * 2
    finally:
        torch.use_deterministic_algorithms(False)


def precise(p: Any, b: Any) -> torch.Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        return rows(p, b) @ p["w"].T
    finally:
        torch.set_float32_matmul_precision(before)


def without_cudnn(p: Any, b: Any) -> torch.Tensor:
    with torch.backends.cudnn.flags(enabled=False):
        return rows(p, b) * 2


PARTS = {"deterministic_algorithms": deterministic, "float32 matmul precision": precise,
         "cudnn_enabled": without_cudnn}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_a_choice_among_kernels_for_a_part_is_refused(name: str):
    with pytest.raises(AmbientError, match=f"{name}.*around the call"):
        trace(lambda p, s, b: PARTS[name](p, b))


def attended(p: Any, s: Any, b: Any) -> torch.Tensor:
    q = p["w"][None, None]
    with sdpa_kernel(SDPBackend.MATH):
        part = F.scaled_dot_product_attention(q, q, q)
    return rows(p, b) + part.sum() + F.scaled_dot_product_attention(q, q, q).sum()


def test_a_choice_that_a_trace_itself_makes_is_taken():
    trace(attended)  # among kernels of attention


def test_a_choice_under_which_nothing_runs_is_nobodys():
    def forward(p: Any, s: Any, b: Any) -> torch.Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            k = 2
        return rows(p, b) * k

    trace(forward)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_integers_that_torch_promotes_with_no_others(dtype: Any):
    def forward(p: Any, s: Any, b: Any) -> Any:
        return b.token_ids.to(dtype).to(torch.int64).to(dtype), s

    fast, batch = fg.graphify(forward, donate="s", stage="b", limits=toys.LIMITS), toys.batch(3, 1)
    got, _ = fast({}, {}, batch)
    assert got.dtype is dtype and got.tolist() == batch.token_ids.tolist()
