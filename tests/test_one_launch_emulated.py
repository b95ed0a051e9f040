"""The kernel of all layers on a CPU: its source, compiled for a machine that is emulated.

All of it runs but the lines of `machine.cuh`, which has the assembly, for a device of some
multiprocessors, whose warps take turns in any order.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import one_launch_clocks
import pytest
import torch
from one_launch_cases import (
    BLOCK,
    SMALL,
    batch_of,
    batch_of_one_sequence,
    batch_of_some,
    traced,
    trees_map,
)
from torch import Tensor

import fngraph as fg
from fngraph import one_launch
from fngraph.core.program import run_program
from fngraph.models.families import llama, qwen3
from fngraph.ops import megakernel
from fngraph.ops.megakernel.image import SOURCE
from fngraph.ops.megakernel.shapes import Decoder, macros

MACHINE = Path(__file__).parent / "emulated"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@functools.cache
def library(decoder: Decoder, programs: int, source: Path = SOURCE) -> Any:
    """The kernel for so many multiprocessors."""
    folder = Path(tempfile.mkdtemp())
    for file in (*source.parent.glob("*.cu*"), *MACHINE.iterdir()):
        shutil.copy(file, folder)
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", *macros(decoder, programs)]
    made = folder / "kernel.so"
    subprocess.run(["g++", *flags, "-o", made, folder / "launch.cpp"], check=True)
    loaded = ctypes.CDLL(str(made))
    shutil.rmtree(folder)
    return loaded


class Emulated:
    """A device."""

    source = SOURCE

    def __init__(self, programs: int, seed: int = 0) -> None:
        self.programs, self.seed = programs, seed

    def loaded(self, decoder: Decoder, *rest: Any) -> Any:
        at = library(decoder, self.programs, self.source)
        names = "shared_bytes", "words_of_step"
        shared, words = (ctypes.c_longlong.in_dll(at, name).value for name in names)
        assert shared == decoder.shared(self.programs)
        return megakernel._Kernel(at, shared, words)

    def launch(self, kernel: Any, device: torch.device, step: Any) -> None:
        failed = kernel.function.launch(ctypes.byref(step), ctypes.c_uint(self.seed))
        assert not failed, {1: "an address, or patience", 2: "all wait"}[failed]


CONFIG: Any = {**SMALL, "num_layers": 2, "vocab_size": 520}
UNEVEN: Any = {**CONFIG, "num_kv_heads": 1, "dim": 1536, "mlp_dim": 1536, "head_dim": 128}
MODELS: dict[str, tuple[Any, Any, int]] = {  # and multiprocessors
    "llama": (llama, llama.Config(**CONFIG, head_dim=64), 12),
    "uneven": (llama, llama.Config(**UNEVEN, tied=True), 13),
    "qwen3": (qwen3, qwen3.Config(**CONFIG, head_dim=64, tied=True), 34),
}


class Model:
    """A decoder whose steps of few requests run on an emulated device."""

    def __init__(self, name: str) -> None:
        self.family, config, self.programs = MODELS[name]
        stage, self.params, self.cache = traced(self.family, config, self.family.forward)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_launch.Decoder, "refusal_on", lambda self, device: None)
            patch.setattr(one_launch.Decoder, "most_tokens", lambda self, *device: 4)
            self.executable = stage.split().lower().compile().executable
        self.constants = list(stage.constants.values())

    def steps(
        self, batches: Sequence[Any], seed: int = 0, cache: Any = None
    ) -> tuple[list[Tensor], Any]:
        """Logits of some steps, one after another in one key's buffers, and the cache then."""
        cache = clone(self.cache if cache is None else cache)
        device, own = Emulated(self.programs, seed), clone(batches[0])
        inputs = [*tensors((self.params, cache, own)), *self.constants]
        tokens, logits = batches[0].spec.num_tokens, []
        sizes = {"T": tokens, "R": tokens}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(megakernel, "_loaded", device.loaded)
            patch.setattr(megakernel, "_launch", device.launch)
            patch.setattr(megakernel, "_index", lambda device: 0)
            patch.setattr(torch.cuda, "current_stream", lambda device: torch.cuda.Stream)
            patch.setattr(torch.cuda.Stream, "synchronize", lambda: None)
            key = fg.Mode.FULL, fg.BatchDescriptor(tokens, tokens, query_len=1)
            program, fns = self.executable.program_of(key, inputs)
            assert program is self.executable.one_launch.program
            for batch in batches:
                for x, y in zip(tensors(own), tensors(batch)):
                    x.copy_(y)
                logits.append(run_program(program, fns, inputs, sizes, None)[0])
        return logits, cache

    def bare(self, batch: Any, cache: Any, wide: bool = False) -> tuple[Tensor, Any]:
        """`forward`, in float64 or as it is."""
        given = self.params, clone(cache)
        return self.family.forward(*(trees_map(Tensor.double, given) if wide else given), batch)


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in fg.core.trees.flatten(tree)[0] if isinstance(x, Tensor)]


def clone(tree: Any) -> Any:
    return trees_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


@functools.cache
def model(name: str) -> Model:
    return Model(name)


def error(got: Tensor, want: Tensor) -> float:
    """Norm over norm."""
    return float((got.double() - want).norm() / want.norm())


def padded(batch: Any, tokens: int) -> Any:
    """A batch as a key of so many requests has it, those behind it of no tokens."""
    more = tokens - batch.spec.num_reqs
    if not more:
        return batch

    def longer(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, x.new_full((more, *x.shape[1:]), value)])

    pads = {"slot_mapping": -1, "query_start_loc": int(batch.query_start_loc[-1])}
    leaves = {n: longer(getattr(batch, n), pads.get(n, 0)) for n in fg.core.buffers_of(type(batch))}
    return dataclasses.replace(batch, **leaves, spec=fg.BatchSpec(tokens, tokens, query_len=1))


LENGTHS: tuple[tuple[int, ...], ...] = (
    (1,), (16,), (129,), (300,), (700,), (2100,),  # no split, a few, more than there are
    (5, 300), (140, 1), (2, 30, 400), (20, 40, 17, 33), (1, 900, 5, 130), (640, 3, 640, 640),
    (1000, 800, 130),  # more splits together than one request may have
)  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_cache_are_forwards(name: str, lengths: tuple[int, ...]) -> None:
    """As near to float64's as bare `forward`, of requests of any lengths."""
    of, n = model(name), len(lengths)
    batch = batch_of(*lengths) if n == 1 else batch_of_some(lengths, "cpu")
    (logits,), cache = of.steps([batch])
    want, exact = of.bare(batch, of.cache, wide=True)
    bare, _ = of.bare(batch, of.cache)
    assert error(logits, want) < 1.5 * error(bare, want), "a single one is off by chance as well"
    for x, y, z in zip(tensors(cache), tensors(exact), tensors(of.cache)):
        at = batch.slot_mapping // BLOCK, batch.slot_mapping % BLOCK
        assert error(x[at], y[at]) < 0.03
        x[at] = z[at]
        assert torch.equal(x, z), "nothing else is written"


@pytest.mark.rest
@pytest.mark.parametrize("name", MODELS)
def test_on_the_whole_it_is_as_near_to_float64(name: str) -> None:
    """Of many steps, in one key's buffers, whose words say of which step they are."""
    of = model(name)
    batches = [batch_of_some((40 + i, 90 + 7 * i), "cpu") for i in range(6)]
    logits, _ = of.steps(batches)
    cache, wants, bares = of.cache, [], []
    for batch in batches:
        wants.append(of.bare(batch, cache, wide=True)[0])
        bare, cache = of.bare(batch, cache)
        bares.append(bare)
    want = torch.cat(wants)
    assert error(torch.cat(logits), want) < 1.2 * error(torch.cat(bares), want)


@pytest.mark.rest
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_the_same_in_any_order(name: str) -> None:
    """Whichever warp comes first."""
    of, batch = model(name), padded(batch_of_some((300, 20), "cpu"), 3)
    (want,), cache = of.steps([batch])
    for seed in (1, 2):
        (logits,), other = of.steps([batch], seed)
        assert torch.equal(logits[:2], want[:2])
        assert all(torch.equal(x, y) for x, y in zip(tensors(cache), tensors(other)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [(20, 21, 22, 23), (130, 128, 129, 40)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_request_reads_what_another_writes(name: str, rows: tuple[int, ...]) -> None:
    """All keys of a step are there before any is read: tokens of one sequence, a request each."""
    of, batch = model(name), batch_of_one_sequence(rows, "cpu")
    for seed in (0, 1):
        (logits,), cache = of.steps([batch], seed)
        want, exact = of.bare(batch, of.cache, wide=True)
        bare, _ = of.bare(batch, of.cache)
        for got, one, other in zip(logits, want, bare):
            assert error(got, one) < 2 * error(other, one)
        for x, y in zip(tensors(cache), tensors(exact)):
            assert error(x, y) < 0.03


@pytest.mark.rest
@pytest.mark.parametrize("tokens", [3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_padding_is_nobodys(name: str, tokens: int) -> None:
    """Requests behind the last are of no tokens: they read no key, write none, and change none."""
    of, batch = model(name), batch_of_some((130, 9), "cpu")
    (alone,), _ = of.steps([batch])
    all_rows = dataclasses.replace(padded(batch, tokens), logits_indices=torch.arange(tokens))
    (logits,), cache = of.steps([all_rows])
    assert torch.equal(logits[:2], alone) and logits.isfinite().all()
    for x, y in zip(tensors(cache), tensors(of.cache)):
        changed = (x != y).flatten(2).any(-1).flatten().nonzero().flatten()
        assert sorted(changed.tolist()) == sorted(batch.slot_mapping.tolist())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lengths", [(1,), (130,), (2100,), (5, 300), (20, 40, 17, 33)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_nobody_reads_may_be_anything(name: str, lengths: tuple[int, ...]) -> None:
    """Slots behind the last key of a block and of other blocks, and tables behind the last one."""
    of, n = model(name), len(lengths)
    batch = batch_of(*lengths) if n == 1 else batch_of_some(lengths, "cpu")
    (want,), _ = of.steps([batch])
    at = torch.arange(batch.block_tables.shape[1] * BLOCK)
    slots = batch.block_tables[:, at // BLOCK] * BLOCK + at % BLOCK
    read = torch.zeros(of.cache[0][0].shape[0] * BLOCK, dtype=torch.bool)
    read[slots[at < batch.seq_lens[:, None]].long()] = True
    dirty = clone(of.cache)
    for x in tensors(dirty):
        x.flatten(0, 1)[~read] = float("nan")
    behind = at[::BLOCK] >= batch.seq_lens[:, None]
    for value in (-1, 10**6):
        table = batch.block_tables.masked_fill(behind, value)
        (got,), _ = of.steps([dataclasses.replace(batch, block_tables=table)], cache=dirty)
        assert torch.equal(got, want)


@pytest.mark.rest
@pytest.mark.parametrize("rows", [(3, 1, 0, 2), (-1, 2, 2, -4)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_logits_are_those_asked_for(name: str, rows: tuple[int, ...]) -> None:
    """In any order, counted from either end."""
    of = model(name)
    (logits,), _ = of.steps([batch_of_some((20, 30, 40, 50), "cpu", rows)])
    (want,), _ = of.steps([batch_of_some((20, 30, 40, 50), "cpu")])
    assert torch.equal(logits, want[list(rows)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tokens", [1, 2])
def test_clocks_are_read_where_the_source_waits(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each layer and program, in the order of its parts; and nothing else is changed."""
    of, batch = model("llama"), batch_of_some((300, 20)[:tokens], "cpu")
    (want,), _ = of.steps([batch])
    clocks = torch.zeros(2, of.programs, one_launch_clocks.MARKS, dtype=torch.int64)
    source = one_launch_clocks.with_clocks(tmp_path, clocks)
    monkeypatch.setattr(Emulated, "source", source)
    (logits,), _ = of.steps([batch])
    assert torch.equal(logits, want)
    ticks = clocks[..., : len(one_launch_clocks.PARTS) + 1].transpose(0, 1).flatten(1)
    assert (ticks[:, 0] > 0).all() and (ticks.diff(dim=1) > 0).all()
    parts = one_launch_clocks.parts_of(clocks)
    assert all(0 < mean <= most for mean, most in parts.values())
    whole = [parts[name][0] for name, _ in one_launch_clocks.PARTS]
    assert sum(whole) <= parts["a layer"][0]
    own = [parts[name][0] for name, _ in one_launch_clocks.ATTENDS]
    assert sum(own) <= parts["attention"][1]
