"""The OpenTelemetry spans of a front. The span of a request to a replica is the parent of those of
the replica.
"""

from __future__ import annotations

from typing import Any

from cllm.observe.otel import Part, SpanExporter, nanoseconds
from cllm.observe.request_record import RequestRecord
from cllm.observe.request_steps import RequestSteps


class FrontSpans(SpanExporter):
    """Sends a span for each sampled request, with one for each choice of a replica and for each
    request to one.
    """

    def is_shown(self, record: RequestRecord) -> bool:
        return has_attempts(record) or record.status >= 400

    def list_parts(self, record: RequestRecord, steps: RequestSteps) -> list[Part]:
        """Return nothing, because the spans within a request begin while it runs."""
        return []

    def begin_attempt(
        self, record: RequestRecord, replica: str, since: float, begun: float, *, continues: bool
    ) -> Any:
        """Return a span for a request to a replica, which was chosen between two times; None if the
        client's request is not sampled.
        """
        if (steps := record.steps) is None or not has_attempts(record):
            return None
        offset = record.created - record.arrived
        self.add(Part("choose", since, begun), steps.span, offset)
        return self.start(
            "continue" if continues else "ask",
            steps.span,
            nanoseconds(begun + offset),
            {"cllm.replica": replica},
            is_client=True,
        )

    def end_attempt(self, span: Any, event: str, *, has_failed: bool) -> None:
        span.set_attribute("cllm.event", event)
        if has_failed:
            span.set_status(self.error, event)
        span.end()


def has_attempts(record: RequestRecord) -> bool:
    """Return whether each request to a replica has a span."""
    return record.method == "POST" and bool(record.replica)
