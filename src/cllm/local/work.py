"""Prompts and texts that a local model is computing, and the reading of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cllm.backends.base import Vectors
from cllm.core.output import NO_TOKEN, EmbeddingOutput, FinishReason, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import EmbeddingRequest, Request
from cllm.engine.commands import Add, Embed
from cllm.engine.shared import SharedEngine
from cllm.errors import BadRequest, EngineError
from cllm.local.completion import Completion, Output, Piece, ToolCallPiece
from cllm.local.response_format import AnswerFormat
from cllm.text.chat_format import OutputPlan
from cllm.text.output_reader import OutputReader
from cllm.text.tools.parser import Channel


class PreparedPrompt(NamedTuple):
    """A prompt that has been checked. ``plan`` says how to read the answer, if it is more than
    text. TokenizedChat explains ``boundaries``.
    """

    tokens: list[int]
    params: SamplingParams
    plan: OutputPlan | None = None
    format: AnswerFormat | None = None
    boundaries: tuple[int, ...] = ()


class GenerationWork:
    """Prompts that the engine is continuing together.

    Call ``close`` at the end; otherwise the engine goes on.
    """

    def __init__(
        self,
        shared: SharedEngine,
        prompts: list[PreparedPrompt],
        requests: list[Request],
        readers: dict[str, tuple[int, OutputReader]],
        wake: Callable[[], None] | None,
    ) -> None:
        """``readers`` maps each request id to the position of its prompt and its reader."""
        self._shared = shared
        self._prompts = prompts
        self._readers = readers
        self._num_going = len(requests)
        self.pending = shared.submit([Add(request) for request in requests], wake)

    @property
    def finished(self) -> bool:
        return not self._num_going

    def close(self) -> None:
        """Abort what has not finished. May be called again."""
        self._shared.drop(self.pending)

    def read(self, output: TokenOutput | EmbeddingOutput) -> Piece | None:
        """Return the pieces that an output adds, or None if it adds nothing.

        Raises BadRequest for a grammar that cannot be followed, and EngineError.
        """
        assert isinstance(output, TokenOutput)
        i, reader = self._readers[output.request_id]
        deltas, ended = reader.read([output])
        if reader.failure == FinishReason.GRAMMAR:
            message = "the grammar cannot be compiled, or allows no further token"
            raise BadRequest(message, param="grammar")
        if reader.failure is not None:
            raise EngineError("the engine failed to compute the prompt")
        for choice in ended:
            self._num_going -= reader.finished
            if not choice.is_known:
                self._shared.abort(choice.request_id, choice.index)
        if not deltas:  # prompt logprobs, or sampled after a stop string
            return None
        tokens = [output.token] if output.token != NO_TOKEN else []
        piece = Piece(i, output.index, "", tokens, deltas[-1].finish)
        piece.prompt_tokens = len(self._prompts[i].tokens)
        piece.cached_tokens = reader.usage.cached_tokens
        if output.logprobs is not None:
            piece.logprobs.append(output.logprobs)
        for delta in deltas:
            match delta.channel:
                case Channel.TEXT:
                    piece.text += delta.text
                case Channel.REASONING:
                    piece.reasoning += delta.text
                case Channel.CALL:
                    piece.tool_calls.append(ToolCallPiece(delta.call, delta.name, delta.text))
        return piece

    def new_completions(self) -> list[Completion]:
        """Return completions to add the pieces to."""
        return [
            Completion(
                [
                    Output(parse=prompt.format and prompt.format.parse)
                    for _ in range(prompt.params.n)
                ],
                len(prompt.tokens),
            )
            for prompt in self._prompts
        ]

    def complete(self, completions: list[Completion]) -> list[Completion]:
        """After the last piece, add the data to ``completions`` that pieces do not have."""
        for i, reader in self._readers.values():
            completions[i].cached_tokens = reader.usage.cached_tokens
            completions[i].prompt_logprobs = reader.prompt_logprobs[0]
        return completions


class EmbeddingWork:
    """Texts that the engine is embedding.

    Call ``close`` at the end; otherwise the engine goes on.
    """

    def __init__(
        self,
        shared: SharedEngine,
        request: EmbeddingRequest,
        size: int,
        wake: Callable[[], None] | None,
    ) -> None:
        self._shared = shared
        self._num_texts, self._size = len(request.texts), size
        self._vectors: list[bytes] = []
        self.pending = shared.submit([Embed(request)] if request.texts else [], wake)

    @property
    def finished(self) -> bool:
        return len(self._vectors) == self._num_texts

    def close(self) -> None:
        """Abort what has not finished. May be called again."""
        self._shared.drop(self.pending)

    def read(self, output: TokenOutput | EmbeddingOutput) -> None:
        """Raises EngineError."""
        assert isinstance(output, EmbeddingOutput)
        if output.error:
            raise EngineError(f"the texts could not be embedded: {output.error}")
        self._vectors += output.vectors

    def vectors(self) -> Vectors:
        """Return the vectors, shape (number of texts, size)."""
        if not self._vectors:
            return np.zeros((0, self._size), np.float32)
        return np.frombuffer(b"".join(self._vectors), "<f4").reshape(self._num_texts, -1)
