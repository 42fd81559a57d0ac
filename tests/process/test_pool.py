"""The pool with a real engine process, on the fake backend."""

import array
import asyncio
import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import termios
import time
from typing import Any

import msgspec
import pytest
from conftest import PATIENCE, repeat, stop_process

from cllm.core.params import SamplingParams
from cllm.core.request import EmbeddingRequest, Priority, Request
from cllm.core.segments import Segment
from cllm.engine.commands import InjectedFault
from cllm.engine.params import EngineParams
from cllm.errors import EngineError, FatalRequest, StartupError
from cllm.observe.exposition import render
from cllm.observe.metrics import Metrics
from cllm.process.backlog import NO_CLAIM, QueueFull, QueueLimits
from cllm.process.launch import make_specs
from cllm.process.messages import Loading
from cllm.process.pending_tokens import Texts
from cllm.process.pool import Pool
from cllm.process.reservations import Claim
from cllm.process.results import ResultCache
from cllm.process.spawn import EngineProcess

pytestmark = pytest.mark.slow  # each starts processes

FAKE = EngineParams(backend="fake", max_num_seqs=2, check=True)


def run(test, params=FAKE, **more):
    """Run ``test(pool)`` with a started engine, and end both."""

    async def main():
        pool = Pool(params, **more)
        await pool.start()
        try:
            await asyncio.wait_for(test(pool), PATIENCE)
        finally:
            await pool.close()
        assert pool.members[0].supervisor.process.ended.is_set()

    asyncio.run(main())


def ask(pool, name, prompt=(97,), scheduling=(), **params):
    """Submit one greedy request, which equals others with the same arguments."""
    return pool.submit(
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


def kill(pool):
    """Kill the engine, if it has not died without this process knowing it yet."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pool.pid, signal.SIGKILL)


def test_concurrent_requests_get_their_own_tokens():
    """There are more requests than sequence ids."""

    async def test(pool):
        streams = [ask(pool, f"r{i}", [i], max_tokens=4) for i in range(5)]
        assert await asyncio.gather(*map(tokens, streams)) == [
            [i + 1, i + 2, i + 3, i + 4] for i in range(5)
        ]
        for stream in streams:
            pool.close_stream(stream)
        assert pool.stats.num_seq_ids_in_use == 0

    run(test)


def test_closed_stream_is_aborted():
    """The next request gets the sequence id, although the aborted request was not finished."""

    async def test(pool):
        stream = ask(pool, "long", n=2, max_tokens=1000, ignore_eos=True)
        await receive(stream)
        pool.close_stream(stream)
        assert await tokens(ask(pool, "next", max_tokens=2)) == [98, 99]
        assert pool.stats.num_running == pool.stats.num_waiting == 0

    run(test)


def test_equal_requests_are_computed_once():
    """Concurrently, or later through the result cache. The engine computes one prompt."""

    async def test(pool):
        streams = [ask(pool, f"r{i}", range(50), max_tokens=4) for i in range(20)]
        assert await asyncio.gather(*map(tokens, streams)) == [[50, 51, 52, 53]] * 20
        assert await tokens(ask(pool, "again", range(50), max_tokens=4)) == [50, 51, 52, 53]
        assert pool.stats.num_prefill_tokens == 50
        assert pool.stats.num_steps == 4

    run(test, results=ResultCache(1, 1000))


def test_departing_reader_does_not_affect_others():
    """When the last reader has left, the engine stops computing."""

    async def test(pool):
        first, second = (ask(pool, name, max_tokens=900, ignore_eos=True) for name in "ab")
        await receive(first)
        pool.close_stream(first)
        for _ in range(5):
            await receive(second)
        pool.close_stream(second)
        assert await tokens(ask(pool, "next", [1], max_tokens=3)) == [2, 3, 4]
        assert pool.stats.num_running == pool.stats.num_waiting == 0

    run(test)


def test_burst_meets_queue_limit_exactly():
    """Although no message of the engine arrives meanwhile. Each end admits one more."""

    async def test(pool):
        streams = []
        for i in range(100):
            with contextlib.suppress(QueueFull):
                streams.append(ask(pool, f"r{i}", [i], max_tokens=5))
        assert len(streams) == FAKE.max_num_seqs + 7
        await asyncio.gather(*map(tokens, streams))
        assert await tokens(ask(pool, "next", [1], max_tokens=1)) == [2]

    run(test, limits=QueueLimits(requests=7))


def test_check_room_rejects_by_number_of_tokens():
    """A prompt that can start immediately always has room. A second rejection with the first one's
    ticket makes no second reservation.
    """

    async def test(pool):
        def check(num_tokens, priority=Priority.NORMAL, claim=NO_CLAIM):
            pool.check_room(num_tokens, "account", priority, claim)

        check(10**9)  # it can start immediately
        for i in range(2):
            ask(pool, f"r{i}", [i], ignore_eos=True)
        check(100)
        with pytest.raises(QueueFull, match="101 prompt tokens would wait") as caught:
            check(101)
        assert caught.value.bound == "tokens"
        with pytest.raises(QueueFull) as again:
            check(101, claim=Claim(caught.value.ticket))
        assert again.value.ticket == caught.value.ticket
        assert pool.backlog.reservations.counts["issued"] == 1
        check(10**9, Priority.INTERACTIVE)
        pool.members[0].supervisor.num_failed, pool.members[0].supervisor.ready = 1, False
        with pytest.raises(EngineError, match="not ready"):
            check(1)
        pool.members[0].supervisor.ready = True

    run(test, limits=QueueLimits(tokens=100))


def test_time_limits_of_request_end_it():
    """A request that waits too long, and one that runs too long, end with TIMEOUT."""

    async def test(pool):
        busy = [ask(pool, f"busy{i}", [i], max_tokens=900, ignore_eos=True) for i in range(2)]
        waits = ask(pool, "waits", scheduling=("", Priority.NORMAL, None, 0.1))
        (output,) = await receive(waits)
        assert (output.token, output.finish) == (-1, "timeout")
        pool.close_stream(busy[0])
        takes = ask(
            pool, "takes", scheduling=("", Priority.NORMAL, 0.2), max_tokens=900, ignore_eos=True
        )
        assert (await tokens(takes))[-1] == -1
        pool.close_stream(busy[1])

    run(test)


def test_weights_set_while_an_engine_loads_reach_it():
    """The first one, and the next."""

    async def test(pool):
        assert pool.params.weights == {"ann": 4.0}
        # with four times the share, ann's requests are served before the second one of bob
        os.kill(pool.pid, signal.SIGKILL)
        await until(lambda: not pool.ready)
        pool.set_weights({"ann": 0.001})
        await until(lambda: pool.ready)
        names = [("bob", 1), ("ann", 2), ("ann", 3), ("bob", 4), ("bob", 5)]
        busy = [ask(pool, f"busy{i}", [i], max_tokens=30, ignore_eos=True) for i in (8, 9)]
        streams = [
            ask(pool, f"{name}{i}", [i], (name,), max_tokens=20, ignore_eos=True)
            for name, i in names
        ]
        order = []

        async def read(stream, name):
            await tokens(stream)
            order.append(name)

        await asyncio.gather(*map(tokens, busy), *map(read, streams, [name for name, _ in names]))
        assert order[-1] == "ann"

    async def main():
        pool = Pool(EngineParams(backend="fake", max_num_seqs=2))
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(0)
        pool.set_weights({"ann": 4.0})
        await starting
        try:
            await asyncio.wait_for(test(pool), PATIENCE)
        finally:
            await pool.close()

    asyncio.run(main())


def test_explain_answers_each_caller():
    """A cancelled earlier caller does not matter."""

    async def test(pool):
        busy = [ask(pool, f"busy{i}", [i], max_tokens=900, ignore_eos=True) for i in range(3)]
        while pool.stats.num_steps < 3:
            await receive(busy[1])
        gone, *asked = (asyncio.ensure_future(pool.explain(count)) for count in (9, 1, 3))
        await asyncio.sleep(0)
        gone.cancel()
        answers = await asyncio.gather(*asked)
        assert [len(answer.steps) for answer in answers] == [1, 3]
        assert len(answers[0].running) == 2
        assert [waiter.name for waiter in answers[0].waiting] == ["busy2.0"]
        os.kill(pool.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            await pool.explain(1)
        await until(lambda: not pool.ready)
        with pytest.raises(EngineError, match="not ready"):
            await pool.explain(1)

    run(test)


async def until(condition):
    while not condition():  # noqa: ASYNC110  # there is no event to await
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def failing_starts(monkeypatch):
    """No engine can be started meanwhile."""

    def fail(*_):
        raise StartupError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("cllm.process.supervisor.spawn", fail)
        yield


MANY = SamplingParams(max_tokens=60, ignore_eos=True, seed=7)
KINDS = {
    "greedy": MANY.replace_unchecked(temperature=0.0, seed=None),
    "random": MANY,
    "three": MANY.replace_unchecked(n=3, top_k=0),
    "penalties": MANY.replace_unchecked(presence_penalty=1.5, repetition_penalty=1.1),
    "dry": MANY.replace_unchecked(dry_multiplier=2.0),
    "mirostat": MANY.replace_unchecked(mirostat=2, mirostat_tau=3.0),
    "logprobs": MANY.replace_unchecked(logprobs=3, prompt_logprobs=2),
    "min_tokens": MANY.replace_unchecked(min_tokens=40, ignore_eos=False),
    "grammar": MANY.replace_unchecked(grammar='start: "[" /[0-9]+/ ("," /[0-9]+/)* "]"'),
}


def submit_all(pool, suffix):
    return {
        kind: pool.submit([Request(f"{kind}-{suffix}", [5, 6, 7 + i] * 9, params)])
        for i, (kind, params) in enumerate(KINDS.items())
    }


async def read_all(streams):
    """Return what each stream delivers, without the request ids and what depends on the cache."""

    async def read(stream):
        unfinished, outputs = {*range(stream.requests[0].params.n)}, []
        while unfinished:
            new = await receive(stream)
            outputs += new
            unfinished -= {output.index for output in new if output.finish}
        scored = [one for output in outputs for one in output.prompt_logprobs or ()]
        tokens = [
            (o.index, o.token, o.finish, o.logprobs) for o in outputs if o.token >= 0 or o.finish
        ]
        return scored, sorted(tokens, key=lambda token: token[0])

    return dict(zip(streams, await asyncio.gather(*map(read, streams.values())), strict=True))


@pytest.mark.parametrize("seed", range(repeat(3, 1)))
def test_streams_continue_in_the_next_engine(seed):
    """After kills at random moments, each stream has the tokens and logprobs that it has without
    them, once. No delivered token is sampled again.
    """
    rng = random.Random(seed)

    async def test(pool):
        expected = await read_all(submit_all(pool, "calm"))
        streams = submit_all(pool, "disturbed")
        reading = asyncio.create_task(read_all(streams))
        for _ in range(3):
            await asyncio.sleep(rng.uniform(0, 0.1))
            await until(lambda: pool.ready)
            if not reading.done():
                kill(pool)
        assert await reading == expected
        assert pool.num_restarts > 0
        assert pool.num_unfinished == 0
        for stream in streams.values():
            pool.close_stream(stream)
        await asyncio.sleep(0)
        assert await tokens(ask(pool, "next", [1], max_tokens=2)) == [2, 3]

    run(test)


@pytest.mark.parametrize("seed", range(repeat(3, 1)))
def test_kills_while_loading_and_while_continuing_lose_nothing(seed, monkeypatch):
    """The next engine dies before it is ready, or before it has computed a token."""
    monkeypatch.setattr("cllm.process.supervisor.FIRST_BACKOFF", 0.01)
    rng = random.Random(seed)

    async def test(pool):
        expected = await read_all(submit_all(pool, "calm"))
        streams = submit_all(pool, "disturbed")
        reading = asyncio.create_task(read_all(streams))
        await asyncio.sleep(0.05)
        killed = [pool.pid]
        os.kill(pool.pid, signal.SIGKILL)
        for _ in range(3):
            await until(lambda: pool.pid not in (None, killed[-1]))
            await asyncio.sleep(rng.uniform(0, 0.4))
            killed.append(pool.pid)
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(killed[-1], signal.SIGKILL)
        await until(lambda: pool.ready)
        os.kill(pool.pid, signal.SIGKILL)
        assert await reading == expected
        assert pool.num_restarts >= 2

    run(test)


def test_kill_in_the_middle_of_a_frame_loses_nothing():
    """The engine cannot write the rest of a frame that is larger than the pipe."""
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=20, prompt_logprobs=20)

    async def test(pool):
        def ask_one(name):
            return {name: pool.submit([Request(name, [*range(1, 251)] * 30, params)])}

        expected = await read_all(ask_one("calm"))
        streams = ask_one("disturbed")
        await asyncio.sleep(0)  # the request is sent; then nothing is read until the pipe is full
        pipe, waiting = (
            pool.members[0].supervisor.process._process.stdout.fileno(),
            array.array("i", [0]),
        )
        while waiting[0] < 60_000:
            time.sleep(0.01)  # noqa: ASYNC251
            fcntl.ioctl(pipe, termios.FIONREAD, waiting)
        os.kill(pool.pid, signal.SIGKILL)
        (found,) = (await read_all(streams)).values()
        assert found == expected["calm"]
        assert pool.num_restarts == 1

    run(test, EngineParams(backend="fake", max_num_seqs=2, context_length=10_000))


def test_delivered_tokens_are_not_sampled_again():
    """Each step samples one token of one sequence."""

    async def test(pool):
        stream = ask(pool, "a", [1], max_tokens=900, ignore_eos=True)
        count = 0
        while count < 300:
            count += len(await receive(stream))
        os.kill(pool.pid, signal.SIGKILL)
        count += len(await tokens(stream))
        assert count == 900
        assert 1 <= pool.stats.num_steps <= 602  # of the second engine

    run(test)


def test_progress_of_a_restart_is_not_reported():
    """The bar of the first load has been closed."""
    reported = []

    async def test(pool):
        reported.clear()
        pool.members[0].supervisor._take(Loading(0.5))
        os.kill(pool.pid, signal.SIGKILL)
        await until(lambda: not pool.ready)
        await until(lambda: pool.ready)
        assert reported == []

    run(test, on_loading=reported.append)


def test_waiting_requests_and_those_that_come_meanwhile_survive():
    """The engine computes two sequences at once; six wait."""

    async def test(pool):
        def ask_one(name, first):
            return ask(pool, f"{name}{first}", [first], max_tokens=30, ignore_eos=True)

        expected = [await tokens(ask_one("calm", i)) for i in range(9)]
        streams = [ask_one("r", i) for i in range(8)]
        await receive(streams[0])
        os.kill(pool.pid, signal.SIGKILL)
        await until(lambda: not pool.ready)
        streams.append(ask_one("late", 8))
        assert await asyncio.gather(*map(tokens, streams[1:])) == expected[1:]

    run(test)


def test_what_its_reader_has_stopped_or_left_is_not_computed_again():
    """The engine died before it could say that it had stopped it."""

    async def test(pool):
        both, left = (
            ask(pool, name, [ord(name)], n=n, max_tokens=900, ignore_eos=True)
            for name, n in (("a", 2), ("b", 1))
        )
        await receive(both)
        os.kill(pool.pid, signal.SIGSTOP)
        pool.stop(both, "a", 0)
        pool.close_stream(left)
        os.kill(pool.pid, signal.SIGKILL)
        outputs = []
        while not any(output.finish for output in outputs):
            outputs += await receive(both)
        (ended,) = (output for output in outputs if output.finish)
        assert (ended.index, ended.token, ended.finish) == (0, -1, "abort")
        await until(lambda: pool.ready and pool.stats.num_running)
        assert (pool.stats.num_running, pool.stats.num_waiting) == (1, 0)
        pool.close_stream(both)

    run(test)


def test_time_limits_continue_after_a_death():
    """They are not set back by the next engine."""

    async def test(pool):
        stream = ask(
            pool, "a", scheduling=("", Priority.NORMAL, 1.5), max_tokens=10**6, ignore_eos=True
        )
        begun = time.monotonic()
        await receive(stream)
        while not any(output.finish for output in await receive(stream)):
            if pool.num_restarts < 1 and time.monotonic() - begun > 0.7 and pool.ready:
                kill(pool)
                await until(lambda: not pool.ready)
        assert pool.num_restarts == 1
        assert time.monotonic() - begun < 1.5 + pool.members[0].supervisor._load_seconds + 1

    run(test)


def test_poison_gets_an_error_and_nobody_else(caplog):
    """One of 32 requests crashes the engine whenever it is computed; at most seven restarts."""
    params = msgspec.structs.replace(FAKE, max_num_seqs=32, check=False)

    async def test(pool):
        expected = await tokens(ask(pool, "calm", [1, 15], max_tokens=200, ignore_eos=True))
        streams = [
            ask(pool, f"r{i}", [i // 16, i % 16], max_tokens=200, ignore_eos=True)
            for i in range(32)
        ]
        poison = ask(pool, "poison", [77, 7], max_tokens=200, ignore_eos=True)
        for stream in streams:
            await receive(stream)
        pool.set_faults([InjectedFault("crash", token=77)])
        pool.close_stream(streams.pop())  # makes room for it
        with pytest.raises(FatalRequest, match="twice while it computed this request"):
            await tokens(poison)
        pool.close_stream(poison)
        rests = await asyncio.gather(*map(tokens, streams))
        assert len({len(rest) for rest in rests}) < 5
        assert rests[15] == expected[-len(rests[15]) :]
        assert 2 <= pool.num_restarts <= 7

    run(test, params=params)


def test_three_poisons_among_thirty_fail_alone(monkeypatch, caplog):
    """While they are searched for, pauses stay short, and new requests and texts only wait."""
    monkeypatch.setattr("cllm.process.supervisor.LONGEST_SEARCH_BACKOFF", 0.1)
    params = msgspec.structs.replace(FAKE, max_num_seqs=64)

    async def test(pool):
        pool.set_faults([InjectedFault("crash", token=77)])
        streams = [
            ask(pool, f"r{i}", [77 if i % 10 == 5 else 1, 20 + i], max_tokens=50, ignore_eos=True)
            for i in range(33)
        ]
        late = []
        for count in range(4):
            await until(lambda count=count: pool.num_restarts > count)
            late.append(ask(pool, f"late{count}", [1, count], max_tokens=3, ignore_eos=True))
            late.append(asyncio.create_task(pool.tokenize([[Segment(f"text {count}")]])))
        ends = await asyncio.gather(*map(tokens, streams), return_exceptions=True)
        for i, end in enumerate(ends):
            assert isinstance(end, FatalRequest) if i % 10 == 5 else len(end) == 50
        for one in late:
            assert await (one if isinstance(one, asyncio.Task) else tokens(one))
        # 10 if the first step has all requests; on a busy machine, some come later
        assert pool.num_restarts <= 12
        pauses = [
            record.args[-1]
            for record in caplog.records
            if record.getMessage().startswith("the engine died")
            and "requests in its step" in record.getMessage()
        ]
        assert max(pauses) <= 0.1

    run(test, params=params)


def test_suspects_that_leave_let_others_continue_once():
    """Of two suspects in groups, the first one leaves while the engine is being started, or its
    reader has stopped it. The second one then continues, and is sent to the engine once.
    """

    async def test(pool):
        expected = await tokens(ask(pool, "calm", [3], max_tokens=300, ignore_eos=True))
        for how in ("leaves", "stops"):
            first, second = (
                ask(pool, f"{name}-{how}", [token], max_tokens=300, ignore_eos=True)
                for name, token in (("first", 1), ("second", 3))
            )
            await receive(first)
            begun = await receive(second)
            names = [f"first-{how}", f"second-{how}"]
            for _ in range(2):
                pool.members[0]._suspects.record_death(names)
            pool.members[0]._has_suspects = True
            assert pool.members[0]._suspects.must_wait(f"second-{how}")
            os.kill(pool.pid, signal.SIGKILL)
            await until(lambda: not pool.ready)
            if how == "leaves":
                pool.close_stream(first)
            else:
                pool.stop(first, f"first-{how}", 0)
            rest = await tokens(second)
            assert [output.token for output in begun] + rest == expected
            pool.close_stream(first)
            pool.close_stream(second)
            assert not pool.members[0]._held
            assert pool.num_unfinished == 0

    run(test)


@contextlib.contextmanager
def texts_that_kill(monkeypatch, *poisons):
    """Let texts of these characters get no tokens, and kill the engine that got them."""
    put, send = Texts.put, Texts._send_to

    def put_unless_poison(texts, message):
        pending = texts.pending.get(message.number)
        if pending is None or pending.texts[0][0].text not in poisons:
            put(texts, message)

    def send_and_kill(texts, member):
        send(texts, member)
        for _, pending in texts._list_pending(member):
            if pending.is_sent and pending.texts[0][0].text in poisons and member.ready:
                os.kill(member.supervisor.pid, signal.SIGABRT)

    with monkeypatch.context() as patch:
        patch.setattr(Texts, "put", put_unless_poison)
        patch.setattr(Texts, "_send_to", send_and_kill)
        yield


def test_texts_that_kill_engines_get_an_error_and_others_their_tokens(monkeypatch):
    """Requests that are computed at the same time are not blamed, nor are other texts."""

    async def test(pool):
        stream = ask(pool, "a", [1], max_tokens=900, ignore_eos=True)
        await receive(stream)
        with texts_that_kill(monkeypatch, "x", "y"):
            asked = [pool.tokenize([[Segment(text)]]) for text in "axbcydef"]
            answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer) for answer in answers] == [
            EngineError if text in "xy" else list for text in "axbcydef"
        ]
        assert "while it tokenized this text" in str(answers[1])
        assert pool.num_restarts <= 5
        assert len(await tokens(stream)) > 100

    run(test)


def test_requests_get_an_error_if_no_engine_can_be_started(monkeypatch):
    """After several attempts."""
    monkeypatch.setattr("cllm.process.supervisor.LONGEST_BACKOFF", 0.01)

    async def test(pool):
        stream = ask(pool, "a", max_tokens=1000, ignore_eos=True)
        await receive(stream)
        with failing_starts(monkeypatch):
            os.kill(pool.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="cannot be started"):
                await tokens(stream)
        await until(lambda: pool.ready)
        pool.close_stream(stream)
        assert len(await tokens(ask(pool, "b", max_tokens=5, ignore_eos=True))) == 5

    run(test)


def test_new_requests_do_not_wait_for_suspects_that_got_an_error(monkeypatch):
    """Engines that cannot be started end a search for what kills them."""
    monkeypatch.setattr("cllm.process.supervisor.LONGEST_BACKOFF", 0.01)

    async def test(pool):
        streams = [ask(pool, name, max_tokens=900, ignore_eos=True) for name in ("a", "b")]
        for stream in streams:
            await receive(stream)
        for _ in range(2):
            pool.members[0]._suspects.record_death(["a", "b"])
        pool.members[0]._has_suspects = True
        with failing_starts(monkeypatch):
            os.kill(pool.pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineError, match="cannot be started"):
                    await tokens(stream)
        assert not pool.members[0].is_searching
        await until(lambda: pool.ready)
        assert len(await tokens(ask(pool, "c", max_tokens=5, ignore_eos=True))) == 5

    run(test)


def test_kills_from_outside_blame_nobody(monkeypatch):
    monkeypatch.setattr("cllm.process.supervisor.FIRST_BACKOFF", 0.01)

    async def test(pool):
        stream = ask(pool, "a", [1], max_tokens=3000, ignore_eos=True)
        for _ in range(5):
            await receive(stream)
            await until(lambda: pool.ready)
            kill(pool)
        assert len(await tokens(stream)) > 900
        assert pool.num_restarts == 5

    run(test)


def notice_hangs_within(monkeypatch, seconds):
    monkeypatch.setattr("cllm.process.liveness.HANG_SECONDS", seconds)
    for module in ("liveness", "supervisor"):
        monkeypatch.setattr(f"cllm.process.{module}.WATCH_SECONDS", 0.1)


def test_hung_engine_is_replaced(monkeypatch):
    """Its streams continue. An engine that has nothing to do does not hang."""
    notice_hangs_within(monkeypatch, 1.0)

    async def test(pool):
        first = pool.pid
        await asyncio.sleep(1.5)
        stream = ask(pool, "a", [1], max_tokens=400, ignore_eos=True)
        await receive(stream)
        assert pool.pid == first
        pool.set_faults([InjectedFault("hang")])
        assert len(await tokens(stream)) > 300
        assert pool.num_restarts == 1
        stream = ask(pool, "b", [1], max_tokens=400, ignore_eos=True)
        await receive(stream)
        os.kill(pool.pid, signal.SIGSTOP)
        assert len(await tokens(stream)) > 300
        assert pool.num_restarts == 2

    run(test)


async def embed(pool):
    waiter = pool.embed(EmbeddingRequest("e", [[1, 2]]))
    assert len(await waiter.done) == 1
    pool.forget(waiter)


async def tokenize(pool):
    assert len(await pool.tokenize([[Segment("abc")]])) == 1


async def explain(pool):
    """Nothing is known about the engine that was stopped."""
    with pytest.raises(EngineError, match="please retry"):
        await pool.explain(1)


async def load_adapter(pool):
    with pytest.raises(EngineError, match="please retry"):
        await pool.load_adapter("one", "one.gguf")


async def set_weights(pool):
    """Nobody waits for an answer."""
    pid = pool.pid
    pool.set_weights({"a": len(pool.params.weights) + 2.0})
    await until(lambda: pool.pid != pid and pool.ready)


@pytest.mark.parametrize("send", [tokenize, embed, explain, load_adapter, set_weights])
def test_engine_stopped_while_idle_is_replaced(monkeypatch, send):
    """As soon as it does not read what it is sent. It is no request's fault."""
    notice_hangs_within(monkeypatch, 1.0)

    async def test(pool):
        pid = pool.pid
        await pool.explain(1)  # it has read all that it was sent at its start
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        assert pool.pid == pid, "nothing was sent"
        await send(pool)
        await until(lambda: pool.pid != pid and pool.ready)
        pid = pool.pid
        os.kill(pid, signal.SIGSTOP)
        assert len(await tokens(ask(pool, "a", [1], max_tokens=5, ignore_eos=True))) == 5
        assert pool.pid != pid

    run(test)


def test_request_is_not_blamed_for_engines_that_were_stopped(monkeypatch):
    notice_hangs_within(monkeypatch, 1.0)

    async def test(pool):
        stream = ask(pool, "a", [1], max_tokens=900, ignore_eos=True)
        for _ in range(3):
            await receive(stream)
            await until(lambda: pool.ready)
            os.kill(pool.pid, signal.SIGSTOP)
            await until(lambda: not pool.ready)
        assert len(await tokens(stream)) > 300

    run(test)


def test_stopped_api_process_blames_no_engine(monkeypatch):
    """Nor does it if all processes were stopped, and the engine continues last."""
    notice_hangs_within(monkeypatch, 5.0)

    async def test(pool):
        pid = pool.pid
        stream = ask(pool, "a", [1], max_tokens=900, ignore_eos=True)
        await receive(stream)
        for stops_all in (False, True):
            if stops_all:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(6)  # noqa: ASYNC251 - like a stopped process, it looks at nothing
            await asyncio.sleep(0.3)
            assert pool.pid == pid
            if stops_all:
                os.kill(pid, signal.SIGCONT)
        assert len(await tokens(stream)) > 300
        assert pool.pid == pid

    run(test)


def test_engine_stopped_while_loading_is_replaced(monkeypatch):
    """A restart, long before its time is over."""
    notice_hangs_within(monkeypatch, 1.0)
    signals = [signal.SIGSTOP]
    loaded = EngineProcess.data_received

    def stop_first(process, data):
        if signals and process.num_sent and not pools[0].ready:
            os.kill(process.pid, signals.pop())
            return  # it was stopped before it wrote this
        loaded(process, data)

    pools = []

    async def test(pool):
        pools.append(pool)
        monkeypatch.setattr(EngineProcess, "data_received", stop_first)
        stream = ask(pool, "a", [1], max_tokens=400, ignore_eos=True)
        await receive(stream)
        kill(pool)
        assert len(await tokens(stream)) > 300
        assert not signals

    run(test)


def test_slow_step_is_not_a_hang(monkeypatch):
    """The engine expects its duration."""
    notice_hangs_within(monkeypatch, 0.3)

    async def test(pool):
        pool.set_faults([InjectedFault("slow", num_steps=30, seconds=0.1)])
        assert len(await tokens(ask(pool, "a", max_tokens=30, ignore_eos=True))) == 30
        pool.set_faults([InjectedFault("slow", seconds=0.6)])
        assert len(await tokens(ask(pool, "b", [1], max_tokens=9, ignore_eos=True))) == 9
        assert pool.num_restarts == 0

    run(test)


def test_restart_needs_the_memory_that_the_engine_took_before(monkeypatch):
    """It comes once that is available, whatever the estimates for a first start say."""
    monkeypatch.setattr("cllm.process.supervisor.LONGEST_BACKOFF", 0.1)
    sizes = {"weight_bytes": 100 << 20, "kv_bytes_per_token": 1000}
    params = msgspec.structs.replace(FAKE, **sizes)

    async def test(pool):
        supervisor = pool.members[0].supervisor
        num_bytes = pool.num_bytes
        assert num_bytes > 400 << 20
        took = supervisor._restart_params.resident_bytes
        assert 10 << 20 < took < 200 << 20
        too_much = msgspec.structs.replace(supervisor._restart_params, resident_bytes=1 << 60)
        supervisor._restart_params, fits = too_much, supervisor._restart_params
        stream = ask(pool, "a", [1], max_tokens=200, ignore_eos=True)
        await receive(stream)
        kill(pool)
        await until(lambda: supervisor.num_failed > 1)
        supervisor._restart_params = fits
        assert len(await tokens(stream)) > 100
        assert pool.num_bytes == num_bytes
        assert supervisor._restart_params.kv_memory == fits.kv_memory > 0

    run(test, params=params)


def test_embeddings_continue_in_the_next_engine():
    async def test(pool):
        request = EmbeddingRequest("e", [[i + 1] * 600 for i in range(40)])
        expected = await pool.embed(EmbeddingRequest("calm", request.texts)).done
        waiter = pool.embed(request)
        await waiter.started
        os.kill(pool.pid, signal.SIGKILL)
        assert await waiter.done == expected
        pool.forget(waiter)
        assert pool.num_restarts == 1

    run(test)


def test_without_an_engine_that_starts_requests_are_rejected(monkeypatch):
    """Until then they wait for it. Retry-After is the rest of the pause plus the load time."""
    monkeypatch.setattr("cllm.process.supervisor.FIRST_BACKOFF", 3.0)

    async def test(pool):
        pool.members[0].supervisor._load_seconds = 12.0
        stream = ask(pool, "a", max_tokens=1000, ignore_eos=True)
        await receive(stream)
        with failing_starts(monkeypatch):
            os.kill(pool.pid, signal.SIGKILL)
            await until(lambda: pool.members[0].supervisor.num_failed)
            with pytest.raises(EngineError, match="not ready") as refused:
                ask(pool, "b")
            assert 12.0 < refused.value.retry_after <= 15.0
        pool.close_stream(stream)

    run(test)


def test_counters_survive_restart():
    """The metrics never fall, and continue from their values while there is no engine and with the
    next one.
    """

    def counted(metrics, pool):
        totals = {
            "num_restarts": pool.num_restarts,
            "reservations": pool.backlog.reservations.counts,
        }
        page = render([metrics.update(pool.stats_since_start, ready=pool.ready, **totals)]).decode()
        lines = [line for line in page.splitlines() if line.startswith("cllm:")]
        values = {
            line[len("cllm:") : line.index("{")]: float(line.rpartition(" ")[2]) for line in lines
        }
        return [
            values[f"{name}_total"]
            for name in ("engine_steps", "prefill_tokens_computed", "engine_restarts")
        ]

    async def test(pool):
        metrics, watched, late = Metrics("m"), [], Metrics("m")
        for _ in range(3):
            await tokens(ask(pool, "a", range(50), max_tokens=4))
            watched.append(counted(metrics, pool))
            os.kill(pool.pid, signal.SIGKILL)
            await until(lambda: not pool.ready)
            watched.append(counted(metrics, pool))
            await until(lambda: pool.ready)
        assert watched == [
            [4, 50, 0],
            [4, 50, 0],
            [8, 100, 1],
            [8, 100, 1],
            [12, 150, 2],
            [12, 150, 2],
        ]
        assert pool.stats.num_steps == 0
        assert counted(late, pool) == [12, 150, 3], "also if the metrics were never read before"

    run(test)


def test_backoff_grows_until_engine_has_served_for_a_minute(monkeypatch, caplog):
    """The first restart is immediate."""
    monkeypatch.setattr("cllm.process.supervisor.FIRST_BACKOFF", 0.1)
    now = [1000.0]

    async def test(pool):
        stream = ask(pool, "a", max_tokens=10**6, ignore_eos=True)
        for seconds_of_service in (59.0, 59.0, 59.0, 60.0):
            await receive(stream)
            now[0] += seconds_of_service
            os.kill(pool.pid, signal.SIGKILL)
            await until(lambda: not pool.ready)
            await until(lambda: pool.ready)
        pool.close_stream(stream)
        pauses = [
            record.args[-1]
            for record in caplog.records
            if record.getMessage().startswith("the engine died")
        ]
        assert pauses == [0.0, 0.1, 0.2, 0.0]

    run(test, clock=lambda: now[0])


def test_failed_load_raises_startup_error(tmp_path):
    """The child reports the reason and has ended."""

    async def main():
        pool = Pool(EngineParams(path=str(tmp_path / "missing.gguf")))
        with pytest.raises(StartupError):
            await pool.start()
        assert pool.members[0].supervisor.process.ended.is_set()
        await pool.close()

    pytest.importorskip("llama_cpp")
    asyncio.run(main())


def test_death_while_loading_names_file_and_signal():
    """A damaged file is the likely cause."""

    code = "import os, signal, sys; sys.stdin.buffer.read(1); os.kill(os.getpid(), signal.SIGSEGV)"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    launched = subprocess.Popen([sys.executable, "-c", code], bufsize=0, **pipes)

    async def main():
        pool = Pool(EngineParams(path="m.gguf"), specs=make_specs(launched=launched))
        with pytest.raises(
            StartupError, match=r"died \(SIGSEGV\) while loading m\.gguf: the file may be damaged"
        ):
            await pool.start()
        await pool.close()

    asyncio.run(main())


def test_request_for_an_unloaded_engine_waits_for_the_next_one():
    """It is reported, and answered once the engine has been started again. Totals go on."""
    wanted = []

    async def test(pool):
        pool.on_wanted = lambda: wanted.append(1)
        assert await tokens(ask(pool, "before", range(50), max_tokens=2)) == [50, 51]
        pid = pool.pid
        await pool.unload()
        assert not pool.ready
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert wanted == []
        stream = ask(pool, "after", range(60, 80), max_tokens=3)
        text = asyncio.create_task(pool.tokenize([[]]))
        await asyncio.sleep(0)
        assert len(wanted) == 2
        await pool.start()
        assert await tokens(stream) == [80, 81, 82]
        assert await text == [[]]
        assert pool.pid != pid
        assert pool.stats_since_start.num_prefill_tokens == 50 + 20
        assert pool.num_restarts == 0

    run(test)


def test_request_that_arrives_while_the_engine_is_unloaded_calls_for_the_next_one():
    wanted = []

    async def test(pool):
        pool.on_wanted = lambda: wanted.append(1)
        unloading = asyncio.create_task(pool.unload())
        await asyncio.sleep(0)  # as few turns of the loop as there can be
        stream = ask(pool, "meanwhile", range(60, 80), max_tokens=2)
        assert wanted == [1]
        await unloading
        await pool.start()
        assert await tokens(stream) == [80, 81]

    run(test)


def test_explanation_wanted_while_the_engine_is_unloaded_gets_an_error():
    async def test(pool):
        stop_process(pool.pid)  # it answers nothing any more
        unloading = asyncio.create_task(pool.unload())
        explaining = asyncio.create_task(pool.explain(1))  # before the engine is told to end
        await unloading
        with pytest.raises(EngineError, match="please retry"):
            await asyncio.wait_for(explaining, 1)

    run(test)


def test_running_stream_continues_after_the_engine_was_unloaded():
    async def test(pool):
        stream = ask(pool, "long", [1], max_tokens=14, ignore_eos=True)
        outputs = await receive(stream)
        await pool.unload()
        explanation = asyncio.create_task(pool.explain(1))
        await pool.start()
        while not outputs[-1].finish:
            outputs += await receive(stream)
        assert [output.token for output in outputs] == [*range(2, 16)]
        with pytest.raises(EngineError):
            await explanation

    run(test)


def test_unloaded_engine_can_be_closed_and_accepts_nothing_then():
    async def test(pool):
        await pool.unload()
        await pool.unload()
        assert pool.seconds_until_ready() >= 1
        await pool.close()
        with pytest.raises(EngineError):
            ask(pool, "late")

    run(test)
