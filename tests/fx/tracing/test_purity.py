"""What `forward` may not do: one class each, at the user's own line, with the fix; and what it may.

The offending line of each function ends in `# here`, which is how a test knows its number.
"""

from __future__ import annotations

import inspect
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys

import fngraph as fg
from fngraph.errors import (
    BranchError,
    ClosureError,
    HostFieldError,
    HostSyncError,
    MutationError,
    OutputError,
    PurityError,
    RandomError,
)

Forward = Callable[[Any, Any, Any], Any]


def trace(forward: Forward, limits: fg.Limits = toys.LIMITS) -> Any:
    """Trace over the toys' arguments: params {"w": (V, E)}, state {"seen", "total"}."""
    made = fg.graphify(forward, donate="s", stage="b", limits=limits)
    return made.trace(toys.tally_params(), toys.tally_state(), batch=toys.batch(2))


def line_of(forward: Forward) -> str:
    """Where `# here` is."""
    lines, first = inspect.getsourcelines(forward)
    (number,) = [first + i for i, line in enumerate(lines) if "# here" in line]
    return f"{Path(__file__).name}:{number}:"


def refused(forward: Forward, error: type[Exception], *words: str, line: bool = True) -> str:
    """Trace `forward`, see it refused with its line and all of `words`; the message."""
    with pytest.raises(error) as caught:
        trace(forward)
    text = str(caught.value)
    wanted = [line_of(forward), *words] if line else words
    assert [w for w in wanted if w not in text] == [], text
    assert isinstance(caught.value, PurityError) and isinstance(caught.value, RuntimeError)
    trace(pure)  # nothing of the failed trace is left behind
    return text


def pure(p: Any, s: Any, b: Any) -> Any:
    return toys.tally(p, s, b)


def test_a_pure_function_is_traced():
    assert len(trace(pure).donation.rows) == 2


# --- tensors that were not passed -----------------------------------------------------------------

WEIGHT = torch.ones(toys.E)
BOX = types.SimpleNamespace(weight=torch.ones(toys.E), layers=[torch.ones(toys.E)])


def reads_global(p: Any, s: Any, b: Any) -> Any:
    x = p["w"][b.token_ids]
    return x * WEIGHT, s  # here


def reads_default(p: Any, s: Any, b: Any, scale: Any = None) -> Any:
    return p["w"][b.token_ids] * scale, s  # here


def reads_attribute(p: Any, s: Any, b: Any) -> Any:
    return p["w"][b.token_ids] * BOX.weight, s  # here


def reads_list(p: Any, s: Any, b: Any) -> Any:
    return p["w"][b.token_ids] * BOX.layers[0], s  # here


def test_a_global_tensor():
    refused(reads_global, ClosureError, "'WEIGHT'", "global", f"({toys.E},)", "forward(params")


def test_a_tensor_from_the_closure():
    gain = torch.ones(toys.E)

    def forward(p: Any, s: Any, b: Any) -> Any:
        return p["w"][b.token_ids] * gain, s  # here

    refused(forward, ClosureError, "'gain'", "closure", "argument")


def test_a_default_argument():
    def forward(p: Any, s: Any, b: Any, *, gain: Any = torch.ones(toys.E)) -> Any:  # noqa: B008
        return p["w"][b.token_ids] * gain, s  # here

    with pytest.raises(fg.errors.FnGraphError, match="gain"):
        trace(forward)


def test_a_default_tensor_of_an_inner_function():
    def scaled(x: Any, gain: Any = torch.ones(toys.E)) -> Any:  # noqa: B008
        return x * gain

    def forward(p: Any, s: Any, b: Any) -> Any:
        return scaled(p["w"][b.token_ids]), s

    with pytest.raises(ClosureError, match=rf"{Path(__file__).name}:\d+"):
        trace(forward)


def test_an_attribute_of_an_object():
    refused(reads_attribute, ClosureError, "not passed to it", "argument")


def test_an_item_of_a_list():
    refused(reads_list, ClosureError, "not passed to it")


def test_a_module_with_parameters():
    module = torch.nn.Linear(toys.E, 3)

    def forward(p: Any, s: Any, b: Any) -> Any:
        return module(p["w"][b.token_ids]), s  # here

    refused(forward, ClosureError, "not passed to it")


def test_a_closed_over_scalar_tensor():
    scale = torch.tensor(2.0)

    def forward(p: Any, s: Any, b: Any) -> Any:
        return p["w"][b.token_ids] * scale, s  # here

    refused(forward, ClosureError, "'scale'")


def test_a_closed_over_scalar_tensor_read_as_a_number():
    scale = torch.tensor(2.0)

    def forward(p: Any, s: Any, b: Any) -> Any:
        return p["w"][b.token_ids] * scale.item(), s  # here

    refused(forward, PurityError)


def test_a_closed_over_tensor_that_is_only_a_view_or_a_write():
    memory = torch.zeros(toys.V, dtype=torch.int64)

    def forward(p: Any, s: Any, b: Any) -> Any:
        memory.view(-1)[0] = 1  # here
        return p["w"][b.token_ids], s

    refused(forward, PurityError)
    assert memory.eq(0).all()


def test_a_closed_over_tensor_that_is_only_returned():
    constant = torch.ones(3)

    def forward(p: Any, s: Any, b: Any) -> Any:
        return (p["w"][b.token_ids], constant), s

    with pytest.raises(PurityError):
        trace(forward)


def test_numbers_modules_and_functions_from_outside_are_fine():
    scale, helper = 2.0, F.silu

    def forward(p: Any, s: Any, b: Any) -> Any:
        return helper(p["w"][b.token_ids] * scale * toys.E), s

    trace(forward)


# --- values on the host ---------------------------------------------------------------------------


def item(p: Any, s: Any, b: Any) -> Any:
    return p["w"] * b.token_ids.sum().item(), s  # here


def if_tensor(p: Any, s: Any, b: Any) -> Any:
    if p["w"].sum() > 0:  # here
        return p["w"] * 2, s
    return p["w"] * 3, s


def int_of_tensor(p: Any, s: Any, b: Any) -> Any:
    return p["w"][: int(b.seq_lens.max())] * 1, s  # here


def float_of_tensor(p: Any, s: Any, b: Any) -> Any:
    return p["w"] * float(p["w"].max()), s  # here


def bool_of_tensor(p: Any, s: Any, b: Any) -> Any:
    return p["w"] * bool((b.token_ids > 0).any()), s  # here


def tolist(p: Any, s: Any, b: Any) -> Any:
    return p["w"] * sum(b.seq_lens.tolist()), s  # here


def as_numpy(p: Any, s: Any, b: Any) -> Any:
    return p["w"] * p["w"].numpy()[0, 0], s  # here


def nonzero(p: Any, s: Any, b: Any) -> Any:
    return p["w"][b.token_ids.nonzero().squeeze(1)], s  # here


def where_of_one(p: Any, s: Any, b: Any) -> Any:
    return p["w"][torch.where(b.token_ids > 0)[0]], s  # here


def mask_index(p: Any, s: Any, b: Any) -> Any:
    return p["w"][p["w"] > 0], s  # here


def masked_select(p: Any, s: Any, b: Any) -> Any:
    return torch.masked_select(p["w"], p["w"] > 0), s  # here


def unique(p: Any, s: Any, b: Any) -> Any:
    return torch.unique(b.token_ids), s  # here


def torch_equal(p: Any, s: Any, b: Any) -> Any:
    return (p["w"] * 2 if torch.equal(p["w"], p["w"] + 1) else p["w"] * 3), s  # here


def an_assert(p: Any, s: Any, b: Any) -> Any:
    assert (b.token_ids >= 0).all()  # here
    return p["w"] * 1, s


def repeat_by_tensor(p: Any, s: Any, b: Any) -> Any:
    return torch.repeat_interleave(b.seq_lens * 1, b.seq_lens), s  # here


def index_by_scalar_tensor(p: Any, s: Any, b: Any) -> Any:
    return p["w"][: b.seq_lens[0]] * 1, s  # here


SYNCS = [
    item, if_tensor, int_of_tensor, float_of_tensor, bool_of_tensor, tolist, as_numpy, nonzero,
    where_of_one, mask_index, masked_select, unique, torch_equal, an_assert, repeat_by_tensor,
    index_by_scalar_tensor,
]  # fmt: skip


@pytest.mark.parametrize("forward", SYNCS)
def test_a_value_read_on_the_host(forward: Forward):
    text = refused(forward, HostSyncError, "host")
    assert "torch.where" in text or "Stay in torch" in text


def test_choices_on_the_device_are_fine():
    def forward(p: Any, s: Any, b: Any) -> Any:
        x = p["w"][b.token_ids]
        x = torch.where(x.sum(1, keepdim=True) > 0, x, -x).masked_fill(x > 3, 3.0)
        x = x[(b.token_ids > 0).long()]  # an integer index has a fixed shape
        return x.gather(1, x.argmax(1, keepdim=True)), s

    trace(forward)


# --- writes ---------------------------------------------------------------------------------------


def adds_to_held(p: Any, s: Any, b: Any) -> Any:
    p["w"].add_(1)  # here
    return p["w"][b.token_ids], s


def writes_a_view_of_held(p: Any, s: Any, b: Any) -> Any:
    p["w"].t()[0, 1:] = 0  # here
    return p["w"][b.token_ids], s


def writes_held_as_out(p: Any, s: Any, b: Any) -> Any:
    torch.mul(p["w"], 2, out=p["w"])  # here
    return p["w"][b.token_ids], s


def writes_a_list_of_held(p: Any, s: Any, b: Any) -> Any:
    torch._foreach_add_([p["w"]], 1.0)  # here
    return p["w"][b.token_ids], s


def puts_into_held(p: Any, s: Any, b: Any) -> Any:
    p["w"].index_put_((b.token_ids,), torch.zeros(()))  # here
    return p["w"] * 1, s


def writes_a_detached_alias(p: Any, s: Any, b: Any) -> Any:
    p["w"].detach().zero_()  # here
    return p["w"] * 1, s


@pytest.mark.parametrize(
    "forward",
    [adds_to_held, writes_a_view_of_held, writes_held_as_out, writes_a_list_of_held,
     puts_into_held, writes_a_detached_alias],
)  # fmt: skip
def test_a_write_to_a_held_argument(forward: Forward):
    refused(forward, MutationError, "p['w']", "held", "donate=", '"p"')


def writes_staged(p: Any, s: Any, b: Any) -> Any:
    return p["w"][b.token_ids.clamp_(min=0)], s  # here


def writes_a_view_of_staged(p: Any, s: Any, b: Any) -> Any:
    b.seq_lens[:1].add_(1)  # here
    return p["w"][b.token_ids], s


def test_a_write_to_the_batch():
    refused(writes_staged, MutationError, "b.token_ids", "staged", "x.clone()")
    refused(writes_a_view_of_staged, MutationError, "b.seq_lens", "staged")


def test_attention_over_a_cache_that_was_not_donated():
    def forward(p: Any, cache: Any, s: Any, b: Any) -> Any:
        q = p["w"][b.token_ids].view(-1, toys.H, toys.D)
        k = q[:, : toys.K]
        out, _ = fg.ops.attention(q, k, k, cache, b)  # here
        return out, s

    (cache,) = toys.attention_cache(1)
    made = fg.graphify(forward, donate="s", stage="b", limits=toys.LIMITS)
    with pytest.raises(MutationError, match=r"cache\[0\].*held.*donate=.*\"cache\"") as error:
        made.trace(toys.tally_params(), cache, toys.tally_state(), batch=toys.batch(2))
    assert line_of(forward) in str(error.value)


def test_writes_to_donated_and_to_new_tensors_are_fine():
    def forward(p: Any, s: Any, b: Any) -> Any:
        s["seen"][torch.where(b.slot_mapping >= 0, b.token_ids, 0)] = 1
        s["total"].t().mul_(2)
        x = p["w"][b.token_ids]
        x += 1
        x[0] = 0
        return x, s

    assert [row.how for row in trace(forward).donation.rows] == ["in place"] * 2


# --- random numbers -------------------------------------------------------------------------------


def rand(p: Any, s: Any, b: Any) -> Any:
    return p["w"] + torch.rand(toys.V, toys.E), s  # here


def randn_like(p: Any, s: Any, b: Any) -> Any:
    return p["w"] + torch.randn_like(p["w"]), s  # here


def dropout(p: Any, s: Any, b: Any) -> Any:
    return F.dropout(p["w"], 0.5), s  # here


def normal_(p: Any, s: Any, b: Any) -> Any:
    return torch.empty(toys.V, toys.E).normal_(), s  # here


def multinomial(p: Any, s: Any, b: Any) -> Any:
    return torch.multinomial(p["w"].softmax(-1), 1), s  # here


def randperm(p: Any, s: Any, b: Any) -> Any:
    return p["w"][torch.randperm(toys.V)], s  # here


def a_generator(p: Any, s: Any, b: Any) -> Any:
    return p["w"] + torch.rand(toys.E, generator=torch.Generator().manual_seed(0)), s  # here


def attention_dropout(p: Any, s: Any, b: Any) -> Any:
    x = p["w"][None, None]
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), s  # here


@pytest.mark.parametrize(
    "forward",
    [rand, randn_like, dropout, normal_, multinomial, randperm, a_generator, attention_dropout],
)
def test_a_draw_from_a_generator(forward: Forward):
    refused(forward, RandomError, "random", "argument")


def test_pythons_random():
    def forward(p: Any, s: Any, b: Any) -> Any:
        return p["w"] * random.random(), s

    with pytest.raises(RandomError, match="random"):
        trace(forward)


def test_dropout_that_is_switched_off_draws_nothing():
    def forward(p: Any, s: Any, b: Any) -> Any:
        x = F.dropout(p["w"], 0.5, training=False) + F.dropout(p["w"], 0.0)
        y = F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
        return y * 1, s

    trace(forward)


def test_random_numbers_from_a_key_are_fine():
    def forward(p: Any, s: Any, b: Any) -> Any:
        hashed = (b.token_ids * 6364136223846793005 + 1442695040888963407) >> 33
        return (hashed % 1000).float() / 1000, s

    trace(forward)


def test_a_trace_leaves_the_generators_as_they_were():
    torch.manual_seed(3)
    before, python = torch.get_rng_state(), random.getstate()
    trace(pure)
    with pytest.raises(RandomError):
        trace(dropout)
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python


# --- the number of tokens or requests -------------------------------------------------------------


def branch_on_tokens(p: Any, s: Any, b: Any) -> Any:
    if b.token_ids.shape[0] > 5:  # here
        return p["w"][b.token_ids] * 2, s
    return p["w"][b.token_ids] * 3, s


def branch_on_requests(p: Any, s: Any, b: Any) -> Any:
    x = p["w"][b.token_ids]
    return (x if b.seq_lens.shape[0] <= 2 else x * 2) * 1, s  # here


def branch_on_one(p: Any, s: Any, b: Any) -> Any:
    if b.token_ids.shape[0] == 1:  # here
        return p["w"][b.token_ids] * 2, s
    return p["w"][b.token_ids] * 3, s


def branch_on_two(p: Any, s: Any, b: Any) -> Any:
    if b.seq_lens.shape[0] < 2:  # here
        return p["w"][b.token_ids] * 2, s
    return p["w"][b.token_ids] * 3, s


def branch_on_both(p: Any, s: Any, b: Any) -> Any:
    if b.token_ids.shape[0] == b.seq_lens.shape[0]:  # here
        return p["w"][b.token_ids] * 2, s
    return p["w"][b.token_ids] * 3, s


@pytest.mark.parametrize(
    ("forward", "letter"),
    [
        (branch_on_tokens, "T"),
        (branch_on_requests, "R"),
        (branch_on_one, "T"),
        (branch_on_two, "R"),
        (branch_on_both, "R"),
    ],
)
def test_a_branch_on_a_size(forward: Forward, letter: str):
    text = refused(forward, BranchError, "tokens or requests", "mask")
    assert f"{letter}=" in text  # a size at which the branch would go the other way


def int_of_tokens(p: Any, s: Any, b: Any) -> Any:
    return p["w"][b.token_ids] * int(b.token_ids.shape[0]), s  # here


def range_of_tokens(p: Any, s: Any, b: Any) -> Any:
    return sum(p["w"][b.token_ids][i] for i in range(b.token_ids.shape[0])), s  # here


def len_of_tokens(p: Any, s: Any, b: Any) -> Any:
    return p["w"][b.token_ids] * len(b.token_ids), s  # here


def new_tensor_of_int(p: Any, s: Any, b: Any) -> Any:
    n = int(b.seq_lens.shape[0])  # here
    return torch.zeros(n), s


def iterate_over_requests(p: Any, s: Any, b: Any) -> Any:
    return torch.stack([n * 2 for n in b.seq_lens]), s  # here


@pytest.mark.parametrize(
    ("forward", "noun"),
    [
        (int_of_tokens, "tokens"),
        (len_of_tokens, "tokens"),
        (range_of_tokens, "tokens"),
        (new_tensor_of_int, "requests"),
        (iterate_over_requests, "requests"),
    ],
)
def test_a_size_made_a_number(forward: Forward, noun: str):
    refused(forward, BranchError, f"number of {noun}", "symbolic")


def test_sizes_that_stay_symbolic_are_fine():
    def forward(p: Any, s: Any, b: Any) -> Any:
        T, R = b.token_ids.shape[0], b.seq_lens.shape[0]
        x = p["w"][b.token_ids].view(T, 2, -1)
        y = torch.arange(T, device=x.device)[:, None] < torch.zeros(R, dtype=torch.int64)
        return (x.reshape(T, toys.E), y, x.new_zeros(2 * T + R)), s

    trace(forward)


def test_a_branch_that_every_batch_takes_alike_is_fine():
    def forward(p: Any, s: Any, b: Any) -> Any:
        assert b.token_ids.shape[0] <= 16 and b.seq_lens.shape[0] < 5
        assert b.token_ids.shape[0] >= b.seq_lens.shape[0]
        return p["w"][b.token_ids] * 1, s

    trace(forward)
    with pytest.raises(BranchError, match=r"T (<=|>) 16"):
        trace(forward, fg.Limits(32, 4, B=3))


# --- host fields ----------------------------------------------------------------------------------


def reads_spec(p: Any, s: Any, b: Any) -> Any:
    return p["w"] * b.spec.num_tokens, s  # here


def branches_on_spec(p: Any, s: Any, b: Any) -> Any:
    return (p["w"] * 2 if b.spec else p["w"] * 3), s  # here


def compares_spec(p: Any, s: Any, b: Any) -> Any:
    return (p["w"] * 2 if b.spec == 3 else p["w"] * 3), s  # here


def indexes_spec(p: Any, s: Any, b: Any) -> Any:
    return p["w"] * b.spec[0], s  # here


def unpacks_spec(p: Any, s: Any, b: Any) -> Any:
    tokens, *_ = b.spec  # here
    return p["w"] * tokens, s


@pytest.mark.parametrize(
    "forward", [reads_spec, branches_on_spec, compares_spec, indexes_spec, unpacks_spec]
)
def test_a_read_of_batch_spec(forward: Forward):
    refused(forward, HostFieldError, ".spec", "batch.seq_lens")


def test_a_batch_may_be_replaced_and_printed():
    import dataclasses

    def forward(p: Any, s: Any, b: Any) -> Any:
        assert "not readable" in repr(b.spec)
        return toys.tally(p, s, dataclasses.replace(b, token_ids=b.token_ids * 1))

    trace(forward)


# --- outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, "int"), (2.5, "float"), ("text", "str"), (True, "bool"), (object(), "object")],
)
def test_something_else_than_a_tensor_returned(value: Any, kind: str):
    def forward(p: Any, s: Any, b: Any) -> Any:
        return (p["w"][b.token_ids], {"extra": value}), s

    text = refused(forward, OutputError, kind, "tensors only", line=False)
    assert "[0][1]['extra']" in text


def test_a_size_returned():
    def forward(p: Any, s: Any, b: Any) -> Any:
        return (p["w"][b.token_ids], b.token_ids.shape[0]), s

    refused(forward, OutputError, "[0][1]", line=False)


def test_the_spec_returned():
    def forward(p: Any, s: Any, b: Any) -> Any:
        return (p["w"][b.token_ids], b.spec), s

    with pytest.raises(PurityError):
        trace(forward)


def test_the_batch_returned():
    def forward(p: Any, s: Any, b: Any) -> Any:
        return (p["w"][b.token_ids], b), s

    refused(forward, OutputError, "b.token_ids", line=False)


ALIASES: dict[str, tuple[Forward, str]] = {
    "held": (lambda p, s, b: (p["w"], s), "p['w']"),
    "view of held": (lambda p, s, b: (p["w"].t()[1:], s), "p['w']"),
    "staged": (lambda p, s, b: (b.token_ids, s), "b.token_ids"),
    "view of staged": (lambda p, s, b: (b.token_ids.view(1, -1), s), "b.token_ids"),
    "a cast that does nothing": (lambda p, s, b: (b.token_ids.long(), s), "b.token_ids"),
    "contiguous that does nothing": (lambda p, s, b: (p["w"].contiguous(), s), "p['w']"),
    "detached": (lambda p, s, b: (p["w"].detach(), s), "p['w']"),
}


@pytest.mark.parametrize("what", ALIASES)
def test_an_alias_of_a_held_or_staged_argument_returned(what: str):
    forward, path = ALIASES[what]
    refused(forward, OutputError, path, "x.clone()", line=False)


def test_clones_none_and_views_of_donated_leaves_may_be_returned():
    def forward(p: Any, s: Any, b: Any) -> Any:
        return {"a": p["w"].clone(), "b": None, "c": s["seen"][:2], "d": [b.token_ids + 0]}, s

    trace(forward)


# --- all of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forward", [item, adds_to_held, rand, branch_on_tokens, reads_spec, reads_global]
)
def test_a_refused_call_loses_nothing(forward: Forward):
    """Through the front door: the state is as it was, and the next function works."""
    made = fg.graphify(forward, donate="s", stage="b", limits=toys.LIMITS, sizes=toys.SIZES)
    params, state = toys.tally_params(), toys.tally_state()
    before = toys.clone((params, state))
    for _ in range(2):  # not only the first time
        with pytest.raises(PurityError):
            made(params, state, toys.batch(2))
    toys.assert_trees((params, state), before)


def test_the_message_comes_from_the_innermost_line_of_the_users():
    def helper(x: torch.Tensor) -> Any:
        return x.sum().item()  # here

    def forward(p: Any, s: Any, b: Any) -> Any:
        return p["w"] * helper(p["w"]), s

    with pytest.raises(HostSyncError) as error:
        trace(forward)
    assert line_of(helper) in str(error.value)


def test_an_exception_of_forward_itself_comes_through():
    def forward(p: Any, s: Any, b: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(forward)


def test_a_shape_mistake_comes_through():
    def forward(p: Any, s: Any, b: Any) -> Any:
        return p["w"] @ p["w"], s

    with pytest.raises(RuntimeError, match=r"mat|shape|size|dim"):
        trace(forward)
