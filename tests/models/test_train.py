"""Training runs the layers that serving runs, over text that is always the same, and goes on."""

from __future__ import annotations

import argparse
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from fngraph.models import CheckpointError, llama, load_checkpoint, naming, train
from fngraph.models.training import english, saving, texts
from fngraph.models.training.adamw import init
from fngraph.models.training.flat import packed
from tests.models import killed
from tests.models.rows import llama_batch
from tests.ranks.starting import run

TEXT = torch.tensor(list(b"return the value of the attribute. " * 40), dtype=torch.uint8)


@pytest.fixture
def flags(tmp_path: Path) -> argparse.Namespace:
    """A run of two seconds."""
    words = "--batch 8 --context 24 --steps 60 --drop 0 --looks 4 --threads 1 --dtype float32"
    return train.parser().parse_args([*words.split(), "--run", str(tmp_path)])


def test_the_loss_is_that_of_the_served_model(params):
    text_NS = torch.randint(256, (3, 18), generator=torch.Generator().manual_seed(0))
    spans = [(text, (i,), 0, 17) for i, text in enumerate(text_NS.tolist())]
    batch = llama_batch(spans, B=2, block_size=17)
    batch = llama.Batch(**{**vars(batch), "logits_indices": torch.arange(3 * 17)})
    cache = llama.init_cache(params.config, 3, block_size=17)
    logits_TV, _ = llama.forward(params, cache, batch)
    want = cross_entropy(logits_TV, text_NS[:, 1:].flatten())
    got = texts.nats_a_token(params, text_NS)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_evaluate_is_the_mean_over_all_sequences(params):
    text_NS = torch.randint(256, (11, 25), generator=torch.Generator().manual_seed(1))
    one_by_one = [texts.nats_a_token(params, row[None]) for row in text_NS]
    got = texts.evaluate(params, text_NS, 8)  # batches of 8 and 3
    assert got == pytest.approx(torch.stack(one_by_one).mean().item(), abs=1e-4)


def test_sequences_overlap_by_the_byte_that_is_predicted_from():
    text_NS = english.cut(torch.arange(10, dtype=torch.uint8), 4)
    assert text_NS.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]


def test_each_pass_reads_each_sequence_once_and_another_order():
    data = torch.arange(103, dtype=torch.uint8)
    steps = [
        english.batch_at(data, step, 3, 10, seed=5) for step in range(6)
    ]  # 18: two passes of 9
    assert all(text_NS.shape == (3, 11) for text_NS in steps)
    assert all(torch.equal(x.diff(), torch.ones_like(x[1:])) for s in steps for x in s)
    starts = torch.cat(steps)[:, 0].tolist()
    passes = [sorted(starts[:9]), sorted(starts[9:])]
    for one in passes:
        assert [b - a for a, b in pairwise(one)] == [10] * 8
    assert starts[:9] != starts[9:] and passes[0] != passes[1]
    assert torch.equal(english.batch_at(data, 4, 3, 10, seed=5), steps[4])  # of the step alone
    assert not torch.equal(english.batch_at(data, 4, 3, 10, seed=6), steps[4])


def test_training_learns(config, flags):
    flags.save_every = 20
    held_NS = english.cut(TEXT[:200], flags.context)
    ended, best = train.fit(config, TEXT, held_NS, flags)
    loss = texts.evaluate(naming.filled(llama.blank(config), best), held_NS, 8)
    assert ended.step == flags.steps and len(ended.looks) == flags.looks
    assert loss < 0.5 * texts.evaluate(llama.init_params(config), held_NS, 8)
    assert loss == pytest.approx(ended.best)


def test_the_average_that_did_best_is_kept(config, flags, monkeypatch):
    flags.steps = 8
    looks = []  # the average at each look; the second one is said to be the best

    def judge(params, text_NS, batch) -> float:
        looks.append({n: w.clone() for n, w in naming.named(params).items()})
        return [3.0, 1.0, 2.0, 2.5][len(looks) - 1]

    monkeypatch.setattr(train, "evaluate", judge)
    ended, best = train.fit(config, TEXT, english.cut(TEXT, 24), flags)
    assert ended.looks.tolist() == [[2, 3], [4, 1], [6, 2], [8, 2.5]]
    assert torch.equal(best["embed"], looks[1]["embed"])
    assert not torch.equal(best["embed"], looks[3]["embed"])


WORDS = "--steps 7 --batch 4 --context 16 --looks 2 --threads 1 --drop 0.1".split()
KILLS = (("half written", 3), ("before the move", 2), ("in a step", 2), ("after the move", 1),
         ("nowhere", 1))  # fmt: skip


@pytest.mark.sampled(0)
def test_a_run_that_is_killed_loses_the_step_it_was_in_and_nothing_else(tmp_path):
    """Each process is killed in another way; the last one ends. Writes are of runs and of the best
    weights, which come before the run that tells of them."""
    folders = {name: tmp_path / name for name in ("killed", "whole")}
    words = {
        name: [*WORDS, "--run", str(at), "--out", str(at / "bytes.safetensors")]
        for name, at in folders.items()
    }
    (ended,) = run(killed.main, 1, words["whole"], "nowhere", 1)
    assert ended.code == 0 and not ended.error, ended.error
    steps = []
    for where, nth in KILLS:
        (ended,) = run(killed.main, 1, words["killed"], where, nth)
        assert ended.code == (0 if where == "nowhere" else -9), (where, ended)
        with safe_open(folders["killed"] / "run.safetensors", framework="pt") as file:
            steps.append(file.get_slice("losses").get_shape()[0])
    # lost are the second step, in a file and then in its folder the third one, the fourth as it
    # begins, and once more after its look has written the average
    assert steps == [1, 2, 3, 3, 7]
    for name in ("run.safetensors", "best.safetensors", "bytes.safetensors"):
        got, want = (load_file(folder / name) for folder in folders.values())
        assert list(got) == list(want)
        for key in want:
            assert torch.equal(got[key], want[key]), (name, key)


def test_a_run_goes_on_as_what_it_was_begun_with(config, tmp_path):
    params = packed(naming.named(llama.init_params(config)))
    new = saving.blank_run(params, init(params, average=True))
    path = tmp_path / "run.safetensors"
    saving.save_run(path, new, {"--lr": 0.1, "--seed": 0})
    again = saving.load_run(path, new, {"--lr": 0.1, "--seed": 0})
    assert torch.equal(again.params.matrices, params.matrices) and again.step == 0
    with pytest.raises(CheckpointError, match=r"--lr 0\.1 there, 0\.2 now; --drop None there, 0"):
        saving.load_run(path, new, {"--lr": 0.2, "--seed": 0, "--drop": 0})
    with pytest.raises(CheckpointError, match=r"another run: --seed 0 there, None now\. Pass"):
        saving.load_run(path, new, {"--lr": 0.1})
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        saving.load_run(path, new, {})


def test_what_a_run_is_begun_with_is_each_flag_but_those_of_files(config):
    facts = lambda *words: train.facts_of(config, TEXT, train.parser().parse_args(words))  # noqa: E731
    free = {
        "--threads": "3",
        "--save-every": "7",
        "--run": "elsewhere",
        "--out": "other.safetensors",
    }
    fixed = {"--steps": "9", "--batch": "9", "--accumulate": "9", "--context": "9", "--lr": "0.5",
             "--weight-decay": "0.5", "--drop": "0.5", "--looks": "9", "--dtype": "bfloat16",
             "--checkpoint": None, "--compile": "pieces", "--seed": "9"}  # fmt: skip
    known = {word for action in train.parser()._actions for word in action.option_strings}
    assert known - {"-h", "--help", "--device"} == {*free, *fixed}
    for name, value in (free | fixed).items():
        words = [name] if value is None else [name, value]
        assert (facts(*words) == facts()) == (name in free), name
    assert train.facts_of(config, TEXT[:-1], train.parser().parse_args([])) != facts()


def test_a_run_of_another_model_is_not_gone_on_with(tmp_path):
    """Whose weights have other names, shapes or dtypes, or which keeps no average."""
    shapes = {"w": (2, 3), "b": (3,)}

    def new(dtype: torch.dtype = torch.float32, average: bool = True, **changed: Any) -> Any:
        params = {n: torch.ones(shape, dtype=dtype) for n, shape in (shapes | changed).items()}
        return saving.blank_run(params, init(params, average=average))

    path = tmp_path / "run.safetensors"
    saving.save_run(path, new()._replace(losses=torch.ones(5)), {})
    assert saving.load_run(path, new(), {}).step == 5
    for blank, text in (
        (new(w=(3, 2)), r"params.w: torch.float32 \(2, 3\) there, torch.float32 \(3, 2\) now"),
        (new(v=(1,)), r"params.v: none there, torch.float32 \(1,\) now; .*opt.first.v: none"),
        (new(torch.bfloat16), r"params.w: torch.float32 .* there, torch.bfloat16 .* now"),
        (new(average=False), r"another model: opt.average.b: .* there, none now; opt.average.w"),
    ):
        with pytest.raises(CheckpointError, match=text):
            saving.load_run(path, blank, {})


def test_the_command_writes_weights_card_and_picture(config, tmp_path, monkeypatch, capsys):
    text = b"The quick brown fox jumps over the lazy dog.\n" * 40
    monkeypatch.setattr(train, "corpus", lambda: (text, text[:300]))
    monkeypatch.setattr(train, "tiny_bytes", lambda: config)
    out = tmp_path / "bytes.safetensors"
    words = f"--steps 3 --batch 4 --context 16 --looks 1 --threads 1 --run {tmp_path} --out {out}"
    train.main(words.split())
    loaded, _ = load_checkpoint(out)
    assert loaded == config
    card = out.with_suffix(".md").read_text()
    for fact in ("| steps | 3 of 4 x 16 bytes", "| seed | 0 |", "held-out loss", torch.__version__):
        assert fact in card
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        train.main([*words.split(), "--lr", "0.1"])
    assert "is of another run: --lr 0.003 there, 0.1 now" in capsys.readouterr().err


def test_the_shipped_card_tells_of_the_shipped_weights():
    config, params = load_checkpoint()
    card = train.BYTES.with_suffix(".md").read_text()
    assert config == train.tiny_bytes()
    assert f"{sum(w.numel() for w in naming.named(params).values()):,}" in card
    assert f"{train.BYTES.stat().st_size:,} bytes" in card


def test_the_text_is_english_and_repeats_itself(monkeypatch):
    some = list(islice(english.documents(), 60))
    monkeypatch.setattr(english, "documents", lambda: iter(some))
    train_text, held_out = english.corpus()
    assert (train_text, held_out) == english.corpus()
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
    assert list(english.paragraphs(document)) == [
        "Return the value of the attribute.",
        "The first bullet is a sentence.",
        'And the second one is "quoted".',
    ]


def test_prose_is_docstrings_then_comments(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Of the module."""\n# one\n# two\nx = 1\n# three\n\ndef f():\n    """Of f."""\n'
    )
    assert list(english.prose(path))[:2] == ["Of the module.", "Of f."]
    assert "one\ntwo\n\nthree" in list(english.prose(path))[-1]
    path.write_bytes(b"def broken(:\n")
    assert list(english.prose(path)) == []
