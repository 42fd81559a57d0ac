"""Embeds texts in small batches between the steps that generate."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt

from cllm.backends.base import Backend
from cllm.core.batch import MAX_CHUNKS, Chunk
from cllm.core.output import EmbeddingOutput, TokenOutput
from cllm.core.request import EmbeddingRequest, Priority
from cllm.engine.side_jobs import Record, SideJob
from cllm.errors import EngineError
from cllm.scheduler.scheduler import Scheduler
from cllm.scheduler.step_cost import LEAST, update_mean

log = logging.getLogger("cllm.engine")


class EmbeddingJob:
    """A request, ``num_started`` of whose texts have been started."""

    def __init__(self, request: EmbeddingRequest) -> None:
        self.request = request
        self.num_started = 0
        self.has_failed = False


class Text:
    """One text. ``total`` pools the embeddings of its first ``start`` tokens, computed so far."""

    def __init__(self, job: EmbeddingJob, tokens: list[int]) -> None:
        self.job = job
        self.tokens = tokens
        self.runs_alone = False
        self.reset()

    def reset(self) -> None:
        self.start = 0
        self.total: npt.NDArray[np.float32] | float = 0.0

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.start


class Embeddings(SideJob):
    """The queue of texts to embed, and their computation. ``take`` returns the results.

    Higher classes come first. Within a class the accounts take turns, text by text, and so do the
    requests of an account. At most one text is partly computed; the next batch continues it. A
    failed batch is retried text by text, so that only the text that causes the failure fails.
    """

    def __init__(self, backend: Backend, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._clock = clock
        # by account
        self._jobs: dict[Priority, dict[str, deque[EmbeddingJob]]] = {
            priority: {} for priority in Priority
        }
        self._current: Text | None = None
        self._retries: deque[Text] = deque()  # texts of a failed batch
        self._longest = 0
        self._has_work = False
        self._has_turn = False  # in this step
        self._done: list[EmbeddingOutput] = []
        self._seconds_per_token = 0.0
        self.num_tokens = 0  # computed so far
        self.record: Record | None = None  # see Engine

    def add(self, request: EmbeddingRequest) -> None:
        if request.texts:
            self._jobs[request.priority].setdefault(request.account, deque()).append(
                EmbeddingJob(request)
            )
            self._has_work = True

    def abort(self, request_id: str) -> None:
        """Forget a request. Ignores an unknown one."""
        for accounts in self._jobs.values():
            for account, jobs in [*accounts.items()]:
                left = deque(job for job in jobs if job.request.request_id != request_id)
                accounts[account] = left
                if not left:
                    del accounts[account]
        if self._current is not None and self._current.job.request.request_id == request_id:
            self._current = None
        self._retries = deque(
            text for text in self._retries if text.job.request.request_id != request_id
        )
        self._has_work = self._has_texts()

    def _has_texts(self) -> bool:
        return self._current is not None or bool(self._retries) or any(self._jobs.values())

    def has_work(self) -> bool:
        return self._has_work

    def before(self, now: float) -> list[TokenOutput]:
        self._has_turn = self._has_work and self._scheduler.reserve(0.5)
        return []

    def after(self, now: float) -> list[TokenOutput]:
        """Embed as many tokens as fit into the rest of the step's target time, at least
        LEAST, unless this step's time belongs to decoding sequences.
        """
        if not self._has_turn:
            return []
        target, left = self._scheduler.target_itl, None
        if math.isfinite(target) and self._scheduler.sequences.running:
            left = target - (now - self._scheduler.step.at)
        try:
            num_tokens = self.embed_batch(self.count_tokens_for(left))
            self.observe(num_tokens, self._clock() - now)
            self._scheduler.charge(num_tokens * self._seconds_per_token)
        except Exception as error:
            log.exception("cannot compute embeddings")
            self.fail_all(str(error))
        self._has_work = self._has_texts()
        return []

    def take(self) -> list[EmbeddingOutput]:
        """Return the results since the last call."""
        done, self._done = self._done, []
        return done

    def count_tokens_for(self, seconds: float | None) -> int:
        """Return how many tokens can be embedded in ``seconds``, at least LEAST.

        The result is at most the backend's largest batch, and exactly that if ``seconds`` is None.
        """
        largest = self._backend.info.max_embedding_batch_tokens
        if seconds is None:
            return largest
        fitting = int(seconds / self._seconds_per_token) if self._seconds_per_token else 0
        return min(largest, max(LEAST, fitting))

    def embed_batch(self, num_tokens: int) -> int:
        """Embed about ``num_tokens`` tokens in one call of the backend; return the number computed.

        More than ``num_tokens`` are computed only if the model cannot split a text.
        """
        parts = [(text, self._chunk(text, room)) for text, room in self._choose(num_tokens)]
        if not parts:  # all requests have been aborted
            return 0
        if self.record is not None:
            names = [text.job.request.request_id for text, _ in parts]
            num_chosen = sum(len(chunk.tokens) for _, chunk in parts)
            self.record.begin(names, num_chosen * self._seconds_per_token)
        try:
            rows = self._backend.embed([chunk for _, chunk in parts])
        except Exception as error:
            if not isinstance(error, EngineError):
                log.exception("a batch of embeddings failed")
            self._handle_failure([text for text, _ in parts], error)
            return 0
        self._current = None
        for (text, chunk), row in zip(parts, rows, strict=True):
            self._advance(text, chunk, row)
        count = sum(len(chunk.tokens) for _, chunk in parts)
        self.num_tokens += count
        return count

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn that embedding ``num_tokens`` tokens took ``seconds``."""
        if num_tokens:
            each = seconds / max(num_tokens, LEAST)
            self._seconds_per_token = update_mean(self._seconds_per_token, each)

    # --- one batch -------------------------------------------------------------------------------

    def _choose(self, room: int) -> Iterator[tuple[Text, int]]:
        """Yield the texts of a batch, with the maximum number of tokens for each."""
        whole, count = self._backend.info.embeds_whole, 0
        while room > 0 and count < MAX_CHUNKS:
            text = self._current if count == 0 and self._current is not None else self._peek()
            if text is None:
                return
            if count and (
                text.runs_alone
                or (whole and text.num_left > room)
                or len(text.tokens) > self._longest
            ):
                return
            if text is not self._current:
                self._begin(text)
            yield text, text.num_left if whole else room
            if text.runs_alone:
                return
            room -= text.num_left
            count += 1

    def _peek(self) -> Text | None:
        """Return the text to start next, or None."""
        if self._retries:
            return self._retries[0]
        job = next(
            (jobs[0] for accounts in self._jobs.values() for jobs in accounts.values()), None
        )
        return Text(job, job.request.texts[job.num_started]) if job is not None else None

    def _begin(self, text: Text) -> None:
        self._longest = max(self._longest, len(text.tokens))
        if self._retries:
            self._retries.popleft()
            return
        job = text.job
        accounts = self._jobs[job.request.priority]
        jobs = accounts.pop(job.request.account)  # inserted again below, at the end of the turn
        jobs.popleft()
        if not job.num_started:
            self._done.append(EmbeddingOutput(job.request.request_id, []))
        job.num_started += 1
        if job.num_started < len(job.request.texts):
            jobs.append(job)
        if jobs:
            accounts[job.request.account] = jobs

    def _chunk(self, text: Text, room: int) -> Chunk:
        return Chunk(text.tokens[text.start : text.start + room], text.start, len(text.tokens))

    def _advance(self, text: Text, chunk: Chunk, row: npt.NDArray[np.float32]) -> None:
        if text.job.has_failed:
            return
        pooling = self._backend.info.pooling
        if pooling == "mean":
            text.total = text.total + row
        elif pooling != "cls" or chunk.start == 0:
            text.total = row.copy()
        text.start += len(chunk.tokens)
        if text.num_left:
            self._current = text
            return
        vector = np.asarray(text.total, np.float32)
        norm = 1.0 if pooling == "rank" else float(np.linalg.norm(vector))
        if not norm or not np.isfinite(vector).all():
            self._end_with_error(
                text.job, "the model returned a vector of zeros or of non-finite numbers"
            )
            return
        vector = vector / norm
        self._done.append(
            EmbeddingOutput(text.job.request.request_id, [vector.astype("<f4").tobytes()])
        )

    def _handle_failure(self, texts: list[Text], error: Exception) -> None:
        log.error("cannot embed %d texts: %s", len(texts), error)
        self._current = None
        if len(texts) == 1:
            self._end_with_error(texts[0].job, str(error))
            return
        for text in texts:
            text.reset()
            text.runs_alone = True
        self._retries = deque(chain(texts, self._retries))

    def fail_all(self, why: str) -> None:
        """End all requests with the error ``why``."""
        jobs = {text.job for text in (self._current, *self._retries) if text is not None}
        for job in jobs.union(
            *(waiting for accounts in self._jobs.values() for waiting in accounts.values())
        ):
            self._end_with_error(job, why)

    def _end_with_error(self, job: EmbeddingJob, why: str) -> None:
        job.has_failed = True
        self.abort(job.request.request_id)
        self._done.append(EmbeddingOutput(job.request.request_id, [], why))
