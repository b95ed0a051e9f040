"""Which elements each process has: whole numbers, whose parts make up the whole."""

from __future__ import annotations

import dataclasses

import pytest

import fngraph as fg
from fngraph.models.weights.splits import (
    Each,
    Size,
    Specs,
    axes_of,
    blocks,
    length,
    own,
    own_config,
    possible,
    rows,
    split_of,
)


def numbers(layout, size, rank):
    return [i for one in own(layout, size, rank) for i in one]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "layout", [Each(6), Each(6, 4), (Each(6, 2), Each(12)), Each(1, (Each(6), Each(6)), True)]
)
def test_parts_make_up_the_whole(layout, size):
    parts = [numbers(layout, size, rank) for rank in range(size)]
    assert sorted(i for part in parts for i in part) == list(range(length(layout)))
    assert len({len(part) for part in parts}) == 1


OWN = {  # layout, processes: what each has
    "heads": (Each(4, 2), 2, ([0, 1, 2, 3], [4, 5, 6, 7])),
    "two parts, end to end": ((Each(2), Each(4)), 2, ([0, 2, 3], [1, 4, 5])),
    "whole beside split": ((3, Each(2)), 2, ([0, 1, 2, 3], [0, 1, 2, 4])),
    "fewer than processes": (Each(2, 2, repeated=True), 4, ([0, 1], [0, 1], [2, 3], [2, 3])),
    "whole of each process, but what is split within": (
        Each(2, (1, Each(2)), repeated=True), 4, ([0, 1], [0, 2], [3, 4], [3, 5]),
    ),
    "padded": (Each(5, padded=True), 4, ([0, 1], [2, 3], [4], [])),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_what_each_process_has(name):
    layout, size, want = OWN[name]
    assert tuple(numbers(layout, size, rank) for rank in range(size)) == want


def test_neighbours_are_one_range():
    assert own((Each(2), Each(2)), 1, 0) == [range(4)]
    assert own((Each(2), Each(4)), 2, 0) == [range(1), range(2, 4)]
    assert own((Each(2), Each(4)), 2, 1) == [range(1, 2), range(4, 6)]


@pytest.mark.parametrize("layout", [Each(6), Each(3, 2, repeated=True), (Each(8), Each(6))])
def test_what_cannot_be_shared_out_is_refused(layout):
    with pytest.raises(fg.errors.RankError, match="cannot be shared out to 4"):
        own(layout, 4, 0)


def test_blocks_of_some_rows():
    found = list(blocks([[range(3, 6), range(8, 9)], [range(2, 4)]], most=2))
    assert [here[0] for _, here in found] == [slice(3, 5), slice(5, 6), slice(8, 9)]
    assert [there[0] for there, _ in found] == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert all((there[1], here[1]) == (slice(0, 2), slice(2, 4)) for there, here in found)
    assert list(blocks([[range(0)]], most=2)) == []
    assert list(blocks([])) == [((), ())], "of a number"


def test_layers_are_meant_by_a_star():
    specs = Specs({"layers.*.attn.wq": rows(Each(4)), "embed": rows(Each(8))}, {})
    assert split_of(specs, "layers.13.attn.wq") == rows(Each(4))
    assert split_of(specs, "embed") == rows(Each(8))
    assert split_of(specs, "layers.13.attn.wk") is None


@dataclasses.dataclass(frozen=True)
class Config:
    heads: int
    kv: int
    experts: int = 6


SIZES = {"heads": Size(), "kv": Size(repeated=True), "experts": Size("ep", whole=True)}
SPECS = Specs({}, SIZES)


def mesh(**sizes: int) -> fg.Mesh:
    return fg.Mesh(tuple(fg.Axis(name, n, n - 1, "group") for name, n in sizes.items()))


def test_a_process_has_its_own_config():
    assert own_config(Config(8, 2), SPECS, mesh(tp=2)) == Config(4, 1)
    assert own_config(Config(8, 2), SPECS, mesh(tp=4, ep=3)) == Config(2, 1)
    assert own_config(Config(8, 2), SPECS, mesh(ep=3)) == Config(8, 2)
    assert own_config(Config(8, 2), SPECS, mesh(tp=1)) == Config(8, 2)


def test_numbers_that_cannot_be_shared_out_are_all_said_with_what_could():
    with pytest.raises(fg.errors.RankError) as caught:
        own_config(Config(6, 4), SPECS, mesh(dp=2, tp=3, ep=4))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("this model cannot be split over Mesh(dp=2, tp=3, ep=4; this process")
    assert lines == [
        "  kv is 4, which 3 processes along 'tp' cannot share",
        "  experts is 6, which 4 processes along 'ep' cannot share",
        "Make the mesh with tp=1 or 2, ep=1 or 2 or 3 or 6",
    ]
    assert possible(Config(12, 2), SPECS, "tp") == [1, 2, 4, 6, 12]


def test_a_mesh_without_an_axis_to_split_over():
    assert list(axes_of(SPECS, mesh(ep=2))) == ["tp", "ep"]
    assert axes_of(SPECS, mesh(ep=2))["tp"] == fg.Axis("tp")
    with pytest.raises(fg.errors.RankError, match=r"has no axis 'tp' or 'ep'.*make_mesh\(tp=4\)"):
        axes_of(SPECS, mesh(dp=4))
