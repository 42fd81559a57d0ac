"""The values that ``LLM`` and ``AsyncLLM`` return."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cllm.core.output import Logprobs

Parse = Callable[[str], Any]


@dataclass(slots=True)
class ToolCall:
    """A call of a function: its name, and its arguments as JSON text.

    The message with the result repeats ``id`` as its ``tool_call_id``.
    """

    name: str
    arguments: str = ""
    id: str = ""

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments as a dictionary. Raises ValueError if their text was cut off."""
        arguments: dict[str, Any] = json.loads(self.arguments or "{}")
        return arguments


@dataclass(slots=True)
class ToolCallPiece:
    """New text of the arguments of the ``index``-th call of a message; the function's ``name``
    comes with the first piece of its call.
    """

    index: int
    name: str
    arguments: str


@dataclass(slots=True)
class Piece:
    """The text that one step adds to output ``index`` of prompt ``prompt``. ``finish_reason`` is ""
    while the output continues.

    In a chat, ``reasoning`` and ``tool_calls`` are separated from ``text``. The sum of an output's
    pieces is the Output that ``generate`` or ``chat`` returns. ``prompt_tokens`` and
    ``cached_tokens`` count the whole prompt, as in Completion.
    """

    prompt: int
    index: int
    text: str
    tokens: list[int]
    finish_reason: str
    logprobs: list[Logprobs] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Output:
    """One of the ``n`` continuations of a prompt.

    ``finish_reason`` is stop, length or, in a chat, tool_calls. ``tokens`` are all that were
    generated, marks included, and ``logprobs`` are theirs, if SamplingParams.logprobs asks for
    them. In a chat, ``reasoning`` and ``tool_calls`` are separated from ``text`` as far as the
    model's format is known.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[Logprobs] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    parse: Parse | None = field(default=None, repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """The value of the text if ``response_format`` was a type or a JSON schema: an instance of
        the type, or the result of ``json.loads``. It is None for other formats, for tool calls, and
        for a text that ``max_tokens`` has cut off.

        Raises ValueError if a stop string has cut the text off, or if the value breaks a rule of
        the type that a grammar cannot express; pydantic's ValidationError is one.
        """
        if self.parse is None or self.finish_reason != "stop":
            return None
        return self.parse(self.text)

    @property
    def message(self) -> dict[str, Any]:
        """The output as a message in OpenAI's format, with which a conversation can continue."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason
        if piece.logprobs:
            self.logprobs += piece.logprobs
        if piece.reasoning:
            self.reasoning += piece.reasoning
        for part in piece.tool_calls:
            if part.name:
                self.tool_calls.append(ToolCall(part.name, id=f"call_{part.index}"))
            self.tool_calls[part.index].arguments += part.arguments


@dataclass(slots=True)
class Completion:
    """The result of one prompt.

    It has ``prompt_tokens`` tokens; ``cached_tokens`` of them came from the prefix cache. The
    properties are those of the first output. If SamplingParams.prompt_logprobs asks for them,
    ``prompt_logprobs`` are those of the prompt's tokens from the second one on.
    """

    outputs: list[Output]
    prompt_tokens: int
    cached_tokens: int = 0
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def parsed(self) -> Any:
        return self.outputs[0].parsed

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.outputs[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        return self.outputs[0].message

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document that ``rerank`` has scored. It was number ``index`` of the list, from 0."""

    index: int
    score: float
    document: str
