"""Run notebooks and store them with what they print and draw.

    python -m tests.notebooks_run                 # all of them; or: make notebooks
    python -m tests.notebooks_run 01 05           # those whose names begin so

Outputs that differ from the stored ones in fractions alone, such as times, stay as they are, and so
does a picture of times (a cell with the tag `times`): a second run changes no file. Nothing of the
machine is kept: paths begin in the clone, and there are no times of cells and no version of Python.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.site.pages import ROOT, without_times

FOLDER = ROOT / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
CELL = re.compile(rf"{re.escape(tempfile.gettempdir())}/ipykernel_\d+/\d+\.py")  # a cell's own file
COLOR = re.compile(r"\x1b\[[\d;]*m")


def notebooks() -> list[Path]:
    """All notebooks, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Any:
    """A notebook as it is stored."""
    import nbformat  # here, so that `-m gpu` needs it not

    return nbformat.read(path, as_version=4)


def code_of(notebook: Any) -> list[Any]:
    """Its cells of code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def executed(path: Path) -> Any:
    """The notebook after a run of all its cells, in its folder, with nothing of this machine.

    Raises with a cell's own traceback.
    """
    from nbclient import NotebookClient

    notebook = read(path)
    for cell in code_of(notebook):
        cell["outputs"] = []
    resources = {"metadata": {"path": str(path.parent)}}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    client = NotebookClient(notebook, timeout=240, resources=resources, record_timing=False)
    client.execute(env=env)
    for i, cell in enumerate(code_of(notebook), 1):
        cell["execution_count"], cell["outputs"] = i, list(_merged(cell["outputs"]))
        for output in cell["outputs"]:
            _tidy(output, i)
    notebook["metadata"] = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return notebook


def shown(cell: Any) -> list[tuple[str, str]]:
    """What a cell shows, as (kind, text); of a picture and of HTML the kind alone."""
    found: list[tuple[str, str]] = []
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            found.append((output["name"], output["text"]))
        elif output["output_type"] == "error":
            found.append(("error", output["evalue"]))
        else:
            data = sorted(output["data"].items())
            found += [(kind, text if kind == "text/plain" else "") for kind, text in data]
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two cells show the same, but for times."""
    a, b = ([(k, without_times(t)) for k, t in shown(cell)] for cell in (one, other))
    return a == b


def kept(notebook: Any, stored: Any) -> Any:
    """The notebook with stored outputs wherever a run says nothing new."""
    before = {cell["source"]: cell for cell in code_of(stored) if cell["outputs"]}
    for cell in code_of(notebook):
        old = before.get(cell["source"])
        if old is not None and same(cell, old):
            drawn = [kind for kind, _ in shown(cell) if kind.startswith("image/")]
            if not drawn or "times" in cell["metadata"].get("tags", ()):
                cell["outputs"] = old["outputs"]
    return notebook


def aligned(text: str) -> str:
    """A text whose Markdown tables are as wide as what is in them."""
    return re.sub(r"(?m)(?:^\|.*\|$\n?)+", lambda found: _table(found[0]), text)


def _table(block: str) -> str:
    """One table."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
    cells = [[part.strip() for part in row] for row in rows]
    if len(rows) < 2 or len({len(row) for row in rows}) > 1:
        return block
    right = [rule.endswith(":") for rule in cells[1]]
    widths = [
        max(max(len(row[i]) for j, row in enumerate(cells) if j != 1), 3) for i in range(len(right))
    ]
    lines = [
        "| "
        + " | ".join(x.rjust(w) if r else x.ljust(w) for x, w, r in zip(row, widths, right))
        + " |"
        for row in cells
    ]
    rules = ["-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right)]
    lines[1] = "|" + "|".join(rules) + "|"
    return "\n".join(lines) + ("\n" if block.endswith("\n") else "")


def _merged(outputs: list[Any]) -> Iterator[Any]:
    """Writes to one stream as one: a kernel sends them as they come."""
    last: Any = None
    for output in outputs:
        is_text = output["output_type"] == "stream"
        if is_text and last is not None and last["name"] == output["name"]:
            last["text"] += output["text"]
            continue
        last = output if is_text else None
        yield output


def _tidy(output: Any, number: int) -> None:
    """An output without paths of this machine and colours of a terminal."""
    if output["output_type"] == "stream":
        output["text"] = _portable(output["text"])
        return
    output["metadata"] = {}
    if output["output_type"] == "execute_result":
        output["execution_count"] = number
    for kind, text in output.get("data", {}).items():
        if not kind.startswith("image/"):
            output["data"][kind] = _portable(text)


def _portable(text: str) -> str:
    new = CELL.sub("cell.py", COLOR.sub("", text).replace(f"{ROOT}/", ""))
    return new if new == text else aligned(new)


def main(names: list[str]) -> None:
    """Run and store those whose names begin with one of `names`; all without one."""
    import nbformat

    for path in notebooks():
        if not names or path.name.startswith(tuple(names)):
            print(path.name, flush=True)
            nbformat.write(kept(executed(path), read(path)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
