"""Who is ahead of a newcomer, for how long, and who is refused."""

import pytest

from cllm.backends.fake.backend import Costs
from cllm.core.output import Stats
from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.process.backlog import Backlog, Place, QueueFull, QueueLimits
from cllm.process.reservations import LONGEST_WAIT, Claim
from cllm.scheduler.policy import Fair, FirstComeFirstServed, Priorities, make_policy

CAPACITY = 4
BATCH, NORMAL, INTERACTIVE = Priority.BATCH, Priority.NORMAL, Priority.INTERACTIVE


def ask(key="", priority=NORMAL, n=1, length=10):
    return Request("r", [1] * length, SamplingParams(n=n), key, priority)


def backlog_of(*, policy="fair", weights=None, seconds_each=0.0, clock=lambda: 0.0, **limits):
    weights = weights or {}
    backlog = Backlog(QueueLimits(**limits), make_policy(policy, weights), weights, clock)
    backlog.observe(Stats(num_seq_ids=CAPACITY, place_seconds=seconds_each))
    return backlog


def submit(backlog, count, **what):
    """Submit up to ``count`` requests; how many were let in."""
    for i in range(count):
        try:
            backlog.admit([ask(**what)])
        except QueueFull:
            return i
        backlog.submitted(ask(**what))
    return count


def refusal(backlog, *requests, body=0):
    with pytest.raises(QueueFull) as caught:
        backlog.admit([*requests], Claim(body=body))
    return caught.value


def told(seconds):
    """Retry-After with which clients that add up to a tenth return after ``seconds`` on average."""
    return max(1, round(seconds / 1.05))


def test_no_client_is_sent_away_for_longer_than_ten_minutes():
    """Neither for a text nor for embeddings, which have no reservations."""
    assert QueueFull("an hour of work waits", "seconds", 3600.0).retry_after == LONGEST_WAIT


def test_the_place_is_the_number_of_those_that_find_none():
    """Whoever finds a free place is at 0, the next one at 1."""
    backlog, places = backlog_of(), []
    for _ in range(7):
        places.append(backlog.place(ask()).position)
        backlog.submitted(ask())
    assert places == [0, 0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("num_begun", [0, 2, 4])
def test_exactly_as_many_wait_as_may(num_begun):
    """Whether or not those that run have had their first token; each end lets one in."""
    backlog = backlog_of(requests=10)
    running = [ask() for _ in range(num_begun)]
    for request in running:
        backlog.submitted(request)
        backlog.begun(request)
    assert submit(backlog, 100) == CAPACITY + 10 - num_begun
    backlog.ended(ask())
    if not num_begun:
        backlog.begun(ask())
    assert submit(backlog, 100) == 1


def test_without_a_queue_only_what_runs_at_once_is_taken():
    """A bound of 0 is not "nothing"; and one request of many sequences begins if one of them
    can.
    """
    assert submit(backlog_of(requests=0), 100) == CAPACITY
    backlog = backlog_of(requests=0)
    assert submit(backlog, 9, n=128) == 1
    assert submit(backlog, 9) == 0


def test_prompt_tokens_that_wait_are_bounded():
    """Those of prompts that are being computed do not count."""
    backlog = backlog_of(tokens=100, seconds_each=2.0)
    assert submit(backlog, CAPACITY + 3, length=30) == CAPACITY + 3
    backlog.admit([ask(length=10)])
    error = refusal(backlog, ask(length=40))
    assert (error.bound, "130 prompt tokens would wait, 100 may" in str(error)) == ("tokens", True)
    assert error.retry_after == told(30 / 90 * 4 * 2.0)


def test_estimated_seconds_are_bounded():
    """The engine says what one of those who wait takes; until it has said so, nobody is refused."""
    assert submit(backlog_of(seconds=5.0), 50) == 50
    backlog = backlog_of(seconds=5.0, seconds_each=1.0)
    assert submit(backlog, CAPACITY + 5) == CAPACITY + 5
    error = refusal(backlog, ask())
    assert (error.bound, error.retry_after) == ("seconds", told(1.0))


def test_retry_after_is_the_time_until_there_is_room():
    """One request must be served for one, ten for ten; never more than are there."""
    for count, num_seconds in ((1, 3.0), (10, 30.0), (100, 63.0)):
        backlog = backlog_of(requests=20, seconds_each=3.0)
        submit(backlog, CAPACITY + 20)
        assert refusal(backlog, *[ask()] * count).retry_after == told(num_seconds)


@pytest.mark.parametrize("num_waiting", [0, 20])
def test_rate_of_service_is_measured_while_all_places_are_taken(num_waiting):
    """Four places, each held for eight seconds: one becomes free every two.

    Idle time in between does not count.
    """
    now = 0.0
    backlog = backlog_of(requests=num_waiting, seconds_each=77.0, clock=lambda: now)
    assert submit(backlog, CAPACITY + num_waiting) == CAPACITY + num_waiting
    for _ in range(3):
        for _ in range(num_waiting // CAPACITY + 1):
            for finish in (backlog.begun, backlog.ended):
                now += 4.0
                backlog.observe(Stats(num_seq_ids=CAPACITY))
                for _ in range(CAPACITY):
                    finish(ask())
        now += 100.0
        assert submit(backlog, CAPACITY + num_waiting) == CAPACITY + num_waiting
    assert backlog.place(ask()).seconds == pytest.approx(2.0 * (num_waiting + 1))


def test_the_first_token_of_a_long_prompt_takes_longer():
    """By what steps and tokens of prompts cost, as the engine says."""
    backlog = backlog_of()
    backlog.observe(Stats(num_seq_ids=CAPACITY, step_seconds=0.5, prompt_token_seconds=0.01))
    assert backlog.place(ask(length=10)) == Place(0, 0.6)
    assert backlog.place(ask(length=400)) == Place(0, 4.5)


def test_estimated_time_to_first_token_is_about_right(fake_engine):
    """Once a queue has been seen: the last of eight that wait begins when it was said to."""
    engine = fake_engine(max_num_seqs=CAPACITY, costs=Costs(step=0.005, row=0.0005, token=0.0001))
    backlog = backlog_of(clock=lambda: engine.now)
    for wave in ("warm", "seen"):
        asked = [
            engine.add(f"{wave} {i}", [i, 1], max_tokens=60, ignore_eos=True)
            for i in range(CAPACITY + 8)
        ]
        sent, estimates, first = engine.now, {}, {}
        for request in asked:
            estimates[request.request_id] = backlog.place(request).seconds
            backlog.submitted(request)
        while engine.scheduler.has_work():
            num_seen = len(engine.outputs)
            engine.step()
            backlog.observe(engine.scheduler.stats())
            for output in engine.outputs[num_seen:]:
                request = asked[int(output.request_id.split()[1])]
                if output.request_id not in first:
                    first[output.request_id] = engine.now - sent
                    backlog.begun(request)
                if output.finish:
                    backlog.ended(request)
    last = asked[-1].request_id
    assert estimates[last] == pytest.approx(first[last], rel=0.25)


def test_lower_classes_are_not_in_the_way():
    """A queue full of batch requests refuses batch requests alone; and the higher ones are ahead of
    them.
    """
    backlog = backlog_of(requests=10)
    assert submit(backlog, 100, priority=BATCH) == CAPACITY + 10
    assert backlog.place(ask()).position == 0
    assert submit(backlog, 100) == CAPACITY + 10
    assert submit(backlog, 100, priority=INTERACTIVE) == CAPACITY + 10
    assert backlog.place(ask(priority=INTERACTIVE)).position == 11
    assert backlog.place(ask(priority=BATCH)).position == 3 * 10 + 2 * CAPACITY + 1


def test_another_key_is_not_in_the_way():
    """Who sends a few is served between those of who sends many."""
    backlog = backlog_of(requests=10)
    submit(backlog, 100, key="many")
    assert submit(backlog, 3, key="few") == 3
    assert backlog.place(ask(key="few")).position <= 7
    assert submit(backlog, 1, key="many") == 0


def test_all_keys_together_stay_bounded():
    """Names cost nothing; those who take a new one each time get no longer queue."""
    backlog = backlog_of(requests=10)
    assert sum(submit(backlog, 1, key=f"name {i}") for i in range(1000)) == CAPACITY + 10


def test_a_weight_counts():
    """A key of weight 3 has three served before one of another key."""
    backlog = backlog_of(weights={"heavy": 3.0})
    submit(backlog, CAPACITY)
    for _ in range(CAPACITY):
        backlog.begun(ask())
    submit(backlog, 9, key="heavy")
    assert backlog.place(ask(key="light")).position == 4
    assert backlog.place(ask(key="heavy")).position == 10


class Tenants(Fair):
    """Shares by tenant."""


class Classes(Priorities):
    """The classes in another order."""


class Shortest(FirstComeFirstServed):
    """One queue, sorted by length."""


class Silent:
    """A policy that inherits nothing and does not say how it sorts."""

    def __init__(self, weights):
        pass


OWN = [
    (f"{__name__}:{policy.__name__}", position)
    for policy, position in ((Tenants, 2), (Classes, 6), (Shortest, 11))
]


@pytest.mark.parametrize(
    ("policy", "position"),
    [("fcfs", 11), ("priority", 6), ("fair", 2), *OWN, (f"{__name__}:Silent", 11)],
)
def test_what_is_ahead_depends_on_the_policy(policy, position):
    """A subclass counts as what it is derived from; of a policy that says nothing, everything is
    ahead.
    """
    backlog = backlog_of(policy=policy)
    submit(backlog, CAPACITY, priority=INTERACTIVE)
    for _ in range(CAPACITY):
        backlog.begun(ask(priority=INTERACTIVE))
    submit(backlog, 5, key="other")
    submit(backlog, 5, priority=BATCH)
    assert backlog.place(ask()).position == position


def test_what_has_ended_leaves_nothing():
    """Aborted before or after its first token, or with the engine."""
    backlog = backlog_of()
    for request in (ask(n=3), ask("a"), ask("b", BATCH)):
        backlog.submitted(request)
        backlog.begun(request)
        backlog.ended(request, request.params.n)
    assert [*backlog._pending.values(), *backlog._num_seqs.values()] == [{}, {}, {}, 0, 0, 0]
    submit(backlog, 9)
    backlog.clear()
    assert backlog.place(ask()).position == 0


# -------------------------------------------------------------- clients that were told to come back


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def rejected(backlog, count=1, **what):
    """Claims of rejected clients, and their Retry-After."""
    errors = [refusal(backlog, ask(**what), body=i + 1) for i in range(count)]
    return [Claim(error.ticket) for error in errors], [error.retry_after for error in errors]


def test_rejected_clients_are_told_to_return_one_after_the_other():
    """Each when it can be served behind the earlier ones."""
    backlog = backlog_of(requests=8, seconds_each=3.0)
    submit(backlog, CAPACITY + 8)
    assert rejected(backlog, 5)[1] == [told(3.0 * (i + 1)) for i in range(5)]


def test_place_of_a_rejected_client_is_not_given_to_newcomers():
    """If their turn would come after its return. The client that returns on time gets it."""
    clock = Clock()
    backlog = backlog_of(requests=8, seconds_each=3.0, clock=clock)
    submit(backlog, CAPACITY + 8)
    (claim,), (seconds,) = rejected(backlog)
    backlog.ended(ask())
    backlog.begun(ask())
    clock.now += seconds
    assert refusal(backlog, ask()).bound == "requests"
    backlog.admit([ask()], claim)
    backlog.submitted(ask())
    assert refusal(backlog, ask()).ticket not in claim


def test_newcomers_have_half_of_the_queue_whoever_will_return():
    """So no capacity is lost to clients that never return; and what can begin at once is never
    refused.
    """
    clock = Clock()
    backlog = backlog_of(requests=8, seconds_each=0.1, clock=clock)
    submit(backlog, CAPACITY + 8)
    seconds = rejected(backlog, 20)[1]
    for _ in range(CAPACITY + 8):
        backlog.begun(ask())
        backlog.ended(ask())
    clock.now += seconds[-1]
    assert submit(backlog, 99) == CAPACITY + 4


def test_client_on_time_may_exceed_the_bound_by_what_is_served_in_a_second():
    """Because Retry-After has whole seconds, so that several return together; at least one may."""
    for seconds_each, num_more in ((0.25, 4), (3.0, 1)):
        clock = Clock()
        backlog = backlog_of(requests=8, seconds_each=seconds_each, clock=clock)
        submit(backlog, CAPACITY + 8)
        claims, seconds = rejected(backlog, 8)
        clock.now += seconds[-1]
        for claim in claims[-num_more - 1 : -1]:
            backlog.admit([ask()], claim)
            backlog.submitted(ask())
        with pytest.raises(QueueFull) as caught:
            backlog.admit([ask()], claims[-1])
        assert caught.value.ticket == claims[-1].ticket, "its place is kept"


def test_returning_clients_of_a_lower_class_are_not_in_the_way():
    clock = Clock()
    backlog = backlog_of(requests=8, seconds_each=3.0, clock=clock)
    submit(backlog, CAPACITY + 8, priority=BATCH)
    clock.now += rejected(backlog, 20, priority=BATCH)[1][-1]
    assert submit(backlog, 99) == CAPACITY + 8
