"""The grid of `check_backend`: configurations, and the batches that each is tried on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fngraph.testing.cases import BATCHES, Rows

PAGES = (  # dtypes, block sizes: for a backend that has one dtype, or one block size, there is some
    (torch.float32, 4), (torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 256),
)  # fmt: skip
HEADS = ((8, 8, 64), (8, 1, 80), (6, 2, 96), (16, 2, 128), (4, 1, 256))
PASTS = ((0,), (6, 3, 12), (3, 4, 7, 8), (5, 9, 0, 300))  # of uniform batches
LONG = [(1, 300), (20, 0), (3, 130)]
OPTIONS: tuple[dict[str, Any], ...] = (
    *({"window": window} for window in (1, 3, 8, 1000)),
    {"scale": 0.3}, {"softcap": 0.8}, {"causal": False}, {"causal": False, "window": 2},
    {"sinks": (-2.0, 0.0, 1.0, 3.0)}, {"k_scale": 0.02, "v_scale": 0.05},
    {"k_scale": (0.02, 0.05), "v_scale": (0.07, 0.01)},
)  # fmt: skip
TENSORS = ("sinks", "k_scale", "v_scale")


class Point(NamedTuple):
    """What is the same for every batch; with scales the cache is fp8."""

    dtype: torch.dtype
    block_size: int
    heads: tuple[int, int, int] = (4, 2, 64)
    options: tuple[tuple[str, Any], ...] = ()

    def made(self, device: torch.device) -> dict[str, Any]:
        """Arguments of `case`."""
        fp8 = torch.float8_e4m3fn if "k_scale" in dict(self.options) else None
        return {
            "dtype": self.dtype, "block_size": self.block_size, "heads": self.heads,
            "cache_dtype": fp8, "device": device,
        }  # fmt: skip

    def asked(self, device: torch.device) -> dict[str, Any]:
        """Options of the primitive."""
        return {
            name: torch.tensor(x, device=device) if name in TENSORS else x
            for name, x in self.options
        }

    def __str__(self) -> str:
        options = "".join(f", {name}={x}" for name, x in self.options)
        return f"heads={self.heads}, {self.dtype}, blocks of {self.block_size}{options}"


def calls_of(query_len: int | None) -> Iterator[tuple[Point, Rows, int | None, bool]]:
    """Points with requests, their query length if it is said, and whether there is padding."""
    kinds = kinds_of(query_len)
    for dtype, size in PAGES:
        for Q in kinds:
            mixes = [*BATCHES.values(), LONG]
            if Q is not None:
                mixes = [[(Q, past) for past in pasts] for pasts in PASTS]
            for rows, padded in itertools.product(mixes, (False, True)):
                yield Point(dtype, size), rows, Q, padded
            for options in OPTIONS if Q in kinds[:2] else ():
                rows = mixes[-1] if options.get("causal", True) else [(n, 0) for n, _ in mixes[-1]]
                yield Point(dtype, size, options=tuple(options.items())), rows, Q, True
            for heads in HEADS if Q == kinds[0] else ():
                yield Point(dtype, size, heads), mixes[-1], Q, False


def levels_of(query_len: int | None) -> Iterator[tuple[Point, int | None]]:
    """Points with the query length of a key, None for mixed batches."""
    some = ((), (("window", 3),))
    for page, options, Q in itertools.product(PAGES, some, kinds_of(query_len)):
        yield Point(*page, options=options), Q


def kinds_of(query_len: int | None) -> tuple[int | None, ...]:
    """Query lengths that are tried, None for mixed batches."""
    return (None, 1, 3) if query_len is None else (query_len,)
