"""Reads a stream of events from every replica, for as long as somebody needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cllm.cluster.leases import Replica, Replicas
from cllm.core.account import Account
from cllm.core.carried import Carried, encode_carried
from cllm.http_connection import Response
from cllm.server.auth import CARRIED_HEADER
from cllm.server.cluster.key import KEY_HEADER, ClusterKey

MAX_EVENT_BYTES = 8_000_000
RETRY_SECONDS = 0.5  # between two attempts to read from a replica
EVENT_END = b"\n\n"
DATA = b"data: "
# The front has checked who may see the events, so that all of them can share one stream.
READER = Account(is_admin=True, is_carried=True)


class EventFollower:
    """Reads the server-sent events at ``path`` from all replicas that get requests. ``take`` is
    called with the data of each event, and ``lose`` when the stream of a replica has ended. Of each
    stream, only an event that is not complete is kept, so a replica that is slow, or sends too
    much, does not affect the others.
    """

    def __init__(
        self,
        replicas: Replicas,
        key: ClusterKey,
        path: str,
        take: Callable[[Replica, bytes], None],
        lose: Callable[[Replica], None],
    ) -> None:
        self._replicas = replicas
        self._key = key
        self._path = path
        self._take = take
        self._lose = lose
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    def update(self) -> None:
        """Follow the replicas that there are now. Call this again from time to time."""
        for replica in self._replicas.all:
            if replica not in self._tasks:
                self._tasks[replica] = asyncio.create_task(self._follow(replica))
        for replica in self._tasks.keys() - {*self._replicas.all}:
            self._tasks.pop(replica).cancel()

    def close(self) -> None:
        """Stop following."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _follow(self, replica: Replica) -> None:
        try:
            while True:
                if replica.is_listed:
                    await self._read(replica)
                    self._lose(replica)
                    replica.wake.set()  # to find out at once whether it has ended
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._lose(replica)

    async def _read(self, replica: Replica) -> None:
        """Read the events of a replica until the connection ends, or they cannot be read."""
        rest = bytearray()
        status = 0

        def begin(response: Response) -> None:
            nonlocal status
            status = response.status

        def feed(data: bytes, _: float) -> bool:
            rest.extend(data)
            end = rest.rfind(EVENT_END)
            if end >= 0:
                for event in bytes(rest[:end]).split(EVENT_END):
                    if event.startswith(DATA):
                        self._take(replica, event[len(DATA) :])
                del rest[: end + len(EVENT_END)]
            return status != 200 or len(rest) > MAX_EVENT_BYTES

        carried = encode_carried(Carried(READER, READER, replica=replica.name))
        fields = [
            (KEY_HEADER.encode(), self._key.find().encode()),
            (CARRIED_HEADER.encode(), carried.encode()),
        ]
        head = replica.client.write_head("GET", self._path, fields)
        try:
            connection = await replica.client.take()
            try:
                await connection.exchange(head, feed, begin)
            finally:
                replica.client.release(connection)
        except OSError:  # also a TimeoutError
            pass
