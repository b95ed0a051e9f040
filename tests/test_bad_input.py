"""Bad input: a typed error that says what, where and how to mend it, and nothing is lost.

"Nothing is lost": the state is bitwise as it was, what was captured stays, and the same step works
right after. Lines of `forward` that break a rule are tested one by one in fx/test_purity.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import toys
from refusing import CLOSURE, DONATION, GOOD, SPEC, SYNC, TREE, WEIGHT, attend, refused, tally

import fngraph as fg
from fngraph import errors

# --- functions that cannot be graphified ----------------------------------------------------------


def writes_params(p: Any, s: Any, b: Any) -> Any:
    p["w"].mul_(2)
    return toys.tally(p, s, b)


def after(change: Callable[[torch.Tensor, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """`tally`, and then `change` of what it returns."""
    return lambda p, s, b: change(*toys.tally(p, s, b))


HERE = "test_bad_input.py:"
BROKEN: dict[str, tuple[Any, tuple[type, type], list[str]]] = {
    "a closed-over tensor": (
        after(lambda x, s: (x * WEIGHT, s)), CLOSURE, [HERE, "'WEIGHT'", "argument"]),
    ".item()": (after(lambda x, s: (x * x.max().item(), s)), SYNC, [HERE, "torch.where"]),
    "if tensor": (after(lambda x, s: (x if x.sum() > 0 else -x, s)), SYNC, [HERE, "if tensor"]),
    "a write to what was not donated": (
        writes_params, (errors.MutationError, RuntimeError), [HERE, "p['w']", "donate=", '"p"']),
    "a donated leaf not returned": (
        after(lambda x, s: (x, {"seen": s["seen"]})), DONATION, ["s['total']", "eturn"]),
    "a donated leaf of another shape": (
        after(lambda x, s: (x, {**s, "total": s["total"][1:]})), DONATION,
        ["s['total']", "[11, 8]", "[10, 8]"]),
    "a donated leaf of another dtype": (
        after(lambda x, s: (x, {**s, "seen": s["seen"].float()})), DONATION,
        ["s['seen']", "int64", "float32", ".to("]),
    "a branch on a size": (
        after(lambda x, s: (x if x.shape[0] > 4 else -x, s)), (errors.BranchError, RuntimeError),
        [HERE, "tokens or requests"]),
    "a read of the spec": (
        lambda p, s, b: (p["w"] * b.spec.num_tokens, s), (errors.HostFieldError, RuntimeError),
        [HERE, "staged leaf"]),
    "global RNG": (
        after(lambda x, s: (x + torch.randn_like(x), s)), (errors.RandomError, RuntimeError),
        [HERE, "argument"]),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("ahead", [False, True], ids=["called", "captured ahead"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_function_that_breaks_a_rule(recorder_name, device, what: str, ahead: bool):
    broken, (kind, builtin), words = BROKEN[what]
    params, state = toys.tally_params(device), toys.tally_state(device)
    before = toys.clone((params, state))
    options = {"donate": "s", "stage": "b", "limits": toys.LIMITS, "sizes": toys.SIZES}
    fast = fg.graphify(broken, recorder=recorder_name, **options)
    for _ in range(2):  # the second time is no better than the first
        with refused(kind, builtin, words):
            if ahead:
                fast.bind(params).capture(state, batch=toys.batch(1), progress=False)
            else:
                fast(params, state, toys.batch(2))
        toys.assert_trees((params, state), before)
    good = fg.graphify(lambda p, s, b: toys.tally(p, s, b), recorder=recorder_name, **options)
    want, after = toys.bare(toys.tally, params, state, toys.on(toys.batch(2), device))
    toys.assert_trees(good(params, state, toys.batch(2)), (want, after), **toys.CLOSE)


# --- steps that cannot be taken -------------------------------------------------------------------


class Served:
    """A model under way: several keys captured, a state with something in it."""

    def __init__(self, recorder: str, device: Any, ahead: bool) -> None:
        self.traces = 0
        self.params = toys.attention_params(device=device)
        self.cache = toys.attention_cache(device=device)
        self.device, self.ahead = device, ahead
        self.fast = fg.graphify(self.forward, recorder=recorder, **GOOD)
        if ahead:
            self.bound = self.fast.bind(self.params).capture(
                self.cache, batch=toys.batch(1), progress=False
            )
        for batch in (toys.batch(3, 2), toys.decode(2, 3), toys.batch(9, 1)):
            self.step(batch)

    def forward(self, params: Any, cache: Any, batch: Any) -> Any:
        """`toys.attend`, counting traces."""
        self.traces += 1
        return toys.attend(params, cache, batch)

    def step(self, batch: Any, cache: Any = None) -> Any:
        """One step, over weights that were bound or are passed."""
        cache = self.cache if cache is None else cache
        if self.ahead:
            return self.bound(cache, batch)
        return self.fast(self.params, cache, batch)

    @property
    def captured(self) -> Any:
        """The step at work."""
        return self.bound if self.ahead else self.fast.steps[0]

    def snapshot(self) -> Any:
        """All that must not be lost."""
        captured = self.captured
        return (
            self.traces, id(captured), {k: id(v) for k, v in captured.replays.items()},
            captured.stats.copy(), toys.clone(self.cache), toys.clone(self.params),
        )  # fmt: skip

    def check(self, before: Any) -> None:
        """Nothing was lost since `before`, and a step works."""
        *now, cache, params = self.snapshot()
        assert now == list(before[:-2])
        toys.assert_trees((cache, params), before[-2:])
        for batch in (toys.decode(2, 4, seed=5), toys.batch(3, 2, seed=6)):
            there = toys.on(batch, self.device)
            want, after = toys.bare(toys.attend, self.params, self.cache, there)
            got, back = self.step(batch)
            assert back is self.cache
            toys.assert_trees((got, back), (want, after), **toys.CLOSE)
        assert self.traces == before[0] and id(self.captured) == before[1]
        assert {k: id(v) for k, v in self.captured.replays.items()} == before[2]


@pytest.fixture(
    scope="module",
    params=[
        ("tape", "cpu", False), ("tape", "cpu", True),
        pytest.param(("cuda", "cuda", False), marks=pytest.mark.gpu),
        pytest.param(("cuda", "cuda", True), marks=pytest.mark.gpu),
    ],
    ids=lambda p: f"{p[0]}-{'captured ahead' if p[2] else 'called'}",
)  # fmt: skip
def served(request: pytest.FixtureRequest) -> Served:
    """Called like `forward`, or bound and captured ahead. One for all: nothing is ever lost."""
    recorder, device, ahead = request.param
    return Served(recorder, torch.device(device), ahead)


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[], Any]:
    """Makes a good batch of three tokens with one field changed."""
    good = toys.batch((1, 5), (2, 3))
    return lambda: dataclasses.replace(good, **{name: change(getattr(good, name))})


def spec(*args: Any, **more: Any) -> Callable[[], Any]:
    """With another spec."""
    return changed("spec", lambda old: fg.BatchSpec(*args, **more))


@fg.struct
class Other:
    """A batch of another class."""

    token_ids: torch.Tensor = fg.buffer("T", "int64")
    spec: fg.BatchSpec = fg.host()


BAD_BATCHES: dict[str, tuple[Callable[[], Any], tuple[type, type], list[str]]] = {
    "dtype": (changed("token_ids", lambda x: x.int()), TREE,
              ["batch.token_ids", "int64[T]", "int32", "x.to(torch.int64)"]),
    "dtype of offsets": (changed("query_start_loc", lambda x: x.long()), TREE,
                         ["batch.query_start_loc", "int32[R + 1]", "int64"]),
    "rank": (changed("token_ids", lambda x: x[None]), TREE, ["batch.token_ids", "[3]", "[1, 3]"]),
    "rank below": (changed("block_tables", lambda x: x[:, 0]), TREE,
                   ["batch.block_tables", "[2, 3]", "[2]"]),
    "length over T": (changed("slot_mapping", lambda x: torch.cat([x, x])), TREE,
                      ["batch.slot_mapping", "T=3", "[6]"]),
    "length over R": (changed("seq_lens", lambda x: x[:1]), TREE, ["batch.seq_lens", "R=2", "[1]"]),
    "length over R + 1": (changed("query_start_loc", lambda x: x[1:]), TREE,
                          ["batch.query_start_loc", "[3]", "R=2", "[2]"]),
    "a wider B": (changed("block_tables", lambda x: torch.cat([x, x], 1)), TREE,
                  ["batch.block_tables", "B=3", "[2, 6]", "no bound",
                   "Pass limits=fg.Limits(..., B=...)"]),
    "a narrower B": (changed("block_tables", lambda x: x[:, :1]), TREE,
                     ["batch.block_tables", "B is 3 in every batch", "pad(x, (0, 2))"]),
    "a list": (changed("token_ids", lambda x: x.tolist()), TREE, ["batch"]),
    "None": (changed("token_ids", lambda x: None), TREE, ["batch.token_ids"]),
    "another class": (lambda: Other(torch.zeros(3).long(), fg.BatchSpec(3, 2)), TREE, ["batch"]),
    "no spec": (changed("spec", lambda old: None), TREE,
                ["batch.spec", "None", "fg.BatchSpec(num_tokens="]),
    "a spec that is a tuple": (changed("spec", lambda old: (3, 2)), TREE,
                               ["batch.spec", "(3, 2)", "fg.BatchSpec(num_tokens="]),
    "a spec of more tokens than the leaves": (spec(4, 2), TREE, ["batch.token_ids", "T=4", "[3]"]),
    "a spec of fewer requests than the leaves": (spec(3, 1), TREE,
                                                 ["batch.seq_lens", "R=1", "[2]"]),
    "a spec that contradicts itself": (
        spec(3, 2, query_len=2), SPEC,
        ["query_len=2", "4 tokens", "num_tokens=3", "query_len=None"]),
    "more requests than tokens": (spec(3, 4), SPEC, ["num_reqs=4", "num_tokens=3"]),
    "no tokens": (spec(0, 0), SPEC, ["num_tokens=0"]),
    "a spec of tensors": (spec(torch.tensor(3), 2), SPEC, ["=tensor(3)", "int("]),
    "beyond max_tokens": (lambda: toys.batch(10, 7), SPEC, ["max_tokens=16", "num_tokens=17"]),
    "beyond max_reqs": (lambda: toys.batch(1, 1, 1, 1, 1), SPEC, ["max_reqs=4", "num_reqs=5"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_BATCHES)
def test_a_bad_batch(served: Served, what: str):
    make, (kind, builtin), words = BAD_BATCHES[what]
    served.step(changed("spec", lambda old: old)())  # as it should be: such leaves are known then
    before = served.snapshot()
    for _ in range(2):
        with refused(kind, builtin, words):
            served.step(make())
    served.check(before)


@functools.cache
def in_mode(modes: str) -> Any:
    """A function under way, its weights and its cache."""
    fast, params, cache = attend(modes=modes, sizes=(8,))
    fast(params, cache, toys.batch(2))
    return fast, params, cache


@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("what", BAD_BATCHES)
def test_a_bad_batch_is_as_bad_in_every_mode(what: str, modes: str):
    """Eager steps are held to the same rules."""
    make, (kind, builtin), words = BAD_BATCHES[what]
    fast, params, cache = in_mode(modes)
    before = toys.clone(cache)
    with refused(kind, builtin, words):
        fast(params, cache, make())
    toys.assert_trees(cache, before)


@pytest.mark.parametrize("what", sorted(BAD_BATCHES.keys() - {"another class"}))
def test_a_bad_batch_at_the_very_first_call(what: str):
    make, _, words = BAD_BATCHES[what]
    fast, params, cache = attend()
    with pytest.raises(errors.FnGraphError) as caught:
        fast(params, cache, make())
    assert words[0].split(".")[0] in str(caught.value)
    batch = toys.batch(3, 2)
    want, after = toys.bare(toys.attend, params, cache, batch)
    toys.assert_trees(fast(params, cache, batch), (want, after), **toys.CLOSE)


# --- leaves that moved ----------------------------------------------------------------------------


def data_elsewhere(layer: Any, w: torch.Tensor) -> Callable[[], None]:
    """`.data =`: the same object over other memory; what `module.double()` or `.to()` do."""
    old, w.data = w.data, w.data.clone()
    return lambda: setattr(w, "data", old)


def another_tensor(layer: Any, w: torch.Tensor) -> Callable[[], None]:
    layer["qkv"] = w.clone()
    return lambda: layer.update(qkv=w)


def set_elsewhere(layer: Any, w: torch.Tensor) -> Callable[[], None]:
    storage, shape, stride = w.untyped_storage(), w.shape, w.stride()
    w.set_(w.clone())
    return lambda: w.set_(storage, 0, shape, stride)


def resized(layer: Any, w: torch.Tensor) -> Callable[[], None]:
    keep, shape, stride = w.detach(), w.shape, w.stride()
    w.set_(torch.empty(0, device=w.device).untyped_storage(), 0, (0,), (1,))
    w.resize_(1000, 1000).resize_(shape)
    return lambda: w.set_(keep.untyped_storage(), 0, shape, stride)


MOVES = {f.__name__: f for f in (data_elsewhere, another_tensor, set_elsewhere, resized)}


@pytest.mark.parametrize("move", MOVES)
def test_weights_that_moved_since_capture(served: Served, move: str):
    if served.ahead and move == "another_tensor":
        return  # bound weights are flattened once: what the dict holds now is not looked at
    before = served.snapshot()
    layer = served.params["layers"][1]
    undo = MOVES[move](layer, layer["qkv"])
    for _ in range(2):  # an error is not an invitation to bind anew
        words = ["params['layers'][1]['qkv']", "moved", "copy_", "capture again"]
        with refused(errors.AddressError, RuntimeError, words):
            served.step(toys.decode(2, 4))
    undo()
    served.check(before)


def test_a_cache_that_moved_since_capture(served: Served):
    before, k = served.snapshot(), served.cache[1][0]
    old, k.data = k.data, k.data.clone()
    with pytest.raises(errors.AddressError, match=r"cache\[1\]\[0\]"):
        served.step(toys.decode(2, 4))
    k.data = old
    served.check(before)


@pytest.mark.parametrize(
    ("other", "kind", "message"),
    [(toys.clone, errors.AddressError, r"cache\[0\]\[0\].*capture again"),
     (lambda cache: toys.attention_cache(), errors.AddressError,
      r"cache\[0\]\[0\].*capture again"),
     (list, errors.TreeError, "cache"), (lambda cache: cache[:1], errors.TreeError, "cache"),
     (lambda cache: (*cache, cache[0]), errors.TreeError, "cache")],
    ids=["a clone", "a new one", "a list", "fewer layers", "more layers"],
)  # fmt: skip
def test_another_cache(served: Served, other: Any, kind: type, message: str):
    before = served.snapshot()
    with pytest.raises(kind, match=message):
        served.step(toys.decode(2, 4), other(served.cache))
    served.check(before)


def test_weights_of_another_structure():
    served = Served("tape", torch.device("cpu"), ahead=False)
    before = served.snapshot()
    whole = served.params
    for other, word in (
        ({**whole, "extra": torch.ones(1)}, "params['extra']"),
        ({k: v for k, v in whole.items() if k != "head"}, "params['head']"),
    ):
        served.params = other
        with refused(errors.TreeError, TypeError, [word]):
            served.step(toys.decode(2, 4))
    served.params = whole
    served.check(before)


# --- arguments that are not trees of tensors ------------------------------------------------------


@pytest.mark.parametrize("leaf", [3, 2.5, "text", [1, 2]], ids=repr)
def test_a_held_leaf_that_is_no_tensor(leaf: Any):
    fast, params = tally(), toys.tally_params()
    with pytest.raises(errors.TreeError, match=r"params\['scale'\].*fg\.static"):
        fast({**params, "scale": leaf}, toys.tally_state(), toys.batch(2))
    fast(params, toys.tally_state(), toys.batch(2))


def test_leaves_on_two_devices():
    params = {**toys.tally_params(), "far": torch.ones(2, device="meta")}
    with pytest.raises(errors.TreeError, match=r"meta.*one device"):
        tally()(params, toys.tally_state(), toys.batch(2))


def test_the_number_of_arguments():
    fast = tally()
    params, state = toys.tally_params(), toys.tally_state()
    with pytest.raises(errors.TreeError, match=r"trace.*params.*state.*got 1"):
        fast.trace(params)
    with pytest.raises(errors.TreeError, match=r"bind.*params.*got 2"):
        fast.bind(params, state)
    step = fast.bind(params).capture(state, batch=toys.batch(1), progress=False)
    with pytest.raises(errors.TreeError, match=r"'state', 'batch'; 3 were passed"):
        step(params, state, toys.batch(1))


def test_tensors_other_than_those_that_were_traced():
    params, state = toys.tally_params(), toys.tally_state()
    compiled = tally().trace(params, state, batch=toys.batch(1)).split().lower().compile()
    for other, words in (
        ({"w": params["w"].double()}, ["params['w']", "float32", "float64"]),
        ({"w": params["w"][1:]}, ["params['w']", "[11, 8]", "[10, 8]"]),
        ({"w": params["w"].t().contiguous().t()}, ["params['w']"]),
        ({"v": params["w"]}, ["params['w']", "params['v']"]),
    ):
        with refused(errors.TreeError, TypeError, words):
            compiled.capture(other, state)
    compiled.capture(params, state)


@fg.struct
class Undeclared:
    """A batch with a field that does not say how it is staged."""

    token_ids: torch.Tensor = fg.buffer("T", "int64")
    extra: torch.Tensor
    spec: fg.BatchSpec = fg.host()


@fg.struct
class Configured:
    """A batch with a static field, which is part of its structure."""

    token_ids: torch.Tensor = fg.buffer("T", "int64")
    scale: int = fg.static()
    spec: fg.BatchSpec = fg.host()


def test_a_batch_with_a_field_that_has_no_buffer():
    fast = fg.graphify(lambda w, batch: w[batch.token_ids] + batch.extra, stage="batch")
    batch = Undeclared(torch.zeros(2).long(), torch.ones(1), fg.BatchSpec(2, 1))
    with pytest.raises(errors.FnGraphError, match="extra"):
        fast(torch.rand(3), batch)


def test_a_batch_with_a_static_field():
    fast = fg.graphify(lambda w, batch: w[batch.token_ids] * batch.scale, stage="batch")
    w = torch.rand(3)
    batch = Configured(torch.tensor([2, 1]), 5, fg.BatchSpec(2, 1))
    assert torch.equal(fast(w, batch), w[[2, 1]] * 5)
    with pytest.raises(errors.TreeError, match="batch"):
        fast(w, dataclasses.replace(batch, scale=6))


# --- captures that fail ---------------------------------------------------------------------------


@contextlib.contextmanager
def doubling_by(name: str, **fields: Any) -> Iterator[None]:
    """`toy_double`'s plain backend, changed, is there under a name."""
    backends = toys.DOUBLE.backends
    backends[name] = dataclasses.replace(backends["plain"], name=name, **fields)
    try:
        yield
    finally:
        del backends[name]


def test_a_key_that_cannot_be_captured(recorder_name, device):
    """The backend breaks at one size: that step raises, the others go on."""
    params = {"w": torch.rand(toys.V, 2, device=device)}
    state = {"n": torch.zeros(1, device=device)}

    def forward(p: Any, s: Any, b: Any) -> Any:
        return toys.double(p["w"][b.token_ids]), {"n": s["n"] + 1}

    def picky(args: Any, host: Any) -> None:
        if len(args.x) == 4:
            raise ValueError("four is right out")
        toys.DOUBLE.backends["plain"].run(args, host)

    with doubling_by("picky", run=picky):
        fast = fg.graphify(
            forward, modes="FULL", donate="s", stage="b", limits=toys.LIMITS, sizes=(2, 4, 8),
            backends={"toy_double": "picky"}, recorder=recorder_name,
        )  # fmt: skip
        fast(params, state, toys.batch(6))
        fast(params, state, toys.batch(2))
        for _ in range(2):
            words = ["FULL", "BatchDescriptor(4", "four is right out"]
            with refused(errors.CaptureError, RuntimeError, words):
                fast(params, state, toys.batch(3))
            assert state["n"].item() == 2
        for batch in (toys.batch(6), toys.batch(2), toys.batch(1)):
            got, _ = fast(params, state, batch)
            assert torch.equal(got.cpu(), params["w"].cpu()[batch.token_ids] * 2)
        assert state["n"].item() == 5 and fast.stats.steps == 5


def doubled(name: str, **options: Any) -> Any:
    """A function that doubles by that backend."""
    return fg.graphify(
        lambda p, s, b: (toys.double(p["w"][b.token_ids]), s), donate="s", stage="b",
        limits=toys.LIMITS, backends={"toy_double": name}, **options,
    )  # fmt: skip


def test_a_backend_that_does_not_support_the_configuration():
    with doubling_by("half", supports=lambda config: "it runs bfloat16 only"):
        with pytest.raises(errors.BackendError, match=r"'half'.*toy_double.*bfloat16 only"):
            doubled("half")({"w": torch.rand(toys.V, 2)}, {}, toys.batch(2))


@pytest.mark.parametrize(
    ("support", "asked", "want"),
    [("NEVER", "FULL", None), ("NEVER", "FULL_AND_PIECEWISE", "PIECEWISE"),
     ("UNIFORM_SINGLE_TOKEN_DECODE", "FULL", "FULL_AND_PIECEWISE")],
)  # fmt: skip
def test_modes_that_the_backend_cannot_serve(support: str, asked: str, want: str | None):
    with doubling_by("weak", support=lambda config: fg.Support[support]):
        fast, w = doubled("weak", modes=asked, sizes=(4,)), torch.rand(toys.V, 2)
        split = fast.trace({"w": w}, {}, batch=toys.batch(2)).split()
        if want is None:
            with pytest.raises(errors.ModesError, match=r"toy_double 0 \(weak\)"):
                split.lower()
        else:
            lowered = split.lower()
            assert str(lowered.resolution.modes) == want
            assert "toy_double 0 (weak)" in lowered.notes[0]
