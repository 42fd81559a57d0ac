"""A pool with several real engine processes, on the fake backend."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections import Counter

import msgspec
import pytest
from conftest import PATIENCE, repeat

from cllm.backends.params import SingleGpu
from cllm.core.output import Stats, combine_stats
from cllm.core.params import SamplingParams, ThinkingBudget
from cllm.core.request import EmbeddingRequest, Priority, Request
from cllm.core.segments import Segment
from cllm.engine.commands import InjectedFault
from cllm.engine.params import EngineParams
from cllm.errors import EngineError, FatalRequest, StartupError
from cllm.process import places
from cllm.process.launch import ANYWHERE, Place, make_specs
from cllm.process.places import find_places
from cllm.process.pool import Pool
from cllm.process.results import ResultCache

pytestmark = pytest.mark.slow  # each starts processes

END = 256
PARAMS = EngineParams(backend="fake", max_num_seqs=2, max_num_batched_tokens=64, check=True)


def run(test, count, params=PARAMS, **more):
    """Run ``test(pool)`` with ``count`` started engines, and end them."""

    async def main():
        pool = Pool(params, specs=make_specs([ANYWHERE] * count), **more)
        await pool.start()
        try:
            await asyncio.wait_for(test(pool), PATIENCE)
        finally:
            await pool.close()
        assert all(member.supervisor.process.ended.is_set() for member in pool.members)
        assert not any(member.bookings for member in pool.members)

    asyncio.run(main())


def ask(pool, name, prompt, account="", count=20, **params):
    """Submit a request of ``count`` tokens, which no other one equals."""
    return submit(pool, name, prompt, account=account, count=count, **params)


def submit(pool, name, prompt, *, account="", priority=Priority.NORMAL, count=20, **params):
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params)
    return pool.submit([Request(name, [*prompt], sampling, account, priority)])


async def read(pool, stream):
    """Return the tokens of a stream."""
    tokens, unfinished = [], True
    while unfinished:
        await stream.arrival()
        for output in stream.take():
            tokens += [output.token] if output.token >= 0 else []
            unfinished = not output.finish
    pool.close_stream(stream)
    return tokens


def count_on(last, count):
    """Return what the fake model says after a prompt that ends with ``last``: it counts, and wants
    to end after 16 tokens.
    """
    tokens = [last]
    for i in range(count):
        tokens.append(END if i == 16 else (tokens[-1] + 1) % 256)
    return tokens[1:]


def find_number(pool, name):
    return pool._assignments.find(name).number


async def until(condition):
    while not condition():  # noqa: ASYNC110  # there is no event to await
        await asyncio.sleep(0.005)


def test_engines_share_the_requests():
    """Each engine gets its part, and every answer is right."""

    async def test(pool):
        streams = [ask(pool, f"r{i}", [i, i + 1]) for i in range(16)]
        homes = Counter(find_number(pool, f"r{i}") for i in range(16))
        assert all(homes[number] >= 2 for number in range(4))
        answers = await asyncio.gather(*(read(pool, stream) for stream in streams))
        assert answers == [count_on(i + 1, 20) for i in range(16)]
        assert pool.stats.num_seq_ids == 8
        assert pool.num_unfinished == 0

    run(test, 4)


def test_prompts_go_to_the_engine_that_knows_their_beginning():
    """Requests that share a long beginning are computed by one engine while it has room."""

    async def test(pool):
        shared = [[topic] * 192 for topic in range(6)]
        homes = {}
        for turn in range(3):
            for topic, prompt in enumerate(shared):
                name = f"{topic}-{turn}"
                stream = ask(pool, name, [*prompt, turn], count=2)
                home = find_number(pool, name)
                assert homes.setdefault(topic, home) == home
                assert await read(pool, stream) == count_on(turn, 2)
        # two engines compute as little as one would: six beginnings once
        assert pool.stats_since_start.num_prefill_tokens < 6 * 193 + 12 * 70

    run(test, 2, msgspec.structs.replace(PARAMS, max_num_seqs=8))


def test_no_request_waits_while_another_engine_has_room():
    """Requests that wait for a busy engine go to one that has become idle."""

    async def test(pool):
        long = ask(pool, "long", [1, 1], count=900)
        await long.arrival()
        others = [ask(pool, f"other{i}", [3, i], count=3) for i in range(12)]
        assert len({find_number(pool, f"other{i}") for i in range(12)}) == 2
        for i, stream in enumerate(others):
            assert await read(pool, stream) == count_on(i, 3)
        assert not long.take()[-1].finish
        pool.close_stream(long)

    run(test, 2, msgspec.structs.replace(PARAMS, max_num_seqs=1))


def test_places_are_counted_by_sequences():
    """A request with several sequences does not leave room for another one."""

    async def test(pool):
        both = ask(pool, "both", [1, 1], count=900, n=2)
        await both.arrival()
        home = find_number(pool, "both")
        others = [ask(pool, f"other{i}", [3, i], count=3) for i in range(6)]
        for i, stream in enumerate(others):
            assert await read(pool, stream) == count_on(i, 3)
        assert not any(output.finish for output in both.take())
        assert pool.members[home].stats.num_waiting == 0
        pool.close_stream(both)

    run(test, 2)


def test_classes_hold_for_all_engines():
    """Interactive requests do not wait for one engine while another one begins batch requests."""

    async def test(pool):
        shared = [*range(64)]
        running = [ask(pool, f"r{i}", [200, i], count=100) for i in range(2)]
        for stream in running:
            await stream.arrival()
        batch = [
            submit(pool, f"b{i}", [*shared, i], priority=Priority.BATCH, count=60)
            for i in range(12)
        ]
        urgent = [
            submit(pool, f"u{i}", [*shared, 99, i], priority=Priority.INTERACTIVE, count=10)
            for i in range(8)
        ]
        for i, stream in enumerate(urgent):
            assert await read(pool, stream) == count_on(i, 10)
        assert sum(bool(stream._outputs) for stream in batch) <= 2
        for stream in (*running, *batch):
            pool.close_stream(stream)

    run(test, 2, msgspec.structs.replace(PARAMS, max_num_seqs=1, context_length=512))


def test_embeddings_take_no_places():
    async def test(pool):
        texts = [[[i, j] for j in range(50)] for i in range(4)]
        waiters = [pool.embed(EmbeddingRequest(f"e{i}", each)) for i, each in enumerate(texts)]
        assert [member.num_seqs for member in pool.members] == [[0, 0, 0]] * 2
        streams = [ask(pool, f"r{i}", [i], count=30) for i in range(4)]
        assert sorted(find_number(pool, f"r{i}") for i in range(4)) == [0, 0, 1, 1]
        for i, stream in enumerate(streams):
            assert await read(pool, stream) == count_on(i, 30)
        for waiter in waiters:
            assert len(await waiter.done) == 50
            pool.forget(waiter)

    run(test, 2)


def test_engine_survives_an_explanation_that_nobody_waits_for():
    """As when the server shuts down."""

    async def test(pool):
        asking = [asyncio.create_task(pool.explain(1, number)) for number in range(2)]
        await asyncio.sleep(0)
        pool.end_all(EngineError("the server shuts down"))
        for task in asking:
            with pytest.raises(EngineError, match="shuts down"):
                await task
        assert await read(pool, ask(pool, "a", [5], count=3)) == count_on(5, 3)
        assert (await pool.explain(1)).running == []
        assert pool.num_restarts == 0

    run(test, 2)


def test_requests_that_wait_for_a_hung_engine_block_no_others():
    """The idle engine takes over what waits for a healthy one, although the hung one has not
    answered.
    """

    async def test(pool):
        long = [ask(pool, f"long{i}", [i], count=900) for i in range(3)]
        for stream in long:
            await stream.arrival()
        homes = {find_number(pool, f"long{i}"): stream for i, stream in enumerate(long)}
        others = [ask(pool, f"w{i}", [50, i], count=3) for i in range(6)]
        await asyncio.sleep(0.1)
        hung = pool.members[0]
        os.kill(hung.supervisor.pid, signal.SIGSTOP)
        pool.close_stream(homes[1])  # that engine becomes idle
        waiting = [stream for i, stream in enumerate(others) if find_number(pool, f"w{i}") != 0]
        for stream in waiting:
            assert len(await asyncio.wait_for(read(pool, stream), 20)) == 3
        os.kill(hung.supervisor.pid, signal.SIGCONT)
        for stream in others:
            if stream not in waiting:
                assert len(await read(pool, stream)) == 3
        for number in (0, 2):
            pool.close_stream(homes[number])
        await until(lambda: not pool._balancer._moves)
        assert [member.num_seqs for member in pool.members] == [[0, 0, 0]] * 3

    run(test, 3, msgspec.structs.replace(PARAMS, max_num_seqs=1))


def test_adapters_are_loaded_into_all_engines_and_the_next_ones(tmp_path):
    async def test(pool):
        path = tmp_path / "a.gguf"
        path.write_text("an adapter")
        assert await pool.load_adapter("a", str(path)) == ""
        assert "no file" in await pool.load_adapter("b", str(tmp_path / "missing"))
        assert [*pool.more_adapters] == ["a"]
        path.unlink()
        for member in pool.members:  # the next engines start without the file
            os.kill(member.supervisor.pid, signal.SIGKILL)
        await until(lambda: not pool.ready)
        with pytest.raises(EngineError, match="not ready"):
            await pool.load_adapter("c", str(path))
        await until(lambda: all(member.ready for member in pool.members))
        assert await read(pool, ask(pool, "r", [5], count=3)) == count_on(5, 3)

    run(test, 2)


def test_requests_that_move_are_delivered_once():
    """Those that wait for a stopped engine, and are withdrawn when it goes on."""

    async def test(pool):
        first, second = pool.members
        os.kill(second.supervisor.pid, signal.SIGSTOP)
        streams = [ask(pool, f"r{i}", [7, i], count=60) for i in range(12)]
        os.kill(second.supervisor.pid, signal.SIGCONT)
        answers = await asyncio.gather(*(read(pool, stream) for stream in streams))
        assert answers == [count_on(i, 60) for i in range(12)]
        assert not pool._balancer._moves
        assert first.num_seqs == second.num_seqs == [0, 0, 0]

    run(test, 2)


@pytest.mark.parametrize("num_after", [0, 1, 2, 5])
def test_next_engine_ends_the_reasoning(num_after):
    """The first one is killed when it was asked to, or has written a part of the forced tokens."""
    force = (200, 201, 202, 203, 100)
    budget = ThinkingBudget(None, (7,), 203, force, inside=True, ends_on_request=True)

    async def test(pool):
        stream = ask(pool, "a", [1], count=100, thinking=budget)
        tokens = []

        async def read_more(count):
            while len(tokens) < count:
                await stream.arrival()
                tokens.extend(output.token for output in stream.take())

        await read_more(20)
        pool.end_reasoning("a")
        while num_after and 200 not in tokens:
            await read_more(len(tokens) + 1)
        await read_more(len(tokens) + num_after)
        os.kill(pool._assignments.find("a").supervisor.pid, signal.SIGKILL)
        tokens += await read(pool, stream)
        assert tokens.count(200) == 1
        same = msgspec.structs.replace(budget, num_tokens=tokens.index(200))
        assert tokens == await read(pool, ask(pool, "b", [1], count=100, thinking=same))

    run(test, 2)


@pytest.mark.parametrize("seed", range(repeat(3, 1)))
def test_killed_engine_loses_nothing(seed):
    """Of four engines one dies after the other; all answers are right and complete, and the
    streams of a killed engine continue in the others at once.
    """
    rng = random.Random(seed)

    async def test(pool):
        streams = [ask(pool, f"r{i}", [9, i], count=150) for i in range(24)]
        reading = asyncio.gather(*(read(pool, stream) for stream in streams))
        vectors = [pool.embed(EmbeddingRequest(f"e{i}", [[1, i, 3]])) for i in range(4)]
        texts = [asyncio.create_task(pool.tokenize([[Segment(f"word {i}")]])) for i in range(4)]
        for _ in range(4):
            await asyncio.sleep(rng.uniform(0, 0.1))
            ready = [member for member in pool.members if member.ready]
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(ready).supervisor.pid, signal.SIGKILL)
        assert await reading == [count_on(i, 150) for i in range(24)]
        assert len(await asyncio.gather(*texts)) == 4
        for waiter in vectors:
            assert len(await waiter.done) == 1
            pool.forget(waiter)
        await until(lambda: pool.num_restarts >= 1 and all(m.ready for m in pool.members))
        assert pool.num_unfinished == 0

    run(test, 4)


def test_streams_do_not_wait_for_the_restart():
    """A stream of a killed engine continues before that engine is ready again."""

    async def test(pool):
        stream = ask(pool, "a", [5], count=300)
        await stream.arrival()
        home = pool._assignments.find("a")
        os.kill(home.supervisor.pid, signal.SIGKILL)
        await until(lambda: not home.ready)
        assert find_number(pool, "a") != home.number
        got = len(stream.take())
        await stream.arrival()
        assert not home.ready
        assert got + len(await read(pool, stream)) <= 300

    run(test, 2)


def test_poison_stays_with_its_engine():
    """A request that kills engines kills one of them, twice, and gets an error. The other engine,
    and the requests that it computes, are not disturbed.
    """

    async def test(pool):
        pool.set_faults([InjectedFault("crash", token=77)])
        others = [ask(pool, f"r{i}", [100 + i], count=60) for i in range(3)]
        for stream in others:
            await stream.arrival()
        poison = ask(pool, "poison", [77], count=5)
        home = find_number(pool, "poison")
        with pytest.raises(FatalRequest):
            await read(pool, poison)
        pool.close_stream(poison)
        for i, stream in enumerate(others):
            tokens = await read(pool, stream)
            assert tokens == count_on(100 + i, 60)[-len(tokens) :]
        assert pool.members[home].supervisor.num_restarts <= 4
        assert pool.members[1 - home].supervisor.num_restarts == 0

    run(test, 2)


def test_engine_that_cannot_be_restarted_fails_its_suspects_only(monkeypatch):
    monkeypatch.setattr("cllm.process.supervisor.LONGEST_BACKOFF", 0.01)
    monkeypatch.setattr("cllm.process.supervisor.FIRST_BACKOFF", 0.01)

    def fail(*_):
        raise StartupError("no memory")

    async def test(pool):
        good = ask(pool, "good", [6], count=900)
        await good.arrival()
        monkeypatch.setattr("cllm.process.supervisor.spawn", fail)
        pool.set_faults([InjectedFault("crash", token=77)])
        bad = ask(pool, "bad", [77], count=900)
        assert find_number(pool, "bad") != find_number(pool, "good")
        with pytest.raises(EngineError, match="cannot be started"):
            await read(pool, bad)
        pool.close_stream(bad)
        later = ask(pool, "later", [7], count=3)
        assert await read(pool, later) == count_on(7, 3)
        assert (await read(pool, good))[-1] == count_on(6, 900)[-1]

    run(test, 2)


def test_unloaded_engines_leave_their_requests_to_the_next_ones():
    async def test(pool):
        streams = [ask(pool, f"r{i}", [i], count=200) for i in range(4)]
        await streams[0].arrival()
        await pool.unload()
        assert pool.unloaded
        assert not pool.ready
        streams.append(ask(pool, "late", [50], count=200))
        await pool.start()
        last = [0, 1, 2, 3, 50]
        for i, stream in enumerate(streams):
            tokens = await read(pool, stream)
            assert tokens == count_on(last[i], 200)[-len(tokens) :]
        await until(lambda: all(member.ready for member in pool.members))

    run(test, 2)


def test_failed_start_ends_all_engines(tmp_path):
    async def main():
        params = EngineParams(path=str(tmp_path / "missing.gguf"))
        pool = Pool(params, specs=make_specs([ANYWHERE] * 2))
        with pytest.raises(StartupError):
            await pool.start()
        assert all(member.supervisor.process.ended.is_set() for member in pool.members)
        await pool.close()

    asyncio.run(main())


def test_equal_requests_are_computed_once_by_all_engines():
    """The result cache and shared computations belong to the pool."""

    async def test(pool):
        sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        streams = [pool.submit([Request(f"r{i}", [4, 4], sampling)]) for i in range(6)]
        answers = [await read(pool, stream) for stream in streams]
        assert answers == [count_on(4, 30)] * 6
        assert await read(pool, pool.submit([Request("again", [4, 4], sampling)])) == answers[0]
        assert pool.stats_since_start.num_prefill_tokens == 2

    run(test, 3, results=ResultCache(10, 1 << 20))


def test_accounts_share_all_engines():
    """An account with many requests does not keep another one waiting."""

    async def test(pool):
        crowd = [ask(pool, f"crowd{i}", [1, i % 200], "crowd", 100) for i in range(60)]
        for stream in crowd[:4]:
            await stream.arrival()
        alone = [ask(pool, f"alone{i}", [2, i], "alone", 5) for i in range(4)]
        for i, stream in enumerate(alone):
            assert await read(pool, stream) == count_on(i, 5)
        waiting = sum(1 for stream in crowd if not stream._outputs)
        assert waiting > 30
        for stream in crowd:
            pool.close_stream(stream)

    run(test, 2)


def test_each_engine_can_explain_itself():
    async def test(pool):
        streams = [ask(pool, f"r{i}", [i], count=900) for i in range(2)]
        for stream in streams:
            await stream.arrival()
        explained = [await pool.explain(1, number) for number in range(2)]
        assert sorted(len(one.running) for one in explained) == [1, 1]
        with pytest.raises(IndexError):
            await pool.explain(1, 2)
        for stream in streams:
            pool.close_stream(stream)

    run(test, 2)


def test_statistics_of_several_engines_are_those_of_a_larger_one():
    first = Stats(num_running=2, num_seq_ids=4, num_steps=10, step_seconds=0.1, slot_seconds=1.0)
    second = Stats(num_running=3, num_seq_ids=4, num_steps=20, step_seconds=0.3, slot_seconds=1.0)
    both = combine_stats([first, second])
    assert (both.num_running, both.num_seq_ids, both.num_steps) == (5, 8, 30)
    assert both.step_seconds == pytest.approx(0.2)
    assert both.slot_seconds == pytest.approx(0.5)
    assert combine_stats([first]) is first


# --- places --------------------------------------------------------------------------------------


def test_engines_divide_the_cores(monkeypatch):
    """The threads of a core, and the cores of a NUMA node, stay together."""
    cores = [(0, [0, 8]), (0, [1, 9]), (1, [2, 10]), (1, [3, 11])]
    monkeypatch.setattr(places, "list_cores", lambda: cores)
    params = EngineParams()
    assert find_places(params, 2) == [Place((0, 8, 1, 9)), Place((2, 10, 3, 11))]
    assert find_places(params, None) == find_places(params, 2)  # one for each node
    assert find_places(params, 3)[0] == Place((0, 8))
    assert find_places(params, 1) == [ANYWHERE]
    assert find_places(params, 5) == [ANYWHERE] * 5  # more than cores
    fixed = EngineParams(options={"n_threads": 4})
    assert find_places(fixed, None) == [ANYWHERE]
    assert find_places(EngineParams(backend="fake"), None) == [ANYWHERE]


def test_each_gpu_gets_an_engine_if_it_can_hold_the_model(monkeypatch):
    gpus = [SingleGpu("CUDA_VISIBLE_DEVICES", name, 10_000_000_000) for name in ("3", "5")]
    loader = "cllm.backends.llama_cpp.loader"
    monkeypatch.setattr(f"{loader}.has_gpu_library", lambda: True)
    monkeypatch.setattr(
        f"{loader}.ask_for_gpus", lambda: [("CUDA0", 10_000_000_000), ("CUDA1", 10_000_000_000)]
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    both = [Place(variables={gpu.variable: gpu.value}) for gpu in gpus]
    assert find_places(EngineParams(weight_bytes=5_000_000_000), None) == both
    assert find_places(EngineParams(weight_bytes=12_000_000_000), None) == [ANYWHERE]
    assert find_places(EngineParams(weight_bytes=12_000_000_000), 2) == both
    with pytest.raises(StartupError, match="only 2 GPUs"):
        find_places(EngineParams(weight_bytes=1), 4)
    chosen = EngineParams(weight_bytes=1, options={"devices": "CUDA1"})
    assert find_places(chosen, None) == [ANYWHERE]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [place.variables for place in find_places(EngineParams(weight_bytes=1), None)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can bind processes to CPUs")
def test_an_engine_stays_at_its_place():
    cpu = min(os.sched_getaffinity(0))
    place = Place((cpu,), {"CUDA_VISIBLE_DEVICES": "7"})

    async def main():
        pool = Pool(PARAMS, specs=make_specs([place, ANYWHERE]))
        await pool.start()
        pid = pool.members[0].supervisor.pid
        assert os.sched_getaffinity(pid) == {cpu}
        with open(f"/proc/{pid}/environ") as file:  # noqa: ASYNC230, PTH123
            assert "CUDA_VISIBLE_DEVICES=7" in file.read().split("\0")
        await pool.close()

    asyncio.run(main())
