"""What a primitive's arguments look like: checked where it is called, so never in a captured graph.

Letters are sizes, as in the public docstrings: one that comes twice is the same number. A size that
is a symbol while a graph is traced (T, R) is compared with nothing, which would be a question.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from fngraph.core.where import user_line
from fngraph.errors import TreeError

WHOLE = (torch.int32, torch.int64)
MOST_KINDS = 1024  # of arguments that are known to fit
CACHE = "num_blocks block_size K D"
QKV = {"q_THD": "T H D", "k_TKD": "T K D", "v_TKD": "T K D", "kv[0]": CACHE, "kv[1]": CACHE}
PAGED = {
    "batch.slot_mapping": "T", "batch.seq_lens": "R", "batch.query_start_loc": "R+1",
    "batch.block_tables": "R B",
}  # fmt: skip
STATES = {"batch.state_slots": "R", "batch.seq_lens": "R", "batch.query_start_loc": "R+1"}


class Shapes:
    """The tensors of a primitive by name, in order, each with its letters: {"q": "T H D", ...}.

    Those named `batch.`, or in `whole`, hold whole numbers. `shared`: two letters, of which the
    first is a multiple of the second.
    """

    def __init__(
        self, primitive: str, letters: Mapping[str, str], shared: tuple[str, str] | None = None,
        whole: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.primitive, self.shared = primitive, shared
        self.whole = {name for name in letters if name.startswith("batch.")} | set(whole)
        self._passed: dict[Any, dict[str, int]] = {}  # by what bare `forward` passes at each call
        self.leaves = [
            (name, _dims(text), WHOLE if name in self.whole else None)
            for name, text in letters.items()
        ]

    def check(self, *tensors: Any) -> dict[str, int]:
        """The size of each letter that is a number.

        Raises:
            TreeError: an argument does not fit.
        """
        try:
            kinds = tuple([(type(x), x.shape, x.dtype) for x in tensors])
            passed = self._passed.get(kinds)
        except (AttributeError, TypeError):  # no tensor; a symbol, which has no hash
            return self._check(tensors)
        if passed is None:
            if len(self._passed) >= MOST_KINDS:
                self._passed.clear()
            passed = self._passed[kinds] = self._check(tensors)
        return passed.copy()

    def _check(self, tensors: tuple[Any, ...]) -> dict[str, int]:
        sizes = {"1": 1}
        for (name, dims, dtypes), x in zip(self.leaves, tensors):
            if not isinstance(x, Tensor) or not _fits(x, dims, dtypes, sizes):
                self._refuse(name, dims, x, sizes)
        if self.shared is not None:
            many, few = (sizes.get(letter) for letter in self.shared)
            if many is not None and few is not None and (few == 0 or many % few):
                of, by = self.shared
                raise TreeError(
                    f"{self._where()}: {of}={many} is no multiple of {by}={few}; each of the {by} "
                    f"serves {of} // {by} of the {of}, in order"
                )
        return sizes

    def also(self, name: str, letters: str, x: Any, sizes: dict[str, int]) -> None:
        """Check one more, which is left out of most calls; `sizes` are those of `check`."""
        dims = _dims(letters)
        if not isinstance(x, Tensor) or not _fits(x, dims, None, sizes):
            self._refuse(name, dims, x, sizes)

    def pair(self, name: str, kv: Any) -> tuple[Any, Any]:
        """The two tensors of a cache.

        Raises:
            TreeError: it is something else.
        """
        try:
            k_cache, v_cache = [kv] if isinstance(kv, Tensor) else kv
        except (TypeError, ValueError):
            got = _shown(kv)
        else:
            dtypes = [getattr(x, "dtype", None) for x in (k_cache, v_cache)]
            if dtypes[0] is dtypes[1]:
                return k_cache, v_cache
            got = f"of {dtypes[0]} and {dtypes[1]}"
        raise TreeError(
            f"{self._where()}: {name} is {got}, expected a pair of tensors of one dtype, "
            f"{name}=(k_cache, v_cache)"
        )

    def number(self, name: str, value: Any, kind: type) -> None:
        """Check a number of Python's, of `kind` int or float.

        Raises:
            TreeError: it is something else.
        """
        if type(value) is not kind and not _is(value, kind):
            raise TreeError(
                f"{self._where()}: {name}={value!r} is of {type(value).__name__}, "
                f"expected {kind.__name__}"
            )

    def _refuse(self, name: str, dims: _Dims, x: Any, sizes: dict[str, int]) -> NoReturn:
        whole = "int32 or int64 " if name in self.whole else ""
        letters = [letter + (f" {more:+d}".replace("+", "+ ").replace("-", "- ") if more else "")
                   for letter, more in dims]  # fmt: skip
        comma = "," if len(dims) == 1 else ""
        known = [f"{x} = {sizes[x]}" for x, _ in dims if x in sizes and not x.isdigit()]
        where = f" with {', '.join(dict.fromkeys(known))}" if known else ""
        raise TreeError(
            f"{self._where()}: {name} is {_shown(x)}, expected a {whole}tensor of "
            f"({', '.join(letters)}{comma}){where}"
        )

    def _where(self) -> str:
        return f"{user_line()}: fg.ops.{self.primitive}"


_Dims = tuple[tuple[str, int], ...]


def _dims(letters: str) -> _Dims:
    """ "R+1 B" as (("R", 1), ("B", 0))."""
    found = re.findall(r"(\w+)([+-]\d)?", letters)
    return tuple((letter, int(more or 0)) for letter, more in found)


def _fits(
    x: Tensor, dims: _Dims, dtypes: tuple[torch.dtype, ...] | None, sizes: dict[str, int]
) -> bool:
    """Whether a tensor has these dims; `sizes` takes letters that are new."""
    shape = x.shape
    if len(shape) != len(dims) or (dtypes is not None and x.dtype not in dtypes):
        return False
    for (letter, more), size in zip(dims, shape):
        if type(size) is int:  # else a symbol
            known = sizes.get(letter)
            if known is None:
                sizes[letter] = size - more
            elif known != size - more:
                return False
    return True


def _is(value: Any, kind: type) -> bool:
    """Whether it will do as one, numpy's and symbols included."""
    kinds = (Integral, torch.SymInt) if kind is int else (Real, torch.SymInt, torch.SymFloat)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _shown(x: Any) -> str:
    if not isinstance(x, Tensor):
        return f"{x!r:.60} of {type(x).__name__}"
    return f"a tensor {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
