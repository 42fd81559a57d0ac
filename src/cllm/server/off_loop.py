"""Work that takes long because a request or its answer is large: done away from the event loop, which serves others.

It is done in one thread, because each thread that computes competes with the event loop for the GIL.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

T = TypeVar("T")

LARGE = 10_000  # bytes; a smaller body has less than 1,000 messages and parts
IS_LARGE = "cllm.is_large"  # in the scope of a request

thread = ThreadPoolExecutor(1, "cllm-large")


def note_size(request: Request, num_bytes: int) -> None:
    """Remember that ``num_bytes`` belong to ``request``."""
    if num_bytes > LARGE:
        request.scope[IS_LARGE] = True


async def off_loop(request: Request, work: Callable[[], T]) -> T:
    """Return the result of ``work`` on what belongs to ``request``; computed in the thread if that is large."""
    return await in_thread(work) if request.scope.get(IS_LARGE) else work()


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of ``work``, computed in the thread."""
    return await asyncio.get_running_loop().run_in_executor(thread, without_collecting, work)


def without_collecting(work: Callable[[], T]) -> T:
    """Return the result of ``work``. Its many new objects are not garbage: looking through them all, again and again,
    would take twice as long as ``work`` itself.
    """
    gc.disable()
    try:
        return work()
    finally:
        gc.enable()
