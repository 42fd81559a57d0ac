"""Places in the queue that are reserved for rejected clients until they retry."""

from __future__ import annotations

import math
import secrets
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, takewhile
from operator import attrgetter
from typing import NamedTuple

from cllm.core.account import is_anonymous
from cllm.core.request import Priority, Request
from cllm.process.queue_load import QueueLoad, measure_load

# clients wait for Retry-After plus up to a tenth, so that they do not return together
MEAN_DELAY = 1.05
# a client returns within Retry-After times LONGEST_DELAY, plus LATENESS seconds
LONGEST_DELAY, LATENESS = 1.1, 2.0
# seconds; clients that would have to wait longer get this Retry-After and no reservation
LONGEST_WAIT = 600.0
EARLIEST_RETRY = 0.3  # seconds; SDKs that ignore Retry-After retry later than this
MAX_RESERVATIONS = 10_000
MAX_PER_ACCOUNT = 1_000  # reservations in each class


class Claim(NamedTuple):
    """Identifies a client that retries: by the ticket from its rejection, or else by a hash of the
    request's body.
    """

    ticket: str = ""
    body: int = 0


class Newcomer(NamedTuple):
    """Requests of one client that are not in the queue yet.

    ``load`` is the load of all of them. The first one has ``num_prompt_tokens``.
    """

    account: str
    priority: Priority
    load: QueueLoad
    num_prompt_tokens: int


def describe_newcomer(*requests: Request) -> Newcomer:
    first = requests[0]
    return Newcomer(first.account, first.priority, measure_load(*requests), len(first.prompt))


@dataclass(slots=True, eq=False)
class Reservation:
    """The place of one client in the queue.

    The client is expected between the times ``due`` and ``expires``, in seconds of the clock, and
    was last rejected at ``rejected_at``.
    """

    priority: Priority
    account: str
    body: int
    load: QueueLoad
    due: float = 0.0
    expires: float = 0.0
    rejected_at: float = 0.0
    ticket: str = field(default_factory=lambda: secrets.token_urlsafe(16))


class Reservations:
    """All reserved places.

    A client claims its place with a ticket: a random number that works once, for the same account
    and class.

    ``counts`` has the numbers of reservations that were issued, honoured (the client returned and
    was admitted), and expired.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` returns seconds."""
        self.counts = Counter(issued=0, honoured=0, expired=0)
        self._clock = clock
        self._by_due: dict[Priority, list[Reservation]] = {priority: [] for priority in Priority}
        self._by_ticket: dict[str, Reservation] = {}
        self._groups: dict[Group, dict[Reservation, None]] = {}
        # groups in which a client has sent its ticket
        self._groups_with_tickets: set[Group] = set()
        self._loads: dict[Priority, QueueLoad] = {priority: QueueLoad() for priority in Priority}
        # for each class: number of reservations -> number of accounts that have at least as many
        self._num_accounts: dict[Priority, Counter[int]] = {
            priority: Counter() for priority in Priority
        }

    def __len__(self) -> int:
        return len(self._by_ticket)

    def find(self, newcomer: Newcomer, claim: Claim) -> Reservation | None:
        """Return the reservation of the client that sends ``newcomer``, if it has one.

        A client that sends no ticket gets a reservation that is due: one of its account for the
        same body, or the only one of its account, if the account has a name. If none is due, a
        reservation of its account for the same body that is older than EARLIEST_RETRY means that
        the client retries too early, and is returned. In a group whose clients do send tickets, a
        request without a ticket is a new one and gets none.
        """
        self._expire()
        account, priority = newcomer.account, newcomer.priority
        claimed = self._by_ticket.get(claim.ticket)
        if claimed is not None and (claimed.priority, claimed.account) == (priority, account):
            self._groups_with_tickets.update(list_groups(claimed))
            return claimed
        same, own = (
            {} if group in self._groups_with_tickets else self._groups.get(group, {})
            for group in ((priority, account, body) for body in (claim.body, None))
        )
        only = own if len(own) == 1 and not is_anonymous(account) else {}
        due = next(filter(self.is_due, chain(same, only)), None)
        early = (one for one in same if one.rejected_at <= self._clock() - EARLIEST_RETRY)
        # the least recently rejected one
        return due or min(early, key=attrgetter("rejected_at"), default=None)

    def is_due(self, reservation: Reservation) -> bool:
        return reservation.due <= self._clock()

    def count(self, priority: Priority, account: str) -> int:
        return len(self._groups.get((priority, account, None), ()))

    def sum_load_within(self, priority: Priority, seconds: float) -> QueueLoad:
        """Return the load of the clients of a class that are due within ``seconds`` or overdue."""
        reservations = self._by_due[priority]
        num_due = bisect_right(reservations, self._clock() + seconds, key=attrgetter("due"))
        return self._loads[priority].scale(num_due / max(1, len(reservations)))

    def compute_share_of_turns(
        self, priority: Priority, num_turns: float, weights: Mapping[str, float]
    ) -> float:
        """Return the share of a class's reservations that is served if each account gets
        ``num_turns`` turns.

        In a turn, an account is served as many requests as its weight, 1 by default.
        """
        num_accounts, total = self._num_accounts[priority], len(self._by_due[priority])
        count = float(total)
        if num_accounts[last := math.ceil(num_turns)]:  # otherwise no account has more
            count = (
                sum(num_accounts[i] for i in range(1, last))
                + (num_turns - last + 1) * num_accounts[last]
            )
        for account, weight in weights.items():
            own = self.count(priority, account)
            count += min(own, num_turns * weight) - min(own, num_turns)
        return count / max(1, total)

    def add(self, newcomer: Newcomer, claim: Claim, seconds: float) -> tuple[str, float]:
        """Reserve a place that will be free in ``seconds`` for ``newcomer``.

        Returns the ticket and Retry-After in whole seconds. The ticket is "" if there are too many
        reservations or the wait is too long.
        """
        retry_after = max(1.0, round(min(seconds / MEAN_DELAY, LONGEST_WAIT)))
        account, priority, load, _ = newcomer
        is_full = len(self) >= MAX_RESERVATIONS or self.count(priority, account) >= MAX_PER_ACCOUNT
        if is_full or retry_after >= LONGEST_WAIT:
            return "", retry_after
        reservation = Reservation(priority, account, claim.body, load)
        self._loads[reservation.priority].add(reservation.load)
        self._by_ticket[reservation.ticket] = reservation
        for group in list_groups(reservation):
            self._groups.setdefault(group, {})[reservation] = None
        self._num_accounts[reservation.priority][
            self.count(reservation.priority, reservation.account)
        ] += 1
        self._schedule(reservation, self._clock() + retry_after, retry_after)
        self.counts["issued"] += 1
        return reservation.ticket, retry_after

    def postpone(self, reservation: Reservation, seconds: float) -> tuple[str, float]:
        """Move the reservation of a client that returns too early, or for which there will be no
        room within ``seconds``. Return its ticket, and the seconds after which to retry.
        """
        due = max(reservation.due, self._clock() + min(seconds, LONGEST_WAIT))
        retry_after = max(1.0, math.ceil(due - self._clock()))
        self._by_due[reservation.priority].remove(reservation)
        self._schedule(reservation, due, retry_after)
        return reservation.ticket, retry_after

    def redeem(self, reservation: Reservation) -> None:
        """Remove the reservation of a client that has been admitted."""
        self._remove(reservation)
        self.counts["honoured"] += 1

    def _schedule(self, reservation: Reservation, due: float, retry_after: float) -> None:
        reservation.due = due
        reservation.rejected_at = self._clock()
        # an early retry may come from another client, and the first client may still return at its
        # time
        reservation.expires = max(
            reservation.expires, self._clock() + LONGEST_DELAY * retry_after + LATENESS
        )
        insort(self._by_due[reservation.priority], reservation, key=attrgetter("due"))

    def _expire(self) -> None:
        now = self._clock()
        for priority in Priority:
            due = takewhile(self.is_due, self._by_due[priority])
            for reservation in [one for one in due if one.expires <= now]:
                self._remove(reservation)
                self.counts["expired"] += 1

    def _remove(self, reservation: Reservation) -> None:
        self._loads[reservation.priority].add(reservation.load, -1)
        self._num_accounts[reservation.priority][
            self.count(reservation.priority, reservation.account)
        ] -= 1
        del self._by_ticket[reservation.ticket]
        self._by_due[reservation.priority].remove(reservation)
        for group in list_groups(reservation):
            del self._groups[group][reservation]
            if not self._groups[group]:
                del self._groups[group]
                self._groups_with_tickets.discard(group)


Group = tuple[Priority, str, int | None]
"""The reservations of an account for one body, or all of them (None)."""


def list_groups(reservation: Reservation) -> list[Group]:
    return [(reservation.priority, reservation.account, body) for body in (None, reservation.body)]
