"""What the load client knows about its two APIs: OpenAI's chat completions and Ollama's own chat,
both streamed.

A chunk is a line: an event of OpenAI's stream, or an object of Ollama's NDJSON. Two searches in its
bytes classify it. JSON is decoded only at the end of a stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

Messages = list[dict[str, str]]
Api = Literal["openai", "ollama"]


class TokenCounts(msgspec.Struct, frozen=True):
    """Numbers of tokens, as the server counts them."""

    output: int
    prompt: int
    cached: int


class Event(msgspec.Struct, frozen=True):
    """The parts of a chunk that the client uses."""

    text: str = ""
    finish_reason: str | None = None
    usage: TokenCounts | None = None
    error: Any = None


class ClientDialect(msgspec.Struct, frozen=True):
    """One API.

    ``decode`` and ``decode_models`` raise msgspec.DecodeError or UnicodeDecodeError for invalid
    input.

    ``exact_lengths`` says that requests can make the server ignore end tokens, so that answers have
    exactly the requested number of tokens.
    """

    chat_path: str
    models_path: str
    content: re.Pattern[bytes]
    """Matches every line that contains text, and no other."""
    last: re.Pattern[bytes]
    """Matches every line that must be decoded."""
    decode: Callable[[bytes], Event]
    decode_models: Callable[[bytes], list[str]]
    body: Callable[[str, Messages, dict[str, Any]], bytes]
    """Returns the body of a chat request from the model's name, the messages and options with
    OpenAI's names.
    """
    exact_lengths: bool


# Quotation marks are escaped inside a JSON string, so the patterns below never match generated
# text.


# --- OpenAI -------------------------------------------------------------------------------------


class MessagePart(msgspec.Struct):
    content: str | None = None


class OpenAIChoice(msgspec.Struct):
    delta: MessagePart | None = None
    finish_reason: str | None = None


class TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class OpenAIUsage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_details: TokenDetails | None = None

    def neutral(self) -> TokenCounts:
        details = self.prompt_tokens_details
        return TokenCounts(
            self.completion_tokens,
            self.prompt_tokens,
            (details.cached_tokens or 0) if details else 0,
        )


class OpenAIChunk(msgspec.Struct):
    choices: list[OpenAIChoice] = []
    usage: OpenAIUsage | None = None
    error: Any = None


class OpenAIModels(msgspec.Struct):
    class Model(msgspec.Struct):
        id: str

    data: list[Model]


DECODE_OPENAI = msgspec.json.Decoder(OpenAIChunk).decode


def decode_openai(line: bytes) -> Event:
    chunk = DECODE_OPENAI(line.removeprefix(b"data:"))
    return Event(
        "".join(choice.delta.content or "" for choice in chunk.choices if choice.delta),
        next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), None),
        chunk.usage.neutral() if chunk.usage else None,
        chunk.error,
    )


def openai_models(content: bytes) -> list[str]:
    return [model.id for model in msgspec.json.decode(content, type=OpenAIModels).data]


def openai_body(model: str, messages: Messages, options: dict[str, Any]) -> bytes:
    rest = {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode({"model": model, "messages": messages, **options, **rest})


# --- Ollama -------------------------------------------------------------------------------------


class OllamaChunk(msgspec.Struct):
    """A chunk of the stream. The server omits counts that are 0."""

    message: MessagePart | None = None
    done: bool = False
    done_reason: str | None = None
    eval_count: int = 0
    prompt_eval_count: int = 0
    error: Any = None


class OllamaModels(msgspec.Struct):
    class Model(msgspec.Struct):
        name: str

    models: list[Model]


DECODE_OLLAMA = msgspec.json.Decoder(OllamaChunk).decode


def decode_ollama(line: bytes) -> Event:
    chunk = DECODE_OLLAMA(line)
    return Event(
        (chunk.message and chunk.message.content) or "",
        chunk.done_reason if chunk.done else None,
        TokenCounts(chunk.eval_count, chunk.prompt_eval_count, 0) if chunk.done else None,
        chunk.error,
    )


def ollama_models(content: bytes) -> list[str]:
    return [model.name for model in msgspec.json.decode(content, type=OllamaModels).models]


OLLAMA_NAMES = {"max_tokens": "num_predict"}


def ollama_body(model: str, messages: Messages, options: dict[str, Any]) -> bytes:
    renamed = {
        OLLAMA_NAMES.get(name, name): value
        for name, value in options.items()
        if name != "ignore_eos"
    }
    return msgspec.json.encode(
        {"model": model, "messages": messages, "stream": True, "options": renamed}
    )


DIALECTS: dict[Api, ClientDialect] = {
    "openai": ClientDialect(
        chat_path="/v1/chat/completions",
        models_path="/v1/models",
        content=re.compile(rb'content": ?"(?!")'),  # reasoning_content is text too
        last=re.compile(rb'"(?:finish_reason": ?"|usage": ?\{|error": ?[{"])'),
        decode=decode_openai,
        decode_models=openai_models,
        body=openai_body,
        exact_lengths=True,
    ),
    "ollama": ClientDialect(
        chat_path="/api/chat",
        models_path="/api/tags",
        content=re.compile(rb'"(?:content|thinking)": ?"(?!")'),
        last=re.compile(rb'"(?:done": ?true|error": ?[{"])'),
        decode=decode_ollama,
        decode_models=ollama_models,
        body=ollama_body,
        exact_lengths=False,
    ),
}
