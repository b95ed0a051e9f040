"""Adapters that PEFT saved, by its layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fngraph.models import CheckpointError, llama, load_adapter, lora

RANK, ALPHA = 3, 12
RANKS = {"self_attn.q_proj": RANK, "mlp.down_proj": 2}
NAMES = {
    "embed": "model.embed_tokens.weight",
    "layers.*.attn.wq": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.mlp.w_down": "model.layers.*.mlp.down_proj.weight",
}
PREFIX = "base_model.model.model.layers"


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """A folder as PEFT's save_pretrained leaves one."""
    said = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_rslora": False,
        "target_modules": ["q_proj", "down_proj"], "modules_to_save": None, "alpha_pattern": {},
        "rank_pattern": {"down_proj": 2},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    save_file({name: x.contiguous() for name, x in tensors.items()},
              folder / "adapter_model.safetensors")  # fmt: skip
    return folder


def tensors_of(params: Any) -> dict[str, torch.Tensor]:
    """q_proj of each layer, down_proj of the second alone, in a rank of its own."""
    generator = torch.Generator().manual_seed(0)
    out = {}
    for i, layer in enumerate(params.layers):
        q, down = layer.attn.wq, layer.mlp.w_down
        for module, weight in (("self_attn.q_proj", q), ("mlp.down_proj", down)):
            if i == 0 and module == "mlp.down_proj":
                continue
            name, rank = f"{PREFIX}.{i}.{module}", RANKS[module]
            out[f"{name}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator)
            out[f"{name}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator)
    return out


@pytest.mark.parametrize("rslora", [False, True])
def test_an_update_is_scale_times_b_times_a(params, tmp_path, rslora):
    adapters = lora.slots(params, count=2, rank=4, names=("wq", "w_down"))
    tensors = tensors_of(params)
    slot = load_adapter(write(tmp_path, tensors, use_rslora=rslora), adapters, NAMES)
    for i, module, name in ((0, "self_attn.q_proj", "attn.wq"), (1, "mlp.down_proj", "mlp.w_down")):
        a, b = (tensors[f"{PREFIX}.{i}.{module}.lora_{half}.weight"] for half in "AB")
        pair = slot[i][name]
        assert pair.a.shape[0] == pair.b.shape[0] == 4
        scale = ALPHA / RANKS[module] ** (0.5 if rslora else 1)
        torch.testing.assert_close((pair.a.T @ pair.b).T, scale * b @ a)
    assert not slot[0]["mlp.w_down"].a.any() and not slot[0]["mlp.w_down"].b.any()


@pytest.mark.parametrize(
    "key, value",
    [
        ("alora_invocation_tokens", [5, 7]), ("arrow_config", {"top_k": 3}), ("use_qalora", True),
        ("trainable_token_indices", [3]), ("target_parameters", ["mlp.experts.down_proj"]),
        ("layer_replication", [[0, 1]]), ("megatron_config", {"a": 1}), ("of_tomorrow", 0.5),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_unless_it_is_empty(params, tmp_path, key, value):
    adapters = lora.slots(params, count=2, rank=4, names=("wq", "w_down"))
    for empty in (None, False, [], {}):
        load_adapter(write(tmp_path, tensors_of(params), **{key: empty}), adapters, NAMES)
    with pytest.raises(ValueError, match=rf"adapter_config\.json: {key}=.* is not supported"):
        load_adapter(write(tmp_path, tensors_of(params), **{key: value}), adapters, NAMES)


def test_a_module_may_have_an_alpha_of_its_own(params, tmp_path):
    """The first pattern that its name ends in, of several names as of one; ranks are those of the
    tensors."""
    adapters = lora.slots(params, count=2, rank=4, names=("wq", "w_down"))
    tensors = tensors_of(params)
    alphas = {
        "self_attn|x_proj": 3, r"layers\.1\.self_attn\.q_proj": 5, "x_proj|q_proj": 7, "proj": 9,
        "o_proj": 11,
    }  # fmt: skip
    folder = write(tmp_path, tensors, alpha_pattern=alphas)
    slot = load_adapter(folder, adapters, NAMES)
    for i, module, name, alpha in (
        (0, "self_attn.q_proj", "attn.wq", 7), (1, "self_attn.q_proj", "attn.wq", 5),
        (1, "mlp.down_proj", "mlp.w_down", ALPHA),
    ):  # fmt: skip
        a, b = (tensors[f"{PREFIX}.{i}.{module}.lora_{half}.weight"] for half in "AB")
        pair = slot[i][name]
        torch.testing.assert_close((pair.a.T @ pair.b).T, alpha / RANKS[module] * b @ a)


def test_all_that_is_wrong_is_listed(params, tmp_path):
    adapters = lora.slots(params, count=2, rank=2, names=("wq",))
    tensors = tensors_of(params)
    del tensors[f"{PREFIX}.0.self_attn.q_proj.lora_B.weight"]
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(2, 2)
    folder = write(tmp_path, tensors, use_dora=True, bias="all")
    with pytest.raises(ValueError) as error:
        load_adapter(folder, adapters, NAMES)
    for line in (
        "use_dora=True is not supported", "bias='all' is not supported",
        "base_model.model.lm_head.lora_A.weight: unknown",
        "layers.0.attn.wq: lora_B is missing", "layers.1.attn.wq: rank 2 at most",
        "layers.1.mlp.w_down: no slots",
    ):  # fmt: skip
        assert line in str(error.value)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "PiSSA", "olora", "corda", "loftq"])
def test_an_adapter_to_changed_weights_is_refused(params, tmp_path, init):
    adapters = lora.slots(params, count=2, rank=4, names=("wq", "w_down"))
    folder = write(tmp_path, tensors_of(params), init_lora_weights=init)
    with pytest.raises(ValueError, match=f"init_lora_weights='{init}' fits base weights that"):
        load_adapter(folder, adapters, NAMES)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva"])
def test_how_else_an_adapter_began_does_not_matter(params, tmp_path, init):
    adapters = lora.slots(params, count=2, rank=4, names=("wq", "w_down"))
    slot = load_adapter(
        write(tmp_path, tensors_of(params), init_lora_weights=init), adapters, NAMES
    )
    assert slot[0]["attn.wq"].a.any()


PATH = f"{PREFIX}.0.self_attn.q_proj"


def spoil(folder: Path, what: str) -> None:
    """Make a mistake of the files."""
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if what == "no folder":
        config.unlink()
    elif what == "no json":
        config.write_text("{lora")
    elif what == "no tensors":
        weights.unlink()
    elif what == "a pickle":
        weights.rename(folder / "adapter_model.bin")
    elif what == "no safetensors":
        weights.write_bytes(b"\0" * 4)


# what its config says, shapes of a half, and what is said of that
BAD: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "no folder": ({}, {}, r"adapter_config\.json: .*No such file.*PEFT's save_pretrained"),
    "no json": ({}, {}, r"adapter_config\.json: .*PEFT's save_pretrained"),
    "no tensors": ({}, {}, r"adapter_model\.safetensors: .*PEFT's save_pretrained"),
    "a pickle": ({}, {}, r"adapter_model\.bin, a pickle: load it with PEFT"),
    "no safetensors": ({}, {}, r"adapter_model\.safetensors: .*PEFT's save_pretrained"),
    "no alpha": ({"lora_alpha": None}, {}, "lora_alpha is None, not a number"),
    "an alpha that is a word": ({"lora_alpha": "12"}, {}, "lora_alpha is '12', not a number"),
    "alphas in a list": ({"alpha_pattern": [3]}, {}, r"alpha_pattern is \[3\], not alphas by"),
    "a pattern that is none": ({"alpha_pattern": {"(": 3}}, {}, r"'\(', no regular expression: m"),
    "an alpha of a pattern": ({"alpha_pattern": {"q": "x"}}, {}, "'q' is 'x', not a number"),
    "three dims": ({}, {"A": (2, 3, 4)}, r"attn\.wq: A and B are \[2, 3, 4\] and \[72, 3\], not"),
    "a vector": ({}, {"B": (72,)}, r"A and B are \[3, 32\] and \[72\], not \(r, in\) and"),
    "no rank": ({}, {"A": (0, 32), "B": (72, 0)}, r"A and B are \[0, 32\] and \[72, 0\], not"),
    "another width": ({}, {"A": (3, 31)}, r"rank 4 at most, 32 to 72; given a \[3, 31\]"),
    "another rank of B": ({}, {"B": (72, 2)}, r"given a \[3, 32\], b \[2, 72\]"),
    "a rank beyond": ({}, {"A": (9, 32), "B": (72, 9)}, r"Pass lora\.slots\(params, rank=9"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_mistake_is_said_with_its_fix(params, tmp_path: Path, what: str):
    config, shapes, says = BAD[what]
    adapters = lora.slots(params, count=2, rank=4, names=("wq", "w_down"))
    tensors = tensors_of(params)
    for half, shape in shapes.items():
        tensors[f"{PATH}.lora_{half}.weight"] = torch.ones(shape)
    spoil(write(tmp_path, tensors, **config), what)
    with pytest.raises(CheckpointError, match=says):
        load_adapter(tmp_path, adapters, NAMES)


def test_a_target_that_no_weight_has_is_said_with_those_there_are(params, tmp_path: Path):
    tensors = tensors_of(params) | {f"{PREFIX}.0.self_attn.qkv.lora_A.weight": torch.ones(3, 32)}
    adapters = lora.slots(params, count=2, rank=4, names=("wq", "w_down"))
    with pytest.raises(CheckpointError, match=r"qkv\.lora_A.*unknown\nknown .*down_proj, q_proj"):
        load_adapter(write(tmp_path, tensors), adapters, NAMES)


def test_something_else_in_place_of_slots_or_names_is_said(params, tmp_path: Path):
    folder = write(tmp_path, tensors_of(params))
    adapters = lora.slots(params, count=2, rank=4, names=("wq", "w_down"))
    with pytest.raises(TypeError, match=r"adapters is a Params: .*lora\.slots"):
        load_adapter(folder, params, NAMES)
    names: Any = llama.FORMAT
    with pytest.raises(TypeError, match=r"names is a Format: .*llama\.FORMAT\.names"):
        load_adapter(folder, adapters, names)
