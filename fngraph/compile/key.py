"""What an artefact depends on: all that may change the code that is made of a piece, as text.

Two artefacts are one if these facts are equal, and a cache finds them by their digest. A fact more
than is needed compiles once more; a fact less serves code that is wrong.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import fx

from fngraph.core.compiling import Range
from fngraph.fx.nodes import is_op
from fngraph.fx.tracing.ambient import Ambient, read
from fngraph.torch_facts import portable

Pass = tuple[str, str]
"""A pass that has rewritten a piece: its name, and its version."""

FLAGS = (
    "TORCHINDUCTOR_", "AOT_INDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TORCH_ALLOW_",
    "TORCH_BLAS_", "TRITON_", "CUBLAS", "NVIDIA_TF32", "CC", "CXX", "MKL_", "DNNL_", "ONEDNN_",
)  # fmt: skip
"""Environment variables that begin so decide what is compiled, or which kernels run."""
PLACES = {
    "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TRITON_CACHE_DIR", "TRITON_HOME",
    "TRITON_DUMP_DIR",
}  # fmt: skip
"""But these say where something is, or how fast it is made. Inductor itself sets some of them."""

OWN = ("compile", "core/compiling.py", "ops", "ranks", "torch_facts")
"""Folders and files of this package whose source is a part of every key."""


def facts_of(
    key: str,
    gm: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    part: Range,
    passes: Sequence[Pass],
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """All that an artefact depends on, by name.

    Args:
        key: `Piece.key`: ops, constants, shapes, strides, dtypes, devices.
        gm: what is compiled: the piece after its passes.
        inputs: fakes of its tensors.
        passes: in the order in which they ran.
    """
    devices = {x.device for x in inputs}
    ops = {node.target: None for node in gm.graph.nodes if is_op(node)}
    flags = {n: v for n, v in environment.items() if n.startswith(FLAGS) and n not in PLACES}
    return {
        "piece": key,
        "code": gm.code,
        "inputs": str([str(x.dtype) for x in inputs]),
        "range": str(part),
        "passes": str([tuple(one) for one in passes]),
        "ops": "\n".join(sorted(portable.op_source(op) for op in ops)),
        "ambient": "\n".join(sorted(map(_ambient, {d.type for d in devices}))),
        "devices": str(sorted({f"{d}: {portable.device_facts(d)}" for d in devices})),
        "fngraph": own_source(),
        **{f"flag {name}": value for name, value in flags.items()},
        **portable.versions(),
        **portable.settings(),
    }


def digest_of(facts: Mapping[str, str]) -> str:
    """What artefacts are found by."""
    text = json.dumps(sorted(facts.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def can_be_told(device: str) -> bool:
    """Whether text can tell the ambient state: a function mode of the user's it cannot."""
    return all(isinstance(mode, tuple) for mode in read(device).modes)


def _ambient(device: str) -> str:
    """The state that code is made under: gradients and inference mode are off then."""
    now: Ambient = read(device)._replace(grad=False, inference=False)
    return f"{device}: {now}"


@functools.cache
def own_source() -> str:
    """Of the files that hand a piece to Inductor, and call what it makes; and of our own ops, whose
    parts may be written into it (`few_rows.taken_apart`): torch keeps no implementation that was
    given to a `Library`."""
    package = Path(__file__).parents[1]
    files = [path for part in OWN
             for path in sorted((package / part).rglob("*.py")) or [package / part]]  # fmt: skip
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
