"""Proxies of the environment: not used for this machine, and named if they cannot be used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cllm.cli.explain import fetch
from cllm.cli.remote import call
from cllm.errors import StartupError
from cllm.http_client import VARIABLES, is_on_this_machine, open_client, read_local

PROXIES = [
    {"http_proxy": "http://127.0.0.1:9"},
    {"HTTP_PROXY": "http://127.0.0.1:9", "no_proxy": "http://[,:x,::1/128"},
    {"all_proxy": "socks5://127.0.0.1:9"},
    {"ALL_PROXY": "socks4://127.0.0.1:9"},
    {"http_proxy": "http://host:port"},
    {"https_proxy": "nonsense://x"},
]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(params=PROXIES, ids=str)
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set the variables of a proxy that cannot be used."""
    for name in (*VARIABLES, "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    variables: dict[str, str] = request.param
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def test_server_on_this_machine_is_reached_without_proxy(url: str, proxy: dict[str, str]) -> None:
    assert call(url, "GET", "/api/ps") == []
    assert call(url.replace("127.0.0.1", "localhost"), "GET", "/api/ps") == []
    assert fetch(url, 1) == b"[]"
    assert read_local(url) == b"[]"


def test_unusable_proxy_is_named(proxy: dict[str, str]) -> None:
    """In one line; a proxy that does not answer is found when it is used."""
    if "9" in "".join(proxy.values()) and "socks" not in "".join(proxy.values()):
        open_client("http://example.test").close()
        return
    with pytest.raises(StartupError) as caught:
        open_client("http://example.test")
    (name,) = proxy
    assert str(caught.value).startswith(f"the proxy in {name} cannot be used: ")
    assert "\n" not in str(caught.value)


def test_proxy_need_not_be_usable_for_a_host_in_no_proxy(
    proxy: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "other.test, .example.test")
    open_client("http://api.example.test:80").close()
    open_client("http://example.test").close()


@pytest.mark.parametrize(
    ("url", "is_near"),
    [
        ("http://localhost:8000", True),
        ("http://LOCALHOST.", True),
        ("http://a.localhost", True),
        ("http://127.9.9.9/v1", True),
        ("http://[::1]:80", True),
        ("http://[::ffff:127.0.0.1]", True),
        ("http://0.0.0.0:8000", True),
        ("http://127.1:8000", True),
        ("http://0x7f.1", True),
        ("http://2130706433/v1", True),
        ("http://10.1", False),
        ("http://bad.cafe", False),
        ("http://10.0.0.1", False),
        ("http://localhost.example", False),
        ("http://[", False),
    ],
)
def test_addresses_of_this_machine(url: str, is_near: bool) -> None:
    assert is_on_this_machine(url) is is_near
