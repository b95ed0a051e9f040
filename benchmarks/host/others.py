"""What a step would otherwise be called through, for `benchmarks host`: the same Llama shape.

    by hand             torch.cuda.graph, static leaves filled by copy_, replay, a view
    reduce-overhead     torch.compile(mode="reduce-overhead") of a function, cache updated in place
    gpt-fast's way      the same of a module whose cache is a buffer, fullgraph
    graphed callables   torch.cuda.make_graphed_callables of that module

The last three are decode/plain.py's step, over a static contiguous cache by torch's SDPA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from benchmarks.decode import plain
from benchmarks.workload import CONTEXT
from fngraph.models.families import llama


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


def ways(params: Any, paged: Any, batch: llama.Batch) -> dict[str, Callable[[], Any]]:
    """What is called, by name."""
    device, dtype, config = batch.token_ids.device, params.embed.dtype, params.config
    weights = plain.weights_of(fg.ops.lay_side_by_side(params))

    def new_cache() -> Any:
        return plain.static_cache(config, batch.spec.num_reqs, CONTEXT, device, dtype)

    tokens, positions = batch.token_ids, batch.positions
    hand = by_hand(params, paged, batch)
    functional = torch.compile(plain.step, mode="reduce-overhead")
    module = plain.Module(config, weights, new_cache())
    other = plain.Module(config, weights, new_cache())
    fast = torch.compile(other, mode="reduce-overhead", fullgraph=True)
    graphed: Any = torch.cuda.make_graphed_callables(module, (tokens, positions))
    cache = new_cache()
    return {
        "by hand: copy_ of each leaf, replay": lambda: hand(batch),
        "reduce-overhead, pure function": lambda: functional(
            config, weights, cache, tokens, positions
        ),
        "gpt-fast's way": lambda: fast(tokens, positions),
        "make_graphed_callables": lambda: graphed(tokens, positions),
    }
