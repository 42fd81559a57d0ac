"""Counts each request that has ended, and writes its line to the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from cllm.config.settings import LogSettings
from cllm.observe.log import REQUESTS
from cllm.observe.request_record import RequestRecord
from cllm.observe.server_metrics import ServerMetrics

log = logging.getLogger(REQUESTS)


class RequestLog:
    """Gets the record of every request when it has ended, and counts it in ``metrics``.

    ``listeners`` are called with each of them; they must not wait. The error of one is logged.
    ``tracer``, if there is one, is called with the record of a request that has arrived, and its
    header traceparent.
    """

    def __init__(self, settings: LogSettings, metrics: ServerMetrics) -> None:
        self.listeners: list[Callable[[RequestRecord], None]] = [metrics.count_response]
        self.allows_header = settings.allow_header
        self.tracer: Callable[[RequestRecord, str], None] | None = None
        self._slow_seconds = settings.slow_seconds

    def end(self, record: RequestRecord) -> None:
        """Take a record whose request has ended."""
        record.ended = time.monotonic()
        for listener in self.listeners:
            try:
                listener(record)
            except Exception:  # it must hide neither the request's own error nor its line
                log.exception("the end of %s %s could not be noted", record.method, record.route)
        slow = self._explain_if_slow(record)
        level = choose_level(record, is_slow=bool(slow))
        if not log.isEnabledFor(level):
            return
        fields = record.list_fields()
        if slow:
            fields["slow"] = slow
        what = (record.method, record.route, record.status)
        log.log(level, "%s %s %d", *what, extra={"fields": fields})

    def _explain_if_slow(self, record: RequestRecord) -> str:
        """Return why the first token came late; "" if it did not."""
        if self._slow_seconds is None or record.submitted is None:
            return ""
        seconds = record.seconds if record.ttft is None else record.ttft
        return record.explain_wait() if seconds >= self._slow_seconds else ""


def choose_level(record: RequestRecord, *, is_slow: bool) -> int:
    """Return the level of a record's line. Questions about the server itself are for debugging."""
    if record.status >= 500 or is_slow or record.outcome in ("error", "timeout"):
        return logging.WARNING
    is_work = record.is_computed or record.replica
    return logging.INFO if is_work or record.status >= 400 else logging.DEBUG
