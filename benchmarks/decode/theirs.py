"""transformers' own model of a family over our tensors: what benchmarks stand beside."""

from __future__ import annotations

from typing import Any

import torch

from fngraph.models.weights.naming import named


def its_model(library: Any, family: Any, params: Any, positions: int, device: Any) -> Any:
    """The model class of a family, its weights our own tensors.

    Args:
        library: the module, `transformers`.
        positions: the most that there may be.
    """
    config = params.config
    kinds = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
    kind = kinds[family.__name__.rsplit(".", 1)[-1]]
    sizes = {
        "vocab_size": config.vocab_size, "hidden_size": config.dim,
        "intermediate_size": config.mlp_dim, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied, "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }  # fmt: skip
    if kind == "Qwen3Moe":
        sizes |= {
            "num_experts": config.num_experts, "num_experts_per_tok": config.num_chosen,
            "moe_intermediate_size": config.expert_dim, "norm_topk_prob": config.normalized,
        }  # fmt: skip
    with torch.device("meta"):
        its = getattr(library, f"{kind}Config")(**sizes, attn_implementation="sdpa")
        model = getattr(library, f"{kind}ForCausalLM")(its).to(params.embed.dtype).eval()
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(its)  # not among the weights
    names, given = family.FORMAT.names, {}
    for path, x in named(params).items():
        parts = path.split(".")
        number = parts[1] if parts[0] == "layers" else ""
        general = ".".join(["layers", "*", *parts[2:]]) if number else path
        given[names[general].replace("*", number, 1)] = x
    if kind == "Qwen3Moe":  # it has an expert's gate and up as one
        for i, layer in enumerate(params.layers):
            of, place = layer.mlp.experts, f"model.layers.{i}.mlp.experts"
            given[f"{place}.gate_up_proj"] = torch.cat((of.w_gate, of.w_up), 1)
            given[f"{place}.down_proj"] = of.w_down
        given = {name: x for name, x in given.items() if "*" not in name}
    model.load_state_dict(given, strict=not config.tied, assign=True)
    model.tie_weights()
    return model
