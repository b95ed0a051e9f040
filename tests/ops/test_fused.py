"""Fused ops: bit for bit their plain form on the CPU; what they promise of shapes, gradients and
layouts. Their kernels are in test_triton_fused.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_cases import CASES, FP8_CASES, OPS, PLAIN, draw, tensors
from torch import Tensor
from torch.nn.functional import linear

from fngraph.errors import AddressError, TransformError, TreeError
from fngraph.ops import lay_side_by_side, quantize_fp8_rows, scaled_linear
from fngraph.ops.side_by_side import why_apart
from fngraph.torch_facts.names import tree_leaves

cases = pytest.mark.parametrize("case", CASES)
all_cases = pytest.mark.parametrize("case", CASES | FP8_CASES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@cases
@DTYPES
def test_on_the_cpu_an_op_is_its_plain_form_bit_for_bit(case: str, dtype: torch.dtype):
    name, make = CASES[case]
    args = make(5, dtype)
    got, want = (tensors(fn(*args)) for fn in (getattr(OPS, name), PLAIN[name][1]))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) and a.dtype == dtype and a.is_contiguous()


@pytest.mark.parametrize("case", FP8_CASES)
@DTYPES
def test_one_that_rounds_to_fp8_is_two_ops_bit_for_bit(case: str, dtype: torch.dtype):
    name, make = FP8_CASES[case]
    args = make(5, dtype)
    plain, _, rows = name.partition("_fp8")
    given, scale = (args, ()) if rows else (args[:-1], args[-1])
    *total, made = tensors(getattr(OPS, plain)(*given))
    quantize = OPS.quantize_fp8_rows if rows else OPS.quantize_fp8
    want = *total, *tensors(quantize(made, *scale))
    got = getattr(OPS, name)(*args)
    kinds = [*[dtype] * len(total), torch.float8_e4m3fn, *[torch.float32] * bool(rows)]
    assert [x.dtype for x in tensors(got)] == kinds
    for a, b in zip(tensors(got), want, strict=True):
        assert torch.equal(a.float(), b.float()) and a.is_contiguous() and a.shape == b.shape
    if not rows:
        same, other = [*scale, scale[0].view(())], [*scale, scale[0].clone()]
        shared = tensors(getattr(OPS, name)(*given, same))[-1]
        assert torch.equal(shared.float(), want[-1].float())
        with pytest.raises(AddressError, match="2 scales by which one input is rounded"):
            getattr(OPS, name)(*given, other)
    leaf = args[0].detach().clone().requires_grad_()
    with pytest.raises(TransformError, match="has no gradient"):
        getattr(OPS, name)(leaf, *args[1:])


@all_cases
def test_an_op_keeps_what_torch_asks_of_ops(case: str):
    name, make = (CASES | FP8_CASES)[case]
    op, args = getattr(OPS, name).default, make(4, torch.float32)
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    empty = make(0, torch.float32)
    assert all(x.shape[-2:].numel() == 0 or not len(x) for x in tensors(op(*empty)))


@cases
def test_gradients_and_transforms_go_through_the_plain_form(case: str):
    name, make = CASES[case]
    op, plain, args = getattr(OPS, name), PLAIN[name][1], make(3, torch.float32)

    def loss(fn: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: sum(y.square().sum() for y in tensors(fn(x, *args[1:])))

    want = torch.func.grad(loss(plain))(args[0])
    assert want.abs().max() > 0
    torch.testing.assert_close(torch.func.grad(loss(op))(args[0]), want)
    leaf = args[0].detach().clone().requires_grad_()
    loss(op)(leaf).backward()
    torch.testing.assert_close(leaf.grad, want)
    twice = torch.stack([args[0], args[0] * 2])
    got = torch.vmap(lambda x: tensors(op(x, *args[1:]))[-1])(twice)
    torch.testing.assert_close(got[1], tensors(plain(args[0] * 2, *args[1:]))[-1])


# --- weights side by side -------------------------------------------------------------------------


def projections(rows: tuple[int, ...] = (8, 4, 4), width: int = 6) -> dict[str, Tensor]:
    return {
        name: draw(n, width, seed=i) for i, (name, n) in enumerate(zip(("wq", "wk", "wv"), rows))
    }


def test_weights_are_laid_side_by_side_and_stay_what_they_were():
    layers = [{"attn": projections(), "w_gate": draw(9, 6), "w_up": draw(9, 6), "norm": draw(6)}]
    named = {f"a.{x}_proj.weight": draw(3, 6, seed=i) for i, x in enumerate("qkv")}
    biases = {f"a.{x}_proj.bias": draw(3, seed=i) for i, x in enumerate("qkv")}
    given = {"layers": layers, "names": named, "biases": biases, "apart": {"wq": draw(8, 6)}}
    laid = lay_side_by_side(given)
    new = laid["layers"][0]
    groups = new["attn"].values(), (new["w_gate"], new["w_up"]), laid["names"].values()
    groups = *groups, laid["biases"].values()
    assert [why_apart(list(group)) for group in groups] == [None] * 4
    assert why_apart(list(layers[0]["attn"].values())) is not None
    for a, b in zip(tree_leaves(laid), tree_leaves(given)):
        assert torch.equal(a, b)
    assert laid["apart"]["wq"] is given["apart"]["wq"] and new["norm"] is layers[0]["norm"]
    again = lay_side_by_side(laid)
    assert again["layers"][0]["attn"]["wk"].data_ptr() == new["attn"]["wk"].data_ptr()


def test_equal_scales_of_one_input_become_one_tensor():
    def scales(*values: float) -> dict[str, Any]:
        named = zip(("wq", "wk", "wv"), values)
        return {
            name: {"input_scale": torch.tensor(x), "scale": torch.tensor(x)} for name, x in named
        }

    laid = lay_side_by_side([scales(0.5, 0.5, 0.5), scales(0.5, 0.5, 0.25)])
    memory = [[one["input_scale"].data_ptr() for one in layer.values()] for layer in laid]
    assert [len(set(found)) for found in memory] == [1, 3]
    assert [one["input_scale"].item() for one in laid[1].values()] == [0.5, 0.5, 0.25]
    assert len({one["scale"].data_ptr() for one in laid[0].values()}) == 3


def test_what_cannot_lie_side_by_side_is_refused_by_name():
    tied = draw(4, 6)
    for wrong, words in (
        (projections() | {"wk": draw(4, 5)}, r"params\['wq'\] \(8, 6\) .*cannot lie side by side"),
        (projections() | {"wk": tied, "wv": tied}, r"params\['wv'\] share memory \(tied weights\)"),
    ):
        with pytest.raises(TreeError, match=words):
            lay_side_by_side(wrong)


def test_one_product_reads_weights_where_they_lie_and_looks_whether_they_do():
    x, weights = draw(5, 6), list(lay_side_by_side(projections()).values())
    op = OPS.linear_side_by_side.default
    biases = list(draw(16).split([8, 4, 4]))
    for added in ([], biases):
        got = op(x, weights, added)
        want = [linear(x, *pair) for pair in zip(weights, added or [None] * 3)]
        torch.testing.assert_close(got, torch.cat(want, 1))
        meta = [[w.to("meta") for w in those] for those in (weights, added)]
        assert op(x.to("meta"), *meta).shape == got.shape
    for one in (weights[1], biases[1]):
        one.mul_(2)  # read where they lie, no copy
    torch.testing.assert_close(op(x, weights, biases)[:, 8:12], linear(x, weights[1], biases[1]))
    for wrong, words in (
        ((weights[::-1], biases), "weights of .* any more: one does not lie right behind"),
        ((weights, biases[::-1]), "biases of .* any more: one does not lie right behind"),
        ((weights, [biases[0], *draw(2, 4)]), r"Bind biases that do"),
    ):
        with pytest.raises(AddressError, match=words):
            op(x, *wrong)
    with pytest.raises(TransformError, match=r"Write torch\.nn\.functional\.linear"):
        torch.func.grad(lambda y: op(y, weights, []).sum())(x)


def test_one_product_in_fp8_reads_weights_and_the_scales_of_their_rows():
    pairs = {name: quantize_fp8_rows(x) for name, x in projections((32, 16, 16), 48).items()}
    given = {name: {"values": a, "scale": b} for name, (a, b) in pairs.items()}
    laid = lay_side_by_side(given).values()
    weights, scales = [x["values"] for x in laid], [x["scale"] for x in laid]
    for a, b in zip((*weights, *scales), (x[i] for i in (0, 1) for x in pairs.values())):
        assert a.dtype == b.dtype and torch.equal(a.float(), b.float())
    x, by = quantize_fp8_rows(draw(5, 48))
    op = OPS.scaled_linear_side_by_side.default
    got = op(x, [by, by], weights, scales, torch.bfloat16)
    want = [scaled_linear(x, by, *pair, torch.bfloat16) for pair in zip(weights, scales)]
    torch.testing.assert_close(got, torch.cat(want, 1))
    meta = [[y.to("meta") for y in those] for those in (weights, scales)]
    fake = op(x.to("meta"), [by.to("meta")], *meta, torch.bfloat16)
    assert fake.shape == got.shape and fake.dtype == got.dtype
    scales[1].mul_(2)
    again = op(x, [by], weights, scales, torch.bfloat16)
    torch.testing.assert_close(again[:, 32:48], 2 * got[:, 32:48])
    for wrong, words in (
        (([by], weights[::-1], scales), "weights of .* any more: one does not lie right behind"),
        (([by], weights, scales[::-1]), "scales of .* any more: one does not lie right behind"),
        (([by, by.clone()], weights, scales), "2 scales by which one input is rounded"),
    ):
        with pytest.raises(AddressError, match=words):
            op(x, *wrong, torch.bfloat16)
    with pytest.raises(TransformError, match=r"Write fg\.ops\.scaled_linear"):
        torch.vmap(lambda y: op(y, [by], weights, scales, torch.bfloat16))(x[None])
