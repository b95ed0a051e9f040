"""Loops in a trace, on the tape: what is recorded, donated, printed; sizes, primitives, levels."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph.errors import OperatorError, RowsError
from fngraph.fx.pieces.work import counter

DEVICES = {"tape": "cpu", "cuda": "cuda"}
E = toys.E
OVER: dict[str, Any] = {
    "donate": "cache", "stage": "batch", "limits": toys.LIMITS, "sizes": toys.SIZES
}  # fmt: skip
BATCHES = [toys.batch(3, 5), toys.decode(3), toys.batch(1), toys.batch(2, seed=3)]


def recording(fast: Any) -> Any:
    """What one key of the last step has recorded."""
    (replay,) = fast.steps[-1].replays.values()
    return replay.calls[0]


# --- outside of a trace ---------------------------------------------------------------------------


def test_outside_of_a_trace_each_is_its_python():
    assert fg.while_loop(lambda c: c < 10, lambda c: c * 2, torch.tensor(3)) == 12
    assert fg.fori_loop(2, 5, lambda i, c: c + i, torch.tensor(0)) == 9
    assert fg.fori_loop(5, 2, lambda i, c: c + i, torch.tensor(7)) == 7
    assert fg.fori_loop(torch.tensor(2), 4, lambda i, c: c + i, torch.tensor(0)) == 5
    last, ys = fg.scan(lambda c, x: (c + x, {"y": c * x}), torch.tensor(0), torch.arange(4))
    assert last == 6 and ys["y"].tolist() == [0, 0, 2, 9]
    last, ys = fg.scan(lambda c, x: (c + x, c), torch.tensor(0), torch.arange(4), reverse=True)
    assert last == 6 and ys.tolist() == [6, 5, 3, 0]
    last, ys = fg.scan(lambda c, _: (c + 1, None), torch.tensor(0), None, length=3)
    assert last == 3 and ys is None
    _, ys = fg.scan(lambda c, x: (c, x.double()), torch.tensor(0), torch.zeros(0, 2))
    assert ys.shape == (0, 2) and ys.dtype is torch.float64
    assert fg.cond(torch.tensor(True), lambda x: x + 1, lambda x: x, torch.tensor(1)) == 2
    assert fg.cond(False, lambda: 1, lambda: 2) == 2


def test_of_a_batch_whose_tensors_turns_are_mapped_over():
    x = torch.arange(3.0)
    doubled = torch.func.vmap(lambda x: fg.fori_loop(0, 2, lambda i, c: c * 2, x))(x)
    assert doubled.tolist() == [0, 4, 8]
    with pytest.raises(fg.errors.TransformError, match=r"torch\.where"):
        torch.func.vmap(lambda x: fg.cond(x > 1, lambda: x, lambda: -x))(x)


# --- what is recorded -----------------------------------------------------------------------------


def turning(w: Any, state: Any, x: Any) -> Any:
    """A loop in a loop, beside a choice; as many turns as the batch says."""
    x, n = x
    step = lambda i, h: torch.tanh(h @ w)  # noqa: E731

    def body(c: Any) -> Any:
        return c[0] + 1, fg.fori_loop(0, 3, step, c[1])

    h = fg.while_loop(lambda c: c[0] < n, body, (n * 0, x))[1]
    h = fg.cond(h.sum() > 0, lambda: h * 2, lambda: h)
    return h, {"s": state["s"] + h.sum()}


def test_the_tape_has_a_loop_as_one_op_with_its_turn_within():
    fast = fg.graphify(turning, donate="state", stage="x", recorder="tape", modes="FULL")
    w, state = torch.randn(4, 4), {"s": torch.zeros(())}
    for n in (0, 2, 5):
        x = torch.randn(2, 4), torch.tensor(n)
        copy = {"s": state["s"].clone()}
        want, after = turning(w, copy, x)
        got, _ = fast(w, state, x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(state, after)
    one = recording(fast)
    names = [node.name for node in one.nodes if node.kind == "other"]
    assert names == ["while", "if", "if"]
    kinds = re.findall(r"(?m)^( *)\d+ (while|if)\(", one.as_text())
    assert [(len(space) // 4, kind) for space, kind in kinds] == [
        (0, "while"), (1, "while"), (0, "if"), (0, "if")
    ]  # fmt: skip
    loop = [i for i, node in enumerate(one.nodes) if node.kind == "other"]
    assert any(b == loop[0] for _, b in one.edges) and any(a == loop[0] for a, _ in one.edges)
    (replay,) = fast.steps[-1].replays.values()
    assert '[label="while"' in replay.dot()
    assert replay.counts.others == 3


def test_turns_may_swap_values_and_go_backwards(recorder_name: str):
    device = DEVICES[recorder_name]

    def rotated(w: Any, x: Any) -> Any:
        return fg.while_loop(
            lambda v: v[0][0] < x[0][0] + 2, lambda v: (v[1], v[2], v[0] + 1), (*x, x[0] * 3)
        )

    w = torch.arange(16.0, device=device).view(4, 4) / 8
    x = tuple(torch.arange(4.0, device=device) + i for i in range(2))
    swap = lambda w, x: fg.fori_loop(0, 5, lambda i, v: (v[1], v[0]), x)  # noqa: E731
    turn = lambda c, row: (c * 2 + row, c + row)  # noqa: E731
    back = lambda w, x: fg.scan(turn, x[0], w, reverse=True)  # noqa: E731
    for fn in (swap, rotated, back):
        fast = fg.graphify(fn, stage="x", recorder=recorder_name, modes="FULL")
        torch.testing.assert_close(fast(w, x), fn(w, x))


def test_the_trace_prints_its_loops_and_equal_ones_are_equal():
    fast = fg.graphify(turning, donate="state", stage="x", modes="FULL")
    given = torch.randn(4, 4), {"s": torch.zeros(())}
    batch = torch.randn(2, 4), torch.tensor(3)
    first, second = (fast.trace(*given, batch=batch) for _ in "ab")
    text = first.as_text()
    assert all(f"# {name}" in text for name in
               ("cond of fg.while_loop", "body of fg.while_loop", "body of fg.fori_loop",
                "if true of fg.cond", "if false of fg.cond"))  # fmt: skip
    assert first.computes_as(second)

    def other(w: Any, state: Any, x: Any) -> Any:
        return turning(w * 1, state, x)

    def deeper(w: Any, state: Any, x: Any) -> Any:
        def body(c: Any) -> Any:
            return c[0] + 1, fg.fori_loop(0, 3, lambda i, h: torch.sin(h @ w), c[1])

        x, n = x
        h = fg.while_loop(lambda c: c[0] < n, body, (n * 0, x))[1]
        h = fg.cond(h.sum() > 0, lambda: h * 2, lambda: h)
        return h, {"s": state["s"] + h.sum()}

    for fn in (other, deeper):
        third = fg.graphify(fn, donate="state", stage="x").trace(*given, batch=batch)
        assert not first.computes_as(third)


def test_blocks_are_stamped_around_loops_and_within(recorder_name: str):
    turn = fg.block(lambda h, layer: torch.tanh(h @ layer) + h)
    looped = fg.block(lambda h, layer: fg.fori_loop(0, 3, lambda i, h: turn(h, layer), h))

    def forward(w: Any, x: Any) -> Any:
        h = x[0]
        for layer in w:
            h = looped(h, layer)
        h = fg.fori_loop(0, 2, lambda i, h: turn(turn(h, w[0]), w[1]), h)
        return turn(h, w[2])

    device = DEVICES[recorder_name]
    generator = torch.Generator().manual_seed(0)
    w = [(torch.randn(4, 4, generator=generator) / 3).to(device) for _ in range(3)]
    x = (torch.ones(2, 4, device=device),)
    fast = fg.graphify(forward, stage="x", recorder=recorder_name, modes="FULL")
    torch.testing.assert_close(fast(w, x), forward(w, x), **toys.CLOSE)


def test_a_loop_that_nobody_reads_is_dropped():
    def forward(w: Any, x: Any) -> Any:
        fg.fori_loop(0, 3, lambda i, h: h @ w, x[0])
        return x[0] * 2

    fast = fg.graphify(forward, stage="x", modes="FULL")
    trace = fast.trace(torch.ones(4, 4), batch=(torch.ones(2, 4),))
    assert "fori" not in trace.as_text() and "scan" not in trace.as_text()


# --- donation -------------------------------------------------------------------------------------

HOW = {
    "updated": (lambda s, x: fg.fori_loop(0, 3, lambda i, s: s - 0.1 * x, s), "in place"),
    "in place": (lambda s, x: fg.fori_loop(0, 3, lambda i, s: s.add_(x), s), "in place"),
    "closed over": (
        lambda s, x: (fg.fori_loop(0, 3, lambda i, c: c + s.add_(x).sum(), x.sum()), s)[1],
        "in place",
    ),
    "handed on": (lambda s, x: fg.fori_loop(0, 3, lambda i, c: (c[0], c[1] + 1), (s, x))[0],
                  "unchanged"),
    "read by turns": (lambda s, x: fg.fori_loop(0, 3, lambda i, c: c + s, s), "copied"),
    "read later": (
        lambda s, x: fg.fori_loop(0, 3, lambda i, c: c + x, s) + 0 * s, "in place"
    ),
    "swapped": (
        lambda s, x: fg.fori_loop(0, 3, lambda i, c: (c[1], c[0] * 2), (s, x))[1], "copied"
    ),
    "chosen": (lambda s, x: fg.cond(x.sum() > 0, lambda: s + x, lambda: s), "copied"),
    "in a choice": (
        lambda s, x: (fg.cond(x.sum() > 0, lambda: s.add_(x).sum(), lambda: x.sum()), s)[1],
        "in place",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOW)
def test_a_donated_leaf_is_a_loops_carry(name: str, recorder_name: str):
    new, how = HOW[name]
    device = DEVICES[recorder_name]

    def forward(w: Any, state: Any, x: Any) -> Any:
        s = new(state["s"], x[0])
        return s.sum() + w, {"s": s}

    fast = fg.graphify(forward, donate="state", stage="x", recorder=recorder_name, modes="FULL")
    w, state = torch.zeros((), device=device), {"s": torch.arange(4.0, device=device)}
    for sign in (1, -1, 1):
        x = (torch.arange(1.0, 5.0, device=device) * sign,)
        want, after = forward(w, {"s": state["s"].clone()}, x)
        got, back = fast(w, state, x)
        assert back["s"] is state["s"]
        torch.testing.assert_close((got, state["s"]), (want, after["s"]))
    (row,) = fast.steps[0].donation.rows
    assert row.how == how, row


# --- rows -----------------------------------------------------------------------------------------


def params() -> Any:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return {"embed": draw(toys.V, E), "layers": draw(3, E, E) / 3}


def real(batch: Any) -> Any:
    return batch.slot_mapping >= 0


def over_layers(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = w["embed"][batch.token_ids]
    h, norms = fg.scan(lambda h, l: (torch.tanh(h @ l) + h, h.sum(-1)), h, w["layers"])
    return h + norms.sum(0)[:, None], cache


def adapted(w: Any, cache: Any, batch: toys.Batch) -> Any:
    """Each token by an adapter of its own, as many layers long as the table is."""
    h, which = w["embed"][batch.token_ids], batch.token_ids % 3
    adapters = w["layers"].flip(0).unsqueeze(1).expand(-1, 3, -1, -1) / 4

    def body(h: Any, table: Any) -> Any:
        return h + torch.tanh(torch.bmm(h[:, None], table[which]))[:, 0], None

    return fg.scan(body, h, adapters)[0], cache


def masked_exit(w: Any, cache: Any, batch: toys.Batch) -> Any:
    def go(c: Any) -> Any:
        total = torch.where(real(batch), c[1].abs().sum(-1), 0).sum()
        return (c[0] < 4) & (total < 40)

    zero = torch.zeros((), dtype=torch.int64, device=batch.token_ids.device)
    body = lambda c: (c[0] + 1, torch.tanh(c[1] @ w["layers"][0]) * 2)  # noqa: E731
    return fg.while_loop(go, body, (zero, w["embed"][batch.token_ids]))[1], cache


def masked_sum(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = torch.where(real(batch)[:, None], w["embed"][batch.token_ids], 0)
    start = h.new_zeros(E), h
    s, h = fg.fori_loop(0, 3, lambda i, c: (c[0] + c[1].sum(0), c[1] * 2), start)
    return h + s, cache


def masked_choice(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = w["embed"][batch.token_ids]
    pred = torch.where(real(batch)[:, None], h, 0).sum() > 0
    return fg.cond(pred, lambda h: h * 2, lambda h: h, h), cache


def counted(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = torch.where(real(batch)[:, None], w["embed"][batch.token_ids], 0)
    s = fg.fori_loop(0, 3, lambda i, s: s.index_add(0, batch.token_ids, h), cache["s"])
    return h, {"s": s}


@pytest.mark.parametrize(
    "forward", [over_layers, adapted, masked_exit, masked_sum, masked_choice, counted]
)
def test_true_rows_are_those_of_bare_forward(forward: Any, recorder_name: str):
    device = DEVICES[recorder_name]
    w, cache = toys.moved((params(), {"s": torch.zeros(toys.V, E)}), device)
    fast = fg.graphify(forward, recorder=recorder_name, modes="FULL", **OVER)
    for batch in BATCHES:
        batch = toys.on(batch, device)
        want, after = forward(w, toys.clone(cache), batch)
        got, _ = fast(w, cache, batch)
        toys.assert_trees((got, cache), (want, after), **toys.CLOSE)
    if recorder_name == "tape":
        tried = {k: v for k, v in OVER.items() if k != "sizes"}
        report = fg.check(forward, w, cache, BATCHES[0], rehearse=True, **tried)
        assert report.rehearsed, report


def sum_over_padding(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = torch.where(real(batch)[:, None], w["embed"][batch.token_ids], 0)
    start = h.new_zeros(E), h
    s, h = fg.fori_loop(0, 3, lambda i, c: (c[0] + c[1].sum(0), c[1] + 1), start)
    return h + s, cache


def exit_by_padding(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = w["embed"][batch.token_ids]
    return fg.while_loop(lambda h: h.abs().sum() < 9, lambda h: h * 2, h), cache


def choice_by_padding(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = w["embed"][batch.token_ids]
    return fg.cond(h.sum() > 0, lambda: h, lambda: -h), cache


def over_tokens(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = w["embed"][batch.token_ids]
    return fg.scan(lambda c, x: (c + x, c), h.new_zeros(E), h)[1], cache


def as_many_as_tokens(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = w["embed"][batch.token_ids]
    return fg.fori_loop(0, h.shape[0], lambda i, h: h * 2, h), cache


def by_more_than_tokens(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = w["embed"][batch.token_ids]
    return fg.cond(h.shape[0] > 3, lambda: h, lambda: -h), cache


def beyond_the_table(w: Any, cache: Any, batch: toys.Batch) -> Any:
    ids = batch.token_ids
    return fg.scan(lambda c, _: (c + 1, w["embed"][c]), ids, None, length=2)[1].sum(0), cache


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (sum_over_padding, "takes sum over T"),
        (exit_by_padding, "takes turns .* by a predicate that padding can change"),
        (choice_by_padding, "chooses .* by a predicate that padding can change"),
        (over_tokens, "fg.scan: xs has T rows"),
        (as_many_as_tokens, "fg.fori_loop: upper= is T"),
        (by_more_than_tokens, "fg.cond: pred is T > 3"),
        (beyond_the_table, "looks up what the padding of an index names"),
    ],
)
def test_padding_that_reaches_true_rows_is_refused(forward: Any, text: str):
    fast = fg.graphify(forward, **OVER)
    with pytest.raises(RowsError, match=text) as raised:
        fast.trace(params(), {"s": torch.zeros(toys.V, E)})
    line = re.search(r"test_loops.py:(\d+)", str(raised.value))
    assert line and 0 <= int(line[1]) - forward.__code__.co_firstlineno <= 6


def a_promise_of_a_predicate(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = w["embed"][batch.token_ids]
    go = lambda h: fg.trust_rows(h.abs().sum()) < 60  # noqa: E731
    return fg.while_loop(go, lambda h: h * 1.25, h), cache


def a_promise_within_a_turn(w: Any, cache: Any, batch: toys.Batch) -> Any:
    h = w["embed"][batch.token_ids]
    turn = lambda i, h: h + fg.trust_rows(h.abs().sum())  # noqa: E731
    return fg.fori_loop(0, 2, turn, h), cache


@pytest.mark.parametrize(
    ("forward", "said"),
    [(a_promise_of_a_predicate, "it takes other turns in a key (fg.while_loop)"),
     (a_promise_within_a_turn, "what fg.trust_rows says here is not so")],
)  # fmt: skip
def test_a_rehearsal_finds_promises_that_loops_do_not_keep(forward: Any, said: str):
    w, cache = params(), {"s": torch.zeros(toys.V, E)}
    tried = {k: v for k, v in OVER.items() if k != "sizes"}
    assert fg.check(forward, w, cache, BATCHES[0], **tried).ok
    report = fg.check(forward, w, cache, BATCHES[0], rehearse=True, **tried)
    assert not report.ok and said in str(report), report


# --- primitives -----------------------------------------------------------------------------------


def decoding(carried: bool) -> Any:
    """Three decode steps over one cache, the token of one going into the next."""

    def forward(w: Any, cache: Any, batch: toys.Batch) -> Any:
        def step(i: Any, c: Any) -> Any:
            ids, out, *kept = c
            logits, new = toys.attend(w, kept[0] if kept else cache, with_ids(batch, ids))
            return (logits.argmax(-1), out + logits, *([new] if kept else []))

        ids = batch.token_ids
        start = ids.clamp(0, toys.V - 1), w["head"].new_zeros(ids.shape[0], toys.V)
        out = fg.fori_loop(0, 3, step, (*start, cache) if carried else start)
        return out[1], out[2] if carried else cache

    return forward


def with_ids(batch: Any, ids: Any) -> Any:
    return dataclasses.replace(batch, token_ids=ids)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_a_primitive_within_a_loop_is_run_by_its_backend(
    carried: bool, mode: str, recorder_name: str
):
    device = DEVICES[recorder_name]
    forward = decoding(carried)
    w, cache = toys.moved((toys.attention_params(), toys.attention_cache()), device)
    calls = []

    def run(args: Any, host: Any) -> None:
        calls.append(host)
        reference(args, host)

    reference: Any = fg.ops.ATTENTION.backend("reference").run
    fg.ops.ATTENTION.register(fg.ops.Backend("noted", run, lambda config: fg.Support.ALWAYS))
    try:
        fast = fg.graphify(
            forward, recorder=recorder_name, modes=mode, backends={"attention": "noted"}, **OVER
        )
        for batch in BATCHES:
            batch = toys.on(batch, device)
            want, after = forward(w, toys.clone(cache), batch)
            calls.clear()
            got, _ = fast(w, cache, batch)
            assert calls and all(host is not None for host in calls)
            toys.assert_trees((got, cache), (want, after), **toys.CLOSE)
        assert all(row.how == "in place" for row in fast.steps[0].donation.rows)
    finally:
        fg.ops.ATTENTION.unregister("noted")


@pytest.mark.parametrize("modes", ["PIECEWISE", "FULL_AND_PIECEWISE", None])
def test_piecewise_cannot_cut_within_a_loop(modes: Any):
    fast = fg.graphify(decoding(False), recorder="tape", modes=modes, **OVER)
    with pytest.raises(OperatorError, match=r'within fg.fori_loop.*modes="FULL"'):
        fast(toys.attention_params(), toys.attention_cache(), BATCHES[0])


def test_slots_that_are_told_a_primitive_within_a_loop_are_checked():
    def forward(w: Any, cache: Any, batch: toys.Batch) -> Any:
        batch = with_ids(batch, batch.token_ids.clamp(0, toys.V - 1))

        def step(i: Any, out: Any) -> Any:
            moved = dataclasses.replace(batch, slot_mapping=batch.slot_mapping + i)
            return out + toys.attend(w, cache, moved)[0]

        start = w["head"].new_zeros(batch.token_ids.shape[0], toys.V)
        return fg.fori_loop(0, 2, step, start), cache

    with pytest.raises(RowsError, match="slot"):
        fg.graphify(forward, **OVER).trace(toys.attention_params(), toys.attention_cache())


# --- what is around a step ------------------------------------------------------------------------


def test_the_estimate_counts_what_a_turn_takes():
    def forward(w: Any, cache: Any, batch: toys.Batch) -> Any:
        def wide(i: Any, h: Any) -> Any:
            return h + torch.tanh(h.repeat(1, 64)).view(-1, 64, E).sum(1)

        return fg.fori_loop(0, 2, wide, w["embed"][batch.token_ids]), cache

    given = params(), {"s": torch.zeros(toys.V, E)}
    lowered = fg.graphify(forward, modes="FULL", **OVER).trace(*given).split().lower()
    plain = fg.graphify(over_layers, modes="FULL", **OVER).trace(*given).split().lower()
    largest = max(lowered.table, key=lambda row: row[1].num_tokens)
    wide = 16 * E * 64 * 4
    assert lowered.estimate(*largest).pool >= plain.estimate(*largest).pool + wide


def test_what_a_loop_does_is_counted_by_its_turns():
    def unrolled(w: Any, cache: Any, batch: toys.Batch) -> Any:
        h = w["embed"][batch.token_ids]
        for layer in w["layers"]:
            h = torch.tanh(h @ layer)
        return h, cache

    def looped(w: Any, cache: Any, batch: toys.Batch) -> Any:
        h = w["embed"][batch.token_ids]
        return fg.scan(lambda h, layer: (torch.tanh(h @ layer), None), h, w["layers"])[0], cache

    counts = []
    for forward in (unrolled, looped):
        split = fg.graphify(forward, **OVER).trace(params(), {"s": torch.zeros(toys.V, E)}).split()
        sizes = {"T": 8, "R": 2, "B": toys.B}
        (part,) = counter(split.pieces, split.traced.graph)(sizes, sizes, None)
        counts.append([work.flops for work in part.works if work.kind == "product"])
    assert counts[0] == counts[1] and len(counts[0]) == 3


def test_a_step_with_loops_sleeps_wakes_and_lets_go(recorder_name: str):
    device = DEVICES[recorder_name]
    w, cache = toys.moved((params(), {"s": torch.zeros(toys.V, E)}), device)
    fast = fg.graphify(counted, recorder=recorder_name, modes="FULL", **OVER)
    batch = toys.on(BATCHES[0], device)
    first, _ = fast(w, cache, batch)
    (step,) = fast.steps
    step.sleep()
    step.wake()
    again, _ = fast(w, cache, batch)
    torch.testing.assert_close(again, first)
    want = counted(w, counted(w, {"s": torch.zeros_like(cache["s"])}, batch)[1], batch)[1]
    torch.testing.assert_close(cache, want)


def test_what_a_loop_gives_may_be_written(recorder_name: str):
    """Where nothing else can be that tensor, or nobody reads it any more."""

    def forward(state: Any, batch: Any) -> Any:
        (x,) = batch
        fresh = fg.cond(x.sum() > 0, lambda: x + 1, lambda: x * 2).add_(1)
        seen, last = fg.fori_loop(0, 3, lambda i, c: (c[1], c[0] + c[1]), (x, x * 2))
        last.add_(1)

        def turn(i: Any, c: Any) -> Any:
            new = torch.zeros_like(c)
            new.add_(c)
            new[0] = c.sum()
            return fg.fori_loop(0, 2, lambda j, d: d * 0.9, new).add_(c)

        done = fg.fori_loop(0, (x.sum() > 0).long() * 2, turn, state)
        done.add_(1)
        return done, (fresh, seen, last)

    device = DEVICES[recorder_name]
    fast = fg.graphify(forward, donate=0, stage=1, recorder=recorder_name, modes="FULL")
    state = torch.ones(4, device=device)
    for sign in (1.0, -1.0, 1.0):
        x = torch.arange(1.0, 5, device=device) * sign
        want, results = forward(state.clone(), (x,))
        back, got = fast(state, (x,))
        torch.testing.assert_close((state, got), (want, results))
        assert back is state


def test_loops_that_differ_in_one_thing_differ_as_text():
    """By which equal pieces are told, and compiled once."""

    def text_of(forward: Any, x: Any) -> str:
        fast = fg.graphify(forward, stage="x", recorder="tape")
        nodes = fast.trace(batch=(x,)).graph.gm.graph.nodes
        (loop,) = (node.target for node in nodes if hasattr(node.target, "graphs"))
        return loop.text

    def scan(**options: Any) -> Any:
        return lambda x: fg.scan(lambda c, _: (c * 0.5, c), x[0], None, **options)[1]

    x = torch.ones(4)
    texts = [text_of(scan(length=3), x), text_of(scan(length=4), x)]
    texts += [text_of(scan(length=3, reverse=True), x), text_of(scan(length=3), x.double())]
    assert text_of(scan(length=3), x) == texts[0] and len(set(texts)) == 4


def test_a_carry_may_come_back_conjugate(recorder_name: str):
    """Which is the same memory, read otherwise."""

    def forward(x: Any) -> Any:
        (z,) = x
        return fg.fori_loop(0, 3, lambda i, c: c.conj(), z), fg.scan(
            lambda c, _: (c.conj(), None), z * 2, None, length=2
        )[0]

    fast = fg.graphify(forward, stage="x", recorder=recorder_name, modes="FULL")
    z = torch.tensor([1 + 2j, 3 - 1j], device=DEVICES[recorder_name])
    odd, even = fast((z,))
    assert torch.equal(odd, z.conj()) and torch.equal(even, z * 2)


def test_a_literal_that_a_turn_writes_is_new_at_each(recorder_name: str):
    def forward(state: Any, batch: Any) -> Any:
        def turn(i: Any, c: Any) -> Any:
            literal = torch.tensor([1.0, 2.0], device=c.device)
            literal.add_(c)
            return c + literal

        return fg.fori_loop(0, 3, turn, batch[0]), state

    device = DEVICES[recorder_name]
    fast = fg.graphify(forward, donate=0, stage=1, recorder=recorder_name, modes="FULL")
    state, batch = {"s": torch.ones(3, device=device)}, (torch.ones(2, device=device),)
    for _ in range(2):
        assert fast(state, batch)[0].tolist() == forward(state, batch)[0].tolist() == [15, 22]


LAID: dict[str, Any] = {  # of q (2, 3), contiguous
    "a result of cond, by its memory": lambda q: torch.as_strided(
        fg.cond(q.sum() > 0, lambda: q.t(), lambda: q.t() * 2), (6,), (1,)
    ),
    "a result of cond, asked": lambda q: by_layout(
        fg.cond(q.sum() > 0, lambda: q.t(), lambda: q.t())
    ),
    "rows of xs, by their memory": lambda q: fg.scan(
        lambda c, r: (c + torch.as_strided(r, (2,), (1,)), None), q.new_zeros(2), q.t()
    )[0],
    "rows of xs, asked": lambda q: fg.scan(
        lambda c, r: (c + by_layout(r), None), q.new_zeros(2), q.t()
    )[0],
    "rows that are stacked": lambda q: by_layout(
        fg.scan(lambda c, r: (c, q.t()), q.new_zeros(()), None, length=2)[1]
    ),
    "a square carry that comes back transposed": lambda q: fg.fori_loop(
        0, 3, lambda i, c: c.t(), q[:, :2] * 1
    ),
    "and is not contiguous at first": lambda q: fg.fori_loop(
        0, 3, lambda i, c: c.t() + i, q[:, :2].t() * 1
    ),
}


def by_layout(x: torch.Tensor) -> torch.Tensor:
    """Other numbers of a tensor that is not contiguous."""
    return x * 1 if x.is_contiguous() else x * 10


@pytest.mark.parametrize("modes", ["FULL", "NONE"])
@pytest.mark.parametrize("what", LAID)
def test_what_loops_hand_over_lies_as_without_a_graph(what: str, modes: Any, recorder_name: str):
    device, fn = DEVICES[recorder_name], LAID[what]
    q = torch.arange(6.0, device=device).view(2, 3)

    def forward(w: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return fn(q * w) * 1

    w = torch.full((), 2.0, device=device)
    fast = fg.graphify(forward, stage="q", modes=modes, recorder=recorder_name)
    torch.testing.assert_close(fast(w, q), forward(w, q), rtol=0, atol=0)


def test_a_written_carry_lies_where_it_began():
    """Its views and writes are said to be of that storage, at their places in it."""

    def turn(i: Any, c: Any) -> Any:
        c[1:].add_(1)
        return c

    fast = fg.graphify(
        lambda s, x: (fg.fori_loop(0, 3, turn, s["s"][4:]).sum() + x[0], s), donate="s", stage="x",
        recorder="tape",
    )  # fmt: skip
    state, batch = {"s": torch.ones(8)}, (torch.ones(()),)
    gm = fast.trace(state, batch=batch).graph.gm
    (loop,) = (node.target for node in gm.graph.nodes if node.op == "call_function"
               and hasattr(node.target, "graphs"))  # fmt: skip
    values = [node.meta["val"] for node in loop.graphs[0].graph.nodes if "val" in node.meta]
    first = next(x for x in values if x.shape == (4,))
    places = {x.storage_offset() for x in values
              if x.untyped_storage()._cdata == first.untyped_storage()._cdata}  # fmt: skip
    assert places == {4, 5}


def test_a_carry_that_is_written_in_place_may_be_asked_for_the_next_turn(recorder_name: str):
    """What `cond` gives is no value of the carry, as what a turn gives is."""

    def turn(carry: Any) -> Any:
        for x in carry:
            x.add_(1)
        return carry

    def forward(state: Any, batch: Any) -> Any:
        fg.while_loop(lambda c: c[0] < 3, turn, (state["n"], state["s"]))
        return state["s"] + batch[0], state

    device = DEVICES[recorder_name]
    fast = fg.graphify(forward, donate=0, stage=1, recorder=recorder_name, modes="FULL")
    batch = (torch.ones(2, device=device),)
    for call in (forward, fast):
        state = {"n": torch.tensor(1, device=device), "s": torch.zeros(2, device=device)}
        got, state = call(state, batch)
        assert got.tolist() == [3, 3] and state["n"].item() == 3 and state["s"].tolist() == [2, 2]


def test_a_turn_may_write_what_the_number_of_turns_came_from(recorder_name: str):
    """It is read before the first one, as Python's range does."""

    def forward(state: Any, batch: Any) -> Any:
        def turn(i: Any, c: Any) -> Any:
            state["left"].sub_(1)
            return c + batch[0]

        return fg.fori_loop(0, state["left"], turn, batch[0]), state

    device = DEVICES[recorder_name]
    fast = fg.graphify(forward, donate=0, stage=1, recorder=recorder_name, modes="FULL")
    batch = (torch.ones(2, device=device),)
    for call in (forward, fast):
        got, state = call({"left": torch.tensor(5, device=device)}, batch)
        assert got.tolist() == [6, 6] and state["left"].item() == 0


def test_a_scan_of_no_turn_writes_nothing():
    kept, carry = torch.zeros(4), torch.zeros(4)

    def turn(c: Any, x: Any) -> Any:
        kept[1:].add_(1)
        c.mul_(2).add_(1)
        return c, c + x

    last, ys = fg.scan(turn, carry, torch.ones(0, 4))
    assert last is carry and ys.shape == (0, 4)
    assert not kept.any() and not carry.any()


@pytest.mark.parametrize("grows", [lambda c: c * c, lambda c: c * 2])
def test_padding_that_grows_from_turn_to_turn_is_not_taken_to_be_finite(grows: Any):
    """0 * inf is NaN: a product with zeros is no mask of it. torch.where is, whatever grows."""

    def forward(w: Any, batch: Growing) -> Any:
        zero = torch.where(batch.real[:, None], batch.x, 0)
        start = torch.where(batch.real[:, None], batch.x / 9, 2.0)
        grown = fg.fori_loop(0, 130, lambda i, c: grows(c) * 1, start)
        masked = grown if not w else torch.where(batch.real[:, None], grown, 0)
        return (zero * masked).sum(0)

    x = torch.zeros(5, 4)
    batch = Growing(x, torch.ones(5, dtype=torch.bool), fg.BatchSpec(5, 1))
    given = {"stage": 1, "sizes": (8,), "limits": fg.Limits(8, 2), "recorder": "tape"}
    with pytest.raises(fg.errors.RowsError, match="A factor of 0 is no mask"):
        fg.graphify(forward, **given)((), batch)
    torch.testing.assert_close(
        fg.graphify(forward, **given)((x,), batch), forward((x,), batch), equal_nan=True
    )

    def tame(w: Any, b: Growing) -> Any:
        start = torch.where(b.real[:, None], b.x, 2.0)
        bounded = fg.fori_loop(0, 130, lambda i, c: torch.tanh(c) + 1, start)
        return (bounded * torch.where(b.real[:, None], b.x, 0)).sum(0)

    torch.testing.assert_close(fg.graphify(tame, **given)((), batch), tame((), batch))


@fg.struct
class Growing:
    """Tokens, and which of them are there."""

    x: torch.Tensor = fg.buffer("T 4", "float32")
    real: torch.Tensor = fg.buffer("T", "bool")
    spec: fg.BatchSpec = fg.host()
