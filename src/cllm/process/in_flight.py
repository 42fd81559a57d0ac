"""Requests in the engine, and the streams that read them. Equal requests are computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from cllm.core.output import FAILURES, NO_TOKEN, FinishReason, TokenOutput
from cllm.core.request import Priority, Request, SequenceProgress
from cllm.engine.commands import Add, Command, EndReasoning, Resume, SetYielding
from cllm.errors import CLLMError
from cllm.process.backlog import NO_CLAIM, Backlog, QueuePosition
from cllm.process.in_flight_request import InFlightRequest, OutputStream
from cllm.process.request_counts import RequestCounts
from cllm.process.reservations import Claim
from cllm.process.results import ResultCache, digest

# what each unfinished sequence has delivered in another pool, by request id and index
Begun = Mapping[str, Mapping[int, SequenceProgress]]


class InFlightRequests:
    """All requests in the engine.

    Reports events to the backlog and finished results to the result cache.
    """

    def __init__(
        self,
        backlog: Backlog,
        results: ResultCache,
        on_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``on_end`` is called with the id of each request that ends, except by ``leave``."""
        self.backlog = backlog
        self._on_end = on_end
        self._results = results
        self._by_id: dict[str, InFlightRequest] = {}
        self._open: dict[bytes, InFlightRequest] = {}  # requests that streams may join
        self._counts = RequestCounts()

    def __len__(self) -> int:
        return len(self._by_id)

    def knows(self, request_id: str) -> bool:
        """Return whether a request has not been answered completely."""
        return request_id in self._by_id

    def find(self, request_id: str) -> Request | None:
        """Return a request that has not been answered completely."""
        entry = self._by_id.get(request_id)
        return None if entry is None else entry.request

    def list_all(self) -> list[InFlightRequest]:
        """Return the requests that have not been answered completely."""
        return list(self._by_id.values())

    def list_waiting(self, request_ids: Iterable[str], priority: Priority) -> list[str]:
        """Return the requests among ``request_ids`` that are of this class and are not known to
        have begun.
        """
        entries = [self._by_id[name] for name in request_ids if name in self._by_id]
        return [
            entry.request.request_id
            for entry in entries
            if entry.request.priority == priority and not (entry.started or entry.has_begun)
        ]

    def make_command(self, request_id: str) -> Add | Resume | None:
        """Return the command that makes another engine compute the rest of a request.

        None means that the request has ended, for example because the engine was asked to stop all
        sequences that were left.
        """
        entry = self._by_id.get(request_id)
        if entry is None:
            return None
        ended = entry.unfinished & entry.stopped
        self.put([make_end(request_id, index) for index in sorted(ended)])
        return entry.make_command() if entry.unfinished else None

    def make_commands(self, request_id: str) -> list[Command]:
        """Return the command of ``make_command``, and those that say what the request's clients
        have asked for meanwhile. If the request has ended, there are none.
        """
        first, entry = self.make_command(request_id), self._by_id.get(request_id)
        if first is None or entry is None:
            return []
        more: list[Command] = [SetYielding(request_id, True)] if entry.yields else []
        return [first, *more, *([EndReasoning(request_id)] if entry.ends_reasoning else [])]

    def submit(
        self,
        requests: list[Request],
        claim: Claim = NO_CLAIM,
        begun: Begun | None = None,
        ends_reasoning: bool = False,
    ) -> tuple[OutputStream, list[Request]]:
        """Return a stream for ``requests``, and those of them that must be computed.

        Raises QueueFull; then nothing has changed, except that a place may be reserved.

        A deterministic request takes a known result from the cache, or shares the computation of an
        equal request, unless that has a lower class. A request with its own time limit is never
        shared.

        Requests that another pool has ``begun`` are computed by themselves, except those that it
        has finished. With ``ends_reasoning``, they end their reasoning at once.
        """
        keys = [None if begun is not None else digest(request) for request in requests]
        requests = [
            request.with_seed() if key is None else request
            for request, key in zip(requests, keys, strict=True)
        ]
        new: dict[bytes | str, Request] = {}
        for request, key in zip(requests, keys, strict=True):
            if begun is not None and not begun[request.request_id]:
                continue
            if key not in self._results and self._find_equal(request, key) is None:
                new.setdefault(
                    key if key is not None and may_share(request) else request.request_id, request
                )
        is_admitted = begun is not None  # by the other pool
        first = self.backlog.admit(list(new.values()), claim) if new and not is_admitted else None
        stream = OutputStream(requests)
        stream.num_ahead, stream.busiest = len(self._by_id), self._counts.find_busiest()
        positions = []
        for request, key in zip(requests, keys, strict=True):
            if begun is not None and not begun[request.request_id]:
                positions.append(QueuePosition())
            elif key is not None and key in self._results:
                positions.append(self._recall(stream, request, key))
            elif (entry := self._find_equal(request, key)) is not None:
                positions.append(self._share(stream, request, entry))
            else:
                positions.append(first or self.backlog.estimate_position(request))
                own = None if begun is None else begun[request.request_id]
                self._start(stream, request, key, positions[-1], own)
                first = None
                if ends_reasoning:
                    self.end_reasoning(request.request_id)
        stream.queue_position = positions[0]
        return stream, list(new.values())

    def _recall(self, stream: OutputStream, request: Request, key: bytes) -> QueuePosition:
        stream.num_recalled += 1
        stream.num_reused_tokens += len(request.prompt)
        for output in self._results.recall(key, request.request_id):
            stream.put(output)
        return QueuePosition()

    def _share(
        self, stream: OutputStream, request: Request, entry: InFlightRequest
    ) -> QueuePosition:
        stream.num_shared += 1
        stream.num_reused_tokens += len(request.prompt)
        entry.join(stream, request.request_id)
        return entry.estimate_position()

    def _start(
        self,
        stream: OutputStream,
        request: Request,
        key: bytes | None,
        queue_position: QueuePosition,
        begun: Mapping[int, SequenceProgress] | None,
    ) -> None:
        shares = key is not None and may_share(request)
        entry = InFlightRequest(
            request, queue_position, key if shares or self._results.is_on else None
        )
        entry.join(stream, request.request_id)
        self._by_id[request.request_id] = entry
        self._counts.add(request.account)
        if key is not None and shares:
            self._open[key] = entry
        self.backlog.record_submission(request)
        if begun is not None:
            self.backlog.record_end(request, 0, request.params.n - len(begun))
            entry.begin_after(begun)

    def _find_equal(self, request: Request, key: bytes | None) -> InFlightRequest | None:
        """Return an equal request in the engine, or None if there is none or ``request`` itself
        would probably be served sooner.
        """
        entry = self._open.get(key) if key is not None and may_share(request) else None
        if entry is None or entry.request.priority > request.priority:
            return None
        if entry.started or entry.request.account == request.account:
            return entry
        own = self.backlog.estimate_position(request)
        sooner = (
            entry.queue_position.position <= own.position
            or entry.estimate_position().seconds < own.seconds
        )
        return entry if sooner else None

    def put(self, outputs: list[TokenOutput], engine: int = 0) -> None:
        """Hand the outputs of a step of the engine with this number to their streams."""
        woken: dict[OutputStream, bool] = {}
        for output in outputs:
            entry = self._by_id.get(output.request_id)
            if entry is not None:
                for stream in entry.readers:
                    woken[stream] = True
                if output.times is not None:
                    entry.engine = engine
                self._put(entry, output)
        for stream in woken:
            stream.wake()

    def _put(self, entry: InFlightRequest, output: TokenOutput) -> None:
        entry.put(output)
        if output.token >= 0 and output.index not in entry.started:
            self.backlog.record_first_token(entry.request, is_first=not entry.started)
            entry.started.add(output.index)
        if output.finish:
            entry.unfinished.discard(output.index)
            entry.failed = entry.failed or output.finish in FAILURES
            has_run = output.index in entry.started
            self.backlog.record_end(entry.request, num_running=has_run, num_waiting=not has_run)
            if not entry.unfinished:
                self._remove(entry)
                self._on_end(entry.request.request_id)
                if entry.key is not None and not entry.failed:
                    self._results.store(entry.key, entry.outputs)

    def _remove(self, entry: InFlightRequest) -> None:
        del self._by_id[entry.request.request_id]
        self._counts.add(entry.request.account, -1)
        if entry.key is not None and self._open.get(entry.key) is entry:
            del self._open[entry.key]
        if not entry.started:
            self.backlog.record_departure(entry.request)
        num_running = len(entry.unfinished & entry.started)
        self.backlog.record_end(entry.request, num_running, len(entry.unfinished) - num_running)

    def stop(self, stream: OutputStream, request_id: str, index: int) -> str | None:
        """Stop a sequence whose reader needs no more tokens. Readers of equal requests then need no
        more tokens either.

        Returns the request id under which the engine must stop the sequence; None if the engine has
        ended it or has already been asked to.
        """
        entry = stream.in_flight.get(request_id)
        if entry is None or index not in entry.unfinished or index in entry.stopped:
            return None
        entry.stopped.add(index)
        return entry.request.request_id

    def leave(self, stream: OutputStream) -> list[str]:
        """Detach ``stream``.

        Returns the ids of unfinished requests that no stream reads any more.
        """
        unwanted = []
        for entry in set(stream.in_flight.values()):
            entry.leave(stream)
            name = entry.request.request_id
            if self._by_id.get(name) is entry and not entry.is_wanted:
                self._remove(entry)
                unwanted.append(name)
        return unwanted

    def set_unread(self, stream: OutputStream, *, is_unread: bool) -> None:
        """Note that the client of ``stream`` does not read, or does again."""
        for entry in stream.in_flight.values():
            (entry.unread.add if is_unread else entry.unread.discard)(stream)

    def take_yielding(self, stream: OutputStream) -> list[tuple[str, bool]]:
        """Return the requests of ``stream`` that yield to others from now on (True), or no longer
        (False). A request yields if none of its clients reads. Call this whenever that may have
        changed.
        """
        changed = []
        for entry in set(stream.in_flight.values()):
            name = entry.request.request_id
            if entry.is_unread != entry.yields and self._by_id.get(name) is entry:
                entry.yields = entry.is_unread
                changed.append((name, entry.yields))
        return changed

    def end_reasoning(self, request_id: str) -> None:
        """Note that the client of a request has asked for the end of its reasoning."""
        if (entry := self._by_id.get(request_id)) is not None:
            entry.ends_reasoning = True

    def estimate_turn(self, request_id: str) -> tuple[bool, int, int]:
        """Return a sort key: how soon the request would get its next token if it ran alone."""
        entry = self._by_id.get(request_id)
        if entry is None:  # a request for embeddings
            return (False, 0, 0)
        return entry.yields, entry.request.priority, len(entry.request.prompt)

    def note_retry(self, request_ids: Iterable[str]) -> None:
        """Note that the engine that had these requests has ended."""
        for request_id in request_ids:
            if (entry := self._by_id.get(request_id)) is not None:
                entry.num_retries += 1

    def note_begun(self, request_ids: Iterable[str]) -> None:
        """Note that requests have been in a step, so that their time in the queue is over."""
        for request_id in request_ids:
            if (entry := self._by_id.get(request_id)) is not None:
                entry.has_begun = True

    def fail_one(self, request_id: str, error: CLLMError) -> None:
        """End the streams that read a request with ``error``."""
        entry = self._by_id.get(request_id)
        if entry is not None:
            self._remove(entry)
            self._on_end(request_id)
            for stream in entry.readers:
                stream.fail(error)

    def fail(self, error: CLLMError) -> None:
        """End all streams with ``error``, because the engine cannot answer them."""
        entries, self._by_id, self._open = self._by_id, {}, {}
        self._counts = RequestCounts()
        self.backlog.clear()
        for stream in {stream: None for entry in entries.values() for stream in entry.readers}:
            stream.fail(error)


def may_share(request: Request) -> bool:
    return request.deadline is None and request.queue_timeout is None


def make_end(request_id: str, index: int) -> TokenOutput:
    """Return the last output of a sequence that its reader has stopped."""
    return TokenOutput(request_id, index, NO_TOKEN, FinishReason.ABORT, is_text=False)
