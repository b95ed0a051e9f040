"""A decoder's layers as one launch: found in a graph, and the program around them.

Where linear layers are fused (`fngraph.passes.linears`), a decoder is this:

    qkv = fused_linear(x, [w_q, w_k, w_v], norm)                           of the first layer
    attention(q, k, v, ..., out, cos, sin)
    h, act = paired_linears(out, w_o, x, norm, [w_gate, w_up], gated)
    x, qkv = paired_linears(act, w_down, h, norm, [w_q, w_k, w_v])         of the next
    logits = fused_linear(fused_linear(act, [w_down], None, h)[indices], [head], norm)

The graph is for any number of tokens, and stays as it is. A FULL key of a few requests that bring a
token each runs a program of its own, beside that of all other keys, in which
`fngraph.ops.megakernel` stands for these nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fngraph.compile.disk import Disk, Kept
from fngraph.compile.key import digest_of
from fngraph.compile.piece import CompiledPiece
from fngraph.core import BatchDescriptor
from fngraph.core.program import Program
from fngraph.fx.nodes import is_loop, op_name, results_of
from fngraph.fx.pieces.around import Around, split_around
from fngraph.fx.pieces.collectives import collectives_of
from fngraph.fx.tracing.tracer import Graph
from fngraph.graphs.replay import InstructionFn
from fngraph.ops.megakernel import Launch
from fngraph.ops.megakernel.image import Image, compiled, facts_of
from fngraph.ops.megakernel.shapes import FIRST, Decoder
from fngraph.ops.primitives import PRIMITIVES
from fngraph.ops.triton.launching import processors, shared_bytes
from fngraph.passes.pattern import dtype_of, is_dense, sizes

LOG = logging.getLogger("fngraph")
aten = torch.ops.aten
_LINEAR = torch.ops.fngraph.fused_linear.default
_PAIR = torch.ops.fngraph.paired_linears.default


@dataclasses.dataclass(frozen=True, repr=False)
class Layers:
    """A decoder in a traced graph, and the program around it.

    Attributes:
        most: requests of a key that runs it.
    """

    decoder: Decoder
    around: Around
    most: int

    def serves(self, descriptor: BatchDescriptor) -> bool:
        """Whether a FULL key runs it: one of few requests that bring a token each."""
        tokens, reqs, query_len, *_ = descriptor
        return reqs == tokens <= self.most and (tokens == 1 or query_len == 1)

    def __repr__(self) -> str:
        return f"Layers({self.decoder.layers} layers and the head, in one launch)"


def find_layers(graph: Graph, outputs: Sequence[int]) -> Layers | str:
    """A graph's decoder, if its weights are where the kernel runs; or why it has none.

    Args:
        outputs: indices of those that the program gives.
    """
    found = decoder_in(graph.gm.graph)
    if not isinstance(found, Found):
        return found
    norm: torch.Tensor = found.reads[FIRST].meta["val"]
    device = norm.device
    if why := found.decoder.refusal_on(device):
        return why
    if collectives_of(graph.gm.graph):  # all processes must run one program for a key
        return "other processes are met"
    given = results_of(graph.gm.graph)
    around = split_around(
        graph, found.nodes, found.reads, found.logits, [given[i] for i in outputs]
    )
    if isinstance(around, str):
        return around
    for piece in (*around.ahead, *around.behind):
        calls = [n for n in piece.gm.graph.nodes if op_name(n) in PRIMITIVES or is_loop(n)]
        if calls:
            return f"{calls[0]} is a primitive or a loop beside the layers"
    most = found.decoder.most_tokens(processors(device), shared_bytes(device))
    return Layers(found.decoder, around, most)


@dataclasses.dataclass(frozen=True, eq=False)
class OneLaunch:
    """The program around a decoder with its callables, for the keys that the decoder serves.

    Attributes:
        ahead, behind: the callables, `fn(sizes, host, *tensors) -> tensors`, of the instructions
            around the decoder's, whose own is made for each capture.
        compiled: pieces among them that were compiled.
        disk: what keeps compiled kernels; None: nothing does.
    """

    layers: Layers
    ahead: tuple[InstructionFn, ...]
    behind: tuple[InstructionFn, ...]
    compiled: tuple[CompiledPiece, ...]
    disk: Disk | None

    @property
    def program(self) -> Program:
        """Its instructions: what is ahead, the decoder, what is behind."""
        return self.layers.around.program

    def over(self, inputs: Sequence[torch.Tensor], tokens: int) -> tuple[InstructionFn, ...]:
        """All callables, with a launch of so many tokens over these inputs, for which memory is
        taken and the kernel compiled now.

        Raises:
            CaptureError, PackageError: see `Launch`.
        """
        reads = self.program.instructions[len(self.ahead)].reads
        norm = inputs[reads[FIRST]]  # in the place of what is not there yet
        tensors = [inputs[i] if i < self.program.num_inputs else norm for i in reads]
        decoder = self.layers.decoder._replace(tokens=tokens)
        return (*self.ahead, Launch(decoder, tensors, kept_by(self.disk)), *self.behind)

    def __repr__(self) -> str:
        return f"OneLaunch({self.layers.decoder.layers} layers and the head)"


@functools.cache
def kept_by(disk: Disk | None) -> Image:
    """What gives the kernel's code: from the disk if it is there, which takes ms where NVRTC takes
    seconds; else compiled, and kept there."""

    @functools.cache
    def image(decoder: Decoder, programs: int, capability: str) -> bytes:
        if disk is None:
            return compiled(decoder, programs, capability)
        facts = facts_of(decoder, programs, capability)
        digest = digest_of(facts)
        if (found := disk.read(digest)) is not None:
            return found.body
        began = time.perf_counter()
        made = compiled(decoder, programs, capability)
        ms = round(1e3 * (time.perf_counter() - began))
        about = {"name": facts["piece"], "holds": f"{decoder.layers} layers, T={decoder.tokens}",
                 "ms": str(ms), "kernels": "1"}  # fmt: skip
        if why := disk.write(digest, Kept({**facts, **about}, made)):
            LOG.warning("%s is not kept: %s", facts["piece"], why)
        return made

    return image


# a decoder in a graph


@dataclasses.dataclass(frozen=True)
class Found:
    """A decoder in a graph.

    Attributes:
        decoder: what its kernel is made for.
        reads: its operands, as `fngraph.ops.megakernel.parted` takes them.
        nodes: what the kernel stands for, in the graph's order.
        logits: the last of them, all that others may read.
    """

    decoder: Decoder
    reads: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    logits: fx.Node


def decoder_in(graph: fx.Graph) -> Found | str:
    """The decoder that a graph is, up to what goes before its layers and behind its head; or why
    it is not one that the kernel is for."""
    try:
        return _Walk(graph).found()
    except _UnlikeError as error:
        return str(error)


class _UnlikeError(Exception):
    """What is another way than the kernel does it."""


class _Walk:
    """From each attention to the next, with all nodes on the way."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.inside: set[fx.Node] = set()
        self.epsilons: set[float] = set()

    def found(self) -> Found:
        """Raise `_UnlikeError` unless it is one."""
        calls = [n for n in self.graph.nodes if op_name(n) == "fngraph::attention"]
        if not calls:
            raise _UnlikeError("there is no attention")
        first = _arguments(calls[0])
        qkv = self._source(first)
        if qkv.target is not _LINEAR:
            raise _UnlikeError("q, k and v of the first layer come from no norm and product")
        given = self._normed(qkv)
        begin = x = given["x"]
        layers: list[list[fx.Node]] = []
        for i, call in enumerate(calls):
            one = _arguments(call)
            self._check_call(one, first)
            if self._source(one) is not qkv:
                raise _UnlikeError(f"q, k and v of layer {i} do not come from the layer before")
            gate = self._gate(call, one, x)
            total, act = self._results(gate["node"])
            behind = self._reader(act, _LINEAR, _PAIR)
            after = _arguments(behind)
            if after["x"] is not act or after["more"] is not total:
                raise _UnlikeError(f"the sum behind the mlp of layer {i} is another")
            down = after["weight"] if behind.target is _PAIR else after["weights"][0]
            norms = [] if one["q_norm"] is None else [one["q_norm"], one["k_norm"]]
            layers.append([
                given["norm"], *given["weights"], *norms, one["k_cache"], one["v_cache"],
                gate["weight"], gate["norm"], *gate["weights"], down,
            ])  # fmt: skip
            if i + 1 < len(calls):
                given = self._next(behind, f"layer {i}")
                x, qkv = self._results(behind)
        logits, last, chosen = self._head(behind)
        if len(self.epsilons) > 1:
            raise _UnlikeError(f"norms have {sorted(self.epsilons)} for eps")
        meta = ("cos", "sin", "slot_mapping", "seq_lens", "query_start_loc", "block_tables")
        step = [begin, *(first[name] for name in meta)]
        reads = [*step, *(node for layer in layers for node in layer), last["norm"],
                 *last["weights"], *chosen]  # fmt: skip
        many = tuple(len(one["weights"]) for one in (given, gate, last))
        decoder = self._decoder(first, layers, last["weights"], many)._replace(chosen=bool(chosen))
        self._check(reads, layers, logits, decoder)
        nodes = tuple(n for n in self.graph.nodes if n in self.inside)
        return Found(decoder, tuple(reads), nodes, logits)

    # parts

    def _source(self, call: dict[str, Any]) -> fx.Node:
        """What q, k and v are columns of, one behind the other."""
        source, at = None, 0
        for name in ("q", "k", "v"):
            heads = call[name]
            part = heads.args[0] if heads.target is aten.view.default else None
            if part is None or part.target is not aten.slice.Tensor or len(part.args) != 4:
                raise _UnlikeError(f"{name} is more than columns of a product")
            of, dim, start, stop = part.args
            if dim != 1 or start != at or (source is not None and of is not source):
                raise _UnlikeError("q, k and v do not lie one behind the other")
            source, at = of, stop
            self.inside.update((heads, part))
        assert source is not None
        if sizes(source)[1] != at:
            raise _UnlikeError("there is more than q, k and v in their product")
        return source

    def _normed(self, node: fx.Node) -> dict[str, Any]:
        """Arguments of a linear layer that is a norm and a product."""
        given = _arguments(node)
        if given["norm"] is None or given["more"] is not None or given["gated"]:
            raise _UnlikeError("a linear layer that should be a norm and a product is another")
        self._norm(given)
        self.inside.add(node)
        return given

    def _norm(self, given: dict[str, Any]) -> None:
        if given["centred"]:
            raise _UnlikeError("a norm adds 1 to its weight")
        self.epsilons.add(given["eps"])

    def _gate(self, call: fx.Node, given: dict[str, Any], x: fx.Node) -> dict[str, Any]:
        """Arguments of what is behind attention: its product, a sum with `x`, a norm, a gate."""
        out = given["out"]
        if out.target is not aten.new_empty.default:
            raise _UnlikeError("attention writes into memory that was there")
        seen = [n for n in out.users if n is not call]
        if len(seen) != 1 or seen[0].target is not aten.view.default:
            raise _UnlikeError("attention's output is read twice, or as heads")
        pair = self._reader(seen[0], _PAIR)
        found = _arguments(pair)
        if found["x"] is not seen[0] or found["more"] is not x or not found["gated"]:
            raise _UnlikeError("behind attention there is no sum, norm and gate")
        self._norm(found)
        self.inside.update((call, out, seen[0]))
        return {**found, "node": pair}

    def _next(self, pair: fx.Node, where: str) -> dict[str, Any]:
        """Arguments of what is between a layer and the next: a product, a sum, a norm, another."""
        found = _arguments(pair)
        if pair.target is not _PAIR or found["gated"]:
            raise _UnlikeError(f"behind {where} there is no sum, norm and product")
        self._norm(found)
        return found

    def _results(self, pair: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The sum and what is behind its norm."""
        found = {n.args[1]: n for n in pair.users}
        if set(found) != {0, 1}:
            raise _UnlikeError(f"{pair} is read in another way than as a sum and a product of it")
        self.inside.update((pair, *found.values()))
        return found[0], found[1]

    def _head(self, node: fx.Node) -> tuple[fx.Node, dict[str, Any], list[fx.Node]]:
        """Logits; the arguments of their product, which a norm goes ahead of; and by what their
        rows are chosen, if they are."""
        given = _arguments(node)
        if node.target is _PAIR or given["norm"] is not None or given["gated"]:
            raise _UnlikeError("behind the last layer there is no product and sum")
        self.inside.add(node)
        rows = self._reader(node, aten.index.Tensor, _LINEAR)
        chosen: list[Any] = []
        if rows.target is aten.index.Tensor:
            chosen = list(rows.args[1])  # type: ignore[arg-type]
            if len(chosen) != 1 or chosen[0] is None or dtype_of(chosen[0]) != torch.int64:
                raise _UnlikeError("rows of logits are chosen in another way than by int64 numbers")
            self.inside.add(rows)
            rows = self._reader(rows, _LINEAR)
        return rows, self._normed(rows), chosen

    def _reader(self, node: fx.Node, *targets: Any) -> fx.Node:
        """The only reader of a kind."""
        users = [n for n in node.users if n.target in targets]
        if len(users) != 1:
            names = " or ".join(str(target) for target in targets)
            raise _UnlikeError(f"{node} is read by no {names}, or by several")
        return users[0]

    def _check_call(self, given: dict[str, Any], first: dict[str, Any]) -> None:
        """Raise unless attention is as the kernel does it, and alike in all layers."""
        options = ("window", "softcap", "sinks", "k_scale", "v_scale", "out_scale")
        if other := [name for name in options if given[name] is not None]:
            raise _UnlikeError(f"attention has {', '.join(other)}")
        if not given["causal"] or given["centred"]:
            raise _UnlikeError("attention is not causal, or its norms add 1 to their weights")
        if given["cos"] is None:
            raise _UnlikeError("attention does not turn its q and k")
        if (given["q_norm"] is None) != (given["k_norm"] is None):
            raise _UnlikeError("one of q and k has a norm")
        alike = ("slot_mapping", "seq_lens", "query_start_loc", "block_tables", "cos", "sin",
                 "scale", "eps")  # fmt: skip
        for name in alike:
            if given[name] is not first[name] and given[name] != first[name]:
                raise _UnlikeError(f"attention of two layers differs in its {name}")

    # the whole

    def _decoder(
        self, call: dict[str, Any], layers: Sequence[Sequence[fx.Node]], head: Sequence[fx.Node],
        many: tuple[int, ...],
    ) -> Decoder:  # fmt: skip
        _, block, kv_heads, head_dim = sizes(call["k_cache"])
        (eps,) = self.epsilons
        return Decoder(
            width=sizes(layers[0][0])[0], heads=sizes(call["q"])[1], kv_heads=kv_heads,
            head_dim=head_dim, mlp=sizes(layers[0][-1])[1], layers=len(layers),
            vocab=sum(sizes(w)[0] for w in head), block=block,
            normed=call["q_norm"] is not None, eps=eps, head_eps=call["eps"],
            scale=call["scale"], weights=many,
        )  # fmt: skip

    def _check(
        self, reads: Sequence[fx.Node], layers: Sequence[Sequence[fx.Node]], logits: fx.Node,
        decoder: Decoder,
    ) -> None:  # fmt: skip
        """Raise unless layers are alike, of the kernel's kinds, and nobody reads within."""
        if len({tuple(sizes(node) for node in layer) for layer in layers}) > 1:
            raise _UnlikeError("layers are of different shapes")
        fixed = reads[: len(reads) - decoder.chosen]
        for node, wanted in zip(fixed, (*_STEP, *[torch.bfloat16] * len(reads))):
            if dtype_of(node) != wanted:
                raise _UnlikeError(f"{node} is of {dtype_of(node)}, and the kernel reads {wanted}")
        if sizes(reads[1])[-1] * 2 != decoder.head_dim:
            raise _UnlikeError("angles are not half as many as columns of a head")
        tokens, reqs = sizes(reads[3])[0], sizes(reads[4])[0]
        rows = {"the layers' input": reads[0], "cosines": reads[1], "sines": reads[2]}
        for what, node in rows.items():
            if sizes(node)[0] != tokens or not is_dense(node):
                raise _UnlikeError(f"{what} are not a row for each token, one behind the other")
        if decoder.chosen and (len(sizes(reads[-1])) != 1 or not is_dense(reads[-1])):
            raise _UnlikeError("numbers of rows of logits do not lie one behind the other")
        if sizes(logits)[0] not in (tokens, reqs):
            raise _UnlikeError("logits are not a row for each token, or for each request")
        if len(set(reads)) < len(reads):
            raise _UnlikeError("layers share weights")
        if why := decoder.refusal():
            raise _UnlikeError(why)
        for node in self.inside - {logits}:
            if strangers := [n for n in node.users if n not in self.inside]:
                raise _UnlikeError(f"{node} is read by {strangers[0]} too")
        if made := [n for n in fixed[_MADE:] if n.op not in ("placeholder", "get_attr")]:
            raise _UnlikeError(f"{made[0]} is made in the graph, and should be a leaf")
        if late := [n for n in (*reads[:_MADE], reads[-1]) if n in self.inside]:
            raise _UnlikeError(f"{late[0]} is made within the layers")


_STEP = (torch.bfloat16,) * 3 + (torch.int64,) + (torch.int32,) * 3
"""dtypes of the first operands."""
_MADE = 3  # x, cos and sin; all others are leaves


def _arguments(call: fx.Node) -> dict[str, Any]:
    names = [a.name for a in call.target._schema.arguments]  # type: ignore[union-attr]
    if call.kwargs or len(call.args) != len(names):
        raise _UnlikeError(f"{call} has arguments by name, or left out")
    return dict(zip(names, call.args))
