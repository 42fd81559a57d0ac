"""Requests in the engine, and the streams that read them. Equal requests are computed once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from cllm.core.output import FAILURES, NO_TOKEN, FinishReason, SequenceTimes, TokenOutput
from cllm.core.request import Priority, Request, SequenceProgress
from cllm.engine.commands import Add, Resume
from cllm.errors import CLLMError
from cllm.process.backlog import NO_CLAIM, Backlog, QueuePosition
from cllm.process.request_counts import RequestCounts
from cllm.process.reservations import Claim
from cllm.process.results import ResultCache, digest, rename_output

# what each unfinished sequence has delivered in another pool, by request id and index
Begun = Mapping[str, Mapping[int, SequenceProgress]]


class OutputStream:
    """Delivers the tokens of some requests to one reader.

    ``queue_position`` is that of the first request when it was submitted. ``num_shared`` requests
    share the computation of an equal request, and ``num_recalled`` were found in the result cache.
    The prompts of both have ``num_reused_tokens`` tokens. When it was made, the engine had
    ``num_ahead`` requests. ``busiest`` is the account with most of them, and their number.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.queue_position = QueuePosition()
        self.num_shared = 0
        self.num_recalled = 0
        self.num_reused_tokens = 0
        self.num_ahead = 0
        self.busiest = ("", 0)
        self.in_flight: dict[str, InFlightRequest] = {}  # by the reader's request ids
        self._outputs: list[TokenOutput] = []
        self._error: CLLMError | None = None
        self._listener: Callable[[], None] | None = None

    def put(self, output: TokenOutput) -> None:
        """Add ``output``. The caller must then call ``wake``."""
        self._outputs.append(output)

    def fail(self, error: CLLMError) -> None:
        """Raise ``error`` in the reader, after the outputs that have arrived."""
        self._error = error
        self.wake()

    def listen(self, wake: Callable[[], None] | None) -> None:
        """Call ``wake``, which must not raise, whenever something has arrived. With None, stop
        calling.
        """
        self._listener = wake

    def wake(self) -> None:
        if self._listener is not None:
            self._listener()

    def take(self) -> list[TokenOutput]:
        """Return all outputs since the last call.

        If there are none, raises the error that ``fail`` got, if any.
        """
        outputs, self._outputs = self._outputs, []
        if not outputs and self._error is not None:
            raise self._error
        return outputs

    async def arrival(self) -> None:
        """Wait until there is something to take.

        Only one task may wait, and only while there is no listener.
        """
        if self._outputs or self._error:
            return
        arrived = asyncio.get_running_loop().create_future()
        self.listen(lambda: None if arrived.done() else arrived.set_result(None))
        try:
            await arrived
        finally:
            self.listen(None)


class InFlightRequest:
    """One request in the engine, read by one or more streams, each of which has its own request id
    for it.

    The outputs so far are kept for streams that join later, and for the result cache.
    """

    def __init__(self, request: Request, queue_position: QueuePosition, key: bytes | None) -> None:
        """``key`` is the request's digest, or None if no other stream may join and the outputs need
        not be kept.
        """
        self.request = request
        self.queue_position = queue_position
        self.key = key
        self.submitted_at = time.monotonic()
        self.started: set[int] = set()  # indices of sequences that have their first token
        self.unfinished = set(range(request.params.n))
        self.stopped: set[int] = set()  # sequences that the engine was asked to stop
        self.failed = False
        self.has_begun = False  # whether it is known to have been in a step or to have a token
        self.outputs: list[TokenOutput] = []
        self._progress: dict[int, SequenceProgress] = {}  # what each sequence has delivered
        self.readers: dict[OutputStream, list[str]] = {}  # with their ids for the request
        self.unread: set[OutputStream] = set()  # readers whose clients do not read
        self.yields = False  # what the engine was told last
        self.times: dict[int, SequenceTimes] = {}  # of its sequences, once they have a token
        self.engine = 0  # the number of the engine that computed it last
        self.num_retries = 0  # engines that ended while they had it

    @property
    def is_wanted(self) -> bool:
        """Whether a stream reads it, or all of its unfinished sequences have been asked to stop."""
        return bool(self.readers) or self.unfinished <= self.stopped

    @property
    def is_unread(self) -> bool:
        """Whether none of the clients of its streams reads."""
        return bool(self.unread) and self.unread >= self.readers.keys()

    def join(self, stream: OutputStream, request_id: str) -> None:
        """Give ``stream`` the outputs so far and all later ones, under the id ``request_id``."""
        for output in self.outputs:
            stream.put(rename_output(output, request_id))
        self.readers.setdefault(stream, []).append(request_id)
        stream.in_flight[request_id] = self

    def begin_after(self, begun: Mapping[int, SequenceProgress]) -> None:
        """Begin after what another pool has delivered, which has finished all sequences that are
        not in ``begun``.
        """
        self.unfinished = set(begun)
        self._progress = dict(begun)
        self.has_begun = len(begun) < self.request.params.n or any(
            progress.tokens for progress in begun.values()
        )

    def leave(self, stream: OutputStream) -> None:
        self.readers.pop(stream, None)
        self.unread.discard(stream)

    def put(self, output: TokenOutput) -> None:
        if self.key is not None:
            self.outputs.append(output)
        if output.times is not None:
            self._note_times(output.index, output.times)
        if output.prefill is not None:
            self.has_begun = True
        elif not output.finish:
            self._record_progress(output)
        else:
            self._progress.pop(output.index, None)
        for stream, names in self.readers.items():
            for name in names:
                stream.put(output if name == output.request_id else rename_output(output, name))

    def _note_times(self, index: int, times: SequenceTimes) -> None:
        """Keep the times of a sequence. It has waited in the engine that had it first."""
        before = self.times.get(index)
        if before is not None and before.prefill is not None:
            times = msgspec.structs.replace(before, num_parked=times.num_parked)
        self.times[index] = times

    def _record_progress(self, output: TokenOutput) -> None:
        progress = self._progress.get(output.index)
        if progress is None:
            progress = self._progress[output.index] = SequenceProgress()
        if output.token >= 0:
            progress.tokens.append(output.token)
        if output.prompt_logprobs or output.mirostat_mu is not None:
            scored = progress.num_prompt_logprobs + len(output.prompt_logprobs or ())
            self._progress[output.index] = SequenceProgress(
                progress.tokens, scored, output.mirostat_mu
            )

    def make_command(self) -> Add | Resume:
        """Return the command that makes another engine compute the rest."""
        has_begun = self.started or self.has_begun or self._progress
        limits = ("deadline",) if has_begun else ("deadline", "queue_timeout")
        elapsed = time.monotonic() - self.submitted_at
        left = {name: getattr(self.request, name) for name in limits}
        left = {name: value - elapsed for name, value in left.items() if value is not None}
        request = self.request
        if left or request.queue_timeout is not None:
            request = msgspec.structs.replace(request, **{"queue_timeout": None, **left})
        if not self._progress and len(self.unfinished) == request.params.n:
            return Add(request)
        begun = {
            index: self._progress.get(index, SequenceProgress())
            for index in sorted(self.unfinished)
        }
        return Resume(request, begun)

    def estimate_position(self) -> QueuePosition:
        """Return the queue position at submission, minus the seconds since then; position 0 if it
        has started.
        """
        if self.started:
            return QueuePosition()
        return QueuePosition(
            self.queue_position.position,
            max(0.0, self.queue_position.seconds - (time.monotonic() - self.submitted_at)),
        )


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

    def submit(
        self, requests: list[Request], claim: Claim = NO_CLAIM, begun: Begun | None = None
    ) -> tuple[OutputStream, list[Request]]:
        """Return a stream for ``requests``, and those of them that must be computed.

        Raises QueueFull; then nothing has changed, except that a place may be reserved.

        A deterministic request takes a known result from the cache, or shares the computation of an
        equal request, unless that has a lower class. A request with its own time limit is never
        shared.

        Requests that another pool has ``begun`` are computed by themselves, except those that it
        has finished.
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

    def yields(self, request_id: str) -> bool:
        """Return whether a request yields to others."""
        entry = self._by_id.get(request_id)
        return entry is not None and entry.yields

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
