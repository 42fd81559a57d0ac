"""Queue limits: what counts as ahead of a newcomer, the estimated wait, and rejections."""

import pytest

from cllm.backends.fake.backend import Costs
from cllm.core.output import Stats
from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.process.backlog import MIN_ENDED, Backlog, QueueFull, QueueLimits, QueuePosition
from cllm.process.reservations import LONGEST_WAIT, Claim
from cllm.scheduler.policy import Fair, FirstComeFirstServed, Priorities, make_policy
from cllm.scheduler.report import collect_stats

CAPACITY = 4
BATCH, NORMAL, INTERACTIVE = Priority.BATCH, Priority.NORMAL, Priority.INTERACTIVE


def ask(account="", priority=NORMAL, n=1, length=10):
    return Request("r", [1] * length, SamplingParams(n=n), account, priority)


def make_backlog(
    *,
    policy="fair",
    weights=None,
    seconds_each=0.0,
    num_ended=MIN_ENDED,
    clock=lambda: 0.0,
    **limits,
):
    weights = weights or {}
    backlog = Backlog(QueueLimits(**limits), make_policy(policy, weights), weights, clock)
    backlog.observe(Stats(num_seq_ids=CAPACITY, slot_seconds=seconds_each))
    for _ in range(num_ended):
        backlog.record_submission(ask())
        backlog.record_first_token(ask())
        backlog.record_end(ask())
    return backlog


def submit(backlog, count, **what):
    """Submit up to ``count`` requests; return how many were admitted."""
    for i in range(count):
        try:
            backlog.admit([ask(**what)])
        except QueueFull:
            return i
        backlog.record_submission(ask(**what))
    return count


def reject(backlog, *requests, body=0):
    with pytest.raises(QueueFull) as caught:
        backlog.admit([*requests], Claim(body=body))
    return caught.value


def expected_retry_after(seconds):
    """Return the Retry-After for clients that should return after ``seconds`` on average, if each
    adds up to a tenth to it.
    """
    return max(1, round(seconds / 1.05))


def test_retry_after_is_at_most_ten_minutes():
    """This holds for embeddings too, which have no reservations."""
    assert QueueFull("an hour of work waits", "seconds", 3600.0).retry_after == LONGEST_WAIT


def test_queue_position_counts_requests_without_slot():
    """A request that finds a free slot has position 0, the next one 1."""
    backlog, positions = make_backlog(), []
    for _ in range(7):
        positions.append(backlog.estimate_position(ask()).position)
        backlog.record_submission(ask())
    assert positions == [0, 0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("num_started", [0, 2, 4])
def test_number_of_waiting_requests_meets_limit_exactly(num_started):
    """It does not matter whether running requests have their first token. Each end admits one more."""
    backlog = make_backlog(requests=10)
    running = [ask() for _ in range(num_started)]
    for request in running:
        backlog.record_submission(request)
        backlog.record_first_token(request)
    assert submit(backlog, 100) == CAPACITY + 10 - num_started
    backlog.record_end(ask())
    if not num_started:
        backlog.record_first_token(ask())
    assert submit(backlog, 100) == 1


def test_limit_of_zero_admits_only_requests_that_start_immediately():
    """A request with many sequences is admitted if one of them can start."""
    assert submit(make_backlog(requests=0), 100) == CAPACITY
    backlog = make_backlog(requests=0)
    assert submit(backlog, 9, n=128) == 1
    assert submit(backlog, 9) == 0


def test_waiting_prompt_tokens_are_limited():
    """Tokens of prompts that are being computed do not count."""
    backlog = make_backlog(tokens=100, seconds_each=2.0)
    assert submit(backlog, CAPACITY + 3, length=30) == CAPACITY + 3
    backlog.admit([ask(length=10)])
    error = reject(backlog, ask(length=40))
    assert (error.bound, "130 prompt tokens would wait (limit 100)" in str(error)) == (
        "tokens",
        True,
    )
    assert error.retry_after == expected_retry_after(30 / 90 * 4 * 2.0)


def test_estimated_wait_is_limited():
    """The engine estimates the seconds of a waiting sequence. Without an estimate, no request is
    rejected.
    """
    assert submit(make_backlog(seconds=5.0), 50) == 50
    backlog = make_backlog(seconds=5.0, seconds_each=1.0)
    assert submit(backlog, CAPACITY + 5) == CAPACITY + 5
    error = reject(backlog, ask())
    assert (error.bound, error.retry_after) == ("seconds", expected_retry_after(1.0))


def test_estimated_wait_rejects_no_request_before_sequences_have_ended():
    """Until then, the estimate has no evidence of the length of answers. Other limits apply."""
    backlog = make_backlog(seconds=5.0, requests=50, seconds_each=100.0, num_ended=MIN_ENDED - 1)
    assert submit(backlog, 100) == CAPACITY + 50
    backlog.record_first_token(ask())
    backlog.record_end(ask())
    assert reject(backlog, ask()).bound == "seconds"


def test_retry_after_is_time_until_there_is_room():
    """One request needs one to be served first, ten need ten, and none needs more than are waiting."""
    for count, num_seconds in ((1, 3.0), (10, 30.0), (100, 63.0)):
        backlog = make_backlog(requests=20, seconds_each=3.0)
        submit(backlog, CAPACITY + 20)
        assert reject(backlog, *[ask()] * count).retry_after == expected_retry_after(num_seconds)


@pytest.mark.parametrize("num_waiting", [0, 20])
def test_service_rate_is_measured_while_all_slots_are_taken(num_waiting):
    """With four slots, each held for eight seconds, a slot becomes free every two seconds.

    Idle time in between does not count.
    """
    now = 0.0
    backlog = make_backlog(requests=num_waiting, seconds_each=77.0, clock=lambda: now)
    assert submit(backlog, CAPACITY + num_waiting) == CAPACITY + num_waiting
    for _ in range(3):
        for _ in range(num_waiting // CAPACITY + 1):
            for finish in (backlog.record_first_token, backlog.record_end):
                now += 4.0
                backlog.observe(Stats(num_seq_ids=CAPACITY))
                for _ in range(CAPACITY):
                    finish(ask())
        now += 100.0
        assert submit(backlog, CAPACITY + num_waiting) == CAPACITY + num_waiting
    assert backlog.estimate_position(ask()).seconds == pytest.approx(2.0 * (num_waiting + 1))


def test_estimate_includes_prompt_computation():
    """The estimate uses the engine's costs of steps and prompt tokens."""
    backlog = make_backlog()
    backlog.observe(Stats(num_seq_ids=CAPACITY, step_seconds=0.5, prompt_token_seconds=0.01))
    assert backlog.estimate_position(ask(length=10)) == QueuePosition(0, 0.6)
    assert backlog.estimate_position(ask(length=400)) == QueuePosition(0, 4.5)


class Served:
    """A stepped engine with a backlog that observes it; ``first`` has the times of first tokens."""

    def __init__(self, engine):
        self.engine, self.first, self.asked = engine, {}, {}
        self.backlog = make_backlog(clock=lambda: engine.now)

    def submit(self, count, **params):
        """Submit requests with different prompts of 33 tokens. Return the last one's name, and the
        estimated time of its first token.
        """
        for _ in range(count):
            i = len(self.asked)
            request = self.engine.add(f"{i}", [i % 200, i // 200] + [i % 200] * 31, **params)
            estimate = self.engine.now + self.backlog.estimate_position(request).seconds
            self.backlog.record_submission(request)
            self.asked[request.request_id] = request
        return request.request_id, estimate

    def step(self):
        num_seen = len(self.engine.outputs)
        self.engine.step()
        self.backlog.observe(collect_stats(self.engine.scheduler))
        for output in self.engine.outputs[num_seen:]:
            request = self.asked[output.request_id]
            if output.request_id not in self.first:
                self.first[output.request_id] = self.engine.now
                self.backlog.record_first_token(request)
            if output.finish:
                self.backlog.record_end(request)

    def finish(self):
        while self.engine.scheduler.sequences.has_work():
            self.step()


COSTS = Costs(step=0.01, row=0.002, token=0.001)


def test_estimated_time_to_first_token_is_about_right(fake_engine):
    """After one full queue has been observed, the last of eight waiting requests starts at about
    its estimated time.
    """
    served = Served(fake_engine(max_num_seqs=CAPACITY, costs=COSTS))
    for _ in range(2):
        last, estimate = served.submit(CAPACITY + 8, max_tokens=60, ignore_eos=True)
        sent = served.engine.now
        served.finish()
    assert estimate - sent == pytest.approx(served.first[last] - sent, rel=0.25)


@pytest.mark.parametrize(
    ("length", "max_tokens", "count"), [(4, 1500, 30), (200, 1500, 30), (24, 24, 300)]
)
def test_estimates_before_first_full_queue_are_about_right(fake_engine, length, max_tokens, count):
    """The answers of six requests have been seen, which never took all slots. The estimate does not
    depend on ``max_tokens`` if answers end long before.
    """
    served = Served(
        fake_engine(max_num_seqs=CAPACITY, context_length=2048, length=length, costs=COSTS)
    )
    for _ in range(2):
        served.submit(CAPACITY - 1, max_tokens=max_tokens)
        served.finish()
    last, estimate = served.submit(count, max_tokens=max_tokens)
    sent = served.engine.now
    served.step()
    wait = served.engine.now + collect_stats(served.engine.scheduler).waiting_seconds
    served.finish()
    seconds = served.first[last] - sent
    assert seconds / 1.5 < estimate - sent < seconds * 1.5
    assert seconds / 1.5 < wait - sent < seconds * 1.5


def test_estimates_just_after_start_are_about_right(fake_engine):
    """No answer has ended, but the limit of the answers is known."""
    served = Served(fake_engine(max_num_seqs=CAPACITY, costs=COSTS))
    served.submit(CAPACITY, max_tokens=24, ignore_eos=True)
    for _ in range(6):
        served.step()
    last, estimate = served.submit(290, max_tokens=24, ignore_eos=True)
    sent = served.engine.now
    served.finish()
    seconds = served.first[last] - sent
    assert seconds / 1.5 < estimate - sent < seconds * 1.5


@pytest.mark.parametrize(
    ("before", "after", "num_each"), [(10, 400, 2), (100, 100, 2), (200, 10, 8)]
)
def test_estimate_follows_a_change_of_the_traffic(fake_engine, before, after, num_each):
    """Answers become longer or shorter; then each slot has served ``num_each`` of the new ones."""
    served = Served(fake_engine(max_num_seqs=CAPACITY, context_length=2048, costs=COSTS))
    served.submit(120, max_tokens=before, ignore_eos=True)
    name, _ = served.submit(num_each * CAPACITY + 1, max_tokens=after, ignore_eos=True)
    served.submit(20, max_tokens=after, ignore_eos=True)
    while name not in served.first:
        served.step()
    last, estimate = served.submit(1, max_tokens=after, ignore_eos=True)
    sent = served.engine.now
    served.finish()
    seconds = served.first[last] - sent
    assert seconds / 2.5 < estimate - sent < seconds * 2.5


def test_lower_classes_do_not_count_as_ahead():
    """A queue full of batch requests rejects only batch requests, and higher classes count as ahead
    of them.
    """
    backlog = make_backlog(requests=10)
    assert submit(backlog, 100, priority=BATCH) == CAPACITY + 10
    assert backlog.estimate_position(ask()).position == 0
    assert submit(backlog, 100) == CAPACITY + 10
    assert submit(backlog, 100, priority=INTERACTIVE) == CAPACITY + 10
    assert backlog.estimate_position(ask(priority=INTERACTIVE)).position == 11
    assert backlog.estimate_position(ask(priority=BATCH)).position == 3 * 10 + 2 * CAPACITY + 1


def test_full_queue_of_one_account_admits_another_account():
    """An account with few requests is served between those of an account with many."""
    backlog = make_backlog(requests=10)
    submit(backlog, 100, account="many")
    assert submit(backlog, 3, account="few") == 3
    assert backlog.estimate_position(ask(account="few")).position <= 7
    assert submit(backlog, 1, account="many") == 0


def test_new_account_for_each_request_does_not_extend_queue():
    """Account names cost nothing, so a client that uses a new one each time gains nothing."""
    backlog = make_backlog(requests=10)
    assert sum(submit(backlog, 1, account=f"name {i}") for i in range(1000)) == CAPACITY + 10


def test_account_weight_scales_its_turns():
    """An account of weight 3 is served three requests for each one of another account."""
    backlog = make_backlog(weights={"heavy": 3.0})
    submit(backlog, CAPACITY)
    for _ in range(CAPACITY):
        backlog.record_first_token(ask())
    submit(backlog, 9, account="heavy")
    assert backlog.estimate_position(ask(account="light")).position == 4
    assert backlog.estimate_position(ask(account="heavy")).position == 10


class Tenants(Fair):
    """Shares by tenant."""


class Classes(Priorities):
    """The classes in another order."""


class Shortest(FirstComeFirstServed):
    """One queue, sorted by length."""


class Silent:
    """A policy that inherits nothing and does not declare how it sorts."""

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
def test_load_ahead_depends_on_policy(policy, position):
    """A subclass counts like its base class. With a policy that declares nothing, everything is
    ahead.
    """
    backlog = make_backlog(policy=policy)
    submit(backlog, CAPACITY, priority=INTERACTIVE)
    for _ in range(CAPACITY):
        backlog.record_first_token(ask(priority=INTERACTIVE))
    submit(backlog, 5, account="other")
    submit(backlog, 5, priority=BATCH)
    assert backlog.estimate_position(ask()).position == position


def test_ended_requests_leave_no_counts():
    """They end before or after their first token, or with the engine."""
    backlog = make_backlog()
    for request in (ask(n=3), ask("a"), ask("b", BATCH)):
        backlog.record_submission(request)
        backlog.record_first_token(request)
        backlog.record_end(request, request.params.n)
    assert backlog.list_pending() == []
    assert [*backlog._num_seqs.values()] == [0, 0, 0]
    submit(backlog, 9)
    backlog.clear()
    assert backlog.estimate_position(ask()).position == 0


# ---------------------------------------------------------------- rejected clients that return


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def reject_several(backlog, count=1, **what):
    """Return the claims of ``count`` rejected clients, and their Retry-After."""
    errors = [reject(backlog, ask(**what), body=i + 1) for i in range(count)]
    return [Claim(error.ticket) for error in errors], [error.retry_after for error in errors]


def test_rejected_clients_get_increasing_retry_after():
    """Each returns when it can be served behind the earlier ones."""
    backlog = make_backlog(requests=8, seconds_each=3.0)
    submit(backlog, CAPACITY + 8)
    assert reject_several(backlog, 5)[1] == [expected_retry_after(3.0 * (i + 1)) for i in range(5)]


def test_newcomers_cannot_take_reserved_place():
    """If their turn would come after the client's return. The client that returns on time gets it."""
    clock = Clock()
    backlog = make_backlog(requests=8, seconds_each=3.0, clock=clock)
    submit(backlog, CAPACITY + 8)
    (claim,), (seconds,) = reject_several(backlog)
    backlog.record_end(ask())
    backlog.record_first_token(ask())
    clock.now += seconds
    assert reject(backlog, ask()).bound == "requests"
    backlog.admit([ask()], claim)
    backlog.record_submission(ask())
    assert reject(backlog, ask()).ticket not in claim


def test_newcomers_always_get_half_of_queue():
    """Clients that never return therefore waste no capacity. Requests that can start immediately
    are never rejected.
    """
    clock = Clock()
    backlog = make_backlog(requests=8, seconds_each=0.1, clock=clock)
    submit(backlog, CAPACITY + 8)
    seconds = reject_several(backlog, 20)[1]
    for _ in range(CAPACITY + 8):
        backlog.record_first_token(ask())
        backlog.record_end(ask())
    clock.now += seconds[-1]
    assert submit(backlog, 99) == CAPACITY + 4


def test_clients_on_time_may_exceed_limit_by_one_second_of_service():
    """Because Retry-After has whole seconds, so several return together. At least one may exceed
    it.
    """
    for seconds_each, num_more in ((0.25, 4), (3.0, 1)):
        clock = Clock()
        backlog = make_backlog(requests=8, seconds_each=seconds_each, clock=clock)
        submit(backlog, CAPACITY + 8)
        claims, seconds = reject_several(backlog, 8)
        clock.now += seconds[-1]
        for claim in claims[-num_more - 1 : -1]:
            backlog.admit([ask()], claim)
            backlog.record_submission(ask())
        with pytest.raises(QueueFull) as caught:
            backlog.admit([ask()], claims[-1])
        assert caught.value.ticket == claims[-1].ticket, "its reservation remains"


def test_reservations_of_lower_class_do_not_count_as_ahead():
    clock = Clock()
    backlog = make_backlog(requests=8, seconds_each=3.0, clock=clock)
    submit(backlog, CAPACITY + 8, priority=BATCH)
    clock.now += reject_several(backlog, 20, priority=BATCH)[1][-1]
    assert submit(backlog, 99) == CAPACITY + 8
