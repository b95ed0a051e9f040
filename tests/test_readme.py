"""The README's Python runs as it stands, block after block, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def test_the_readme_runs(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"3 \| +4 \| +1 \| FULL \| +1", printed), printed
    cache = names["cache"]
    assert isinstance(cache, torch.Tensor)
    # the step ran twice on the same cache: each slot holds its token's embedding twice
    embed = names["params"]["embed"]  # type: ignore[index]
    torch.testing.assert_close(cache[:3], 2 * embed[[1, 2, 3]])
    assert not cache[3:].any()
    assert names["loss"] < 1e-3  # type: ignore[operator]
    net, x = names["net"], names["x"]
    torch.testing.assert_close(names["y"], net(x).detach())  # type: ignore[operator]


def test_its_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
