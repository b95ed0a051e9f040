"""Functions, and what they hold, as text that changes with their source: the same in each process.

A kernel that torch traces into an artefact may be anywhere: in the file of the op, in a module that
it names, behind an object that tunes it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

KNOWN = sys.stdlib_module_names | {"torch", "triton", "numpy", "fngraph"}
"""Packages that no one looks into: of other versions there are other keys (`versions`,
`compile/key.py`)."""
_MOST = 4096  # elements of a tensor whose values are told


def is_torchs(fn: Any) -> bool:
    """Whether a function is one of torch's own."""
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
    elif isinstance(value, tuple | list | set | frozenset):
        parts: list[list[str]] = [[] for _ in value]
        for one, into in zip(value, parts):
            _describe(one, into, seen)
        lines.append(type(value).__name__)
        lines += map(str, sorted(parts) if isinstance(value, set | frozenset) else parts)
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
    elif isinstance(value, torch.Tensor):
        lines.append(f"{value.dtype} {value.device} {tuple(value.shape)}")
        if value.device.type == "cpu" and type(value) is torch.Tensor and value.numel() <= _MOST:
            lines.append(str(value.tolist()))
    elif isinstance(value, type):
        _describe_class(value, lines)
    else:
        _describe_object(value, lines, seen)


def _describe_class(of: type, lines: list[str]) -> None:
    lines.append(f"{of.__module__}.{of.__qualname__}")
    if not _is_known(of.__module__):
        file = getattr(sys.modules.get(of.__module__), "__file__", None)
        lines.append(_file_hash(file or ""))


def _describe_object(value: Any, lines: list[str], seen: set[int]) -> None:
    """What it is, and what it holds; of one of Triton's that tunes a kernel, the kernel."""
    _describe_class(type(value), lines)
    if id(value) in seen:
        return
    seen.add(id(value))
    if not _is_known(type(value).__module__):
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        for name in sorted(names):
            lines.append(name)
            _describe(getattr(value, name, None), lines, seen)
    elif type(value).__module__.startswith("triton."):
        lines += [str(one) for one in getattr(value, "configs", ())]
        _describe(getattr(value, "fn", None), lines, seen)


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in KNOWN


def _describe_function(fn: types.FunctionType, lines: list[str], seen: set[int]) -> None:
    if id(fn) in seen or is_torchs(fn):
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
    names = dict.fromkeys(_names_in(fn.__code__))
    _describe_names(names, fn.__globals__, lines, seen, set())
    for module in _imports_of(fn.__code__, fn.__globals__.get("__package__") or ""):
        lines += [module, _file_hash(_file_of(module))]
    if (inner := getattr(fn, "__wrapped__", None)) is not None:
        _describe(inner, lines, seen)


def _describe_names(
    names: Iterable[str], among: Mapping[str, Any], lines: list[str], seen: set[int],
    inside: set[str],
) -> None:  # fmt: skip
    """Those that are there; of a module, what of them it has, as `module.name` looks that up."""
    for name in names:
        if name not in among:
            continue
        value = among[name]
        lines.append(name)
        if not isinstance(value, types.ModuleType):
            _describe(value, lines, seen)
        elif value.__name__ not in inside and not _is_known(value.__name__):
            _describe_names(names, vars(value), lines, seen, inside | {value.__name__})


def _names_in(code: types.CodeType) -> Iterable[str]:
    """Names that a function's code, and that of functions in it, looks up."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names_in(const)


def _imports_of(code: types.CodeType, package: str) -> Iterable[str]:
    """Modules that a function imports when it runs, and what it takes of them, which may be
    modules: the first call has not been yet, so their files are all that can be told."""
    before: list[Any] = [None, None]  # what an import is preceded by: its level, then its names
    for one in dis.get_instructions(code):
        if one.opname == "EXTENDED_ARG":
            continue
        if one.opname == "IMPORT_NAME":
            level, names = before
            told = one.argval if not level else f"{'.' * level}{one.argval}"
            with contextlib.suppress(ImportError):  # beyond its package
                module = importlib.util.resolve_name(told, package)
                if not _is_known(module):
                    yield from (module, *(f"{module}.{name}" for name in names or ()))
        before = [before[1], one.argval]
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _imports_of(const, package)


def _file_of(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):  # no package, or one without a file
        return ""
    return (spec and spec.origin) or ""


def _file_hash(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # typed in, or gone: the code itself is all that there is
        return "no file"
