"""Toy models of latent attention and of recurrent state, in every mode, against bare `forward`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from torch import Tensor
from torch.nn.functional import silu, softplus
from toys import LIMITS, SIZES, B, E, S

import fngraph as fg

V, SLOTS = toys.V, 4


@fg.struct
class Batch:
    """The toys' batch, with a slot of state for each request."""

    token_ids: Tensor = fg.buffer("T", "int64")
    slot_mapping: Tensor = fg.buffer("T", "int64", pad=-1)
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: Tensor = fg.buffer("R B", "int32", pad=0)
    state_slots: Tensor = fg.buffer("R", "int64", pad=-1)
    spec: fg.BatchSpec = fg.host()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) / 2


def latent(params: Any, cache: Any, batch: Batch) -> Any:
    """MLA: 3 heads over a latent of 4 and a rotated part of 2."""
    x_TE = params["embed"][batch.token_ids]
    q_THC = (x_TE @ params["q"]).unflatten(-1, (3, 6))
    out, cache = fg.ops.mla(q_THC, x_TE @ params["kv"], cache, batch, rank=4, scale=0.5)
    return x_TE + out.flatten(1) @ params["out"], cache


def delta(params: Any, cache: Any, batch: Batch) -> Any:
    """GDN: a convolution, then the gated delta rule."""
    conv, state = cache
    x_TE = params["embed"][batch.token_ids]
    mixed, conv = fg.ops.causal_conv(x_TE @ params["qkv"], params["conv"], conv, batch)
    q, k, v = silu(mixed).split([4, 4, 8], 1)
    q, k = (torch.nn.functional.normalize(y.unflatten(1, (1, 4)), dim=-1) for y in (q, k))
    g, beta = -softplus(x_TE @ params["g"]), (x_TE @ params["beta"]).sigmoid()
    out, state = fg.ops.gated_delta(q, k, v.unflatten(1, (2, 4)), g, beta, state, batch)
    return x_TE + out.flatten(1) @ params["out"], (conv, state)


def mamba(params: Any, cache: Any, batch: Batch) -> Any:
    """Mamba-2: a convolution, then the state space."""
    conv, state = cache
    x_TE = params["embed"][batch.token_ids]
    mixed, conv = fg.ops.causal_conv(x_TE @ params["xbc"], params["conv"], conv, batch)
    x, b, c = silu(mixed).split([8, 4, 4], 1)
    x, b, c = x.unflatten(1, (2, 4)), b[:, None], c[:, None]
    dt = softplus(x_TE @ params["dt"])
    out, state = fg.ops.ssd(x, dt, -params["a"].exp(), b, c, state, batch)
    return x_TE + (out + x * params["d"][:, None]).flatten(1) @ params["out"], (conv, state)


def setup(model: Any, device: Any) -> tuple[Any, Any]:
    """Params, and a cache in which what was never written is NaN."""
    embed, nan = draw(V, E), float("nan")
    if model is latent:
        params = {"q": draw(E, 18), "kv": draw(E, 6), "out": draw(12, E)}
        cache: Any = torch.full((4 * B, S, 6), nan)
    else:
        params = {"conv": draw(16, 4), "out": draw(8, E), "qkv": draw(E, 16), "xbc": draw(E, 16)}
        params |= {"g": draw(E, 2), "beta": draw(E, 2), "dt": draw(E, 2)}
        params |= {"a": draw(2), "d": draw(2)}
        cache = (torch.full((SLOTS, 16, 3), nan), torch.full((SLOTS, 2, 4, 4), nan))
    params["embed"] = embed
    return toys.moved((params, cache), device)


def batch(device: Any, *rows: int | tuple[int, int], query_len: int | None = None) -> Batch:
    plain = toys.on(toys.batch(*rows, query_len=query_len, seed=len(rows)), device)
    slots = torch.tensor([2, 0, 3, 1][: len(rows)], device=device)
    return Batch(**vars(plain), state_slots=slots)


STEPS: list[tuple[list[Any], int | None]] = [
    ([3, 1, 4], None),
    ([(1, 3), (1, 1), (1, 4)], 1),
    ([(1, 4), (2, 2), (1, 5), 5], None),
    ([(1, 5), (1, 4), (1, 6), (1, 5)], 1),
    ([(1, 6), (1, 5)], 1),
    ([(2, 7), (2, 6)], None),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", [latent, delta, mamba])
@pytest.mark.parametrize("modes", toys.MODES)
def test_every_mode_writes_what_bare_forward_writes(model, modes, recorder_name, device):
    params, cache = setup(model, device)
    mine = toys.clone(cache)
    fast = fg.graphify(model, modes=modes, donate="cache", stage="batch", sizes=SIZES)
    step = fast.bind(params).capture(cache, LIMITS, recorder=recorder_name, progress=False)
    ran = set()
    for rows, query_len in STEPS:
        given = batch(device, *rows, query_len=query_len)
        want, mine = toys.bare(model, params, mine, given)
        got, back = step(cache, given)
        ran.add(step.dispatch(given.spec).mode.name)
        torch.testing.assert_close(got, want)
        toys.assert_trees(back, mine, atol=1e-6, rtol=1e-5)
        assert not got.isnan().any()
    expected = {"FULL_DECODE_ONLY": {"FULL", "NONE"}, "FULL_AND_PIECEWISE": {"FULL", "PIECEWISE"}}
    assert ran == expected.get(modes, {modes})


@pytest.mark.parametrize("model", [delta, mamba])
def test_slots_that_are_not_padded_with_minus_one_are_refused(model):
    @fg.struct
    class Careless(Batch):  # type: ignore[misc]
        state_slots: Tensor = fg.buffer("R", "int64", pad=0)

    params, cache = setup(model, "cpu")
    plain = batch("cpu", 3)
    careless = Careless(**vars(plain))
    fast = fg.graphify(model, donate="cache", stage="batch", sizes=SIZES)
    with pytest.raises(fg.errors.FieldError, match=r"batch.state_slots says where .* writes"):
        fast.trace(params, cache, batch=careless, limits=LIMITS)
