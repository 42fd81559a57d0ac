"""Requests for embeddings in the engine, and the callers that wait for them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import msgspec

from cllm.core.output import EmbeddingOutput
from cllm.core.request import EmbeddingRequest
from cllm.engine.commands import Embed
from cllm.errors import CLLMError, EngineError
from cllm.process.backlog import SHARE, QueueFull, QueueLimits
from cllm.process.futures import resolve

MIN_TOKENS = 32  # a step with fewer takes about as long
MAX_TOKENS = 4_000_000  # in the engine at a time, whatever the limits of the queue are


class Waiter:
    """The vectors of one request.

    ``started`` resolves when the engine has started the request, ``done`` when all vectors have
    arrived.
    """

    def __init__(self, request: EmbeddingRequest) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.started: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[list[bytes]] = loop.create_future()
        self.vectors: list[bytes] = []
        self.num_tokens_left = sum(map(len, request.texts))

    def put(self, embedded: EmbeddingOutput) -> None:
        resolve(self.started, None)
        for vector in embedded.vectors:
            self.num_tokens_left -= len(self.request.texts[len(self.vectors)])
            self.vectors.append(vector)
        if embedded.error:
            self.fail(EngineError(f"The texts could not be embedded: {embedded.error}."))
        elif len(self.vectors) == len(self.request.texts):
            resolve(self.done, self.vectors)

    def fail(self, error: CLLMError) -> None:
        resolve(self.done, error)


class InFlightEmbeddings:
    """All requests for embeddings in the engine. Rejects a request that would exceed a limit."""

    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds."""
        self._limits = limits
        self._clock = clock
        self._waiters: dict[str, Waiter] = {}
        # Sums over the latest messages; the last one has the weight 1. A mean of the costs of each
        # message would be wrong, because short texts cost more per token.
        self._seconds = self._tokens = 0.0
        self._last = 0.0  # when the last vectors arrived, or the wait for the first ones began

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def _seconds_per_token(self) -> float:
        return self._seconds / self._tokens if self._tokens else 0.0

    def begin(self, request: EmbeddingRequest) -> Waiter:
        """Add a request.

        Raises QueueFull; a request that can begin immediately is never rejected.
        """
        waiter = Waiter(request)
        if self._waiters:
            self._check(waiter)
        else:
            self._last = self._clock()
        self._waiters[request.request_id] = waiter
        return waiter

    def _count_ahead(self, account: str) -> tuple[float, float]:
        """Return the requests and tokens ahead of a new request.

        All requests of its own account count. Accounts take turns, so each other account counts at
        most one more.
        """
        loads: dict[str, tuple[int, int]] = {}
        for waiter in self._waiters.values():
            count, tokens = loads.get(waiter.request.account, (0, 0))
            loads[waiter.request.account] = count + 1, tokens + waiter.num_tokens_left
        turns = loads.get(account, (0, 0))[0] + 1
        shares = {other: min(1.0, turns / count) for other, (count, _) in loads.items()}
        num_requests = sum(shares[other] * count for other, (count, _) in loads.items())
        return round(num_requests, 6), sum(
            shares[other] * tokens for other, (_, tokens) in loads.items()
        )

    def _check(self, waiter: Waiter) -> None:
        limits = self._limits
        num_requests, num_tokens = self._count_ahead(waiter.request.account)
        seconds = num_tokens * self._seconds_per_token
        num_tokens += waiter.num_tokens_left
        max_tokens = math.inf if limits.tokens is None else limits.tokens
        all_tokens = sum(waiter.num_tokens_left for waiter in [*self._waiters.values(), waiter])
        if all_tokens > MAX_TOKENS:
            num_tokens, max_tokens = all_tokens, MAX_TOKENS
        if limits.requests is not None and num_requests > limits.requests:
            what = (
                f"{num_requests:.0f} requests for embeddings would wait (limit {limits.requests})"
            )
            raise QueueFull(what, "requests", seconds / num_requests)
        if num_tokens > max_tokens:
            what = f"{num_tokens:.0f} tokens would wait to be embedded (limit {max_tokens})"
            raise QueueFull(
                what, "tokens", min(seconds, (num_tokens - max_tokens) * self._seconds_per_token)
            )
        if limits.seconds is not None and seconds > limits.seconds:
            what = f"the first vector would take {seconds:.1f} seconds (limit {limits.seconds:g})"
            raise QueueFull(what, "seconds", seconds - limits.seconds)

    def put(self, embedded: EmbeddingOutput) -> None:
        waiter = self._waiters.get(embedded.request_id)
        if waiter is None:
            return
        before = waiter.num_tokens_left
        waiter.put(embedded)
        if count := before - waiter.num_tokens_left:
            now = self._clock()
            self._seconds = (1 - SHARE) * self._seconds + now - self._last
            self._tokens = (1 - SHARE) * self._tokens + max(count, MIN_TOKENS)
            self._last = now

    def forget(self, waiter: Waiter) -> bool:
        """Remove a request.

        Returns whether the engine must abort it, because it has not finished.
        """
        known = self._waiters.pop(waiter.request.request_id, None)
        waiter.started.cancel()
        if not waiter.done.cancel() and not waiter.done.cancelled():
            waiter.done.exception()  # so that asyncio does not report it as never retrieved
        return known is not None and len(waiter.vectors) < len(waiter.request.texts)

    def knows(self, request_id: str) -> bool:
        """Return whether a request has not been answered completely."""
        waiter = self._waiters.get(request_id)
        return waiter is not None and not waiter.done.done()

    def find(self, request_id: str) -> EmbeddingRequest | None:
        """Return a request that has not been answered completely."""
        return self._waiters[request_id].request if self.knows(request_id) else None

    def make_command(self, request_id: str) -> Embed | None:
        """Return the command that makes another engine embed the rest of a request's texts; None if
        nothing is left.
        """
        if not self.knows(request_id):
            return None
        waiter = self._waiters[request_id]
        left = waiter.request.texts[len(waiter.vectors) :]
        return Embed(msgspec.structs.replace(waiter.request, texts=left))

    def fail_one(self, request_id: str, error: CLLMError) -> None:
        """End a request with ``error``. Ignores an unknown one."""
        if (waiter := self._waiters.get(request_id)) is not None:
            waiter.fail(error)

    def fail(self, error: CLLMError) -> None:
        """End all requests with ``error``, because the engine cannot answer them."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter.fail(error)
