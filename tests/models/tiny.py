"""Tiny models of transformers, one a family, wild enough that their greedy text keeps changing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 1024
PROMPT = [7, 250, 3, 3, 99, 0, 41, 180, 12, 77, 5]
Make = Callable[[], Any]


def llama() -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, max_position_embeddings=96,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 24,
        },
        tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip


def mistral() -> Any:
    """A window that a text leaves, and linear rope."""
    return transformers.MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, max_position_embeddings=96,
        sliding_window=24, eos_token_id=None, bos_token_id=None,
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    )  # fmt: skip


def qwen2() -> Any:
    """Biases, and a window in the second layer."""
    return transformers.Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=96,
        use_sliding_window=True, sliding_window=20, max_window_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip


def gemma3() -> Any:
    """Windows in two of three layers, two ropes, a soft cap, a head of its own."""
    return transformers.Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, max_position_embeddings=96,
        query_pre_attn_scalar=16, sliding_window=20, sliding_window_pattern=3,
        final_logit_softcapping=20.0, tie_word_embeddings=False,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )  # fmt: skip


def qwen3() -> Any:
    return transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, max_position_embeddings=96,
        eos_token_id=None, bos_token_id=None,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
            "original_max_position_embeddings": 24,
        },
    )  # fmt: skip


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, max_position_embeddings=96,
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
        mlp_only_layers=[1], eos_token_id=None, bos_token_id=None,
    )  # fmt: skip


def mamba2() -> Any:
    return transformers.Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8,
        state_size=8, n_groups=2, chunk_size=16, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip


def deepseek_v2() -> Any:
    return transformers.DeepseekV2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16,
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, n_routed_experts=6,
        n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1, routed_scaling_factor=1.5, max_position_embeddings=96,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 0.9,
            "mscale_all_dim": 0.7, "original_max_position_embeddings": 24, "beta_fast": 32,
            "beta_slow": 1,
        },
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip


def deepseek_v3() -> Any:
    """Compressed queries; experts out of two of three groups."""
    return transformers.DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16,
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, n_routed_experts=6,
        n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=16, n_group=3,
        topk_group=2, first_k_dense_replace=1, routed_scaling_factor=1.5,
        max_position_embeddings=96, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip


def qwen3_next() -> Any:
    return transformers.Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=96,
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24, mlp_only_layers=[2], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
        eos_token_id=None, bos_token_id=None, rms_norm_eps=1e-4,
    )  # fmt: skip


def bert() -> Any:
    """An encoder, which is not found by `GENERATIVE`: it writes no text."""
    torch.manual_seed(1)
    made = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=3, max_position_embeddings=64,
        )
    )  # fmt: skip
    for weight in made.parameters():
        weight.normal_(weight.mean().item(), 0.3)
    return made.eval()


GENERATIVE: dict[str, tuple[Make, int, float]] = {
    "llama": (llama, 35, 0.3),
    "mistral": (mistral, 0, 0.3),
    "qwen2": (qwen2, 5, 0.3),
    "gemma3_text": (gemma3, 2, 0.35),
    "qwen3": (qwen3, 3, 0.3),
    "qwen3_moe": (qwen3_moe, 0, 0.4),
    "mamba2": (mamba2, 1, 0.35),
    "deepseek_v2": (deepseek_v2, 7, 0.25),
    "deepseek_v3": (deepseek_v3, 1, 0.3),
    "qwen3_next": (qwen3_next, 1, 0.2),
}
"""Config, seed, and how wide matrices are drawn: found by looking for texts that keep changing."""


def model(name: str) -> Any:
    """The model, in float32, with every weight random."""
    if name == "bert":
        return bert()
    make, seed, width = GENERATIVE[name]
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(
        make(), attn_implementation="eager", dtype=torch.float32
    ).eval()
    for weight_name, weight in made.named_parameters():
        if weight.ndim > 1:
            weight.normal_(0, width)
        elif "A_log" in weight_name:  # sums of large decays would cost their prefill digits
            weight.uniform_(-3, 0)
        else:
            weight.add_(torch.rand_like(weight) - 0.5)
    for buffer_name, buffer in made.named_buffers():
        if buffer_name.endswith("correction_bias"):
            buffer.uniform_(-0.3, 0.3)
    return made


def save(name: str, folder: Path) -> Any:
    """The model, saved to a folder."""
    made = model(name)
    made.save_pretrained(folder)
    return made


def logits(model: Any, tokens: list[int]) -> Tensor:
    """(S, V): after each token."""
    out: Tensor = model(torch.tensor([tokens])).logits[0]
    return out


def greedy(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    """Its own greedy generation."""
    return generated(model, prompt, max_new_tokens=count, min_new_tokens=count)


def generated(model: Any, prompt: list[int], **options: Any) -> tuple[int, ...]:
    """What its own `generate` makes of a prompt, undrawn."""
    tokens = torch.tensor([prompt])
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0, **options
    )
    return tuple(out[0, len(prompt) :].tolist())
