"""The unfinished sequences: the state of each, and the changes from one state to another.

Every sequence ends in one function, ``release``, which frees its seq_id and cells.

Invariants: an unfinished sequence is in exactly one of ``running``, ``waiting`` and ``deferred``;
RUNNING means a leased seq_id; between steps a seq_id has as many cells as its sequence has computed
tokens; a deferred sequence has a running leader or a snapshot that is being read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from cllm.core.batch import Batch, Drop, Operation, Save, Trim
from cllm.core.output import FinishReason, TokenOutput
from cllm.core.sequence import Sequence, Status
from cllm.kv_cache.cache import KVCache
from cllm.kv_cache.matching import Match
from cllm.kv_cache.snapshots import Snapshot, StorageTier
from cllm.scheduler.deferred import Deferred
from cllm.scheduler.expiries import Expiries
from cllm.scheduler.length_estimates import LengthEstimates
from cllm.scheduler.policy import Policy
from cllm.scheduler.running import Running
from cllm.scheduler.speculation import Speculation
from cllm.scheduler.trace import Statistics
from cllm.scheduler.waiting import AGED, YIELDING, Waiting

log = logging.getLogger("cllm.engine")

MAX_YIELDING = 10_000  # requests that are remembered although they may be unknown
MAX_FAILURES = 3  # failed batches in a row after which a sequence is assumed to be the cause


class Disk(Protocol):
    """Copies snapshots between RAM and files, in a thread.

    Its methods start a copy, and raise no exceptions. When the copy has ended, ``finish_write`` or
    ``finish_read`` of Sequences is called.
    """

    def write(self, snapshot: Snapshot) -> None:
        """Start writing a snapshot that is in RAM."""
        ...

    def read(self, snapshot: Snapshot) -> None:
        """Start reading a snapshot to RAM."""
        ...


class Sequences:
    """Moves sequences between states, and rebuilds the bookkeeping if an exception has left it
    inconsistent.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        policy: Policy,
        statistics: Statistics,
        speculation: Speculation | None,
    ) -> None:
        self.kv_cache = kv_cache
        self.waiting = Waiting(policy)
        self.running = Running()
        self.deferred = Deferred()
        self.length_estimates = LengthEstimates()
        self.outputs: list[TokenOutput] = []  # to be returned by the next call
        # the sequences to blame if an exception is raised now
        self.suspects: Iterable[Sequence] = ()
        self._statistics = statistics
        self._speculation = speculation
        self._now = 0.0  # when the current or last step began
        self._requests: dict[str, dict[int, Sequence]] = {}
        self._expiries = Expiries()
        self._next_order = 0
        self._pending_operations: list[Operation] = []  # run first in the next batch
        self._operations: list[Operation] = []  # those of the batch that is being computed
        self.disk: Disk | None = None
        self._num_recoveries = 0  # since the last step
        self._yielding: set[str] = set()  # requests whose clients do not read

    # --- one step --------------------------------------------------------------------------------

    def begin_step(self, now: float) -> None:
        """Note when a step begins, and end the sequences that have expired."""
        self._now = now
        for seq in self._expiries.take(now):
            self._end(seq, FinishReason.TIMEOUT)

    def begin_operations(self) -> list[Operation]:
        """Return the list of the next batch's operations, with those that must run first."""
        self._operations = self.drain_pending_operations()
        return self._operations

    def finish_operations(self, operations: Iterable[Operation]) -> None:
        """Record that a batch with these operations has been computed."""
        self._num_recoveries, self._operations = 0, []
        self.write_saved(operations)

    # --- arrival ---------------------------------------------------------------------------------

    def add(self, seq: Sequence, now: float) -> list[TokenOutput]:
        """Queue a sequence that arrived at ``now``. If it cannot be queued, return its last output.

        Its prompt must leave a cell for the first sampled token.
        """
        try:
            self._add(seq, now)
        except Exception:
            log.exception("cannot queue %s", seq.name)  # the sender should have checked it
            return self.recover() if self.knows(seq) else [seq.make_end_output(FinishReason.ERROR)]
        return []

    def _add(self, seq: Sequence, now: float) -> None:
        self.suspects = (seq,)
        if seq.num_prompt_tokens >= self.kv_cache.cells_per_seq:
            raise ValueError(f"{seq!r} can never fit into {self.kv_cache.cells_per_seq} cells")
        seq.arrived = seq.waits_since = now
        seq.effective_priority = self._choose_priority(seq)
        seq.order, self._next_order = self._next_order, self._next_order + 1
        match = self.kv_cache.find(seq)
        seq.num_uncached_tokens = seq.num_tokens - max(match.num_tokens, match.num_inflight_tokens)
        request = seq.request
        self._expiries.set(
            seq,
            min(
                (t for t in (request.deadline, request.queue_timeout) if t is not None),
                default=None,
            ),
        )
        self._requests.setdefault(request.request_id, {})[seq.index] = seq
        self.waiting.push(seq)
        self.suspects = ()

    def knows(self, seq: Sequence) -> bool:
        """Return whether ``seq`` was added and has not finished."""
        return seq.index in self._requests.get(seq.request.request_id, {})

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.deferred)

    def list_all(self, request_id: str) -> list[Sequence]:
        """Return the unfinished sequences of a request."""
        return [*self._requests.get(request_id, {}).values()]

    def set_yielding(self, request_id: str, *, yields: bool) -> None:
        """Let the sequences of a request yield their places to all others, or no longer.

        The request may not have arrived yet, because its grammar is being compiled.
        """
        if yields:
            self._yielding.add(request_id)
            if len(self._yielding) > MAX_YIELDING:  # most of them have ended meanwhile
                self._yielding.intersection_update(self._requests)
        else:
            self._yielding.discard(request_id)
        for seq in self.list_all(request_id):
            priority = self._choose_priority(seq)
            if seq in self.waiting:
                self.waiting.move(seq, priority)
            elif seq.status is Status.RUNNING:
                self._restore_priority(seq)
            else:
                seq.effective_priority = priority

    def _choose_priority(self, seq: Sequence) -> int:
        if seq.request.request_id in self._yielding:
            return YIELDING
        return self.waiting.policy.effective_priority(seq)

    def _restore_priority(self, seq: Sequence) -> None:
        """Move a running sequence to its own class, or to that of a follower if it is higher."""
        self.running.move(seq, self._choose_priority(seq))
        for follower in self.deferred.list_followers(seq):
            self.running.promote(seq, follower.effective_priority)

    # --- running ---------------------------------------------------------------------------------

    def admit(self, seq: Sequence, seq_id: int, num_cached: int) -> None:
        """Let a waiting sequence run under ``seq_id``, which has ``num_cached`` of its tokens."""
        self.waiting.take(seq)
        seq.seq_id, seq.num_computed_tokens = seq_id, num_cached
        if seq.num_cached_tokens is None:  # cells reused after parking do not count
            seq.num_cached_tokens = num_cached
            siblings = self._requests[seq.request.request_id].values()
            if seq.request.queue_timeout is not None and not any(
                s.status is Status.RUNNING for s in siblings
            ):
                for sibling in siblings:  # the request has started, so only its deadline counts
                    self._expiries.set(sibling, seq.request.deadline)
            self.length_estimates.record_admission(seq)
            seq.admitted = self._now
            self.waiting.policy.served(seq, seq.num_lacking_tokens, 0)
        seq.status = Status.RUNNING
        self.running.add(seq)

    def defer(self, seq: Sequence, match: Match) -> list[Operation] | None:
        """Let ``seq`` wait for a leader to compute its prefix, or for a read from disk.

        Returns operations that make room in RAM, or None if there is no room for the read.
        """
        operations: list[Operation] = []
        if match.leader is not None:
            self.running.promote(match.leader, seq.effective_priority)
            self.deferred.follow(match.leader, match.num_inflight_tokens, seq)
        else:
            snapshot = match.source
            assert isinstance(snapshot, Snapshot)
            if snapshot.tier is StorageTier.DISK:
                room = self.kv_cache.snapshots.read(snapshot)
                if room is None:
                    return None
                operations += room
                assert self.disk is not None, "only a disk tier creates files"
                self.disk.read(snapshot)
            self.deferred.await_read(snapshot, seq)
        self.waiting.remove(seq)
        if seq.admitted is None:
            seq.wait_reason = self.deferred.reasons[seq]
        return operations

    # --- parking and resuming --------------------------------------------------------------------

    def park(self, seq: Sequence) -> list[Operation]:
        """Release a running sequence's cells. It resumes later from the tokens that are then still
        in the pool or in RAM. Return operations that must run before others that use these cells.
        """
        operations = self._free_cells(seq, soon=True)
        self.running.remove(seq)
        seq.status, seq.waits_since = Status.PARKED, self._now
        if seq.effective_priority == AGED:
            seq.effective_priority = self._choose_priority(seq)
        self.waiting.push(seq)
        self._statistics.num_parked += 1
        seq.num_parked += 1
        return operations

    def empty_cells(self) -> list[Operation]:
        """Park all running sequences; return operations that empty all cells."""
        while self.running:
            self._pending_operations += self.park(self.running.tail)
        return [
            *self.drain_pending_operations(),
            *(self.kv_cache.make_room(self.kv_cache.cells.size) or ()),
        ]

    def drain_pending_operations(self) -> list[Operation]:
        """Return and clear the operations that must run before all others."""
        pending, self._pending_operations = self._pending_operations, []
        return pending

    def _requeue(self, seqs: list[Sequence]) -> None:
        """Put deferred sequences back into the queue, at their old positions."""
        for seq in seqs:
            self.waiting.push(seq)

    # --- checkpoints ------------------------------------------------------------------------------

    def count_until_checkpoint(self, seq: Sequence) -> int:
        """Return the number of tokens up to the next position where the state of ``seq`` must be
        saved; all its tokens if there is none.
        """
        return min(
            (
                at - seq.num_computed_tokens
                for at in self._list_checkpoints(seq)
                if at > seq.num_computed_tokens
            ),
            default=seq.num_tokens,
        )

    def _list_checkpoints(self, seq: Sequence) -> list[int]:
        """Return the positions, from the current one on, where the state is saved."""
        awaited = self.deferred.count_awaited(seq)
        is_prompt = seq.num_computed_tokens < seq.num_prompt_tokens
        expected = seq.list_boundaries() if is_prompt else ()
        positions = self.kv_cache.layout.state.select_checkpoints((*awaited, *expected))
        last = seq.request.num_base_tokens or seq.num_tokens
        return [at for at in positions if seq.num_computed_tokens <= at <= last]

    def record_progress(self, seq: Sequence) -> None:
        """Save the state of ``seq`` at checkpoints; requeue followers whose prefix it has
        computed.
        """
        if seq.status is not Status.RUNNING:
            return
        if seq.num_computed_tokens in self._list_checkpoints(seq):
            self._pending_operations += self.kv_cache.checkpoint(seq)
        if self.deferred.count_awaited(seq):
            self._requeue(self.deferred.take_ready_followers(seq))
            if seq.effective_priority != AGED:
                self._restore_priority(seq)

    # --- snapshots in files ----------------------------------------------------------------------

    def finish_write(self, key: int, *, succeeded: bool) -> None:
        """Record that a file contains a snapshot, or that it could not be written."""
        self._statistics.num_disk_failures += not succeeded
        if succeeded:
            self.kv_cache.snapshots.record_written(key)

    def finish_read(self, key: int, *, succeeded: bool) -> None:
        """Record that a snapshot is in RAM or could not be read, and requeue the sequences that
        wait for it.
        """
        self._statistics.num_disk_failures += not succeeded
        self.kv_cache.snapshots.finish_read(key, succeeded=succeeded)
        self._requeue(self.deferred.take_readers(key))

    def write_saved(self, operations: Iterable[Operation]) -> None:
        """Start writing to files the snapshots that completed ``operations`` have saved to RAM."""
        if self.disk is None:
            return
        dropped = {operation.snapshot for operation in operations if isinstance(operation, Drop)}
        for operation in operations:
            if isinstance(operation, Save) and operation.snapshot not in dropped:
                snapshot = self.kv_cache.snapshots.ram.get(operation.snapshot)
                if snapshot is not None:
                    self.disk.write(snapshot)

    # --- ending ----------------------------------------------------------------------------------

    def abort(self, request_id: str, index: int | None = None) -> list[TokenOutput]:
        """End a request's sequences (all, or the one with ``index``), wherever they are."""
        seqs = self._requests.get(request_id, {})
        if index is None:
            self._yielding.discard(request_id)
        for seq in [seq for i, seq in seqs.items() if index in (None, i)]:
            self._end(seq, FinishReason.ABORT)
        return self.take_outputs()

    def withdraw(self, request_id: str) -> bool:
        """Forget a request of which no sequence has begun. Return False if there is none."""
        seqs = self.list_all(request_id)
        waits = all(seq in self.waiting and seq.status is Status.WAITING for seq in seqs)
        if not seqs or not waits:
            return False
        for seq in seqs:
            self.waiting.remove(seq)
            self.release(seq)
        return True

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence without a token."""
        self.suspects = (seq,)
        if seq in self.waiting:
            self.waiting.remove(seq)
        elif not self.deferred.discard(seq):
            self.running.remove(seq)
        output = seq.make_end_output(reason)
        self.release(seq)
        self.outputs.append(output)
        self.suspects = ()

    def drop_failed(self, seq: Sequence) -> None:
        """End a sequence that cannot be sampled. None of its cells are reused."""
        seq_id, seq.num_computed_tokens = seq.seq_id, 0
        self._end(seq, FinishReason.ERROR)
        self._pending_operations += self.kv_cache.invalidate_seq_ids({seq_id})

    def undo_draft(self, seq: Sequence, seq_id: int, keep: int) -> None:
        """Remove the cells of rejected draft tokens, after the first ``keep`` of ``seq_id``."""
        if seq.status is Status.RUNNING:
            self._pending_operations += self.kv_cache.rewind(seq_id, keep)
        else:  # the sequence is released, but its draft tokens are still in the cells
            self._pending_operations.append(Trim(seq_id, min(keep, seq.num_tokens)))

    def take_outputs(self) -> list[TokenOutput]:
        """Return and clear the outputs that no call has returned yet."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def finish(self, seq: Sequence) -> None:
        """End a running sequence that has its last token."""
        self.running.remove(seq)
        self.release(seq)

    def release(self, seq: Sequence) -> None:
        """Forget a sequence and free its seq_id and cells. Every sequence ends here."""
        self._pending_operations += self._free_cells(seq)
        if self._speculation is not None:
            self._speculation.forget(seq)
        seq.status = Status.FINISHED
        siblings = self._requests[seq.request.request_id]
        del siblings[seq.index]
        if not siblings:
            del self._requests[seq.request.request_id]
            self._yielding.discard(seq.request.request_id)

    def _free_cells(self, seq: Sequence, *, soon: bool = False) -> list[Operation]:
        """Keep the tokens that others may reuse; return operations that empty the other cells."""
        operations: list[Operation] = []
        if seq.seq_id >= 0:
            seq_id, seq.seq_id = seq.seq_id, -1
            keep = seq.num_computed_tokens
            if 0 < seq.request.num_base_tokens < keep:
                state = self.kv_cache.layout.state
                keep = state.count_remaining(seq.request.num_base_tokens)
                operations = self.kv_cache.rewind(seq_id, keep)
            self.kv_cache.release(seq_id, seq.tokens[:keep], soon=soon)
            seq.num_computed_tokens = 0
            self._requeue(self.deferred.take_followers(seq))
        return operations

    # --- failures --------------------------------------------------------------------------------

    def fail(self, batch: Batch) -> list[TokenOutput]:
        """Undo a batch that could not be computed.

        The contents of all seq_ids that it affected are unknown, so its sequences are computed
        again from their tokens. Sequences with MAX_FAILURES failed batches end.
        """
        affected = batch.list_changed_seq_ids()
        self._pending_operations += self.kv_cache.invalidate(batch.operations)
        failed = {row.seq for row in batch.rows}
        for seq in [seq for seq in self.running if seq.seq_id in affected]:
            seq.num_computed_tokens = 0
            seq.num_failures += seq in failed
            if seq.num_failures < MAX_FAILURES:
                self._pending_operations += self.park(seq)
            else:
                self._end(seq, FinishReason.ERROR)
        self._pending_operations += self.kv_cache.invalidate_seq_ids(affected)
        return self.take_outputs()

    def recover(self) -> list[TokenOutput]:
        """Recover from an exception in any other method, which may have left the bookkeeping
        inconsistent.

        Rebuilds it from the sequences and their tokens; all cells count as empty. If the exception
        was raised for one sequence, it ends. If it was raised for several, each counts one more
        failed batch, as in ``fail``. After MAX_FAILURES recoveries without a completed step, all
        sequences end.
        """
        suspects = {seq for seq in self.suspects if self.knows(seq)}
        self._num_recoveries += 1
        self.kv_cache = self.kv_cache.without_cells()
        dropped = self.kv_cache.invalidate([*self._operations, *self._pending_operations])
        seq_ids = range(self.kv_cache.seq_ids.size + self.kv_cache.layout.num_spare_ids)
        self._operations, self._pending_operations = (
            [],
            [*dropped, *self.kv_cache.invalidate_seq_ids(set(seq_ids))],
        )
        self.waiting, self.deferred = Waiting(self.waiting.policy), Deferred()
        self.running = Running()
        for seq in [seq for seqs in self._requests.values() for seq in seqs.values()]:
            seq.status = Status.WAITING if seq.num_cached_tokens is None else Status.PARKED
            seq.seq_id, seq.num_computed_tokens = -1, 0
            seq.num_failures += seq in suspects
            must_end = (
                suspects == {seq} or max(seq.num_failures, self._num_recoveries) >= MAX_FAILURES
            )
            if must_end or not self._try_push(seq):
                self.release(seq)
                self.outputs.append(seq.make_end_output(FinishReason.ERROR))
        self.suspects = ()
        return self.take_outputs()

    def _try_push(self, seq: Sequence) -> bool:
        try:
            self.waiting.push(seq)
        except Exception:
            log.exception("cannot queue %s", seq.name)
            return False
        return True

    # --- invariants ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. Call it between steps."""
        self.kv_cache.check()
        for seq in self.running:
            assert seq.status is Status.RUNNING, repr(seq)
            assert self.kv_cache.seq_ids.is_leased(seq.seq_id), repr(seq)
            assert 0 <= seq.num_computed_tokens < seq.num_tokens, repr(seq)
            assert self.kv_cache.count_cells(seq.seq_id) == seq.num_computed_tokens, repr(seq)
        assert self.kv_cache.seq_ids.num_leased == len(self.running), str(self)
        for seq in [*self.waiting, *self.deferred]:
            assert seq.status in (Status.WAITING, Status.PARKED), repr(seq)
            assert seq.seq_id == -1, repr(seq)
        self.running.check()
        self.deferred.check(self.running)
        seqs = [*self.running, *self.waiting, *self.deferred]
        assert len(set(seqs)) == len(seqs), f"a sequence is in two states: {self}"
        known = {seq for seqs in self._requests.values() for seq in seqs.values()}
        assert known == set(seqs), f"a sequence is lost: {self}"

    def __str__(self) -> str:
        waiting = f"{len(self.waiting)}+{len(self.deferred)}"
        return (
            f"<{type(self).__name__} running {[*self.running]} waiting {waiting} {self.kv_cache}>"
        )
