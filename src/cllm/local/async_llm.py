"""A model in the caller's own process, for programs with an event loop.

from cllm import AsyncLLM

async with AsyncLLM() as llm:
    done = await llm.chat([{"role": "user", "content": "What is 27 plus 45?"}])
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from typing import Any, Self, overload
from weakref import WeakKeyDictionary, ref

from cllm.backends.base import Vectors
from cllm.config.settings import Settings
from cllm.core.model_info import ModelInfo
from cllm.core.request import PriorityName
from cllm.local.completion import Completion, Piece, Ranked
from cllm.local.model import (
    NOT_COPIED,
    Conversations,
    LocalModel,
    Params,
    Prompts,
    check_top_n,
    list_of_texts,
    rank,
    read_settings,
)
from cllm.local.work import EmbeddingWork, GenerationWork, PreparedPrompt
from cllm.text.messages import Messages
from cllm.text.pairs import read_scores


class AsyncLLM:
    """``LLM`` for an event loop. Methods that block in ``LLM`` are coroutines here.

    All requests that are awaited at the same time share the batch. If a task is cancelled, its
    request is aborted, and its sequences are freed in the next step. A separate thread computes the
    steps, and prompts are tokenized in other threads. It may be used from several event loops.

    ``async with AsyncLLM() as llm`` loads the model, and closes it at the end. Without ``async
    with``, call ``await llm.load()`` first, and ``await llm.close()`` at the end. The methods raise
    what those of LLM raise, and RuntimeError before ``load``.
    """

    def __init__(self, model: str | None = None, **settings: object) -> None:
        """Arguments and errors as for LLM. The model is not loaded yet."""
        self._settings = read_settings(model, settings)
        self._loaded: LocalModel | None = None
        self._loading = threading.Lock()
        self._alarms: WeakKeyDictionary[asyncio.AbstractEventLoop, Alarm] = WeakKeyDictionary()

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return an AsyncLLM for a complete settings tree."""
        llm = cls()
        llm._settings = settings
        return llm

    async def load(self) -> None:
        """Load the model, unless it is loaded. Raises StartupError, and RuntimeError after
        ``close``.

        Tasks that call this at the same time wait for one load. If the task that loads is
        cancelled, the load is aborted.
        """
        cancelled = threading.Event()

        def progress(_: float) -> None:
            if cancelled.is_set():
                raise InterruptedError

        def load() -> None:
            with self._loading:
                if self._loaded is None:
                    self._loaded = LocalModel(self._settings, progress)

        if self._loaded is None:
            try:
                await asyncio.to_thread(load)
            except asyncio.CancelledError:
                cancelled.set()
                raise
        with self._model._shared.in_use():  # unless it is closed
            pass

    def __reduce__(self) -> Any:
        raise TypeError(NOT_COPIED)

    async def close(self) -> None:
        """Free the model, after the step that is being computed. Other tasks that wait for answers
        get RuntimeError.
        """
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.close)

    async def __aenter__(self) -> Self:
        await self.load()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _model(self) -> LocalModel:
        if self._loaded is None:
            raise RuntimeError("the model is not loaded; use `async with` or `await llm.load()`")
        return self._loaded

    @property
    def info(self) -> ModelInfo:
        """Sizes and limits of the model, such as ``context_length`` and ``embedding_size``."""
        return self._model.info

    async def encode(self, text: str) -> list[int]:
        """As LLM.encode."""
        return await asyncio.to_thread(self._model.encode, text)

    async def encode_chat(
        self, messages: Messages, tools: Messages | None = None, **variables: Any
    ) -> list[int]:
        """As LLM.encode_chat."""
        return await asyncio.to_thread(self._model.encode_chat, messages, tools, **variables)

    async def tokenize(self, text: str) -> list[int]:
        """As LLM.tokenize."""
        return await asyncio.to_thread(self._model.tokenize, text)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """As LLM.detokenize."""
        return await asyncio.to_thread(self._model.detokenize, tokens)

    async def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        response_format: Any = None,
        priority: PriorityName = "normal",
    ) -> list[Completion]:
        """As LLM.generate."""
        prepared = await asyncio.to_thread(self._model._prepare, prompts, params, response_format)
        return await self._collect(prepared, priority)

    async def stream(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        response_format: Any = None,
        priority: PriorityName = "normal",
    ) -> AsyncGenerator[Piece, None]:
        """As LLM.stream, for ``async for``. Raises for wrong arguments when the iteration begins.

        If its loop is left early, the rest is aborted when the iterator is closed: by
        ``contextlib.aclosing``, or when nothing refers to it.
        """
        prepared = await asyncio.to_thread(self._model._prepare, prompts, params, response_format)
        async with aclosing(self._stream(prepared, priority)) as pieces:
            async for piece in pieces:
                yield piece

    @overload
    async def chat(
        self,
        messages: Messages,
        params: Params = None,
        tools: Messages | None = None,
        *,
        tool_choice: str = "auto",
        response_format: Any = None,
        priority: PriorityName = "normal",
        **variables: Any,
    ) -> Completion: ...

    @overload
    async def chat(
        self,
        messages: list[Messages],
        params: Params = None,
        tools: Messages | None = None,
        *,
        tool_choice: str = "auto",
        response_format: Any = None,
        priority: PriorityName = "normal",
        **variables: Any,
    ) -> list[Completion]: ...

    async def chat(
        self,
        messages: Conversations,
        params: Params = None,
        tools: Messages | None = None,
        *,
        tool_choice: str = "auto",
        response_format: Any = None,
        priority: PriorityName = "normal",
        **variables: Any,
    ) -> Completion | list[Completion]:
        """As LLM.chat."""
        prepared = await asyncio.to_thread(
            self._model._prepare_chats,
            *(messages, params, tools, tool_choice, response_format, variables),
        )
        done = await self._collect(prepared, priority)
        return done if isinstance(messages[0], list) else done[0]

    async def stream_chat(
        self,
        messages: Conversations,
        params: Params = None,
        tools: Messages | None = None,
        *,
        tool_choice: str = "auto",
        response_format: Any = None,
        priority: PriorityName = "normal",
        **variables: Any,
    ) -> AsyncGenerator[Piece, None]:
        """As LLM.stream_chat, for ``async for``; ends as ``stream`` does."""
        prepared = await asyncio.to_thread(
            self._model._prepare_chats,
            *(messages, params, tools, tool_choice, response_format, variables),
        )
        async with aclosing(self._stream(prepared, priority)) as pieces:
            async for piece in pieces:
                yield piece

    async def embed(
        self, texts: str | Sequence[str], *, priority: PriorityName = "normal"
    ) -> Vectors:
        """As LLM.embed."""
        prepared = await asyncio.to_thread(self._model._prepare_texts, texts)
        return await self._compute(prepared, priority)

    async def score(
        self, query: str, documents: Sequence[str], *, priority: PriorityName = "normal"
    ) -> list[float]:
        """As LLM.score."""
        model = self._model
        listed = list_of_texts(documents, "documents")
        prepared = await asyncio.to_thread(model._prepare_ranking, query, listed)
        vectors = await self._compute(prepared, priority)
        return read_scores(vectors, model.info) if listed else []

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        priority: PriorityName = "normal",
    ) -> list[Ranked]:
        """As LLM.rerank."""
        listed = list_of_texts(documents, "documents")
        check_top_n(top_n)
        return rank(listed, await self.score(query, listed, priority=priority), top_n)

    async def _collect(
        self, prompts: list[PreparedPrompt], priority: PriorityName
    ) -> list[Completion]:
        reader = self._new_reader()
        with closing(self._model._generate(prompts, priority, reader.wake)) as work:
            completions = work.new_completions()
            while not work.finished:
                for piece in await reader.read(work):
                    completions[piece.prompt].outputs[piece.index].add(piece)
            return work.complete(completions)

    async def _stream(
        self, prompts: list[PreparedPrompt], priority: PriorityName
    ) -> AsyncGenerator[Piece, None]:
        reader = self._new_reader()
        with closing(self._model._generate(prompts, priority, reader.wake)) as work:
            while not work.finished:
                for piece in await reader.read(work):
                    yield piece

    async def _compute(self, texts: list[list[int]], priority: PriorityName) -> Vectors:
        reader = self._new_reader()
        with closing(self._model._embed(texts, priority, reader.wake)) as work:
            while not work.finished:
                await reader.read(work)
            return work.vectors()

    def _new_reader(self) -> WorkReader:
        loop = asyncio.get_running_loop()
        alarm = self._alarms.get(loop)
        if alarm is None:
            alarm = self._alarms[loop] = Alarm(loop)
        return WorkReader(self._model, alarm)


class WorkReader:
    """Reads the outputs for one coroutine."""

    def __init__(self, model: LocalModel, alarm: Alarm) -> None:
        self._model = model
        self._alarm = alarm
        self._arrival = asyncio.Event()

    def wake(self) -> None:
        """Wake the coroutine, from any thread. Raises RuntimeError if its loop is closed."""
        self._alarm.ring(self._arrival)

    async def read(self, work: GenerationWork | EmbeddingWork) -> list[Piece]:
        """Wait for the next result of ``work``, and return it. Raises what ``work.read`` raises."""
        await self._arrival.wait()
        self._arrival.clear()
        pieces = map(work.read, self._model._shared.take_all(work.pending))
        return [piece for piece in pieces if piece is not None]


class Alarm:
    """Wakes the coroutines of an event loop, with one call of the loop for those of a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._arrivals: deque[asyncio.Event] = deque()
        self._is_scheduled = False

    def ring(self, arrival: asyncio.Event) -> None:
        """Set ``arrival`` soon. Raises RuntimeError if the loop is closed."""
        self._arrivals.append(arrival)
        if self._is_scheduled:
            return
        self._is_scheduled = True
        try:
            loop = self._loop()
            if loop is None:
                raise RuntimeError("the event loop is gone")
            loop.call_soon_threadsafe(self._set_arrivals)
        except RuntimeError:
            self._is_scheduled = False
            raise

    def _set_arrivals(self) -> None:
        self._is_scheduled = False  # first, so that later arrivals are scheduled again
        while self._arrivals:
            self._arrivals.popleft().set()
