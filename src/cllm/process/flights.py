"""Requests on their way through the engine, and who reads them. What is the same is computed once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cllm.core.output import FinishReason, TokenOutput
from cllm.core.request import Request
from cllm.errors import CLLMError
from cllm.process.backlog import NO_CLAIM, Backlog, Place
from cllm.process.reservations import Claim
from cllm.process.results import ResultCache, digest, renamed

FAILURES = (FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.GRAMMAR)


class Stream:
    """The tokens of some requests on their way to one reader.

    place: where the first of them stood at its submission. num_shared and num_recalled of the requests are computed
    for somebody else too, or were before; num_reused_tokens are those of their prompts.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.place = Place()
        self.num_shared = 0
        self.num_recalled = 0
        self.num_reused_tokens = 0
        self.flights: dict[str, Flight] = {}  # by the reader's names
        self._outputs: list[TokenOutput] = []
        self._error: CLLMError | None = None
        self._listener: Callable[[], None] | None = None

    def put(self, output: TokenOutput) -> None:
        """Add ``output``; ``wake`` is to follow."""
        self._outputs.append(output)

    def fail(self, error: CLLMError) -> None:
        """Let the reader have ``error`` after the outputs that have come."""
        self._error = error
        self.wake()

    def listen(self, wake: Callable[[], None] | None) -> None:
        """``wake`` is called when something has come, and must not raise."""
        self._listener = wake

    def wake(self) -> None:
        if self._listener is not None:
            self._listener()

    def take(self) -> list[TokenOutput]:
        """All outputs since the last call. Raises what ``fail`` was given, if there are none."""
        outputs, self._outputs = self._outputs, []
        if not outputs and self._error is not None:
            raise self._error
        return outputs

    async def arrival(self) -> None:
        """Return when there is something to take. For one at a time, and not beside a listener."""
        if self._outputs or self._error:
            return
        arrived = asyncio.get_running_loop().create_future()
        self.listen(lambda: None if arrived.done() else arrived.set_result(None))
        try:
            await arrived
        finally:
            self.listen(None)


class Flight:
    """One request in the engine, for the readers of one or more streams, each of which has its own name for it.

    What has come so far is kept for those who may join, or ask for it again.
    """

    def __init__(self, request: Request, place: Place, key: bytes | None) -> None:
        """``key``: the digest; None if nobody may join and the outputs need not be kept."""
        self.request = request
        self.place = place
        self.key = key
        self.submitted = time.monotonic()
        self.begun: set[int] = set()  # indices whose first token has come
        self.going = set(range(request.params.n))
        self.stopped: set[int] = set()  # the engine has been told that they are long enough
        self.failed = False
        self.outputs: list[TokenOutput] = []
        self.readers: dict[Stream, list[str]] = {}  # and their names for it

    @property
    def is_wanted(self) -> bool:
        """Somebody reads it, or it is ending by itself."""
        return bool(self.readers) or self.going <= self.stopped

    def join(self, stream: Stream, request_id: str) -> None:
        """Let ``stream`` have what came so far and what will come, under the name ``request_id``."""
        for output in self.outputs:
            stream.put(renamed(output, request_id))
        self.readers.setdefault(stream, []).append(request_id)
        stream.flights[request_id] = self

    def leave(self, stream: Stream) -> None:
        self.readers.pop(stream, None)

    def put(self, output: TokenOutput) -> None:
        if self.key is not None:
            self.outputs.append(output)
        for stream, names in self.readers.items():
            for name in names:
                stream.put(output if name == output.request_id else renamed(output, name))

    def place_now(self) -> Place:
        """Where it stands, at the latest."""
        if self.begun:
            return Place()
        return Place(self.place.position, max(0.0, self.place.seconds - (time.monotonic() - self.submitted)))


class Flights:
    """All that is in the engine. Tells the backlog what happens, and the results what came of it."""

    def __init__(self, backlog: Backlog, results: ResultCache) -> None:
        self.backlog = backlog
        self._results = results
        self._flights: dict[str, Flight] = {}
        self._open: dict[bytes, Flight] = {}  # those that may be joined

    def __len__(self) -> int:
        return len(self._flights)

    def board(self, requests: list[Request], claim: Claim = NO_CLAIM) -> tuple[Stream, list[Request]]:
        """A stream for ``requests``, and those of them that must be computed. Raises QueueFull; then only a reservation
        is made.

        A deterministic request is recalled if its result is known, else shares the computation of one like it. Not
        if that has a lower class, and not if there is a limit to its own time, which the other would not keep.
        """
        keys = [digest(request) for request in requests]
        new: dict[bytes | str, Request] = {}
        for request, key in zip(requests, keys, strict=True):
            if key not in self._results and self._like(request, key) is None:
                new.setdefault(key if key is not None and may_share(request) else request.request_id, request)
        place = self.backlog.admit(list(new.values()), claim) if new else None
        stream = Stream(requests)
        places = []
        for request, key in zip(requests, keys, strict=True):
            if key is not None and key in self._results:
                places.append(self._recall(stream, request, key))
            elif (flight := self._like(request, key)) is not None:
                places.append(self._share(stream, request, flight))
            else:
                places.append(place or self.backlog.place(request))
                self._start(stream, request, key, places[-1])
                place = None
        stream.place = places[0]
        return stream, list(new.values())

    def _recall(self, stream: Stream, request: Request, key: bytes) -> Place:
        stream.num_recalled += 1
        stream.num_reused_tokens += len(request.prompt)
        for output in self._results.recall(key, request.request_id):
            stream.put(output)
        return Place()

    def _share(self, stream: Stream, request: Request, flight: Flight) -> Place:
        stream.num_shared += 1
        stream.num_reused_tokens += len(request.prompt)
        flight.join(stream, request.request_id)
        return flight.place_now()

    def _start(self, stream: Stream, request: Request, key: bytes | None, place: Place) -> None:
        shares = key is not None and may_share(request)
        flight = Flight(request, place, key if shares or self._results.is_on else None)
        flight.join(stream, request.request_id)
        self._flights[request.request_id] = flight
        if key is not None and shares:
            self._open[key] = flight
        self.backlog.submitted(request)

    def _like(self, request: Request, key: bytes | None) -> Flight | None:
        """A computation that gives what ``request`` asks for, and not later than one of its own would."""
        flight = self._open.get(key) if key is not None and may_share(request) else None
        if flight is None or flight.request.priority > request.priority:
            return None
        if flight.begun or flight.request.key == request.key:
            return flight
        own = self.backlog.place(request)
        sooner = flight.place.position <= own.position or flight.place_now().seconds < own.seconds
        return flight if sooner else None

    def put(self, outputs: list[TokenOutput]) -> None:
        """Hand the outputs of a step to their streams."""
        woken: dict[Stream, bool] = {}
        for output in outputs:
            flight = self._flights.get(output.request_id)
            if flight is not None:
                for stream in flight.readers:
                    woken[stream] = True
                self._put(flight, output)
        for stream in woken:
            stream.wake()

    def _put(self, flight: Flight, output: TokenOutput) -> None:
        flight.put(output)
        if output.token >= 0 and output.index not in flight.begun:
            self.backlog.begun(flight.request, is_first=not flight.begun)
            flight.begun.add(output.index)
        if output.finish:
            flight.going.discard(output.index)
            flight.failed = flight.failed or output.finish in FAILURES
            has_run = output.index in flight.begun
            self.backlog.ended(flight.request, num_running=has_run, num_waiting=not has_run)
            if not flight.going:
                self._remove(flight)
                if flight.key is not None and not flight.failed:
                    self._results.keep(flight.key, flight.outputs)

    def _remove(self, flight: Flight) -> None:
        del self._flights[flight.request.request_id]
        if flight.key is not None and self._open.get(flight.key) is flight:
            del self._open[flight.key]
        if not flight.begun:
            self.backlog.left_queue(flight.request)
        num_running = len(flight.going & flight.begun)
        self.backlog.ended(flight.request, num_running, len(flight.going) - num_running)

    def stop(self, stream: Stream, request_id: str, index: int) -> str | None:
        """A sequence has said all that its reader wants, and so all that others want who asked for the same.

        Returns the name under which the engine is to be told; None if it knows, or needs not know.
        """
        flight = stream.flights.get(request_id)
        if flight is None or index not in flight.going or index in flight.stopped:
            return None
        flight.stopped.add(index)
        return flight.request.request_id

    def leave(self, stream: Stream) -> list[str]:
        """``stream`` reads no longer; returns the names of those whose last reader it was and that have not ended."""
        unwanted = []
        for flight in set(stream.flights.values()):
            flight.leave(stream)
            name = flight.request.request_id
            if self._flights.get(name) is flight and not flight.is_wanted:
                self._remove(flight)
                unwanted.append(name)
        return unwanted

    def fail(self, error: CLLMError) -> None:
        """The engine will say nothing more about any of them."""
        flights, self._flights, self._open = self._flights, {}, {}
        self.backlog.clear()
        for stream in {stream: None for flight in flights.values() for stream in flight.readers}:
            stream.fail(error)


def may_share(request: Request) -> bool:
    return request.deadline is None and request.queue_timeout is None
