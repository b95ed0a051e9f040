"""Blocks that texts share: several texts of one prompt, and what is kept of those that ended."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fngraph.models import (
    Policy,
    Settings,
    Tally,
    advance,
    bare_steps,
    cancel,
    forget,
    gather,
    llama,
    schedule,
    serve,
    start,
    stream,
    submit,
)
from fngraph.models.serving import blocks
from tests.models.conftest import wide_params
from tests.models.test_scheduling import check_blocks
from tests.models.traffic import generate, next_token, simulate

SIZE = 4
POLICY = Policy(32, 6, 16, SIZE)
CONFIG = llama.Config(50, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, dim=24, mlp_dim=32)
PROMPT = tuple(range(1, 15))


def finish(state, policy=POLICY):
    """The state at the end, the texts, and the tokens that were computed."""
    events, tokens = [], 0
    for step in simulate(state, policy):
        check_blocks(step.before)
        check_blocks(step.after)
        events += step.events
        tokens += step.batch.spec.num_tokens
        state = step.after
    return state, gather(events), tokens


# the cache of `simulate` is its own, so that turns go through one inbox
def turns(*prompts, policy=POLICY, num_blocks=40, between=lambda state: state, max_new=9):
    """Each prompt, or what it makes of the texts so far, once the one before has ended.

    Returns: texts, and for each turn the tokens computed and those that were found.
    """
    texts, counts, left, events = [], [], list(prompts), []

    def inbox(state):
        if not state.live and left:
            if counts:
                state = between(state)
                texts.append(gather(events).get(state.submitted - 1, ()))
            prompt = left.pop(0)
            counts.append([0, 0])
            state = submit(state, policy, prompt(texts) if callable(prompt) else prompt, max_new)
        return state

    for step in simulate(start(num_blocks, policy), policy, inbox):
        check_blocks(step.before)
        check_blocks(step.after)
        events += step.events
        counts[-1][0] += step.batch.spec.num_tokens
        counts[-1][1] += step.before.reused
        last = step.after
    texts.append(gather(events)[last.submitted - 1])
    return texts, counts, last


def test_a_second_turn_computes_its_new_tokens_alone():
    """What it generated is shared too, as far as blocks are full."""
    second = lambda texts: (*PROMPT, *texts[0], 2, 1, 0)  # noqa: E731
    texts, counts, _ = turns(PROMPT, second)
    assert texts == [generate(PROMPT, 9), generate(second(texts), 9)]
    cached = (len(PROMPT) + 9 - 1) // SIZE * SIZE  # the last token drawn was never computed
    assert counts[0] == [len(PROMPT) + 8, 0]
    assert counts[1] == [len(PROMPT) + 9 + 3 - cached + 8, cached]


@pytest.mark.parametrize("query_lens", [(1, 3), (1, 2, 4)])
def test_tokens_that_were_drafts_are_shared_as_well(query_lens):
    policy = Policy(32, 6, 24, SIZE, query_lens=query_lens, ngram=1)
    second = lambda texts: (*PROMPT, *texts[0], 2, 1, 0)  # noqa: E731
    texts, counts, _ = turns(PROMPT, second, policy=policy, max_new=30)
    assert texts == [generate(PROMPT, 30), generate(second(texts), 30)]
    assert counts[1][1] == (len(PROMPT) + 30 - 1) // SIZE * SIZE


def test_nothing_is_kept_without_sharing():
    policy = Policy(32, 6, 16, SIZE, share=False)
    _, counts, last = turns(PROMPT, PROMPT, policy=policy)
    assert counts[0] == counts[1] == [len(PROMPT) + 8, 0] and not last.pool.named


def test_blocks_are_kept_until_they_are_needed_the_oldest_first():
    """Three texts of six blocks, of which five are full; the end of the first one goes first."""
    first, second, third = ((i, *PROMPT) for i in (20, 21, 22))
    # the third takes what the first had, but not what the second had
    _, counts, _ = turns(first, second, third, second, first, num_blocks=12)
    found = [one[1] for one in counts]
    assert found[:3] == [0, 0, 0] and found[3] == 12  # its prompt, but for what is left over
    for num_blocks, left in ((11, 0), (12, 4), (13, 8), (14, 12), (40, 12)):
        _, counts, _ = turns(first, second, third, first, num_blocks=num_blocks)
        assert counts[3][1] == left


def test_a_hit_makes_a_text_the_newest():
    first, second, third = ((i, *PROMPT) for i in (20, 21, 22))
    _, counts, _ = turns(first, second, first, third, first, num_blocks=12)
    assert [one[1] for one in counts] == [0, 0, 12, 0, 12]


def test_what_is_forgotten_is_computed_again():
    texts, counts, last = turns(PROMPT, PROMPT, between=lambda state: forget(state, -1))
    assert counts[0] == counts[1] and texts[0] == texts[1]
    assert last.pool.named and not forget(last, -1).pool.named and not forget(last).pool.names
    assert forget(last, 3).pool is last.pool


def test_adapters_keep_their_own():
    pool = blocks.new_pool(8, 2)
    text = np.arange(4)
    for root in (-1, 0):
        pool, held = blocks.take(pool, 2)
        pool = blocks.release(blocks.give_names(pool, np.array(held), text, 2, root, 0), held)
    assert pool.kept == 4 and sorted(blocks.behind(pool, [(0,)])) == [2, 3]
    pool = blocks.unname(pool, blocks.behind(pool, [(0,)]))
    assert pool.kept == 2 and not blocks.find_prefix(pool, text, 2, 0)
    assert blocks.find_prefix(pool, text, 2, -1) == [0, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_of_texts_that_end_at_once_the_ends_go_before_what_they_share(first):
    """Or a block would be found behind one that holds other tokens by then."""
    pool, text = blocks.new_pool(3, 2), np.arange(4)
    pool, (head, one, other) = blocks.take(pool, 3)
    for last, tail in ((one, 0), (other, 7)):
        whole = np.array([*text[:2], tail, tail])
        held = np.array([head, last])
        pool = blocks.give_names(pool, held, whole, 2, -1, int(last == other))
    pool = blocks.share(pool, [head])
    runs = [[head, one], [head, other]]
    pool = blocks.release(pool, runs[first], runs[1 - first])
    for left in (2, 1, 0):
        pool, (taken,) = blocks.take(pool, 1)
        assert (taken == head) == (left == 0) and len(pool.names) == left


def test_what_is_shared_and_what_goes_first_over_many_turns():
    """Random chats in a small cache: the same texts, and no block before one that is gone."""
    rng = random.Random(0)
    heads = [tuple(rng.choices(range(3), k=n)) for n in (3, 9, 17)]
    seen: list[tuple] = []

    def one(texts):
        """The beginning of a text, or one that goes on from an earlier one."""
        back = rng.randrange(1, 9)
        goes_on = rng.random() < 0.5 and len(texts) >= back
        tail = (*texts[-back], rng.randrange(3)) if goes_on else ()
        prompt = (*(seen[-back] if goes_on else rng.choice(heads)), *tail)
        seen.append(prompt if len(prompt) < 50 else heads[0])
        return seen[-1]

    asked = [one] * 60
    texts, counts, last = turns(*asked, num_blocks=20)
    assert texts == [generate(prompt, 9) for prompt in seen]
    assert sum(found > 0 for _, found in counts) > 20 and len(last.pool.free) == 20


def test_texts_of_one_prompt_share_its_blocks_and_free_them_with_the_last():
    prompt = (*PROMPT, 5, 6, 7)  # four blocks, and a token
    state = submit(start(60, POLICY), POLICY, prompt, 6, n=3)
    assert [job.id for job in state.waiting] == [0, 1, 2] and state.submitted == 3
    first = True
    for step in simulate(state, POLICY):
        check_blocks(step.before)
        running = step.before.running
        if first:  # the prompt once, and of the others what is left over of the last block
            assert step.batch.spec.num_tokens == len(prompt) + 2 * 1
            assert step.before.reused == 2 * 16
            shared = list(running[0].blocks)[:4]
            step_state = step.after
            first = False
        if len(running) == 3:
            assert all(step.before.pool.holders[block] == 3 for block in shared)
    assert len(step.after.pool.free) == 60 and not step.after.pool.holders
    for id in (0, 2):  # two of them go, the blocks stay
        step_state = cancel(step_state, id)
        assert not set(shared) & set(step_state.pool.free.tolist())
    assert set(shared) <= set(cancel(step_state, 1).pool.free.tolist())


def test_texts_of_one_prompt_have_seeds_of_their_own():
    """Text i is the one of its seed alone; all of them are the same again."""
    params, policy = wide_params(CONFIG), Policy(32, 6, 16, SIZE)
    steps = bare_steps(llama.forward, params, policy, "sampling")

    def texts(*asked):
        cache, state = llama.init_cache(CONFIG, 40, block_size=SIZE), start(40, policy)
        for n, seed in asked:
            settings = Settings(1.5, seed=seed)
            state = submit(state, policy, PROMPT, 8, settings=settings, n=n)
        got = gather(stream(serve(steps, cache, state, policy)))
        return [got[i] for i in range(len(got))]

    together = texts((4, 7))
    assert len(set(together)) == 4 and together == texts((4, 7))
    assert together == [texts((1, 7 + i))[0] for i in range(4)]
    assert texts((3, None)) == [texts((1, i))[0] for i in range(3)]


def test_the_tally_counts_what_was_found():
    params, cache = wide_params(CONFIG), llama.init_cache(CONFIG, 40, block_size=SIZE)
    steps, tally = bare_steps(llama.forward, params, POLICY), Tally()
    state = submit(start(40, POLICY), POLICY, PROMPT, 6)
    for _ in range(2):
        for one in tally.watch(serve(steps, cache, state, POLICY)):
            state = one.state
        state = submit(state, POLICY, PROMPT, 6)
    assert tally.total("reused") == 12 and "reused" in tally.as_text()
    assert tally.total("tokens") == 2 * (len(PROMPT) + 5) - 12


def test_a_thrown_out_request_finds_what_is_left_of_its_own():
    policy = Policy(32, 3, 16, SIZE, reserve=0)
    state = start(13, policy)
    for i in range(3):
        state = submit(state, policy, (i, *PROMPT[:6]), 12)
    reused = 0
    texts = []
    for step in simulate(state, policy):
        check_blocks(step.after)
        reused += step.before.reused
        texts += step.events
    assert reused >= 2 * SIZE
    assert gather(texts) == {i: generate((i, *PROMPT[:6]), 12) for i in range(3)}
    assert next_token(PROMPT) in range(3)


@pytest.mark.parametrize("who", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("max_tokens", [32, 6])
def test_what_a_step_that_failed_would_have_computed_is_nobodys(max_tokens, who):
    """It was planned, and never came back: nothing of it is in the cache."""
    params, policy = wide_params(CONFIG), Policy(max_tokens, 6, 16, SIZE)
    steps = bare_steps(llama.forward, params, policy)

    def texts(*failing):
        cache = llama.init_cache(CONFIG, 40, block_size=SIZE)
        state = start(40, policy)
        for _ in range(2):
            state = submit(state, policy, PROMPT, 8)
        events = []
        for fails in failing:
            state, batch = schedule(state, policy, steps)
            if fails:
                for id in who:
                    state = cancel(state, id)
                state = submit(state, policy, PROMPT, 8, priority=-1)
                continue
            ids, cache = steps.run(cache, batch)
            state, new = advance(state, ids.tolist())
            events += new
            names = state.pool.names
            assert all(type(ahead) is tuple or ahead in names for ahead, _ in names.values())
        events += stream(serve(steps, cache, state, policy))
        return gather(events)

    (want,) = set(texts().values())
    for failing in ((True,), (False, True), (True, True), (False, False, True)):
        got = texts(*failing)
        assert len(got) >= 2 + sum(failing) - len(who)
        assert all(text == want[: len(text)] if i in who else text == want
                   for i, text in got.items())  # fmt: skip
