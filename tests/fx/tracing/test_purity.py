"""What `forward` may not do: one class each, at the user's own line, with the fix; and what it may.

A test knows the number of the offending line: a lambda's only one, else the one with `# here`.
"""

from __future__ import annotations

import dataclasses
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
    OperatorError,
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
    """Where a lambda is, or `# here` in a function."""
    number = forward.__code__.co_firstlineno
    if forward.__name__ != "<lambda>":
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


def named(*functions: Forward) -> dict[str, Forward]:
    return {fn.__name__: fn for fn in functions}


# --- tensors that were not passed -----------------------------------------------------------------

WEIGHT = torch.ones(toys.E)
BOX = types.SimpleNamespace(weight=torch.ones(toys.E), layers=[torch.ones(toys.E)])


def reads_global(p: Any, s: Any, b: Any) -> Any:
    x = p["w"][b.token_ids]
    return x * WEIGHT, s  # here


def closing_over(gain: Any) -> dict[str, Forward]:
    return {
        "returned": lambda p, s, b: ((p["w"][b.token_ids], gain), s),
        "a tensor": lambda p, s, b: (p["w"][b.token_ids] * gain, s),
        "a number": lambda p, s, b: (p["w"][b.token_ids] * gain.item(), s),
        "a module": lambda p, s, b: (gain(p["w"][b.token_ids]), s),
    }


CLOSED: dict[str, tuple[Forward, list[str]]] = {
    "a global": (
        reads_global, ["'WEIGHT'", "global", f"({toys.E},)", "argument: forward("]),
    "the closure": (
        closing_over(torch.ones(toys.E))["a tensor"], ["'gain'", "closure", "argument"]),
    "a scalar": (closing_over(torch.tensor(2.0))["a tensor"], ["'gain'"]),
    "an attribute of an object": (
        lambda p, s, b: (p["w"][b.token_ids] * BOX.weight, s), ["not passed to it", "argument"]),
    "an item of a list": (
        lambda p, s, b: (p["w"][b.token_ids] * BOX.layers[0], s), ["not passed to it"]),
    "a module with parameters": (
        closing_over(torch.nn.Linear(toys.E, 3))["a module"], ["not passed to it"]),
}  # fmt: skip


@pytest.mark.parametrize("what", CLOSED)
def test_a_tensor_that_was_not_passed(what: str):
    forward, words = CLOSED[what]
    refused(forward, ClosureError, *words)


def test_a_default_tensor_is_held_like_any_other():
    def forward(p: Any, s: Any, b: Any, *, gain: Any = torch.ones(toys.E)) -> Any:  # noqa: B008
        return p["w"][b.token_ids] * gain, s

    held = {leaf.path: leaf.role.value for leaf in trace(forward).args.leaves}
    assert held["gain"] == "held"


def test_a_default_tensor_of_an_inner_function():
    def scaled(x: Any, gain: Any = torch.ones(toys.E)) -> Any:  # noqa: B008
        return x * gain

    def forward(p: Any, s: Any, b: Any) -> Any:
        return scaled(p["w"][b.token_ids]), s

    with pytest.raises(ClosureError, match=rf"{Path(__file__).name}:\d+"):
        trace(forward)


def test_a_closed_over_tensor_that_is_only_a_view_or_a_write():
    memory = torch.zeros(toys.V, dtype=torch.int64)

    def forward(p: Any, s: Any, b: Any) -> Any:
        memory.view(-1)[0] = 1  # here
        return p["w"][b.token_ids], s

    refused(forward, PurityError)
    assert memory.eq(0).all()


def closing_over_no_tensor(scale: float, helper: Any) -> Forward:
    return lambda p, s, b: (helper(p["w"][b.token_ids] * scale * toys.E), s)


# --- values on the host ---------------------------------------------------------------------------


def if_tensor(p: Any, s: Any, b: Any) -> Any:
    if p["w"].sum() > 0:  # here
        return p["w"] * 2, s
    return p["w"] * 3, s


def an_assert(p: Any, s: Any, b: Any) -> Any:
    assert (b.token_ids >= 0).all()  # here
    return p["w"] * 1, s


SYNCS: dict[str, Forward] = named(if_tensor, an_assert) | {
    "item": lambda p, s, b: (p["w"] * b.token_ids.sum().item(), s),
    "int": lambda p, s, b: (p["w"][: int(b.seq_lens.max())] * 1, s),
    "float": lambda p, s, b: (p["w"] * float(p["w"].max()), s),
    "bool": lambda p, s, b: (p["w"] * bool((b.token_ids > 0).any()), s),
    "tolist": lambda p, s, b: (p["w"] * sum(b.seq_lens.tolist()), s),
    "numpy": lambda p, s, b: (p["w"] * p["w"].numpy()[0, 0], s),
    "nonzero": lambda p, s, b: (p["w"][b.token_ids.nonzero().squeeze(1)], s),
    "where of one": lambda p, s, b: (p["w"][torch.where(b.token_ids > 0)[0]], s),
    "mask index": lambda p, s, b: (p["w"][p["w"] > 0], s),
    "masked_select": lambda p, s, b: (torch.masked_select(p["w"], p["w"] > 0), s),
    "unique": lambda p, s, b: (torch.unique(b.token_ids), s),
    "equal": lambda p, s, b: (p["w"] * (2 if torch.equal(p["w"], p["w"] + 1) else 3), s),
    "repeat by tensor": lambda p, s, b: (torch.repeat_interleave(b.seq_lens * 1, b.seq_lens), s),
    "index by scalar tensor": lambda p, s, b: (p["w"][: b.seq_lens[0]] * 1, s),
}


@pytest.mark.parametrize("what", SYNCS)
def test_a_value_read_on_the_host(what: str):
    text = refused(SYNCS[what], HostSyncError, "host")
    assert "torch.where" in text or "Stay in torch" in text


SHAPES: dict[str, Forward] = {
    "ctc_loss": lambda p, s, b: (F.ctc_loss(p["w"][:, None], b.block_tables, *[b.seq_lens] * 2), s),
    "lstsq": lambda p, s, b: (torch.linalg.lstsq(p["w"], p["w"][:, :1]).solution, s),
}  # fmt: skip


@pytest.mark.parametrize("what", SHAPES)
def test_an_op_whose_shape_follows_from_values(what: str):
    refused(SHAPES[what], HostSyncError, "shape", "outside of forward", what)


OUTS: dict[str, tuple[Forward, str]] = {
    "of one element": (
        lambda p, s, b: (torch.add(p["w"][b.token_ids], 1, out=torch.empty(1)), s),
        "[1] for a result of [T, 8]"),
    "of none": (
        lambda p, s, b: (torch.mm(p["w"], torch.ones(toys.E, 2), out=p["w"].new_empty(0)), s),
        "[0] for a result of [11, 2]"),
    "of another rank": (
        lambda p, s, b: (torch.cat([p["w"][b.token_ids]] * 2, 1, out=torch.empty(3, 3, 3)), s),
        "[3, 3, 3] for a result of [T, 16]"),
    "one of two": (
        lambda p, s, b: (torch.sort(
            p["w"], 1, out=(p["w"] * 1, p["w"].new_empty(1, dtype=torch.long)))[0], s),
        "[1] for a result of [11, 8]"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("what", OUTS)
def test_an_out_that_torch_would_resize(what: str):
    forward, words = OUTS[what]
    refused(forward, OperatorError, words, "y = torch.add")


def test_an_out_of_the_right_shape_is_fine():
    def forward(p: Any, s: Any, b: Any) -> Any:
        x = p["w"][b.token_ids]
        return torch.add(x, 1, out=torch.empty_like(x)), s

    trace(forward)


def test_what_torch_runs_and_cannot_trace_is_named():
    """Its rule for the shape of x[mask] takes bytes for another dtype. What is an error on numbers
    too is told as torch's own."""

    def of_bytes(p: Any, s: Any, b: Any) -> Any:
        return p["w"][(p["w"][:, 0] > 9).to(torch.uint8)], s  # here

    refused(of_bytes, OperatorError, "__getitem__", "runs but cannot trace", "mask.bool()")
    with pytest.raises(OperatorError, match=r"test_purity.py:\d+: .*Expected dtype int32/int64"):
        trace(lambda p, s, b: (p["w"].gather(0, p["w"]), s))


def chooses_on_the_device(p: Any, s: Any, b: Any) -> Any:
    x = p["w"][b.token_ids]
    x = torch.where(x.sum(1, keepdim=True) > 0, x, -x).masked_fill(x > 3, 3.0)
    x = x[(b.token_ids > 0).long()]  # an integer index has a fixed shape
    return x.gather(1, x.argmax(1, keepdim=True)), s


# --- writes ---------------------------------------------------------------------------------------


def writes_a_view_of_held(p: Any, s: Any, b: Any) -> Any:
    p["w"].t()[0, 1:] = 0  # here
    return p["w"][b.token_ids], s


HELD_WRITES: dict[str, Forward] = named(writes_a_view_of_held) | {
    "add_": lambda p, s, b: (p["w"].add_(1)[b.token_ids], s),
    "out=": lambda p, s, b: (torch.mul(p["w"], 2, out=p["w"])[b.token_ids], s),
    "a list": lambda p, s, b: (torch._foreach_add_([p["w"]], 1.0), s),
    "index_put_": lambda p, s, b: (p["w"].index_put_((b.token_ids,), torch.zeros(())) * 1, s),
    "a detached alias": lambda p, s, b: (p["w"].detach().zero_() * 1, s),
}


@pytest.mark.parametrize("what", HELD_WRITES)
def test_a_write_to_a_held_argument(what: str):
    refused(HELD_WRITES[what], MutationError, "p['w']", "held", "donate=", '"p"')


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda p, s, b: (p["w"][b.token_ids.clamp_(min=0)], s), ["b.token_ids", "x.clone()"]),
        (lambda p, s, b: (b.seq_lens[:1].add_(1), s), ["b.seq_lens"]),
    ],
    ids=["a field", "a view of one"],
)
def test_a_write_to_the_batch(forward: Forward, words: list[str]):
    refused(forward, MutationError, "staged", *words)


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


def attention_dropout(p: Any, s: Any, b: Any) -> Any:
    x = p["w"][None, None]
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), s  # here


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


DRAWS: dict[str, Forward] = named(attention_dropout) | {
    "rand": lambda p, s, b: (p["w"] + torch.rand(toys.V, toys.E), s),
    "randn_like": lambda p, s, b: (p["w"] + torch.randn_like(p["w"]), s),
    "dropout": lambda p, s, b: (F.dropout(p["w"], 0.5), s),
    "normal_": lambda p, s, b: (torch.empty(toys.V, toys.E).normal_(), s),
    "multinomial": lambda p, s, b: (torch.multinomial(p["w"].softmax(-1), 1), s),
    "randperm": lambda p, s, b: (p["w"][torch.randperm(toys.V)], s),
    "a generator": lambda p, s, b: (p["w"] + torch.rand(toys.E, generator=seeded()), s),
}


@pytest.mark.parametrize("what", DRAWS)
def test_a_draw_from_a_generator(what: str):
    refused(DRAWS[what], RandomError, "random", "argument")


def test_pythons_random():
    with pytest.raises(RandomError, match="random"):
        trace(lambda p, s, b: (p["w"] * random.random(), s))


def has_dropout_switched_off(p: Any, s: Any, b: Any) -> Any:
    x = F.dropout(p["w"], 0.5, training=False) + F.dropout(p["w"], 0.0)
    y = F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
    return y * 1, s


def draws_from_a_key(p: Any, s: Any, b: Any) -> Any:
    hashed = (b.token_ids * 6364136223846793005 + 1442695040888963407) >> 33
    return (hashed % 1000).float() / 1000, s


def test_a_trace_leaves_the_generators_as_they_were():
    torch.manual_seed(3)
    before, python = torch.get_rng_state(), random.getstate()
    trace(pure)
    with pytest.raises(RandomError):
        trace(DRAWS["dropout"])
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python


# --- the number of tokens or requests -------------------------------------------------------------


def an_if(p: Any, s: Any, b: Any) -> Any:
    if b.token_ids.shape[0] > 5:  # here
        return p["w"][b.token_ids] * 2, s
    return p["w"][b.token_ids] * 3, s


BRANCHES: dict[str, tuple[Forward, str]] = {
    "T > 5": (an_if, "T"),
    "R <= 2": (lambda p, s, b: (p["w"] * (1 if b.seq_lens.shape[0] <= 2 else 2), s), "R"),
    "T == 1": (lambda p, s, b: (p["w"] * (2 if b.token_ids.shape[0] == 1 else 3), s), "T"),
    "R < 2": (lambda p, s, b: (p["w"] * (2 if b.seq_lens.shape[0] < 2 else 3), s), "R"),
    "T == R": (
        lambda p, s, b: (p["w"] * (2 if b.token_ids.shape[0] == b.seq_lens.shape[0] else 3), s),
        "R",
    ),
}


@pytest.mark.parametrize("what", BRANCHES)
def test_a_branch_on_a_size(what: str):
    forward, letter = BRANCHES[what]
    text = refused(forward, BranchError, "tokens or requests", "mask")
    assert f"{letter}=" in text  # a size at which the branch would go the other way


def new_tensor_of_int(p: Any, s: Any, b: Any) -> Any:
    n = int(b.seq_lens.shape[0])  # here
    return torch.zeros(n), s


NUMBERS: dict[str, tuple[Forward, str]] = {
    "int": (lambda p, s, b: (p["w"][b.token_ids] * int(b.token_ids.shape[0]), s), "tokens"),
    "len": (lambda p, s, b: (p["w"][b.token_ids] * len(b.token_ids), s), "tokens"),
    "range": (
        lambda p, s, b: (sum(p["w"][b.token_ids][i] for i in range(b.token_ids.shape[0])), s),
        "tokens",
    ),
    "new tensor of int": (new_tensor_of_int, "requests"),
    "iteration": (lambda p, s, b: (torch.stack([n * 2 for n in b.seq_lens]), s), "requests"),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_a_size_made_a_number(what: str):
    forward, noun = NUMBERS[what]
    refused(forward, BranchError, f"number of {noun}", "symbolic")


RESHAPES: dict[str, Forward] = {
    "R + 1 by T": lambda p, s, b: (b.query_start_loc.view(b.token_ids.shape[0], -1) * 1, s),
    "R + 1 in pairs": lambda p, s, b: (b.query_start_loc.reshape(-1, 2) * 1, s),
    "R + 1 in two": lambda p, s, b: (b.query_start_loc.view(2, -1) * 1, s),
}


@pytest.mark.parametrize("what", RESHAPES)
def test_a_reshape_that_not_every_batch_has(what: str):
    refused(RESHAPES[what], BranchError, "R + 1")


def keeps_sizes_symbolic(p: Any, s: Any, b: Any) -> Any:
    T, R = b.token_ids.shape[0], b.seq_lens.shape[0]
    x = p["w"][b.token_ids].view(T, 2, -1)
    y = torch.arange(T, device=x.device)[:, None] < torch.zeros(R, dtype=torch.int64)
    return (x.reshape(T, toys.E), y, x.new_zeros(2 * T + R)), s


def test_a_branch_that_every_batch_takes_alike_is_fine():
    def forward(p: Any, s: Any, b: Any) -> Any:
        assert b.token_ids.shape[0] <= 16 and b.seq_lens.shape[0] < 5
        assert b.token_ids.shape[0] >= b.seq_lens.shape[0]
        return p["w"][b.token_ids] * 1, s

    trace(forward)
    with pytest.raises(BranchError, match=r"T (<=|>) 16"):
        trace(forward, fg.Limits(32, 4, B=3))


# --- host fields ----------------------------------------------------------------------------------


def unpacks_spec(p: Any, s: Any, b: Any) -> Any:
    tokens, *_ = b.spec  # here
    return p["w"] * tokens, s


SPECS: dict[str, Forward] = named(unpacks_spec) | {
    "read": lambda p, s, b: (p["w"] * b.spec.num_tokens, s),
    "branched on": lambda p, s, b: ((p["w"] * 2 if b.spec else p["w"] * 3), s),
    "compared": lambda p, s, b: ((p["w"] * 2 if b.spec == 3 else p["w"] * 3), s),
    "indexed": lambda p, s, b: (p["w"] * b.spec[0], s),
}


@pytest.mark.parametrize("what", SPECS)
def test_a_read_of_batch_spec(what: str):
    refused(SPECS[what], HostFieldError, ".spec", "from a staged leaf")


def replaces_and_prints_the_batch(p: Any, s: Any, b: Any) -> Any:
    assert "not readable" in repr(b.spec)
    return toys.tally(p, s, dataclasses.replace(b, token_ids=b.token_ids * 1))


# --- outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, "int"), (2.5, "float"), ("text", "str"), (True, "bool"), (object(), "object")],
)
def test_something_else_than_a_tensor_returned(value: Any, kind: str):
    def forward(p: Any, s: Any, b: Any) -> Any:
        return (p["w"][b.token_ids], {"extra": value}), s

    refused(forward, OutputError, kind, "tensors only", "[0][1]['extra']", line=False)


BACK: dict[str, tuple[Forward, list[str]]] = {
    "a size": (lambda p, s, b: ((p["w"][b.token_ids], b.token_ids.shape[0]), s), ["[0][1]"]),
    "the batch": (lambda p, s, b: ((p["w"][b.token_ids], b), s), ["b.token_ids"]),
    "held": (lambda p, s, b: (p["w"], s), ["p['w']", "x.clone()"]),
    "view of held": (lambda p, s, b: (p["w"].t()[1:], s), ["p['w']", "x.clone()"]),
    "staged": (lambda p, s, b: (b.token_ids, s), ["b.token_ids", "x.clone()"]),
    "view of staged": (lambda p, s, b: (b.token_ids.view(1, -1), s), ["b.token_ids", "x.clone()"]),
    "a cast that does nothing": (
        lambda p, s, b: (b.token_ids.long(), s), ["b.token_ids", "x.clone()"]),
    "contiguous that does nothing": (
        lambda p, s, b: (p["w"].contiguous(), s), ["p['w']", "x.clone()"]),
    "detached": (lambda p, s, b: (p["w"].detach(), s), ["p['w']", "x.clone()"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BACK)
def test_what_may_not_be_returned(what: str):
    forward, words = BACK[what]
    refused(forward, OutputError, *words, line=False)


def returns_clones_none_and_views(p: Any, s: Any, b: Any) -> Any:
    return {"a": p["w"].clone(), "b": None, "c": s["seen"][:2], "d": [b.token_ids + 0]}, s


# --- all of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forward",
    [
        pure, closing_over_no_tensor(2.0, F.silu), chooses_on_the_device, has_dropout_switched_off,
        draws_from_a_key, keeps_sizes_symbolic, replaces_and_prints_the_batch,
        returns_clones_none_and_views,
    ],
)  # fmt: skip
def test_what_is_fine_is_traced(forward: Forward):
    assert len(trace(forward).donation.rows) == 2


@pytest.mark.parametrize(
    ("forward", "line"),
    [
        (closing_over(torch.tensor(2.0))["a number"], True),
        (closing_over(torch.ones(3))["returned"], False),
        (lambda p, s, b: ((p["w"][b.token_ids], b.spec), s), False),
    ],
    ids=["a closed-over scalar as a number", "a closed-over tensor returned", "the spec returned"],
)
def test_what_breaks_several_rules_is_refused(forward: Forward, line: bool):
    refused(forward, PurityError, line=line)


def test_the_message_comes_from_the_innermost_line_of_the_users():
    def helper(x: torch.Tensor) -> Any:
        return x.sum().item()  # here

    with pytest.raises(HostSyncError) as error:
        trace(lambda p, s, b: (p["w"] * helper(p["w"]), s))
    assert line_of(helper) in str(error.value)


def test_an_exception_of_forward_itself_comes_through():
    def forward(p: Any, s: Any, b: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(forward)


def test_a_shape_mistake_comes_through():
    with pytest.raises(RuntimeError, match=r"mat|shape|size|dim"):
        trace(lambda p, s, b: (p["w"] @ p["w"], s))


# --- what is called to raise or to print ----------------------------------------------------------


@torch.library.custom_op("test_purity::say", mutates_args=())
def say(x: torch.Tensor) -> None:
    """Without a result: a graph would leave it out."""


@say.register_fake
def _(x: torch.Tensor) -> None: ...


square = lambda p: p["w"][:4, :4]  # noqa: E731
CALLED_TO_RAISE: dict[str, tuple[Forward, str]] = {
    "inv": (lambda p, s, b: (torch.linalg.inv(square(p)), s), "Call torch.linalg.inv_ex, return"),
    "inverse": (lambda p, s, b: (square(p).inverse(), s), "torch.linalg.inv, which raises"),
    "tensorinv": (
        lambda p, s, b: (torch.linalg.tensorinv(square(p), 1), s), "Call torch.linalg.inv_ex",
    ),
    "solve": (
        lambda p, s, b: (torch.linalg.solve(square(p), square(p)), s), "torch.linalg.solve_ex",
    ),
    "cholesky": (
        lambda p, s, b: (torch.linalg.cholesky(square(p)), s), "torch.linalg.cholesky_ex, return",
    ),
    "lu": (lambda p, s, b: (torch.linalg.lu_factor(square(p))[0], s), "linalg.lu_factor_ex"),
    "a power": (lambda p, s, b: (torch.linalg.matrix_power(square(p), -2), s), "linalg.inv_ex"),
    "a check that is asked for": (
        lambda p, s, b: (torch.linalg.inv_ex(square(p), check_errors=True)[0], s),
        "aten.linalg_inv_ex.default with check_errors=True. A graph raises no error",
    ),
    "an assertion": (
        lambda p, s, b: (torch._assert_async((p["w"] > 0).all()), (p["w"].sum(), s))[1],
        "aten._assert_async.default. A graph raises no error and prints nothing: it would leave",
    ),
    "an assertion with a text": (
        lambda p, s, b: (torch._assert_async((p["w"] > 0).all(), "no"), (p["w"].sum(), s))[1],
        "Return the condition",
    ),
    "an op of one's own": (
        lambda p, s, b: (say(p["w"]), (p["w"].sum(), s))[1],
        "say.default, which has no result. A graph raises no error and prints nothing: it would",
    ),
    "in a loop": (
        lambda p, s, b: (fg.fori_loop(0, 2, lambda i, x: torch.linalg.inv(x), square(p)), s),
        "torch.linalg.inv_ex",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLED_TO_RAISE)
def test_what_is_called_to_raise_or_to_print_is_refused_not_left_out(case: str):
    refused(CALLED_TO_RAISE[case][0], OperatorError, CALLED_TO_RAISE[case][1])


@pytest.mark.parametrize("case", CALLED_TO_RAISE)
def test_a_report_of_it_goes_on(case: str):
    made = fg.check(
        CALLED_TO_RAISE[case][0], toys.tally_params(), toys.tally_state(), toys.batch(2),
        donate="s", stage="b", limits=toys.LIMITS,
    )  # fmt: skip
    assert CALLED_TO_RAISE[case][1] in str(made)


def test_forms_that_say_it_in_a_result_are_taken():
    """And what a trace asserts of dtypes."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        inverse, info = torch.linalg.inv_ex(square(p).double())
        return (inverse, info, F.one_hot(b.token_ids % 3, 3)), s

    trace(forward)
