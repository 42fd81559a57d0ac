"""The record of a request, and the line that the log has of it."""

from __future__ import annotations

import pytest

from cllm.config.settings import LogSettings
from cllm.core.output import SequenceTimes
from cllm.observe.log import REQUESTS
from cllm.observe.request_log import RequestLog
from cllm.observe.request_record import RequestRecord
from cllm.observe.server_metrics import ServerMetrics


def make_record(**fields: object) -> RequestRecord:
    """Return the record of a request that arrived at 100 s and got 5 tokens in one second."""
    record = RequestRecord("req_1", "POST", "/v1/completions", "OpenAI", arrived=100.0)
    record.submitted, record.first_token, record.last_token = 100.0, 112.0, 113.0
    record.ended, record.status, record.outcome = 113.0, 200, "finished"
    record.prompt_tokens, record.completion_tokens = 20, 5
    record.times = SequenceTimes(9.0, 3.0, "all 4 places are in use (scheduler.max_num_seqs)")
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def test_times_are_derived_from_the_moments() -> None:
    record = make_record()
    record.gaps.extend([0.25] * 3 + [0.5])
    assert (record.ttft, record.decoding, record.tokens_per_second) == (12.0, 1.0, 4.0)
    assert (record.find_gap(0.5), record.find_gap(0.99)) == (0.25, 0.5)
    assert make_record(first_token=None, last_token=None).ttft is None
    assert make_record(completion_tokens=1).tokens_per_second is None


def test_wait_names_the_account_that_was_ahead_and_the_long_prefill() -> None:
    record = make_record(num_ahead=6, busiest=("nightly", 5), num_parked=2)
    assert record.explain_wait() == (
        "waited 9.0 s behind 6 requests, 5 of account 'nightly': all 4 places are in use "
        "(scheduler.max_num_seqs); prefill of 20 tokens took 3.0 s; parked 2 times"
    )


def test_request_that_ended_in_the_queue_has_waited() -> None:
    unknown = {"first_token": None, "last_token": None, "times": SequenceTimes()}
    aborted = make_record(**unknown, outcome="abort")
    assert aborted.explain_wait() == "waited, or computed its prompt, for 13.0 s"
    finished = make_record(**unknown)  # texts were embedded
    assert finished.explain_wait() == "took 13.0 s; its parts are not known"


def test_line_has_only_what_is_known() -> None:
    fields = make_record(first_token=None, submitted=None, outcome="").list_fields()
    assert fields == {
        "id": "req_1",
        "dialect": "OpenAI",
        "queue_ms": 9000,
        "prefill_ms": 3000,
        "total_ms": 13000,
    }


@pytest.mark.parametrize(
    ("fields", "level"),
    [
        ({}, "INFO"),
        ({"submitted": None}, "DEBUG"),  # a question about the server
        ({"submitted": None, "status": 404}, "INFO"),
        ({"status": 503}, "WARNING"),
        ({"outcome": "error"}, "WARNING"),  # in a stream that had begun
        ({"arrived": 50.0}, "WARNING"),  # slow
        ({"arrived": 50.0, "submitted": 50.0, "times": SequenceTimes()}, "WARNING"),  # shared
    ],
)
def test_level_of_the_line_follows_from_the_end(caplog, fields, level) -> None:
    caplog.set_level("DEBUG", REQUESTS)
    RequestLog(LogSettings(slow_seconds=20), ServerMetrics()).end(make_record(**fields))
    [line] = caplog.records
    assert line.levelname == level
    assert ("slow" in line.fields) == ("arrived" in fields)


def test_listener_that_raises_hides_neither_the_line_nor_other_listeners(caplog):
    caplog.set_level("DEBUG", REQUESTS)
    request_log, noted = RequestLog(LogSettings(), ServerMetrics()), []
    request_log.listeners += [lambda record: 1 / 0, noted.append]  # type: ignore[list-item]
    record = make_record()
    request_log.end(record)
    assert noted == [record]
    failure, line = caplog.records
    assert failure.exc_info[0] is ZeroDivisionError
    assert line.getMessage().startswith(record.method)
