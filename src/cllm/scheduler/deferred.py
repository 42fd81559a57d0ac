"""Sequences that wait for a prefix that is already being computed or read, so that nothing is done
twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from cllm.core.sequence import Sequence
from cllm.kv_cache.tiers import Snapshot


class Deferred:
    """Sequences behind a leader that computes their prefix, or behind a snapshot that is being read
    from disk.

    The sequences that a method returns are no longer deferred. A sequence that ends while deferred
    is discarded. Its entry in the leader's list stays until the leader stops, and has no effect.
    """

    def __init__(self) -> None:
        self.reasons: dict[Sequence, str] = {}
        # leader -> (tokens awaited, follower)
        self._followers: dict[Sequence, list[tuple[int, Sequence]]] = {}
        self._readers: dict[int, list[Sequence]] = {}  # snapshot key -> sequences

    def __len__(self) -> int:
        return len(self.reasons)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.reasons)

    def follow(self, leader: Sequence, num_tokens: int, seq: Sequence) -> None:
        self.reasons[seq] = f"{num_tokens} tokens that {leader.name} computes"
        self._followers.setdefault(leader, []).append((num_tokens, seq))

    def read(self, snapshot: Snapshot, seq: Sequence) -> None:
        self.reasons[seq] = f"{len(snapshot.tokens)} tokens that are read from disk"
        self._readers.setdefault(snapshot.key, []).append(seq)

    def awaited(self, leader: Sequence) -> list[int]:
        """Return the numbers of computed tokens that the followers of ``leader`` wait for."""
        return [count for count, _ in self._followers.get(leader, ())]

    def leaders(self) -> Iterator[tuple[Sequence, list[int]]]:
        """Yield each leader, with the number of tokens that each of its followers waits for."""
        for leader, followers in self._followers.items():
            if awaited := [count for count, seq in followers if seq in self.reasons]:
                yield leader, awaited

    def progressed(self, leader: Sequence) -> list[Sequence]:
        """Return the followers whose prefix ``leader`` has computed by now."""
        followers = self._followers.get(leader)
        if not followers:
            return []
        self._followers[leader] = [
            entry for entry in followers if entry[0] > leader.num_computed_tokens
        ]
        return self._called(
            [seq for count, seq in followers if count <= leader.num_computed_tokens]
        )

    def stopped(self, leader: Sequence) -> list[Sequence]:
        """Return all followers of ``leader``, which has stopped running."""
        return self._called([seq for _, seq in self._followers.pop(leader, ())])

    def was_read(self, key: int) -> list[Sequence]:
        """Return the sequences that waited for the snapshot ``key``, which was read or could not be
        read.
        """
        return self._called(self._readers.pop(key, []))

    def _called(self, seqs: list[Sequence]) -> list[Sequence]:
        return [seq for seq in seqs if self.discard(seq)]

    def discard(self, seq: Sequence) -> bool:
        """Remove ``seq``; return whether it was deferred."""
        return self.reasons.pop(seq, None) is not None

    def check(self, running: list[Sequence]) -> None:
        """Raise AssertionError if a sequence waits for nothing or a leader does not run."""
        led = {seq for pairs in self._followers.values() for _, seq in pairs}
        read = {seq for seqs in self._readers.values() for seq in seqs}
        assert self.reasons.keys() <= led | read, f"deferred for nothing: {self.reasons}"
        assert self._followers.keys() <= set(running), "a leader does not run"
