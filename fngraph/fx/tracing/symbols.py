"""T and R as symbols, and a note of everything that the user's Python asks of them.

A graph serves every batch, so `if x.shape[0] > 5` is a question that a trace must not answer for
all of them by one example. Only questions from outside torch count: torch asks many, whose answers
do not change what it computes.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch

from fngraph.core import Limits
from fngraph.core.where import is_user, user_line
from fngraph.errors import BranchError
from fngraph.fx.tracing.assumptions import NOUNS, Assumption, by_transform, lettered, size_fixed
from fngraph.fx.tracing.refusals import Refusals
from fngraph.torch_facts.names import tree_map
from fngraph.torch_facts.tracing import (
    ConstantSource,
    DimDynamic,
    DispatchKey,
    Mod,
    PythonMod,
    ShapeEnv,
    SLoc,
    SymNode,
)

aten = torch.ops.aten
_CLAMPS = {"_compute_slice_index"}  # torch's own, but x[:n] is as long as the answer
_TEXT = {"str", "__str__", "__repr__", "_graph_repr", "__hash__", "is_nested_int"}


class Symbols(ShapeEnv):
    """Torch's environment of symbolic sizes, which notes the user's questions as assumptions.

    0 and 1 are not special (`specialize_zero_one=False`): torch would take `T == 1` to be false
    without a word. Examples are above one and differ, so that T and R never share a symbol.

    Attributes:
        assumed: the answers that Python in `forward` got, in order.
        sizes: letter to the number that stands for it in the trace.
        letters: sympy symbol to letter, {s0: "T", s1: "R"}.
    """

    def __init__(self, limits: Limits, taken: Sequence[int], refuse: Refusals) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        self.limits, self._refuse = limits, weakref.ref(refuse)
        self._fixed: set[Any] = set()
        self.assumed: dict[Assumption, None] = {}
        examples = example_sizes(limits, taken)
        self.sizes = {letter: self._symbol(letter, n) for letter, n in examples.items()}
        self.letters = {size.node.expr: letter for letter, size in self.sizes.items()}

    @property
    def refuse(self) -> Refusals:
        """What keeps the trace's refusals; once the trace is gone, one that raises.

        It is held weakly. C++ holds this environment for each size of a fake, where the collector
        cannot see it: what it held would stay for good, an error with the frames of the caller too.
        """
        return self._refuse() or Refusals()

    def _symbol(self, letter: str, example: int) -> Any:
        source = ConstantSource(letter)
        symbol = self.create_symbol(example, source, DimDynamic.DYNAMIC, constraint_dim=None)
        return torch.SymInt(_Node(symbol, self, int, example))

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Torch's own, with a look at who asks.

        Raises:
            BranchError: the user's Python asks something that not every batch answers alike.
        """
        named: set[Any] = getattr(orig_expr, "free_symbols", set())
        known = named <= self.letters.keys()
        asked = known and named and _asked_outside_torch()
        if asked and isinstance(orig_expr, sympy.Expr):
            expr, value = lettered(orig_expr, self.letters), self.example(orig_expr)
            self.refuse(size_fixed(expr, value, user_line()))
            return value  # torch would replace the symbol for good
        answer = super().evaluate_expr(orig_expr, *args, **kwargs)
        if known and isinstance(answer, float | sympy.Float) and named:
            # whoever asks for a float, the graph keeps the number: torch.tensor(x.shape[0] / 2)
            expr = lettered(orig_expr, self.letters)
            self.refuse(size_fixed(expr, float(answer), user_line()))
        elif asked or (known and named and _asks_for_a_rest(orig_expr)):
            expr = lettered(orig_expr, self.letters)
            self.ask(expr if answer else sympy.Not(expr), user_line())
        return answer

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        """Torch's own; where the trace is to go on, T and R stay symbols."""
        if self.refuse.go_on and a in self.letters:
            letter, value = sympy.Symbol(self.letters[a]), lettered(tgt, self.letters)
            self.refuse(by_transform(user_line()) or size_fixed(letter, value, user_line()))
        else:
            super()._set_replacement(a, tgt, msg)

    def _get_stack_summary(
        self, is_debug: bool = False, framework_loc: str | None = None
    ) -> tuple[SLoc, str]:
        """Who asks, for torch's own messages: nobody is named. Torch walks the stack for it at each
        question, and loads `torch.export` to know its own files, a tenth of a trace. Ours have the
        user's line."""
        return SLoc(framework_loc, None), ""

    def example(self, expr: Any) -> Any:
        """What an expression of torch's symbols is in the example."""
        sizes = {symbol: self.sizes[letter].node.hint for symbol, letter in self.letters.items()}
        return expr.xreplace({symbol: sympy.Integer(n) for symbol, n in sizes.items()})

    def ask(self, condition: Any, line: str) -> None:
        """Note that the trace holds only where `condition`, in T and R, does.

        Raises:
            BranchError: some batch within the limits does not fulfil it.
        """
        assumption = Assumption(condition, line)
        if assumption not in self.assumed:
            with self.refuse.catching():
                assumption.check(self.limits)
            self.assumed[assumption] = None

    def check_fixed(self, line: str) -> None:
        """Refuse it if torch itself has fixed T or R (iteration does, and some jvps)."""
        for symbol, value in self.replacements.items():
            if symbol in self.letters and symbol not in self._fixed:
                self._fixed.add(symbol)
                letter = sympy.Symbol(self.letters[symbol])
                self.refuse(by_transform(line) or size_fixed(letter, value, line))

    def spell(self, text: str) -> str:
        """`text` with T and R for the names that torch has for them."""
        for symbol, letter in self.letters.items():
            text = re.sub(rf"\b{symbol}\b", letter, text)
        return text


class _Node(SymNode):
    """T or R as the user's Python finds it; its text and its hash would be the example's."""

    def str(self) -> builtins.str:
        if not self._refused("turns into text (str, f-string)"):
            return super().str()
        env: Any = self.shape_env
        return str(env.example(self._expr))

    def is_nested_int(self) -> bool:
        if sys._getframe(1).f_code.co_name == "__hash__":
            self._refused("hashes (dict key, set, lru_cache)")
        return super().is_nested_int()

    def _refused(self, does: builtins.str) -> bool:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_name in _TEXT:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None or not is_user(frame):
            return False
        env: Any = self.shape_env
        env.refuse(
            BranchError(
                f"{user_line()}: forward {does} the number of {NOUNS[env.letters[self._expr]]}, "
                "which differs from batch to batch. Use what all batches share: x.dtype, x.dim()"
            )
        )
        return True


def example_sizes(limits: Limits, taken: Sequence[int]) -> dict[str, int]:
    """T and R of the example: different, above one, no dim of a leaf, and within limits if any is.

    Within the limits, because beyond them Python may rightly go another way.
    """
    R = next((n for n in range(min(limits.max_reqs, 13), 1, -1) if n not in taken), None)
    T = next((n for n in range(min(limits.max_tokens, 31), 2, -1) if n not in {*taken, R}), None)
    if T is not None and R is not None and R < T:
        return {"T": T, "R": R}
    free = [n for n in (1009, 1013, 1019, 1021, 1031, 1033) if n not in taken]
    return {"T": T or free[1], "R": R if R and R < (T or free[1]) else min(2, T or 2)}


@functools.lru_cache(4096)  # torch asks the same of every op
def _asks_for_a_rest(expr: Any) -> bool:
    """Whether T or R are divisible by a number, by which torch's C++ cuts (tensor_split)."""
    rests = expr.atoms(Mod, PythonMod) if isinstance(expr, sympy.Basic) else ()
    return any(rest.args[0].free_symbols and rest.args[1].is_number for rest in rests)


def _asked_outside_torch() -> bool:
    """Whether SymBool.__bool__ or SymInt.__int__ was called by code that is not torch's."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.fx.experimental", "torch.utils._stats")
    ):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or frame.f_code.co_name in _CLAMPS:
        return frame is not None
    if frame.f_globals.get("__name__") != "torch":
        return False
    caller = frame.f_back
    name = "" if caller is None else caller.f_globals.get("__name__", "")
    return not name.startswith(("torch.", "fngraph.fx"))


@contextlib.contextmanager
def symbolic_zeros() -> Iterator[None]:
    """While it lasts, ops on forward-mode tangents that are zero keep T and R symbolic.

    What has no tangent gets a zero one that takes no memory, and torch's kernels for such tensors
    (in C++) fix every size that they see. These stand in for them.
    """
    for op, kernel in _KERNELS.items():
        op.py_kernels[DispatchKey.ZeroTensor] = kernel
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op in _KERNELS:
            op.py_kernels.pop(DispatchKey.ZeroTensor, None)
            op._dispatch_cache.clear()


def _is_zero(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x._is_zerotensor()


def _full(x: Any, value: int = 0) -> Any:
    return torch.full(x.shape, value, dtype=x.dtype, device=x.device)


def _product(a: Any, b: Any) -> Any:
    return aten.mul.Tensor(_full(a), _full(b))  # what is zero stays so: 0 * inf would be NaN


def _quotient(a: Any, b: Any) -> Any:
    return aten.div.Tensor(_full(a), _full(b, 0 if _is_zero(b) else 1))


def _given_memory(op: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op(*tree_map(lambda x: _full(x) if _is_zero(x) else x, args), **kwargs)

    return kernel


_LINEAR = (
    "add", "sub", "neg", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "where", "cat",
    "stack", "lerp", "masked_fill", "masked_scatter", "index_put", "index_add", "index_copy",
    "index_fill", "scatter", "scatter_add", "slice_scatter", "select_scatter", "diagonal_scatter",
    "clone", "_to_copy", "copy", "sum", "view", "_unsafe_view", "expand", "permute", "transpose",
    "t", "unsqueeze", "squeeze", "slice", "select", "index", "gather", "index_select", "embedding",
    "constant_pad_nd", "convolution", "flip", "roll", "repeat", "cumsum", "mean", "addcmul",
)  # fmt: skip
_KERNELS = {
    op: _given_memory(op)
    for name in _LINEAR
    for packet in (getattr(aten, name),)
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if not op._schema.is_mutable
} | {aten.mul.Tensor: _product, aten.div.Tensor: _quotient}
