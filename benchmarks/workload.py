"""The Llama that is measured, its batches, and what they are looked up by."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

import fngraph as fg
from benchmarks.harness import count
from fngraph.models.families import llama
from fngraph.models.weights import naming

BLOCK_SIZE, CONTEXT = 16, 128  # tokens of a block, and of each request
BLOCKS = CONTEXT // BLOCK_SIZE  # of a request
COUNTS = slice(7)  # of a spec: what a step looks a batch up by; not public
BF16 = torch.bfloat16
FULL = argparse.Namespace(layers=16, dim=2048, vocab=128256)
QUICK = {"layers": 1, "dim": 256, "vocab": 256}
SHAPE = {
    "--layers": count(FULL.layers),
    "--dim": count(FULL.dim, multiple_of=256),
    "--vocab": count(FULL.vocab, least=256),
}


def shape(flags: Any = FULL) -> llama.Config:
    """Llama-3.2-1B's, or a smaller one of its kind."""
    layers, dim = flags.layers, flags.dim
    return llama.Config(
        vocab_size=flags.vocab, num_layers=layers, num_heads=dim // 64, num_kv_heads=dim // 256,
        head_dim=64, dim=dim, mlp_dim=4 * dim, tied=True,
    )  # fmt: skip


SHAPES = {
    "1B": shape(),
    "8B": llama.Config(
        vocab_size=128256, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, dim=4096,
        mlp_dim=14336,
    ),
    "tiny": llama.Config(
        vocab_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, dim=64, mlp_dim=128
    ),
}  # fmt: skip


def random_params(
    config: Any, device: str, dtype: torch.dtype, family: Any = llama,
    even: bool = False,
) -> Any:  # fmt: skip
    """Drawn where they stay; `family.init_params` draws on the host, a minute for 8B.

    Args:
        even: as `even_spread` says.
    """

    def drawn(name: str, x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 1:
            return torch.ones(x.shape, device=device, dtype=dtype)
        spread = even_spread(config, name, x) if even else 0.02
        return torch.randn(x.shape, device=device, dtype=dtype) * spread

    return naming.replaced(family.blank(config), drawn)


def even_spread(config: Any, name: str, x: torch.Tensor) -> float:
    """So wide that each part has a say in the logits, and rounding no more than it should: a layer
    adds little to what it is given, and all of them about as much as that is."""
    last = name.rsplit(".", 1)[-1]
    added = 2 * config.num_layers if last in ("wo", "w_down") else 1
    return 1.0 if last == "embed" else float((x.shape[-1] * added) ** -0.5)


def new_cache(config: llama.Config, device: str) -> Any:
    """Of 64 requests."""
    return llama.init_cache(config, 64 * BLOCKS, block_size=BLOCK_SIZE, device=device, dtype=BF16)


def batch_of(num_reqs: int, new: int, context: int = CONTEXT) -> llama.Batch:
    """`num_reqs` requests of `context` tokens, the last `new` of which run in this step."""
    each = context // BLOCK_SIZE
    blocks = torch.arange(num_reqs * each, dtype=torch.int32).view(num_reqs, each)
    positions = torch.arange(context - new, context).repeat(num_reqs)
    at, offsets = positions // BLOCK_SIZE, positions % BLOCK_SIZE
    owner = torch.arange(num_reqs).repeat_interleave(new)
    starts = torch.arange(0, num_reqs * new + 1, new)
    return llama.Batch(
        token_ids=torch.randint(256, (num_reqs * new,)),
        positions=positions,
        slot_mapping=blocks[owner, at].long() * BLOCK_SIZE + offsets,
        seq_lens=torch.full((num_reqs,), context, dtype=torch.int32),
        query_start_loc=starts.int(),
        block_tables=blocks,
        logits_indices=starts[1:] - 1,
        spec=fg.BatchSpec(num_reqs * new, num_reqs, query_len=1 if new == 1 else None),
    )


def to_device(batch: Any, device: Any) -> Any:
    """Each leaf of it."""
    moved = {n: getattr(batch, n).to(device) for n in fg.core.buffers_of(type(batch))}
    return dataclasses.replace(batch, **moved)


def attention_of(step: Any) -> str:
    """The backend that a captured step's attention runs on."""
    return next(iter(step.backends.values()))


def nodes_of(replay: Any) -> dict[str, Any]:
    """How many nodes a key's graphs have, if there is what reads them."""
    try:
        return {"nodes": replay.counts.nodes}
    except fg.errors.PackageError as error:
        return {"nodes failed": str(error)}
