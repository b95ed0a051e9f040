"""`fg.check(..., rehearse=True)`: a function's graph on the user's batch, and on it in a key.

What a trace claims of rows rests on rules for ops, on what fields declare, and on the user's word
(`fg.trust_rows`, rows kept for padding, indices that are not negative). Here it is tried out, on
his own arguments: `fngraph.fx.rows.rehearsal` compares node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fngraph.core import BatchSpec, Limits, host_field, plan_buffers, trees
from fngraph.core.text import count
from fngraph.errors import FnGraphError, RowsError, SpecError, TreeError
from fngraph.fx.arguments import Arguments
from fngraph.fx.leaves import Role, TensorSpec
from fngraph.fx.nodes import inputs_of
from fngraph.fx.rows.rehearsal import Untrue, rehearse
from fngraph.fx.tracing.tried import said
from fngraph.graphs.staging.buffers import check_leaves, true_sizes
from fngraph.graphs.staging.unpack import padded

Keys = bool | Iterable[tuple[int, int]]


def rehearsal(
    values: Sequence[Any], batch: Any, keys: Keys, refuse: Callable[[FnGraphError], None],
    rehearsed: list[tuple[int, int]],
) -> Callable[[Arguments, Limits, Any, Mapping[Any, Any]], None]:  # fmt: skip
    """What a trace is to show its graph and facts to: it runs both, and reports to `refuse`.

    Args:
        values: all arguments of a call, real tensors; donated ones are copied, not written.
        batch: the staged one of them.
        keys: (T, R) of the keys to rehearse; True: some that are larger than the batch.
        rehearsed: gets those in which nothing differs.

    Raises:
        TreeError: `fg.like` specs in place of tensors. SpecError: a key that is too small, or none.
    """
    if keys is not True:
        keys = _read_keys(keys)
    leaves = [trees.flatten(value)[0] for value in values]
    if any(isinstance(x, TensorSpec) for part in leaves for x in part):
        raise TreeError("rehearse=True runs forward: pass tensors, not fg.like specs")
    field = host_field(type(batch))
    spec = getattr(batch, field) if field else BatchSpec(1, 1)
    if field and not isinstance(keys, bool):
        _check_keys(spec, keys)

    def look(args: Arguments, limits: Limits, graph: Any, facts: Mapping[Any, Any]) -> None:
        if args.batch_type is None:
            return  # exact shapes, no padding
        for sizes in _sizes_of(spec, limits, keys):
            true, padded = _both(args, leaves, spec, {**limits.dims, **sizes}, limits)
            try:
                difference = rehearse(graph.gm, facts, true, padded)
            except Exception as error:
                refuse(SpecError(f"forward fails on the batch as it is: {said(error)}"))
                return
            if difference is not None:
                size = ", ".join(f"{k}={n}" for k, n in sizes.items())
                told = f"{_placed(difference, args)}. That is in a rehearsed key of {size}"
                refuse(RowsError(told))
                return
            rehearsed.append((sizes["T"], sizes["R"]))

    return look


def _read_keys(keys: Any) -> list[tuple[int, int]]:
    try:
        read = [(t, r) for t, r in keys]
    except (TypeError, ValueError):
        read = []
    if not read or any(type(n) is not int or n < 1 for key in read for n in key):
        raise SpecError(
            f"rehearse={keys!r}: pass True, or the keys to try as a list of pairs: [(T, R), ...]"
        )
    return read


def _placed(difference: Untrue, args: Arguments) -> str:
    """What differs; of a leaf, by its path, and that its field says otherwise."""
    if difference.node.op != "placeholder":
        return str(difference)
    leaf = args.leaves[inputs_of(difference.node.graph).index(difference.node)]
    return f"{leaf.path} is not what its field says ({leaf.buffer}): {difference.text}"


def _sizes_of(spec: BatchSpec, limits: Limits, keys: Keys) -> list[dict[str, int]]:
    """T and R of each key, {"T": 16, "R": 8}: what is missing to them is padding."""
    T, R, q = spec.num_tokens, spec.num_reqs, spec.query_len
    if keys is True:
        more = {(T, R), (T, R + 1), (T + 3, R), (T + 5, R + 2)}
        keys = {(q * (R + n), R + n) for n in range(3)} if q else more
        keys = [(t, r) for t, r in sorted(keys) if t <= limits.max_tokens and r <= limits.max_reqs]
    return [{"T": t, "R": r} for t, r in keys or ()]  # type: ignore[union-attr]


def _check_keys(spec: BatchSpec, keys: Iterable[tuple[int, int]]) -> None:
    T, R, q = spec.num_tokens, spec.num_reqs, spec.query_len
    for t, r in keys:
        if t < T or r < R or (q and t != q * r):
            uniform = f" of {q} tokens a request" if q else ""
            raise SpecError(
                f"a key of T={t} and R={r} cannot hold the batch: {count(T, 'token')}, "
                f"{count(R, 'request')}{uniform}"
            )


def _both(
    args: Arguments,
    leaves: Sequence[Sequence[torch.Tensor]],
    spec: BatchSpec,
    key: Mapping[str, int],
    limits: Limits,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The graph's leaves for the batch as it is, and as a key has it; donated ones copied."""
    true: list[torch.Tensor] = []
    padded: list[torch.Tensor] = []
    for role, part in zip(args.signature.roles, leaves):
        if role is Role.STAGED:
            true += [x.to(args.device) for x in part]
            padded += padded_leaves(args, part, spec, key, limits)
        elif role is Role.DONATED:
            true += [x.clone() for x in part]
            padded += [x.clone() for x in part]
        else:
            true += part
            padded += part
    return true, padded


def padded_leaves(
    args: Arguments,
    batch: Sequence[torch.Tensor],
    spec: BatchSpec,
    key: Mapping[str, int],
    limits: Limits,
) -> list[torch.Tensor]:
    """A batch's leaves in the static buffers of a key of these sizes, padded by the graphs' node.

    Raises:
        TreeError: a leaf that is not what its field and the spec say.
    """
    plan = plan_buffers(args.fields, key)
    true = true_sizes(spec, limits.dims)
    check_leaves(plan, batch, true)
    return padded(plan, batch, true, spec.query_len or 0, args.device)
