"""The watch: every way in which a tensor can move is seen, and nothing else is."""

from __future__ import annotations

import contextlib
import ctypes
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import extension
import pytest
import torch

from fngraph.graphs import addresses
from fngraph.graphs.addresses import Watch, places
from fngraph.torch_facts import layout
from fngraph.torch_facts.layout import word_addresses

MOVES: dict[str, Callable[[Any], Any]] = {
    "data": lambda x: setattr(x, "data", torch.empty(40, 8)),
    "data of a view": lambda x: setattr(x, "data", x.data[1:]),
    "resize, more": lambda x: x.resize_(80, 80),
    "resize, less": lambda x: x.resize_(4, 8),
    "data of another dtype": lambda x: setattr(x, "data", x.data.view(torch.int32)),
    "negative data": lambda x: setattr(x, "data", torch._neg_view(x.data)),
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "strides alone": lambda x: x.as_strided_((40, 8), (1, 40)),
    "set_": lambda x: x.set_(torch.empty(40, 8)),
    "storage, more": lambda x: x.untyped_storage().resize_(1 << 22),
    "swap": lambda x: torch.utils.swap_tensors(x, torch.empty(40, 8)),
}
STAYS: dict[str, Callable[[Any], Any]] = {
    "written": lambda x: x.add_(1),
    "viewed": lambda x: x.view(8, 40),
    "requires grad": lambda x: x.requires_grad_(),
    "same data": lambda x: setattr(x, "data", x.data),
}


@pytest.fixture(params=["compiled", "numpy", "data_ptr"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways of looking; the last one is for a torch whose layout is another."""
    if request.param == "data_ptr":
        monkeypatch.setattr(addresses, "word_addresses", lambda x: None)
    elif request.param == "numpy":
        monkeypatch.setattr(addresses, "watched", addresses.watched_in_python)
    else:
        extension.needs_it()
        monkeypatch.setattr(addresses, "watched", addresses._words.watched)
    return str(request.param)


def watched(device: Any) -> tuple[Watch, torch.Tensor]:
    """A watch over 100 tensors, and one in their middle."""
    tensors = [torch.empty(40, 8, device=device) for _ in range(100)]
    return Watch(tensors), tensors[57]


@pytest.mark.parametrize("move", MOVES)
def test_a_move_is_seen(move: str, way: str):
    found, x = watched("cpu")
    assert not found.moved()
    MOVES[move](x)
    assert found.moved()


@pytest.mark.parametrize("stay", STAYS)
def test_what_does_not_move_is_left_in_peace(stay: str, way: str):
    found, x = watched("cpu")
    STAYS[stay](x)
    assert not found.moved()


def some(n: Any, most: int, dims: int | None = None) -> list[int]:
    """Drawn sizes or strides below `most`, of up to 4 dims."""
    return [n(most) for _ in range(n(5) if dims is None else dims)]


def strided(x: Any, n: Any) -> Any:
    sizes = some(n, 4)
    return x.as_strided_(sizes, some(n, 3, len(sizes)), n(8))


def set_to(x: Any, n: Any) -> Any:
    sizes = some(n, 4)
    return x.set_(x.untyped_storage(), n(8), sizes, some(n, 3, len(sizes)))


REMADE: list[Callable[[Any, Any], Any]] = [  # changes of a tensor in place, by drawn numbers
    lambda x, n: x.unsqueeze_(n(x.dim() + 1)),
    lambda x, n: x.squeeze_(),
    lambda x, n: x.resize_(some(n, 4)),
    strided,
    set_to,
    lambda x, n: x.dim() > 1 and x.transpose_(n(x.dim()), n(x.dim())),
    lambda x, n: setattr(x, "data", x.data.flatten()[n(4) :]),
    lambda x, n: setattr(x, "data", torch.empty([2] * n(4))),
    lambda x, n: setattr(x, "data", x.data.detach()),
    lambda x, n: setattr(x, "data", torch._neg_view(x.data)),
    lambda x, n: setattr(x, "data", x.data.view(torch.int32)),
]


def test_whatever_changes_places_is_seen(way: str):
    """Ways of the user to change a tensor in place, drawn, with dims that come and go."""
    draw = random.Random(0)
    moved = 0
    for _ in range(3000):
        memory = torch.empty(200)
        tensors = [memory[k:][:16].view(*[2] * 4) for k in range(3)]
        tensors += [memory[7], memory[8:24].view([1] * 6 + [16])][: draw.randrange(3)]
        found, before = Watch(tensors), places(tensors)
        x = draw.choice(tensors)
        with contextlib.suppress(RuntimeError):  # torch refuses some, and has changed some by then
            draw.choice(REMADE)(x, draw.randrange)
        if places(tensors) != before:
            moved += 1
            assert found.moved(), (before, places(tensors))
    assert moved > 1500


@pytest.mark.parametrize("way", ["compiled", "numpy"], indirect=True)
def test_each_word_counts(way: str):
    x = torch.arange(50)
    moved = addresses.watched([x.data_ptr() + 8 * i for i in range(3, 47)])
    for i in range(50):
        x[i] += 1 << 40
        assert moved() == (3 <= i < 47)
        x[i] -= 1 << 40
    assert not moved()


def test_the_compiled_way_is_the_one_that_is_taken():
    extension.needs_it()
    assert addresses.watched is addresses._words.watched


def test_memory_that_a_tensor_has_left_stays_while_it_is_watched(way: str):
    """Or its words would be another's by then, and perhaps as before."""
    x = torch.empty(40, 8)
    left = x.untyped_storage()._weak_ref()
    found = Watch([x])
    x.data = torch.empty(40, 8)
    assert found.moved() and not torch.UntypedStorage._expired(left)
    del found
    assert torch.UntypedStorage._expired(left)
    torch.UntypedStorage._free_weak_ref(left)


def test_a_torch_that_keeps_them_otherwise_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch):
    find, words = layout._find.__wrapped__, layout._words
    for otherwise in (
        lambda at, count: [0] * count,  # none of the numbers
        lambda at, count: words(at, count // 2) * 2,  # twice
        lambda at, count: sorted(words(at, count)),  # in no order
    ):
        with monkeypatch.context() as patch:
            patch.setattr(layout, "_words", otherwise)
            assert find() is None
    monkeypatch.setattr(layout, "neg_view", lambda z: z.detach())  # nothing tells it
    assert find() is None


def test_strides_that_change_alone_are_seen(way: str):
    """Between two layouts with gaps, which no other word tells apart."""
    x = torch.empty(100).as_strided((4, 4), (9, 2))
    found = Watch([x])
    x.as_strided_((4, 4), (11, 2))
    assert found.moved()


def test_the_words_are_found_in_this_torch():
    assert word_addresses(torch.empty(2, 3)) and word_addresses(torch.empty([1] * 6)) is None


def test_the_words_are_found_whatever_memory_holds():
    """Tensors are made where others were, and not every byte of them is written."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    draw, found = random.Random(0), set()
    for _ in range(100):
        sizes = [draw.choice([168, 176, 184, 192, 200, 208]) for _ in range(60)]
        memory = [libc.malloc(size) for size in sizes]
        for at, size in zip(memory, sizes):
            ctypes.memmove(at, draw.randbytes(size), size)
        draw.shuffle(memory)
        for at in memory:
            libc.free(at)
        found.add(layout._find.__wrapped__())
    assert found == {layout._find()} and None not in found


def test_what_is_no_address_is_refused():
    extension.needs_it()
    watched = addresses._words.watched
    assert not watched([])()
    for wrong in ([None], [8.0], 7, [1 << 70], [x for x in "ab"], ["a"]):
        with pytest.raises((TypeError, OverflowError)):
            watched(wrong)
    for wrong in ([0], [12], [-3]):
        with pytest.raises(ValueError, match="multiple of 8"):
            watched(wrong)


def test_a_compiled_watch_leaves_nothing():
    extension.needs_it()
    watched, x = addresses._words.watched, torch.zeros(1000, dtype=torch.int64)
    tracemalloc.start()
    for _ in range(100):
        words = [x.data_ptr() + 8 * i for i in range(1000)]
        moved = watched(words)
        assert not moved()
        for wrong in (None, 0):
            with pytest.raises((TypeError, ValueError)):
                watched([*words, wrong])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100_000  # a watch over 1,000 words has 16,000 bytes, and a list of them more
    x[999] = 1
    assert moved()


def test_moves_on_the_device_are_seen(device):
    found, x = watched(device)
    x.data = torch.empty(40, 8, device=device)
    assert found.moved()
    found.reset()
    assert not found.moved()


def test_a_module_that_changes_its_dtype_is_seen():
    module = torch.nn.Linear(3, 3)
    found = Watch(list(module.parameters()))
    module.double()
    assert found.moved()
