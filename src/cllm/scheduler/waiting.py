"""The queue of waiting sequences, in the order of the policy."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Any

from cllm.core.request import Priority
from cllm.core.sequence import Sequence
from cllm.scheduler.policy import Policy

# No sequence starves: one in AGED_SHARE admissions goes to the one that has waited longest, if
# longer than PATIENCE.
AGED_SHARE = 8
PATIENCE = 30.0  # seconds
MAX_STALE = 64  # entries of removed sequences in _by_age, beside one for each that waits
YIELDING = max(Priority) + 1  # below every class: its client does not read
AGED = -1  # above every class: such a sequence is not parked for a higher class after its long wait


class Waiting:
    """A queue in which every operation costs O(log of its length).

    Removed sequences leave stale entries in the heaps; ``_stamps`` says which entries are valid. A
    sequence that returns gets its old position, because its deadline and its order have not
    changed.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        # tokens to compute for waiting sequences, by what was cached on their arrival
        self.num_tokens = 0
        self._stamps: dict[Sequence, int] = {}
        self._next_stamp = 0
        self._groups: dict[Any, list[tuple[float, int, int, Sequence]]] = {}
        self._sizes: dict[Any, int] = {}
        self._ranks: list[tuple[Any, int, Any]] = []
        self._by_age: list[tuple[float, int, Sequence]] = []
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._stamps

    def _group(self, seq: Sequence) -> tuple[bool, Any]:
        """Return whether ``seq`` yields to others, and its group in the policy."""
        return seq.effective_priority == YIELDING, self.policy.group(seq)

    def _rank(self, group: tuple[bool, Any]) -> tuple[bool, Any]:
        """Return the rank of a group: those that yield come after all others."""
        return group[0], self.policy.rank(group[1])

    def comes_before(self, head: Sequence, other: Sequence) -> bool:
        """Return whether ``head`` would be served before ``other``, which runs, if both waited.
        False if their classes differ, or if accounts do not take turns.
        """
        policy = self.policy
        return (
            policy.takes_turns
            and other.effective_priority in (head.effective_priority, AGED)
            and policy.effective_priority(other) == policy.effective_priority(head)
            and self._rank(self._group(head)) < self._rank(self._group(other))
        )

    def push(self, seq: Sequence) -> None:
        group = self._group(seq)  # first, because the policy may raise
        if not self._sizes.get(group):
            self.policy.arrived(group[1])
        rank = None if group in self._groups else self._rank(group)
        self._next_stamp += 1
        stamp = self._stamps[seq] = self._next_stamp
        self.num_tokens += seq.num_uncached_tokens
        if group not in self._groups:
            self._groups[group], self._sizes[group] = [], 0
            heapq.heappush(self._ranks, (rank, stamp, group))
        due = math.inf if seq.request.deadline is None else seq.arrived + seq.request.deadline
        heapq.heappush(self._groups[group], (due, seq.order, stamp, seq))
        self._sizes[group] += 1
        if not group[0]:
            heapq.heappush(self._by_age, (seq.waits_since, stamp, seq))
        if len(self._by_age) > 2 * len(self._stamps) + MAX_STALE:
            self._by_age = [
                entry for entry in self._by_age if self._stamps.get(entry[2]) == entry[1]
            ]
            heapq.heapify(self._by_age)

    def move(self, seq: Sequence, priority: int) -> None:
        """Move ``seq`` to the class ``priority``."""
        self.remove(seq)
        seq.effective_priority = priority
        self.push(seq)

    def head(self, now: float) -> Sequence | None:
        """Return the sequence to serve next.

        A sequence that has waited too long belongs to the class AGED from then on.
        """
        if self._num_taken % AGED_SHARE == AGED_SHARE - 1:
            oldest = self._oldest()
            if oldest is not None and now - oldest.waits_since > PATIENCE:
                oldest.effective_priority = AGED
                return oldest
        while self._ranks:
            rank, stamp, group = self._ranks[0]
            queue = self._groups[group]
            while queue and self._stamps.get(queue[0][3]) != queue[0][2]:
                heapq.heappop(queue)
            current = self._rank(group)
            if not queue:
                heapq.heappop(self._ranks)
                del self._groups[group], self._sizes[group]
            elif current != rank:
                heapq.heapreplace(self._ranks, (current, stamp, group))
            else:
                return queue[0][3]
        return None

    def _oldest(self) -> Sequence | None:
        while self._by_age:
            _, stamp, seq = self._by_age[0]
            if self._stamps.get(seq) == stamp:
                return seq
            heapq.heappop(self._by_age)
        return None

    def take(self, seq: Sequence) -> None:
        """Remove ``seq``, because it is admitted."""
        self._num_taken += 1
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove ``seq``. Raises KeyError if it was not waiting."""
        del self._stamps[seq]
        self.num_tokens -= seq.num_uncached_tokens
        self._sizes[self._group(seq)] -= 1

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._stamps)
