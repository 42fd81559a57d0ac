"""OpenTelemetry spans of requests, made when a request has ended. Needs the extra ``otel``."""

from __future__ import annotations

from urllib.parse import urlsplit

from cllm.config.settings import TraceSettings
from cllm.errors import StartupError
from cllm.observe.request_record import RequestRecord

TIMEOUT = 2.0  # seconds for a request to the collector
MISSING = "trace.endpoint needs OpenTelemetry: pip install 'cllm[otel]'"


class SpanExporter:
    """Sends a span for each sampled request that a model computes or that is rejected, with one for
    each of its phases, over OTLP/HTTP. A thread sends them; if the collector does not answer, they
    are dropped.
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
        self._server = trace.SpanKind.SERVER
        self._error = trace.StatusCode.ERROR

    def export(self, record: RequestRecord) -> None:
        """Make the spans of a request that has ended."""
        if record.ended is None or not (record.is_computed or record.status >= 400):
            return
        offset = record.created - record.arrived  # from the monotonic clock to that of the day
        span = self._tracer.start_span(
            f"{record.method} {record.route}",
            context=self._read_parent({"traceparent": record.traceparent}),
            kind=self._server,
            start_time=nanoseconds(record.arrived + offset),
        )
        if span.is_recording():
            span.set_attributes(list_attributes(record))
            if record.status >= 500 or record.outcome in ("error", "timeout"):
                span.set_status(self._error, record.error_code or record.outcome)
            within = self._in_context(span)
            for name, begin, end in record.list_phases():
                part = self._tracer.start_span(
                    name, context=within, start_time=nanoseconds(begin + offset)
                )
                part.end(nanoseconds(end + offset))
        span.end(nanoseconds(record.ended + offset))

    def close(self) -> None:
        """Send what has not been sent; this takes as long as the collector, TIMEOUT at most."""
        self._provider.force_flush(int(TIMEOUT * 1000))
        self._provider.shutdown()


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def list_attributes(record: RequestRecord) -> dict[str, str | int | float]:
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
