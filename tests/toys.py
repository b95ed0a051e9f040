"""Small pure models that tests share, batches for them, and a bare run to compare with.

Shape letters: T tokens, R requests, E model dim, V vocab, H heads, K kv heads, D head dim; the
cache has N blocks of S tokens, B of them a request.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg
from fngraph.core import trees
from fngraph.models.families import llama
from fngraph.ops import Backend, define

V, E, H, K, D, S, B = 11, 8, 4, 2, 2, 4, 3
LIMITS = fg.Limits(max_tokens=16, max_reqs=4, B=B)
SIZES = (1, 2, 4, 8, 16)
FULL, PIECEWISE, NONE = fg.Mode.FULL, fg.Mode.PIECEWISE, fg.Mode.NONE
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
CONSTANTS = fg.core.Constants(  # of a machine that is none
    fg.core.DeviceConstants("d", 1e6, {"float32": 1e6, "bfloat16": 1e6}, 1.0),
    fg.core.HostConstants("h", 1.0, 1.0, 0.0, 1.0, 1.0),
)


@fg.struct
class Batch:
    """R requests laid end to end over T tokens."""

    token_ids: Tensor = fg.buffer("T", "int64")
    slot_mapping: Tensor = fg.buffer("T", "int64", pad=-1)
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: Tensor = fg.buffer("R B", "int32", pad=0)
    spec: fg.BatchSpec = fg.host()


def batch(*rows: int | tuple[int, int], query_len: int | None = None, seed: int = 0) -> Batch:
    """A batch of requests, each `new tokens` or `(new tokens, tokens in the cache already)`.

    Request r owns blocks r*B .. r*B + B - 1, so that steps of the same rows go on one from another.
    """
    pairs = [(row, 0) if isinstance(row, int) else row for row in rows]
    new = [n for n, _ in pairs]
    T, generator = sum(new), torch.Generator().manual_seed(seed)
    slots = [r * B * S + past + i for r, (n, past) in enumerate(pairs) for i in range(n)]
    starts = [sum(new[:r]) for r in range(len(new) + 1)]
    return Batch(
        token_ids=torch.randint(0, V, (T,), generator=generator),
        slot_mapping=torch.tensor(slots),
        seq_lens=torch.tensor([n + past for n, past in pairs], dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        block_tables=torch.arange(len(new) * B, dtype=torch.int32).view(-1, B),
        spec=fg.BatchSpec(T, len(new), query_len=query_len),
    )


def on(batch: Any, device: Any) -> Any:
    """The batch on a device; its spec stays."""
    moved = {name: getattr(batch, name).to(device) for name in fg.core.buffers_of(type(batch))}
    return dataclasses.replace(batch, **moved)


def fill(filled: Any, like: Batch) -> Any:
    """A host batch, with the leaves of another batch."""
    for name in fg.core.buffers_of(Batch):
        getattr(filled, name).copy_(getattr(like, name))
    return filled


def decode(reqs: int, past: int = 3, seed: int = 0) -> Batch:
    """One token for each request, known to be uniform."""
    return batch(*[(1, past)] * reqs, query_len=1, seed=seed)


# --- a model with attention -----------------------------------------------------------------------


def attention_params(layers: int = 2, seed: int = 0, **to: Any) -> dict[str, Any]:
    """Weights of `attend`."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(**to)  # noqa: E731
    return {
        "embed": draw(V, E),
        "layers": [
            {"qkv": draw(E, (H + 2 * K) * D) / 2, "out": draw(H * D, E) / 2} for _ in range(layers)
        ],
        "head": draw(E, V),
    }


def attention_cache(layers: int = 2, blocks: int = 4 * B, **to: Any) -> tuple[Any, ...]:
    """An empty cache for each layer."""
    return tuple(tuple(torch.zeros(blocks, S, K, D).to(**to) for _ in "kv") for _ in range(layers))


def attend(params: Any, cache: Any, batch: Batch) -> tuple[Tensor, Any]:
    """Logits (T, V) of every token, and the cache."""
    x_TE, kept = params["embed"][batch.token_ids], []
    for layer, kv in zip(params["layers"], cache):
        qkv = (x_TE @ layer["qkv"]).unflatten(-1, (H + 2 * K, D))
        q_THD, k_TKD, v_TKD = qkv.split([H, K, K], dim=1)
        out_THD, kv = fg.ops.attention(q_THD, k_TKD, v_TKD, kv, batch)
        x_TE = x_TE + torch.tanh(out_THD.flatten(1) @ layer["out"])
        kept.append(kv)
    return x_TE @ params["head"], tuple(kept)


# --- models without a primitive -------------------------------------------------------------------


def tally_params(device: Any = "cpu") -> dict[str, Tensor]:
    """Weights of `tally`."""
    return {"w": torch.linspace(-1, 1, V * E).view(V, E).to(device)}


def tally_state(device: Any = "cpu") -> dict[str, Tensor]:
    """How often each token was seen, and the sum of their embeddings."""
    state = {"seen": torch.zeros(V, dtype=torch.int64), "total": torch.zeros(V, E)}
    return moved(state, device)


def tally(params: Any, state: Any, batch: Batch) -> tuple[Tensor, Any]:
    """(T, E) embeddings, each times how often it was seen; the state is updated functionally."""
    real_T = batch.slot_mapping >= 0
    seen_V = state["seen"].index_add(0, batch.token_ids, real_T.long())
    x_TE = params["w"][batch.token_ids] * seen_V[batch.token_ids, None]
    real_TE = torch.where(real_T[:, None], x_TE, 0)
    total_VE = state["total"].index_add(0, batch.token_ids, real_TE)
    return x_TE, {"seen": seen_V, "total": total_VE}


def tally_(params: Any, state: Any, batch: Batch) -> tuple[Tensor, Any]:
    """`tally`, with its state updated in place."""
    real_T = batch.slot_mapping >= 0
    state["seen"].index_add_(0, batch.token_ids, real_T.long())
    x_TE = params["w"][batch.token_ids] * state["seen"][batch.token_ids, None]
    state["total"].index_add_(0, batch.token_ids, torch.where(real_T[:, None], x_TE, 0))
    return x_TE, state


# --- the run to compare with ----------------------------------------------------------------------


def clone(tree: Any) -> Any:
    """The same tree over memory of its own."""
    return trees.map_leaves(torch.clone, tree)


def moved(tree: Any, device: Any) -> Any:
    """The same tree on a device."""
    return trees.map_leaves(lambda x: x.to(device), tree)


def bare(fn: Any, params: Any, state: Any, batch: Batch) -> tuple[Any, Any]:
    """`fn`'s outputs and new state, by calling it on a copy of the state."""
    with torch.no_grad():
        return fn(params, clone(state), batch)


def leaves(tree: Any) -> list[Any]:
    """The leaves, in order."""
    return trees.flatten(tree)[0]


def assert_trees(got: Any, want: Any, **tolerance: Any) -> None:
    """Equal structures and close (by default bitwise equal) leaves."""
    assert trees.flatten(got)[1] == trees.flatten(want)[1]
    tolerance = tolerance or {"atol": 0, "rtol": 0}
    for a, b in zip(leaves(got), leaves(want)):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


# --- a primitive without a cache ------------------------------------------------------------------


def _run_double(args: Any, host: Any) -> None:
    DOUBLE_ROWS.append(len(args.x))
    args.out.copy_(args.x * args.factor)


DOUBLE_ROWS: list[int] = []
"""Rows of each call of `double`'s backend, for tests that ask what it was given."""

DOUBLE = define(
    "toy_double",
    "(Tensor x, Tensor(a!) out, float factor)",
    configure=lambda x, out, factor: (x.dtype, factor),
    default=Backend("plain", _run_double, support=lambda config: fg.Support.ALWAYS),
)


def double(x: Tensor, out: Tensor | None = None, factor: float = 2.0) -> Tensor:
    """x * factor, by a primitive."""
    out = torch.zeros_like(x) if out is None else out
    DOUBLE.op(x, out, factor)
    return out


# --- a toy with its arguments, and steps for it ---------------------------------------------------


class Model(NamedTuple):
    """A toy with arguments on a device."""

    fn: Any
    params: Any
    state: Any

    def graphify(self, **options: Any) -> Any:
        """Over the toys' limits."""
        return graphified(self.fn, **{"donate": 1, "stage": "batch"} | options)

    def check(self, fast: Any, batch: Any, **tolerance: Any) -> Any:
        """One step of `fast` is what bare forward gives, state included; what it put out."""
        want, after = bare(*self, batch)
        got, back = fast(self.params, self.state, batch)
        assert back is self.state
        assert_trees((got, back), (want, after), **tolerance or CLOSE)
        return got


def graphified(fn: Any, **options: Any) -> Any:
    """`fn` over the toys' limits."""
    return fg.graphify(fn, **{"limits": LIMITS, "sizes": SIZES} | options)


def model(name: str, device: Any = "cpu") -> Model:
    """ "attend", "tally" or "tally_"."""
    if name == "attend":
        return Model(attend, attention_params(device=device), attention_cache(device=device))
    fn = {"tally": tally, "tally_": tally_}[name]
    return Model(fn, tally_params(device), tally_state(device))


def steps(device: Any = "cpu") -> list[Batch]:
    """Prefill, chunks, mixed and decode, over requests that go on; sizes on and between rungs."""
    batches = [
        batch(3, 5), batch((2, 3), (1, 5), seed=1), decode(2, past=6, seed=2),
        batch(1), batch((4, 0), (1, 7), 3, 1, seed=3), decode(4, past=8, seed=4),
        batch(2, 1, seed=5), batch(9, 7, seed=6), decode(1, past=9, seed=7),
        decode(3, past=10, seed=8),
    ]  # fmt: skip
    return [on(one, device) for one in batches]


def llama_batch(b: Batch) -> llama.Batch:
    """The same requests, with positions, and logits for the last token of each."""
    ends = b.query_start_loc[1:].long()
    past = b.seq_lens - b.query_start_loc.diff()
    order = torch.arange(b.spec.num_tokens, device=ends.device)
    owner = torch.searchsorted(ends, order, right=True)
    positions = order - b.query_start_loc[owner] + past[owner]
    return llama.Batch(
        b.token_ids, positions.long(), b.slot_mapping, b.seq_lens, b.query_start_loc,
        b.block_tables, ends - 1, b.spec,
    )  # fmt: skip
