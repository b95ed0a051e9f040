"""Two steps that two threads of each process call, in whatever order: what meets another step is an
error in both processes, and what is no error is right."""

from __future__ import annotations

import rank_threads
import starting


def test_steps_of_two_threads_do_not_mix() -> None:
    own, other = starting.values(starting.run(rank_threads.threads, 2))
    for (counts, last), (theirs, _) in zip(own, other):
        assert set(counts) | set(theirs) <= {"True", "RankError"}, (counts, theirs)
        assert counts.get("True", 0) == theirs.get("True", 0) and last
    errors = [sum(counts.get("RankError", 0) for counts, _ in each) for each in (own, other)]
    assert errors[0] == errors[1]
