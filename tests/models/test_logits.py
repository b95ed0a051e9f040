"""Penalties, biases, masks, logprobs: against plain Python, in every mode, with drafts, alone."""

from __future__ import annotations

import functools
import math
import random
import re
import types

import numpy as np
import pytest
import torch

import fngraph as fg
from fngraph.models import (
    Policy,
    Settings,
    bare_steps,
    llama,
    make_steps,
    schedule,
    serve,
    start,
    stream,
    submit,
)
from fngraph.models.serving import grammars
from fngraph.models.serving.batches import SHAPED, batch_type, empty_batch, lay_out
from fngraph.models.serving.logits import Drawn, changed, drawn, edits, on_host
from fngraph.models.serving.scheduling import advance, plan
from fngraph.models.serving.steps import case_of
from tests.models.conftest import DEVICES, gathered, wide_params

V, SIZE = 40, 4
CONFIG = llama.Config(V, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, dim=24, mlp_dim=32)
POLICY = Policy(24, 4, 8, SIZE, query_lens=(1, 3), ngram=1)


def by_hand(logits: list[float], prompt: list[int], new: list[int], settings: Settings,
            allowed: list[int], barred: list[int]) -> list[float]:  # fmt: skip
    """The same of one place, a token at a time."""
    out = []
    for token, x in enumerate(logits):
        if token in prompt or token in new:
            factor = settings.repetition_penalty
            x = x / factor if x > 0 else x * factor
        x -= settings.frequency_penalty * new.count(token)
        x -= settings.presence_penalty * (token in new)
        x += dict(settings.logit_bias).get(token, 0.0)
        out.append(-math.inf if token in barred or token not in allowed else x)
    return out


ALL = Settings(0.0, 0, 1.0, 0.0, None, 1.3, 0.7, 0.4, {3: 2.0, 7: -math.inf, 9: -1.5})
ONE_EACH = [
    Settings(repetition_penalty=1.5), Settings(repetition_penalty=0.5),
    Settings(presence_penalty=2.0), Settings(frequency_penalty=-0.5),
    Settings(logit_bias=((0, 3.0), (39, -3.0))), ALL, Settings(),
]  # fmt: skip


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("settings", ONE_EACH, ids=range(len(ONE_EACH)))
def test_logits_are_changed_as_by_hand_at_each_place_of_a_draft(settings, odd):
    """A verify row counts the drafts before a place, and none behind it."""
    rng = random.Random(5)
    vocabulary = range(0, V, 2)  # what its grammar allows
    state = start(40, POLICY)
    prompt = rng.sample(range(odd, V, 2), k=6)  # and so the drafts: its grammar allows them or not
    state = submit(
        state, POLICY, prompt, 12, settings=settings, stop=[5, 6, [1, 2]], min_tokens=4,
        grammar=lambda new: vocabulary,
    )  # fmt: skip
    state, _ = advance(plan(state, POLICY), [[prompt[0]]])
    state, _ = advance(plan(state, POLICY), [[prompt[0]]])
    state = plan(state, POLICY)
    (row,) = state.rows
    assert len(row.drafts) == 2
    allowed, faults = grammars.ask(state.rows, (), V)
    assert not faults
    kind = batch_type("logits")
    batch = lay_out(
        state.rows, POLICY, lambda spec: empty_batch(kind, POLICY, spec, V), (), allowed
    )
    assert batch.spec.extra == SHAPED and case_of(batch.spec).shaped
    logits = torch.randn(1, 3, V, generator=torch.Generator().manual_seed(1)) * 3
    got = changed(logits, batch, batch.positions[batch.logits_indices] + 1)
    for q in range(3):
        new = [prompt[0], prompt[0], *row.drafts[:q]]
        here = vocabulary if all(token % 2 == 0 for token in row.drafts[:q]) else []
        barred = [5, 6] if len(new) < 4 else []
        want = by_hand(logits[0, q].tolist(), prompt, new, settings, list(here), barred)
        torch.testing.assert_close(got[0, q], torch.tensor(want))


def test_a_row_that_asks_for_nothing_keeps_its_bits():
    policy = Policy(24, 4, 8, SIZE)
    state = start(40, policy)
    state = submit(state, policy, [1, 2, 3], 5, settings=ALL)
    state = submit(state, policy, [1, 2, 3], 5)
    state = plan(state, policy)
    kind = batch_type("logits")
    batch = lay_out(state.rows, policy, lambda spec: empty_batch(kind, policy, spec, V))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        logits = torch.randn(2, 1, V).to(dtype)
        got = changed(logits, batch, batch.positions[batch.logits_indices] + 1)
        assert torch.equal(got[1], logits[1].to(got.dtype)) and not torch.equal(got[0], logits[0])


def test_logprobs_are_of_the_logits_that_the_model_gave():
    logits = torch.randn(2, 1, V)
    got = drawn(logits, torch.tensor([[3], [-1]]), 5)
    want = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(got.logprobs[0, 0].double(), want[0, 0, 3])
    assert got.top_ids.shape == (2, 1, 5)
    torch.testing.assert_close(got.top_logprobs.double(), want.sort(descending=True)[0][..., :5])
    assert drawn(logits, torch.zeros(2, 1).long(), 99).top_ids.shape[-1] == V


def even(new):
    """Even tokens alone; after eight, none of the small ones."""
    return [token for token in range(V) if token % 2 == 0 and (len(new) < 8 or token > 20)]


REQUESTS = [  # prompt, max_new, what else
    ((1, 2, 3), 12, {}),
    ((1, 2, 3), 12, {"settings": ALL}),
    ((4, 5, 6, 7, 8), 14, {"settings": Settings(frequency_penalty=1.5), "logprobs": 2}),
    ((9,) * 7, 10, {"settings": Settings(0.9, seed=4, repetition_penalty=1.4)}),
    ((9,) * 7, 12, {"grammar": even, "logprobs": 0}),
    ((1, 2, 3), 12, {"stop": list(range(0, V, 3)), "min_tokens": 6}),
    ((5, 6), 8, {"settings": Settings(0.7, seed=1)}),
    ((7, 7, 7), 15, {"settings": Settings(logit_bias={7: 30.0}), "logprobs": 3}),
]  # fmt: skip


def served(steps, cache, state, policy):
    events = list(stream(serve(steps, cache, state, policy)))
    logprobs: dict[int, list] = {}
    for event in events:
        assert len(event.logprobs) in (0, len(event.tokens))
        logprobs.setdefault(event.id, []).extend(event.logprobs)
    return gathered(events), {event.id: event.end for event in events if event.end}, logprobs


@pytest.fixture(scope="module")
def alone():
    """See `by_itself`, on the CPU."""
    return by_itself("cpu")


@functools.cache
def by_itself(device):
    """What each request gets alone, by bare `forward`."""
    params, found = wide_params(CONFIG, device=device), []
    policy = Policy(24, 1, 8, SIZE)
    for prompt, max_new, asked in REQUESTS:
        steps = bare_steps(llama.forward, params, policy, "sampling", "logits", device=device)
        cache = llama.init_cache(CONFIG, 8, block_size=SIZE, device=device)
        state = submit(start(8, policy), policy, prompt, max_new, **asked)
        texts, ends, logprobs = served(steps, cache, state, policy)
        found.append((texts[0], ends[0], logprobs[0]))
    return found


@pytest.mark.sampled("FULL_AND_PIECEWISE")
@pytest.mark.parametrize("device, recorder", DEVICES)
@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_texts_are_the_same_in_every_mode_and_with_drafts_as_alone(modes, device, recorder):
    """Whatever padding holds."""
    params = wide_params(CONFIG, device=device)
    cache = llama.init_cache(CONFIG, 24, block_size=SIZE, device=device)
    steps = make_steps(
        llama.forward, params, cache, POLICY, "sampling", "logits", modes=modes, sizes=(4, 12, 24),
        recorder=recorder, progress=False, guards=True,
    )  # fmt: skip
    state = start(24, POLICY)
    for prompt, max_new, asked in REQUESTS:
        state = submit(state, POLICY, prompt, max_new, **asked)
    texts, ends, logprobs = served(steps, cache, state, POLICY)
    for i, (text, end, lps) in enumerate(by_itself(device)):
        assert (texts[i], ends[i]) == (text, end), REQUESTS[i]
        asked = REQUESTS[i][2].get("logprobs")
        assert len(logprobs[i]) == (0 if asked is None else len(text))
        for got, want in zip(logprobs[i], lps, strict=True):
            assert got.logprob == pytest.approx(want.logprob, abs=1e-4)
            assert len(got.top) == asked
            assert [p for _, p in got.top] == pytest.approx([p for _, p in want.top], abs=1e-4)


def test_what_was_asked_for_is_what_comes(alone):
    plain, penal, counted, _, only_even, late, _, biased = (one[0] for one in alone)
    assert plain != penal and 7 not in penal
    assert all(token % 2 == 0 for token in only_even) and min(only_even[8:]) > 20
    assert len(late) > 6 and late[-1] % 3 == 0 and not any(t % 3 == 0 for t in late[:6])
    assert len(set(counted)) > len(set(plain))
    assert biased == (7,) * 15
    tops = alone[7][2]
    assert tops[0].logprob < tops[0].top[0][1] and tops[0].top[0][0] != 7  # before the bias


@pytest.mark.parametrize(
    "grammar, says",
    [
        (lambda new: [] if len(new) == 3 else None, "allows no token after 3 new ones"),
        (lambda new: np.zeros(V, bool), "allows no token after 0 new ones"),
        (lambda new: torch.zeros(2, dtype=torch.int32), "allows no token after 0 new ones"),
        (lambda new: [1 // (2 - len(new))], "raised ZeroDivisionError"),
        (lambda new: 7, "raised TypeError: it returned 7: return ids, bools or"),
        (lambda new: [V], r"raised ValueError: it allows 40, the vocabulary is 40"),
        (lambda new: [1.5], "raised TypeError: it returned"),
        (lambda new: np.ones(V - 1, bool), r"its bools are \[39\]"),
        (lambda new: np.ones(3, np.int32), r"its bitmask is \[3\], 40 tokens take 2 words"),
    ],
)
def test_a_grammar_that_fails_ends_its_request_alone(grammar, says, alone):
    """The other one, which shares its prompt, gets what it gets alone."""
    params, cache = wide_params(CONFIG), llama.init_cache(CONFIG, 24, block_size=SIZE)
    for policy in (POLICY, Policy(24, 4, 8, SIZE)):
        steps = bare_steps(llama.forward, params, policy, "sampling", "logits")
        state = submit(start(24, policy), policy, (9,) * 7, 10, grammar=grammar)
        prompt, max_new, asked = REQUESTS[3]
        state = submit(state, policy, prompt, max_new, **asked)
        texts, ends, _ = served(steps, cache, state, policy)
        assert texts[1] == alone[3][0] and ends[1] == "length"
        assert ends[0].startswith("failed: its grammar "), ends
        assert re.search(says, ends[0])


def test_masks_of_all_kinds_say_the_same():
    ids = [0, 5, 31, 32, 39]
    bools = np.isin(np.arange(V), ids)
    words = grammars.words_of(ids, V)
    assert words.dtype == np.int32 and words.shape == (2,)
    for given in (set(ids), np.array(ids), torch.tensor(ids), bools, torch.tensor(bools), words,
                  words | np.array([0, -256], np.int32)):  # fmt: skip
        assert np.array_equal(grammars.words_of(given, V), words)
    assert np.array_equal(grammars.words_of(None, V), grammars.words_of(range(V), V))


def test_a_plain_batch_runs_what_it_always_ran():
    """A request that asks for more takes the batch to another function, and only while it is in."""
    params, cache = wide_params(CONFIG), llama.init_cache(CONFIG, 24, block_size=SIZE)
    policy = Policy(24, 4, 8, SIZE)
    steps = make_steps(
        llama.forward, params, cache, policy, "logits", modes="FULL", sizes=(4, 24),
        recorder="tape", progress=False,
    )  # fmt: skip
    assert "2 functions; greedy, logits" in repr(steps)
    state = submit(start(24, policy), policy, (1, 2), 8)
    state = submit(state, policy, (3, 4), 3, settings=Settings(presence_penalty=1.0))
    ran = []
    while state.live:
        state, batch = schedule(state, policy, steps)
        ids, cache = steps.run(cache, batch)
        ran.append(isinstance(ids, Drawn))
        assert ("text" in vars(batch)) == ran[-1]
        state, _ = advance(state, (ids.ids if ran[-1] else ids).tolist())
    assert ran == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    "more, asked, says",
    [
        ((), {"settings": ALL}, r'change no logits .* make_steps\(\.\.\., "logits"\)'),
        ((), {"logprobs": 0}, "report none"),
        ((), {"grammar": even}, "change no logits"),
        ((), {"stop": [3], "min_tokens": 1}, "min_tokens before a stop"),
        (("logits",), {"logprobs": 21}, "logprobs=21, beyond 20"),
        (("logits",), {"settings": Settings(logit_bias={40: 1.0})}, "token 40 of its logit_bias"),
        (("logits",), {"settings": Settings(logit_bias=dict.fromkeys(range(65), 1.0))},
         "name 65 tokens, beyond 64"),
    ],
)  # fmt: skip
def test_steps_that_cannot_do_it_say_so(more, asked, says):
    params, cache = wide_params(CONFIG), llama.init_cache(CONFIG, 24, block_size=SIZE)
    steps = bare_steps(llama.forward, params, POLICY, *more)
    state = submit(start(24, POLICY), POLICY, (1, 2), 8)
    state = submit(state, POLICY, (1, 2), 8, **asked)
    ends = served(steps, cache, state, POLICY)[1]
    assert ends[0] == "length"
    assert re.search(says, ends[1]), ends


def test_who_cannot_be_run_leaves_nothing_to_share():
    """Its row computes token 0 throughout; another request with its prompt joins in that step."""
    params, prompt = wide_params(CONFIG), tuple(range(1, 14))
    texts = []
    for bad in (False, True):
        cache = llama.init_cache(CONFIG, 24, block_size=SIZE)
        steps = bare_steps(llama.forward, params, POLICY)
        state = start(24, POLICY)
        if bad:
            state = submit(state, POLICY, prompt, 8, settings=Settings(1.0))
        state = submit(state, POLICY, prompt, 8)
        texts.append(served(steps, cache, state, POLICY)[0][int(bad)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("bias", [{3: 2.0, 7: -math.inf}, [(3, 2.0), (7, -math.inf)]])
def test_a_bias_is_as_it_was_submitted(bias):
    state = submit(start(24, POLICY), POLICY, (1,), 2, settings=Settings(logit_bias=bias))
    bias.clear()
    (job,) = state.waiting
    assert job.request.settings.biases == {3: 2.0, 7: -math.inf}


@pytest.mark.parametrize(
    "settings, says",
    [
        (Settings(repetition_penalty=0.0), "repetition_penalty=0.* is not between"),
        (Settings(presence_penalty=math.nan), "within 1e6 of 0"),
        (Settings(frequency_penalty=math.inf), "within 1e6 of 0"),
        (Settings(logit_bias={-1: 1.0}), "counted from 0"),
        (Settings(logit_bias={2: math.inf}), "up to 1e38 or -inf"),
        (Settings(logit_bias={2: math.nan}), "up to 1e38 or -inf"),
        (Settings(logit_bias={"a": 1.0}), "Pass tokens"),
        (Settings(logit_bias=(3, 4)), r"logit_bias=\(3, 4\): pass a dict"),
    ],
)
def test_settings_that_cannot_be(settings, says):
    with pytest.raises(ValueError, match=says):
        submit(start(24, POLICY), POLICY, (1,), 2, settings=settings)


def test_steps_with_logits_know_their_vocabulary():
    with pytest.raises(ValueError, match="pass vocab_size="):
        bare_steps(llama.forward, None, POLICY, "logits")
    assert edits(submit(start(24, POLICY), POLICY, (1,), 2, settings=ALL).waiting[0].request)
    assert fg.core.buffers_of(batch_type("logits"))["text"].dtype == "int32"


def test_steps_of_another_vocabulary_are_refused():
    params = wide_params(CONFIG)
    with pytest.raises(ValueError, match="vocab_size=20, but the model has 40 logits"):
        bare_steps(llama.forward, params, POLICY, "logits", vocab_size=20)
    batch = types.SimpleNamespace(allowed=torch.zeros(1, 1, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"up to 128, and there are 40.*vocab_size=40\)"):
        changed(torch.zeros(1, 1, V), batch, torch.zeros(1, 1))


def test_what_a_step_gave_is_not_its_tokens():
    params = wide_params(CONFIG)
    steps, cache = bare_steps(llama.forward, params, POLICY, "logits"), None
    cache = llama.init_cache(CONFIG, 16, block_size=SIZE)
    state, batch = schedule(submit(start(16, POLICY), POLICY, [1, 2], 3, logprobs=2), POLICY, steps)
    given, cache = steps.run(cache, batch)
    with pytest.raises(TypeError, match=r"advance\(state, \*on_host\(ids, state\.rows\)\)"):
        advance(state, given)
    _, (event,) = advance(state, *on_host(given, state.rows))
    assert len(event.logprobs[0].top) == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([-1, 7], "it allows -1, the vocabulary is 40"),
        (np.ones(V, np.int64), "a number for each token: return bools, or ids once each"),
        (np.full(V, 0.5), r"it returned float64, \[40\]"),
        (["x"] * 1000, r"it returned \['x', 'x'.*\.\.\.\]: return ids"),
    ],
)
def test_a_grammar_that_returns_what_is_no_mask(given, told):
    with pytest.raises((TypeError, ValueError), match=told):
        grammars.words_of(given, V)


def test_a_bitmask_without_a_sign_is_one_too():
    full = np.full(2, 2**32 - 1, np.uint32)
    assert (grammars.words_of(full, V) == grammars.words_of(None, V)).all()
    assert (grammars.words_of([True] * V, V) == grammars.words_of(None, V)).all()
