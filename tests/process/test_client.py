"""The engine process seen from the API process, on the fake backend."""

import asyncio
import os
import signal

import pytest

from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import EngineParams
from cllm.errors import EngineError, StartupError
from cllm.process.client import EngineClient

FAKE = EngineParams(backend="fake", max_num_seqs=2, check=True)


def run(test):
    """Run ``test(client)`` with a started engine and end both."""

    async def main():
        client = EngineClient(FAKE)
        await client.start()
        try:
            await asyncio.wait_for(test(client), 20)
        finally:
            await client.close()
        assert client._process.returncode is not None

    asyncio.run(main())


def ask(client, name, **params):
    return client.submit([Request(name, [97], SamplingParams(temperature=0, **params))])


async def tokens(stream):
    """All tokens of a stream of one sequence."""
    outputs = []
    while not outputs or not outputs[-1].finish:
        outputs += await stream.get()
    return [output.token for output in outputs]


def test_requests_are_answered_together():
    """More requests than sequence ids, each with its own tokens."""

    async def test(client):
        streams = [ask(client, f"r{i}", max_tokens=4) for i in range(5)]
        assert await asyncio.gather(*map(tokens, streams)) == [[98, 99, 100, 101]] * 5
        for stream in streams:
            client.close_stream(stream)
        assert client.stats.num_seq_ids_in_use == 0

    run(test)


def test_a_closed_stream_is_aborted():
    """Its sequence is given back although it had much to say, and the next one gets it."""

    async def test(client):
        stream = ask(client, "long", n=2, max_tokens=1000, ignore_eos=True)
        await stream.get()
        client.close_stream(stream)
        assert await tokens(ask(client, "next", max_tokens=2)) == [98, 99]
        assert client.stats.num_running == client.stats.num_waiting == 0

    run(test)


def test_a_dead_engine_fails_its_streams_and_comes_back():
    """The reason is named, nothing is accepted in between, and the new engine answers."""

    async def test(client):
        stream = ask(client, "a", max_tokens=1000, ignore_eos=True)
        await stream.get()
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            await tokens(stream)
        client.close_stream(stream)
        with pytest.raises(EngineError, match="not ready"):
            ask(client, "b")
        while not client.ready:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.02)
        assert await tokens(ask(client, "c", max_tokens=1)) == [98]
        assert client.num_restarts == 1

    run(test)


def test_what_cannot_start_is_a_startup_error(tmp_path):
    """The reason comes from the child; the child is gone."""

    async def main():
        client = EngineClient(EngineParams(path=str(tmp_path / "missing.gguf")))
        with pytest.raises(StartupError):
            await client.start()
        assert client._process.returncode is not None
        await client.close()

    pytest.importorskip("llama_cpp")
    asyncio.run(main())
