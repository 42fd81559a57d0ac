"""What is computed in each step, and for whom.

One order: served from its head (the running ones in order of admission, then the waiting ones in order of arrival),
taken from its tail when cells run short. A sequence finishes in the step that samples its last token, and its seq_id
and cells are given back in one function, ``release``, whatever ended it.

Invariants: a sequence is in exactly one of ``waiting`` and ``running`` until it has finished; RUNNING means a leased
seq_id; a preempted sequence was not scheduled in the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from cllm.core.batch import Batch, Row, Trim
from cllm.core.output import Stats, TokenOutput
from cllm.core.sequence import FinishReason, Sequence, Status
from cllm.kv_cache.ledger import Ledger

# While somebody decodes, prompts get a quarter of a step, so that a long one does not hold up the others.
PREFILL_SHARE = 4


class Scheduler:
    """First come, first served; decoding rows before prompts; a prompt enters in chunks."""

    def __init__(self, ledger: Ledger, max_num_batched_tokens: int, end_tokens: list[int]) -> None:
        """``end_tokens``: the ids with which the model says that it has finished."""
        if max_num_batched_tokens < ledger.seq_ids.size:
            raise ValueError(f"{max_num_batched_tokens} tokens a step do not hold {ledger.seq_ids.size} rows")
        self.ledger = ledger
        self.max_num_batched_tokens = max_num_batched_tokens
        self.end_tokens = frozenset(end_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._owed: list[Trim] = []  # for the seq_ids of a batch that failed, whose cells are unknown
        self.num_steps = 0
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; its prompt is shorter than ledger.cells_per_seq."""
        if seq.num_prompt_tokens >= self.ledger.cells_per_seq:
            raise ValueError(f"{seq!r} can never fit into {self.ledger.cells_per_seq} cells")
        self.waiting.append(seq)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> Batch | None:
        """Choose the rows of the next step, or None if there is nothing to do."""
        operations = self._make_room_for_decoding()
        rows = [Row(seq, seq.num_computed_tokens, 1, True) for seq in self.running if seq.num_lacking_tokens == 1]
        for row in rows:
            self.ledger.hold(row.seq.seq_id, 1)
        budget = self.max_num_batched_tokens - len(rows)
        if rows:
            budget = min(budget, max(1, self.max_num_batched_tokens // PREFILL_SHARE))
        for seq in self._lacking_many(operations):
            count = min(seq.num_lacking_tokens, budget)
            room = self.ledger.make_room(count)
            if room is None:
                break
            operations += room
            self.ledger.hold(seq.seq_id, count)
            rows.append(Row(seq, seq.num_computed_tokens, count, count == seq.num_lacking_tokens))
            budget -= count
            if budget == 0:
                break
        if not rows:
            return None
        operations, self._owed = [*self._owed, *operations], []
        rows.sort(key=lambda row: row.seq.seq_id)
        return Batch(rows, operations)

    def _make_room_for_decoding(self) -> list[Trim]:
        """Free a cell for each sequence that lacks one token, preempting from the tail until they fit."""
        while True:
            num_rows = sum(seq.num_lacking_tokens == 1 for seq in self.running)
            operations = self.ledger.make_room(num_rows)
            if operations is not None:
                return operations
            self._preempt(self.running[-1])

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.release(seq)
        seq.status = Status.WAITING
        seq.num_computed_tokens = 0
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _lacking_many(self, operations: list[Trim]) -> Iterator[Sequence]:
        """The running sequences that lack more than one token, then waiting ones as they are admitted."""
        yield from [seq for seq in self.running if seq.num_lacking_tokens > 1]
        while self.waiting and self.ledger.seq_ids.num_free and self._fits(self.waiting[0]):
            seq = self.waiting.popleft()
            seq.seq_id, seq.num_computed_tokens, trims = self.ledger.lease(seq.tokens)
            if seq.num_cached_tokens is None:  # not what a preempted one finds of its own
                seq.num_cached_tokens = seq.num_computed_tokens
            seq.status = Status.RUNNING
            operations += trims
            self.running.append(seq)
            yield seq

    def _fits(self, seq: Sequence) -> bool:
        """True if all the tokens of a waiting sequence fit beside one more token for each running one."""
        return seq.num_tokens + len(self.running) < self.ledger.num_available or not self.running

    def update(self, batch: Batch, tokens: list[int]) -> list[TokenOutput]:
        """Take in the sampled tokens, one for each sampling row in order; release what has finished."""
        self.num_steps += 1
        outputs = []
        sampled = iter(tokens)
        for seq, start, count, samples in batch.rows:
            seq.num_computed_tokens = start + count
            if samples:
                outputs.append(self._append(seq, next(sampled)))
        if any(output.finish for output in outputs):
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        return outputs

    def _append(self, seq: Sequence, token: int) -> TokenOutput:
        seq.append(token)
        params = seq.request.params
        finish, is_text = "", True
        if token in self.end_tokens and not params.ignore_eos:
            finish, is_text = FinishReason.STOP, False
        elif token in params.stop_token_ids:
            finish, is_text = FinishReason.STOP, False
        elif seq.num_tokens >= seq.limit:
            finish = FinishReason.LENGTH
        if finish:
            self.release(seq)
        first = seq.index == 0 and seq.num_tokens == seq.num_prompt_tokens + 1
        num_cached = (seq.num_cached_tokens or 0) if first else 0
        return TokenOutput(seq.request.request_id, seq.index, token, finish, is_text, num_cached)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenOutput]:
        """End a request's sequences (all, or the one with ``index``), wherever they are."""

        def meant(seq: Sequence) -> bool:
            return seq.request.request_id == request_id and index in (None, seq.index)

        ended = [seq for seq in [*self.running, *self.waiting] if meant(seq)]
        for seq in ended:
            self.release(seq)
        self.running = [seq for seq in self.running if seq.status is not Status.FINISHED]
        self.waiting = deque(seq for seq in self.waiting if seq.status is not Status.FINISHED)
        return [TokenOutput(request_id, seq.index, -1, FinishReason.ABORT, False) for seq in ended]

    def fail(self, batch: Batch) -> list[TokenOutput]:
        """End the sequences of a batch that could not be computed; what their cells hold is unknown."""
        self._owed = [*batch.operations, *(Trim(row.seq.seq_id, 0) for row in batch.rows)]
        outputs = []
        for seq in [row.seq for row in batch.rows]:
            seq.num_computed_tokens = 0
            self.release(seq)
            outputs.append(TokenOutput(seq.request.request_id, seq.index, -1, FinishReason.ERROR, False))
        self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        return outputs

    def release(self, seq: Sequence) -> None:
        """Give back what a sequence holds. The only place where that happens."""
        seq.status = Status.FINISHED
        if seq.seq_id >= 0:
            seq_id, seq.seq_id = seq.seq_id, -1
            self.ledger.release(seq_id, seq.tokens[: seq.num_computed_tokens])

    def stats(self) -> Stats:
        ledger = self.ledger
        return Stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_seq_ids=ledger.seq_ids.size,
            num_seq_ids_in_use=ledger.seq_ids.num_leased,
            num_cells=ledger.num_cells,
            num_cells_held=ledger.num_held,
            num_cells_idle=ledger.num_idle,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken; to be called between steps."""
        self.ledger.check()
        for seq in self.running:
            assert seq.status is Status.RUNNING, repr(seq)
            assert self.ledger.seq_ids.is_leased(seq.seq_id), repr(seq)
            assert 0 <= seq.num_computed_tokens < seq.num_tokens, repr(seq)
        assert self.ledger.seq_ids.num_leased == len(self.running), str(self)
        for seq in self.waiting:
            assert seq.status is Status.WAITING, repr(seq)
            assert seq.seq_id == -1, repr(seq)

    def __str__(self) -> str:
        return f"<Scheduler running {self.running} waiting {len(self.waiting)} {self.ledger}>"
