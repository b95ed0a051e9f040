"""Which models are decoded with, and what one step of them has to read.

Shapes alone: weights are random. Of a large mixture of experts a few layers and a part of the
vocabulary stand for all; `note` says so in each row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.decode import plain
from benchmarks.workload import BF16, SHAPES
from fngraph.models.families import llama, qwen3, qwen3_moe


class Model(NamedTuple):
    """A family's functions, a config, and how it differs from the model that it is named after."""

    family: Any
    config: Any
    note: str = ""


def _qwen3(kind: Any = qwen3.Config, **sizes: Any) -> Any:
    return kind(**{"rope_theta": 1e6, "norm_eps": 1e-6, "tied": True, **sizes})


MODELS = {
    "1B": Model(llama, SHAPES["1B"]),
    "8B": Model(llama, SHAPES["8B"]),
    "0.6B": Model(qwen3, _qwen3(
        vocab_size=151936, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, dim=1024,
        mlp_dim=3072,
    )),
    "30B-A3B": Model(qwen3_moe, _qwen3(
        qwen3_moe.Config, vocab_size=4096, num_layers=2, num_heads=32, num_kv_heads=4,
        head_dim=128, dim=2048, mlp_dim=6144, num_experts=128, num_chosen=8, expert_dim=768,
        normalized=True,
    ), "2 of 48 layers, 4096 of 151936 words"),
    "tiny": Model(llama, SHAPES["tiny"]),
    "tiny-qwen3": Model(qwen3, _qwen3(
        vocab_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, dim=64,
        mlp_dim=128,
    )),
    "tiny-moe": Model(qwen3_moe, _qwen3(
        qwen3_moe.Config, vocab_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        dim=64, mlp_dim=128, num_experts=8, num_chosen=2, expert_dim=32, normalized=True,
    )),
}  # fmt: skip


def bytes_read(config: Any, weights: plain.Weights, num_reqs: int, context: int) -> float:
    """Bytes that a step of one token a request reads at least: weights and the cache.

    The table of embeddings is left out, but for a head that is tied to it. Of experts it is those
    that so many tokens choose if they choose at random.
    """
    read = float(weights.head.nbytes + weights.norm.nbytes)
    for layer in weights.layers:
        parts = [x for x in layer[:-1] if x is not None]
        if isinstance(layer.mlp, plain.Experts):
            of_all = 1 - (1 - config.num_chosen / config.num_experts) ** num_reqs
            parts.append(layer.mlp.router)
            read += sum(x.nbytes for x in layer.mlp[1:]) * of_all
        else:
            parts += layer.mlp
        read += sum(x.nbytes for x in parts)
    kept = 2 * num_reqs * context * config.num_kv_heads * config.head_dim * config.num_layers
    return read + kept * BF16.itemsize
