"""Models of transformers as they are, held to transformers' own `generate`, in every mode.

The judge is the model itself with its `eager` attention: one call of `generate` over all prompts,
padded on the left, and one pass over each finished text for the logits. (Not `sdpa`, which is
transformers' default and leaves out Gemma 2's soft cap.)
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fngraph as fg
from fngraph.errors import (
    AddressError,
    BackendError,
    FnGraphError,
    HostSyncError,
    ModelError,
    OperatorError,
    SpecError,
)
from fngraph.ops import Backend, primitive

pytest.importorskip("transformers")

from fngraph.integrations.transformers import GraphifiedModel, graphify_model
from fngraph.integrations.transformers.attention import Attending, Mask, attend, window_of
from fngraph.integrations.transformers.suitable import NATIVE
from fngraph.models import generate, loading
from tests.integrations.architectures import EVERY_MODE, FURTHER, VOCAB, WINDOW, make
from tests.models.conftest import DEVICES
from tests.traced_once import Kept, traced_once

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = (1, 2, 4, 8, 12)
LIMITS = fg.Limits(12, 6, B=6)
BLOCK_SIZE = 16
NEW = 48
DECODE_STEPS, MIXED_STEPS = 47, 15  # of every run: nothing ends a text early
MODES = {  # what a mode promises, (decode batches, mixed batches)
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL_DECODE_ONLY": ("FULL", "NONE"),
    "FULL": ("FULL", "FULL"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}


def prompts() -> list[list[int]]:
    """Six prompts of 1 to 45 tokens."""
    generator = torch.Generator().manual_seed(5)
    lengths = (45, 1, 7, 19, 33, 28)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


class Wanted(NamedTuple):
    """A model and what it says itself: new tokens by prompt, logits after each token."""

    model: Any
    tokens: list[list[int]]
    logits_SV: list[Tensor]


@torch.no_grad()
def want(model: Any) -> Wanted:
    """Everything that the model says with its own attention."""
    device, before = model.device, model.config._attn_implementation
    model.set_attn_implementation("eager")
    longest = max(map(len, prompts()))
    padding = [longest - len(p) for p in prompts()]
    ids = torch.tensor([[0] * n + p for n, p in zip(padding, prompts())], device=device)
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=device)
    texts = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, use_cache=True
    )
    tokens = texts[:, longest:].tolist()
    whole = [torch.tensor([p + t], device=device) for p, t in zip(prompts(), tokens)]
    logits = [model(text).logits[0] for text in whole]
    model.set_attn_implementation(before)
    return Wanted(model, tokens, logits)


@pytest.fixture(scope="module")
def wanted():
    """`Wanted` by architecture and device, computed once."""
    kept: dict[tuple[str, str], Wanted] = {}

    def of(name: str, device: str) -> Wanted:
        if (name, device) not in kept:
            kept[name, device] = want(make(name, device=device))
        return kept[name, device]

    return of


@pytest.fixture(scope="module")
def traces() -> Kept:
    """Of each case, for all modes."""
    return {}


def graphify(model: Any, **options: Any) -> GraphifiedModel:
    """The model under test, its cache full of NaN, so that reading unwritten slots shows."""
    defaults: dict[str, Any] = {"sizes": SIZES, "block_size": BLOCK_SIZE, "lazy": True}
    if model.device.type == "cpu":
        defaults["recorder"] = "tape"
    fast = graphify_model(model, LIMITS, **defaults | options)
    for kv in fast.cache:
        for x in kv:
            x.fill_(torch.nan)
    return fast


def hold(fast: GraphifiedModel, right: Wanted, modes: str, atol: float = 1e-4) -> Counter[str]:
    """Serve the prompts; tokens, logits and the mode of each step must be right."""
    should: Counter[str] = Counter()
    got: list[list[int]] = [[] for _ in prompts()]
    top = fast.step.table.top
    for served in fast.serve(prompts(), NEW):
        ends = [(job.id, job.computed + new) for job, new, _ in served.rows]
        logits = [right.logits_SV[id][end - 1] for id, end in ends]
        torch.testing.assert_close(served.logits_RV, torch.stack(logits), atol=atol, rtol=0)
        for event in served.events:
            got[event.id] += event.tokens
        spec = served.batch.spec
        decode, mixed = MODES[modes]
        name = decode if spec.query_len == 1 else mixed
        should["NONE" if spec.num_tokens > top else name] += 1
    assert got == right.tokens and len(served.state.pool.free) == len(fast.cache[0][0])
    steps = fast.step.stats.steps
    ran = {
        name: round(fast.step.stats.share(name) * steps) for name in ("FULL", "PIECEWISE", "NONE")
    }
    assert steps == should.total() and ran == {name: should[name] for name in ran}
    return should


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device, recorder", DEVICES)
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("name", EVERY_MODE)
def test_tokens_logits_and_shares(name, modes, device, recorder, wanted, traces):
    right = wanted(name, device)
    with traced_once(traces, (name, device)):
        fast = graphify(right.model, modes=modes, recorder=recorder, check=modes == "NONE")
    assert fast.support.modes is fg.Mode[modes] and not fast.support.notes
    ran = hold(fast, right, modes)
    assert len(set().union(*right.tokens)) >= 50
    decode, mixed = MODES[modes]
    assert ran == Counter({decode: DECODE_STEPS}) + Counter({mixed: MIXED_STEPS})


@pytest.mark.sampled(0)
@pytest.mark.parametrize("device, recorder", DEVICES)
@pytest.mark.parametrize("name", FURTHER)
def test_further_architectures(name, device, recorder, wanted):
    right = wanted(name, device)
    hold(graphify(right.model, recorder=recorder), right, "FULL_AND_PIECEWISE")
    assert len(set().union(*right.tokens)) >= 50


def test_steps_beyond_the_ladder_run_eagerly(wanted):
    right = wanted("Mistral", "cpu")
    ran = hold(graphify(right.model, sizes=(1, 2, 4, 8)), right, "FULL_AND_PIECEWISE")
    assert ran["FULL"] == DECODE_STEPS and ran["NONE"] >= 5


# --- the value ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Any:
    """A Llama."""
    return make("Llama")


@pytest.fixture(scope="module")
def fast(llama) -> GraphifiedModel:
    """The same with graphs."""
    return graphify(llama)


def test_generate_gives_what_generate_gives(wanted):
    right = wanted("Llama", "cpu")
    fast = graphify(right.model)
    assert fast.generate(prompts(), NEW) == right.tokens
    assert fast.generate(prompts()[::-1], NEW) == right.tokens[::-1]  # over used blocks
    assert fast.generate([], NEW) == []


@pytest.mark.sampled(0)
def test_generate_ends_texts_where_the_model_does(traces):
    model = make("Llama")
    with traced_once(traces, "Llama"):
        plain = graphify(model).generate(prompts(), NEW)
    stops = [plain[0][10], plain[1][20]]
    model.generation_config.eos_token_id = stops
    want = [next((t[: i + 1] for i, x in enumerate(t) if x in stops), t) for t in plain]
    with traced_once(traces, "Llama"):
        fast = graphify(model)
    assert fast.stop == set(stops) and len(want[0]) <= 11 and len(want[1]) <= 21
    assert fast.generate(prompts(), NEW) == want
    assert fast.generate(prompts(), NEW, stop=()) == plain


ASKED: dict[str, dict[str, Any]] = {  # of a generation config
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[50], [3, 51]]},
    "suppress_tokens": {"suppress_tokens": list(range(60, 180))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(1, 100))},
    "sequence_bias": {"sequence_bias": [[[7], 4.0], [[9, 8], -9.0]]},
    "ends that come late": {"min_new_tokens": 20, "eos_token_id": list(range(1, 150))},
    "a length at least": {"min_length": 40, "eos_token_id": list(range(1, 150))},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [1, 2]},
    "nothing": {"num_beams": 1, "do_sample": False, "repetition_penalty": 1.0, "top_k": 50},
}


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("what", ASKED)
def test_generate_does_what_the_generation_config_asks(what: str, wanted, traces):
    """As transformers' own, one prompt at a time."""
    import transformers

    model = make("Llama")
    with traced_once(traces, "Llama, asked"):
        fast = graphify(model)
    plain = fast.generate(prompts()[1:5], 24)
    object.__setattr__(fast, "generation", transformers.GenerationConfig(**ASKED[what]))
    ends = set(ASKED[what].get("eos_token_id", ()))
    with torch.no_grad():
        want = [
            model.generate(
                torch.tensor([p]), generation_config=fast.generation, max_new_tokens=24,
                pad_token_id=0,
            )[0, len(p) :].tolist()
            for p in prompts()[1:5]
        ]  # fmt: skip
    assert fast.generate(prompts()[1:5], 24, stop=ends) == want
    assert (want == plain) == (what == "nothing")


@pytest.mark.parametrize(
    "name, value", [("guidance_scale", 1.5), ("num_beams", 3), ("forced_eos_token_id", 0),
                    ("exponential_decay_length_penalty", (3, 1.1)), ("of_tomorrow", 7)],
)  # fmt: skip
def test_what_generate_does_not_have_is_refused_by_name(name, value, fast):
    import transformers

    asked = dataclasses.replace(fast, generation=transformers.GenerationConfig(**{name: value}))
    with pytest.raises(ModelError, match=rf"{name}=.* model\.generation_config\.{name} = None"):
        asked.generate(prompts()[:1], 3)


BAD_PROMPTS: dict[str, tuple[list[Any], str]] = {
    "negative": ([3, -1], r"prompt 1: prompt\[1\]=-1 is no token"),
    "a float": ([1.9], r"prompt 1: prompt\[0\]=1\.9 is a float"),
    "beyond the vocabulary": ([3, VOCAB], f"prompt 1 has token {VOCAB}, .* below {VOCAB}"),
}


@pytest.mark.parametrize("what", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_its_number(what: str, fast):
    bad, says = BAD_PROMPTS[what]
    with pytest.raises(SpecError, match=says):
        fast.generate([[1], bad], 3)
    with pytest.raises(TypeError, match=r"max_new_tokens=2\.5 is a float"):
        fast.generate([[1]], 2.5)
    assert fast.generate([[1]], 3)


def test_positions_beyond_the_model_are_refused(fast):
    short = dataclasses.replace(fast, max_len=20)
    assert short.generate([[1] * 18], 3)  # the last token has no position
    with pytest.raises(SpecError, match=r"prompt 0 .* beyond the model's 20 positions"):
        short.generate([[1] * 18], 4)


def test_logits_that_are_no_numbers_fail_their_prompt_alone(traces):
    model = make("Llama")
    with traced_once(traces, "Llama, asked"):
        fast = graphify(model)
    want = fast.generate([[5, 6], [7, 8]], 4)
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = torch.nan
    events = [e for step in fast.serve([[5, 6], [3, 99], [7, 8]], 4) for e in step.events]
    texts = [[t for e in events if e.id == i for t in e.tokens] for i in range(3)]
    assert texts == [want[0], [], want[1]] and [e.id for e in events if e.failed] == [1]
    with pytest.raises(ModelError, match="prompt 1 failed: no token is the likeliest"):
        fast.generate([[5, 6], [3, 99], [7, 8]], 4)


def test_every_key_is_captured_ahead_unless_lazy(llama):
    fast = graphify(llama, lazy=False, sizes=(1, 2))
    assert len(fast.step) == len(list(fast.step.table)) == 4
    assert len(graphify(llama, sizes=(1, 2)).step) == 0


def test_weights_are_held_where_they_are(llama, fast):
    own = dict(llama.named_parameters())
    assert all(fast.params[n].data_ptr() == p.data_ptr() for n, p in own.items())


def test_the_model_stays_as_it_is(wanted):
    model = wanted("Qwen3Moe", "cpu").model
    before = model.config.to_dict(), model.config._attn_implementation
    experts = model.get_experts_implementation()
    weights = {n: p.clone() for n, p in model.named_parameters()}
    graphify(model).generate(prompts()[1:2], 3)
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert model.get_experts_implementation() == experts
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


@torch.no_grad()
def test_forward_is_a_function_of_its_arguments(fast):
    """Called bare, with the cache and the weights that it is given."""
    *_, last = fast.serve(prompts()[:1], 4)
    twice = [
        fast.forward(fast.params, tuple((k.clone(), v.clone()) for k, v in fast.cache), last.batch)
        for _ in range(2)
    ]
    assert torch.equal(twice[0][0], twice[1][0])
    torch.testing.assert_close(twice[0][0], last.logits_RV, atol=1e-5, rtol=0)
    zeros = {n: torch.zeros_like(p) for n, p in fast.params.items()}
    assert fast.forward(zeros, fast.cache, last.batch)[0].eq(0).all()


def test_prompts_that_could_never_run_are_refused(llama, fast):
    with pytest.raises(SpecError, match=r"takes 7 blocks of 16, and 6 are there.*B=7"):
        fast.generate([[1] * 60], NEW)
    with pytest.raises(SpecError, match="prompt 1 has 0 tokens"):
        fast.generate([[1], []], NEW)
    with pytest.raises(SpecError, match="prompt 0 has 1 tokens and asks for 0 more"):
        fast.generate([[1]], 0)
    with pytest.raises(SpecError, match=r"Limits\(..., B=...\)"):
        graphify_model(llama, fg.Limits(16, 4))


# --- support --------------------------------------------------------------------------------------


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch):
    """Adds a backend of the reference's own `run` to the primitive, for the test."""
    attend = primitive("attention")

    def add(name: str, level: fg.Support, refuses: str = "") -> None:
        def supports(config: Any) -> str | None:
            return f"it has no {refuses}" if refuses and getattr(config, refuses) else None

        new = Backend(name, attend.backend("reference").run, lambda config: level, supports)
        monkeypatch.setitem(attend.backends, name, new)

    return add


def test_support_says_what_each_layer_asks_for_and_who_refuses(backends, wanted):
    backends("plain", fg.Support.ALWAYS, refuses="window")
    fast = graphify(wanted("Gemma2", "cpu").model)
    first, second = fast.support.rows
    assert first.layer == "model.layers.0.self_attn" and second.layer.endswith("1.self_attn")
    no_cap = "not sdpa: scaled_dot_product_attention has no softcap"
    refused = f"{no_cap}; not plain: it has no window"
    assert first.reason == f"window {WINDOW}; softcap 2.0; {refused}"
    assert second.reason == f"softcap 2.0; {no_cap}"
    assert (first.backend, first.level) == ("reference", fg.Support.ALWAYS)
    lines = repr(fast.support).splitlines()
    assert lines[0].split("|")[1:5] == [s for s in lines[0].split("|")[1:5] if s.strip()]
    assert "model.layers.0.self_attn" in lines[2] and lines[-1] == "FULL_AND_PIECEWISE"


def test_a_backend_that_one_layer_cannot_have_is_refused(backends, wanted):
    backends("plain", fg.Support.ALWAYS, refuses="window")
    with pytest.raises(BackendError, match=r"'plain' cannot run attention .*it has no window"):
        graphify(wanted("Gemma2", "cpu").model, backends={"attention": "plain"})


def test_modes_come_down_to_what_the_backend_can_capture(backends, wanted):
    backends("decode", fg.Support.UNIFORM_SINGLE_TOKEN_DECODE)
    right = wanted("Llama", "cpu")
    fast = graphify(right.model, modes="FULL", backends={"attention": "decode"})
    assert fast.support.modes is fg.Mode.FULL_AND_PIECEWISE and "decode" in fast.support.notes[0]
    assert {row.level for row in fast.support.rows} == {fg.Support.UNIFORM_SINGLE_TOKEN_DECODE}
    hold(fast, right, "FULL_AND_PIECEWISE")


# --- what cannot work says so, before any capture -------------------------------------------------

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
    "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent layers": ("Jamba", {}, "layers of another kind .*linear_attention"),
    "linear attention": ("Qwen3Next", {}, "layers of another kind .*linear_attention"),
    "a recurrent model": ("Mamba", {}, r"is recurrent: .*fg\.from_module.*use_cache=False"),
    "one that is a family": (
        "Mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1},
        r"is recurrent: .* fngraph\.models\.mamba2 runs it: .* mamba2\.load",
    ),
    "Mamba beside attention": ("FalconH1", {}, "layers of another kind .*hybrid"),
    "chunked attention": ("Llama4Text", {}, "layers of another kind .*chunked_attention"),
    "alibi": ("Bloom", {}, r"takes no position_ids.* ALiBi.*fg\.from_module"),
    "attention of its own": ("GPTJ", {}, "does not go through .*AttentionInterface"),
    "keyword arguments dropped": ("StableLm", {}, "not given the keyword arguments"),
    "attention sinks": ("GptOss", {}, "attention with s_aux"),
    "both directions": ("Gemma3Text", {"use_bidirectional_attention": True}, "both directions"),
    "a mask used as a tensor": ("Doge", {}, r"of the attention mask: it reads its \.dtype.*Doge"),
    "values wider than queries": (
        "DeepseekV3", {"v_head_dim": 32}, "have 32 columns a head, its queries and keys 24",
    ),
    "a table of positions": (
        "GPT2", {"max_position_embeddings": 40}, r"\.wpe is a table of 40 positions.* 96 .*B=3\)",
    ),
    "a table that is a little longer": (
        "OPT", {"max_position_embeddings": 40}, r"embed_positions is a table of 40 .*B=3\)",
    ),
    "dynamic RoPE": (
        "Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64},
        r"rotary_emb rescales \(rope_type='dynamic'\).* more than 64 tokens.* allow 96 tokens",
    ),
    "long RoPE": (
        "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        r"rotary_emb rescales \(rope_type='longrope'\).* more than 64 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_become_a_step_says_why(what: str):
    name, options, message = REFUSED[what]
    with pytest.raises(ModelError, match=message):
        graphify(make(name, **options))


@pytest.mark.parametrize("what", ["Qwen3Next", "StableLm", "GptOss", "Doge", "Qwen3Moe"])
def test_a_model_that_is_refused_stays_as_it_is(what: str):
    """Whenever it is: before the trace, in it, by a backend, by the check."""
    model = make(what)
    before = copy.deepcopy(model.config.to_dict()), model.config._attn_implementation
    experts = model.get_experts_implementation()
    options: dict[str, Any] = {}
    if what == "Qwen3Moe":  # that may become a step, with other experts
        options = {"experts": "grouped_mm"}
    with pytest.raises(FnGraphError):
        graphify(model, **options)
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert model.get_experts_implementation() == experts
    model(torch.tensor([[1, 2, 3]]), use_cache=False)


def forgetful(forward: Any, *, only: bool) -> Any:
    """The forward with logits of NaN: all of them, or those of the second request alone."""

    def broken(params: Any, cache: Any, batch: Any) -> Any:
        logits_RV, cache = forward(params, cache, batch)
        chosen_R = batch.seq_lens >= (6 if only else 0)  # the second prompt has 6 tokens
        return torch.where(chosen_R[:, None], torch.nan, logits_RV), cache

    return broken


@pytest.mark.parametrize("only", [False, True], ids=["all", "one"])
def test_a_step_whose_logits_are_nan_does_not_pass_the_check(only, llama):
    from fngraph.integrations.transformers.fixed import Fixed
    from fngraph.integrations.transformers.forward import attention_layers, params_of, pure_forward
    from fngraph.integrations.transformers.trial import check_step

    fixed, params = Fixed(None, {}), params_of(llama, {})
    layers = attention_layers(llama, params, LIMITS, 96, fixed)
    forward = pure_forward(llama, 96, fixed)
    check_step(llama, forward, params, layers)
    with pytest.raises(ModelError, match=r"beside another one than alone \(relative error nan"):
        check_step(llama, forgetful(forward, only=only), params, layers)


def test_a_model_whose_own_logits_are_not_finite_is_refused():
    model = make("Llama")
    with torch.no_grad():
        model.model.norm.weight[3] = torch.inf
    with pytest.raises(ModelError, match="not finite for a small request by itself"):
        graphify(model)


@pytest.mark.parametrize("name, options", [("Qwen3Moe", {"experts": "eager"}), ("JetMoe", {})])
def test_experts_that_wait_for_the_routing_name_the_line(name, options):
    """Qwen3-MoE's own loop over the experts that were hit; JetMoE has nothing else."""
    with pytest.raises(HostSyncError, match=rf"modeling_{name.lower()[:3]}\w+\.py:\d+"):
        graphify(make(name), **options)


def test_experts_that_the_device_cannot_run_are_refused(wanted):
    """By the model's name; or by the line, where only torch's rule for fakes refuses it."""
    with pytest.raises(
        (ModelError, OperatorError), match=r"(cannot be traced|cannot trace).*BF(loat)?16"
    ):
        graphify(wanted("Qwen3Moe", "cpu").model, experts="grouped_mm")


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ModelError, match=r"training mode.*model\.eval\(\)"):
        graphify(make("Llama").train())


def t5() -> Any:
    import transformers

    sizes = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def bert() -> Any:
    import transformers

    sizes = {
        "intermediate_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return transformers.BertModel(transformers.BertConfig(vocab_size=9, **sizes))


def paligemma() -> Any:
    import transformers

    text = {
        "model_type": "gemma", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4, "patch_size": 2,
    }  # fmt: skip
    config = transformers.PaliGemmaConfig(vision_config=vision, text_config=text, projection_dim=8)
    return transformers.PaliGemmaForConditionalGeneration(config)


NO_LM: dict[str, tuple[Callable[[], Any], str]] = {
    "another module": (
        lambda: torch.nn.Linear(2, 2),
        r"Linear is no causal LM of transformers\. Load one: .*fg\.from_module",
    ),
    "a name": (lambda: "gpt2", r"str is no causal LM .* Load one: AutoModel\w+\.from_pretrained"),
    "with an encoder": (t5, r"T5\w+ is an encoder and a decoder.*from_module.*use_cache=False"),
    "an encoder": (bert, r"BertModel is no causal LM, .* no head .* encoder, fg\.from_module"),
    "without its head": (
        lambda: make("Llama").model, r"LlamaModel is no causal LM, .* no head .*AutoModelForCausal",
    ),
    "pictures in both directions": (paligemma, r"of the attention mask: it .*PaliGemma"),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_LM)
def test_something_that_is_no_causal_lm_is_told_where_to_go(what: str):
    make_one, says = NO_LM[what]
    one = make_one()
    with pytest.raises(ModelError, match=says):
        graphify_model(one.eval() if isinstance(one, torch.nn.Module) else one, LIMITS)


def test_recurrent_families_are_those_that_are_named():
    named = {
        name: generate.family_states(importlib.import_module(loading.FAMILIES[name]))
        for name in loading.FAMILIES
    }
    assert {name for name, states in named.items() if states} == set(NATIVE)


class Letters:
    """A tokenizer of letters, as transformers calls one."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(chr, tokens))


def test_prompts_that_are_strings(fast):
    texts = ["Hello", "a"]
    with pytest.raises(SpecError, match=r"prompt 0 is a string, .* tokenizer=AutoTokenizer"):
        fast.generate(texts, 3)
    with pytest.raises(SpecError, match=r"prompts is a string\. Pass a list of them, \['Hello'\]"):
        fast.generate("Hello", 3)
    told = dataclasses.replace(fast, tokenizer=Letters())
    with pytest.raises(SpecError, match="prompt 1 is a string, and others are lists"):
        told.generate([[1], "a"], 3)
    tokens = fast.generate([list(map(ord, text)) for text in texts], 3)
    assert told.generate(texts, 3) == ["".join(map(chr, text)) for text in tokens]
    assert told.generate([[1, 2]], 3) == fast.generate([[1, 2]], 3)


class Mixing(torch.nn.Module):
    """An MLP that also looks at the token before."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """(1, T, E) to the same."""
        return self.mlp(x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


class Deaf(torch.nn.Module):
    """A rotary embedding that counts tokens itself."""

    def __init__(self, rope: torch.nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        """Whatever the positions, from 0 on."""
        return self.rope(x, torch.arange(x.shape[1], device=x.device)[None])


@pytest.mark.parametrize("what", ["tokens mixed", "positions ignored"])
def test_a_model_whose_requests_would_change_one_another_is_refused(what: str):
    """No trace can tell, so two requests are tried; the footgun is the text without the check."""
    model = make("Llama")
    if what == "tokens mixed":
        model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    else:
        model.model.rotary_emb = Deaf(model.model.rotary_emb)
    with pytest.raises(ModelError, match=r"beside another one than alone \(relative error"):
        graphify(model)
    right = want(model) if what == "tokens mixed" else None
    texts = graphify(model, check=False).generate(prompts(), NEW)
    assert right is None or texts != right.tokens  # one would have expected the same


# --- RoPE that depends on the batch is fixed where the limits make it constant --------------------


@pytest.mark.sampled(0)
def test_rope_that_rescales_beyond_the_limits_only_is_fixed():
    """Equal to the model itself; also after the model has switched over to its long factors."""
    options = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 96}
    model = make("Phi3", **options)
    right = want(model)
    hold(graphify(model), right, "FULL_AND_PIECEWISE")
    with torch.no_grad():
        model(torch.ones(1, 120, dtype=torch.int64))
    assert model.model.rotary_emb.inv_freq.ne(model.model.rotary_emb.original_inv_freq).all()
    hold(graphify(model), right, "FULL_AND_PIECEWISE")
    assert model.model.rotary_emb.rope_type == "longrope"


@pytest.mark.sampled(0)
def test_dynamic_rope_below_its_length_is_fixed():
    right = want(make("Llama", rope_parameters=DYNAMIC))
    hold(graphify(right.model), right, "FULL_AND_PIECEWISE")


# --- masks ----------------------------------------------------------------------------------------


def rules() -> dict[str, tuple[Any, Any]]:
    """Rules of transformers with the window that each is, over requests of 64 tokens."""
    from transformers import masking_utils as m

    zeros = torch.zeros(1, dtype=torch.int64)
    last = lambda b, h, q, k: k == q  # noqa: E731
    return {
        "causal": (m.causal_mask_function, None),
        "window of 1": (m.sliding_window_causal_mask_function(1), 1),
        "window of 24": (m.sliding_window_causal_mask_function(24), 24),
        "window of 63": (m.sliding_window_causal_mask_function(63), 63),
        "window of all": (m.sliding_window_causal_mask_function(64), None),
        "window beyond": (m.sliding_window_causal_mask_function(4096), None),
        "both": (m.and_masks(m.causal_mask_function, m.sliding_window_overlay(7)), 7),
        "causal or itself": (m.or_masks(m.causal_mask_function, last), None),
        "all": (m.bidirectional_mask_function, ModelError),
        "a window ahead": (m.sliding_window_bidirectional_mask_function(5), ModelError),
        "chunks": (m.chunked_causal_mask_function(8, zeros), ModelError),
        "chunks of half": (m.chunked_causal_mask_function(32, zeros), ModelError),
        "padding": (m.padding_mask_function(torch.ones(1, 5, dtype=torch.bool)), ModelError),
    }  # fmt: skip


@pytest.mark.parametrize("name", rules())
def test_the_window_is_read_off_the_rule(name: str):
    rule, expected = rules()[name]
    if expected is ModelError:
        with pytest.raises(ModelError, match="mask of Attention"):
            window_of(Mask(rule), 64, "Attention")
    else:
        assert window_of(Mask(rule), 64, "Attention") == expected


@pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, 4, 4)])
def test_a_mask_of_the_models_own_is_refused(mask: Any):
    module, x = torch.nn.Module(), torch.zeros(1, 2, 4, 8)
    with pytest.raises(ModelError, match="Module makes its own attention mask"):
        attend(module, x, x, x, mask, fngraph=Attending(None, None, 64))


def test_weights_that_are_replaced_are_told(llama):
    model = copy.deepcopy(llama)
    fast = graphify(model, check=False)
    want = fast.generate([[1, 2, 3]], 4)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight.copy_(weight.roll(1, 0))
    got = fast.generate([[1, 2, 3]], 4)  # in place: heeded
    assert got == graphify(model, check=False).generate([[1, 2, 3]], 4) != want
    weight.data = weight.data.clone()
    with pytest.raises(AddressError, match=r"embed_tokens\.weight of .* weight\.copy_\(new\)"):
        fast.generate([[1, 2, 3]], 4)


def test_limits_that_are_a_number(llama):
    with pytest.raises(TypeError, match=r"limits=64: pass Limits\(max_tokens"):
        graphify_model(llama, 64)


def test_one_prompt_in_place_of_a_list_of_them(fast):
    with pytest.raises(SpecError, match=r"Pass a list of such: \[\[1, 2, 3\]"):
        fast.generate([1, 2, 3], 4)
