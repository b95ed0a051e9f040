"""A decoder's layers as one launch: found in a graph, and the program around them.

Where linear layers are fused (`fngraph.passes.linears`), a decoder is this:

    qkv = fused_linear(x, [w_q, w_k, w_v], norm)                           of the first layer
    attention(q, k, v, ..., out, cos, sin)
    h, act = paired_linears(out, w_o, x, norm, [w_gate, w_up], gated)
    x, qkv = paired_linears(act, w_down, h, norm, [w_q, w_k, w_v])         of the next
    logits = fused_linear(fused_linear(act, [w_down], None, h)[indices], [head], norm)

The graph is for any number of tokens, and stays as it is. A FULL key of one token runs a program of
its own, beside that of all other keys, in which `fngraph.ops.megakernel` stands for these nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core.program import Program
from fngraph.fx.nodes import op_name, results_of
from fngraph.fx.pieces.around import Around, split_around
from fngraph.fx.tracing.tracer import Graph
from fngraph.graphs.replay import InstructionFn
from fngraph.ops.megakernel import FIRST, Decoder, Megakernel, parted
from fngraph.passes.pattern import dtype_of, sizes

aten = torch.ops.aten
_LINEAR = torch.ops.fngraph.fused_linear.default
_PAIR = torch.ops.fngraph.paired_linears.default


@dataclasses.dataclass(frozen=True)
class Layers:
    """A decoder in a traced graph, and the program around it."""

    decoder: Decoder
    around: Around


def layers_of(graph: Graph, outputs: Sequence[int]) -> Layers | str:
    """A graph's decoder, if its weights are where the kernel runs; or why it has none.

    Args:
        outputs: indices of those that the program gives.
    """
    found = decoder_in(graph.gm.graph)
    if not isinstance(found, Found):
        return found
    weights: torch.Tensor = found.reads[-1].meta["val"]
    if why := found.decoder.refusal_on(weights.device):
        return why
    given = results_of(graph.gm.graph)
    results = [given[i] for i in outputs]
    around = split_around(graph, found.nodes, found.reads, found.logits, results)
    return around if isinstance(around, str) else Layers(found.decoder, around)


@dataclasses.dataclass(frozen=True, eq=False)
class OneLaunch:
    """A program with its callables, for a step of one token and one request.

    Attributes:
        fns: one an instruction, `fn(sizes, host, *tensors) -> tensors`; one is `kernel`.
    """

    program: Program
    fns: tuple[InstructionFn, ...]
    kernel: Megakernel

    def why_not(self, inputs: Sequence[torch.Tensor]) -> str | None:
        """Why the kernel cannot read the program's inputs where they lie, or None."""
        at = self.fns.index(self.kernel)
        reads = self.program.instructions[at].reads
        norm = inputs[reads[FIRST]]  # in the place of what is not there yet
        tensors = [inputs[i] if i < self.program.num_inputs else norm for i in reads]
        made = parted(self.kernel.decoder, tensors)
        return made if isinstance(made, str) else None

    def __repr__(self) -> str:
        return f"OneLaunch({self.kernel.decoder.layers} layers and the head)"


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
        self.calls = [n for n in graph.nodes if op_name(n) == "fngraph::attention"]

    def found(self) -> Found:
        if not self.calls:
            raise _UnlikeError("there is no attention")
        given = [_arguments(call) for call in self.calls]
        qkv = self._source(given[0])
        if qkv.target is not _LINEAR:
            raise _UnlikeError("q, k and v of the first layer come from no norm and product")
        x, norm, weights, eps = self._normed(qkv)
        begin, layers, epsilons = x, [], {eps}
        pair: Any = None
        for i, one in enumerate(given):
            self._same_meta(one, given[0])
            if self._source(one) is not qkv:
                raise _UnlikeError(f"q, k and v of layer {i} do not come from the layer before")
            out, middle, gate = self._attended(self.calls[i], one, x)
            epsilons.add(middle.eps)
            behind = self._one(gate, _LINEAR, _PAIR)
            a = behind.args
            down = a[1] if behind.target is _PAIR else a[1][0]
            if not (a[0] is gate and (a[2] if behind.target is _PAIR else a[3]) is middle.total):
                raise _UnlikeError(f"the sum behind the mlp of layer {i} is another")
            norms = [one["q_norm"], one["k_norm"]] if one["q_norm"] is not None else []
            cache = [one["k_cache"], one["v_cache"]]
            layers.append([norm, *weights, *norms, *cache, out, middle.norm, *middle.weights, down])
            if i + 1 < len(given):
                if behind.target is not _PAIR or behind.args[7]:
                    raise _UnlikeError(f"behind layer {i} there is no norm and next layer")
                x, qkv = self._results(behind)
                norm, weights = behind.args[3], behind.args[4]
                epsilons.add(behind.args[5])
                self._plain_norm(behind.args[6])
            pair = behind
        logits, norm, head, eps = self._head(pair)
        epsilons.add(eps)
        if len(epsilons) > 1:
            raise _UnlikeError(f"norms have {sorted(epsilons)} for eps")
        first = given[0]
        meta = ("slot_mapping", "seq_lens", "query_start_loc", "block_tables")
        step = [begin, first["cos"], first["sin"], *(first[name] for name in meta)]
        reads = [*step, *(node for layer in layers for node in layer), norm, *head]
        decoder = self._decoder(first, layers, weights, middle.weights, head, eps)
        self._check(reads, layers, logits, decoder)
        nodes = tuple(n for n in self.graph.nodes if n in self.inside)
        return Found(decoder, tuple(reads), nodes, logits)

    # parts

    def _source(self, given: dict[str, Any]) -> fx.Node:
        """What q, k and v are columns of, one behind the other."""
        source, at = None, 0
        for name in ("q", "k", "v"):
            seen = given[name]
            part = seen.args[0] if seen.target is aten.view.default else None
            if part is None or part.target is not aten.slice.Tensor or len(part.args) != 4:
                raise _UnlikeError(f"{name} is more than columns of a product")
            of, dim, start, stop = part.args
            if dim != 1 or start != at or (source is not None and of is not source):
                raise _UnlikeError("q, k and v do not lie one behind the other")
            source, at = of, stop
            self.inside.update((seen, part))
        assert source is not None
        if sizes(source)[1] != at:
            raise _UnlikeError("there is more than q, k and v in their product")
        self.inside.add(source)
        return source

    def _normed(self, node: fx.Node) -> tuple[fx.Node, fx.Node, list[fx.Node], float]:
        """Input, norm's weight, weights and eps of a linear layer with a norm ahead."""
        x, weights, norm, more, eps, centred, gated, held, _ = node.args
        if norm is None or more is not None or gated or not held:
            raise _UnlikeError("a linear layer that is a norm and a product is another")
        self._plain_norm(centred)
        self.inside.add(node)
        return x, norm, weights, eps  # type: ignore[return-value]

    def _plain_norm(self, centred: Any) -> None:
        if centred:
            raise _UnlikeError("a norm adds 1 to its weight")

    def _attended(self, call: fx.Node, given: dict[str, Any], x: fx.Node) -> Any:
        """The weight behind attention, and what `_Middle` says, and the gate's output."""
        out = given["out"]
        if out.target is not aten.new_empty.default:
            raise _UnlikeError("attention writes into memory that was there")
        seen = [n for n in out.users if n is not call]
        if len(seen) != 1 or seen[0].target is not aten.view.default:
            raise _UnlikeError("attention's output is read twice, or as heads")
        self.inside.update((call, out, seen[0]))
        pair = self._one(seen[0], _PAIR)
        _, weight, more, norm, weights, eps, centred, gated, _ = pair.args
        if more is not x or not gated:
            raise _UnlikeError("behind attention there is no sum, norm and gate")
        self._plain_norm(centred)
        total, gate = self._results(pair)
        return weight, _Middle(total, norm, weights, eps), gate  # type: ignore[arg-type]

    def _results(self, pair: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Both, of which the first may have no reader."""
        found = {n.args[1]: n for n in pair.users}
        if set(found) - {0, 1} or 1 not in found:
            raise _UnlikeError("a sum and its product are read in another way")
        self.inside.update((pair, *found.values()))
        return found.get(0), found[1]  # type: ignore[return-value]

    def _head(self, node: fx.Node) -> tuple[fx.Node, fx.Node, list[fx.Node], float]:
        """Logits, the last norm, the head's weights and eps."""
        if node.target is _PAIR:  # of every row
            if node.args[7]:
                raise _UnlikeError("behind the last layer there is a gate")
            _, logits = self._results(node)
            self._plain_norm(node.args[6])
            return logits, node.args[3], node.args[4], node.args[5]  # type: ignore[return-value]
        _, weights, norm, _, _, _, gated, held, _ = node.args
        if len(weights) != 1 or norm is not None or gated or not held:  # type: ignore[arg-type]
            raise _UnlikeError("behind the last layer there is no sum")
        self.inside.add(node)
        rows = self._one(node, aten.index.Tensor, _LINEAR)
        if rows.target is aten.index.Tensor:  # of the only token, whatever it says
            if len(rows.args[1]) != 1:  # type: ignore[arg-type]
                raise _UnlikeError("rows of logits are chosen in another way")
            self.inside.add(rows)
            logits = self._one(rows, _LINEAR)
        else:
            logits = rows
        _, norm, head, eps = self._normed(logits)
        return logits, norm, head, eps

    def _one(self, node: fx.Node, *targets: Any) -> fx.Node:
        """The only reader, which calls one of these."""
        users = [n for n in node.users if n.target in targets]
        if len(users) != 1:
            names = " or ".join(str(target) for target in targets)
            raise _UnlikeError(f"{node} is read by no {names}, or by several")
        return users[0]

    def _same_meta(self, given: dict[str, Any], first: dict[str, Any]) -> None:
        """Raise unless a call of attention is as the kernel does it, and as the first."""
        other = [
            name for name in ("window", "softcap", "sinks", "k_scale", "v_scale", "out_scale")
            if given[name] is not None
        ]  # fmt: skip
        if other or not given["causal"] or given["centred"]:
            raise _UnlikeError(f"attention has {', '.join(other) or 'no causal mask, or 1 + norm'}")
        if given["cos"] is None:
            raise _UnlikeError("attention does not turn its q and k")
        if (given["q_norm"] is None) != (given["k_norm"] is None):
            raise _UnlikeError("one of q and k has a norm")
        of_step = ("slot_mapping", "seq_lens", "query_start_loc", "block_tables", "cos", "sin",
                   "scale", "eps")  # fmt: skip
        for name in of_step:
            if given[name] is not first[name] and given[name] != first[name]:
                raise _UnlikeError(f"attention of two layers differs in its {name}")

    # the whole

    def _decoder(
        self, given: dict[str, Any], layers: Sequence[Any], qkv: Sequence[fx.Node],
        gate: Sequence[fx.Node], head: Sequence[fx.Node], eps: float,
    ) -> Decoder:  # fmt: skip
        _, block, kv_heads, head_dim = sizes(given["k_cache"])
        return Decoder(
            width=sizes(layers[0][0])[0], heads=sizes(given["q"])[1], kv_heads=kv_heads,
            head_dim=head_dim, mlp=sizes(layers[0][-1])[1], layers=len(layers),
            words=sum(sizes(w)[0] for w in head), block=block,
            normed=given["q_norm"] is not None, eps=eps, head_eps=given["eps"],
            scale=given["scale"], weights=(len(qkv), len(gate), len(head)),
        )  # fmt: skip

    def _check(
        self, reads: Sequence[fx.Node], layers: Sequence[Any], logits: fx.Node, decoder: Decoder
    ) -> None:
        """Raise unless layers are alike, of the kernel's kinds, and nobody reads within."""
        if len({tuple(sizes(node) for node in layer) for layer in layers}) > 1:
            raise _UnlikeError("layers are of different shapes")
        ints = {3: torch.int64, 4: torch.int32, 5: torch.int32, 6: torch.int32}
        for i, node in enumerate(reads):
            wanted = ints.get(i, torch.bfloat16)
            if dtype_of(node) != wanted:
                raise _UnlikeError(f"{node} is of {dtype_of(node)}, and the kernel reads {wanted}")
        if sizes(reads[1])[-1] * 2 != decoder.head_dim:
            raise _UnlikeError("angles are not half as many as columns of a head")
        if len(set(reads)) < len(reads):
            raise _UnlikeError("layers share weights")
        if why := decoder.refusal():
            raise _UnlikeError(why)
        for node in self.inside - {logits}:
            if strangers := [n for n in node.users if n not in self.inside]:
                raise _UnlikeError(f"{node} is read by {strangers[0]} too")
        late = [n for n in reads if n in self.inside]
        if late:
            raise _UnlikeError(f"{late[0]} is made within the layers")


@dataclasses.dataclass(frozen=True)
class _Middle:
    """What is between attention and the gate: a sum, its norm, weights of the gate."""

    total: fx.Node
    norm: fx.Node
    weights: list[fx.Node]
    eps: float


def _arguments(call: fx.Node) -> dict[str, Any]:
    names = [a.name for a in call.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, call.args, strict=True))
