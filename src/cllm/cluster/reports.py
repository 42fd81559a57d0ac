"""Asks the replicas of a front what requests have cost that it could not see to their end."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from urllib.parse import urlencode

import msgspec

from cllm.cluster.accounts import Accounts
from cllm.cluster.ask import ask
from cllm.cluster.leases import Replica, Replicas
from cllm.server.cluster.routes import USAGE_PATH
from cllm.store.usage_reports import ReportBatch

PULL_SECONDS = 1.0
LEAST_PAUSE = 0.05  # seconds between two pulls

log = logging.getLogger("cllm.cluster")


class ReportPuller:
    """Pulls the reports of all replicas every second, and sooner if one is expected."""

    def __init__(self, replicas: Replicas, accounts: Accounts) -> None:
        self._replicas = replicas
        self._accounts = accounts
        self._wake = asyncio.Event()
        self._pulls: dict[Replica, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        accounts.on_expected = lambda _: self._wake.set()

    def open(self) -> None:
        """Begin to pull."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Pull once more what is expected, and stop."""
        tasks = [*self._pulls.values()]
        if self._task is not None:
            tasks.append(self._task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        awaited = self._accounts.awaited
        late = [one for one in self._replicas.all if one.name in awaited]
        await asyncio.gather(*map(self.pull, late))
        self._accounts.give_up_all()

    async def _run(self) -> None:
        due = 0.0  # when all replicas are asked again
        clock = asyncio.get_running_loop().time
        while True:
            awaited = self._accounts.awaited
            is_due = clock() >= due
            if is_due:
                due = clock() + PULL_SECONDS
                self._accounts.expire()
            for replica in self._replicas.all:
                if replica not in self._pulls and (is_due or replica.name in awaited):
                    self._pulls[replica] = task = asyncio.create_task(self._pull(replica))
                    task.add_done_callback(lambda _, one=replica: self._pulls.pop(one, None))  # type: ignore[misc]
            await asyncio.sleep(LEAST_PAUSE)
            if not self._accounts.awaited:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, due - clock())):
                        await self._wake.wait()
            self._wake.clear()

    async def _pull(self, replica: Replica) -> None:
        try:
            await self.pull(replica)
        except Exception:  # it must not end the pulls
            log.exception("the usage that %s reports could not be read", replica.url)

    async def pull(self, replica: Replica) -> None:
        """Take the reports of a replica, if it answers with reports."""
        if replica.lease is None:
            return
        accounts, name = self._accounts, replica.name
        epoch, after = accounts.last_taken(name, is_saved=True)
        paused = accounts.list_paused(replica.batch_accounts)
        fields = [("front", accounts.front), ("epoch", epoch), ("after", after)]
        query = urlencode([*fields, *(("paused", one) for one in paused)])
        answer = await ask(replica, accounts.access.cluster_key, "GET", f"{USAGE_PATH}?{query}")
        if answer is None or answer.status != 200:
            return
        try:
            taken = msgspec.json.decode(answer.body, type=ReportBatch)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._warn(replica, str(error)[:200])
            return
        replica.report_trouble = ""
        replica.batch_accounts = taken.batch_accounts
        accounts.take(name, taken)

    def _warn(self, replica: Replica, trouble: str) -> None:
        if replica.report_trouble != trouble:
            log.warning("the usage that %s reports cannot be read: %s", replica.url, trouble)
        replica.report_trouble = trouble
