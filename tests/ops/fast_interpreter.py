"""Triton's interpreter in half its time, by private names of Triton's, where they are there.

It is Python around numpy: a tile of 16 numbers takes as long as one of 1000, and most of that is
spent on types that are made anew for each value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def patch_once(interpreter: Any, core: Any, language: Any) -> None:
    """Each module of the language is made interpreted once a launch.

    Else each call of one kernel's function by another does so, which is a fifth of all the time.
    Those drop what `_patch_lang` returns; a launch, before which `load` is Triton's own builtin,
    uses it to undo the change.
    """
    plain = interpreter._patch_lang

    def patch(fn: Any) -> Any:
        seen = (x for x in fn.__globals__.values() if x is language or x is core)
        return plain(fn) if any(core.is_builtin(x.load) for x in seen) else None

    interpreter._patch_lang = patch


def remembered(plain: Callable[..., None], key_of: Callable[..., Any], own: tuple[str, ...]) -> Any:
    """`__init__` that gives objects of one key the attributes of the first, but for their own.

    Args:
        key_of: of the arguments.
        own: names of arguments that are attributes of each object, in the order of the arguments.
    """
    made: dict[Any, dict[str, Any]] = {}

    def init(self: Any, *args: Any) -> None:
        key = key_of(*args)
        if (known := made.get(key)) is not None:
            self.__dict__.update(known)
            self.__dict__.update(zip(own, args))
            return
        plain(self, *args)
        made[key] = {name: x for name, x in vars(self).items() if name not in own}

    return init


def _name(scalar: Any) -> tuple[Any, ...]:
    """A type of no shape, as what can be compared at once; that of a pointer has a space."""
    return type(scalar), scalar.name, getattr(scalar, "address_space", None)


def _block(element_ty: Any, shape: Any) -> Any:
    sizes = [n if type(n) is int else n.value for n in getattr(shape, "values", shape)]
    return _name(element_ty), tuple(sizes)


def _tensor(handle: Any, of: Any) -> Any:
    return _name(of.scalar), of.shape if of.is_block() else ()


def by_scalar(plain: Any) -> Any:
    """A type's numpy dtype, found once."""
    found: dict[Any, Any] = {}

    def dtype_of(of: Any) -> Any:
        if (key := _name(of.scalar)) not in found:
            found[key] = plain(of)
        return found[key]

    return dtype_of


def by_table(plain: Any) -> Any:
    """A float of 8 bits as a wider one: there are 256."""
    tables: dict[Any, Any] = {}

    def convert(x: Any, of: Any, to: Any, rounding: Any) -> Any:
        if of.primitive_bitwidth != 8 or x.itemsize != 1:
            return plain(x, of, to, rounding)
        if (key := (of.name, to.name, rounding)) not in tables:
            tables[key] = plain(np.arange(256, dtype=np.uint8), of, to, rounding)
        return tables[key][x.view(np.uint8)]

    return convert


def speed_up() -> None:
    """Do all that can be done."""
    from triton import language
    from triton.runtime import interpreter

    core: Any = language.core
    if hasattr(interpreter, "_patch_lang"):
        patch_once(interpreter, core, language)
    if hasattr(core, "block_type"):
        core.block_type.__init__ = remembered(core.block_type.__init__, _block, ())
    if hasattr(core, "tensor"):
        core.tensor.__init__ = remembered(core.tensor.__init__, _tensor, ("handle", "type"))
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = by_scalar(interpreter._get_np_dtype)
    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = by_table(interpreter._convert_float)
