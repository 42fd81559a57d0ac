"""What the server prints when it starts and ends."""

import asyncio
import logging
import socket

import pytest

from cllm.config.settings import Settings
from cllm.config.sources import load_settings
from cllm.engine.params import EngineParams
from cllm.process.pool import Pool
from cllm.server.access import Access
from cllm.server.http.server import open_server
from cllm.server.run import address, address_elsewhere, listen
from cllm.serving.builder import Builder
from cllm.serving.engines import Engines
from cllm.serving.sources import Source


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:{}"),
        ("0.0.0.0", "http://127.0.0.1:{}"),
        ("::", "http://[::1]:{}"),
        ("::1", "http://[::1]:{}"),
    ],
)
def test_printed_address_can_be_called(host, url):
    """A wildcard address cannot be called, so the server prints the loopback address and the
    machine's name.
    """
    try:
        listener = listen(host, 0)
    except Exception:  # noqa: BLE001
        assert ":" in host
        pytest.skip("this machine has no IPv6")
    with listener:
        port = listener.getsockname()[1]
        assert address(listener) == url.format(port)
        elsewhere = f"http://{socket.gethostname()}:{port}" if host in ("0.0.0.0", "::") else None
        assert address_elsewhere(listener) == elsewhere
        name = address(listener).removeprefix("http://").rpartition(":")[0].strip("[]")
        socket.create_connection((name, port), 5).close()


def test_failed_start_does_not_wait_for_clients(tmp_path, caplog):
    """A client that polls meanwhile has a request in the server but none in the engine."""
    settings = load_settings(None, {}, {"storage.folder": str(tmp_path)}).settings
    assert isinstance(settings, Settings)

    async def fail_while_polled():
        engine = Pool(EngineParams(backend="fake"))
        source = Source("m", settings, is_first=True)
        registry = Builder(settings, [source], Engines(), engine).registry
        server = open_server(registry, settings, Access(settings))
        listener = listen("127.0.0.1", 0)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        answering = asyncio.create_task(asyncio.sleep(0.2))
        server.server_state.tasks.add(answering)
        answering.add_done_callback(server.server_state.tasks.discard)
        server.should_exit = True
        await serving
        assert answering.done()
        await server.registry.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(fail_while_polled())
    assert caplog.messages == []
