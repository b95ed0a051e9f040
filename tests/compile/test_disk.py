"""Artefacts on disk: whole or not there, whoever else writes, is killed or damages them. No torch
here: two processes that write at once take a tenth of a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fngraph.compile.disk import MAGIC, MOST_BYTES, STALE_S, Disk, Kept, disk_of

ROOT = Path(__file__).parents[2]
KEPT = Kept({"piece": "x", "torch": "2"}, b"code" * 1000)
A, B, C = "a" * 40, "b" * 40, "c" * 40


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "new" / "cache")


def in_new_python(code: str, *args: object, **more: Any) -> subprocess.Popen[str]:
    told = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(told, cwd=ROOT, text=True, **more)


def rewritten(disk: Disk, change: bytes | None = None, at: int = 0) -> None:
    data = bytearray(disk.path(A).read_bytes())
    data[at] ^= 1
    disk.path(A).write_bytes(bytes(data) if change is None else change)


def test_what_is_kept_is_found_with_its_facts(disk: Disk):
    assert disk.read(A) is None and disk.entries() == [] and disk.clear() == 0
    assert disk.write(A, KEPT) is None
    assert disk.read(A) == KEPT and disk.read(B) is None
    (entry,) = disk.entries()
    assert (entry.digest, entry.facts) == (A, KEPT.facts) and entry.nbytes > 4000
    assert disk.folder.stat().st_mode & 0o777 == 0o700
    assert disk.clear() == 1 and disk.read(A) is None


SIZE = len(MAGIC) + 32 + 8


@pytest.mark.parametrize("at", [0, len(MAGIC), len(MAGIC) + 33, SIZE, SIZE + 60, -1])
def test_a_flipped_bit_is_never_used(disk: Disk, at: int):
    disk.write(A, KEPT)
    rewritten(disk, at=at)
    assert [entry.facts for entry in disk.entries()] == [None]
    with pytest.warns(RuntimeWarning, match=rf"{A}.* is not used: .* It is compiled anew"):
        assert disk.read(A) is None
    assert disk.read(A) is None  # and gone, without another warning
    assert disk.write(A, KEPT) is None and disk.read(A) == KEPT


@pytest.mark.parametrize("data", [b"", MAGIC, MAGIC + bytes(32), MAGIC[:5]])
def test_a_part_of_a_file_is_never_used(disk: Disk, data: bytes):
    disk.write(A, KEPT)
    rewritten(disk, data)
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert disk.read(A) is None


def test_an_artefact_under_another_s_name_is_never_used(disk: Disk):
    disk.write(A, KEPT)
    disk.path(A).rename(disk.path(B))
    with pytest.warns(RuntimeWarning, match=f"the artefact of another key, {A}"):
        assert disk.read(B) is None


WRITES = """
import sys
from pathlib import Path
from fngraph.compile.disk import Disk, Kept
disk, times = Disk(Path(sys.argv[1])), int(sys.argv[3])
for i in range(times):
    assert disk.write(sys.argv[2], Kept({}, sys.argv[4].encode() * 200_000)) is None
"""


def test_of_two_writers_each_leaves_a_whole_file(disk: Disk):
    disk.write(A, Kept({}, b"0" * 200_000))
    writers = [in_new_python(WRITES, disk.folder, A, 60, who) for who in (1, 2)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        kept = disk.read(A)
        assert kept is not None and len(set(kept.body)) == 1 and len(kept.body) == 200_000
        seen.add(kept.body[:1])
    assert [writer.wait() for writer in writers] == [0, 0]
    assert {b"1", b"2"} & seen and [p.name for p in disk.folder.iterdir()] == [disk.path(A).name]


STOPS = """
import os, sys, time
from pathlib import Path
from fngraph.compile.disk import Disk, Kept
os.fsync = lambda file: (print("written", flush=True), time.sleep(60))
Disk(Path(sys.argv[1])).write(sys.argv[2], Kept({}, b"half"))
"""


def test_a_writer_that_is_killed_leaves_nothing_that_is_read(disk: Disk):
    with in_new_python(STOPS, disk.folder, A, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "written\n"
        writer.send_signal(signal.SIGKILL)
    (left,) = disk.folder.iterdir()
    assert left.suffix == ".part" and disk.read(A) is None and disk.entries() == []
    assert disk.write(A, KEPT) is None and disk.read(A) == KEPT and left.exists()
    os.utime(left, (0, time.time() - STALE_S - 1))
    disk.write(B, KEPT)
    assert not left.exists() and disk.read(A) == KEPT


def test_what_was_used_least_recently_goes_first(disk: Disk):
    size = 4200
    small = Disk(disk.folder, most=2 * size)
    for i, digest in enumerate((A, B)):
        small.write(digest, KEPT)
        os.utime(small.path(digest), (i, i))
    assert small.read(A) == KEPT  # so B is now the one that was used least recently
    small.write(C, KEPT)
    assert {entry.digest for entry in small.entries()} == {A, C}
    assert "more than the 8400" in str(small.write(B, Kept({}, bytes(9000))))
    assert {entry.digest for entry in small.entries()} == {A, C}
    tiny = Disk(disk.folder, most=size)
    tiny.write(B, KEPT)
    assert [entry.digest for entry in tiny.entries()] == [B]


def test_entries_come_by_use_and_what_was_just_written_stays_whatever_clocks_say(disk: Disk):
    for used, digest in enumerate((B, A, C)):
        disk.write(digest, KEPT)
        os.utime(disk.path(digest), (used, used))
    assert [entry.digest for entry in disk.entries()] == [C, A, B]
    ahead = time.time() + 3600  # another machine's, that shares the folder
    os.utime(disk.path(A), (ahead, ahead))
    Disk(disk.folder, most=4200).write(B, KEPT)
    assert [entry.digest for entry in disk.entries()] == [B]


def test_the_nearest_is_of_the_same_piece_and_range_and_differs_least(disk: Disk):
    asked = {"piece": "x", "range": "1-4", "torch": "2", "device": "cpu", "threads": "1"}
    assert disk.nearest(asked) is None
    disk.write(A, Kept(asked | {"torch": "1", "device": "cuda", "threads": "8"}, b""))
    disk.write(B, Kept(asked | {"torch": "1", "threads": "8"}, b""))
    disk.write(C, Kept(asked | {"range": "5-8"}, b""))
    assert disk.nearest(asked) == (B, ["threads (1; there 8)", "torch (2; there 1)"])
    assert disk.nearest(asked | {"piece": "y"}) is None


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_only_be_read_serves(disk: Disk):
    disk.write(A, KEPT)
    disk.folder.chmod(0o500)
    try:
        _read_only(disk)
    finally:
        disk.folder.chmod(0o700)


def _read_only(disk: Disk) -> None:
    assert disk.read(A) == KEPT
    assert "cannot be written" in str(disk.write(B, KEPT))
    assert disk.read(B) is None and [entry.digest for entry in disk.entries()] == [A]


def test_a_folder_in_which_nothing_can_be_made_is_said(disk: Disk, monkeypatch):
    """As above, for root too: what the file system refuses."""
    disk.write(A, KEPT)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("open", "unlink"):
        monkeypatch.setattr(Path, name, refuse if name == "unlink" else _only_reading)
    monkeypatch.setattr(os, "utime", refuse)
    _read_only(disk)


_OPEN = Path.open


def _only_reading(path: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
    if "r" not in mode:
        raise PermissionError(13, "Permission denied")
    return _OPEN(path, mode, *args, **kwargs)  # type: ignore[arg-type]


def test_a_folder_that_others_may_write_is_not_used(disk: Disk):
    disk.write(A, KEPT)
    disk.folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="anybody may write it, .* Set FNGRAPH_CACHE"):
        assert disk.read(A) is None
    with pytest.warns(RuntimeWarning):
        assert "is not used" in str(disk.write(B, KEPT))
    assert not disk.path(B).exists()


def test_a_folder_of_another_user_is_not_used(disk: Disk, monkeypatch):
    disk.write(A, KEPT)
    stat = Path.stat

    def another(path: Path, **options: Any) -> os.stat_result:
        status = list(stat(path, **options))
        status[4] = os.getuid() + 1
        return os.stat_result(status)

    monkeypatch.setattr(Path, "stat", another)
    with pytest.warns(RuntimeWarning, match="is another user's, .* Set FNGRAPH_CACHE"):
        assert disk.read(A) is None


NO_WAY_IN = """
import os, sys, warnings
from pathlib import Path
from fngraph.compile.disk import Disk, Kept
if os.getuid() == 0:  # may go anywhere
    os.setuid(65534)
warnings.simplefilter("always")
disk = Disk(Path(sys.argv[1]))
print(disk.read("a" * 40), disk.nearest({}), disk.entries(), disk.clear())
print(disk.write("a" * 40, Kept({}, b"code")))
print(disk.why_unused())
"""


def test_a_folder_behind_one_that_may_not_be_entered_is_said(disk: Disk):
    """As the home of another user, in a container, is."""
    disk.write(A, KEPT)
    disk.folder.parent.chmod(0)
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        ran = in_new_python(NO_WAY_IN, disk.folder, **told)
        out, err = ran.communicate()
    finally:
        disk.folder.parent.chmod(0o700)
    assert ran.returncode == 0, err
    nothing, kept, why = out.splitlines()
    assert nothing == "None None [] 0"
    assert kept == f"{disk.folder} cannot be written: Permission denied"
    assert why.startswith(f"{disk.folder} cannot be read: Permission denied. Set FNGRAPH_CACHE to")
    assert err.count("RuntimeWarning: the cache ") == 1 and disk.read(A) == KEPT


def test_a_folder_that_goes_while_it_is_written_is_no_error(disk: Disk, monkeypatch):
    replace = Path.replace

    def gone(path: Path, to: Path) -> None:
        replace(path, to)
        for one in disk.folder.iterdir():
            one.unlink()
        disk.folder.rmdir()

    monkeypatch.setattr(Path, "replace", gone)
    assert disk.write(A, KEPT) is None and disk.read(A) is None


@pytest.mark.parametrize("off", ["", "0", "off", "OFF"])
def test_the_environment_may_ask_for_none(off: str):
    assert disk_of({"FNGRAPH_CACHE": off}) is None


def test_the_environment_says_where_and_how_much(tmp_path: Path):
    there = disk_of({"FNGRAPH_CACHE": str(tmp_path), "FNGRAPH_CACHE_BYTES": "7"})
    assert there == Disk(tmp_path, 7)
    users = disk_of({"XDG_CACHE_HOME": str(tmp_path)})
    assert users == Disk(tmp_path / "fngraph", MOST_BYTES)
    assert disk_of({}) == Disk(Path.home() / ".cache" / "fngraph", MOST_BYTES)
    with pytest.raises(ValueError, match="FNGRAPH_CACHE_BYTES='2 GB': a number of bytes"):
        disk_of({"FNGRAPH_CACHE_BYTES": "2 GB"})


def test_a_user_without_a_home_says_where(tmp_path: Path, monkeypatch):
    """As an id of a container that no file of users has."""

    def unknown(*args: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    assert disk_of({"FNGRAPH_CACHE": str(tmp_path)}) == Disk(tmp_path, MOST_BYTES)
    assert disk_of({"XDG_CACHE_HOME": str(tmp_path)}) == Disk(tmp_path / "fngraph", MOST_BYTES)
    with pytest.warns(RuntimeWarning, match="no home folder is known.* Set FNGRAPH_CACHE to a"):
        assert disk_of({}) is None
    monkeypatch.setattr(Path, "expanduser", unknown)
    with pytest.raises(ValueError, match="FNGRAPH_CACHE='~/x': no home folder is known"):
        disk_of({"FNGRAPH_CACHE": "~/x"})
