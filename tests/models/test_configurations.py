"""Folders with configurations of all kinds: the logits are transformers', or there is a reason.

A few of the draws of `tests.models.configurations`; 500 a family take some minutes each:

    python -m tests.models.configurations
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fngraph.models import loading
from tests.models import configurations as of

SAMPLE = 8  # draws a family
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": of.VOCAB}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
PLAIN: of.Edits = {**SIZES, **HEADS, "max_position_embeddings": 96}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MOE = {**PLAIN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
NEXT = {
    **MOE, "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 12,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    "vocab_size": of.VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4,
    "head_dim": 8, "state_size": 4, "n_groups": 2, "chunk_size": 8,
}  # fmt: skip
DEEPSEEK = {
    **SIZES, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": None,
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 6,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12, "max_position_embeddings": 96,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "original_max_position_embeddings": 24,
}  # fmt: skip
GEMMA = {**PLAIN, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
USED = {"use_sliding_window": True, "sliding_window": 8}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
V3 = {**DEEPSEEK, "q_lora_rank": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MADE = {
    "mistral": PLAIN, "qwen2": PLAIN | {"hidden_size": 48}, "gemma3_text": GEMMA,
    "llama": PLAIN, "qwen3": PLAIN, "qwen3_moe": MOE, "qwen3_next": NEXT, "mamba2": MAMBA,
    "deepseek_v2": DEEPSEEK, "deepseek_v3": V3, "bert": {**SIZES, "num_attention_heads": 4},
}  # fmt: skip
# family, what it is made with beside MADE, what config.json says after that
EQUAL: dict[str, tuple[str, of.Edits, of.Edits]] = {
    **{
        f"rope_scaling beside rope_parameters, {name}": (name, {}, {"rope_scaling": YARN})
        for name in ("llama", "qwen3", "qwen3_moe", "qwen3_next", "deepseek_v2")
    },
    "with a theta of its own": ("qwen3", {}, {"rope_scaling": {**YARN, "rope_theta": 500.0}}),
    "of llama3": (
        "llama", {}, {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 24}},
    ),
    "the first in place of the other": (
        "qwen3", {"rope_parameters": {**YARN, "rope_theta": 500.0}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "a trained length outside, llama3": (
        "llama", {"rope_parameters": LLAMA3}, {"original_max_position_embeddings": 16},
    ),
    "a trained length outside, yarn": (
        "qwen3", {"rope_parameters": YARN}, {"original_max_position_embeddings": 90},
    ),
    "an amplitude of 0": ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 0.0}}, {}),
    "a finite time_step_limit": ("mamba2", {"time_step_limit": (0.05, 0.2)}, {}),
    "experts in every second layer": ("qwen3_moe", {"decoder_sparse_step": 2}, {}),
    "the rotary share that Qwen3-Next has": (
        "qwen3_next", {}, {"rope_parameters": of.GONE, "partial_rotary_factor": of.GONE},
    ),
    "a rotary share in rope_scaling": (
        "qwen3_next", {}, {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}},
    ),
    "a rope that is linear": ("llama", {}, {"rope_scaling": LINEAR}),
    "one that grows with a text of 40": (
        "llama", {"max_position_embeddings": 24}, {"rope_scaling": DYNAMIC},
    ),
    "one that grows, from elsewhere on": (
        "qwen3", {"rope_parameters": {**DYNAMIC, "rope_theta": 500.0}},
        {"max_position_embeddings": 20},
    ),
    "one of two lists of factors": ("qwen3", {}, {"rope_scaling": LONG}),
    "of two lists, with an amplitude": (
        "mistral", {}, {"rope_scaling": {**LONG, "attention_factor": 2.0}},
    ),
    "of two lists, a trained length outside": (
        "llama", {"rope_parameters": LONG}, {"original_max_position_embeddings": 30},
    ),
    **{
        f"attention with biases, {name}": (name, {"attention_bias": True}, {})
        for name in (
            "llama", "qwen3", "qwen3_moe", "qwen3_next", "gemma3_text", "deepseek_v2", "deepseek_v3"
        )
    },
    "queries compressed": ("deepseek_v2", {"q_lora_rank": 8}, {}),
    "experts in groups": ("deepseek_v2", GROUPS, {}),
    "experts in groups that are not limited": ("deepseek_v2", {**GROUPS, "topk_group": 2}, {}),
    "experts chosen by a bias": ("deepseek_v3", {}, {}),
    "shares that do not add up": ("deepseek_v3", {"norm_topk_prob": False}, {}),
    "no window in Mistral": ("mistral", {"sliding_window": 8}, {"sliding_window": None}),
    "the window that Mistral has": ("mistral", {"sliding_window": 8}, {"sliding_window": of.GONE}),
    "windows from a layer on": (
        "qwen2", {**USED, "max_window_layers": 1}, {"layer_types": of.GONE},
    ),
    "windows by layer": (
        "qwen3", {**USED, "layer_types": ["sliding_attention", "full_attention"]}, {},
    ),
    "windows in all layers of experts": ("qwen3_moe", USED, {}),
    "windows that are not used": ("qwen2", {**USED, "use_sliding_window": False}, {}),
    "two ropes": (
        "gemma3_text",
        {"rope_parameters": {
            "full_attention": {**LINEAR, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        }},
        {},
    ),
    "two ropes of transformers 4": (
        "gemma3_text", {},
        {"rope_parameters": of.GONE, "rope_scaling": LINEAR, "rope_local_base_freq": 30.0},
    ),
    "windows by a pattern": (
        "gemma3_text", {}, {"layer_types": of.GONE, "sliding_window_pattern": 2},
    ),
    "a soft cap of logits": ("gemma3_text", {"final_logit_softcapping": 1.5}, {}),
    "the head that Gemma ties": ("gemma3_text", {}, {"tie_word_embeddings": of.GONE}),
    "no num_key_value_heads": (
        "llama", {"num_key_value_heads": 4}, {"num_key_value_heads": of.GONE},
    ),
    "no head_dim": ("llama", {"head_dim": 8}, {"head_dim": of.GONE}),
    "no head_dim where 128 is meant": ("qwen3", {"head_dim": 128}, {"head_dim": of.GONE}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, of.Edits, str]] = {
    "an unknown key": ("qwen3", {"logit_scale": 3.0}, r"logit_scale is 3\.0, which is not known"),
    "an unknown one of BERT": ("bert", {"layer_scale": 2}, "layer_scale is 2, which is not known"),
    "one of a rope": ("llama", {"rope_scaling": {**YARN, "slope": 2}}, "type 'yarn' has no slope"),
    "a rope of no order": (
        "llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "not below high_freq",
    ),
    "part of a head": ("llama", {"partial_rotary_factor": 0.5}, "only all columns of a head"),
    "heads not shared out": ("llama", {"num_attention_heads": 3}, "no multiple of num_key_value"),
    "odd pairs": ("qwen3", {"head_dim": 7}, "head_dim is 7"),
    "layers of another number": (
        "qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1, not 2 layers",
    ),
    "a layer of another width": ("mamba2", {"expand": 3}, r"hidden_size \* expand 48"),
    "experts counted twice": ("qwen3_moe", {"num_experts": 7}, "but num_experts 7"),
    "values not shared out": ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_value_heads"),
    "queries compressed": ("deepseek_v2", {"q_lora_rank": of.GONE}, "q_a_proj.weight: missing"),
    "groups of other sizes": ("deepseek_v2", {**GROUPS, "n_group": 3}, "n_group is 3 and topk_"),
    "groups with too few experts": (
        "deepseek_v2", {**GROUPS, "num_experts_per_tok": 3}, "is 3, but 1 groups have 2 experts",
    ),
    "groups without two experts": ("deepseek_v3", {"n_group": 4}, "of one size, 2 at least"),
    "another way to choose": ("deepseek_v2", {"topk_method": "noaux_tc"}, "'noaux_tc', not greedy"),
    "a rope of halves": ("deepseek_v3", {"rope_interleave": False}, "only True can be run"),
    "factors of other pairs": (
        "llama", {"rope_scaling": {**LONG, "long_factor": [1.0]}}, "have 6 and 1 numbers, not one",
    ),
    "factors that are none": (
        "llama", {"rope_scaling": {**LONG, "long_factor": ["a"]}}, "long_factor is .* not a list",
    ),
    "windows said twice": (
        "qwen3_moe", {**USED, "layer_types": ["full_attention"] * 2}, "for all layers here",
    ),
    "a window of no size": ("mistral", {"sliding_window": 0}, "sliding_window is 0, not how many"),
    "a window by no size": (
        "qwen3", {"layer_types": ["sliding_attention"] * 2}, "is None, not how many .* layer 0 has",
    ),
    "kinds of layers that Mistral leaves out": (
        "mistral", {"layer_types": ["full_attention"] * 2}, "layer_types is .*, only None",
    ),
    "a rope for no kind of layer": ("gemma3_text", {"rope_parameters": LINEAR}, "has factor, "),
    "a rope of a window by the text": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {**DYNAMIC, "rope_theta": 9.0}}},
        "go by the length of the text",
    ),
    "scores capped": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "only None can be run"),
    "both directions": ("gemma3_text", {"use_bidirectional_attention": True}, "only False"),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def quiet():
    of.quiet()


def folder_of(name: str, made: of.Edits, edits: of.Edits, folder: Path) -> Path:
    """A folder of the family, with these changes."""
    of.write(name, {**MADE[name], **made}, folder)
    of.edit(folder, edits)
    return folder


@pytest.mark.parametrize("what", EQUAL)
def test_logits_are_those_of_transformers(what: str, tmp_path: Path):
    name, made, edits = EQUAL[what]
    before = of.ours(folder_of(name, made, {}, tmp_path), of.text(1))
    of.edit(tmp_path, edits)
    kind, said = of.verdict(tmp_path, of.text(1))
    assert kind == "equal", said
    seen = {"rope_scaling", "original_max_position_embeddings", "sliding_window"}
    if seen & edits.keys():  # at all
        assert (of.ours(tmp_path, of.text(1)) - before).abs().max() > 0.1


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_another_model_is_refused(what: str, tmp_path: Path):
    name, edits, says = REFUSED[what]
    with pytest.raises(loading.CheckpointError, match=says):
        loading.family(folder_of(name, {}, edits, tmp_path)).load(tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", of.FAMILIES)
def test_a_sample_of_random_configurations(name: str):
    """Equal to transformers', or refused with a reason: the whole is the command above."""
    verdicts = [of.hold(name, seed) for seed in range(SAMPLE)]
    assert not [said for kind, said in verdicts if kind == "DIFFERENT"]
    kinds = Counter(kind for kind, _ in verdicts)
    assert kinds["equal"] >= 2 and kinds["refused"] + kinds["equal"] >= SAMPLE // 2, verdicts


def test_the_judge_sees_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A theta that is misread, as a mend that went wrong would."""
    folder_of("llama", {}, {}, tmp_path)
    family: Any = loading.family(tmp_path)
    read = family.read_config
    wrong = family.FORMAT._replace(
        read=lambda raw: read({**raw, "rope_parameters": {"rope_theta": 9_000.0}})
    )
    monkeypatch.setattr(family, "load", lambda folder: loading.load(wrong, folder))
    kind, said = of.verdict(tmp_path, of.text(1))
    assert kind == "DIFFERENT", said
