"""What torch refuses of a call in `forward`, in the caller's words: paths, lines, dtypes, fixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fngraph as fg
from fngraph import errors

E = 8


@fg.struct
class Batch:
    x: Tensor = fg.buffer("T 8", "bfloat16")
    ids: Tensor = fg.buffer("T", "int64")
    spec: fg.BatchSpec = fg.host()


def batch(tokens: int = 3) -> Batch:
    x = torch.ones(tokens, E, dtype=torch.bfloat16)
    return Batch(x, torch.arange(tokens), fg.BatchSpec(tokens, 1))


def params(**more: Tensor) -> dict[str, Tensor]:
    return {"w": torch.ones(E, E), "v": torch.ones(5), "h": torch.ones(E, E).bfloat16()} | more


def told(forward: Callable[..., Any], given: Any = None, modes: str = "FULL") -> str:
    """What a call raises, which is what a check reports at the same line."""
    given, options = given or params(), {"stage": "b", "limits": fg.Limits(16, 4)}
    with pytest.raises(errors.OperatorError) as caught:
        fg.graphify(forward, modes=modes, **options)(given, batch())
    text = str(caught.value)
    report = fg.check(forward, given, batch(), **options)
    assert [type(e) for e in report.errors] == [errors.OperatorError]
    assert str(report.errors[0]).removesuffix(". What comes after it was not checked") == text
    with pytest.raises(RuntimeError):
        forward(given, batch())
    return text


X, W = "b.x, bfloat16[T, 8]", "p['w'], float32[8, 8]"
MIXED: dict[str, Callable[[Any, Any], Any]] = {
    "linear": lambda p, b: F.linear(b.x, p["w"]),
    "matmul": lambda p, b: b.x @ p["w"],
    "a view": lambda p, b: b.x @ p["w"].t()[:, :3],
    "bmm": lambda p, b: torch.bmm(b.x[None], p["w"][None]),
    "a bias": lambda p, b: F.linear(b.x, p["h"], p["w"][0]),
    "mv": lambda p, b: b.x.mv(p["w"][0]),
    "einsum": lambda p, b: torch.einsum("te,ef->tf", b.x, p["w"]),
    "conv1d": lambda p, b: F.conv1d(b.x[:, :, None], p["w"][:, :, None]),
    "index_copy": lambda p, b: p["w"].index_copy(0, b.ids[:1], p["h"][:1]),
}


@pytest.mark.parametrize("what", MIXED)
def test_operands_of_different_dtypes_are_named_with_the_fix(what: str):
    text = told(MIXED[what])
    assert text.startswith("test_operands.py:") or "/test_operands.py:" in text.split(": ")[0]
    assert W in text, text
    if what == "index_copy":  # of two weights
        assert "p['h'], bfloat16[8, 8]" in text
        return
    assert X in text, text
    assert text.endswith(
        "Give them one dtype: p['w'].to(torch.bfloat16) ahead of the call, or b.x.to(torch.float32)"
    )


def test_of_what_forward_makes_the_line_is_named():
    def forward(p: Any, b: Any) -> Any:
        x = b.x * 2  # here
        y = x.view(-1, E)
        return y @ p["w"]

    line = forward.__code__.co_firstlineno + 1
    text = told(forward)
    assert f"test_operands.py:{line} makes, bfloat16[T, 8]; and {W}" in text
    assert text.endswith(f"test_operands.py:{line} makes, .to(torch.float32)")


def test_large_weights_are_no_exception_and_integers_become_what_floats_are():
    w = torch.empty(1).expand(E, 1 << 24)
    assert "p['w'], float32[8, 16777216]" in told_at_trace(lambda p, b: b.x @ p["w"], w=w)
    text = told(lambda p, b: torch.mm(b.x.int(), p["w"]))
    assert text.endswith("makes, .to(torch.float32)") and "p['w'].to" not in text


def told_at_trace(forward: Any, **more: Tensor) -> str:
    fast = fg.graphify(forward, stage="b", limits=fg.Limits(16, 4))
    with pytest.raises(errors.OperatorError) as caught:
        fast.trace(fg.like(params(**more)), batch=batch())
    return str(caught.value)


def test_every_line_is_listed_by_a_check():
    def forward(p: Any, b: Any) -> Any:
        x = b.x @ p["w"]
        x = F.linear(x.bfloat16(), p["w"])
        return x

    report = fg.check(forward, params(), batch(), stage="b")
    assert [type(e) for e in report.errors] == 2 * [errors.OperatorError]


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "sizes": (lambda p, b: b.x + p["v"], ["calls add", "size of tensor a", X, "p['v'], flo"]),
    "a layer norm": (lambda p, b: F.layer_norm(b.x, (7,), p["v"]), ["calls layer_norm", X]),
    "indices": (lambda p, b: p["w"].gather(0, b.x), ["calls gather", "int32/int64", X, W]),
    "many": (lambda p, b: torch.stack([b.x, p["v"], p["w"], p["h"], b.x + 1, b.ids]),
             ["calls stack", X, "; and 2 tensors more"]),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_torch_refuses_is_told_with_its_operands(what: str):
    forward, words = REFUSED[what]
    text = told(forward)
    for word in [
        *words,
        "which torch refuses (RuntimeError: ",
        "Called by itself, forward should fail here too",
    ]:
        assert word in text, (word, text)


def test_forward_may_catch_what_torch_refuses():
    def careful(p: Any, b: Any) -> Any:
        try:
            x = b.x @ p["w"]
        except RuntimeError:
            x = b.x.float() @ p["w"]
        try:
            y = p["w"].t().view(-1)
        except RuntimeError:
            y = p["w"].t().reshape(-1)
        return x + y[:E], p["w"] * 2

    fast = fg.graphify(careful, stage="b", limits=fg.Limits(16, 4))
    for one, other in zip(fast(params(), batch()), careful(params(), batch())):
        assert torch.equal(one, other)


@torch.library.custom_op("fngraph_tests::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    raise RuntimeError("mine")


@fails.register_fake
def mine(x: Tensor) -> Tensor:
    raise RuntimeError("mine")


@pytest.mark.parametrize("call", [lambda x: torch.vmap(mine)(x), lambda x: fails(x)])
def test_what_the_users_code_raises_inside_of_a_call_of_torchs_is_its_own(call: Any):
    def forward(p: Any, b: Any) -> Any:
        return call(b.x)

    with pytest.raises(RuntimeError) as caught:
        fg.graphify(forward, stage="b")(params(), batch())
    assert type(caught.value) is RuntimeError and str(caught.value) == "mine"


def test_pythons_own_kinds_of_error_stay_and_say_what_was_given():
    with pytest.raises(IndexError, match="Dimension out of range") as caught:
        fg.graphify(lambda p, b: b.x.transpose(0, 5), stage="b")(params(), batch())
    assert f"transpose: It was given {X}" in caught.value.__notes__


@pytest.mark.parametrize(("modes", "op"), [("NONE", "aten.index.Tensor"), ("FULL", "aten::index")])
def test_what_only_a_run_shows_has_a_note_of_its_op(modes: str, op: str):
    fast = fg.graphify(lambda p, b: p["w"][b.ids], stage="b", modes=modes)
    with pytest.raises(IndexError) as caught:
        fast(params(), dataclasses.replace(batch(), ids=torch.full((3,), E)))
    assert op in caught.value.__notes__[0]


KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "promoted": lambda p, b: b.x + p["w"][0],
    "a layer norm of float32 weights": lambda p, b: F.layer_norm(b.x, (E,), p["w"][0], p["w"][1]),
    "cat": lambda p, b: torch.cat([b.x, b.x.float()], 1),
    "where": lambda p, b: torch.where(b.ids[:, None] > 1, b.x, p["w"][0]),
    "indexed": lambda p, b: p["w"][b.ids] * b.x,
    "cast": lambda p, b: b.x @ p["w"].to(b.x.dtype),
}


@pytest.mark.parametrize("what", KEPT)
def test_dtypes_that_torch_takes_together_run(what: str):
    fast = fg.graphify(KEPT[what], stage="b", limits=fg.Limits(16, 4))
    assert torch.equal(fast(params(), batch()), KEPT[what](params(), batch()))


def test_under_autocast_operands_are_what_the_kernel_gets():
    fast = fg.graphify(lambda p, b: b.x @ p["w"], stage="b", limits=fg.Limits(16, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(params(), batch()).dtype is torch.bfloat16
