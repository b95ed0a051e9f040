"""What a step would otherwise be called through, for `benchmarks host`: the same Llama shape.

    by hand             torch.cuda.graph, static leaves filled by copy_, replay, a view
    reduce-overhead     torch.compile(mode="reduce-overhead") of a pure function, cache returned
    gpt-fast's way      the same of a module whose cache is a buffer, fullgraph
    graphed callables   torch.cuda.make_graphed_callables of that module

The last three attend over a static contiguous cache by torch's SDPA, as gpt-fast does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fngraph as fg
from benchmarks.workload import CONTEXT
from fngraph.models.families import decoder, llama
from fngraph.models.families.layers import Mlp


def by_hand(params: Any, cache: Any, batch: llama.Batch) -> Callable[[llama.Batch], Tensor]:
    """A loop that captured `forward` itself, as one writes it."""
    names = list(fg.core.buffers_of(llama.Batch))
    static = dataclasses.replace(batch, **{n: getattr(batch, n).clone() for n in names})
    llama.forward(params, cache, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = llama.forward(params, cache, static)
    buffers = [getattr(static, n) for n in names]

    def call(given: llama.Batch) -> Tensor:
        for buffer, name in zip(buffers, names):
            buffer.copy_(getattr(given, name), non_blocking=True)
        graph.replay()
        return out[: given.spec.num_reqs]

    return call


class Tokens(NamedTuple):
    """What the layers read of a batch."""

    token_ids: Tensor
    positions: Tensor


def plain_step(
    params: llama.Params, cache: Any, token_ids_R: Tensor, positions_R: Tensor
) -> tuple[Tensor, Any]:
    """One token of each request over a static cache, for each layer k and v of (R, K, S, D)."""
    rows_R = torch.arange(len(token_ids_R), device=token_ids_R.device)
    seen_RS = torch.arange(CONTEXT, device=token_ids_R.device) <= positions_R[:, None]

    def attend(q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor, kv: Any, _: Any) -> tuple[Tensor, Any]:
        k_RKSD, v_RKSD = kv
        k_RKSD[rows_R, :, positions_R] = k_RKD
        v_RKSD[rows_R, :, positions_R] = v_RKD
        out_RH1D = F.scaled_dot_product_attention(
            q_RHD[:, :, None], k_RKSD, v_RKSD, seen_RS[:, None, None], enable_gqa=True
        )
        return out_RH1D[:, :, 0], kv

    x_RE, cache = decoder.transformer(
        params, cache, Tokens(token_ids_R, positions_R),
        functools.partial(llama.attention, attend=attend), rope_dim=params.config.head_dim,
    )  # fmt: skip
    return decoder.logits(params, x_RE), cache


def static_cache(config: llama.Config, num_reqs: int, device: Any, dtype: torch.dtype) -> Any:
    """Zeros for `plain_step`."""
    shape = (num_reqs, config.num_kv_heads, CONTEXT, config.head_dim)
    zeros = lambda: torch.zeros(shape, device=device, dtype=dtype)  # noqa: E731
    return tuple((zeros(), zeros()) for _ in range(config.num_layers))


class Module(nn.Module):
    """`plain_step` with weights and cache as its own, as gpt-fast's model has them."""

    def __init__(self, params: llama.Params, cache: Any) -> None:
        super().__init__()
        self.config = params.config
        for i, (layer, (k, v)) in enumerate(zip(params.layers, cache)):
            norms = {"attn_norm": layer.attn_norm, "mlp_norm": layer.mlp_norm}
            for name, x in {**norms, **vars(layer.attn), **vars(layer.mlp), "k": k, "v": v}.items():
                self.register_buffer(f"{name}{i}", x)
        for name in ("embed", "norm", "head"):
            self.register_buffer(name, getattr(params, name))

    def forward(self, token_ids_R: Tensor, positions_R: Tensor) -> Tensor:
        """Logits, (R, V)."""
        numbers = range(self.config.num_layers)
        layers = tuple(
            decoder.Layer(
                getattr(self, f"attn_norm{i}"),
                llama.Attention(*(getattr(self, f"{n}{i}") for n in ("wq", "wk", "wv", "wo"))),
                getattr(self, f"mlp_norm{i}"),
                Mlp(*(getattr(self, f"{n}{i}") for n in ("w_gate", "w_up", "w_down"))),
            )
            for i in numbers
        )
        embed, norm, head = (getattr(self, name) for name in ("embed", "norm", "head"))
        params = llama.Params(embed, layers, norm, head, self.config)
        cache = tuple((getattr(self, f"k{i}"), getattr(self, f"v{i}")) for i in numbers)
        return plain_step(params, cache, token_ids_R, positions_R)[0]


def ways(params: Any, paged: Any, batch: llama.Batch) -> dict[str, Callable[[], Any]]:
    """What is called, by name."""
    device, dtype = batch.token_ids.device, params.embed.dtype
    new_cache = lambda: static_cache(params.config, batch.spec.num_reqs, device, dtype)  # noqa: E731
    tokens, positions = batch.token_ids, batch.positions
    hand = by_hand(params, paged, batch)
    functional = torch.compile(plain_step, mode="reduce-overhead")
    module = Module(params, new_cache())
    fast = torch.compile(Module(params, new_cache()), mode="reduce-overhead", fullgraph=True)
    graphed: Any = torch.cuda.make_graphed_callables(module, (tokens, positions))
    cache = new_cache()
    return {
        "by hand: copy_ of each leaf, replay": lambda: hand(batch),
        "reduce-overhead, pure function": lambda: functional(params, cache, tokens, positions),
        "gpt-fast's way": lambda: fast(tokens, positions),
        "make_graphed_callables": lambda: graphed(tokens, positions),
    }
