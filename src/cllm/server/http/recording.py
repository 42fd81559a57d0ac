"""Records every request, from its arrival to the end of its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.observe.log import request_level
from cllm.observe.request_log import RequestLog
from cllm.observe.request_record import RequestRecord
from cllm.server.http.request_id import HEADERS, KEY

RECORD = "cllm.record"  # in the scope of a request: its RequestRecord
LEVEL_HEADER = "x-cllm-log-level"  # the level of the request's own lines
CLIENT_CLOSED_REQUEST = 499
LEVELS = logging.getLevelNamesMapping()


def find_record(scope: Scope) -> RequestRecord:
    """Return the record of the request with this scope; a new one outside of ``with_records``."""
    record: RequestRecord | None = scope.get(RECORD)
    if record is None:
        record = scope[RECORD] = RequestRecord()
    return record


def with_records(
    app: ASGIApp, request_log: RequestLog, describe_path: Callable[[str], tuple[str, str]]
) -> ASGIApp:
    """Return ``app`` with a record for each request, which ``request_log`` gets at its end.
    ``describe_path`` is that of KnownPaths.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord(scope[KEY], scope["method"])
        record.route, record.dialect = describe_path(scope["path"])

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                given = [value for name, value in message["headers"] if name == HEADERS[0]]
                if given:
                    record.request_id = given[0].decode(errors="replace")
            await send(message)

        if request_log.tracer is not None:
            request_log.tracer(record, Headers(scope=scope).get("traceparent", ""))
        if request_log.allows_header:
            request_level.set(LEVELS.get(Headers(scope=scope).get(LEVEL_HEADER, "").upper()))
        try:
            await app({**scope, RECORD: record}, receive, send_noted)
        finally:
            record.status = record.status or CLIENT_CLOSED_REQUEST
            request_log.end(record)

    return called
