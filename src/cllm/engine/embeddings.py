"""Embeds texts in small batches between the steps that generate."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt

from cllm.backends.base import Backend
from cllm.core.batch import MAX_CHUNKS, Chunk
from cllm.core.output import Embedded, TokenOutput
from cllm.core.request import EmbeddingRequest, Priority
from cllm.engine.side_jobs import SideJob
from cllm.errors import EngineError
from cllm.scheduler.scheduler import Scheduler

log = logging.getLogger("cllm.engine")

SHARE = 0.2  # weight of a new observation in the mean


class Job:
    """A request. ``num_begun``: how many of its texts have been started."""

    def __init__(self, request: EmbeddingRequest) -> None:
        self.request = request
        self.num_begun = 0
        self.has_failed = False


class Text:
    """One text.

    ``start``: number of tokens computed so far. ``total``: their embeddings, pooled so far.
    """

    def __init__(self, job: Job, tokens: list[int]) -> None:
        self.job = job
        self.tokens = tokens
        self.alone = False
        self.again()

    def again(self) -> None:
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
        self._jobs: dict[Priority, dict[str, deque[Job]]] = {priority: {} for priority in Priority}
        self._going: Text | None = None
        self._again: deque[Text] = deque()  # texts of a failed batch
        self._longest = 0
        self._has_work = False
        self._done: list[Embedded] = []
        self._seconds_per_token = 0.0
        self.num_tokens = 0  # computed so far

    def add(self, request: EmbeddingRequest) -> None:
        if request.texts:
            self._jobs[request.priority].setdefault(request.key, deque()).append(Job(request))
            self._has_work = True

    def abort(self, request_id: str) -> None:
        """Forget a request. Ignores an unknown one."""
        for keys in self._jobs.values():
            for key, jobs in [*keys.items()]:
                keys[key] = deque(job for job in jobs if job.request.request_id != request_id)
                if not keys[key]:
                    del keys[key]
        if self._going is not None and self._going.job.request.request_id == request_id:
            self._going = None
        self._again = deque(
            text for text in self._again if text.job.request.request_id != request_id
        )
        self._has_work = self._has_texts()

    def _has_texts(self) -> bool:
        return self._going is not None or bool(self._again) or any(self._jobs.values())

    def has_work(self) -> bool:
        return self._has_work

    def before(self, now: float) -> list[TokenOutput]:
        if self._has_work:
            self._scheduler.reserve((self._scheduler.params.target_itl or 0.0) / 2)
        return []

    def after(self, now: float) -> list[TokenOutput]:
        """Embed as many tokens as fit into the rest of the step's target time, at least one
        tile.
        """
        if not self._has_work:
            return []
        target, left = self._scheduler.params.target_itl, None
        if target is not None and self._scheduler.running:
            left = target - (now - self._scheduler.begun)
        try:
            num_tokens = self.bite(self.num_tokens_for(left))
            self.observe(num_tokens, self._clock() - now)
        except Exception as error:
            log.exception("embeddings failed")
            self.fail_all(str(error))
        self._has_work = self._has_texts()
        return []

    def take(self) -> list[Embedded]:
        """Return the results since the last call."""
        done, self._done = self._done, []
        return done

    def num_tokens_for(self, seconds: float | None) -> int:
        """Return how many tokens can be embedded in ``seconds``, in whole tiles, at least one tile.

        At most the maximum batch of the backend, which is also the result if ``seconds`` is None.
        """
        info = self._backend.info
        if seconds is None:
            return info.embedding_bite
        num_tiles = (
            int(seconds / (self._seconds_per_token * info.tile)) if self._seconds_per_token else 1
        )
        return min(info.embedding_bite, max(1, num_tiles) * info.tile)

    def bite(self, num_tokens: int) -> int:
        """Embed about ``num_tokens`` tokens in one call of the backend; return the number computed.

        It exceeds ``num_tokens`` only if the model cannot split a text.
        """
        parts = [(text, self._chunk(text, room)) for text, room in self._choose(num_tokens)]
        if not parts:  # all requests were aborted
            return 0
        try:
            rows = self._backend.embed([chunk for _, chunk in parts])
        except Exception as error:
            if not isinstance(error, EngineError):
                log.exception("a bite failed")
            self._failed([text for text, _ in parts], error)
            return 0
        self._going = None
        for (text, chunk), row in zip(parts, rows, strict=True):
            self._advance(text, chunk, row)
        count = sum(len(chunk.tokens) for _, chunk in parts)
        self.num_tokens += count
        return count

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn that embedding ``num_tokens`` tokens took ``seconds``."""
        if num_tokens:
            each = seconds / max(num_tokens, self._backend.info.tile)
            before = self._seconds_per_token
            self._seconds_per_token = (
                before + SHARE * (min(each, 2 * before) - before) if before else each
            )

    # --- one batch -------------------------------------------------------------------------------

    def _choose(self, room: int) -> Iterator[tuple[Text, int]]:
        """Yield the texts of a batch, with the maximum number of tokens for each."""
        whole, count = self._backend.info.embeds_whole, 0
        while room > 0 and count < MAX_CHUNKS:
            text = self._going if count == 0 and self._going is not None else self._peek()
            if text is None:
                return
            if count and (
                text.alone or (whole and text.num_left > room) or len(text.tokens) > self._longest
            ):
                return
            if text is not self._going:
                self._begin(text)
            yield text, text.num_left if whole else room
            if text.alone:
                return
            room -= text.num_left
            count += 1

    def _peek(self) -> Text | None:
        """Return the text to start next, or None."""
        if self._again:
            return self._again[0]
        job = next((jobs[0] for keys in self._jobs.values() for jobs in keys.values()), None)
        return Text(job, job.request.texts[job.num_begun]) if job is not None else None

    def _begin(self, text: Text) -> None:
        self._longest = max(self._longest, len(text.tokens))
        if self._again:
            self._again.popleft()
            return
        job = text.job
        keys = self._jobs[job.request.priority]
        jobs = keys.pop(job.request.key)  # inserted again below, as the last in turn
        jobs.popleft()
        if not job.num_begun:
            self._done.append(Embedded(job.request.request_id, []))
        job.num_begun += 1
        if job.num_begun < len(job.request.texts):
            jobs.append(job)
        if jobs:
            keys[job.request.key] = jobs

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
            self._going = text
            return
        vector = np.asarray(text.total, np.float32)
        norm = 1.0 if pooling == "rank" else float(np.linalg.norm(vector))
        if not norm or not np.isfinite(vector).all():
            self._fail(text.job, "the model gave what is no vector")
            return
        vector = vector / norm
        self._done.append(Embedded(text.job.request.request_id, [vector.astype("<f4").tobytes()]))

    def _failed(self, texts: list[Text], error: Exception) -> None:
        log.error("texts could not be embedded: %s", error)
        self._going = None
        if len(texts) == 1:
            self._fail(texts[0].job, str(error))
            return
        for text in texts:
            text.again()
            text.alone = True
        self._again = deque(chain(texts, self._again))

    def fail_all(self, why: str) -> None:
        """End all requests with the error ``why``."""
        jobs = {text.job for text in (self._going, *self._again) if text is not None}
        for job in jobs.union(
            *(waiting for keys in self._jobs.values() for waiting in keys.values())
        ):
            self._fail(job, why)

    def _fail(self, job: Job, why: str) -> None:
        job.has_failed = True
        self.abort(job.request.request_id)
        self._done.append(Embedded(job.request.request_id, [], why))
