"""What passes and levels of compilation do to the functions of loops; backends call by call."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch.nn.functional import silu

import fngraph as fg
from fngraph.errors import BackendError, CaptureError
from fngraph.passes import Pass

DEVICES = {"tape": "cpu", "cuda": "cuda"}
E = 8
OVER: dict[str, Any] = {
    "donate": "cache", "stage": "batch", "limits": toys.LIMITS, "sizes": toys.SIZES
}  # fmt: skip


def weights(device: Any = "cpu") -> Any:
    generator = torch.Generator().manual_seed(0)
    w = {name: torch.randn(E, E, generator=generator).to(device) / 3 for name in ("a", "b", "c")}
    return fg.ops.lay_side_by_side(w)


def given(rows: int = 3, device: Any = "cpu") -> tuple[torch.Tensor]:
    return (torch.linspace(-1, 1, rows * E).view(rows, E).to(device),)


def layer(w: Any, h: Any) -> Any:
    """A gate, and a sum: two linear layers that passes fuse; and what is made of literals."""
    angles = 1 / 100 ** (torch.arange(0, E, 2, device=h.device) / E)
    h = h * torch.cos(angles).repeat(2)
    return h + (silu(h @ w["a"].t()) * (h @ w["b"].t())) @ w["c"].t()


def in_a_loop(w: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, h: layer(w, h), x[0])


def in_a_scan(w: Any, x: Any) -> Any:
    body = lambda h, row: (layer(w, h + row), h)  # noqa: E731
    return fg.scan(body, x[0][:2], torch.stack([x[0][:2]] * 3))


def in_a_choice(w: Any, x: Any) -> Any:
    return fg.cond(x[0].sum() > 1, lambda: layer(w, x[0]), lambda: layer(w, x[0] * 2))


def in_a_loop_of_loops(w: Any, x: Any) -> Any:
    inner = lambda i, h: fg.fori_loop(0, 2, lambda j, g: layer(w, g), h)  # noqa: E731
    return fg.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, inner(0, c[1])), (x[0].new_zeros(()), x[0])
    )[1]


def traced(fast: Any) -> Any:
    return fast.steps[0].main.executable.maker.traced


def ops_of(gm: Any) -> list[str]:
    """The ops of ours and of matrices, in order, of a graph or of the functions of its loops."""
    found = []
    for node in gm.graph.nodes:
        if hasattr(node.target, "graphs"):
            found += [op for inner in node.target.graphs for op in ops_of(inner)]
        elif node.op == "call_function" and any(
            part in (name := str(node.target)) for part in ("fngraph.", ".mm", "arange", "cos")
        ):
            found.append(name)
    return found


# --- passes ---------------------------------------------------------------------------------------

FORWARDS = {"loop": in_a_loop, "scan": in_a_scan, "choice": in_a_choice, "both": in_a_loop_of_loops}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_function_has_the_kernels_of_the_same_lines_outside(name: str, recorder_name: str):
    w, forward, device = weights(), FORWARDS[name], DEVICES[recorder_name]
    w, x = weights(device), given(device=device)
    fast = fg.graphify(forward, stage="x", recorder=recorder_name, modes="FULL", passes="all")
    plain = fg.graphify(
        lambda w, x: layer(w, x[0]), stage="x", recorder=recorder_name, modes="FULL", passes="all"
    )
    for value in (x[0], x[0] + 1):
        torch.testing.assert_close(fast(w, (value,)), forward(w, (value,)), **toys.CLOSE)
    plain(w, x)
    times = 2 if name == "choice" else 1
    want = ops_of(traced(plain).graph.gm)
    assert len(want) == 2 and ops_of(traced(fast).graph.gm) == want * times
    matches = {one.one.name: one.matches for one in traced(fast).passes}
    alone = {one.one.name: one.matches for one in traced(plain).passes}
    assert matches["linears"] == alone["linears"] * times == 2 * times
    counter = 1 if name in ("loop", "both") else 0  # fori_loop scans over a range of its own
    assert matches["fold_constants"] - counter == alone["fold_constants"] * times == times
    assert fast.steps[0].stats.passes["linears"] == 2 * times


@pytest.mark.gpu
def test_a_kernel_that_begins_early_may_be_the_first_of_a_body_and_the_last():
    """A gate in one launch, which reads its weights before it waits: nothing else is in a turn."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)  # noqa: E731
    w = fg.ops.lay_side_by_side({"a": draw(512, 512) / 16, "b": draw(512, 512) / 16})

    def forward(w: Any, x: Any) -> Any:
        gate = lambda i, h: silu(h @ w["a"].t()) * (h @ w["b"].t())  # noqa: E731
        h = gate(0, fg.fori_loop(0, 3, gate, gate(0, x[0])))
        return fg.cond(h.sum() > 1e30, lambda: h, lambda: gate(0, h))  # never: some 1e5

    def unrolled(w: Any, x: Any) -> Any:
        h = x[0]
        for _ in range(6):
            h = silu(h @ w["a"].t()) * (h @ w["b"].t())
        return h

    options: dict[str, Any] = {"stage": "x", "recorder": "cuda", "modes": "FULL", "passes": "all"}
    looped, straight = (fg.graphify(fn, **options) for fn in (forward, unrolled))
    for _ in range(20):
        x = (draw(1, 512),)
        assert torch.equal(looped(w, x), straight(w, x))
    assert "fngraph.fused_linear.default" in ops_of(traced(looped).graph.gm)


def test_what_a_pass_did_to_a_body_is_shown():
    fast = fg.graphify(in_a_loop_of_loops, stage="x", recorder="tape", modes="FULL", passes="all")
    told = fast.trace(weights(), batch=given())
    diff = told.diff("linears")
    (before,) = (line for line in diff.splitlines() if line.startswith("---"))
    assert before.startswith("--- before linears in body of fg.fori_loop, ")
    assert "test_loop_levels.py:" in before
    assert "+    fused_linear" in diff and "-    mm" in diff
    assert told.diff("rope") == ""
    assert "in body of fg.fori_loop" in told.diff("fold_constants")


def test_a_pass_sees_leaves_and_constants_of_a_body():
    """A body's operands are the arguments and the constants of `forward` that they are."""
    seen: list[dict[str, Any]] = []

    def look(graph: Any) -> Any:
        leaves = [n.meta["leaf"].path for n in graph.nodes if "leaf" in n.meta]
        values = [n.meta["value"].tolist() for n in graph.nodes if n.op == "get_attr"]
        seen.append({"leaves": leaves, "values": values})
        return graph

    def forward(w: Any, x: Any) -> Any:
        two = torch.tensor([1.0, 2.0]).repeat(E // 2)
        return fg.fori_loop(0, 2, lambda i, h: (h @ w["a"]) * two, x[0])

    fast = fg.graphify(forward, stage="x", recorder="tape", modes="FULL", passes=(look,))
    torch.testing.assert_close(fast(weights(), given()), forward(weights(), given()))
    outer, body = seen
    assert outer["leaves"] == ["w['a']", "w['b']", "w['c']", "x[0]"]
    assert body["leaves"] == ["w['a']"]
    assert outer["values"][-1] == [1.0, 2.0]
    assert body["values"] == []  # what is made of it comes from around the loop


def test_an_op_that_mixes_rows_is_refused_in_a_body_too():
    def reversed_(graph: Any) -> Any:
        aten = torch.ops.aten
        for node in list(graph.nodes):
            if node.target is aten.tanh.default:
                with graph.inserting_before(node):
                    node.replace_all_uses_with(
                        graph.call_function(aten.flip.default, (node.args[0], [0]))
                    )
        return graph

    def forward(w: Any, cache: Any, batch: toys.Batch) -> Any:
        start = w["w"][batch.token_ids]
        return fg.fori_loop(0, 2, lambda i, h: torch.tanh(h), start), cache

    fast = fg.graphify(forward, passes=(Pass("turned", reversed_, "1"),), **OVER)
    with pytest.raises(fg.errors.RowsError, match=r"test_loop_levels.py:\d+.*the pass 'turned'"):
        fast.trace(toys.tally_params(), toys.tally_state())


def test_what_a_loop_leaves_in_memory_is_known_after_a_pass_around_it():
    """A loop that writes its carry in place stands in a graph that a pass has rewritten."""

    def forward(w: Any, cache: Any, batch: toys.Batch) -> Any:
        seen = cache["seen"] + 0

        def turn(i: Any, c: Any) -> Any:
            c.add_(1)
            return c

        seen = fg.fori_loop(0, 3, turn, seen)
        x = w["w"][batch.token_ids]
        return silu(x) * torch.sin(x), {**cache, "seen": seen}

    fast = fg.graphify(forward, recorder="tape", modes="FULL", passes=("silu_mul",), **OVER)
    w, state, batch = toys.tally_params(), toys.tally_state(), toys.batch(3, 5)
    want, after = forward(w, toys.clone(state), batch)
    got, _ = fast(w, state, batch)
    toys.assert_trees((got, state), (want, after), **toys.CLOSE)
    assert {one.one.name: one.matches for one in traced(fast).passes} == {"silu_mul": 1}


# --- compilation ----------------------------------------------------------------------------------


def test_a_body_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: Any, recorder_name: str):
    """Two loops of one body, and what is done outside: one piece; another process finds it."""
    monkeypatch.setenv("FNGRAPH_CACHE", str(tmp_path))
    device = DEVICES[recorder_name]
    w, x = weights(device), given(device=device)

    def forward(w: Any, x: Any) -> Any:
        turn = lambda i, h: torch.sin(h) * w["a"] + torch.cos(h)  # noqa: E731
        h = fg.fori_loop(0, 3, turn, x[0][:1].expand(E, E).clone())
        return fg.fori_loop(0, 2, lambda i, h: turn(i, h), h.flip(0))

    made = []
    for loaded in (False, True):
        fast = fg.graphify(
            forward, stage="x", recorder=recorder_name, modes="FULL", compile="pieces"
        )
        torch.testing.assert_close(fast(w, x), forward(w, x), **toys.CLOSE)
        stats = fast.steps[0].stats
        assert {key.loaded for key in stats.compiles} == {loaded}
        assert not [note for note in fast.steps[0].notes if "not compiled" in note]
        made.append(sorted(key.piece for key in stats.compiles))
    executable = fast.steps[0].main.executable
    assert made[0] == made[1] and len(made[0]) == len(executable.compiled)
    # before the first, between them, and the body that both have
    split = traced(fast).split()
    assert len(split.functions) == 2 and len(executable.compiled) == 3
    if recorder_name == "tape":
        (replay,) = fast.steps[0].replays.values()
        called = [line for line in replay.calls[0].as_text().splitlines() if "compiled(" in line]
        assert [line.startswith(" " * 7) for line in called] == [False, True, False, True]


@pytest.mark.parametrize("level", ["stock", "once"])
def test_one_compiled_function_holds_no_loop(level: str):
    fast = fg.graphify(in_a_choice, stage="x", recorder="tape", modes="FULL", compile=level)
    torch.testing.assert_close(fast(weights(), given()), in_a_choice(weights(), given()))
    (note,) = (note for note in fast.steps[0].notes if note.startswith("compile="))
    assert note.startswith(f'compile="{level}" -> "pieces": fg.cond, ')
    assert "test_loop_levels.py:" in note and "node of its own" in note
    assert fast.steps[0].main.executable.level == "pieces"


def in_place(params: Any, x: Any) -> Any:
    """Gradient descent, many steps in one: donated leaves are the carry."""

    def turn(i: Any, p: Any) -> Any:
        loss = lambda p: ((x[0] @ p["w"] + p["b"]) ** 2).mean()  # noqa: E731
        grads = torch.func.grad(loss)(p)
        return {name: p[name] - 0.1 * grads[name] for name in p}

    return fg.fori_loop(0, 3, turn, params)


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_donation_and_gradients_are_those_of_what_was_traced(mode: str, recorder_name: str):
    device = DEVICES[recorder_name]
    rows = []
    for level in ("none", "pieces"):
        params = {"w": weights(device)["a"].clone(), "b": torch.ones(E, device=device)}
        fast = fg.graphify(
            in_place, donate="params", stage="x", recorder=recorder_name, modes=mode, compile=level
        )
        want = in_place({k: v.clone() for k, v in params.items()}, given(device=device))
        got = fast(params, given(device=device))
        assert got["w"] is params["w"]
        torch.testing.assert_close(params, want, **toys.CLOSE)
        rows.append([(row.path, row.how) for row in fast.steps[0].donation.rows])
    assert rows[0] == rows[1]


# --- primitives -----------------------------------------------------------------------------------


def decoding(w: Any, cache: Any, batch: toys.Batch) -> Any:
    """Attention before a loop, in it (for each of two layers), and behind it."""
    batch = dataclasses.replace(batch, token_ids=batch.token_ids.clamp(0, toys.V - 1))

    def once(ids: Any) -> Any:
        return toys.attend(w, cache, dataclasses.replace(batch, token_ids=ids))[0]

    def step(i: Any, c: Any) -> Any:
        out = once(c[0])
        return out.argmax(-1), c[1] + out

    first = once(batch.token_ids)
    ids, out = fg.fori_loop(0, 3, step, (first.argmax(-1), torch.zeros_like(first)))
    return out + once(ids), cache


@pytest.fixture
def noted():
    """Backends that note where they ran and do as `reference`."""
    ran: list[str] = []
    reference: Any = fg.ops.ATTENTION.backend("reference").run

    def make(name: str) -> fg.ops.Backend:
        def run(args: Any, host: Any) -> None:
            ran.append(name)
            reference(args, host)

        return fg.ops.Backend(name, run, lambda config: fg.Support.ALWAYS)

    names = [f"b{i}" for i in range(6)]
    fg.ops.ATTENTION.register(*map(make, names))
    yield ran
    for name in names:
        fg.ops.ATTENTION.unregister(name)


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("level", ["none", "pieces"])
def test_backends_call_by_call_reach_those_in_loops(
    mode: str, level: str, noted: list[str], recorder_name: str
):
    device = DEVICES[recorder_name]
    fast = fg.graphify(
        decoding, recorder=recorder_name, modes=mode, compile=level,
        backends={"attention": [f"b{i}" for i in range(6)]}, **OVER,
    )  # fmt: skip
    w, cache = toys.moved((toys.attention_params(), toys.attention_cache()), device)
    batch = toys.on(toys.batch(3, 5), device)
    want, after = decoding(w, toys.clone(cache), batch)
    got, _ = fast(w, cache, batch)
    toys.assert_trees((got, cache), (want, after), **toys.CLOSE)
    once = ["b0", "b1", *["b2", "b3"] * (3 if mode == "NONE" else 1), "b4", "b5"]
    assert "".join(once) in "".join(noted) and set(noted) == set(once)
    if level == "pieces":
        assert len(fast.steps[0].main.executable.compiled) == 6


def test_a_number_that_no_call_has_is_refused(noted: list[str]):
    for choices in (["b0"] * 4, {6: "b0"}):
        fast = fg.graphify(decoding, modes="FULL", backends={"attention": choices}, **OVER)
        split = fast.trace(toys.attention_params(), toys.attention_cache()).split()
        with pytest.raises(BackendError, match="calls attention 6 times"):
            split.lower()


def test_equal_loops_may_have_other_backends(noted: list[str]):
    """Pieces that are alike are one, but for whose primitives run by others."""

    def forward(w: Any, cache: Any, batch: toys.Batch) -> Any:
        batch = dataclasses.replace(batch, token_ids=batch.token_ids.clamp(0, toys.V - 1))
        one = {**w, "layers": w["layers"][:1]}
        start = w["head"].new_zeros(batch.token_ids.shape[0], toys.V)

        def turns(out: Any) -> Any:
            return fg.fori_loop(
                0, 2, lambda i, h: torch.sin(h) + toys.attend(one, cache[:1], batch)[0], out
            )

        out = start
        for _ in range(4):
            toys.attend(one, cache[:1], batch)
            out = turns(out)
        return out, cache

    names = {0: "b0", 1: "b1", 2: "b0", 3: "b3", 4: "b0", 5: "b5", 6: "b0", 7: "b1"}
    w, cache = toys.attention_params(), toys.attention_cache()
    found = []
    for backends in ({"attention": names}, {"attention": "b0"}):
        fast = fg.graphify(forward, recorder="tape", modes="FULL", backends=backends, **OVER)
        noted.clear()
        fast(w, cache, toys.batch(3, 5))
        found.append("".join(dict.fromkeys(noted)))
        found.append(len(fast.trace(w, cache).split().distinct))
    assert found == ["b0b1b3b5", 5, "b0", 3]


# --- rules of torch's that are wrong --------------------------------------------------------------


@pytest.fixture
def wrong():
    """Ops whose rule says another shape, or dtype, than they give."""
    library = torch.library.Library("looped", "DEF")
    for name, gives, says in (
        ("narrow", lambda x: x[..., :1] * 1, torch.empty_like),
        ("double", lambda x: x.double(), torch.empty_like),
    ):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, gives, "CPU")
        library.impl(name, gives, "CUDA")
        library.impl(name, says, "Meta")
    yield torch.ops.looped
    library._destroy()


@pytest.mark.parametrize("kind", ["carry 0", "row 0 of what a turn stacks", "result 0"])
@pytest.mark.parametrize("op", ["narrow", "double"])
def test_a_result_of_another_kind_than_traced_is_told(
    op: str, kind: str, wrong: Any, recorder_name: str
):
    """A CUDA capture runs ops, as mode NONE does; the tape goes by the rule, and tells itself."""
    device = DEVICES[recorder_name]

    def forward(w: Any, x: Any) -> Any:
        bad = getattr(wrong, op)
        if kind == "carry 0":
            return fg.fori_loop(0, 2, lambda i, h: fg.trust_rows(bad(h)), x[0])
        if kind == "result 0":
            return fg.cond(x[0].sum() < 1e9, lambda: bad(x[0]), lambda: x[0] * 2)
        return fg.scan(lambda h, row: (h, bad(h)), x[0], None, length=2)[1]

    got = {"narrow": r"float32\[3, 1\]", "double": r"float64\[3, 8\]"}[op]
    told = rf"{kind} of fg\.\w+ is {got}, and torch's rule for it says float32\[3, 8\]"
    for mode in ("NONE", "FULL"):
        fast = fg.graphify(forward, stage="x", recorder=recorder_name, modes=mode)
        by_tape = (recorder_name, mode) == ("tape", "FULL")
        with pytest.raises(CaptureError, match="torch's rule for it says" if by_tape else told):
            fast(weights(device), given(device=device))
