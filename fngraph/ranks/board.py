"""A board of numbers that the processes of one host share: each writes its own row, all read all.

    board = fg.make_board(group, timeout_s=60)
    board.exchange([3, 0])                     # [[3, 0], [5, 1]], in both processes

An exchange over gloo goes through the kernel's sockets and wakes a thread, which takes 100 us and
more; over memory that both map it takes some microseconds. It is the agreement before each step.

Every word of 8 bytes has 32 bits of a number and the count of the exchange that it is of. So words
may become visible in any order, and no fence is needed: a reader waits until all of a row are of
its own exchange. Two slots take turns: who writes its third exchange has read the second of all,
and so all have read the first.

The first process may tell all others some bytes, as it does each batch that a team runs: it writes
them, and their length as its number, and each other one its own word when it has them. There is
room for one message, which lies there until all have it. Messages are counted by themselves: who
has heard one has not read the words of all, and may be ahead of them.

A process holds a lock on a byte of the file, which the kernel takes back when it ends, however it
does: so that those who wait are told. Who gives up waiting writes that it has, and takes part in
nothing more, as those who come late must not take its old word for an answer.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fngraph.core.text import expect
from fngraph.errors import AbsentError, RankError
from fngraph.torch_facts.names import gather_objects

SHARED = Path("/dev/shm")
"""Memory as files, of this host alone. Where there is none (macOS), there is no board."""
MOST = 8
"""Numbers that an exchange may have; each is of 63 bits, and not below 0."""
SLOT = 2 * MOST  # words
LEFT = 2 * SLOT  # the word that says from which exchange on a process takes part no more
HEARD = LEFT + 1  # two words of the last message: its length
LEFT_HEARD = HEARD + 2  # as LEFT, of messages
ROW = 3 * SLOT  # words of a process
TOKEN = 16  # bytes behind all rows, by which the file is known
TURNS = 0x7FFFFFFF  # counts of exchanges; then from 0 again
SPINS = 200  # looks before others may have the core: they come within some us if they run
YIELDING_S, LOOK_S = 1e-3, 0.01  # how long only that; how often it is looked whether one has ended
HEARING_S = 0.02  # how long only that for a message: a step of the device is often shorter


class Turn(NamedTuple):
    """An exchange, or a message.

    Attributes:
        number: its count, among those of its kind.
        at: where its words are, in the row of each process.
        left: where it is said from which one on a process takes part no more.
    """

    number: int
    at: int
    left: int

    @classmethod
    def exchange(cls, number: int) -> Turn:
        return cls(number & TURNS, (number & 1) * SLOT, LEFT)

    @classmethod
    def message(cls, number: int) -> Turn:
        return cls(number & TURNS, HEARD, LEFT_HEARD)


class Board:
    """A process's place at one. All of them call the same exchanges in the same order.

    Attributes:
        rank, size: its row, of so many.
        timeout_s: how long it waits for the others, in seconds.
        room: bytes that a message may have.

    Made by `make_board`, of a file that is open, and the board's from then on.
    """

    def __init__(self, file: int, rank: int, size: int, timeout_s: float, room: int = 0) -> None:
        import fcntl  # where there is SHARED there is it

        self.rank, self.size, self.timeout_s, self.room = rank, size, timeout_s, room
        self._file, self._lock = file, fcntl
        weakref.finalize(self, os.close, file)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        # of its own descriptor: closing any that this process has of the file gives up the lock
        mapped = mmap.mmap(file, _bytes(size, room))
        self._words = memoryview(mapped).cast("Q")
        whole = torch.frombuffer(mapped, dtype=torch.int64)
        self._message = whole[ROW * size :]  # a word for 4 bytes
        self._turn, self._heard = Turn.exchange(0), Turn.message(0)
        self._turns = threading.Lock()
        self._told = False  # and not all have it, as far as is known

    def __repr__(self) -> str:
        room = f", with room for {self.room} bytes" if self.room else ""
        return f"Board(process {self.rank} of {self.size}, waits {self.timeout_s:g} s{room})"

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Everybody's numbers, in the order of ranks; it waits.

        Args:
            numbers: 1 to 8, from 0 to 2**63 - 1; as many in each process.

        Raises:
            AbsentError: one has ended, has given up, or does not come within the timeout.
        """
        with self._turns:  # threads come one after the other, each whole
            self.put(numbers)
            return self.take(len(numbers))

    def put(self, numbers: Sequence[int]) -> None:
        """Begin an exchange: say one's own; `take` before the next one."""
        self._turn = Turn.exchange(self._turn.number + 1)
        self._say(self._turn, numbers)

    def _say(self, turn: Turn, numbers: Sequence[int]) -> None:
        tag, at = turn.number << 32, self.rank * ROW + turn.at
        words = self._words
        for number in numbers:
            words[at] = tag | number & 0xFFFFFFFF
            words[at + 1] = tag | number >> 32
            at += 2

    def take(self, count: int) -> list[list[int]]:
        """Everybody's numbers of the exchange that was begun, `count` each; see `exchange`."""
        return self._taken(self._turn, count, self.timeout_s)

    def _taken(self, turn: Turn, count: int, most_s: float) -> list[list[int]]:
        try:
            found = [self._row(turn, rank, 2 * count, most_s) for rank in range(self.size)]
            for rank in range(self.size):  # whose word is there, and who waits no longer
                self._check_takes_part(turn, rank)
            return found
        except BaseException:
            self._leave_in(turn)
            raise

    def tell(self, message: Tensor, within_s: float | None = None) -> bool:
        """Tell all others some bytes, by process 0 alone; whether there is room for them. Where
        there is none, the others are told that.

        Args:
            message: uint8, in one dim, on the CPU.
            within_s: how long it waits for those who do not have the last one; None: `timeout_s`.

        Raises:
            AbsentError: as `exchange`, of the last message.
        """
        if self._told:
            self.all_have_it(within_s)
        self._heard = Turn.message(self._heard.number + 1)
        fits = len(message) <= self.room
        if fits:
            tag = self._heard.number << 32
            filled = torch.zeros(-(-len(message) // 4), dtype=torch.int32)
            filled.view(torch.uint8)[: len(message)] = message
            words = filled.to(torch.int64).bitwise_and_(0xFFFFFFFF).bitwise_or_(tag)
            self._message[: len(words)] = words
        self._say(self._heard, [len(message)])
        self._told = True
        return fits

    def all_have_it(self, within_s: float | None = None) -> None:
        """Wait until all others have what was told last; see `tell`."""
        self._told = False
        self._taken(self._heard, 1, self.timeout_s if within_s is None else within_s)

    def hear(self) -> Tensor | None:
        """What process 0 tells, by all others; it waits. None: there was no room for it.

        Returns:
            uint8, in one dim; a copy.

        Raises:
            AbsentError: as `exchange`.
        """
        turn = self._heard = Turn.message(self._heard.number + 1)
        try:
            (length,) = self._row(turn, 0, 2, self.timeout_s, HEARING_S)
            self._check_takes_part(turn, 0)
            found = None
            if length <= self.room:
                words = self._message[: -(-length // 4)].clone()
                while not bool(words.bitwise_right_shift(32).eq(turn.number).all()):
                    self._check_takes_part(
                        turn, 0
                    )  # its number was visible before all of its bytes
                    words = self._message[: len(words)].clone()
                found = words.to(torch.int32).view(torch.uint8)[:length]
        except BaseException:
            self._leave_in(turn)
            raise
        self._say(turn, [length])
        return found

    def leave(self) -> None:
        """Take part in nothing more: who comes to an exchange with this process is told."""
        self._leave_from(Turn.exchange(self._turn.number + 1))
        self._leave_from(Turn.message(self._heard.number + 1))

    def absent(self) -> list[int]:
        """Those that come no more: they have ended or given up. Asking takes some us."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        return [r for r in others if self._words[r * ROW + LEFT] or self._ended(r)]

    def _leave_in(self, turn: Turn) -> None:
        """Who has not heard from all others takes part in nothing more, from this one on."""
        self._leave_from(turn)
        self.leave()

    def _leave_from(self, turn: Turn) -> None:
        if not self._words[self.rank * ROW + turn.left]:
            self._words[self.rank * ROW + turn.left] = 1 << 32 | turn.number

    def _row(
        self, turn: Turn, rank: int, length: int, most_s: float, yielding_s: float = YIELDING_S
    ) -> list[int]:
        at, number = rank * ROW + turn.at, turn.number
        words = self._words[at : at + length]
        for _ in range(SPINS):
            found = words.tolist()
            if min(found) >> 32 == number == max(found) >> 32:
                break
        else:
            found = self._awaited(turn, rank, length, most_s, yielding_s)
        return [low & 0xFFFFFFFF | (high & 0xFFFFFFFF) << 32
                for low, high in zip(found[::2], found[1::2])]  # fmt: skip

    def _awaited(
        self, turn: Turn, rank: int, length: int, most_s: float, yielding_s: float
    ) -> list[int]:
        began, at = time.monotonic(), rank * ROW + turn.at
        looked = began
        why = ""
        while True:
            found = self._words[at : at + length].tolist()
            if min(found) >> 32 == turn.number == max(found) >> 32:
                return found
            if why:
                raise self._absent(rank, why)
            now = time.monotonic()
            self._check_takes_part(turn, rank)
            if now - began > most_s:
                why = f"has not come for {most_s:g} s"
            elif now - looked > LOOK_S:
                looked, why = now, self._ended(rank)
            if now - began < yielding_s:
                os.sched_yield()
            elif not why:
                time.sleep(min((now - began) / 20, 1e-3))

    def _check_takes_part(self, turn: Turn, rank: int) -> None:
        left = self._words[rank * ROW + turn.left]
        if left and (turn.number - left & TURNS) <= TURNS >> 1:  # and not in a later one
            why = "has given up, and takes no more part; whoever goes on makes a new mesh"
            raise self._absent(rank, why, gave_up=True)

    def _absent(self, rank: int, why: str, gave_up: bool = False) -> AbsentError:
        who = ", this one," if rank == self.rank else ""
        return AbsentError(f"process {rank} of {self.size}{who} {why}", rank, gave_up)

    def _ended(self, rank: int) -> str:
        """Why a process cannot come any more; "": it has its lock, and may."""
        if rank == self.rank:
            return ""
        try:
            self._lock.lockf(self._file, self._lock.LOCK_SH | self._lock.LOCK_NB, 1, rank)
        except OSError:
            return ""
        self._lock.lockf(self._file, self._lock.LOCK_UN, 1, rank)
        return "has ended, or has destroyed its groups"


def make_board(group: Any, timeout_s: float, room: int = 0) -> Board | None:
    """A board of a gloo group's processes, who all call this; None, for all of them, where they are
    on several hosts, or one of them has no memory that others can map.

    Args:
        timeout_s: how long one waits for the others in an exchange, in seconds.
        room: bytes that a message of the first process may have, the same in all of them; twice as
            much memory is taken.

    Raises:
        RankError: no such group, a time that is not above 0, or room below it.
    """
    expect(dist.ProcessGroup, "torch's: dist.new_group(backend='gloo')", RankError, group=group)
    if not is_seconds(timeout_s):
        raise RankError(f"make_board(timeout_s={timeout_s!r}): a number of seconds above 0")
    if not isinstance(room, int) or isinstance(room, bool) or room < 0:
        raise RankError(f"make_board(room={room!r}): a whole number of bytes, 0 or more")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    made = _new_file(_bytes(size, room)) if rank == 0 else None
    try:
        path, token = gather_objects(made, group)[0] or ("", b"")
        board = _opened(path, token, rank, size, timeout_s, room)
        everywhere = all(gather_objects(board is not None, group))
    finally:
        if made is not None:
            Path(made[0]).unlink()  # those who have it keep it
    return board if everywhere else None


def is_seconds(value: object) -> bool:
    """Whether it is a time that one may wait."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _new_file(length: int) -> tuple[str, bytes] | None:
    token = secrets.token_bytes(TOKEN)
    try:
        handle, path = tempfile.mkstemp(prefix="fngraph-", dir=SHARED)
    except OSError:
        return None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(length) + token)  # all of it is there, or this fails
    except OSError:
        Path(path).unlink()
        return None
    return path, token


def _opened(
    path: str, token: bytes, rank: int, size: int, timeout_s: float, room: int
) -> Board | None:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    if os.pread(file, TOKEN, _bytes(size, room)) == token:
        with contextlib.suppress(OSError):
            return Board(file, rank, size, timeout_s, room)
    else:
        os.close(file)
    return None


def _bytes(size: int, room: int) -> int:
    return 8 * (ROW * size + -(-room // 4))
