"""`fngraph.core.spec`: what is accepted, refused and shown."""

import copy
import pickle
import sys
from collections.abc import Callable

import numpy
import pytest

from fngraph.core import BatchDescriptor, BatchSpec, HostBounds, KeyBounds
from fngraph.core.spec import CLASS, COUNTS
from fngraph.errors import SpecError


def test_defaults_are_the_safe_ones():
    spec = BatchSpec(7, 2)
    assert spec == (7, 2, None, 0, False, False, (), HostBounds(None, None))
    assert (spec.query_len, spec.host.max_query_len, spec.host.max_seq_len) == (None, None, None)


REFUSED = [
    (
        dict(num_tokens=7, num_reqs=2, query_len=3),
        (
            "BatchSpec(query_len=3) says every request has 3 tokens, so 2 requests make 6 tokens, "
            "but num_tokens=7. Pass query_len=None for a mixed batch."
        ),
    ),
    (
        dict(num_tokens=2, num_reqs=1, query_len=1),
        (
            "BatchSpec(query_len=1) says every request has 1 token, so 1 request makes 1 token, "
            "but num_tokens=2. Pass query_len=None for a mixed batch."
        ),
    ),
    (
        dict(num_tokens=2, num_reqs=3),
        (
            "BatchSpec(num_tokens=2, num_reqs=3) has more requests than tokens, and each brings at "
            "least one. Count only the requests of this step."
        ),
    ),
    (
        dict(num_tokens=0, num_reqs=0),
        "BatchSpec(num_tokens=0) is an empty step. Skip steps without tokens.",
    ),
    (
        dict(num_tokens=-1, num_reqs=1),
        "BatchSpec(num_tokens=-1) is an empty step. Skip steps without tokens.",
    ),
    (
        dict(num_tokens=1, num_reqs=0),
        "BatchSpec(num_reqs=0) serves no request. Skip steps without requests.",
    ),
    (
        dict(num_tokens=1, num_reqs=1, adapters=-1),
        "BatchSpec(adapters=-1) is below zero. Pass adapters=0 for a batch without any.",
    ),
    (
        dict(num_tokens=2.0, num_reqs=1),
        (
            "num_tokens=2.0 is not a host integer. Pass num_tokens=int(...); a tensor is read "
            "before the step, not in it."
        ),
    ),
    (
        dict(num_tokens=2, num_reqs="1"),
        (
            "num_reqs='1' is not a host integer. Pass num_reqs=int(...); a tensor is read before "
            "the step, not in it."
        ),
    ),
    (
        dict(num_tokens=2, num_reqs=1, query_len=2.0),
        (
            "query_len=2.0 is not a host integer. Pass query_len=int(...); a tensor is read "
            "before the step, not in it."
        ),
    ),
    (
        dict(num_tokens=2, num_reqs=1, adapters=None),
        (
            "adapters=None is not a host integer. Pass adapters=int(...); a tensor is read "
            "before the step, not in it."
        ),
    ),
]


@pytest.mark.parametrize(("counts", "message"), REFUSED)
def test_contradictions_say_the_rule_and_the_fix(counts, message):
    with pytest.raises(SpecError) as info:
        BatchSpec(**counts)
    assert str(info.value) == message
    assert isinstance(info.value, ValueError)


@pytest.mark.parametrize(("counts", "message"), REFUSED)
def test_replace_and_make_are_checked_too(counts, message):
    plain = BatchSpec(1, 1)
    with pytest.raises(SpecError) as info:
        plain._replace(**counts)
    assert str(info.value) == message
    with pytest.raises(SpecError):
        BatchSpec._make(plain._asdict() | counts)._make((plain._asdict() | counts).values())


def test_smallest_and_uniform_batches():
    assert BatchSpec(1, 1, 1) == BatchSpec(num_tokens=1, num_reqs=1, query_len=1)
    assert BatchSpec(6, 2, 3)._replace(num_tokens=9, num_reqs=3).query_len == 3
    assert BatchSpec._make((6, 2, 3)) == BatchSpec(6, 2, query_len=3)


def test_ordinary_specs_are_checked_in_one_expression(monkeypatch):
    """The long way makes the messages, and takes three times as long."""
    module = sys.modules["fngraph.core.spec"]
    monkeypatch.setattr(module, "_counts", lambda *counts: pytest.fail(f"{counts}"))
    for counts in ((1, 1), (1, 1, 1), (6, 2), (6, 2, 3), (6, 6, 1, 4), (6, 6, 1, 4, True, True)):
        assert BatchSpec(*counts)[: len(counts)] == counts
    assert BatchSpec(6, 2, host=HostBounds(5)).host == HostBounds(5)


def test_whole_numbers_of_other_types_become_int():
    spec = BatchSpec(
        numpy.int64(6), numpy.int32(2), numpy.int8(3), numpy.int64(1), numpy.bool_(True)
    )
    assert spec == BatchSpec(6, 2, 3, 1, True)
    assert [*map(type, spec)] == [int, int, int, int, bool, bool, tuple, HostBounds]
    assert type(BatchSpec(1, 1, cascade=1).cascade) is bool
    assert type(BatchSpec(1, 1, encoder_outputs=None).encoder_outputs) is bool


class ReadFromDevice:
    """Like a tensor of one: an index, at the price of waiting for the device."""

    def __index__(self):
        pytest.fail("waited for the device")

    def __repr__(self):
        return "tensor(3)"


@pytest.mark.parametrize("name", ["num_tokens", "num_reqs", "query_len", "adapters"])
def test_tensors_are_refused_unread(name):
    with pytest.raises(SpecError) as info:
        BatchSpec(**{"num_tokens": 3, "num_reqs": 3, name: ReadFromDevice()})
    assert str(info.value) == (
        f"{name}=tensor(3) is not a host integer. Pass {name}=int(...); a tensor is read before "
        "the step, not in it."
    )


def test_extra_fields_are_sorted_and_hashable():
    one = BatchSpec(4, 4, extra={"b": 2, "a": 1})
    assert one.extra == (("a", 1), ("b", 2))
    assert one == BatchSpec(4, 4, extra=[("b", 2), ("a", 1)])
    assert hash(one) == hash(BatchSpec(4, 4, extra={"a": 1, "b": 2}))
    assert BatchSpec(4, 4, extra={}) == BatchSpec(4, 4)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (BatchSpec(6, 2), "BatchSpec(num_tokens=6, num_reqs=2)"),
        (BatchSpec(6, 2, 3), "BatchSpec(num_tokens=6, num_reqs=2, query_len=3)"),
        (
            BatchSpec(6, 2, None, 4, True, True, {"u": 2}, HostBounds(5)),
            (
                "BatchSpec(num_tokens=6, num_reqs=2, adapters=4, cascade=True, "
                "encoder_outputs=True, extra={'u': 2}, "
                "host=HostBounds(max_query_len=5, max_seq_len=None))"
            ),
        ),
    ],
)
def test_repr_says_what_differs_and_reads_back(spec, text):
    assert repr(spec) == text
    assert eval(text) == spec
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    assert type(pickle.loads(pickle.dumps(spec))) is BatchSpec


def test_a_uniform_batch_bounds_its_own_query_length():
    assert BatchSpec(6, 2).bounds == (None, None)
    assert BatchSpec(6, 2, query_len=3).bounds == (3, None)
    assert BatchSpec(6, 2, query_len=3, host=HostBounds(max_seq_len=9)).bounds == (3, 9)
    assert BatchSpec(6, 2, query_len=3, host=HostBounds(4, 9)).bounds == (4, 9)
    assert BatchSpec(6, 2, host=HostBounds(4)).bounds == (4, None)


def test_a_descriptor_sets_bounds_of_its_own():
    for key, most in ((BatchDescriptor(8, 4, 2), 2), (BatchDescriptor(8, 4), 8)):
        bounds = KeyBounds(key)
        assert bounds == HostBounds(most, None) and bounds.key is key
    assert HostBounds(8).key is None


def test_host_bounds_are_no_part_of_the_key():
    bounded = BatchSpec(6, 2, host=HostBounds(max_query_len=5, max_seq_len=100))
    assert bounded.descriptor() == BatchSpec(6, 2).descriptor()
    assert bounded != BatchSpec(6, 2)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (BatchDescriptor(40, 40, query_len=1), "BatchDescriptor(40, 40, query_len=1)"),
        (BatchDescriptor(40), "BatchDescriptor(40)"),
        (BatchDescriptor(40, 8), "BatchDescriptor(40, 8)"),
        (BatchDescriptor(40, adapters=2), "BatchDescriptor(40, adapters=2)"),
        (
            BatchDescriptor(8, 4, cascade=True, encoder_outputs=None, extra={"u": 1}),
            "BatchDescriptor(8, 4, cascade=True, encoder_outputs=None, extra={'u': 1})",
        ),
        (BatchDescriptor(8, cascade=False), "BatchDescriptor(8, cascade=False)"),
    ],
)
def test_descriptor_repr_reads_back(key, text):
    assert repr(key) == text
    assert eval(text) == key and hash(eval(text)) == hash(key)


def test_flags_left_out_are_false_for_full_keys_and_any_for_piecewise_keys():
    assert BatchDescriptor(8, 8, 1) == (8, 8, 1, 0, False, False, ())
    assert BatchDescriptor(8) == (8, None, None, 0, None, None, ())
    assert BatchDescriptor(8, 8, 1, 0, None, True)[CLASS] == (1, 0, None, True, ())


def test_descriptor_of_a_spec_is_its_own_counts():
    spec = BatchSpec(6, 2, 3, 4, True, False, {"u": 2})
    key = spec.descriptor()
    assert type(key) is BatchDescriptor and key == spec[COUNTS]
    assert key == BatchDescriptor(6, 2, 3, 4, True, False, {"u": 2})


@pytest.mark.parametrize("name", ["cascade", "encoder_outputs"])
def test_a_flag_is_a_host_bool(name):
    class Tensor:  # what torch.tensor(True) offers: a value that the device has to be waited for
        is_cuda = True

        def __bool__(self):
            raise AssertionError("read")

        def __repr__(self):
            return "tensor(True)"

    with pytest.raises(SpecError) as error:
        BatchSpec(2, 2, **{name: Tensor()})
    assert str(error.value) == f"{name}=tensor(True) is not a host bool. Pass {name}=bool(...)"
    for true in (True, 1, numpy.bool_(True)):
        assert getattr(BatchSpec(2, 2, **{name: true}), name) is True
    for false in (False, 0, numpy.bool_(False)):
        assert getattr(BatchSpec(2, 2, **{name: false}), name) is False


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: HostBounds(-1), "HostBounds(max_query_len=-1) is below 0"),
        (lambda: HostBounds(max_seq_len=-2), "HostBounds(max_seq_len=-2) is below 0"),
        (lambda: HostBounds("3"), "max_query_len='3' is not a host integer"),
        (lambda: HostBounds(True), "max_query_len=True is not a host integer"),
        (lambda: HostBounds()._replace(max_seq_len=2.5), "max_seq_len=2.5 is not a host integer"),
        (lambda: BatchSpec(3, 3, host=7), "host=7: pass host=fg.HostBounds("),
        (lambda: BatchSpec(3, 3, host=(1, 1)), "host=(1, 1): pass host=fg.HostBounds("),
        (lambda: BatchSpec(5, 2, host=HostBounds(2)), "2 requests of at most 2 tokens make 4"),
        (lambda: BatchSpec(5, 2, adapters=1, host=HostBounds(2)), "make 4, fewer than num_tokens"),
        (lambda: BatchSpec(5, 2, host=HostBounds(5, 2)), "HostBounds(max_seq_len=2)"),
        (lambda: BatchSpec(5, 2, host=HostBounds(3))._replace(num_tokens=7), "make 6, fewer"),
        (lambda: BatchSpec(True, True), "num_tokens=True is not a host integer"),
        (lambda: BatchSpec(3, 3, extra="ab"), "extra='ab': pass a dict"),
        (lambda: BatchSpec(3, 3, extra=[1]), "extra=[1]: pass a dict"),
        (lambda: BatchSpec(3, 3, extra={"u": [1]}), "extra={'u': [1]}: pass a dict to what has"),
        (lambda: BatchSpec(3, 3, extra={1: 2}), "extra={1: 2}: pass a dict"),
    ],
)  # fmt: skip
def test_what_bounds_and_counts_refute(make: Callable[[], object], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert text in str(caught.value)


def test_bounds_that_hold_are_plain_ints() -> None:
    bounds = BatchSpec(5, 2, host=HostBounds(numpy.int64(3), 9)).host
    assert bounds == (3, 9) and type(bounds.max_query_len) is int
    assert BatchSpec(4, 2, host=HostBounds(2, 2)).host == (2, 2)  # just
    assert pickle.loads(pickle.dumps(bounds)) == bounds and copy.copy(bounds) == bounds
