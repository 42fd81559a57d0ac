"""Makes snapshots while somebody watches, and gives each to all watchers."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

import msgspec

from cllm.config.settings import ServerSettings
from cllm.errors import CLLMError
from cllm.process.member import Member
from cllm.scheduler.trace import Explanation
from cllm.server.http.sse import escape_line_ends
from cllm.server.live.last_minute import LastMinute
from cllm.server.live.schema import Snapshot
from cllm.server.live.snapshot import Snapshots, list_members
from cllm.serving.registry import Registry

SECONDS = 0.2  # between two snapshots
IDLE_SECONDS = 1.0  # between two snapshots of a server that computes nothing
MAX_SHARE = 0.02  # of the event loop's time, for making snapshots
MAX_STEPS = 16  # of each engine, in a snapshot

log = logging.getLogger("cllm.live")


class SnapshotStream(ABC):
    """Makes snapshots, at most one every SECONDS, however many watch, and none while nobody does.
    Large ones are made less often, so that they take at most MAX_SHARE of the event loop's time.
    """

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self._running: asyncio.Task[None] | None = None

    # --- What differs between servers and fronts -------------------------------------------------

    @abstractmethod
    def open(self) -> None:
        """Begin to watch."""

    @property
    @abstractmethod
    def is_ending(self) -> bool:
        """Whether no more snapshots are made."""

    @abstractmethod
    async def prepare(self) -> None:
        """Get what the next snapshot needs."""

    @abstractmethod
    def make(self) -> Snapshot:
        """Return the present state."""

    @abstractmethod
    def close(self) -> None:
        """Forget everything, because nobody watches."""

    # --- What they share -------------------------------------------------------------------------

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield snapshots as server-sent events until the server shuts down. A watcher that is slow
        misses some.
        """
        watcher = Watcher()
        self._watchers.add(watcher)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        try:
            while (data := await watcher.take()) is not None:
                yield data
        finally:
            self._watchers.discard(watcher)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self.open()
            while self._watchers and not self.is_ending:
                begun = loop.time()
                await self.prepare()
                spent = time.thread_time()
                snapshot = self.make()
                data = b"data: " + escape_line_ends(msgspec.json.encode(snapshot)) + b"\n\n"
                spent = time.thread_time() - spent
                for watcher in self._watchers:
                    watcher.put(data)
                period = IDLE_SECONDS if snapshot.is_idle else SECONDS
                await asyncio.sleep(begun + max(period, spent / MAX_SHARE) - loop.time())
        except Exception:
            log.exception("the live view has failed")
        finally:
            self.close()
            for watcher in self._watchers:
                watcher.put(None)


class LiveView(SnapshotStream):
    """Makes snapshots of a server, which ends when it shuts down and all requests have ended."""

    def __init__(
        self,
        registry: Registry,
        last_minute: LastMinute,
        settings: ServerSettings = ServerSettings(),  # noqa: B008  # frozen
    ) -> None:
        super().__init__()
        self._registry = registry
        self._settings = settings
        self._last_minute = last_minute
        self._snapshots: Snapshots | None = None
        self._asked: dict[Member, asyncio.Task[Explanation]] = {}
        self._explanations: dict[Member, Explanation] = {}

    def open(self) -> None:
        self._snapshots = Snapshots(self._registry, self._last_minute, self._settings)

    @property
    def is_ending(self) -> bool:
        loaded = self._registry.loaded
        return loaded.draining and not loaded.num_unfinished

    async def prepare(self) -> None:
        await self._ask_engines()

    def make(self) -> Snapshot:
        assert self._snapshots is not None
        return self._snapshots.make(self._explanations)

    def close(self) -> None:
        for task in self._asked.values():
            task.cancel()
        self._asked.clear()
        self._explanations.clear()

    async def _ask_engines(self) -> None:
        """Get explanations from the engines that have work. One that is in a long step answers
        later; until then, its last explanation counts.
        """
        members = [member for model in self._registry.models for member in list_members(model)]
        for member in dict.fromkeys(members):
            if member.ready and member not in self._asked and self._may_have_changed(member):
                self._asked[member] = asyncio.create_task(member.explain(MAX_STEPS))
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=SECONDS / 2)
        for member in [member for member, task in self._asked.items() if task.done()]:
            try:
                self._explanations[member] = self._asked.pop(member).result()
            except CLLMError:  # the engine has died
                self._explanations.pop(member, None)
        for member in [one for one in self._explanations if one not in members or not one.ready]:
            del self._explanations[member]

    def _may_have_changed(self, member: Member) -> bool:
        known = self._explanations.get(member)
        return (
            known is None
            or member.num_requests > 0
            or bool(known.running or known.num_waiting)
            or (bool(known.steps) and known.steps[-1].number != member.stats.num_steps)
        )


class Watcher:
    """Holds the latest snapshot until its client takes it."""

    def __init__(self) -> None:
        self._data: bytes | None = None
        self._arrived = asyncio.Event()

    def put(self, data: bytes | None) -> None:
        """Replace the snapshot; None means that no more follow."""
        self._data = data
        self._arrived.set()

    async def take(self) -> bytes | None:
        """Wait for a snapshot that has not been taken yet."""
        await self._arrived.wait()
        self._arrived.clear()
        return self._data
