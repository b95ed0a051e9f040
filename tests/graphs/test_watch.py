"""The watch: every way in which a tensor can move is seen, and nothing else is."""

from __future__ import annotations

import ctypes
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import extension
import pytest
import torch

from fngraph.graphs import addresses
from fngraph.graphs.addresses import Watch
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


def test_no_addresses_and_no_number_are_told(way: str):
    assert not Watch([]).moved()
    if way == "compiled":
        with pytest.raises(TypeError):
            addresses._words.watched([None])
        with pytest.raises(TypeError):
            addresses._words.watched(7)


def test_a_compiled_watch_goes_with_its_last_name():
    extension.needs_it()
    x = torch.zeros(1000, dtype=torch.int64)
    words = [x.data_ptr() + 8 * i for i in range(1000)]
    tracemalloc.start()
    for _ in range(100):
        moved = addresses._words.watched(words)
        assert not moved()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100_000  # a watch over 1,000 words has 16,000 bytes
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
