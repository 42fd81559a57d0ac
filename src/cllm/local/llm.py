"""A model in the caller's own process, for scripts and notebooks.

from cllm import LLM, SamplingParams

llm = LLM()
messages = [{"role": "user", "content": "What is 27 plus 45?"}]
print(llm.chat(messages, SamplingParams(temperature=0)).text)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Self, overload

from cllm.backends.base import Vectors
from cllm.config.settings import Settings
from cllm.core.request import PriorityName
from cllm.local.completion import Completion, Piece, Ranked
from cllm.local.model import (
    Conversations,
    LocalModel,
    Params,
    Progress,
    Prompts,
    check_top_n,
    list_of_texts,
    rank,
    read_settings,
)
from cllm.local.work import EmbeddingWork, GenerationWork, PreparedPrompt
from cllm.text.messages import Messages
from cllm.text.pairs import read_scores


class LLM(LocalModel):
    """A model without a server.

    All prompts of a call are batched together, and with those of other threads: an LLM may be used
    by many threads at once. Used in a ``with`` statement, it is closed at the end; otherwise its
    memory is freed when nothing refers to it. In an event loop, its methods block the loop; use
    AsyncLLM there. In a process that is forked after loading, its methods raise RuntimeError.

    Its methods raise BadRequest, which is a ValueError and names the field (``error.param``), for
    input that cannot be computed, such as a prompt with as many tokens as the context or more;
    EngineError if computing fails; and RuntimeError after ``close``. KeyboardInterrupt in a call
    aborts what the call computes, after the step that is being computed.
    """

    def __init__(self, model: str | None = None, **settings: object) -> None:
        """Load a model: a path, hf:owner/repo[:quantization], or by default the built-in one.

        ``settings`` are options of docs/configuration.md with their sections, written with
        underscores, such as ``scheduler_max_num_seqs=8`` or ``model_max_context_length=2048``.

        Raises StartupError, and TypeError for an unknown option. The likely kinds of damage to a
        file are noticed before llama.cpp reads it; other damage may abort the process.
        """
        super().__init__(read_settings(model, settings))

    @classmethod
    def from_settings(cls, settings: Settings, progress: Progress | None = None) -> Self:
        """Load the model of a complete settings tree. Raises StartupError."""
        llm = cls.__new__(cls)
        LocalModel.__init__(llm, settings, progress)
        return llm

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        response_format: Any = None,
        priority: PriorityName = "normal",
    ) -> list[Completion]:
        """Complete each prompt (text or token ids). Return a list also for one prompt.

        ``params`` apply to all prompts, or there is one for each; None means those of the settings.
        ``response_format`` has the meaning that it has in ``chat``. Waiting prompts of
        "interactive" calls are computed before those of "normal" ones, and those of "batch" come
        last.
        """
        return self._collect(self._prepare(prompts, params, response_format), priority)

    def stream(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        response_format: Any = None,
        priority: PriorityName = "normal",
    ) -> Iterator[Piece]:
        """Return an iterator over the pieces of all completions as they arrive.

        Leaving its loop early aborts the rest. The arguments are those of ``generate``.
        """
        return self._stream(self._prepare(prompts, params, response_format), priority)

    @overload
    def chat(
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
    def chat(
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

    def chat(
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
        """Return the next assistant message of a conversation: text, reasoning and tool calls. For
        a list of conversations, return a list, computed together.

        ``messages`` are dictionaries in OpenAI's format. ``params`` apply to all conversations, or
        there is one for each.

        ``tools`` are functions in OpenAI's format. Calls name one of them, and their arguments
        follow its schema as far as that can be enforced; a ``strict`` one whose schema cannot be
        enforced raises BadRequest. ``tool_choice`` is "auto", "none", "required" (at least one
        call), or the name of the function to call.

        ``response_format`` constrains the text, but not the reasoning. With a pydantic model or
        another type that pydantic knows, the text is JSON, and ``parsed`` is an instance. With a
        dictionary, it is JSON that follows this JSON schema, or OpenAI's ``{"type":
        "json_object"}`` or ``{"type": "json_schema", ...}``; ``parsed`` is what it stands for. Text
        or a compiled pattern is a regular expression that matches the whole text. With a list, the
        text is one of its texts. BadRequest is raised for a format that cannot be enforced.
        ``grammar`` in the params is another way to constrain the text.

        ``priority`` has the meaning that it has in ``generate``. ``variables`` are passed to the
        model's chat template.
        """
        done = self._collect(
            self._prepare_chats(messages, params, tools, tool_choice, response_format, variables),
            priority,
        )
        return done if isinstance(messages[0], list) else done[0]

    def stream_chat(
        self,
        messages: Conversations,
        params: Params = None,
        tools: Messages | None = None,
        *,
        tool_choice: str = "auto",
        response_format: Any = None,
        priority: PriorityName = "normal",
        **variables: Any,
    ) -> Iterator[Piece]:
        """Return an iterator over the pieces of the next message of each conversation: text,
        reasoning and tool calls.

        Leaving its loop early aborts the rest. The arguments are those of ``chat``.
        """
        prepared = self._prepare_chats(
            messages, params, tools, tool_choice, response_format, variables
        )
        return self._stream(prepared, priority)

    def embed(self, texts: str | Sequence[str], *, priority: PriorityName = "normal") -> Vectors:
        """Return a vector of length 1 for each text: float32, shape (number of texts,
        info.embedding_size).

        Raises BadRequest if a text is empty or has more than info.max_embedding_tokens tokens, or
        if the model does not give embeddings.
        """
        return self._compute(self._prepare_texts(texts), priority)

    def score(
        self, query: str, documents: Sequence[str], *, priority: PriorityName = "normal"
    ) -> list[float]:
        """Return how well each document fits the query; higher is better.

        A reranker gives its own score, usually a logit. With any other model it is the cosine of
        the embeddings, from -1 to 1. Raises what ``embed`` raises.
        """
        listed = list_of_texts(documents, "documents")
        prepared = self._prepare_ranking(query, listed)
        return read_scores(self._compute(prepared, priority), self.info) if listed else []

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        priority: PriorityName = "normal",
    ) -> list[Ranked]:
        """Return the ``top_n`` documents that fit the query best, or all, the best first, with
        ``index``, ``score`` and ``document``.

        Scores and errors are those of ``score``.
        """
        listed = list_of_texts(documents, "documents")
        check_top_n(top_n)
        return rank(listed, self.score(query, listed, priority=priority), top_n)

    def _collect(self, prompts: list[PreparedPrompt], priority: PriorityName) -> list[Completion]:
        with closing(self._generate(prompts, priority)) as work:
            completions = work.new_completions()
            for piece in self._read(work):
                completions[piece.prompt].outputs[piece.index].add(piece)
            return work.complete(completions)

    def _stream(self, prompts: list[PreparedPrompt], priority: PriorityName) -> Iterator[Piece]:
        with closing(self._generate(prompts, priority)) as work:
            yield from self._read(work)

    def _compute(self, texts: list[list[int]], priority: PriorityName) -> Vectors:
        with closing(self._embed(texts, priority)) as work:
            for _ in self._read(work):
                pass
            return work.vectors()

    def _read(self, work: GenerationWork | EmbeddingWork) -> Iterator[Piece]:
        """Yield results until ``work`` has finished."""
        while not work.finished:
            piece = work.read(self._shared.take(work.pending))
            if piece is not None:
                yield piece

    def __enter__(self) -> Self:
        with self._shared.in_use():  # unless it is closed
            return self

    def __exit__(self, *_: object) -> None:
        self.close()
