"""Compiled pieces: every level in every mode is bare `forward`, within a tolerance, on either
recorder; what serves a size, what recompiles, and what stays as it was traced.

A compilation takes a second or more, so few programs are compiled, each of few ops, and once in the
run: `compiled_once` keeps what was made. Exact sizes of their own are asked for once.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import re
import weakref
from typing import Any

import pytest
import torch
import toys
from toys import Model, llama_batch, model, steps

import fngraph as fg
from fngraph.compile.artefact import Artefact
from fngraph.core.compiling import Range, Span, trimmed
from fngraph.errors import CompileError
from fngraph.models.families import llama
from fngraph.torch_facts.inductor import Made

pytestmark = pytest.mark.usefixtures("one_thread")
COMPILED = "fngraph::compiled"
LONG = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="C++ takes long to compile: attend is as much of a model"
)


def lowered(toy: Model, **options: Any) -> Any:
    """The toy under compile="pieces", or what `options` say."""
    fast = toy.graphify(**{"compile": "pieces"} | options)
    return fast.trace(toy.params, toy.state).split().lower()


def captured(toy: Model, recorder_name: str, **options: Any) -> Any:
    return lowered(toy, **options).compile().capture(toy.params, toy.state, recorder=recorder_name)


def check(toy: Model, step: Any, batch: Any, **tolerance: Any) -> Any:
    """One step is what bare forward gives, state included."""
    return toy.check(lambda params, state, batch: step(state, batch), batch, **tolerance)


def tiny_llama(device: Any) -> Model:
    config = llama.Config(
        vocab_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4, dim=16, mlp_dim=24
    )
    return Model(
        llama.forward, llama.init_params(config, device=device),
        llama.init_cache(config, 4 * toys.B, block_size=toys.S, device=device),
    )  # fmt: skip


def row(params: Any, state: Any, batch: toys.Batch) -> Any:
    """Nothing but rows of a table: the least there is to compile."""
    return torch.tanh(params["w"][batch.token_ids]) * 2, state


def rows_model(device: Any = "cpu", rows: int = toys.V, dtype: Any = torch.float32) -> Model:
    w = torch.linspace(-1, 1, rows * toys.E, dtype=dtype).view(rows, toys.E).to(device)
    return Model(row, {"w": w}, {"calls": torch.zeros(1, device=device)})


# --- the same as forward --------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("modes", toys.MODES)
@pytest.mark.parametrize(
    ("name", "level"),
    [("attend", "none"), ("attend", "pieces"), ("tally_", "none"), ("tally_", "pieces"),
     ("tally_", "once"), ("tally_", "stock"), pytest.param("llama", "pieces", marks=LONG)],
)  # fmt: skip
def test_every_mode_and_level_equals_bare_forward(recorder_name, device, name, level, modes):
    toy = tiny_llama(device) if name == "llama" else model(name, device)
    donate = "cache" if name == "llama" else 1
    step = captured(toy, recorder_name, compile=level, modes=modes, donate=donate)
    made = [one for piece in step.main.executable.compiled for one in piece.made]
    for batch in steps(device):
        check(toy, step, llama_batch(batch) if name == "llama" else batch)
    resolved = fg.Mode.parse(modes)
    assert {mode for _, _, mode in step.stats.counts} == {resolved.decode, resolved.mixed}
    assert [one for piece in step.main.executable.compiled for one in piece.made] == made
    assert bool(made) == (level != "none")


def test_a_recording_holds_one_op_a_piece():
    """The tape sees neither Inductor's kernels nor the ops that it leaves to torch."""
    step = captured(model("attend"), "tape", modes="FULL")
    names = [op.fn.name() for op in step[fg.BatchDescriptor(8, 4)].graph]
    assert names.count(COMPILED) == 3
    assert not {"aten::mm", "aten::tanh"} & set(names)


def test_the_op_says_what_it_writes():
    toy = model("tally_")
    step = captured(toy, "tape", modes="FULL")
    (op,) = [x for x in step[fg.BatchDescriptor(8, 4)].graph if x.fn.name() == COMPILED]
    (*_, reads, writes) = op.args
    state = {x.data_ptr() for x in toy.state.values()}
    assert {x.data_ptr() for x in writes} == state
    assert not {x.data_ptr() for x in reads} & state
    schema = torch.ops.fngraph.compiled.default._schema
    assert [x.name for x in schema.arguments if x.is_write] == ["writes"]


def test_results_that_are_an_argument_s_memory_are_copied():
    """Inductor makes none that are known; the op's schema promises that there are none."""
    toy = rows_model()
    (piece,) = lowered(toy, modes="NONE").compile().executable.compiled
    w = toy.params["w"]
    lying = piece.artefacts[0].made._replace(call=lambda *args: [w[:3]])
    piece.artefacts[0] = dataclasses.replace(piece.artefacts[0], made=lying)
    (got,) = called(piece, w, torch.arange(3))
    assert torch.equal(got, w[:3]) and got.data_ptr() != w.data_ptr()


def test_guards_borrowed_results_and_sleep(recorder_name, device):
    toy = model("attend", device)
    step = captured(toy, recorder_name, modes="FULL_AND_PIECEWISE", guards=True, outputs="borrow")
    for batch in steps(device)[:4]:
        check(toy, step, batch)
    step.sleep()
    step.wake()
    for batch in steps(device)[4:]:
        check(toy, step, batch)


def _tangled(params: Any, state: Any, batch: toys.Batch, write: bool) -> Any:
    """Views that one piece makes and another one reads, and writes into; and two results of it that
    are equal, and written apart."""
    x_TE = params["w"][batch.token_ids] * 3
    left_TF, wide_T1E = x_TE[:, : toys.E // 2], x_TE[:, None]
    one_TF, two_TF = torch.zeros_like(left_TF), torch.zeros_like(left_TF)
    total_E = state["total"][0].add_(params["w"][0])
    a_TE = toys.double(torch.sin(x_TE))
    right_TF = toys.double(wide_T1E[:, 0, toys.E // 2 :], one_TF)
    right_TF = right_TF + toys.double(right_TF, two_TF, factor=3.0)
    if write:
        left_TF.add_(1)
    return (x_TE + a_TE, left_TF * 2, right_TF + wide_T1E[:, 0, :1], total_E * a_TE), state


def tangled(params: Any, state: Any, batch: toys.Batch) -> Any:
    return _tangled(params, state, batch, write=False)


def tangled_(params: Any, state: Any, batch: toys.Batch) -> Any:
    return _tangled(params, state, batch, write=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE", "NONE"])
@pytest.mark.parametrize("fn", [tangled, tangled_])
def test_views_of_one_memory_stay_so(recorder_name, device, fn: Any, modes: str):
    toy = Model(fn, toys.tally_params(device), toys.tally_state(device))
    step = captured(toy, recorder_name, modes=modes, sizes=(4,))
    why = {note.partition("compiled: ")[2] for note in step.notes if "not compiled" in note}
    assert ("it writes memory that two of its arguments share" in why) == (fn is tangled_)
    for rows in (3, 4):
        check(toy, step, toys.on(toys.batch(rows, seed=rows), device))


def test_arguments_that_lie_otherwise_are_read_right():
    """Nothing that a step stages does; Inductor's code would stop with an assertion."""
    toy = rows_model()
    (piece,) = lowered(toy, modes="NONE").compile().executable.compiled
    w, ids = toy.params["w"], torch.tensor([[3, 0], [1, 0], [7, 0]])[:, 0]
    assert ids.stride() == (2,)
    (got,) = called(piece, w, ids)
    torch.testing.assert_close(got, torch.tanh(w[ids]) * 2)


def written_behind(params: Any, state: Any, batch: toys.Batch) -> Any:
    """The second piece writes what the first has made."""
    x_TE = params["w"][batch.token_ids] * 3
    y_TE = toys.double(torch.sin(x_TE))
    x_TE.add_(y_TE)
    return x_TE + y_TE, state


def test_arguments_that_lie_otherwise_are_written_where_they_lie():
    """As what a primitive gives may, whose fake says otherwise."""
    low = lowered(rows_model()._replace(fn=written_behind), modes="NONE")
    piece = next(x for x in low.compile().executable.compiled if any(x.plan.written))
    rows, at = 3, {"T": 3, "R": 3}
    dense = [torch.rand(rows, toys.E) for _ in piece.plan.inputs]
    other = [torch.empty(toys.E, rows).t().copy_(x) for x in dense]
    want, got = piece(at, None, *dense), piece(at, None, *other)
    assert [x.stride() for x in other] == [(1, rows)] * len(other)
    for a, b in zip((*dense, *want), (*other, *got), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def part_of_leaf(params: Any, state: Any, batch: toys.Batch) -> Any:
    """The first piece gives a view of a leaf that begins inside of its memory, the second one of
    such a view."""
    x_TE = torch.tanh(params["w"][batch.token_ids])
    part, right_TF = toys.double(params["w"][1:, 2:]), x_TE[:, toys.E // 2 :]
    y_TE = torch.sin(toys.double(x_TE))
    last_TF = toys.double(right_TF[:, 1:])
    return x_TE + toys.double(y_TE)[:, :1] + part[0, 0] + last_TF[:, :1], state


def test_a_view_of_a_part_of_memory_begins_where_it_did(recorder_name, device):
    rows = rows_model(device, rows=toys.V + 2)
    toy = Model(part_of_leaf, {"w": rows.params["w"][2:]}, rows.state)
    assert toy.params["w"].storage_offset() == 2 * toys.E
    for modes in ("FULL", "NONE"):
        step = captured(toy, recorder_name, modes=modes, sizes=(4,))
        check(toy, step, toys.on(toys.batch(3), device))


def test_results_of_one_memory_are_made_apart():
    """Inductor makes none such that are known; views are made of each as if it were its own."""
    low = lowered(rows_model()._replace(fn=two_rows), modes="NONE")
    (piece,) = low.compile().executable.compiled
    one, w = torch.ones(3, toys.E), rows_model().params["w"]
    lying = piece.artefacts[0].made._replace(call=lambda *args: [one, one.t().contiguous().t()])
    piece.artefacts[0] = dataclasses.replace(piece.artefacts[0], made=lying)
    a, b = called(piece, w, torch.arange(3))
    assert a.is_contiguous() and b.is_contiguous()
    lying = lying._replace(call=lambda *args: [one, one])
    piece.artefacts[0] = dataclasses.replace(piece.artefacts[0], made=lying)
    piece._known.clear()
    a, b = called(piece, w, torch.arange(3))
    assert a.data_ptr() != b.data_ptr() and torch.equal(a, b)


def two_rows(params: Any, state: Any, batch: toys.Batch) -> Any:
    x_TE = params["w"][batch.token_ids]
    return (torch.tanh(x_TE) * 2, torch.sin(x_TE) * 2), state


def called(piece: Any, *tensors: torch.Tensor) -> Any:
    """A piece's results from arguments that their dtypes tell apart; as many rows as requests."""
    given = [x for fake in piece.plan.inputs for x in tensors if x.dtype == fake.dtype]
    rows = len(tensors[-1])
    return piece({"T": rows, "R": rows}, None, *given)


# --- what serves a size ---------------------------------------------------------------------------


def test_what_code_assumes_of_sizes_is_asked_of_each():
    class Even:
        def holds(self, sizes: Any) -> bool:
            return sizes["T"] % 2 == 0

    made = Made(lambda *args: [], "", 0)
    artefact = Artefact(Range(Span(1, 8), Span(1, 8)), made, Even(), (), 0)  # type: ignore[arg-type]
    served = [artefact.serves(T, R) for T, R in ((2, 2), (3, 3), (8, 1), (10, 1))]
    assert served == [True, False, True, False]


def test_exact_sizes_beat_the_range_and_are_printed(recorder_name, device):
    toy = rows_model(device)
    compiled = lowered(toy, modes="FULL", compile_sizes=(4,)).compile()
    (piece,) = compiled.executable.compiled
    assert [str(a.range) for a in piece.artefacts] == [
        "T 2..16, R 1..4", "T 4, R 1..4", "T 1, R 1"
    ]  # fmt: skip
    serves = {t: str(piece.artefact(t, min(t, 2)).range.tokens) for t in (1, 2, 3, 4, 5, 16)}
    assert serves == {1: "1", 4: "4", **dict.fromkeys((2, 3, 5, 16), "2..16")}
    assert repr(compiled) == (
        'Compiled(1 callable for 1 instruction, compile="pieces": 3 artefacts)'
    )
    text = compiled.as_text()
    for artefact in piece.artefacts:
        assert artefact.made.path in text and f"| {artefact.range} " in text
    assert re.search(r"\| FULL \| BatchDescriptor\(4, 4\) +\| piece 0  \| T 4, R 1\.\.4 ", text)
    step = compiled.capture(toy.params, toy.state, recorder=recorder_name)
    assert {key.num_tokens for _, key in step.main.warm.values()} == {1, 4, 8, 16}
    for batch in steps(device):
        check(toy, step, batch)


def test_no_range_is_asked_for_twice_and_none_that_no_batch_has(monkeypatch):
    """Where Inductor lets neither symbol be 1: three artefacts, and none for T 1, R 2..4."""
    asked = []

    def make(source: Any, wanted: fg.core.Range) -> Artefact:
        asked.append(wanted)
        holds = trimmed(wanted, lambda t, r: all(n > 1 or s.exact for n, s in zip((t, r), wanted)))
        return Artefact(holds, Made(lambda *args: [], "nowhere", 0), None, (), 0)

    monkeypatch.setattr("fngraph.compile.piece.make_artefact", make)
    (piece,) = lowered(rows_model(), modes="NONE", compile_sizes=(1,)).compile().executable.compiled
    assert len(asked) == len(set(asked))
    for sizes in ((1, 1), (2, 1), (16, 4), (3, 2)):
        assert piece.artefact(*sizes).serves(*sizes)
    assert [str(one) for one in asked] == [
        "T 1..16, R 1..4", "T 1, R 1", "T 1..16, R 1"
    ]  # fmt: skip
    assert [str(one.range) for one in piece.artefacts] == [
        "T 2..16, R 2..4", "T 1, R 1", "T 2..16, R 1"
    ]  # fmt: skip


def test_pieces_do_not_grow_in_number_with_depth():
    made = {}
    for layers in (2, 5):
        toy = Model(toys.attend, toys.attention_params(layers), toys.attention_cache(layers))
        made[layers] = lowered(toy, modes="NONE").compile().executable.compiled
    assert [len(pieces) for pieces in made.values()] == [3, 3]
    assert all(len(piece.artefacts) == 2 for pieces in made.values() for piece in pieces)


def test_once_is_an_error_for_another_size():
    toy = rows_model()
    (piece,) = lowered(toy, modes="NONE", compile="once").compile().executable.compiled
    assert piece.artefact(3, 2).range == piece.artefacts[0].range
    del piece.artefacts[0]
    with pytest.raises(CompileError, match=r"piece 0 was compiled once, for T 1, .*; 3 tokens of"):
        piece.artefact(3, 2)


# --- what was asked for, and what became of it ----------------------------------------------------


def drawing(params: Any, state: Any, batch: toys.Batch) -> Any:
    x = params["w"][batch.token_ids]
    return x + torch.rand(x.shape, generator=GENERATOR), state


GENERATOR = torch.Generator()


def test_what_draws_stays_as_it_was_traced():
    toy = rows_model()._replace(fn=drawing)
    low = lowered(toy, modes="NONE", generators=(GENERATOR,))
    assert "piece 0 is not compiled: it draws random numbers" in low.notes
    assert low.compile().executable.compiled == ()


def test_dropout_that_is_off_draws_nothing():
    """Attention has torch's mark of what draws, whatever its share of dropout."""

    def attended(params: Any, state: Any, batch: toys.Batch) -> Any:
        x = params["w"].view(1, 1, *params["w"].shape)
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x)[0, 0]
        return y[batch.token_ids], state

    low = lowered(rows_model()._replace(fn=attended), modes="NONE")
    assert "_scaled_dot_product" in low.split.traced.graph.gm.code
    assert low.notes == ()


def views_alone(w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    whole, part = torch.zeros(toys.V, toys.E), torch.zeros(toys.V - 1, toys.E)
    return toys.double(toys.double(w, whole)[1:], part)


STAYS: dict[str, tuple[Any, str]] = {
    "a view of another dtype": (
        lambda w, ids: (w[ids] * 3).view(torch.int32), "view_dtype is a view of another dtype"
    ),
    "one between pieces": (
        lambda w, ids: toys.double((w[ids] * 3).view(torch.int32)), "is a view of another dtype"
    ),
    "an argument's, in part": (
        lambda w, ids: toys.double(w.view(torch.int32)[1:]), "is a view of another dtype"
    ),
    "complex numbers": (lambda w, ids: (w[ids] * 1j).abs(), "computes with complex numbers"),
    "views alone": (views_alone, "makes views alone"),
    "no tensor": (lambda w, ids: torch.ones(3), "has no arguments"),
}  # fmt: skip


@pytest.mark.parametrize("why", STAYS)
def test_what_cannot_be_compiled_stays_as_it_was_traced(why: str):
    """And computes what bare forward does."""
    fn, words = STAYS[why]

    def forward(params: Any, state: Any, batch: toys.Batch) -> Any:
        return fn(params["w"], batch.token_ids), state

    toy = rows_model()._replace(fn=forward)
    low = lowered(toy, modes="FULL", sizes=(4,))
    assert any(" is not compiled: " in note and words in note for note in low.notes), low.notes
    step = low.compile().capture(toy.params, toy.state, recorder="tape")
    assert step.main.executable.compiled == ()
    check(toy, step, toys.batch(3))


@pytest.mark.parametrize("level", ["stock", "once"])
def test_whole_functions_with_primitives_are_compiled_in_pieces(level: str):
    low = lowered(model("attend"), compile=level)
    assert low.level == "pieces"
    (note,) = [note for note in low.notes if "compile=" in note]
    assert note.startswith(f'compile="{level}" -> "pieces": attention 0 and 1 more runs by')


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile": "piece"}, r"compile='piece': one of 'none', .*\. Did you mean 'pieces'\?"),
        ({"compile": True}, "compile=True: one of 'none'"),
        ({"compile_sizes": (1,)}, 'only compile="pieces" has code for exact sizes'),
        ({"compile": "once", "compile_sizes": (1,)}, "this is compile='once'"),
        ({"compile": "pieces", "compile_sizes": 8}, r"expected several, compile_sizes=\(...\)"),
        ({"compile": "pieces", "compile_sizes": ("8",)}, "compile_sizes='8': expected numbers of"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(TypeError, match=words):
        fg.graphify(row, stage="batch", **options)


def test_what_it_took_is_counted_and_logged(caplog):
    toy = rows_model()
    with caplog.at_level(logging.INFO, "fngraph"):
        step = captured(toy, "tape", modes="FULL", sizes=(4,), cache=False)
    lines = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert [line.partition(" ms, ")[0].rpartition(": ")[0] for line in lines] == [
        "compiled piece 0 for T 2..16, R 1..4", "compiled piece 0 for T 1, R 1"
    ]  # fmt: skip
    took = step.stats.compiles
    assert [(made.piece, str(made.sizes), made.kernels, made.loaded) for made in took] == [
        ("piece 0", "T 2..16, R 1..4", 1, False), ("piece 0", "T 1, R 1", 1, False)
    ]  # fmt: skip
    assert all(t.times == 1 and t.us > 0 for t in took.values())
    assert "| piece   | sizes           | was      |" in step.stats.as_text()
    assert step.stats.compiled == 2 and step.stats.compiles == took
    assert (step.stats - step.stats.copy()).compiles == {}


def test_progress_is_shown_piece_by_piece(monkeypatch):
    shown: list[tuple[str, list[bool]]] = []

    def track(items: Any, description: str) -> Any:
        done: list[bool] = []
        shown.append((description, done))
        for item in items:
            yield item
            done.append(True)

    low = lowered(model("attend"), modes="NONE")
    low.compile()
    assert shown == []
    monkeypatch.setattr("fngraph.report.progress.track", track)
    made = low.compile(progress=True).executable.compiled
    assert low.compile(progress="my model").executable.compiled
    assert len(made) == 3 and shown == [("compiling", [True] * 3), ("my model", [True] * 3)]
    monkeypatch.undo()
    assert lowered(rows_model(), compile="none", modes="NONE").compile(progress=True)


def test_the_bar_itself_goes_from_none_to_all(capsys):
    pytest.importorskip("rich")
    lowered(rows_model(), modes="NONE").compile(progress="my model")
    said = capsys.readouterr().out
    assert "my model" in said and "100%" in said


# --- other weights --------------------------------------------------------------------------------


def test_weights_of_another_kind_are_compiled_for(recorder_name, device):
    toy = rows_model(device)
    step = captured(toy, recorder_name, modes="FULL", sizes=(4,))
    (first,) = step.main.executable.compiled
    batch = toys.on(toys.batch(3), device)
    other = rows_model(device, toys.V + 9, torch.float64)
    for second in (False, True):
        before = step.stats.copy()
        step.rebind(params=other.params)
        got, _ = step(toy.state, batch)
        torch.testing.assert_close(got, row(other.params, toy.state, batch)[0])
        assert len((step.stats - before).compiles) == (0 if second else 2)
        assert (step.main.executable.compiled == (first,)) == second
        (first,) = step.main.executable.compiled


# --- lifetime -------------------------------------------------------------------------------------


def test_code_lives_as_long_as_what_runs_it(tape):
    toy = rows_model()
    step = captured(toy, "tape", modes="FULL", sizes=(4,))
    (piece,) = step.main.executable.compiled
    w, ids = toy.params["w"], torch.arange(4)
    recording, (out,) = tape.record(functools.partial(called, piece, w, ids))
    recording.replay()
    torch.testing.assert_close(out, torch.tanh(w[:4]) * 2)
    alive = weakref.ref(piece)
    (of_step,) = step[fg.BatchDescriptor(4, 4)].calls
    del step, piece
    gc.collect()
    for one in (of_step, recording):
        one.replay()
    del of_step, one
    gc.collect()
    assert alive() is None
    with pytest.raises(CompileError, match="code that is gone: its step was released"):
        recording.replay()
