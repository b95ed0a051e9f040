"""Advice in the caller's own names: his fields and his parameters, not those of an example.

A rule knows rows and ops; what tells true rows from padding, the caller's batch does. So a message
leaves a place for it, which is filled in where the refusal is noted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fngraph.core.buffers import COUNTED
from fngraph.fx.leaves import Leaf, Role
from fngraph.fx.signatures import Signature

ARGUMENT = "Make it <an argument>"
"""Of a tensor that `forward` was not given."""
_VALID = re.compile(r"valid = <true rows of (.*?)>; ")


def valid(size: str) -> str:
    """What defines `valid`, True in true rows along a dim of `size`; code with it follows.

    Args:
        size: as a person writes it, "T" or "R".
    """
    return f"valid = <true rows of {size}>; "


def where_valid(rank: int, dim: int, x: str, other: str) -> str:
    """What leaves `x` where `valid` is True along one of its dims, and is `other` elsewhere."""
    behind = ", None" * (rank - dim - 1)
    return f"torch.where(valid{f'[:{behind}]' if behind else ''}, {x}, {other})"


def in_own_names(text: str, leaves: Sequence[Leaf], signature: Signature) -> str:
    """`text` with the caller's names in the places for them.

    Args:
        leaves: of all arguments.
    """
    text = _VALID.sub(lambda found: _valid(found[1], leaves, signature), text)
    return text.replace(ARGUMENT, _argument(signature))


def _valid(size: str, leaves: Sequence[Leaf], signature: Signature) -> str:
    told = {leaf.buffer.dims[0].text: path for leaf in leaves if leaf.buffer is not None
            if (path := _tells(leaf)) is not None}  # fmt: skip
    if size in told:
        return f"valid = {told[size]}; "
    (staged,) = signature.positions(Role.STAGED)
    letter = size if size in COUNTED else "T"
    return (
        f"valid = {signature.names[staged]}.valid, a field to add: valid: torch.Tensor = "
        f'fg.buffer("{letter}", "bool"), all True; '
    )


def _tells(leaf: Leaf) -> str | None:
    """Code that is True in true rows and False in padding, of one staged leaf."""
    buffer = leaf.buffer
    if buffer is None or len(buffer.dims) != 1 or not leaf.padded or isinstance(buffer.pad, str):
        return None
    if buffer.dtype == "bool":
        return None if buffer.pad or not leaf.path.endswith(".valid") else leaf.path
    return f"{leaf.path} >= 0" if "int" in buffer.dtype and buffer.pad < 0 else None


def _argument(signature: Signature) -> str:
    names = [name for name in signature.names if name.isidentifier()]
    called = f"forward({', '.join(signature.names)})"
    held = [signature.names[i] for i in signature.positions(Role.HELD)]
    if not held or held[0] not in names:
        return f"Make it one more argument of {called}"
    return f"Make it an argument: {called} with the tensor in {held[0]}"
