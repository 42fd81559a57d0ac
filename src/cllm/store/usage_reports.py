"""What a replica tells fronts about the usage of their accounts.

An answer that a front has received completely says what it cost. A front cannot see that of answers
whose client has gone, and of batches, so it asks for reports about twice a second.
"""

from __future__ import annotations

from collections import deque

import msgspec

from cllm.core.carried import Carried
from cllm.store.charges import UsageCounts

MAX_REPORTS = 100_000  # for each front; older ones are dropped
MAX_FRONTS = 100


class UsageReport(msgspec.Struct):
    """What one request of a front has cost its account. ``request`` is the id that the front gave
    the request, or "" for the requests of batches.
    """

    number: int
    account: str
    request: str
    used: UsageCounts


class TakenReports(msgspec.Struct):
    """Reports of the run ``epoch`` of a replica, whose numbers ascend."""

    epoch: str
    reports: list[UsageReport]


class UsageReports:
    """The reports that fronts have not taken yet, in memory, by the name of the front."""

    def __init__(self) -> None:
        self._fronts: dict[str, deque[UsageReport]] = {}
        self._number = 0

    def add(self, carried: Carried, used: UsageCounts, request: str) -> None:
        """Report that a request of ``carried`` has cost ``used``."""
        if not carried.front or used == UsageCounts():
            return
        self._number += 1
        reports = self._fronts.pop(carried.front, None) or deque(maxlen=MAX_REPORTS)
        self._fronts[carried.front] = reports  # the latest front is the last one
        if len(self._fronts) > MAX_FRONTS:
            del self._fronts[next(iter(self._fronts))]
        reports.append(UsageReport(self._number, carried.scheduled.name, request, used))

    def take(self, front: str, after: int) -> list[UsageReport]:
        """Return the reports for ``front`` with higher numbers than ``after``, and forget all
        others.
        """
        reports = self._fronts.get(front, deque())
        while reports and reports[0].number <= after:
            reports.popleft()
        return [*reports]
