"""The engine process seen from the API process, on the fake backend."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

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
    """Run ``test(client)`` with a started engine and end both."""

    async def main():
        client = EngineClient(FAKE, **more)
        await client.start()
        try:
            await asyncio.wait_for(test(client), PATIENCE)
        finally:
            await client.close()
        assert client._process.ended.is_set()

    asyncio.run(main())


def ask(client, name, prompt=(97,), terms=(), **params):
    """One request, greedy and so the same as others like it."""
    return client.submit(
        [Request(name, [*prompt], SamplingParams(temperature=0, **params), *terms)]
    )


async def received(stream):
    """The next outputs."""
    await stream.arrival()
    return stream.take()


async def tokens(stream):
    """All tokens of a stream of one sequence."""
    outputs = []
    while not outputs or not outputs[-1].finish:
        outputs += await received(stream)
    return [output.token for output in outputs]


def test_requests_are_answered_together():
    """More requests than sequence ids, each with its own tokens."""

    async def test(client):
        streams = [ask(client, f"r{i}", [i], max_tokens=4) for i in range(5)]
        assert await asyncio.gather(*map(tokens, streams)) == [
            [i + 1, i + 2, i + 3, i + 4] for i in range(5)
        ]
        for stream in streams:
            client.close_stream(stream)
        assert client.stats.num_seq_ids_in_use == 0

    run(test)


def test_a_closed_stream_is_aborted():
    """Its sequence is given back although it had much to say, and the next one gets it."""

    async def test(client):
        stream = ask(client, "long", n=2, max_tokens=1000, ignore_eos=True)
        await received(stream)
        client.close_stream(stream)
        assert await tokens(ask(client, "next", max_tokens=2)) == [98, 99]
        assert client.stats.num_running == client.stats.num_waiting == 0

    run(test)


def test_what_is_the_same_is_computed_once():
    """Together or one after the other, the second with a cache; the engine sees one prompt."""

    async def test(client):
        streams = [ask(client, f"r{i}", range(50), max_tokens=4) for i in range(20)]
        assert await asyncio.gather(*map(tokens, streams)) == [[50, 51, 52, 53]] * 20
        assert await tokens(ask(client, "again", range(50), max_tokens=4)) == [50, 51, 52, 53]
        assert client.stats.num_prefill_tokens == 50
        assert client.stats.num_steps == 4

    run(test, results=ResultCache(1, 1000))


def test_a_reader_that_leaves_takes_nothing_from_the_others():
    """And when the last has left, the engine computes no further."""

    async def test(client):
        first, second = (ask(client, name, max_tokens=900, ignore_eos=True) for name in "ab")
        await received(first)
        client.close_stream(first)
        for _ in range(5):
            await received(second)
        client.close_stream(second)
        assert await tokens(ask(client, "next", [1], max_tokens=3)) == [2, 3, 4]
        assert client.stats.num_running == client.stats.num_waiting == 0

    run(test)


def test_a_burst_meets_the_bound_exactly():
    """Although the engine has not said a word meanwhile; each end lets one in."""

    async def test(client):
        streams = []
        for i in range(100):
            with contextlib.suppress(QueueFull):
                streams.append(ask(client, f"r{i}", [i], max_tokens=5))
        assert len(streams) == FAKE.max_num_seqs + 7
        await asyncio.gather(*map(tokens, streams))
        assert await tokens(ask(client, "next", [1], max_tokens=1)) == [2]

    run(test, limits=QueueLimits(requests=7))


def test_room_is_checked_for_a_number_of_tokens():
    """A prompt that can begin immediately always has room. A second rejection with the ticket of
    the first one makes no second reservation.
    """

    async def test(client):
        def check(num_tokens, priority=Priority.NORMAL, claim=NO_CLAIM):
            client.check_room(num_tokens, "account", priority, claim)

        check(10**9)  # which begins immediately
        for i in range(2):
            ask(client, f"r{i}", [i], ignore_eos=True)
        check(100)
        with pytest.raises(QueueFull, match="101 prompt tokens would wait, 100 may") as caught:
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


def test_limits_of_its_own_end_a_request():
    """One that waits too long, one that takes too long; the reason is TIMEOUT."""

    async def test(client):
        busy = [ask(client, f"busy{i}", [i], max_tokens=900, ignore_eos=True) for i in range(2)]
        waits = ask(client, "waits", terms=("", Priority.NORMAL, None, 0.1))
        (output,) = await received(waits)
        assert (output.token, output.finish) == (-1, "timeout")
        client.close_stream(busy[0])
        takes = ask(
            client, "takes", terms=("", Priority.NORMAL, 0.2), max_tokens=900, ignore_eos=True
        )
        assert (await tokens(takes))[-1] == -1
        client.close_stream(busy[1])

    run(test)


def test_the_engine_explains_itself():
    """Each who asks has his own answer, also if the one before him has gone away."""

    async def test(client):
        busy = [ask(client, f"busy{i}", [i], max_tokens=900, ignore_eos=True) for i in range(3)]
        while client.stats.num_steps < 3:
            await received(busy[1])
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


def test_a_dead_engine_fails_its_streams_and_comes_back():
    """The reason is named, nothing is accepted in between, and the new engine answers."""

    async def test(client):
        stream = ask(client, "a", max_tokens=1000, ignore_eos=True)
        await received(stream)
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


def test_retry_after_a_death_is_the_pause_and_the_time_of_a_load(monkeypatch):
    """For those whose streams have ended, and for all that come until the engine is ready."""
    monkeypatch.setattr("cllm.process.client.FIRST_BACKOFF", 2.0)
    now = 1000.0

    async def test(client):
        nonlocal now
        client._load_seconds = 12.0
        stream = ask(client, "a", max_tokens=1000, ignore_eos=True)
        await received(stream)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineError) as died:
            await tokens(stream)
        assert died.value.retry_after == client.seconds_until_ready() == 14.0
        now += 1.5
        with pytest.raises(EngineError) as refused:
            ask(client, "b")
        assert refused.value.retry_after == 12.5
        while not client.ready:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.02)
        assert client.seconds_until_ready() == 0.0

    run(test, clock=lambda: now)


def test_counters_survive_a_restart():
    """What Prometheus reads never falls, and goes on from where it was: while there is no engine,
    and with the next.
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
            while client.ready:  # noqa: ASYNC110  # it tells nobody
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
        assert counted(late, client) == [12, 150, 3], "however seldom the page is read"

    run(test)


def test_pauses_between_restarts_grow_until_the_engine_has_served_for_a_minute(monkeypatch, caplog):
    """A request that kills every engine meets longer and longer pauses, although each engine
    computes a few steps.
    """
    monkeypatch.setattr("cllm.process.client.FIRST_BACKOFF", 0.1)
    now = [1000.0]

    async def test(client):
        for seconds_of_service in (59.0, 59.0, 59.0, 60.0):
            stream = ask(client, "poison", max_tokens=1000, ignore_eos=True)
            await received(stream)
            now[0] += seconds_of_service
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineError):
                await tokens(stream)
            client.close_stream(stream)
            while not client.ready:  # noqa: ASYNC110  # it tells nobody
                await asyncio.sleep(0.02)
        pauses = [
            record.args[-1] for record in caplog.records if record.msg.startswith("the engine died")
        ]
        assert pauses == [0.1, 0.2, 0.4, 0.1]

    run(test, clock=lambda: now[0])


def test_what_cannot_start_is_a_startup_error(tmp_path):
    """The reason comes from the child; the child is gone."""

    async def main():
        client = EngineClient(EngineParams(path=str(tmp_path / "missing.gguf")))
        with pytest.raises(StartupError):
            await client.start()
        assert client._process.ended.is_set()
        await client.close()

    pytest.importorskip("llama_cpp")
    asyncio.run(main())


def test_death_during_the_load_names_the_file():
    """And the signal: a damaged file is the likely cause."""

    code = "import os, signal, sys; sys.stdin.buffer.read(1); os.kill(os.getpid(), signal.SIGSEGV)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    launched = subprocess.Popen([sys.executable, "-c", code], bufsize=0, **pipes)

    async def main():
        client = EngineClient(EngineParams(path="m.gguf"), launched=launched)
        with pytest.raises(
            StartupError, match=r"died \(SIGSEGV\) while it loaded m\.gguf: the file may be damaged"
        ):
            await client.start()
        await client.close()

    asyncio.run(main())
