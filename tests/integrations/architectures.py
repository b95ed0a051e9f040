"""Tiny random models of transformers, wild enough that their greedy text keeps changing."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 211
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
WINDOW = 24  # shorter than the texts
SLIDING = {"sliding_window": WINDOW}
ALTERNATING = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# name in transformers -> options beyond SIZES; tried in every mode
EVERY_MODE: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": SLIDING,
    "Gemma2": {**ALTERNATING, "head_dim": 8, "attn_logit_softcapping": 2.0},
    "Gemma3Text": {**ALTERNATING, "head_dim": 8},
    "Phi3": SLIDING,
    "Olmo2": {},
    "GPTNeoX": {},
    "Granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "Qwen3Moe": {**MOE, "head_dim": 8},
}
# tried in one mode
FURTHER: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, **SLIDING},
    "Qwen2Moe": {**MOE, **ALTERNATING, "use_sliding_window": True},
    "GPT2": {"n_head": 2},
    "OPT": {},
    "Cohere2": ALTERNATING,
    "SmolLM3": {},
    "Starcoder2": SLIDING,
    "DeepseekV3": {
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
}

GAIN = {"GPT2": 3.0, "Starcoder2": 3.0}  # of their matrices, where 1.5 leaves the text monotonous


def make(name: str, *, device: str = "cpu", **options: Any) -> Any:
    """A causal LM of that architecture, in eval mode, the same on every device."""
    import transformers

    options = SIZES | (EVERY_MODE | FURTHER).get(name, {}) | options
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return widen(model, GAIN.get(name, 1.5)).to(device)


@torch.no_grad()
def widen(model: Any, gain: float) -> Any:
    """Matrices with that gain, small biases, norms between 0.5 and 1.5."""
    for path, weight in model.named_parameters():
        if path.endswith("bias"):
            weight.normal_(std=0.1)
        elif weight.ndim > 1:
            weight.normal_(std=gain * weight.shape[-1] ** -0.5)
        else:
            weight.uniform_(0.5, 1.5)
    return model
