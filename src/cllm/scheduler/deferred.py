"""Sequences that wait for a prefix that is being computed or read, so that no work is done
twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cllm.core.sequence import Sequence
from cllm.kv_cache.snapshots import Snapshot
from cllm.scheduler.reasons import AwaitsLeader, AwaitsRead


class Deferred:
    """Sequences that wait for a leader to compute their prefix, or for a snapshot that is being
    read from disk.

    The sequences that a method returns are no longer deferred. A sequence that ends while deferred
    is discarded. Its entry in the leader's list stays until the leader stops, and has no effect.
    """

    def __init__(self) -> None:
        self.reasons: dict[Sequence, AwaitsLeader | AwaitsRead] = {}
        # leader -> (tokens awaited, follower)
        self._followers: dict[Sequence, list[tuple[int, Sequence]]] = {}
        self._readers: dict[int, list[Sequence]] = {}  # snapshot key -> sequences

    def __len__(self) -> int:
        return len(self.reasons)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.reasons)

    def follow(self, leader: Sequence, num_tokens: int, seq: Sequence) -> None:
        self.reasons[seq] = AwaitsLeader(num_tokens, leader.name)
        self._followers.setdefault(leader, []).append((num_tokens, seq))

    def await_read(self, snapshot: Snapshot, seq: Sequence) -> None:
        self.reasons[seq] = AwaitsRead(len(snapshot.tokens))
        self._readers.setdefault(snapshot.key, []).append(seq)

    def count_awaited(self, leader: Sequence) -> list[int]:
        """Return the numbers of computed tokens that the followers of ``leader`` wait for."""
        return [count for count, _ in self._followers.get(leader, ())]

    def list_followers(self, leader: Sequence) -> list[Sequence]:
        """Return the sequences that wait for ``leader``."""
        return [seq for _, seq in self._followers.get(leader, ()) if seq in self.reasons]

    def take_ready_followers(self, leader: Sequence) -> list[Sequence]:
        """Return the followers whose prefix ``leader`` has computed."""
        followers = self._followers.get(leader)
        if not followers:
            return []
        self._followers[leader] = [
            entry for entry in followers if entry[0] > leader.num_computed_tokens
        ]
        return self._take([seq for count, seq in followers if count <= leader.num_computed_tokens])

    def take_followers(self, leader: Sequence) -> list[Sequence]:
        """Return all followers of ``leader``, which has stopped running."""
        return self._take([seq for _, seq in self._followers.pop(leader, ())])

    def take_readers(self, key: int) -> list[Sequence]:
        """Return the sequences that waited for the snapshot ``key``, which was read or could not be
        read.
        """
        return self._take(self._readers.pop(key, []))

    def _take(self, seqs: list[Sequence]) -> list[Sequence]:
        return [seq for seq in seqs if self.discard(seq)]

    def discard(self, seq: Sequence) -> bool:
        """Remove ``seq``; return whether it was deferred."""
        return self.reasons.pop(seq, None) is not None

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError if a sequence waits for nothing or a leader is not running."""
        followers = {seq for pairs in self._followers.values() for _, seq in pairs}
        readers = {seq for seqs in self._readers.values() for seq in seqs}
        assert self.reasons.keys() <= followers | readers, f"deferred for nothing: {self.reasons}"
        assert self._followers.keys() <= set(running), "a leader is not running"
