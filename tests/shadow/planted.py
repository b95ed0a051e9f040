"""Faults to plant in a step, one of each kind, and traffic that meets them.

A `Plant` makes a step with its fault, maybe spoils something while the steps go on, and says which
op and line of the toys are at fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import toys

import fngraph as fg
from fngraph.ops import Backend
from fngraph.ops.paged import reference

ROOT = Path(__file__).parents[2]


def line(text: str, file: str = "tests/toys.py") -> str:
    """`file:line` of the only line of a file that has this text."""
    lines = (ROOT / file).read_text().splitlines()
    (at,) = [i for i, one in enumerate(lines, 1) if text in one]
    return f"{file}:{at}"


def own_line(text: str) -> str:
    """`line` of this file, where the text begins a statement."""
    lines = (ROOT / "tests/shadow/planted.py").read_text().splitlines()
    (at,) = [i for i, one in enumerate(lines, 1) if one.strip().startswith(text)]
    return f"tests/shadow/planted.py:{at}"


def traffic(steps: int) -> Iterator[toys.Batch]:
    """Requests that come, whose prompts are padded, and decode once: with and without padding."""
    for i in range(steps):
        reqs, past = 1 + i // 2 % 3, 3 + i // 6 % 2 * 2
        if i % 2:
            yield toys.decode(reqs, past, seed=i)
        else:
            yield toys.batch(*[past] * reqs, seed=i)


@dataclasses.dataclass
class Planted:
    """A step with a fault.

    Attributes:
        spoil: what happens after some steps; nothing, if the fault is there from the beginning.
        kind, op, line: what `fg.bisect` is to find.
        says: words of what it says.
    """

    step: fg.Step
    cache: Any
    op: str
    line: str
    kind: str = "program"
    says: str = ""
    spoil: Callable[[], None] = lambda: None


def compiled(forward: Any, params: Any, cache: Any, **options: Any) -> Any:
    """The last stage before a step."""
    fast = fg.graphify(forward, donate="cache", stage="batch", sizes=toys.SIZES, **options)
    return fast.trace(params, cache, limits=toys.LIMITS).split().lower().compile()


def with_executable(made: Any, **changes: Any) -> Any:
    """The same stage, with another executable."""
    return dataclasses.replace(made, executable=dataclasses.replace(made.executable, **changes))


def stale_weight(recorder: str, device: Any, **options: Any) -> Planted:
    """The caller puts a new tensor into his tree, and goes on with the step."""
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    made = compiled(toys.attend, params, cache)
    step = made.capture(params, cache, recorder=recorder, **options)

    def spoil() -> None:
        params["layers"][1]["out"] = params["layers"][1]["out"] * 1.01

    return Planted(
        step, cache, "aten.mm.default", line('layer["out"])'), spoil=spoil,
        says="params['layers'][1]['out']",
    )  # fmt: skip


def wrong_pad(recorder: str, device: Any, **options: Any) -> Planted:
    """Padding tokens are staged with slot 0, where a request has its first token."""
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    made = compiled(toys.attend, params, cache)
    plan = made.executable.plan
    buffers = tuple(
        dataclasses.replace(one, buffer=dataclasses.replace(one.buffer, pad=0))
        if one.path == "batch.slot_mapping" else one
        for one in plan.buffers
    )  # fmt: skip
    made = with_executable(made, plan=dataclasses.replace(plan, buffers=buffers))
    step = made.capture(params, cache, recorder=recorder, **options)
    return Planted(
        step, cache, "fngraph.attention.default", line("fg.ops.attention("),
        says="batch.slot_mapping, which is not padded as its field says",
    )  # fmt: skip


def off_by_a_block(recorder: str, device: Any, **options: Any) -> Planted:
    """The second layer's backend reads each request's blocks one further than they are."""

    def run(args: Any, host: Any) -> None:
        meta = args.meta
        tables = meta.block_tables.roll(1, 1)
        reference.BACKEND.run(args._replace(meta=meta._replace(block_tables=tables)), host=host)

    fg.ops.ATTENTION.register(Backend("off_by_a_block", run, lambda config: fg.Support.ALWAYS))
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    backends = {"attention": ["reference", "off_by_a_block"]}
    try:
        made = compiled(toys.attend, params, cache, backends=backends)
    finally:
        fg.ops.ATTENTION.unregister("off_by_a_block")
    step = made.capture(params, cache, recorder=recorder, **options)
    return Planted(
        step, cache, "fngraph.attention.default", line("fg.ops.attention("),
        says="backend 'off_by_a_block' writes other values into out than '",
    )  # fmt: skip


def flipped(fn: Any, bit: int, element: int = 0) -> Any:
    """A piece's function, with one bit of one element of its first result flipped."""

    def call(sizes: Mapping[str, int], host: Any, *tensors: torch.Tensor) -> Any:
        first, *rest = fn(sizes, host, *tensors)
        first = first.clone()
        first.view(torch.int32).view(-1)[element : element + 1].bitwise_xor_(1 << bit)
        return (first, *rest)

    return call


def with_flipped_op(made: Any, op: str, occurrence: int, bit: int = 22) -> Any:
    """`with_other_op`, where the other flips one bit of what the op makes."""
    return with_other_op(made, op, occurrence, lambda fn: _flipping(fn, bit))


def with_other_op(made: Any, op: str, occurrence: int, other: Callable[[Any], Any]) -> Any:
    """A stage whose pieces call another function in the place of one op of them, the how many-th of
    its name, counted from 0 over the program; the ops that it is held to do not.

    Args:
        other: makes the function, of the op.
    """
    executable = made.executable
    fns, left = list(executable.fns), occurrence
    for at, gm in enumerate(executable.modules):
        if gm is None:
            continue
        nodes = [n for n in gm.graph.nodes if n.op == "call_function" and str(n.target) == op]
        if left < len(nodes):
            graph = torch.fx.Graph()
            copies: dict[Any, Any] = {}
            graph.output(graph.graph_copy(gm.graph, copies))
            node = copies[nodes[left]]
            node.target = other(node.target)
            fns[at] = _as_function(torch.fx.GraphModule({}, graph))
            return with_executable(made, fns=tuple(fns))
        left -= len(nodes)
    raise AssertionError(f"there are not so many {op}")


def _as_function(gm: torch.fx.GraphModule) -> Any:
    return lambda sizes, host, *xs: gm(sizes["T"], sizes["R"], *xs)


def _flipping(op: Any, bit: int) -> Any:
    def flipping(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = op(*args, **kwargs)
        made.view(torch.int32).view(-1)[:1].bitwise_xor_(1 << bit)
        return made

    return flipping


def one_bit(recorder: str, device: Any, **options: Any) -> Planted:
    """The second layer's tanh flips one bit of one element, in the midst of its piece."""
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    made = with_flipped_op(compiled(toys.attend, params, cache), "aten.tanh.default", 1)
    step = made.capture(params, cache, recorder=recorder, **options)
    return Planted(step, cache, "aten.tanh.default", line("torch.tanh("), says="1 element differs")


def trusted(params: Any, cache: Any, batch: toys.Batch) -> Any:
    """`attend`, after a mean over tokens that padding is in; `fg.trust_rows` says otherwise."""
    mean_E = fg.trust_rows(params["embed"][batch.token_ids].mean(0))
    shifted = {**params, "embed": params["embed"] + mean_E}
    return toys.attend(shifted, cache, batch)


def rows_mixed(recorder: str, device: Any, **options: Any) -> Planted:
    """Padding reaches true rows through what the user vouches for."""
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    made = compiled(trusted, params, cache)
    step = made.capture(params, cache, recorder=recorder, **options)
    return Planted(
        step, cache, "fg.trust_rows", own_line("mean_E = "),
        kind="padding", says="true rows are",
    )  # fmt: skip


SCALE = [1.0]


def scaled(params: Any, cache: Any, batch: toys.Batch) -> Any:
    """`attend`, of what a global list says."""
    logits, cache = toys.attend(params, cache, batch)
    return logits * SCALE[0], cache


def a_global(recorder: str, device: Any, **options: Any) -> Planted:
    """A number that forward reads and nobody passes changes."""
    SCALE[0] = 2.0
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    made = compiled(scaled, params, cache)
    step = made.capture(params, cache, recorder=recorder, **options)

    def spoil() -> None:
        SCALE[0] = 3.0

    return Planted(
        step, cache, "aten.mul.Tensor", own_line("return logits * "),
        kind="trace", says="something else there than when it was traced", spoil=spoil,
    )  # fmt: skip


FAULTS = (stale_weight, wrong_pad, off_by_a_block, one_bit, rows_mixed, a_global)
