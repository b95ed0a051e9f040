"""`Disk`: artefacts kept in a folder, one file each, safe whoever else reads and writes there.

A file is named after the digest of all that its artefact depends on (`key.py`), and says that
digest and its own hash inside: what does not agree is damaged, and never used. It is written under
another name and renamed when it is whole, so that a reader finds all of it or none; of two writers
the later one wins, with the same artefact. Beyond a number of bytes the least recently used ones
go.

Artefacts are code. So a folder that another user owns, or that everybody may write, is not used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import stat
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fngraph.core.text import count

MAGIC = b"fngraph artefact 1\n"
MOST_BYTES = 4 << 30
STALE_S = 3600  # after which a file that is still being written has lost its writer
OFF = ("", "0", "off")
ABOUT = {"name", "holds", "ms", "kernels"}  # facts of what an artefact is; the others make its key
_SHORT = 60  # letters of a fact that is shown
_SUFFIX, _UNFINISHED = ".artefact", ".part"
_INSTEAD = 'Set FNGRAPH_CACHE to a folder of your own, or to "off"'


class Kept(NamedTuple):
    """What a file holds.

    Attributes:
        facts: what its artefact depends on, by name, and what it is.
        body: the artefact.
    """

    facts: Mapping[str, str]
    body: bytes


def difference(facts: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """What keys differ in, by name; short facts are shown, those of `others` last."""
    told = []
    for name in sorted((facts.keys() | others.keys()) - ABOUT):
        pair = facts.get(name, ""), others.get(name, "")
        if pair[0] != pair[1]:
            short = all(len(one) <= _SHORT and "\n" not in one for one in pair)
            shown = [one or "nothing" for one in pair]
            told.append(f"{name} ({shown[0]}; there {shown[1]})" if short else name)
    return told


def is_same_piece(facts: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Whether two are of one piece and range of sizes, whatever else their keys say."""
    return all(facts.get(name) == others.get(name) for name in ("piece", "range"))


class Entry(NamedTuple):
    """A file of the folder.

    Attributes:
        used: when it was last read or written, in seconds since the epoch.
        facts: see `Kept`; None: it is damaged.
    """

    digest: str
    nbytes: int
    used: float
    facts: Mapping[str, str] | None


@dataclasses.dataclass(frozen=True)
class Disk:
    """A folder of artefacts.

    Attributes:
        most: bytes that all files may take together.
    """

    folder: Path
    most: int = MOST_BYTES

    def path(self, digest: str) -> Path:
        """Where an artefact is, or would be."""
        return self.folder / f"{digest}{_SUFFIX}"

    def read(self, digest: str) -> Kept | None:
        """An artefact that is whole, or None: it is not there, or damaged, which is warned of."""
        path = self.path(digest)
        if not self._is_ours():
            return None
        try:
            found = _parse(path.read_bytes(), digest)
        except FileNotFoundError:
            return None
        except OSError as error:
            found = str(error)
        if isinstance(found, str):
            self.discard(digest, found)
            return None
        try:
            os.utime(path)
        except OSError:  # a folder that can only be read: nothing goes from there either
            pass
        return found

    def discard(self, digest: str, why: str) -> None:
        """Warn of a file that cannot be used, and remove it if that can be done."""
        path = self.path(digest)
        warnings.warn(
            f"{path} is not used: {why}. It is compiled anew", RuntimeWarning, stacklevel=3
        )
        _remove(path)

    def write(self, digest: str, kept: Kept) -> str | None:
        """Keep an artefact; or why it is not kept."""
        data = _format(digest, kept)
        if len(data) > self.most:
            return f"its {len(data)} bytes are more than the {self.most} that the cache may take"
        unfinished = self.folder / f"{digest}.{os.getpid()}.{secrets.token_hex(4)}{_UNFINISHED}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_ours():
                return f"{self.folder} is not used"
            try:
                with unfinished.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())  # or the name may reach the disk before what it names
                unfinished.replace(self.path(digest))
            except BaseException:
                _remove(unfinished)
                raise
        except OSError as error:
            return f"{self.folder} cannot be written: {error.strerror or error}"
        self._shrink(digest)
        return None

    def entries(self) -> list[Entry]:
        """All files, the most recently used first."""
        found = []
        for path in self._files(_SUFFIX):
            try:
                status, parsed = path.stat(), _parse(path.read_bytes(), path.stem)
            except OSError:  # it has gone meanwhile
                continue
            facts = None if isinstance(parsed, str) else parsed.facts
            found.append(Entry(path.stem, status.st_size, status.st_mtime, facts))
        return sorted(found, key=lambda entry: -entry.used)

    def nearest(self, facts: Mapping[str, str]) -> tuple[str, list[str]] | None:
        """Of the same piece and range, the digest of what differs least from `facts`, and in what;
        None: there is none. For people: files are not checked."""
        found = []
        for path in self._files(_SUFFIX):
            try:
                with path.open("rb") as file:
                    file.seek(len(MAGIC) + 32)
                    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
                others = header["facts"]
                if is_same_piece(facts, others):
                    found.append((path.stem, difference(facts, others)))
            except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
                continue  # gone meanwhile, or damaged
        return min(found, key=lambda one: len(one[1]), default=None)

    def clear(self) -> int:
        """Remove all files, those of writers that are gone as well; how many artefacts."""
        gone = 0
        for path in self._files(_SUFFIX, _UNFINISHED):
            gone += _remove(path) and path.suffix == _SUFFIX
        return gone

    def _files(self, *suffixes: str) -> list[Path]:
        """Those of the folder that end so; none where it cannot be read, or has gone."""
        try:
            return [path for path in self.folder.iterdir() if path.suffix in suffixes]
        except OSError:
            return []

    def _shrink(self, newest: str) -> None:
        """Remove what was used least recently, till all is within the bound; and stale rests."""
        sizes: list[tuple[float, int, Path]] = []
        for path in self._files(_SUFFIX, _UNFINISHED):
            try:
                status = path.stat()
            except OSError:
                continue
            if path.suffix == _UNFINISHED and time.time() - status.st_mtime > STALE_S:
                _remove(path)
            elif path.suffix == _SUFFIX:
                sizes.append((status.st_mtime, status.st_size, path))
        left = sum(size for _, size, _ in sizes)
        for _, size, path in sorted(sizes):
            if left <= self.most:
                break
            if path.stem != newest:
                _remove(path)
                left -= size

    def _is_ours(self) -> bool:
        """Whether nobody else can have put code there; if not, that is warned of."""
        why = self.why_unused()
        if why is not None:
            warnings.warn(f"the cache {why}", RuntimeWarning, stacklevel=4)
        return why is None

    def why_unused(self) -> str | None:
        """Why nothing is read or kept there, with what to do; None: it is, or there is no folder
        yet."""
        try:
            status = self.folder.stat()
        except FileNotFoundError:
            return None
        except OSError as error:  # it is behind a folder that may not be entered, or a file
            return f"{self.folder} cannot be read: {error.strerror or error}. {_INSTEAD}"
        if not stat.S_ISDIR(status.st_mode):
            return f"{self.folder} is a file. {_INSTEAD}"
        if not hasattr(os, "getuid"):  # Windows has other means
            return None
        if status.st_uid in (os.getuid(), 0) and not status.st_mode & stat.S_IWOTH:
            return None
        return (
            f"{self.folder} is another user's, or anybody may write it, and what is in it would be "
            f"run: it is not used. {_INSTEAD}"
        )

    def __str__(self) -> str:
        entries = self.entries()
        nbytes = sum(entry.nbytes for entry in entries)
        return f"{self.folder}: {count(len(entries), 'artefact')}, {nbytes} of {self.most} bytes"


def disk_of(environment: Mapping[str, str]) -> Disk | None:
    """The cache that the environment asks for; None: none.

    `FNGRAPH_CACHE` is its folder, or "off"; without it, `fngraph` in the user's cache folder.
    `FNGRAPH_CACHE_BYTES` is its bound. A user who has no home has none, and is warned.

    Raises:
        ValueError: a bound that is no number, or a folder of a home that is not known.
    """
    place = environment.get("FNGRAPH_CACHE")
    if place is not None and place.lower() in OFF:
        return None
    most = environment.get("FNGRAPH_CACHE_BYTES") or str(MOST_BYTES)
    if not most.isdecimal():
        raise ValueError(
            f"FNGRAPH_CACHE_BYTES={most!r}: a number of bytes, as FNGRAPH_CACHE_BYTES={MOST_BYTES}"
        )
    try:
        if place:
            folder = Path(place).expanduser()
        else:
            folder = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fngraph"
    except RuntimeError as error:
        if place:
            raise ValueError(f"FNGRAPH_CACHE={place!r}: no home folder is known") from error
        told = f"compiled code is not kept: no home folder is known. {_INSTEAD}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        return None
    return Disk(folder.absolute(), int(most))


def _format(digest: str, kept: Kept) -> bytes:
    header = json.dumps({"digest": digest, "facts": dict(kept.facts)}).encode()
    rest = len(header).to_bytes(8, "little") + header + kept.body
    return MAGIC + hashlib.sha256(rest).digest() + rest


def _parse(data: bytes, digest: str) -> Kept | str:
    """What a file holds, or what is wrong with it."""
    if not data.startswith(MAGIC):
        return "it is no artefact of this version"
    start = len(MAGIC) + 32
    if hashlib.sha256(data[start:]).digest() != data[len(MAGIC) : start]:
        return "it is damaged: its bytes are not those that were written"
    size = int.from_bytes(data[start : start + 8], "little")
    header = json.loads(data[start + 8 : start + 8 + size])
    if header["digest"] != digest:
        return f"it is the artefact of another key, {header['digest']}"
    return Kept(header["facts"], data[start + 8 + size :])


def _remove(path: Path) -> bool:
    """Whether it was there and could be removed."""
    try:
        path.unlink()
    except OSError:
        return False
    return True
