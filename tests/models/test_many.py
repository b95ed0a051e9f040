"""Several tokens a request from one launch: the texts of single steps, and no turn too many.

The model here has what `llama` has, and counts how often it ran in a leaf of its own cache. So in
every mode the device itself says how many turns there were.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.models import (
    Policy,
    Settings,
    State,
    Steps,
    bare_steps,
    cancel,
    gather,
    llama,
    lora,
    make_steps,
    naming,
    serve,
    start,
    submit,
)
from fngraph.models.serving import many
from fngraph.models.serving.batches import MANY, STOPS, batch_type, empty_batch, lay_out
from fngraph.models.serving.halting import Halt
from fngraph.models.serving.loop import Served, schedule
from fngraph.models.serving.ranks.circles import Circle, Ranks
from fngraph.models.serving.ranks.following import over_ranks
from fngraph.models.serving.ranks.stages import Stage
from fngraph.models.serving.sampling import FAILED, UNDRAWN
from fngraph.models.serving.scheduling import advance, plan
from fngraph.models.serving.steps import case_of
from tests.models.conftest import gathered, wide_params

SIZE, BLOCKS = 4, 40
POLICY = Policy(32, 4, 10, SIZE, decode_many=6)
SINGLE = dataclasses.replace(POLICY, decode_many=1)
MODES = ["bare", "NONE", "FULL_AND_PIECEWISE"]
GONE = 4  # the request that is cancelled


def counted(params: Any, cache: Any, batch: Any) -> Any:
    """`llama.forward`, which also counts."""
    logits, kv = llama.forward(params, cache[0], batch)
    return logits, (kv, cache[1] + 1)


class Model:
    """Steps of each mode, made once, and the cache under them."""

    def __init__(self, device: str, recorder: str) -> None:
        self.params = wide_params(llama.Config(256, 2, 6, 2, 12, 32, 48), device=device)
        self.device, self.recorder = device, recorder
        self.made: dict[Any, tuple[Steps, Any]] = {}

    def steps(self, mode: str, policy: Policy = POLICY, *more: str) -> tuple[Steps, Any]:
        """Steps, and their cache, in which reading what was never written shows."""
        at = mode, policy, more
        if at not in self.made:
            kv = llama.init_cache(self.params.config, BLOCKS, block_size=SIZE, device=self.device)
            cache = kv, torch.zeros(1, device=self.device)
            if mode == "bare":
                steps = bare_steps(counted, self.params, policy, *more, device=self.device)
            else:
                steps = make_steps(
                    counted, self.params, cache, policy, *more, modes=mode,
                    recorder=self.recorder, sizes=(1, 2, 4, 32), progress=False,
                )  # fmt: skip
            self.made[at] = steps, cache
        steps, cache = self.made[at]
        for k, v in cache[0]:
            k.fill_(float("nan")), v.fill_(float("nan"))
        cache[1].zero_()
        return steps, cache

    def serve(
        self, mode: str, state: State, policy: Policy = POLICY, *more: str,
        inbox: Callable[[State], State] = lambda state: state, **options: Any,
    ) -> tuple[dict[int, tuple[int, ...]], list[Served], int, Any]:  # fmt: skip
        """Texts, the steps, how often the model ran, and the cache."""
        steps, cache = self.steps(mode, dataclasses.replace(policy, query_lens=(1,)), *more)
        events, ran = [], []
        for one in serve(steps, cache, state, policy, inbox, **options):
            events += one.events
            ran.append(one)
        self.made[mode, policy, more] = steps, cache
        return gathered(events), ran, int(cache[1]), cache


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request: Any) -> Model:
    """`Model` on each device."""
    return Model(request.param, "tape" if request.param == "cpu" else "cuda")


def settings_of(i: int) -> Settings:
    """Some greedy, some with a seed, some without."""
    return [Settings(), Settings(0.9, seed=5), Settings(1.1, 40, 0.95)][i % 3]


def coming(policy: Policy) -> Callable[[State], State]:
    """An inbox: requests that come and go at set steps, and stop in every way there is."""
    prompts = [(1, 2, 3), (9,) * 11, (7, 8), (200, 100, 5), (4, 4, 4), (1, 2, 3, 60)]
    stops = [[], [5, 9, 232], [[200, 184]], [73], [], ["ab"]]
    decode = lambda ids: "".join(chr(97 + token % 7) for token in ids)  # noqa: E731
    at = iter(range(1000))

    def inbox(state: State) -> State:
        step = next(at)
        now = {0: (0, 1), 2: (2, 3, 4), 3: (5,)}
        for i in now.get(step, ()):
            how = {"stop": stops[i], "settings": settings_of(i)}
            how |= {"decode": decode} if i == 5 else {}
            state = submit(state, policy, prompts[i], 15 + i, **how)
        return cancel(state, GONE) if step == 5 else state

    return inbox


def fresh() -> State:
    """A state without requests."""
    return start(BLOCKS, POLICY)


@pytest.mark.parametrize("mode", MODES)
def test_texts_are_those_of_single_steps(model: Model, mode: str):
    begin = submit(fresh(), POLICY, (3,), 1)
    want, single, *_ = model.serve("bare", begin, SINGLE, "sampling", inbox=coming(SINGLE))
    got, ran, *_ = model.serve(mode, begin, POLICY, "sampling", inbox=coming(POLICY))
    assert all(one.turns == 1 and not one.single for one in single)
    assert got.keys() == want.keys()
    both = min(len(got[GONE]), len(want[GONE]))  # who is cancelled has had other steps
    assert got.pop(GONE)[:both] == want.pop(GONE)[:both] and both
    assert got == want
    lengths = [len(got[i]) - 14 - i for i in got]
    assert min(lengths) < 0 == max(lengths)  # some have stopped, some went on
    launches = [one for one in ran if one.turns > 1]
    assert len(launches) >= 4 and len(ran) < len(single) / 2
    assert len(ran[-1].state.pool.free) == BLOCKS
    if mode == "FULL_AND_PIECEWISE":
        assert {one.ran.mode for one in launches} == {fg.Mode.FULL}


@pytest.mark.parametrize("mode", MODES[1:])
def test_turns_end_when_all_are_done(model: Model, mode: str):
    """8 turns a launch and texts that stop: the model runs as often as the longest needs it."""
    begin = submit(submit(fresh(), POLICY, (1, 2, 3), 30), POLICY, (7, 8), 3)
    want, *_ = model.serve("bare", begin, SINGLE, "sampling")
    stop = next(i for i in range(8, 30) if want[0][i] not in want[0][:i])
    begin = submit(fresh(), POLICY, (1, 2, 3), 30, stop=[want[0][stop]])
    begin = submit(begin, POLICY, (7, 8), 3)
    got, ran, turns, cache = model.serve(mode, begin, POLICY, "sampling")
    assert got == {0: want[0][: stop + 1], 1: want[1]}
    assert turns == stop + 1 < sum(one.turns for one in ran)
    first, *launches = ran  # the prompts; 6, and what is left
    assert [one.turns for one in launches] == [6] * -(-stop // 6) and first.turns == 1
    assert [len(event.tokens) for event in launches[0].events] == [6, 2]
    # each token but the last of each text, in a slot; all other slots are as they were
    for layer in cache[0]:
        for leaf in layer:
            assert int((~leaf.isnan()).any(-1).any(-1).sum()) == (3 + stop) + (2 + 2)


def test_sampled_tokens_are_those_of_their_places(model: Model):
    """However many come at once: 2, 3 or 6."""
    begin = fresh()
    for i in range(3):
        begin = submit(begin, POLICY, (i, 5), 13, settings=Settings(1.3, seed=i))
    want, *_ = model.serve("bare", begin, SINGLE, "sampling")
    for k in (2, 3, 6):
        policy = dataclasses.replace(POLICY, decode_many=k)
        got, ran, *_ = model.serve("bare", begin, policy, "sampling")
        assert got == want and max(one.turns for one in ran) == k
    assert len({text for text in want.values()}) == 3


def test_a_launch_of_the_captured_steps_may_take_fewer_turns(model: Model):
    """A loop's own policy may ask for less than the steps were made for, not for more."""
    steps, cache = model.steps("NONE", POLICY, "sampling")
    less, more = (dataclasses.replace(POLICY, decode_many=k) for k in (4, 7))
    state = submit(fresh(), POLICY, (1, 2, 3), 9)
    ran = list(serve(steps, cache, state, less))
    assert [one.turns for one in ran] == [1, 4, 4]
    with pytest.raises(ValueError, match="decode_many=7"):
        schedule(state, more, steps)


def test_requests_that_draw_nothing_fail_as_in_single_steps(model: Model):
    """NaN from a place on: the text ends there, whichever turn of a launch it is."""

    def failing(params: Any, cache: Any, batch: Any) -> Any:
        logits, cache = llama.forward(params, cache, batch)
        late = batch.positions[batch.logits_indices] >= 9
        logits = logits.reshape(late.numel(), -1)
        return logits.masked_fill(late.reshape(-1, 1), float("nan")).view(*late.shape, -1), cache

    def served(policy: Policy) -> list[tuple[int, tuple[int, ...], str | None]]:
        cache = llama.init_cache(model.params.config, BLOCKS, block_size=SIZE, device=model.device)
        steps = bare_steps(failing, model.params, policy, device=model.device)
        state = submit(submit(start(BLOCKS, policy), policy, (1, 2, 3), 20), policy, (4,) * 8, 20)
        got: dict[int, tuple[tuple[int, ...], str | None]] = {}
        for one in serve(steps, cache, state, policy):
            for event in one.events:
                got[event.id] = got.get(event.id, ((), None))[0] + event.tokens, event.end
        return [(id, *what) for id, what in got.items()]

    want = served(SINGLE)
    assert [len(tokens) for _, tokens, _ in want] == [7, 2]
    assert all(end.startswith("failed: no token") for *_, end in want)
    for k in (2, 4, 6, 20):
        assert served(dataclasses.replace(POLICY, decode_many=k)) == want


LEVELS: dict[str, dict[str, Any]] = {
    "fused": {"passes": "all"}, "pieces": {"compile": "pieces"}
}  # fmt: skip


@pytest.mark.sampled("fused")
@pytest.mark.parametrize("level", LEVELS)
def test_texts_are_those_of_single_steps_of_the_same_level(model: Model, level: str):
    """Passes match in the loop's body what they match in a single step, as often."""
    params = fg.ops.lay_side_by_side(model.params)
    texts, matches = [], []
    for policy in (SINGLE, POLICY):
        cache = llama.init_cache(params.config, BLOCKS, block_size=SIZE, device=model.device)
        steps = make_steps(
            llama.forward, params, cache, policy, "sampling", modes="FULL_AND_PIECEWISE",
            recorder=model.recorder, progress=False, sizes=(4, 32), **LEVELS[level],
        )  # fmt: skip
        state = start(BLOCKS, policy)
        for i in range(3):
            state = submit(state, policy, (5 + i, 6, 7), 11, settings=settings_of(i))
        ran = list(serve(steps, cache, state, policy))
        texts.append(gather(event for one in ran for event in one.events))
        assert max(one.turns for one in ran) == policy.decode_many
        assert {one.ran.mode for one in ran if one.turns > 1} <= {fg.Mode.FULL}
        matches.append(dict(steps.captured[-1].stats.passes))
    assert texts[0] == texts[1] and len(set(texts[0].values())) == 3
    views = ("no_ops", "fold_constants")  # of which what is around the model has its own
    single, body = ({k: n for k, n in one.items() if k not in views} for one in matches)
    assert single == body and single["linears"] >= 9 and single["rope_in_attention"] == 2


@pytest.mark.sampled("bare")
@pytest.mark.parametrize("mode", ["bare", "FULL_DECODE_ONLY"])
def test_adapters_go_along(model: Model, mode: str):
    """A request under an adapter writes what single steps write."""
    generator = torch.Generator().manual_seed(1)
    slots = lora.slots(model.params, count=2, rank=4, names=("wq", "w_down"))
    for leaf in naming.named(slots).values():
        leaf.copy_(torch.randn(leaf.shape, generator=generator) * 0.3)
    texts = []
    for policy in (SINGLE, POLICY):
        cache = llama.init_cache(model.params.config, BLOCKS, block_size=SIZE, device=model.device)
        if mode == "bare":
            options = {"adapters": slots, "device": model.device}
            steps = bare_steps(llama.forward, model.params, policy, **options)
        else:
            steps = make_steps(
                llama.forward, model.params, cache, policy, modes=mode, adapters=slots,
                recorder=model.recorder, progress=False, sizes=(4, 32),
            )  # fmt: skip
        state = start(BLOCKS, policy)
        for i in range(3):
            state = submit(state, policy, (5, 6, 7), 11, adapter=i - 1)
        ran = list(serve(steps, cache, state, policy))
        texts.append(gather(event for one in ran for event in one.events))
        assert max(one.turns for one in ran) == policy.decode_many
        assert {case_of(one.spec).adapted for one in ran} == {True}
    assert texts[0] == texts[1] and len(set(texts[0].values())) == 3


# --- a launch that the host ends ------------------------------------------------------------------


def raised(model: Model, mode: str) -> tuple[Steps, Any, Any, State]:
    """Steps of many tokens, their cache, and a planned launch of two requests."""
    steps, cache = model.steps(mode, POLICY)
    state = submit(submit(fresh(), POLICY, (1, 2, 3), 30), POLICY, (7, 8), 4)
    ran = next(iter(serve(steps, cache, state, POLICY)))
    state, batch = schedule(ran.state, POLICY, steps)
    assert state.turns == 6
    return steps, cache, batch, state


def test_an_interrupted_wait_lowers_the_flag(monkeypatch: pytest.MonkeyPatch):
    """Else each later launch would draw one token, without a word."""

    class Interrupted:
        def record(self, stream: Any) -> None: ...

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "Event", Interrupted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    halt, drawn = Halt("cpu"), SimpleNamespace(is_cuda=True, device="cuda")
    with pytest.raises(KeyboardInterrupt):
        halt.wait(drawn, lambda: True)  # type: ignore[arg-type]
    assert not halt.leaf.item()


@pytest.mark.parametrize("mode", MODES)
def test_a_halted_launch_has_drawn_fewer_of_the_same_tokens(model: Model, mode: str):
    """A flag that is raised before: each request draws one. Lowered, all."""
    steps, cache, batch, state = raised(model, mode)
    assert steps.halt is not None
    steps.halt.set()
    ids, cache = steps.run(cache, batch)
    one = ids.tolist()
    assert all(token >= 0 and set(rest) == {UNDRAWN} for token, *rest in one)
    after, events = advance(state, one)
    assert [len(event.tokens) for event in events] == [1, 1] and after.live
    steps.halt.set(False)
    _, batch = schedule(after, POLICY, steps)
    ids, cache = steps.run(cache, batch)
    rest, whole = ids.tolist(), model.serve("bare", fresh_of_two(), SINGLE)[0]
    assert (one[0][0], *rest[0]) == whole[0][1:8]  # behind the one that the prompt gave
    assert (one[1][0], *rest[1][:2]) == whole[1][1:4] and rest[1][2] == UNDRAWN


def fresh_of_two() -> State:
    """The requests of `raised`."""
    return submit(submit(fresh(), SINGLE, (1, 2, 3), 30), SINGLE, (7, 8), 4)


@pytest.mark.parametrize("turn", [0, 2, 5])
def test_the_turn_that_finds_the_flag_raised_is_the_last(model: Model, turn: int):
    ran = 0

    def forward(params: Any, cache: Any, batch: Any) -> Any:
        nonlocal ran
        if batch.token_ids.shape[0] == 1 and int(batch.positions[0]) >= 3:
            if ran == turn:
                halt.set()
            ran += 1
        return llama.forward(params, cache, batch)

    cache = llama.init_cache(model.params.config, BLOCKS, block_size=SIZE, device=model.device)
    steps = bare_steps(forward, model.params, POLICY, device=model.device)
    halt = steps.halt
    assert halt is not None
    state = submit(fresh(), POLICY, (1, 2, 3), 7)
    served = []
    for one in serve(steps, cache, state, POLICY):
        served.append(one)
        halt.set(False)
    want = model.serve("bare", submit(fresh(), SINGLE, (1, 2, 3), 7), SINGLE)[0]
    assert gather(event for one in served for event in one.events) == want
    drew = [len(one.events[0].tokens) for one in served]
    assert drew == [1, 1 + turn, 5 - turn][: 3 - (turn == 5)]


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_who_comes_does_not_wait_for_the_launch(drafts: int):
    """Thousands of turns are ended within some of them, and the texts are those of single steps."""
    model = Model("cuda", "cuda")
    policy = Policy(
        32, 4, 700, SIZE, decode_many=2000, query_lens=(1, 1 + drafts)[: 1 + bool(drafts)]
    )
    want, _, single = served_while_asked(model, dataclasses.replace(policy, decode_many=1))
    got, leaf, drew = served_while_asked(model, policy)
    assert got == want and len(got) == 2
    assert leaf is not None and not leaf.any()
    first, launch, *rest = drew
    assert first == 1 and 1 < launch < 1900 and len(rest) >= 2
    assert set(single) <= set(range(1, 2 + drafts))


def served_while_asked(model: Model, policy: Policy) -> tuple[Any, Any, list[int]]:
    """Texts of a request and of one that comes soon after; the flag; what the first drew a step."""
    cache = llama.init_cache(model.params.config, 1400, block_size=SIZE, device="cuda")
    steps = make_steps(
        llama.forward, model.params, cache, policy, modes="FULL_AND_PIECEWISE", sizes=(4, 32),
        progress=False, max_len=2800,
    )  # fmt: skip
    began, steps_before = 0.0, 0

    def inbox(state: State) -> State:
        nonlocal steps_before
        steps_before += 1
        comes = began > 0 if policy.decode_many > 1 else steps_before > 20
        return submit(state, policy, (9, 8, 7), 100) if comes and state.submitted == 1 else state

    def pending() -> bool:  # until the other is there: some turns into the first launch
        nonlocal began
        began = began or time.monotonic()
        return steps_before == 2 and time.monotonic() - began > 0.02

    state = submit(start(1400, policy), policy, (1, 2, 3), 2000)
    ran = list(serve(steps, cache, state, policy, inbox, pending=pending))
    texts = gather(event for step in ran for event in step.events)
    drew = [len(event.tokens) for step in ran for event in step.events if event.id == 0]
    return texts, steps.halt and steps.halt.leaf, drew


# --- when it is one token -------------------------------------------------------------------------


def decoding(policy: Policy, *asked: dict[str, Any], blocks: int = BLOCKS) -> State:
    """A planned step of requests that are past their prompts."""
    state = start(blocks, policy)
    for options in asked or ({},):
        state = submit(state, policy, **{"prompt": (1, 2, 3), "max_new": 9} | options)
    state, _ = advance(plan(state, policy), [[4]] * len(state.waiting))
    return plan(state, policy)


@pytest.mark.parametrize(
    ("asked", "change", "why"),
    [([{"logprobs": 1}], {}, "changes its logits, or has them reported"),
     ([{"grammar": lambda new: None}], {}, "changes its logits"),
     ([{"stop": [7], "min_tokens": 5}], {}, "changes its logits"),
     ([{"settings": Settings(presence_penalty=0.5)}], {}, "changes its logits"),
     ([{"max_new": 2}], {}, "lacks one token"),
     ([{"prompt": (1,) * 9}] * 2, {"cascade": 8}, "cascade attention"),
     ([{}, {}, {}], {"max_tokens": 9}, "more requests run")],
)  # fmt: skip
def test_why_a_step_draws_one_token(asked: Any, change: dict[str, Any], why: str):
    policy = dataclasses.replace(POLICY, **change)
    state = decoding(policy, *asked)
    if "max_tokens" in change:
        policy = dataclasses.replace(policy, max_tokens=2)
        state = plan(dataclasses.replace(state, rows=()), policy)
    after = many.take_ahead(state, policy)
    assert after.turns == 1 and why in after.single
    assert after.rows == state.rows and after.pool is state.pool
    single = dataclasses.replace(policy, decode_many=1)
    assert many.take_ahead(state, single) is state


def test_nobody_waits_for_a_launch_to_end():
    state = decoding(POLICY)
    assert many.take_ahead(state, POLICY).turns == 6
    waits = submit(dataclasses.replace(state, rows=()), POLICY, (9,) * 30, 9)
    planned = plan(waits, POLICY)
    assert many.take_ahead(planned, POLICY).single == "a prompt is being computed"
    full = dataclasses.replace(POLICY, max_reqs=1)
    assert many.take_ahead(plan(waits, full), full).single == "1 wait"


def test_blocks_are_taken_ahead_as_far_as_they_go():
    """3 + 1 tokens are in one block of 4; a turn beyond the first needs the next one."""
    for blocks, turns in ((1, 1), (2, 5), (3, 6)):
        policy = dataclasses.replace(POLICY, share=False, max_blocks=3)
        state = decoding(policy, {"max_new": 5 if blocks < 3 else 9}, blocks=max(blocks, 2))
        if blocks == 1:
            free = state.pool.free[:0]
            state = dataclasses.replace(state, pool=dataclasses.replace(state.pool, free=free))
        after = many.take_ahead(state, policy)
        assert after.turns == min(turns, many.left_of(state.rows[0].job))
        assert (after.single == "no block is free for more") == (blocks == 1)
        held = after.running[0].blocks
        assert list(held) == list(after.rows[0].job.blocks)
        both = [len(x.running[0].blocks) + len(x.pool.free) for x in (after, state)]
        assert both[0] == both[1]


def test_what_a_batch_of_several_turns_says():
    stops = [[i] for i in range(20, 30)] + [[1, 2]]
    state = decoding(POLICY, {"stop": stops}, {"max_new": 3, "stop": [[8, 8]]})
    state = many.take_ahead(state, POLICY)
    kind = batch_type("many", "sampling")
    batch = lay_out(state.rows, POLICY, lambda spec: empty_batch(kind, POLICY, spec), turns=6)
    assert batch.spec[:3] == (2, 2, 1) and batch.spec.extra == MANY
    assert batch.spec.host == fg.HostBounds(1, 4 + 5)
    assert batch.left.tolist() == [6, 2] and batch.stop_ids.shape == (2, STOPS)
    assert batch.stop_ids.tolist() == [[*range(20, 27), FAILED], [FAILED] * STOPS]
    declared = fg.core.buffers_of(kind)
    assert {str(leaf.dims) for leaf in declared.values()} & {"T", "R Q"} == set()


def test_advance_takes_tokens_up_to_what_was_not_drawn():
    state = many.take_ahead(decoding(POLICY, {}, {"stop": [[7, 8]]}), POLICY)
    drawn = [[5, 6, FAILED, *[UNDRAWN] * 3], [6, 7, 8, 9, 9, 9]]
    after, events = advance(state, drawn)
    assert [event.tokens for event in events] == [(5, 6), (6, 7, 8)]
    assert [event.end for event in events] == [None, "stop"]
    (job,) = after.running
    assert (job.computed, len(job.tokens), after.turns) == (5, 6, 1) and job.decoding
    with pytest.raises(TypeError, match=r"on_host\(ids, state.rows\)"):
        advance(state, torch.tensor(drawn))  # its rows would be views that the next step writes
    with pytest.raises(AssertionError):
        assert advance(dataclasses.replace(state, turns=1), drawn)[1] == events


# --- what does not go together --------------------------------------------------------------------


def test_where_several_turns_have_no_place(model: Model):
    cache = llama.init_cache(model.params.config, 4, block_size=SIZE, device=model.device)
    with pytest.raises(ValueError, match=r'decode_many=6\).*modes="FULL_AND_PIECEWISE"'):
        make_steps(llama.forward, model.params, cache, POLICY, modes="PIECEWISE")
    stage = Stage(0, 2)
    with pytest.raises(ValueError, match="2 pipeline stages"):
        make_steps(llama.forward, model.params, cache, POLICY, modes="NONE", stage=stage)
    with pytest.raises(ValueError, match="pass decode_many=1 or more"):
        Policy(32, 4, 10, decode_many=0)
    steps, _ = model.steps("bare")
    with pytest.raises(ValueError, match="for one process"):
        over_ranks(steps, Ranks(Circle(None, 0, (0, 1))))
    assert over_ranks(steps, alone := Ranks()).ranks is alone
