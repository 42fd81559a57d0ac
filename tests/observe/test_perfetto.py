"""Trace files follow the Trace Event Format. Perfetto's own reader is a program that is fetched from
a host of its own, so these tests check the form.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from cllm.core.output import SequenceTimes
from cllm.core.timeline import SequenceSpan, StepTimes, Timeline
from cllm.observe.perfetto import write_trace_file
from cllm.observe.request_record import RequestRecord

METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
Event = dict[str, Any]


def check_form(content: bytes) -> list[Event]:
    """Return the events of a file, after checking what readers of the format need."""
    events: list[Event] = json.loads(content)["traceEvents"]
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    processes = {one["pid"] for one in events if one["name"] == "process_name"}
    tracks: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        assert event["ph"] in "XCM"
        assert all(
            type(event[field]) is int and event[field] >= 0 for field in ("ts", "pid", "tid")
        )
        assert event["pid"] in processes
        if event["ph"] == "M":
            assert event["name"] in METADATA
        elif event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
        else:
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert tracks.keys() <= named
    for slices in tracks.values():
        check_nesting(slices)
    return events


def check_nesting(slices: list[Event]) -> None:
    """Slices of a track contain each other or do not overlap; a parent precedes its parts."""
    open_until: list[int] = []
    for event in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)
    assert all(one["ts"] <= other["ts"] or one["dur"] for one, other in pairwise(slices))


def make_record() -> RequestRecord:
    record = RequestRecord("req_1", "POST", "/v1/completions", "OpenAI", arrived=99.0)
    record.submitted, record.first_token, record.last_token = 99.5, 100.5, 101.0
    record.ended, record.status, record.outcome = 101.1, 200, "finished"
    record.times = SequenceTimes(0.25, 0.7)
    return record


def make_timeline() -> Timeline:
    moments = (100.0, 100.00001, 100.0002, 100.05, 100.0501, 100.0502, 100.0503)
    step = StepTimes(1, *moments, 1, 20, 2, 1, 30, 4, "the budget is used")
    spans = [
        SequenceSpan("A.0", "ann", "queued", 99.5, 99.75, reason="no place"),
        SequenceSpan("A.0", "ann", "prefill", 100.0, 100.05, 20),
        SequenceSpan("A.0", "ann", "decode", 100.05, 101.0, 10),
    ]
    return Timeline([step], spans)


def test_file_has_tracks_for_steps_sequences_and_requests():
    engines = {"engine 0 of m": make_timeline(), "engine 1 of m": Timeline()}
    content = write_trace_file(100.0, [make_record()], engines)
    events = check_form(content)
    names = {(one["pid"], one["args"]["name"]) for one in events if one["name"] == "process_name"}
    assert names == {(1, "cLLM server"), (2, "engine 0 of m"), (3, "engine 1 of m")}
    slices = [(one["pid"], one["name"], one["ts"]) for one in events if one["ph"] == "X"]
    assert slices[:6] == [  # times count from the arrival of the first request
        *((1, "POST /v1/completions 200", 0), (1, "prepare", 0), (1, "queue", 500_000)),
        *((1, "prefill", 750_000), (1, "decode", 1_500_000), (1, "send", 2_000_000)),
    ]
    stages = ["side jobs", "schedule", "forward", "sample", "update", "side jobs"]
    assert [name for _, name, _ in slices[6:13]] == ["step", *stages]
    assert [name for _, name, _ in slices[13:]] == ["queued", "prefill", "decode"]
    counters = {one["name"]: one["args"] for one in events if one["ph"] == "C"}
    assert counters == {
        "cells": {"in_use": 30, "cached": 4},
        "sequences": {"running": 2, "waiting": 1},
    }
    assert json.loads(content)["otherData"] == {"recording_begun_seconds": 1.0, "num_dropped": 0}


def test_rejected_request_is_one_slice():
    record = RequestRecord("req_2", "POST", "/v1/completions", status=429, arrived=100.0)
    record.ended = 100.001
    events = check_form(write_trace_file(99.0, [record], {}))
    assert [one["name"] for one in events if one["ph"] == "X"] == ["POST /v1/completions 429"]
