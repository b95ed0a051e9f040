"""The tables of a step, leaves with rows="changed": how a call reads and keeps them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fngraph.core import Limits, buffers_of, host_field
from fngraph.errors import TreeError
from fngraph.fx.arguments import Arguments
from fngraph.step.changed_rows import ChangedRows, Table

Reader = Callable[[Any], Sequence[torch.Tensor]]


@dataclasses.dataclass(eq=False)
class Tables:
    """The tables of a step, by field; shared with the steps of other ambient states.

    Attributes:
        again: whether a step has read them and ended well, and none has failed since.
    """

    tables: dict[str, Table]
    again: bool = False

    def reader(self, args: Arguments, read: Reader) -> Reader:
        """From a batch to its leaves, tables in place of what was given for them."""
        cls: Any = args.batch_type
        field = host_field(cls)
        assert field is not None

        def leaves(batch: Any) -> Sequence[torch.Tensor]:
            if type(batch) is not cls:
                return read(batch)
            again, self.again = self.again, False
            made: Any = object.__new__(cls)
            made.__dict__.update(vars(batch))
            reqs = getattr(batch, field).num_reqs
            with torch.no_grad():
                for name, table in self.tables.items():
                    made.__dict__[name] = table.take(getattr(batch, name), reqs, again)
            return read(made)

        return leaves

    def assembler(self, assemble: Callable[..., Any]) -> Callable[..., Any]:
        """The last thing that a step does, and a note that it got there."""

        def assembled(results: Any, args: Any) -> Any:
            self.again = True
            return assemble(results, args)

        return assembled


@torch.inference_mode(False)
def make_tables(args: Arguments, limits: Limits, device: torch.device) -> Tables | None:
    """Of the fields with rows="changed"; None where there are none."""
    if args.batch_type is None:
        return None
    sizes = {**limits.dims, "R": limits.max_reqs}
    tables = {}
    for name, buffer in buffers_of(args.batch_type).items():
        if buffer.changed:
            dtype = getattr(torch, buffer.dtype)
            data = torch.zeros(buffer.shape(sizes), dtype=dtype, device=device)
            tables[name] = Table(f"{args.batch_name}.{name}", data, [False] * len(data))
    return Tables(tables) if tables else None


def put_changed(tables: Tables | None, batch: Any, changed: Mapping[str, ChangedRows]) -> None:
    """Into a batch of one's own.

    Raises:
        TreeError: a field without a table.
    """
    known = [] if tables is None else list(tables.tables)
    for name in changed:
        if name not in known:
            raise TreeError(
                f'{name!r} takes no ChangedRows; fields that do, by rows="changed": {known}'
            )
    vars(batch).update(changed)
