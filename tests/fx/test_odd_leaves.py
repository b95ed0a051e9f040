"""Odd leaves, held, donated and staged: each works as with the bare function, or says what to do.

What donation does to their layouts is in test_inplace.py, shared storage in test_donation.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fngraph as fg
from fngraph.errors import AliasError, FnGraphError, TransformError, TreeError

MODES = ["NONE", "PIECEWISE", "FULL"]
ROLES = ["held", "donated", "staged"]


class Plain(Tensor):
    """A subclass that changes nothing."""


class Loud(Tensor):
    """A subclass whose ops are its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(Tensor):
    """A subclass around another tensor, without memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = lambda x: x.inner if isinstance(x, Wrapped) else x  # noqa: E731
        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


def ramp(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(12).view(4, 3).to(dtype)


def spiral() -> Tensor:
    return torch.complex(ramp(), ramp().flip(0))


def frozen() -> Tensor:
    with torch.inference_mode():
        return ramp()


def fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(ramp())


DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "float16", "bfloat16",
    "float64", "complex64", "complex128", "float8_e4m3fn",
)  # fmt: skip
WORK = {
    "transposed": lambda: ramp().t().contiguous().t(),
    "rows with gaps": lambda: torch.arange(24.0).view(4, 6)[:, :3],
    "every other": lambda: torch.arange(24.0).view(4, 6)[:, ::2],
    "not at the start": lambda: torch.arange(24.0)[12:].view(4, 3),
    "no rows": lambda: torch.zeros(0, 3),
    "no columns": lambda: torch.zeros(4, 0),
    "empty past the end": lambda: torch.arange(5.0)[5:],
    "no dims": lambda: torch.tensor(2.5),
    "channels last": lambda: (
        torch.arange(12.0).view(1, 3, 2, 2).to(memory_format=torch.channels_last)
    ),
    "requires grad": lambda: ramp().requires_grad_(),
    "has a history": lambda: ramp().requires_grad_() * 2,
    "Parameter": lambda: nn.Parameter(ramp()),
    "Buffer": lambda: nn.Buffer(ramp()),
    "conjugated": lambda: spiral().conj(),
    "negative": lambda: spiral().conj().imag,
    "inference": frozen,
    "shared between processes": lambda: ramp().share_memory_(),
    "numpy's": lambda: torch.from_numpy(ramp().numpy()),
    "plain subclass": lambda: ramp().as_subclass(Plain),
    **{dtype: lambda dtype=dtype: ramp(getattr(torch, dtype)) for dtype in DTYPES},
}
OVERLAP = {
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "expanded number": lambda: torch.tensor(2.0).expand(4, 3),
    "overlapping": lambda: torch.arange(6.0).as_strided((4, 3), (1, 1)),
}
REFUSED = {
    "sparse coo": (lambda: torch.eye(4, 3).to_sparse(), r"sparse_coo.*indices and values"),
    "sparse csr": (lambda: torch.eye(4, 3).to_sparse_csr(), r"sparse_csr.*x\.to_dense\(\)"),
    "mkldnn": (lambda: ramp().to_mkldnn(), r"mkldnn.*x\.to_dense\(\)"),
    "quantized": (
        lambda: torch.quantize_per_tensor(ramp(), 0.1, 0, torch.quint8), r"quantized.*int_repr\(\)"
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        r"nested tensor.*x\.offsets\(\)",
    ),
    "wrapper subclass": (lambda: Wrapped(ramp()), r"Wrapped.*plain tensors that it is made of"),
    "function subclass": (lambda: ramp().as_subclass(Loud), r"Loud.*plain tensors"),
    "fake": (fake, r"FakeTensor.*fg\.like"),
    "lazy": (lambda: nn.UninitializedParameter(), r"without a shape.*module\(x\)"),
    "meta": (lambda: ramp().to("meta"), r"meta device"),
}  # fmt: skip


def wide(x: Tensor) -> Tensor:
    """The values, in a dtype in which they can be added."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def next_of(x: Tensor, amount: Tensor) -> Tensor:
    """A functional update in `x`'s own dtype."""
    return (wide(x) + amount).to(x.dtype)


def read(p: Any, b: Any) -> Any:
    return b.token_ids + wide(p["x"]).sum(), wide(p["x"]) * 2


def update(s: Any, b: Any) -> Any:
    total = (b.token_ids * (b.slot_mapping >= 0)).sum()
    return total * 1, {"x": next_of(s["x"], total)}


def exact(w: Any, xs: Any) -> Any:
    return w + wide(xs["x"]).sum(), wide(xs["x"]) * 2


def graphified(role: str, modes: str = "FULL") -> Any:
    """The function of a role, over exact shapes if it is staged."""
    if role == "staged":
        return fg.graphify(exact, modes=modes, stage="xs")
    fn, donate = (read, None) if role == "held" else (update, "s")
    return fg.graphify(
        fn, modes=modes, donate=donate, stage="b", limits=toys.LIMITS, sizes=toys.SIZES
    )


def same(got: Any, want: Any) -> None:
    plain = lambda x: x.detach().as_subclass(Tensor).clone()  # noqa: E731
    toys.assert_trees(tree_map(plain, got), tree_map(plain, want))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("what", [*WORK, *OVERLAP])
def test_held(what: str, modes: str):
    leaf, fast = {**WORK, **OVERLAP}[what](), graphified("held", modes)
    for batch in (toys.batch(3, 2), toys.decode(2), toys.batch(1)):
        same(fast({"x": leaf}, batch), read({"x": leaf}, batch))
    assert fast.stats.share(modes) == 1


@pytest.mark.sampled(20)
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("what", WORK)
def test_donated(what: str, modes: str):
    leaf, fast = {"x": WORK[what]()}, graphified("donated", modes)
    want, at = {"x": WORK[what]()}, leaf["x"].data_ptr()
    for batch in (toys.batch(3, 2), toys.decode(2), toys.batch(1)):
        out, want = update(want, batch)
        got, back = fast(leaf, batch)
        assert back is leaf and leaf["x"].data_ptr() == at
        same((got, leaf), (out, want))
    assert fast.stats.share(modes) == 1


@pytest.mark.sampled(20)
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("what", [*WORK, *OVERLAP])
def test_staged(what: str, modes: str):
    make, fast, w = {**WORK, **OVERLAP}[what], graphified("staged", modes), torch.ones(2)
    for _ in range(2):
        same(fast(w, {"x": make()}), exact(w, {"x": make()}))
    assert fast.stats.share(modes) == 1


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("what", ["transposed", "every other", "expanded", "conjugated"])
def test_a_staged_leaf_is_dense_to_forward_in_every_mode(what: str, modes: str):
    """As its static buffer is: what a trace says of it (a view, a stride) holds."""
    make, w = {**WORK, **OVERLAP}[what], torch.ones(2)
    fast = fg.graphify(lambda w, xs: (w * 1, xs.view(-1) + 0), modes=modes, stage="xs")
    same(fast(w, make()), (w, make().reshape(-1)))


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("array", [False, True], ids=["a view", "another storage"])
def test_a_batch_that_lies_in_the_state_is_read_as_it_was(array: bool, modes: str):
    """The last token, kept in the state and passed as the batch: it was copied before the write."""

    def forward(s: Any, xs: Any) -> Any:
        s["last"].add_(1)
        return xs * 10, s

    fast = fg.graphify(forward, modes=modes, donate="s", stage="xs")
    kept = np.zeros(4, np.int64)
    s = {"last": torch.from_numpy(kept)}
    for i in range(3):
        xs = torch.from_numpy(kept[1:3]) if array else s["last"][1:3]
        out, _ = fast(s, xs)
        assert out.tolist() == [10 * i, 10 * i] and kept.tolist() == [i + 1] * 4
    assert fast.stats.share(modes) == 1


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("what", OVERLAP)
def test_a_donated_leaf_whose_elements_share_memory(what: str, modes: str):
    leaf = OVERLAP[what]()
    before = leaf.clone()
    with pytest.raises(AliasError, match=r"s\['x'\] is donated.*strides.*x\.contiguous\(\)"):
        graphified("donated", modes)({"x": leaf}, toys.batch(2))
    assert torch.equal(leaf, before)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, on making some of these
@pytest.mark.parametrize(
    ("what", "role"),
    [(w, role) for w in REFUSED for role in ROLES if (w, role) != ("lazy", "staged")],
)
def test_what_is_not_plain_memory_is_refused(what: str, role: str):
    make, words = REFUSED[what]
    path = {"held": "p", "donated": "s", "staged": "xs"}[role]
    args = (torch.ones(2), {"x": make()}) if role == "staged" else ({"x": make()}, toys.batch(2))
    with pytest.raises(TreeError, match=rf"{path}\['x'\].*{words}") as caught:
        graphified(role)(*args)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("what", ["sparse coo", "meta"])
def test_a_batch_that_turns_odd_later_is_refused_too(what: str):
    """The same shape and dtype as the leaf that was captured for."""
    fast, w = graphified("staged"), torch.ones(2)
    fast(w, {"x": ramp()})
    with pytest.raises(TreeError, match=r"xs\['x'\]: expected dense memory.*(sparse|meta)"):
        fast(w, {"x": REFUSED[what][0]()})
    same(fast(w, {"x": ramp()}), exact(w, {"x": ramp()}))


@pytest.mark.parametrize("modes", MODES)
def test_a_batch_that_is_a_view_of_donated_state_is_read_as_it_was(modes: str):
    """The last result is kept in the state, and is the next batch: a step writes what it reads."""

    def forward(s: Any, b: Any) -> Any:
        s["kept"].mul_(2)
        return b["x"] + 1, s

    state = {"kept": ramp()}
    fast = fg.graphify(forward, modes=modes, donate=0, stage=1, recorder="tape")
    for _ in range(3):
        want = state["kept"] + 1
        same(fast(state, {"x": state["kept"].view(4, 3)})[0], want)


def test_meta_tensors_can_be_traced_but_not_bound():
    fast, leaf = graphified("held"), {"x": ramp().to("meta")}
    assert "held" in repr(fast.trace(leaf, batch=toys.batch(2)))


# --- several leaves of one memory -----------------------------------------------------------------


@pytest.mark.parametrize("modes", MODES)
def test_tied_weights_and_views_of_one_storage_may_be_held(modes: str):
    """One tensor under two paths, and rows, columns and a reinterpretation of one storage."""
    whole = torch.randn(toys.V, 4)
    params = {
        "embed": whole, "head": whole, "rows": whole[2:], "columns": whole[:, 1:3],
        "bits": whole.view(torch.int32), "turned": whole.t(),
    }  # fmt: skip

    def forward(p: Any, b: Any) -> Any:
        x = p["embed"][b.token_ids]
        more = p["rows"].sum() + p["columns"].sum() + (p["bits"] < 0).sum()
        return x @ p["head"].T, x @ p["turned"] + more

    fast = fg.graphify(forward, modes=modes, stage="b", limits=toys.LIMITS, sizes=toys.SIZES)
    for batch in (toys.batch(3, 2), toys.decode(2)):
        torch.testing.assert_close(fast(params, batch), forward(params, batch))
        whole.mul_(-1.5)  # one write shows in all of them
    assert fast.stats.share(modes) == 1


def test_tied_batch_leaves_are_staged_each():
    x, fast = ramp(), fg.graphify(lambda xs: xs["a"] - 2 * xs["b"], stage="xs")
    assert torch.equal(fast({"a": x, "b": x}), -x)
    assert torch.equal(fast({"a": x, "b": x + 1}), -x - 2)  # not frozen as one


def test_mixed_dtypes_in_one_tree():
    params = {dtype: ramp(getattr(torch, dtype)) for dtype in DTYPES}

    def forward(p: Any, b: Any) -> Any:
        total = sum(wide(x).real.sum() for x in p.values())
        return b.token_ids + total, {name: x.clone() for name, x in p.items()}

    fast = fg.graphify(forward, modes="FULL", stage="b", limits=toys.LIMITS, sizes=toys.SIZES)
    same(fast(params, toys.batch(3)), forward(params, toys.batch(3)))


@pytest.mark.gpu
def test_pinned_leaves():
    """Staged they are copied; held they are on the host, which is another device."""
    x, w = ramp().pin_memory(), torch.ones(2, device="cuda")
    fast = fg.graphify(exact, stage="xs")
    same(fast(w, {"x": x}), exact(w, {"x": x.cuda()}))
    with pytest.raises(TreeError, match="one device"):
        fg.graphify(lambda p, xs: xs + p["x"].sum() + p["w"].sum(), stage="xs")(
            {"x": x, "w": w}, torch.ones(2)
        )


# --- transforms over a graphified function, and one graphified function in another ---------------

OVER = {
    "grad": lambda fast, p, b: torch.func.grad(lambda w: fast({"x": w}, b)[1].sum())(p["x"]),
    "grad beside": lambda fast, p, b: torch.func.grad(lambda s: (fast(p, b)[1] * s).sum())(
        torch.tensor(1.0)
    ),
    "vmap": lambda fast, p, b: torch.func.vmap(lambda w: fast({"x": w}, b)[1])(p["x"]),
    "jvp": lambda fast, p, b: torch.func.jvp(lambda w: fast({"x": w}, b)[1], (p["x"],), (p["x"],)),
}


@pytest.mark.parametrize("ahead", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("what", OVER)
def test_a_transform_over_a_graphified_function_is_refused(what: str, ahead: bool):
    """Its results would be constants: a gradient of zero without a word."""
    fast, p, batch = graphified("held"), {"x": ramp()}, toys.batch(2)
    if ahead:
        fast(p, batch)
    with pytest.raises(TransformError, match=r"test_odd_leaves.py:\d+: .*Put the transform inside"):
        OVER[what](fast, p, batch)
    same(fast(p, batch), read(p, batch))


def test_a_transform_over_a_bound_step_is_refused():
    fast, p, batch = graphified("held"), {"x": ramp()}, toys.batch(2)
    step = fast.bind(p).capture(batch=batch, progress=False)
    with pytest.raises(FnGraphError, match="Put the transform inside"):
        torch.func.grad(lambda s: (step(batch)[1] * s).sum())(torch.tensor(1.0))
    same(step(batch), read(p, batch))


@pytest.mark.parametrize("ahead", [False, True], ids=["first call", "later call"])
def test_one_graphified_function_inside_another_is_a_part_of_it(ahead: bool):
    inner, p, batch = graphified("held"), {"x": ramp()}, toys.batch(2)
    if ahead:
        inner(p, batch)
    outer = fg.graphify(
        lambda p, b: torch.func.grad(lambda w: inner({"x": w}, b)[1].square().sum())(p["x"]),
        stage="b", limits=toys.LIMITS, sizes=toys.SIZES, modes="FULL",
    )  # fmt: skip
    same(outer(p, batch), 8 * p["x"])
    same(inner(p, batch), read(p, batch))  # nothing of the trace stays in it
    assert inner.stats.steps == 1 + ahead and outer.stats.share("FULL") == 1
