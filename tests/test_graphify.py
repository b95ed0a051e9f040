"""`graphify` from the front: a drop-in for `forward`, in every mode, on either recorder."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, NamedTuple

import pytest
import torch
import toys
from torch import Tensor
from toys import FULL, NONE, PIECEWISE, Model, graphified, llama_batch, model, steps

import fngraph as fg
from fngraph.core import trees
from fngraph.errors import TreeError
from fngraph.models.families import llama

every_mode = pytest.mark.parametrize("modes", toys.MODES)


# --- the same as forward --------------------------------------------------------------------------


@every_mode
def test_every_mode_equals_bare_forward(recorder_name, device, toy: Model, modes: str):
    fast = toy.graphify(modes=modes, recorder=recorder_name)
    exact = {} if toy.fn is toys.attend or device.type != "cpu" else {"atol": 0, "rtol": 0}
    for batch in steps(device):
        toy.check(fast, batch, **exact)
    ran = {mode for _, _, mode in fast.stats.counts}
    resolved = fg.Mode.parse(modes)
    assert ran == {resolved.decode, resolved.mixed}


@pytest.mark.sampled(2)
@every_mode
def test_a_llama_in_every_mode_equals_bare_forward(recorder_name, device, modes: str):
    config = llama.Config(
        vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, dim=16, mlp_dim=24
    )
    toy = Model(
        llama.forward, llama.init_params(config, device=device),
        llama.init_cache(config, 4 * toys.B, block_size=toys.S, device=device),
    )  # fmt: skip
    fast = toy.graphify(modes=modes, donate="cache", recorder=recorder_name)
    for batch in steps(device):
        toy.check(fast, llama_batch(batch))
    assert fast.stats.steps == len(steps())


def test_a_batch_may_be_on_the_host_or_on_the_device(recorder_name, device, toy: Model):
    fast, other = toy.graphify(recorder=recorder_name), model(toy.fn.__name__, device)
    twin = other.graphify(recorder=recorder_name)
    for batch in steps():
        got, _ = fast(toy.params, toy.state, batch)
        want, _ = twin(other.params, other.state, toys.on(batch, device))
        toys.assert_trees((got, toy.state), (want, other.state))


# --- lazily, and ahead of time --------------------------------------------------------------------


def test_keys_are_captured_when_they_are_first_needed(recorder_name, device):
    traced = []

    def forward(params: Any, state: Any, batch: Any) -> Any:
        traced.append(1)
        return toys.tally(params, state, batch)

    toy = model("tally", device)._replace(fn=forward)
    fast = toy.graphify(recorder=recorder_name)
    seen = []
    for batch in (toys.batch(3), toys.batch(3), toys.decode(3, 0), toys.batch(2, 2), toys.batch(9)):
        fast(toy.params, toy.state, batch)
        captured = fast.steps[0]
        seen.append(len(captured))
    assert seen == [1, 1, 2, 2, 3] and len(traced) == 1
    assert list(captured) == [
        fg.BatchDescriptor(4), fg.BatchDescriptor(4, 4, 1), fg.BatchDescriptor(16)
    ]  # fmt: skip


@pytest.mark.sampled(5)
@every_mode
def test_bind_and_capture_ahead_of_time(recorder_name, device, toy: Model, modes: str):
    fast = toy.graphify(modes=modes, limits=None, sizes=toys.SIZES, recorder=recorder_name)
    step = fast.bind(toy.params).capture(
        toy.state, toys.LIMITS, batch=toys.batch(1), progress=False
    )
    assert len(step) == len(step.table)
    before = len(step.replays)
    for batch in steps(device):
        toy.check(lambda params, *args: step(*args), batch)
    assert len(step.replays) == before  # nothing was left to capture
    assert step.stats.steps == len(steps())


def test_a_progress_bar_is_shown_when_asked_for(capsys):
    toy = model("tally")
    fast = toy.graphify()
    fast.bind(toy.params).capture(toy.state, batch=toys.batch(1))
    assert "capturing on tape" in capsys.readouterr().out
    fast.bind(toy.params).capture(toy.state, batch=toys.batch(1), progress=False)
    assert capsys.readouterr().out == ""


def test_capture_takes_limits_or_graphifys_own():
    toy = model("tally")
    own = toy.graphify(limits=fg.Limits(8, 2, B=toys.B), sizes=(1, 2, 4))
    for given, limits in (((), fg.Limits(8, 2, B=toys.B)), ((toys.LIMITS,), toys.LIMITS)):
        step = own.bind(toy.params).capture(toy.state, *given, batch=toys.batch(1), progress=False)
        assert step.limits == limits


@pytest.mark.parametrize(
    ("given", "said"), [((), "nothing"), ((fg.Limits(8, 4), {}), "Limits, dict")]
)
def test_capture_says_what_it_takes_and_what_it_got(given, said):
    bound = fg.graphify(toys.tally, donate="state", stage="batch").bind(toys.tally_params())
    with pytest.raises(fg.errors.TreeError, match=f"takes state, fg.Limits.*; got {said}$"):
        bound.capture(*given)


def test_outputs_can_be_chosen_at_capture():
    toy = model("tally")
    bound = toy.graphify().bind(toy.params)
    for outputs, borrow in (("own", False), ("borrow", True), (None, False)):
        step = bound.capture(toy.state, batch=toys.batch(1), outputs=outputs, progress=False)
        a, b = step(toy.state, toys.decode(2, 0))[0], step(toy.state, toys.decode(2, 0))[0]
        assert (a.data_ptr() == b.data_ptr()) is borrow


def test_two_graphified_functions_do_not_disturb_one_another(recorder_name, device):
    a, b = model("attend", device), model("attend", device)
    one = a.graphify(modes="FULL", recorder=recorder_name)
    two = b.graphify(modes="PIECEWISE", recorder=recorder_name)
    for batch in steps(device):
        want, _ = toys.bare(*a, batch)
        for toy, fast in ((a, one), (b, two)):
            torch.testing.assert_close(fast(toy.params, toy.state, batch)[0], want, **toys.CLOSE)


def test_one_compiled_function_serves_two_bindings(recorder_name, device):
    one, two = model("tally", device), model("tally", device)
    two.params["w"].mul_(5)
    compiled = (
        one.graphify().trace(one.params, one.state, batch=toys.batch(1)).split().lower().compile()
    )
    steps_of = [compiled.capture(m.params, m.state, recorder=recorder_name) for m in (one, two)]
    for batch in steps(device):
        for toy, step in zip((one, two), steps_of):
            toy.check(lambda params, *args, step=step: step(*args), batch)


# --- dispatch, explain, stats ---------------------------------------------------------------------


def test_dispatch_explain_and_stats_agree_with_what_ran():
    toy = model("attend")
    fast = toy.graphify()
    for batch in steps():
        before = fast.stats.copy()
        fast(toy.params, toy.state, batch)
        mode, key, _ = fast.dispatch(batch.spec)
        ran = fast.stats - before
        assert ran.counts == {(batch.spec.num_tokens, key.num_tokens, mode): 1}
        assert repr(key) in fast.explain(batch.spec).as_text()
    text = fast.stats.as_text()
    assert "PIECEWISE" in text and "FULL" in text and fast.stats.steps == len(steps())


def test_eager_steps_are_counted_with_their_reason():
    toy = model("attend")
    fast = toy.graphify(modes="FULL_DECODE_ONLY")
    for batch in (toys.batch(3), toys.batch(2, 1), toys.decode(2, 0)):
        fast(toy.params, toy.state, batch)
    assert sum(fast.stats.reasons.values()) == 2 and all(fast.stats.reasons)
    assert fast.stats.share("NONE") == pytest.approx(2 / 3)
    small = toy.graphify(sizes=(1, 2, 4))
    small(toy.params, toy.state, toys.batch(9, 1))
    assert small.stats.counts == {(10, 10, NONE): 1} and len(small.stats.reasons) == 1


def test_uniform_keys_of_several_query_lengths():
    toy = model("attend")
    fast = toy.graphify(query_lens=(1, 3), sizes=(1, 2, 4, 8))
    for lens, query_len, want in (
        ((1, 1), 1, (FULL, fg.BatchDescriptor(2, 2, 1))),
        ((3, 3), 3, (FULL, fg.BatchDescriptor(6, 2, 3))),
        ((3, 3), None, (PIECEWISE, fg.BatchDescriptor(8))),  # a prefill of three is no verify step
        ((2, 2), 2, (PIECEWISE, fg.BatchDescriptor(4))),
        ((3,), 3, (FULL, fg.BatchDescriptor(3, 1, 3))),
    ):
        batch = toys.batch(*lens, query_len=query_len)
        toy.check(fast, batch)
        assert fast.dispatch(batch.spec)[:2] == want


def test_nothing_is_known_before_the_first_call():
    fast = model("tally").graphify()
    assert fast.stats.steps == 0
    for ask in (fast.dispatch, fast.explain):
        with pytest.raises(TreeError, match=r"first call.*trace\("):
            ask(fg.BatchSpec(1, 1))


# --- how it is called -----------------------------------------------------------------------------


def test_keyword_arguments_and_defaults():
    def forward(params: Any, state: Any, batch: Any, bias: Any = None) -> Any:
        x, state = toys.tally(params, state, batch)
        return (x if bias is None else x + bias), state

    toy = model("tally")._replace(fn=forward)
    batch = toys.batch(3)
    for bias in (None, torch.ones(toys.E)):
        fast, state = toy.graphify(), toys.tally_state()
        want, _ = toys.bare(lambda p, s, b: forward(p, s, b, bias), toy.params, state, batch)  # noqa: B023
        given = {} if bias is None else {"bias": bias}
        got, back = fast(batch=batch, params=toy.params, state=state, **given)
        assert back is state and torch.equal(got, want)
        again, _ = fast(toy.params, state, batch=batch, **given)
        assert again.shape == want.shape


def test_arguments_that_do_not_fit_the_signature():
    toy = model("tally")
    fast = toy.graphify()
    for batches, more in (((), {}), ((toys.batch(1), 4), {}), ((toys.batch(1),), {"batches": 1})):
        with pytest.raises(TypeError):
            fast(toy.params, toy.state, *batches, **more)
    fast(toy.params, toy.state, toys.batch(1))


def test_roles_by_name_or_position_and_in_any_order():
    forward = lambda batch, state, params: toys.tally(params, state, batch)  # noqa: E731
    toy = model("tally")
    for donate, stage in ((1, 0), ("state", "batch"), (["state"], ["batch"]), ((1,), "batch")):
        fast = graphified(forward, donate=donate, stage=stage)
        state = toys.tally_state()
        want, _ = toys.bare(toys.tally, toy.params, state, toys.batch(3))
        got, back = fast(toys.batch(3), state, toy.params)
        assert back is state and torch.equal(got, want)


def test_several_held_arguments_and_none_donated():
    forward = lambda batch, w, scale: w[batch.token_ids] * scale["x"]  # noqa: E731
    w, scale = torch.rand(toys.V, 2), {"x": torch.tensor(3.0)}
    for modes in toys.MODES:
        fast = graphified(forward, modes=modes, stage=0)
        for batch in steps():
            assert torch.equal(fast(batch, w, scale), w[batch.token_ids] * 3)


def test_the_decorator_form():
    @fg.graphify(donate="state", stage="batch", limits=toys.LIMITS, sizes=toys.SIZES, modes="FULL")
    def step(params: Any, state: Any, batch: Any) -> Any:
        """One step."""
        return toys.tally(params, state, batch)

    toy = model("tally")
    want, _ = toys.bare(*toy, toys.batch(3))
    assert torch.equal(step(toy.params, toy.state, toys.batch(3))[0], want)
    assert step.__name__ == "step" and step.__doc__ == "One step." and "FULL" in repr(step)


def test_a_method_or_a_callable_object_can_be_graphified():
    class Tally:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def step(self, params: Any, state: Any, batch: Any) -> Any:
            x, state = toys.tally(params, state, batch)
            return x * self.factor, state

        __call__ = step

    toy, tallier = model("tally"), Tally(3.0)
    for fn in (tallier.step, tallier):
        state = toys.tally_state()
        want, _ = toys.bare(tallier.step, toy.params, state, toys.batch(3))
        fast = graphified(fn, donate=1, stage=2)
        assert torch.equal(fast(toy.params, state, toys.batch(3))[0], want)


def test_default_limits_take_further_letters_from_the_first_batch():
    toy = model("attend")
    fast = toy.graphify(limits=None, sizes=(4,))
    fast(toy.params, toy.state, toys.batch(3))
    (step,) = fast.steps
    assert step.limits == fg.Limits(8192, 256, B=toys.B)


def test_a_field_that_is_none_in_the_first_batch_is_the_one_that_is_named():
    toy = model("attend")
    fast = toy.graphify(limits=None, sizes=(4,))
    batch = dataclasses.replace(toys.batch(3), token_ids=None)
    with pytest.raises(fg.errors.TreeError, match=r"batch\.token_ids: missing"):
        fast(toy.params, toy.state, batch)


# --- pytrees --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A NamedTuple node."""

    a: Any
    b: Any


@fg.struct
class Weights:
    """A struct node, with configuration in its structure."""

    w: Tensor
    bias: Tensor | None
    scale: float = fg.static()


TREES: dict[str, Any] = {
    "dict": lambda: {"w": torch.rand(toys.V, 2), "none": None},
    "list": lambda: [torch.rand(toys.V, 2), [None, ()]],
    "tuple": lambda: (torch.rand(toys.V, 2), {}),
    "named tuple": lambda: Pair(torch.rand(toys.V, 2), None),
    "struct": lambda: Weights(torch.rand(toys.V, 2), None, 2.0),
    "bare tensor": lambda: torch.rand(toys.V, 2),
    "nested": lambda: {"z": [Pair({"w": torch.rand(toys.V, 2)}, None)], "a": ((),)},
}


@pytest.mark.parametrize("modes", ["NONE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(
    ("held", "donated"), [*((tree, "dict") for tree in TREES), *(("dict", tree) for tree in TREES)]
)
def test_any_tree_may_be_held_and_donated(held: str, donated: str, modes: str):
    def forward(p: Any, s: Any, b: Any) -> Any:
        x = toys.leaves(p)[0][b.token_ids]
        new = trees.map_leaves(lambda t: t + 1, s)
        return {"x": x * toys.leaves(s)[0].sum(), "nothing": None}, new

    toy = Model(forward, TREES[held](), TREES[donated]())
    fast = toy.graphify(modes=modes, donate="s", stage="b")
    for batch in (toys.batch(3, 2), toys.decode(2, 0)):
        toy.check(fast, batch, atol=0, rtol=0)


def test_static_configuration_is_part_of_the_structure():
    forward = lambda p, s, b: (p.w[b.token_ids] * p.scale, s)  # noqa: E731
    w, batch = torch.rand(toys.V, 2), toys.batch(3)
    fast = graphified(forward, donate="s", stage="b")
    got, _ = fast(Weights(w, None, 2.0), {}, batch)
    assert torch.equal(got, w[batch.token_ids] * 2)
    with pytest.raises(TreeError, match="p"):
        fast(Weights(w, None, 3.0), {}, batch)  # the graphs have 2.0 baked in


def test_like_keeps_the_tree_and_drops_the_memory():
    like = fg.like({"a": torch.rand(3, 4).t(), "b": [None, torch.ones(2, dtype=torch.int32)]})
    assert repr(like["a"]) == "float32[4, 3]@cpu" and like["a"].stride == (1, 4)
    assert like["b"][0] is None and like["b"][1].dtype is torch.int32
    assert fg.like(like) == like


def test_stages_from_like_can_be_captured_over_real_tensors():
    toy = model("attend")
    compiled = (
        toy.graphify()
        .trace(fg.like(toy.params), fg.like(toy.state), batch=toys.batch(1))
        .split().lower().compile()
    )  # fmt: skip
    step = compiled.capture(toy.params, toy.state)
    want, _ = toys.bare(*toy, toys.batch(3, 2))
    torch.testing.assert_close(step(toy.state, toys.batch(3, 2))[0], want, **toys.CLOSE)


# --- stages that print ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stages() -> list[Any]:
    """Every stage of the attention toy."""
    toy = model("attend")
    traced = toy.graphify().trace(toy.params, toy.state, batch=toys.batch(1))
    split = traced.split()
    lowered = split.lower()
    compiled = lowered.compile()
    return [traced, split, lowered, compiled, compiled.capture(toy.params, toy.state)]


def test_every_stage_has_a_readable_repr(stages):
    names = ["Traced", "Split", "Lowered", "Compiled", "Step"]
    for stage, name in zip(stages, names, strict=True):
        assert type(stage) is getattr(fg, name)
        text = repr(stage)
        assert text.startswith(f"{name}(") and len(text) < 400 and "0x" not in text


def test_every_stage_has_a_text(stages):
    for stage in stages[:4]:
        assert len(stage.as_text().splitlines()) > 3 and "0x" not in stage.as_text()
    traced, split, lowered, compiled, captured = stages
    assert "in place" in traced.donation.as_text()
    assert "attention" in split.as_text()
    for word in ("FULL", "PIECEWISE", "batch.slot_mapping", "-1", "stride", "reference", "ALWAYS"):
        assert word in lowered.as_text()
    assert "def forward" in compiled.as_text()
    assert "8 of 8 keys on tape" in repr(captured)


def test_stages_are_immutable(stages):
    for stage in stages[:-1]:
        field = dataclasses.fields(stage)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(stage, field, None)


def test_the_same_stage_can_be_taken_on_twice(stages):
    traced, split, lowered, _, _ = stages
    assert traced.split().as_text() == split.as_text()
    assert split.lower().as_text() == lowered.as_text()
    fewer = split.lower(fg.Limits(16, 2, B=toys.B))
    assert fewer.limits.max_reqs == 2 and fewer.table.keys("FULL")[0].num_reqs == 2


def test_lower_says_why_modes_are_not_as_asked():
    toy = model("attend")
    traced = toy.graphify(modes="FULL").trace(toy.params, toy.state, batch=toys.batch(1))
    asked = traced.split().lower()
    assert asked.notes == () and asked.resolution.modes is FULL
    assert len(asked.calls) == 2 and asked.calls[0].backend.name == "reference"


def test_the_demo_line_of_the_design(stages):
    captured = stages[-1]
    replay = captured[fg.BatchDescriptor(4, 4, 1)]
    assert replay.graph is not None and replay.mode is FULL
    assert len(captured[fg.BatchDescriptor(16)].graphs) == 3


def test_captured_is_a_mapping_of_keys(stages):
    captured = stages[-1]
    keys = list(captured)
    assert len(captured) == len(keys) == 8 and all(captured[k].descriptor == k for k in keys)
    with pytest.raises(KeyError, match="nearest") as error:
        captured[fg.BatchDescriptor(5, 5, 1)]
    assert "BatchDescriptor(4, 4, query_len=1)" in str(error.value)
    assert "BatchDescriptor(5, 5, query_len=1)" in str(error.value)


# --- grad and inference mode ----------------------------------------------------------------------

AMBIENT = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("later", AMBIENT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("first", AMBIENT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["attend", "tally_"])
def test_the_first_call_and_later_ones_may_be_under(recorder_name, device, name, first, later):
    toy = model(name, device)
    fast = toy.graphify(recorder=recorder_name)
    for i, batch in enumerate(steps(device)):
        want, after = toys.bare(*toy, batch)
        with (first if i < 2 else later)():
            got, _ = fast(toy.params, toy.state, batch)
        toys.assert_trees((got, toy.state), (want, after), **toys.CLOSE)
        assert not got.requires_grad


@pytest.mark.sampled(15)
@every_mode
@pytest.mark.parametrize("inference", ["params", "state", "both"])
@pytest.mark.parametrize("name", ["attend", "tally", "tally_"])
def test_leaves_made_in_inference_mode(recorder_name, device, name, inference: str, modes: str):
    plain = model(name, device)
    with torch.inference_mode():
        inside = model(name, device)
    toy = plain._replace(
        params=plain.params if inference == "state" else inside.params,
        state=plain.state if inference == "params" else inside.state,
    )
    fast = toy.graphify(modes=modes, recorder=recorder_name)
    for batch in steps(device)[:4]:
        with torch.inference_mode():
            want, after = toys.bare(*toy, batch)
        got, _ = fast(toy.params, toy.state, batch)
        toys.assert_trees((got, toy.state), (want, after), **toys.CLOSE)


def test_weights_that_require_grad_are_read_without_one(recorder_name, device):
    toy = model("attend", device)
    for leaf in toys.leaves(toy.params):
        leaf.requires_grad_()
    fast = toy.graphify(recorder=recorder_name)
    for batch in steps(device)[:4]:
        got = toy.check(fast, batch)
        assert not got.requires_grad and got.grad_fn is None


def test_weights_and_cache_in_bfloat16(recorder_name, device):
    toy = model("attend", device)
    half = lambda tree: trees.map_leaves(lambda x: x.bfloat16(), tree)  # noqa: E731
    toy = toy._replace(params=half(toy.params), state=half(toy.state))
    fast = toy.graphify(recorder=recorder_name)
    for batch in steps(device):
        toy.check(fast, batch, atol=3e-2, rtol=3e-2)


# --- batches without a spec -----------------------------------------------------------------------


def test_exact_shapes_are_the_key_of_a_batch_without_a_spec(recorder_name, device):
    def step(params: Any, opt: Any, xy: Any) -> Any:
        def loss_of(params: Any, x: Tensor, y: Tensor) -> Tensor:
            return ((x @ params["w"] + params["b"] - y) ** 2).mean()

        grads, loss = torch.func.grad_and_value(loss_of)(params, *xy)
        opt = {k: 0.9 * m + grads[k] for k, m in opt.items()}
        return {k: p - 0.1 * opt[k] for k, p in params.items()}, opt, loss

    generator = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(s, generator=generator).to(device)  # noqa: E731
    params = {"w": draw(3, 2), "b": draw(2)}
    opt = {k: torch.zeros_like(v) for k, v in params.items()}
    fast = fg.graphify(step, donate=("params", "opt"), stage="xy", recorder=recorder_name)
    for n in (4, 4, 7, 4, 7, 4):
        xy = (draw(n, 3), draw(n, 2))
        with torch.no_grad():
            want = step(toys.clone(params), toys.clone(opt), xy)
        got = fast(params, opt, xy)
        assert got[0] is params and got[1] is opt
        toys.assert_trees(got, want, **toys.CLOSE)
    assert fast.stats.steps == 6


def test_at_most_max_keys_shapes_are_kept():
    traced = []
    step = lambda w, x: (traced.append(tuple(x.shape)), x @ w)[1]  # noqa: E731
    w = torch.rand(3, 2)
    fast = fg.graphify(step, stage="x", max_keys=2)
    for n in (1, 2, 1, 3, 1):  # 2 goes when 3 comes, since 1 was used after it
        x = torch.rand(n, 3)
        torch.testing.assert_close(fast(w, x), x @ w)
    words = r"max_keys=2 .*second one go: float32\[3, 3\] for float32\[2, 3\].*max_keys=8"
    with pytest.warns(UserWarning, match=words) as warned:  # the second that goes, and once
        for n in (2, 3, 1):
            fast(w, torch.rand(n, 3))
    assert len(warned) == 1 and warned[0].filename == __file__
    assert [shape[0] for shape in traced] == [1, 2, 3, 2, 3, 1]
    ran = {1: (4, 2), 2: (2, 2), 3: (2, 2)}
    assert fast.stats.shapes == {f"float32[{n}, 3]": both for n, both in ran.items()}
    assert "| float32[1, 3] |     4 |        2 |" in fast.stats.as_text()
    assert (fast.stats - fast.stats).shapes == {} and fast.stats.steps == 8


def test_sixteen_shapes_are_kept_in_silence():
    w, fast = torch.rand(3, 2), fg.graphify(lambda w, x: x @ w, stage="x")
    for n in (*range(1, 18), 17):
        fast(w, torch.rand(n, 3))
    assert len(fast.steps) == 16 and len(fast.stats.shapes) == 17


def test_the_container_that_was_bound_is_known_by_identity(recorder_name, device):
    """A frozen one is not looked into at each call; one that can change is."""
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    fast = fg.graphify(
        toys.attend, modes="FULL", donate="cache", stage="batch", sizes=toys.SIZES,
        recorder=recorder_name,
    )  # fmt: skip
    step = fast.bind(params).capture(cache, toys.LIMITS, progress=False)
    copies = tuple((k.clone(), v.clone()) for k, v in cache)
    with pytest.raises(fg.errors.AddressError, match=r"cache\[0\]\[0\]"):
        step(copies, toys.on(toys.batch(2), device))


@pytest.mark.parametrize("functions", [1, 4])
def test_first_calls_from_several_threads(recorder_name, device, functions: int):
    """A trace changes functions of torch that all threads call; one first call makes the step."""
    threads, failed, traced = 4, [], 0

    def forward(p: Any, s: Any, x: Any) -> Any:
        nonlocal traced
        traced += 1
        for _ in range(20):
            x = x * p
        return x[None], s + 1

    fast = [
        graphified(forward, donate="s", stage="x", recorder=recorder_name) for _ in range(functions)
    ]
    p, s = torch.ones(1, device=device), [torch.zeros(3, device=device) for _ in fast]
    x, start = torch.ones(3, device=device), threading.Barrier(threads)

    def call(i: int) -> None:
        start.wait()
        try:
            out, _ = fast[i % functions](p, s[i % functions], x)
            assert torch.equal(out, x[None])
        except BaseException as error:
            failed.append(error)

    running = [threading.Thread(target=call, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failed, failed
    assert all(one.eq(threads // functions).all() for one in s)
    assert [len(one.steps) for one in fast] == [1] * functions and traced == functions


# --- called by what is under torch.compile --------------------------------------------------------


@pytest.mark.parametrize("known", ["called before", "first called there", "a step"])
def test_torch_compile_breaks_at_a_graphified_function(known: str):
    """What is around it is compiled; it runs as it would; Dynamo does not follow it inside."""
    w, x, traced, compiled = torch.rand(4, 4), torch.rand(3, 4), [], []
    fast = fg.graphify(lambda w, x: (traced.append(1), x @ w)[1], stage="x")
    step = fast.bind(w).capture(batch=x, progress=False) if known == "a step" else None
    if known == "called before":
        fast(w, x)

    def noting(gm: Any, example: Any) -> Any:
        compiled.extend(n.target.__name__ for n in gm.graph.nodes if n.op.startswith("call"))
        return gm.forward

    def around_step(x: torch.Tensor) -> Any:
        return step(x * 2) + 1

    around = around_step if step is not None else lambda x: fast(w, x * 2) + 1
    torch._dynamo.reset()
    for _ in range(2):
        torch.testing.assert_close(torch.compile(around, backend=noting)(x), x * 2 @ w + 1)
    assert compiled == ["mul", "add"] and len(traced) == 1
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="a graphified function replays graphs of its own"):
        torch.compile(around, backend=noting, fullgraph=True)(x)
