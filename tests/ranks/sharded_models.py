"""What each process of test_sharded.py runs: every family's part of it, over the same steps, in
graphs too, and what comes out of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from fngraph.models import (
    generate,
    llama,
    loading,
    lora,
    naming,
    quantize_fp8,
    qwen3_moe,
    shard,
)
from fngraph.models.families.experts import mix
from fngraph.models.weights import sharding
from fngraph.models.weights.adapters import own_pair

BLOCKS, BLOCK_SIZE = 4, 16  # of a request
LIMITS = fg.Limits(64, 4, B=BLOCKS)
TEXTS = [
    [(i * 37 + j * j * 11) % 251 for j in range(BLOCKS * BLOCK_SIZE)] for i in range(3)
]  # of three requests
Span = tuple[int, int, int]  # request, first token, last + 1
STEPS: list[list[Span]] = [  # prefills, single tokens of all, some of both
    [(0, 0, 26), (1, 0, 5)],
    [(0, 26, 27), (1, 5, 6)],
    [(1, 6, 7), (0, 27, 28), (2, 0, 7)],
    [(0, 28, 29), (1, 7, 8), (2, 7, 8)],
    [(2, 8, 20), (0, 29, 30)],
]
MESHES = {2: ({"tp": 2}, {"ep": 2}), 4: ({"tp": 4}, {"tp": 2, "ep": 2})}


class Made(NamedTuple):
    """A model: its family, its params, whole or a process's part, and what is called."""

    family: Any
    params: Any

    def new_cache(self) -> Any:
        """A cache in which reading what was never written shows."""
        cache = self.family.init_cache(
            self.params.config, BLOCKS * len(TEXTS), block_size=BLOCK_SIZE, num_slots=len(TEXTS),
            dtype=self.params.embed.dtype, device=self.params.embed.device,
        )  # fmt: skip
        for x in naming.named(cache).values():
            x.fill_(torch.nan)
        return cache

    def batch(self, spans: Sequence[Span]) -> Any:
        """A step's tokens, on its device."""
        return batch_of(self.family.Batch, spans, self.params.embed.device)


def batch_of(Batch: Any, spans: Sequence[Span], device: torch.device | str = "cpu") -> Any:
    """A step's tokens; request i has its own blocks and its own slot."""
    lengths = torch.tensor([end - first for _, first, end in spans])
    positions = torch.cat([torch.arange(first, end) for _, first, end in spans])
    of = torch.tensor([i for i, *_ in spans]).repeat_interleave(lengths)
    ends = lengths.cumsum(0)
    leaves = {
        "token_ids": torch.tensor([t for i, first, end in spans for t in TEXTS[i][first:end]]),
        "positions": positions,
        "slot_mapping": of * BLOCKS * BLOCK_SIZE + positions,
        "seq_lens": torch.tensor([end for *_, end in spans], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        "block_tables": torch.tensor(
            [[i * BLOCKS + b for b in range(BLOCKS)] for i, *_ in spans], dtype=torch.int32
        ),
        "state_slots": torch.tensor([i for i, *_ in spans]),
        "logits_indices": ends - 1,
    }
    query_len = 1 if bool((lengths == 1).all()) else None
    spec = fg.BatchSpec(len(of), len(spans), query_len=query_len)
    return generate.select(Batch, leaves, spec, device)


@torch.no_grad()
def bare(made: Made) -> list[Tensor]:
    """The logits of each step, of bare `forward`."""
    cache, found = made.new_cache(), []
    for spans in STEPS:
        logits_RV, cache = made.family.forward(made.params, cache, made.batch(spans))
        found.append(logits_RV.cpu().clone())
    return found


def in_graphs(
    made: Made, steps: list[list[Span]] = STEPS
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """The logits of each step in graphs, and as the traced program in mode NONE; and the modes."""
    cache = made.new_cache()
    fast = fg.graphify(
        made.family.forward, modes="FULL_AND_PIECEWISE", donate="cache", stage="batch",
        sizes=(4, 32), recorder="cuda" if made.params.embed.device.type == "cuda" else "tape",
    )  # fmt: skip
    step = fast.bind(made.params).capture(cache, LIMITS, progress=False)
    both, modes = [], []
    for allowed in (None, ("NONE",)):
        found = []
        for x in naming.named(cache).values():
            x.fill_(torch.nan)
        for spans in steps:
            batch = made.batch(spans)
            modes.append(step.dispatch(batch.spec, allowed=allowed).mode.name)
            logits_RV, cache = step(cache, batch, allowed=allowed)
            found.append(logits_RV.cpu())
        both.append(found)
    return both[0], both[1], modes


def meshes(world: int, device: str) -> Iterator[tuple[str, fg.Mesh]]:
    """By name, those of so many processes."""
    for sizes in MESHES[world]:
        name = "_".join(f"{name}{size}" for name, size in sizes.items())
        yield name, fg.make_mesh(device, **sizes)


@torch.no_grad()
def own_batches(made: Made, own: int) -> list[Tensor]:
    """The logits of one request's steps, of bare `forward`."""
    cache, found = made.new_cache(), []
    for first, end in OWN_STEPS:
        batch = made.batch([(own, first, end)])
        logits_RV, cache = made.family.forward(made.params, cache, batch)
        found.append(logits_RV.cpu().clone())
    return found


OWN_STEPS = ((0, 9), (9, 10), (10, 11), (11, 15))


# --- models in memory -----------------------------------------------------------------------------

LLAMAS: dict[str, dict[str, Any]] = {
    "biases": {"qkv_bias": True, "out_bias": True, "vocab_size": 253},
    "tied": {"tied": True, "vocab_size": 253},
    "fp8": {},
    "fp8 by known scales": {},
    "adapters": {},
}
ADAPTED = ("wq", "wk", "wo", "w_up", "w_down")


def whole(name: str) -> llama.Params:
    """A Llama, every weight drawn."""
    sizes = {"vocab_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"head_dim": 16, "dim": 64, "mlp_dim": 96} | LLAMAS[name]
    if name.startswith("fp8"):  # tensor cores take steps of 16
        sizes |= {"num_kv_heads": 4, "mlp_dim": 128}
    draw = torch.Generator().manual_seed(len(name))
    params = naming.replaced(
        llama.blank(llama.Config(**sizes)),
        lambda _, x: torch.randn(x.shape, generator=draw) * (0.2 if x.ndim == 2 else 0.5),
    )
    if not name.startswith("fp8"):
        return params
    matrices = [n for n, x in naming.named(params.layers).items() if x.ndim == 2]
    known = {f"layers.{n}": 0.05 for n in matrices} if "known" in name else None
    return quantize_fp8(params, input_scales=known)


def adapted(params: llama.Params, share: sharding.Share | None) -> list[Tensor]:
    """The logits of each step, the requests of which have adapters, none, or another."""
    adapters = lora.slots(params, count=2, rank=4, names=ADAPTED)
    draw, sizes = torch.Generator().manual_seed(5), naming.named(whole("adapters").layers)
    for slot in range(2):
        pairs = {}
        for name, x in sizes.items():
            layer, _, weight = name.partition(".")
            if weight.rpartition(".")[2] in ADAPTED:
                a, b = (torch.randn(4, n, generator=draw) * 0.2 for n in reversed(x.shape))
                at = int(layer), weight
                pairs[at] = own_pair(share, at, a, b) if share else (a, b)
        for i, own in enumerate(lora.one_slot(adapters, pairs)):
            for weight, pair in own.items():
                adapters[i][weight].a[slot], adapters[i][weight].b[slot] = pair.a, pair.b
    forward, found = lora.adapted(llama.forward), []
    cache = Made(llama, params).new_cache()
    for spans in STEPS:
        batch = batch_of(llama.Batch, spans)
        ids = torch.tensor([(i - 1) for i, first, end in spans for _ in range(first, end)])
        batch = SimpleNamespace(**vars(batch), adapter_ids=ids)
        logits_RV, cache = forward(params, adapters, cache, batch)
        found.append(logits_RV)
    return found


@torch.no_grad()
def in_memory(name: str, mesh: fg.Mesh | None) -> list[Tensor]:
    """The logits of each step of a Llama, or of a process's part of it."""
    params, share = whole(name), None
    if mesh is not None:
        specs = llama.specs(params.config)
        share, params = sharding.share_of(params.config, specs, mesh), shard(params, specs, mesh)
    return adapted(params, share) if name == "adapters" else bare(Made(llama, params))


@torch.no_grad()
def product(mesh: fg.Mesh | None) -> list[Tensor]:
    """One product in fp8 whose sum is over all processes, by a known scale."""
    params = whole("fp8 by known scales")
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(1))
    if mesh is not None:
        axis = mesh["tp"]
        params, part = shard(params, llama.specs(params.config), mesh), axis.part(128)
        x = x[:, part.start : part.stop]
    return [linear(x, params.layers[0].mlp.w_down)]


def mixed(dtype: torch.dtype, mesh: fg.Mesh | None) -> list[Tensor]:
    """Experts of tokens and of padding, with what is beside them and without; one expert a token
    as well."""
    config = qwen3_moe.Config(
        vocab_size=8, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8, dim=32, mlp_dim=32,
        num_experts=6, num_chosen=2, expert_dim=64, normalized=True,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(9)
    params = naming.replaced(
        qwen3_moe.blank(config), lambda _, x: torch.randn(x.shape, generator=draw).to(dtype) * 0.3
    )
    x_TE, beside_TE = (torch.randn(12, 32, generator=draw).to(dtype) for _ in range(2))
    real_T = torch.arange(12) < 9
    x_TE = torch.where(real_T[:, None], x_TE, torch.nan)
    part = 1.0
    if mesh is not None:
        params = shard(params, qwen3_moe.specs(config), mesh)
        part = 1 / (mesh["tp"].size if "tp" in mesh else 1)
    experts, found = params.layers[0].mlp.experts, []
    for chosen in (1, 2):
        share_TC, expert_TC = torch.rand(12, 6, generator=draw).topk(chosen)
        for beside in (None, beside_TE * part):
            found.append(mix(experts, x_TE, expert_TC, share_TC, real_T, beside))
    return found


# --- what a process runs --------------------------------------------------------------------------


def parts(
    rank: int, folder: Path, names: Sequence[str], graphs: Sequence[str], device: str
) -> dict[Any, Any]:
    """Families of `folder`, over each mesh that they can be split over; those of `graphs` in
    graphs too. What is made in memory on the CPU alone."""
    found: dict[Any, Any] = {}
    for kind, mesh in meshes(int(os.environ["WORLD_SIZE"]), device):
        for path in (folder / name for name in names):
            family = loading.family(path)
            specs = family.specs(loading.read_config(family.FORMAT, path))
            axes = {size.axis for size in specs.sizes.values()}
            if not axes.intersection(mesh.names):
                continue
            made = Made(family, family.load(path, mesh=mesh)[1])
            found[kind, path.name, "bare"] = bare(made)
            if path.name in graphs:
                full, none, modes = in_graphs(made)
                found |= {(kind, path.name, "graphs"): full, (kind, path.name, "none"): none}
                found[kind, path.name, "modes"] = modes
            if "ep" in axes and "ep" in mesh:
                apart = Made(family, sharding.with_own_tokens(made.params))
                found[kind, path.name, "own"] = own_batches(apart, mesh["ep"].rank)
                if path.name in graphs:
                    steps = [[(mesh["ep"].rank, *one)] for one in OWN_STEPS]
                    found[kind, path.name, "own graphs"] = in_graphs(apart, steps)[0]
        if device != "cpu":
            continue
        for dtype in (torch.float32, torch.bfloat16):
            found[kind, "mix", str(dtype)] = mixed(dtype, mesh)
        if mesh.names == ("tp",):
            found |= {(kind, name, "bare"): in_memory(name, mesh) for name in LLAMAS}
            found[kind, "product", "bare"] = product(mesh)
    return found
