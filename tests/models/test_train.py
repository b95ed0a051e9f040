"""Training runs the layers that serving runs, over text that is always the same."""

from __future__ import annotations

import argparse
from itertools import islice

import pytest
import torch
from torch.nn.functional import cross_entropy

from fngraph.models import llama, load_checkpoint, naming, train, train_bytes, train_bytes as corpus
from tests.models.rows import llama_batch


@pytest.fixture
def flags() -> argparse.Namespace:
    """A run of a second."""
    words = "--batch 8 --context 24 --steps 60 --drop 0 --looks 4 --threads 1"
    return train_bytes.parser().parse_args(words.split())


def test_the_loss_is_that_of_the_served_model(params):
    text_NS = torch.randint(256, (3, 18), generator=torch.Generator().manual_seed(0))
    spans = [(text, (i,), 0, 17) for i, text in enumerate(text_NS.tolist())]
    batch = llama_batch(spans, B=2, block_size=17)
    batch = llama.Batch(**{**vars(batch), "logits_indices": torch.arange(3 * 17)})
    cache = llama.init_cache(params.config, 3, block_size=17)
    logits_TV, _ = llama.forward(params, cache, batch)
    want = cross_entropy(logits_TV, text_NS[:, 1:].flatten())
    got = train.nats_a_byte(params.config, naming.named(params), text_NS)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_evaluate_is_the_mean_over_all_sequences(params, flags):
    text_NS = torch.randint(256, (11, 25), generator=torch.Generator().manual_seed(1))
    named = naming.named(params)
    one_by_one = [train.nats_a_byte(params.config, named, row[None]) for row in text_NS]
    got = train.evaluate(params.config, named, text_NS, flags)  # batches of 8 and 3
    assert got == pytest.approx(torch.stack(one_by_one).mean().item(), abs=1e-4)


def test_sequences_overlap_by_the_byte_that_is_predicted_from():
    text_NS = train.cut(torch.arange(10, dtype=torch.uint8), 4)
    assert text_NS.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]


def test_training_learns_and_repeats_itself(config, flags):
    data = torch.tensor(list(b"return the value of the attribute. " * 40), dtype=torch.uint8)
    held_NS = train.cut(data[:200], flags.context)
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        with torch.enable_grad():
            named, steps, _ = train.fit(config, data, held_NS, flags)
        losses.append(train.evaluate(config, named, held_NS, flags))
        assert steps == flags.steps
    untrained = naming.named(llama.init_params(config))
    assert losses[0] < 0.5 * train.evaluate(config, untrained, held_NS, flags)
    assert losses[0] == losses[1]


def test_the_average_that_did_best_is_kept(config, flags, monkeypatch):
    data = torch.tensor(list(b"return the value of the attribute. " * 40), dtype=torch.uint8)
    looks = []  # the average at each look; the second one is said to be the best

    def judge(config, named, text_NS, flags) -> float:
        looks.append({n: w.clone() for n, w in named.items()})
        return [3.0, 1.0, 2.0, 2.5][len(looks) - 1]

    monkeypatch.setattr(train, "evaluate", judge)
    with torch.enable_grad():
        best, _, _ = train.fit(config, data, train.cut(data, 24), flags)
    assert len(looks) == flags.looks
    assert torch.equal(best["embed"], looks[1]["embed"])
    assert not torch.equal(best["embed"], looks[3]["embed"])


def test_dropout_changes_the_update_and_not_the_weights_it_starts_from(config, flags):
    text_NS = torch.randint(256, (2, 25), generator=torch.Generator().manual_seed(2))
    losses = []
    for drop in (0.0, 0.5):
        flags.drop = drop
        named = naming.named(llama.init_params(config))
        with torch.enable_grad():
            optimizer = train.adamw(named, flags)
            losses.append(train.update(config, named, optimizer, text_NS, 0.5, flags).item())
        assert all(torch.isfinite(w).all() for w in named.values())
    assert losses[0] != losses[1]


def test_the_script_writes_weights_and_card(config, tmp_path, monkeypatch):
    text = b"The quick brown fox jumps over the lazy dog.\n" * 40
    monkeypatch.setattr(train_bytes, "corpus", lambda: (text, text[:300]))
    monkeypatch.setattr(train_bytes, "tiny_bytes", lambda: config)
    out = tmp_path / "bytes.safetensors"
    words = f"--steps 3 --batch 4 --context 16 --looks 1 --threads 1 --out {out}"
    with torch.enable_grad():
        train_bytes.main(words.split())
    loaded, _ = load_checkpoint(out)
    assert loaded == config
    card = out.with_suffix(".md").read_text()
    for fact in ("| steps | 3 of 4 x 16 bytes", "| seed | 0 |", "held-out loss", torch.__version__):
        assert fact in card


def test_the_text_is_english_and_repeats_itself(monkeypatch):
    some = list(islice(corpus.documents(), 60))
    monkeypatch.setattr(corpus, "documents", lambda: iter(some))
    train_text, held_out = corpus.corpus()
    assert (train_text, held_out) == corpus.corpus()
    assert len(train_text) > 50_000 and len(held_out) > 1000
    lines = train_text.decode().splitlines()
    assert not set(lines) & set(held_out.decode().splitlines())
    assert len(set(lines)) == len(lines)
    letters = sum(c.isalpha() or c == " " for line in lines for c in line)
    assert letters > 0.9 * len(train_text)


def test_what_counts_as_a_paragraph():
    document = (
        "Return the value\nof the attribute.\n\n"
        "* The first bullet is a sentence.\n* And the second one is \u201cquoted\u201d.\n\n"
        ">>> print(the_code_that_is_not_prose)\n\n"
        "    x = [1, 2, 3]; y = {4: 5}; z = (6, 7, 8, 9).\n\n"
        "Too short.\n\n"
        "No full stop at the end of this one"
    )
    assert list(corpus.paragraphs(document)) == [
        "Return the value of the attribute.",
        "The first bullet is a sentence.",
        'And the second one is "quoted".',
    ]


def test_prose_is_docstrings_then_comments(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Of the module."""\n# one\n# two\nx = 1\n# three\n\ndef f():\n    """Of f."""\n'
    )
    assert list(corpus.prose(path))[:2] == ["Of the module.", "Of f."]
    assert "one\ntwo\n\nthree" in list(corpus.prose(path))[-1]
    path.write_bytes(b"def broken(:\n")
    assert list(corpus.prose(path)) == []
