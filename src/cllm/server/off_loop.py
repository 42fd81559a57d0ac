"""Runs long work on large requests and answers in another thread, so that the event loop can serve
other clients.

There is only one such thread, because each thread that computes competes with the event loop for
the GIL.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cllm.errors import EngineError
from cllm.server.call import Call
from cllm.server.http.sse import until_disconnect

T = TypeVar("T")

LARGE = 10_000  # bytes; a smaller body has less than 1,000 messages and parts
MAX_WAITING_BYTES = 64_000_000  # of large requests; reading that many takes a few seconds

thread = ThreadPoolExecutor(1, "cllm-large")
waiting: dict[Call, int] = {}  # the calls that wait for the thread, and their sizes in bytes


def admit(call: Call, num_bytes: int) -> None:
    """Record that ``num_bytes`` belong to ``call``.

    Raises EngineError if that makes ``call`` large and too many bytes of large requests wait
    already.
    """
    call.num_bytes += num_bytes
    is_large = call.num_bytes > LARGE
    if is_large and waiting and sum(waiting.values()) + call.num_bytes > MAX_WAITING_BYTES:
        call.state.registry.metrics.count_rejection("large")
        raise EngineError("Too many large requests are waiting to be read; please retry.")


async def off_loop(call: Call, work: Callable[[], T]) -> T:
    """Return the result of ``work`` on the data of ``call``. If the data is large, ``work`` runs in
    the thread.

    Raises ClientGone if the client disconnects meanwhile. If ``work`` has not started by then, it
    never does.
    """
    if call.num_bytes <= LARGE:
        return work()
    waiting[call] = call.num_bytes
    try:
        running = in_thread(work)
        if call.request is None:
            return await running
        return await until_disconnect(call.request, running)
    finally:
        del waiting[call]


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of ``work``, computed in the thread."""
    # On cancellation this list is emptied. Otherwise the thread's queue would keep ``work`` and
    # everything that it refers to.
    pending = [work]
    try:
        return await asyncio.get_running_loop().run_in_executor(
            thread, lambda: without_gc(pending.pop())
        )
    finally:
        pending.clear()


def without_gc(work: Callable[[], T]) -> T:
    """Return the result of ``work``, computed without garbage collection.

    Scanning its many new objects again and again would take twice as long as ``work`` itself.
    """
    gc.disable()
    try:
        return work()
    finally:
        gc.enable()
