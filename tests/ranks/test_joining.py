"""What size batches have that meet, and what is in the rows that are not theirs; who has a request.
No process is started here.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import fngraph as fg
from fngraph.models import Policy, start, submit
from fngraph.models.serving.batches import batch_type, empty_batch, lay_out, own_spec, padding
from fngraph.models.serving.logits import first_rows
from fngraph.models.serving.ranks.circles import Circle, Ranks
from fngraph.models.serving.ranks.joining import NOTHING, join, pad_leaves, promise, wish_of
from fngraph.models.serving.ranks.spreading import assign, moved, outstanding, spread, tokens_of
from fngraph.models.serving.scheduling import plan

SHAPED = (("logits", True),)
SPECS = [
    fg.BatchSpec(3, 3, query_len=1),
    fg.BatchSpec(8, 2, query_len=4),
    fg.BatchSpec(6, 2, query_len=3),
    fg.BatchSpec(20, 4),
    fg.BatchSpec(5, 5, query_len=1, adapters=2),
    fg.BatchSpec(4, 4, query_len=1, cascade=True),
    fg.BatchSpec(2, 2, query_len=1, extra=SHAPED),
    None,
]


@pytest.mark.parametrize(
    "specs, joint",
    [
        ([SPECS[0], SPECS[4]], fg.BatchSpec(5, 5, query_len=1, adapters=2)),
        ([SPECS[1], SPECS[1]], SPECS[1]),
        ([SPECS[1], SPECS[2]], fg.BatchSpec(2, 2, query_len=1)),
        ([SPECS[1], SPECS[0]], SPECS[0]),
        ([SPECS[1], SPECS[3]], SPECS[3]),
        ([SPECS[0], SPECS[3]], SPECS[3]),
        ([SPECS[5], SPECS[5]], SPECS[5]),
        ([SPECS[5], SPECS[0]], fg.BatchSpec(4, 4, query_len=1)),
        ([SPECS[5], None], fg.BatchSpec(4, 4, query_len=1)),
        ([SPECS[0], SPECS[6]], fg.BatchSpec(3, 3, query_len=1, extra=SHAPED)),
        ([None, SPECS[1], None], SPECS[1]),
        ([None, None], None),
    ],
)
def test_the_table(specs, joint):
    for order in itertools.permutations(specs):
        assert join([wish_of(s) if s else NOTHING for s in order], SHAPED) == joint


def test_any_batches_have_a_size_that_holds_them_all():
    for specs in itertools.product(SPECS, repeat=3):
        joint = join([wish_of(s) if s else NOTHING for s in specs], SHAPED)
        assert (joint is None) == (specs == (None,) * 3)
        for spec in filter(None, specs):
            own = spec.num_tokens
            if spec.query_len and spec.query_len != joint.query_len:
                own = spec.num_reqs  # without drafts
            assert joint.num_tokens >= own and joint.num_reqs >= spec.num_reqs
            assert joint.adapters >= spec.adapters and len(joint.extra) >= len(spec.extra)
            assert joint.query_len in (None, 1, spec.query_len)
            assert spec.cascade or not joint.cascade


@pytest.mark.parametrize("going_on", [True, False])
def test_the_next_step_has_a_token_of_each_row(going_on: bool):
    """And no cascade: of who shares a prefix now, some may end."""
    for spec in filter(None, SPECS):
        wish = promise(spec, going_on)
        want = spec._replace(num_tokens=spec.num_reqs, query_len=1, cascade=False)
        assert wish == wish_of(want)._replace(bound=int(going_on))
        assert join([wish, wish], SHAPED) == want


@pytest.mark.parametrize("going_on", [True, False])
def test_who_has_nothing_is_bound_where_nothing_waits(going_on: bool):
    assert promise(None, going_on) == NOTHING._replace(bound=int(going_on))


def rows_of(policy: Policy, prompts: list[list[int]]) -> tuple:
    state = start(16, policy)
    for prompt in prompts:
        state = submit(state, policy, prompt, 4)
    return plan(state, policy).rows


@pytest.mark.parametrize("more", [(), ("adapters", "sampling", "logits")])
@pytest.mark.parametrize("query_len", [None, 1])
def test_rows_lie_before_padding_as_fields_say_it(more: tuple[str, ...], query_len: int | None):
    policy = Policy(16, 4, 4)
    prompts = [[5], [6]] if query_len else [[5, 6, 7], [8, 9]]
    rows, kind = rows_of(policy, prompts), batch_type(*more)
    spec = own_spec(rows, policy)._replace(query_len=query_len)
    joint = fg.BatchSpec(4, 4, query_len=1) if query_len else fg.BatchSpec(11, 4)

    def dirty(spec: fg.BatchSpec):
        batch = empty_batch(kind, policy, spec, 256)
        for name in fg.core.buffers_of(kind):
            getattr(batch, name).fill_(77)
        return batch

    own = lay_out(rows, policy, lambda spec: empty_batch(kind, policy, spec, 256))
    batch = lay_out(rows, policy, dirty, joint=joint)
    assert batch.spec[:-1] == joint[:-1] and batch.spec.host == own.spec.host
    T, R = spec.num_tokens, len(rows)
    for name, buffer in fg.core.buffers_of(kind).items():
        found, want = getattr(batch, name), getattr(own, name)
        part = found[tuple(map(slice, want.shape))]
        assert torch.equal(part, want), name
        if buffer.pad == "stride":
            assert found[R:].tolist() == ([2, 3, 4] if query_len else [T] * 3)
        else:
            rest = found.clone()
            rest[tuple(map(slice, want.shape))] = buffer.pad
            assert (rest == buffer.pad).all(), name
    empty = padding(joint, dirty)
    starts = np.arange(5) if query_len else np.zeros(5)
    assert empty.query_start_loc.tolist() == starts.tolist()
    assert (empty.slot_mapping == -1).all() and not empty.seq_lens.any()


def test_pads_of_a_uniform_batch_go_on_with_its_stride():
    batch = empty_batch(batch_type(), Policy(16, 4, 4), fg.BatchSpec(12, 4, query_len=3))
    pad_leaves(batch, 3, 1)["query_start_loc"][:] = [0, 3]
    assert batch.query_start_loc.tolist() == [0, 3, 6, 9, 12]


def test_requests_go_where_least_is_outstanding():
    assert assign([0, 0, 0], [5, 1, 1, 1, 1, 1]) == [0, 1, 2, 1, 2, 1]
    assert assign([7, 0], [3, 3, 3]) == [1, 1, 1]
    assert tokens_of({"prompt": [1, 2], "max_new": 3, "n": 2}) == 10
    policy = Policy(16, 4, 4)
    state = submit(submit(start(16, policy), policy, [1, 2, 3], 5), policy, [1], 2)
    assert outstanding(state) == 11
    begun = tuple(job._replace(computed=2) for job in state.waiting[:1])
    assert outstanding(dataclasses.replace(state, running=begun, waiting=())) == 6


def test_one_process_takes_all_requests():
    policy, coming = Policy(16, 4, 4), [{"prompt": [1], "max_new": 2, "n": 2}]
    inbox = spread(Ranks(), policy, lambda state: coming)
    assert [job.id for job in inbox(start(16, policy)).waiting] == [0, 1]
    with pytest.raises(ValueError, match=r"make_ranks\(\.\.\., meet=True\)"):
        spread(Ranks(leaders=Circle(None, 0, (0, 1))), policy, lambda state: [])


def test_what_padding_drew_is_left_out():
    assert first_rows(torch.arange(6).view(3, 2), 2).tolist() == [[0, 1], [2, 3]]


def test_a_request_that_nobody_can_run_is_left_out_alone():
    policy = Policy(16, 4, 4)
    good = {"prompt": [1, 2], "max_new": 2}
    odd: Any = [None, {**good, "prompt": iter([1, 2])}]
    coming = [good, {"prompt": [], "max_new": 2}, {**good, "grammar": lambda tokens: None}, *odd]
    coming.append(good)
    with pytest.warns(UserWarning, match="a request is not served: ") as told:
        state = spread(Ranks(), policy, lambda state: coming)(start(8, policy))
    assert [job.request.prompt for job in state.waiting] == [(1, 2)] * 2
    assert state.submitted == 2 and len(told) == 4


def test_a_deadline_is_told_as_what_is_left_of_it():
    """Each host's clock has a beginning of its own."""
    asked = {"prompt": [1], "max_new": 2, "deadline": 107.0}
    told = moved(asked, -100.0)
    assert told["deadline"] == 7.0 and moved(told, 5000.0)["deadline"] == 5007.0
    without = {"prompt": [1], "max_new": 2}
    assert moved(without, -100.0) == without
