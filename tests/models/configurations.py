"""Configurations drawn at random, a folder each, and what transformers and we make of it.

    python -m tests.models.configurations [--count 500] [--families llama qwen3 ...] [--first 0]

holds each family to transformers on so many of them; `test_configurations.py` on a few. A folder is
what transformers' `save_pretrained` writes of a random model, after which config.json is spoiled in
ways that people spoil it: keys of other versions, left out, or added.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fngraph.models import CheckpointError, bert, generate, loading
from fngraph.models.families.rope import unscaled
from tests.models.rows import llama_batch

VOCAB, LENGTH = 96, 40
Edits = dict[str, Any]
GONE = object()  # in place of a value: without the key


KINDS = ("default", "default", "llama3", "yarn", "linear", "dynamic", "longrope")


def rope(rng: random.Random, kinds: tuple[str, ...] = KINDS) -> Edits:
    """Rope parameters of a kind."""
    kind = rng.choice(kinds)
    said: Edits = {"rope_type": kind, "rope_theta": rng.choice([50.0, 500.0, 10_000.0, 1e6])}
    maybe = lambda **options: {k: v for k, v in options.items() if rng.random() < 0.4}  # noqa: E731
    if kind != "default":
        said |= {"factor": rng.choice([1.0, 2.0, 4.0, 8.0])}
    if kind in ("llama3", "yarn", "longrope"):
        said |= maybe(original_max_position_embeddings=rng.choice([16, 24, 48]))
    if kind == "llama3":
        said |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "yarn":
        said |= maybe(beta_fast=16.0, beta_slow=2.0, truncate=False, attention_factor=1.3)
        said |= rng.choice([{}, {}, {"mscale": 0.9, "mscale_all_dim": 0.7}, {"mscale": 0.8}])
    if kind == "longrope":
        said |= maybe(attention_factor=1.3)
    return said


def stretched(rng: random.Random, made: Edits) -> Edits:
    """What ropes that go by the text need beside their kind; a pair has a factor of its own."""
    said, more = dict(made["rope_parameters"]), {}
    if said.get("rope_type") == "dynamic":
        more["max_position_embeddings"] = rng.choice([20, 32, 64])
    if said.get("rope_type") == "longrope":
        width = made["hidden_size"] // made["num_attention_heads"]
        columns = made.get("qk_rope_head_dim", made.get("head_dim", width))
        pairs = int(columns * said.get("partial_rotary_factor", 1)) // 2 + (rng.random() < 0.1)
        said["short_factor"] = [rng.uniform(1, 2) for _ in range(pairs)]
        said["long_factor"] = [rng.uniform(1, 9) for _ in range(pairs)]
        more |= {"rope_parameters": said}
    return made | more


def rope_edits(rng: random.Random) -> Edits:
    """Ropes said elsewhere, or twice."""
    old = rope(rng, ("default", "llama3", "llama3", "yarn", "yarn", "yarn", "linear"))
    theta = old.pop("rope_theta")
    if rng.random() < 0.5:
        old["type"] = old.pop("rope_type")
    return rng.choice([
        {},
        {},
        {"rope_scaling": old},  # beside rope_parameters
        {"rope_scaling": old | {"rope_theta": theta}},
        {"rope_parameters": GONE, "rope_theta": theta, "rope_scaling": old},  # transformers 4
        {"rope_parameters": GONE, "rope_theta": theta, "rope_scaling": None},
        {"rope_parameters": GONE},
        {"original_max_position_embeddings": rng.choice([12, 32])},
        {"rope_scaling": old, "original_max_position_embeddings": rng.choice([12, 32])},
        {"rope_theta": theta},
        {"partial_rotary_factor": 0.5},
    ])  # fmt: skip


def two_rope_edits(rng: random.Random) -> Edits:
    """As Gemma 3 says its ropes."""
    old = rope(rng, ("linear", "linear", "yarn"))
    theta = old.pop("rope_theta")
    said = {"rope_theta": theta, "rope_local_base_freq": 50.0, "rope_parameters": GONE}
    flat = {"rope_parameters": {**old, "rope_theta": theta}}
    return rng.choice([
        {"rope_scaling": old}, {"rope_theta": theta}, said | {"rope_scaling": old}, said, flat,
        said | {"rope_scaling": None, "sliding_window_pattern": 3, "layer_types": GONE},
    ])  # fmt: skip


def heads(rng: random.Random) -> Edits:
    """Heads and their dims."""
    kv = rng.choice([1, 2, 3])
    return {
        "num_attention_heads": kv * rng.choice([1, 2, 4]), "num_key_value_heads": kv,
        "head_dim": rng.choice([4, 8, 12, 16, 20]),
    }  # fmt: skip


def decoder(rng: random.Random) -> Edits:
    """What decoders have in common."""
    return {
        "vocab_size": VOCAB, "hidden_size": rng.choice([24, 48]),
        "intermediate_size": rng.choice([20, 40]), "num_hidden_layers": rng.randint(1, 4),
        "max_position_embeddings": rng.choice([48, 64, 96]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-2]), "rope_parameters": rope(rng),
        "tie_word_embeddings": rng.random() < 0.5, "bos_token_id": None, "eos_token_id": None,
        "hidden_act": rng.choice(["silu"] * 8 + ["gelu", "relu"]),
        "attention_bias": rng.random() < 0.1,
    }  # fmt: skip


def mixture(rng: random.Random) -> Edits:
    """What those with experts have in common."""
    experts = rng.choice([3, 4, 6])
    return {
        "num_experts_per_tok": rng.randint(1, experts), "moe_intermediate_size": 12,
        "num_experts": experts, "norm_topk_prob": rng.random() < 0.5,
    }  # fmt: skip


def qwen_mixture(rng: random.Random, layers: int) -> Edits:
    """Which layers have experts, as Qwen says it."""
    plain = rng.choice([[], [], [0], [layers - 1], list(range(layers))])
    return mixture(rng) | {
        "decoder_sparse_step": rng.choice([1, 1, 2, 3]),
        "mlp_only_layers": plain,
    }


def llama(rng: random.Random) -> Edits:
    made = decoder(rng) | heads(rng) | {"mlp_bias": rng.random() < 0.1}
    made["hidden_size"] = made["num_attention_heads"] * rng.choice([4, 8])
    return made


def qwen3(rng: random.Random) -> Edits:
    made = decoder(rng) | heads(rng)
    windows = {"sliding_window": 8, "max_window_layers": rng.randint(0, 2)}
    used = windows | {"use_sliding_window": True}
    kinds = ["full_attention", "sliding_attention"]
    layers = [rng.choice(kinds) for _ in range(made["num_hidden_layers"])]
    return made | rng.choice([{}, {}, windows, used, used | {"layer_types": layers}])


def mistral(rng: random.Random) -> Edits:
    made = llama(rng) | {"sliding_window": rng.choice([None, 5, 8, 64])}
    made.pop("mlp_bias")
    return made


def qwen2(rng: random.Random) -> Edits:
    made = qwen3(rng)
    made["hidden_size"] = made["num_attention_heads"] * rng.choice([4, 8])
    return made


def gemma3(rng: random.Random) -> Edits:
    made = decoder(rng) | heads(rng)
    made["hidden_size"] = made["num_attention_heads"] * rng.choice([4, 8])
    kinds = ["full_attention", "sliding_attention"]
    ropes = {kind: rope(rng, ("default", "linear", "llama3", "yarn")) for kind in kinds}
    for one in ropes.values() if rng.random() < 0.9 else ():
        one.pop("truncate", None)  # of ropes by kind, transformers does not look at it
    made.pop("hidden_act")
    layers = [rng.choice(kinds) for _ in range(made["num_hidden_layers"])]
    made |= rng.choice([{}, {"layer_types": layers}, {"sliding_window_pattern": 2}])
    act = rng.choice(["gelu_pytorch_tanh"] * 8 + ["gelu", "silu"])
    return made | {
        "hidden_activation": act, "sliding_window": rng.choice([5, 8, 64]),
        "rope_parameters": rng.choice([ropes, ropes, None]),
        "query_pre_attn_scalar": rng.choice([8, 16, 256]),
        "final_logit_softcapping": rng.choice([None, None, 2.0]),
    }  # fmt: skip


def qwen3_moe(rng: random.Random) -> Edits:
    made = qwen3(rng)
    for key in ("max_window_layers", "layer_types"):
        made.pop(key, None)
    return made | qwen_mixture(rng, made["num_hidden_layers"])


def qwen3_next(rng: random.Random) -> Edits:
    made = decoder(rng) | heads(rng)
    layers, keys = made["num_hidden_layers"], rng.choice([1, 2])
    kinds = [rng.choice(["full_attention", "linear_attention"]) for _ in range(layers)]
    made["rope_parameters"] |= rng.choice([{}, {}, {"partial_rotary_factor": 0.5}])
    made |= {
        "linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([4, 8]), "linear_value_head_dim": rng.choice([4, 12]),
        "linear_conv_kernel_dim": rng.choice([2, 4]), "shared_expert_intermediate_size": 16,
        "head_dim": rng.choice([8, 16, 32]),
    }  # fmt: skip
    ways = [{}, {"layer_types": kinds}, {"full_attention_interval": rng.choice([1, 2, 3])}]
    return made | qwen_mixture(rng, layers) | rng.choice(ways)


def deepseek_v2(rng: random.Random) -> Edits:
    made, count = decoder(rng) | mixture(rng), rng.choice([1, 2, 4])
    made |= {"n_routed_experts": made.pop("num_experts"), "num_attention_heads": count}
    return made | {
        "num_key_value_heads": count, "q_lora_rank": rng.choice([None, 8, 12]),
        "kv_lora_rank": rng.choice([8, 16]), "qk_nope_head_dim": rng.choice([8, 12]),
        "qk_rope_head_dim": rng.choice([4, 8]), "v_head_dim": rng.choice([6, 10]),
        "n_shared_experts": rng.choice([1, 2]), "norm_topk_prob": rng.random() < 0.1,
        "first_k_dense_replace": rng.randint(0, made["num_hidden_layers"]),
        "routed_scaling_factor": rng.choice([1.0, 1.5]), "mlp_bias": rng.random() < 0.1,
        **groups(rng, made["n_routed_experts"]),
    }  # fmt: skip


def groups(rng: random.Random, count: int) -> Edits:
    """Groups that experts are chosen from."""
    parts = rng.choice([n for n in (1, 2, 3) if count % n == 0])
    method = rng.choice(["greedy", "group_limited_greedy", "group_limited_greedy"])
    return {"n_group": parts, "topk_group": rng.randint(1, parts), "topk_method": method}


def deepseek_v3(rng: random.Random) -> Edits:
    made = deepseek_v2(rng) | {"norm_topk_prob": rng.random() < 0.7}
    for key in ("topk_method", "mlp_bias"):
        made.pop(key)
    return made | {"rope_interleave": rng.random() < 0.9}


def mamba2(rng: random.Random) -> Edits:
    groups, expand = rng.choice([1, 2]), rng.choice([1, 2])
    count, dim = groups * rng.choice([1, 2, 4]), rng.choice([4, 8, 12])
    limits = [(0.0, float("inf")), (0.0, float("inf")), (0.01, 0.2), (0.0, 0.5), (0.3, 9.0)]
    return {
        "vocab_size": VOCAB, "hidden_size": count * dim * 2 // expand,
        "num_heads": count * 2, "head_dim": dim, "expand": expand, "n_groups": groups,
        "state_size": rng.choice([4, 8]), "conv_kernel": rng.choice([2, 4]), "chunk_size": 8,
        "num_hidden_layers": rng.randint(1, 3), "time_step_limit": rng.choice(limits),
        "layer_norm_epsilon": rng.choice([1e-5, 1e-2]), "residual_in_fp32": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5, "bos_token_id": None, "eos_token_id": None,
        "use_bias": rng.random() < 0.1, "use_conv_bias": rng.random() < 0.9,
        "hidden_act": rng.choice(["silu"] * 8 + ["gelu", "relu"]),
    }  # fmt: skip


def bert_(rng: random.Random) -> Edits:
    count = rng.choice([1, 2, 3])
    return {
        "vocab_size": VOCAB, "num_attention_heads": count,
        "hidden_size": count * rng.choice([4, 8]), "intermediate_size": rng.choice([20, 40]),
        "num_hidden_layers": rng.randint(1, 3), "max_position_embeddings": rng.choice([48, 64]),
        "type_vocab_size": rng.choice([1, 2, 3]), "layer_norm_eps": rng.choice([1e-12, 1e-2]),
        "hidden_act": rng.choice(["gelu"] * 8 + ["gelu_new", "relu", "silu"]),
        "is_decoder": rng.random() < 0.1, "pad_token_id": rng.choice([0, 3]),
    }  # fmt: skip


FAMILIES = {
    "llama": llama, "mistral": mistral, "qwen2": qwen2, "gemma3_text": gemma3,
    "qwen3": qwen3, "qwen3_moe": qwen3_moe, "qwen3_next": qwen3_next,
    "deepseek_v2": deepseek_v2, "deepseek_v3": deepseek_v3, "mamba2": mamba2, "bert": bert_,
}  # fmt: skip
LEFT_OUT = (
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "layer_types", "decoder_sparse_step",
    "mlp_only_layers", "attention_bias", "hidden_act", "norm_topk_prob", "rms_norm_eps", "expand",
    "residual_in_fp32", "time_step_limit", "partial_rotary_factor", "q_lora_rank", "use_conv_bias",
    "first_k_dense_replace", "routed_scaling_factor", "type_vocab_size", "layer_norm_eps",
    "max_position_embeddings", "architectures", "dtype",
)  # fmt: skip
ADDED: tuple[Edits, ...] = (
    {"torch_dtype": "bfloat16"}, {"pretraining_tp": 2}, {"use_cache": False}, {"unheard_of": 0.5},
    {"attn_logit_softcapping": 30.0}, {"sliding_window": None}, {"quantization_config": {"b": 4}},
    {"_name_or_path": "/some/where"}, {"head_dim": None}, {"num_key_value_heads": None},
)  # fmt: skip


def draw(name: str, seed: int) -> tuple[Edits, Edits]:
    """What the model is made with, and what is changed in config.json after that."""
    rng = random.Random(f"{name} {seed}")
    made, edits = FAMILIES[name](rng), {}
    if "rope_parameters" in made and rng.random() < 0.5 and name == "gemma3_text":
        edits |= two_rope_edits(rng)
    if "rope_type" in (made.get("rope_parameters") or {}):
        made = stretched(rng, made)
        edits |= rope_edits(rng) if rng.random() < 0.5 else {}
    if rng.random() < 0.3:
        edits |= dict.fromkeys(rng.sample(LEFT_OUT, 2), GONE)
    if rng.random() < 0.2:
        edits |= rng.choice(ADDED)
    return made, edits


@torch.no_grad()
def write(name: str, made: Edits, folder: Path, seed: int = 0) -> None:
    """A model with every weight random."""
    config = transformers.AutoConfig.for_model(name, **made)
    auto = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32)
    for path, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.normal_(0, 0.25)
        elif "A_log" in path:
            weight.uniform_(-3, 0)
        else:
            weight.add_(torch.rand_like(weight) - 0.5)
    for path, bias in model.named_buffers():
        if path.endswith("correction_bias"):
            bias.normal_(0, 0.3)
    model.save_pretrained(folder)


def edit(folder: Path, edits: Edits) -> None:
    """Other keys in config.json."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | edits
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not GONE}))


def text(seed: int) -> list[int]:
    """Tokens that vary, or attention would be over rows that are all alike."""
    return random.Random(seed).choices(range(VOCAB), k=LENGTH)


@torch.no_grad()
def theirs(folder: Path, tokens: list[int]) -> Tensor:
    """(S, V): transformers' logits; of BERT (1, E), its embedding.

    Raises:
        Exception: whatever transformers does of a folder that it cannot read whole.
    """
    bert_like = json.loads((folder / "config.json").read_text())["model_type"] == "bert"
    auto = transformers.AutoModel if bert_like else transformers.AutoModelForCausalLM
    model, found = auto.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    missing = [n for n in found["missing_keys"] if not n.startswith("pooler")]
    assert not missing and not found["mismatched_keys"], found
    model.eval()
    if bert_like:
        out = model(torch.tensor([tokens]))
        return torch.nn.functional.normalize(out.last_hidden_state.mean(1), dim=-1)
    rows, kept = [], {}
    for part in chunks(folder, tokens):
        out = model(torch.tensor([part]), use_cache=len(part) < len(tokens), **kept)
        kept = {"past_key_values": out.past_key_values} if len(part) < len(tokens) else {}
        rows.append(out.logits[0])
    return torch.cat(rows)


def chunks(folder: Path, tokens: list[int]) -> list[list[int]]:
    """All at once; where a rope goes by the text, what it leaves as it is, then token by token."""
    config: Any = loading.family(folder).read_config(loading.read_json(folder))
    first = unscaled(getattr(config, "rope_scaling", None))
    if first is None or first >= len(tokens):
        return [tokens]
    return [tokens[:first], *([token] for token in tokens[first:])]


@torch.no_grad()
def ours(folder: Path, tokens: list[int]) -> Tensor:
    """The same by us."""
    family = loading.family(folder)
    config, params = family.load(folder)
    cache = family.init_cache(config, 4, block_size=16, num_slots=1)
    if family is bert:
        batch = llama_batch([(tokens, range(4), 0, len(tokens))], 4, 16)
        batch = generate.select(bert.Batch, vars(batch), batch.spec)
        return family.forward(params, cache, batch)[0]
    rows, computed = [], 0
    for part in chunks(folder, tokens):
        end = computed + len(part)
        batch = generate.alone(tokens[:end], computed, 4, "cpu", family.Batch)
        batch = dataclasses.replace(batch, logits_indices=torch.arange(len(part)))
        logits, cache = family.forward(params, cache, batch)
        rows.append(logits)
        computed = end
    return torch.cat(rows)


def verdict(folder: Path, tokens: list[int]) -> tuple[str, str]:
    """("equal" | "refused" | "theirs fails" | "DIFFERENT", and what there is to say)."""
    try:
        got = ours(folder, tokens)
    except CheckpointError as error:
        return "refused", str(error)
    try:
        want = theirs(folder, tokens)
    except Exception as error:
        return "theirs fails", f"{type(error).__name__}: {error}"
    worst, scale = float((got - want).abs().max()), float(want.std())
    said = f"{worst:.2g} off, of {scale:.2g}"
    return ("equal" if worst <= 1e-3 * max(scale, 0.1) else "DIFFERENT"), said


def hold(name: str, seed: int) -> tuple[str, str]:
    """The verdict on one draw; "no model" where transformers cannot make it."""
    made, edits = draw(name, seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            write(name, made, folder, seed)
        except Exception as error:
            return "no model", f"{type(error).__name__}: {error}"
        edit(folder, edits)
        kind, said = verdict(folder, text(seed))
    return kind, f"{said}\n    {made}\n    {edits}"


def main(argv: list[str] | None = None) -> int:
    """The command; 1 where anything differs, or where none is equal."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.configurations")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    flags = parser.parse_args(argv)
    quiet()
    torch.set_num_threads(1)
    differ = 0
    for name in flags.families:
        counts: Counter[str] = Counter()
        for seed in range(flags.first, flags.first + flags.count):
            try:
                kind, said = hold(name, seed)
            except Exception:
                kind, said = "RAISED", traceback.format_exc()
            counts[kind] += 1
            if kind in ("DIFFERENT", "RAISED", "theirs fails"):
                print(f"{name} {seed}: {kind}: {said}", flush=True)
        differ += counts["DIFFERENT"] + counts["RAISED"] + (not counts["equal"])
        print(name, dict(counts), flush=True)
    return int(differ > 0)


def quiet() -> None:
    """transformers says a lot about configurations like these."""
    transformers.utils.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()


if __name__ == "__main__":
    raise SystemExit(main())
