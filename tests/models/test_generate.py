"""The serving loop over bare `forward`, the reference that it is held to, and what is printed."""

from __future__ import annotations

from collections import Counter

import pytest

import fngraph as fg
from fngraph.models import (
    Policy,
    Settings,
    bare_steps,
    demo,
    gather,
    generate,
    llama,
    naming,
    save_checkpoint,
    serve,
    start,
    stream,
    submit,
    text,
)
from tests.models.conftest import wide_params
from tests.models.dense import dense_logits

PROMPTS = [(5, 200, 17), tuple(range(60, 110)), (9,), tuple(range(33, 0, -1)), (128, 7, 7, 7, 90)]


def serve_bare(params, policy, new=12, num_blocks=12):
    """Every step of serving PROMPTS with `llama.forward` itself."""
    state = start(num_blocks, policy)
    for i, prompt in enumerate(PROMPTS):
        state = submit(state, policy, prompt, new + 3 * i)
    cache = llama.init_cache(params.config, num_blocks, block_size=generate.BLOCK_SIZE)
    return list(serve(bare_steps(llama.forward, params, policy), cache, state, policy))


def texts_of(served):
    """What each request got."""
    return gather(stream(served))


def test_reference_is_greedy_over_the_dense_model(params):
    prompt = PROMPTS[1]
    got = generate.reference(params, prompt, 10)
    text = list(prompt)
    for _ in range(10):
        text.append(int(dense_logits(params, text)[-1].argmax()))
    assert got == tuple(text[len(prompt) :])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("max_tokens, max_reqs", [(3, 1), (5, 3), (16, 4), (64, 5)])
def test_served_tokens_are_those_of_the_reference(params, max_tokens, max_reqs):
    texts = texts_of(serve_bare(params, Policy(max_tokens, max_reqs, 6)))
    for i, prompt in enumerate(PROMPTS):
        assert texts[i] == generate.reference(params, prompt, 12 + 3 * i)


def test_steps_are_chunked_to_the_budget_and_decodes_are_marked(params):
    served = serve_bare(params, Policy(16, 3, 6))
    assert max(one.spec.num_tokens for one in served) == 16  # the prompt of 50 comes in chunks
    kinds = Counter(one.spec.query_len for one in served)
    assert kinds[None] >= 4 and kinds[1] >= 20
    assert all(one.seconds > 0 for one in served)


def test_the_reference_text_is_varied_enough_to_tell_models_apart(params):
    texts = [generate.reference(params, prompt, 24) for prompt in PROMPTS]
    assert len(set().union(*texts)) >= 50


def test_prompts_come_from_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("The\n\nReturn a \u201clist\u201d\n", encoding="utf-8")
    assert generate.read_prompts(path) == ["The", "Return a \u201clist\u201d"]
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        generate.read_prompts(path)


def test_text_and_bytes():
    assert text.to_text(text.to_tokens("caf\u00e9")) == "caf\u00e9"
    assert text.to_text((104, 105, 0xC3)) == "hi\ufffd"


def test_ladders_end_where_they_are_told():
    assert generate.ladder(32) == (1, 2, 4, 8, 16, 32)
    assert generate.ladder(33) == (1, 2, 4, 8, 16, 32, 33)
    assert generate.ladder(1) == (1,)


def test_the_plan_fits_the_longest_prompt():
    state, policy = generate.plan(["a", "b" * 40], 8, max_tokens=16, max_reqs=4)
    assert policy == Policy(16, 4, 3, generate.BLOCK_SIZE)
    assert len(state.waiting) == 2 and state.pool.num_blocks == 12


def test_texts_end_where_the_tokenizer_says():
    stops = text.BYTE_TEXT._replace(stops=frozenset({7, 3}))
    state, _ = generate.plan(["abc"], 8, max_tokens=8, max_reqs=1, text=stops)
    assert state.waiting[0].request.stop == ((3,), (7,))


def test_stops_and_texts_of_a_prompt_that_a_plan_is_given():
    state, _ = generate.plan(
        ["abc", "d"], 8, max_tokens=8, max_reqs=1, stop=["end"], n=2, settings=Settings(0.7, seed=3)
    )
    requests = [job.request for job in state.waiting]
    assert [request.prompt for request in requests] == [(97, 98, 99)] * 2 + [(100,)] * 2
    assert {request.stop_strings for request in requests} == {("end",)}
    assert len({request.key for request in requests}) == 2


def test_the_demo_has_prompts_of_many_lengths():
    lengths = [len(prompt) for prompt in generate.read_prompts(generate.PROMPTS)]
    assert len(lengths) >= 8 and len(set(lengths)) >= 8
    assert min(lengths) <= 4 and max(lengths) >= 150


# --- the demo's verdict -------------------------------------------------------------------------

DECODE, MIXED = fg.BatchSpec(4, 4, query_len=1), fg.BatchSpec(9, 4)


def test_what_each_mode_promises_is_what_fngraph_means_by_it():
    assert set(demo.MEANING) == set(fg.Mode.__members__)
    for name, (decode, mixed) in demo.MEANING.items():
        mode = fg.Mode[name]
        assert (str(mode.decode), str(mode.mixed)) == (decode, mixed)


def test_the_expected_mode_of_a_step():
    assert demo.expected_mode("FULL_AND_PIECEWISE", DECODE) == "FULL"
    assert demo.expected_mode("FULL_AND_PIECEWISE", MIXED) == "PIECEWISE"
    assert demo.expected_mode("FULL_DECODE_ONLY", MIXED) == "NONE"
    assert demo.expected_mode("FULL", fg.BatchSpec(demo.SIZES[-1] + 1, 4)) == "NONE"


@pytest.fixture(scope="module")
def final(config):
    return texts_of(serve_bare(wide_params(config), Policy(16, 3, 6)))


def run(final, **shares: float) -> demo.Run:
    expected = Counter({"FULL": 3, "PIECEWISE": 1})
    return demo.Run("FULL_AND_PIECEWISE", final, expected, shares, 1.0)


def test_the_verdict_is_good_only_when_tokens_and_shares_are(final):
    wanted = dict(final)
    right = {"FULL": 0.75, "PIECEWISE": 0.25, "NONE": 0.0}
    line, well = demo.verdict(run(final, **right), wanted)
    assert well and "tokens equal" in line and "FULL 75.0%" in line

    other = {**wanted, 2: (*wanted[2][:-1], wanted[2][-1] ^ 1)}
    line, well = demo.verdict(run(final, **right), other)
    assert not well and "tokens differ in requests [2]" in line

    line, well = demo.verdict(run(final, **right), {**wanted, 99: (1,)})
    assert not well and "[99]" in line

    eager = {"FULL": 0.75, "PIECEWISE": 0.0, "NONE": 0.25}
    line, well = demo.verdict(run(final, **eager), wanted)
    assert not well and "PIECEWISE should be 25.0%" in line and "NONE should be 0.0%" in line


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words(config, tmp_path_factory) -> list[str]:
    """Arguments that name a small model and three prompts."""
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder / "m.safetensors", config, naming.named(wide_params(config)))
    (folder / "prompts.txt").write_text(f"The\nReturn a list\n{'long ' * 12}\n")
    paths = ["--checkpoint", folder / "m.safetensors", "--prompts", folder / "prompts.txt"]
    return [*map(str, paths), "--max-new", "6"]


def test_the_demo_prints_all_and_exits_with_0(words, capsys):
    assert demo.main(words) == 0
    out = capsys.readouterr().out
    last = out.rstrip().splitlines()[-len(demo.MEANING) :]
    assert [line.split()[0] for line in last] == list(demo.MEANING)
    assert all("tokens equal" in line and "ms a step" in line for line in last)
    assert "FULL 100.0%, PIECEWISE 0.0%, NONE 0.0%" in last[3]
    for piece in ("DispatchTable(FULL_AND_PIECEWISE", "| tokens | padded |", "2 long long"):
        assert piece in out


def test_the_demo_exits_with_1_when_tokens_differ(words, capsys, monkeypatch):
    honest = demo.reference
    monkeypatch.setattr(demo, "MEANING", {"NONE": demo.MEANING["NONE"]})  # the quickest of them
    monkeypatch.setattr(demo, "reference", lambda *args: (*honest(*args)[:-1], 0))
    assert demo.main(words) == 1
    assert "tokens differ in requests [" in capsys.readouterr().out


def test_the_demo_exits_with_1_when_a_mode_does_not_replay(words, capsys, monkeypatch):
    honest = demo.make_steps
    monkeypatch.setattr(demo, "MEANING", {"FULL": demo.MEANING["FULL"]})
    eager = {"modes": "NONE"}
    monkeypatch.setattr(demo, "make_steps", lambda *args, **o: honest(*args, **{**o, **eager}))
    assert demo.main(words) == 1
    assert "WRONG: FULL should be 100.0%" in capsys.readouterr().out


def test_generate_prints_the_texts_and_what_ran(words, params, capsys):
    generate.main([*words, "--modes", "FULL", "--max-tokens", "16", "--max-reqs", "2"])
    out = capsys.readouterr().out
    assert "| padding |" in out and "| FULL" in out and "| NONE" not in out
    assert "0 The =>" in out and "1 Return a list =>" in out


def test_generate_stops_at_texts_and_writes_several_of_a_prompt(words, capsys):
    drawn = ["--temperature", "0.9", "--seed", "5", "--n", "2"]

    def texts(*more):
        generate.main([*words, "--modes", "FULL", "--max-tokens", "16", *drawn, *more])
        lines = capsys.readouterr().out.splitlines()
        return [line.partition(" => ")[2] for line in lines if " => " in line]

    whole = texts()
    letter = next(c for text in whole for c in text if c.isalpha() and c.isascii())
    cut = texts("--stop", letter)
    assert len(whole) == len(cut) == 6 and whole[0] != whole[1]
    assert cut == [text.partition(letter)[0] for text in whole] != whole
