"""A collector that speaks OTLP over HTTP."""

from __future__ import annotations

import gzip
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """A collector; ``spans`` has what it was sent."""

    def __init__(self) -> None:
        self.spans: queue.Queue = queue.Queue()
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            spans.put((self.path, span))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def list_spans(self) -> dict:
        """Return the spans that were sent, by name; the last one of each name."""
        return {span.name: span for span in self.take()}

    def take(self) -> list:
        """Return the spans that were sent."""
        found = []
        while not self.spans.empty():
            path, span = self.spans.get()
            assert path == "/v1/traces"
            found.append(span)
        return found
