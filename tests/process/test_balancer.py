"""Requests that wait for one engine move to another one that has room."""

import asyncio
import random
import time

import pytest
from fake_engines import FakeMember, FakePool, ask, step

from cllm.core.output import Stats, TokenOutput
from cllm.core.request import EmbeddingRequest, Priority
from cllm.engine.commands import Withdraw, Withdrawn
from cllm.process.assignments import Assignments
from cllm.process.backlog import Backlog, QueueLimits
from cllm.process.balancer import BALANCE_SECONDS, Balancer
from cllm.process.embeddings import InFlightEmbeddings
from cllm.process.in_flight import InFlightRequests
from cllm.process.results import ResultCache
from cllm.process.supervisor import Death
from cllm.scheduler.policy import Fair


class Harness:
    """Engines with two slots each, and their balancer."""

    def __init__(self, count=2):
        self.now = 1.0
        pool = FakePool()
        self.members = [FakeMember(number, pool) for number in range(count)]
        backlog = Backlog(QueueLimits(), Fair({}), {})
        backlog.observe(Stats(num_seq_ids=2 * count))
        self.assignments = Assignments(self.members)
        self.in_flight = InFlightRequests(backlog, ResultCache(), self.assignments.remove)
        self.embeddings = InFlightEmbeddings(QueueLimits())
        self.balancer = Balancer(
            self.members, self.assignments, self.in_flight, self.embeddings, lambda: self.now
        )

    def give(self, number, *names, n=1, priority=Priority.NORMAL):
        """Submit requests to an engine."""
        for name in names:
            _, [request] = self.in_flight.submit([ask(name, n, priority)])
            member, booked = self.assignments.assign(request, [self.members[number]])
            member.give(name, booked)

    def begin(self, number, *names):
        """Let an engine compute requests, and report how many others wait there."""
        self.in_flight.put([TokenOutput(name, 0, 1) for name in names])
        member = self.members[number]
        num_waiting = sum(member.num_seqs) - len(names)
        member.take(step(num_running=len(names), num_waiting=num_waiting))

    def balance(self):
        self.now += BALANCE_SECONDS
        self.balancer.balance()

    def list_withdrawn(self, number):
        """Return the requests that an engine was asked for since the last call."""
        sent = self.members[number].take_sent()
        return [one.request_id for one in sent if isinstance(one, Withdraw)]

    def answer(self, name, *, done=True):
        self.balancer.take(Withdrawn(name, done))

    def count(self):
        return [sum(member.num_seqs) for member in self.members]


def make_busy(*waiting, count=2):
    """Return a harness whose first engine computes two requests, while others wait for it."""
    harness = Harness(count)
    harness.give(0, "a", "b", *waiting)
    harness.begin(0, "a", "b")
    return harness


def test_waiting_requests_move_to_an_idle_engine():
    """As many as it has room for, in their order."""
    harness = make_busy("c", "d", "e")
    harness.balance()
    assert harness.list_withdrawn(0) == ["c", "d"]
    assert harness.count() == [3, 2], "those on their way count for the target"
    for name in "cd":
        harness.answer(name)
        assert harness.assignments.find(name) is harness.members[1]
    assert harness.members[1].take_added() == ["c", "d"]
    assert harness.count() == [3, 2]
    harness.balance()
    assert harness.list_withdrawn(0) == []


def test_request_that_has_begun_stays_and_is_not_asked_for_again():
    harness = make_busy("c")
    harness.balance()
    assert harness.list_withdrawn(0) == ["c"]
    harness.answer("c", done=False)
    assert harness.assignments.find("c") is harness.members[0]
    assert harness.count() == [3, 0]
    harness.balance()
    assert harness.list_withdrawn(0) == []


def test_nothing_moves_while_nothing_waits():
    harness = Harness()
    harness.give(0, "a", "b")
    harness.begin(0, "a", "b")
    harness.balance()
    assert harness.list_withdrawn(0) == []


def test_engines_are_compared_only_now_and_then():
    harness = make_busy("c")
    harness.balance()
    harness.answer("c", done=False)
    harness.list_withdrawn(0)
    harness.give(0, "d")
    harness.now += BALANCE_SECONDS / 2
    harness.balancer.balance()
    assert harness.list_withdrawn(0) == []
    harness.balance()
    assert harness.list_withdrawn(0) == ["d"]


def test_higher_classes_move_first():
    harness = Harness()
    harness.give(0, "a", "b", priority=Priority.INTERACTIVE)
    harness.give(0, "late", "later", priority=Priority.BATCH)
    harness.give(0, "c")
    harness.begin(0, "a", "b")
    harness.balance()
    assert harness.list_withdrawn(0) == ["c", "late"]


def test_engine_relieves_the_one_with_most_requests_first():
    harness = Harness(3)
    for number, names in enumerate(["abcd", "efghij"]):
        harness.give(number, *names)
        harness.begin(number, *names[:2])
    harness.balancer.relieve_others(harness.members[2])
    assert (harness.list_withdrawn(0), harness.list_withdrawn(1)) == ([], ["g", "h"])


def test_source_that_hangs_keeps_no_slot_of_the_target():
    """Its answer still moves the request when it comes."""
    harness = make_busy("c", "d", count=3)
    harness.members[2].die()
    harness.balance()
    assert harness.list_withdrawn(0) == ["c", "d"]
    harness.members[0].hangs = True
    harness.balance()
    assert harness.count() == [4, 0, 0]
    harness.balance()
    assert harness.count() == [4, 0, 0], "counted back once"
    harness.members[0].hangs = False
    harness.answer("c")
    assert harness.assignments.find("c") is harness.members[1]
    assert harness.count() == [3, 1, 0]


def test_request_goes_to_another_engine_if_the_target_has_died():
    harness = make_busy("c", count=3)
    harness.balance()
    [target] = [member for member in harness.members[1:] if sum(member.num_seqs)]
    target.die()
    harness.answer("c")
    assert harness.assignments.find("c") not in (target, None)


def test_request_that_ended_meanwhile_does_not_move():
    harness = make_busy("c")
    harness.balance()
    harness.assignments.remove("c")
    harness.answer("c")
    assert harness.assignments.find("c") is None
    assert harness.members[1].take_added() == []
    assert harness.count() == [2, 0]


def test_engine_that_died_answers_no_more():
    harness = make_busy("c")
    harness.balance()
    harness.balancer.cancel(harness.members[0])
    assert harness.count() == [3, 0]
    harness.answer("c")  # from before the death, or of nothing: it changes nothing
    assert harness.count() == [3, 0]


@pytest.mark.parametrize("is_suspect", [False, True])
def test_other_engines_continue_what_has_killed_none(is_suspect):
    harness = make_busy("c")
    dead = harness.members[0]
    dead.die()
    dead.find_fatal_request(Death("", ["a"] * is_suspect, True, 1.0), is_certain=True)
    harness.balancer.move_all(dead)
    moved = ["b", "c"] if is_suspect else ["a", "b", "c"]
    assert harness.members[1].take_added() == moved
    assert [*dead.bookings] == ["a"] * is_suspect


def test_requests_stay_if_no_engine_is_ready():
    harness = make_busy()
    for member in harness.members:
        member.die()
    harness.balancer.move_all(harness.members[0])
    assert [*harness.members[0].bookings] == ["a", "b"]


def test_counts_are_right_after_any_order_of_events():
    """Withdrawals, answers, ends, hangs and deaths at random: each request has one engine, which
    counts its sequences once.
    """
    generator, began = random.Random(5), time.process_time()
    for _ in range(40):
        harness = Harness(3)
        names = [f"r{i}" for i in range(12)]
        for name in names:
            harness.give(generator.randrange(3), name, n=generator.randint(1, 2))
        for _ in range(60):
            member, name = generator.choice(harness.members), generator.choice(names)
            match generator.randrange(6):
                case 0:
                    member.hangs = not member.hangs
                case 1 if member.ready and sum(one.ready for one in harness.members) > 1:
                    member.die()
                    harness.balancer.cancel(member)
                    harness.balancer.move_all(member)
                case 2 if not member.ready:
                    member.start()
                case 3:
                    harness.answer(name, done=generator.random() < 0.7)
                case 4 if generator.random() < 0.2:
                    harness.assignments.remove(name, abort=True)
                case _:
                    waiting = generator.randrange(3)
                    member.take(step(num_running=2, num_waiting=waiting))
                    harness.balance()
            for one in harness.members:
                assert min(one.num_seqs) >= 0
            booked = [name for one in harness.members for name in one.bookings]
            assert len(booked) == len({*booked})
            assert sum(harness.count()) == sum(
                booked.num_seqs for one in harness.members for booked in one.bookings.values()
            )
        for name in [*harness.balancer._moves]:
            harness.answer(name)
        for one in harness.members:
            assert sum(one.num_seqs) == sum(booked.num_seqs for booked in one.bookings.values())
    assert time.process_time() - began < 60


def test_texts_to_embed_move_too():
    async def main():
        harness = Harness()
        request = EmbeddingRequest("texts", [[1], [2]])
        harness.embeddings.begin(request)
        member, booked = harness.assignments.assign(request, [harness.members[0]])
        member.give("texts", booked)
        harness.members[0].die()
        harness.balancer.move_all(member)
        assert harness.assignments.find("texts") is harness.members[1]

    asyncio.run(main())
