"""What a fuzzer has reached of the rules on rows: kept and refused, options of ops, each refusal.

Looked at from outside: the one function that picks a rule is wrapped, and what is raised says its
line. Nothing of it is in the library.
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
from fngraph.fx.rows import check, rules
from fngraph.fx.rows.state import Kept, Mixes

FOLDER = Path(fngraph.fx.rows.__file__).parent
NO_RULE = "an op without a rule"
NEVER = {  # rules that say one thing alone, whatever they are asked
    ("running", "refused"): "a running sum never sees what lies behind it",
    ("lower", "refused"): "tril keeps rows of any matrix",
    ("in_order", "refused"): "a view that moves no dim keeps all",
}


def told(name: str, *parts: str) -> str:
    return "\t".join((name, *parts))


def look(reached: Counter[str]) -> Callable[[], None]:
    """Count what is reached from now on; what is returned ends it.

    Keys are lines of words with tabs between: "rule", its function, "kept" or "refused"; "op", its
    name, an option that was not left out; "line", a file, the line of a refusal.
    """
    plain_rule, plain_init = check.rule, Mixes.__init__

    def rule(call: Any) -> Kept:
        name = told("rule", rule_of(call))
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

    check.rule, Mixes.__init__ = rule, init  # type: ignore[method-assign]

    def end() -> None:
        check.rule, Mixes.__init__ = plain_rule, plain_init  # type: ignore[method-assign]

    return end


def rule_of(call: Any) -> str:
    """The name of the function that an op goes by."""
    target = call.node.target
    known = rules._RULES.get(call.name) if target.namespace == "aten" else None
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
    lines = [
        [f"{file}:{line}", str(reached[told("line", file, line)]), text]
        for (file, line), text in refusals().items()
    ]
    return [
        ("rules", ["rule", "kept", "refused", "padding known as"], shown),
        ("options of ops", ["op", "given other than left out"],
         [[op, ", ".join(names)] for op, names in options.items()]),
        ("refusals", ["where", "times", "text"], lines),
    ]  # fmt: skip
