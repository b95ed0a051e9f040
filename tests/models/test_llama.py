"""Llama against a dense computation of its own, for every kind of batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fngraph.core import trees
from fngraph.models import llama, load_checkpoint, naming, save_checkpoint
from fngraph.models.families import decoder
from fngraph.models.families.rope import (
    Dynamic,
    Linear,
    Llama3,
    LongRope,
    Yarn,
    rotate,
    rotation,
)
from fngraph.models.weights.checkpoint import BYTES, CheckpointError
from tests.models.conftest import wide_params
from tests.models.dense import dense_logits
from tests.models.rows import llama_batch

BLOCK_SIZE, B = 4, 6
TEXTS = [tuple(range(7, 27)), (250, 3, 3, 99, 0), tuple(range(100, 80, -1)), (42,)]
# interleaved on purpose: no request's blocks are in order or next to one another
BLOCKS = [(9, 2, 11, 0, 7, 13), (4, 16), (1, 15, 3, 12, 6), (5,)]


def run(params: llama.Params, *steps: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Logits of each step; a step is a list of (text, first token, last token + 1)."""
    cache = llama.init_cache(params.config, 18, block_size=BLOCK_SIZE)
    for k_NSKD, v_NSKD in cache:  # what was never written must never be read
        k_NSKD.fill_(torch.nan)
        v_NSKD.fill_(torch.nan)
    out = []
    for step in steps:
        spans = [(TEXTS[i], BLOCKS[i], first, last) for i, first, last in step]
        logits_RV, cache = llama.forward(params, cache, llama_batch(spans, B, BLOCK_SIZE))
        out.append(logits_RV)
    return out


def assert_dense(params: llama.Params, *steps: list[tuple[int, int, int]]) -> None:
    """Every row of every step has the logits that its text has at that place."""
    dense = [dense_logits(params, text) for text in TEXTS]
    for step, got_RV in zip(steps, run(params, *steps)):
        want_RV = torch.stack([dense[i][last - 1] for i, _, last in step])
        assert got_RV.shape == want_RV.shape
        torch.testing.assert_close(got_RV.double(), want_RV, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([[(0, 0, 20)]], id="prefill of one"),
        pytest.param([[(0, 0, 20), (1, 0, 5), (2, 0, 20), (3, 0, 1)]], id="prefill of many"),
        pytest.param([[(0, 0, 3)], *([(0, i, i + 1)] for i in range(3, 20))], id="decode of one"),
        pytest.param(
            [[(0, 0, 3), (2, 0, 9)], *([(2, 9 + i, 10 + i), (0, 3 + i, 4 + i)] for i in range(9))],
            id="decode of two that change places",
        ),
        pytest.param([[(0, 0, 7), (1, 0, 1)], [(0, 7, 8), (2, 0, 20), (1, 1, 5)]], id="mixed"),
        pytest.param(
            [[(0, 0, 5)], [(0, 5, 6), (2, 0, 4)], [(2, 4, 17), (0, 6, 19)], [(0, 19, 20)]],
            id="chunked prefill",
        ),
    ],
)
def test_logits_are_those_of_the_dense_model(params, steps):
    assert_dense(params, *steps)


@pytest.mark.parametrize(
    "change",
    [{"num_kv_heads": 1}, {"num_kv_heads": 6}, {"tied": True}, {"rope_theta": 50.0}],
    ids=str,
)
def test_variants(config, change):
    changed = dataclasses.replace(config, **change)
    params = wide_params(changed)
    assert (params.head is None) == changed.tied
    assert_dense(params, [(0, 0, 11), (1, 0, 5)], [(0, 11, 20), (2, 0, 20)])


def test_a_layer_with_a_window_does_not_see_a_shared_prefix_whole(config):
    """A batch whose requests share a prefix is read by cascades, but for such layers."""
    params = wide_params(dataclasses.replace(config, window=5, window_layers=(1,)))
    texts = [(*range(8), 40, 41, 42), (*range(8), 90)]
    spans = [(text, (2, 4, 6 + i), 0, len(text)) for i, text in enumerate(texts)]
    batch = llama_batch(spans, B, BLOCK_SIZE)
    fresh = lambda: llama.init_cache(params.config, 18, block_size=BLOCK_SIZE)  # noqa: E731
    want_RV, _ = llama.forward(params, fresh(), batch)
    object.__setattr__(batch, "prefix_len", torch.tensor([8], dtype=torch.int32))
    got_RV, _ = llama.forward(params, fresh(), batch)
    torch.testing.assert_close(got_RV, want_RV, atol=1e-5, rtol=0)
    every = dataclasses.replace(params.config, window_layers=())
    other = naming.filled(llama.blank(every), naming.named(params))
    assert (llama.forward(other, fresh(), batch)[0] - want_RV).abs().max() > 0.1


def test_the_head_runs_on_the_asked_rows_only(params, monkeypatch):
    seen = []
    head = decoder.logits
    watched = lambda params, x_RE, norm: seen.append(x_RE.shape) or head(params, x_RE, norm)  # noqa: E731
    monkeypatch.setattr(decoder, "logits", watched)
    (got_RV,) = run(params, [(0, 0, 20), (2, 0, 13)])
    assert seen == [(2, params.config.dim)]
    assert got_RV.shape == (2, params.config.vocab_size)


def test_any_row_may_be_asked_for(params):
    batch = llama_batch([(TEXTS[0], BLOCKS[0], 0, 20)], B, BLOCK_SIZE)
    asked = dataclasses.replace(batch, logits_indices=torch.tensor([4, 19, 0]))
    cache = llama.init_cache(params.config, 18, block_size=BLOCK_SIZE)
    got_RV, _ = llama.forward(params, cache, asked)
    want_RV = dense_logits(params, TEXTS[0])[[4, 19, 0]]
    torch.testing.assert_close(got_RV.double(), want_RV, atol=1e-5, rtol=0)


def test_rope_turns_by_position_alone(config):
    at = torch.tensor([5, 0, 5])
    by = rotation(at, config.head_dim, config.rope_theta, torch.float32)
    assert by.cos.shape == by.sin.shape == (3, 1, config.head_dim)
    x_THD = torch.randn(1, 2, config.head_dim).expand(3, -1, -1)
    turned = rotate(x_THD, by)
    torch.testing.assert_close(turned[1], x_THD[1])  # position 0: not at all
    assert torch.equal(turned[0], turned[2])
    torch.testing.assert_close(turned.norm(dim=-1), x_THD.norm(dim=-1))


@pytest.mark.parametrize("scaling", [Dynamic(4.0, 16), LongRope((1.0, 2.0), (3.0, 4.0), 16, 1.2)])
def test_a_rope_that_goes_by_the_text_is_the_same_in_any_chunks(scaling):
    """A token goes by the text up to itself: what else is in the call has no say."""
    whole = rotation(torch.arange(40), 4, 100.0, torch.float32, scaling)
    for at in (0, 15, 16, 39):
        alone = rotation(torch.tensor([at]), 4, 100.0, torch.float32, scaling)
        assert all(torch.equal(x[at], y[0]) for x, y in zip(whole, alone))
    plain = rotation(torch.arange(40), 4, 100.0, torch.float32, Linear(1.0))
    same = [
        torch.allclose(whole[0][i] / getattr(scaling, "amplitude", 1), plain[0][i]) for i in (1, 39)
    ]
    assert same == [isinstance(scaling, Dynamic), False]


def test_rope_scores_depend_on_the_distance(config):
    q, k = torch.randn(2, 1, 1, config.head_dim)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, rotation(torch.tensor([position]), config.head_dim, 1e4, x.dtype))

    def score(i: int, j: int) -> float:
        return (turned(q, i) * turned(k, j)).sum().item()

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_the_cache_comes_back_as_it_was_passed(params):
    cache = llama.init_cache(params.config, 18, block_size=BLOCK_SIZE)
    batch = llama_batch([(TEXTS[0], BLOCKS[0], 0, 3)], B, BLOCK_SIZE)
    _, after = llama.forward(params, cache, batch)
    assert [[id(t) for t in kv] for kv in after] == [[id(t) for t in kv] for kv in cache]
    written = cache[0][0].flatten(0, 1).abs().sum((1, 2)).nonzero().flatten().tolist()
    assert written == [BLOCKS[0][0] * BLOCK_SIZE + i for i in range(3)]


def test_config_is_structure_and_weights_are_leaves(params):
    leaves, structure = trees.flatten(params)
    assert len(leaves) == len(naming.shapes(llama.blank(params.config)))
    assert hash(params.config) == hash(dataclasses.replace(params.config))
    other = dataclasses.replace(params, config=dataclasses.replace(params.config, norm_eps=1e-6))
    assert trees.flatten(other)[1] != structure


def test_init_is_the_same_each_time_and_of_the_listed_shapes(config):
    once, again = (naming.named(llama.init_params(config, seed=5)) for _ in range(2))
    assert {n: tuple(w.shape) for n, w in once.items()} == naming.shapes(llama.blank(config))
    assert all(torch.equal(once[n], again[n]) for n in once)
    assert not torch.equal(once["embed"], llama.init_params(config, seed=6).embed)


SCALINGS = (
    Llama3(8.0, 1.0, 4.0, 64), Yarn(4.0, 32, 1, 64), Linear(2.0), Dynamic(2.0, 64),
    LongRope((1.0, 1.5), (2.0, 8.0), 64, 1.1),
)  # fmt: skip


@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=lambda x: type(x).__name__)
def test_a_checkpoint_comes_back(config, params, scaling, tmp_path):
    config = dataclasses.replace(config, rope_scaling=scaling, window=7, window_layers=(1,))
    path = tmp_path / "a" / "model.safetensors"
    save_checkpoint(path, config, naming.named(params))
    loaded_config, loaded = load_checkpoint(path)
    assert loaded_config == config
    named = naming.named(loaded)
    assert all(torch.equal(named[n], w) for n, w in naming.named(params).items())
    assert [layer.attn.window for layer in loaded.layers] == [None, 7]


def test_a_bad_checkpoint_lists_all_that_is_wrong(config, params, tmp_path):
    named = naming.named(params)
    named["layers.0.attn.wq"] = named["layers.0.attn.wq"][1:]
    named["layers.9.attn.wq"] = named.pop("layers.1.attn.wo")
    save_checkpoint(tmp_path / "m.safetensors", config, named)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path / "m.safetensors")
    for line in ("1.attn.wo: missing", "9.attn.wq: unknown", "0.attn.wq: expected (72, 32)"):
        assert line in str(error.value)
    with pytest.raises(CheckpointError, match=r"python -m fngraph\.models\.train"):
        load_checkpoint(tmp_path / "none.safetensors")


def test_the_committed_checkpoint_is_small_and_has_its_card():
    config, params = load_checkpoint()
    assert BYTES.stat().st_size <= 4_000_000
    assert config.vocab_size == 256 and params.embed.dtype == torch.float32
    card = BYTES.with_suffix(".md").read_text()
    assert all(word in card for word in ("training text", "steps", "held-out loss", "seed"))
