"""Compiled code as bytes, and all that Inductor goes by besides the graph that it is handed.

Seen in torch 2.11 (its source) and 2.13 (CPU).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import platform
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fngraph.torch_facts.lean import lightened, without_compiler, without_debugger, without_workers
from fngraph.torch_facts.sources import is_torchs, text_of


def dumped(call: Any) -> bytes | str:
    """What `compile_ahead` has made, as bytes; or why it has none."""
    try:
        data = call.serialize()
        return lightened(data) if isinstance(data, bytes) else "torch cannot save it"
    except Exception as error:  # torch has no class for what it cannot pickle
        return f"torch cannot save it: {error}"


def loaded(data: bytes) -> Callable[..., Any]:
    """The function again. Its kernels are in the bytes; those of the CPU Inductor keeps itself, and
    compiles where its own folder has lost them."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    without_debugger()
    with without_compiler(), without_workers():
        return AOTCompiledArtifact.deserialize(data)


def settings() -> dict[str, str]:
    """Inductor's configuration, and that of what is around it, as far as code depends on it."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch.compiler import config as compiler
    from torch.fx.experimental import _config as sizes

    found = {}
    for module in (inductor, functorch, compiler, sizes):
        values: Any = module.save_config_portable()  # type: ignore[attr-defined]
        values = values | _left_out(module)
        digest = hashlib.sha256(repr(sorted(_stable(values).items())).encode()).hexdigest()
        found[module.__name__] = digest
    return found


def _stable(values: Mapping[str, Any]) -> dict[str, str]:
    """Each value as text that another process writes as well; a function is its source."""
    return {name: _hook(x) if callable(x) else repr(x) for name, x in values.items()}


def _left_out(module: Any) -> dict[str, str]:
    """What torch saves with no configuration, and compiles by: passes that somebody put in, and
    settings whose names begin with an underscore."""
    prefixes = tuple(getattr(module, "_cache_config_ignore_prefix", ()))
    ignored = {*getattr(module, "_save_config_ignore", ())}
    found = {}
    for name in module._config:
        if name.startswith("_") or name in ignored or name.startswith(prefixes):
            value = getattr(module, name)
            if callable(value) or (name.startswith("_") and value is not None):
                found[f"left out: {name}"] = _hook(value)
    return found


def _hook(value: Any) -> str:
    """A pass of Inductor's says what it is by its `uuid`, where it has one."""
    told = getattr(value, "uuid", None)
    uuid = told() if callable(told) and not isinstance(value, type) else None
    return text_of(value) if uuid is None else repr(uuid)


TRITON = "triton", "pytorch-triton", "triton-windows"  # packages that it comes in


def installed(*packages: str) -> dict[str, str]:
    """Versions of those that are, by name."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def versions() -> dict[str, str]:
    """Of all that makes code or runs it."""
    kernels = [" ".join(one) for one in installed(*TRITON).items()]
    git = getattr(torch.version, "git_version", None)
    return {
        "torch": f"{torch.__version__} {git}", "triton": str(kernels),
        "cuda": f"{torch.version.cuda} {torch.version.hip}", "python": platform.python_version(),
    }  # fmt: skip


def device_facts(device: torch.device) -> str:
    """The device as far as code depends on it."""
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        return f"{of.name}, {of.major}.{of.minor}, {of.multi_processor_count} processors"
    cpu = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {cpu} {_flags_of_cpu()} {torch.get_num_threads()} threads"


@functools.cache
def _flags_of_cpu() -> str:
    """C++ is compiled for the very processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return hashlib.sha256("\n".join(dict.fromkeys(told)).encode()).hexdigest()[:16]


# --- the Python behind an op ----------------------------------------------------------------------


def op_source(op: Any) -> str:
    """Text that changes with the Python that says what an op does: its implementation, its rule
    for fakes, what Inductor puts in its place. Torch's own changes with torch."""
    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton

    name = op._schema.name
    found: list[Any] = [*op.py_kernels.values(), *(table.get(op) for table in _replacements())]
    if (defined := OPDEFS.get(name)) is not None:
        found += [defined._init_fn, defined._abstract_fn, *defined._backend_fns.values()]
    if not name.startswith(("aten::", "prims::")):
        kernel = singleton.find(name).fake_impl.kernel
        found.append(kernel and kernel.func)
    texts = sorted(text_of(fn) for one in found if callable(one) for fn in _behind(one))
    return "\n".join([str(op._schema), *texts])


def _replacements() -> Iterator[Mapping[Any, Any]]:
    """Inductor's tables of what it puts in an op's place.

    A process that loads its code has no need of them, and they take a second to load. Where nobody
    has loaded them, they hold nothing but torch's own.
    """
    for name in ("decomposition", "lowering"):
        module = sys.modules.get(f"torch._inductor.{name}")
        yield getattr(module, f"{name}s", {})  # or it is being loaded by another thread


def _behind(fn: Any) -> list[Any]:
    """A function that is not torch's; of one of torch's that holds others, as `register_fake` makes
    of a rule for fakes, those others."""
    if not is_torchs(fn):
        return [fn]
    cells = getattr(fn, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells]
    return [inner for one in held if isinstance(one, types.FunctionType) for inner in _behind(one)]
