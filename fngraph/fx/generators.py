"""Random draws inside `forward` from generators that were registered: `graphify(generators=(g,))`.

A traced draw names its generator by index, in its node's meta: neither fake tensors nor fx's code
can hold one. A piece gets the generators themselves when it is compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.errors import RandomError
from fngraph.fx.nodes import STAYS, mutates
from fngraph.torch_facts.names import tree_leaves

DRAWN = "drawn_from"  # in a node's custom meta: the index of a generator
Generators = Sequence[torch.Generator]


def source(func: Any, args: Any, kwargs: Mapping[str, Any], generators: Generators) -> int | None:
    """The index of the generator that a draw is from; None if that is not a registered one.

    A draw that names none is from the device's default generator, which may be registered too.
    """
    given = kwargs.get("generator")
    if given is None and (i := _place(func)) is not None and i < len(args):
        given = args[i]
    device = device_of(args, kwargs)
    for i, generator in enumerate(generators):  # torch makes a new Python object for an argument
        if given is None:
            if _is_default(generator) and is_on(generator, device):
                return i
        elif _address(given) == _address(generator):
            return i
    return None


def is_on(generator: torch.Generator, device: torch.device) -> bool:
    """Whether a generator draws on this device."""
    mine = generator.device
    return (mine.type == device.type and None in (mine.index, device.index)) or mine == device


def device_of(args: Any, kwargs: Mapping[str, Any]) -> torch.device:
    """Where a draw's result will be."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    said = kwargs.get("device") or (tensors[0].device if tensors else torch.get_default_device())
    return torch.device(said)


def without(func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """A draw with no generator, as meta kernels want it: op and arguments.

    `rand.generator` takes no symbolic sizes, `rand.default` does.
    """
    kept = {name: value for name, value in kwargs.items() if name != "generator"}
    args = args[: _place(func)]
    for overload, plain in _PLAIN.items():
        if func._overloadname == overload:
            return getattr(func.overloadpacket, plain), args, kept
    return func, args, kept


_PLAIN = {"generator": "default", "low_generator": "low", "low_generator_dtype": "low_dtype",
          "Tensor_generator": "Tensor"}  # fmt: skip


def drawn(node: fx.Node) -> int | None:
    """The index of the generator that a node draws from; None for a node that draws nothing."""
    tags = getattr(node.target, "tags", ())  # sizes that the op asks for carry its meta too
    if torch.Tag.nondeterministic_seeded not in tags:
        return None
    return node.meta.get("custom", {}).get(DRAWN)  # type: ignore[no-any-return]


def has_effect(node: fx.Node) -> bool:
    """Whether a node is there though nobody may read it: it writes, draws, or may raise."""
    return mutates(node) or drawn(node) is not None or STAYS in node.meta


def with_generators(gm: fx.GraphModule, generators: Generators) -> fx.GraphModule:
    """The same module, its draws from these generators; itself where it has none."""
    if all(drawn(node) is None for node in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        if (index := drawn(node)) is not None:
            node.target = Draw(node.target, generators[index])
    made = fx.GraphModule({}, graph)
    made.meta.update(gm.meta)
    return made


class Draw:
    """An op that draws from one generator."""

    def __init__(self, op: Any, generator: torch.Generator) -> None:
        twins = (name for name, plain in _PLAIN.items() if plain == op._overloadname)
        twin = getattr(op.overloadpacket, next(twins, "none"), None) if _place(op) is None else None
        self.op, self.__name__ = twin or op, "draw"
        self.kwargs = {} if _place(self.op) is None else {"generator": generator}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs, **self.kwargs)

    def __str__(self) -> str:
        return str(self.op)


@contextlib.contextmanager
def preserved(generators: Generators) -> Iterator[None]:
    """Whatever is drawn meanwhile, the generators go on from where they are."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)


def check_untouched(generators: Generators, before: Sequence[torch.Tensor]) -> None:
    """Raise `RandomError` if `forward` has moved a generator other than by a draw, which a trace
    does not make: a graph would not do it again."""
    if not all(torch.equal(g.get_state(), state) for g, state in zip(generators, before)):
        raise RandomError(
            "forward seeds a generator or sets its state, which a graph would not do again. Seed "
            "it between the calls: g.manual_seed(0)"
        )


def _address(generator: torch.Generator) -> int:
    return generator._cdata  # type: ignore[attr-defined,no-any-return]


def _place(func: Any) -> int | None:
    """The index of an op's argument that is a generator; None where it has none."""
    names = [a.name for a in func._schema.arguments]
    return names.index("generator") if "generator" in names else None


def _is_default(generator: torch.Generator) -> bool:
    defaults = (torch.default_generator, *torch.cuda.default_generators)
    return any(_address(generator) == _address(default) for default in defaults)
