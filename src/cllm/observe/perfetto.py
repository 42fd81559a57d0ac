"""Writes timelines in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing
show. The format: "Trace Event Format", Nat Duca and Dan Sinclair, Google.

The server is a process with a track for each request. Each engine is a process with a track for its
steps and their stages, one for each sequence, and counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cllm.core.timeline import SequenceSpan, StepTimes, Timeline
from cllm.observe.request_record import RequestRecord

Event = dict[str, Any]
SERVER_PID = 1
STEPS_TID = 1


class TraceFile:
    """The events of a file. Times are in whole microseconds, so that parts of a slice are never
    longer than the slice.
    """

    def __init__(self, origin: float) -> None:
        """The file's times count from ``origin``, in seconds on the monotonic clock; what began
        earlier is cut.
        """
        self._origin = origin
        self._events: list[Event] = []
        self._num_tracks: dict[int, int] = {}
        self._next_pid = SERVER_PID

    def add_process(self, name: str) -> int:
        """Return the number of a new process."""
        pid, self._next_pid = self._next_pid, self._next_pid + 1
        self._describe(pid, 0, "process_name", name=name)
        self._describe(pid, 0, "process_sort_index", sort_index=pid)
        return pid

    def add_track(self, pid: int, name: str) -> int:
        """Return the number of a new track of a process."""
        tid = self._num_tracks[pid] = self._num_tracks.get(pid, 0) + 1
        self._describe(pid, tid, "thread_name", name=name)
        self._describe(pid, tid, "thread_sort_index", sort_index=tid)
        return tid

    def add_slice(
        self, track: tuple[int, int], name: str, begin: float, end: float, **args: object
    ) -> None:
        """Add a slice from ``begin`` to ``end``. Arguments without a value are left out."""
        start = self._micros(begin)
        event = self._make_event("X", track, name, start, args)
        event["dur"] = max(0, self._micros(end) - start)

    def add_counter(self, pid: int, name: str, at: float, **values: int) -> None:
        """Set a counter with one or more series."""
        event = self._make_event("C", (pid, 0), name, self._micros(at), {})
        event["args"] = values

    def encode(self, **other: object) -> bytes:
        """Return the file. ``other`` are facts about it."""
        content = {"displayTimeUnit": "ms", "traceEvents": self._events, "otherData": other}
        return msgspec.json.encode(content)

    def _describe(self, pid: int, tid: int, what: str, **args: object) -> None:
        self._make_event("M", (pid, tid), what, 0, args)

    def _make_event(
        self, kind: str, track: tuple[int, int], name: str, at: int, args: Mapping[str, object]
    ) -> Event:
        pid, tid = track
        event: Event = {"ph": kind, "pid": pid, "tid": tid, "name": name, "ts": at}
        if given := {key: value for key, value in args.items() if value not in (None, "")}:
            event["args"] = given
        self._events.append(event)
        return event

    def _micros(self, at: float) -> int:
        return max(0, int((at - self._origin) * 1e6))


def write_trace_file(
    begun: float, records: Iterable[RequestRecord], engines: Mapping[str, Timeline]
) -> bytes:
    """Return the file with the requests that have ended, and the engines' timelines by their names.
    The recording has ``begun`` at this time; only requests' and sequences' times are earlier.
    """
    requests = sorted(records, key=lambda record: record.arrived)
    waits = [timeline.spans for timeline in engines.values()]
    earliest = min([begun, *(one.begin for spans in waits for one in spans)])
    origin = min([earliest, *(record.arrived for record in requests)])
    file = TraceFile(origin)
    pid = file.add_process("cLLM server")
    for record in requests:
        add_request(file, pid, record)
    for name, timeline in engines.items():
        add_engine(file, name, timeline)
    dropped = sum(timeline.num_dropped for timeline in engines.values())
    return file.encode(recording_begun_seconds=round(begun - origin, 6), num_dropped=dropped)


def add_request(file: TraceFile, pid: int, record: RequestRecord) -> None:
    """Add a track with a slice for a request and one for each of its phases."""
    ended = record.arrived if record.ended is None else record.ended
    track = pid, file.add_track(pid, record.answer_id or record.request_id or record.route)
    title = f"{record.method} {record.route} {record.status}".strip()
    file.add_slice(track, title, record.arrived, ended, **record.list_fields())
    for name, begin, end in record.list_phases():
        file.add_slice(track, name, begin, end)


def add_engine(file: TraceFile, name: str, timeline: Timeline) -> None:
    """Add a process with the steps, the sequences and the counters of an engine."""
    pid = file.add_process(name)
    track = pid, file.add_track(pid, "steps")
    before: Sequence[int] = ()
    for step in timeline.steps:
        add_step(file, track, step)
        counted = step.num_cells_held, step.num_cells_idle, step.num_running, step.num_waiting
        if counted != before:
            before = counted
            held, idle, running, waiting = counted
            file.add_counter(pid, "cells", step.ended, in_use=held, cached=idle)
            file.add_counter(pid, "sequences", step.ended, running=running, waiting=waiting)
    by_sequence: dict[str, list[SequenceSpan]] = {}
    for span in timeline.spans:
        by_sequence.setdefault(span.sequence, []).append(span)
    for sequence, spans in sorted(by_sequence.items(), key=lambda item: item[1][0].begin):
        track = pid, file.add_track(pid, sequence)
        for span in sorted(spans, key=lambda span: span.begin):
            details = {"account": span.account, "reason": span.reason}
            if span.num_tokens:
                details["tokens"] = str(span.num_tokens)
            file.add_slice(track, span.phase, span.begin, span.end, **details)


def add_step(file: TraceFile, track: tuple[int, int], step: StepTimes) -> None:
    """Add a step, and a slice for each of its stages that took any time."""
    file.add_slice(
        track,
        "step",
        step.begun,
        step.ended,
        number=step.number,
        decoding_rows=step.num_rows,
        prompt_tokens=step.num_prefill_tokens,
        limited_by=step.blocked,
    )
    stages = (
        ("side jobs", step.begun, step.scheduling),
        ("schedule", step.scheduling, step.forwarding),
        ("forward", step.forwarding, step.sampling),
        ("sample", step.sampling, step.updating),
        ("update", step.updating, step.updated),
        ("side jobs", step.updated, step.ended),
    )
    for name, begin, end in stages:
        if end - begin >= 1e-6:
            file.add_slice(track, name, begin, end)
