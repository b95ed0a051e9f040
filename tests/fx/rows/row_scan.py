"""What becomes of each line of `row_ops.py` over padded rows: the same as without, or refused.

    python tests/fx/rows/row_scan.py                # writes docs/row_ops.md; minutes
    python tests/fx/rows/row_scan.py AvgPool        # prints those lines alone

Each line is traced; its facts are compared with what its ops do on batches as they are and in keys,
loud ones too (`differences`); then it runs on the tape, over T rows in keys of 8 and 16, and the
true rows are compared with the bare call's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path += [str(TESTS.parent), str(TESTS), str(TESTS / "fx" / "rows")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from row_ops import GROUPS  # noqa: E402
from rows_tried import differences, unlike  # noqa: E402
from rows_whole import LIMITS, batch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import fngraph as fg  # noqa: E402
from fngraph.core import trees  # noqa: E402
from fngraph.errors import FnGraphError  # noqa: E402
from fngraph.fx.tracing.refusals import Refusals  # noqa: E402

PAGE = TESTS.parent / "docs" / "row_ops.md"
CALLS = ((7, 3, None), (16, 6, None), (1, 1, None))
SAME = "same"


@dataclasses.dataclass(frozen=True)
class Case:
    """A line of a group.

    Attributes:
        shape: of a row of x.
    """

    group: str
    shape: tuple[int, ...]
    code: str

    @property
    def name(self) -> str:
        return f"{self.group}: {self.code}"


CASES = {
    case.name: case
    for group, (shape, lines) in GROUPS.items()
    for line in lines.strip().splitlines()
    for case in [Case(group, shape, line)]
}


def weights() -> Tensor:
    """(8, 8), none of which is 0."""
    return (torch.arange(64.0) * 7 % 13 - 6.5).view(8, 8) / 4


def values(shape: tuple[int, ...], b: Any, w: Tensor) -> dict[str, Any]:
    """The names that a line has."""
    times = math.prod(shape) // 8
    x = (b.x[:, :, None] * torch.arange(1.0, times + 1, device=w.device)).reshape(-1, *shape)
    given = {"x": x, "y": x.flip(-1) + 0.5, "ids": b.ids, "row": b.y, "real": b.slot >= 0, "w": w}
    return given | {"one": w.new_ones(())}


def forward_of(case: Case) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """`forward(params, batch)` of a line, and its params."""
    make, _, takes = case.code.partition(" | ")
    held: dict[str, Any] = {"w": weights()}
    modules = {"torch": torch, "F": F, "nn": nn, "f8": torch.float8_e4m3fn}
    module = None
    if make.startswith("nn."):
        torch.manual_seed(0)
        module = eval(make, modules)
        module.train("train" in make)
        call, held["params"], held["buffers"] = fg.from_module(module)
    code = make if module is None else f"call({takes or 'x'})"
    line = eval(f"lambda x, y, ids, row, real, w, one, call: {code}", modules)

    def forward(p: Any, b: Any) -> Any:
        bound = None if module is None else functools.partial(call, p["params"], p["buffers"])
        made = line(**values(case.shape, b, p["w"]), call=bound)
        return trees.map_leaves(lambda x: x.clone() if isinstance(x, Tensor) else x, made)

    return forward, held


def verdict(case: Case) -> str:
    """ "same", or why it is refused.

    Raises:
        AssertionError: a fact does not hold, or true rows differ.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _verdict(case)


def _verdict(case: Case) -> str:
    forward, held = forward_of(case)
    with torch.no_grad():
        forward(held, batch(*CALLS[0]))  # runs at all

    def look(args: Any, limits: Any, graph: Any, facts: Any) -> None:
        for found in differences(args, held, {}, graph.gm, facts):
            raise AssertionError(f"{case.name}: {found}")

    generators = (torch.default_generator,)
    fast = fg.graphify(
        forward, stage=1, limits=LIMITS, modes="FULL", sizes=(8, 16), recorder="tape",
        generators=generators,
    )  # fmt: skip
    try:
        traced = fast.trace_call((held, batch(*CALLS[0])), Refusals(), look)
        step = traced.split().lower().compile().capture(held, recorder="tape", lazy=True)
    except FnGraphError as error:
        return told(error)
    for sizes in CALLS:
        b = batch(*sizes)
        with torch.no_grad():
            want = forward(held, b)
        assert not (differs := unlike(step(b), want)), f"{case.name}: {differs}"
    return SAME


def told(error: FnGraphError) -> str:
    """A refusal in short: its class, and the first words."""
    text = re.sub(r"^\S+:\d+: (forward )?", "", str(error))
    short = re.split(r"[,.:;] | \(", text)[0]
    return f"{type(error).__name__}: {short}"


def verdicts(names: Iterator[str]) -> Iterator[tuple[Case, str]]:
    for name in names:
        yield CASES[name], verdict(CASES[name])


def row(case: Case, said: str) -> str:
    """A line of the page's tables."""
    code = case.code.replace(" | ", ": ").replace("|", "\\|")
    said = said.replace("][", "]\\[")  # which Markdown would take for a link
    return f"| `{code}` | {said} |"


HEAD = """# Operations over rows

What people's modules call, with T rows of tokens in front and features behind, padded to a key.
"same": the true rows are those of the bare call. Else the error; its whole text says why, and what
to write instead. Where no rule can know and you do, `fg.trust_rows` around the result says so.

`python tests/fx/rows/row_scan.py` writes this page: it traces each line, checks what is claimed of
each value in it, with NaN and infinities in padding and elsewhere, runs it on the tape in keys of 8
and 16 tokens, and compares. `tests/fx/rows/test_row_ops.py` holds each line to it.

`x` has the shape that the heading says and `y` is another of that shape; `ids`, `row` and `real`
are (T,) of integers, floats and bools (false in padding), `w` (8, 8) weights, `one` a scale, `f8` a
dtype. Behind a colon is what a module is called with, if not `x` alone.
"""


def page(found: list[tuple[Case, str]]) -> str:
    """The whole page."""
    parts = [HEAD]
    within = [said for case, said in found if case.group != "along"]
    same = within.count(SAME)
    parts.append(
        f"Of {len(within)} lines that compute within rows {same} are the same, "
        f"{len(within) - same} are refused. What computes over T itself is the last table.\n"
    )
    for group, (shape, _) in GROUPS.items():
        title = "Over T" if group == "along" else group.capitalize()
        dims = ", ".join(map(str, ("T", *shape)))
        lines = [row(case, said) for case, said in found if case.group == group]
        parts.append(f"## {title}: ({dims})\n\n| | |\n|---|---|\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def main(picked: list[str]) -> None:
    names = [name for name in CASES if not picked or any(text in name for text in picked)]
    found = []
    for case, said in verdicts(iter(names)):
        found.append((case, said))
        if picked:
            print(f"{case.name}: {said}", flush=True)
    if not picked:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])
