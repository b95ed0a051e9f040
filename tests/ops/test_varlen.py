"""Attention over sequences that lie end to end: `reference` against one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fngraph as fg
from fngraph.errors import FieldError, TreeError
from fngraph.ops import slots

NAN = float("nan")
PACKS = {
    "one": [7], "several": [3, 9, 1, 5], "empty ones": [0, 4, 0, 0, 6, 0], "all empty": [0, 0],
    "long": [40, 33],
}  # fmt: skip


def drawn(T: int, H: int = 4, K: int = 2, D: int = 8, dtype: Any = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T)
    draw = lambda heads: torch.randn(T, heads, D, generator=generator, dtype=torch.float64)  # noqa: E731
    return [draw(heads).to(dtype) for heads in (H, K, K)]


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **options: Any) -> Tensor:
    """In float64, each sequence alone; zeros behind them."""
    out, at = torch.zeros_like(q, dtype=torch.float64), 0
    group = q.shape[1] // k.shape[1]
    for n in lengths:
        here = slice(at, at := at + n)
        q_, k_, v_ = (x[here].double().transpose(0, 1) for x in (q, k, v))
        k_, v_ = (x.repeat_interleave(group, 0) for x in (k_, v_))
        causal = options.get("causal", False)
        made = scaled_dot_product_attention(
            q_, k_, v_, is_causal=causal, scale=options.get("scale")
        )
        out[here] = made.transpose(0, 1)
    return out


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("behind", [0, 3])
def test_each_sequence_is_as_alone(name: str, options: dict[str, Any], behind: int, monkeypatch):
    monkeypatch.setattr(slots, "AT_ONCE", 900)  # a few rows at a time
    lengths = PACKS[name]
    q, k, v = drawn(sum(lengths) + behind)
    want = one_by_one(q, k, v, lengths, **options)
    for x in (q, k, v):
        x[sum(lengths) :] = NAN
    got = fg.ops.varlen_attention(q, k, v, starts_of(lengths), **options)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_what_is_no_number_stays_in_its_sequence():
    lengths = [3, 4, 2]
    q, k, v = drawn(9)
    want = one_by_one(q, k, v, lengths)
    v[4, 0, 1], k[8, 1] = NAN, float("inf")
    got = fg.ops.varlen_attention(q, k, v, starts_of(lengths))
    assert got[3:7, :2, 1].isnan().all() and got[7:, 2:].isnan().all()
    torch.testing.assert_close(got[:3], want[:3])
    torch.testing.assert_close(got[3:7, 2:], want[3:7, 2:])


def test_gradients_are_those_of_one_by_one():
    lengths = [3, 0, 4]
    given = [x.requires_grad_() for x in drawn(9)]
    grads = torch.autograd.grad(
        fg.ops.varlen_attention(*given, starts_of(lengths)).square().sum(), given
    )
    wants = torch.autograd.grad(one_by_one(*given, lengths).square().sum(), given)
    for got, want in zip(grads, wants, strict=True):
        torch.testing.assert_close(got, want)


def test_mistakes_are_named():
    q, k, v = drawn(5)
    starts = starts_of([5])
    for args, told in (
        ((q, k[:4], v, starts), r"k_TKD is .* T = 5"),
        ((q, k, v, starts.float()), r"cu_seqlens is .*int32 or int64"),
        ((q[:, :3], k, v, starts), "H=3 is no multiple of K=2"),
    ):
        with pytest.raises(TreeError, match=told):
            fg.ops.varlen_attention(*args)


# --- in a step ------------------------------------------------------------------------------------


@fg.struct
class Patches:
    """T patches in R images; windows are of at most 3 patches, so that T of them are enough."""

    x: Tensor = fg.buffer("T", "int64")
    images: Tensor = fg.buffer("R + 1", "int32", pad="last")
    windows: Tensor = fg.buffer("T + 1", "int64", pad="last")
    spec: fg.BatchSpec = fg.host()


def encode(params: Any, batch: Patches) -> Tensor:
    """Attention over images, then over windows; (T, E)."""
    x_TE = params["embed"][batch.x]
    for starts in (batch.images, batch.windows):
        qkv = (x_TE @ params["qkv"]).unflatten(-1, (3, 2, 4))
        x_TE = x_TE + fg.ops.varlen_attention(*qkv.unbind(1), starts).flatten(1)
    return x_TE


def patches(*images: int) -> Patches:
    starts, T = starts_of(list(images)), sum(images)
    begins = {at for n, end in zip(images, starts[1:].tolist()) for at in range(end - n, end, 3)}
    windows = [*sorted(begins), *[T] * (T + 1 - len(begins))]
    x = torch.randint(0, 9, (T,), generator=torch.Generator().manual_seed(T))
    return Patches(x, starts, torch.tensor(windows), fg.BatchSpec(T, len(images)))


def weights(device: Any = "cpu") -> Any:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return toys.moved({"embed": draw(9, 8), "qkv": draw(8, 24)}, device)


@pytest.mark.parametrize("modes", toys.MODES)
def test_graphs_equal_bare_forward(recorder_name, device, modes: str):
    params = weights(device)
    fast = fg.graphify(
        encode, stage="batch", limits=fg.Limits(16, 4), sizes=(4, 8, 16), modes=modes,
        recorder=recorder_name,
    )  # fmt: skip
    for images in ((5,), (3, 7), (1, 2, 4), (16,), (2, 3, 5, 6)):
        batch = toys.on(patches(*images), device)
        torch.testing.assert_close(fast(params, batch), encode(params, batch), **toys.CLOSE)
    ran = {str(mode) for _, _, mode in fast.stats.counts}
    assert ran == {
        {"FULL_DECODE_ONLY": "NONE", "FULL_AND_PIECEWISE": "PIECEWISE"}.get(modes, modes)
    }


def attended(x_TE: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    qkv = (x_TE @ weight).unflatten(-1, (3, 2, 4))
    return x_TE + fg.ops.varlen_attention(*qkv.unbind(1), starts).flatten(1)


LOOPS: dict[str, Any] = {
    "closed over by a scan": lambda p, x, s: fg.scan(
        lambda c, w: (attended(c, w, s), None), x, p["layers"]
    )[0],
    "carried": lambda p, x, s: fg.scan(
        lambda c, w: ((attended(c[0], w, c[1]), c[1]), None), (x, s), p["layers"]
    )[0][0],
    "in a choice": lambda p, x, s: fg.cond(
        p["qkv"].sum() > 99, lambda: x * 1, lambda: attended(x, p["qkv"], s)
    ),
    "copied and cast": lambda p, x, s: attended(x, p["qkv"], s.clone().long().int()),
}


@pytest.mark.parametrize("modes", ["FULL", "NONE"])
@pytest.mark.parametrize("what", LOOPS)
def test_in_loops_too(what: str, modes: Any, recorder_name, device):
    """Offsets that repeat their last are known to rise wherever they are handed on."""
    params = weights(device)
    params["layers"] = params["qkv"][None].repeat(3, 1, 1) / 3

    def forward(params: Any, batch: Patches) -> Tensor:
        return LOOPS[what](params, params["embed"][batch.x], batch.images)

    fast = fg.graphify(
        forward, stage="batch", limits=fg.Limits(16, 4), sizes=(4, 8, 16), modes=modes,
        recorder=recorder_name,
    )  # fmt: skip
    for images in ((5,), (3, 7), (1, 2, 4)):
        batch = toys.on(patches(*images), device)
        torch.testing.assert_close(fast(params, batch), forward(params, batch), **toys.CLOSE)


def test_offsets_that_padding_lets_fall_are_refused():
    @fg.struct
    class Careless(Patches):  # type: ignore[misc]
        windows: Tensor = fg.buffer("T + 1", "int64")

    batch = patches(3, 4)
    with pytest.raises(FieldError, match=r"batch.windows says where requests begin"):
        fg.graphify(encode, stage="batch", limits=fg.Limits(16, 4))(
            weights(), Careless(**vars(batch))
        )
