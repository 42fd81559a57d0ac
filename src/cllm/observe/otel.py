"""OpenTelemetry spans of requests, made when a request has ended. Needs the extra ``otel``."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlsplit

from cllm.config.settings import TraceSettings
from cllm.errors import StartupError
from cllm.observe.request_record import RequestRecord
from cllm.observe.request_steps import RequestSteps, Work

TIMEOUT = 2.0  # seconds for a request to the collector
MISSING = "trace.endpoint needs OpenTelemetry: pip install 'cllm[otel]'"
Attributes = dict[str, str | int | float]


class SpanExporter:
    """Sends a span for each sampled request that a model computes or that is rejected, with one for
    each of its phases and their parts, over OTLP/HTTP. A thread sends them; if the collector does
    not answer, they are dropped.
    """

    def __init__(self, settings: TraceSettings, version: str) -> None:
        """Raises StartupError if OpenTelemetry is not installed, or the address is not HTTP."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise StartupError(MISSING) from None
        endpoint = settings.endpoint or ""
        if urlsplit(endpoint).scheme not in ("http", "https"):
            raise StartupError(f"trace.endpoint must be an HTTP address, not {endpoint!r}")
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sample)),
            resource=Resource.create({"service.name": "cllm", "service.version": version}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("cllm", version)
        self._read_parent = TraceContextTextMapPropagator().extract
        self._in_context = trace.set_span_in_context
        self._server, self._client = trace.SpanKind.SERVER, trace.SpanKind.CLIENT
        self._internal = trace.SpanKind.INTERNAL
        self.error = trace.StatusCode.ERROR

    def begin(self, record: RequestRecord, traceparent: str) -> None:
        """Choose whether a request that has arrived is traced. ``traceparent`` is its header of W3C
        Trace Context, "" without one.
        """
        span = self._tracer.start_span(
            f"{record.method} {record.route}",
            context=self._read_parent({"traceparent": traceparent}),
            kind=self._server,
            start_time=nanoseconds(record.created),
        )
        record.trace = span.get_span_context()
        if span.is_recording():
            record.steps = RequestSteps(span)

    def export(self, record: RequestRecord) -> None:
        """Make the spans of a request that has ended."""
        if (steps := record.steps) is None or record.ended is None:
            return
        if not self.is_shown(record):
            return
        offset = record.created - record.arrived  # from the monotonic clock to that of the day
        span = steps.span
        span.set_attributes(list_attributes(record))
        if record.status >= 500 or record.outcome in ("error", "timeout"):
            span.set_status(self.error, record.error_code or record.outcome)
        for part in self.list_parts(record, steps):
            self.add(part, span, offset)
        span.end(nanoseconds(record.ended + offset))

    def is_shown(self, record: RequestRecord) -> bool:
        """Return whether a request that has ended has a span."""
        return record.is_computed or record.status >= 400

    def list_parts(self, record: RequestRecord, steps: RequestSteps) -> list[Part]:
        """Return the phases of a request that has ended, and what they consist of."""
        return list_parts(record, steps)

    def add(self, part: Part, parent: Any, offset: float) -> None:
        """Make the spans of a part. ``offset`` is that from the monotonic clock to that of the
        day.
        """
        span = self.start(part.name, parent, nanoseconds(part.begin + offset), part.attributes)
        for inner in part.parts:
            self.add(inner, span, offset)
        span.end(nanoseconds(part.end + offset))

    def start(
        self,
        name: str,
        parent: Any,
        at: int,
        attributes: Attributes | None = None,
        *,
        is_client: bool = False,
    ) -> Any:
        """Return a span within another one, which begins ``at`` a time in nanoseconds."""
        return self._tracer.start_span(
            name,
            context=self._in_context(parent),
            kind=self._client if is_client else self._internal,
            attributes=attributes,
            start_time=at,
        )

    def close(self) -> None:
        """Send what has not been sent; this takes as long as the collector, TIMEOUT at most."""
        self._provider.force_flush(int(TIMEOUT * 1000))
        self._provider.shutdown()


def write_traceparent(context: Any) -> str:
    """Return the header of W3C Trace Context for what is done within a span."""
    trace, span = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    return f"00-{trace}-{span}-{context.trace_flags & 1:02x}"


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class Part(NamedTuple):
    """A part of a request, with its own ``parts``. Times are in seconds, monotonic clock."""

    name: str
    begin: float
    end: float
    attributes: Attributes | None = None
    parts: tuple[Part, ...] = ()


def list_parts(record: RequestRecord, steps: RequestSteps) -> list[Part]:
    """Return the phases of a request and what they consist of.

    A stream is sent while it decodes, so its part ``send`` begins with the first token.
    """
    parts = []
    for name, begin, end in record.list_phases():
        part = Part(name, begin, end)
        if name == "prepare":
            prepared = [Part(*step) for step in steps.preparation]
            accepted = Part("accept", begin, min([end, *(step.begin for step in prepared)]))
            part = part._replace(parts=(accepted, *prepared))
        elif name == "prefill":
            part = part._replace(parts=list_chunks(record, begin, end))
        elif name == "decode":
            detokenized = Part("detokenize", begin, end, describe(steps.detokenizing))
            part = part._replace(parts=(detokenized,))
        elif name == "send" and steps.sending.count:
            formatting = {"cllm.format_ms": milliseconds(steps.formatting.seconds)}
            attributes = describe(steps.sending) | formatting
            part = Part(name, record.first_token or begin, end, attributes)
        parts.append(part)
    return parts


def list_chunks(record: RequestRecord, begin: float, end: float) -> tuple[Part, ...]:
    """Return the chunks of the prompt, which the engine's clock has measured, within a time."""
    return tuple(
        Part(
            "prefill chunk",
            min(end, begin + chunk.begin),
            min(end, begin + chunk.end),
            {"cllm.tokens": chunk.num_tokens},
        )
        for chunk in record.times.chunks
    )


def describe(work: Work) -> Attributes:
    """Return how often some work was done, and how long it took in all."""
    return {"cllm.count": work.count, "cllm.busy_ms": milliseconds(work.seconds)}


def milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


def list_attributes(record: RequestRecord) -> Attributes:
    """Return the attributes of a request's span: OpenTelemetry's names where it has some, and the
    fields of its log line.
    """
    named: dict[str, str | int] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.answer_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
    }
    own = {f"cllm.{name}": value for name, value in record.list_fields().items()}
    return {name: value for name, value in named.items() if value != ""} | own
