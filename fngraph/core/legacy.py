"""Two old flags that `modes` replaced; each still works, and warns."""

from __future__ import annotations

import warnings

from fngraph.core.modes import Mode
from fngraph.errors import ModesError


def modes_from_flags(
    modes: Mode | str | None = None,
    use_cudagraph: bool | None = None,
    full_cuda_graph: bool | None = None,
) -> Mode | None:
    """The modes that the old flags ask for; `modes` itself where none is given.

    | use_cudagraph | full_cuda_graph | modes     |
    |---------------|-----------------|-----------|
    | False         | False or unset  | NONE      |
    | True          | False or unset  | PIECEWISE |
    | True or unset | True            | FULL      |
    | unset         | False           | PIECEWISE |

    Raises:
        ModesError: a flag contradicts `modes`, or the other flag.

    Source: vLLM deprecated these two in 0.10.1 in favour of `cudagraph_mode`.
    """
    asked = None if modes is None else Mode.parse(modes)
    flags = {"use_cudagraph": use_cudagraph, "full_cuda_graph": full_cuda_graph}
    given = ", ".join(f"{name}={value}" for name, value in flags.items() if value is not None)
    if not given:
        return asked
    if use_cudagraph is False and full_cuda_graph:
        raise ModesError(f'{given} contradict each other. Pass modes="NONE" or modes="FULL".')
    if use_cudagraph is False:
        meant = Mode.NONE
    else:
        meant = Mode.FULL if full_cuda_graph else Mode.PIECEWISE
    if asked is not None and asked is not meant:
        raise ModesError(f'{given} means {meant}, but modes="{asked}". Pass modes= alone.')
    warnings.warn(f'{given} is deprecated. Pass modes="{meant}".', DeprecationWarning, stacklevel=3)
    return meant
