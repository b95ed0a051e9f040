"""A process's part of params: of a tree, and of files, of which no more is read.

No process group is needed here: meshes are written by hand. What parts compute together is in
tests/ranks/test_sharded.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, relu

import fngraph as fg
from fngraph.models import (
    CheckpointError,
    Fp8Weight,
    llama,
    load_adapter,
    loading,
    lora,
    mamba2,
    naming,
    quantize_fp8,
    qwen3_moe,
    shard,
)
from fngraph.models.weights import files, sharding
from fngraph.models.weights.sharded import SplitVocabulary, SummedWeight
from tests.models import tiny

ROOT = Path(__file__).parents[2]
MESHES = [{"tp": 2}, {"tp": 4}, {"tp": 2, "ep": 2}, {"ep": 3}]


def mesh(rank: int, **sizes: int) -> fg.Mesh:
    """That of a process, by hand."""
    axes = []
    for name, size in reversed(sizes.items()):
        axes.append(fg.Axis(name, size, rank % size, f"group of {name}" if size > 1 else ""))
        rank //= size
    return fg.Mesh(tuple(reversed(axes)))


def same(a: Any, b: Any) -> bool:
    """Whether two trees are of one structure and hold the same bits."""
    alike = naming.replaced(a, lambda *_: 0) == naming.replaced(b, lambda *_: 0) or repr(
        naming.replaced(a, lambda *_: 0)
    ) == repr(naming.replaced(b, lambda *_: 0))
    one, other = naming.named(a), naming.named(b)
    return alike and one.keys() == other.keys() and all(
        x.dtype == other[n].dtype and torch.equal(x.float(), other[n].float())
        for n, x in one.items()
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a tiny model of a family is, saved once."""
    made: dict[str, Path] = {}

    @torch.no_grad()
    def saved(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            tiny.save(name, made[name])
        return made[name]

    return saved


def is_split(family: Any, config: Any, sizes: dict[str, int]) -> bool:
    axes = {size.axis for size in family.specs(config).sizes.values()}
    return bool(axes & sizes.keys())


@pytest.mark.parametrize("name", tiny.GENERATIVE)
def test_what_is_loaded_is_what_is_cut_out_of_the_whole(name: str, folder: Callable[[str], Path]):
    family = loading.family(folder(name))
    config, whole = family.load(folder(name))
    specs = family.specs(config)
    for sizes in MESHES:
        if not is_split(family, config, sizes):
            continue
        for rank in (0, 1, 3):
            one = mesh(rank, **sizes)
            own, params = family.load(folder(name), mesh=one)
            part = shard(whole, specs, one)
            assert params.config == part.config == own
            assert same(params, part)
            before = naming.named(whole)
            shared = {n for n, x in naming.named(part).items() if x is before.get(n)}
            assert not any(sharding.split_of(specs, n) for n in shared)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mamba2", "qwen3_next", "deepseek_v3"])
def test_each_element_is_on_some_process(name: str, folder: Callable[[str], Path]):
    """Numbers in place of weights, no two the same."""
    family = loading.family(folder(name))
    config, params = family.load(folder(name))
    start = iter(range(0, 1 << 40, 1 << 20))
    counted = naming.replaced(
        params, lambda _, x: (torch.arange(x.numel()) + next(start)).view(x.shape).double()
    )
    sizes = {"tp": 2, "ep": 2} if "num_experts" in family.specs(config).sizes else {"tp": 4}
    parts = [naming.named(shard(counted, family.specs(config), mesh(r, **sizes))) for r in range(4)]
    for n, x in naming.named(counted).items():
        found = torch.cat([part[n].flatten() for part in parts]).unique()
        assert torch.equal(found, x.flatten()), n
        is_part = sharding.split_of(family.specs(config), n) is not None
        assert is_part == (parts[0][n].numel() < x.numel()), n


def config_of(**changes: Any) -> llama.Config:
    return llama.Config(**{
        "vocab_size": 250, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "dim": 64, "mlp_dim": 128, **changes,
    })  # fmt: skip


def test_a_vocabulary_is_filled_up_with_zeros():
    params = llama.init_params(config_of())
    parts = [shard(params, llama.specs(params.config), mesh(r, tp=4)).head for r in range(4)]
    assert all(isinstance(part, SplitVocabulary) and part.count == 250 for part in parts)
    whole = torch.cat([part.weight for part in parts])
    assert torch.equal(whole[:250], params.head) and whole.shape == (252, 64)
    assert not whole[250:].any()


def test_weights_in_fp8_are_split_with_their_scales():
    params = quantize_fp8(llama.init_params(config_of(), dtype=torch.bfloat16))
    parts = [shard(params, llama.specs(params.config), mesh(r, tp=2)) for r in range(2)]
    whole, (a, b) = params.layers[0], (part.layers[0] for part in parts)
    for cut, dim in ((lambda x: x.attn.wq, 0), (lambda x: x.mlp.w_up, 0)):
        values = [cut(x).values.float() for x in (a, b)]
        assert torch.equal(torch.cat(values, dim), cut(whole).values.float())
        assert torch.equal(torch.cat([cut(a).scale, cut(b).scale]), cut(whole).scale)
    assert isinstance(a.attn.wo, SummedWeight) and isinstance(a.attn.wo.weight, Fp8Weight)
    values = torch.cat([x.mlp.w_down.weight.values.float() for x in (a, b)], 1)
    assert torch.equal(values, whole.mlp.w_down.values.float())
    assert torch.equal(a.mlp.w_down.weight.scale, whole.mlp.w_down.scale)


def test_parts_can_be_rounded_to_fp8_and_are_found_by_the_names_of_the_whole():
    part = shard(llama.init_params(config_of()), llama.specs(config_of()), mesh(1, tp=2))
    assert naming.named(part).keys() == naming.named(llama.blank(config_of())).keys()
    made = quantize_fp8(part, input_scales={"layers.1.mlp.w_down": 0.5})
    down = made.layers[1].mlp.w_down
    assert isinstance(down, SummedWeight) and float(down.weight.input_scale) == 0.5
    assert isinstance(made.layers[0].attn.wq, Fp8Weight)


def test_parts_too_small_for_fp8_are_said():
    params = quantize_fp8(llama.init_params(config_of(head_dim=8), dtype=torch.bfloat16))
    with pytest.raises(fg.errors.RankError, match="split them over fewer") as caught:
        shard(params, llama.specs(params.config), mesh(0, tp=4))
    assert "layers.0.attn.wq: is (8, 64), and fp8 takes multiples of 16" in str(caught.value)
    assert "mlp" not in str(caught.value)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "heads": (
        lambda: shard(llama.init_params(config_of()), llama.specs(config_of()), mesh(0, tp=3)),
        "num_heads is 4, which 3 processes along 'tp' cannot share",
    ),
    "what would do": (
        lambda: shard(llama.init_params(config_of()), llama.specs(config_of()), mesh(0, tp=8)),
        "Make the mesh with tp=1 or 2 or 4",
    ),
    "no such axis": (
        lambda: shard(llama.init_params(config_of()), llama.specs(config_of()), mesh(0, dp=2)),
        r"has no axis 'tp'.*Make it: make_mesh\(tp=2\)",
    ),
    "experts alone": (
        lambda: shard(llama.init_params(config_of()), llama.specs(config_of()), mesh(0, ep=2)),
        "has no axis 'tp'",
    ),
    "specs of another config": (
        lambda: shard(
            llama.init_params(config_of()), llama.specs(config_of(mlp_dim=64)), mesh(0, tp=2)
        ),
        r"layers.0.mlp.w_gate is \(128, 64\), and its spec lays 64 out along dim 0",
    ),
    "twice": (
        lambda: shard(
            shard(llama.init_params(config_of()), llama.specs(config_of()), mesh(0, tp=2)),
            llama.specs(config_of()), mesh(0, tp=2),
        ),
        "embed is split already. Pass params that are whole",
    ),
    "another order": (
        lambda: shard(llama.init_params(config_of()), mesh(0, tp=2), llama.specs(config_of())),
        r"specs=Mesh\(tp=2; .*\) is a Mesh. Pass the family's specs\(config\)",
    ),
    "an axis": (
        lambda: shard(
            llama.init_params(config_of()), llama.specs(config_of()), mesh(0, tp=2)["tp"]
        ),
        r"mesh=Axis\('tp', rank 0 of 2\) is an Axis. Pass the whole mesh, fg.make_mesh\(tp=2\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_said(name: str):
    run, message = MISTAKES[name]
    with pytest.raises(fg.errors.RankError, match=message):
        run()


def test_a_family_that_cannot_be_split_and_a_mesh_that_does_not_fit_are_said_at_load(
    folder: Callable[[str], Path],
):
    with pytest.raises(fg.errors.RankError, match="this family cannot be split"):
        loading.family(folder("bert")).load(folder("bert"), mesh=mesh(0, tp=2))
    with pytest.raises(fg.errors.RankError, match="num_experts is 6, which 4 processes along 'ep'"):
        qwen3_moe.load(folder("qwen3_moe"), mesh=mesh(0, ep=4))
    with pytest.raises(fg.errors.RankError, match="num_groups is 2, which 3 processes") as caught:
        mamba2.load(folder("mamba2"), mesh=mesh(0, tp=3))
    assert "num_heads is 8" in str(caught.value)


def test_a_part_is_for_linear_alone():
    params = shard(llama.init_params(config_of()), llama.specs(config_of()), mesh(0, tp=2))
    for weight in (params.layers[0].attn.wo, params.embed):
        with pytest.raises(TypeError, match=r"relu meets a .*linear.x, weight. alone"):
            relu(weight)
        with pytest.raises(TypeError, match="linear meets a"):
            linear(weight, torch.ones(2, 64))


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "deepseek_v2", "mamba2"])
def test_no_more_is_read_than_is_kept(
    name: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    """A tied head that is in the files is compared, which reads the part twice."""
    read: list[int] = []
    copy_part = files.Stored.copy_part

    def counted(self: Any, block: Any, to: Tensor) -> None:
        read.append(to.nbytes)
        assert to.nbytes <= sharding.MOST
        copy_part(self, block, to)

    monkeypatch.setattr(files.Stored, "copy_part", counted)
    monkeypatch.setattr(files.Stored, "whole", None)
    monkeypatch.setattr(sharding, "MOST", 4096)
    family = loading.family(folder(name))
    _, params = family.load(folder(name), mesh=mesh(1, tp=2))
    kept = sum(x.nbytes for x in naming.named(params).values())
    assert sum(read) == kept and len(read) > len(naming.named(params))


def test_a_tied_head_is_compared_by_parts(folder: Callable[[str], Path], tmp_path: Path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder("llama") / file).read_bytes())
    state = load_file(tmp_path / "model.safetensors")
    head = state["model.embed_tokens.weight"].clone()
    save_file(state | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert llama.load(tmp_path, mesh=mesh(0, tp=2))[1].head is None
    head[700] += 1
    save_file(state | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert llama.load(tmp_path, mesh=mesh(0, tp=2))[1].head is None, "its rows are as they were"
    with pytest.raises(CheckpointError, match="is another one than"):
        llama.load(tmp_path, mesh=mesh(1, tp=2))


def raw_of(config: llama.Config) -> dict[str, Any]:
    """A config.json."""
    return {
        "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim, "rms_norm_eps": config.norm_eps,
    }  # fmt: skip


def save(path: Path, params: llama.Params, **raw: Any) -> None:
    """A folder of params; those in fp8 as AutoFP8 saves them."""
    state = {}
    for name, x in naming.named(params).items():
        stem, _, part = name.rpartition(".")
        own = part in ("values", "scale", "input_scale")
        (theirs,) = loading.sources_of(llama.FORMAT.names, stem if own else name, x)
        state[{"scale": f"{theirs}_scale"}.get(part, theirs)] = x.contiguous()
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw_of(params.config) | raw))


def test_a_folder_in_fp8_is_read_by_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = quantize_fp8(llama.init_params(config_of(), dtype=torch.bfloat16))
    said = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    save(tmp_path, whole, quantization_config=said)
    monkeypatch.setattr(sharding, "MOST", 1000)
    for rank in range(4):
        _, params = llama.load(tmp_path, mesh=mesh(rank, tp=4))
        assert same(params, shard(whole, llama.specs(whole.config), mesh(rank, tp=4)))
    small = quantize_fp8(llama.init_params(config_of(head_dim=8), dtype=torch.bfloat16))
    save(tmp_path, small, quantization_config=said)
    with pytest.raises(CheckpointError, match=r"process's part of .*k_proj.weight: is \(8, 64\)"):
        llama.load(tmp_path, mesh=mesh(0, tp=2))


PEAK = """
import sys, torch
import fngraph as fg
from fngraph.models import llama, naming

def said(what):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))

torch.ones(64, 64) @ torch.ones(64, 64)
llama.load(sys.argv[2], mesh=fg.Mesh((fg.Axis("tp", 2, 0, "a group"),)))  # what is loaded once
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins here
before = said("VmRSS")
_, params = llama.load(sys.argv[1], mesh=fg.Mesh((fg.Axis("tp", 2, 1, "a group"),)))
print(sum(x.nbytes for x in naming.named(params).values()), said("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says the peak")
def test_the_peak_while_loading_is_the_part_and_a_tenth(tmp_path: Path):
    """All memory of the process, pages of files included."""
    small, large = tmp_path / "small", tmp_path / "large"
    for path, sizes in ((small, {}), (large, {"num_layers": 6, "dim": 1024, "mlp_dim": 4096})):
        path.mkdir()
        config = config_of(**sizes, vocab_size=16384 if sizes else 250)
        config = dataclasses.replace(config, num_heads=8, head_dim=128 if sizes else 16)
        draw = lambda _, x: torch.full(x.shape, 0.5, dtype=torch.bfloat16)  # noqa: E731
        save(path, naming.replaced(llama.blank(config), draw))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, str(large), str(small)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    part, peak = map(int, ran.stdout.split())
    assert part > 0.45 * (large / "model.safetensors").stat().st_size > 90 << 20
    assert part < peak <= 1.1 * part


# --- adapters -------------------------------------------------------------------------------------


def test_an_adapter_is_split_as_its_weights_are(tmp_path: Path):
    config, names = config_of(), ("wq", "wk", "wo", "w_up", "w_down")
    whole = llama.init_params(config)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "lora_alpha": 8, "r": 4})
    )
    state, theirs = {}, llama.FORMAT.names
    for name, x in naming.named(whole.layers).items():
        if name.rsplit(".", 1)[-1] in names:
            (stem,) = loading.sources_of(theirs, f"layers.{name}", x)
            stem = f"base_model.model.{stem.removesuffix('.weight')}"
            state[f"{stem}.lora_A.weight"] = torch.randn(4, x.shape[1])
            state[f"{stem}.lora_B.weight"] = torch.randn(x.shape[0], 4)
    save_file(state, tmp_path / "adapter_model.safetensors")
    slots = lambda params: lora.slots(params, count=2, rank=4, names=names)  # noqa: E731
    want = load_adapter(tmp_path, slots(whole), theirs)
    found = []
    for rank in range(2):
        share = sharding.share_of(config, llama.specs(config), mesh(rank, tp=2))
        params = shard(whole, llama.specs(config), mesh(rank, tp=2))
        found.append(load_adapter(tmp_path, slots(params), theirs, share=share))
    for i, name, whole_half, dim in (
        (0, "attn.wq", "b", 1), (1, "attn.wk", "b", 1), (0, "attn.wo", "a", 1),
        (1, "mlp.w_up", "b", 1), (1, "mlp.w_down", "a", 1),
    ):  # fmt: skip
        other = "a" if whole_half == "b" else "b"
        parts = [getattr(one[i][name], whole_half) for one in found]
        assert torch.equal(torch.cat(parts, dim), getattr(want[i][name], whole_half))
        for one in found:
            assert torch.equal(getattr(one[i][name], other), getattr(want[i][name], other))
    share = sharding.share_of(config, llama.specs(config), mesh(0, tp=2))
    with pytest.raises(CheckpointError, match=r"64 to 64; given a \[4, 64\], b \[4, 32\]"):
        load_adapter(tmp_path, slots(whole), theirs, share=share)
    stem = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    save_file(state | {stem: torch.randn(60, 4)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"wq: .*64 to 32; given a \[4, 64\], b \[4, 60\]"):
        load_adapter(tmp_path, slots(params), theirs, share=share)
