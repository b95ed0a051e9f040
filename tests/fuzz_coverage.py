"""What a fuzzer has reached of the rules on rows: kept and refused, options of ops, each refusal,
and for each op which marks of its operands have given which mark of its result.

Looked at from outside: the functions that pick a rule and that note a fact are wrapped, and what is
raised says its line. Nothing of it is in the library.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fngraph.fx.rows
from fngraph.fx.nodes import is_op, is_tensor, operands
from fngraph.fx.rows import check, rules
from fngraph.fx.rows.bounds import ANY
from fngraph.fx.rows.state import (
    BEYOND,
    FINITE,
    OFFSETS,
    VANISHING,
    Kept,
    Mixed,
    Mixes,
    moving_dims,
)
from fngraph.fx.schemas import plain_name

FOLDER = Path(fngraph.fx.rows.__file__).parent
NO_RULE = "an op without a rule"
NEVER = {  # rules that say one thing alone, whatever they are asked
    ("running", "refused"): "a running sum never sees what lies behind it",
    ("lower", "refused"): "tril keeps rows of any matrix",
    ("in_order", "refused"): "a view that moves no dim keeps all",
}


NAMES = {"OFFSETS": OFFSETS, "FINITE": FINITE, "VANISHING": VANISHING, "BEYOND": BEYOND}
UNMOVED = ("constant", "held", "still")
GIVEN = ("tensor", "unknown", *UNMOVED, *NAMES.values())
"""Marks of a value: what its padding holds; of one without rows for T or R, what is known of it."""


def told(name: str, *parts: str) -> str:
    return "\t".join((name, *parts))


def look(reached: Counter[str]) -> Callable[[], None]:
    """Count what is reached from now on; what is returned ends it.

    Keys are lines of words with tabs between: "rule", its function, "kept" or "refused"; "op", its
    name, an option that was not left out; "line", a file, the line of a refusal; "fact", an op, its
    rule, the marks of an operand and of the result.
    """
    plain_rule, plain_init, plain_result = check.rule, Mixes.__init__, check._result

    def rule(call: Any) -> Kept:
        name = told("rule", rule_of(call.node))
        for option in options_of(call):
            reached[told("op", call.name, option)] += 1
        try:
            kept = plain_rule(call)
        except Mixes:
            reached[told(name, "refused")] += 1
            raise
        reached[told(name, "kept")] += 1
        for fill in kept.fills.values():
            reached[told(name, fill if isinstance(fill, str) else "a number")] += 1
        return kept

    def init(self: Mixes, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        frame = sys._getframe(1)
        reached[told("line", Path(frame.f_code.co_filename).name, str(frame.f_lineno))] += 1

    def result(node: Any, states: Any, *args: Any) -> Any:
        found = plain_result(node, states, *args)
        if is_op(node) and is_tensor(node):
            name = told("fact", plain_name(node.target), rule_of(node))
            for given in {marks(x, states[x]) for x in operands(node)} or {"nothing"}:
                reached[told(name, given, marks(node, found))] += 1
        return found

    check.rule, Mixes.__init__, check._result = rule, init, result  # type: ignore[method-assign]

    def end() -> None:
        Mixes.__init__ = plain_init  # type: ignore[method-assign]
        check.rule, check._result = plain_rule, plain_result

    return end


def marks(x: Any, state: Any) -> str:
    """What is known of a value, in words: "offsets", "tensor bounded", "unknown held"."""
    if isinstance(state, Mixed):
        return "mixed"
    moving = moving_dims(x)
    fills = [state.fills.get(d) for d in moving]
    words = sorted({f if isinstance(f, str) else "tensor" if f is not None else "unknown"
                    for f in fills})  # fmt: skip
    if not moving:
        words = ["constant" if state.value is not None else "held" if state.held else "still"]
    if moving and state.held:
        words.append("held")
    if state.span == ANY:
        words.append("vouched for")
    elif state.span is not None:
        words.append("bounded")
    return " ".join(words)


def rule_of(node: Any) -> str:
    """The name of the function that an op goes by."""
    target = node.target
    known = rules._RULES.get(plain_name(target)) if target.namespace == "aten" else None
    if known is not None:
        return str(known.__name__)
    if target.namespace == "fngraph":
        return "a primitive"
    return "pointwise" if torch.Tag.pointwise in target.tags else NO_RULE


def options_of(call: Any) -> list[str]:
    """The arguments that are not what the schema says of those left out; [""] if all are."""
    found = [
        a.name
        for a in call.node.target._schema.arguments
        if a.has_default_value() and not _same(call.args.get(a.name), a.default_value)
    ]
    return found or [""]


def _same(given: Any, default: Any) -> bool:
    return given is default or (type(given) is type(default) and given == default)


def refusals() -> dict[tuple[str, str], str]:
    """Every place in a rule that refuses, as (file, line), with the start of its text."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                if ast.unparse(node.exc.func) == "Mixes":
                    text = ast.unparse(node.exc.args[0]).strip("f'\"")
                    found[path.name, str(node.exc.lineno)] = text[:60]
    return found


def verdicts() -> dict[str, set[str]]:
    """Each rule, with what it could say."""
    names = {str(fn.__name__) for fn in rules._RULES.values()} | {NO_RULE, "a primitive"}
    both = {"kept", "refused"}
    found = {name: {v for v in both if (name, v) not in NEVER} for name in sorted(names)}
    found["a primitive"] = {"kept"}
    return found


def unreached(reached: Counter[str]) -> list[str]:
    """What no program has come to, of rules and refusals."""
    rows = [
        f"rule {name}: never {verdict}"
        for name, wanted in verdicts().items()
        for verdict in sorted(wanted)
        if not reached[told("rule", name, verdict)]
    ]
    rows += [
        f"{file}:{line}: never refused: {text}"
        for (file, line), text in refusals().items()
        if not reached[told("line", file, line)]
    ]
    ops = {key.split("\t")[1] for key in reached if key.startswith("op\t")}
    missing = sorted(set(rules._RULES) - ops)
    return rows + (
        [f"ops with a rule that no program calls: {', '.join(missing)}"] if missing else []
    )


def unmet(reached: Counter[str]) -> dict[str, list[str]]:
    """By rule, pairs of marks, of an operand and of the result, that no op of it has met; the
    second is one that its code names."""
    met: dict[str, set[tuple[str, str]]] = {}
    for key in reached:
        if key.startswith("fact\t"):
            _, _, rule, given, gives = key.split("\t")
            pairs = met.setdefault(rule, set())
            words = ["unmoved" if b in UNMOVED else b for b in gives.split()]
            pairs.update((a, b) for a in given.split() for b in words)
    found = {}
    for fn in sorted(set(rules._RULES.values()), key=lambda fn: fn.__name__):
        gives = ("tensor", "unknown", "mixed", "unmoved", *(NAMES[n] for n in sorted(_named(fn))))
        pairs = met.get(fn.__name__, set())
        found[fn.__name__] = [f"{a} to {b}" for a in GIVEN for b in gives if (a, b) not in pairs]
    return found


def never(unmet: dict[str, list[str]]) -> list[str]:
    """Of those pairs the marks that a rule is never given, and those that it never gives."""
    lines = []
    for name, missing in unmet.items():
        pairs = {tuple(pair.split(" to ")) for pair in missing}
        gives = {b for _, b in pairs}
        never_given = [a for a in GIVEN if all((a, b) in pairs for b in gives)]
        never_gives = sorted(b for b in gives if all((a, b) in pairs for a in GIVEN))
        if never_given or never_gives:
            lines.append(
                f"rule {name}: never given {', '.join(never_given) or 'none'}, never gives "
                f"{', '.join(never_gives) or 'none'}"
            )
    return lines


def _named(fn: Any) -> set[str]:
    """The marks that a rule's code names, and those of what it calls of the rules' own files."""
    pending, seen, found = [fn], set(), set()
    while pending:
        fn = pending.pop()
        if fn in seen or not getattr(fn, "__module__", "").startswith(fngraph.fx.rows.__name__):
            continue
        seen.add(fn)
        found |= NAMES.keys() & set(fn.__code__.co_names)
        pending += [f for name in fn.__code__.co_names if callable(f := fn.__globals__.get(name))
                    and hasattr(f, "__code__")]  # fmt: skip
    return found


def tables(reached: Counter[str]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, head, rows) of what was reached."""
    shown = []
    for name in verdicts():
        of = {k.split("\t")[2]: n for k, n in reached.items() if k.startswith(f"rule\t{name}\t")}
        marks = ", ".join(sorted(of.keys() - {"kept", "refused"}))
        shown.append([name, str(of.get("kept", 0)), str(of.get("refused", 0)), marks])
    options: dict[str, list[str]] = {}
    for key in sorted(reached):
        if key.startswith("op\t"):
            _, op, option = key.split("\t")
            options.setdefault(op, []).extend([option] if option else [])
    pairs: dict[str, list[str]] = {}
    for key in sorted(reached):
        if key.startswith("fact\t"):
            _, op, _, given, gives = key.split("\t")
            pairs.setdefault(op, []).append(f"{given} to {gives}: {reached[key]}")
    lines = [
        [f"{file}:{line}", str(reached[told("line", file, line)]), text]
        for (file, line), text in refusals().items()
    ]
    return [
        ("rules", ["rule", "kept", "refused", "padding known as"], shown),
        ("options of ops", ["op", "given other than left out"],
         [[op, ", ".join(names)] for op, names in options.items()]),
        ("marks", ["op", "of an operand, to that of the result: times"],
         [[op, "\n".join(found)] for op, found in pairs.items()]),
        ("refusals", ["where", "times", "text"], lines),
    ]  # fmt: skip
