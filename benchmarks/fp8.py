"""Products in fp8, and a decode step of a Llama whose weights are: python -m benchmarks fp8

products   an 8B Llama's projections, us on the device and TB/s of weights: the kernel for few rows,
           `torch._scaled_mm`, and bfloat16; and what rounding the rows takes. Weights are read in
           turns, so that none is in the cache. Needs a GPU. --sweep: other tiles of the kernel.
step       a decode step in bfloat16 and in fp8, ms and their ratio, at each level with and without
           all passes, where each row of an input makes its own scale and where one is known, as
           measured on random tokens (--inputs); how far logits are off. Random weights of an 8B
           Llama's shape (--layers, --dim, --vocab for others).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from benchmarks.device import copy_bandwidth, device_us, draw
from benchmarks.harness import DEVICE, SWEEP, Benchmark, Mistake, count, kept, show, some_of
from benchmarks.steps import median_ms
from benchmarks.workload import BF16, BLOCKS, batch_of, new_cache, random_params, to_device
from fngraph.models.families import llama
from fngraph.models.weights import naming
from fngraph.models.weights.fp8 import LINEAR, quantize_fp8

ops: Any = fg.ops  # below are names that are not public; quantising loads its kernels' module
PARTS = ("products", "step")
LEVELS = ("none", "pieces")
INPUTS = ("own", "known")  # scales by which inputs are rounded
SHAPES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))  # rows and columns of a weight
ROWS = (1, 2, 8, 16, 17, 64)
CACHE = 128 << 20  # bytes of weights, of which the device keeps none
GOAL = 0.62  # of bfloat16's time, one request at the best level


def in_turns(weight: Tensor, call: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """`call` on one copy of the weight after the other."""
    copies = [weight] + [weight.clone() for _ in range(CACHE // weight.nbytes)]
    turns = itertools.cycle(copies)
    return lambda: call(next(turns))


def quantized(T: int, N: int, K: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of `scaled_linear`, each row by its own scale."""
    x, x_scale = fg.ops.quantize_fp8_rows(draw(T, K))
    weight, scale = fg.ops.quantize_fp8_rows(draw(N, K) / 64)
    return x, x_scale, weight, scale


def product(T: int, N: int, K: int) -> dict[str, Any]:
    """us of each way, TB/s of the best in fp8, and errors against a product in float64."""
    x, x_scale, weight, scale = quantized(T, N, K)
    want = (x.double() * x_scale) @ (weight.double() * scale).t()
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "_scaled_mm": lambda w: ops.fp8.tensor_cores(x, x_scale, w, scale, BF16)
    }
    if T <= ops.fp8.FEW:
        ways["triton"] = lambda w: ops.triton.products.fp8.linear(x, x_scale, w, scale, BF16)
    us: dict[str, float] = {}
    for name, way in ways.items():
        error = float((way(weight).double() - want).norm() / want.norm())
        if not error < 1e-2:
            raise SystemExit(f"{name} of {T} x {K} by {N} is wrong: {error}")
        us[name] = device_us(in_turns(weight, way))
    wide, rows = (weight.float() * scale).to(BF16), draw(T, K)
    us["bfloat16"] = device_us(in_turns(wide, lambda w: linear(rows, w)))
    us["rounding"] = device_us(lambda: fg.ops.quantize_fp8_rows(rows))
    best = min(us[name] for name in ways)
    return {
        "rows": T, "N": N, "K": K, **us, "of bfloat16": best / us["bfloat16"],
        "TB/s": weight.nbytes / best / 1e6,
    }  # fmt: skip


TILES_OF_ONE = ((1, 16384), (2, 16384), (2, 8192), (2, 4096), (4, 4096), (4, 2048), (8, 1024))
TILES = ((16, 256), (16, 512), (32, 128), (32, 256), (64, 128), (64, 256), (128, 128))


def sweep() -> None:
    """The kernel for few rows with other tiles, the best six of each shape."""
    quantized(1, 16, 16)  # loads them
    kernels = ops.triton.products.fp8
    How = kernels.How
    one = [How(*tile, 1, warps, 0) for tile in TILES_OF_ONE for warps in (2, 4, 8)]
    few = [How(*tile, splits, warps, stages) for tile in TILES for splits in (1, 2, 4, 8)
           for warps in (2, 4) for stages in (3, 4, 6)]  # fmt: skip
    for (N, K), (T, ways) in itertools.product(SHAPES, ((1, one), (16, few))):
        given = quantized(T, N, K)
        usual = kernels.how_to(T, N, K, kernels.processors(given[0].device))
        times = {how: _tried(kernels.linear, given, how) for how in (usual, *ways)}
        for how in (usual, *sorted(times, key=times.__getitem__)[:6]):
            rate = given[2].nbytes / times[how] / 1e6
            as_it_is = ", as it is" * (how == usual)
            print(f"{T} rows, {N} x {K}{as_it_is}: {times[how]:.1f} us, {rate:.2f} TB/s, {how}")


def _tried(linear: Callable[..., Tensor], given: Any, how: Any) -> float:
    """us, or infinity where it does not fit the device."""
    x, x_scale, weight, scale = given
    try:
        return device_us(
            in_turns(weight, lambda w: linear(x, x_scale, w, scale, BF16, how=how)), 1.5
        )
    except Exception as error:  # of what does not fit: torch's and Triton's have this base alone
        if isinstance(error, TypeError):
            raise
        print(f"  {how}: {type(error).__name__}: {str(error)[:100]}")
        return float("inf")


def shape(flags: argparse.Namespace) -> llama.Config:
    """Llama-3.1-8B's, or a smaller one of its kind."""
    heads = flags.dim // 128
    return llama.Config(
        vocab_size=flags.vocab, num_layers=flags.layers, num_heads=heads,
        num_kv_heads=max(1, heads // 4), head_dim=128, dim=flags.dim, mlp_dim=flags.dim * 7 // 2,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Watched:
    """In place of a weight: it notes the largest number of what it is multiplied with."""

    weight: Tensor
    name: str
    largest: dict[str, Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        assert func is linear and not kwargs
        x, self, *bias = args
        self.largest[self.name] = x.abs().amax()
        return linear(x, self.weight, *bias)


def known_scales(params: Any, device: str) -> dict[str, float]:
    """By weight, the scale of its input: of 128 random tokens. Theirs are one where inputs are."""
    largest: dict[str, Tensor] = {}
    named = lambda name, x: name.rsplit(".", 1)[-1] in LINEAR and x.ndim == 2  # noqa: E731
    watched = naming.replaced(
        params, lambda name, x: Watched(x, name, largest) if named(name, x) else x
    )
    batch = to_device(batch_of(8, 16), device)
    llama.forward(watched, new_cache(params.config, device), batch)
    return {name: float(x) / ops.fp8.MAX for name, x in largest.items()}


def step_of(
    flags: argparse.Namespace, params: Any, level: str, passes: str | None
) -> dict[int, tuple[float, Tensor]]:
    """By batch, ms of a step and its logits."""
    cache = new_cache(params.config, flags.device)
    fast = fg.graphify(
        llama.forward, modes="FULL", compile=level, donate="cache", stage="batch",
        sizes=tuple(flags.batch), compile_sizes=tuple(flags.batch) if level == "pieces" else (),
        passes=passes,
    )  # fmt: skip
    limits = fg.Limits(max_tokens=max(flags.batch), max_reqs=max(flags.batch), B=BLOCKS)
    step = fast.bind(params).capture(cache, limits, outputs="borrow", progress=False)
    found = {}
    for num_reqs in flags.batch:
        torch.manual_seed(0)
        batch = to_device(batch_of(num_reqs, 1), flags.device)
        ms = median_ms(lambda: step(cache, batch), flags.repeats)  # noqa: B023
        found[num_reqs] = ms, step(cache, batch)[0].double().cpu()
    step.sleep()
    return found


def steps(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each level, passes, kind of scales, of inputs' scales and batch."""
    config = shape(flags)
    plain = fg.ops.lay_side_by_side(random_params(config, flags.device, BF16, even=True))
    scales = {"own": None, "known": known_scales(plain, flags.device)}
    kinds = {
        (kind, inputs): fg.ops.lay_side_by_side(
            quantize_fp8(plain, rows=kind == "rows", input_scales=scales[inputs])
        )
        for kind, inputs in itertools.product(flags.scales, flags.inputs)
    }
    for level, passes in itertools.product(flags.levels, (None, "all")):
        before = step_of(flags, plain, level, passes)
        for (kind, inputs), params in kinds.items():
            now = step_of(flags, params, level, passes)
            for num_reqs, (ms, logits) in now.items():
                was, want = before[num_reqs]
                row = {
                    "level": level, "passes": passes or "the level's", "scales": kind,
                    "inputs": inputs, "batch": num_reqs, "bfloat16 ms": was, "fp8 ms": ms,
                    "ratio": ms / was,
                    "error": float((logits - want).norm() / want.norm()),
                }  # fmt: skip
                print(row, flush=True)
                yield row


def missed(figures: Any, flags: argparse.Namespace) -> list[str]:
    """The goal, where an 8B Llama was measured on a GPU."""
    rows = [row for row in figures["step"] if row["batch"] == 1]
    if not rows or not flags.device.startswith("cuda") or flags.layers != 32 or flags.dim != 4096:
        return []
    best = min(row["bfloat16 ms"] for row in rows)  # each against that at its own best
    lines = []
    for inputs in dict.fromkeys(row["inputs"] for row in rows):
        ratio = min(row["fp8 ms"] for row in rows if row["inputs"] == inputs) / best
        said = f"one request, {inputs} scales of inputs: {ratio:.2f} of bfloat16"
        lines += [f"{said}, at most {GOAL} is asked"] * (ratio > GOAL)
    return lines


@Benchmark(
    {
        **DEVICE, **SWEEP, "--parts": some_of(PARTS), "--levels": some_of(LEVELS),
        "--scales": some_of(("rows", "whole"), ("rows",)), "--inputs": some_of(INPUTS),
        "--batch": count([1, 8, 64]), "--layers": count(32), "--dim": count(4096, multiple_of=128),
        "--vocab": count(128256, least=256), "--repeats": count(50),
    },
    quick={"layers": 1, "dim": 256, "vocab": 256, "repeats": 1, "batch": [1], "levels": ["none"]},
    missed=missed,
)  # fmt: skip
@torch.no_grad()
def measure(flags: argparse.Namespace) -> dict[str, Any] | None:
    """Products, then steps."""
    torch.manual_seed(0)
    cuda = flags.device.startswith("cuda")
    if not cuda and (flags.sweep or "products" in flags.parts):
        raise Mistake("products are measured on a GPU: pass --parts step")
    if flags.sweep:
        copy_bandwidth()
        sweep()
        return None
    figures: dict[str, Any] = {"products": [], "step": []}
    if "products" in flags.parts:
        figures["copy TB/s"] = copy_bandwidth()
        kept(flags, (product(T, *nk) for nk in SHAPES for T in ROWS), figures, "products")
        show(figures["products"], "products, us")
    if "step" in flags.parts:
        kept(flags, steps(flags), figures, "step")
        show(figures["step"], "a decode step")
    return figures
