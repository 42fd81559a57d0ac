"""The engine client with a real engine process, on the fake backend."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from conftest import PATIENCE

from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.engine.params import EngineParams
from cllm.errors import EngineError, StartupError
from cllm.observe.metrics import Metrics
from cllm.process.backlog import NO_CLAIM, QueueFull, QueueLimits
from cllm.process.client import EngineClient
from cllm.process.reservations import Claim
from cllm.process.results import ResultCache

FAKE = EngineParams(backend="fake", max_num_seqs=2, check=True)


def run(test, **more):
    """Run ``test(client)`` with a started engine, and end both."""

    async def main():
        client = EngineClient(FAKE, **more)
        await client.start()
        try:
            await asyncio.wait_for(test(client), PATIENCE)
        finally:
            await client.close()
        assert client._process.ended.is_set()

    asyncio.run(main())


def ask(client, name, prompt=(97,), scheduling=(), **params):
    """Submit one greedy request, which equals others with the same arguments."""
    return client.submit(
        [Request(name, [*prompt], SamplingParams(temperature=0, **params), *scheduling)]
    )


async def receive(stream):
    """Return the next outputs."""
    await stream.arrival()
    return stream.take()


async def tokens(stream):
    """Return all tokens of a stream of one sequence."""
    outputs = []
    while not outputs or not outputs[-1].finish:
        outputs += await receive(stream)
    return [output.token for output in outputs]


def test_concurrent_requests_get_their_own_tokens():
    """There are more requests than sequence ids."""

    async def test(client):
        streams = [ask(client, f"r{i}", [i], max_tokens=4) for i in range(5)]
        assert await asyncio.gather(*map(tokens, streams)) == [
            [i + 1, i + 2, i + 3, i + 4] for i in range(5)
        ]
        for stream in streams:
            client.close_stream(stream)
        assert client.stats.num_seq_ids_in_use == 0

    run(test)


def test_closed_stream_is_aborted():
    """The next request gets the sequence id, although the aborted request was not finished."""

    async def test(client):
        stream = ask(client, "long", n=2, max_tokens=1000, ignore_eos=True)
        await receive(stream)
        client.close_stream(stream)
        assert await tokens(ask(client, "next", max_tokens=2)) == [98, 99]
        assert client.stats.num_running == client.stats.num_waiting == 0

    run(test)


def test_equal_requests_are_computed_once():
    """Concurrently, or later through the result cache. The engine computes one prompt."""

    async def test(client):
        streams = [ask(client, f"r{i}", range(50), max_tokens=4) for i in range(20)]
        assert await asyncio.gather(*map(tokens, streams)) == [[50, 51, 52, 53]] * 20
        assert await tokens(ask(client, "again", range(50), max_tokens=4)) == [50, 51, 52, 53]
        assert client.stats.num_prefill_tokens == 50
        assert client.stats.num_steps == 4

    run(test, results=ResultCache(1, 1000))


def test_departing_reader_does_not_affect_others():
    """When the last reader has left, the engine stops computing."""

    async def test(client):
        first, second = (ask(client, name, max_tokens=900, ignore_eos=True) for name in "ab")
        await receive(first)
        client.close_stream(first)
        for _ in range(5):
            await receive(second)
        client.close_stream(second)
        assert await tokens(ask(client, "next", [1], max_tokens=3)) == [2, 3, 4]
        assert client.stats.num_running == client.stats.num_waiting == 0

    run(test)


def test_burst_meets_queue_limit_exactly():
    """Although no message of the engine arrives meanwhile. Each end admits one more."""

    async def test(client):
        streams = []
        for i in range(100):
            with contextlib.suppress(QueueFull):
                streams.append(ask(client, f"r{i}", [i], max_tokens=5))
        assert len(streams) == FAKE.max_num_seqs + 7
        await asyncio.gather(*map(tokens, streams))
        assert await tokens(ask(client, "next", [1], max_tokens=1)) == [2]

    run(test, limits=QueueLimits(requests=7))


def test_check_room_rejects_by_number_of_tokens():
    """A prompt that can start immediately always has room. A second rejection with the first one's
    ticket makes no second reservation.
    """

    async def test(client):
        def check(num_tokens, priority=Priority.NORMAL, claim=NO_CLAIM):
            client.check_room(num_tokens, "account", priority, claim)

        check(10**9)  # it can start immediately
        for i in range(2):
            ask(client, f"r{i}", [i], ignore_eos=True)
        check(100)
        with pytest.raises(QueueFull, match="101 prompt tokens would wait") as caught:
            check(101)
        assert caught.value.bound == "tokens"
        with pytest.raises(QueueFull) as again:
            check(101, claim=Claim(caught.value.ticket))
        assert again.value.ticket == caught.value.ticket
        assert client.reservations["issued"] == 1
        check(10**9, Priority.INTERACTIVE)
        client.ready = False
        with pytest.raises(EngineError, match="not ready"):
            check(1)
        client.ready = True

    run(test, limits=QueueLimits(tokens=100))


def test_time_limits_of_request_end_it():
    """A request that waits too long, and one that runs too long, end with TIMEOUT."""

    async def test(client):
        busy = [ask(client, f"busy{i}", [i], max_tokens=900, ignore_eos=True) for i in range(2)]
        waits = ask(client, "waits", scheduling=("", Priority.NORMAL, None, 0.1))
        (output,) = await receive(waits)
        assert (output.token, output.finish) == (-1, "timeout")
        client.close_stream(busy[0])
        takes = ask(
            client, "takes", scheduling=("", Priority.NORMAL, 0.2), max_tokens=900, ignore_eos=True
        )
        assert (await tokens(takes))[-1] == -1
        client.close_stream(busy[1])

    run(test)


def test_explain_answers_each_caller():
    """A cancelled earlier caller does not matter."""

    async def test(client):
        busy = [ask(client, f"busy{i}", [i], max_tokens=900, ignore_eos=True) for i in range(3)]
        while client.stats.num_steps < 3:
            await receive(busy[1])
        gone, *asked = (asyncio.ensure_future(client.explain(count)) for count in (9, 1, 3))
        await asyncio.sleep(0)
        gone.cancel()
        answers = await asyncio.gather(*asked)
        assert [len(answer.steps) for answer in answers] == [1, 3]
        assert len(answers[0].running) == 2
        assert [waiter.name for waiter in answers[0].waiting] == ["busy2.0"]
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            await client.explain(1)
        with pytest.raises(EngineError, match="not ready"):
            await client.explain(1)

    run(test)


def test_dead_engine_fails_its_streams_and_restarts():
    """The error names the signal, requests in between are rejected, and the new engine answers."""

    async def test(client):
        stream = ask(client, "a", max_tokens=1000, ignore_eos=True)
        await receive(stream)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            await tokens(stream)
        client.close_stream(stream)
        with pytest.raises(EngineError, match="not ready"):
            ask(client, "b")
        while not client.ready:  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.02)
        assert await tokens(ask(client, "c", max_tokens=1)) == [98]
        assert client.num_restarts == 1

    run(test)


def test_retry_after_engine_death_is_backoff_plus_load_time(monkeypatch):
    """This holds for ended streams, and for all requests until the engine is ready."""
    monkeypatch.setattr("cllm.process.client.FIRST_BACKOFF", 2.0)
    now = 1000.0

    async def test(client):
        nonlocal now
        client._load_seconds = 12.0
        stream = ask(client, "a", max_tokens=1000, ignore_eos=True)
        await receive(stream)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineError) as died:
            await tokens(stream)
        assert died.value.retry_after == client.seconds_until_ready() == 14.0
        now += 1.5
        with pytest.raises(EngineError) as refused:
            ask(client, "b")
        assert refused.value.retry_after == 12.5
        while not client.ready:  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.02)
        assert client.seconds_until_ready() == 0.0

    run(test, clock=lambda: now)


def test_counters_survive_restart():
    """The metrics never fall, and continue from their values while there is no engine and with the
    next one.
    """

    def counted(metrics, client):
        totals = {"num_restarts": client.num_restarts, "reservations": client.reservations}
        page = metrics.render(client.stats_since_start, ready=client.ready, **totals).decode()
        lines = [line for line in page.splitlines() if line.startswith("cllm:")]
        values = {
            line[len("cllm:") : line.index("{")]: float(line.rpartition(" ")[2]) for line in lines
        }
        return [
            values[f"{name}_total"]
            for name in ("engine_steps", "prefill_tokens_computed", "engine_restarts")
        ]

    async def test(client):
        metrics, watched, late = Metrics("m"), [], Metrics("m")
        for _ in range(3):
            await tokens(ask(client, "a", range(50), max_tokens=4))
            watched.append(counted(metrics, client))
            os.kill(client.pid, signal.SIGKILL)
            while client.ready:  # noqa: ASYNC110  # there is no event to await
                await asyncio.sleep(0.02)
            watched.append(counted(metrics, client))
            while not client.ready:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert watched == [
            [4, 50, 0],
            [4, 50, 0],
            [8, 100, 1],
            [8, 100, 1],
            [12, 150, 2],
            [12, 150, 2],
        ]
        assert client.stats.num_steps == 0
        assert counted(late, client) == [12, 150, 3], "also if the metrics were never read before"

    run(test)


def test_backoff_grows_until_engine_has_served_for_a_minute(monkeypatch, caplog):
    """A request that kills every engine meets growing pauses, although each engine computes a few
    steps.
    """
    monkeypatch.setattr("cllm.process.client.FIRST_BACKOFF", 0.1)
    now = [1000.0]

    async def test(client):
        for seconds_of_service in (59.0, 59.0, 59.0, 60.0):
            stream = ask(client, "poison", max_tokens=1000, ignore_eos=True)
            await receive(stream)
            now[0] += seconds_of_service
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineError):
                await tokens(stream)
            client.close_stream(stream)
            while not client.ready:  # noqa: ASYNC110  # there is no event to await
                await asyncio.sleep(0.02)
        pauses = [
            record.args[-1] for record in caplog.records if record.msg.startswith("the engine died")
        ]
        assert pauses == [0.1, 0.2, 0.4, 0.1]

    run(test, clock=lambda: now[0])


def test_failed_load_raises_startup_error(tmp_path):
    """The child reports the reason and has ended."""

    async def main():
        client = EngineClient(EngineParams(path=str(tmp_path / "missing.gguf")))
        with pytest.raises(StartupError):
            await client.start()
        assert client._process.ended.is_set()
        await client.close()

    pytest.importorskip("llama_cpp")
    asyncio.run(main())


def test_death_while_loading_names_file_and_signal():
    """A damaged file is the likely cause."""

    code = "import os, signal, sys; sys.stdin.buffer.read(1); os.kill(os.getpid(), signal.SIGSEGV)"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    launched = subprocess.Popen([sys.executable, "-c", code], bufsize=0, **pipes)

    async def main():
        client = EngineClient(EngineParams(path="m.gguf"), launched=launched)
        with pytest.raises(
            StartupError, match=r"died \(SIGSEGV\) while loading m\.gguf: the file may be damaged"
        ):
            await client.start()
        await client.close()

    asyncio.run(main())
