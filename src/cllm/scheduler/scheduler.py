"""Decides what each step computes, and for which sequences.

Running sequences are parked in the order of ``Running``, from its tail, when cells run short; their
prompts are computed in that of ``PromptOrder``. Waiting ones are admitted in that of ``Waiting``. A
sequence finishes in the step that samples its last token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cllm.core.batch import Batch, Operation, Row
from cllm.core.output import FAILED, NO_TOKEN, FinishReason, Logprobs, TokenOutput
from cllm.core.sequence import Sequence, Status
from cllm.kv_cache.cache import KVCache
from cllm.kv_cache.matching import Match
from cllm.scheduler.adapter_turns import AdapterTurns
from cllm.scheduler.pacing import Pacing, Plan
from cllm.scheduler.params import SchedulerParams
from cllm.scheduler.policy import Policy, split_prefill_budget
from cllm.scheduler.prompt_order import PromptOrder
from cllm.scheduler.reasons import (
    AllSeqIdsInUse,
    AwaitsRead,
    DecodingFirst,
    FailedTogether,
    PrefillBudgetUsed,
    TooFewCells,
    TooManyDeferred,
)
from cllm.scheduler.seq_id_order import arrange
from cllm.scheduler.sequences import Sequences
from cllm.scheduler.speculation import Speculation
from cllm.scheduler.step_cost import StepCost
from cllm.scheduler.trace import Statistics, Step

NOTHING: Mapping[int, Logprobs] = {}


class Scheduler:
    """Decides what to compute: ``schedule`` returns a batch, ``update`` takes its tokens."""

    def __init__(
        self,
        kv_cache: KVCache,
        params: SchedulerParams,
        end_tokens: list[int],
        policy: Policy,
        speculation: Speculation | None = None,
    ) -> None:
        """The model ends its output with one of ``end_tokens``."""
        if params.max_num_batched_tokens < kv_cache.seq_ids.size:
            raise ValueError(
                f"max_num_batched_tokens ({params.max_num_batched_tokens}) must be at least the "
                f"number of sequence ids ({kv_cache.seq_ids.size})"
            )
        self.statistics = Statistics()
        self.step = Step(0.0)  # the current or last step
        self.sequences = Sequences(kv_cache, policy, self.statistics, speculation)
        self.params = params
        self.end_tokens = frozenset(end_tokens)
        self.cost = StepCost(params.row_seconds)
        self.pacing = Pacing(self.cost, params)
        self._plan = Plan([], False)  # of the current or last step
        self._prompt_order = PromptOrder(self.cost)
        self.turns = AdapterTurns(params.weights)
        self._speculation = speculation
        # why the queue could not move on last, and when
        self._blocked: object = ""
        self._blocked_at = -math.inf

    def add(self, seq: Sequence, now: float) -> list[TokenOutput]:
        """Queue a sequence that arrived at ``now``. See ``Sequences.add``."""
        self.turns.is_used |= bool(seq.request.adapters)
        return self.sequences.add(seq, now)

    # --- one step --------------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch | None:
        """Return the next batch, or None if there is nothing to compute.

        The caller must then call ``update`` or ``fail``.
        """
        # 1. Expire: requests that have timed out end.
        # 2. Make way: one running sequence is parked if a waiting one should have its place.
        # 3. Decode: sequences that lack one token get rows. If cells run short, the tail is parked.
        #    If the layout separates prompts, this is the last part, in steps without prompts.
        # 4. Admit: waiting sequences start to run, as the policy sorts them, until one cannot.
        # 5. Prefill: prompts get rows within the budget. If cells run short, the tail is parked. A
        #    sequence leaves ``unserved`` with a row or without its cells.
        sequences = self.sequences
        self.step, sequences.suspects = Step(now), ()
        layout = sequences.kv_cache.layout
        sequences.begin_step(now)
        sequences.suspects = sequences.running
        operations = sequences.begin_operations()
        self._make_way(now, operations)
        separates = layout.separates and self.params.prefill_share < 1
        rows: list[Row] = []
        if not separates:
            plan = self._make_plan()
            rows = self._decode(plan.decoding, operations)
        self._admit_waiting(now, operations)
        if self.step.blocked:
            self._blocked, self._blocked_at = self.step.blocked, now
        if separates:  # newly admitted sequences that lack one token decode with the others
            plan = self._make_plan()
        sequences.suspects = sequences.running
        lacking = self._sort_prompts(plan, now)
        self.pacing.add_prompts(
            plan, lacking, self._prompt_order.precedes, rows, len(sequences.running)
        )
        if plan.prompts:
            rows += self._prefill(rows, plan, operations)
        elif lacking:
            self.step.blocked = self.step.blocked or DecodingFirst()
        if separates and not rows:
            rows = self._decode(plan.decoding, operations)
        sequences.suspects = ()
        if not rows and not operations:
            return None
        if layout.can_swap:
            num_decoding = sum(seq.seq_id >= 0 for seq in plan.decoding)
            operations += arrange(rows, num_decoding, sequences.running, sequences.kv_cache)
        rows.sort(key=lambda row: row.seq.seq_id)
        return Batch(rows, operations, self.turns.current)

    def _make_plan(self) -> Plan:
        """Return the plan for this step, without prompts."""
        running = self.sequences.running
        self._plan = plan = self.pacing.plan(running)
        plan.decoding = self.turns.select(plan.decoding, running, plan.paused)
        return plan

    def _sort_prompts(self, plan: Plan, now: float) -> list[Sequence]:
        """Return the running sequences that lack more than one token and whose adapters have their
        turn, as ``PromptOrder`` sorts them.
        """
        others = {*plan.decoding} | plan.paused
        lacking = [
            seq for seq in self.sequences.running if seq not in others and self.turns.includes(seq)
        ]
        self._prompt_order.sort(lacking, self.sequences.waiting.policy, now)
        return lacking

    @property
    def target_itl(self) -> float:
        """Seconds between two tokens of a sequence that other requests' prompts may cause."""
        return self.pacing.target_itl(len(self.sequences.running))

    def reserve(self, share: float) -> bool:
        """Leave a share of the next step's target time for a side job, unless the time belongs to
        decoding sequences; return whether it may run. Then call ``charge``.
        """
        return self.pacing.reserve(share, len(self.sequences.running))

    def charge(self, seconds: float) -> None:
        """Count ``seconds`` that a side job has used as time for prompts."""
        if self.sequences.running:
            self.pacing.charge(seconds)

    def _make_row(self, seq: Sequence, count: int, draft: tuple[int, ...] = ()) -> Row:
        self.sequences.suspects = (seq,)
        self.sequences.kv_cache.hold(seq.seq_id, count + len(draft))
        num_samples = 1 + len(draft) if count == seq.num_lacking_tokens else 0
        num_prompt_logprobs = (
            seq.count_prompt_logprobs(seq.num_computed_tokens, count)
            if seq.num_pending_prompt_logprobs
            else 0
        )
        return Row(
            seq,
            seq.num_computed_tokens,
            count,
            num_samples + num_prompt_logprobs,
            draft,
            num_prompt_logprobs,
        )

    def _decode(self, decoding: list[Sequence], operations: list[Operation]) -> list[Row]:
        """Return a row for each sequence of ``decoding``, after parking sequences that do not fit.

        The rows get draft tokens if all running sequences decode and none waits.
        """
        sequences = self.sequences
        drafts: dict[Sequence, tuple[int, ...]] = {}
        if (
            self._speculation is not None
            and decoding
            and len(decoding) == len(sequences.running)
            and not sequences.waiting
        ):
            drafts = self._speculation.propose(
                decoding, self.cost, self.pacing.drafted, self.params.max_num_batched_tokens
            )
            self.step.draft_seconds = self._speculation.seconds
        while (
            room := sequences.kv_cache.make_room(len(decoding) + sum(map(len, drafts.values())))
        ) is None:
            if drafts:
                drafts = {}
                continue
            operations += sequences.park(sequences.running.tail)
            decoding = [seq for seq in decoding if seq.seq_id >= 0]
        operations += room
        return [self._make_row(seq, 1, drafts.get(seq, ())) for seq in decoding]

    def _prefill(self, decoding: list[Row], plan: Plan, operations: list[Operation]) -> list[Row]:
        """Return rows for the plan's prompts, in addition to ``decoding``."""
        self.step.prefill_budget = plan.num_prompt_tokens
        unserved = dict(
            split_prefill_budget(
                plan.prompts,
                plan.num_prompt_tokens,
                self.cost.efficient_prefill_tokens,
                self.sequences.kv_cache.layout.undivided,
            )
        )
        rows: list[Row] = []
        while unserved:
            seq, share = next(iter(unserved.items()))
            if share == 0:
                self.step.blocked = self.step.blocked or PrefillBudgetUsed(self.step.prefill_budget)
                break
            self.sequences.suspects = (seq,)
            count = min(
                share,
                self.sequences.count_until_checkpoint(seq),
                seq.count_until_adapters(),
                self._count_until_logits_run_out(seq, [*decoding, *rows]),
            )
            if self._make_room(seq, count, unserved, operations):
                del unserved[seq]
                rows.append(self._make_row(seq, count))
        if rows:
            self._prompt_order.advance(rows)
        return rows

    def _make_room(
        self,
        seq: Sequence,
        count: int,
        unserved: dict[Sequence, int],
        operations: list[Operation],
    ) -> bool:
        """Free ``count`` cells for ``seq`` by parking from the tail of ``unserved``; append the
        operations for that to ``operations``.

        Return False if ``seq`` itself became the tail and was parked.
        """
        sequences, kv_cache = self.sequences, self.sequences.kv_cache
        while (room := kv_cache.make_room(count)) is None:
            tail = sequences.running.find_last(unserved)
            if tail is seq:
                self.step.blocked = TooFewCells(seq.name, count, 0, kv_cache.num_available)
            del unserved[tail]
            operations += sequences.park(tail)
            if tail is seq:
                return False
        operations += room
        return True

    def _count_until_logits_run_out(self, seq: Sequence, rows: list[Row]) -> int:
        """Return how many tokens of ``seq`` can be computed before the step's rows of logits run
        out; all of them without prompt logprobs.

        Reserves a row for each other running sequence.
        """
        if not seq.num_pending_prompt_logprobs:
            return seq.num_tokens
        space = (
            self.params.max_num_samples
            - sum(row.num_samples for row in rows)
            - (len(self.sequences.running) - len(rows) - 1)
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

    # --- admission -------------------------------------------------------------------------------

    def _admit_waiting(self, now: float, operations: list[Operation]) -> None:
        """Admit waiting sequences, in the order of the policy, until one cannot be admitted."""
        sequences = self.sequences
        growth = self._estimate_growth(*sequences.running) if sequences.waiting else 0
        sequences.suspects = sequences.waiting
        while (seq := sequences.waiting.head(now)) is not None:
            sequences.suspects = (seq,)
            if not sequences.kv_cache.seq_ids.num_free:
                self.step.blocked = AllSeqIdsInUse(sequences.kv_cache.seq_ids.size)
                return
            match = sequences.kv_cache.find(seq)
            if seq.num_failures and any(other.num_failures for other in sequences.running):
                self.step.blocked = FailedTogether(seq.name)
                return
            if match.must_wait:
                if len(sequences.deferred) >= 2 * sequences.kv_cache.seq_ids.size:
                    self.step.blocked = TooManyDeferred(len(sequences.deferred))
                    return
                operations_for_read = sequences.defer(seq, match)
                if operations_for_read is not None:
                    operations += operations_for_read
                    continue
                match = Match()
            if shortage := self._find_shortage(seq, match, growth):
                self.step.blocked = shortage
                return
            leased = sequences.kv_cache.lease(seq, match) or sequences.kv_cache.lease(seq, Match())
            assert leased is not None, "an empty match always fits"
            seq_id, num_cached, operations_for_prefix = leased
            if seq.admitted is None:
                if seq.wait_reason == "" and self._blocked_at >= seq.arrived:
                    seq.wait_reason = self._blocked
                tier = "disk" if isinstance(seq.wait_reason, AwaitsRead) else match.tier
                self.statistics.count_hit(seq.num_prompt_tokens, tier, num_cached)
            sequences.admit(seq, seq_id, num_cached)
            operations += operations_for_prefix
            growth += self._estimate_growth(seq)
            sequences.suspects = sequences.waiting

    def _find_shortage(self, seq: Sequence, match: Match, growth: int) -> TooFewCells | None:
        """Return why ``seq`` will probably not find enough cells if running sequences need
        ``growth`` more; None if it probably will.
        """
        kv_cache, estimates = self.sequences.kv_cache, self.sequences.length_estimates
        need = estimates.estimate_length(seq) - kv_cache.count_shared_cells(match)
        num_available = kv_cache.num_available
        if not self.sequences.running or need + growth <= num_available:
            return None
        return TooFewCells(seq.name, need, growth, num_available)

    def _estimate_growth(self, *seqs: Sequence) -> int:
        """Return the number of further cells that running sequences will probably need."""
        estimate = self.sequences.length_estimates.estimate_length
        num_cells = self.sequences.kv_cache.count_cells
        return sum(estimate(seq) - num_cells(seq.seq_id) for seq in seqs)

    def _estimate_cells(self, seqs: list[Sequence]) -> int:
        """Return how many cells running sequences will probably need together, at least."""
        kv_cache = self.sequences.kv_cache
        private = [kv_cache.count_private_cells(seq.seq_id) for seq in seqs]
        cells = [kv_cache.count_cells(seq.seq_id) for seq in seqs]
        shared = max((a - b for a, b in zip(cells, private, strict=True)), default=0)
        return self._estimate_growth(*seqs) + sum(private) + shared

    def _make_way(self, now: float, operations: list[Operation]) -> None:
        """Park one running sequence if a waiting sequence needs its seq_id or its cells, and has a
        higher class or belongs to an account whose turn it is.
        """
        sequences = self.sequences
        if not sequences.running or (head := sequences.waiting.head(now)) is None:
            return
        priority = head.effective_priority
        lower = [seq for seq in sequences.running if seq.effective_priority > priority]
        rivals = lower or sequences.running.list_rivals(head, sequences.waiting, now)
        match = sequences.kv_cache.find(head) if rivals else Match()
        if not rivals or (match.must_wait and not lower):
            return
        shortage = self._find_shortage(head, match, self._estimate_growth(*sequences.running))
        if shortage:
            kept = [seq for seq in sequences.running if seq not in rivals]
            if shortage.needed + self._estimate_cells(kept) > sequences.kv_cache.cells.size:
                return  # parking all of them would not help
        elif sequences.kv_cache.seq_ids.num_free:
            return
        operations += sequences.park(rivals[-1])

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

        ``logprobs`` maps indices of ``tokens`` to the logprobs that are reported. NO_TOKEN means
        that the sequence's grammar allows no token, and FAILED that it cannot be sampled. Both end
        the sequence.
        """
        sequences = self.sequences
        sequences.finish_operations(batch.operations)
        if not batch.rows:
            return sequences.take_outputs()
        outputs = sequences.outputs
        step = self.step
        begin = end = 0
        for row in batch.rows:
            seq = row.seq
            sequences.suspects = (seq,)
            begin, end = end + row.num_prompt_logprobs, end + row.num_samples
            sampled = tokens[begin:end]
            if FAILED in tokens[end - row.num_samples : end]:
                sequences.drop_failed(seq)
                continue
            if row.num_prompt_logprobs:
                scored = [logprobs[i] for i in range(begin - row.num_prompt_logprobs, begin)]
                outputs.append(seq.report_prompt_logprobs(scored))
            num_accepted = count_accepted(row, sampled)
            verified = len(row.draft), num_accepted
            seq.num_computed_tokens = row.start + row.num_tokens + num_accepted
            seq.num_failures = 0
            if seq.first_token_at is None:
                outputs += seq.note_chunk(step.at, now, row.num_tokens)
            if row.num_samples and row.num_tokens == 1:
                step.num_rows += 1
            else:
                step.num_prefill_tokens += row.num_tokens
            step.num_guesses += len(row.draft)
            step.num_accepted += num_accepted
            if row.draft and self._speculation is not None:
                self._speculation.record_verification(seq, len(row.draft), num_accepted)
            seq_id = seq.seq_id
            for i, token in enumerate(sampled[: num_accepted + 1], begin):
                outputs.append(self._append(seq, token, logprobs.get(i), now, verified))
                verified = (0, 0)
                if seq.status is Status.FINISHED:
                    break
            if num_accepted < len(row.draft) or (row.draft and seq.status is Status.FINISHED):
                sequences.undo_draft(seq, seq_id, row.start + row.num_tokens + num_accepted)
            sequences.record_progress(seq)
        step.seconds, step.num_operations = now - step.at, len(batch.operations)
        step.num_running = len(sequences.running)
        step.num_waiting = len(sequences.waiting) + len(sequences.deferred)
        self.pacing.observe(self._plan, step, batch.rows)
        only_decodes = not step.num_prefill_tokens
        self.turns.observe(batch.adapters, step.seconds, only_decodes=only_decodes)
        self.statistics.add(step)
        sequences.suspects = ()
        return sequences.take_outputs()

    def _append(
        self,
        seq: Sequence,
        token: int,
        logprobs: Logprobs | None,
        now: float,
        verified: tuple[int, int],
    ) -> TokenOutput:
        is_first = seq.first_token_at is None
        if is_first:
            seq.first_token_at = now
        if seq.num_tokens >= seq.limit:  # max_tokens is 0: only the prompt is computed
            self.sequences.finish(seq)
            num_cached = 0 if seq.index else seq.num_cached_tokens or 0
            return TokenOutput(
                seq.request.request_id,
                seq.index,
                NO_TOKEN,
                FinishReason.LENGTH,
                is_text=False,
                num_cached_tokens=num_cached,
                times=seq.sum_up_times(),
            )
        if token != NO_TOKEN:
            seq.append(token)
            self.sequences.waiting.policy.served(seq, 0, 1)
        finish, is_text = seq.finish_after(token, self.end_tokens)
        if finish:
            self.sequences.length_estimates.record_finish(seq)
            self.sequences.finish(seq)
            if seq.thinking is not None:
                self.statistics.num_thoughts_ended += seq.thinking.is_over
        first = seq.index == 0 and seq.num_output_tokens == 1
        num_cached = (seq.num_cached_tokens or 0) if first else 0
        name, mu = seq.request.request_id, seq.find_mu(seq.num_tokens) if seq.mirostat_mu else None
        return TokenOutput(
            name,
            seq.index,
            token,
            finish,
            is_text,
            num_cached,
            logprobs,
            mirostat_mu=mu,
            times=seq.sum_up_times() if is_first or finish else None,
            num_guesses=verified[0],
            num_accepted=verified[1],
        )


def count_accepted(row: Row, sampled: list[int]) -> int:
    """Return how many draft tokens of ``row`` equal the tokens sampled at their positions."""
    for i, token in enumerate(row.draft):
        if sampled[i] != token:
            return i
    return len(row.draft)
