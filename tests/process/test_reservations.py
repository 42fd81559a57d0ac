"""Reserved queue places for rejected clients: who may claim them, when, and for how long."""

import pytest

from cllm.core.request import Priority
from cllm.process import reservations as module
from cllm.process.backlog import NO_CLAIM
from cllm.process.queue_load import QueueLoad
from cllm.process.reservations import Claim, Newcomer, Reservations

NORMAL, BATCH = Priority.NORMAL, Priority.BATCH


class Desk:
    """Reservations with a clock that tests set."""

    def __init__(self):
        self.now = 100.0
        self.reservations = Reservations(lambda: self.now)

    def reject(self, account="a", body=0, priority=NORMAL, seconds=10.5):
        """Return the ticket."""
        return self.reservations.add(ask(account, priority), Claim(body=body), seconds)[0]

    def find(self, account="a", ticket="", body=0, priority=NORMAL):
        """Return the ticket of the reservation that ``find`` returns, or None."""
        found = self.reservations.find(ask(account, priority), Claim(ticket, body))
        return found and found.ticket

    def redeem(self, **claim):
        self.reservations.redeem(self.reservations.find(ask(), Claim(**claim)))


def ask(account="a", priority=NORMAL):
    return Newcomer(account, priority, QueueLoad(1, 1, 2), 2)


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 1), (1.4, 1), (10.5, 10), (600.0, 571)])
def test_retry_after_allows_for_a_tenth_of_delay(seconds, expected):
    ticket, retry_after = Desk().reservations.add(ask(), NO_CLAIM, seconds)
    assert (bool(ticket), retry_after) == (True, expected)


def test_ticket_works_once_for_its_account_and_class_only():
    desk = Desk()
    ticket, other = desk.reject(body=1), desk.reject(body=2)
    assert desk.find(ticket=ticket) == ticket
    assert desk.find(ticket=other) == other != ticket
    desk.now += 10.0
    for claim in ({"account": "b"}, {"priority": BATCH}, {"priority": Priority.INTERACTIVE}):
        assert desk.find(ticket=ticket, **claim) is None
    desk.redeem(ticket=ticket)
    assert desk.find(ticket=ticket, body=3) is None
    desk.redeem(ticket=other)
    assert desk.find(ticket=ticket) is desk.find(ticket=other) is desk.find(ticket="forged") is None
    assert desk.reservations.counts == {"issued": 2, "honoured": 2, "expired": 0}


def test_due_clients_without_tickets_are_recognized():
    """They are recognized by the body, or by the account if it has a name and only one reservation."""
    desk = Desk()
    first, second = desk.reject(body=1), desk.reject(body=2)
    desk.reject("")
    assert desk.find(body=1) is None
    desk.now += 10.0
    assert (desk.find(body=1), desk.find(body=2), desk.find(body=3)) == (first, second, None)
    desk.redeem(body=1)
    assert desk.find(body=3) == second
    assert desk.find("", body=3) is desk.find("b", body=2) is None


def test_request_without_ticket_is_new_in_groups_that_send_tickets():
    """This lasts until all clients of the group have gone. Groups of other bodies are not affected."""
    desk = Desk()
    first, _, other = desk.reject(body=1), desk.reject(body=1), desk.reject(body=2)
    desk.now += 10.0
    assert desk.find(body=1) == first
    desk.redeem(ticket=first)
    assert desk.find(body=1) is None
    assert desk.find(body=2) == other
    desk.now += 10.0
    assert desk.find() is None, "all have expired"
    again = desk.reject(body=1)
    desk.now += 10.0
    assert desk.find(body=1) == again


def test_unclaimed_reservation_expires():
    """Two seconds plus a tenth of Retry-After after the retry was due.

    Its ticket is no longer valid.
    """
    desk = Desk()
    ticket = desk.reject()
    desk.now += 12.9
    assert desk.find(ticket=ticket) == ticket
    desk.now += 0.1
    assert desk.find(ticket=ticket) is None
    assert len(desk.reservations) == 0
    assert desk.reservations.counts == {"issued": 1, "honoured": 0, "expired": 1}


def test_early_retry_keeps_due_time():
    """Retry-After is the remaining time, however often the client asks. It is longer if there is no
    room at that time.
    """
    desk = Desk()
    ticket = desk.reject()
    reservation = desk.reservations.find(ask(), Claim(ticket))
    for _ in range(3):
        desk.now += 2.5
        assert desk.reservations.postpone(reservation, 0.0) == (
            ticket,
            10 - (desk.now - 100.0) // 1,
        )
    desk.now += 2.5
    assert desk.reservations.is_due(reservation)
    assert desk.reservations.postpone(reservation, 4.2) == (ticket, 5)
    assert not desk.reservations.is_due(reservation)
    assert desk.reservations.counts["issued"] == 1


@pytest.mark.parametrize("account", ["a", ""])
def test_early_retries_without_ticket_make_no_reservations(account):
    """They get the remaining time.

    A request that arrives at the same time comes from another client.
    """
    desk = Desk()
    ticket = desk.reject(account, body=1, seconds=105.0)
    assert desk.find(account, body=1) is None
    for i in range(1, 100):
        desk.now += 1.0
        reservation = desk.reservations.find(ask(account), Claim(body=1))
        assert desk.reservations.postpone(reservation, 0.0) == (ticket, 100 - i)
        assert desk.find("b", body=1) is desk.find(account, body=2) is None
    assert len(desk.reservations) == 1


def test_early_retry_does_not_shorten_reservation():
    """It may come from another client with the same body."""
    desk = Desk()
    ticket = desk.reject(body=1, seconds=105.0)
    desk.now += 99.0
    desk.reservations.postpone(desk.reservations.find(ask(), Claim(body=1)), 0.0)
    desk.now += 12.9
    assert desk.find(ticket=ticket) == ticket
    desk.now += 0.2
    assert desk.find(ticket=ticket) is None


def test_early_retries_with_equal_bodies_keep_all_reservations():
    desk = Desk()
    tickets = [desk.reject(body=1), desk.reject(body=1)]
    desk.now += 1.0
    found = []
    for _ in tickets:
        reservation = desk.reservations.find(ask(), Claim(body=1))
        found.append(desk.reservations.postpone(reservation, 0.0)[0])
    assert found == tickets
    assert desk.find(body=1) is None, "a third client"


def test_load_of_returning_clients_is_summed_by_due_time():
    """Each class has its own sums."""
    desk = Desk()
    for account, seconds in (("a", 10.5), ("b", 21.0), ("a", 31.5)):
        desk.reject(account, seconds=seconds)
    desk.reject("c", priority=BATCH)
    load = desk.reservations.sum_load_within
    assert load(NORMAL, 9.9) == QueueLoad(0, 0, 0)
    assert load(NORMAL, 20.0) == QueueLoad(2, 2, 4)
    desk.now += 10.0
    assert load(NORMAL, 20.0) == QueueLoad(3, 3, 6)
    assert load(BATCH, 0.0) == QueueLoad(1, 1, 2)


def test_load_of_redeemed_and_expired_reservations_does_not_count():
    desk = Desk()
    ticket = desk.reject(body=1)
    desk.reject(body=2)
    load = desk.reservations.sum_load_within
    desk.now += 10.0
    desk.redeem(ticket=ticket)
    assert load(NORMAL, 60.0) == QueueLoad(1, 1, 2)
    desk.now += 60.0
    assert desk.find() is None
    assert load(NORMAL, 60.0) == QueueLoad(0, 0, 0)


@pytest.mark.parametrize("weights", [{}, {"2": 3.0, "4": 0.5}])
@pytest.mark.parametrize("num_turns", [0.5, 1.0, 2.5, 4.0, 7.0])
def test_share_of_turns_counts_each_account_up_to_its_turns(weights, num_turns):
    """The result equals counting one by one, also after some have gone."""
    desk = Desk()
    for account in range(1, 6):
        for _ in range(account):
            desk.reject(str(account))
    for name in ("1", "5", "5"):
        desk.reservations.redeem(next(iter(desk.reservations._groups[NORMAL, name, None])))
    counts = {"2": 2, "3": 3, "4": 4, "5": 3}
    served = sum(
        min(count, num_turns * weights.get(account, 1.0)) for account, count in counts.items()
    )
    share = desk.reservations.compute_share_of_turns(NORMAL, num_turns, weights)
    assert share == pytest.approx(served / 12)


def test_retry_after_is_limited_and_longer_waits_get_no_reservation():
    desk = Desk()
    assert desk.reservations.add(ask(), NO_CLAIM, 1e9) == ("", module.LONGEST_WAIT)
    ticket = desk.reject()
    reservation = desk.reservations.find(ask(), Claim(ticket))
    assert desk.reservations.postpone(reservation, 1e9) == (ticket, module.LONGEST_WAIT)
    assert len(desk.reservations) == 1


def test_account_cannot_take_all_reservations(monkeypatch):
    """Its further clients get a Retry-After but no place. The limit holds for each class."""
    monkeypatch.setattr(module, "MAX_PER_ACCOUNT", 2)
    desk = Desk()
    assert [bool(desk.reject(body=i)) for i in range(3)] == [True, True, False]
    assert desk.reject("b")
    assert desk.reject(priority=BATCH)
    desk.now += 13.0
    assert desk.find() is None
    assert desk.reject()


def test_number_of_reservations_is_limited(monkeypatch):
    """Further clients get a Retry-After but no place."""
    monkeypatch.setattr(module, "MAX_RESERVATIONS", 2)
    desk = Desk()
    assert [bool(desk.reject(body=i)) for i in range(3)] == [True, True, False]
    assert desk.reservations.add(ask(), NO_CLAIM, 21.0) == ("", 20)
    desk.now += 13.0
    assert desk.find() is None
    assert desk.reject()
