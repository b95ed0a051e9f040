"""docs/transformers.md: each block runs alone, on tiny random models in place of published ones.

The block of whole inputs is in test_transformers_whole.py, with the models that it is about.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.integrations import architectures
from tests.integrations.test_transformers_multimodal import IMAGE, START, model_of

PAGE = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
pytestmark = pytest.mark.usefixtures("one_thread")


class Processor:
    """What a model's processor makes of one picture of 4 x 6 patches."""

    seen = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))

    def image_processor(self, picture: Any, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.seen, "image_grid_thw": torch.tensor([[1, 4, 6]])}

    def apply_chat_template(self, chat: Any, **options: Any) -> dict[str, torch.Tensor]:
        (message,) = chat
        assert [part["type"] for part in message["content"]] == ["image", "text"]
        ids = torch.tensor([[5, START, *[IMAGE] * 6, 7, 8]])
        return {"input_ids": ids, **self.image_processor(None, "pt")}


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models under the names of published ones, and no GPU."""
    for kind, make in {
        "AutoModelForCausalLM": lambda name, dtype: architectures.make("Qwen3"),
        "AutoModelForImageTextToText": lambda name, dtype: model_of("Qwen3VL"),
        "AutoProcessor": lambda name: Processor(),
    }.items():
        monkeypatch.setattr(getattr(transformers, kind), "from_pretrained", make)
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda module: module)


def ran(words: str) -> dict[str, Any]:
    """What the one block with these words leaves behind."""
    (block,) = (block for block in BLOCKS if words in block)
    names: dict[str, Any] = {"__name__": "transformers_docs"}
    with torch.no_grad():
        exec(compile(small(block), "transformers.md", "exec"), names)
    return names


def small(block: str) -> str:
    """The block at sizes of the tiny models, which have a few hundred positions."""
    block = re.sub(r"fg\.Limits\(2048, 64, B=\d+\)", "fg.Limits(32, 4, B=8)", block)
    return re.sub(r"budgets(\": |=)\([\d, ]+\)", r"budgets\1(8, 32)", block)


def test_a_model_of_text():
    names = ran("AutoModelForCausalLM")
    assert [len(text) for text in names["texts"]] == [48, 48]


@pytest.mark.sampled(0)
def test_a_model_that_sees():
    names = ran("apply_chat_template")
    assert [len(text) for text in names["texts"]] == [64, 64]
    assert names["fast"].vision is not None


def test_a_tower():
    names = ran("image_processor(")
    assert len(names["rows"]) == 1


def test_each_block_is_tried():
    tried = ("AutoModelForCausalLM", "apply_chat", "image_processor(", "AutoModelForSpeechSeq2Seq.")
    assert [sum(words in block for words in tried) for block in BLOCKS] == [1] * len(tried)
