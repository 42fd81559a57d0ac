"""The running sequences, in the order in which they decode if not all can, and are parked (last
first)."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator

from cllm.core.request import Priority
from cllm.core.sequence import Sequence
from cllm.scheduler.waiting import Waiting

# After this long, an account without a running sequence may take the place of one that has several.
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

    def list_rivals(self, head: Sequence, waiting: Waiting, now: float) -> list[Sequence]:
        """Return the sequences that may be parked for ``head`` because it is its account's turn.

        It is its turn if ``head`` has waited for TURN_SECONDS and the account has no running
        sequence. The sequences belong to accounts that the policy serves later, because others
        would be admitted again at once. Each account keeps its earliest sequence. The last one in
        the result, the latest of the account with the most, is to be parked first.
        """
        mine = head.request.account
        if now - head.waits_since < TURN_SECONDS or any(
            seq.request.account == mine for seq in self._seqs
        ):
            return []
        later = [seq for seq in self._seqs if waiting.comes_before(head, seq)]
        counts: Counter[str] = Counter()
        rivals = []
        for seq in later:
            account = seq.request.account
            if counts[account]:
                rivals.append(seq)
            counts[account] += 1
        return sorted(rivals, key=lambda seq: counts[seq.request.account])

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
        """Move ``seq`` to the class ``priority`` if that is a higher one, but never to AGED, which
        it would keep.
        """
        priority = max(priority, min(Priority))
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
