"""Batches of attention on the device, and calls of our backends and of torch's on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fngraph as fg
from benchmarks.device import DTYPE, Fn, draw, scattered
from benchmarks.harness import Mistake

H, K, D, BLOCK = 32, 8, 128, 16
kernels: Any = fg.ops.triton  # not public: what lies below a backend's call


class Paged(NamedTuple):
    """A decode batch twice: paged for us, contiguous for torch."""

    q: Tensor  # (N, H, D)
    k: Tensor  # (N, K, D), the new token's, which the cache holds already
    v: Tensor
    cache: tuple[Tensor, Tensor]  # (blocks, BLOCK, K, D)
    meta: Any
    keys: Tensor  # (N, context, K, D)
    values: Tensor

    def args(self, out: Tensor) -> Any:
        """What a backend is given."""
        return fg.ops.AttentionArgs(self.q, self.k, self.v, *self.cache, self.meta, out, config())


def paged(n: int, context: int) -> Paged:
    """n requests of one length, their last token new."""
    meta = scattered([1] * n, [context] * n, BLOCK)
    keys, values, cache = draw(n, context, K, D), draw(n, context, K, D), []
    for x in (keys, values):
        blocks = x.view(-1, BLOCK, K, D)
        pages = torch.empty_like(blocks)
        pages[meta.block_tables.flatten().long()] = blocks
        cache.append(pages)
    new = keys[:, -1].clone(), values[:, -1].clone()
    return Paged(draw(n, H, D), *new, (cache[0], cache[1]), meta, keys, values)


def config() -> Any:
    """What our backends are chosen by."""
    return fg.ops.AttentionConfig(H, K, D, BLOCK, DTYPE, DTYPE, "cuda", D**-0.5)


def backend(name: str) -> Any:
    """One of ours, able to run here."""
    found = fg.ops.primitive("attention").backend(name)
    reason = kernels.launching.missing("cuda") or found.supports(config())
    if reason is not None:
        raise Mistake(f"{name}: {reason}")
    return found


def flash(q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor], most: tuple[int, int],
          causal: bool) -> Tensor:  # fmt: skip
    """torch's FlashAttention 2 over requests end to end, the op below `varlen_attn`."""
    return torch.ops.aten._flash_attention_forward(
        q, k, v, *starts, *most, 0.0, causal, False, scale=D**-0.5
    )[0]


def decoders(p: Paged, flex: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Name and call of each; a result is (N, H, D)."""
    context = p.keys.shape[1]
    out, host = torch.empty_like(p.q), fg.HostBounds(max_query_len=1)
    q_NH1D = p.q[:, :, None]
    k_NKSD, v_NKSD = (x.transpose(1, 2) for x in (p.keys, p.values))
    starts = p.meta.query_start_loc
    flat = p.keys.flatten(0, 1), p.values.flatten(0, 1)

    def ours(name: str) -> Callable[[], Tensor]:
        run = backend(name).run

        def step() -> Tensor:
            run(p.args(out), host)
            return out

        return step

    def split() -> Tensor:
        kernels.attention.decode.attend(p.args(out), 1)
        return out

    def unified() -> Tensor:
        kernels.attention.unified.attend(p.args(out))
        return out

    yield "sdpa", lambda: sdpa(q_NH1D, k_NKSD, v_NKSD, enable_gqa=True)[:, :, 0]
    yield "varlen", lambda: flash(p.q, *flat, (starts, starts * context), (1, context), False)
    if flex:
        from torch.nn.attention.flex_attention import flex_attention  # brings dynamo in

        attend = torch.compile(flex_attention, dynamic=False)
        yield "flex", lambda: attend(q_NH1D, k_NKSD, v_NKSD, enable_gqa=True)[:, :, 0]
    yield "step", ours("triton_decode")
    yield "triton_decode", split
    yield "triton", unified


def prefilling(lens: tuple[int, ...]) -> tuple[Callable[..., Tensor], Fn, Tensor]:
    """Our call, by a tile if one is given; theirs; and what both should come to."""
    T, most = sum(lens), max(lens)
    q, k, v = draw(T, H, D), draw(T, K, D), draw(T, K, D)
    meta = scattered(lens, lens, BLOCK)
    blocks, starts = meta.block_tables.numel(), meta.query_start_loc
    cache = draw(blocks, BLOCK, K, D), draw(blocks, BLOCK, K, D)
    for pool, x in zip(cache, (k, v)):
        pool.view(-1, K, D)[meta.slot_mapping] = x
    out = torch.empty_like(q)

    def ours(tile: Any = None) -> Tensor:
        args = fg.ops.AttentionArgs(q, k, v, *cache, meta, out, config())
        kernels.attention.unified.attend(args, tile=tile)
        return out

    def theirs() -> Tensor:
        return flash(q, k, v, (starts, starts), (most, most), True)

    return ours, theirs, theirs()
