"""Models of transformers over whole inputs, by `from_module`: as they are, without a cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.errors import OutputError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
TOKENS = torch.tensor([[5, 9, 33, 2, 60, 7], [1, 1, 8, 40, 3, 0]])
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
PICTURE = {**SIZES, "image_size": 16, "patch_size": 8}


def of(kind: str, config: str, **options: Any) -> Any:
    """A random model."""
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()


def clip() -> Any:
    text = {**SIZES, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 7}
    options = {"text_config": text, "vision_config": PICTURE, "projection_dim": 16}
    return of("CLIPModel", "CLIPConfig", **options)


def t5() -> Any:
    return of(
        "T5ForConditionalGeneration", "T5Config", vocab_size=64, d_model=32, d_kv=8, d_ff=48,
        num_layers=2, num_heads=4,
    )  # fmt: skip


def whisper() -> Any:
    parts = {
        f"{part}_{what}": n
        for part in ("encoder", "decoder")
        for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
    }
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    return of(
        "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=64, d_model=32,
        max_source_positions=10, num_mel_bins=8, decoder_start_token_id=0, **parts, **ends,
    )  # fmt: skip


def bert() -> Any:
    return of("BertModel", "BertConfig", **SIZES, vocab_size=64)


IDS, MASK = {"input_ids": TOKENS}, {"attention_mask": (TOKENS > 2).long()}
AFTER = {"decoder_input_ids": TOKENS[:, :4]}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "BERT": (bert, IDS | MASK, {}),
    "ViT": (lambda: of("ViTModel", "ViTConfig", **PICTURE), {"pixel_values": PIXELS}, {}),
    "CLIP": (clip, IDS | MASK | {"pixel_values": PIXELS}, {}),
    "T5": (t5, IDS | AFTER, {"use_cache": False}),
    "Whisper": (whisper, {"input_features": SOUND} | AFTER, {"use_cache": False}),
    "Mamba": (
        lambda: of(
            "MambaForCausalLM", "MambaConfig", vocab_size=64, hidden_size=32, num_hidden_layers=2,
            state_size=4,
        ),
        IDS, {"use_cache": False},
    ),
    "Bloom": (
        lambda: of(
            "BloomForCausalLM", "BloomConfig", vocab_size=64, hidden_size=32, n_layer=2, n_head=4
        ),
        IDS, {"use_cache": False},
    ),
}  # fmt: skip


def whole(model: Any, given: dict[str, Any], options: dict[str, Any]) -> Any:
    """What the model gives by graphs of its whole inputs."""
    forward, params, buffers = fg.from_module(model)

    def one(params: Any, buffers: Any, given: Any) -> Any:
        return forward(params, buffers, **given, **options)

    return fg.graphify(one, stage="given", recorder="tape")(params, buffers, given)


@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_the_model_gives(name: str):
    make, given, options = CASES[name]
    model = make()
    got = whole(model, given, options)
    with torch.no_grad():
        want = model(**given, **options)
    assert type(got) is type(want) and list(got) == list(want)
    for key in got:
        if isinstance(want[key], torch.Tensor):
            assert got[key] is getattr(got, key)
            torch.testing.assert_close(got[key], want[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["T5", "Whisper", "Bloom"])
def test_a_cache_in_the_result_is_told_what_to_call_with(name: str):
    make, given, _ = CASES[name]
    with pytest.raises(OutputError, match=r"past_key_values = .*Cache.*with use_cache=False"):
        whole(make(), given, {})


def test_the_page_s_python_runs(monkeypatch: pytest.MonkeyPatch):
    """On random models in place of published ones."""
    blocks = [b for b in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "from_module" in b]
    models = {"google-bert/bert-base-uncased": bert, "openai/whisper-tiny": whisper}
    for kind in ("AutoModel", "AutoModelForSpeechSeq2Seq"):
        monkeypatch.setattr(getattr(transformers, kind), "from_pretrained", lambda n: models[n]())
    (block,) = blocks
    names: dict[str, Any] = {}
    exec(compile(block, "transformers.md", "exec"), names)
    given = {name: names[name] for name in ("input_ids", "attention_mask")}
    heard = {name: names[name] for name in ("input_features", "decoder_input_ids")}
    with torch.no_grad():
        want = names["bert"](**given).last_hidden_state
        logits = names["whisper"](**heard, use_cache=False).logits
    torch.testing.assert_close(names["out"].last_hidden_state, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(names["logits"], logits, atol=1e-5, rtol=1e-5)
    tested = re.search(r"model's own numbers: ([\w, ]+)\.", PAGE)
    assert tested and tested[1].split(", ") == list(CASES)
