"""The code of docs/instruments.md, from the first block to the last."""

from __future__ import annotations

import re
import warnings
from pathlib import Path


def test_its_code_runs(tmp_path: Path):
    text = (Path(__file__).parents[2] / "docs/instruments.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    path = tmp_path / "instruments.py"
    path.write_text("\n".join(blocks))
    import sys
    import types

    module = types.ModuleType("instruments")
    sys.modules["instruments"] = module  # annotations are looked up there
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(path.read_text(), str(path), "exec"), module.__dict__, None)
    finally:
        del sys.modules["instruments"]
