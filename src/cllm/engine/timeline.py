"""Records what the engine does while somebody asks for it."""

from __future__ import annotations

from collections import deque
from itertools import chain, islice
from typing import NamedTuple

from cllm.core.batch import Batch
from cllm.core.sequence import Sequence, Status
from cllm.core.timeline import SequenceSpan, StepTimes, Timeline
from cllm.scheduler.scheduler import Scheduler

MAX_STEPS = 20_000
MAX_SPANS = 50_000


class StepMoments(NamedTuple):
    """When the parts of a step began, in seconds, and when the last one ended."""

    scheduling: float
    forwarding: float
    sampling: float
    updating: float
    updated: float


class Decoding(NamedTuple):
    """Steps without a gap in which a sequence has decoded."""

    begin: float
    end: float
    num_tokens: int  # of the sequence when it began
    step: int  # the last one


class TimelineRecorder:
    """Records the steps of a scheduler and the spans of its sequences, the last MAX_STEPS and
    MAX_SPANS of them.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)
        self._spans: deque[SequenceSpan] = deque(maxlen=MAX_SPANS)
        self._num_added = 0
        # how often each sequence that has had a row was parked before that
        self._num_parked = {seq: seq.num_parked for seq in scheduler.sequences.running}
        self._decoding: dict[Sequence, Decoding] = {}

    def add(self, batch: Batch, begun: float, moments: StepMoments, ended: float) -> None:
        """Record a step, whose outputs the scheduler has got already."""
        step, cells = self._scheduler.step, self._scheduler.sequences.kv_cache.cells
        self._num_added += 1
        self._steps.append(
            StepTimes(
                step.number,
                begun,
                *moments,
                ended,
                step.num_rows,
                step.num_prefill_tokens,
                step.num_running,
                step.num_waiting,
                cells.num_held,
                cells.num_idle,
                str(step.blocked),
            )
        )
        begin, end = moments.scheduling, moments.updated
        for row in batch.rows:
            seq = row.seq
            num_parked = self._num_parked.get(seq)
            if num_parked != seq.num_parked:
                self._end_decoding(seq)
                self._add_wait(seq, begin, "" if seq.num_parked else str(seq.wait_reason))
            self._num_parked[seq] = seq.num_parked
            if row.num_samples and row.num_tokens == 1:
                known = self._decoding.get(seq)
                if known is not None and known.step < step.number - 1:
                    self._end_decoding(seq)
                    known = None
                if known is None:
                    known = Decoding(begin, end, row.start + 1, step.number)
                self._decoding[seq] = known._replace(end=end, step=step.number)
            else:
                self._add(seq, "prefill", begin, end, row.num_tokens)
            if seq.status is Status.FINISHED:
                self._end_decoding(seq)
                del self._num_parked[seq]

    def finish(self, now: float) -> Timeline:
        """Return what was recorded, with the spans that have not ended."""
        sequences = self._scheduler.sequences
        for seq in [*self._decoding]:
            self._end_decoding(seq)
        deferred = ((seq, str(reason)) for seq, reason in sequences.deferred.reasons.items())
        blocked = str(self._scheduler.step.blocked)
        waiting = ((seq, blocked) for seq in sequences.waiting)
        for seq, reason in islice(chain(deferred, waiting), MAX_SPANS // 2):
            self._add_wait(seq, now, reason)
        num_kept = len(self._steps) + len(self._spans)
        return Timeline([*self._steps], [*self._spans], self._num_added - num_kept)

    def _add_wait(self, seq: Sequence, end: float, reason: str) -> None:
        phase = "parked" if seq.num_parked else "queued"
        self._add(seq, phase, seq.waits_since, end, reason=reason)

    def _end_decoding(self, seq: Sequence) -> None:
        if (known := self._decoding.pop(seq, None)) is not None:
            count = seq.num_tokens - known.num_tokens
            self._add(seq, "decode", known.begin, known.end, count)

    def _add(
        self,
        seq: Sequence,
        phase: str,
        begin: float,
        end: float,
        num_tokens: int = 0,
        reason: str = "",
    ) -> None:
        self._num_added += 1
        account = seq.request.account
        self._spans.append(SequenceSpan(seq.name, account, phase, begin, end, num_tokens, reason))
