"""Every command that there is: its help, and mistakes in each of its words, told in a line.

Commands are found by themselves: modules of ours that run as `__main__`, and what they name as
first words. So are their flags, and what is no value of each.
"""

from __future__ import annotations

import argparse
import importlib
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fngraph as fg
from fngraph.__main__ import main as cache
from fngraph.models import command, demo, generate, train

ROOT = Path(__file__).parent.parent


def modules() -> list[str]:
    """The modules that are commands."""
    found = []
    for folder in ("fngraph", "models", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "__main__.py" or re.search(
                r'^if __name__ == "__m', path.read_text(), re.M
            ):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found.append(f"fngraph.{name}" if folder == "models" else name)
    return found


def main_of(module: str) -> Callable[[list[str]], int | None]:
    return importlib.import_module(module).main


class Helped(Exception):
    """A parser that was asked for help."""


def parsers(
    main: Callable[[list[str]], int | None], words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Each last parser of a command, with the words that lead to it."""

    def caught(self: argparse.ArgumentParser, file: object = None) -> None:
        raise Helped(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Helped) as helped:
        patch.setattr(argparse.ArgumentParser, "print_help", caught)
        main([*words, "--help"])
    parser = helped.value.args[0]
    named = [a for a in parser._actions if not a.option_strings and a.choices]
    if not named:
        yield words, parser
    for action in named:
        for choice in action.choices:
            yield from parsers(main, (*words, choice))


def ended(main: Callable[[list[str]], int | None], words: list[str]) -> int | None:
    """The status that a command ends with; another exception is a traceback."""
    try:
        return main(words)
    except SystemExit as stopped:
        return stopped.code


def wrong_values(action: argparse.Action) -> list[str]:
    """What the flag cannot be."""
    if action.type is str:
        return []
    if action.choices or action.type is None:
        return ["nonsense"]
    try:
        found = action.type("7")
    except (argparse.ArgumentTypeError, ValueError):
        found = None
    if isinstance(found, int):
        return ["nonsense", "-1", str(10**30)]
    if isinstance(found, float):
        return ["nonsense", "-1", "nan"]
    return [f"{__file__}/nonsense"]  # a path below a file is neither there nor can it be made


def test_commands_are_found():
    found = {"fngraph.__main__", "benchmarks.__main__"}
    found |= {f"fngraph.models.{name}" for name in ("demo", "generate", "train")}
    assert found <= set(modules())


@pytest.mark.parametrize("module", modules())
def test_help_is_no_mistake(module: str, capsys):
    main, name = main_of(module), f"python -m {module.removesuffix('.__main__')}"
    for words in [(), *(words for words, _ in parsers(main))]:
        assert ended(main, [*words, "--help"]) == 0, words
        assert f"usage: {' '.join([name, *words])}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("module", modules())
def test_a_mistake_is_told_in_a_line(module: str, capsys):
    main = main_of(module)
    for words, parser in parsers(main):
        quick = ["--quick"] if "--quick" in parser._option_string_actions else []
        first = ["some:word" for a in parser._actions if not a.option_strings]
        wrong = [(["--nonsense"], "", "--nonsense"), (["words"], "", "words")]
        for action in parser._actions:
            if action.option_strings and action.nargs != 0:
                flag = action.option_strings[0]
                wrong += [([f"{flag}={v}"], flag, v) for v in wrong_values(action)]
        for argv, flag, value in wrong:
            assert ended(main, [*words, *first, *quick, *argv]) == 2, (words, argv)
            told = capsys.readouterr().err.rstrip().splitlines()[-1]
            assert "error: " in told, told
            if "needs a device 'cuda'" not in told:  # it got no further here
                assert flag.lstrip("-") in told and value in told, (words, argv, told)


def generated(words: list[str], main=generate.main) -> int | None:
    return ended(main, ["--max-new", "12", "--max-tokens", "16", "--modes", "NONE", *words])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is heard: what a shell starts in the background is deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_the_texts_so_far(tmp_path: Path, capsys, monkeypatch):
    honest = generate.serve

    def interrupted(*args):
        for i, one in enumerate(honest(*args)):
            if i == 6:
                signal.raise_signal(signal.SIGINT)
            yield one

    (tmp_path / "prompts.txt").write_text("The\n")
    assert generated(["--prompts", str(tmp_path / "prompts.txt")]) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr(generate, "serve", interrupted)
    assert generated(["--prompts", str(tmp_path / "prompts.txt")]) == 130
    part = capsys.readouterr().out
    text = re.compile(r"^0 The => (.*)", re.M)
    found, full = text.search(part)[1], text.search(whole)[1]
    assert len(found) >= 5 and found != full and full.startswith(found)
    assert part.count("0 The =>") == 1 and "| padding |" in part


@pytest.mark.usefixtures("interruptible")
def test_a_command_that_ctrl_c_ends_has_no_traceback(capsys):
    def stopped(argv: list[str]) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    with pytest.raises(SystemExit) as status:
        command.run(stopped)
    assert status.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize(
    "main, words, told",
    [
        (generate.main, "--drafts 40 --max-tokens 32", "Pass at most 31, or --max-tokens 41"),
        (generate.main, "--max-new 1000000000", "1000000000 is more than 1048576"),
        (generate.main, "--max-tokens 100000", "100000 is more than 65536"),
        (generate.main, f"--checkpoint {__file__}", "is no safetensors file"),
        (generate.main, "--checkpoint tests", "tests is a folder; pass a file"),
        (generate.main, f"--prompts {train.BYTES}", "is no text in UTF-8"),
        (generate.main, f"--model {__file__}", "is a file; pass the folder it is in"),
        (generate.main, "--device meta", "'meta' has no memory; pass cpu"),
        (generate.main, "--tp 2", "wants 2 processes, and 1 is here. Start it with: torchrun"),
        (demo.main, "--tp 2", "wants 2 processes, and 1 is here. Start it with: torchrun"),
        (train.main, "--out tests", "tests is a folder; pass a file in it"),
        (train.main, f"--run {__file__}", "is a file; pass a folder"),
        (cache, "report tests/nowhere.json", "nowhere.json: No such file or directory"),
        (cache, "report tests/conftest.py", "conftest.py: this is not a log that step.log.save"),
        (cache, "cache warm nowhere:f", "there is no module 'nowhere'"),
        (cache, "cache warm json.nowhere:f", "there is no module 'json.nowhere'"),
        (cache, "cache warm json:nowhere", "json has no 'nowhere'"),
        (cache, "cache warm json:__name__", "json cannot be called: '__name__'"),
        (cache, "cache warm json:dumps", "missing a required argument: 'obj'. Name a function"),
        (cache, "cache warm :f", "expected MODULE:NAME"),
    ],
)
def test_what_goes_together_is_told(main, words: str, told: str, capsys):
    assert ended(main, words.split()) == 2
    assert told in capsys.readouterr().err.rstrip().splitlines()[-1]


@pytest.mark.parametrize("main", [demo.main, generate.main])
def test_a_model_that_processes_cannot_share_is_told_in_a_line(main, capsys, monkeypatch):
    three = fg.Mesh((fg.Axis("tp", 3, 0, "nobody"),))
    monkeypatch.setattr(fg, "make_mesh", lambda device, tp: three)
    assert ended(main, ["--tp", "3"]) == 2
    told = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert re.search(
        r"error: .*num_kv_heads is 2, which 3 processes along 'tp' cannot share; .*tp=1 or 2", told
    )
    monkeypatch.setenv("RANK", "1")  # the first tells it
    assert ended(main, ["--tp", "3"]) == 2 and capsys.readouterr().err == ""


def test_what_there_is_too_little_of_is_told(capsys, monkeypatch):
    monkeypatch.setattr(generate, "memory_of", lambda device: 10**9)
    assert ended(generate.main, ["--max-new", "200000", "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert re.search(r"blocks takes \d+\.\d GB, and there are 1\.0 GB. Lower --max-new", told)
    monkeypatch.setattr(train, "corpus", lambda: (b"a" * 90, b"b" * 40))
    assert ended(train.main, ["--context", "64"]) == 2
    assert "--context 64: the held-out text has 40 bytes" in capsys.readouterr().err


def test_a_module_that_fails_fails_as_itself(tmp_path: Path, monkeypatch):
    (tmp_path / "fails_at_import.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        cache(["cache", "warm", "fails_at_import:f"])
