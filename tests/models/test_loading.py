"""Hugging Face folders: what is read, what is refused, and text from one by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models as kinds, pre_tokenizers

from fngraph.models import (
    CheckpointError,
    generate,
    llama,
    load_checkpoint,
    loading,
    naming,
    read_text,
)
from tests.models import tiny

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Qwen3 with a tokenizer of single bytes."""
    tiny.save("qwen3", tmp_path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(kinds.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def change(folder: Path, **keys: object) -> None:
    """Other values in config.json."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return naming.named(loading.family(folder).load(folder)[1])


def test_shards_are_one_model(folder: Path):
    whole = weights(folder)
    named = list(load_file(folder / FILE).items())
    parts = {"a.safetensors": dict(named[:9]), "b.safetensors": dict(named[9:])}
    for name, part in parts.items():
        save_file(part, folder / name)
    index = {n: name for name, part in parts.items() for n in part}
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / FILE).unlink()
    again = weights(folder)
    assert whole.keys() == again.keys()
    assert all(torch.equal(again[n], w) for n, w in whole.items())
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        weights(folder)


def test_all_that_does_not_fit_is_one_error(folder: Path):
    named = load_file(folder / FILE)
    named["model.layers.1.self_attn.q_norm.weight"] = torch.ones(5)
    named["model.layers.7.mlp.up_proj.weight"] = named.pop("model.layers.0.mlp.up_proj.weight")
    del named["model.norm.weight"]
    save_file(named, folder / FILE)
    with pytest.raises(CheckpointError) as error:
        weights(folder)
    assert str(error.value).splitlines()[1:] == [
        "  model.layers.0.mlp.up_proj.weight: missing, expected (48, 32)",
        "  model.norm.weight: missing, expected (32,)",
        "  model.layers.7.mlp.up_proj.weight: unknown, of shape (48, 32)",
        "  model.layers.1.self_attn.q_norm.weight: expected (12,), got (5,)",
    ]


def test_a_config_that_cannot_be_run_is_refused(folder: Path):
    change(folder, hidden_act="gelu", layer_types=["chunked_attention"] * 2)
    with pytest.raises(CheckpointError) as error:
        weights(folder)
    for line in ("hidden_act is 'gelu', only 'silu'", "layer_types has 'chunked_attention', only"):
        assert line in str(error.value)


def test_what_else_may_be_wrong_with_a_config(folder: Path):
    change(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 1.0})
    with pytest.raises(CheckpointError, match="'spiral'; there are default, llama3, yarn, linear"):
        weights(folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(raw | {"rope_parameters": None}))
    with pytest.raises(CheckpointError, match="lacks 'rms_norm_eps'"):
        weights(folder)
    change(folder, model_type="gpt9")
    with pytest.raises(CheckpointError, match="'gpt9' is none of bert, deepseek_v2, deepseek_v3"):
        weights(folder)
    with pytest.raises(CheckpointError, match="save_pretrained"):
        loading.family(folder / "nowhere")


def test_a_weight_that_a_format_does_not_name_is_said(folder: Path):
    names = {n: theirs for n, theirs in llama.FORMAT.names.items() if n != "layers.*.attn.wq"}
    with pytest.raises(CheckpointError, match=r"names has no 'layers\.\*\.attn\.wq'\. Add"):
        loading.load(llama.FORMAT._replace(names=names), folder)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"[]", "a list where an object should be"),
        (b"\xff\xfe{}", "can't decode byte 0xff"),
        (b'{"model_type": ["qwen3"]}', r"model_type \['qwen3'\] is none of"),
    ],
)
def test_a_config_that_is_none_is_refused(folder: Path, content: bytes, says: str):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        weights(folder)


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"hidden_size": "32"}, "dim is '32', not a whole number"),
        ({"num_hidden_layers": 2.0}, "num_layers is 2.0, not a whole number"),
        ({"vocab_size": -1}, "vocab_size is -1, not a whole number"),
        ({"num_attention_heads": 0, "head_dim": None}, "by zero|head_dim is None"),
        ({"rms_norm_eps": None}, "norm_eps is None, not a number"),
        ({"tie_word_embeddings": "no"}, "tied is 'no', not true or false"),
        ({"rope_parameters": [1]}, r"config\.json: "),
        (
            {"rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1.0, "factor": "4", "low_freq_factor": 1,
                "high_freq_factor": 4,
            }},
            r"rope_scaling\.factor is '4', not a number",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window is None, not how many tokens one sees, but layer 1 has a window",
        ),
        ({"layer_types": 1}, "not iterable"),
        ({"quantization_config": {"bits": 4}}, "cannot be run:\n  quant_method is None"),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_is_no_value_is_refused(folder: Path, keys: dict[str, Any], says: str):
    change(folder, **keys)
    with pytest.raises(CheckpointError, match=says):
        weights(folder)


@pytest.mark.parametrize(
    "name, keys, says",
    [
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, .* 6 experts"),
        ("deepseek_v2", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0, .* 6 experts"),
        ("qwen3_next", {"layer_types": ["chunked_attention"] * 4}, "has 'chunked_attention'"),
    ],
)
def test_what_a_family_cannot_be_is_refused(name: str, keys: dict[str, Any], says: str, tmp_path):
    tiny.save(name, tmp_path)
    change(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=says):
        weights(tmp_path)


def test_an_index_that_is_left_over_is_not_read(folder: Path):
    """Beside a whole file, as transformers has it; one that is broken is said all the same."""
    whole = weights(folder)
    index = {"weight_map": dict.fromkeys(load_file(folder / FILE), "gone-00001-of-00009")}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))
    assert weights(folder).keys() == whole.keys()


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}], ids=str)
def test_an_index_of_no_files_is_refused(folder: Path, index: dict[str, Any]):
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="has no weight_map"):
        weights(folder)


@pytest.mark.parametrize(
    "stored, says", [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")], ids=str
)
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_quantized_weights_are_not_taken_for_plain_ones(folder: Path, stored, says, dtype):
    named = load_file(folder / FILE)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(named | {name: named[name].to(stored)}, folder / FILE)
    with pytest.raises(CheckpointError, match=rf"  {name}: is stored as {says}, only"):
        loading.family(folder).load(folder, dtype=dtype)


def test_dtypes_are_kept_or_cast(folder: Path):
    save_file({n: w.bfloat16() for n, w in load_file(folder / FILE).items()}, folder / FILE)
    assert {w.dtype for w in weights(folder).values()} == {torch.bfloat16}
    _, params = loading.family(folder).load(folder, dtype=torch.float32)
    assert {w.dtype for w in naming.named(params).values()} == {torch.float32}


def test_several_dtypes_are_said_at_load(folder: Path):
    named = load_file(folder / FILE)
    norms = {n: w for n, w in named.items() if "norm" in n}
    save_file({n: w.bfloat16() for n, w in named.items()} | norms, folder / FILE)
    with pytest.raises(CheckpointError, match=r"(?s)several dtypes.*dtype=torch\.bfloat16.*F32: 9"):
        weights(folder)
    _, params = loading.family(folder).load(folder, dtype=torch.bfloat16)
    assert {w.dtype for w in naming.named(params).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "name, parts, cast",
    [
        ("mamba2", ("A_log", "dt_bias", ".D"), True),
        ("qwen3_next", ("norm.weight", "A_log"), True),
        ("deepseek_v3", ("correction_bias",), False), ("gemma3_text", ("norm.weight",), True),
    ],
)  # fmt: skip
def test_what_is_computed_in_float32_may_be_stored_so(name, parts, cast, tmp_path: Path):
    """And runs; the bias by which DeepSeek-V3 chooses is not cast, as by transformers."""
    tiny.save(name, tmp_path)
    stored = load_file(tmp_path / FILE)
    of = lambda n: torch.float32 if n.endswith(parts) else torch.bfloat16  # noqa: E731
    save_file({n: w.to(of(n)) for n, w in stored.items()}, tmp_path / FILE)
    family = loading.family(tmp_path)
    config, params = family.load(tmp_path)
    assert {w.dtype for w in naming.named(params).values()} == {torch.bfloat16, torch.float32}
    cache = family.init_cache(config, 2, num_slots=1, dtype=torch.bfloat16)
    batch = generate.alone(tiny.PROMPT, 0, 2, "cpu", family.Batch)
    assert family.forward(params, cache, batch)[0].isfinite().all()
    dtypes = {w.dtype for w in naming.named(family.load(tmp_path, dtype=torch.float16)[1]).values()}
    assert dtypes == ({torch.float16} if cast else {torch.float16, torch.float32})


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float8_e4m3fn, torch.bool, "bfloat16"], ids=str
)
def test_a_dtype_that_weights_cannot_have_is_refused(folder: Path, dtype: Any):
    config, _ = loading.family(folder).load(folder)
    calls = (
        lambda: loading.family(folder).load(folder, dtype=dtype),
        lambda: loading.from_state(llama.blank, {}, config, {}, dtype=dtype),
        lambda: llama.init_params(config, dtype=dtype),
        lambda: load_checkpoint(dtype=dtype),
    )
    for call in calls:
        with pytest.raises(
            TypeError, match=r"would be cut off.*torch\.float32|pass one of torch's"
        ):
            call()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_model_saved_without_its_head(name: str, tmp_path: Path):
    """Its names lack "model."; a head that is not tied is missing, and nothing else."""
    model = tiny.save(name, tmp_path)
    family = loading.family(tmp_path)
    config, whole = family.load(tmp_path)
    model.model.save_pretrained(tmp_path)
    if not config.tied:
        with pytest.raises(CheckpointError) as error:
            family.load(tmp_path)
        assert str(error.value).splitlines()[1:] == [
            f"  lm_head.weight: missing, expected {tuple(whole.head.shape)}"
        ]
        return
    named, again = (naming.named(x) for x in (whole, family.load(tmp_path)[1]))
    assert all(torch.equal(again[n], w) for n, w in named.items())


def test_a_tied_head_is_not_read(tmp_path: Path):
    tiny.save("llama", tmp_path)
    assert llama.load(tmp_path)[1].head is None
    named = load_file(tmp_path / FILE)
    save_file(
        named | {"lm_head.weight": named["model.embed_tokens.weight"].clone()}, tmp_path / FILE
    )
    assert llama.load(tmp_path)[1].head is None
    change(tmp_path, tie_word_embeddings=False)
    assert llama.load(tmp_path)[1].head is not None


@pytest.mark.parametrize(
    "name, embed", [("llama", "model.embed_tokens"), ("mamba2", "backbone.embeddings")]
)
def test_a_tied_head_that_is_another_one_is_refused(name: str, embed: str, tmp_path: Path):
    tiny.save(name, tmp_path)
    change(tmp_path, tie_word_embeddings=True)
    named = load_file(tmp_path / FILE)
    head = named[f"{embed}.weight"].clone()
    save_file(named | {"lm_head.weight": head}, tmp_path / FILE)
    assert loading.family(tmp_path).load(tmp_path)[1].head is None
    head[3, 1] += 0.5
    save_file(named | {"lm_head.weight": head}, tmp_path / FILE)
    says = rf"lm_head\.weight: is another one than {embed}\.weight, .* tie_word_embeddings: false"
    with pytest.raises(CheckpointError, match=says):
        weights(tmp_path)


@pytest.mark.parametrize("name", [name for name in tiny.GENERATIVE if name != "mamba2"])
def test_a_config_of_transformers_4_reads_the_same(name: str, tmp_path: Path):
    tiny.save(name, tmp_path)
    family = loading.family(tmp_path)
    now = family.load(tmp_path)[0]
    raw = json.loads((tmp_path / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    if "sliding_attention" in rope:
        raw["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    else:
        raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        rope["type"] = rope.pop("rope_type")
    if rope.get("type") == "default":
        raw["rope_scaling"] = None
    if "num_local_experts" in raw:
        raw["num_experts"] = raw.pop("num_local_experts")
    raw.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert family.load(tmp_path)[0] == now


def test_an_infinite_limit_reads_the_same_as_transformers_4_writes_it(tmp_path: Path):
    tiny.save("mamba2", tmp_path)
    family = loading.family(tmp_path)
    now = family.load(tmp_path)[0]
    assert now.dt_limit == (0.0, float("inf"))
    change(tmp_path, time_step_limit=[0.0, float("inf")])
    assert family.load(tmp_path)[0] == now


def test_text_ends_where_the_model_says(folder: Path):
    change(folder, eos_token_id=[7, 9])
    (folder / "generation_config.json").unlink(missing_ok=True)
    text = read_text(folder)
    tokens = text.encode("caf\u00e9")
    assert text.decode(tokens) == "caf\u00e9" and text.stops == {7, 9}
    assert text.decode((*tokens, 9, *tokens)).count("caf\u00e9") == 2  # a prompt has them too
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read_text(folder)


def test_the_command_writes_text_from_a_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (tmp_path / "prompts.txt").write_text("The\nReturn a list\n")
    family = loading.family(folder)
    params = family.load(folder)[1]
    text = read_text(folder)
    words = ["--model", str(folder), "--prompts", str(tmp_path / "prompts.txt")]
    generate.main([*words, "--max-new", "5", "--max-tokens", "8", "--max-reqs", "2"])
    out = "".join(capsys.readouterr().out.split())
    assert "FULL|" in out and "PIECEWISE|" in out
    for prompt in ("The", "Return a list"):
        new = generate.reference(params, text.encode(prompt), 5, family)
        end = next((i for i, token in enumerate(new) if token in text.stops), len(new))
        assert "".join(f"{prompt}=>{text.decode(new[:end])}".split()) in out
