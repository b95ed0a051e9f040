"""Functions, and what they hold, as text that changes with their source: the same in each process.

A kernel that torch traces into an artefact may be anywhere: in the file of the op, in a module that
it names, behind an object that tunes it, in a method of what its defaults hold.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
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

from fngraph.torch_facts.names import OpOverload

KNOWN = sys.stdlib_module_names | {"torch", "triton", "numpy", "fngraph"}
"""Packages that no one looks into: of other versions there are other keys (`versions`,
`compile/key.py`)."""
VALUES = {
    "argparse", "array", "builtins", "collections", "datetime", "decimal", "fractions", "functools",
    "numpy", "operator", "pathlib", "re", "types",
}  # fmt: skip
"""Of these, packages whose objects are values, each what it is pickled as; others hold handles,
locks or a clock."""
_MODELS = "fngraph.models"
"""No part of a key by itself, and looked into as what a user has written. Names come into it when
they are asked for: where it is met as a module, or through `fngraph`, all of its source counts."""
_MOST = 1 << 24  # elements of a tensor whose values are told
_PLAIN = (
    int, float, complex, bool, str, bytes, bytearray, range, slice, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo,
)  # fmt: skip
_BUILT_IN = (types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType)


def is_torchs(fn: Any) -> bool:
    """Whether a function is one of torch's own."""
    module = getattr(inspect.unwrap(fn), "__module__", None) or ""
    return module.partition(".")[0] == "torch"


def text_of(fn: Any) -> str:
    """Text that changes with a function's code, its file, what it holds and what it calls."""
    return _Telling().text(fn)


class _Telling:
    """Values as lines of text.

    Functions, classes and objects, which may hold one another, are numbers where they are met, and
    told once, behind what has met them: a chain of them may be longer than Python's stack.
    """

    def __init__(self, in_set: bool = False) -> None:
        self._in_set = in_set
        self._lines: list[str] = []
        self._numbers: dict[int, int] = {}
        self._met: list[Any] = []  # all of them, in order
        self._path: set[int] = set()  # lists and dicts around what is told now
        self._files: dict[str, str] = {}

    def text(self, value: Any) -> str:
        """A digest of all that is told of a value."""
        self._tell(value)
        for one in self._met:  # which grows
            self._lines.append(f"number {self._numbers[id(one)]}")
            self._tell_all(one)
        return hashlib.sha256("\n".join(self._lines).encode()).hexdigest()

    def _say(self, *lines: Any) -> None:
        self._lines += map(str, lines)

    def _tell(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._say(repr(value))
        elif isinstance(value, torch.Tensor):
            self._tell_tensor(value)
        elif isinstance(value, types.CodeType):
            self._say(value.co_name, value.co_code.hex(), value.co_names)
            self._tell(value.co_consts)
        elif isinstance(value, tuple | list | set | frozenset | dict | types.MappingProxyType):
            self._tell_container(value)
        elif isinstance(value, types.ModuleType):
            self._say(value.__name__, _models_hash() if _has_models(value.__name__) else "")
        else:
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self._met)
                self._met.append(value)  # alive, lest its id be another's
            self._say(f"{type(value).__name__} {self._numbers[id(value)]}")

    def _tell_container(self, value: Any) -> None:
        self._say(type(value).__name__, len(value))
        if id(value) in self._path:
            return
        self._path.add(id(value))
        if isinstance(value, set | frozenset):
            self._say(*sorted(map(self._alone, value)))
        elif isinstance(value, tuple | list):
            for one in value:
                self._tell(one)
        else:
            for key, one in sorted(((self._alone(k), x) for k, x in value.items()), key=_first):
                self._say(key)
                self._tell(one)
        self._path.discard(id(value))

    def _alone(self, value: Any) -> str:
        """Text by which what has no order is put into one."""
        if isinstance(value, _PLAIN):
            return repr(value)
        return type(value).__name__ if self._in_set else _Telling(in_set=True).text(value)

    def _tell_tensor(self, value: torch.Tensor) -> None:
        self._say(value.dtype, value.device, tuple(value.shape))
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if plain and value.device.type == "cpu" and value.numel() <= _MOST:
            lying = value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
            self._say(hashlib.sha256(lying.view(torch.uint8).numpy().tobytes()).hexdigest())

    def _tell_all(self, value: Any) -> None:
        inner = getattr(value, "__func__", value)
        if isinstance(inner, types.FunctionType):
            self._tell_function(inner)
            if isinstance(value, types.MethodType):
                self._tell(value.__self__)
        elif isinstance(value, type):
            self._tell_class(value)
        elif isinstance(value, property):
            self._tell((value.fget, value.fset))
        elif isinstance(value, OpOverload | torch._ops.OpOverloadPacket):
            self._tell_op(str(value))
        elif isinstance(value, _BUILT_IN):
            self._say(getattr(value, "__module__", ""), value.__qualname__)
            self._tell(getattr(value, "__self__", None))
        elif isinstance(getattr(value, "src", None), str):  # a kernel of Triton's
            self._say(value.src)
            self._tell(getattr(value, "fn", None))
        else:
            self._tell_object(value)

    def _tell_object(self, value: Any) -> None:
        """What it is, and what it holds; of one of Triton's that tunes a kernel, the kernel."""
        of = type(value)
        self._say(f"{of.__module__}.{of.__qualname__}")
        names = [*getattr(value, "__dict__", ()), *getattr(of, "__slots__", ())]
        if not _is_known(of.__module__):
            self._tell(of)
        elif isinstance(value, torch.nn.Module):
            names = list(vars(value))
        elif of.__module__.startswith("triton."):
            self._say(*getattr(value, "configs", ()))
            names = ["fn"]
        elif of.__module__ == "torch._library.custom_ops":
            names = ["_qualname", "_init_fn", "_abstract_fn", "_backend_fns"]
        elif of.__module__.startswith("fngraph.core.") and dataclasses.is_dataclass(of):
            names = [field.name for field in dataclasses.fields(of)]
        else:
            names = []
        for name in sorted({*names}):
            self._say(name)
            self._tell(getattr(value, name, None))
        if not names and (
            of.__module__.partition(".")[0] in VALUES or not _is_known(of.__module__)
        ):
            self._tell_pickled(value)
        self._tell(getattr(value, "__wrapped__", None))

    def _tell_pickled(self, value: Any) -> None:
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            state: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception:  # whatever its author thinks of pickling
            state = str(getattr(value, "__name__", ""))  # numpy.sin has one
        for part in (state,) if isinstance(state, str) else state:
            self._tell(list(part) if hasattr(part, "__next__") else part)

    def _tell_class(self, of: type) -> None:
        """Of one's own, its files and what is in it, and what it has of others."""
        self._say(f"{of.__module__}.{of.__qualname__}")
        for base in of.__mro__:
            if _is_known(base.__module__):
                self._say(f"{base.__module__}.{base.__qualname__}")
            elif base is not of:
                self._tell(base)
        if not _is_known(of.__module__):
            self._say(self._file(getattr(sys.modules.get(of.__module__), "__file__", None) or ""))
            for name, one in sorted(vars(of).items()):
                is_special = name.startswith("__") and name.endswith("__")
                inner = getattr(one, "__func__", one)
                if not is_special or isinstance(inner, types.FunctionType | property):
                    self._say(name)
                    self._tell(one)

    def _tell_function(self, fn: types.FunctionType) -> None:
        """Of torch's own and Python's, what it holds alone."""
        module = fn.__globals__.get("__name__") or ""
        self._say(f"{module}.{fn.__qualname__}")
        for cell in fn.__closure__ or ():
            try:
                self._tell(cell.cell_contents)
            except ValueError:  # empty as yet
                self._say("empty")
        self._tell((fn.__defaults__, fn.__kwdefaults__, getattr(fn, "__wrapped__", None)))
        if _is_known(module) and not module.startswith("fngraph"):
            return
        self._say(self._file(fn.__code__.co_filename))
        self._tell(fn.__code__)
        self._tell(vars(fn))
        names = dict.fromkeys(_names_in(fn.__code__))
        self._tell_names(names, fn.__globals__, set())
        self._tell_ops(names)
        for told in _imports_of(fn.__code__, fn.__globals__.get("__package__") or ""):
            self._say(told, _models_hash() if _has_models(told) else self._file(_file_of(told)))

    def _tell_names(self, names: Iterable[str], among: Mapping[str, Any], inside: set[str]) -> None:
        """Those that are there; of a module, what of them it has, as `module.name` looks it up."""
        for name in names:
            if name not in among:
                continue
            value = among[name]
            self._say(name)
            self._tell(value)
            if isinstance(value, types.ModuleType) and value.__name__ not in inside:
                if not (_is_known(value.__name__) or _has_models(value.__name__)):
                    self._tell_names(names, vars(value), inside | {value.__name__})

    def _tell_ops(self, names: Iterable[str]) -> None:
        """Ops of one's own that are looked up by name, `torch.ops.mine.double`."""
        from torch._library.custom_ops import OPDEFS

        wanted = {*names}
        for told in sorted(OPDEFS):
            space, _, name = told.partition("::")
            if "ops" in wanted and space in wanted and name in wanted:
                self._tell(OPDEFS[told])

    def _tell_op(self, told: str) -> None:
        from torch._library.custom_ops import OPDEFS

        self._say(told)
        space, _, name = told.partition(".")
        self._tell(OPDEFS.get(f"{space}::{name.partition('.')[0]}"))

    def _file(self, path: str) -> str:
        if path not in self._files:
            self._files[path] = _file_hash(path)
        return self._files[path]


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in KNOWN and not f"{module}.".startswith(f"{_MODELS}.")


def _has_models(module: str) -> bool:
    return module == "fngraph" or f"{module}.".startswith(f"{_MODELS}.")


@functools.cache
def _models_hash() -> str:
    files = sorted((Path(__file__).parents[1] / "models").rglob("*.py"))
    return hashlib.sha256("".join(map(_file_hash, files)).encode()).hexdigest()


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
                if not _is_known(module) or _has_models(module):
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


def _file_hash(path: str | Path) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # typed in, or gone: the code itself is all that there is
        return "no file"
