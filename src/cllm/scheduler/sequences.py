"""The unfinished sequences: the state of each, and the changes from one state to another.

Every sequence ends in one function, ``release``, which frees its seq_id and cells.

Invariants: an unfinished sequence is in exactly one of ``running``, ``waiting`` and ``deferred``;
RUNNING means a leased seq_id; between steps a seq_id has as many cells as its sequence has computed
tokens; a deferred sequence has a leader that runs or a snapshot that is being read.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable
from typing import Protocol

from cllm.core.batch import Batch, Drop, Operation, Save
from cllm.core.output import FinishReason, TokenOutput
from cllm.core.sequence import Sequence, Status
from cllm.kv_cache.layouts import Layout
from cllm.kv_cache.ledger import Ledger
from cllm.kv_cache.tiers import Place, Snapshot
from cllm.scheduler.deferred import Deferred
from cllm.scheduler.policy import Policy
from cllm.scheduler.speculation import Speculation
from cllm.scheduler.waiting import Waiting

log = logging.getLogger("cllm.engine")

MAX_FAILURES = 3  # failed batches in a row after which a sequence is assumed to be the cause


class Disk(Protocol):
    """Copies snapshots between RAM and files, in a thread. Its methods raise no exceptions."""

    def write(self, snapshot: Snapshot) -> None:
        """Start writing a snapshot that is in RAM."""
        ...

    def start_read(self, snapshot: Snapshot) -> None:
        """Start reading a snapshot; ``was_read`` must follow, after this call."""
        ...


def rank(seq: Sequence) -> tuple[int, int]:
    """Return the sort key of a running sequence: class, then arrival.

    The last sequence is parked first.
    """
    return seq.urgency, seq.order


class Sequences:
    """Moves sequences between states, and rebuilds the bookkeeping if an exception has left it
    inconsistent.
    """

    def __init__(self, ledger: Ledger, policy: Policy, speculation: Speculation | None) -> None:
        self.ledger = ledger
        self.waiting = Waiting(policy)
        self.running: list[Sequence] = []
        self.deferred = Deferred()
        self.num_parked = 0
        self._speculation = speculation
        self._requests: dict[str, dict[int, Sequence]] = {}
        self._expiries: list[tuple[float, int, Sequence]] = []
        self._next_order = 0
        self._outputs: list[TokenOutput] = []  # not returned by any call yet
        self._pending_operations: list[Operation] = []  # to run first in the next batch
        self._operations: list[Operation] = []  # of the batch being computed
        self._disk: Disk | None = None
        # the sequences that would have caused an exception raised now
        self._suspects: Iterable[Sequence] = ()
        self._num_recoveries = 0  # since the last step

    # --- arrival ---------------------------------------------------------------------------------

    def add(self, seq: Sequence, now: float) -> list[TokenOutput]:
        """Queue a sequence that arrived at ``now``. If it cannot be queued, return its last output.

        Its prompt must leave a cell for the first sampled token.
        """
        try:
            self._add(seq, now)
        except Exception:
            log.exception("%s was refused", seq.name)  # the sender should have checked it
            return self.recover() if self.knows(seq) else [seq.end_output(FinishReason.ERROR)]
        return []

    def _add(self, seq: Sequence, now: float) -> None:
        self._suspects = (seq,)
        if seq.num_prompt_tokens >= self.ledger.cells_per_seq:
            raise ValueError(f"{seq!r} can never fit into {self.ledger.cells_per_seq} cells")
        seq.arrived = now
        seq.urgency = self.waiting.policy.urgency(seq)
        seq.order, self._next_order = self._next_order, self._next_order + 1
        match = self.ledger.find(seq)
        seq.num_uncached_tokens = seq.num_tokens - max(match.num_tokens, match.num_inflight_tokens)
        request = seq.request
        self._expire_in(
            seq, min(filter(None, (request.deadline, request.queue_timeout)), default=None)
        )
        self._requests.setdefault(request.request_id, {})[seq.index] = seq
        self.waiting.push(seq)
        self._suspects = ()

    def _expire_in(self, seq: Sequence, seconds: float | None) -> None:
        seq.expires = None if seconds is None else seq.arrived + seconds
        if seq.expires is not None:
            heapq.heappush(self._expiries, (seq.expires, seq.order, seq))

    def knows(self, seq: Sequence) -> bool:
        """Return whether ``seq`` was added and has not finished."""
        return seq.index in self._requests.get(seq.request.request_id, {})

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.deferred)

    # --- parking and resuming --------------------------------------------------------------------

    def _park(self, seq: Sequence) -> None:
        """Release a running sequence's cells; it resumes later from what is left of them in the
        cells or in RAM.
        """
        self._give_back(seq, soon=True)
        self.running.remove(seq)
        seq.status = Status.PARKED
        self.waiting.push(seq)
        self.num_parked += 1

    def empty_cells(self) -> list[Operation]:
        """Park all running sequences; return operations that empty all cells."""
        while self.running:
            self._park(max(self.running, key=rank))
        return [
            *self.drain_pending_operations(),
            *(self.ledger.make_room(self.ledger.cells.size) or ()),
        ]

    def change_layout(self, num_cells: int, layout: Layout) -> None:
        """Use new cells. The old ones must be empty; see ``empty_cells``."""
        self.ledger = self.ledger.with_layout(num_cells, layout)

    def drain_pending_operations(self) -> list[Operation]:
        """Return and clear the operations that must run before all others."""
        owed, self._pending_operations = self._pending_operations, []
        return owed

    def _call_back(self, seqs: list[Sequence]) -> None:
        """Put deferred sequences back into the queue, at their old positions."""
        for seq in seqs:
            self.waiting.push(seq)

    # --- snapshots in files ----------------------------------------------------------------------

    def use_disk(self, disk: Disk) -> None:
        self._disk = disk

    def was_read(self, key: int, *, succeeded: bool) -> None:
        """Note that a snapshot is in RAM now or could not be read; requeue the sequences behind
        it.
        """
        snapshot = self.ledger.tiers.find(key)
        if snapshot is not None and succeeded:
            snapshot.place = Place.RAM
        elif snapshot is not None:
            self.ledger.drop(key)
        self._call_back(self.deferred.was_read(key))

    def write_saved(self, operations: Iterable[Operation]) -> None:
        """Start writing to files what operations that have run have saved to RAM."""
        if self._disk is None:
            return
        dropped = {operation.snapshot for operation in operations if isinstance(operation, Drop)}
        for operation in operations:
            if isinstance(operation, Save) and operation.snapshot not in dropped:
                snapshot = self.ledger.tiers.ram.get(operation.snapshot)
                if snapshot is not None:
                    self._disk.write(snapshot)

    # --- ending ----------------------------------------------------------------------------------

    def abort(self, request_id: str, index: int | None = None) -> list[TokenOutput]:
        """End a request's sequences (all, or the one with ``index``), wherever they are."""
        seqs = self._requests.get(request_id, {})
        for seq in [seq for i, seq in seqs.items() if index in (None, i)]:
            self._end(seq, FinishReason.ABORT)
        return self.take_outputs()

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            expires, _, seq = heapq.heappop(self._expiries)
            if seq.expires == expires and seq.status is not Status.FINISHED:
                self._end(seq, FinishReason.TIMEOUT)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence without a token."""
        self._suspects = (seq,)
        if seq in self.waiting:
            self.waiting.remove(seq)
        elif not self.deferred.discard(seq):
            self.running.remove(seq)
        output = seq.end_output(reason)
        self.release(seq)
        self._outputs.append(output)
        self._suspects = ()

    def take_outputs(self) -> list[TokenOutput]:
        """Return and clear the outputs that no call has returned yet."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def release(self, seq: Sequence) -> None:
        """Forget a sequence and free its seq_id and cells. Every sequence ends here."""
        self._give_back(seq)
        if self._speculation is not None:
            self._speculation.forget(seq)
        seq.status = Status.FINISHED
        siblings = self._requests[seq.request.request_id]
        del siblings[seq.index]
        if not siblings:
            del self._requests[seq.request.request_id]

    def _give_back(self, seq: Sequence, *, soon: bool = False) -> None:
        if seq.seq_id >= 0:
            seq_id, seq.seq_id = seq.seq_id, -1
            self.ledger.release(seq_id, seq.tokens[: seq.num_computed_tokens], soon=soon)
            seq.num_computed_tokens = 0
            self._call_back(self.deferred.stopped(seq))

    # --- failures --------------------------------------------------------------------------------

    def fail(self, batch: Batch) -> list[TokenOutput]:
        """Undo a batch that could not be computed.

        The contents of all seq_ids that it touched are unknown.

        Its sequences are computed again from their tokens. Sequences with MAX_FAILURES failed
        batches end.
        """
        touched, owed = self.ledger.invalidate_operations(batch.operations)
        touched |= {row.seq.seq_id for row in batch.rows}
        self._pending_operations += owed
        failed = {row.seq for row in batch.rows}
        for seq in [seq for seq in self.running if seq.seq_id in touched]:
            seq.num_computed_tokens = 0
            seq.num_failures += seq in failed
            if seq.num_failures < MAX_FAILURES:
                self._park(seq)
            else:
                self._end(seq, FinishReason.ERROR)
        self._pending_operations += self.ledger.invalidate_seq_ids(touched)
        return self.take_outputs()

    def recover(self) -> list[TokenOutput]:
        """Continue after an exception in any other method, which may have left the bookkeeping
        inconsistent.

        Rebuilds it from the sequences and their tokens; all cells count as empty. If one sequence
        was being worked on, it ends. If there were several, each counts one more failed batch, as
        in ``fail``. After MAX_FAILURES recoveries without a completed step, all sequences end.
        """
        suspects = {seq for seq in self._suspects if self.knows(seq)}
        self._num_recoveries += 1
        self.ledger = self.ledger.without_cells()
        _, dropped = self.ledger.invalidate_operations(
            [*self._operations, *self._pending_operations]
        )
        seq_ids = range(self.ledger.seq_ids.size + self.ledger.layout.num_spare_ids)
        self._operations, self._pending_operations = (
            [],
            [*dropped, *self.ledger.invalidate_seq_ids(set(seq_ids))],
        )
        self.waiting, self.deferred, self.running = Waiting(self.waiting.policy), Deferred(), []
        for seq in [seq for seqs in self._requests.values() for seq in seqs.values()]:
            seq.status = Status.WAITING if seq.num_cached_tokens is None else Status.PARKED
            seq.seq_id, seq.num_computed_tokens = -1, 0
            seq.num_failures += seq in suspects
            is_culprit = (
                suspects == {seq} or max(seq.num_failures, self._num_recoveries) >= MAX_FAILURES
            )
            if is_culprit or not self._could_push(seq):
                self.release(seq)
                self._outputs.append(seq.end_output(FinishReason.ERROR))
        return self.take_outputs()

    def _could_push(self, seq: Sequence) -> bool:
        try:
            self.waiting.push(seq)
        except Exception:
            log.exception("%s cannot be queued", seq.name)
            return False
        return True

    # --- invariants ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. Call it between steps."""
        self.ledger.check()
        for seq in self.running:
            assert seq.status is Status.RUNNING, repr(seq)
            assert self.ledger.seq_ids.is_leased(seq.seq_id), repr(seq)
            assert 0 <= seq.num_computed_tokens < seq.num_tokens, repr(seq)
            assert self.ledger.num_cells_of(seq.seq_id) == seq.num_computed_tokens, repr(seq)
        assert self.ledger.seq_ids.num_leased == len(self.running), str(self)
        for seq in [*self.waiting, *self.deferred]:
            assert seq.status in (Status.WAITING, Status.PARKED), repr(seq)
            assert seq.seq_id == -1, repr(seq)
        self.deferred.check(self.running)
        places = [*self.running, *self.waiting, *self.deferred]
        assert len(set(places)) == len(places), f"a sequence in two places: {self}"
        known = {seq for seqs in self._requests.values() for seq in seqs.values()}
        assert known == set(places), f"a sequence is lost: {self}"

    def __str__(self) -> str:
        waiting = f"{len(self.waiting)}+{len(self.deferred)}"
        return f"<{type(self).__name__} running {self.running} waiting {waiting} {self.ledger}>"
