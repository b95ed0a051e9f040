"""Compiled code as bytes, and all that Inductor goes by besides the graph that it is handed.

Seen in torch 2.11 (its source) and 2.13 (CPU).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import platform
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fngraph.torch_facts.lean import lightened, without_compiler, without_debugger, without_workers


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
        digest = hashlib.sha256(repr(sorted(_stable(values).items())).encode()).hexdigest()
        found[module.__name__] = digest
    return found


def _stable(values: Mapping[str, Any]) -> dict[str, str]:
    """Each value as text that another process writes as well; a function is its source."""
    return {name: text_of(x) if callable(x) else repr(x) for name, x in values.items()}


def versions() -> dict[str, str]:
    """Of all that makes code or runs it."""
    kernels = []
    for name in ("triton", "pytorch-triton", "triton-windows"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            kernels.append(f"{name} {importlib.metadata.version(name)}")
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
    if not _is_torchs(fn):
        return [fn]
    cells = getattr(fn, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells]
    return [inner for one in held if isinstance(one, types.FunctionType) for inner in _behind(one)]


def _is_torchs(fn: Any) -> bool:
    module = getattr(inspect.unwrap(fn), "__module__", None) or ""
    return module.partition(".")[0] == "torch"


def text_of(fn: Any) -> str:
    """Text that changes with a function's code, its file, what it holds and what it calls."""
    lines: list[str] = []
    _describe(fn, lines, set())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def _describe(value: Any, lines: list[str], seen: set[int]) -> None:
    if isinstance(value, _PLAIN):
        lines.append(repr(value))
    elif isinstance(value, tuple | list | frozenset):
        parts: list[list[str]] = [[] for _ in value]
        for one, into in zip(value, parts):
            _describe(one, into, seen)
        lines.append(type(value).__name__)
        lines += map(str, sorted(parts) if isinstance(value, frozenset) else parts)
    elif isinstance(value, dict):
        for name, one in sorted(value.items(), key=lambda item: str(item[0])):
            lines.append(str(name))
            _describe(one, lines, seen)
    elif isinstance(value, types.CodeType):
        lines += [value.co_name, value.co_code.hex(), repr(value.co_names)]
        _describe(value.co_consts, lines, seen)
    elif isinstance(value, functools.partial):
        for one in (value.func, value.args, tuple(sorted(value.keywords.items()))):
            _describe(one, lines, seen)
    elif isinstance(getattr(value, "src", None), str):  # a kernel of Triton's
        lines.append(value.src)
        _describe(getattr(value, "fn", None), lines, seen)
    elif isinstance(getattr(value, "__func__", value), types.FunctionType):
        _describe_function(getattr(value, "__func__", value), lines, seen)
    else:
        lines.append(f"{type(value).__module__}.{type(value).__qualname__}")


def _describe_function(fn: types.FunctionType, lines: list[str], seen: set[int]) -> None:
    if id(fn) in seen or _is_torchs(fn):
        lines.append(f"{fn.__module__}.{fn.__qualname__}")
        return
    seen.add(id(fn))
    lines += [fn.__qualname__, _file_hash(fn.__code__.co_filename)]
    for cell in fn.__closure__ or ():
        try:
            _describe(cell.cell_contents, lines, seen)
        except ValueError:  # empty as yet
            lines.append("empty")
    _describe(fn.__defaults__, lines, seen)
    _describe(fn.__code__, lines, seen)
    for name in _names_in(fn.__code__):
        if name in fn.__globals__ and not isinstance(fn.__globals__[name], types.ModuleType | type):
            lines.append(name)
            _describe(fn.__globals__[name], lines, seen)
    if (inner := getattr(fn, "__wrapped__", None)) is not None:
        _describe(inner, lines, seen)


def _names_in(code: types.CodeType) -> Iterable[str]:
    """Names that a function's code, and that of functions in it, looks up."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names_in(const)


def _file_hash(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # typed in, or gone: the code itself is all that there is
        return "no file"
