"""N = 1, N = 2, T = R and T > R from one trace that fixes no size: T and R in many ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import fngraph as fg
from fngraph.errors import BranchError
from fngraph.models.families import llama
from fngraph.models.weights import naming

LIMITS = fg.Limits(max_tokens=32, max_reqs=16, B=toys.B)
BATCHES = {  # (T, R), requests laid out unevenly where they can be
    (1, 1): (1,),
    (2, 1): (2,),
    (2, 2): (1, 1),
    (5, 5): (1,) * 5,
    (17, 3): (9, 1, 7),
    (16, 16): (1,) * 16,
    (32, 4): (8, 12, 1, 11),
}
MODES = ["NONE", "PIECEWISE", "FULL"]


def owners(b: Any) -> Tensor:
    """(T,) the request of each token; of a padding token, any."""
    T, R = b.token_ids.shape[0], b.seq_lens.shape[0]
    found = torch.searchsorted(b.query_start_loc, torch.arange(T, dtype=torch.int32), right=True)
    return (found - 1).clamp(max=R - 1)


def same_request(b: Any) -> Tensor:
    """(T, T) whether a token may see another: its own request's, up to itself; and itself."""
    T, owner = b.token_ids.shape[0], owners(b)
    return (owner[:, None] == owner) & torch.ones(T, T, dtype=torch.bool).tril()


def causal_conv(x: Tensor, w: Tensor) -> Tensor:
    """(T, E) each channel over the last three tokens."""
    padded = F.pad(x.t()[None], (2, 0))
    return F.conv1d(padded, w[: x.shape[1], None, :3], groups=x.shape[1])[0].t()


def masked_sum(x: Tensor, b: Any) -> Tensor:
    """(R, E) sums over the true tokens of each request."""
    real = (b.slot_mapping >= 0)[:, None]
    return x.new_zeros(b.seq_lens.shape[0], x.shape[1]).index_add(0, owners(b), x * real)


# (T, E) hidden states, (E, E) weights, batch -> rows that do not depend on how many follow
WAYS: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "arange T": lambda x, w, b: x + torch.arange(x.shape[0])[:, None],
    "arange of an expression": lambda x, w, b: torch.arange(1, 2 * len_(x) + 1, 2)[:, None] * x,
    "zeros R": lambda x, w, b: torch.zeros(b.seq_lens.shape[0]) + b.seq_lens,
    "ones T by R": lambda x, w, b: torch.ones(x.shape[0], b.seq_lens.shape[0]),
    "full": lambda x, w, b: x.new_full((x.shape[0], 3), 2.5),
    "like": lambda x, w, b: torch.empty_like(x).fill_(3) + torch.zeros_like(b.token_ids)[:, None],
    "view -1": lambda x, w, b: x.view(-1, 2, toys.E // 2).flatten(1),
    "view by shape": lambda x, w, b: x.view(x.shape[0], 2, -1).transpose(1, 2).reshape(x.shape),
    "view T first": lambda x, w, b: x.view(x.size(0), -1, 4).sum(-1),
    "view 2 T": lambda x, w, b: (x.view(x.shape[0] * 2, -1) * 2).view(x.shape[0], -1),
    "rows of rows": lambda x, w, b: (x * 1).unflatten(1, (2, -1)).flatten(0, 1),
    "unflatten R": lambda x, w, b: b.block_tables.reshape(-1).unflatten(0, (-1, toys.B)) + 0,
    "cat, first": lambda x, w, b: torch.cat([x, x + 1])[: x.shape[0]] * 1,
    "cat, second": lambda x, w, b: torch.cat([x, x + 1])[x.shape[0] :] * 1,
    "cat features": lambda x, w, b: torch.cat([x, b.token_ids[:, None].float()], -1),
    "a row before": lambda x, w, b: torch.cat([x[:1] * 0, x])[:-1],
    "pad rows": lambda x, w, b: F.pad(x, (0, 0, 1, 2))[:-3],
    "pad features": lambda x, w, b: F.pad(x, (1, 2), value=1.0),
    "repeat_interleave": lambda x, w, b: x.repeat_interleave(2, 0, output_size=2 * x.shape[0]),
    "repeat_interleave R": lambda x, w, b: b.seq_lens.repeat_interleave(
        3, output_size=3 * b.seq_lens.shape[0]
    ),
    "repeat": lambda x, w, b: x.repeat(2, 3)[x.shape[0] :] + x.tile(1, 3),
    "last tokens": lambda x, w, b: x[b.query_start_loc[1:] - 1],
    "first tokens": lambda x, w, b: x[b.query_start_loc[:-1].clamp(max=x.shape[0] - 1)],
    "lengths": lambda x, w, b: torch.diff(b.query_start_loc) + b.query_start_loc[:-1],
    "owners": lambda x, w, b: b.seq_lens[owners(b)] * 0 + owners(b),
    "sums": lambda x, w, b: masked_sum(x, b),
    "expand": lambda x, w, b: x[None].expand(3, -1, -1).sum(0) + x[:1].expand(x.shape) * 0,
    "expand R": lambda x, w, b: b.seq_lens[:, None].expand(-1, 4) + 0,
    "stack": lambda x, w, b: torch.stack([x, -x], 1).flatten(1),
    "stack in front": lambda x, w, b: torch.stack([x, -x]).sum(0),
    "chunk": lambda x, w, b: torch.mul(*x.chunk(2, dim=-1)),
    "split": lambda x, w, b: torch.cat(x.split([3, 5], -1)[::-1], -1),
    "unbind": lambda x, w, b: sum(x.unflatten(1, (4, -1)).unbind(1)),
    "narrow": lambda x, w, b: x.narrow(1, 2, 3) + x.select(1, 0)[:, None],
    "einsum": lambda x, w, b: torch.einsum("te,fe->tf", x, w),
    "einsum of heads": lambda x, w, b: torch.einsum(
        "thd,hde->te", x.unflatten(1, (2, -1)), w.view(2, 4, -1)
    ),
    "einsum of three": lambda x, w, b: torch.einsum("te,fe,f->tf", x, w, w[:, 0]),
    "rearrange": lambda x, w, b: rearrange(
        rearrange(x, "t (h d) -> h t d", h=2) * 2, "h t d -> t (d h)"
    ),
    "einops repeat": lambda x, w, b: repeat(x, "t e -> (t two) e", two=2) * 1,
    "sdpa": lambda x, w, b: F.scaled_dot_product_attention(
        *(rearrange(x @ w, "t (h d) -> 1 h t d", h=2),) * 3, attn_mask=same_request(b)
    )[0].transpose(0, 1).flatten(1),
    "scores": lambda x, w, b: (x @ x.t()).masked_fill(~same_request(b), -1e9).softmax(-1) @ x,
    "outer": lambda x, w, b: torch.outer(b.seq_lens, torch.arange(3)),
    "meshgrid": lambda x, w, b: torch.meshgrid(
        torch.arange(x.shape[0]), torch.arange(4), indexing="ij"
    )[1],
    "cumsum": lambda x, w, b: x.cumsum(0),
    "windows": lambda x, w, b: F.pad(x, (0, 0, 2, 0)).unfold(0, 3, 1).sum(-1),
    "conv": lambda x, w, b: causal_conv(x, w),
    "gather": lambda x, w, b: x.gather(1, (b.token_ids % toys.E)[:, None]),
    "scatter": lambda x, w, b: x.scatter(1, (b.token_ids % toys.E)[:, None], 5.0),
    "one hot": lambda x, w, b: F.one_hot(b.token_ids, toys.V) + 0,
    "index_put": lambda x, w, b: x.index_put((torch.arange(x.shape[0]),), x * 2),
    "slice_scatter": lambda x, w, b: x.slice_scatter(x[:, :2] * 2, 1, 2, 4),
    "topk": lambda x, w, b: x.topk(3, -1).values,
    "sort": lambda x, w, b: x.sort(-1, descending=True).indices,
    "norm": lambda x, w, b: F.layer_norm(x, (toys.E,)) + F.normalize(x),
    "dtypes": lambda x, w, b: x.double().to(torch.bfloat16).float(),
    "bits": lambda x, w, b: x.view(torch.int32).bitwise_and(0xFFFF),
    "complex": lambda x, w, b: torch.view_as_real(
        torch.view_as_complex(x.unflatten(1, (-1, 2))) * 1j
    ).flatten(1),
    "vmap": lambda x, w, b: torch.func.vmap(lambda row: w @ row)(x),
    "tokens of a cache": lambda x, w, b: torch.arange(toys.V)[b.token_ids] + b.slot_mapping * 0,
}  # fmt: skip


TRUSTED = {  # right, as the runs below show, by arguments about values that no rule knows
    "cat, first", "cat, second", "pad rows", "repeat", "first tokens", "owners", "sums", "sdpa",
    "scores", "windows",
}  # fmt: skip


def len_(x: Tensor) -> Any:
    """T: `len(x)` itself is a number, which a trace refuses."""
    return x.size(0)


def forward_of(names: Any) -> Callable[..., Any]:
    """All of the named ways, after a primitive."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        x = toys.double(p["embed"][b.token_ids])
        found = {name: WAYS[name](x, p["w"], b) for name in names}
        return {k: fg.trust_rows(v) if k in TRUSTED else v for k, v in found.items()}, s

    return forward


def weights() -> dict[str, Tensor]:
    """A table and a square."""
    draw = torch.Generator().manual_seed(1)
    return {
        "embed": torch.randn(toys.V, toys.E, generator=draw),
        "w": torch.randn(toys.E, toys.E, generator=draw),
    }


def assert_fixes_no_size(traced: Any) -> None:
    """T and R are the only symbols; nothing was assumed of them, and neither became a number."""
    graph = traced.graph
    assert graph.assumptions == () and set(graph.letters.values()) == {"T", "R"}
    values = tree_leaves([n.meta.get("val") for n in graph.gm.graph.nodes])
    tensors = [v for v in values if isinstance(v, Tensor)]
    sizes = [n for v in tensors for n in (*v.shape, *v.stride(), v.storage_offset())]
    sizes += [v for v in values if isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool)]
    symbols = {s for n in sizes if not isinstance(n, int) for s in n.node.expr.free_symbols}
    assert symbols <= set(graph.letters)
    (environment,) = {v.fake_mode.shape_env for v in tensors}
    assert not environment.replacements.keys() & set(graph.letters)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", WAYS)
def test_a_trace_fixes_no_size(name: str):
    made = fg.graphify(forward_of([name]), donate="s", stage="b", limits=LIMITS)
    assert_fixes_no_size(made.trace(weights(), {}, batch=toys.batch(2)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", [(1, 1), (2, 2), (17, 3)], ids=str)
@pytest.mark.parametrize("modes", MODES)
def test_one_trace_runs_every_size(modes: str, first: tuple[int, int]):
    """Whichever batch comes first, equal to bare `forward`; no way has another's rows."""
    calls, forward = [], forward_of(WAYS)

    def counted(p: Any, s: Any, b: Any) -> Any:
        calls.append("traced")
        return forward(p, s, b)

    fast = fg.graphify(
        counted, modes=modes, donate="s", stage="b", limits=LIMITS, sizes=(1, 2, 8, 32)
    )
    params = weights()
    for rows in (BATCHES[first], *BATCHES.values()):
        got, _ = fast(params, {}, toys.batch(*rows))
        want, _ = toys.bare(forward, params, {}, toys.batch(*rows))
        for name in WAYS:
            torch.testing.assert_close(
                got[name], want[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert calls == ["traced"]


# --- sizes as numbers -----------------------------------------------------------------------------

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {  # which a graph would freeze
    "torch.tensor of an int": lambda x: x + torch.tensor(x.shape[0]),
    "torch.tensor of a float": lambda x: x + torch.tensor([x.shape[0] * 1.0]),
    "new_tensor": lambda x: x + x.new_tensor([x.shape[0] / 3]),
    "as_tensor": lambda x: x + torch.as_tensor(x.shape[0] / 3),
    "eps": lambda x: F.layer_norm(x, (toys.E,), eps=x.shape[0] * 1e-5),
    "scale": lambda x: F.scaled_dot_product_attention(x, x, x, scale=1 / x.shape[0]),
    "math": lambda x: x * math.sqrt(x.shape[0]),
    "a Python list": lambda x: x * list(range(100))[x.shape[0]],
}


def hidden_forward(fn: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """`fn` of the hidden states."""
    return lambda p, s, b: (fn(p["embed"][b.token_ids]), s)


ALWAYS = {
    "T % -3 <= 0": lambda T: T % -3 <= 0,
    "T % -3 + T % 3 < 2": lambda T: T % -3 + T % 3 < 2,
    "-T % 3 - T % 3 > -2": lambda T: -T % 3 - T % 3 > -2,
    "T % -3 > -3": lambda T: T % -3 > -3,
    "-T % 3 >= 0": lambda T: -T % 3 >= 0,
    "-T // 2 * -2 >= T": lambda T: -T // 2 * -2 >= T,
    "T // -2 * -2 >= T": lambda T: T // -2 * -2 >= T,
}


@pytest.mark.parametrize("name", ALWAYS)
def test_remainders_are_pythons_whatever_the_sign(name: str):
    """What holds for every batch is no branch; its contrary is refused with a batch."""
    holds = ALWAYS[name]
    made = lambda of: fg.graphify(  # noqa: E731
        lambda p, s, b: (p["embed"][b.token_ids] * (1 if of(b.token_ids.shape[0]) else 2), s),
        donate="s", stage="b", limits=LIMITS,
    )  # fmt: skip
    assert all(holds(T) for T in range(1, LIMITS.max_tokens + 1))
    made(holds).trace(weights(), {}, batch=toys.batch(2))
    with pytest.raises(BranchError, match="which is false for T="):
        made(lambda T: T % -3 == 0).trace(weights(), {}, batch=toys.batch(2))


@pytest.mark.parametrize("name", ["x[1:-1]", "x[2:-1, :4]", "x[1:-1].t()", "x[1:][:-1]"])
def test_a_size_below_none_for_some_batch_is_refused(name: str):
    """Of one token no row is left, and not -1."""
    made = fg.graphify(
        lambda p, s, b: (eval(name, {"x": p["embed"][b.token_ids]}) * 1, s),
        donate="s", stage="b", limits=LIMITS,
    )  # fmt: skip
    with pytest.raises(BranchError, match="which is false for T=1"):
        made.trace(weights(), {}, batch=toys.batch(2))


ROWS = {  # and how many there must be
    "x[1]": 2, "x[-2]": 2, "x[2]": 3, "x.t()[:, 1]": 2, "x.select(0, 1).t()": 2,
    "(lambda y: (y[1].fill_(2), y)[1])(x * 1)": 2, "x.select_scatter(x[0], 0, 1)": 2,
    "x.narrow(0, 1, 1)": 2, "x.unfold(0, 3, 1)": 3, "x.topk(2, 0)[0]": 2, "x.kthvalue(2, 0)[0]": 2,
    "x.select(0, (x.shape[0] + 1) // 2)": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", [*ROWS, "x[0]", "x[-1]", "x.select(0, x.shape[0] - 1)"])
@pytest.mark.parametrize("letter", "TR")
def test_a_row_that_some_batch_has_not_is_refused(name: str, letter: str):
    """As bare forward refuses that batch; a key has a row of padding there."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        ids = b.token_ids if letter == "T" else b.seq_lens
        return fg.trust_rows(eval(name, {"x": p["embed"][ids]})) * 1, s

    made = fg.graphify(forward, donate="s", stage="b", limits=LIMITS)
    few = toys.batch(*[1] * (ROWS.get(name, 2) - 1))
    if name not in ROWS:
        forward(weights(), {}, few)
        made.trace(weights(), {}, batch=toys.batch(2))
        return
    with pytest.raises((IndexError, RuntimeError)):
        forward(weights(), {}, few)
    said = rf"where {letter} >= ({ROWS[name]}|.*//.*), which is false for .*\b{letter}=1\b"
    with pytest.raises(BranchError, match=said):
        made.trace(weights(), {}, batch=toys.batch(2))


# of (T, 8) hidden states and a number: T, or one that is T for some batches alone
FITTING: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "a mask": lambda x, n: x.new_zeros(n, 2).index_put((x[:, 0] > 0,), x.new_ones(())),
    "a mask behind an index": lambda x, n: x.new_zeros(2, n).index_put_(
        (torch.tensor([1]), x[:, 0] > 0), x.new_ones(())),
    "a mask of two dims": lambda x, n: x.new_zeros(n, toys.E).index_put((x > 0,), x.new_ones(())),
    "two indices": lambda x, n: x.new_zeros(n, x.shape[0]).index_put(
        (torch.arange(n), torch.arange(x.shape[0])), x.new_ones(())),
    "values": lambda x, n: x.new_zeros(n, toys.E).index_put((torch.arange(n),), x),
    "values in place": lambda x, n: x.new_zeros(n, toys.E).index_put_((torch.arange(n),), x),
    "values of columns": lambda x, n: x.new_zeros(2, n).index_put((torch.tensor([1]),), x[:, 0]),
    "index_add": lambda x, n: x.new_zeros(2, n).index_add(0, torch.arange(2), x[:, :2].t()),
    "index_reduce": lambda x, n: x.new_zeros(n, toys.E).index_reduce(0, torch.arange(n), x, "amax"),
    "select_scatter": lambda x, n: x.new_zeros(2, n).select_scatter(x[:, 0], 0, 1),
    "slice_scatter": lambda x, n: x.new_zeros(2, n).slice_scatter(x[:, :1].t(), 0, 1),
    "slice_scatter of rows": lambda x, n: x.new_zeros(n + 1, toys.E).slice_scatter(x, 0, 1),
    "values of attention": lambda x, n: F.scaled_dot_product_attention(
        *[x.new_zeros(1, 1, n, toys.E)] * 2, x[None, None], is_causal=True),
}  # fmt: skip


@pytest.mark.parametrize("name", FITTING)
def test_sizes_that_fit_for_some_batches_alone_are_refused(name: str):
    """Also where torch's fake of the op does not ask; an error of a key, or memory beyond one."""
    made = lambda of: fg.graphify(  # noqa: E731
        hidden_forward(lambda x: fg.trust_rows(FITTING[name](x, of(x.shape[0])))),
        donate="s", stage="b", limits=LIMITS,
    )  # fmt: skip
    made(lambda T: T).trace(weights(), {}, batch=toys.batch(2))
    with pytest.raises(BranchError, match=r"test_trace_sizes\.py:\d+: .*which is false for T="):
        made(lambda T: 7).trace(weights(), {}, batch=toys.batch(2))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_size_that_becomes_a_number_is_refused(name: str):
    made = fg.graphify(hidden_forward(NUMBERS[name]), donate="s", stage="b", limits=LIMITS)
    with pytest.raises(BranchError, match=r"test_trace_sizes\.py:\d+: .*fixes the num"):
        made.trace(weights(), {}, batch=toys.batch(2))


@pytest.mark.parametrize(
    "size",
    [
        lambda T: torch.sym_int(torch.sym_sqrt(T)),
        lambda T: math.ceil(T / 2),
        lambda T: math.floor(T**0.5),
    ],
    ids=["root", "half", "power"],
)
def test_a_size_by_way_of_a_float_is_refused_with_the_line(size: Any):
    """A piece makes its sizes anew, with Python's operators on ints."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        return fg.trust_rows(p["w"].new_zeros(size(b.token_ids.shape[0])).sum()), s

    made = fg.graphify(forward, donate="s", stage="b", limits=LIMITS)
    with pytest.raises(BranchError, match=r"test_trace_sizes\.py:\d+: .*\bT\b.*computed in floats"):
        made.trace(weights(), {}, batch=toys.batch(2)).split()


# --- the model ------------------------------------------------------------------------------------


def llama_batch(rows: tuple[int, ...], past: int) -> llama.Batch:
    """Requests of `rows` new tokens, after `past` tokens each."""
    b = toys.batch(*[(new, past) for new in rows], query_len=1 if set(rows) == {1} else None)
    return llama.Batch(
        token_ids=b.token_ids,
        positions=torch.cat([torch.arange(past, past + new) for new in rows]),
        slot_mapping=b.slot_mapping,
        seq_lens=b.seq_lens,
        query_start_loc=b.query_start_loc,
        block_tables=b.block_tables,
        logits_indices=b.query_start_loc[1:].long() - 1,
        spec=b.spec,
    )


@pytest.fixture(scope="module")
def model() -> tuple[llama.Params, Any]:
    """Three layers, two query heads a kv head, weights ten times as wide as `init_params` makes."""
    config = llama.Config(
        vocab_size=toys.V, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6, dim=20,
        mlp_dim=28,
    )  # fmt: skip
    drawn = llama.init_params(config)
    params = naming.replaced(drawn, lambda _, w: w * 10 if w.dim() > 1 else w)
    return params, llama.init_cache(config, 16 * toys.B, block_size=toys.S)


def test_a_trace_of_the_llama_fixes_no_size(model: Any):
    made = fg.graphify(llama.forward, donate="cache", stage="batch", limits=LIMITS)
    traced = made.trace(*model)
    assert_fixes_no_size(traced)
    assert traced.split().program.kinds == 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("modes", [*MODES, "FULL_AND_PIECEWISE"])
def test_the_llama_runs_every_size_from_one_trace(modes: str, model: Any):
    params, cache = model
    calls = []

    def counted(params: Any, cache: Any, batch: llama.Batch) -> Any:
        calls.append("traced")
        return llama.forward(params, cache, batch)

    fast = fg.graphify(
        counted, modes=modes, donate="cache", stage="batch", limits=LIMITS, sizes=(1, 2, 8, 32)
    )
    cache, mine = toys.clone(cache), toys.clone(cache)
    for rows in BATCHES.values():
        for new, past in ((tuple(min(n, 9) for n in rows), 0), ((1,) * len(rows), 3)):
            batch = llama_batch(new, past)
            got, cache = fast(params, cache, batch)
            want, mine = toys.bare(llama.forward, params, mine, batch)
            toys.assert_trees((got, cache), (want, mine), atol=1e-4, rtol=1e-4)
    assert calls == ["traced"]
