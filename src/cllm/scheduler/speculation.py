"""Draft tokens that are verified in one step, and how many of them are worth their cost.

Each position is sampled with its own random number, as it would be without speculation. A draft
token is accepted if it equals the sampled one. So the text is the same with and without
speculation, at every temperature.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Run
from dataclasses import dataclass, replace
from typing import NamedTuple

from cllm.core.drafter import Drafter
from cllm.core.sequence import Sequence
from cllm.errors import EngineError
from cllm.scheduler.pacing import is_long
from cllm.scheduler.step_cost import STALE, StepCost, update_mean

log = logging.getLogger("cllm.scheduler")

START = 0.6  # expected acceptance rates of the first sequences
MEMORY = 0.1  # weight of one verified token in a rate
# weight of the rates of new sequences in each step: low rates recover, so drafting is tried again
RECOVERY = 0.002
CARRIED = 0.3  # weight of a finished sequence in the rates of new ones
FORGOTTEN = 0.1  # weight of START in these rates after each sequence that never had a draft
MIN_START = 0.3  # so that new sequences try at all
MAX_STEPS = 64  # with draft tokens, before one without


@dataclass(slots=True)
class Rates:
    """Acceptance rates of draft tokens: of the first one after a rejected one, and of those that
    follow an accepted one. A text that is being copied is predicted well until it changes.
    """

    first: float = START
    following: float = START

    def move(self, target: Rates, weight: float) -> None:
        self.first += weight * (target.first - self.first)
        self.following += weight * (target.following - self.following)


class Choice(NamedTuple):
    """A number of draft tokens for each sequence, and the tokens per second expected with them."""

    num_tokens: int
    speed: float


class Source:
    """A drafter, and what is known of it: how often its draft tokens are accepted, and how long
    they take.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.has_failed = False
        self._token_seconds = 0.0  # see Drafter; the mean, or less after a pause
        self._rates: dict[Sequence, Rates] = {}
        self._judged: set[Sequence] = set()  # sequences whose drafts have been verified
        self._following: set[Sequence] = set()  # sequences whose last draft was entirely right
        self._start = Rates()  # of new sequences
        self._share = 1.0  # of the sequences that wanted a draft and got one

    def estimate(
        self,
        seqs: list[Sequence],
        num_candidates: int,
        cost: StepCost,
        drafted: StepCost,
        max_count: int,
    ) -> Prospects:
        """Return the prospects of a step with ``seqs``, of which ``num_candidates`` may get up to
        ``max_count`` draft tokens. See ``Speculation.propose`` for the costs.
        """
        num_rows = len(seqs)
        num_drafting = max(1, round(self._share * num_candidates))
        num_long_tokens = sum(seq.num_tokens for seq in seqs if is_long(seq.num_tokens))
        rows = [num_rows + count * num_drafting for count in range(max_count + 1)]
        return Prospects(
            num_rows,
            num_drafting,
            [
                cost.estimate_decode(num_rows, num_long_tokens),
                *(
                    estimate_drafted(cost, drafted, n, num_long_tokens * n // num_rows)
                    + count * self._token_seconds
                    for count, n in enumerate(rows[1:], 1)
                ),
            ],
            lambda count: drafted.is_known(rows[count]),
        )

    def choose(self, seq: Sequence, prospects: Prospects) -> Choice:
        """Return what is best for ``seq``."""
        rates = self._rates.get(seq)
        if rates is None:
            rates = self._rates[seq] = replace(self._start)
        rates.move(self._start, RECOVERY)
        first = rates.following if seq in self._following else rates.first
        return prospects.choose(first, rates.following)

    def draft(self, wanted: dict[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """See Drafter."""
        self._token_seconds *= 1 - RECOVERY
        if not wanted:
            return {}
        try:
            drafts = self.drafter.draft(wanted)
        except EngineError as error:
            log.error("disabling a source of draft tokens because it failed: %s", error)
            self.has_failed = True
            return {}
        each = self.drafter.token_seconds
        self._token_seconds = update_mean(self._token_seconds or None, each)
        self._share = update_mean(self._share, len(drafts) / len(wanted), MEMORY)
        self._following &= drafts.keys()
        return drafts

    def record_verification(self, seq: Sequence, num_guesses: int, num_right: int) -> None:
        """See Speculation."""
        rates = self._rates[seq]
        self._judged.add(seq)
        for i in range(min(num_guesses, num_right + 1)):  # those after a rejected one teach nothing
            is_right = float(i < num_right)
            if i or seq in self._following:
                rates.following += MEMORY * (is_right - rates.following)
            else:
                rates.first += MEMORY * (is_right - rates.first)
        if num_right == num_guesses:
            self._following.add(seq)
        else:
            self._following.discard(seq)

    def forget(self, seq: Sequence) -> None:
        rates = self._rates.pop(seq, None)
        self._following.discard(seq)
        self.drafter.forget(seq)
        if seq in self._judged and rates is not None:
            self._judged.remove(seq)
            self._start.move(rates, CARRIED)
            self._start.first = max(MIN_START, self._start.first)
            self._start.following = max(MIN_START, self._start.following)
        else:
            self._start.move(Rates(), FORGOTTEN)


class Speculation:
    """Asks drafters for as many draft tokens as are worth their cost.

    By the learned step costs, a draft token costs as much as one more row, and what its drafter
    takes. An accepted one saves the cost of a decoded token. So drafting stops by itself when rows
    are worth more to other sequences, or when few drafts are accepted. ``seconds`` is the time of
    the drafters in this step.

    A row with a draft token may cost more than one of another sequence, because recurrent layers
    compute the tokens of a sequence one after the other, and keep its past states. So the costs of
    both are learned apart. To compare them, some steps have no draft tokens.
    """

    def __init__(
        self,
        drafters: Run[Drafter],
        max_draft_tokens: int,
        max_samples: int,
        *,
        needs_neighbours: bool = False,
    ) -> None:
        """Of equally good ``drafters``, the first one is asked first. A step has at most
        ``max_samples`` rows of logits. If it ``needs_neighbours``, only sequences with consecutive
        seq_ids get draft tokens.
        """
        self.seconds = 0.0
        # steps with draft tokens since the last one without, and the other way round
        self._num_steps = self._num_plain = 0
        self._sources = [Source(drafter) for drafter in drafters]
        self._last: dict[Sequence, Source] = {}  # of a sequence's last draft
        self._max_draft_tokens = max_draft_tokens
        self._needs_neighbours = needs_neighbours
        self._max_samples = max_samples

    def propose(
        self, seqs: list[Sequence], cost: StepCost, drafted: StepCost, max_tokens: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return draft tokens for some of ``seqs``, which all decode, in a step of at most
        ``max_tokens``. A step costs ``cost`` without draft tokens, and ``drafted`` with them.
        """
        self.seconds = 0.0
        self._num_steps += 1
        if self._num_steps > MAX_STEPS or not cost.has_seen(len(seqs)):
            self._num_steps = 0
            return {}
        space = min(self._max_samples, max_tokens) - len(seqs)
        candidates = find_neighbours(seqs) if self._needs_neighbours else seqs
        max_count = min(self._max_draft_tokens, space // len(seqs))
        sources = [source for source in self._sources if not source.has_failed]
        prospects = [
            source.estimate(seqs, len(candidates), cost, drafted, max_count) for source in sources
        ]
        wanted: list[dict[Sequence, int]] = [{} for _ in sources]
        for seq in candidates:
            params = seq.request.params
            if params.looks_back or params.is_bound:
                continue
            longest = seq.limit - seq.num_tokens - 1
            best = 0.0
            for i in reversed(range(len(sources))):
                choice = sources[i].choose(seq, prospects[i])
                if choice.speed >= best and (count := min(choice.num_tokens, longest)):
                    wanted[i][seq], best = count, choice.speed
        drafts: dict[Sequence, tuple[int, ...]] = {}
        for source, counts in zip(sources, wanted, strict=True):
            left = {seq: count for seq, count in counts.items() if seq not in drafts}
            found = source.draft(left)
            drafts |= found
            self._last |= dict.fromkeys(found, source)
            self.seconds += source.drafter.seconds if left else 0.0
        if drafts:
            self._num_plain = 0
        else:
            self._num_steps = 0
            self._num_plain += 1
            if self._num_plain % STALE == 0:
                drafted.forget()
        return drafts

    def record_verification(self, seq: Sequence, num_guesses: int, num_right: int) -> None:
        """Learn that the first ``num_right`` of the draft tokens were accepted."""
        self._last[seq].record_verification(seq, num_guesses, num_right)

    def forget(self, seq: Sequence) -> None:
        self._last.pop(seq, None)
        for source in self._sources:
            source.forget(seq)


def estimate_drafted(
    cost: StepCost, drafted: StepCost, num_rows: int, num_long_tokens: int
) -> float:
    """Return the expected seconds of a step whose rows include draft tokens; see
    ``Speculation.propose`` for the costs.
    """
    seconds = drafted.estimate_decode(num_rows, num_long_tokens)
    if drafted.is_known(num_rows):
        return seconds
    plain = cost.estimate_decode(num_rows, num_long_tokens)
    return min(plain, seconds or plain)  # the first steps may be far too slow


def find_neighbours(seqs: list[Sequence]) -> list[Sequence]:
    """Return the most sequences with consecutive seq_ids."""
    groups: list[list[Sequence]] = []
    for seq in sorted(seqs, key=lambda seq: seq.seq_id):
        if groups and seq.seq_id == groups[-1][-1].seq_id + 1:
            groups[-1].append(seq)
        else:
            groups.append([seq])
    return max(groups, key=len)


class Prospects(NamedTuple):
    """What draft tokens would cost in the next step, which has ``num_rows`` sequences.

    ``num_drafting`` of them are expected to get a draft. ``seconds`` are the durations of the step
    with 0, 1, ... draft tokens for each of these. ``is_known`` says whether a step with that many
    has been observed.
    """

    num_rows: int
    num_drafting: int
    seconds: list[float]
    is_known: Callable[[int], bool]

    def choose(self, first: float, following: float) -> Choice:
        """Return the number of draft tokens per sequence that maximizes the expected tokens per
        second, for a sequence with the rates ``first`` and ``following``; see Rates.
        """
        max_count = len(self.seconds) - 1
        if not self.seconds[0]:
            return Choice(min(max_count, 1), 0.0)
        best, best_speed = 0, self.num_rows / self.seconds[0]
        expected, probability = float(self.num_rows), first
        for count in range(1, max_count + 1):
            expected += self.num_drafting * probability
            probability *= following
            speed = expected / self.seconds[count]
            if speed > best_speed:
                best, best_speed = count, speed
        # the cost of a number of rows that was never tried is only a guess
        longer = min(2 * best, max_count)
        if following >= START and longer > best and not self.is_known(longer):
            return Choice(longer, best_speed)
        return Choice(best, best_speed)
