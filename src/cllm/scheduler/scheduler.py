"""Decides what each step computes, and for which sequences.

All sequences have one order: the running ones by class and arrival, then the waiting ones as the
policy sorts them. They are served from the head of this order. When cells run short, sequences are
parked from its tail. A sequence finishes in the step that samples its last token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from cllm.core.batch import Batch, Operation, Row, Trim
from cllm.core.output import FAILED, NO_TOKEN, FinishReason, Logprobs, Stats, TokenOutput
from cllm.core.sequence import Sequence, Status
from cllm.kv_cache.ledger import Ledger, Match
from cllm.kv_cache.tiers import Place, Snapshot
from cllm.scheduler.expectations import Expectations
from cllm.scheduler.policy import Policy, split_prefill_budget
from cllm.scheduler.sequences import Sequences, rank
from cllm.scheduler.speculation import Speculation
from cllm.scheduler.step_cost import StepCost
from cllm.scheduler.trace import MAX_STEPS, Step, stats_of, step_of

NOTHING: Mapping[int, Logprobs] = {}


class SchedulerParams(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one step. max_num_batched_tokens: tokens. max_num_samples: rows of logits, at least
    one for each running sequence. tile: see ModelInfo. target_itl: seconds between two tokens of a
    sequence that other requests' prompts may cause; None gives prompts all the space there is.
    """

    max_num_batched_tokens: int = 512
    max_num_samples: int = 512
    tile: int = 16
    target_itl: float | None = 1.0


class Scheduler(Sequences):
    """Decides what to compute: ``schedule`` returns a batch, ``update`` takes the tokens sampled
    from it.
    """

    def __init__(
        self,
        ledger: Ledger,
        params: SchedulerParams,
        end_tokens: list[int],
        policy: Policy,
        speculation: Speculation | None = None,
    ) -> None:
        """``end_tokens``: ids of the tokens with which the model ends its output."""
        if params.max_num_batched_tokens < ledger.seq_ids.size:
            raise ValueError(
                f"{params.max_num_batched_tokens} tokens a step do not hold "
                f"{ledger.seq_ids.size} rows"
            )
        super().__init__(ledger, policy, speculation)
        self.params = params
        self.end_tokens = frozenset(end_tokens)
        self.cost = StepCost(params.tile)
        self.trace: deque[Step] = deque(maxlen=MAX_STEPS)
        self.expected = Expectations()
        self.begun = 0.0  # when the present step began
        self.budget = 0  # the tokens that it may prefill
        self._reserved = 0.0  # seconds of the next step that prompts must leave for side jobs
        self.blocked = ""  # why the head of the queue was not admitted in the last step
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_guesses = 0
        self.num_accepted = 0

    # --- one step --------------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch | None:
        """Return the next batch, or None if there is nothing to compute.

        ``update`` or ``fail`` must follow.
        """
        # 1. Expire: requests that have timed out end.
        # 2. Yield: one running sequence is parked if a waiting one of a higher class needs its
        #    seq_id or its cells.
        # 3. Decode: each running sequence that lacks one token gets a row. If cells run short, the
        #    tail is parked.
        # 4. Admit: waiting sequences start to run, in the order of the policy, until one cannot be
        #    admitted.
        # 5. Prefill: prompts get rows within the budget, served from the head of ``unserved``. If
        #    cells run short, the tail of ``unserved`` is parked. A sequence leaves ``unserved``
        #    either with a row or without its cells.
        self.begun, self.blocked, self._suspects = now, "", ()
        reserved, self._reserved = self._reserved, 0.0
        self._expire(now)
        self._suspects = self.running
        self._yield_to_a_higher_class(now)
        operations = self._operations = self.drain_pending_operations()
        rows = self._decode(operations)
        num_tokens = sum(row.size for row in rows)
        space, shares = self.params.max_num_batched_tokens - num_tokens, self.ledger.layout.shares
        target_itl = None if self.params.target_itl is None else self.params.target_itl - reserved
        self.budget = self.cost.prefill_budget(
            space, len(rows), num_tokens, target_itl, shares=shares
        )
        self._admit_waiting(now, operations)
        self._suspects = self.running
        rows += self._prefill(rows, operations)
        self._suspects = ()
        if not rows and not operations:
            return None
        rows.sort(key=lambda row: row.seq.seq_id)
        return Batch(rows, operations)

    def reserve(self, seconds: float) -> None:
        """Leave ``seconds`` of the next step's target time for a side job."""
        self._reserved += seconds

    def _row(self, seq: Sequence, count: int, draft: tuple[int, ...] = ()) -> Row:
        self._suspects = (seq,)
        self.ledger.hold(seq.seq_id, count + len(draft))
        num_samples = 1 + len(draft) if count == seq.num_lacking_tokens else 0
        num_scores = (
            seq.count_prompt_logprobs(seq.num_computed_tokens, count)
            if seq.num_pending_prompt_logprobs
            else 0
        )
        return Row(seq, seq.num_computed_tokens, count, num_samples + num_scores, draft, num_scores)

    def _decode(self, operations: list[Operation]) -> list[Row]:
        """Return a row for each sequence that lacks one token, after parking sequences that do not
        fit.

        The rows get draft tokens if all running sequences decode and none waits.
        """
        decoding = [seq for seq in self.running if seq.num_lacking_tokens == 1]
        drafts: dict[Sequence, tuple[int, ...]] = {}
        if (
            self._speculation is not None
            and decoding
            and len(decoding) == len(self.running)
            and not self.waiting
        ):
            drafts = self._speculation.propose(
                decoding, self.cost, self.params.max_num_batched_tokens
            )
        while (
            room := self.ledger.make_room(len(decoding) + sum(map(len, drafts.values())))
        ) is None:
            if drafts:
                drafts = {}
                continue
            self._park(max(self.running, key=rank))
            decoding = [seq for seq in self.running if seq.num_lacking_tokens == 1]
        operations += room
        return [self._row(seq, 1, drafts.get(seq, ())) for seq in decoding]

    def _prefill(self, decoding: list[Row], operations: list[Operation]) -> list[Row]:
        """Return rows for the running sequences that lack more than one token, within the prefill
        budget.
        """
        served = {row.seq for row in decoding}
        lacking = [seq for seq in self.running if seq not in served]
        unserved = dict(
            split_prefill_budget(lacking, self.budget, self.cost.efficient_prefill_tokens)
        )
        rows: list[Row] = []
        while unserved:
            seq, share = next(iter(unserved.items()))
            if share == 0:
                self.blocked = (
                    self.blocked
                    or f"the step has enough tokens of prompts, of {self.budget} at most"
                )
                break
            self._suspects = (seq,)
            count = min(
                share,
                self._until_checkpoint(seq),
                self._until_logits_run_out(seq, [*decoding, *rows]),
            )
            room = self._make_room(seq, count, unserved)
            if room is not None:
                del unserved[seq]
                operations += room
                rows.append(self._row(seq, count))
        return rows

    def _make_room(
        self, seq: Sequence, count: int, unserved: dict[Sequence, int]
    ) -> list[Operation] | None:
        """Return operations that free ``count`` cells for ``seq``, after parking from the tail of
        ``unserved``.

        None if ``seq`` itself became the tail: then it is parked too.
        """
        while (room := self.ledger.make_room(count)) is None:
            tail = max(unserved, key=rank)
            if tail is seq:
                self.blocked = (
                    f"no cells: {seq.name} needs {count}, {self.ledger.num_available} are to be had"
                )
            del unserved[tail]
            self._park(tail)
            if tail is seq:
                return None
        return room

    def _until_checkpoint(self, seq: Sequence) -> int:
        """Return the number of tokens up to the next position where the state of ``seq`` must be
        saved.
        """
        return min(
            (at - seq.num_computed_tokens for at in self._checkpoints(seq)), default=seq.num_tokens
        )

    def _until_logits_run_out(self, seq: Sequence, rows: list[Row]) -> int:
        """Return how many tokens of ``seq`` fit into the step's rows of logits, if its prompt
        logprobs are needed.

        Reserves a row for each other running sequence.
        """
        if not seq.num_pending_prompt_logprobs:
            return seq.num_tokens
        space = (
            self.params.max_num_samples
            - sum(row.num_samples for row in rows)
            - (len(self.running) - len(rows) - 1)
        )
        return (
            max(
                0,
                seq.num_prompt_tokens
                - 1
                - seq.num_pending_prompt_logprobs
                - seq.num_computed_tokens,
            )
            + space
        )

    def _checkpoints(self, seq: Sequence) -> list[int]:
        """Return the positions ahead where state is saved: where followers wait, and before the
        last prompt token.
        """
        if self.ledger.layout.trims:
            return []
        awaited = self.deferred.awaited(seq)
        return [at for at in (*awaited, seq.num_prompt_tokens - 1) if at > seq.num_computed_tokens]

    # --- admission -------------------------------------------------------------------------------

    def _admit_waiting(self, now: float, operations: list[Operation]) -> None:
        """Admit waiting sequences, in the order of the policy, until one cannot be admitted."""
        growth = self._expected_growth(*self.running) if self.waiting else 0
        self._suspects = self.waiting
        while (seq := self.waiting.head(now)) is not None:
            self._suspects = (seq,)
            if not self.ledger.seq_ids.num_free:
                self.blocked = f"all {self.ledger.seq_ids.size} sequence ids are in use"
                return
            match = self.ledger.find(seq)
            if seq.num_failures and any(other.num_failures for other in self.running):
                self.blocked = (
                    f"{seq.name} and another one were in a step that failed: not both again"
                )
                return
            if match.is_on_its_way:
                if len(self.deferred) >= 2 * self.ledger.seq_ids.size:
                    self.blocked = f"{len(self.deferred)} already wait for prefixes"
                    return
                leaving = self._defer(seq, match)
                if leaving is not None:
                    operations += leaving
                    continue
                match = Match()
            if not self._fits(seq, match, growth):
                return
            leased = self.ledger.lease(seq, match) or self.ledger.lease(seq, Match())
            assert leased is not None, "nothing always fits"
            operations += self._admit(seq, *leased)
            growth += self._expected_growth(seq)
            self._suspects = self.waiting

    def _fits(self, seq: Sequence, match: Match, growth: int) -> bool:
        """Return whether ``seq`` will probably find enough cells, if running sequences need
        ``growth`` more.
        """
        if not self.running or not self.ledger.layout.shares:
            return True
        need = self.expected.size(seq) - self.ledger.num_shared(match)
        if need + growth <= self.ledger.num_available:
            return True
        self.blocked = (
            f"no cells: {seq.name} needs {need}, those who run {growth} more, "
            f"{self.ledger.num_available} are to be had"
        )
        return False

    def _expected_growth(self, *seqs: Sequence) -> int:
        """Return the number of further cells that running sequences will probably need."""
        return sum(self.expected.size(seq) - self.ledger.num_cells_of(seq.seq_id) for seq in seqs)

    def _admit(
        self, seq: Sequence, seq_id: int, num_cached: int, operations: list[Operation]
    ) -> list[Operation]:
        self.waiting.take(seq)
        seq.seq_id, seq.num_computed_tokens = seq_id, num_cached
        if seq.num_cached_tokens is None:  # a parked one's own cells are not counted as cached
            seq.num_cached_tokens = num_cached
            siblings = self._requests[seq.request.request_id].values()
            if seq.request.queue_timeout is not None and not any(
                s.status is Status.RUNNING for s in siblings
            ):
                for sibling in siblings:  # the request has started: only its deadline counts now
                    self._expire_in(sibling, seq.request.deadline)
            self.expected.begun(seq)
            self.waiting.policy.served(seq, seq.num_lacking_tokens, 0)
        seq.status = Status.RUNNING
        self.running.append(seq)
        return operations

    def _defer(self, seq: Sequence, match: Match) -> list[Operation] | None:
        """Let ``seq`` wait for a leader to compute its prefix, or for a read from disk.

        Returns operations that make room in RAM, or None if there is no room for the read.
        """
        operations: list[Operation] = []
        if match.leader is not None:
            match.leader.urgency = min(match.leader.urgency, seq.urgency)
            self.deferred.follow(match.leader, match.num_inflight_tokens, seq)
        else:
            snapshot = match.source
            assert isinstance(snapshot, Snapshot)
            if snapshot.place is Place.DISK:
                leaving = self.ledger.read(snapshot)
                if leaving is None:
                    if snapshot.num_bytes > self.ledger.tiers.ram_bytes:
                        self.ledger.drop(snapshot.key)
                    return None
                operations += leaving
                assert self._disk is not None, "there are no files without a disk tier"
                self._disk.start_read(snapshot)
            self.deferred.read(snapshot, seq)
        self.waiting.remove(seq)
        return operations

    def _yield_to_a_higher_class(self, now: float) -> None:
        """Park one running sequence if a waiting one of a higher class needs its seq_id or its
        cells.
        """
        if not self.running or (head := self.waiting.head(now)) is None:
            return
        tail = max(self.running, key=rank)
        if tail.urgency > head.urgency and (
            not self.ledger.seq_ids.num_free
            or not self._fits(head, self.ledger.find(head), self._expected_growth(*self.running))
        ):
            self._park(tail)

    # --- results ---------------------------------------------------------------------------------

    def update(
        self,
        batch: Batch,
        tokens: list[int],
        now: float,
        logprobs: Mapping[int, Logprobs] = NOTHING,
    ) -> list[TokenOutput]:
        """Append the sampled tokens, ``num_samples`` for each row in order; release finished
        sequences.

        ``logprobs``: by index into ``tokens``, for the tokens whose logprobs are reported. NO_TOKEN
        means that the sequence's grammar allows no token, FAILED that it cannot be sampled; both
        end the sequence.
        """
        self._num_recoveries = 0
        self._operations = []  # they have run
        if batch.operations:
            self.write_saved(batch.operations)
        if not batch.rows:
            return self.take_outputs()
        outputs = self._outputs
        num_prefill = num_guesses = num_accepted = num_rows = 0
        begin = end = 0
        for row in batch.rows:
            seq = row.seq
            self._suspects = (seq,)
            begin, end = end + row.num_scores, end + row.num_samples
            found = tokens[begin:end]
            if FAILED in tokens[end - row.num_samples : end]:
                self._drop_failed(seq)
                continue
            if row.num_scores:
                outputs.append(
                    self._scored(seq, [logprobs[i] for i in range(begin - row.num_scores, begin)])
                )
            right = 0
            while right < len(row.draft) and found[right] == row.draft[right]:
                right += 1
            seq.num_computed_tokens = row.start + row.num_tokens + right
            seq.num_failures = 0
            if row.num_samples and row.num_tokens == 1:
                num_rows += 1
            else:
                num_prefill += row.num_tokens
            num_guesses += len(row.draft)
            num_accepted += right
            if row.draft and self._speculation is not None:
                self._speculation.verified(seq, len(row.draft), right)
            seq_id = seq.seq_id
            for i, token in enumerate(found[: right + 1], begin):
                outputs.append(self._append(seq, token, logprobs.get(i)))
                if seq.status is Status.FINISHED:
                    break
            if right < len(row.draft) or (row.draft and seq.status is Status.FINISHED):
                self._take_back_guesses(seq, seq_id, row.start + row.num_tokens + right)
            self._progressed(seq)
        if any(output.finish for output in outputs):
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        self.cost.observe(num_rows + num_guesses, num_prefill, now - self.begun)
        self.num_steps += 1
        self.num_prefill_tokens += num_prefill
        self.num_guesses += num_guesses
        self.num_accepted += num_accepted
        self._suspects = ()
        self.trace.append(
            step_of(self, batch, now, num_rows, num_prefill, num_guesses, num_accepted)
        )
        return self.take_outputs()

    def _drop_failed(self, seq: Sequence) -> None:
        """End a sequence that cannot be sampled. None of its cells are reused."""
        seq_id, seq.num_computed_tokens = seq.seq_id, 0
        self._end(seq, FinishReason.ERROR)
        self._pending_operations += self.ledger.invalidate_seq_ids({seq_id})

    def _take_back_guesses(self, seq: Sequence, seq_id: int, keep: int) -> None:
        if seq.status is Status.RUNNING:
            self._pending_operations += self.ledger.rewind(seq_id, keep)
        else:  # the ledger has released it already, but the draft tokens are still in the cells
            self._pending_operations.append(Trim(seq_id, min(keep, seq.num_tokens)))

    def _progressed(self, seq: Sequence) -> None:
        """Save the state of ``seq`` at checkpoints; requeue followers whose prefix it has
        computed.
        """
        if seq.status is not Status.RUNNING:
            return
        if not self.ledger.layout.trims and (
            seq.num_computed_tokens in (seq.num_prompt_tokens - 1, *self.deferred.awaited(seq))
        ):
            self._pending_operations += self.ledger.checkpoint(seq)
        self._call_back(self.deferred.progressed(seq))

    def _scored(self, seq: Sequence, logprobs: list[Logprobs]) -> TokenOutput:
        seq.num_pending_prompt_logprobs -= len(logprobs)
        return TokenOutput(seq.request.request_id, seq.index, NO_TOKEN, prompt_logprobs=logprobs)

    def _append(self, seq: Sequence, token: int, logprobs: Logprobs | None) -> TokenOutput:
        if seq.num_tokens >= seq.limit:  # max_tokens is 0: only the prompt is computed
            self.release(seq)
            num_cached = 0 if seq.index else seq.num_cached_tokens or 0
            return TokenOutput(
                seq.request.request_id, seq.index, NO_TOKEN, FinishReason.LENGTH, False, num_cached
            )
        if token != NO_TOKEN:
            seq.append(token)
            self.waiting.policy.served(seq, 0, 1)
        finish, is_text = seq.finish_after(token, self.end_tokens)
        if finish:
            self.expected.finished(seq)
            self.release(seq)
        first = seq.index == 0 and seq.num_output_tokens == 1
        num_cached = (seq.num_cached_tokens or 0) if first else 0
        return TokenOutput(
            seq.request.request_id, seq.index, token, finish, is_text, num_cached, logprobs
        )

    # --- statistics ------------------------------------------------------------------------------

    def stats(self) -> Stats:
        return stats_of(self)
