"""Small decoders whose layers are one launch, their batches and caches."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph import one_launch
from fngraph.models.families import llama, qwen3
from fngraph.models.weights import naming

SMALL: Any = {"vocab_size": 5000, "num_layers": 3, "num_heads": 8, "num_kv_heads": 2, "dim": 512,
              "mlp_dim": 1024}  # fmt: skip
BLOCK, BLOCKS = 16, 160
LIMITS = fg.Limits(8, 4, B=BLOCKS)


def family_and_config(name: str) -> tuple[Any, Any]:
    """Small decoders whose shapes the kernel takes."""
    if name == "llama":
        return llama, llama.Config(**SMALL, head_dim=64)
    if name == "llama of 128":  # more of a kv head's heads, columns and groups that are uneven
        sizes = {**SMALL, "num_heads": 16, "dim": 1536, "mlp_dim": 2560, "vocab_size": 1000}
        return llama, llama.Config(**sizes, head_dim=128, tied=True)
    if name == "layers of an 8B":  # products that take several turns of the ring
        sizes = {**SMALL, "num_layers": 2, "num_heads": 32, "num_kv_heads": 8}
        return llama, llama.Config(**{**sizes, "dim": 4096, "mlp_dim": 14336}, head_dim=128)
    heads = 64 if name == "qwen3" else 128
    return qwen3, qwen3.Config(**SMALL, head_dim=heads, rope_theta=1e6, norm_eps=1e-6, tied=True)


NAMES = ("llama", "llama of 128", "qwen3", "qwen3 of 128")


def params_of(family: Any, config: Any, device: str, apart: bool = False) -> Any:
    """Drawn so that each layer has a say."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(name: str, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, device=device, generator=generator)
        return (1 + noise / 10 if x.ndim == 1 else noise * x.shape[-1] ** -0.5).bfloat16()

    params = naming.replaced(family.blank(config), drawn)
    return params if apart else fg.ops.lay_side_by_side(params)


def cache_of(config: Any, device: str) -> Any:
    """Full of what was never written by a step."""
    generator = torch.Generator(device).manual_seed(1)
    cache = llama.init_cache(config, BLOCKS, block_size=BLOCK, device=device, dtype=torch.bfloat16)
    return tuple(
        tuple(torch.randn(x.shape, device=device, generator=generator).bfloat16() for x in kv)
        for kv in cache
    )


def batch_of(length: int, device: str = "cpu", slot: int | None = None, token: int = 7) -> Any:
    """One token, the last of `length` ones, in blocks that do not follow one another."""
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(length)).int()
    at = length - 1
    own = int(table[at // BLOCK]) * BLOCK + at % BLOCK
    batch = llama.Batch(
        token_ids=torch.tensor([token]), positions=torch.tensor([at]),
        slot_mapping=torch.tensor([own if slot is None else slot]),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32), block_tables=table[None],
        logits_indices=torch.tensor([0]), spec=fg.BatchSpec(1, 1, query_len=1),
    )  # fmt: skip
    return toys.on(batch, device)


def batch_of_some(lengths: Any, device: str, rows: Any = None) -> Any:
    """One token of each request, the last of so many; each has blocks of its own."""
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(len(lengths))).int()
    table, slots, taken = torch.zeros(len(lengths), BLOCKS, dtype=torch.int32), [], 0
    for row, length in zip(table, lengths):
        own = order[taken : taken + -(-length // BLOCK)]
        row[: len(own)] = own
        taken += len(own)
        slots.append(int(own[-1]) * BLOCK + (length - 1) % BLOCK)
    assert taken <= BLOCKS
    n = len(lengths)
    batch = llama.Batch(
        token_ids=torch.arange(n) * 31 + 7, positions=torch.tensor(lengths) - 1,
        slot_mapping=torch.tensor(slots), seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=torch.arange(n + 1, dtype=torch.int32), block_tables=table,
        logits_indices=torch.arange(n) if rows is None else torch.tensor(rows),
        spec=fg.BatchSpec(n, n, query_len=1),
    )  # fmt: skip
    return toys.on(batch, device)


def batch_of_one_sequence(lengths: Any, device: str) -> Any:
    """Tokens of one sequence, a request each; each reads what those before it write."""
    at = torch.tensor(list(lengths)) - 1
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0)).int()
    batch = batch_of_some([1] * len(at), "cpu")
    batch = dataclasses.replace(
        batch, positions=at, seq_lens=at.int() + 1, block_tables=table.repeat(len(at), 1),
        slot_mapping=table[at // BLOCK] * BLOCK + at % BLOCK,
    )  # fmt: skip
    return toys.on(batch, device)


def trees_map(fn: Any, tree: Any) -> Any:
    leaves, treedef = fg.core.trees.flatten(tree)
    return fg.core.trees.unflatten(treedef, [fn(x) for x in leaves])


def greedy(forward: Any) -> Any:
    """With something behind the head."""

    def step(params: Any, cache: Any, batch: llama.Batch) -> Any:
        logits, cache = forward(params, cache, batch)
        return logits.argmax(-1), logits, cache

    return step


def graphified(family: Any, **options: Any) -> Any:
    options = {"modes": "FULL", "passes": "all", "sizes": (1, 2), **options}
    return fg.graphify(greedy(family.forward), donate="cache", stage="batch", **options)


def traced(
    family: Any, config: Any, forward: Any = None, dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Any:  # fmt: skip
    params, cache = params_of(family, config, "cpu"), cache_of(config, "cpu")
    if dtype != torch.bfloat16:
        params, cache = trees_map(lambda x: x.to(dtype), (params, cache))
    options = {"passes": "all", **options}
    fast = fg.graphify(forward or greedy(family.forward), donate="cache", stage="batch", **options)
    return fast.trace(params, cache, limits=LIMITS), params, cache


def found_in(stage: Any) -> Any:
    return one_launch.decoder_in(stage.graph.gm.graph)
