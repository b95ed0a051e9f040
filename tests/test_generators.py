"""Random draws inside `forward`: from registered generators, as eager draws at the padded size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys

import fngraph as fg
from fngraph.errors import RandomError, RowsError

SIZES = (1, 2, 4, 8)  # of at most 16 tokens, so that 9 and more run eagerly
BATCHES = [
    toys.batch(3), toys.decode(2), toys.batch(5, 4), toys.batch(2, 2), toys.decode(3), toys.batch(1)
]  # fmt: skip


def generator(device: Any, seed: int = 1) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def draws(x: Any, g: torch.Generator) -> Any:
    """Several kinds of draws, of which one goes unused."""
    uniform = torch.rand(x.shape, generator=g, device=x.device)
    torch.rand(7, generator=g, device=x.device)
    normal = torch.empty_like(x).normal_(generator=g) + torch.normal(x, 1.0, generator=g)
    noise = torch.empty_like(x).exponential_(1, generator=g)
    scores = x.softmax(-1)
    picked = torch.multinomial(scores, 1, generator=g)
    kept = torch.bernoulli(scores, generator=g)
    few = torch.randint(3, 9, (4,), generator=g, device=x.device)
    return uniform + x, normal, (scores / noise).argmax(-1), picked, kept, few.expand(x.shape[0], 4)


def sampling(*generators: torch.Generator) -> Any:
    """A forward that draws from each generator in turn."""

    def forward(p: Any, s: Any, b: toys.Batch) -> Any:
        x = p["w"][b.token_ids]
        return [draws(x, g) for g in generators], s

    return forward


def made(forward: Any, device: Any, **options: Any) -> tuple[Any, Any, Any]:
    """A graphified function, its params and its state."""
    options = {"sizes": SIZES, "limits": toys.LIMITS} | options
    fast = fg.graphify(forward, donate="s", stage="b", **options)
    return fast, toys.tally_params(device), toys.tally_state(device)


def captured(forward: Any, device: Any, **options: Any) -> tuple[Any, Any]:
    """Every key captured, and the state."""
    fast, params, state = made(forward, device, **options)
    return fast.bind(params).capture(state, progress=False, batch=toys.batch(2)), state


def eager(forward: Any, step: Any, batch: Any, device: Any) -> Any:
    """`forward` on the padded batch, cut to the true rows."""
    T = step.dispatch(batch.spec).descriptor.num_tokens
    ids = F.pad(batch.token_ids, (0, T - len(batch.token_ids)))
    params = {"w": toys.tally_params()["w"].to(device)}
    outputs, _ = forward(params, None, toys.dataclasses.replace(batch, token_ids=ids.to(device)))
    return toys.trees.map_leaves(lambda x: x[: batch.spec.num_tokens], outputs)


def check(step: Any, state: Any, bare: Any, device: Any, batches: Any = BATCHES) -> None:
    """Each step draws what `bare` draws at its padded size."""
    for batch in batches:
        want = eager(bare, step, batch, device)
        toys.assert_trees(step(state, toys.on(batch, device))[0], want)


@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_steps_draw_what_eager_draws_at_the_padded_size(device, modes: str):
    g, h = generator(device), generator(device)
    step, state = captured(sampling(g), device, modes=modes, generators=(g,))
    ran = {step.dispatch(b.spec).mode for b in BATCHES}
    assert len(ran) == {"NONE": 1, "PIECEWISE": 2, "FULL_AND_PIECEWISE": 3}[modes]
    for batch in BATCHES * 3:
        check(step, state, sampling(h), device, [batch])
        assert torch.equal(g.get_state(), h.get_state())


def test_each_overload_of_a_draw_is_recorded_as_itself(device):
    defaults = torch.cuda.default_generators if device.type == "cuda" else [torch.default_generator]

    def forward(p: Any, s: Any, b: toys.Batch) -> Any:
        x = p["w"][b.token_ids]
        return [torch.randint_like(x, 9), torch.randint_like(x, 7, 9), torch.rand_like(x)], s

    step, state = captured(forward, device, generators=tuple(defaults))
    for batch in BATCHES:
        defaults[0].manual_seed(3)
        want = eager(forward, step, batch, device)
        defaults[0].manual_seed(3)
        toys.assert_trees(step(state, toys.on(batch, device))[0], want)


def test_tracing_capturing_and_looking_at_times_leave_a_generator_where_it_was(device):
    g = generator(device)
    torch.rand(5, generator=g, device=device)
    before = g.get_state()
    fast, params, state = made(sampling(g), device, generators=(g,))
    batch = toys.on(toys.batch(2), device)
    fast.trace(params, state, batch=batch)
    assert torch.equal(g.get_state(), before)
    step = fast.bind(params).capture(state, progress=False, batch=batch)
    assert torch.equal(g.get_state(), before)
    step.times(next(iter(step)), repeats=2)
    assert torch.equal(g.get_state(), before)


def test_what_a_warm_up_draws_is_undone(device, monkeypatch):
    from fngraph.graphs.tape.recorder import TapeRecorder

    monkeypatch.setattr(TapeRecorder, "warm_up", lambda self, fn: fn())  # else it runs nothing
    g, h = generator(device), generator(device)
    step, state = captured(sampling(g), device, generators=(g,))
    assert torch.equal(g.get_state(), h.get_state())
    check(step, state, sampling(h), device, [toys.batch(3)])


def test_a_function_that_chooses_another_generator_is_captured_again(device):
    one, two = (generator(device, seed) for seed in (1, 2))

    def forward(p: Any, s: Any, b: toys.Batch) -> Any:
        g = one if torch.get_default_dtype() is torch.float32 else two
        x = p["w"][b.token_ids]
        return x * 0 + torch.rand(toys.E, generator=g, device=device, dtype=torch.float32), s

    step, state = captured(forward, device, generators=(one, two))
    batch = toys.on(toys.batch(3), device)
    for dtype, seed in ((torch.float32, 1), (torch.float64, 2)):
        torch.set_default_dtype(dtype)
        try:
            got, state = step(state, batch)
        finally:
            torch.set_default_dtype(torch.float32)
        want = torch.rand(toys.E, generator=generator(device, seed), device=device)
        assert torch.equal(got[0], want)


def test_a_key_that_is_captured_in_a_step_draws_once(device):
    g, h = generator(device), generator(device)
    fast, params, state = made(sampling(g), device, generators=(g,))
    for batch in BATCHES:
        got, state = fast(params, state, toys.on(batch, device))
        toys.assert_trees(got, eager(sampling(h), fast, batch, device))


def test_a_seed_between_steps_is_honored(device):
    g = generator(device)
    step, state = captured(sampling(g), device, generators=(g,))
    batch, drawn = toys.on(toys.batch(3), device), []
    for seed in (4, 5, 4):
        g.manual_seed(seed)
        drawn.append([step(state, batch)[0] for _ in range(2)])
    toys.assert_trees(drawn[0], drawn[2])
    assert not torch.equal(drawn[0][0][0][0], drawn[1][0][0][0])
    assert not torch.equal(drawn[0][0][0][0], drawn[0][1][0][0])


def test_a_state_that_is_put_back_draws_the_same_again(device):
    g = generator(device)
    step, state = captured(sampling(g), device, generators=(g,))
    batch = toys.on(toys.decode(2), device)
    step(state, batch)
    before = g.get_state()
    first = step(state, batch)[0]
    g.set_state(before)
    toys.assert_trees(step(state, batch)[0], first)


def test_two_steps_share_one_generator(device):
    g, h = generator(device), generator(device)
    steps = [captured(sampling(g), device, generators=(g,)) for _ in range(2)]
    for i in range(6):
        step, state = steps[i % 2]
        check(step, state, sampling(h), device, [BATCHES[i // 2]])


def test_two_generators_go_on_apart_from_one_another(device):
    gs, hs = ([generator(device, seed) for seed in (1, 2)] for _ in "gh")
    step, state = captured(sampling(*gs), device, generators=gs)
    check(step, state, sampling(*hs), device)


def test_pieces_that_differ_in_their_generator_alone_are_two(device):
    gs, hs = ([generator(device, seed) for seed in (1, 2)] for _ in "gh")

    def layered(one: torch.Generator, two: torch.Generator, double: Any) -> Any:
        def forward(p: Any, s: Any, b: toys.Batch) -> Any:
            x = p["w"][b.token_ids]
            for g in (one, two, one):
                x = double(x + torch.rand(x.shape, generator=g, device=x.device))
            return x, s

        return forward

    forward = layered(*gs, toys.double)
    step, state = captured(forward, device, modes="PIECEWISE", generators=gs)
    check(step, state, layered(*hs, lambda x: x * 2), device)


def test_the_default_generator_may_be_registered(device):
    """Then dropout in a graph is eager's."""
    default = torch.cuda.default_generators[0] if device.type == "cuda" else torch.default_generator

    def forward(p: Any, s: Any, b: toys.Batch) -> Any:
        x = p["w"][b.token_ids]
        return (F.dropout(x, 0.5), torch.rand_like(x)), s

    step, state = captured(forward, device, generators=(default,))
    for batch in BATCHES:
        before = default.get_state()
        want = eager(forward, step, batch, device)
        default.set_state(before)
        toys.assert_trees(step(state, toys.on(batch, device))[0], want)


def test_a_failed_capture_leaves_the_generator_where_it_was(device):
    g, h = generator(device), generator(device)
    fast, params, state = made(sampling(g), device, generators=(g,))
    batch = toys.on(toys.batch(3), device)
    step = fast.trace(params, state, batch=batch).split().lower().compile()
    fn = step.executable.fns[0]

    def explode(*args: Any) -> Any:
        fn(*args)
        raise ValueError("boom")

    executable = toys.dataclasses.replace(step.executable, fns=(explode,))
    broken = toys.dataclasses.replace(step, executable=executable)
    before = g.get_state()
    with pytest.raises(fg.errors.CaptureError, match="boom"):
        broken.capture(params, state)
    assert torch.equal(g.get_state(), before)
    whole = step.capture(params, state)
    toys.assert_trees(whole(state, batch)[0], eager(sampling(h), whole, toys.batch(3), device))


def test_a_recording_draws_at_each_replay(kit):
    g, h = generator(kit.device), generator(kit.device)
    x = torch.ones(5, device=kit.device)
    draw = torch.ops.aten.exponential.default
    recording, out = kit.recorder.record(lambda: draw(x, generator=g) + x, (g,))
    assert torch.equal(g.get_state(), h.get_state())
    for _ in range(3):
        recording.replay()
        assert torch.equal(out, draw(x, generator=h) + x)


# --- what is refused ------------------------------------------------------------------------------


def refused(forward: Any, error: type[Exception], match: str, *generators: Any) -> None:
    fast, params, state = made(forward, "cpu", generators=generators)
    before = [g.get_state() for g in generators]
    with pytest.raises(error, match=match):
        fast.trace(params, state, batch=toys.batch(2))
    assert all(torch.equal(g.get_state(), b) for g, b in zip(generators, before))


def test_a_generator_that_is_not_registered():
    g, other = generator("cpu"), generator("cpu")
    refused(sampling(g), RandomError, r"test_generators.py:\d+.*generators=\(g,\)")
    refused(sampling(other), RandomError, r"not registered", g)
    refused(lambda p, s, b: (F.dropout(p["w"], 0.5), s), RandomError, "not registered", g)


def test_a_check_knows_the_generators():
    g = generator("cpu")
    args = (sampling(g), toys.tally_params(), toys.tally_state(), toys.batch(2))
    assert fg.check(*args, donate="s", stage="b", generators=(g,)).ok
    assert not fg.check(*args, donate="s", stage="b").ok


def test_a_generator_of_another_device():
    g = generator("cpu")
    forward = lambda p, s, b: (torch.rand(3, generator=g, device="meta"), s)  # noqa: E731
    refused(forward, RandomError, r'draws on meta.*of cpu.*torch.Generator\("meta"\)', g)


@pytest.mark.parametrize("how", ["manual_seed", "seed", "set_state"])
def test_forward_may_not_seed_it(how: str):
    g, state = generator("cpu"), generator("cpu", 9).get_state()

    def forward(p: Any, s: Any, b: toys.Batch) -> Any:
        getattr(g, how)(*{"manual_seed": [3], "seed": [], "set_state": [state]}[how])
        return p["w"][b.token_ids] + torch.rand(toys.E, generator=g), s

    refused(forward, RandomError, "between the calls", g)


COUNTS = {
    "randint": lambda x, g: torch.randint(0, x.shape[0], (4,), generator=g),
    "randperm": lambda x, g: torch.randperm(x.shape[0], generator=g),
    "multinomial": lambda x, g: torch.multinomial(x[:, 0].sigmoid(), 1, generator=g),
}


@pytest.mark.parametrize("what", COUNTS)
def test_a_draw_out_of_the_padded_number_of_rows(what: str):
    g = generator("cpu")
    forward = lambda p, s, b: (COUNTS[what](p["w"][b.token_ids], g), s)  # noqa: E731
    refused(forward, RowsError, r"test_generators.py:\d+", g)


@pytest.mark.parametrize("what", [[3], ["g"], torch.Generator])
def test_generators_are_generators(what: Any):
    with pytest.raises(TypeError):
        made(sampling(), "cpu", generators=what)


GLOBALS: dict[str, torch.Generator] = {}


def test_a_block_draws_at_each_call():
    body = fg.block(lambda x: x + torch.rand(x.shape, generator=GLOBALS["g"]))
    blocked = lambda p, s, b: (body(body(body(p["w"][b.token_ids]))), s)  # noqa: E731
    g, h = generator("cpu"), generator("cpu")
    GLOBALS["g"] = g
    fast, params, state = made(blocked, "cpu", generators=(g,))
    got, _ = fast(params, state, toys.batch(4))
    GLOBALS["g"] = h
    toys.assert_trees(got, eager(blocked, fast, toys.batch(4), "cpu"))
