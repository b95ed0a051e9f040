"""Hybrids, backends per layer, names that are only studied, and plans on the host."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import toys
from toys import FULL, LIMITS, NONE, PIECEWISE, SIZES

import fngraph as fg
from fngraph.errors import BackendError
from fngraph.ops import ATTENTION, Backend, Hybrid, Plan

CALLS: Counter[Any] = Counter()
right: Any = ATTENTION.backend("reference").run


@pytest.fixture
def add():
    """Adds a backend that counts its calls and then does as `reference`."""
    added = []

    def add(name: str, level: fg.Support, **more: Any) -> None:
        def run(args: Any, host: Any) -> None:
            CALLS[name, len(args.q), host and host.key] += 1
            right(args, host)

        CALLS.clear()
        ATTENTION.register(Backend(name, more.pop("run", run), lambda config: level, **more))
        added.append(name)

    yield add
    for name in set(added):
        ATTENTION.unregister(name)


def lowered(choice: Any, modes: str | None = None, layers: int = 2) -> Any:
    fast = fg.graphify(
        toys.attend, modes=modes, donate="cache", stage="batch", sizes=SIZES,
        backends={"attention": choice}, recorder="tape",
    )  # fmt: skip
    params, cache = toys.attention_params(layers), toys.attention_cache(layers)
    return fast.trace(params, cache, limits=LIMITS).split().lower()


def taken(choice: Any, **capture: Any) -> tuple[Any, Any, Any]:
    """A step on the tape, its weights and its cache."""
    params, cache = toys.attention_params(), toys.attention_cache()
    low = lowered(choice, **capture)
    return low.compile().capture(params, cache, recorder="tape"), params, cache


def used(keys: Any) -> set[tuple[str, Any]]:
    return {(name, key and key.query_len) for name, _, key in keys}


NARROW = fg.ops.AttentionConfig(4, 2, 8, 4, torch.float32, torch.float32, "cpu", 1.0)


def test_where_none_is_named_a_preferred_backend_is_taken_if_it_can_run(add):
    assert ATTENTION.suited(NARROW).name == "reference"
    add(
        "narrow", fg.Support.ALWAYS, preferred=lambda config: True,
        supports=lambda config: "too wide" if config.head_dim > 8 else None,
    )  # fmt: skip
    assert ATTENTION.suited(NARROW).name == "narrow"
    assert ATTENTION.suited(NARROW._replace(head_dim=16)).name == "reference"
    add("narrow", fg.Support.ALWAYS)  # one of that name is replaced
    assert ATTENTION.suited(NARROW).name == "reference"


def test_what_is_unregistered_is_forgotten():
    level = lambda config: fg.Support.ALWAYS  # noqa: E731
    ATTENTION.register(Backend("one", right, level, preferred=lambda config: True))
    assert ATTENTION.suited(NARROW).name == "one"
    ATTENTION.unregister("one")
    assert ATTENTION.suited(NARROW).name == "reference"
    for name, why in (("reference", "is the definition of attention"), ("one", "no backend")):
        with pytest.raises(BackendError, match=why):
            ATTENTION.unregister(name)


def test_bare_forward_and_a_step_take_the_same_where_none_is_named(add):
    add("one", fg.Support.ALWAYS, preferred=lambda config: True)
    assert [call.backend.name for call in lowered(None).calls] == ["one", "one"]
    toys.bare(toys.attend, toys.attention_params(), toys.attention_cache(), toys.batch(3, 2))
    assert list(CALLS.items()) == [(("one", 5, None), 2)]


def test_why_a_preferred_backend_is_passed_over_is_noted(add):
    add("one", fg.Support.ALWAYS, preferred=lambda config: True, supports=lambda config: "no way")
    assert lowered(None).notes == ("attention runs on reference, not on one: no way",)
    assert lowered("reference").notes == ()


def test_a_hybrid_runs_uniform_keys_with_one_and_all_else_with_the_other(add):
    add("one", fg.Support.UNIFORM_BATCH)
    add("two", fg.Support.ALWAYS)
    low = lowered(Hybrid(uniform="one", mixed="two"))
    assert low.resolution.modes is fg.Mode.FULL_AND_PIECEWISE
    params, cache = toys.attention_params(), toys.attention_cache()
    step = low.compile().capture(params, cache, recorder="tape")
    captured = [key for key in CALLS if key[2] is not None]
    assert used(captured) == {("one", 1)}
    for batch, mode, name in [
        (toys.decode(3), FULL, None), (toys.batch(3, 2), PIECEWISE, "two"),
        (toys.batch(1, 1, 1), PIECEWISE, "two"),
    ]:  # fmt: skip
        CALLS.clear()
        want = toys.bare(toys.attend, params, cache, batch)
        CALLS.clear()
        got, _ = step(cache, batch)
        torch.testing.assert_close(got, want[0])
        assert step.dispatch(batch.spec).mode is mode
        assert used(CALLS) == ({(name, None)} if name else set())


def test_in_mode_full_uniform_batches_get_keys_of_their_own(add):
    add("one", fg.Support.ALWAYS)
    add("two", fg.Support.ALWAYS)
    low = lowered(Hybrid(uniform="one", mixed="two"), "FULL")
    assert low.resolution.modes is FULL
    assert {key.query_len for _, key in low.table} == {None, 1}
    assert {key.query_len for _, key in lowered("one", "FULL").table} == {None}
    params, cache = toys.attention_params(), toys.attention_cache()
    low.compile().capture(params, cache, recorder="tape")
    assert used(CALLS) == {("one", 1), ("two", None)}


def test_the_level_of_a_hybrid_is_the_lower_one_and_says_whose_it_is(add):
    add("one", fg.Support.UNIFORM_SINGLE_TOKEN_DECODE)
    add("two", fg.Support.ALWAYS)
    low = lowered(["two", Hybrid("one", mixed="two")], "FULL")
    (reason,) = low.resolution.reasons
    assert "attention 1 (uniform: one) (UNIFORM_SINGLE_TOKEN_DECODE)" in reason
    assert "uniform: one" in low.as_text()
    (reason,) = lowered({0: Hybrid("two", mixed="one")}, "FULL").resolution.reasons
    assert "attention 0 (mixed: one)" in reason


def test_a_backend_for_each_layer(add):
    add("one", fg.Support.ALWAYS)
    add("never", fg.Support.NEVER)
    assert [c.backend.name for c in lowered(["one", "reference"]).calls] == ["one", "reference"]
    low = lowered({1: "never"})
    assert [c.backend.name for c in low.calls] == ["reference", "never"]
    (reason,) = low.resolution.reasons
    assert "attention 1 (never) (NEVER) can never be captured" in reason


@pytest.mark.parametrize(
    "choice, message",
    [(["reference"], "lists 1 backends, and forward calls attention 2 times"),
     ({2: "reference"}, r"forward calls attention 2 times, number 0 to 1"),
     ({-1: "reference"}, r"\{-1: ...\}.*forward calls attention 2 times, number 0 to 1"),
     (Hybrid("reference", mixed="refrence"), "no backend 'refrence'"),
     ({0: "refrence"}, "no backend 'refrence'"), (3, r"pass a name, or fg.ops.Hybrid")],
)  # fmt: skip
def test_a_choice_that_fits_nothing_is_refused(choice, message):
    with pytest.raises(BackendError, match=message):
        lowered(choice)


def test_backends_are_written_by_primitive():
    with pytest.raises(BackendError, match=r"backends='sdpa'.*backends=\{\"attention\": 'sdpa'\}"):
        fg.graphify(toys.attend, donate="cache", stage="batch", backends="sdpa")


@pytest.mark.parametrize("answer", [False, True, 0])
def test_supports_gives_a_reason_or_none(add, answer):
    """`lambda config: config.head_dim <= 128` would refuse what it can run, and take the rest."""
    add("odd", fg.Support.ALWAYS, supports=lambda config: answer)
    with pytest.raises(BackendError, match=rf"'odd': supports\(config\) returned {answer}; return"):
        lowered("odd")


def test_what_is_no_backend_is_not_registered():
    known = list(ATTENTION.backends)

    def mine(args: Any, host: Any) -> None: ...

    with pytest.raises(BackendError, match=r"pass a fg.ops.Backend, fg.ops.Backend\('mine', run"):
        ATTENTION.register(ATTENTION.backend("reference"), mine)  # type: ignore[arg-type]
    assert list(ATTENTION.backends) == known


def test_a_backend_shows_its_level():
    assert "'sdpa', UNIFORM_BATCH" in repr(ATTENTION.backend("sdpa"))
    by_width = Backend("mine", right, lambda config: fg.Support(config.head_dim > 8))
    assert repr(by_width) == "Backend('mine')"


def test_a_level_in_place_of_a_function():
    level = fg.Support.ALWAYS
    with pytest.raises(BackendError, match=r"pass support=lambda config: fg.Support.ALWAYS"):
        Backend("mine", right, support=level)  # type: ignore[arg-type]


@pytest.mark.parametrize("typo, name", [("flashmla", "FlashMLA"), ("SDPA", "sdpa")])
def test_the_nearest_name_is_so_in_either_case(typo, name):
    with pytest.raises(BackendError, match=f"mean '{name}'"):
        ATTENTION.backend(typo)


def test_a_refusal_names_the_layer_of_a_hybrid(add):
    add("one", fg.Support.ALWAYS, supports=lambda config: "it is Tuesday")
    with pytest.raises(BackendError, match=r"attention 1: backend 'one' .*it is Tuesday"):
        lowered(["reference", Hybrid("one", mixed="reference")])


def test_what_is_not_shipped_can_be_lowered_but_not_compiled():
    low = lowered("CUTLASS MLA", "FULL")
    assert low.resolution.modes is fg.Mode.FULL_AND_PIECEWISE
    assert "CUTLASS MLA" in low.resolution.reasons[0]
    with pytest.raises(BackendError, match=r"attention 0 cannot run: .*not ship 'CUTLASS MLA'"):
        low.compile()


# --- plans on the host ----------------------------------------------------------------------------


def planned(add: Any, level: fg.Support, leaves: tuple[str, ...] = ("seq_lens",)) -> list[Any]:
    """Adds the backend `planned`: it attends over the lengths that its plan has put into a buffer,
    not those on the device. What is filled is noted in the list."""
    filled: list[Any] = []

    def buffers(config: Any, sizes: Any, key: Any) -> Any:
        return key, torch.full((sizes["R"],), 99, dtype=torch.int32)

    def fill(buffers: Any, config: Any, sizes: Any, leaves: Any) -> None:
        key, lens = buffers
        filled.append((key, dict(sizes), leaves[0].tolist()))
        lens.zero_()[: len(leaves[0])] = leaves[0]

    def run(args: Any, host: Any) -> None:
        lens = args.plan[1][: len(args.meta.seq_lens)]
        right(args._replace(meta=args.meta._replace(seq_lens=lens)), host)

    add("planned", level, run=run, plan=Plan(leaves, buffers, fill))
    return filled


def test_a_plan_is_made_before_each_step_into_the_keys_own_buffers(add):
    filled = planned(add, fg.Support.UNIFORM_BATCH)
    low = lowered("planned")
    params, cache = toys.attention_params(), toys.attention_cache()
    compiled = low.compile()
    assert len(compiled.executable.planners) == 1  # two layers, one plan
    step = compiled.capture(params, cache, recorder="tape")
    keys = {key for key, _, _ in filled}
    assert None in keys and {key.num_tokens for key in keys if key} == {1, 2, 4}
    for batch, mode in [
        (toys.decode(3), FULL), (toys.decode(2, past=5), FULL), (toys.batch(3, 2), PIECEWISE),
        (toys.decode(3, past=7), FULL), (toys.batch(9, 3, 2, 2), PIECEWISE),
    ]:  # fmt: skip
        filled.clear()
        want = toys.bare(toys.attend, params, cache, batch)
        got, _ = step(cache, batch)
        torch.testing.assert_close(got, want[0])
        ((key, sizes, lens),) = filled
        chosen = step.dispatch(batch.spec)
        assert chosen.mode is mode and lens == batch.seq_lens.tolist()
        assert key == (chosen.descriptor if mode is FULL else None)
        T = chosen.descriptor.num_tokens if mode is FULL else batch.spec.num_tokens
        assert sizes["T"] == T


def test_a_mixed_key_is_planned_for_as_many_requests_as_can_come(add):
    filled = planned(add, fg.Support.ALWAYS)
    step, params, cache = taken("planned", modes="FULL")
    assert {key and key.query_len for key, _, _ in filled} == {None}
    for batch in (toys.batch(3, 2), toys.batch(1, 2, 1, 4), toys.decode(3, past=4)):
        filled.clear()
        want = toys.bare(toys.attend, params, cache, batch)
        torch.testing.assert_close(step(cache, batch)[0], want[0])
        assert [lens for _, _, lens in filled] == [batch.seq_lens.tolist()]


def test_a_batch_that_was_handed_out_is_planned_too(add):
    filled = planned(add, fg.Support.UNIFORM_BATCH)
    step, params, cache = taken("planned")
    batch = toys.decode(3, past=4)
    want = toys.bare(toys.attend, params, cache, batch)
    for _ in range(2):
        filled.clear()
        got, _ = step(cache, toys.fill(step.host_batch(batch.spec), batch))
        torch.testing.assert_close(got, want[0])
        assert [lens for _, _, lens in filled] == [[5, 5, 5]]


def test_an_eager_batch_is_planned_too(add):
    planned(add, fg.Support.NEVER)
    step, params, cache = taken("planned", modes="NONE")
    batch = toys.batch(5, 2, 6)
    want = toys.bare(toys.attend, params, cache, batch)
    assert step.dispatch(batch.spec).mode is NONE
    torch.testing.assert_close(step(cache, batch)[0], want[0])


@fg.struct
class Changed(toys.Batch):
    block_tables: torch.Tensor = fg.buffer("R B", "int32", pad=0, rows="changed")


def over_changed(params: Any, cache: Any, batch: Changed) -> Any:
    return toys.attend(params, cache, batch)


def over_computed(params: Any, cache: Any, batch: toys.Batch) -> Any:
    lens = batch.seq_lens + 0
    return toys.attend(params, cache, dataclasses.replace(batch, seq_lens=lens))


@pytest.mark.parametrize(
    ("forward", "leaf", "message"),
    [(over_changed, "block_tables", r"batch.block_tables, which lives on the device"),
     (over_computed, "seq_lens", r"seq_lens, which is no leaf of the batch: forward")],
    ids=["it lives on the device", "forward computes it"],
)  # fmt: skip
def test_a_leaf_that_cannot_be_read_rejects_the_backend_when_lowered(add, forward, leaf, message):
    planned(add, fg.Support.ALWAYS, (leaf,))
    fast = fg.graphify(forward, donate="cache", stage="batch", backends={"attention": "planned"})
    split = fast.trace(toys.attention_params(), toys.attention_cache(), limits=LIMITS).split()
    with pytest.raises(BackendError, match=message):
        split.lower()


def test_a_plan_names_tensors_of_the_primitive(add):
    with pytest.raises(BackendError, match=r"plan names 'seq_len', and attention .*'seq_lens'"):
        planned(add, fg.Support.ALWAYS, leaves=("seq_len",))
    with pytest.raises(BackendError, match=r"pass a tuple, \('seq_lens',\)"):
        Plan("seq_lens", lambda *a: None, lambda *a: None)  # type: ignore[arg-type]


def test_a_leaf_that_comes_on_the_device_is_refused_and_not_waited_for():
    from fngraph.ops.backend import Planner

    plan = Plan(("seq_lens",), lambda *a: None, lambda *a: None)
    planner = Planner("p", plan, None, (0,), ("batch.seq_lens",), {"T": 1, "R": 1})
    with pytest.raises(BackendError, match=r"reads batch.seq_lens, which is on meta.*host_batch"):
        planner.fill(None, {}, [torch.zeros(1, device="meta")])


def test_flashinfers_page_table():
    from fngraph.ops.paged.flashinfer import pages

    tables = torch.tensor([[7, 3, 5], [2, 9, 0], [4, 0, 0]], dtype=torch.int32)
    offsets, used, last = pages(torch.tensor([9, 8, 1], dtype=torch.int32), tables, 4, 5)
    assert offsets.tolist() == [0, 3, 5, 6, 6, 6]
    assert used.tolist() == [7, 3, 5, 2, 9, 4]
    assert last.tolist()[:3] == [1, 4, 1] and len(last) == 5


def test_what_is_planned_is_what_is_read_after_an_unread_leaf_got_another_shape(add):
    planned(add, fg.Support.UNIFORM_BATCH)
    params = toys.attention_params() | {"unread": torch.ones(3)}
    fast = fg.graphify(
        toys.attend, donate="cache", stage="batch", limits=toys.LIMITS, sizes=(1, 2, 4),
        backends={"attention": "planned"}, recorder="tape",
    )  # fmt: skip
    step = fast.bind(params).capture(toys.attention_cache(), progress=False)
    step.rebind(params={"params['unread']": torch.ones(5)})
    executable = step.main.executable
    read = {id(p) for fn in executable.fns for p in getattr(fn, "planners", {}).values()}
    assert read == {id(planner) for planner in executable.planners} and len(read) == 1


def test_between_graphs_a_backend_may_work_out_once_what_stays(add):
    def bind(args: Any) -> Any:
        CALLS["bind", len(args.q)] += 1

        def run(*, host: Any) -> None:
            CALLS["bound", len(args.q), host.max_query_len] += 1
            right(args, host)

        return run

    add("binds", fg.Support.ALWAYS, bind=bind)
    step, params, cache = taken("binds", modes="PIECEWISE")
    own = toys.clone(cache)
    CALLS.clear()
    for i in range(3):
        batch = toys.decode(3, past=2 + i, seed=i)
        got, _ = step(cache, batch)
        want, own = toys.bare(toys.attend, params, own, batch)
        toys.assert_trees(got, want, **toys.CLOSE)
    toys.assert_trees(cache, own, **toys.CLOSE)
    layers = len(params["layers"])
    assert CALLS == {("bind", 3): layers, ("bound", 3, 1): 3 * layers}
