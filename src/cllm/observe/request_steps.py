"""The steps of a request within its phases, which are noted only if the request is traced."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Work:
    """Work that is done many times in small parts: how often, and for how long in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds

    def timed(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function that does the same, and whose time is added."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            begun = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(time.monotonic() - begun)

        return call

    def timed_async(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """Do what ``timed`` does for a coroutine function; waiting counts too."""

        async def call(*args: P.args, **kwargs: P.kwargs) -> T:
            begun = time.monotonic()
            try:
                return await function(*args, **kwargs)
            finally:
                self.add(time.monotonic() - begun)

        return call


@dataclass(slots=True, eq=False)
class RequestSteps:
    """The steps of a request that is traced, beside the chunks of its prompt in ``times``.

    ``span`` is OpenTelemetry's span of the request. ``preparation`` has the names, begins and ends
    of the steps before the submission, in seconds on the monotonic clock. Tokens become text in
    ``detokenizing``; the parts of a stream are written in ``formatting`` and ``sending``, which
    includes waiting for a client that does not read.
    """

    span: Any
    preparation: list[tuple[str, float, float]] = field(default_factory=list)
    detokenizing: Work = field(default_factory=Work)
    formatting: Work = field(default_factory=Work)
    sending: Work = field(default_factory=Work)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Note a step of the preparation."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.preparation.append((name, begun, time.monotonic()))
