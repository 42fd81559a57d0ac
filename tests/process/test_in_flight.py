"""Equal requests are computed once: joining, leaving and cached results, without an engine."""

import time

import pytest

from cllm.core.output import Stats, TokenOutput
from cllm.core.params import SamplingParams, ThinkingBudget
from cllm.core.request import Priority, Request
from cllm.engine.commands import EndReasoning, SetYielding
from cllm.errors import EngineError
from cllm.process.backlog import Backlog, QueueFull, QueueLimits, QueuePosition
from cllm.process.in_flight import InFlightRequests
from cllm.process.results import ResultCache
from cllm.scheduler.policy import Fair


class Harness:
    """InFlightRequests, and methods that play the engine."""

    def __init__(self, results=0, capacity=4, **limits):
        backlog = Backlog(QueueLimits(**limits), Fair({}), {})
        backlog.observe(Stats(num_seq_ids=capacity))
        self.in_flight = InFlightRequests(backlog, ResultCache(results, 100_000))
        self.computed = []  # ids of the requests sent to the engine

    def ask(self, *names, prompt=(1, 2, 3), scheduling=(), **params):
        sampling = SamplingParams(**{"temperature": 0, **params})
        requests = [Request(name, [*prompt], sampling, *scheduling) for name in names]
        stream, new = self.in_flight.submit(requests)
        self.computed += [request.request_id for request in new]
        return stream

    def emit(self, name, *tokens, index=0, finish="", cached=0):
        for i, token in enumerate(tokens):
            last = i == len(tokens) - 1
            output = TokenOutput(name, index, token, finish if last else "", True, cached)
            self.in_flight.put([output])
            cached = 0

    def is_empty(self):
        return (
            len(self.in_flight)
            == len(self.in_flight._open)
            == sum(self.in_flight.backlog._num_seqs.values())
            == 0
            and not self.in_flight.backlog.list_pending()
        )


def read(stream):
    """Return the outputs since the last call, as (name, index, token, finish)."""
    return [(one.request_id, one.index, one.token, str(one.finish)) for one in stream.take()]


def test_late_reader_gets_all_outputs_from_beginning():
    """It then reads the rest together with the first reader, each under its own request id."""
    harness = Harness()
    first = harness.ask("a")
    harness.emit("a", 10, 11)
    second = harness.ask("b")
    assert read(second) == [("b", 0, 10, ""), ("b", 0, 11, "")]
    harness.emit("a", 12, finish="stop")
    assert read(second) == [("b", 0, 12, "stop")]
    assert read(first) == [("a", 0, 10, ""), ("a", 0, 11, ""), ("a", 0, 12, "stop")]
    assert harness.computed == ["a"]
    assert harness.is_empty()


def test_shared_prompt_counts_as_reused():
    """The first reader gets the engine's number of cached tokens; the second reuses the whole
    prompt.
    """
    harness = Harness()
    first, second = harness.ask("a"), harness.ask("b")
    harness.emit("a", 10, finish="stop", cached=2)
    assert [one.num_cached_tokens for one in first._outputs + second._outputs] == [2, 0]
    assert (first.num_shared, first.num_reused_tokens) == (0, 0)
    assert (second.num_shared, second.num_reused_tokens) == (1, 3)


def test_equal_prompts_of_one_client_are_computed_once():
    """The stream reads the outputs twice."""
    harness = Harness()
    stream = harness.ask("a-0", "a-1", n=2)
    harness.emit("a-0", 5, index=1, finish="length")
    harness.emit("a-0", 6, index=0, finish="length")
    assert sorted(read(stream)) == [
        (f"a-{i}", j, 6 - j, "length") for i in range(2) for j in range(2)
    ]
    assert (harness.computed, harness.is_empty()) == (["a-0"], True)


@pytest.mark.parametrize("leaver", [0, 1])
def test_request_continues_until_last_reader_leaves(leaver):
    """Whichever leaves first. The last one's departure aborts the request."""
    harness = Harness()
    streams = [harness.ask("a"), harness.ask("b")]
    harness.emit("a", 10)
    assert harness.in_flight.leave(streams[leaver]) == []
    harness.emit("a", 11)
    assert [token for _, _, token, _ in read(streams[1 - leaver])] == [10, 11]
    assert harness.in_flight.leave(streams[1 - leaver]) == ["a"]
    assert harness.in_flight.leave(streams[1 - leaver]) == []
    assert harness.is_empty()


def test_request_without_readers_cannot_be_joined():
    """It has been aborted in the engine."""
    harness = Harness()
    harness.in_flight.leave(harness.ask("a"))
    harness.ask("b")
    assert harness.computed == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": (1, 2)},
        {"temperature": 1.0},
        {"seed": 1, "temperature": 1.0},
        {"max_tokens": 5},
        {"stop": ("x",)},
        {"n": 2},
        {"scheduling": ("", Priority.NORMAL, 1.0)},
        {"scheduling": ("", Priority.NORMAL, None, 1.0)},
        {"scheduling": ("", Priority.INTERACTIVE)},
    ],
)
def test_different_requests_are_computed_separately(other):
    """Random sampling, other parameters, a time limit, or a higher class, which must not wait with
    a lower one.
    """
    harness = Harness()
    harness.ask("a")
    harness.ask("b", **other)
    assert harness.computed == ["a", "b"]


def test_requests_of_other_accounts_and_lower_classes_share():
    """A seed makes random sampling repeatable."""
    harness = Harness()
    for name, scheduling in (
        ("a", ("x",)),
        ("b", ("y", Priority.NORMAL)),
        ("c", ("", Priority.BATCH)),
    ):
        harness.ask(name, scheduling=scheduling, temperature=1.0, seed=5)
    assert harness.computed == ["a"]


def test_request_does_not_join_one_that_would_be_served_later():
    """A light account does not wait behind a heavy account's requests. Once the shared request has
    started, all join it.
    """
    harness = Harness(capacity=1)
    for i in range(20):
        harness.ask(f"many{i}", prompt=(i,), scheduling=("many",))
    alone = harness.ask("few", prompt=(19,), scheduling=("few",))
    assert (alone.num_shared, alone.queue_position.position) == (0, 2)
    assert harness.ask("many", prompt=(19,), scheduling=("many",)).queue_position.position == 2, (
        "the other request is now served sooner"
    )
    harness.emit("many10", 7)
    assert harness.ask("other", prompt=(10,), scheduling=("other",)).num_shared == 1


def test_full_queue_still_shares():
    """Sharing costs nothing. A request that must be computed is rejected, and nothing of it has
    started.
    """
    harness = Harness(capacity=1, requests=1)
    harness.ask("a", prompt=(1,))
    harness.ask("b", prompt=(2,))
    with pytest.raises(QueueFull):
        harness.ask("c", prompt=(3,))
    assert harness.ask("d", prompt=(2,)).num_shared == 1
    assert harness.computed == ["a", "b"]
    assert len(harness.in_flight) == 2


def test_sharing_reader_gets_queue_position_of_shared_request():
    """The position is 0 once that request has started."""
    harness = Harness(capacity=1)
    harness.ask("a", prompt=(1,))
    assert harness.ask("b", prompt=(2,)).queue_position.position == 1
    assert harness.ask("c", prompt=(2,)).queue_position.position == 1
    harness.emit("b", 7)
    assert harness.ask("d", prompt=(2,)).queue_position == QueuePosition()


def test_sequence_is_stopped_once_and_its_result_is_cached():
    """A stop string ends it for all readers. After they leave, it finishes by itself and its result
    is stored.
    """
    harness = Harness(results=8)
    first, second = harness.ask("a", stop=("x",)), harness.ask("b", stop=("x",))
    harness.emit("a", 10)
    assert harness.in_flight.stop(second, "b", 0) == "a"
    assert harness.in_flight.stop(first, "a", 0) is None
    assert harness.in_flight.leave(first) == harness.in_flight.leave(second) == []
    late = harness.ask("c", stop=("x",))
    harness.emit("a", -1, finish="abort")
    assert [token for _, _, token, _ in read(late)] == [10, -1]
    assert [token for _, _, token, _ in read(harness.ask("d", stop=("x",)))] == [10, -1]
    assert (harness.computed, harness.is_empty()) == (["a"], True)


def test_cached_result_is_returned_without_engine():
    """All outputs arrive at once, also for a request with a higher class and a deadline, and also
    when the queue is full.
    """
    harness = Harness(results=8, capacity=1, requests=0)
    harness.ask("a", n=2)
    harness.emit("a", 10, 11, finish="stop")
    harness.emit("a", 20, index=1, finish="length")
    harness.ask("other", prompt=(9,))
    again = harness.ask("b", n=2, scheduling=("", Priority.INTERACTIVE, 1.0))
    assert read(again) == [("b", 0, 10, ""), ("b", 0, 11, "stop"), ("b", 1, 20, "length")]
    assert (
        again.num_recalled,
        again.num_shared,
        again.num_reused_tokens,
        again.queue_position,
    ) == (
        1,
        0,
        3,
        QueuePosition(),
    )
    assert harness.in_flight.leave(again) == []
    assert harness.computed == ["a", "other"]


@pytest.mark.parametrize("finish", ["error", "timeout"])
def test_failed_results_are_not_cached(finish):
    """Results of aborted requests are not cached either."""
    harness = Harness(results=8)
    harness.ask("a")
    harness.emit("a", 10)
    harness.emit("a", -1, finish=finish)
    harness.in_flight.leave(harness.ask("b"))
    harness.ask("c")
    assert harness.computed == ["a", "b", "c"]


def test_request_with_deadline_fills_result_cache():
    """Although no other request may share it while it runs."""
    harness = Harness(results=8)
    harness.ask("a", scheduling=("", Priority.NORMAL, 5.0))
    harness.ask("b")
    harness.emit("a", 10, finish="stop")
    assert read(harness.ask("c")) == [("c", 0, 10, "stop")]
    assert harness.computed == ["a", "b"]


def test_seed_is_drawn_before_request_is_sent_to_engine():
    """Another engine can then compute the same text. Greedy requests need no seed."""
    harness = Harness()
    prompt = [1, 2, 3]
    random, chosen = SamplingParams(temperature=1), SamplingParams(temperature=1, seed=5)
    sent = []
    for i, params in enumerate([random, random, chosen, SamplingParams(temperature=0)]):
        sent += harness.in_flight.submit([Request(str(i), prompt, params)])[1]
    first, second, third, greedy = [request.params.seed for request in sent]
    assert first is not None
    assert None is not second != first
    assert (third, greedy) == (5, None)


def test_engine_failure_reaches_all_readers():
    """They first get the outputs that had arrived. No request remains."""
    harness = Harness()
    streams = [harness.ask("a"), harness.ask("b")]
    harness.emit("a", 10)
    harness.in_flight.fail(EngineError("gone"))
    for stream in streams:
        assert [token for _, _, token, _ in read(stream)] == [10]
        with pytest.raises(EngineError, match="gone"):
            stream.take()
        assert harness.in_flight.leave(stream) == []
    harness.emit("a", 11)
    assert harness.is_empty()


def told(harness, stream):
    return harness.in_flight.take_yielding(stream)


def test_request_yields_while_none_of_its_clients_reads():
    harness = Harness()
    first = harness.ask("a")
    assert told(harness, first) == []
    harness.in_flight.set_unread(first, is_unread=True)
    assert told(harness, first) == [("a", True)]
    assert told(harness, first) == []
    second = harness.ask("b")  # an equal request, which reads
    assert told(harness, second) == [("a", False)]
    harness.in_flight.set_unread(first, is_unread=False)
    assert told(harness, first) == []
    harness.in_flight.set_unread(first, is_unread=True)
    assert told(harness, first) == []
    assert harness.in_flight.leave(second) == []
    assert told(harness, second) == [("a", True)]
    assert harness.in_flight.make_commands("a")[1:] == [SetYielding("a", True)]
    third = harness.ask("c")
    assert told(harness, third) == [("a", False)]
    assert harness.in_flight.leave(first) == []
    assert told(harness, first) == []
    assert harness.in_flight.leave(third) == ["a"]
    assert harness.in_flight.make_commands("a") == []
    assert harness.is_empty()


@pytest.mark.parametrize("ends_on_request", [False, True])
def test_request_whose_client_may_end_the_reasoning_is_computed_by_itself(ends_on_request):
    harness = Harness(results=4)
    budget = ThinkingBudget(9, (7,), 8, (8,), ends_on_request=ends_on_request)
    harness.ask("a", thinking=budget)
    harness.ask("b", thinking=budget)
    assert harness.computed == (["a", "b"] if ends_on_request else ["a"])
    harness.emit("a", 10, finish="stop")
    harness.ask("c", thinking=budget)
    assert harness.computed == (["a", "b", "c"] if ends_on_request else ["a"])


def test_next_engine_is_told_that_the_reasoning_is_to_end():
    harness = Harness()
    harness.ask("a")
    assert len(harness.in_flight.make_commands("a")) == 1
    harness.in_flight.end_reasoning("a")
    harness.in_flight.end_reasoning("unknown")
    assert harness.in_flight.make_commands("a")[1:] == [EndReasoning("a")]


@pytest.mark.slow
def test_submission_takes_no_longer_with_10_000_accounts():
    """In CPU time, the best of many in turn, because other programs compute."""
    few, many = Harness(), Harness()
    for harness, number in ((few, 10), (many, 10_000)):
        for i in range(number):
            harness.ask(f"r{i}", prompt=(i,), scheduling=(f"account {i}",))
    seconds = {few: 1.0, many: 1.0}
    for i in range(100):
        for harness in (few, many):
            begun = time.thread_time()
            harness.ask(f"s{i}", prompt=(i, i), scheduling=("account 1",))
            seconds[harness] = min(seconds[harness], time.thread_time() - begun)
    assert seconds[many] < 5 * seconds[few]
