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

import fngraph as fg
from fngraph import errors

WEIGHT = torch.ones(toys.E)
GOOD: dict[str, Any] = {"donate": "cache", "stage": "batch", "limits": toys.LIMITS,
                        "sizes": toys.SIZES}  # fmt: skip


def attend(**options: Any) -> tuple[Any, Any, Any]:
    """`toys.attend` of one layer, its weights and its cache."""
    fast = fg.graphify(toys.attend, **GOOD | options)
    return fast, toys.attention_params(1), toys.attention_cache(1)


def tally() -> Any:
    """`toys.tally` over the toys' limits."""
    return fg.graphify(toys.tally, donate="state", stage="batch", limits=toys.LIMITS)


@contextlib.contextmanager
def refused(kind: type, builtin: type, words: list[str]) -> Iterator[None]:
    """An error of that class and builtin base, whose message has these words."""
    with pytest.raises(errors.FnGraphError) as caught:
        yield
    assert type(caught.value) is kind and isinstance(caught.value, builtin)
    assert [w for w in words if w not in str(caught.value)] == [], str(caught.value)


TREE, SPEC = (errors.TreeError, TypeError), (errors.SpecError, ValueError)
CLOSURE, SYNC = (errors.ClosureError, RuntimeError), (errors.HostSyncError, RuntimeError)
SIZES, DONATION = (errors.SizesError, ValueError), (errors.DonationError, ValueError)
BACKEND, MODES = (errors.BackendError, LookupError), (errors.ModesError, ValueError)


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


# --- names that name nothing ----------------------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, Any], tuple[type, type], list[str]]] = {
    "a mode": ({"modes": "FULL_AND_PICEWISE"}, MODES,
               ["'FULL_AND_PICEWISE'", '"FULL_AND_PIECEWISE"']),
    "a mode that is no name": ({"modes": 3}, MODES, ["3", "FULL"]),
    "a backend": ({"backends": {"attention": "refrence"}}, BACKEND,
                  ["'refrence'", "'reference'", "mean"]),
    "a primitive": ({"backends": {"atention": "reference"}}, BACKEND, ["'atention'", "attention"]),
    "a recorder": ({"recorder": "tapes"}, (errors.CaptureError, RuntimeError),
                   ["'tapes'", '"tape"', '"cuda"']),
    "outputs": ({"outputs": "borow"}, TREE, ["'borow'", '"borrow"']),
    "a donated name": ({"donate": "cash"}, TREE, ["cash", "cache"]),
    "a donated position": ({"donate": 7}, TREE, ["7", "cache"]),
    "a staged name": ({"stage": "batsh"}, TREE, ["batsh", "batch"]),
    "one name twice": ({"stage": "cache"}, TREE, ["cache", "both"]),
    "nothing staged": ({"stage": None}, TREE, ['stage="batch"']),
    "sizes that fall": ({"sizes": (8, 4)}, SIZES, ["(4, 8)"]),
    "sizes twice": ({"sizes": (4, 4)}, SIZES, ["4"]),
    "sizes beyond the limits": ({"sizes": (4, 32)}, SIZES, ["32", "max_tokens=16"]),
    "no sizes": ({"sizes": ()}, SIZES, ["empty"]),
    "a cut": ({"cut": 3}, MODES, ["cut=3", '"declined"']),
    "a rounding": ({"align": "x"}, SIZES, ["align='x'", '"uniform"']),
    "sizes beyond": ({"beyond": None}, SIZES, ["beyond=None", '"drop"']),
    "query lengths twice": ({"query_lens": (1, 1)}, SIZES, ["(1, 1)"]),
}  # fmt: skip
VALUES = [
    ("key_reqs", "x", "'x'", "or None"), ("max_keys", None, None, "a number of"),
    ("max_keys", True, True, "a number of"),
    ("limits", 5, 5, "fg.Limits("), ("sizes", 4, 4, "sizes=(...)"),
    ("query_lens", 4, 4, "query_lens=(...)"), ("query_lens", ("a",), "'a'", "query_lens=(1, 4)"),
    ("fields", (3,), 3, "(field,)"), ("cost", 3, 3, "lambda key"),
    ("adapters", "x", "'x'", "adapters=(0, 4)"), ("adapters", (1.5,), 1.5, "adapters=(0, 4)"),
    ("generators", (3,), 3, "(g,)"), ("state_blocks", "x", "'x'", "or None"),
    *((flag, 3, 3, "True or False") for flag in ("guards", "pooling", "eager", "layerwise")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "said", "fix"), VALUES)
def test_an_option_of_another_kind_fails_where_it_is_written(name, value, said, fix):
    with pytest.raises(TypeError) as caught:
        attend(**{name: value})
    text = str(caught.value)
    assert text.startswith(f"{name}={said}: expected") and fix in text, text


@pytest.mark.parametrize("what", OPTIONS)
def test_an_option_that_names_nothing(what: str):
    options, (kind, builtin), words = OPTIONS[what]
    with refused(kind, builtin, words):
        fast, *held = attend(**options)
        fast(*held, toys.batch(2))
    fast, *held = attend()
    fast(*held, toys.batch(2))


@pytest.mark.parametrize("what", ["a mode", "a backend", "a primitive", "outputs", "a recorder",
                                  "a cut", "a rounding", "sizes beyond"])  # fmt: skip
def test_a_wrong_name_fails_where_it_is_written(what: str):
    """Not at the first call, which may be far away."""
    options, (kind, _), _ = OPTIONS[what]
    with pytest.raises(kind):
        fg.graphify(toys.attend, donate="cache", stage="batch", **options)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", r"takes no option 'nonsense'\.$"),
        ("use_cudagraph", '\'use_cudagraph\'. Pass modes="PIECEWISE", or modes="NONE"'),
        ("full_cuda_graph", '\'full_cuda_graph\'. Pass modes="FULL", or modes="PIECEWISE"'),
    ],
)
def test_an_unknown_option(name: str, words: str):
    with pytest.raises(TypeError, match=words):
        fg.graphify(toys.attend, donate="cache", stage="batch", **{name: True})


def test_a_forward_that_takes_anything():
    with pytest.raises(errors.TreeError, match=r"\*args"):
        fg.graphify(lambda params, *args: None, stage="params")


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


# --- the first mistakes of a first hour -----------------------------------------------------------

x43, w44 = torch.rand(3, 4).add_(4), torch.rand(4, 4)


def exact(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """One call of a function of exact shapes."""
    return fg.graphify(forward, **{"stage": "x"} | options)(*args)


MISTAKES: dict[str, Callable[[Any, Any], Any]] = {
    "an attribute": lambda w, x: (x @ w).reshpe(-1),
    "an attribute of a view": lambda w, x: w.t().bogus,
    "an operand": lambda w, x: x + [1, 2],  # noqa: RUF005
    "an operand on the left": lambda w, x: [1, 2] + x,  # noqa: RUF005
    "a comparison": lambda w, x: x < "a",
    "a call": lambda w, x: x(3),
    "an argument": lambda w, x: torch.cat(x, w),
    "a size": lambda w, x: torch.zeros(x),
    "bytes": lambda w, x: memoryview(x),
    "a function of torch": lambda w, x: torch.softmx(x @ w),
    "a key": lambda w, x: {"w": w}["W"],
    "a keyword": lambda w, x: torch.relu(x, bad=3),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_that_eager_would_name_is_named_the_same_way(what: str):
    """A typo is an AttributeError, not a rule of ours; fakes are not spoken of."""
    forward = MISTAKES[what]
    with pytest.raises((AttributeError, TypeError, LookupError)) as eager:
        forward(w44, x43)
    with pytest.raises(type(eager.value)) as caught:
        exact(forward, w44, x43)
    assert type(caught.value) is type(eager.value) and str(caught.value) == str(eager.value)
    assert HERE in caught.value.__notes__[0]
    report = fg.check(forward, w44, x43, stage="x")
    assert str(eager.value).split("\n")[0] in report.as_text() and HERE in report.as_text()


@pytest.mark.parametrize("given", ["cache", "params"])
def test_a_batch_in_the_place_of_another_argument(given: str):
    fast, params, cache = attend()
    batch = toys.batch(2)
    args = (params, batch, cache) if given == "cache" else (batch, cache, params)
    for call in (lambda: fast(*args), lambda: fast.trace(*args[:2])):
        words = [f"{given} is", "Batch", "The batch is 'batch'", "(params, cache, batch)"]
        with refused(*TREE, words):
            call()
    fast(params, cache, batch)
    with refused(*TREE, [f"{given} is", "The batch is 'batch'"]):
        fast(*args)


@pytest.mark.parametrize(
    ("forward", "new", "donate"),
    [(lambda w, t, x: x @ w * t, torch.ones(1), False),
     (lambda w, t, x: x @ w * t["a"], {"a": torch.ones(4)}, False),
     (lambda w, t, x: (x @ w * t).float(), torch.ones(3, 4).double(), False),
     (lambda w, t, x: (x @ w, t + 1), torch.ones(2), True),
     (lambda w, t, x: (x @ w, {"n": t["n"] + 1}), {"n": torch.ones(2)}, True),
     (lambda w, t, x: (x @ w, {"n": t["n"] + 1.5}), {"n": torch.ones(2).long()}, False),
     (lambda w, t, x: t + 1, torch.ones(2), True)],
    ids=["a number", "a dict", "a dtype", "state", "a dict of state", "another dtype", "all"],
)  # fmt: skip
def test_an_argument_that_is_new_at_each_call(forward: Any, new: Any, donate: bool):
    """To stage it is what is said; to donate it where forward returns one like it."""
    fast = fg.graphify(forward, stage="x")
    fast(w44, new, x43)
    with pytest.raises(errors.AddressError, match=r'stage=\("x", "t"\)') as caught:
        fast(w44, toys.clone(new), x43)
    assert ("donate='t'" in str(caught.value)) is donate


def test_state_is_to_be_donated_beside_what_is():
    fast = fg.graphify(lambda s, t, x: (s + 1, t + 1), donate="s", stage="x")
    state = torch.ones(2)
    fast(state, torch.ones(3), x43)
    with pytest.raises(errors.AddressError, match=r"donate=\('s', 't'\)\), and it is updated"):
        fast(state, torch.ones(3), x43)


def test_a_new_argument_beside_a_batch_with_a_spec():
    fast = fg.graphify(lambda p, t, s, b: toys.tally(p, s, b), donate="s", stage="b")
    params, state = toys.tally_params(), toys.tally_state()
    fast(params, torch.ones(1), state, toys.batch(2))
    with pytest.raises(errors.AddressError, match=r"'t' is new.*field of Batch, fg\.buffer"):
        fast(params, torch.ones(1), state, toys.batch(2))


def test_state_that_comes_back_as_it_was():
    with refused(errors.OutputError, RuntimeError, ["s['n']", 'donate="s"', "x.clone()"]):
        exact(lambda w, s, x: (x @ w, s), w44, {"n": torch.zeros(2)}, x43)
    with refused(errors.OutputError, RuntimeError, ["returns x itself", "x.clone()"]):
        exact(lambda w, x: x, w44, x43)


# --- arguments that are no data, and those that stand for several ---------------------------------


def kinds(w: Any, x: Any, train: bool = False, mode: str = "relu", eps: Any = 0.5) -> Any:
    """Takes a flag, a name and a number."""
    y = getattr(torch, mode)(x @ w) + (eps if eps is not None else 7)
    return y * 2 if train else y


STATIC: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "defaults": ((), {}), "a flag": ((True,), {}), "a flag by name": ({}, {"train": True}),
    "text": ((False, "sigmoid"), {}), "text by name": ((), {"mode": "tanh"}),
    "None": ((), {"eps": None}), "a tensor": ((), {"eps": torch.tensor(3.0)}),
}  # fmt: skip


def test_what_is_no_data_is_part_of_the_function():
    """Each value has a program of its own, and comes back to it."""
    fast = fg.graphify(kinds, stage="x", max_keys=16)
    for _ in range(2):
        for args, kwargs in STATIC.values():
            want = kinds(w44, x43, *args, **kwargs)
            assert torch.equal(fast(w44, x43, *args, **kwargs), want)
    assert len(fast.steps) == 6  # two of them are the same
    with refused(*TREE, ["eps is a float", "functools.partial"]):  # it may be another at each call
        fast(w44, x43, eps=0.25)
    bound = functools.partial(kinds, train=True, eps=0.25)
    assert torch.equal(exact(bound, w44, x43), bound(w44, x43))
    fast = fg.graphify(bound, stage="x")
    assert torch.equal(fast(w44, x43, train=False), bound(w44, x43, train=False))
    assert torch.equal(fast(w44, x43), bound(w44, x43))


def test_what_is_no_data_ahead_of_calls():
    fast = fg.graphify(kinds, stage="x")
    for more in ((), (True, "tanh")):
        step = fast.bind(w44, *more).capture(batch=x43, progress=False)
        assert torch.equal(step(x43), kinds(w44, x43, *more))
        compiled = fast.trace(w44, *more, batch=x43).split().lower().compile()
        assert torch.equal(compiled.capture(w44, *more)(x43), kinds(w44, x43, *more))
    with refused(*TREE, ["train is False", "traced as True"]):
        compiled.capture(w44)
    assert fg.check(kinds, w44, x43, stage="x", rehearse=True)


def test_what_is_no_data_beside_a_batch_with_a_spec():
    def scaled(p: Any, s: Any, b: Any, by: Any = 3, back: bool = True) -> Any:
        y, s = toys.tally(p, s, b)
        return (-y if back else y) * by, s

    fast = fg.graphify(scaled, donate="s", stage="b", limits=toys.LIMITS, sizes=toys.SIZES)
    params, state = toys.tally_params(), toys.tally_state()
    for batch in (toys.batch(2), toys.batch(3, 1)):
        for more in ({}, {"back": False}):
            bare = functools.partial(scaled, **more)
            want, after = toys.bare(bare, params, state, batch)
            toys.assert_trees(fast(params, state, batch, **more), (want, after), **toys.CLOSE)
    assert len(fast.steps) == 2


def forward_of_two(x: Any, w: Any, s: Any, t: Any) -> Any:
    return x @ w * t["a"], s + x.sum()


def test_several_staged_arguments_are_one_batch(recorder_name, device):
    options = {"stage": ("x", "t"), "donate": "s", "recorder": recorder_name}
    fast = fg.graphify(forward_of_two, **options)
    w, s, state = w44.to(device), torch.zeros(1, device=device), torch.zeros(1)
    for n in (3, 2, 3):
        x, t = torch.rand(n, 4), {"a": torch.rand(1)}
        want, state = forward_of_two(x, w44, state, t)
        y, back = fast(x.to(device), w, s, t={"a": t["a"].to(device)})
        torch.testing.assert_close(y.cpu(), want)
        assert back is s
        torch.testing.assert_close(s.cpu(), state)
    assert len(fast.steps) == 2
    step = fast.bind(w).capture(s, batch=(x.to(device), t), progress=False)
    for args, kwargs in (((x, s, t), {}), ((), {"t": t, "s": s, "x": x})):
        want, state = forward_of_two(x, w44, state, t)
        torch.testing.assert_close(step(*args, **kwargs)[0].cpu(), want)
    for bad, path in ((x.double(), "x"), (x[:1], "x")):
        with refused(*TREE, [f"{path}: "]):
            step(bad, s, t)
    with refused(*TREE, ["t['a']: missing"]):
        step(x, s, {"b": t["a"]})
    with refused(*TREE, ["expected the arguments 'x', 's', 't'"]):
        step(x, s, t, t)
    assert fg.check(forward_of_two, x, w44, torch.zeros(1), t, stage=("x", "t"), donate="s")


def test_what_is_staged_beside_a_batch_with_a_spec_is_a_field_of_it():
    fast = fg.graphify(lambda p, s, b, t: toys.tally(p, s, b), donate="s", stage=("b", "t"))
    with refused(*TREE, ["b is a Batch", "Make t a field of it"]):
        fast(toys.tally_params(), toys.tally_state(), toys.batch(2), torch.ones(1))


def test_modules_are_pointed_to_from_module():
    net = torch.nn.Linear(4, 4)
    for call in (
        lambda: fg.graphify(net, stage="x"), lambda: exact(lambda m, x: m(x), net, x43),
        lambda: exact(lambda m, x: m["net"](x), {"net": net}, x43),
    ):  # fmt: skip
        with refused(*TREE, ["module", "Linear", "fg.from_module("]):
            call()


@fg.struct
class Model:
    """A tree with a method."""

    w: torch.Tensor

    @fg.graphify(stage="x")
    def apply(self, x: Any) -> Any:
        return x @ self.w


def test_a_graphified_method():
    """`self` is the first argument, a tree; of another class it is said how to make it one."""
    model, other = Model(w44), type("Other", (), {"apply": Model.apply})()
    assert torch.equal(model.apply(x43), x43 @ w44)
    assert Model.apply.trace(model, batch=x43).signature.names == ("self", "x")
    with refused(*TREE, ["self is of class Other", "@fg.struct"]):
        other.apply(x43)


def helper(x: Any) -> Any:
    raise ValueError("mine")


def fails(w: Any, x: Any) -> Any:
    """Fails in a function that it calls."""
    return helper(x @ w)


FIRST_CALLS: dict[str, Callable[[Any], Any]] = {
    "a call": lambda fast: fast(w44, x43),
    "a trace": lambda fast: fast.trace(w44, batch=x43),
    "a capture": lambda fast: fast.bind(w44).capture(batch=x43, progress=False),
}


@pytest.mark.parametrize("how", FIRST_CALLS)
def test_a_mistake_comes_with_the_callers_own_frames(how: str, monkeypatch: pytest.MonkeyPatch):
    """Its traceback has forward's frames, after the call that led to it; all of them on request."""
    fast = fg.graphify(fails, stage="x")

    def names() -> tuple[list[str], Any]:
        with pytest.raises(ValueError, match="mine") as caught:
            FIRST_CALLS[how](fast)
        return [entry.name for entry in caught.traceback], caught.value.__notes__

    found, notes = names()
    assert found[-2:] == ["fails", "helper"] and len(found) <= 6, found
    assert notes[-1].endswith("FNGRAPH_TRACEBACK=all shows them") and len(set(notes)) == len(notes)
    monkeypatch.setenv("FNGRAPH_TRACEBACK", "all")
    found, notes = names()
    assert found[-2:] == ["fails", "helper"] and len(found) > 15 and len(notes) == 1
