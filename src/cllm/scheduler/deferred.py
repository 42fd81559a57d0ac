"""Those who wait for tokens that are on their way already, so that nothing is computed, or read, twice."""

from __future__ import annotations

from collections.abc import Iterator

from cllm.core.sequence import Sequence
from cllm.kv_cache.tiers import Snapshot


class Deferred:
    """Sequences behind a leader that computes their prefix, or behind a snapshot that is being read from disk.

    Whatever a method returns waits no longer. A sequence that ends meanwhile is discarded here; its entry behind the
    leader stays until the leader goes, and means nothing.
    """

    def __init__(self) -> None:
        self.reasons: dict[Sequence, str] = {}
        self._followers: dict[Sequence, list[tuple[int, Sequence]]] = {}  # leader -> (tokens awaited, who)
        self._readers: dict[int, list[Sequence]] = {}  # key of the snapshot -> who

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
        """The numbers of computed tokens at which somebody leaves ``leader``."""
        return [count for count, _ in self._followers.get(leader, ())]

    def led(self) -> Iterator[tuple[Sequence, list[int]]]:
        """Each leader, and the number of tokens that each of those behind it waits for."""
        for leader, followers in self._followers.items():
            if awaited := [count for count, seq in followers if seq in self.reasons]:
                yield leader, awaited

    def progressed(self, leader: Sequence) -> list[Sequence]:
        """``leader`` has computed more."""
        followers = self._followers.get(leader)
        if not followers:
            return []
        self._followers[leader] = [entry for entry in followers if entry[0] > leader.num_computed_tokens]
        return self._called([seq for count, seq in followers if count <= leader.num_computed_tokens])

    def stopped(self, leader: Sequence) -> list[Sequence]:
        """``leader`` computes no longer."""
        return self._called([seq for _, seq in self._followers.pop(leader, ())])

    def was_read(self, key: int) -> list[Sequence]:
        """The snapshot ``key`` is there, or will not come."""
        return self._called(self._readers.pop(key, []))

    def _called(self, seqs: list[Sequence]) -> list[Sequence]:
        return [seq for seq in seqs if self.discard(seq)]

    def discard(self, seq: Sequence) -> bool:
        """``seq`` waits no longer; whether it did."""
        return self.reasons.pop(seq, None) is not None

    def check(self, running: list[Sequence]) -> None:
        """Raise AssertionError if somebody waits for nothing."""
        led = {seq for pairs in self._followers.values() for _, seq in pairs}
        read = {seq for seqs in self._readers.values() for seq in seqs}
        assert self.reasons.keys() <= led | read, f"deferred for nothing: {self.reasons}"
        assert self._followers.keys() <= set(running), "a leader does not run"
