"""Asks a replica for a whole answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from pydantic_core import from_json
from starlette.responses import Response

from cllm.cluster.leases import Replica
from cllm.server.cluster.key import KEY_HEADER, ClusterKey

SAFE_IN_PATHS = "/:@!$&'()*+,;=~-._"
MAX_ANSWER = 32_000_000  # bytes
TIMEOUT = 10.0  # seconds for an answer that needs no computing
PASSED_ON = (b"content-type", b"retry-after", b"www-authenticate", b"allow")


def quote_path(path: str) -> str:
    """Return a decoded path as it is written in a request."""
    return quote(path, safe=SAFE_IN_PATHS)


class ReplicaAnswer(NamedTuple):
    """The whole answer of a replica."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes

    def read(self, form: Any) -> Any:
        """Return the JSON value of the body, or None if it does not have the form of the type
        ``form``. It may have more fields.
        """
        try:
            msgspec.json.decode(self.body, type=form)
            return from_json(self.body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    def pass_on(self) -> Response:
        """Return this answer for the client."""
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in self.fields
            if name in PASSED_ON
        }
        return Response(self.body, self.status, headers)


async def ask(
    replica: Replica,
    key: ClusterKey,
    method: str,
    target: str,
    fields: Iterable[tuple[bytes, bytes]] = (),
    body: bytes = b"",
    seconds: float | None = TIMEOUT,
) -> ReplicaAnswer | None:
    """Return the answer of a replica to a request of its front, sent to ``target``, a path that
    may have a query; or None if it does not answer, or with more than MAX_ANSWER.
    """
    fields = [(KEY_HEADER.encode(), key.find().encode()), *fields]
    if body or method not in ("GET", "HEAD"):
        fields.append((b"content-length", b"%d" % len(body)))
    data = bytearray()

    def feed(part: bytes, _: float) -> bool:
        data.extend(part)
        return len(data) > MAX_ANSWER

    head = replica.client.write_head(method, target, fields)
    is_repeatable = method in ("GET", "HEAD")
    try:
        async with asyncio.timeout(seconds):
            connection = await replica.client.take(is_new=not is_repeatable)
            try:
                response = await connection.exchange(head + body, feed, lambda _: None)
            finally:
                replica.client.release(connection)
    except OSError:  # also a TimeoutError
        return None
    if len(data) > MAX_ANSWER:
        return None
    return ReplicaAnswer(response.status, response.fields, bytes(data))
