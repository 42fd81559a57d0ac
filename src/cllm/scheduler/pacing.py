"""Divides time between decoding sequences, prompts, and sequences so long that they would slow down
all others.

Each has an account of seconds, as in deficit round robin (Shreedhar and Varghese, 1995). When one
has used its time, it waits until the others have had their share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Run
from dataclasses import dataclass, field

from cllm.core.batch import Row
from cllm.core.sequence import Sequence, Status
from cllm.scheduler.params import SchedulerParams
from cllm.scheduler.step_cost import CHUNK, StepCost
from cllm.scheduler.trace import Step

# The target time between tokens, in steps of one row. One for each second sequence is added: the
# more sequences decode, the longer their own step takes.
MIN_TARGET_STEPS, MAX_TARGET_STEPS = 23, 35
SHORTEST_TARGET = 0.1  # seconds; shorter times between tokens gain nothing for a reader
LONG_TOKENS = 2048  # the attention of shorter sequences never costs more than all others together
USUAL_SHARE = 0.5  # share of the time for one long sequence or one long prompt
PATIENCE = 30.0  # seconds of prefill that one prompt may take at the configured share
LONG_STEPS = 40  # a prompt is long if it takes more time than this many steps of one row
MANY_DECODING = 16  # decoding sequences for each long prompt
SHARE_BESIDE_MANY = 0.33  # share of the time for a long prompt if more sequences than that decode
ADVANCE = 8.0  # seconds within which such a prompt advances by a chunk, if USUAL_SHARE suffices
LARGEST_SHARE = 0.95  # share of the time for any number of prompts
# A step is charged at most this many times its usual time, and its prompts at least half of theirs.
OUTLIER = 2.0


class Lane:
    """Prompts that share one account of time.

    They wait while its balance of ``seconds`` is negative. ``share`` is their part of the time that
    they and their rivals use, below 1.
    """

    def __init__(self, share: float) -> None:
        self.seconds = 0.0
        self.share = share

    def observe(self, used: float, others: float) -> None:
        """Charge the seconds that the lane's prompts have ``used`` in a step, and add what they
        earn from the seconds of ``others``.
        """
        if others:
            earned = others * self.share / (1 - self.share)
            self.seconds = min(earned, self.seconds - used + earned)
        else:
            self.seconds -= used


@dataclass(slots=True, eq=False)
class Plan:
    """What one step may compute: rows for ``decoding``, and up to ``num_prompt_tokens`` tokens of
    ``prompts``, which ``Pacing.add_prompts`` adds.
    """

    # sequences that lack one token and get a row in the next step that decodes
    decoding: list[Sequence]
    # whether sequences of any adapters decode, or short prompts wait beside long ones
    others_wait: bool
    # sequences that lack one token but get no row in this step
    paused: set[Sequence] = field(default_factory=set)
    # decoding sequences that cost more than all others together
    costly: set[Sequence] = field(default_factory=set)
    # whether long sequences are paused to learn what the others cost
    learns: bool = False
    prompts: list[Sequence] = field(default_factory=list)
    num_prompt_tokens: int = 0
    # whether ``prompts`` use the time of long prompts
    uses_long_lane: bool = False


class Pacing:
    """Plans which sequences each step may compute, and learns from the step what it has cost.

    Long and short prompts have separate lanes. So a short prompt does not wait because a long one
    has used its share, and many short ones do not use up the share of a long one.
    """

    def __init__(self, cost: StepCost, params: SchedulerParams) -> None:
        self._cost = cost
        self.drafted = StepCost()  # of steps with draft tokens
        self._max_tokens = params.max_num_batched_tokens
        self._target = params.target_itl
        self._was_measured = params.row_seconds > 0
        self._reserved = 0.0  # seconds of the next step that prompts must leave for side jobs
        self._weights = params.weights
        self._weight = 1.0  # weight of the long sequences' accounts, relative to the others
        self._share = params.prefill_share
        self.short_prompts, self.long_prompts = Lane(self._share), Lane(self._share)
        # seconds that prompts and side jobs have used since the last step that decoded
        self.waited = 0.0
        self._prompts_came = False  # whether the last step computed prompts alone
        # balance of seconds of the costly decoding sequences; while it is negative, they pause
        self.long_rows = 0.0
        self._spent: dict[Sequence, float] = {}  # seconds in which unfinished prompts came first
        self._decodes = False  # whether sequences decoded at the last step

    def plan(self, running: Iterable[Sequence]) -> Plan:
        """Return the plan for a step, without prompts: they may be added once other sequences
        have been admitted.
        """
        decoding = [seq for seq in running if seq.num_lacking_tokens == 1]
        plan = Plan(decoding, bool(decoding))
        short = [seq for seq in decoding if not is_long(seq.num_tokens)]
        if len(short) == len(decoding):
            self.long_rows = 0.0
            return plan
        rest = 0.0 if self._cost.includes_long else self._cost.estimate_decode(len(short))
        if short and not rest:
            plan.decoding, plan.paused = short, {*decoding}.difference(short)
            plan.learns = True
            return plan
        costs = {
            seq: self._cost.estimate_long_row(seq.num_tokens)
            for seq in decoding
            if is_long(seq.num_tokens)
        }
        # starting with the shortest, as long as a row costs no more than all before it together
        for seq, seconds in sorted(costs.items(), key=lambda item: item[1]):
            if seconds > rest:
                break
            del costs[seq]
            rest += seconds
        others = [seq for seq in decoding if seq not in costs]
        if not costs or not rest:
            self.long_rows = 0.0
            return plan
        plan.costly = {*costs}
        self._weight = self._mean_weight([*costs]) / self._mean_weight(others)
        if self.long_rows < 0:
            plan.decoding, plan.paused = others, plan.costly
        return plan

    def _mean_weight(self, seqs: list[Sequence]) -> float:
        return sum(self._weights.get(seq.request.account, 1.0) for seq in seqs) / len(seqs)

    def add_prompts(
        self,
        plan: Plan,
        lacking: list[Sequence],
        precedes: Callable[[Sequence, Sequence], bool],
        rows: Run[Row],
        num_running: int,
    ) -> None:
        """Add prompts of ``lacking`` to ``plan``: long ones, short ones or none.

        ``lacking`` has the order of ``PromptOrder``, whose method ``precedes`` is. The step has
        ``rows`` already. ``num_running`` counts all running sequences.
        """
        self._decodes = bool(plan.decoding)
        self._spent = {  # includes prompts whose adapter does not have its turn
            seq: seconds
            for seq, seconds in self._spent.items()
            if seq.status is Status.RUNNING and seq.num_lacking_tokens > 1
        }
        if plan.learns and plan.decoding:  # only a step without prompts teaches that
            return
        if self._share == 1:
            plan.prompts = lacking
        else:
            self._choose_lane(plan, lacking, precedes)
        if plan.prompts:
            plan.num_prompt_tokens = self._compute_budget(plan, rows, num_running)

    def _choose_lane(
        self,
        plan: Plan,
        lacking: list[Sequence],
        precedes: Callable[[Sequence, Sequence], bool],
    ) -> None:
        """Add the long or the short prompts of ``lacking`` to ``plan``, if they have time left."""
        long = [seq for seq in lacking if self._takes_long(seq)]
        among_long = {*long}
        short = [seq for seq in lacking if seq not in among_long]
        if long and short:
            if long[0].effective_priority < short[0].effective_priority:
                short = []
            elif precedes(short[0], long[0]):
                long = []
        may_long = self._update(self.long_prompts, long, plan.decoding, short)
        may_short = self._update(self.short_prompts, short, plan.decoding, [])
        plan.prompts = long if may_long else short if may_short else []
        plan.others_wait |= may_long and bool(short)
        plan.uses_long_lane = may_long

    def _takes_long(self, seq: Sequence) -> bool:
        left = self._cost.estimate_prefill(seq.num_lacking_tokens, seq.num_computed_tokens)
        return self._spent.get(seq, 0.0) + left > LONG_STEPS * self._cost.row_seconds

    def _update(
        self, lane: Lane, prompts: Run[Sequence], decoding: Run[Sequence], short: Run[Sequence]
    ) -> bool:
        """Choose the share of ``lane`` and return whether its ``prompts`` may be computed now.

        ``decoding`` sequences compete with the prompts for time, and so do ``short`` prompts with
        long ones.
        """
        lane.share = self._share
        if not prompts:
            return False
        priority = prompts[0].effective_priority
        rivals = [seq for seq in (*decoding, *short) if seq.effective_priority <= priority]
        if not rivals:
            lane.seconds = 0.0
            return True
        spent = self._spent.get(prompts[0], 0.0)
        num_prompts = sum(seq.effective_priority <= priority for seq in prompts)
        num_above = sum(seq.effective_priority < priority for seq in rivals)
        if spent <= PATIENCE and num_prompts > 1 and 2 * num_above <= len(rivals):
            # each further prompt counts as much as MANY_DECODING sequences
            waiting = MANY_DECODING * (num_prompts - 1)
            share = min(LARGEST_SHARE, waiting / (waiting + len(rivals)))
            lane.share = max(lane.share, share)
        if spent > PATIENCE or short:
            lane.share = min(lane.share, USUAL_SHARE)
        if lane is self.long_prompts and len(rivals) > MANY_DECODING * num_prompts:
            needed = self._cost.estimate_prefill(CHUNK, prompts[0].num_computed_tokens) / ADVANCE
            lane.share = min(lane.share, USUAL_SHARE, max(SHARE_BESIDE_MANY, needed))
        return lane.seconds >= 0

    def target_itl(self, num_running: int) -> float:
        """Return the seconds between two tokens of a sequence that prompts may cause."""
        if self._target is not None:
            return self._target
        if not self._was_measured:
            return 1.0
        num_steps = min(MAX_TARGET_STEPS, MIN_TARGET_STEPS + num_running / 2)
        return max(SHORTEST_TARGET, num_steps * self._cost.row_seconds)

    def _compute_budget(self, plan: Plan, rows: Run[Row], num_running: int) -> int:
        """Return how many tokens of the plan's prompts to compute beside ``rows``."""
        decoding = plan.decoding
        num_tokens = sum(row.size for row in rows)
        num_long_tokens = sum(seq.num_tokens for seq in decoding if is_long(seq.num_tokens))
        num_before = plan.prompts[0].num_computed_tokens
        seconds = self.target_itl(num_running) - self._reserved
        seconds -= self._cost.estimate_long_row(num_long_tokens)
        if decoding and not rows:  # decoding sequences have already waited for prompts
            seconds -= self.waited
            left = seconds - self._cost.estimate_decode(len(decoding))
            if self._prompts_came and left < self._cost.estimate_prefill(CHUNK, num_before):
                return 0
        space = self._max_tokens - num_tokens
        num_rows = len(decoding) or int(plan.others_wait)
        return self._cost.compute_prefill_budget(space, num_rows, seconds, num_before)

    def reserve(self, share: float, num_running: int) -> bool:
        """See ``Scheduler.reserve``."""
        if self.short_prompts.seconds < 0 and self._decodes:
            return False
        target = self.target_itl(num_running)
        if math.isfinite(target):
            self._reserved = share * target
        return True

    def charge(self, seconds: float) -> None:
        """Note that something other than prompts has used ``seconds`` of their time."""
        self.waited += seconds
        if self._decodes and self._share < 1:
            self.short_prompts.seconds -= seconds

    def observe(self, plan: Plan, step: Step, rows: Run[Row]) -> None:
        """Learn what a ``step`` with ``rows`` has cost, and charge the sequences of its plan."""
        self._reserved = 0.0
        num_long_tokens = count_long_tokens(rows)
        num_before = count_tokens_before(rows)
        num_rows = step.num_rows + step.num_guesses
        seconds, prefill = step.seconds - step.draft_seconds, 0.0
        known = self.drafted if step.num_guesses else self._cost
        expected = known.estimate_decode(num_rows, num_long_tokens)
        if step.num_prefill_tokens:
            prefill = max(0.0, seconds - expected)
            if usual := self._cost.estimate_prefill(step.num_prefill_tokens, num_before):
                prefill = min(max(prefill, usual / OUTLIER), usual * OUTLIER, seconds)
        decode = seconds - prefill
        if expected:
            decode = min(decode, OUTLIER * expected)
        costly = [row for row in rows if row.seq in plan.costly]
        long = min(decode, self._cost.estimate_long_row(count_long_tokens(costly)))
        if plan.prompts:
            head = plan.prompts[0]
            self._spent[head] = self._spent.get(head, 0.0) + prefill
        if self._share < 1:
            others = decode if num_rows else 0.0
            for_short, for_long = (0.0, prefill) if plan.uses_long_lane else (prefill, 0.0)
            self.short_prompts.observe(for_short, others)
            self.long_prompts.observe(for_long, others + for_short)
        self.waited = 0.0 if num_rows else self.waited + seconds
        self._prompts_came = not num_rows
        self.long_rows = min(0.0, self.long_rows - long + (decode - long) * self._weight)
        known.observe(num_rows, step.num_prefill_tokens, seconds, num_long_tokens, num_before)

    def estimate_seconds(self, rows: Run[Row]) -> float:
        """Return the expected seconds of a step with ``rows``; 0 if nothing is known.

        If nothing similar has been observed yet, return an upper bound.
        """
        cost = self._cost
        num_decoding = sum(row.size for row in rows if row.num_tokens == 1)
        num_tokens = sum(row.num_tokens for row in rows if row.num_tokens > 1)
        decode = cost.estimate_decode(num_decoding, count_long_tokens(rows))
        prefill = cost.estimate_prefill(num_tokens, count_tokens_before(rows))
        most = cost.row_seconds  # tokens of one step never take longer than one by one
        return (decode or most * num_decoding) + (prefill or most * num_tokens)


def is_long(num_tokens: int) -> bool:
    return num_tokens >= LONG_TOKENS


def count_long_tokens(rows: Run[Row]) -> int:
    """Return the tokens that the positions of decoding ``rows`` attend to, for long sequences."""
    return sum(
        row.size * (row.start + 1) for row in rows if row.num_tokens == 1 and is_long(row.start + 1)
    )


def count_tokens_before(rows: Run[Row]) -> float:
    """Return how many tokens of its own sequence each prompt token of ``rows`` follows, on
    average.
    """
    prompts = [row for row in rows if row.num_tokens > 1]
    num_tokens = sum(row.num_tokens for row in prompts)
    before = sum(row.num_tokens * (row.start + row.num_tokens / 2) for row in prompts)
    return before / num_tokens if num_tokens else 0.0
