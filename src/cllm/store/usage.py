"""The usage of accounts, and what their limits leave.

When a request is admitted, it reserves the tokens that it may use. When it ends, it pays for those
that it used. Both happen in the thread of the event loop without waiting, so parallel requests
cannot exceed a limit together. Every 0.8 seconds, the delivered tokens are written to disk, also
those of running requests, so a crash loses at most that. A request of a batch pays once its answer
is on disk. If a server ends before that, the next one computes the answer again.

The limits per minute are counted in seconds of the monotonic clock, which runs on while no server
does. So no change of the wall clock ends a minute early.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import msgspec

from cllm.core.account import Account
from cllm.errors import CLLMError, RateLimited, Unauthorized
from cllm.store.charges import WINDOW, Charge, Counts, UsageCounts, UsageEntry, note_need
from cllm.store.database import SHARED, USAGE_SCHEMA, Database

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # identifies the start of the monotonic clock
EXPECTED_OUTPUT = 512  # tokens that are reserved for a request that does not limit its output
# Replicas whose last booked report is remembered. One that comes back after so many others have
# reported may be booked twice for reports that were on their way when it was lost.
MAX_REPLICAS = 10_000
NAMES = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "concurrent_requests": "concurrent requests",
    "tokens_per_month": "tokens per month",
}

log = logging.getLogger("cllm.access")


class UsageLedger:
    """The usage of all accounts, in memory and, once ``open`` has been called, on disk."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns Unix times, ``monotonic`` the seconds since the machine was started."""
        self._clock = clock
        self.seconds = monotonic
        self._boot_id = read_boot_id()
        self._entries: dict[str, UsageEntry] = {}
        self._thread = ThreadPoolExecutor(1, "cllm-usage")
        self._database: Database | None = None
        self._saving = asyncio.Lock()
        self._opening = asyncio.Lock()
        self.is_valid: Callable[[str], bool] = lambda _: True  # whether an account has a key
        self.num_failed_writes = 0
        # by the names of a front and a replica: the epoch of the replica, and the number of its
        # last report that is booked; and the same as on disk
        self._taken: dict[tuple[str, str], tuple[str, int]] = {}
        self._saved: dict[tuple[str, str], tuple[str, int]] = {}

    # --- admission -------------------------------------------------------------------------------

    def admit(
        self,
        account: Account,
        num_tokens: int,
        num_extra: int,
        counts: Counts,
        model: str = "",
    ) -> Charge:
        """Reserve the tokens that a request to ``model`` may use: ``num_tokens``, and up to
        ``num_extra`` more that the request does not name. ``counts`` has the tokens of the request
        so far, and grows.

        Raises RateLimited; then nothing has changed.
        """
        self.check(account)
        if account.num_reserved is not None and num_tokens > account.num_reserved:
            note_need(num_tokens)
            limit = "tokens_per_minute"
            raise self._limited(account, limit, account.num_reserved, 1.0, num_tokens)
        seconds_now, limits = self.seconds(), account.limits
        entry = self._entry(account.name)
        _, tokens = entry.count_latest(seconds_now)
        for name, paid in (("tokens_per_minute", tokens), ("tokens_per_month", self._month(entry))):
            if (most := getattr(limits, name)) is None:
                continue
            left = most - paid - entry.num_reserved
            if num_tokens > left:
                seconds: float | None = None
                if name == "tokens_per_minute" and num_tokens <= most:
                    seconds = entry.seconds_until(seconds_now, 2, num_tokens - left)
                elif num_tokens <= most - paid:
                    seconds = 1.0  # until a running request has cost less than it has reserved
                raise self._limited(account, name, most, seconds, num_tokens)
            num_extra = min(num_extra, left - num_tokens)
        charge = Charge(self, entry, num_tokens + num_extra, counts, model)
        entry.charges.add(charge)
        return charge

    def check(self, account: Account) -> None:
        """Raise RateLimited if no request of the account could be admitted now, and Unauthorized if
        its key has been revoked. This is cheap, so it can be called before a prompt is read.
        """
        if not account.is_carried and not self.is_valid(account.name):
            raise Unauthorized("The API key has been revoked.")
        seconds, limits = self.seconds(), account.limits
        entry = self._find(account.name)
        requests, tokens = entry.count_latest(seconds)
        if (most := limits.concurrent_requests) is not None and len(entry.charges) >= most:
            raise self._limited(account, "concurrent_requests", most, 1.0)
        if (most := limits.requests_per_minute) is not None and requests >= most:
            until = entry.seconds_until(seconds, 1, requests - most + 1)
            raise self._limited(account, "requests_per_minute", most, until)
        if (most := limits.tokens_per_minute) is not None and tokens >= most:
            until = entry.seconds_until(seconds, 2, tokens - most + 1)
            raise self._limited(account, "tokens_per_minute", most, until)
        if (most := limits.tokens_per_month) is not None and self._month(entry) >= most:
            raise self._limited(account, "tokens_per_month", most, None)

    def _month(self, entry: UsageEntry) -> int:
        """Return the tokens that an account has paid this month."""
        entry.begin_month(self.now())
        return entry.of_month.tokens

    def _limited(
        self, account: Account, limit: str, most: int, seconds: float | None, asked: int = 0
    ) -> RateLimited:
        message = f"The account {account.name!r} may use {most} {NAMES[limit]}"
        is_final = asked > most
        if is_final:
            message += f", but this request may need {asked} tokens"
        elif asked:
            message += f"; this request may need {asked} tokens and fewer are left"
        return RateLimited(f"{message}.", limit, seconds, is_final=is_final)

    def now(self) -> float:
        """Return the Unix time."""
        return self._clock()

    def _find(self, name: str) -> UsageEntry:
        """Return the entry of an account, which is empty if the account has used nothing."""
        return self._entries.get(name) or UsageEntry(name)

    def _entry(self, name: str) -> UsageEntry:
        if name not in self._entries:
            self._entries[name] = UsageEntry(name)
        return self._entries[name]

    def list_left(self, account: Account) -> dict[str, tuple[int, int, float]]:
        """Return the limits per minute for "requests" and "tokens", if there are any.

        Each has the limit, the amount left, and the seconds until all of it is available again.
        """
        now, entry = self.seconds(), self._find(account.name)
        requests, tokens = entry.count_latest(now)
        seconds = max(0.0, entry.latest[-1][0] + WINDOW + 1 - now) if entry.latest else 0.0
        states = {}
        for name, most, used in (
            ("requests", account.limits.requests_per_minute, requests),
            ("tokens", account.limits.tokens_per_minute, tokens + entry.num_reserved),
        ):
            if most is not None:
                states[name] = (most, max(0, most - used), seconds)
        return states

    def totals(self) -> dict[str, UsageCounts]:
        """Return the usage of each account since the start."""
        return {name: entry.total for name, entry in self._entries.items()}

    def of_month(self, name: str) -> UsageCounts:
        """Return the usage of an account this month."""
        entry = self._find(name)
        self._month(entry)
        return entry.of_month

    def end_all(self, name: str, error: CLLMError) -> None:
        """End the running requests of an account with ``error``."""
        for charge in [*self._find(name).charges]:
            if charge.end is not None:
                charge.end(error)

    def book(self, name: str, used: UsageCounts, model: str) -> None:
        """Add what requests of an account to ``model`` have cost that were not admitted here."""
        entry = self._entry(name)
        entry.count_used(used, self.seconds())
        entry.book(used, self.now(), model)

    def note_taken(self, front: str, replica: str, epoch: str, number: int) -> None:
        """Note the last report of a replica that ``front`` has booked."""
        self._taken.pop((front, replica), None)
        self._taken[front, replica] = epoch, number  # the latest one is the last one
        if len(self._taken) > MAX_REPLICAS:
            del self._taken[next(iter(self._taken))]

    def last_taken(self, front: str, replica: str, *, is_saved: bool = False) -> tuple[str, int]:
        """Return the epoch and the number of the last report that is booked or, if ``is_saved``,
        of the last one that is not lost if this process is killed.
        """
        known = self._saved if is_saved and self._database is not None else self._taken
        return known.get((front, replica), ("", 0))

    # --- on disk ---------------------------------------------------------------------------------

    async def open(self, folder: Path) -> None:
        """Read the usage of earlier servers, and write further usage to ``folder``. Raises
        OSError.
        """
        async with self._opening:
            if self._database is not None:
                return
            saved: list[Any] = []
            await self._run(lambda: saved.extend(self._read(folder.expanduser())))
            self._database, month, latest, taken = saved
        self._saved = {(front, replica): (epoch, last) for front, replica, epoch, last in taken}
        self._taken = self._saved | self._taken
        now = self.now()
        for name, day, *counts in month:
            entry = self._entry(name)
            # the clock may have been set back since then; what was used meanwhile has been added
            used = entry.of_month if entry.month == day[:7] else UsageCounts()
            used.add(UsageCounts(*counts))
            entry.day, entry.month, entry.of_month = max(entry.day, day), day[:7], used
            entry.begin_month(now)
        for name, *one in latest:
            self._entry(name).latest.append(one)
        for entry in self._entries.values():
            entry.latest = deque(sorted(entry.latest))

    @property
    def is_open(self) -> bool:
        """Whether usage is written to disk."""
        return self._database is not None

    def _read(self, folder: Path) -> tuple[Database, list[Any], list[Any], list[Any]]:
        """Open the database. Return it, the usage of each account in its last month and in the
        last minute, and the last reports that are booked.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        database = Database(folder / "usage.db", USAGE_SCHEMA, SHARED)
        month = database.rows(
            "SELECT account, MAX(day), SUM(requests), SUM(prompt_tokens), SUM(cached_tokens), "
            "SUM(completion_tokens) FROM days AS one WHERE substr(day, 1, 7) = "
            "(SELECT substr(MAX(day), 1, 7) FROM days WHERE account = one.account) "
            "GROUP BY account"
        )
        taken = database.rows("SELECT * FROM reports")
        return database, month, self._read_latest(database), taken

    def _read_latest(self, database: Database) -> list[Any]:
        """Return the buckets of the last minute, in seconds of this monotonic clock."""
        shift, last = self._compute_shift(database), int(self.seconds())
        rows = database.rows("SELECT account, second, requests, tokens FROM latest ORDER BY second")
        if shift:
            merged: dict[tuple[str, int], list[int]] = {}
            for name, second, requests, tokens in rows:
                one = merged.setdefault((name, min(last, second + shift)), [0, 0])
                one[:] = one[0] + requests, one[1] + tokens
            rows = [(*key, *one) for key, one in merged.items()]
            with database.transaction() as connection:
                connection.execute("DELETE FROM latest")
                connection.executemany("INSERT INTO latest VALUES (?, ?, ?, ?)", rows)
                self._write_clocks(connection)
        return [row for row in rows if row[1] >= last - WINDOW - 1]

    def _compute_shift(self, database: Database) -> int:
        """Return the number to add to the seconds on disk; 0 if they are of this monotonic clock.

        Otherwise the wall clock shows how long ago the last server ended.
        """
        seconds, now = self.seconds(), self.now()
        clocks = database.rows("SELECT boot_id, seconds, unix_time FROM clocks")
        # earlier versions wrote no clocks, and Unix times
        boot_id, then, unix_time = clocks[0] if clocks else ("", now, now)
        if clocks and boot_id == self._boot_id != "" and then <= seconds:
            return 0
        return math.ceil(seconds - max(0.0, now - unix_time) - then)

    def _write_clocks(self, connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM clocks")
        row = self._boot_id, self.seconds(), self.now()
        connection.execute("INSERT INTO clocks VALUES (?, ?, ?)", row)

    async def _run(self, work: Callable[..., None], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def is_dirty(self) -> bool:
        """Return whether there is something to write, or requests run."""
        is_changed = any(entry.changed or entry.charges for entry in self._entries.values())
        return is_changed or self._taken != self._saved

    def is_saving(self) -> bool:
        return self._saving.locked()

    async def save(self) -> None:
        """Write the usage since the last call. After a failure, the next call tries again. The work
        continues even if the caller is cancelled.
        """
        await asyncio.shield(self._save())

    async def _save(self) -> None:
        async with self._saving:
            for entry in self._entries.values():
                for charge in entry.charges:
                    charge.pay()
            for entry in self._entries.values():
                entry.forget_old(self.seconds())
            if self._database is None:
                return
            changed = [one for one in self._entries.values() if one.changed or one.unsaved]
            usage = [
                (entry.name, *key, *msgspec.structs.astuple(used))
                for entry in changed
                for key, used in entry.unsaved.items()
            ]
            latest = [(entry.name, *one) for entry in changed for one in entry.changed.values()]
            taken = [(entry, entry.unsaved, entry.changed) for entry in changed]
            for entry in changed:
                entry.unsaved, entry.changed = {}, {}
            booked = {**self._taken}
            reports = [
                (*key, *last) for key, last in booked.items() if self._saved.get(key) != last
            ]
            forgotten = [*(self._saved.keys() - booked.keys())]
            if not taken and not reports and not forgotten:
                return
            try:
                await self._run(self._write, self._database, usage, latest, reports, forgotten)
            except OSError as error:
                if not self.num_failed_writes:
                    log.error("the usage of accounts cannot be written: %s", error)
                self.num_failed_writes += 1
                for entry, unsaved, seconds in taken:
                    for key, used in unsaved.items():
                        entry.get_unsaved(*key).add(used)
                    entry.changed = seconds | entry.changed
            else:
                self._saved = booked

    def _write(
        self,
        database: Database,
        usage: Iterable[tuple[str | int, ...]],
        latest: Iterable[tuple[str | int, ...]],
        reports: Iterable[tuple[str | int, ...]] = (),
        forgotten: Iterable[tuple[str, str]] = (),
    ) -> None:
        with database.transaction() as connection:
            connection.executemany(
                "INSERT INTO days VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "requests = requests + excluded.requests, "
                "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
                "cached_tokens = cached_tokens + excluded.cached_tokens, "
                "completion_tokens = completion_tokens + excluded.completion_tokens",
                usage,
            )
            connection.executemany("INSERT OR REPLACE INTO latest VALUES (?, ?, ?, ?)", latest)
            connection.executemany("INSERT OR REPLACE INTO reports VALUES (?, ?, ?, ?)", reports)
            connection.executemany("DELETE FROM reports WHERE front = ? AND replica = ?", forgotten)
            connection.execute(
                "DELETE FROM latest WHERE second < ?", (int(self.seconds()) - 10 * WINDOW,)
            )
            self._write_clocks(connection)

    async def list_days(
        self, begin: date, end: date, accounts: Container[str] | None = None
    ) -> list[tuple[str, str, str, UsageCounts]]:
        """Return the account, the day, the model and the usage for each day from ``begin`` to
        ``end`` on which one of ``accounts`` used a model. None means all accounts. The model is ""
        for what cLLM 0.1 counted, which told no models apart.
        """
        await self.save()
        first, last = begin.isoformat(), end.isoformat()
        rows: list[tuple[str, str, str, UsageCounts]] = []

        def read(database: Database) -> None:
            query = "SELECT * FROM days WHERE day BETWEEN ? AND ? ORDER BY day, account, model"
            for name, day, model, *counts in database.rows(query, first, last):
                rows.append((name, day, model, UsageCounts(*counts)))

        if self._database is not None:
            await self._run(read, self._database)
        else:
            for entry in self._entries.values():
                for (day, model), used in entry.unsaved.items():
                    if first <= day <= last:
                        rows.append((entry.name, day, model, used))
        return [row for row in rows if accounts is None or row[0] in accounts]

    async def close(self) -> None:
        """Write the remaining usage. No request can be admitted afterwards."""
        await self.save()
        if self._database is not None:
            with suppress(OSError):  # the clocks: the wall clock may have jumped since the last use
                await self._run(self._write, self._database, (), ())
            await self._run(self._database.close)
            self._database = None
        await asyncio.to_thread(self._thread.shutdown)


def read_boot_id() -> str:
    """Return an id of this start of the machine, or "" if it is unknown."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def first_of_month(now: float) -> date:
    return datetime.fromtimestamp(now, UTC).date().replace(day=1)
