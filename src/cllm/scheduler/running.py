"""The running sequences, in the order of parking, and of decoding if not all can."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator

from cllm.core.sequence import Sequence

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

    def find_victim(self, head: Sequence, now: float, *, takes_turns: bool) -> Sequence | None:
        """Return the sequence that should make room for ``head``, which waits; None if none should.

        It is of a lower class; or, if accounts take turns, the latest one of the account with the
        most sequences, if the account of ``head`` has none and has waited for TURN_SECONDS.
        """
        tail = self.tail
        if tail.effective_priority > head.effective_priority:
            return tail
        if not takes_turns or now - head.arrived < TURN_SECONDS:
            return None
        rivals = [seq for seq in self._seqs if seq.effective_priority == head.effective_priority]
        counts = Counter(seq.request.account for seq in rivals)
        account, count = counts.most_common(1)[0] if counts else ("", 0)
        if count < 2 or any(seq.request.account == head.request.account for seq in self._seqs):
            return None
        return next(seq for seq in reversed(rivals) if seq.request.account == account)

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
