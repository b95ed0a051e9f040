"""`python -m fngraph env`: each line says what is here, and what is missing costs something."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.__main__ import main
from fngraph.errors import PackageError
from fngraph.graphs import addresses
from fngraph.ops.megakernel import image
from fngraph.report import env


def found(**environment: str) -> dict[str, env.Row]:
    return {row.what: row for row in env.rows(environment)}


def test_it_prints_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    for version in (fg.__version__, platform.python_version(), torch.__version__):
        assert version in printed
    assert importlib.metadata.version("rich") in printed


def test_how_bound_leaves_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """In C, by numpy, or one tensor after the other; which of them is not seen otherwise."""
    what = "a look at bound leaves"
    built = addresses._words is not None
    assert found()[what].here == ("compiled" if built else "by numpy")
    monkeypatch.setattr(addresses, "watched", addresses.watched_in_python)
    assert found()[what].here == "by numpy" and "C compiler" in found()[what].costs
    monkeypatch.setattr(env, "word_addresses", lambda x: None)
    assert found()[what].here == "tensor by tensor" and found()[what].costs


def test_a_version_of_triton_that_nobody_has_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="without it the line says that there is none")
    from fngraph.ops.triton import direct

    monkeypatch.setattr(direct, "was_seen", lambda: True)
    assert not found()["Triton"].costs
    monkeypatch.setattr(direct, "was_seen", lambda: False)
    assert "40 us, of 3.6.*" in found()["Triton"].costs


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if these were not installed."""
    version = importlib.metadata.version

    def other(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", other)


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "triton", "pytorch-triton", "triton-windows", "matplotlib", "rich")
    rows = found()
    assert rows["Triton"].here == "none" and "pip install triton" in rows["Triton"].costs
    assert rows["matplotlib"] == ("matplotlib", "none", "pip install 'fngraph[report]'")
    models = "pip install 'fngraph[models]' or pip install 'fngraph[report]'"
    assert rows["rich"] == ("rich", "none", models)


def test_where_compiled_code_is_kept(tmp_path: Path) -> None:
    what = "compiled code is kept"
    assert str(tmp_path) in found(FNGRAPH_CACHE=str(tmp_path))[what].here
    assert "each process" in found(FNGRAPH_CACHE="off")[what].costs
    assert "FNGRAPH_CACHE_BYTES" in found(FNGRAPH_CACHE_BYTES="many")[what].costs
    (tmp_path / "file").touch()
    assert found(FNGRAPH_CACHE=str(tmp_path / "file"))[what].here == "no"


def missing(*_: Any) -> Any:
    raise PackageError("pip install it")


def test_why_a_decoder_is_no_single_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NVIDIA" in env._launches(torch.device("cpu")).costs
    monkeypatch.setattr(env, "why_not_on", lambda device: None)
    monkeypatch.setattr(image, "version", lambda: "13.0")
    assert env._launches(torch.device("cpu"))[1:] == ("NVRTC 13.0", "")
    monkeypatch.setattr(image, "version", missing)
    assert env._launches(torch.device("cpu"))[1:] == ("no", "pip install it")
    monkeypatch.setattr(env, "driver_for", missing)
    assert env._nodes()[1:] == ("not to be seen", "pip install it")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    rows = found()
    assert torch.cuda.get_device_name(0) in rows["GPU 0"].here
    for what in ("a decoder in one launch", "nodes of CUDA graphs"):
        assert bool(rows[what].costs) == (rows[what].here in ("no", "not to be seen"))
