"""Linear layers of few rows, as decoding has them, against cuBLAS: python -m benchmarks linear

Each layer of a Llama with what is around it in one launch (norm in front; gate; sum behind), or of
more than 8 rows in two, in a graph of as many copies as fill 400 MB, each with weights of its own,
one after the other. Beside it cuBLAS's product alone, without what is around it. TB/s are of
weights. --sweep tries other tiles; --only compiles them for one part of a list, so that several
processes can do it ahead.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from benchmarks.device import device_us, draw
from benchmarks.harness import SWEEP, Benchmark, count, kept, show, some_of

ops: Any = fg.ops  # kernels are not public: what lies below a call of the op
SHAPES = {  # of weights (N, K) that one launch reads, and what is around the product
    "1b qkv": ((2048, 512, 512), 2048, "norm"),
    "1b o": ((2048,), 2048, "sum"),
    "1b gate": ((8192, 8192), 2048, "gate"),
    "1b down": ((2048,), 8192, "sum"),
    "8b qkv": ((4096, 1024, 1024), 4096, "norm"),
    "8b o": ((4096,), 4096, "sum"),
    "8b gate": ((14336, 14336), 4096, "gate"),
    "8b down": ((4096,), 14336, "sum"),
    "1b head": ((128256,), 2048, "norm"),
    "06b qkv": ((2048, 1024, 1024), 1024, "norm"),
    "06b o": ((1024,), 2048, "sum"),
    "06b gate": ((3072, 3072), 1024, "gate"),
    "06b down": ((1024,), 3072, "sum"),
}
TILES = ((1, 1024, 2), (1, 2048, 4), (2, 512, 2), (2, 512, 4), (2, 1024, 4), (2, 2048, 4),
         (2, 2048, 8), (4, 512, 4), (4, 1024, 4), (4, 1024, 8), (8, 512, 8))  # fmt: skip
PARTED = ((16, 128, 4, 4), (16, 256, 4, 4), (16, 128, 8, 8), (16, 256, 8, 8), (32, 128, 4, 4),
          (16, 128, 2, 2))  # fmt: skip  # on tensor cores, without a gate
WIDE = ((64, 128, 1, 4, 6), (64, 128, 2, 4, 6), (64, 128, 4, 4, 5), (64, 64, 4, 4, 8),
        (64, 128, 2, 4, 3), (64, 128, 4, 4, 3), (32, 128, 2, 4, 6), (32, 256, 1, 4, 4),
        (64, 128, 2, 8, 6))  # fmt: skip  # sums of more rows; in one part products, too
WIDE_GATED = ((64, 128, 1, 4, 4), (64, 64, 1, 4, 6), (64, 128, 1, 8, 4), (128, 64, 1, 8, 4),
              (32, 128, 1, 4, 3))  # fmt: skip


class Layer:
    """Copies of one layer, and their calls one after another."""

    def __init__(self, name: str, rows: int) -> None:
        self.kernels = importlib.import_module("fngraph.ops.triton.products.skinny")  # loads Triton
        self.wide = importlib.import_module("fngraph.ops.triton.products.wide")
        sizes, K, self.kind = SHAPES[name]
        self.nbytes = sum(sizes) * K * 2
        self.copies = max(1, min(64, -(-400_000_000 // self.nbytes)))
        weights = [draw(sum(sizes), K) / K**0.5 for _ in range(self.copies)]
        self.weights = [list(w.split(sizes)) for w in weights]
        self.whole = weights
        self.x, self.norm = draw(rows, K), draw(K)
        width = sizes[0] if self.kind == "gate" else sum(sizes)
        self.more = draw(rows, width) if self.kind == "sum" else None
        self.out = draw(rows, width)
        of_op = ops.fused_linear.tile_of(rows, K, self.kind == "gate", True)
        self.apart = self.kind != "sum" and of_op is None  # whose norm is a launch of its own

    def fused(self, tile: Any) -> None:
        """Ours."""
        if isinstance(tile, ops.fused_linear.WideTile):
            self._of_many(tile)
            return
        for weights in self.weights:
            x = self._normed() if self.apart else self.x
            norm = None if self.apart or self.kind == "sum" else self.norm
            self.kernels.run(
                x, weights, norm, self.more, self.out, 1e-5, tile, centred=False,
                gated=self.kind == "gate", held=True,
            )  # fmt: skip

    def _of_many(self, tile: Any) -> None:
        for weights, whole in zip(self.weights, self.whole):
            if self.kind == "sum":
                made = self.wide.summed(self.x, *weights, self.more, None, 0.0, False, tile)
                self.out = made[0]
            else:
                of = weights if self.kind == "gate" else [whole]
                self.out = self.wide.product(self._normed(), of, tile)

    def _normed(self) -> Tensor:
        made: Tensor = torch.ops.fngraph.rms_norm(self.x, self.norm, 1e-5, False)
        return made

    def usual(self) -> Any:
        """The tile that the op takes; None: cuBLAS's products."""
        (rows, K), gated, adds = self.x.shape, self.kind == "gate", self.kind == "sum"
        size, linear = self.x.itemsize, ops.fused_linear
        tile = linear.tile_of(rows, K, gated, not adds and not self.apart, size, adds)
        N = self.out.shape[1]
        return tile or linear.wide_of(rows, K, N, gated, self.x.device, size, sums=adds)

    def products(self) -> None:
        """cuBLAS's, with nothing around."""
        for weight in self.whole:
            torch.mm(self.x, weight.t())

    def error(self, tile: Any) -> float:
        """How far our last result is from float64's, by its norm, over that of torch's own ops."""
        self.weights, kept = self.weights[-1:], self.weights
        self.fused(tile)
        self.weights = kept
        want, plain = self._plain(torch.float64), self._plain(self.x.dtype)
        off = lambda y: float((y.double() - want).norm() / want.norm())  # noqa: E731
        return off(self.out) / off(plain)

    def _plain(self, dtype: torch.dtype) -> Tensor:
        x, weights = self.x.to(dtype), [w.to(dtype) for w in self.weights[-1]]
        if self.kind != "sum":
            wide = x if dtype == torch.float64 else x.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
            x = (wide * scale).to(dtype) * self.norm.to(dtype)
        made = [x @ w.t() for w in weights]
        if self.kind == "gate":
            return torch.nn.functional.silu(made[0]) * made[1]
        y = torch.cat(made, 1)
        return y if self.more is None else y + self.more.to(dtype)


def point(name: str, rows: int, sweep: bool) -> Iterator[dict[str, Any]]:
    """A row of a layer as it is, and with `sweep` of it with other tiles, the fastest first."""
    layer = Layer(name, rows)
    tbs = lambda us: layer.nbytes * layer.copies / us / 1e6  # noqa: E731
    theirs = tbs(device_us(layer.products, 1))
    usual = layer.usual()
    tiles = [usual] if usual else []
    if sweep and rows <= 4:
        tiles += [ops.fused_linear.Tile(*t) for t in TILES]
    if sweep and 1 < rows <= 16 and layer.kind != "gate":
        tiles += [ops.fused_linear.Tile(*t) for t in PARTED]
    if sweep and (layer.kind == "sum" or rows > 2):
        wide = WIDE_GATED if layer.kind == "gate" else WIDE
        of_kind = [t for t in wide if t[2] == 1 or layer.kind == "sum"]
        tiles += [ops.fused_linear.WideTile(*t) for t in of_kind]
    found = []
    for tile in dict.fromkeys(tiles):
        row: dict[str, Any] = {
            "layer": name,
            "rows": rows,
            "tile": tuple(tile),
            "usual": tile == usual,
        }
        try:
            row |= {"TB/s": tbs(device_us(lambda: layer.fused(tile), 1))}  # noqa: B023
        except Exception as error:  # too large for the device
            row |= {"TB/s": 0.0, "failed": str(error)[:80]}
        found.append(
            row
            | {"cuBLAS TB/s": theirs, "error / torch's": "failed" not in row and layer.error(tile)}
        )
    yield from sorted(found, key=lambda row: -row["TB/s"])


@Benchmark(
    SWEEP | {
        "--rows": count([1, 2, 4, 8, 16, 64]), "--layers": some_of(list(SHAPES)),
        "--only": {"help": "i/n: the i-th of n parts"},
    },
    quick={"rows": [1], "layers": ["1b o"]}, needs_cuda=True,
)  # fmt: skip
@torch.no_grad()
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a layer and number of rows."""
    torch.manual_seed(0)
    pairs = list(itertools.product(flags.layers, flags.rows))
    if flags.only:
        i, n = map(int, flags.only.split("/"))
        pairs = pairs[i::n]
    points = (point(name, count, flags.sweep) for name, count in pairs)
    rows = kept(flags, itertools.chain.from_iterable(points))
    show(rows)
    return rows
