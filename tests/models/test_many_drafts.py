"""Several tokens a request from one launch, each turn of which verifies drafts: the texts of single
steps without drafts, in fewer turns, whatever the drafts are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fngraph as fg
from fngraph.models import (
    Policy,
    Settings,
    State,
    bare_steps,
    gather,
    llama,
    lora,
    make_steps,
    naming,
    serve,
    start,
    submit,
)
from fngraph.models.serving import many, turns
from fngraph.models.serving.batches import STOPS, batch_type
from fngraph.models.serving.drawn import drawn_of
from fngraph.models.serving.loop import Served
from fngraph.models.serving.sampling import FAILED, UNDRAWN
from fngraph.models.serving.scheduling import advance, plan
from fngraph.models.serving.steps import case_of
from fngraph.models.serving.texts.tokens import Tokens
from tests.models.conftest import gathered, wide_params
from tests.models.test_many import LEVELS, counted

SIZE, BLOCKS = 4, 60
POLICY = Policy(32, 4, 14, SIZE, decode_many=6, query_lens=(1, 3, 4), ngram=1)
SINGLE = dataclasses.replace(POLICY, decode_many=1, query_lens=(1,))
MODES = ["bare", "NONE", "FULL_AND_PIECEWISE"]
LOOPS = [(1, 2, 3) * 4, (5,) * 6, (7, 8), (60, 61, 60, 61)]  # prompts, most of which repeat


def repeating(params: Any, cache: Any, batch: Any) -> Any:
    """A model of one's own, that counts its turns and likes to go round in circles of 8 tokens."""
    logits, cache = counted(params, cache, batch)
    places = batch.positions[batch.logits_indices] + 1
    liked = torch.arange(logits.shape[-1], device=logits.device) == (places % 8)[..., None] + 3
    return logits + 6 * liked.to(logits.dtype).view(logits.shape), cache


def failing(params: Any, cache: Any, batch: Any) -> Any:
    """The same, whose logits are NaN from a place on."""
    logits, cache = repeating(params, cache, batch)
    late = batch.positions[batch.logits_indices] >= 19
    return logits.masked_fill(late.view(logits.shape[:-1])[..., None], float("nan")), cache


class Model:
    """A small model, steps of each mode, made once, and the cache under them."""

    def __init__(self, device: str) -> None:
        self.params = wide_params(llama.Config(256, 2, 6, 2, 12, 32, 48), device=device)
        self.recorder = "tape" if device == "cpu" else "cuda"
        self.device = device
        self.made: dict[Any, tuple[Any, Any]] = {}

    def new_cache(self) -> Any:
        """A cache, and how often the model ran."""
        kv = llama.init_cache(self.params.config, BLOCKS, block_size=SIZE, device=self.device)
        return kv, torch.zeros(1, device=self.device)

    def steps(self, forward: Any, mode: str, policy: Policy, adapters: Any) -> tuple[Any, Any]:
        """Steps, and their cache, in which reading what was never written shows."""
        at = forward, mode, policy, id(adapters)
        if at not in self.made:
            cache = self.new_cache()
            how = {"adapters": adapters} | (
                {"device": self.device} if mode == "bare" else
                {"modes": mode, "recorder": self.recorder, "sizes": (4, 16, 32), "progress": False}
            )  # fmt: skip
            held = (self.params, policy) if mode == "bare" else (self.params, cache, policy)
            make: Any = bare_steps if mode == "bare" else make_steps
            self.made[at] = make(forward, *held, "sampling", **how), cache
        steps, cache = self.made[at]
        for leaf in (leaf for layer in cache[0] for leaf in layer):
            leaf.fill_(float("nan"))
        cache[1].zero_()
        return steps, cache

    def served(
        self, mode: str, policy: Policy, *, prompts: Any = LOOPS, new: int = 17,
        forward: Any = counted, adapters: Any = None, loops: Policy | None = None, **asked: Any,
    ) -> tuple[dict[int, tuple[int, ...]], list[Served], int]:  # fmt: skip
        """Texts, steps, and how often the model ran; 0 of bare steps, whose caches are new ones."""
        steps, cache = self.steps(forward, mode, policy, adapters)
        loops = loops or policy
        state = start(BLOCKS, loops)
        for i, prompt in enumerate(prompts):
            own = {name: each[i] for name, each in asked.items()}
            state = submit(state, loops, prompt, new + i, **own)
        ran = [*serve(steps, cache, state, loops)]
        return gathered(event for one in ran for event in one.events), ran, int(cache[1])


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request: Any) -> Model:
    """`Model` on each device."""
    return Model(request.param)


def guessed(ran: list[Served]) -> list[Served]:
    """The launches whose turns verify drafts."""
    return [one for one in ran if one.turns > 1 and case_of(one.spec).verify]


@pytest.mark.sampled("repeating-FULL_AND")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forward", [counted, repeating])
def test_texts_are_those_of_single_steps(model: Model, forward: Any, mode: str):
    """Greedy and sampled, with stops on the way; a model that repeats itself takes fewer turns."""
    how: dict[str, Any] = {"stop": [[], [[200, 184]], [[10]], [[9]]]}
    if forward is repeating:
        how["settings"] = [Settings(), Settings(0.9, seed=5), Settings(1.1, 40, 0.95), Settings()]
    want, single, _ = model.served("bare", SINGLE, forward=forward, **how)
    got, ran, turns = model.served(mode, POLICY, forward=forward, **how)
    assert got == want
    launches = guessed(ran)
    assert launches and all(one.kind == "verify" and one.spec.query_len == 4 for one in launches)
    assert len(ran[-1].state.pool.free) == BLOCKS
    if forward is repeating:
        assert {len(text) for text in got.values()} - {17, 18, 19, 20}  # some have stopped
        assert turns < len(single)
    if mode == "FULL_AND_PIECEWISE":
        assert {one.ran.mode for one in launches} == {fg.Mode.FULL}


def test_turns_end_when_all_are_done(model: Model):
    """17 tokens of a circle of 8: the model runs as often as drafts leave it to."""
    prompts = [tuple(range(3, 11)) * 2, tuple(range(3, 11)) * 2]
    got, ran, turns = model.served(
        "FULL_AND_PIECEWISE", dataclasses.replace(POLICY, decode_many=40),
        prompts=prompts, forward=repeating, new=16,
    )  # fmt: skip
    assert [one.turns for one in ran] == [1, 16] and guessed(ran)
    assert got[0] == tuple(3 + i % 8 for i in range(16)) == got[1][:16]
    assert turns == 1 + 4  # 16 more tokens, 4 a turn


def test_the_loop_may_ask_for_less_than_the_steps_were_made_for(model: Model):
    """Fewer tokens, shorter drafts: the drafts of a launch are those of the steps."""
    less = dataclasses.replace(POLICY, decode_many=5, query_lens=(1, 3))
    want, *_ = model.served("bare", SINGLE, forward=repeating)
    for mode in ("bare", "FULL_AND_PIECEWISE"):
        got, ran, _ = model.served(mode, POLICY, forward=repeating, loops=less)
        assert got == want
        assert {one.spec.query_len for one in guessed(ran)} == {4}
        assert max(one.turns for one in ran) == 5


@pytest.mark.sampled("FULL")
@pytest.mark.parametrize("mode", MODES)
def test_near_the_end_of_a_table_drafts_have_no_place(model: Model, mode: str):
    """A text as long as its table: the last turns verify less, or nothing, and all are right."""
    longest = POLICY.max_blocks * SIZE
    prompts = [(1, 2, 3) * 4, (4, 5) * 5]
    want, *_ = model.served("bare", SINGLE, forward=repeating, prompts=prompts, new=longest - 12)
    got, ran, _ = model.served(mode, POLICY, forward=repeating, prompts=prompts, new=longest - 12)
    assert got == want and len(got[0]) == longest - 12
    assert guessed(ran) and any("a table has no place" in one.single for one in ran)


@pytest.mark.sampled("bare")
@pytest.mark.parametrize("mode", MODES)
def test_requests_that_draw_nothing_fail_as_in_single_steps(model: Model, mode: str):
    texts = []
    for at, policy in (("bare", SINGLE), (mode, POLICY)):
        got, ran, _ = model.served(at, policy, forward=failing)
        ends = {e.id: e.end for one in ran for e in one.events if e.end}
        texts.append((got, ends))
    assert texts[0] == texts[1] and all("no token" in end for end in texts[0][1].values())
    assert guessed(ran)


@pytest.mark.sampled("bare")
@pytest.mark.parametrize("mode", ["bare", "FULL_DECODE_ONLY"])
def test_adapters_go_along(model: Model, mode: str):
    generator = torch.Generator().manual_seed(1)
    slots = lora.slots(model.params, count=2, rank=4, names=("wq", "w_down"))
    for leaf in naming.named(slots).values():
        leaf.copy_(torch.randn(leaf.shape, generator=generator) * 0.3)
    how = {"prompts": [(5, 6, 5, 6)] * 3, "new": 25, "adapters": slots, "adapter": [-1, 0, 1]}
    want, *_ = model.served("bare", SINGLE, **how)
    got, ran, _ = model.served(mode, POLICY, **how)
    assert got == want and len(set(got.values())) == 3
    assert guessed(ran) and {case_of(one.spec).adapted for one in ran} == {True}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("level", LEVELS)
def test_texts_are_those_of_single_steps_of_the_same_level(model: Model, level: str):
    weights = fg.ops.lay_side_by_side(model.params)
    texts = []
    for policy in (SINGLE, POLICY):
        cache = llama.init_cache(weights.config, BLOCKS, block_size=SIZE, device=model.device)
        steps = make_steps(
            llama.forward, weights, cache, policy, modes="FULL_AND_PIECEWISE", progress=False,
            recorder=model.recorder, sizes=(4, 16), **LEVELS[level],
        )  # fmt: skip
        state = start(BLOCKS, policy)
        for i in range(3):
            state = submit(state, policy, (5 + i, 6, 7) * 2, 25)
        ran = list(serve(steps, cache, state, policy))
        texts.append(gather(event for one in ran for event in one.events))
    assert texts[0] == texts[1] and guessed(ran)


# --- turn by turn ---------------------------------------------------------------------------------


def next_token(text: Any) -> int:
    """The token after a text, of few kinds, so that texts repeat themselves."""
    return sum((i % 3 + 1) * token for i, token in enumerate(text)) % 5


def scripted(params: Any, cache: Any, batch: Any) -> Any:
    """A model that reads all of each text out of its slots, and then is sure of `next_token`."""
    slots = batch.slot_mapping
    cache = cache.index_put((slots[slots >= 0],), batch.token_ids[slots >= 0])
    logits = []
    for i, ats in enumerate(batch.logits_indices.tolist()):
        for at in ats:
            places = range(int(batch.positions[at]) + 1)
            where = [int(batch.block_tables[i, p // SIZE]) * SIZE + p % SIZE for p in places]
            logits.append(torch.eye(5)[next_token(cache[where].tolist())])
    return torch.stack(logits).view(*batch.logits_indices.shape, 5), cache


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 7),
            st.lists(st.integers(0, 4), max_size=2),
        ),
        min_size=1, max_size=3,
    ),
    st.integers(1, 4), st.integers(1, 3),
)  # fmt: skip
@settings(deadline=None)
def test_turn_by_turn(rows: list[Any], drafts: int, ngram: int):
    """Tokens up to what each row may draw, or what stops it, then UNDRAWN; and nothing is written
    but their slots, and those of drafts behind them."""
    most, table = 7, 6
    texts = [text for text, *_ in rows]
    count = len(rows)
    tables = torch.randperm(count * table).view(count, table)
    stops = [list(stop) + [FAILED] * (STOPS - len(stop)) for *_, stop in rows]
    kind = batch_type("many", "lookup")
    cache = torch.full((count * table * SIZE,), -7)
    for row, text in zip(tables.tolist(), texts):
        for place, token in enumerate(text[:-1]):
            cache[row[place // SIZE] * SIZE + place % SIZE] = token
    lengths = torch.tensor([len(text) for text in texts])
    batch = kind(
        token_ids=torch.zeros(count, 1 + drafts).long(),
        positions=torch.zeros(count, 1 + drafts).long(),
        slot_mapping=torch.zeros(count, 1 + drafts).long(),
        seq_lens=(lengths + drafts).int(),
        query_start_loc=torch.arange(count + 1).int() * (1 + drafts),
        block_tables=tables.int(),
        logits_indices=torch.arange(count * (1 + drafts)).view(count, -1),
        left=torch.tensor([left for _, left, _ in rows]).int(),
        stop_ids=torch.tensor(stops),
        text=torch.tensor([text + [3] * (table * SIZE - len(text)) for text in texts]).int(),
        spec=fg.BatchSpec(count * (1 + drafts), count, query_len=1 + drafts),
    )
    forward = turns.many_forward(scripted, most, SIZE, "many", "lookup", drafts=drafts, ngram=ngram)
    halted, _ = forward(None, torch.tensor([True]), cache, batch)
    ids, after = forward(None, torch.tensor([False]), cache, batch)
    for some, whole in zip(halted.tolist(), ids.tolist()):  # one turn's, of which the host ends it
        turn = drawn_of(some)
        assert min(1, len(drawn_of(whole))) <= len(turn) <= 1 + drafts
        assert turn == tuple(whole[: len(turn)]) and set(some[len(turn) :]) <= {UNDRAWN}
    written = {i for i, (old, new) in enumerate(zip(cache.tolist(), after.tolist())) if old != new}
    for row, (text, left, stop), got in zip(tables.tolist(), rows, ids.tolist()):
        want = list(text)
        while len(want) < len(text) + left and (want == text or want[-1] not in stop):
            want.append(next_token(want))
        assert got == want[len(text) :] + [UNDRAWN] * (most - len(want) + len(text))
        last = len(want) - 1 + drafts if left else 0
        mine = {row[p // SIZE] * SIZE + p % SIZE for p in range(len(text) - 1, last)}
        written -= mine
        for place, token in enumerate(want[:-1]):
            assert after[row[place // SIZE] * SIZE + place % SIZE] == token
    assert not written


# --- what is looked up, and when ------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4),
    st.integers(1, 4), st.integers(1, 5),
)  # fmt: skip
@settings(deadline=None)
def test_drafts_are_those_of_the_host(texts: list[list[int]], ngram: int, count: int):
    """What followed the first occurrence, then the last token; stale tokens lie behind each end."""
    rows = torch.randint(0, 4, (len(texts), 32), dtype=torch.int32)
    for row, text in zip(rows, texts):
        row[: len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    got = turns.look_up(rows, lengths, ngram, count)
    for text, drafts in zip(texts, got.tolist()):
        found = Tokens(text).after_first(ngram, count)
        if len(text) > ngram:
            assert drafts == (found + [text[-1]] * count)[:count]
        assert set(drafts) <= set(text)


def test_what_is_written_where():
    rows = torch.arange(10).view(2, 5)
    new = torch.tensor([[70, 71, 72], [80, 81, 82]])
    got = turns.written(rows, new, torch.tensor([1, 4]), torch.tensor([2, 3]))
    assert got.tolist() == [[0, 70, 71, 3, 4], [5, 6, 7, 8, 80]]
    assert turns.written(rows, new, torch.tensor([0, 0]), torch.tensor([0, 0])).equal(rows)


def drafting(policy: Policy, *prompts: tuple[int, ...], new: int = 20, blocks: int = 40) -> State:
    """A planned step of requests that are past their prompts, and begin to repeat them."""
    state = start(blocks, policy)
    for prompt in prompts:
        state = submit(state, policy, prompt, new)
    state, _ = advance(plan(state, policy), [[prompt[0]] for prompt in prompts])
    return plan(state, policy)


def test_blocks_are_taken_for_the_drafts_of_the_last_turn():
    state = drafting(POLICY, (1, 2, 1, 2))
    after = many.take_ahead(state, POLICY)
    assert after.turns == 6 and after.rows[0].drafts == (2, 1, 2)
    # 5 tokens, 6 turns, the last of which writes its token and 3 drafts: places 4 to 12
    assert len(after.rows[0].job.blocks) == -(-(5 + 6 - 1 + 3) // SIZE)
    assert len(after.pool.free) + len(after.running[0].blocks) == 40
    longer = many.take_ahead(state, POLICY, drafts=7)
    assert len(longer.rows[0].drafts) == 7 and longer.rows[0].drafts[-1] == 1
    assert len(longer.rows[0].job.blocks) == -(-(5 + 6 - 1 + 7) // SIZE)


def test_why_a_step_that_verifies_does_it_once():
    tight = dataclasses.replace(POLICY, max_tokens=9, query_lens=(1, 3, 6))
    state = drafting(tight, (1, 2, 1, 2), (4, 5, 4, 5))
    assert state.rows[0].drafts and "2 rows with 5 drafts" in many.take_ahead(state, tight).single
    state = drafting(POLICY, (1, 2, 1, 2), new=2)
    assert many.take_ahead(state, POLICY).single == "each request lacks one token"
    few = dataclasses.replace(POLICY, max_blocks=2, share=False)
    state = drafting(few, (1, 2, 1, 2), new=4)
    assert many.take_ahead(state, few).single == "a table has no place for more"
    state = drafting(POLICY, (1, 2, 1, 2), new=4, blocks=2)
    assert many.take_ahead(state, POLICY).single == "no block is free for more"
