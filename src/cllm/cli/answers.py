"""The sources of answers in the terminal, the options of an answer, and its parts and counts."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from cllm.errors import StartupError
from cllm.input_files import read_input_text

Messages = list[dict[str, Any]]
Think = bool | Literal["low", "medium", "high"]


@dataclass
class AnswerOptions:
    """The options of an answer.

    ``sampling`` has the sampling parameters that were given. ``schema`` is the JSON schema of the
    answer, or True for any JSON object. If ``think`` is None, the model's template decides.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] | bool | None = None
    think: Think | None = None

    @property
    def effort(self) -> str | None:
        """The effort that ``think`` names, if it names one."""
        if self.think is False:
            return "none"
        return self.think if isinstance(self.think, str) else None

    @property
    def response_format(self) -> dict[str, Any] | None:
        """The field response_format of OpenAI's API."""
        if self.schema is None:
            return None
        if self.schema is True:
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema}}

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template for ``think``."""
        if self.think is None:
            return {}
        arguments: dict[str, Any] = {
            "enable_thinking": bool(self.think),
            "thinking": bool(self.think),
        }
        if isinstance(self.think, str):
            arguments["reasoning_effort"] = self.think
        return arguments

    def for_server(self) -> dict[str, Any]:
        """Return the options as fields of a chat request."""
        fields = dict(self.sampling)
        if self.response_format is not None:
            fields["response_format"] = self.response_format
        if self.effort is not None:
            fields["reasoning_effort"] = self.effort
        elif self.think:
            fields["chat_template_kwargs"] = self.variables
        return fields


def read_schema(text: str | None) -> dict[str, Any] | bool | None:
    """Return the schema that --format names: "json", the schema itself, or a file. Raises
    StartupError.
    """
    if text is None:
        return None
    if text == "json":
        return True
    try:
        content = text if text.lstrip().startswith("{") else read_input_text(Path(text))
        schema = json.loads(content)
    except OSError as error:
        raise StartupError(
            f"--format is json, a JSON schema, or a file with one; cannot read {text}: "
            f"{error.strerror}"
        ) from None
    except ValueError as error:
        raise StartupError(f"--format is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise StartupError("--format must be a JSON schema that is an object")
    return schema


class AnswerPart(NamedTuple):
    """A piece of an answer."""

    text: str
    is_reasoning: bool = False


Parts = Generator[AnswerPart, None, None]


@dataclass
class AnswerFacts:
    """The token counts of the last answer, how it ended, and when its parts arrived."""

    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    asked: float = field(default_factory=time.monotonic)
    first: float | None = None
    latest: float = 0.0

    def mark_arrival(self) -> None:
        self.latest = time.monotonic()
        if self.first is None:
            self.first = self.latest

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first is None else self.first - self.asked

    @property
    def tokens_per_second(self) -> float | None:
        """The rate after the first token; None if there are too few tokens."""
        if self.first is None or self.completion_tokens < 2 or self.latest <= self.first:
            return None
        return (self.completion_tokens - 1) / (self.latest - self.first)

    def counts(self) -> dict[str, Any]:
        return {
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }

    def __str__(self) -> str:
        """Return one line for people."""
        facts = []
        if self.ttft is not None:
            facts.append(f"{self.ttft:.2f} s to the first token")
        if self.tokens_per_second is not None:
            facts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.completion_tokens:
            facts.append(f"{self.completion_tokens} tokens")
        if self.prompt_tokens:
            facts.append(f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached")
        return ", ".join(facts)


class Talker(Protocol):
    """A server or a model that answers. ``model`` is its name, "" for the default one."""

    options: AnswerOptions
    last: AnswerFacts
    model: str

    def ask(self, messages: Messages) -> Parts:
        """Yield the parts of the next assistant message. Closing it ends the generation."""
        ...

    def complete(self, prompt: str) -> Parts:
        """Yield the parts of a continuation. Closing it ends the generation."""
        ...

    def list_models(self) -> list[str]: ...

    def switch(self, model: str) -> None:
        """Use another model from now on. Raises CLLMError if there is no such model."""
        ...
