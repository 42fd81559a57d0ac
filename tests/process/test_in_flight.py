"""What is the same is computed once: joining, leaving, results; without an engine."""

import pytest

from cllm.core.output import Stats, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.errors import EngineError
from cllm.process.backlog import Backlog, Place, QueueFull, QueueLimits
from cllm.process.in_flight import InFlightRequests
from cllm.process.results import ResultCache
from cllm.scheduler.policy import Fair


class Air:
    """InFlightRequests, and the engine's part played by hand."""

    def __init__(self, results=0, capacity=4, **limits):
        backlog = Backlog(QueueLimits(**limits), Fair({}), {})
        backlog.observe(Stats(num_seq_ids=capacity))
        self.in_flight = InFlightRequests(backlog, ResultCache(results, 100_000))
        self.computed = []  # names of what the engine was told to compute

    def ask(self, *names, prompt=(1, 2, 3), terms=(), **params):
        params = SamplingParams(**{"temperature": 0, **params})
        requests = [Request(name, [*prompt], params, *terms) for name in names]
        stream, new = self.in_flight.submit(requests)
        self.computed += [request.request_id for request in new]
        return stream

    def say(self, name, *tokens, index=0, finish="", cached=0):
        for i, token in enumerate(tokens):
            last = i == len(tokens) - 1
            output = TokenOutput(name, index, token, finish if last else "", True, cached)
            self.in_flight.put([output])
            cached = 0

    def is_empty(self):
        return len(self.in_flight) == len(self.in_flight._open) == sum(
            self.in_flight.backlog._num_seqs.values()
        ) == 0 and not any(self.in_flight.backlog._pending.values())


def read(stream):
    """What has come since the last call: (name, index, token, finish)."""
    return [(one.request_id, one.index, one.token, str(one.finish)) for one in stream.take()]


def test_who_comes_later_gets_all_from_the_beginning():
    """And then the rest together with the first, each under its own name."""
    air = Air()
    first = air.ask("a")
    air.say("a", 10, 11)
    second = air.ask("b")
    assert read(second) == [("b", 0, 10, ""), ("b", 0, 11, "")]
    air.say("a", 12, finish="stop")
    assert read(second) == [("b", 0, 12, "stop")]
    assert read(first) == [("a", 0, 10, ""), ("a", 0, 11, ""), ("a", 0, 12, "stop")]
    assert air.computed == ["a"]
    assert air.is_empty()


def test_what_was_computed_for_another_is_cached():
    """The engine's number for the first, the whole prompt for the second."""
    air = Air()
    first, second = air.ask("a"), air.ask("b")
    air.say("a", 10, finish="stop", cached=2)
    assert [one.num_cached_tokens for one in first._outputs + second._outputs] == [2, 0]
    assert (first.num_shared, first.num_reused_tokens) == (0, 0)
    assert (second.num_shared, second.num_reused_tokens) == (1, 3)


def test_the_same_prompt_twice_in_one_request():
    """Is computed once and read twice."""
    air = Air()
    stream = air.ask("a-0", "a-1", n=2)
    air.say("a-0", 5, index=1, finish="length")
    air.say("a-0", 6, index=0, finish="length")
    assert sorted(read(stream)) == [
        (f"a-{i}", j, 6 - j, "length") for i in range(2) for j in range(2)
    ]
    assert (air.computed, air.is_empty()) == (["a-0"], True)


@pytest.mark.parametrize("leaver", [0, 1])
def test_the_end_of_one_reader_does_not_end_the_other(leaver):
    """Whichever it is; the engine is told when the last one goes."""
    air = Air()
    streams = [air.ask("a"), air.ask("b")]
    air.say("a", 10)
    assert air.in_flight.leave(streams[leaver]) == []
    air.say("a", 11)
    assert [token for _, _, token, _ in read(streams[1 - leaver])] == [10, 11]
    assert air.in_flight.leave(streams[1 - leaver]) == ["a"]
    assert air.in_flight.leave(streams[1 - leaver]) == []
    assert air.is_empty()


def test_what_nobody_reads_any_longer_cannot_be_joined():
    """Its last reader has gone, so the engine has been told to end it."""
    air = Air()
    air.in_flight.leave(air.ask("a"))
    air.ask("b")
    assert air.computed == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": (1, 2)},
        {"temperature": 1.0},
        {"seed": 1, "temperature": 1.0},
        {"max_tokens": 5},
        {"stop": ("x",)},
        {"n": 2},
        {"terms": ("", Priority.NORMAL, 1.0)},
        {"terms": ("", Priority.NORMAL, None, 1.0)},
        {"terms": ("", Priority.INTERACTIVE)},
    ],
)
def test_what_is_not_the_same_is_computed(other):
    """Chance, other parameters, an own time, or a higher class, which must not wait with a lower
    one.
    """
    air = Air()
    air.ask("a")
    air.ask("b", **other)
    assert air.computed == ["a", "b"]


def test_the_account_and_a_lower_class_make_no_difference():
    """A seed makes chance repeatable."""
    air = Air()
    for name, terms in (("a", ("x",)), ("b", ("y", Priority.NORMAL)), ("c", ("", Priority.BATCH))):
        air.ask(name, terms=terms, temperature=1.0, seed=5)
    assert air.computed == ["a"]


def test_nobody_shares_what_would_come_later():
    """Who sends little is not taken to the end of the queue of who sends much; once that has begun,
    all share.
    """
    air = Air(capacity=1)
    for i in range(20):
        air.ask(f"many{i}", prompt=(i,), terms=("many",))
    alone = air.ask("few", prompt=(19,), terms=("few",))
    assert (alone.num_shared, alone.place.position) == (0, 2)
    assert air.ask("many", prompt=(19,), terms=("many",)).place.position == 2, (
        "now that it is the sooner one"
    )
    air.say("many10", 7)
    assert air.ask("other", prompt=(10,), terms=("other",)).num_shared == 1


def test_a_full_queue_still_shares():
    """It costs nothing; what must be computed is refused, and then nothing of it has begun."""
    air = Air(capacity=1, requests=1)
    air.ask("a", prompt=(1,))
    air.ask("b", prompt=(2,))
    with pytest.raises(QueueFull):
        air.ask("c", prompt=(3,))
    assert air.ask("d", prompt=(2,)).num_shared == 1
    assert air.computed == ["a", "b"]
    assert len(air.in_flight) == 2


def test_the_place_of_who_shares():
    """That of the one it shares with, and none once that has begun."""
    air = Air(capacity=1)
    air.ask("a", prompt=(1,))
    assert air.ask("b", prompt=(2,)).place.position == 1
    assert air.ask("c", prompt=(2,)).place.position == 1
    air.say("b", 7)
    assert air.ask("d", prompt=(2,)).place == Place()


def test_a_stopped_sequence_is_told_once_and_still_counts():
    """A stop string ends it for all; when its readers go, it ends by itself and its result is
    kept.
    """
    air = Air(results=8)
    first, second = air.ask("a", stop=("x",)), air.ask("b", stop=("x",))
    air.say("a", 10)
    assert air.in_flight.stop(second, "b", 0) == "a"
    assert air.in_flight.stop(first, "a", 0) is None
    assert air.in_flight.leave(first) == air.in_flight.leave(second) == []
    late = air.ask("c", stop=("x",))
    air.say("a", -1, finish="abort")
    assert [token for _, _, token, _ in read(late)] == [10, -1]
    assert [token for _, _, token, _ in read(air.ask("d", stop=("x",)))] == [10, -1]
    assert (air.computed, air.is_empty()) == (["a"], True)


def test_a_result_is_given_again():
    """All of it at once, to whoever asks the same, even in a hurry; nothing waits for the
    engine.
    """
    air = Air(results=8, capacity=1, requests=0)
    air.ask("a", n=2)
    air.say("a", 10, 11, finish="stop")
    air.say("a", 20, index=1, finish="length")
    air.ask("other", prompt=(9,))
    again = air.ask("b", n=2, terms=("", Priority.INTERACTIVE, 1.0))
    assert read(again) == [("b", 0, 10, ""), ("b", 0, 11, "stop"), ("b", 1, 20, "length")]
    assert (again.num_recalled, again.num_shared, again.num_reused_tokens, again.place) == (
        1,
        0,
        3,
        Place(),
    )
    assert air.in_flight.leave(again) == []
    assert air.computed == ["a", "other"]


@pytest.mark.parametrize("finish", ["error", "timeout"])
def test_what_went_wrong_is_not_kept(finish):
    """Nor what was ended because nobody read it."""
    air = Air(results=8)
    air.ask("a")
    air.say("a", 10)
    air.say("a", -1, finish=finish)
    air.in_flight.leave(air.ask("b"))
    air.ask("c")
    assert air.computed == ["a", "b", "c"]


def test_one_with_limits_of_its_own_fills_the_cache():
    """Though nobody may share it while it runs."""
    air = Air(results=8)
    air.ask("a", terms=("", Priority.NORMAL, 5.0))
    air.ask("b")
    air.say("a", 10, finish="stop")
    assert read(air.ask("c")) == [("c", 0, 10, "stop")]
    assert air.computed == ["a", "b"]


def test_seed_is_drawn_before_the_request_is_sent_to_the_engine():
    """So that another engine can compute the same text; greedy requests need none."""
    air = Air()
    prompt = [1, 2, 3]
    random, chosen = SamplingParams(temperature=1), SamplingParams(temperature=1, seed=5)
    sent = []
    for i, params in enumerate([random, random, chosen, SamplingParams(temperature=0)]):
        sent += air.in_flight.submit([Request(str(i), prompt, params)])[1]
    first, second, third, greedy = [request.params.seed for request in sent]
    assert first is not None
    assert None is not second != first
    assert (third, greedy) == (5, None)


def test_the_end_of_the_engine_is_told_to_all_readers():
    """After what had come; and nothing of it is left."""
    air = Air()
    streams = [air.ask("a"), air.ask("b")]
    air.say("a", 10)
    air.in_flight.fail(EngineError("gone"))
    for stream in streams:
        assert [token for _, _, token, _ in read(stream)] == [10]
        with pytest.raises(EngineError, match="gone"):
            stream.take()
        assert air.in_flight.leave(stream) == []
    air.say("a", 11)
    assert air.is_empty()
