"""What a user may pass by mistake at the entries of serving is named, with what to pass."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fngraph.models import (
    Policy,
    Settings,
    Tally,
    advance,
    generate,
    loading,
    read_text,
    start,
    submit,
)
from fngraph.models.serving.scheduling import plan
from tests.models import tiny

POLICY = Policy(max_tokens=32, max_reqs=2, max_blocks=4)
COUNTS = ("n", "max_new", "min_tokens", "adapter", "priority", "logprobs")


@pytest.mark.parametrize(
    "sizes, named",
    [((0, 0, 0), "max_tokens=0"), ((2, 1, 0), "max_blocks=0")],
)
def test_a_policy_for_nothing(sizes, named):
    with pytest.raises(ValueError, match=named):
        Policy(*sizes)


def test_a_request_of_another_type():
    state = start(16, POLICY)
    with pytest.raises(TypeError, match=r"prompt='abc': .*text\.encode\(prompt\)"):
        submit(state, POLICY, "abc", 4)
    with pytest.raises(TypeError, match=r"settings=.*pass Settings\(temperature=0\.8"):
        submit(state, POLICY, [1], 4, settings={"temperature": 1.0})


def test_a_stop_token_needs_no_list_of_its_own():
    state = submit(start(16, POLICY), POLICY, [1], 4, stop=[258, [13, 13]])
    assert state.waiting[0].request.stop == ((258,), (13, 13))


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ({"stop": 5}, TypeError, r"stop=5: pass a list, stop=\[5\]"),
        ({"stop": None}, TypeError, r"stop=None: pass a list, stop=\[\]"),
        ({"stop": b"ab"}, TypeError, "pass a list"),
        ({"stop": [-1]}, ValueError, "stop has -1, which is no token"),
        ({"stop": [2**31]}, ValueError, "stop has 2147483648, which is no token"),
        ({"stop": [[1, 10**5000]]}, ValueError, "stop is far too large: a number of 16610 bits"),
        ({"stop": itertools.count()}, ValueError, "stop has more than 1048576: pass fewer"),
        ({"stop": [itertools.count()]}, ValueError, "a stop has more than 1048576: pass fewer"),
        ({"n": 10**30}, ValueError, "n is far too large: a number of 100 bits"),
        ({"n": 10**9}, ValueError, "n=1000000000: pass how many texts, 1 to 65536. Each is a req"),
        ({"n": 0}, ValueError, "n=0: pass how many texts, 1 to"),
        *(
            ({name: 10**5000}, ValueError, f"{name} is far too large: a number of 16610")
            for name in COUNTS
        ),
        ({"prompt": itertools.count()}, ValueError, r"^65 or more prompt tokens and 4 new ones"),
        ({"prompt": range(10**12)}, ValueError, r"^1000000000000 prompt tokens and 4 new ones"),
        ({"prompt": range(10**30)}, ValueError, r"^65 or more prompt tokens and 4 new ones"),
        ({"prompt": [10**5000]}, ValueError, r"prompt\[0\]=a number of 16610 bits is no token"),
        ({"settings": Settings(logit_bias={2**31: 1.0})}, ValueError, "logit_bias has 2147483648"),
        ({"deadline": -1}, ValueError, r"deadline=-1: pass time\.monotonic\(\)"),
        ({"prompt": 5}, TypeError, "prompt=5: pass a list of tokens"),
        ({"settings": Settings("0.8")}, TypeError, "temperature='0.8' is a str, no number"),
        ({"settings": Settings(presence_penalty="1")}, TypeError, "presence_penalty='1' is a str"),
        ({"settings": Settings(presence_penalty=math.inf)}, ValueError, "presence_penalty=inf"),
        ({"settings": Settings(frequency_penalty=math.nan)}, ValueError, "frequency_penalty=nan"),
        ({"settings": Settings(repetition_penalty=0)}, ValueError, "repetition_penalty=0 is not"),
        ({"settings": Settings(logit_bias={1: "2"})}, ValueError, "logit_bias has 1: '2'"),
        ({"settings": Settings(logit_bias={3: 1e39})}, ValueError, r"logit_bias has 3: 1e\+39"),
        ({"settings": Settings(logit_bias=None)}, ValueError, "logit_bias=None: pass a dict"),
    ],
)
def test_what_a_request_cannot_ask_for(given, error, named):
    asked = {"prompt": [1], "max_new": 4} | given
    with pytest.raises(error, match=named):
        submit(start(16, POLICY), POLICY, **asked)


def test_numbers_of_other_libraries_are_numbers():
    settings = Settings(np.float32(0.5), np.int64(3), seed=np.int64(4), logit_bias=[])
    assert not settings.changes_logits
    wide = settings._replace(logit_bias={np.int64(2): np.float32(-1)})
    for one in (settings, wide):
        state = submit(start(16, POLICY), POLICY, [1], 4, settings=one, deadline=np.float32(3))
        assert state.waiting[0].request.shaped == bool(one.logit_bias)


def test_arguments_in_another_order():
    state = start(16, POLICY)
    with pytest.raises(TypeError, match="takes num_blocks, policy; the second is a int"):
        start(POLICY, 16)
    with pytest.raises(TypeError, match=r"takes state, policy, prompt.*these are Policy, State"):
        submit(POLICY, state, [1], 4)
    with pytest.raises(TypeError, match=r"query_lens=4: pass a tuple of them, \(1, 4\)"):
        Policy(8, 2, 2, query_lens=4)


def test_texts_of_one_prompt_are_requests_in_a_row():
    state = submit(start(16, POLICY), POLICY, [1], 4, n=3, settings=Settings(1.0, seed=7))
    state = submit(state, POLICY, [2], 4, priority=-1, deadline=9.0)
    state = submit(state, POLICY, [3], 4, n=2, deadline=11.0)
    assert [job.id for job in state.waiting] == [3, 0, 1, 2, 4, 5]
    keys = [job.request.key for job in state.waiting]
    alone = [
        submit(start(16, POLICY), POLICY, [1], 4, settings=Settings(1.0, seed=7 + i))
        .waiting[0].request.key for i in range(3)
    ]  # fmt: skip
    assert keys[1:4] == alone and len(set(keys)) == 6
    assert (state.submitted, state.soonest) == (6, 9.0)


def test_as_many_texts_as_there_may_be_are_there_at_once():
    began = time.perf_counter()
    state = submit(start(16, POLICY), POLICY, [1], 4, n=1 << 16)
    assert len(state.waiting) == state.submitted == 1 << 16
    assert time.perf_counter() - began < 20  # one by one it took minutes


@pytest.mark.parametrize("blocks", [-1, 2**31, 10**30])
def test_a_cache_of_a_number_that_none_has(blocks: int):
    with pytest.raises(ValueError, match="num_blocks"):
        start(blocks, POLICY)


def test_a_state_is_advanced_once():
    state = plan(submit(start(16, POLICY), POLICY, [1], 4), POLICY)
    after, _ = advance(state, [[5]])
    with pytest.raises(ValueError, match="tokens of 1 rows, but 0 are under way"):
        advance(after, [[5]])


def test_states_and_tallies_read_in_a_line():
    state = submit(start(5000, POLICY), POLICY, [1], 4, settings=Settings())
    text = "1 waiting, 0 running, 0 rows under way, 5000 of 5000 blocks free"
    assert repr(state) == f"State({text})"
    assert repr(Tally()) == "Tally(0 steps, 0 new tokens; )"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as transformers saves it, with a tokenizer of words."""
    path = tmp_path_factory.mktemp("llama")
    tiny.save("llama", path)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    return path


def test_a_folder_without_a_tokenizer(folder, tmp_path):
    with pytest.raises(loading.CheckpointError, match=r"no tokenizer\.json.*AutoTokenizer"):
        read_text(tmp_path)


def test_a_dtype_by_name(folder):
    with pytest.raises(TypeError, match=r"dtype='bfloat16': .*torch\.bfloat16"):
        loading.family(folder).load(folder, dtype="bfloat16")


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--max-reqs", "0"], "--max-reqs: 0 is not 1 or more"),
        (["--drafts", "40"], "Pass at most 31"),
        (["--max-reqs", "4097"], "4097 is more than 4096"),
        (["--recorder", "cuda", "--device", "cpu"], "the model is on cpu"),
        (["--max-new", "100000"], "positions. Pass --max-new"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_the_command_says_what_is_wrong_in_a_line(flags, named, folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        generate.main(["--model", str(folder), *flags])
    assert named in capsys.readouterr().err
