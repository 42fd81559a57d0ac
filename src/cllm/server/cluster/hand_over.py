"""Hands saved prefixes over to another replica when this one shuts down.

Fronts name the heir: the replica to which they will send the requests for these prefixes. The
prefixes are files of the disk cache, the ones used last first. The heir checks each file, because a
wrong one could make its engine fail.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from cllm.config.settings import Settings
from cllm.core.model_info import ModelInfo
from cllm.engine.snapshot_files import (
    Head,
    check_file,
    list_by_time,
    lock,
    name_file,
    read_head,
    read_tokens,
)
from cllm.errors import BadRequest
from cllm.private_files import open_private
from cllm.server.cluster.key import KEY_HEADER, ClusterKey
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel

if TYPE_CHECKING:
    import httpx2

STATE_PATH = "/internal/state"
MAX_SALT = 1000  # characters
WRITE_BYTES = 1 << 20  # written to a file at once
CONNECT_SECONDS = 2.0

log = logging.getLogger("cllm.cluster")


class HandOverFailed(Exception):
    """The heir does not take prefixes, or there is no time left."""


class StoredPrefixes(msgspec.Struct, frozen=True):
    """What the heir has: the fingerprint of its model, and the names of its files."""

    fingerprint: str
    names: Annotated[list[str], msgspec.Meta(max_length=1_000_000)]


class Leaving(NamedTuple):
    """A model of a replica that shuts down: its name, and the folder of its disk cache."""

    name: str
    folder: Path
    fingerprint: str
    prompt_token_seconds: float


class HandOver:
    """The side of the replica that shuts down."""

    def __init__(self, settings: Settings, key: ClusterKey) -> None:
        self._heir = ""  # its address
        self._seconds = settings.cluster.hand_over
        self._key = key

    def name_heir(self, heir: str) -> None:
        """Hand prefixes over to the server at the address ``heir``."""
        if self._seconds and heir != self._heir:
            log.info("this server will hand its prefixes over to %s when it shuts down", heir)
            self._heir = heir

    def prepare(self, registry: Registry) -> list[Leaving]:
        """Return the models whose prefixes can be handed over. Call it before their engines end."""
        if not (self._seconds and self._heir):
            return []
        return [
            Leaving(
                model.name,
                cache.folder,
                cache.info.fingerprint,
                model.engine.stats.prompt_token_seconds if model.engine else 0.0,
            )
            for model in registry.models
            if (cache := find_cache(model)) is not None
        ]

    async def send(self, leaving: Sequence[Leaving]) -> None:
        """Send the files of these models, whose engines have ended, as long as there is time and
        receiving a token's state is faster than computing it.
        """
        if leaving:
            await asyncio.to_thread(self._send, leaving)

    def _send(self, leaving: Sequence[Leaving]) -> None:
        import httpx2

        begun, sent = time.monotonic(), 0
        until = begun + self._seconds
        try:
            timeout = httpx2.Timeout(self._seconds, connect=CONNECT_SECONDS)
            headers = {KEY_HEADER: self._key.find()}
            direct = httpx2.HTTPTransport()  # without a proxy, which could read the key
            with httpx2.Client(
                base_url=self._heir, transport=direct, timeout=timeout, headers=headers
            ) as client:
                for model in leaving:
                    for _ in send_files(client, model, until):
                        sent += 1
        except (HandOverFailed, OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            log.warning("prefixes are no longer handed over to %s: %s", self._heir, reason)
        seconds = time.monotonic() - begun
        log.info("handed %d prefixes over to %s in %.1f s", sent, self._heir, seconds)


def send_files(client: httpx2.Client, model: Leaving, until: float) -> Iterator[Path]:
    """Send files of a model until the time ``until``. Yield each one that the heir has taken.

    Raises HandOverFailed, OSError and httpx2.HTTPError.
    """
    query = {"model": model.name}
    answer = client.get(STATE_PATH, params=query)
    if answer.status_code == 404:
        log.info("the heir does not accept prefixes of the model %s", model.name)
        return
    if answer.status_code != 200:
        raise HandOverFailed(f"it answers with status {answer.status_code}")
    try:
        stored = msgspec.json.decode(answer.content, type=StoredPrefixes)
    except msgspec.DecodeError as error:
        raise HandOverFailed(f"its answer is not valid: {error}") from None
    if stored.fingerprint != model.fingerprint:
        log.info("the heir has another file or other settings of the model %s", model.name)
        return
    known = {*stored.names}
    for path in reversed(list_by_time(model.folder)):
        if path.name in known:
            continue
        try:
            size, head = path.stat().st_size, read_file_head(path)
        except (OSError, ValueError):  # deleted or damaged meanwhile
            continue
        if head.fingerprint != model.fingerprint:
            continue
        begun = time.monotonic()
        length = {"content-length": str(size)}
        content = read_pieces(path, until)
        answer = client.put(STATE_PATH, params=query, content=content, headers=length)
        if answer.status_code == 204:
            yield path
        elif answer.status_code != 400:  # it does not want this file
            raise HandOverFailed(f"it answers with status {answer.status_code}")
        seconds = (time.monotonic() - begun) / max(1, len(read_tokens(head)))
        if 0 < model.prompt_token_seconds < seconds:
            log.info(
                "the network takes %.2g s a token, and computing it %.2g s: no more prefixes of %s "
                "are handed over",
                seconds,
                model.prompt_token_seconds,
                model.name,
            )
            break


def read_file_head(path: Path) -> Head:
    with path.open("rb") as file:
        return read_head(file)


def read_pieces(path: Path, until: float) -> Iterator[bytes]:
    """Yield the content of a file. Raises HandOverFailed after the time ``until``."""
    with path.open("rb") as file:
        while piece := file.read(WRITE_BYTES):
            if time.monotonic() > until:
                raise HandOverFailed("there is no time left")
            yield piece


class Cache(NamedTuple):
    """The disk cache of a loaded model."""

    folder: Path
    max_bytes: int
    info: ModelInfo


def find_cache(model: ServedModel | None) -> Cache | None:
    """Return the disk cache of a model; None if it has none, is not loaded, or cannot check the
    states of other machines.
    """
    engine = None if model is None or model.parent is not None else model.engine
    if engine is None or engine.info is None or not engine.info.checks_states:
        return None
    params = engine.params
    if not params.disk_cache:
        return None
    return Cache(Path(params.disk_cache).expanduser(), params.disk_cache_bytes, engine.info)


def list_stored(cache: Cache) -> StoredPrefixes:
    """Return what a heir has already."""
    return StoredPrefixes(
        cache.info.fingerprint, [path.name for path in list_by_time(cache.folder)]
    )


async def receive_prefix(body: AsyncIterator[bytes], cache: Cache) -> str:
    """Store a file that another replica sends, and return its name in the folder of the cache.

    Raises BadRequest, with nothing stored, if it is not an intact file of this model.
    """
    temporary = cache.folder / f"{secrets.token_hex(8)}.{os.getpid()}.tmp"
    try:
        with open_private(temporary, "xb") as file:
            lock(file)  # otherwise an engine that starts would delete it
            num_bytes, pending = 0, bytearray()
            async for part in body:
                num_bytes += len(part)
                if num_bytes > cache.max_bytes:
                    raise BadRequest("The prefix is larger than kv.disk_cache_mb.", status=413)
                pending += part
                if len(pending) >= WRITE_BYTES:
                    await asyncio.to_thread(file.write, bytes(pending))
                    pending.clear()
            file.write(pending)
            file.flush()
            head = await asyncio.to_thread(check_prefix, temporary, cache.info)
            temporary.replace(cache.folder / name_file(head))
    except ValueError as error:
        log.warning("a prefix that another replica has sent is not used: %s", error)
        if isinstance(error, BadRequest):
            raise
        raise BadRequest(f"The prefix is not used: {error}.", code="invalid_value") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return name_file(head)


def check_prefix(path: Path, info: ModelInfo) -> Head:
    """Return the head of a file. Raises ValueError unless it is intact and of this model.

    The engine checks the state in it before libllama loads that.
    """
    head = check_file(path)
    if head.fingerprint != info.fingerprint:
        raise ValueError("it is of another file, or of other settings of the model")
    if len(head.salt) > MAX_SALT:
        raise ValueError("its salt is too long")
    tokens = read_tokens(head)
    if len(tokens) > info.context_length:
        raise ValueError("it has more tokens than the context")
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= info.vocabulary_size:
        raise ValueError("it has tokens that are not in the vocabulary")
    return head
