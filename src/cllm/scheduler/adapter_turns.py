"""Chooses the LoRA adapters for the next step. A batch cannot mix them, and changing them costs
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import cycle, islice

from cllm.core.request import Adapters
from cllm.core.sequence import Sequence

SWITCH_SECONDS = 0.01  # assumed cost of a change, until it is measured
# Share of the time for changes. They should take less than 5 %, and the estimates lag behind.
SWITCH_SHARE = 0.04
MIN_TURN = 0.05  # seconds
MAX_DEBT = 100.0  # turns
SMOOTHING = 0.2  # weight of the last measurement


class AdapterTurns:
    """Divides the steps among groups of sequences with the same adapters, by the shares of their
    accounts. An account with several groups divides its share among them.

    This is deficit round robin (Shreedhar and Varghese, SIGCOMM 1995), with seconds instead of
    bytes. A group keeps its turn until it has used its time. Any excess shortens its next turn.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """``weights`` are the shares of accounts; those not listed have 1."""
        self.current: Adapters = ()
        self.switch_seconds = SWITCH_SECONDS
        self.is_used = False  # whether there has been a request with adapters
        self._weights = weights
        self._left: dict[Adapters, float] = {}  # seconds of each group, in the order of the turns
        self._first = 0.0  # seconds of the first step of this turn; 0 if it is not comparable
        self._others: list[float] = []  # seconds of the next steps of this turn

    @property
    def turn_seconds(self) -> float:
        return max(MIN_TURN, self.switch_seconds / SWITCH_SHARE)

    def includes(self, seq: Sequence) -> bool:
        """Return whether ``seq`` may be in this step."""
        return not self.is_used or seq.adapters == self.current

    def select(
        self, decoding: list[Sequence], running: Iterable[Sequence], paused: Collection[Sequence]
    ) -> list[Sequence]:
        """Choose whose turn it is among ``running`` without ``paused``, and return those of
        ``decoding`` that may be in this step.
        """
        if not self.is_used:
            return decoding
        groups: dict[Adapters, set[str]] = {}
        for seq in running:
            if seq not in paused:
                groups.setdefault(seq.adapters, set()).add(seq.request.account)
        if len(groups) == 1:  # no other group waits for its turn
            (self.current,) = groups
            self._left = {self.current: 0.0}
            self._first, self._others = 0.0, []
        elif groups and (self.current not in groups or self._left.get(self.current, 0.0) <= 0):
            self._begin_turn(groups)
        return [seq for seq in decoding if self.includes(seq)]

    def _begin_turn(self, groups: Mapping[Adapters, set[str]]) -> None:
        self._learn()
        order = [group for group in self._left if group in groups or group == self.current]
        order += [group for group in groups if group not in self._left]
        begin = order.index(self.current) + 1 if self.current in order else 0
        self._left = {group: self._left.get(group, 0.0) for group in order}
        shares = self._compute_shares(groups)
        for group in islice(cycle(order), begin, None):
            if group not in groups:
                continue
            self._left[group] += self.turn_seconds * shares[group]
            if self._left[group] > self.turn_seconds / 2:
                break
        self.current = group
        self._left = {group: left for group, left in self._left.items() if group in groups}

    def _compute_shares(self, groups: Mapping[Adapters, set[str]]) -> dict[Adapters, float]:
        """Return the share of each group; their mean is 1."""
        num_groups = Counter(account for accounts in groups.values() for account in accounts)
        shares = {
            group: sum(self._weights.get(name, 1.0) / num_groups[name] for name in accounts)
            for group, accounts in groups.items()
        }
        mean = sum(shares.values()) / len(shares)
        return {group: share / mean for group, share in shares.items()}

    def observe(self, adapters: Adapters, seconds: float, *, only_decodes: bool) -> None:
        """Count the time of a step."""
        if not self.is_used:
            return
        if adapters in self._left:
            least = -MAX_DEBT * self.turn_seconds
            self._left[adapters] = max(least, self._left[adapters] - seconds)
        if not only_decodes:
            self._first = 0.0
        elif not self._first:
            self._first = seconds
        else:
            self._others.append(seconds)

    def _learn(self) -> None:
        """Learn what a change costs, from the time by which the first step of a turn is longer."""
        if self._first and self._others:
            extra = max(0.0, self._first - sum(self._others) / len(self._others))
            self.switch_seconds += SMOOTHING * (extra - self.switch_seconds)
        self._first, self._others = 0.0, []
