"""What is inside of recorded graphs, as values: nodes by kind and name, counts, and a DOT text.

A recording tells its nodes and edges when it is asked (`Recording.nodes`, `Recording.edges`), not
before: capturing 900 graphs costs nothing for it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fngraph.core import BatchDescriptor, Mode
from fngraph.core.text import count

KINDS = ("kernel", "memcpy", "memset", "other")


class Node(NamedTuple):
    """One node of a graph.

    Attributes:
        kind: "kernel", "memcpy", "memset" or "other".
        name: the kernel's name, or what an "other" is.
    """

    kind: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """How many nodes there are of each kind; `nodes` is all of them.

    Attributes:
        names: (name, number) of the kernels, the most frequent first.
    """

    nodes: int = 0
    kernels: int = 0
    memcpys: int = 0
    memsets: int = 0
    others: int = 0
    names: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Counts:
        """Counts of these nodes."""
        nodes = list(nodes)
        kinds = collections.Counter(node.kind for node in nodes)
        kernels, memcpys, memsets, others = (kinds[kind] for kind in KINDS)
        names = collections.Counter(node.name for node in nodes if node.kind == "kernel")
        ranked = tuple(names.most_common())
        return cls(len(nodes), kernels, memcpys, memsets, others, ranked)

    def as_text(self) -> str:
        """`5 nodes (4 kernels, 1 memcpy)`, then a line for each kernel's name."""
        return "\n".join([str(self), *(f"{n:6} x {name}" for name, n in self.names)])

    def __str__(self) -> str:
        numbers = (self.kernels, self.memcpys, self.memsets, self.others)
        parts = ", ".join(count(n, kind) for n, kind in zip(numbers, KINDS) if n)
        return f"{count(self.nodes, 'node')} ({parts})" if parts else "0 nodes"

    def __repr__(self) -> str:
        return f"Counts({self})"


def key_name(mode: Mode, key: BatchDescriptor) -> str:
    """A key for profiles: `fngraph FULL 8x8 q1`."""
    return f"fngraph {short_name(mode, key)}"


def short_name(mode: Mode, key: BatchDescriptor) -> str:
    """A key in a few letters: `FULL 8x8 q1`, tokens by requests."""
    words = [f"{mode} {key.num_tokens}"]
    if key.num_reqs is not None:
        words[0] += f"x{key.num_reqs}"
    if key.query_len is not None:
        words.append(f"q{key.query_len}")
    if key.adapters:
        words.append(f"a{key.adapters}")
    flags = {"cascade": key.cascade, "encoder_outputs": key.encoder_outputs}
    words += [name for name, value in flags.items() if value]
    return " ".join([*words, *(f"{name}={value}" for name, value in key.extra)])


def dot(title: str, calls: Sequence[Any]) -> str:
    """A key as DOT: a cluster for each graph, in the order of replay, eager calls between them.

    Args:
        calls: recordings, and eager calls (which have a name and no nodes).
    """
    lines = [f"digraph {_quoted(title)} {{", "  node [shape=box, fontname=monospace];"]
    last = None
    for i, call in enumerate(calls):
        nodes = getattr(call, "nodes", None)
        if nodes is None:
            lines.append(f"  c{i} [label={_quoted(call.name)}, shape=ellipse];")
            first, end = f"c{i}", f"c{i}"
        else:
            lines.append(f"  subgraph cluster_{i} {{")
            lines.append(f"    label={_quoted(f'graph {i}: {Counts.of(nodes)}')};")
            for j, node in enumerate(nodes):
                style = "" if node.kind == "kernel" else ", style=dashed"
                lines.append(f"    c{i}n{j} [label={_quoted(node.name)}{style}];")
            lines += [f"    c{i}n{a} -> c{i}n{b};" for a, b in call.edges]
            lines.append("  }")
            if not nodes:
                continue
            first, end = f"c{i}n0", f"c{i}n{len(nodes) - 1}"
        if last is not None:
            lines.append(f"  {last} -> {first} [style=dotted];")
        last = end
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
