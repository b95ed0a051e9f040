"""Every notebook runs from top to bottom, and is committed without outputs larger than text."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.sampled("01_")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
# ipykernel and zmq warn of event loops of their own when the client starts a kernel
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_notebook_runs(path: Path) -> None:
    import nbformat  # here, so that -m gpu needs neither
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()  # raises with the cell's own traceback


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_text(path: Path) -> None:
    import nbformat

    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            kinds = set(output.get("data", {})) or {"text/plain"}
            assert kinds == {"text/plain"}, f"{path.name}: clear the outputs of its cells"


def test_there_are_notebooks() -> None:
    assert [p.stem for p in NOTEBOOKS][:1] == ["00_tour"]
