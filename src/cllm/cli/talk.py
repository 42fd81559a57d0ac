"""Whom ``cllm chat`` and ``cllm generate`` talk to: a running server, or a model in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from cyclopts import Parameter

from cllm.config import Settings
from cllm.core.params import SamplingParams
from cllm.errors import CLLMError, StartupError

Messages = list[dict[str, Any]]


@Parameter(name="*")
@dataclass(frozen=True)
class Sampling:
    """What is left out is the model's or the server's default."""

    max_tokens: Annotated[int | None, Parameter(help="The most tokens of an answer.")] = None
    temperature: Annotated[float | None, Parameter(help="0 always takes the most probable token.")] = None
    top_p: Annotated[float | None, Parameter(help="Share of the probability that is sampled from.")] = None
    top_k: Annotated[int | None, Parameter(help="Number of tokens that are sampled from; 0 is all.")] = None
    seed: Annotated[int | None, Parameter(help="The same seed gives the same text.")] = None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


DEFAULTS = Sampling()


class Answer(msgspec.Struct):
    """How the last answer ended."""

    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Talker(Protocol):
    last: Answer

    def ask(self, messages: Messages) -> Iterator[str]:
        """The pieces of the next assistant message."""
        ...

    def complete(self, prompt: str) -> Iterator[str]:
        """The pieces of a continuation."""
        ...


class Local:
    """A model in this process."""

    def __init__(self, settings: Settings, sampling: Sampling) -> None:
        from cllm.llm import LLM

        self._params = SamplingParams(**{**settings.sampling.model_dump(exclude_none=True), **sampling.given()})
        self._llm = LLM.from_settings(settings)
        self.last = Answer()

    def ask(self, messages: Messages) -> Iterator[str]:
        prompt = self._llm.encode_chat(messages)
        return self._stream(prompt)

    def complete(self, prompt: str) -> Iterator[str]:
        return self._stream(self._llm.encode(prompt))

    def _stream(self, prompt: list[int]) -> Iterator[str]:
        self.last = Answer(prompt_tokens=len(prompt))
        for piece in self._llm.stream(prompt, self._params):
            self.last.completion_tokens += len(piece.tokens)
            self.last.finish_reason = piece.finish_reason
            yield piece.text


class Remote:
    """A server that speaks OpenAI's dialect."""

    def __init__(self, url: str, sampling: Sampling) -> None:
        """Raises StartupError if nobody answers there."""
        import httpx2

        key = os.environ.get("CLLM_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=600)
        self._sampling = sampling.given()
        self.last = Answer()
        try:
            self._client.get("/v1/models", timeout=10).raise_for_status()
        except httpx2.HTTPError as error:
            raise StartupError(f"no server answers at {url}: {error}") from None

    def ask(self, messages: Messages) -> Iterator[str]:
        for choice in self._stream("/v1/chat/completions", {"messages": messages}):
            yield choice["delta"].get("content") or ""

    def complete(self, prompt: str) -> Iterator[str]:
        for choice in self._stream("/v1/completions", {"prompt": prompt}):
            yield choice["text"]

    def _stream(self, path: str, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import httpx2

        try:
            yield from self._chunks(path, content)
        except httpx2.HTTPError as error:
            raise CLLMError(f"the connection to the server broke: {error}") from None

    def _chunks(self, path: str, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.last = Answer()
        body = {**content, **self._sampling, "stream": True, "stream_options": {"include_usage": True}}
        with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise CLLMError(error_message(response.read()))
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise CLLMError(chunk["error"]["message"])
                if usage := chunk.get("usage"):
                    self.last.prompt_tokens = usage["prompt_tokens"]
                    self.last.completion_tokens = usage["completion_tokens"]
                for choice in chunk["choices"]:
                    self.last.finish_reason = choice["finish_reason"] or ""
                    yield choice


def error_message(data: bytes) -> str:
    """The message of an error answer, whatever sent it."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode("utf-8", "replace")


def print_stream(pieces: Iterator[str]) -> str:
    """Print the pieces as they come, then end the line; returns the whole text."""
    parts = []
    for piece in pieces:
        print(piece, end="", flush=True)
        parts.append(piece)
    print()
    return "".join(parts)
