"""Replicas that are replaced one after the other while clients send requests: none fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx2
from cluster.conftest import FAKE, start_front
from conftest import PATIENCE
from server.conftest import Server

REQUESTS: list[tuple[str, dict[str, object]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 40}),
    ("/api/generate", {"model": "fake", "prompt": "hello", "options": {"num_predict": 40}}),
    (
        "/v1/messages",
        {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40},
    ),
]
LAST = {
    "/v1/chat/completions": "data: [DONE]\n\n",
    "/v1/completions": "data: [DONE]\n\n",
    "/api/generate": "}\n",
    "/v1/messages": 'data: {"type":"message_stop"}\n\n',
}


class Clients:
    """Threads that send requests of all kinds until they are stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.num_answered = 0
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(path, {**body, "stream": stream}))
            for path, body in REQUESTS
            for stream in (False, True)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, path: str, body: dict[str, object]) -> None:
        with httpx2.Client(base_url=self._url, timeout=PATIENCE) as client:
            while not self._is_over.is_set():
                try:
                    got = client.post(path, json=body)
                except httpx2.HTTPError as error:
                    self.failures.append(f"{path}: {error!r}")
                    return
                is_whole = not body["stream"] or got.text.endswith(LAST[path])
                if got.status_code != 200 or not is_whole or '"error"' in got.text:
                    self.failures.append(f"{path}: {got.status_code} {got.text[-500:]}")
                self.num_answered += 1

    def wait(self, count: int) -> None:
        """Wait until so many further requests have been answered."""
        until = self.num_answered + count
        while self.num_answered < until and not self.failures:
            self._is_over.wait(0.02)

    def stop(self) -> list[str]:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        return self.failures


def test_no_request_fails_while_replicas_are_replaced_one_by_one(
    start_server: Callable[..., Server],
):
    replicas = [start_server(*FAKE) for _ in range(3)]
    front = start_front(start_server, *(one.url for one in replicas))
    clients = Clients(front.url)
    try:
        clients.wait(20)
        for replica in replicas:
            assert replica.stop() == 0, replica.log
            clients.wait(20)
            again = start_server(*FAKE, port=int(replica.url.rpartition(":")[2]))
            clients.wait(20)
            assert again.url == replica.url
    finally:
        failures = clients.stop()
    assert failures == []
    assert clients.num_answered > 100
