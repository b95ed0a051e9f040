"""Agreement of processes that must run alike: what each says of itself, compared on all of them.

Where they agree it takes one exchange of some bytes a group. Where they do not, each sends all that
it has to say, and each raises the same `RankError`, of the first thing that differs.

One exchange along each axis of a mesh in turn, with what the ones before have found, tells every
process of the grid whether any two of them differ. It goes over a board of memory that processes
of a host share, else over a group of its own, of gloo, both of which `make_mesh` makes: who is in a
collective of the model's is not taken for one that agrees.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from fngraph.errors import RankError
from fngraph.ranks.faults import failing_as, unsay
from fngraph.ranks.mesh import Agreeing, agreeing
from fngraph.torch_facts.names import all_gather_into, gather_objects, serves_cpu

Told = Mapping[str, str]
"""What a process says of itself, by name, in the order in which it is compared."""
RAISED = "raised"
"""Said in place of all else by a process that cannot go on."""


@dataclasses.dataclass(frozen=True)
class Peers:
    """Those that a program meets in its collectives, and what it says of itself to them.

    Attributes:
        groups: (axis, what torch calls its processes), in one order for all of them.
        told: what all must have alike.
        places: where in the user's code some of that is, by its name.
        counts: whether they must bring the same numbers of tokens and requests.
        calls: of the collectives, in order: ("all_reduce", "tp", the user's line).
    """

    groups: tuple[tuple[str, str], ...]
    told: Told
    places: Mapping[str, str]
    counts: bool
    calls: tuple[tuple[str, str, str], ...]

    @functools.cached_property
    def digest(self) -> str:
        """Of `told`."""
        return hashlib.sha256(repr(list(self.told.items())).encode()).hexdigest()

    def number(self, more: Told) -> int:
        """Of `told`, and of what is said besides: 60 bits."""
        text = self.digest + repr(list(more.items()))
        return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)

    def lines(self, op: str, axis: str) -> list[str]:
        """Where the user calls a collective."""
        return list(dict.fromkeys(line for o, a, line in self.calls if (o, a) == (op, axis)))


def first_difference(told: Mapping[int, Told]) -> tuple[str, dict[int, str]] | None:
    """What processes do not have alike, by name, and what each has there; None: nothing.

    What one cannot go on for comes first; else it is the first by the order of the least rank.

    Args:
        told: by rank.
    """
    if any(RAISED in one for one in told.values()):
        return RAISED, {rank: one[RAISED] for rank, one in told.items() if RAISED in one}
    names = dict.fromkeys(name for rank in sorted(told) for name in told[rank])
    for name in names:
        values = {rank: told[rank].get(name, "nothing") for rank in sorted(told)}
        if len(set(values.values())) > 1:
            return name, values
    return None


def refusal(what: str, told: Mapping[int, Told], places: Mapping[str, str]) -> RankError:
    """The error that every process raises.

    Args:
        what: what they were about to do: "capture 3 keys".
    """
    found = first_difference(told)
    if found is None:
        return RankError(f"ranks {sorted(told)} were about to {what}, and differ in what they said")
    name, values = found
    if name == RAISED:
        each = "; ".join(f"rank {rank} raised {text.rstrip('.')}" for rank, text in values.items())
        return RankError(f"to {what} is off: {each}. Nothing was launched")
    where = f" ({places[name]})" if places.get(name) else ""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    each = "; ".join(f"{value} on {_named(ranks)}" for value, ranks in by_value.items())
    return RankError(
        f"ranks {sorted(told)} were about to {what}, and differ in {name}{where}: {each}. All must "
        "run one function in the same way: give each the same code, options and batch counts"
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


IN_TURN = threading.RLock()
"""Held by who meets other processes, from there to the end of what was agreed on: threads that
have each a step would have their words, and sums, mixed up."""


def meet(
    peers: Peers, what: str, number: int, flag: int, say: Callable[[], Told], trouble: bool = False
) -> list[int]:
    """Compare a number over all groups; nobody goes on unless it is one.

    Args:
        what: what is about to be done, for errors.
        flag: something small that each tells the others, and that may differ.
        say: all that a process has to say of itself; asked where numbers differ.
        trouble: whether this process cannot go on, whatever the others have.

    Returns:
        the flags that there are, this process's own among them.

    Raises:
        RankError: they differ, or one is in trouble: on every process. One of them is gone.
    """
    flags = {flag}
    wrong = int(trouble)
    with IN_TURN:
        unsay()
        for axis, group in peers.groups:
            with failing_as(f"the agreement to {what},", axis, group) as found:
                rows = _exchanged(agreeing(found), [number, wrong, sum(1 << f for f in flags)])
            wrong = int(any(w for _, w, _ in rows) or len({n for n, *_ in rows}) > 1)
            flags.update(_bits(rows))
        if not wrong:
            return sorted(flags)
        raise refusal(what, tell_all(peers, what, say()), peers.places)


def tell_all(peers: Peers, what: str, own: Told) -> dict[int, Told]:
    """What each process of the groups has to say, by rank.

    Raises:
        RankError: one of them is gone.
    """
    told: dict[int, Told] = {dist.get_rank(): dict(own)}
    for axis, group in peers.groups:
        with failing_as(f"the agreement to {what},", axis, group) as found:
            for part in gather_objects(told, agreeing(found).group):
                told |= part
    return told


def _bits(rows: Sequence[Sequence[int]]) -> Iterator[int]:
    for *_, mask in rows:
        yield from (i for i in range(mask.bit_length()) if mask >> i & 1)


def _exchanged(by: Agreeing, numbers: Sequence[int]) -> list[list[int]]:
    """Each process's numbers, in the order of ranks."""
    if by.board is not None:
        return by.board.exchange(numbers)
    group = by.group
    device = "cpu" if serves_cpu(group) else torch.device("cuda", torch.cuda.current_device())
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    out = own.new_empty(dist.get_world_size(group) * len(numbers))
    all_gather_into(out, own, group)
    found: list[list[int]] = out.view(-1, len(numbers)).tolist()
    return found
