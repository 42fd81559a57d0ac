"""Limits of accounts and their usage: in memory, on disk and after a crash."""

import asyncio
import calendar
import random
import sqlite3
from datetime import UTC, date, datetime
from types import SimpleNamespace

import pytest

from cllm.core.account import Account, AccountLimits
from cllm.errors import RateLimited, Unauthorized
from cllm.store import usage
from cllm.store.charges import WINDOW, UsageCounts
from cllm.store.database import SHARED, USAGE_SCHEMA, VERSION, Database
from cllm.store.usage import UsageLedger

NOON = 1_800_000_000.0  # 2027-01-15


def account(name="ann", **limits):
    return Account(name, has_key=True, limits=AccountLimits(**limits))


def counts(prompt=0, completion=0, cached=0):
    return SimpleNamespace(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


class Clock:
    def __init__(self):
        self.now = NOON

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(clock):
    return UsageLedger(clock, clock)


def refused(ledger, *arguments):
    with pytest.raises(RateLimited) as caught:
        ledger.admit(*arguments)
    return caught.value


@pytest.mark.parametrize("seed", range(10))
def test_budget_of_a_month_never_grows_by_jumps_of_the_clock(tmp_path, seed):
    """Back and forth, and over restarts: only a month later than all before begins a new one."""
    generator, clock = random.Random(seed), Clock()
    ann, latest, used = account(tokens_per_month=100), "", 0

    async def serve():
        nonlocal latest, used
        ledger = UsageLedger(clock)
        await ledger.open(tmp_path)
        for _ in range(generator.randint(1, 8)):
            clock.now = NOON + generator.randint(-3, 3) * 30 * 86_400 + generator.random() * 9e5
            month = datetime.fromtimestamp(clock.now, UTC).date().isoformat()[:7]
            tokens = generator.randint(1, 60)
            fresh = max(month, latest)
            try:
                charge = ledger.admit(ann, tokens, 0, counts(tokens))
            except RateLimited:
                assert fresh == latest
                assert used + tokens > 100
                continue
            charge.settle(finished=True)
            used = tokens if fresh != latest else used + tokens
            latest = fresh
            assert used <= 100
        await ledger.close()

    for _ in range(6):
        asyncio.run(serve())


def test_requests_per_minute_are_counted_in_any_minute(ledger, clock):
    ann = account(requests_per_minute=3)
    for _ in range(3):
        ledger.admit(ann, 1, 0, counts()).settle(finished=True)
        clock.now += 10
    error = refused(ledger, ann, 1, 0, counts())
    assert error.limit == "requests_per_minute"
    clock.now += error.retry_after
    ledger.admit(ann, 1, 0, counts())
    ledger.admit(account("bob", requests_per_minute=3), 1, 0, counts())


@pytest.mark.parametrize("seed", range(20))
def test_no_minute_ever_exceeds_its_limits(seed, clock):
    """Whatever arrives, ends, is aborted or fails, at any time."""
    ledger, chance = UsageLedger(clock, clock), random.Random(seed)
    ann = account(requests_per_minute=5, tokens_per_minute=100, concurrent_requests=3)
    admitted, paid, open_charges = [], [], []
    for _ in range(2000):
        clock.now += chance.choice([0, 0, 0.3, 2, 11])
        tokens = counts(chance.randrange(1, 20))
        size = tokens.prompt_tokens + chance.randrange(1, 30)
        try:
            charge = ledger.admit(ann, size, 0, tokens)
        except RateLimited as error:
            assert error.retry_after is None or 1 <= error.retry_after <= WINDOW + 1
        else:
            admitted.append(clock.now)
            open_charges.append((charge, tokens, size))
        assert len(open_charges) <= 3
        if open_charges and chance.random() < 0.6:
            charge, tokens, size = open_charges.pop(chance.randrange(len(open_charges)))
            if chance.random() < 0.8:
                tokens.completion_tokens = chance.randrange(1, size - tokens.prompt_tokens + 1)
            charge.settle(finished=bool(tokens.completion_tokens))
            if tokens.completion_tokens:
                paid.append((clock.now, tokens.prompt_tokens + tokens.completion_tokens))
        assert sum(time > clock.now - WINDOW for time in admitted) <= 5
        reserved = sum(size for _, _, size in open_charges)
        assert reserved + sum(n for time, n in paid if time > clock.now - WINDOW) <= 100


def test_request_larger_than_its_limit_is_never_admitted(ledger):
    error = refused(ledger, account(tokens_per_minute=10), 11, 0, counts(11))
    assert (error.limit, error.retry_after) == ("tokens_per_minute", None)


def test_open_output_reserves_at_most_what_is_left(ledger):
    ann = account(tokens_per_month=100)
    first, used = ledger.admit(ann, 60, 512, counts(60)), counts(5)
    refused(ledger, ann, 1, 512, used)
    first.settle()
    ledger.admit(ann, 1, 512, used)


def test_payment_beyond_a_reservation_frees_none_of_another_one(ledger):
    ann, used = account(tokens_per_minute=100), counts(10)
    charge = ledger.admit(ann, 10, 0, used)
    ledger.admit(ann, 50, 0, counts(50))
    used.completion_tokens = 40
    charge.pay()
    refused(ledger, ann, 1, 0, counts(1))


def test_month_begins_anew(ledger, clock):
    ann = account(tokens_per_month=100)
    ledger.admit(ann, 80, 0, counts(70, 10)).settle(finished=True)
    error = refused(ledger, ann, 30, 0, counts())
    assert (error.limit, error.retry_after) == ("tokens_per_month", None)
    clock.now = calendar.timegm((2027, 2, 1, 0, 0, 0))
    ledger.admit(ann, 30, 0, counts())


def test_failed_requests_without_an_answer_do_not_count(ledger):
    """Aborted ones do, else a client could have any number computed."""
    ann = account(requests_per_minute=2)
    for _ in range(5):
        ledger.admit(ann, 1, 0, counts(5)).settle(failed=True)
    ledger.admit(ann, 1, 0, counts(5)).settle()
    ledger.admit(ann, 1, 0, counts(5, 3)).settle(failed=True)
    refused(ledger, ann, 1, 0, counts())
    assert ledger.of_month("ann") == UsageCounts(2, 5, 0, 3)
    assert ledger.totals()["ann"].requests == 7  # a counter of Prometheus must not decrease


def test_aborted_request_pays_for_what_was_delivered(ledger):
    used = counts(50, cached=20)
    charge = ledger.admit(account(), 500, 0, used)
    assert ledger.totals()["ann"] == UsageCounts(1)
    used.completion_tokens = 7
    charge.settle()
    charge.settle(finished=True)  # only the first call counts
    assert ledger.totals()["ann"] == UsageCounts(1, 50, 20, 7)


def test_running_requests_are_ended(ledger):
    ended = []
    for name in ("ann", "bob"):
        ledger.admit(account(name), 1, 0, counts()).end = lambda error, name=name: ended.append(
            (name, error)
        )
    error = RateLimited("x", "y", None)
    ledger.end_all("ann", error)
    assert ended == [("ann", error)]


async def reopen(folder, clock, monotonic=None):
    ledger = UsageLedger(clock, monotonic or clock)
    await ledger.open(folder)
    return ledger


def test_usage_survives_a_crash(tmp_path, clock):
    """The tokens of a request that still runs too, and the limits per minute."""

    async def run():
        ledger = await reopen(tmp_path, clock)
        ann = account(requests_per_minute=2, tokens_per_month=200)
        ledger.admit(ann, 30, 0, counts(20, 10, 5)).settle(finished=True)
        running = counts(40, 3)
        ledger.admit(ann, 100, 0, running)
        await ledger.save()
        running.completion_tokens = 9
        await ledger.save()
        await ledger.save()
        # no close: the process died here
        after = await reopen(tmp_path, clock)
        assert after.of_month("ann") == UsageCounts(2, 60, 5, 19)
        assert refused(after, ann, 1, 0, counts()).limit == "requests_per_minute"
        clock.now += WINDOW + 2
        assert refused(after, ann, 122, 0, counts()).limit == "tokens_per_month"
        after.admit(ann, 121, 0, counts(1, 1)).settle(finished=True)
        await after.close()
        days = await (await reopen(tmp_path, clock)).list_days(date.min, date.max)
        assert days == [("ann", "2027-01-15", "", UsageCounts(3, 61, 5, 20))]

    asyncio.run(run())


def test_sum_of_parallel_requests_is_exact(tmp_path, clock):
    async def run():
        ledger, chance, expected = await reopen(tmp_path, clock), random.Random(1), UsageCounts()

        async def request(i):
            used = counts(chance.randrange(1, 100), cached=1)
            charge = ledger.admit(account(f"account-{i % 7}"), 500, 0, used)
            for _ in range(chance.randrange(1, 50)):
                await asyncio.sleep(0)
                used.completion_tokens += 1
            charge.settle(finished=i % 3 > 0)
            expected.add(
                UsageCounts(1, used.prompt_tokens, used.cached_tokens, used.completion_tokens)
            )

        async def save():
            while True:
                await ledger.save()
                await asyncio.sleep(0)

        saving = asyncio.create_task(save())
        await asyncio.gather(*(request(i) for i in range(500)))
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
        await ledger.close()
        total = UsageCounts()
        for *_, used in await (await reopen(tmp_path, clock)).list_days(date.min, date.max):
            total.add(used)
        assert total == expected

    asyncio.run(run())


def test_full_disk_delays_writing_only(tmp_path, clock, monkeypatch, caplog):
    async def run():
        ledger = await reopen(tmp_path, clock)
        write = UsageLedger._write

        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(UsageLedger, "_write", fail)
        ledger.admit(account(), 30, 0, counts(20, 10)).settle(finished=True)
        await ledger.save()
        ledger.admit(account(), 30, 0, counts(1, 2)).settle(finished=True)
        await ledger.save()
        assert ledger.num_failed_writes == 2
        assert caplog.text.count("cannot be written") == 1
        monkeypatch.setattr(UsageLedger, "_write", write)
        await ledger.close()
        assert (await reopen(tmp_path, clock)).of_month("ann") == UsageCounts(2, 21, 0, 12)

    asyncio.run(run())


def test_database_of_a_newer_version_is_refused_and_unchanged(tmp_path, clock):
    path = tmp_path / "usage.db"
    Database(path, USAGE_SCHEMA, SHARED).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(OSError, match="newer version"):
        asyncio.run(reopen(tmp_path, clock))
    assert path.read_bytes() == before


def test_reservations_alone_do_not_end_a_budget(ledger):
    """They may cost less than they have reserved."""
    ann = account(tokens_per_month=100)
    running = ledger.admit(ann, 60, 0, counts(10, 5))
    error = refused(ledger, ann, 60, 0, counts())
    assert (error.limit, error.retry_after) == ("tokens_per_month", 1.0)
    running.settle(finished=True)
    ledger.admit(ann, 60, 0, counts(60, 40)).settle(finished=True)
    assert refused(ledger, ann, 1, 0, counts()).retry_after is None


def test_request_whose_key_was_revoked_meanwhile_is_not_admitted(ledger):
    """It was let in before, and its prompt has been read since."""
    ledger.is_valid = lambda name: name != "ann"
    with pytest.raises(Unauthorized):
        ledger.admit(account(), 1, 0, counts())
    ledger.admit(account("bob"), 1, 0, counts())


@pytest.mark.parametrize("seed", range(10))
def test_limits_per_minute_never_grow_by_jumps_of_the_clock(tmp_path, seed):
    """Ahead and back again, also while no server runs, and over restarts of the machine."""
    chance, clock, monotonic, boot = random.Random(seed), Clock(), Clock(), "first boot"
    monotonic.now = 5.0
    ann, times, now = account(requests_per_minute=3, tokens_per_minute=100), [], 0.0

    def wait(seconds):
        nonlocal now
        now += seconds
        clock.now += seconds
        monotonic.now += seconds

    async def serve():
        ledger = UsageLedger(clock, monotonic)
        ledger._boot_id = boot
        await ledger.open(tmp_path)
        for _ in range(chance.randint(1, 8)):
            wait(chance.choice([0.0, 0.4, 3.0, 30.0]))
            clock.now += chance.choice([0, 0, 3600, -3600, 86_400, -90])
            recent = [time for time in times if time > now - WINDOW]
            try:
                charge = ledger.admit(ann, 10, 0, counts(5, 5))
            except RateLimited as error:
                assert len([time for time in times if time > now - WINDOW - 6]) >= 3
                assert 1 <= error.retry_after <= WINDOW + 1
                continue
            assert len(recent) < 3
            charge.settle(finished=True)
            times.append(now)
        await ledger.close()

    for number in range(8):
        asyncio.run(serve())
        if chance.random() < 0.3:
            wait(10.0)
            boot, monotonic.now = f"boot {number}", chance.choice([5.0, 1e6])
        else:
            wait(1.0)
            clock.now += chance.choice([0, 3600, -3600])


def test_limits_per_minute_continue_after_an_update(tmp_path, clock):
    """Earlier versions wrote the Unix times of the last minute."""
    database = Database(tmp_path / "usage.db", USAGE_SCHEMA, SHARED)
    with database.transaction() as connection:
        for seconds_ago in (3000, 50, 40, -20):
            row = ("ann", int(NOON) - seconds_ago, 1, 10)
            connection.execute("INSERT INTO latest VALUES (?, ?, ?, ?)", row)
        connection.execute("DROP TABLE clocks")
    database.close()
    monotonic = Clock()
    monotonic.now = 30.0

    async def run():
        ledger = await reopen(tmp_path, clock, monotonic)
        ann = account(requests_per_minute=3)
        assert 10 <= refused(ledger, ann, 1, 0, counts()).retry_after <= 12
        monotonic.now += 12
        ledger.admit(ann, 1, 0, counts())
        refused(ledger, ann, 1, 0, counts())
        await ledger.close()

    asyncio.run(run())


def test_failed_request_is_taken_back_from_the_day_on_which_it_was_booked(ledger, clock):
    charge = ledger.admit(account(), 1, 0, counts(5))
    clock.now -= 10 * 86_400
    ledger.admit(account(), 1, 0, counts(5)).settle(failed=True)
    charge.settle(failed=True)
    days = asyncio.run(ledger.list_days(date.min, date.max))
    assert [(day, used.requests) for _, day, _, used in days] == [("2027-01-15", 0)]


def test_usage_without_a_disk_takes_bounded_memory(ledger, clock):
    async def run():
        for _ in range(1000):
            ledger.admit(account(), 10, 0, counts(5, 5)).settle(finished=True)
            clock.now += 1
            await ledger.save()
        entry = ledger._entries["ann"]
        assert len(entry.changed) <= 2 * WINDOW + 2
        assert len(entry.latest) <= WINDOW + 2
        assert ledger.of_month("ann").requests == 1000

    asyncio.run(run())


def test_database_is_opened_once_while_requests_are_counted(tmp_path, clock):
    async def run():
        first = await reopen(tmp_path, clock)
        first.admit(account(), 30, 0, counts(20, 10)).settle(finished=True)
        await first.close()
        second = UsageLedger(clock, clock)
        opening = [asyncio.create_task(second.open(tmp_path)) for _ in range(3)]
        for _ in range(50):
            second.admit(account(), 3, 0, counts(1, 1)).settle(finished=True)
            await asyncio.sleep(0)
        await asyncio.gather(*opening)
        assert second.of_month("ann") == UsageCounts(51, 70, 0, 60)
        await second.close()

    asyncio.run(run())


def test_days_without_usage_are_not_listed(tmp_path, clock):
    async def run():
        ledger = await reopen(tmp_path, clock)
        assert ledger.of_month("ann") == UsageCounts()
        ledger.list_left(account(requests_per_minute=1))
        assert await ledger.list_days(date.min, date.max) == []
        await ledger.close()

    asyncio.run(run())


def test_looking_at_an_account_does_not_list_it(ledger):
    """An administrator may ask for any name; it must not stay in memory, nor in /metrics."""
    for i in range(100):
        nobody = account(f"nobody\x7f{i}", requests_per_minute=3)
        assert ledger.of_month(nobody.name).tokens == 0
        assert ledger.list_left(nobody)["requests"] == (3, 3, 0.0)
        ledger.check(nobody)
        ledger.end_all(nobody.name, Unauthorized("revoked"))
    assert not ledger.totals()
    ledger.admit(account("ann"), 1, 0, counts())
    assert [*ledger.totals()] == ["ann"]


def test_usage_of_earlier_versions_has_no_model_and_is_moved_once(tmp_path, clock):
    (tmp_path / "usage.db").touch()
    with sqlite3.connect(tmp_path / "usage.db") as connection:
        connection.execute(
            "CREATE TABLE usage (account TEXT, day TEXT, requests INTEGER, prompt_tokens INTEGER, "
            "cached_tokens INTEGER, completion_tokens INTEGER)"
        )
        connection.execute("INSERT INTO usage VALUES ('ann', '2027-01-15', 1, 20, 0, 10)")
    connection.close()

    async def run():
        for _ in range(2):
            ledger = await reopen(tmp_path, clock)
            assert ledger.of_month("ann").requests == 1
            await ledger.close()
        ledger = await reopen(tmp_path, clock)
        ledger.admit(account(), 30, 0, counts(1, 2), "small").settle(finished=True)
        assert await ledger.list_days(date.min, date.max) == [
            ("ann", "2027-01-15", "", UsageCounts(1, 20, 0, 10)),
            ("ann", "2027-01-15", "small", UsageCounts(1, 1, 0, 2)),
        ]
        await ledger.close()

    asyncio.run(run())


def test_only_the_replicas_that_reported_last_are_remembered(tmp_path, monkeypatch):
    """Replicas come and go; a table of all of them would grow forever."""
    monkeypatch.setattr(usage, "MAX_REPLICAS", 3)

    async def run():
        ledger = UsageLedger()
        await ledger.open(tmp_path)
        for number, name in enumerate("abcad", 1):
            ledger.note_taken("front", name, "epoch", number)
            await ledger.save()
        await ledger.close()
        again = UsageLedger()
        await again.open(tmp_path)
        taken = [again.last_taken("front", name) for name in "abcd"]
        await again.close()
        return taken

    assert asyncio.run(run()) == [("epoch", 4), ("", 0), ("epoch", 3), ("epoch", 5)]
