"""Answers that coroutines wait for."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from cllm.errors import CLLMError

T = TypeVar("T")


def resolve(future: asyncio.Future[T], answer: T | CLLMError) -> None:
    """Set the result or the exception of ``future``, unless it has one or its caller has been
    cancelled.
    """
    if future.done():
        return
    if isinstance(answer, CLLMError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
