"""Makes snapshots while somebody watches, and gives each to all watchers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

import msgspec

from cllm.errors import CLLMError
from cllm.process.member import Member
from cllm.scheduler.trace import Explanation
from cllm.server.http.sse import escape_line_ends
from cllm.server.live.last_minute import LastMinute
from cllm.server.live.snapshot import Snapshots, list_members
from cllm.serving.registry import Registry

SECONDS = 0.2  # between two snapshots
IDLE_SECONDS = 1.0  # between two snapshots of a server that computes nothing
MAX_STEPS = 16  # of each engine, in a snapshot

log = logging.getLogger("cllm.live")


class LiveView:
    """Makes snapshots of a server, at most one every SECONDS, however many watch, and none while
    nobody does.
    """

    def __init__(self, registry: Registry, last_minute: LastMinute) -> None:
        self._registry = registry
        self._last_minute = last_minute
        self._watchers: set[Watcher] = set()
        self._running: asyncio.Task[None] | None = None
        self._asked: dict[Member, asyncio.Task[Explanation]] = {}
        self._explanations: dict[Member, Explanation] = {}

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
        snapshots = Snapshots(self._registry, self._last_minute)
        loop = asyncio.get_running_loop()
        try:
            while self._watchers and not self._registry.loaded.draining:
                begun = loop.time()
                await self._ask_engines()
                snapshot = snapshots.make(self._explanations)
                data = b"data: " + escape_line_ends(msgspec.json.encode(snapshot)) + b"\n\n"
                for watcher in self._watchers:
                    watcher.put(data)
                period = IDLE_SECONDS if snapshot.is_idle else SECONDS
                await asyncio.sleep(begun + period - loop.time())
        except Exception:
            log.exception("the live view has failed")
        finally:
            for task in self._asked.values():
                task.cancel()
            self._asked.clear()
            self._explanations.clear()
            for watcher in self._watchers:
                watcher.put(None)

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
