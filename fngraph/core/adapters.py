"""Which numbers of active adapters get graphs of their own."""

from __future__ import annotations

from fngraph.errors import SpecError


def adapter_counts(
    max_adapters: int, *, powers: bool = False, without: bool = True
) -> tuple[int, ...]:
    """The `adapters=` of `build_table`, ascending.

    | max_adapters | powers | without | counts          |
    |--------------|--------|---------|-----------------|
    | 0            |        |         | (0,)            |
    | 4            | False  | True    | (0, 5)          |
    | 4            | True   | True    | (0, 1, 2, 4, 5) |
    | 4            | False  | False   | (5,)            |

    The largest is one more than `max_adapters`, since rows without any adapter are a group too.

    Args:
        max_adapters: adapters that one batch can use; 0: adapters are off.
        powers: capture powers of two in between, so that few adapters cost less than all.
        without: capture batches without adapters too; else they run eagerly.

    Raises:
        SpecError: `max_adapters` is negative.

    Source: vLLM 0.33, `specialize_active_lora` (powers) and `cudagraph_specialize_lora`, without
    which its first dispatcher captures the largest count alone.
    """
    if max_adapters < 0:
        raise SpecError(f"max_adapters={max_adapters} is negative. Pass 0 where there are none.")
    if max_adapters == 0:
        return (0,)
    between = [2**i for i in range(max_adapters.bit_length())] if powers else []
    return (*([0] if without else []), *between, max_adapters + 1)
