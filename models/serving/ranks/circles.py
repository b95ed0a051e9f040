"""Processes that serve together, and what they tell each other on the host, as values.

    ranks = make_ranks(fg.make_mesh(dp=2, tp=2))
    steps = over_ranks(make_steps(...), ranks)

A *team* runs each batch together: tensor-parallel processes, pipeline stages. Its first one, the
leader, has the requests; the others follow. Each team's leader has requests and a cache of
its own (data-parallel).

What is told goes beside the collectives of the model, on CPUs, so that nobody waits for a device:
over memory where a circle's processes are of one host, else over gloo, as does what has no room.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Container, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fngraph as fg

FIRST = 8192  # bytes of a message that come at once; a longer one has a second part
LENGTH = 8  # bytes that say how long one is
ROOM = 1 << 20  # bytes of a message on a board: 64 block tables of 4,000 entries
PATIENCE = timedelta(seconds=5)  # with who is to be told the end, and may be gone


class Circle(NamedTuple):
    """Some processes, as one of them sees them.

    Attributes:
        group: torch's, of gloo; None where this one is alone.
        rank: its place among them; the first one leads.
        members: their numbers among all processes.
        board: on which they `exchange` numbers and the first one tells; None: over the group, as on
            several hosts.
        timeout_s: how long one waits for the others, in seconds.
    """

    group: Any = None
    rank: int = 0
    members: tuple[int, ...] = (0,)
    board: fg.Board | None = None
    timeout_s: float = math.inf

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.members)

    def __repr__(self) -> str:
        return f"Circle(rank {self.rank} of {self.size})"


ALONE = Circle()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """Who serves together, as a process sees it.

    Attributes:
        team: those that run each batch together; the first has the requests.
        leaders: of all teams, as a leader sees them.
        meet: whether teams meet in collectives of the model, so that their batches must have one
            size: they agree on it before each step. Else each serves by itself.
        axes: those of a team, outermost first.
        ahead: whether they agree on a step's size while the one before runs, where they can.
    """

    team: Circle = ALONE
    leaders: Circle = ALONE
    meet: bool = False
    axes: tuple[fg.Axis, ...] = ()
    ahead: bool = False

    @property
    def leads(self) -> bool:
        """Whether this process has requests; else it follows one that has."""
        return self.team.rank == 0

    @property
    def agrees(self) -> bool:
        """Whether each step's size is settled with others."""
        return self.meet and self.leaders.size > 1

    def __repr__(self) -> str:
        team = f"rank {self.team.rank} of {self.team.size} in its team"
        return f"Ranks({team}; {self.leaders.size} teams{', which meet' * self.meet})"


ONE = Ranks()  # a process by itself


def make_ranks(
    mesh: fg.Mesh, *, apart: Sequence[str] = ("dp",), meet: bool = False, ahead: bool = False,
    timeout: timedelta | float = timedelta(minutes=30),
) -> Ranks:  # fmt: skip
    """The teams of a mesh. All of its processes call this, in the same order.

    Args:
        apart: axes along which processes have requests of their own; those along all others are a
            team. A name that the mesh does not have is none.
        meet: whether the model has collectives along an axis of `apart`.
        ahead: whether teams that meet agree on the size of a step while the one before runs, as
            long as all of them decode, without drafts: what comes meanwhile waits for a step more.
            A team that fails behind such a word is noticed in the model's collectives, after the
            mesh's timeout; else before the step.
        timeout: how long one waits for another's word, in seconds or as a timedelta, and so how
            long a leader may do nothing, and how soon a process that stalls is noticed. One that
            has ended is noticed at once.

    Raises:
        fg.errors.RankError: arguments of another kind.
    """
    error, expect = fg.errors.RankError, fg.core.text.expect
    expect(fg.Mesh, "the whole mesh, fg.make_mesh(dp=2, tp=2)", error, mesh=mesh)
    expect((tuple, list), 'names of axes, ("dp",)', error, apart=apart)
    expect(bool, "True or False", error, meet=meet, ahead=ahead)
    is_flag = isinstance(timeout, bool)  # which is an int
    if isinstance(timeout, int | float) and not is_flag and math.isfinite(timeout):
        timeout = timedelta(seconds=timeout)
    expect(timedelta, "seconds, or datetime.timedelta(minutes=30)", error, timeout=timeout)
    assert isinstance(timeout, timedelta)
    if timeout <= timedelta():
        raise error(f"make_ranks(timeout={timeout!r}): a time above 0")
    if mesh.size == 1:
        return Ranks(meet=meet, axes=mesh.axes, ahead=ahead)
    own = {axis.name: axis.rank for axis in mesh.axes}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    teams: dict[tuple[int, ...], list[int]] = {}
    for number, places in enumerate(everywhere):
        teams.setdefault(tuple(places.get(name, 0) for name in apart), []).append(number)
    within = tuple(axis for axis in mesh.axes if axis.name not in apart)
    order = lambda number: [everywhere[number][axis.name] for axis in within]  # noqa: E731
    members = [tuple(sorted(teams[place], key=order)) for place in sorted(teams)]
    found = [_circle(one, timeout) for one in (*members, tuple(one[0] for one in members))]
    team = next(circle for circle in found[:-1] if dist.get_rank() in circle.members)
    team, leaders = _with_board(team), found[-1]
    return Ranks(team, _with_board(leaders) if meet else leaders, meet, within, ahead)


def _circle(members: tuple[int, ...], timeout: timedelta) -> Circle:
    """Made by all processes, also those that are not in it."""
    group = None
    if len(members) > 1:
        group = dist.new_group(list(members), backend="gloo", timeout=timeout)
    own = dist.get_rank()
    rank = members.index(own) if own in members else -1
    return Circle(group, rank, members, timeout_s=timeout.total_seconds())


def _with_board(circle: Circle) -> Circle:
    """Made by the processes of the circle alone."""
    if circle.size == 1 or circle.rank < 0:
        return circle
    return circle._replace(board=fg.make_board(circle.group, circle.timeout_s, ROOM))


class Sent(NamedTuple):
    """A message on its way: `wait` before the next one."""

    works: tuple[Any, ...] = ()
    kept: tuple[Tensor, ...] = ()
    board: fg.Board | None = None

    def wait(self, most: timedelta | None = None) -> None:
        """Until it may be forgotten; RuntimeError: nobody takes it any more.

        Args:
            most: no longer than this, and not at all for what lies on a board.
        """
        for work in self.works:
            work.wait() if most is None else work.wait(most)
        if self.board is not None and most is None:
            self.board.all_have_it()


def tell(
    circle: Circle, word: Any, leaves: Sequence[Tensor] = (), most: timedelta | None = None
) -> Sent:
    """Begin to tell all others of the circle something; its first process alone does.

    Args:
        word: what pickle takes.
        leaves: CPU tensors, whose bytes go along: the others know their shapes.
        most: how long it waits for who has not taken the last message; None: for the timeout.
    """
    if circle.size == 1:
        return Sent()
    message, board = _packed(word, leaves), circle.board
    if board is not None and board.tell(message, most.total_seconds() if most else None):
        return Sent(board=board)
    parts = _parts(message)
    send = lambda x: dist.broadcast(x, circle.members[0], circle.group, async_op=True)  # noqa: E731
    return Sent(tuple(map(send, parts)), parts, board)


def hear(circle: Circle) -> tuple[Any, Tensor]:
    """What the first process of the circle tells, and the bytes that go along; it waits."""
    message = circle.board.hear() if circle.board is not None else None
    if message is None:
        message = _received(lambda x: dist.broadcast(x, circle.members[0], circle.group))
    return _unpacked(message)


def tell_one(circle: Circle, rank: int, word: Any) -> None:
    """Tell one other of the circle something; it waits until that one listens."""
    for part in _parts(_packed(word, ())):
        dist.send(part, circle.members[rank], circle.group)


def hear_one(circle: Circle, rank: int) -> Any:
    """What one other of the circle tells this one; it waits."""
    word, _ = _unpacked(_received(lambda x: dist.recv(x, circle.members[rank], circle.group)))
    return word


def _packed(word: Any, leaves: Sequence[Tensor]) -> Tensor:
    """A message: the word behind its length, and the bytes of the leaves."""
    said = pickle.dumps(word)
    parts = (len(said).to_bytes(LENGTH), said, *(leaf.numpy().tobytes() for leaf in leaves))
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def _unpacked(message: Tensor) -> tuple[Any, Tensor]:
    """What was packed: the word, and the bytes of the leaves."""
    begin = LENGTH + int.from_bytes(message[:LENGTH].numpy().tobytes())
    return pickle.loads(message[LENGTH:begin].numpy().tobytes()), message[begin:]


def _parts(message: Tensor) -> tuple[Tensor, ...]:
    """As it goes over a group: what comes at once, and the rest if there is more."""
    length = torch.frombuffer(bytearray(len(message).to_bytes(LENGTH)), dtype=torch.uint8)
    filling = message.new_zeros(max(0, FIRST - LENGTH - len(message)))
    whole = torch.cat([length, message, filling])
    return (whole[:FIRST], whole[FIRST:])[: 1 + (len(whole) > FIRST)]


def _received(receive: Callable[[Tensor], Any]) -> Tensor:
    """A message of a group."""
    first = torch.empty(FIRST, dtype=torch.uint8)
    receive(first)
    length = LENGTH + int.from_bytes(first[:LENGTH].numpy().tobytes())
    if length <= FIRST:
        return first[LENGTH:length]
    rest = torch.empty(length - FIRST, dtype=torch.uint8)
    receive(rest)
    return torch.cat([first[LENGTH:], rest])


class Coming(NamedTuple):
    """Numbers of every process of a circle, on their way."""

    board: fg.Board | None
    length: int
    found: Sequence[Tensor] = ()
    works: Sequence[Any] = ()
    going: Sent = Sent()

    def wait(self) -> list[tuple[int, ...]]:
        """Those of each, in the order of their ranks.

        Where the last one of another is not 0, that one has left, and takes none.
        """
        if self.board is not None:
            return list(map(tuple, self.board.take(self.length)))
        for work in self.works:
            work.wait()
        told = [tuple(one.tolist()) for one in self.found]
        if not any(one[-1] for one in told):
            self.going.wait()
        return told


def exchange(circle: Circle, numbers: Sequence[int]) -> Coming:
    """Begin to tell whole numbers to all others of the circle, and to hear theirs."""
    if circle.board is not None:
        circle.board.put(numbers)
        return Coming(circle.board, len(numbers))
    own = torch.tensor(numbers, dtype=torch.int64)
    found = [own if i == circle.rank else torch.empty_like(own) for i in range(circle.size)]
    # each to each: an all-gather goes around the ring, and takes twice as long
    coming: list[Any] = [
        dist.irecv(x, member, circle.group)
        for x, member in zip(found, circle.members)
        if x is not own
    ]
    return Coming(None, len(numbers), found, coming, tell_each(circle, numbers))


def tell_each(circle: Circle, numbers: Sequence[int], but: Container[int] = ()) -> Sent:
    """Begin to tell whole numbers to all others of the circle, `but` some."""
    own = torch.tensor(numbers, dtype=torch.int64)
    others = [m for i, m in enumerate(circle.members) if i != circle.rank and m not in but]
    return Sent(tuple(dist.isend(own, member, circle.group) for member in others), (own,))
