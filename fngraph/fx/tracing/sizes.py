"""T and R as symbols, and a note of everything that the user's Python asks of them.

A graph serves every batch, so `if x.shape[0] > 5` is a question that a trace must not answer for
all of them by one example; `Guard` says for which batches the answer would be another one. Only
questions from outside torch count: torch asks many, whose answers do not change what it computes.

What a trace assumed of T and R, and for which batches that is not so.

What torch does otherwise for some sizes without asking: guards that a graph implies.

`x.squeeze(0)` drops a dim if T is 1, and `x[3]` is an error if T is less than 4; in a key, neither.
"""

from __future__ import annotations

import builtins
import dataclasses
import math
import operator
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import sympy
import torch
from torch import fx

from fngraph.core import Limits
from fngraph.core.where import is_user, user_line
from fngraph.errors import BranchError
from fngraph.fx.tracing.refusals import Refusals
from fngraph.torch_facts.names import OpOverload
from fngraph.torch_facts.tracing import (
    ConstantSource,
    DimDynamic,
    Mod,
    PythonMod,
    ShapeEnv,
    SymNode,
    in_forward_mode,
)

_CLAMPS = {"_compute_slice_index"}  # torch's own, but x[:n] is as long as the answer


class Sizes(ShapeEnv):
    """Torch's environment of symbolic sizes, which notes the user's questions as guards.

    0 and 1 are not special (`specialize_zero_one=False`): torch would take `T == 1` to be false
    without a word. Examples are above one and differ, so that T and R never share a symbol.
    """

    def __init__(self, limits: Limits, taken: Sequence[int], refuse: Refusals) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        self.limits, self.refuse = limits, refuse
        self._fixed: set[Any] = set()
        self.guards_asked: dict[Guard, None] = {}
        examples = example_sizes(limits, taken)
        self.letters = {letter: self._symbol(letter, n) for letter, n in examples.items()}
        self.symbols = {size.node.expr: letter for letter, size in self.letters.items()}

    def _symbol(self, letter: str, example: int) -> Any:
        source = ConstantSource(letter)
        symbol = self.create_symbol(example, source, DimDynamic.DYNAMIC, constraint_dim=None)
        return torch.SymInt(_Node(symbol, self, int, example))

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Torch's own, with a look at who asks.

        Raises:
            BranchError: the user's Python asks something that not every batch answers alike.
        """
        known = getattr(orig_expr, "free_symbols", set()) <= self.symbols.keys()
        asked = known and orig_expr.free_symbols and _asked_outside_torch()
        if asked and isinstance(orig_expr, sympy.Expr):
            expr, value = lettered(orig_expr, self.symbols), self.example(orig_expr)
            self.refuse(fixed(expr, value, user_line()))
            return value  # torch would replace the symbol for good
        answer = super().evaluate_expr(orig_expr, *args, **kwargs)
        if known and isinstance(answer, float | sympy.Float) and orig_expr.free_symbols:
            # whoever asks for a float, the graph keeps the number: torch.tensor(x.shape[0] / 2)
            expr = lettered(orig_expr, self.symbols)
            self.refuse(fixed(expr, float(answer), user_line()))
        elif asked or (known and orig_expr.free_symbols and _asks_for_a_rest(orig_expr)):
            expr = lettered(orig_expr, self.symbols)
            self.ask(expr if answer else sympy.Not(expr), user_line())
        return answer

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        """Torch's own; where the trace is to go on, T and R stay symbols."""
        if self.refuse.go_on and a in self.symbols:
            letter, value = sympy.Symbol(self.symbols[a]), lettered(tgt, self.symbols)
            self.refuse(by_transform(user_line()) or fixed(letter, value, user_line()))
        else:
            super()._set_replacement(a, tgt, msg)

    def example(self, expr: Any) -> Any:
        """What an expression of torch's symbols is in the example."""
        sizes = {symbol: self.letters[letter].node.hint for symbol, letter in self.symbols.items()}
        return expr.xreplace({symbol: sympy.Integer(n) for symbol, n in sizes.items()})

    def ask(self, condition: Any, line: str) -> None:
        """Note that the trace holds only where `condition`, in T and R, does.

        Raises:
            BranchError: some batch within the limits does not fulfil it.
        """
        guard = Guard(condition, line)
        if guard not in self.guards_asked:
            with self.refuse.catching():
                guard.check(self.limits)
            self.guards_asked[guard] = None

    def check_fixed(self, line: str) -> None:
        """Refuse it if torch itself has fixed T or R (iteration does, and some jvps)."""
        for symbol, value in self.replacements.items():
            if symbol in self.symbols and symbol not in self._fixed:
                self._fixed.add(symbol)
                letter = sympy.Symbol(self.symbols[symbol])
                self.refuse(by_transform(line) or fixed(letter, value, line))

    def spell(self, text: str) -> str:
        """`text` with T and R for the names that torch has for them."""
        for symbol, letter in self.symbols.items():
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
                f"{user_line()}: forward {does} the number of {NOUNS[env.symbols[self._expr]]}, "
                "which differs from batch to batch. Use what all batches share: x.dtype, x.dim()"
            )
        )
        return True


_TEXT = {"str", "__str__", "__repr__", "_graph_repr", "__hash__", "is_nested_int"}


def lettered(expr: Any, symbols: Mapping[Any, str]) -> Any:
    """A sympy expression with T and R for torch's own symbols."""
    return expr.xreplace({symbol: sympy.Symbol(letter) for symbol, letter in symbols.items()})


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


NOUNS = {"T": "tokens", "R": "requests"}
_FUNCTIONS = {
    "FloorDiv": lambda a, b: a // b, "CleanDiv": lambda a, b: a // b, "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b, "Max": max, "Min": min, "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b, "FloatPow": pow, "PowByNatural": pow, "ToFloat": float,
    "TruncToInt": int, "FloorToInt": math.floor, "CeilToInt": math.ceil, "RoundToInt": round,
    "RoundDecimal": round, "TruncToFloat": math.trunc, "BitwiseFn_bitwise_and": operator.and_,
    "BitwiseFn_bitwise_or": operator.or_, "BitwiseFn_bitwise_xor": operator.xor,
    "LShift": operator.lshift, "RShift": operator.rshift, "Where": lambda c, a, b: a if c else b,
}  # fmt: skip
_FUNCTIONS |= {f"OpaqueUnaryFn_{name}": getattr(math, name) for name in dir(math)}


@dataclasses.dataclass(frozen=True)
class Guard:
    """A condition over T and R, and the user's line that asked for it."""

    condition: Any
    line: str

    def counterexample(self, limits: Limits) -> tuple[int, int] | None:
        """A batch (T, R) within `limits` for which the condition does not hold, or None."""
        holds = sympy.lambdify(sympy.symbols("T R"), self.condition, modules=[_FUNCTIONS, math])
        letters = {symbol.name for symbol in self.condition.free_symbols}
        return next(((t, r) for t, r in _batches(limits, letters) if not holds(t, r)), None)

    def check(self, limits: Limits) -> None:
        """Raise unless the condition holds for every batch within `limits`.

        Raises:
            BranchError: with a batch for which it does not.
        """
        batch = self.counterexample(limits)
        if batch is not None:
            raise BranchError(
                f"{self.line}: Python in forward depends on the number of tokens or requests: the "
                f"trace took the way where {self.condition}, which is false for T={batch[0]}, "
                f"R={batch[1]}. Write one computation for every size (masks, torch.where), or "
                f"narrow {limits!r} to sizes for which it holds"
            )

    def __repr__(self) -> str:
        return f"{self.condition} ({self.line})"


def _batches(limits: Limits, letters: set[str]) -> Iterator[tuple[int, int]]:
    """Every batch within `limits` that differs in what the condition is about.

    For both letters at once that is up to max_tokens * max_reqs of them, some 0.3 us each.
    """
    tokens, reqs = range(1, limits.max_tokens + 1), range(1, limits.max_reqs + 1)
    if "R" not in letters:
        yield from ((t, 1) for t in tokens)
    elif "T" not in letters:
        yield from ((limits.max_tokens, r) for r in reqs if r <= limits.max_tokens)
    else:
        yield from ((t, r) for t in tokens for r in reqs if r <= t)


def fixed(expr: Any, value: Any, line: str) -> BranchError:
    """The error about an expression in T and R that became a number."""
    nouns = " and ".join(NOUNS.get(s.name, s.name) for s in expr.free_symbols)
    return BranchError(
        f"{line}: forward fixes the number of {nouns} at {expr} = {value} (int(x.shape[0]), "
        "range(x.shape[0]), torch.tensor(x.shape[0] / 2), ...). Keep sizes symbolic: "
        "torch.arange(x.shape[0], device=x.device); where a formula needs the count, take it from "
        "the device: batch.query_start_loc[-1]"
    )


def by_transform(line: str) -> BranchError | None:
    """The error if it is within jvp or vmap that a size became a number: torch's rules do that."""
    if in_forward_mode():
        return BranchError(
            f"{line}: torch's forward-mode derivative (torch.func.jvp, jacfwd, hessian) of an op "
            "here fixes the number of tokens or requests. Take it in reverse mode: "
            "torch.func.jacrev for jacfwd, and for jvp(f, (x,), (t,)): pull = torch.func.vjp(f, "
            "x)[1]; torch.func.vjp(lambda u: pull(u)[0], torch.zeros_like(f(x)))[1](t)[0]"
        )
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_flat_vmap":
        frame = frame.f_back
    if frame is None:
        return None
    return BranchError(
        f"{line}: torch's batching rule (torch.func.vmap, jacrev) of an op here fixes the "
        "number of tokens or requests. Loop over the samples if they are few, "
        "torch.stack([f(x) for x in xs]); or stage a plain tuple or dict of tensors in place "
        "of an fg.struct: its exact shapes are the key then, and no size is symbolic"
    )


_SQUEEZES = {"aten::squeeze", "aten::squeeze_"}


def implied(gm: fx.GraphModule, symbols: dict[Any, str]) -> Iterator[Guard]:
    """Conditions on T and R under which each op does what it did in the trace."""
    for node in gm.graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        name = node.target._schema.name
        if name in _SQUEEZES or name == "aten::select":
            x, *rest = node.args
            for size, least in _asked(name, list(x.meta["val"].shape), rest):
                if isinstance(size, torch.SymInt):
                    expr = lettered(size.node.expr, symbols)
                    holds = sympy.Ne(expr, 1) if least is None else expr >= least
                    yield Guard(holds, node.meta.get("stack_trace", "forward"))


def _asked(name: str, shape: list[Any], rest: list[Any]) -> list[tuple[Any, int | None]]:
    """Sizes and the least that each may be; None: anything but 1."""
    if name == "aten::select":
        dim, index = rest
        return [(shape[dim], index + 1 if index >= 0 else -index)]
    dims = range(len(shape)) if not rest else rest[0] if isinstance(rest[0], list) else rest
    return [(shape[d], None) for d in dims if shape]
