"""What a replica tells fronts about the usage of their accounts.

An answer that a front has received completely says what it cost. A front cannot see that of answers
whose client has gone, and of batches, so it asks for reports about once a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import msgspec

from cllm.core.carried import Carried
from cllm.errors import RateLimited
from cllm.store.charges import UsageCounts

MAX_REPORTS = 100_000  # for each front; older ones are dropped
MAX_FRONTS = 100
PAUSE_SECONDS = 1.0  # after which a paused batch looks again whether it may go on


class UsageReport(msgspec.Struct):
    """What one request of a front has cost its account. ``request`` is the id that the front gave
    the request, or "" for the requests of batches, whose ``model`` the front does not know.
    """

    number: int
    account: str
    request: str
    used: UsageCounts
    model: str = ""


class ReportBatch(msgspec.Struct):
    """Reports of the run ``epoch`` of a replica, in ascending order of their numbers, which a front
    gets at once. The accounts ``batch_accounts`` have unfinished batches there.
    """

    epoch: str
    reports: list[UsageReport]
    batch_accounts: list[str] = []


class UsageReports:
    """The reports that fronts have not taken yet, in memory, by the name of the front."""

    def __init__(self) -> None:
        self._fronts: dict[str, deque[UsageReport]] = {}
        self._number = 0
        self._paused: dict[str, Collection[str]] = {}  # accounts, by the name of the front

    def pause(self, front: str, accounts: Collection[str]) -> None:
        """Let the batches of these accounts wait, and of no others of ``front``: they may use
        nothing now.
        """
        self._paused[front] = accounts
        if len(self._paused) > MAX_FRONTS:
            del self._paused[next(iter(self._paused))]

    def check(self, carried: Carried) -> None:
        """Raise RateLimited while the batches of an account wait."""
        if carried.account.name in self._paused.get(carried.front, ()):
            message = f"The account {carried.account.name!r} has used up a limit."
            raise RateLimited(message, "tokens_per_minute", PAUSE_SECONDS)

    def add(self, carried: Carried, used: UsageCounts, request: str, model: str = "") -> None:
        """Report that a request of ``carried`` has cost ``used``. A front with accounts must know
        if it has cost nothing, because it has reserved tokens for the request.
        """
        is_awaited = request and carried.account.has_key
        if not carried.front or (used == UsageCounts() and not is_awaited):
            return
        self._number += 1
        reports = self._fronts.pop(carried.front, None) or deque(maxlen=MAX_REPORTS)
        self._fronts[carried.front] = reports  # the latest front is the last one
        if len(self._fronts) > MAX_FRONTS:
            del self._fronts[next(iter(self._fronts))]
        name = carried.scheduled.name
        reports.append(UsageReport(self._number, name, request, used, model))

    def take(self, front: str, after: int) -> list[UsageReport]:
        """Return the reports for ``front`` with higher numbers than ``after``, and forget all
        others.
        """
        reports = self._fronts.get(front, deque())
        while reports and reports[0].number <= after:
            reports.popleft()
        return [*reports]
