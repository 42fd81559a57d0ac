"""Batches without HTTP: in this dialect a request is an integer, and its answer is the square."""

from __future__ import annotations

import asyncio
import errno
import json
import sqlite3
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
from store_parts import OWN

from cllm.core.account import Account
from cllm.core.stored_ids import make_id
from cllm.errors import BadRequest, EngineError, RateLimited, Unauthorized
from cllm.process.backlog import QueueFull
from cllm.serving import batches as module
from cllm.serving.answer import RequestTimeout
from cllm.serving.batches import Batches
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel
from cllm.store import batches as store_module
from cllm.store.batch_answers import BatchAnswers
from cllm.store.batches import BatchRecord
from cllm.store.charges import UsageCounts
from cllm.store.files import new_file
from cllm.store.store import Store
from cllm.store.usage import UsageLedger

FOREVER = "no answer"
ENDPOINT = "/squares"


class Squares:
    """A request is the id of a number and the number. ``plans``: what a request gets before its
    answer, an error or FOREVER.
    """

    def __init__(self, **plans) -> None:
        self.plans = {name.removeprefix("r"): [*steps] for name, steps in plans.items()}
        self.tried = []

    def check(self, path, endpoint):
        requests = json.loads(path.read_bytes())
        faults = [{"code": "not_a_number"} for value in requests.values() if value is None]
        return len(requests), faults

    def read(self, path):
        return iter(json.loads(path.read_bytes()).items())

    async def answer(self, record, request_id, body, service):
        self.tried.append(request_id)
        for step in self.plans.get(request_id, [])[:1]:
            self.plans[request_id].pop(0)
            if isinstance(step, Exception):
                raise step
            await asyncio.Event().wait()
        return line(request_id, body * body)

    def fault(self, request_id, error):
        return line(request_id, str(error))

    def unanswered(self, request_id, code, message):
        return line(request_id, code)

    def identify(self, answer):
        return json.loads(answer)["id"], {"output": 1}


def line(request_id, answer):
    return json.dumps({"id": request_id, "answer": answer}).encode() + b"\n"


class Server:
    """The batches of one account in a folder, as one server has them."""

    def __init__(self, folder, lines, max_bytes=10_000) -> None:
        self.engine = SimpleNamespace(ready=True, unloaded=False)
        service = SimpleNamespace(engine=self.engine)
        self.model = ServedModel(name="squares", aliases=["*"], service=service)
        self.store = Store(folder, 100, max_bytes)
        self.batches = Batches(self.store, Registry([self.model]), {ENDPOINT: lines}, 2)

    async def begin(self, requests, batch_id="batch_1", **more):
        content = json.dumps(requests).encode()
        file = new_file("o", "in", "batch", len(content), None, make_id("file-"))
        self.store.files.path(file.id).write_bytes(content)
        await self.store.run(self.store.files.add, file)
        fields = {"model": "squares", "expires_at": 2_000_000_000, **more}
        record = BatchRecord(
            id=batch_id,
            account="o",
            endpoint=ENDPOINT,
            input_file_id=file.id,
            completion_window="24h",
            created_at=1,
            **fields,
        )
        await self.batches.create(record, OWN)

    async def until(self, is_so, batch_id="batch_1"):
        """Return the batch when ``is_so(batch)`` is true."""
        async with asyncio.timeout(60):
            while not is_so(record := await self.batches.get(batch_id, OWN, [ENDPOINT])):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return record

    async def ended(self):
        return await self.until(lambda record: record.has_ended)

    def contents(self, record):
        """Return the answers and the errors of a batch, by request."""
        found = []
        for file_id in (record.output_file_id, record.error_file_id):
            text = b"" if file_id is None else self.store.files.path(file_id).read_bytes()
            lines = [json.loads(answer) for answer in text.splitlines()]
            assert len({entry["id"] for entry in lines}) == len(lines), "one answer each"
            found.append({entry["id"]: entry["answer"] for entry in lines})
        return found


def run(folder, test, lines=None, **more):
    """Run ``test`` with a server on ``folder``."""

    async def main():
        server = Server(folder, lines or Squares(), **more)
        await server.batches.open()
        try:
            return await test(server)
        finally:
            await server.batches.stop()

    return asyncio.run(main())


NUMBERS = {str(i): i for i in range(7)}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.01)
    monkeypatch.setattr(module, "DISK_PAUSE", 0.01)


def test_all_requests_of_a_batch_are_answered(tmp_path):
    async def test(server):
        await server.begin(NUMBERS)
        record = await server.ended()
        assert server.contents(record) == [{str(i): i * i for i in range(7)}, {}]
        assert (record.status, record.total, record.completed, record.failed) == (
            "completed",
            7,
            7,
            0,
        )
        assert record.usage == {"output": 7}
        assert [*record.times] == ["in_progress", "finalizing", "completed"]
        assert await server.batches.list_for(OWN, [ENDPOINT]) == [record]

    run(tmp_path, test)


def test_batch_with_invalid_requests_fails_before_it_starts(tmp_path):
    async def test(server):
        await server.begin({"1": None})
        record = await server.ended()
        assert (record.status, record.errors) == ("failed", [{"code": "not_a_number"}])

    run(tmp_path, test)


def test_request_is_retried_if_the_engine_fails(tmp_path):
    """A full queue does not count as a failure. A request that can never be computed is not
    retried.
    """
    lines = Squares(
        r1=[EngineError("died", 0.01), RequestTimeout("late")],
        r2=[EngineError(f"died {i}", 0.01) for i in range(3)],
        r3=[QueueFull("full", "requests", 0.01) for _ in range(5)],
        r4=[BadRequest("never")],
        r5=[ValueError("a bug")],
    )

    async def test(server):
        await server.begin(NUMBERS)
        record = await server.ended()
        done, failed = server.contents(record)
        assert done == {i: int(i) ** 2 for i in "0136"}
        assert failed == {"2": "died 2", "4": "never", "5": "a bug"}
        assert (record.status, record.completed, record.failed) == ("completed", 4, 3)
        assert [lines.tried.count(str(i)) for i in range(7)] == [1, 3, 3, 6, 1, 1, 1]

    run(tmp_path, test, lines)


class Charged(Squares):
    """Each try costs 3 tokens."""

    def __init__(self, ledger, **plans) -> None:
        super().__init__(**plans)
        self.ledger = ledger

    async def answer(self, record, request_id, body, service):
        charge = self.ledger.admit(Account("o", has_key=True), 3, 0, UsageCounts(0, 1, 0, 2))
        try:
            return await super().answer(record, request_id, body, service)
        finally:
            charge.settle(finished=True)


def test_interrupted_requests_are_charged_once(tmp_path):
    """By a stop, or by a kill at any time; also if the answer was not on disk yet. An engine that
    fails costs nothing either.
    """
    ledger = UsageLedger()

    async def stop_after_five(server):
        await server.begin(NUMBERS)
        await server.until(lambda record: record.completed == 5)
        await ledger.save()

    run(
        tmp_path,
        stop_after_five,
        Charged(ledger, r3=[EngineError("dead")], r5=[FOREVER], r6=[FOREVER]),
    )
    assert ledger.of_month("o").tokens == 5 * 3
    assert ledger.of_month("o").requests == 5
    assert ledger._find("o").num_reserved == 0
    run(tmp_path, lambda server: server.ended(), Charged(ledger))
    assert ledger.of_month("o").tokens == 7 * 3
    assert ledger.of_month("o").requests == 7


def test_answer_that_is_not_on_disk_yet_costs_nothing_yet(tmp_path, monkeypatch):
    ledger = UsageLedger()
    seen = []
    flush = BatchAnswers.flush

    def look_and_flush(answers):
        seen.append(ledger.of_month("o").tokens)
        flush(answers)

    async def test(server):
        await server.begin({"1": 1})
        await server.ended()
        assert ledger.of_month("o").tokens == 3

    monkeypatch.setattr(BatchAnswers, "flush", look_and_flush)
    run(tmp_path, test, Charged(ledger))
    assert seen[0] == 0


def test_lines_wait_for_the_limits_and_the_key_of_their_account(tmp_path, monkeypatch):
    """Only a line that its account's limits never allow fails."""
    monkeypatch.setattr(module, "KEY_PAUSE", 0.01)
    lines = Squares(
        r1=[RateLimited("many", "requests_per_minute", 0.01) for _ in range(5)],
        r2=[RateLimited("used up", "tokens_per_month", None) for _ in range(5)],
        r3=[Unauthorized("revoked") for _ in range(5)],
        r4=[RateLimited("too large", "tokens_per_minute", None, is_final=True)],
    )

    async def test(server):
        await server.begin(NUMBERS)
        done, failed = server.contents(await server.ended())
        assert done == {i: int(i) ** 2 for i in "012356"}
        assert failed == {"4": "too large"}

    run(tmp_path, test, lines)


def test_lines_that_wait_for_limits_leave_room_for_others(tmp_path):
    """Two lines are computed at once; those of a limited account hold no place meanwhile."""
    limited = [RateLimited("many", "requests_per_minute", 3600.0)]
    lines = Squares(r10=limited, r11=[*limited], r12=[*limited])

    async def test(server):
        await server.begin({"10": 1, "11": 1, "12": 1, "13": 1})
        await server.until(lambda record: {"10", "11"} <= {*lines.tried})
        await server.begin(NUMBERS, "batch_2")
        record = await server.until(lambda record: record.has_ended, "batch_2")
        assert record.completed == 7
        assert not (await server.batches.get("batch_1", OWN, [ENDPOINT])).has_ended

    run(tmp_path, test, lines)


def test_requests_wait_until_the_service_is_ready(tmp_path):
    lines = Squares()

    async def test(server):
        server.engine.ready = False
        await server.begin(NUMBERS)
        await server.until(lambda record: record.status == "in_progress")
        await asyncio.sleep(0.1)
        assert lines.tried == []
        server.engine.ready = True
        assert (await server.ended()).completed == 7

    run(tmp_path, test, lines)


def test_batch_continues_after_a_stop(tmp_path):
    """Only requests without an answer are computed again."""

    async def first(server):
        await server.begin(NUMBERS)
        await server.until(lambda record: record.completed == 4)

    async def second(server):
        record = await server.ended()
        assert (record.status, record.completed) == ("completed", 7)
        assert server.contents(record) == [{str(i): i * i for i in range(7)}, {}]

    run(tmp_path, first, lines := Squares(r4=[FOREVER], r5=[FOREVER]))
    assert sorted(lines.tried) in ([*"01234"], [*"012345"])
    run(tmp_path, second, lines := Squares())
    assert sorted(lines.tried) == [*"456"]


@pytest.mark.parametrize("is_expired", [False, True])
def test_batch_that_ends_early_reports_its_unanswered_requests(tmp_path, is_expired):
    lines = Squares(r1=[FOREVER], r2=[FOREVER])

    async def test(server):
        await server.begin(NUMBERS, expires_at=int(time.time()) + (2 if is_expired else 1000))
        record = await server.until(lambda record: record.completed == 1)
        if not is_expired:
            await server.batches.cancel(record)
        record = await server.ended()
        assert record.status == ("expired" if is_expired else "cancelled")
        assert server.contents(record) == [
            {"0": 0},
            {str(i): f"batch_{record.status}" for i in range(1, 7)},
        ]
        assert (record.completed, record.failed) == (1, 6)
        with pytest.raises(BadRequest, match="no longer be cancelled"):
            await server.batches.cancel(record)

    run(tmp_path, test, lines)


def test_batch_waits_for_its_model(tmp_path):
    """It waits too if another model is served under that name."""
    lines = Squares()

    async def test(server):
        await server.begin(NUMBERS, model="cubes")
        record = await server.until(lambda record: record.status == "in_progress")
        await asyncio.sleep(0.1)
        assert lines.tried == []
        await server.batches.cancel(record)
        assert (await server.ended()).failed == 7

    run(tmp_path, test, lines)


@pytest.mark.parametrize("is_valid", [False, True])
def test_batch_cancelled_before_validation_is_validated_at_the_next_start(tmp_path, is_valid):
    requests = NUMBERS if is_valid else {**NUMBERS, "7": None}

    async def first(server):
        server.batches._start = lambda _: None  # the server is killed before it validates
        await server.begin(requests)
        record = await server.batches.get("batch_1", OWN, [ENDPOINT])
        assert record.status == "validating"
        record = msgspec.structs.replace(record, status="cancelling")
        await server.store.run(server.store.batches.save, record)

    async def second(server):
        record = await server.ended()
        if is_valid:
            assert (record.status, record.total, record.failed) == ("cancelled", 7, 7)
            assert server.contents(record) == [{}, {str(i): "batch_cancelled" for i in range(7)}]
        else:
            assert (record.status, record.errors) == ("failed", [{"code": "not_a_number"}])

    run(tmp_path, first)
    run(tmp_path, second)


def test_progress_is_known_while_the_batch_waits_for_its_model(tmp_path):
    async def first(server):
        await server.begin(NUMBERS)
        await server.until(lambda record: record.completed == 4)

    async def second(server):
        server.model.name = "cubes"
        await server.batches.open()
        record = await server.until(lambda record: record.completed == 4)
        await server.batches.cancel(record)
        assert (await server.ended()).failed == 3

    async def with_another_model():
        server = Server(tmp_path, Squares())
        try:
            await second(server)
        finally:
            await server.batches.stop()

    run(tmp_path, first, Squares(r4=[FOREVER], r5=[FOREVER]))
    asyncio.run(with_another_model())


def test_files_of_other_batches_leave_room_for_answers(tmp_path):
    """Finished batches may have more files than the limit; answers are no further ones."""

    async def test(server):
        server.store.room.take(0, 200, check=False)
        server.store.room.check = lambda num_files: None
        await server.begin(NUMBERS)
        del server.store.room.check
        assert (await server.ended()).completed == 7

    run(tmp_path, test)


def test_batch_waits_while_the_disk_is_full(tmp_path, monkeypatch):
    """Answers are counted only when they are on disk, and none is lost."""

    async def test(server):
        flush, full = module.Store.run, [True]

        async def run_or_fail(store, work, *arguments):
            if full[0] and getattr(work, "__name__", "") == "flush":
                raise OSError(errno.ENOSPC, "No space left on device")
            return await flush(store, work, *arguments)

        monkeypatch.setattr(module.Store, "run", run_or_fail)
        await server.begin(NUMBERS)
        await server.until(lambda record: record.status == "in_progress")
        await asyncio.sleep(0.2)
        assert (await server.batches.get("batch_1", OWN, [ENDPOINT])).completed == 0
        full[0] = False
        record = await server.ended()
        assert server.contents(record)[0] == {str(i): i * i for i in range(7)}

    run(tmp_path, test)


def fail_calls(monkeypatch, name, error, times):
    """Let the first ``times`` calls of ``name`` in the store's thread raise."""
    run, left = module.Store.run, [times]

    async def run_and_fail(store, work, *arguments):
        if left[0] and work.__name__ == name:
            left[0] -= 1
            raise error
        return await run(store, work, *arguments)

    monkeypatch.setattr(module.Store, "run", run_and_fail)


@pytest.mark.parametrize("name", ["read_answered", "flush", "save", "finish"])
def test_batch_waits_while_the_disk_fails(tmp_path, monkeypatch, name):
    async def test(server):
        fail_calls(monkeypatch, name, OSError(errno.EIO, "Input/output error"), times=2)
        await server.begin(NUMBERS)
        record = await server.ended()
        assert record.status == "completed"
        assert server.contents(record) == [{str(i): i * i for i in range(7)}, {}]

    run(tmp_path, test)


def test_answers_survive_a_failed_transaction_at_the_end(tmp_path, monkeypatch):
    """The transaction fails after the answers have become the content of a file."""
    insert, left = store_module.insert_file, [1]

    def fail_once(connection, file):
        if left[0]:
            left[0] -= 1
            raise sqlite3.OperationalError("disk I/O error")
        return insert(connection, file)

    async def first(server):
        monkeypatch.setattr(store_module, "insert_file", fail_once)
        await server.begin(NUMBERS)
        assert (await server.ended()).status == "completed"

    async def second(server):
        record = await server.ended()
        file = await server.store.run(server.store.files.get, record.output_file_id, OWN)
        assert file.filename == "batch_1.output.jsonl"
        assert server.contents(record) == [{str(i): i * i for i in range(7)}, {}]

    run(tmp_path, first)
    run(tmp_path, second)


@pytest.mark.parametrize("name", ["read_answered", "finish"])
def test_answers_are_delivered_after_an_unexpected_error(tmp_path, monkeypatch, name):
    """It occurs when all requests have been computed."""
    lines, go_on = Squares(), asyncio.Event()

    async def test(server):
        await server.begin(NUMBERS)
        await server.until(lambda record: record.completed)
        fail_calls(monkeypatch, name, ValueError("a bug"), times=1)
        go_on.set()
        record = await server.ended()
        assert (record.status, record.errors) == ("failed", [module.INTERNAL])
        assert server.contents(record) == [{str(i): i * i for i in range(7)}, {}]

    async def hold_last(record, request_id, body, service):
        if request_id == "6":
            await go_on.wait()
        return await Squares.answer(lines, record, request_id, body, service)

    lines.answer = hold_last
    run(tmp_path, test, lines)


def test_batch_that_cannot_be_finished_continues_at_the_next_start(tmp_path, monkeypatch):
    async def first(server):
        await server.begin(NUMBERS)
        (task,) = server.batches._running.values()
        await task
        assert server.batches._unfinished == {}
        assert not (await server.batches.get("batch_1", OWN, [ENDPOINT])).has_ended

    async def second(server):
        record = await server.ended()
        assert server.contents(record) == [{str(i): i * i for i in range(7)}, {}]

    def fail(*arguments):
        raise ValueError("a bug")

    with monkeypatch.context() as patches:
        patches.setattr(store_module, "insert_file", fail)
        run(tmp_path, first)
    run(tmp_path, second)


def test_batch_that_is_expiring_cannot_be_cancelled(tmp_path):
    """Otherwise the record of the cancelled batch would replace the final one."""

    async def test(server):
        has_finished, go_on = threading.Event(), threading.Event()
        finish = server.store.batches.finish

        def finish_and_wait(record):
            finish(record)
            has_finished.set()
            assert go_on.wait(60)

        server.store.batches.finish = finish_and_wait
        await server.begin(NUMBERS, expires_at=int(time.time()) + 2)
        record = await server.batches.get("batch_1", OWN, [ENDPOINT])
        assert await asyncio.to_thread(has_finished.wait, 60)
        assert record.status == "in_progress"
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        with pytest.raises(BadRequest, match="no longer be cancelled"):
            await server.batches.cancel(record)
        assert (await server.ended()).status == "expired"
        assert await server.store.run(server.store.batches.unfinished) == []

    run(tmp_path, test, Squares(r1=[FOREVER], r2=[FOREVER]))


@pytest.mark.parametrize("is_earlier", [True, False])
def test_batch_is_started_once_while_the_store_opens(tmp_path, is_earlier):
    """It was left by an earlier server, or is created by a request at that time."""

    async def first(server):
        if is_earlier:
            await server.begin(NUMBERS)

    async def second():
        server, go_on = Server(tmp_path, lines := Squares()), asyncio.Event()
        open_store = server.store.open

        async def open_slowly():
            has_opened = await open_store()
            server.store.open = open_store
            await go_on.wait()
            return has_opened

        async def request():
            await server.batches.open()
            if not is_earlier:
                await server.begin(NUMBERS)

        server.store.open = open_slowly
        starting = asyncio.create_task(server.batches.start())
        while server.store.open is open_slowly:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        requesting = asyncio.create_task(request())
        await asyncio.wait({requesting}, timeout=0.2)
        go_on.set()
        await asyncio.gather(starting, requesting)
        record = await server.ended()
        assert server.contents(record) == [{str(i): i * i for i in range(7)}, {}]
        assert sorted(lines.tried) == [*"0123456"]
        await server.batches.stop()

    run(tmp_path, first, Squares(**{f"r{i}": [FOREVER] for i in range(7)}))
    asyncio.run(second())


def test_server_starts_if_batches_cannot_continue(tmp_path, monkeypatch):
    """The next request tries again."""

    async def main():
        server = Server(tmp_path, Squares())
        with monkeypatch.context() as patches:
            patches.setattr(store_module.BatchStore, "unfinished", lambda store: 1 / 0)
            await server.batches.start()
            with pytest.raises(ZeroDivisionError):
                await server.batches.open()
        await server.batches.open()
        await server.begin(NUMBERS)
        assert (await server.ended()).status == "completed"
        await server.batches.stop()

    asyncio.run(main())


def test_batch_keeps_the_answers_that_fit_when_it_fails(tmp_path):
    async def test(server):
        await server.begin({str(i): i for i in range(100)})
        record = await server.ended()
        assert (record.status, record.errors[0]["code"]) == ("failed", "storage_full")
        done, _ = server.contents(record)
        assert 0 < len(done) == record.completed < 100

    run(tmp_path, test, max_bytes=1500)
