"""Measure what logs, metrics, traces and the live view cost.

    uv run python -m benchmarks.sight_cost [MODEL] [--requests 4] [--rounds 6]

Two servers of MODEL (by default the built-in one) answer the same load of 4 clients in turn: one
that writes errors only, and one that writes JSON lines at the level info, sends 1 % of its requests
as spans, is watched by a live view, and whose metrics are read every 5 seconds, as by Prometheus.
Printed are the output tokens per second of both, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2

from benchmarks.adapters import compute_rate, send, serve
from cllm.bench.servers import RunningServer
from cllm.cli.doctor import describe_cpu
from cllm.cli.main import install_signal_handlers
from cllm.models.catalog import BUILTIN

SCRAPE_SECONDS = 5.0
OFF = ["log: {level: error}"]


class Collector(BaseHTTPRequestHandler):
    """Accepts spans, and forgets them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[str]:
    """Receive spans, and yield the address for them."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{collector.server_port}/v1/traces"
        collector.shutdown()


@contextmanager
def watching(server: RunningServer) -> Iterator[None]:
    """Watch the live view, and read the metrics."""
    ended = threading.Event()

    def watch() -> None:
        with httpx2.stream("GET", f"{server.url}/live/events", timeout=60) as answer:
            answer.raise_for_status()
            for _ in answer.iter_raw():
                if ended.is_set():
                    return

    def scrape() -> None:
        while not ended.wait(SCRAPE_SECONDS):
            httpx2.get(f"{server.url}/metrics", timeout=60).raise_for_status()

    threads = [threading.Thread(target=each, daemon=True) for each in (watch, scrape)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(10)


def main() -> None:
    install_signal_handlers()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=BUILTIN)
    parser.add_argument("--requests", type=int, default=4, help="of each client, in a round")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    model = f"model: {{path: {options.model}, name: base}}"
    with tempfile.TemporaryDirectory() as name, collecting() as address:
        folders = [Path(name) / each for each in ("off", "on")]
        for folder in folders:
            folder.mkdir()
        on = ["log: {format: json}", f"trace: {{endpoint: '{address}', sample: 0.01}}"]
        with serve(folders[0], [model, *OFF]) as plain, serve(folders[1], [model, *on]) as seen:
            for server in (plain, seen):
                send(server, ["base"], 1)
            ratios = []
            for number in range(options.rounds):
                rates = {}
                for which in ("off", "on") if number % 2 else ("on", "off"):
                    if which == "off":
                        rates[which] = compute_rate(send(plain, ["base"], options.requests))
                    else:
                        with watching(seen):
                            rates[which] = compute_rate(send(seen, ["base"], options.requests))
                ratios.append(rates["on"] / rates["off"])
                print(f"off {rates['off']:.1f}, on {rates['on']:.1f} tokens/s: {ratios[-1]:.3f}")
    print(
        f"{describe_cpu()}: median {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f}-{max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
