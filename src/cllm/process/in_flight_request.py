"""One request in the engine, and the streams that read its outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import msgspec

from cllm.core.output import SequenceTimes, TokenOutput
from cllm.core.request import Request, SequenceProgress
from cllm.engine.commands import Add, Resume
from cllm.errors import CLLMError
from cllm.process.backlog import QueuePosition
from cllm.process.results import rename_output


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

    @property
    def ends_reasoning(self) -> bool:
        """Whether the client has asked for the end of the reasoning."""
        return any(entry.ends_reasoning for entry in self.in_flight.values())

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
        self.ends_reasoning = False  # whether the client has asked for the end of the reasoning
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
