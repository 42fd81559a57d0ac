"""A conversation, and what is wanted of the message that comes next, in the words of no dialect."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec


class Channel(enum.StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Effort(enum.StrEnum):
    """How much the model shall think before it answers."""

    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template gets, and how the answer is bound.

    messages: dicts with ``role`` (system, user, assistant, tool) and ``content`` (text). An assistant's may have
    ``reasoning_content`` and ``tool_calls``, dicts of ``id``, ``type`` "function" and ``function``: ``name`` and
    ``arguments``, a JSON text or an object; a tool's has ``tool_call_id``, and ``name`` if it is known.
    tools: as OpenAI declares them, ``{"type": "function", "function": {"name", "description", "parameters"}}``.
    tool_choice: auto, none or required (at least one call, and nothing else); allowed_tools: the names of those that
    may be called, () is all of them. So a call of one function is forced by "required" and its name.
    thinking: None is as the template does by itself; a template that knows no such switch ignores it.
    thinking_budget: tokens after which the model is made to end its reasoning. effort: a word for both.
    variables: others for the template. continued: the field of the last message, an assistant's, whose text the answer
    goes on with; "" if the answer is a new message.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] = "auto"
    allowed_tools: tuple[str, ...] = ()
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    thinking_budget: int | None = None
    effort: Effort | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    continued: Literal["", "content", "reasoning_content"] = ""

    def continuing(self) -> Chat:
        """The same, to go on with the last message, which has no calls. If that is empty, the answer is a new one."""
        last = self.messages[-1]
        if last.get("content"):
            return replace(self, continued="content")
        if last.get("reasoning_content"):
            return replace(self, continued="reasoning_content")
        return replace(self, messages=self.messages[:-1])

    @property
    def strict_tools(self) -> set[str]:
        """Names of those whose arguments must follow their schema."""
        return {tool["function"]["name"] for tool in self.tools if tool["function"].get("strict") is True}


class Part(msgspec.Struct, gc=False):
    """A piece of what a model writes. call: its ordinal, from 0; name: of the function, with a call's first part."""

    channel: Channel
    text: str
    call: int = 0
    name: str = ""
