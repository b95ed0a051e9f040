"""Silent mistakes of CUDA graphs by hand, each with the value one would have expected.

| mistake                                         | here                                   |
|-------------------------------------------------|----------------------------------------|
| a new input is not copied in: stale             | right: staged at every call            |
| a result is overwritten by the next step        | right: outputs are owned by default    |
| warm-up and capture run the update              | right: state is left as it was         |
| a weight is replaced, the graph reads the old   | AddressError                           |
| a copy of the cache is passed, the old changes  | AddressError                           |
| tied memory is updated in place                 | AliasError                             |
| a Python number from the batch is frozen        | HostFieldError, BranchError, TreeError |
| a closed-over tensor is frozen                  | ClosureError                           |
| random numbers repeat, or do not                | RandomError                            |
| a literal that is written to keeps the change   | right: a fresh copy at each call       |
| padding writes to slot 0, or to the last slot   | right: slot -1 writes nowhere          |
| padding rows see, or spoil, real ones           | right: bitwise the same                |
| a prefill of three is taken for a verify step   | right: only the spec can say uniform   |
| a batch beyond the largest key is cut           | right: it runs eagerly, counted        |
| a size of one is specialised                    | right: never traced at one             |
| a model dim equals the example's T              | right: no dim of a leaf is an example  |
| an eager step between replays sees old memory   | right: one state, one address          |
| gradients of an opaque op are zero              | right; without a rule TransformError   |

Frozen without a word, here as in `jax.jit`: Python globals that are numbers, `print`, the clock.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import toys

import fngraph as fg
from fngraph import errors


def graphified(fn: Any, **options: Any) -> Any:
    """`fn(p, s, b)` over the toys' limits."""
    options = {"limits": toys.LIMITS, "sizes": toys.SIZES, "modes": "FULL"} | options
    return fg.graphify(fn, donate="s", stage="b", **options)


def attending(recorder: str, device: Any, layers: int = 2, **options: Any) -> tuple[Any, Any, Any]:
    """`toys.attend` over the toys' limits, its weights and its cache."""
    params, cache = toys.attention_params(layers), toys.attention_cache(layers)
    options = {"limits": toys.LIMITS, "sizes": (16,), "recorder": recorder} | options
    fast = fg.graphify(toys.attend, donate="cache", stage="batch", **options)
    return fast, *toys.moved((params, cache), device)


def count(p: Any, s: Any, b: Any) -> Any:
    """How many steps there were, and the embeddings."""
    return p["w"][b.token_ids] * 1, {"n": s["n"] + 1}


def count_in_place(p: Any, s: Any, b: Any) -> Any:
    s["n"].add_(1)
    return p["w"][b.token_ids] * 1, s


def rows_of(params: Any, batch: Any) -> torch.Tensor:
    """What `count` gives, had nothing gone wrong."""
    return params["w"][batch.token_ids]


@pytest.fixture
def params(device: Any) -> dict[str, torch.Tensor]:
    """One embedding table."""
    return toys.tally_params(device)


@pytest.fixture
def state(device: Any) -> dict[str, torch.Tensor]:
    """One number."""
    return {"n": torch.zeros(1, device=device)}


# --- memory ---------------------------------------------------------------------------------------


def test_a_new_batch_is_read(recorder_name, params, state):
    fast = graphified(count, recorder=recorder_name)
    for ids in ([1, 2], [3, 4], [5, 5]):
        batch = dataclasses.replace(toys.batch(2), token_ids=torch.tensor(ids))
        out, _ = fast(params, state, batch)
        assert torch.equal(out, params["w"][ids])  # a graph that is not fed would give [1, 2]'s
    for i in range(3):  # the same one, changed in place
        batch.token_ids.fill_(i)
        out, _ = fast(params, state, batch)
        assert torch.equal(out, params["w"][[i, i]])


@pytest.mark.parametrize(
    "batches",
    [[toys.batch(2, seed=i) for i in range(4)], [toys.batch(8), toys.batch(2)]],
    ids=["of one size", "of two sizes"],
)
def test_results_of_several_steps_can_be_kept(recorder_name, params, state, batches):
    fast = graphified(count, recorder=recorder_name)
    outs = [fast(params, state, batch)[0] for batch in batches]
    for out, batch in zip(outs, batches):  # by hand, those of one size would be the last one
        assert torch.equal(out, rows_of(params, batch))


@pytest.mark.parametrize("fn", [count, count_in_place])
@pytest.mark.parametrize("modes", toys.MODES)
def test_each_step_counts_once(recorder_name, params, state, fn, modes: str):
    """Eager steps and replays in turn share one state."""
    batches = [
        toys.batch(3), toys.decode(2), toys.batch(3), toys.decode(2), toys.batch(5), toys.batch(9)
    ]  # fmt: skip
    fast, ran = graphified(fn, modes=modes, recorder=recorder_name), []
    for i, batch in enumerate(batches):
        fast(params, state, batch)
        ran.append(fast.dispatch(batch.spec).mode)
        assert state["n"].item() == i + 1  # warm-up and capture would make it 2 or 3 a new key
    N, F = toys.NONE, toys.FULL
    assert ran == [N, F, N, F, N, N] or modes != "FULL_DECODE_ONLY"


def test_an_output_that_is_the_state_is_a_copy_of_it(recorder_name, params, state):
    def fn(p: Any, s: Any, b: Any) -> Any:
        s["n"].add_(1)
        return s["n"], s

    for modes in toys.MODES:
        state["n"].zero_()
        fast = graphified(fn, modes=modes, recorder=recorder_name)
        seen = [fast(params, state, toys.batch(2))[0] for _ in range(3)]
        assert [x.item() for x in seen] == [1, 2, 3]  # bare forward would give 3, 3, 3


@pytest.mark.parametrize("modes", toys.MODES)
def test_one_result_returned_twice(recorder_name, params, state, modes: str):
    twice = lambda p, s, b: ((x := p["w"][b.token_ids] * 2, x, x[:, 0]), s)  # noqa: E731
    fast = graphified(twice, modes=modes, recorder=recorder_name)
    (a, b, c), _ = fast(params, state, toys.batch(2))
    a.zero_()
    assert torch.equal(b, params["w"][toys.batch(2).token_ids] * 2)
    b.zero_()
    assert torch.equal(c, params["w"][toys.batch(2).token_ids][:, 0] * 2)


def test_two_functions_may_update_one_state_in_turn(recorder_name, params, state):
    one = graphified(count, recorder=recorder_name)
    two = graphified(count_in_place, recorder=recorder_name)
    for i in range(4):
        (one, two)[i % 2](params, state, toys.batch(2))
        assert state["n"].item() == i + 1


def test_a_weight_that_is_updated_in_place_counts(recorder_name, params, state):
    fast = graphified(count, recorder=recorder_name)
    fast(params, state, toys.batch(2))
    with torch.no_grad():
        params["w"].copy_(params["w"] * 2 + 1)
    out, _ = fast(params, state, toys.batch(2))
    assert torch.equal(out, rows_of(params, toys.batch(2)))


@pytest.mark.parametrize("how", ["replaced", "data", "double", "deepcopied state"])
def test_memory_that_is_replaced_is_an_error_not_the_old_value(recorder_name, device, state, how):
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.rand(toys.V, 2, device=device))
    params = {"w": module.w}
    fast = graphified(count, recorder=recorder_name)
    fast(params, state, toys.batch(2))
    if how == "replaced":
        params["w"] = torch.rand(toys.V, 2, device=device)
    elif how == "data":
        params["w"].data = torch.rand(toys.V, 2, device=device)
    elif how == "double":
        module.double()
        assert params["w"] is module.w  # the same object, elsewhere and of another dtype
    else:
        state = copy.deepcopy(state)
    with pytest.raises((errors.AddressError, errors.TreeError), match=r"p\['w'\]|s\['n'\]"):
        fast(params, state, toys.batch(2))


def test_tied_memory_cannot_be_donated(recorder_name, params):
    tied = {"a": params["w"], "b": params["w"]}
    both = lambda p, s, b: (b.token_ids * 1, {"a": s["a"] + 1, "b": s["b"] * 2})  # noqa: E731
    fast = graphified(both, recorder=recorder_name)
    with pytest.raises(errors.AliasError, match="share memory"):
        fast({}, tied, toys.batch(2))  # a + 1 and b * 2 cannot both be kept in one memory


def test_a_swap_is_a_swap(recorder_name, device):
    s = {"a": torch.zeros(2, device=device), "b": torch.ones(2, device=device)}
    swap = lambda p, s, b: (b.token_ids * 1, {"a": s["b"], "b": s["a"]})  # noqa: E731
    fast = graphified(swap, recorder=recorder_name)
    fast({}, s, toys.batch(2))
    assert (s["a"].tolist(), s["b"].tolist()) == ([1, 1], [0, 0])  # copied in turn: both 1


@pytest.mark.parametrize("where", ["on the host", "on the device"])
def test_a_literal_that_is_written_to_starts_afresh(recorder_name, state, where: str):
    def fn(p: Any, s: Any, b: Any) -> Any:
        to = {"device": b.token_ids.device} if where == "on the device" else {}
        total = torch.tensor([0.0, 0.0], **to)
        total.add_(1)
        return total * torch.tensor([2.0, 3.0], **to), s

    if (recorder_name, where) == ("cuda", "on the host"):
        return  # on CUDA it would be made with device=, which the trace hoists
    for modes in toys.MODES:
        fast = graphified(fn, modes=modes, recorder=recorder_name)
        for _ in range(3):
            assert fast({}, state, toys.batch(2))[0].tolist() == [2, 3]  # not [4, 6] at the second


def test_weights_and_batches_with_strides(recorder_name, device, state):
    wide = torch.rand(2, toys.V, 2, device=device)
    params = {"w": wide.transpose(0, 2)[:, :, 1].t()}  # neither contiguous nor at offset 0
    fast = graphified(count, recorder=recorder_name)
    ids = torch.arange(8)[::2]
    batch = dataclasses.replace(toys.batch(4), token_ids=ids)
    assert torch.equal(fast(params, state, batch)[0], params["w"][ids])


def test_the_order_of_a_dicts_keys_does_not_count(recorder_name, device, state):
    a, b = torch.rand(toys.V, 2, device=device), torch.rand(toys.V, 2, device=device)
    minus = lambda p, s, b: (p["a"][b.token_ids] - p["b"][b.token_ids], s)  # noqa: E731
    fast = graphified(minus, recorder=recorder_name)
    want = (a - b)[toys.batch(2).token_ids]
    assert torch.equal(fast({"a": a, "b": b}, state, toys.batch(2))[0], want)
    assert torch.equal(fast({"b": b, "a": a}, state, toys.batch(2))[0], want)


def test_a_none_that_becomes_a_tensor(recorder_name, params, state):
    def fn(p: Any, s: Any, b: Any) -> Any:
        x = p["w"][b.token_ids] * 1
        return (x if p["bias"] is None else x + p["bias"]), s

    fast = graphified(fn, recorder=recorder_name)
    fast({**params, "bias": None}, state, toys.batch(2))
    bias = torch.ones(toys.E, device=params["w"].device)
    with pytest.raises(errors.TreeError, match=r"p\['bias'\]"):  # not a silent None
        fast({**params, "bias": bias}, state, toys.batch(2))


# --- what Python saw once -------------------------------------------------------------------------


def times(by: Any) -> Any:
    """A forward that gives the weight times `by(p, b)`."""
    return lambda p, s, b: (p["w"] * by(p, b), s)


FROZEN: dict[str, tuple[Any, type]] = {
    what: (times(by), error)
    for what, by, error in [
        ("batch.spec.num_tokens", lambda p, b: b.spec.num_tokens, errors.HostFieldError),
        ("len(x)", lambda p, b: len(b.token_ids), errors.BranchError),
        ("if T > 4", lambda p, b: 2 if b.token_ids.shape[0] > 4 else 1, errors.BranchError),
        ("x.item()", lambda p, b: b.token_ids[0].item(), errors.HostSyncError),
        ("max(a, b)", lambda p, b: max(b.seq_lens[0], b.seq_lens[0] + 1), errors.HostSyncError),
        ("a closed-over tensor", lambda p, b: OUTSIDE, errors.ClosureError),
        ("torch.rand", lambda p, b: torch.rand(()), errors.RandomError),
        # without a check: 1 for every batch, as the `except` says
        ("x.item() in try", lambda p, b: tried(lambda: b.seq_lens.max().item()),
         errors.HostSyncError),
        ("batch.spec in try", lambda p, b: tried(lambda: b.spec.num_tokens), errors.HostFieldError),
        ("a tensor as text", lambda p, b: len(str(b.seq_lens)), errors.HostSyncError),
        # without a check: one number for all steps, and not a draw each
        ("bernoulli_ with its default", lambda p, b: torch.empty(toys.E).bernoulli_(),
         errors.RandomError),
        # without a check: what the array held at the first call
        ("a numpy array", lambda p, b: torch.from_numpy(ARRAY), errors.ClosureError),
        ("tolist of a global", lambda p, b: OUTSIDE.tolist()[0], errors.ClosureError),
    ]
} | {
    "a closed-over tensor, returned": (lambda p, s, b: ((p["w"] * 1, OUTSIDE), s),
                                       errors.PurityError),
    # without a check: the example's text, "x16" and not "x3"
    "T in a name": (lambda p, s, b: ({f"x{b.token_ids.shape[0]}": p["w"] * 1}, s),
                    errors.BranchError),
    # without a check: the weight as it was, and not its double
    "w.data =": (lambda p, s, b: (setattr(p["w"], "data", p["w"] * 2), (p["w"] * 1, s))[1],
                 errors.MutationError),
    # without a check: a fake tensor in the list, and nothing more in the steps after the first
    "a tensor kept": (lambda p, s, b: (KEPT.append(p["w"] * 2), (p["w"] * 1, s))[1],
                      errors.LeakError),
    # without a check: (1, E) for a batch of one token, which is (E,)
    "squeeze of T": (lambda p, s, b: (p["w"][b.token_ids].squeeze(0) * 1, s), errors.BranchError),
}  # fmt: skip
OUTSIDE, ARRAY = torch.ones(toys.E), np.ones(toys.E, dtype=np.float32)
KEPT: list[torch.Tensor] = []


def tried(part: Any) -> Any:
    """`part()`, or 1 where that fails."""
    try:
        return part()
    except Exception:
        return 1


@pytest.mark.sampled(15)
@pytest.mark.parametrize("modes", ["NONE", "FULL"])
@pytest.mark.parametrize("what", FROZEN)
def test_what_a_graph_would_freeze_is_an_error(what: str, modes: str):
    fn, error = FROZEN[what]
    with pytest.raises(error) as caught:
        graphified(fn, modes=modes)(toys.tally_params(), {"n": torch.zeros(1)}, toys.batch(3))
    assert isinstance(caught.value, errors.PurityError)


def test_a_number_among_the_arguments_is_an_error(params, state):
    with pytest.raises(errors.TreeError, match=r"p\['scale'\]"):
        graphified(count)({**params, "scale": 2.0}, state, toys.batch(2))


# --- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", toys.MODES)
def test_padding_writes_to_no_slot(recorder_name, device, modes: str):
    """All slots but the declared ones, 0 and the last one (index -1) too, hold what they held."""
    fast, params, cache = attending(recorder_name, device, modes=modes, sizes=toys.SIZES)
    for leaf in toys.leaves(cache):
        leaf.fill_(float("nan"))  # what a padding row would spoil, it would have to write
    decode, mixed = toys.decode(3, past=0, seed=9), toys.batch((1, 3), (4, 2), 1)
    for batch in (toys.batch(3, 4), toys.batch((2, 3), (1, 4), seed=1), decode, mixed):
        before = toys.clone(cache)
        fast(params, cache, batch)
        for old, new in zip(toys.leaves(before), toys.leaves(cache)):
            old, new = (x.flatten(0, 1).view(torch.int32) for x in (old, new))
            changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
            assert changed == sorted(batch.slot_mapping.tolist())


@pytest.mark.parametrize("modes", ["PIECEWISE", "FULL"])
def test_real_rows_do_not_see_what_padding_rows_hold(recorder_name, device, modes: str):
    """A large batch before leaves other numbers in the rows that become padding."""
    fast, params, cache = attending(recorder_name, device, modes=modes)
    batch, outs = toys.batch((2, 3), (1, 4)), []
    for before in (toys.batch(3), toys.batch(4, 4, 4, 4, seed=3), toys.batch(1, 9, seed=4)):
        fast(params, cache, before)
        for leaf in toys.leaves(cache):
            leaf.fill_(0.5)
        outs.append((fast(params, cache, batch)[0], toys.clone(cache)))
    toys.assert_trees(outs[1], outs[0])
    toys.assert_trees(outs[2], outs[0])


def test_nan_in_what_nobody_owns_does_not_spread(recorder_name, device):
    fast, params, cache = attending(recorder_name, device, sizes=toys.SIZES)
    for leaf in toys.leaves(cache):
        leaf.fill_(float("nan"))
    for batch in (toys.batch(3, 2), toys.decode(2, 2), toys.batch((2, 3), (1, 3), 5)):
        assert fast(params, cache, batch)[0].isfinite().all()


def test_a_prefill_of_three_is_no_verify_step_of_three():
    fast = graphified(count, modes="FULL_AND_PIECEWISE", query_lens=(1, 3))
    params, state = toys.tally_params(), {"n": torch.zeros(1)}
    prefill, verify = toys.batch(3, 3), toys.batch((3, 5), (3, 5), query_len=3)
    fast(params, state, prefill)
    assert fast.dispatch(prefill.spec).mode is toys.PIECEWISE  # FULL, if lengths were looked at
    assert fast.dispatch(verify.spec).mode is toys.FULL


@pytest.mark.parametrize("modes", toys.MODES)
def test_each_size_up_to_the_limits_is_whole(recorder_name, params, state, modes: str):
    """Those beyond the largest key are no smaller: they run eagerly, and are counted so."""
    fast = graphified(count, modes=modes, sizes=(2, 5, 11), recorder=recorder_name)
    some = [toys.batch(n, seed=n) for n in range(1, 17)]
    for batch in (*some, toys.batch(13, 3), toys.decode(4)):
        out, _ = fast(params, state, batch)
        assert torch.equal(out, rows_of(params, batch))  # not the first eleven rows
    assert [fast.stats.counts[n, n, toys.NONE] for n in (12, 16)] == [1, 2]
    assert len(fast.stats.reasons) >= 1


# --- sizes ----------------------------------------------------------------------------------------


def test_a_batch_of_one_is_like_any_other(recorder_name, params, state):
    """Traced at one, `x + row` would broadcast, `squeeze` would drop the dim, and stay so."""

    def fn(p: Any, s: Any, b: Any) -> Any:
        x = p["w"][b.token_ids]
        return (x + x.flip(1), x.sum(1, keepdim=True) * x, x.unsqueeze(0).squeeze(0) @ x.t()), s

    for first in (1, 2, 7):
        fast = graphified(fn, modes="NONE", recorder=recorder_name)
        for n in (first, 1, 2, 5, 1):
            want, _ = toys.bare(fn, params, state, toys.on(toys.batch(n), params["w"].device))
            toys.assert_trees(fast(params, state, toys.batch(n))[0], want, **toys.CLOSE)


@pytest.mark.parametrize("modes", ["NONE", "FULL"])
def test_model_dims_are_never_taken_for_tokens(modes: str):
    """Weights as long as any example could be: their dims are constants all the same."""
    lengths = [2, 3, 5, 7, 11, 13, 16, 17, 19, 23, 29, 31, 37, 41, 43, 64, 97, 101, 709, 1361]

    def fn(p: Any, s: Any, b: Any) -> Any:
        return [w * b.token_ids.sum() for w in p["w"]], s

    params = {"w": [torch.ones(n) for n in lengths]}
    fast = graphified(fn, modes=modes)
    batch = dataclasses.replace(toys.batch(3), token_ids=torch.tensor([1, 0, 1]))
    outs, _ = fast(params, {"n": torch.zeros(1)}, batch)
    assert [len(out) for out in outs] == lengths and all(out.eq(2).all() for out in outs)


def test_t_and_r_are_never_taken_for_one_another():
    """Both are 3 in the first batch; they are not, in the second."""

    def fn(p: Any, s: Any, b: Any) -> Any:
        return (b.token_ids * 2, b.seq_lens * 2), s

    fast, state = graphified(fn), {"n": torch.zeros(1)}
    for batch in (toys.batch(1, 1, 1), toys.batch(2, 5), toys.batch(1)):
        (tokens, lens), _ = fast({}, state, batch)
        assert torch.equal(tokens, batch.token_ids * 2) and torch.equal(lens, batch.seq_lens * 2)


# --- gradients ------------------------------------------------------------------------------------


def test_a_gradient_through_an_opaque_op():
    """Torch's own fallback gives zeros, and a warning that nobody reads."""
    params, batch = toys.attention_params(1), toys.batch(3)
    qkv = params["layers"][0]["qkv"].requires_grad_()
    toys.attend(params, toys.attention_cache(1), batch)[0].square().sum().backward()
    assert qkv.grad is not None and qkv.grad.count_nonzero() == qkv.numel()
    with pytest.raises(NotImplementedError, match="gradient"):
        toys.double(qkv)
