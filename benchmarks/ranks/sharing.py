"""A process's part of a model whose weights are drawn by their names, its cache, and what one
process makes of the same (`benchmarks ranks`).

Shape letters: R requests, V vocab, K kv heads, D head dim; N blocks of S tokens.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg
from benchmarks.workload import BF16, BLOCK_SIZE, batch_of, even_spread, to_device
from fngraph.models.families import llama
from fngraph.models.weights import naming
from fngraph.models.weights.sharded import SplitVocabulary, SummedWeight
from fngraph.models.weights.sharding import copying, share_of
from fngraph.models.weights.splits import Each, own, split_of

STAND = (SummedWeight, SplitVocabulary)


def drawn(name: str, shape: Sequence[int], device: str) -> Tensor:
    """Normal numbers, the same for a name in every process."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator, device=device, dtype=BF16)


def part_of(config: llama.Config, mesh: fg.Mesh) -> llama.Params:
    """This process's part, drawn weight by weight: the whole is never there."""
    specs, device = llama.specs(config), mesh.device
    share = share_of(config, specs, mesh)

    def part(name: str, x: Tensor) -> Any:
        if x.ndim == 1:
            return torch.ones(x.shape, device=device, dtype=BF16)
        whole = drawn(name, x.shape, device).mul_(even_spread(config, name, x))
        if split_of(specs, name) is None:
            return whole
        made = share.part(name, x.shape, copying(whole), device=device, dtype=BF16)
        return share.standing(name, made, x.shape)

    made = naming.replaced(llama.blank(config), part)
    return fg.ops.lay_side_by_side(dataclasses.replace(made, config=share.config))


def without_stands(params: Any) -> Any:
    """The same tensors, and nothing that sums or gathers."""
    return naming.replaced(
        params, lambda _, x: x.weight if isinstance(x, STAND) else x, (Tensor, *STAND)
    )


def own_heads(config: llama.Config, axis: fg.Axis) -> list[int]:
    """Which kv heads this process has."""
    ranges = own(Each(config.num_kv_heads, repeated=True), axis.size, axis.rank)
    return [head for one in ranges for head in one]


class Task(NamedTuple):
    """Steps that every way takes.

    Attributes:
        config: of the whole model.
        context: tokens of each request, the last `new` of which are this step's.
    """

    config: llama.Config
    mesh: fg.Mesh
    params: llama.Params
    context: int
    batches: Sequence[int]
    new: int = 1

    @property
    def axis(self) -> fg.Axis:
        """Over which the model is split."""
        return self.mesh["tp"]

    def pages(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Paged k and v of this process's heads, (N, S, K, D) each, full of the same numbers."""
        blocks = max(self.batches) * self.context // BLOCK_SIZE
        shape = (blocks, BLOCK_SIZE, self.config.num_kv_heads, self.config.head_dim)
        heads = own_heads(self.config, self.axis)

        def of(name: str) -> Tensor:
            return drawn(name, shape, self.mesh.device)[:, :, heads].contiguous()

        return tuple((of(f"k {i}"), of(f"v {i}")) for i in range(self.config.num_layers))

    def rows(self, num_reqs: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """The same, of so many requests, as `plain.step` has them: (R, K, context, D) each."""

        def of(x_NSKD: Tensor) -> Tensor:
            x = x_NSKD[: num_reqs * self.context // BLOCK_SIZE]
            return x.reshape(num_reqs, self.context, *x.shape[2:]).transpose(1, 2).contiguous()

        return tuple((of(k), of(v)) for k, v in self.pages())

    def batch(self, num_reqs: int) -> llama.Batch:
        """On the device; the same tokens in every process."""
        torch.manual_seed(num_reqs)
        return to_device(batch_of(num_reqs, self.new, self.context), self.mesh.device)

    def bytes_read(self, num_reqs: int) -> int:
        """What a step reads of this process's part: weights, but for a table that is no head too,
        and k and v."""
        leaves = naming.named(without_stands(self.params))
        read = sum(x.nbytes for name, x in leaves.items() if name != "embed" or self.config.tied)
        kept = 2 * num_reqs * self.context * self.params.config.num_kv_heads
        size = kept * self.config.head_dim * self.config.num_layers * BF16.itemsize
        return read + size


class Right(NamedTuple):
    """What one process's bare `forward` makes of a batch.

    Attributes:
        logits: (R, V).
        kept: k and v of each request's last token, layer by layer, (R, K, D) each.
    """

    logits: Tensor
    kept: list[Tensor]


def newest(cache: Any, num_reqs: int, context: int) -> list[Tensor]:
    """k and v of the last token of each request, from pages: (R, K, D) each."""
    last = torch.arange(1, num_reqs + 1) * context - 1
    return [x.flatten(0, 1)[last.to(x.device)] for pair in cache for x in pair]


def rights(task: Task) -> dict[int, Right]:
    """By batch, on the host, of one process."""
    found = {}
    for num_reqs in task.batches:
        logits, cache = llama.forward(task.params, task.pages(), task.batch(num_reqs))
        kept = newest(cache, num_reqs, task.context)
        found[num_reqs] = Right(logits.cpu(), [x.cpu() for x in kept])
    return found
