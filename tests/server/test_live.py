"""The stream of snapshots at /live/events, on the fake backend."""

import asyncio
import contextlib
import json
import threading
import time
from types import SimpleNamespace

import httpx2
import msgspec
import preloaded
import pytest
from conftest import PATIENCE
from fake_engines import FakeMember, ask

from cllm.core.output import SequenceTimes
from cllm.core.request import Priority
from cllm.engine.commands import Explained
from cllm.observe.request_record import RequestRecord
from cllm.process.backlog import QueuePosition
from cllm.process.in_flight_request import InFlightRequest
from cllm.process.messages import LENGTH, frame
from cllm.process.queue_load import QueueLoad
from cllm.scheduler.report import explain
from cllm.scheduler.trace import Explanation
from cllm.server.live import watching
from cllm.server.live.last_minute import LastMinute
from cllm.server.live.schema import Latencies
from cllm.server.live.snapshot import (
    IN_STEP,
    LOADING,
    MAX_PROMPT,
    RESTARTING,
    Snapshots,
    list_sequences,
    list_waiting,
)
from cllm.server.live.watching import LiveView

ENDLESS = {"max_tokens": 30_000, "ignore_eos": True, "temperature": 0}
SECRET = "a text that must not be shown"


@contextlib.contextmanager
def snapshots(server, **headers):
    """Yield a function that returns the next snapshot."""
    with server.client.stream("GET", "/live/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()

        def read():
            line = next(line for line in lines if line)
            return json.loads(line.removeprefix("data: "))

        yield read


def sequences(snapshot):
    return [
        one
        for model in snapshot["models"]
        for engine in model["engines"]
        for one in engine["sequences"]
    ]


@contextlib.contextmanager
def requests(server, count, **body):
    """Let ``count`` requests be computed, or wait, meanwhile."""
    with contextlib.ExitStack() as stack:
        for number in range(count):
            own = {"prompt": f"{number} {SECRET}", "stream": True, "user": f"u{number}", **ENDLESS}
            client = stack.enter_context(httpx2.Client(base_url=server.url, timeout=PATIENCE))
            stream = client.stream("POST", "/v1/completions", json=own | body)
            stack.enter_context(stream)
        yield


def find(read, condition):
    """Return the next snapshot that meets a condition."""
    for _ in range(500):
        if condition(snapshot := read()):
            return snapshot
    raise AssertionError(snapshot)


def count(snapshot, *phases):
    return sum(one["phase"] in phases for one in sequences(snapshot))


@pytest.mark.slow
def test_snapshot_says_what_runs_and_why_others_wait(new_narrow_server):
    with snapshots(new_narrow_server) as read:
        assert sequences(read()) == []
        with requests(new_narrow_server, 6):
            seen = find(read, lambda one: (count(one, "decode"), count(one, "queued")) == (4, 2))
            waiting = [one for one in sequences(seen) if one["phase"] == "queued"]
            reasons = sorted(one["reason"] for one in waiting)
            assert reasons[0] == "all 4 places are in use (scheduler.max_num_seqs)"
            assert reasons[1].endswith(f", the head of the queue ({reasons[0]})")
            running = [one for one in sequences(seen) if one["phase"] == "decode"]
            assert all(one["num_prompt_tokens"] == 2 + len(SECRET) for one in running)
            (model,) = seen["models"]
            assert {one["key"] for one in sequences(seen)} == {f"user-u{n}" for n in range(6)}
            assert sorted(one["num_requests"] for one in model["queue"]) == [1, 1]
            assert {one["priority"] for one in model["queue"]} == {"normal"}
            (engine,) = model["engines"]
            later = find(read, lambda one: one["models"][0]["output_tokens_per_s"] > 0)
            assert later["models"][0]["engines"][0]["stage_ms"]["forward"] > 0
            assert engine["is_ready"]
            assert engine["num_cells_held"] > 0
            assert engine["steps"][-1]["num_rows"] == 4
            assert SECRET not in json.dumps([seen, later])
        idle = find(read, lambda one: not sequences(one))
        assert idle["models"][0]["num_requests"] == 0


@pytest.mark.slow
def test_latencies_of_the_last_minute_are_shown(new_narrow_server):
    with snapshots(new_narrow_server) as read:
        body = {"prompt": "a", "max_tokens": 8}
        assert new_narrow_server.client.post("/v1/completions", json=body).status_code == 200
        last = find(read, lambda one: one["last_minute"]["num_requests"])["last_minute"]
        assert len(last["ttft"]) == len(last["itl"]) == 3
        assert last["num_failed"] == 0


@pytest.mark.slow
def test_open_view_does_not_delay_the_shutdown(start_server):
    server = start_server("--backend.name", "fake")
    with snapshots(server) as read:
        read()
        stopping = threading.Thread(target=server.process.send_signal, args=(15,))
        stopping.start()
        with contextlib.suppress(StopIteration, httpx2.HTTPError):
            while True:
                read()
        stopping.join()
    assert server.process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_view_needs_an_administrators_key_but_the_page_needs_none(start_server):
    server = start_server("--backend.name", "fake", CLLM_API_KEY="secret")
    assert server.client.get("/live/events").status_code == 401
    assert server.client.get("/v1/live/events").status_code == 401
    page = server.client.get("/live")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    with snapshots(server, authorization="Bearer secret") as read:
        assert read()["is_ready"]
    head = server.client.head("/live/events", headers={"authorization": "Bearer secret"})
    assert head.status_code == 200


def test_operators_paths_have_no_other_names(fake_server):
    for path in ("/v1/live", "/v1/live/events"):
        assert fake_server.client.get(path).status_code == 404


# --- the rate ------------------------------------------------------------------------------------


class CountingMember(FakeMember):
    """A member that counts how often it is asked."""

    num_asked = 0

    async def explain(self, num_steps):
        self.num_asked += 1
        return Explanation([], [], 0, [], {}, None, "")


def make_view(member):
    """Return the view of a server with one engine."""
    pool = SimpleNamespace(members=[member])
    model = SimpleNamespace(engine=pool, parent=None)
    registry = SimpleNamespace(models=[model], loaded=SimpleNamespace(draining=False))
    return LiveView(registry, LastMinute())


@pytest.mark.slow
def test_ends_of_prompts_are_shown_if_an_administrator_wants_that(start_server):
    options = ("--backend.name", "fake", "--context", "40000", "--max-num-seqs", "2")
    server = start_server(*options, "--server.live-prompts")
    with (
        snapshots(server) as read,
        requests(server, 1, prompt=f"{'x' * MAX_PROMPT}{SECRET}"),
    ):
        seen = find(read, sequences)
    (engine,) = seen["models"][0]["engines"]
    [sequence], [(name, text)] = engine["sequences"], engine["prompts"].items()
    assert sequence["name"] == f"{name}.0"
    assert text == "x" * (MAX_PROMPT - len(SECRET)) + SECRET
    server.stop()
    assert SECRET not in server.log


@pytest.mark.slow
def test_prompts_are_never_shown_to_everyone():
    where = ("--host", "0.0.0.0", "--port", "0", "--insecure")
    result = preloaded.run("serve", "--backend.name", "fake", "--server.live-prompts", *where)
    assert result.returncode == 2
    assert "server.live_prompts on 0.0.0.0 would show everyone" in result.stderr


def test_engines_are_asked_only_while_somebody_watches_and_once_for_all(monkeypatch):
    made = []
    snapshot = SimpleNamespace(is_idle=False)

    class Made:
        def __init__(self, registry, last_minute, settings):
            pass

        def make(self, explanations):
            made.append(dict(explanations))
            return snapshot

    monkeypatch.setattr(watching, "Snapshots", Made)
    monkeypatch.setattr(watching, "SECONDS", 0.001)
    monkeypatch.setattr(watching.msgspec.json, "encode", lambda snapshot: b"{}", raising=False)

    async def main():
        member = CountingMember()
        member.get("busy")
        view = make_view(member)
        await asyncio.sleep(0.01)
        assert member.num_asked == len(made) == 0
        watchers = [view.watch() for _ in range(5)]
        for _ in range(3):
            assert [await anext(one) for one in watchers] == [b"data: {}\n\n"] * 5
        assert member.num_asked - len(made) in (0, 1)  # perhaps it has just been asked again
        assert member in made[0]
        for watcher in watchers:
            await watcher.aclose()
        await view._running
        before = len(made)
        await asyncio.sleep(0.01)
        assert len(made) == member.num_asked == before

    asyncio.run(main())


def test_idle_engine_is_not_asked_again():
    async def main():
        member = CountingMember()
        view = make_view(member)
        for _ in range(3):
            await view._ask_engines()
        assert member.num_asked == 1
        member.get("busy")
        await view._ask_engines()
        assert member.num_asked == 2

    asyncio.run(main())


# --- latencies -----------------------------------------------------------------------------------


def record(ended, ttft, gaps=(), status=200):
    made = RequestRecord(arrived=ended - ttft, submitted=ended - ttft, status=status)
    made.first_token, made.ended, made.times = ended, ended, SequenceTimes()
    made.gaps.extend(gaps)
    return made


def test_percentiles_are_those_of_requests_that_ended_within_a_minute():
    last = LastMinute()
    last.note(record(1000.0, 50.0))
    for number in range(100):
        last.note(record(1050.0, number / 100, [0.01] * 500, 500 if number < 3 else 200))
    latencies = last.sum_up(1070.0)
    assert (latencies.num_requests, latencies.num_failed) == (100, 3)
    assert latencies.ttft == pytest.approx([0.5, 0.89, 0.98])
    assert latencies.itl == pytest.approx([0.01, 0.01, 0.01])
    assert last.sum_up(1070.5) is latencies
    assert last.sum_up(1200.0) == Latencies()


def test_requests_that_no_model_computes_do_not_count():
    last = LastMinute()
    asked = RequestRecord(status=200)
    asked.ended = 5.0
    last.note(asked)
    assert last.sum_up(10.0) == Latencies()


# --- the cost ------------------------------------------------------------------------------------


def test_snapshots_of_64_sequences_take_less_than_a_hundredth_of_a_core(fake_engine):
    """The work of the engine and of the API process, with 16 more sequences that wait."""
    engine = fake_engine(max_num_seqs=64, context_length=512, length=400)
    entries = []
    for number in range(80):
        request = ask(f"chatcmpl-{number:024d}-0", prompt=[number, 7, 7])
        entries.append(InFlightRequest(request, QueuePosition(1, 100.0), None))
        engine.add(request.request_id, [number, 7, 7], account=f"user-{number}", max_tokens=400)
    for _ in range(30):
        engine.step()
    member = FakeMember()
    pool = SimpleNamespace(
        members=[member],
        stats_since_start=member.stats,
        loaded_share=1.0,
        num_unfinished=80,
        list_requests=lambda: [(member, entry) for entry in entries],
        backlog=SimpleNamespace(list_pending=lambda: [(Priority.NORMAL, "ann", QueueLoad(16))]),
    )
    service = SimpleNamespace(metrics=SimpleNamespace(num_generated=0.0))
    model = SimpleNamespace(
        name="m",
        status="loaded",
        parent=None,
        num_bytes=0,
        is_loaded=True,
        engine=pool,
        service=service,
        is_loading=False,
        waiting=[],
    )
    loaded = SimpleNamespace(draining=False)
    made = Snapshots(SimpleNamespace(models=[model], ready=True, loaded=loaded), LastMinute())
    decode = msgspec.msgpack.Decoder(Explained).decode
    seconds = []
    for _ in range(20):
        begun = time.thread_time()
        explained = Explained(explain(engine.scheduler, engine.now, watching.MAX_STEPS))
        explanation = decode(frame(explained)[LENGTH.size :]).explanation
        data = msgspec.json.encode(made.make({member: explanation}))
        seconds.append(time.thread_time() - begun)
    phases = [one["phase"] for one in sequences(json.loads(data))]
    assert (phases.count("decode"), phases.count("queued")) == (64, 16)
    assert min(seconds) / watching.SECONDS < 0.01


# --- requests that the engine has not explained --------------------------------------------------


def make_entry(name, *, has_started=False, seconds=9.0):
    entry = InFlightRequest(ask(name), QueuePosition(1, seconds), None)
    entry.started |= {0} if has_started else set()
    return entry


def test_requests_of_an_engine_that_restarts_are_shown():
    entries = [make_entry("old", has_started=True), make_entry("new")]
    old, new = list_sequences(None, entries, RESTARTING)
    assert (old.name, old.phase, old.expected_wait) == ("old.0", "parked", None)
    assert (new.name, new.phase, new.reason) == ("new.0", "queued", RESTARTING)
    assert 0 < new.expected_wait <= 9


def test_requests_that_wait_for_the_load_of_a_model_are_shown():
    record = RequestRecord("req_1", account="ann")
    model = SimpleNamespace(waiting=[record], is_loading=True)
    first, second = list_waiting(model, [make_entry("new")])
    assert (first.name, first.account, first.phase) == ("req_1", "ann", "queued")
    assert (second.name, second.phase) == ("new.0", "queued")
    assert {first.reason, second.reason} == {LOADING}


def test_late_explanation_is_completed_by_what_the_pool_knows(fake_engine):
    """Requests that have ended since are left out, and new ones wait for the end of the step."""
    engine = fake_engine(max_num_seqs=2)
    for name in ("ended", "going"):
        engine.add(name, [len(name)], max_tokens=100)
    engine.step()
    known = explain(engine.scheduler, engine.now, 1)
    shown = list_sequences(known, [make_entry("going"), make_entry("new", seconds=0.0)], IN_STEP)
    assert [(one.name, one.reason) for one in shown] == [("going.0", ""), ("new.0", IN_STEP)]
    assert shown[1].expected_wait is None
