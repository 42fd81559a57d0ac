"""Long work on large requests and answers runs in another thread, so that the event loop can serve
other clients.

There is one such thread, because each thread that computes competes with the event loop for the
GIL.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from cllm.errors import EngineError
from cllm.server.resolve import service_for
from cllm.server.sse import until_disconnect

T = TypeVar("T")

LARGE = 10_000  # bytes; a smaller body has less than 1,000 messages and parts
MAX_WAITING_BYTES = 64_000_000  # of large requests; reading that many takes a few seconds
NUM_BYTES = "cllm.num_bytes"  # in the scope of a request

thread = ThreadPoolExecutor(1, "cllm-large")
waiting: dict[Request, int] = {}  # the requests that wait for the thread, and their sizes in bytes


def admit(request: Request, num_bytes: int) -> None:
    """Record that ``num_bytes`` belong to ``request``.

    Raises EngineError if that makes ``request`` large and too many bytes of large requests wait
    already.
    """
    size = request.scope[NUM_BYTES] = request.scope.get(NUM_BYTES, 0) + num_bytes
    if size > LARGE and waiting and sum(waiting.values()) + size > MAX_WAITING_BYTES:
        service_for(request).metrics.refused("large")
        raise EngineError("Too many large requests wait to be read; please retry.")


async def off_loop(request: Request, work: Callable[[], T]) -> T:
    """Return the result of ``work`` on the data of ``request``.

    If that is large, ``work`` runs in the thread.

    Raises ClientGone if the client disconnects meanwhile. If ``work`` has not started by then, it
    never does.
    """
    size = request.scope.get(NUM_BYTES, 0)
    if size <= LARGE:
        return work()
    waiting[request] = size
    try:
        return await until_disconnect(request, in_thread(work))
    finally:
        del waiting[request]


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of ``work``, computed in the thread."""
    # On cancellation this list is emptied: the thread's queue would keep ``work`` and everything
    # that it refers to.
    pending = [work]
    try:
        return await asyncio.get_running_loop().run_in_executor(
            thread, lambda: without_gc(pending.pop())
        )
    finally:
        pending.clear()


def without_gc(work: Callable[[], T]) -> T:
    """Return the result of ``work``, without garbage collection: scanning its many new objects
    again and again would take twice as long as ``work`` itself.
    """
    gc.disable()
    try:
        return work()
    finally:
        gc.enable()
