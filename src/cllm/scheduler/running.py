"""The running sequences, in the order of parking, and of decoding if not all can."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator

from cllm.core.sequence import Sequence
from cllm.scheduler.waiting import Waiting

# An account without a running sequence waits this long for a place of an account with several.
TURN_SECONDS = 1.0


def sort_key(seq: Sequence) -> tuple[int, int]:
    """Return the sort key of a running sequence: class, then arrival."""
    return seq.effective_priority, seq.order


class Running:
    """Running sequences by ``sort_key``. Sequences are parked from the tail."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    @property
    def tail(self) -> Sequence:
        return self._seqs[-1]

    def list_victims(self, head: Sequence, waiting: Waiting, now: float) -> list[Sequence]:
        """Return the sequences that may be parked for ``head``, which waits, the first of them
        last.

        They are those of lower classes. If there are none, and ``head`` has waited for TURN_SECONDS
        without a running sequence of its account, they are those of the account with the most,
        except the earliest. The policy must serve the account of ``head`` before that one,
        otherwise the parked sequence would return at once.
        """
        victims = [seq for seq in self._seqs if seq.effective_priority > head.effective_priority]
        if victims or now - head.arrived < TURN_SECONDS:
            return victims
        mine = head.request.account
        if any(seq.request.account == mine for seq in self._seqs):
            return []
        behind = [
            seq
            for seq in self._seqs
            if seq.effective_priority == head.effective_priority and waiting.precedes(head, seq)
        ]
        counts = Counter(seq.request.account for seq in behind)
        account = max(counts, key=counts.__getitem__, default="")
        return [seq for seq in behind if seq.request.account == account][1:]

    def find_last(self, seqs: Collection[Sequence]) -> Sequence:
        """Return the one of ``seqs`` that is nearest to the tail. Raises StopIteration if none
        is running.
        """
        return next(seq for seq in reversed(self._seqs) if seq in seqs)

    def add(self, seq: Sequence) -> None:
        insort(self._seqs, seq, key=sort_key)

    def remove(self, seq: Sequence) -> None:
        """Remove ``seq``. Raises ValueError if it is not running."""
        self._seqs.remove(seq)

    def promote(self, seq: Sequence, priority: int) -> None:
        """Move ``seq`` to the class ``priority`` if that is a higher one."""
        if priority < seq.effective_priority:
            self.move(seq, priority)

    def move(self, seq: Sequence, priority: int) -> None:
        """Move ``seq`` to the class ``priority``."""
        self.remove(seq)
        seq.effective_priority = priority
        self.add(seq)

    def check(self) -> None:
        """Raise AssertionError if the order is broken."""
        assert self._seqs == sorted(self._seqs, key=sort_key), f"out of order: {self._seqs}"
