"""What a front does with a request: which replicas it asks, and what becomes of that."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cllm.cluster.outcomes import Refused, ReplicaLost, StreamCut
from cllm.cluster.relay import Relay
from cllm.cluster.spans import FrontSpans
from cllm.core.carried import Computed
from cllm.observe.otel import write_traceparent
from cllm.observe.request_record import RequestRecord
from cllm.scheduler.trace import SequenceState
from cllm.server.auth import COMPUTED_HEADER
from cllm.store.charges import UsageCounts

MAX_ATTEMPTS = 16  # the latest ones are kept
ANSWERED = "answered"
LOOKING = "the front reads it and looks for a replica"


@dataclass(slots=True, eq=False)
class Attempt:
    """A request to a replica, from the choice of the replica to the end of its answer. ``event`` is
    what happened in the end. Times are on the monotonic clock.
    """

    replica: str
    continues: bool
    begun: float = field(default_factory=time.monotonic)
    ended: float | None = None
    event: str = ""
    span: Any = None  # of OpenTelemetry, if the request is sampled


class ErrorFields(msgspec.Struct):
    """What the front reads of OpenAI's error object."""

    code: str | None = None
    param: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of an error in OpenAI's form."""

    error: ErrorFields


class Journey:
    """The way of one request. ``relay`` is its answer, and ``received`` what of it the client has
    got, once there is one.
    """

    def __init__(self, record: RequestRecord, spans: FrontSpans | None = None) -> None:
        self.record = record
        self._spans = spans
        self.relay: Relay | None = None
        self.received = UsageCounts()
        self.attempts: deque[Attempt] = deque(maxlen=MAX_ATTEMPTS)
        self._num_failed = 0

    @contextmanager
    def ask(self, replica: str, *, continues: bool = False) -> Iterator[None]:
        """Note that a replica is asked while the block runs, and what becomes of that."""
        attempt = Attempt(replica, continues)
        record = self.record
        record.replica, record.num_retries = replica, self._num_failed
        if (spans := self._spans) is not None:
            since = record.arrived if not self.attempts else self.attempts[-1].ended or 0.0
            attempt.span = spans.begin_attempt(
                record, replica, since, attempt.begun, continues=continues
            )
        self.attempts.append(attempt)
        try:
            yield
            attempt.event = ANSWERED
        except BaseException as error:
            attempt.event = getattr(error, "event", "failed")
            if isinstance(error, (Refused, ReplicaLost, StreamCut)) and not self._repeats(attempt):
                self._num_failed += 1
            raise
        finally:
            attempt.ended = time.monotonic()
            if spans is not None and attempt.span is not None:
                has_failed = attempt.event != ANSWERED
                spans.end_attempt(attempt.span, attempt.event, has_failed=has_failed)

    @property
    def traceparent(self) -> str:
        """The header of W3C Trace Context for the replica that is asked now; "" if the front does
        not trace requests.
        """
        span = self.attempts[-1].span if self.attempts else None
        context = self.record.trace if span is None else span.get_span_context()
        return "" if context is None else write_traceparent(context)

    def note_sent(self) -> None:
        """Note that the replica has been sent the request."""
        if (span := self.attempts[-1].span) is not None:
            span.add_event("sent")

    def _repeats(self, attempt: Attempt) -> bool:
        """Return whether the attempt before ended in the same way; then forget that one."""
        before = self.attempts[-2] if len(self.attempts) > 1 else None
        if before is None or (before.replica, before.event) != (attempt.replica, attempt.event):
            return False
        del self.attempts[-2]
        return True

    def complete(self) -> None:
        """Complete the record of the request, except for what concerns HTTP."""
        record, relay, received = self.record, self.relay, self.received
        if relay is None or relay.response.status != 200:
            record.submitted = None  # no model has computed it
            if relay is not None:
                self._read_error(relay.error_body)
            return
        record.prompt_tokens, record.cached_tokens = received.prompt_tokens, received.cached_tokens
        record.completion_tokens = received.completion_tokens
        ending = None if relay.replay is None else relay.replay.ending
        if ending is not None and ending.error:
            record.outcome = "error"
        elif not record.outcome:
            record.outcome = "finished" if relay.is_complete else "abort"
        if relay.replay is None and not self._read_computed(relay):  # such as embeddings
            record.submitted, record.outcome = None, ""

    def _read_computed(self, relay: Relay) -> bool:
        """Complete the record by what the replica says of an answer that is no stream. Return
        whether it says something.
        """
        with suppress(msgspec.DecodeError, UnicodeDecodeError, LookupError):
            found = relay.response.headers[COMPUTED_HEADER.encode()]
            computed = msgspec.json.decode(found, type=Computed)
            record = self.record
            record.prompt_tokens = computed.prompt_tokens
            record.cached_tokens = computed.cached_tokens
            record.completion_tokens = computed.completion_tokens
            record.finish_reasons = computed.finish_reasons
            if computed.ttft is not None:
                record.first_token = self.attempts[-1].begun + computed.ttft
            return True
        return False

    def _read_error(self, body: bytes) -> None:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            error = msgspec.json.decode(body, type=ErrorBody).error
            self.record.error_code = error.code or ""
            self.record.error_field = (error.param or "")[:100]

    @property
    def is_at_front(self) -> bool:
        """Whether no replica has it now."""
        return not self.attempts or self.attempts[-1].ended is not None

    @property
    def id(self) -> str:
        """The id by which its replica calls it; that of the front until it is known."""
        if self.relay is not None:
            known = self.relay.response.headers.get(b"x-request-id")
            if known is not None:
                return known.decode("latin-1")
        return self.record.request_id

    def describe(self, now: float) -> list[str]:
        """Return in sentences which replicas were asked, if there were several; else []."""
        if len(self.attempts) < 2:
            return []
        return [describe(attempt, now) for attempt in self.attempts]

    def show(self, now: float) -> SequenceState:
        """Return its state, for a request that no replica has."""
        last = self.attempts[-1] if self.attempts else None
        since = self.record.arrived if last is None or last.ended is None else last.ended
        has_output = self.received.completion_tokens > 0
        reason = LOOKING
        if last is not None:
            to_do = "continues it" if has_output else "answers it"
            reason = f"{last.replica} {last.event}, and the front looks for a replica that {to_do}"
        return SequenceState(
            name=f"{self.id}-0.0",
            account=self.record.account,
            priority=self.record.priority,
            phase="parked" if has_output else "queued",
            phase_seconds=round(now - since, 3),
            age=round(now - self.record.arrived, 3),
            num_prompt_tokens=self.received.prompt_tokens,
            num_output_tokens=self.received.completion_tokens,
            reason=reason,
        )


def describe(attempt: Attempt, now: float) -> str:
    if attempt.ended is not None:
        return f"{attempt.replica} {attempt.event} {now - attempt.ended:.1f} s ago"
    does = "has continued it for" if attempt.continues else "has had it for"
    return f"{attempt.replica} {does} {now - attempt.begun:.1f} s"
